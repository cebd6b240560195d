"""Trains the completer: `python -m r2sm_jax.train configs/completer.py` (docs/complete.md).

Its run folder holds `config.json`, `metrics.jsonl`, and `completer.json` with
`completer.safetensors`, which are written at each evaluation and once more at the end.
"""

from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from r2sm_jax.config import Config
from r2sm_jax.data.dataset import Sample
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import REFERENCE_METHODS, methods_of, score_completion
from r2sm_jax.inference.crop_models import MaskCompleter, save_completer
from r2sm_jax.inference.parts import start_weights
from r2sm_jax.models.crop_unet import CropUNet, make_completer
from r2sm_jax.synthetic.sources import open_dataset, spread_evenly
from r2sm_jax.training.crop_models import completer_loss, cut_examples
from r2sm_jax.training.parts import example_batches, refuse_resume, train_part

THRESHOLDS = (-0.5, 0.0, 0.5, 1.0, 1.5)
"""Logits among which the one with the highest IoU on `dev` is chosen."""


def train_completer(config: Config) -> Path:
    """Trains a completer. Returns its run folder.

    Raises InputError if the data cannot be read or have no object whose complete shape is known, or
    as `start_weights`.
    """
    refuse_resume(config, "completer")
    sizes = config.model.completer

    def build() -> CropUNet:
        return make_completer(sizes, rngs=nnx.Rngs(config.train.seed))

    graphdef, weights, frozen = start_weights(config, "completer", build)
    image_size = config.model.vision.image_size
    source = open_dataset(config.data, "train", image_size=image_size, count=config.data.scenes)
    dev = open_dataset(
        config.data, "dev", image_size=image_size, count=config.train.evaluate_samples
    )
    dev = spread_evenly(dev, config.train.evaluate_samples)
    samples = [dev[index] for index in range(len(dev))]
    references = score_completion(REFERENCE_METHODS, samples)
    if not references["visible mask"]["hidden"]["objects"]:
        raise InputError(
            f"{config.data.source}: the split dev has no hidden object whose complete shape is "
            "known; give compose:FILE, which hides objects, or data with amodal masks"
        )

    batches = example_batches(
        source,
        config,
        lambda sample, rng: cut_examples(sample, sizes.size, rng),
    )
    untrained = MaskCompleter(sizes, nnx.merge_state(weights, frozen))

    def judge(averaged: nnx.State, folder: Path) -> dict[str, Any]:
        trained = untrained.updated(weights=nnx.merge_state(averaged, frozen))
        completer, figures = choose_threshold(trained, samples)
        save_completer(folder, completer)
        print_figures(references | figures)
        return {"threshold": completer.threshold, "dev": references | figures}

    return train_part(
        config,
        completer_loss(graphdef),
        weights,
        frozen,
        batches,
        judge,
        references=references,
    )


def choose_threshold(
    completer: MaskCompleter, samples: list[Sample]
) -> tuple[MaskCompleter, dict[str, Any]]:
    """The completer with the threshold that is best on `dev`, and its figures there."""
    candidates = []
    for threshold in THRESHOLDS:
        candidate = completer.updated(threshold=threshold)
        candidates.append((candidate, score_completion(methods_of(candidate), samples)))
    # Objects that nothing hides count as well: what is added to them is wrong.
    return max(candidates, key=lambda candidate: mean_iou(candidate[1]))


def mean_iou(figures: dict[str, Any]) -> float:
    """The mean IoU of hidden and other objects, with and without neighbours."""
    values = []
    for of_kind in figures.values():
        for group in ("hidden", "not_hidden"):
            iou = of_kind[group]["amodal_iou"]
            if iou is not None:
                values.append(iou)
    return float(np.mean(values))


def print_figures(figures: dict[str, Any]) -> None:
    """Prints one line for each way to complete."""
    for name, values in figures.items():
        hidden, rest = values["hidden"], values["not_hidden"]
        kept = f"{rest['amodal_iou']:.3f}" if rest["objects"] else "-"
        print(
            f"{name:20} amodal IoU {hidden['amodal_iou']:.3f}, occluded IoU "
            f"{hidden['occluded_iou']:.3f} ({hidden['objects']} hidden); not hidden {kept} "
            f"({rest['objects']})",
            flush=True,
        )
