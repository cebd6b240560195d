"""`python -m r2sm_jax.data COMMAND ...`, see tools/data.py."""

from r2sm_jax.cli import cli_main
from r2sm_jax.tools.data import main

if __name__ == "__main__":
    cli_main(main)
