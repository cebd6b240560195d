"""The completer of the released model, trained a little more on your own data.

Complete masks that people drew teach it, and so do instance masks, whose complete objects
`compose:` hides behind others (docs/complete.md). Its sizes are those of the released one: crops of
128 pixels, no backbone.

    python -m r2sm_jax.train configs/completer_finetune.py \\
        --data.source json:DATA.json --data.images DIR
    python -m r2sm_jax.train configs/completer_finetune.py \\
        --data.source compose:INSTANCES.json --data.images DIR
"""

from r2sm_jax.config import (
    CompleterConfig,
    Config,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    VisionConfig,
)


def get_config() -> Config:
    return Config(
        init="photos-small",
        model=ModelConfig(
            # Pictures are composed at this size; the completer itself sees crops.
            vision=VisionConfig(image_size=448),
            completer=CompleterConfig(size=128, efficientnet=""),
        ),
        data=DataConfig(scenes=100_000, queries=1),
        # A tenth of the rate from scratch, so that little of what it knows is lost.
        optimizer=OptimizerConfig(learning_rate=1e-4),
        train=LoopConfig(
            part="completer",
            steps=300,
            batch_size=8,
            evaluate_every=100,
            evaluate_samples=100,
        ),
    )
