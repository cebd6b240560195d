"""What the trainings of completer and outliner share: batches of crops, and the optimizer."""

from collections.abc import Callable, Iterator

import grain
import numpy as np
import optax
from jaxtyping import UInt8

from r2sm_jax.config import Config
from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.data.prepare import FreshSource

EXAMPLES_PER_IMAGE = 4
"""Objects of one picture in a batch, chosen at random; fewer are filled up with repeats."""
# The optimizer is always AdamW with these constants and a gradient norm of at most 1. Of
# `OptimizerConfig` only `learning_rate` is read.
WARM_UP_STEPS = 300
WEIGHT_DECAY = 0.02
AVERAGE = 0.999
"""Weights are averaged over about the last thousand steps."""

CutExamples = Callable[[Sample, np.random.Generator], Iterator[UInt8[np.ndarray, "s s c"]]]
"""The examples of one picture, with random variations."""


class Examples:
    """The examples of a training source, picture by picture.

    A source that can make new pictures does so at each visit, whatever `DataConfig.fresh` says:
    nothing of a picture is cached here.
    """

    def __init__(self, source: Source, cut_examples: CutExamples, shape: tuple[int, int, int]):
        """`shape` is that of one example."""
        self.source = source
        self.cut_examples = cut_examples
        self.shape = shape

    def __call__(
        self, place: tuple[int, int], rng: np.random.Generator
    ) -> UInt8[np.ndarray, "m s s c"]:
        """Some examples of picture `place[0]` at its visit `place[1]`; all 0 if it has none."""
        index, visit = place
        sample = self._sample_at(index, visit)
        crops = list(self.cut_examples(sample, rng))
        if not crops:
            # The loss of an example without an object is 0.
            return np.zeros((EXAMPLES_PER_IMAGE, *self.shape), np.uint8)
        rng.shuffle(crops)
        chosen = [crops[number % len(crops)] for number in range(EXAMPLES_PER_IMAGE)]
        return np.stack(chosen)

    def _sample_at(self, index: int, visit: int) -> Sample:
        if isinstance(self.source, FreshSource):
            return self.source.at_visit(index, visit)
        return self.source[index]


def example_batches(
    source: Source, config: Config, cut_examples: CutExamples, shape: tuple[int, int, int]
) -> Iterator[UInt8[np.ndarray, "m s s c"]]:
    """An endless, reshuffled iterator of batches. `shape` is that of one example."""
    num_samples = len(source)
    places = grain.MapDataset.range(num_samples).seed(config.train.seed).shuffle().repeat()
    # The position tells the visit, so that a picture is another one each time.
    places = places.map_with_index(lambda position, i: (i, position // num_samples))
    examples = places.random_map(Examples(source, cut_examples, shape))
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
    for batch in examples.batch(config.train.batch_size).to_iter_dataset(options):
        yield batch.reshape(-1, *batch.shape[2:])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with a warm-up and a cosine decay over all steps."""
    steps = config.train.steps
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.optimizer.learning_rate, min(WARM_UP_STEPS, steps // 10 + 1), steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=WEIGHT_DECAY))


def averaging(steps: int) -> float:
    """How much of the averaged weights a step keeps: an average over more steps than there are
    would keep the random weights."""
    return min(AVERAGE, 1 - 10 / (steps + 10))
