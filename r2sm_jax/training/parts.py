"""What the trainings of completer and outliner share: batches of crops, the step and the loop."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, UInt8

from r2sm_jax.config import Config
from r2sm_jax.data.dataset import FreshSource, Sample, Source
from r2sm_jax.errors import InputError
from r2sm_jax.training.run_folder import new_run, point_latest

EXAMPLES_PER_IMAGE = 4
"""Objects of one picture that become examples, chosen at random; a batch has as many examples for
each of its `batch_size`."""
POOL_SIZE = 1024
"""Examples from which a batch is drawn, so that it mixes many pictures: examples of one picture are
alike."""
MAX_EMPTY_PICTURES = 1000
"""So many pictures in a row without an example end the training, which would wait for ever."""
# The optimizer is always AdamW with these constants and a gradient norm of at most 1. Of
# `OptimizerConfig` only `learning_rate` is read.
WARM_UP_STEPS = 300
WEIGHT_DECAY = 0.02
AVERAGE = 0.999
"""Weights are averaged over about the last thousand steps."""

CutExamples = Callable[[Sample, np.random.Generator], Iterator[UInt8[np.ndarray, "s s c"]]]
"""The examples of one picture, with random variations."""

LossOf = Callable[[nnx.State, nnx.State, jax.Array, jax.Array], tuple[Array, dict[str, Array]]]
"""(trained weights, frozen weights, planes of the examples, key) -> the loss and its parts."""

Judge = Callable[[nnx.State, Path], Mapping[str, Any]]
"""(averaged weights, run folder) -> figures for the log; it also saves and prints."""


class PictureExamples:
    """The examples of a training source, picture by picture.

    A source that can make new pictures does so at each visit, whatever `DataConfig.fresh` says:
    nothing of a picture is cached here.
    """

    def __init__(self, source: Source, cut_examples: CutExamples):
        self.source = source
        self.cut_examples = cut_examples

    def __call__(
        self, place: tuple[int, int], rng: np.random.Generator
    ) -> list[UInt8[np.ndarray, "s s c"]]:
        """Up to `EXAMPLES_PER_IMAGE` examples of picture `place[0]` at its visit `place[1]`."""
        index, visit = place
        sample = self._sample_at(index, visit)
        crops = list(self.cut_examples(sample, rng))
        rng.shuffle(crops)
        return crops[:EXAMPLES_PER_IMAGE]

    def _sample_at(self, index: int, visit: int) -> Sample:
        if isinstance(self.source, FreshSource):
            return self.source.at_visit(index, visit)
        return self.source[index]


def example_batches(
    source: Source, config: Config, cut_examples: CutExamples
) -> Iterator[UInt8[np.ndarray, "m s s c"]]:
    """An endless iterator of batches that mix the examples of many pictures.

    The seed of training decides the order of the pictures, their examples and the batches. Raises
    InputError if `MAX_EMPTY_PICTURES` pictures in a row have no example.
    """
    num_samples = len(source)
    places = grain.MapDataset.range(num_samples).seed(config.train.seed).shuffle().repeat()
    # The position tells the visit, so that a picture is another one each time.
    places = places.map_with_index(lambda position, i: (i, position // num_samples))
    pictures = places.random_map(PictureExamples(source, cut_examples))
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
    examples = chain_examples(pictures.to_iter_dataset(options))
    return draw_batches(
        examples,
        EXAMPLES_PER_IMAGE * config.train.batch_size,
        np.random.default_rng(config.train.seed),
    )


def chain_examples(
    pictures: Iterable[list[UInt8[np.ndarray, "s s c"]]],
) -> Iterator[UInt8[np.ndarray, "s s c"]]:
    """The examples of all pictures in their order. Raises InputError as `example_batches`."""
    num_empty = 0
    for examples in pictures:
        num_empty = 0 if examples else num_empty + 1
        if num_empty == MAX_EMPTY_PICTURES:
            raise InputError(
                f"{num_empty} training pictures in a row have no object to learn from; give data "
                "with larger objects, or for a completer with complete masks"
            )
        yield from examples


def draw_batches(
    examples: Iterator[UInt8[np.ndarray, "s s c"]], batch_size: int, rng: np.random.Generator
) -> Iterator[UInt8[np.ndarray, "m s s c"]]:
    """Batches at random from a pool of examples, which new ones fill up."""
    pool: list[np.ndarray] = []
    while True:
        # At first the pool takes two examples for each that leaves it. So training starts after two
        # batches, not when the pool is full.
        num_new = batch_size if len(pool) >= POOL_SIZE else 2 * batch_size
        pool += islice(examples, num_new)
        rng.shuffle(pool)
        yield np.stack(pool[:batch_size])
        pool = pool[batch_size:]


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with a warm-up and a cosine decay over all steps."""
    steps = config.train.steps
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.optimizer.learning_rate, min(WARM_UP_STEPS, steps // 10 + 1), steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=WEIGHT_DECAY))


def make_step(loss_of: LossOf, optimizer: optax.GradientTransformation, ema: float):
    """The training step: the state is `(weights, averaged weights, optimizer state)`.

    `ema`: how much of the averaged weights a step keeps.
    """

    def step(
        state: Any, frozen: nnx.State, planes: UInt8[Array, "m s s c"], key: Array
    ) -> tuple[Any, Any]:
        weights, averaged, optimizer_state = state
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, parts), gradients = gradient_of(weights, frozen, planes, key)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, weights)
        weights = optax.apply_updates(weights, updates)
        averaged = optax.incremental_update(weights, averaged, 1 - ema)
        return (weights, averaged, optimizer_state), parts | {"loss": loss}

    return step


def train_part(
    config: Config,
    loss_of: LossOf,
    weights: nnx.State,
    frozen: nnx.State,
    batches: Iterator[UInt8[np.ndarray, "m s s c"]],
    judge: Judge,
    *,
    references: Mapping[str, Any] | None = None,
) -> Path:
    """Trains a part in one go. Returns its run folder.

    Args:
        weights, frozen: those that are trained, and the others.
        judge: called every `evaluate_every` steps and at the end.
        references: figures of rules that learn nothing, for the log.
    """
    started = time.monotonic()
    optimizer = make_optimizer(config)
    # An average over more steps than there are would keep the random weights.
    ema = min(AVERAGE, 1 - 10 / (config.train.steps + 10))
    step_function = jax.jit(make_step(loss_of, optimizer, ema), donate_argnums=0)
    state = (weights, jax.tree.map(jnp.copy, weights), optimizer.init(weights))

    with ExitStack() as stack:
        folder = stack.enter_context(new_run(config))
        log = stack.enter_context((folder / "metrics.jsonl").open("a", encoding="utf-8"))

        def write_line(values: Mapping[str, Any]) -> None:
            log.write(json.dumps(values) + "\n")
            log.flush()

        print(f"run folder {folder}", flush=True)
        if references is not None:
            write_line({"step": 0, "references": references})
        key = jax.random.key(config.train.seed)
        for step in range(1, config.train.steps + 1):
            step_key = jax.random.fold_in(key, step)
            state, values = step_function(state, frozen, next(batches), step_key)
            is_last = step == config.train.steps
            if is_last or step % config.train.log_every == 0:
                losses = {f"train/{name}": float(value) for name, value in values.items()}
                write_line({"step": step} | losses)
                seconds = time.monotonic() - started
                print(f"step {step}: loss {losses['train/loss']:.3f}, {seconds:.0f} s", flush=True)
            if is_last or step % config.train.evaluate_every == 0:
                # The step takes over the buffers of the state, so the weights are copied.
                averaged = jax.tree.map(jnp.copy, state[1])
                write_line({"step": step, **judge(averaged, folder)})
                if config.run is None:
                    point_latest(folder)
    return folder


def refuse_resume(config: Config, name: str) -> None:
    """Raises InputError for `--resume`, which is for the segmenter. `name`: of the part."""
    if config.resume:
        raise InputError(
            f"--resume is for the segmenter; the {name} trains in one go, so give a new --run, and "
            "--init RUN to start from the weights of another one"
        )
