"""An hour on two CPU cores and 10 GB of memory: the default model on more scenes, for longer.

Task: R2SM, arXiv 2506.01795. Measured with `--train.steps 7600` and narrower wordings, 66.2 minutes beside other
work: on `val` gIoU 0.816 (modal 0.824, amodal 0.808), occluded IoU 0.487, AP 0.571, type accuracy 1.000
(`val_phrasing` 0.954, `val_hard` 0.957).

    python -m r2sm_jax.train configs/scenes_hour.py
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(scenes=16384),
        train=LoopConfig(steps=8000, evaluate_every=2000, checkpoint_every=1000),
    )
