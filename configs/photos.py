"""Photographs: forty minutes on two CPU cores, with any photos that have masks.

Task: R2SM, arXiv 2506.01795, on photographs over which objects of others are laid (docs/photos.md).
Measured with 424 photos of COCO on photos that were not trained on: gIoU 0.438, occluded IoU 0.175,
gIoU 0.361 with names that were not trained; 39 minutes, with other work beside it.

    python -m r2sm_jax.train configs/photos.py \\
        --data.source compose:INSTANCES.json --data.images DIR
"""

from r2sm_jax.config import (
    Config,
    DataConfig,
    DecoderConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    VisionConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vision=VisionConfig(
                image_size=448,
                patch_size=16,
                depth=2,
                encoder="efficientnet",
                efficientnet="efficientnet-lite2",
                efficientnet_frozen_to=8,
            ),
            decoder=DecoderConfig(refine_exponent=1.0),
            classifier=True,
            target=True,
        ),
        data=DataConfig(scenes=3072, text_only_queries=28000),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, muon_learning_rate=0.011, muon_weight_decay=0.1
        ),
        train=LoopConfig(
            steps=1000,
            batch_size=8,
            evaluate_every=250,
            evaluate_samples=96,
            checkpoint_every=250,
            report_samples=120,
        ),
    )
