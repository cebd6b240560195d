"""Photographs in some twenty minutes on two CPU cores: smaller images than in `configs/photos.py`,
a frozen backbone.

Measured with EfficientNet-Lite0 and 424 photos of COCO, on photos that were not trained on: gIoU
0.394, 0.328 with names that were not trained; 2.2 seconds a step.

    python -m r2sm_jax.train configs/photos_quick.py \\
        --data.source compose:INSTANCES.json --data.images DIR
"""

from dataclasses import replace
from pathlib import Path

from r2sm_jax.cli import load_config_file
from r2sm_jax.config import Config


def get_config() -> Config:
    config = load_config_file(Path(__file__).with_name("photos.py"))
    vision = replace(config.model.vision, image_size=320, efficientnet_frozen_to=32)
    return replace(
        config,
        model=replace(config.model, vision=vision),
        optimizer=replace(config.optimizer, learning_rate=7e-4, muon_learning_rate=0.015),
        train=replace(config.train, steps=500, batch_size=16, report_samples=100),
    )
