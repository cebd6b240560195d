"""An hour on two CPU cores: the default model on more scenes, for longer.

Task: R2SM, arXiv 2506.01795.

    python -m r2sm_jax.train configs/scenes_hour.py
"""

from dataclasses import replace

from r2sm_jax.config import Config, DataConfig, LoopConfig


def get_config() -> Config:
    config = Config(
        data=DataConfig(scenes=12288),
        train=LoopConfig(steps=8500, evaluate_every=1700, checkpoint_every=850),
    )
    return replace(config, optimizer=replace(config.optimizer, warmup_steps=300))
