"""R2SM's MUVA split: the model and protocol of r2sm_cocoa_cls.py. **Not trained here**.

Paper: R2SM, arXiv 2506.01795, Table 2 (gIoU / cIoU over all queries): ReLA 71.78 / 72.54, GLaMM
59.30 / 58.34.

Data: 3,000 images to train, 3,000 to validate, up to ten queries each. Convert and train:

    python -m r2sm_jax.data convert muva muva_train.json --images IMAGES \\
        --queries 0 --out muva_masks.json
    python -m r2sm_jax.data convert r2sm QUERIES --over muva_masks.json \\
        --out muva/train.json  # and val.json
    python -m r2sm_jax.train configs/r2sm_muva.py --data.images IMAGES

Ten epochs. Cost: 1.0e17 FLOPs in all, 5.6 hours at 5e12 a second (computed, not
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
        data=replace(config.data, source="json:muva", instances=20),
        train=replace(config.train, steps=3380, evaluate_every=338, checkpoint_every=338),
    )
