"""The completer on photographs with masks: from a visible mask to the complete one.

Any COCO instances file teaches it: complete objects are hidden by others (docs/complete.md).

    python -m r2sm_jax.train configs/completer.py \\
        --data.source compose:INSTANCES.json --data.images DIR
"""

from r2sm_jax.config import (
    Config,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    VisionConfig,
)


def get_config() -> Config:
    return Config(
        # Pictures are composed at this size; the completer itself sees crops of 128 pixels.
        model=ModelConfig(vision=VisionConfig(image_size=448)),
        data=DataConfig(scenes=100_000, queries=1),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        train=LoopConfig(
            part="completer",
            steps=3000,
            batch_size=8,
            evaluate_every=1000,
            evaluate_samples=100,
        ),
    )
