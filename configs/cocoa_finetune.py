"""Fine-tuning on photographs with COCOA annotations, from a run on scenes. No score on COCOA's
validation images was measured here.

Data: COCOA (Zhu et al., arXiv 1509.01329). Convert and train:

    python -m r2sm_jax.data convert cocoa ANNOTATIONS --out cocoa.json
    python -m r2sm_jax.train configs/cocoa_finetune.py \\
        --data.source json:cocoa.json --init runs/latest

The small model was trained on drawn scenes only, so expect rough masks: the file shows the steps,
not a result.
"""

from r2sm_jax.config import Config, DataConfig, LoopConfig, OptimizerConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(source="json:cocoa.json"),
        optimizer=OptimizerConfig(learning_rate=3e-4, muon_learning_rate=5e-3, warmup_steps=20),
        train=LoopConfig(steps=300, batch_size=4, evaluate_every=100, checkpoint_every=100),
    )
