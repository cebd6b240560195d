"""R2SM's D2SA split: SAM ViT-B at 1024 pixels, MiniLM, the paper's protocol. **Not trained here**.

Paper: R2SM, arXiv 2506.01795, Table 2 (gIoU / cIoU over all queries): ReLA 83.18 / 81.24, GLaMM
78.79 / 74.35. Data (2,000 images to train, 3,600 to validate, up to ten queries each), converted
with

    python -m r2sm_jax.data convert d2sa D2S_amodal_training_rot0.json --images IMAGES \\
        --queries 0 --out d2sa_masks.json
    python -m r2sm_jax.data convert r2sm QUERIES --over d2sa_masks.json \\
        --out d2sa/train.json  # and val.json
    python -m r2sm_jax.train configs/r2sm_d2sa.py --data.images IMAGES

The run takes ten epochs and selects its checkpoint by gIoU, as the paper does. But it selects on
`dev`, a tenth of the *training* images, which is held out, so that val is only reported. To select
on val, as the paper does, give `--train.select-on val`: the run then trains on all training images,
and its report says on what it was selected.

The model is that of `configs/r2sm_cocoa_cls.py`. The image encoder starts from SAM; give
`--model.vision.sam FOLDER` for a local copy. `--model.decoder.type sam` also takes SAM's decoder.

Batch: 8 images with ten queries each, in 4 parts of 2 images. AdamW with a peak rate of 1e-4, which
falls linearly to zero. Everything except the language model is trained. Memory, by `python
scripts/estimate.py configs/r2sm_d2sa.py`: 9.1 GB a device for a step of 2 images (at 12 instances
each). Cost: 3.7e12 FLOPs per image, 6.7e16 in all. At 5e12 FLOPs per second, a third of a V100's
float32 peak, that is 3.7 hours (computed, not measured). On an A100 or newer add `--model.dtype
bfloat16`.
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
