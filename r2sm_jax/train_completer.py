"""Trains the completer: `python -m r2sm_jax.train configs/completer.py` (docs/complete.md).

Its run folder holds `config.json`, `metrics.jsonl`, and `completer.json` with
`completer.safetensors`, which are written at each evaluation and once more at the end.
"""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from r2sm_jax.config import Config
from r2sm_jax.data.dataset import Sample
from r2sm_jax.data.sources import open_dataset, spread_evenly
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import completer_figures, reference_figures
from r2sm_jax.inference.completion import MaskCompleter, save_completer
from r2sm_jax.models.completion import Completer
from r2sm_jax.training.completion import cut_examples, make_step
from r2sm_jax.training.parts import averaging, example_batches, make_optimizer
from r2sm_jax.training.run_folder import new_run, point_latest

THRESHOLDS = (-0.5, 0.0, 0.5, 1.0, 1.5)
"""Logits among which the one with the highest IoU on `dev` is chosen."""


def train_completer(config: Config) -> Path:
    """Trains a completer from random weights. Returns its run folder.

    Raises InputError if the data cannot be read or have no object whose complete shape is known.
    """
    started = time.monotonic()
    if config.resume or config.init:
        flag = "--resume" if config.resume else "--init"
        raise InputError(
            f"{flag} is for the segmenter; a completer trains from random weights in one go, so "
            "leave the flag out and give a new --run"
        )
    size = config.model.vision.image_size
    source = open_dataset(config.data, "train", image_size=size, count=config.data.scenes)
    dev = open_dataset(config.data, "dev", image_size=size, count=config.train.evaluate_samples)
    dev = spread_evenly(dev, config.train.evaluate_samples)
    samples = [dev[index] for index in range(len(dev))]
    references = reference_figures(samples)
    if not references["visible mask"]["hidden"]["objects"]:
        raise InputError(
            f"{config.data.source}: the split dev has no hidden object whose complete shape is "
            "known; give compose:FILE, which hides objects, or data with amodal masks"
        )

    model = Completer(config.model.completer, rngs=nnx.Rngs(config.train.seed))
    graphdef, weights = nnx.split(model)
    optimizer = make_optimizer(config)
    step_function = jax.jit(
        make_step(graphdef, optimizer, averaging(config.train.steps)), donate_argnums=0
    )
    completer = MaskCompleter(config.model.completer, weights)
    state = (weights, jax.tree.map(jnp.copy, weights), optimizer.init(weights))

    with ExitStack() as stack:
        folder = stack.enter_context(new_run(config))
        log = stack.enter_context((folder / "metrics.jsonl").open("a", encoding="utf-8"))
        print(f"run folder {folder}", flush=True)
        write_line(log, {"step": 0, "references": references})

        key = jax.random.key(config.train.seed)
        crop_size = config.model.completer.size
        batches = example_batches(
            source,
            config,
            lambda sample, rng: cut_examples(sample, crop_size, rng),
            (crop_size, crop_size, 7),
        )
        for step in range(1, config.train.steps + 1):
            state, values = step_function(state, next(batches), jax.random.fold_in(key, step))
            if step % config.train.log_every == 0 or step == config.train.steps:
                losses = {f"train/{name}": float(value) for name, value in values.items()}
                write_line(log, {"step": step} | losses)
                seconds = time.monotonic() - started
                print(f"step {step}: loss {losses['train/loss']:.3f}, {seconds:.0f} s", flush=True)
            if step % config.train.evaluate_every == 0 or step == config.train.steps:
                # The step takes over the buffers of the state, so the weights are copied.
                averaged = jax.tree.map(jnp.copy, state[1])
                completer, figures = choose_threshold(completer.updated(weights=averaged), samples)
                figures = references | figures
                write_line(log, {"step": step, "threshold": completer.threshold, "dev": figures})
                save_completer(folder, completer)
                if config.run is None:
                    point_latest(folder)
                print_figures(figures)
    return folder


def choose_threshold(
    completer: MaskCompleter, samples: list[Sample]
) -> tuple[MaskCompleter, dict[str, Any]]:
    """The completer with the threshold that is best on `dev`, and its figures there."""
    candidates = []
    for threshold in THRESHOLDS:
        candidate = completer.updated(threshold=threshold)
        candidates.append((candidate, completer_figures(candidate, samples)))
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


def write_line(log: Any, values: dict[str, Any]) -> None:
    log.write(json.dumps(values) + "\n")
    log.flush()
