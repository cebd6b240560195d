"""The whole path in a minute: drawn scenes, a tiny model, thirty steps, an evaluation, a report.

It shows that the installation works and what a run folder holds. It learns next to nothing.

    python -m r2sm_jax.train configs/smoke.py
"""

from r2sm_jax.config import (
    Config,
    DataConfig,
    DecoderConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    TextConfig,
    VisionConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vision=VisionConfig(image_size=64, dim=64, depth=1, heads=2, mlp_dim=128, out_dim=64),
            # Its first two blocks alone run, in a third of the time.
            text=TextConfig(layers=(2,)),
            decoder=DecoderConfig(
                dim=64, depth=1, heads=2, mlp_dim=128, slots=2, fine_dim=32, mask_dim=32
            ),
        ),
        data=DataConfig(scenes=128, queries=4, instances=6, text_only_queries=256),
        # Muon would take longer to compile than these steps take.
        optimizer=OptimizerConfig(name="adamw", learning_rate=3e-3, warmup_steps=5),
        train=LoopConfig(
            steps=30,
            batch_size=8,
            log_every=1,
            evaluate_every=30,
            checkpoint_every=30,
            evaluate_samples=4,
            report_samples=4,
        ),
    )
