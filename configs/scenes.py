"""The default, as a file to start from: drawn scenes, some sixteen minutes on two CPU cores.

Task: R2SM, arXiv 2506.01795. For longer: `--data.scenes 8192
--data.text-only-queries 28000 --train.steps 2000` (gIoU 0.735 after 28 minutes on two cores).
Measured on
`val`: gIoU 0.658, occluded IoU 0.326; 1,530 seconds of processor time, without matrix units.

    python -m r2sm_jax.train configs/scenes.py

`python -m r2sm_jax.train` without a file runs the same.
"""

from r2sm_jax.config import Config


def get_config() -> Config:
    return Config()
