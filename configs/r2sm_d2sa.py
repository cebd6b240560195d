"""R2SM's D2SA split: the model and protocol of r2sm_cocoa_cls.py. **Not trained here**.

Paper: R2SM, arXiv 2506.01795, Table 2 (gIoU / cIoU over all queries): ReLA 83.18 / 81.24, GLaMM
78.79 / 74.35.

Data: 2,000 images to train, 3,600 to validate, up to ten queries each. Convert and train:

    python -m r2sm_jax.data convert d2sa D2S_amodal_training_rot0.json --images IMAGES \\
        --queries 0 --out d2sa_masks.json
    python -m r2sm_jax.data convert r2sm QUERIES --over d2sa_masks.json \\
        --out d2sa/train.json  # and val.json
    python -m r2sm_jax.train configs/r2sm_d2sa.py --data.images IMAGES

Ten epochs. Cost: 6.7e16 FLOPs in all, 3.7 hours at 5e12 a second (computed, not
measured). Checkpoint selection, batch, rates and memory: r2sm_cocoa_cls.py.
"""

from dataclasses import replace
from pathlib import Path

from r2sm_jax.cli import load_config_file
from r2sm_jax.config import Config


def get_config() -> Config:
    config = load_config_file(Path(__file__).with_name("r2sm_cocoa_cls.py"))
    return replace(
        config,
        data=replace(config.data, source="json:d2sa", instances=16),
        train=replace(config.train, steps=2250, evaluate_every=225, checkpoint_every=225),
    )
