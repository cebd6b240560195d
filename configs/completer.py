"""The completer on photographs with masks: from a visible mask to the complete one.

Any COCO instances file teaches it: complete objects are hidden by others (docs/complete.md). It
reads crops of 64 pixels and the features of a frozen EfficientNet-Lite2, which give most for the
processor time (docs/log.md). With 424 photos of COCO and 65 minutes of processor time it is worse
than the hull within the neighbours' masks (docs/results.md). The released completer is a better
start for your own data, with 300 steps at a tenth of the rate: `--init photos-small
--model.completer.size 128 --model.completer.efficientnet= --train.steps 300
--train.evaluate-every 100 --optimizer.learning-rate 1e-4`.

    python -m r2sm_jax.train configs/completer.py \\
        --data.source compose:INSTANCES.json --data.images DIR
"""

from r2sm_jax.config import (
    CROP_EMA,
    CROP_RECIPE,
    CompleterConfig,
    Config,
    DataConfig,
    LoopConfig,
    ModelConfig,
    VisionConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            # Pictures are composed at this size; the completer itself sees crops.
            vision=VisionConfig(image_size=448),
            completer=CompleterConfig(size=64, efficientnet="efficientnet-lite2"),
        ),
        data=DataConfig(scenes=100_000),
        optimizer=CROP_RECIPE,
        train=LoopConfig(
            part="completer",
            steps=2000,
            batch_size=8,
            evaluate_every=500,
            evaluate_samples=100,
            ema=CROP_EMA,
            matmul_precision="float32",
        ),
    )
