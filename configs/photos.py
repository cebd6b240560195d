"""Photographs: half an hour on two CPU cores, with any photos that have masks.

Task: R2SM, arXiv 2506.01795, on photographs over which objects of others are laid (docs/photos.md). Measured with 424
photos of COCO on photos that were not trained on: gIoU 0.396, occluded IoU 0.165, gIoU 0.281 with names that were not
trained; 26 minutes, with other work beside it.

    python -m r2sm_jax.train configs/photos.py --data.source compose:INSTANCES.json --data.images DIR
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig, ModelConfig, OptimizerConfig, VisionConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vision=VisionConfig(image_size=320, patch_size=16, depth=2, backbone="efficientnet-lite2"),
        ),
        data=DataConfig(scenes=3072, mirror=False, cache_features="runs/cache"),
        optimizer=OptimizerConfig(learning_rate=7e-4, muon_learning_rate=0.015, muon_weight_decay=0.1),
        train=LoopConfig(steps=1000, evaluate_every=250, evaluate_samples=96, checkpoint_every=250, report_samples=120),
    )
