"""`python -m r2sm_jax.demo [RUN|EXPORT]`, see tools/demo.py."""

from r2sm_jax.errors import cli_main
from r2sm_jax.inference.web_page import main

if __name__ == "__main__":
    cli_main(main)
