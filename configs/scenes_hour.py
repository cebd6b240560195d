"""An hour on two CPU cores and 10 GB of memory: the default model on more scenes, for longer.

Task: R2SM, arXiv 2506.01795. Measured: 59.2 minutes; on `val` gIoU 0.812 (modal 0.819, amodal 0.806), occluded IoU
0.482, type accuracy 1.000 (`val_phrasing` 0.935, `val_hard` 0.939).

    python -m r2sm_jax.train configs/scenes_hour.py
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(scenes=16384),
        train=LoopConfig(steps=8000, evaluate_every=2000, checkpoint_every=1000),
    )
