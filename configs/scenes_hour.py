"""Sized for an hour on two CPU cores: the default model on more scenes, for longer. Not measured yet.

Task: R2SM, arXiv 2506.01795.

    python -m r2sm_jax.train configs/scenes_hour.py
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(scenes=14336),
        train=LoopConfig(steps=7400, evaluate_every=1850, checkpoint_every=925),
    )
