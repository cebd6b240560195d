"""An hour on two CPU cores and 6 GB of memory: the default model on more scenes, for longer, at
lower rates.

Task: R2SM, arXiv 2506.01795. Measured on `val`: gIoU 0.852, occluded IoU 0.537, type accuracy
1.000 (`val_phrasing` 0.976, `val_hard` 0.944); 55 minutes on a processor with AMX.

    python -m r2sm_jax.train configs/scenes_hour.py
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig, OptimizerConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(scenes=24576, text_only_queries=28000),
        optimizer=OptimizerConfig(learning_rate=7e-4, muon_learning_rate=0.02),
        train=LoopConfig(
            steps=10000,
            log_every=50,
            evaluate_every=2500,
            checkpoint_every=1250,
            report_samples=256,
        ),
    )
