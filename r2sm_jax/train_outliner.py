"""Trains the outliner: `python -m r2sm_jax.train configs/outliner.py` (docs/complete.md).

Its run folder holds `config.json`, `metrics.jsonl`, and `outliner.json` with
`outliner.safetensors`, which are written at each evaluation and once more at the end.
"""

import time
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from r2sm_jax.config import Config
from r2sm_jax.data.sources import open_dataset, spread_evenly
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.prompts import outliner_figures, scored_objects
from r2sm_jax.inference.outliner import MaskOutliner, save_outliner
from r2sm_jax.models.keys_efficientnet import fill_first_blocks
from r2sm_jax.models.outliner import Outliner
from r2sm_jax.models.pretrained import find_efficientnet
from r2sm_jax.train_completer import write_line
from r2sm_jax.training.outliner import NUM_PLANES, cut_prompt_examples, make_step
from r2sm_jax.training.parts import averaging, example_batches, make_optimizer
from r2sm_jax.training.run_folder import new_run, point_latest


def train_outliner(config: Config) -> Path:
    """Trains an outliner on frozen published features. Returns its run folder.

    Raises InputError if the data or the weights of the backbone cannot be read, or `dev` has no
    object to judge by.
    """
    started = time.monotonic()
    if config.resume or config.init:
        flag = "--resume" if config.resume else "--init"
        raise InputError(
            f"{flag} is for the segmenter; an outliner trains in one go, so leave the flag out and "
            "give a new --run"
        )
    sizes = config.model.outliner
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

    model = Outliner(sizes, rngs=nnx.Rngs(config.train.seed))
    graphdef, weights, frozen = nnx.split(model, nnx.Param, ...)
    if sizes.efficientnet:
        published = find_efficientnet(sizes.efficientnet)
        frozen["efficientnet"] = fill_first_blocks(frozen["efficientnet"], published)
    optimizer = make_optimizer(config)
    step_function = jax.jit(
        make_step(graphdef, optimizer, averaging(config.train.steps)), donate_argnums=0
    )
    state = (weights, jax.tree.map(jnp.copy, weights), optimizer.init(weights))

    with ExitStack() as stack:
        folder = stack.enter_context(new_run(config))
        log = stack.enter_context((folder / "metrics.jsonl").open("a", encoding="utf-8"))
        print(f"run folder {folder}", flush=True)

        key = jax.random.key(config.train.seed)
        batches = example_batches(
            source,
            config,
            lambda sample, rng: cut_prompt_examples(sample, sizes.size, rng),
            (sizes.size, sizes.size, NUM_PLANES),
        )
        for step in range(1, config.train.steps + 1):
            state, values = step_function(
                state, frozen, next(batches), jax.random.fold_in(key, step)
            )
            if step % config.train.log_every == 0 or step == config.train.steps:
                losses = {f"train/{name}": float(value) for name, value in values.items()}
                write_line(log, {"step": step} | losses)
                seconds = time.monotonic() - started
                print(f"step {step}: loss {losses['train/loss']:.3f}, {seconds:.0f} s", flush=True)
            if step % config.train.evaluate_every == 0 or step == config.train.steps:
                # The step takes over the buffers of the state, so the weights are copied.
                averaged = jax.tree.map(jnp.copy, state[1])
                outliner = MaskOutliner(sizes, nnx.merge_state(averaged, frozen))
                figures = outliner_figures(outliner, samples)
                write_line(log, {"step": step, "dev": figures})
                save_outliner(folder, outliner)
                if config.run is None:
                    point_latest(folder)
                shown = [f"{name} {values['iou']:.3f}" for name, values in figures.items()]
                print(f"modal IoU of {figures['box']['objects']} objects: {', '.join(shown)}")
    return folder
