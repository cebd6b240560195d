"""An hour on two CPU cores and 13 GB of memory: the default model on more scenes, for longer.

Task: R2SM, arXiv 2506.01795. Measured alone, 62 minutes at 0.41 s a step: on `val` gIoU 0.811 (modal 0.815,
amodal 0.807), occluded IoU 0.472, AP 0.574, type accuracy 1.000 (`val_phrasing` 0.945, `val_hard` 0.887).

    python -m r2sm_jax.train configs/scenes_hour.py
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(scenes=24576),
        train=LoopConfig(steps=8000, evaluate_every=2000, checkpoint_every=1000),
    )
