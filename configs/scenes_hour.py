"""An hour on two CPU cores and 13 GB of memory: the default model on more scenes, for longer.

Task: R2SM, arXiv 2506.01795. Measured before the head had four readers: on `val` gIoU 0.821 (modal 0.827, amodal
0.816), occluded IoU 0.497, AP 0.582, type accuracy 0.999 (`val_phrasing` 0.951, `val_hard` 0.905); 79 minutes on a slow
day, at 0.53 s a step.

    python -m r2sm_jax.train configs/scenes_hour.py
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(scenes=24576),
        train=LoopConfig(steps=8000, evaluate_every=2000, checkpoint_every=1000),
    )
