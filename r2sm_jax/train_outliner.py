"""Trains the outliner: `python -m r2sm_jax.train configs/outliner.py` (docs/complete.md).

Its run folder holds `config.json`, `metrics.jsonl`, and `outliner.json` with
`outliner.safetensors`, which are written at each evaluation and once more at the end.
"""

from pathlib import Path
from typing import Any

from flax import nnx

from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import outliner_figures, scored_objects
from r2sm_jax.inference.crop_models import MaskOutliner, save_outliner
from r2sm_jax.inference.parts import start_weights
from r2sm_jax.models.crop_unet import CropUNet, make_outliner
from r2sm_jax.synthetic.sources import open_dataset, spread_evenly
from r2sm_jax.training.crop_models import cut_prompt_examples, outliner_loss
from r2sm_jax.training.parts import example_batches, refuse_resume, train_part


def train_outliner(config: Config) -> Path:
    """Trains an outliner on frozen published features. Returns its run folder.

    Raises InputError if the data cannot be read, or `dev` has no object to judge by, or as
    `start_weights`.
    """
    refuse_resume(config, "outliner")
    sizes = config.model.outliner

    def build() -> CropUNet:
        return make_outliner(sizes, rngs=nnx.Rngs(config.train.seed))

    graphdef, weights, frozen = start_weights(config, "outliner", build)
    image_size = config.model.vision.image_size
    source = open_dataset(config.data, "train", image_size=image_size, count=config.data.scenes)
    dev = open_dataset(
        config.data, "dev", image_size=image_size, count=config.train.evaluate_samples
    )
    dev = spread_evenly(dev, config.train.evaluate_samples)
    samples = [dev[index] for index in range(len(dev))]
    if not any(scored_objects(sample) for sample in samples):
        raise InputError(
            f"{config.data.source}: the split dev has no object of 64 or more visible pixels; give "
            "more images"
        )

    batches = example_batches(
        source,
        config,
        lambda sample, rng: cut_prompt_examples(sample, sizes.size, rng),
    )

    def judge(averaged: nnx.State, folder: Path) -> dict[str, Any]:
        outliner = MaskOutliner(sizes, nnx.merge_state(averaged, frozen))
        figures = outliner_figures(outliner, samples)
        save_outliner(folder, outliner)
        shown = [f"{name} {values['iou']:.3f}" for name, values in figures.items()]
        print(f"modal IoU of {figures['box']['objects']} objects: {', '.join(shown)}", flush=True)
        return {"dev": figures}

    return train_part(config, outliner_loss(graphdef), weights, frozen, batches, judge)
