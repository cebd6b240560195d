"""The embedded default, as a file to start from: procedural scenes, two CPU cores, a quarter of an
hour.

Task: R2SM, arXiv 2506.01795.

    python -m r2sm_jax.train configs/scenes.py

`python -m r2sm_jax.train` without a file runs the same.
"""

from r2sm_jax.config import Config


def get_config() -> Config:
    return Config()
