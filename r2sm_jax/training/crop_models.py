"""Training of completer and outliner: examples of crops, their variations, losses, and the task.

An example of the completer is a crop around the visible mask of one object whose complete mask is
known. Hidden objects come from pictures in which others lie over them. Objects that nothing hides
are examples, too: the completer must learn to add nothing to them. An example of the outliner is a
crop around a box or clicks that mean one object, and the object's visible mask.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import reduce
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, UInt8
from scipy import ndimage

from r2sm_jax.config import Config, LoopConfig
from r2sm_jax.data import masks
from r2sm_jax.data.crops import (
    BOX_EXTENT,
    MIN_COMPLETED_PIXELS,
    MIN_HIDDEN_SHARE,
    MIN_WINDOW_SIDE,
    WHOLE_EXTENT,
    CropWindow,
    cut_crop,
    cut_prompt_crop,
    window_at,
    window_of_box,
)
from r2sm_jax.data.dataset import FreshSource, Sample, Source
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.models.crop_unet import (
    NUM_CHANNELS,
    CropOutput,
    CropUNet,
    make_completer,
    make_outliner,
)
from r2sm_jax.models.hub import find_model
from r2sm_jax.models.keys import first_blocks
from r2sm_jax.models.matmul import JAX_PRECISION
from r2sm_jax.query import Click, Prompt
from r2sm_jax.training.loop import Evaluate
from r2sm_jax.training.processes import place, shard_batch
from r2sm_jax.training.regions import draw_region
from r2sm_jax.training.step import TrainState, Values, init_state, update

CutExamples = Callable[..., Iterator[UInt8[np.ndarray, "s s c"]]]
"""(sample, rng=) -> the examples of one picture, with random variations."""
EXAMPLES_PER_IMAGE = 4
"""Objects of one picture that become examples, chosen at random; a batch has as many examples for
each of its `batch_size`."""
POOL_SIZE = 512
"""Examples that are shuffled at a time, so that a batch mixes many pictures: examples of one
picture are alike."""
# The optimizer is always AdamW with these constants and a gradient norm of at most 1. Of
# `OptimizerConfig` only `learning_rate` is read.
WARM_UP_STEPS = 300
WEIGHT_DECAY = 0.02
AVERAGE = 0.999
"""Weights are averaged over about the last thousand steps."""

# The completer's examples
UNHIDDEN_KEPT = 0.7  # share of the examples without a hidden part that training uses
JITTER_SCALE = (0.8, 1.3)  # of the crop's side
JITTER_SHIFT = 0.1  # of the crop's side, each way
# Given masks as they are in life: noise moves their outline, parts of them are missing.
CLEAN_SHARE = 0.4  # of the examples keep the true visible mask
OTHERS_SHARE = 0.65  # of the examples know the masks of the other objects
MAX_OUTLINE_NOISE = 0.5  # of the blurred mask's value, by which the outline moves in or out
ERASED_SHARE = 0.25  # of the noisy examples lack what lies in a random box
VISIBLE_WEIGHT = 0.1  # of a pixel inside the visible mask in the cross-entropy: it is given
# In life everything around an object may have a mask, also what lies behind it.
REST_SHARE = 0.5  # of the examples have the rest of the picture, or a part of it, as a neighbour
STUFF_CHANCE = 0.5  # of a region of stuff beside an object: a third of the examples then are such
MIN_STUFF_SHOWN = 0.3  # of such a region
HIDDEN_WEIGHT = 0.3  # of the cross-entropy of whether anything is hidden

# The outliner's examples
MIN_OUTLINED_PIXELS = 60  # below it an object is no example
BOX_SHARE = 0.5  # of the examples have a box
BOX_AND_CLICKS_SHARE = 0.3  # of those with a box have clicks as well
BOX_NOISE = 0.04  # standard deviation of a box's sides, of its width or height
ROUGH_BOX_SHARE = 0.25  # of the boxes have `ROUGH_BOX` times this noise: boxes drawn in haste
ROUGH_BOX = 2.5
SIZE_NOISE = 0.15  # of the crop around a box, in the logarithm
MORE_CLICKS_SHARE = 0.3  # of the examples with clicks have two or three
NEGATIVE_SHARE = 0.3  # of the examples with clicks have one or two beside the object
CLICK_EXTENT = (1.15, 7.0)  # side of the crop around clicks, of the longer side of the object
CLICK_SHIFT = 0.12  # by which that crop is moved, of its side, each way
AREA_FLOOR = 1 / 30  # of the mask's cells: bounds the cross-entropy of tiny objects


# Examples of the completer


def cut_examples(
    sample: Sample, size: int, rng: np.random.Generator
) -> Iterator[UInt8[np.ndarray, "s s 7"]]:
    """Yields the examples of a sample. Crops are moved and scaled at random.

    Planes of an example: colours, inside of the image, visible mask, visible masks of the other
    objects, complete mask.
    """
    objects = masks.union([instance.modal for instance in sample.instances], sample.image.shape[:2])
    for visible, complete in known_masks(sample, objects, rng):
        if masks.area(visible) < MIN_COMPLETED_PIXELS:
            continue
        is_hidden = masks.occlude_rate(visible, complete) >= MIN_HIDDEN_SHARE
        if not is_hidden and rng.random() > UNHIDDEN_KEPT:
            continue
        others = objects & ~visible
        if rng.random() < REST_SHARE:
            is_whole = rng.random() < 0.5
            others |= ~visible if is_whole else draw_region(sample.image, objects, rng) & ~visible
        window = jitter_window(CropWindow.around(visible), rng)
        yield cut_crop(sample.image, window, size, (visible, others, complete))


def known_masks(
    sample: Sample, objects: Mask, rng: np.random.Generator
) -> Iterator[tuple[Mask, Mask]]:
    """Yields the visible and the complete mask of each object whose complete one is known, and of
    regions of stuff, on which objects lie. `objects`: the visible masks of all."""
    for instance in sample.instances:
        if instance.ignore or instance.amodal is None:
            continue
        yield instance.modal, instance.amodal
        if rng.random() < STUFF_CHANCE:
            region = draw_region(sample.image, objects, rng)
            shown = region & ~objects
            if masks.area(shown) >= MIN_STUFF_SHOWN * masks.area(region):
                yield shown, region


def jitter_window(window: CropWindow, rng: np.random.Generator) -> CropWindow:
    """Changes the size and place of a window."""
    side = max(8, round(window.side * rng.uniform(*JITTER_SCALE)))
    shift_x, shift_y = rng.uniform(-JITTER_SHIFT, JITTER_SHIFT, 2) * side
    centre_x, centre_y = window.x + window.side / 2, window.y + window.side / 2
    return CropWindow(
        round(centre_x - side / 2 + shift_x), round(centre_y - side / 2 + shift_y), side
    )


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


def vary_completion(
    planes: UInt8[Array, "m s s 7"], key: Array
) -> tuple[
    Float[Array, "m s s c"], Float[Array, "m s s"], Float[Array, "m s s"], Bool[Array, " m"]
]:
    """Makes crops for the completer. Returns also the visible masks given to it, the complete
    masks, from 0 to 1, and whether anything is hidden.

    Varies examples, hides the others' masks from some, and makes noise on the given masks of most.
    """
    keys = jax.random.split(key, 10)
    count = len(planes)
    planes = vary(planes, keys[:3])
    visible, others, complete = (planes[..., k] / 255 for k in range(4, 7))

    is_clean = jax.random.bernoulli(keys[3], CLEAN_SHARE, (count, 1, 1))
    given = jnp.where(is_clean, visible, disturb(visible, others, keys[4]))
    others = jnp.where(is_clean, others, move_outline(others, keys[5]))
    others_known = jax.random.bernoulli(keys[6], OTHERS_SHARE, (count, 1, 1))
    known = jnp.broadcast_to(others_known, visible.shape)
    masks_of_crop = 255 * jnp.stack([given, others * known, known], axis=-1)
    crops = jnp.concatenate([planes[..., :4], masks_of_crop], axis=-1)
    # What a rough mask lacks is not hidden.
    shown = visible.sum((1, 2)) / jnp.maximum(complete.sum((1, 2)), 1)
    return crops, given, complete, 1 - shown >= MIN_HIDDEN_SHARE


def disturb(
    visible: Float[Array, "m s s"], others: Float[Array, "m s s"], key: Array
) -> Float[Array, "m s s"]:
    """Makes visible masks as finders give them: outlines moved, a part missing, a bit of a
    neighbour."""
    count, size, _ = visible.shape
    keys = jax.random.split(key, 6)
    moved = move_outline(visible, keys[0])

    # A random box is erased: it cuts the mask in two, takes a side away, or makes a hole.
    centre = jax.random.uniform(keys[1], (count, 2), minval=0.25, maxval=0.75)
    half = jax.random.uniform(keys[2], (count, 2), minval=0.01, maxval=0.12)
    grid = (jnp.arange(size) + 0.5) / size
    in_rows = jnp.abs(grid[None, :] - centre[:, :1]) < half[:, :1]
    in_columns = jnp.abs(grid[None, :] - centre[:, 1:]) < half[:, 1:]
    erased = in_rows[:, :, None] & in_columns[:, None, :]
    erases = jax.random.bernoulli(keys[3], ERASED_SHARE, (count, 1, 1))
    kept = jnp.where(erased & erases, 0.0, moved)
    # Where the box would leave less than 60 % of the visible area, nothing is erased: too little of
    # the object would show.
    is_enough = kept.sum((1, 2)) >= 0.6 * visible.sum((1, 2))
    moved = jnp.where(is_enough[:, None, None], kept, moved)

    # In some examples the mask spills over: it takes a bit of a neighbour near the outline.
    near = blur(visible, 5) > 0.08
    patch = low_noise(keys[4], count, size, 8) > 1.0
    spills = jax.random.bernoulli(keys[5], 0.25, (count, 1, 1))
    return jnp.where(near & patch & (others > 0.5) & spills, 1.0, moved)


def move_outline(mask: Float[Array, "m s s"], key: Array) -> Float[Array, "m s s"]:
    """Moves the outlines of masks in or out, evenly and by smooth noise."""
    count, size, _ = mask.shape
    keys = jax.random.split(key, 3)
    soft = blur(mask, 4)
    even = jax.random.uniform(keys[0], (count, 1, 1), minval=-1) * MAX_OUTLINE_NOISE * 0.7
    uneven = low_noise(keys[1], count, size, 12) * jax.random.uniform(
        keys[2], (count, 1, 1), maxval=0.25
    )
    # The outline is where the blurred mask crosses 0.5. Far from the mask nothing is added evenly.
    noisy = soft + even * (soft > 0.01) + uneven
    return (noisy > 0.5).astype(jnp.float32)


def blur(mask: Float[Array, "m s s"], radius: int) -> Float[Array, "m s s"]:
    """Takes the mean over a square of 2 radius + 1 pixels, twice: nearly a Gaussian."""
    side = 2 * radius + 1
    for _ in range(2):
        mask = jax.lax.reduce_window(mask, 0.0, jax.lax.add, (1, side, 1), (1, 1, 1), "SAME")
        mask = jax.lax.reduce_window(mask, 0.0, jax.lax.add, (1, 1, side), (1, 1, 1), "SAME")
        mask = mask / side**2
    return mask


def low_noise(key: Array, count: int, size: int, cells: int) -> Float[Array, "m s s"]:
    """Draws smooth noise of variance about one, with `cells` independent values each way."""
    noise = jax.random.normal(key, (count, cells, cells))
    return jax.image.resize(noise, (count, size, size), "cubic")


def mean_of_objects(values: Float[Array, " m"], target: Float[Array, "m h w"]) -> Float[Array, ""]:
    """Computes the mean over the examples that have an object."""
    has_object = target.any((1, 2)).astype(jnp.float32)
    return (values * has_object).sum() / jnp.maximum(has_object.sum(), 1)


def true_iou(answer: Bool[Array, "m h w"], target: Bool[Array, "m h w"]) -> Float[Array, " m"]:
    """Computes the IoU of each mask, for the head that predicts it."""
    overlap = (answer & target).sum((1, 2))
    return overlap / jnp.maximum((answer | target).sum((1, 2)), 1)


def completion_loss(
    output: CropOutput,
    given: Float[Array, "m s s"],
    complete: Float[Array, "m s s"],
    is_hidden: Bool[Array, " m"],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Adds up cross-entropy, soft IoU of the whole answer, dice of what is added, the squared error
    of the predicted IoU, and the cross-entropy of whether anything is hidden.

    Means over the examples that have an object.
    """
    logits, iou, hidden_logit = output
    assert hidden_logit is not None
    target = (complete > 0.5).astype(jnp.float32)
    entropy = optax.sigmoid_binary_cross_entropy(logits, target)
    weight = jnp.where(given > 0.5, VISIBLE_WEIGHT, 1.0)
    # A sum over all pixels of the crop, as a share of the object's area: an error of a tenth of the
    # object costs about the same for all sizes. 32 pixels more bound it for tiny objects.
    entropy = (entropy * weight).sum((1, 2)) / (target.sum((1, 2)) + 32)

    probability = jax.nn.sigmoid(logits)
    answer = jnp.maximum(given, probability)
    intersection = (answer * target).sum((1, 2))
    union = (answer + target - answer * target).sum((1, 2))
    soft_iou = intersection / jnp.maximum(union, 1)

    outside = 1 - given
    added, hidden = probability * outside, target * outside
    # With 16 above and below it is 1 where nothing is hidden and nothing added, and a few wrong
    # pixels there do not bring it to 0.
    overlap = (added * hidden).sum((1, 2))
    num_pixels = added.sum((1, 2)) + hidden.sum((1, 2))
    dice = (2 * overlap + 16) / (num_pixels + 16)

    is_answer = (given > 0.5) | (logits > 0)
    iou_error = (iou - true_iou(is_answer, target > 0.5)) ** 2
    hidden_entropy = optax.sigmoid_binary_cross_entropy(hidden_logit, is_hidden)

    mean = partial(mean_of_objects, target=target)
    parts = {
        "entropy": mean(entropy),
        "soft_iou": mean(soft_iou),
        "dice": mean(dice),
        "iou_error": mean(iou_error),
        "hidden_entropy": mean(hidden_entropy),
    }
    loss = parts["entropy"] + 1 - parts["soft_iou"] + 0.5 * (1 - parts["dice"])
    return loss + parts["iou_error"] + HIDDEN_WEIGHT * parts["hidden_entropy"], parts


def completer_loss(
    completer: CropUNet, planes: UInt8[Array, "m s s 7"], key: Array
) -> tuple[Float[Array, ""], Values]:
    """Computes the loss of a training step, and its parts."""
    crops, given, complete, is_hidden = vary_completion(planes, key)
    return completion_loss(completer(crops), given, complete, is_hidden)


# Examples of the outliner


def cut_prompt_examples(
    sample: Sample, size: int, rng: np.random.Generator
) -> Iterator[UInt8[np.ndarray, "s s c"]]:
    """Yields one example of each object of a sample, with a random prompt."""
    for instance in sample.instances:
        visible = instance.modal
        if instance.ignore or masks.area(visible) < MIN_OUTLINED_PIXELS:
            continue
        prompt = draw_prompt(visible, rng)
        window = prompt_window(prompt, visible, rng)
        crop = cut_prompt_crop(sample.image, window, size, prompt)
        target = window.cut(visible, size)
        yield np.concatenate([crop, target[..., None]], axis=2)


def draw_prompt(visible: Mask, rng: np.random.Generator) -> Prompt:
    """Draws a box, clicks or both, as a person would give them for an object."""
    box = noisy_box(visible, rng) if rng.random() < BOX_SHARE else None
    if box is not None and rng.random() > BOX_AND_CLICKS_SHARE:
        return Prompt(box)

    count = int(rng.integers(2, 4)) if rng.random() < MORE_CLICKS_SHARE else 1
    clicks = positive_clicks(visible, count, rng)
    if rng.random() < NEGATIVE_SHARE:
        clicks += negative_clicks(visible, int(rng.integers(1, 3)), rng)
    return Prompt(box, tuple(clicks))


def noisy_box(visible: Mask, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Draws the box of a mask with noise on each side."""
    x0, y0, x1, y1 = masks.box(visible)
    scale = BOX_NOISE * (ROUGH_BOX if rng.random() < ROUGH_BOX_SHARE else 1.0)
    lengths = np.array([x1 - x0, y1 - y0, x1 - x0, y1 - y0])
    moved = np.array([x0, y0, x1, y1]) + rng.normal(0, scale, 4) * lengths
    left, top, right, bottom = moved.tolist()
    if right - left < 3 or bottom - top < 3:
        return float(x0), float(y0), float(x1), float(y1)
    return left, top, right, bottom


def positive_clicks(visible: Mask, count: int, rng: np.random.Generator) -> list[Click]:
    """Draws clicks on a mask, rather far from its outline than near it."""
    x0, y0, x1, y1 = masks.box(visible)
    inner = np.pad(visible[y0:y1, x0:x1], 1)
    distance = np.asarray(ndimage.distance_transform_edt(inner))[1:-1, 1:-1]
    weights = distance.ravel() ** 2
    places = rng.choice(weights.size, count, p=weights / weights.sum())
    rows, columns = np.unravel_index(places, distance.shape)
    return [
        Click(float(x0 + column) + 0.5, float(y0 + row) + 0.5)
        for row, column in zip(rows, columns, strict=True)
    ]


def negative_clicks(visible: Mask, count: int, rng: np.random.Generator) -> list[Click]:
    """Draws up to `count` clicks beside a mask and near it."""
    height, width = visible.shape
    x0, y0, x1, y1 = masks.box(visible)
    margin = 0.3 * max(x1 - x0, y1 - y0)
    clicks = []
    for _ in range(count):
        x = rng.uniform(x0 - margin, x1 + margin)
        y = rng.uniform(y0 - margin, y1 + margin)
        is_inside = 0 <= x < width and 0 <= y < height
        if is_inside and not visible[int(y), int(x)]:
            clicks.append(Click(x, y, is_positive=False))
    return clicks


def prompt_window(prompt: Prompt, visible: Mask, rng: np.random.Generator) -> CropWindow:
    """Draws a crop as the outliner sees it: around the box, or of any size around the first
    click."""
    if prompt.box is not None:
        return window_of_box(prompt.box, BOX_EXTENT * math.exp(rng.uniform(-1, 1) * SIZE_NOISE))

    height, width = visible.shape
    x0, y0, x1, y1 = masks.box(visible)
    length = max(x1 - x0, y1 - y0)
    smallest, largest = CLICK_EXTENT
    side = length * math.exp(rng.uniform(math.log(smallest), math.log(largest)))
    whole = max(smallest * length, WHOLE_EXTENT * max(height, width))
    side = max(MIN_WINDOW_SIDE, int(min(side, whole)))
    shift_x, shift_y = rng.uniform(-CLICK_SHIFT, CLICK_SHIFT, 2) * side
    first = prompt.clicks[0]
    return window_at(first.x + shift_x, first.y + shift_y, side, height, width)


def vary_outline(
    planes: UInt8[Array, "m s s 8"], key: Array
) -> tuple[Float[Array, "m s s c"], Float[Array, "m _s _s"]]:
    """Makes crops for the outliner, and targets at half of their resolution."""
    planes = vary(planes, jax.random.split(key, 3))
    shares = reduce(planes[..., NUM_CHANNELS] / 255, "m (h p) (w q) -> m h w", "mean", p=2, q=2)
    return planes[..., :NUM_CHANNELS], (shares > 0.5).astype(jnp.float32)


def outline_loss(
    logits: Float[Array, "m h w"], iou: Float[Array, " m"], target: Float[Array, "m h w"]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Adds up cross-entropy, soft IoU, and the squared error of the predicted IoU.

    Means over the examples that have an object.
    """
    area = target.sum((1, 2))
    entropy = optax.sigmoid_binary_cross_entropy(logits, target).sum((1, 2))
    entropy = entropy / (area + AREA_FLOOR * target[0].size)

    probability = jax.nn.sigmoid(logits)
    intersection = (probability * target).sum((1, 2))
    union = (probability + target - probability * target).sum((1, 2))
    soft_iou = (intersection + 1) / (union + 1)

    of_answer = true_iou(logits > 0, target > 0.5)
    iou_error = (iou - of_answer) ** 2

    mean = partial(mean_of_objects, target=target)
    parts = {
        "entropy": mean(entropy),
        "soft_iou": mean(soft_iou),
        "iou_error": mean(iou_error),
        "iou": mean(of_answer),
    }
    return parts["entropy"] + 1 - parts["soft_iou"] + parts["iou_error"], parts


def outliner_loss(
    outliner: CropUNet, planes: UInt8[Array, "m s s 8"], key: Array
) -> tuple[Float[Array, ""], Values]:
    """Computes the loss of a training step, and its parts."""
    crops, target = vary_outline(planes, key)
    output = outliner(crops)
    return outline_loss(output.mask_logits, output.iou, target)


# The task

PARTS = {
    "completer": (make_completer, completer_loss, cut_examples),
    "outliner": (make_outliner, outliner_loss, cut_prompt_examples),
}
"""What builds the network of a part, its loss, and what cuts its examples."""


class CropTask:
    """Trains a completer or an outliner (training/loop.py).

    Attributes:
        part: "completer" or "outliner".
        constants: The weights of its frozen backbone.
    """

    def __init__(self, config: Config, source: Source, mesh: Mesh, evaluate: Evaluate):
        """Builds the network of a resolved configuration with random weights. `source`: the
        pictures. Raises InputError if there is nothing to learn from in them."""
        self.part = config.train.part
        self.evaluate = evaluate
        self._config, self._mesh = config, mesh
        build, loss, cut = PARTS[self.part]
        sizes = getattr(config.model, self.part)
        self._backbone = sizes.efficientnet
        self._batches = example_batches(source, config, partial(cut, size=sizes.size))
        model = build(sizes, rngs=nnx.Rngs(config.train.seed))
        graphdef, self._params, self.constants = nnx.split(model, nnx.Param, ...)
        self._optimizer = make_optimizer(config)
        step = partial(
            train_step, graphdef=graphdef, loss=loss, optimizer=self._optimizer, config=config.train
        )
        self._step = jax.jit(step, donate_argnums=0)

    def set_weights(self, weights: nnx.State) -> None:
        """Starts from these weights."""
        self._params, self.constants = nnx.split_state(weights, nnx.Param, ...)

    def load_pretrained(self) -> None:
        """Starts from the published backbone, if it has one. Raises InputError if that cannot be
        read or is of other sizes."""
        if self._backbone:
            published = find_model(self._backbone, f"--model.{self.part}.efficientnet")
            self.constants["efficientnet"] = first_blocks(self.constants["efficientnet"], published)

    def start(self) -> tuple[TrainState, grain.DatasetIterator]:
        """Returns the state before the first step, and all batches. Puts all weights on the
        devices."""
        self.constants = place(self._mesh, self.constants)
        state = init_state(self._params, self._optimizer, averaged=True)
        return place(self._mesh, state), self._batches

    def step(
        self, state: TrainState, batch: UInt8[np.ndarray, "m s s c"]
    ) -> tuple[TrainState, Values]:
        """Trains on one batch."""
        return self._step(state, self.constants, shard_batch(self._mesh, batch))


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Builds AdamW with a warm-up and a cosine decay over all steps."""
    steps = config.train.steps
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.optimizer.learning_rate, min(WARM_UP_STEPS, steps // 10 + 1), steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=WEIGHT_DECAY))


def train_step(
    state: TrainState,
    constants: nnx.State,
    planes: UInt8[Array, "m s s c"],
    *,
    graphdef: nnx.GraphDef,
    loss: Callable[..., tuple[Array, Values]],
    optimizer: optax.GradientTransformation,
    config: LoopConfig,
) -> tuple[TrainState, Values]:
    """Takes one step; the number of the step decides its random variations."""
    key = jax.random.fold_in(jax.random.key(config.seed), state.step + 1)

    def loss_of(params: nnx.State) -> tuple[Array, Values]:
        return loss(nnx.merge(graphdef, params, constants), planes, key)

    with jax.default_matmul_precision(JAX_PRECISION[config.matmul_precision]):
        (total, parts), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return update(state, grads, optimizer, AVERAGE), parts | {"loss": total}


# Batches of examples


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


def example_batches(source: Source, config: Config, cut: CutExamples) -> grain.DatasetIterator:
    """Returns an endless iterator of batches `uint8 [m s s c]` that mix the examples of many
    pictures, and that continues exactly from its state.

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
    return iter(batches.map(lambda batch: batch[process::count]))
