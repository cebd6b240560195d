"""A seventh of the default's training, to compare mask-type heads in runs that also train masks.
Measured: docs/heads.md.

With
JAX_COMPILATION_CACHE_DIR set, a head is compiled once for all its seeds.

    python -m r2sm_jax.train configs/ablation.py --model.head linear
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(scenes=2400),
        train=LoopConfig(steps=300, checkpoint_every=300, evaluate_every=300, report_samples=128),
    )
