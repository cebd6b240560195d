"""The outliner on photographs with masks: from a box or clicks to the visible mask.

Any instance masks teach it (docs/complete.md). `json:` files show it the photos as they are;
`compose:INSTANCES.json` lays other objects over them.

    python -m r2sm_jax.data convert coco INSTANCES.json --images DIR --out photos.json
    python -m r2sm_jax.train configs/outliner.py --data.source json:photos.json --data.images DIR
"""

from r2sm_jax.config import (
    CROP_EMA,
    CROP_RECIPE,
    Config,
    DataConfig,
    LoopConfig,
    ModelConfig,
    VisionConfig,
)


def get_config() -> Config:
    return Config(
        # Pictures are composed at this size; the outliner itself sees crops of 160 pixels.
        model=ModelConfig(vision=VisionConfig(image_size=640)),
        data=DataConfig(scenes=100_000),
        optimizer=CROP_RECIPE,
        train=LoopConfig(
            part="outliner",
            steps=2400,
            batch_size=6,
            evaluate_every=800,
            evaluate_samples=100,
            ema=CROP_EMA,
        ),
    )
