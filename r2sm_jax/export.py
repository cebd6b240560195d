"""`python -m r2sm_jax.export RUN --out DIR`, see tools/export.py."""

from r2sm_jax.errors import exit_cleanly
from r2sm_jax.tools.export import main

if __name__ == "__main__":
    exit_cleanly(main)
