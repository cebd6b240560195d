"""`python -m r2sm_jax.export RUN --out DIR`, see tools/export.py."""

from r2sm_jax.errors import cli_main
from r2sm_jax.inference.exporter import main

if __name__ == "__main__":
    cli_main(main)
