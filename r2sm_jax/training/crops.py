"""What the trainings of completer and outliner share: examples out of pictures, their batches and
their variation. An example is a crop with planes beside its colours, `uint8 [s s c]`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from r2sm_jax.config import Config
from r2sm_jax.data.dataset import FreshSource, Source
from r2sm_jax.errors import InputError
from r2sm_jax.models.crop_unet import CropUNet
from r2sm_jax.models.hub import find_model
from r2sm_jax.models.keys import first_blocks
from r2sm_jax.training.loop import Batches, Evaluate, Task
from r2sm_jax.training.step import Loss

CutExamples = Callable[..., Iterator[UInt8[np.ndarray, "s s c"]]]
"""(sample, rng=) -> the examples of one picture, with random variations."""
EXAMPLES_PER_IMAGE = 4
"""Objects of one picture that become examples, chosen at random; a batch has as many examples for
each of its `batch_size`."""
POOL_SIZE = 512
"""Examples that are shuffled at a time, so that a batch mixes many pictures: examples of one
picture are alike."""


# Batches


def draw_examples(
    place: tuple[int, int], rng: np.random.Generator, *, source: Source, cut: CutExamples
) -> list[UInt8[np.ndarray, "s s c"]]:
    """Makes up to `EXAMPLES_PER_IMAGE` examples of picture `place[0]` at its visit `place[1]`.

    A source that can make new pictures does so at each visit, whatever `DataConfig.fresh` says.
    """
    index, visit = place
    is_fresh = isinstance(source, FreshSource)
    sample = source.at_visit(index, visit) if is_fresh else source[index]
    order = rng.permutation(len(sample.instances))
    shuffled = replace(sample, instances=tuple(sample.instances[place] for place in order))
    return list(islice(cut(shuffled, rng=rng), EXAMPLES_PER_IMAGE))


class _Unpack(grain.experimental.FlatMapTransform):
    """Gives the examples of pictures one after the other."""

    def flat_map(self, element: list[np.ndarray]) -> list[np.ndarray]:
        return element


def example_batches(source: Source, config: Config, cut: CutExamples) -> Batches:
    """Returns batches `uint8 [m s s c]` that mix the examples of many pictures.

    The seed of training decides the order of the pictures, their examples and the batches. Each of
    several processes gets its rows of them. Raises InputError if no picture has an example.
    """
    seed, num_samples = config.train.seed, len(source)
    draw = partial(draw_examples, source=source, cut=cut)
    # Without any the iterator would look for ever.
    if not any(draw((index, 0), np.random.default_rng(0)) for index in range(num_samples)):
        raise InputError(
            f"{config.data.source}: no training picture has an object to learn from; give data "
            "with larger objects, or for a completer with complete masks"
        )
    places = grain.MapDataset.range(num_samples).seed(seed).shuffle().repeat()
    # The position tells the visit, so that a picture is another one each time.
    places = places.map_with_index(lambda position, i: (i, position // num_samples))
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
    pictures = places.random_map(draw).to_iter_dataset(options)
    examples = grain.experimental.FlatMapIterDataset(pictures, _Unpack())
    mixed = grain.experimental.WindowShuffleIterDataset(examples, window_size=POOL_SIZE, seed=seed)
    process, count = jax.process_index(), jax.process_count()
    batches = mixed.batch(EXAMPLES_PER_IMAGE * config.train.batch_size)
    rows = batches.map(lambda batch: batch[process::count])

    def read(position: Any) -> Iterator[tuple[UInt8[np.ndarray, "m s s c"], Any]]:
        iterator = iter(rows)
        if position is not None:
            iterator.set_state(position)
        for batch in iterator:
            yield batch, iterator.get_state()

    return read


# On the devices


def vary(planes: UInt8[Array, "m s s c"], keys: Array) -> Float[Array, "m s s c"]:
    """Mirrors half of the examples, and changes colours and brightness, from 0 to 255. Takes three
    `keys`."""
    count = len(planes)
    flip = jax.random.bernoulli(keys[0], 0.5, (count, 1, 1, 1))
    planes = jnp.where(flip, planes[:, :, ::-1], planes)
    gain = 1 + 0.25 * jax.random.uniform(keys[1], (count, 1, 1, 3), minval=-1)
    gain = gain * (1 + 0.3 * jax.random.uniform(keys[2], (count, 1, 1, 1), minval=-1))
    colours = jnp.clip(planes[..., :3] * gain, 0, 255)
    return jnp.concatenate([colours, planes[..., 3:]], axis=-1)


def object_weight(target: Bool[Array, "m h w"]) -> Float[Array, " m"]:
    """Weights with which a sum is the mean over the examples that have an object."""
    has_object = target.any((1, 2)).astype(jnp.float32)
    return has_object / jnp.maximum(has_object.sum(), 1)


def true_iou(
    answer: Bool[Array, "m h w"],
    target: Bool[Array, "m h w"],
    beyond: Float[Array, " m"] | float = 0.0,
) -> Float[Array, " m"]:
    """Computes the IoU of each mask, for the head that predicts it. `beyond`: cells of the target
    that lie beyond the crop, which no answer has."""
    overlap = (answer & target).sum((1, 2))
    union = (answer | target).sum((1, 2)) + beyond
    return overlap / jnp.maximum(union, 1)


# The task


class CropPart(NamedTuple):
    """What is special about a completer or an outliner."""

    build: Callable[..., CropUNet]
    """(sizes, rngs=) -> the network with random weights."""
    cut: Callable[..., Iterator[UInt8[np.ndarray, "s s c"]]]
    """(sample, size, rng) -> its examples."""
    loss: Loss


def crop_task(
    part: CropPart, config: Config, source: Source, evaluate: Evaluate, *, published: bool
) -> Task:
    """Makes the task of a resolved configuration.

    Args:
        part: the completer or the outliner, which `config` names.
        config: a resolved configuration.
        source: the training pictures.
        evaluate: scores weights.
        published: whether the backbone gets its published weights; else all weights are random, for
            others to take their place.

    Raises InputError if there is nothing to learn from in the pictures, or if the backbone cannot
    be read or is of other sizes.
    """
    name = config.train.part
    sizes = getattr(config.model, name)
    batches = example_batches(source, config, partial(part.cut, size=sizes.size))
    model = part.build(sizes, rngs=nnx.Rngs(config.train.seed))
    if published and model.efficientnet is not None and sizes.efficientnet:
        found = find_model(sizes.efficientnet, f"--model.{name}.efficientnet")
        weights = first_blocks(nnx.state(model.efficientnet), found)
        nnx.update(model.efficientnet, weights)
    return Task(model, part.loss, batches, evaluate)
