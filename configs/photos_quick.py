"""Photographs in a quarter of an hour on two CPU cores: `configs/photos.py` with half of its steps.

Measured with 424 photos of COCO on photos that were not trained on: gIoU 0.394, 0.328 with names that were not trained,
occluded IoU 0.164; 15 minutes, with other work beside it and the pictures' features from an earlier run, which take
some three minutes more.

    python -m r2sm_jax.train configs/photos_quick.py --data.source compose:INSTANCES.json --data.images DIR
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig, ModelConfig, OptimizerConfig, VisionConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vision=VisionConfig(image_size=320, patch_size=16, depth=2, backbone="efficientnet-lite0"),
        ),
        data=DataConfig(scenes=3072, mirror=False, cache_features="runs/cache"),
        optimizer=OptimizerConfig(learning_rate=7e-4, muon_learning_rate=0.015, muon_weight_decay=0.1),
        train=LoopConfig(steps=500, evaluate_every=250, evaluate_samples=96, checkpoint_every=250, report_samples=100),
    )
