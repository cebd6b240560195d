"""Photographs: an hour on two CPU cores and 6 GB of memory, with any photos that have masks.

Task: R2SM, arXiv 2506.01795, on photographs over which complete objects of others are laid (docs/photos.md).

    python -m r2sm_jax.train configs/photos.py --data.source compose:INSTANCES.json --data.images DIR
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig, ModelConfig, VisionConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vision=VisionConfig(image_size=224, patch_size=16, depth=2, backbone="efficientnet-lite0"),
        ),
        data=DataConfig(scenes=8192, mirror=False, cache_features=".cache/photos"),
        train=LoopConfig(steps=4000, evaluate_every=1000, checkpoint_every=500, report_samples=120),
    )
