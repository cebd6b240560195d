"""The default, as a file to start from: drawn scenes, 28 minutes on two CPU cores.

Task: R2SM, arXiv 2506.01795. Measured on `val`, mean of three runs: gIoU 0.735, occluded IoU 0.359.

    python -m r2sm_jax.train configs/scenes.py

`python -m r2sm_jax.train` without a file runs the same.
"""

from r2sm_jax.config import Config


def get_config() -> Config:
    return Config()
