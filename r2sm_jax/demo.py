"""`python -m r2sm_jax.demo [RUN|EXPORT]`, see tools/demo.py."""

from r2sm_jax.errors import exit_cleanly
from r2sm_jax.tools.demo import main

if __name__ == "__main__":
    exit_cleanly(main)
