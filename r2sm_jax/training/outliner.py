"""Training of the outliner: examples from any sample with visible masks, loss and step.

An example is a crop around a box or clicks that mean one object, and the object's visible mask.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import reduce
from flax import nnx
from jaxtyping import Array, Float, UInt8
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.crops import CropWindow
from r2sm_jax.data.dataset import Sample
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.prompt_crops import (
    BOX_EXTENT,
    MIN_WINDOW_SIDE,
    WHOLE_EXTENT,
    cut_prompt_crop,
    window_at,
    window_of_box,
)
from r2sm_jax.models.outliner import NUM_CHANNELS
from r2sm_jax.query import Click, Prompt
from r2sm_jax.training.parts import LossOf

MIN_VISIBLE_PIXELS = 60  # below it an object is no example
NUM_PLANES = NUM_CHANNELS + 1
"""Planes of an example: the channels of a crop, and the visible mask."""

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


def cut_prompt_examples(
    sample: Sample, size: int, rng: np.random.Generator
) -> Iterator[UInt8[np.ndarray, "s s c"]]:
    """One example of each object of a sample, with a random prompt."""
    for instance in sample.instances:
        visible = instance.modal
        if instance.ignore or masks.area(visible) < MIN_VISIBLE_PIXELS:
            continue
        prompt = draw_prompt(visible, rng)
        window = _window(prompt, visible, rng)
        crop = cut_prompt_crop(sample.image, window, size, prompt)
        target = window.cut(visible * np.uint8(255), size)
        yield np.concatenate([crop, target[..., None]], axis=2)


def draw_prompt(visible: Mask, rng: np.random.Generator) -> Prompt:
    """A box, clicks or both, as a person would give them for an object."""
    box = noisy_box(visible, rng) if rng.random() < BOX_SHARE else None
    if box is not None and rng.random() > BOX_AND_CLICKS_SHARE:
        return Prompt(box)

    count = int(rng.integers(2, 4)) if rng.random() < MORE_CLICKS_SHARE else 1
    clicks = positive_clicks(visible, count, rng)
    if rng.random() < NEGATIVE_SHARE:
        clicks += negative_clicks(visible, int(rng.integers(1, 3)), rng)
    return Prompt(box, tuple(clicks))


def noisy_box(visible: Mask, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """The box of a mask with noise on each side."""
    x0, y0, x1, y1 = masks.box(visible)
    scale = BOX_NOISE * (ROUGH_BOX if rng.random() < ROUGH_BOX_SHARE else 1.0)
    lengths = np.array([x1 - x0, y1 - y0, x1 - x0, y1 - y0])
    moved = np.array([x0, y0, x1, y1]) + rng.normal(0, scale, 4) * lengths
    left, top, right, bottom = moved.tolist()
    if right - left < 3 or bottom - top < 3:
        return float(x0), float(y0), float(x1), float(y1)
    return left, top, right, bottom


def positive_clicks(visible: Mask, count: int, rng: np.random.Generator) -> list[Click]:
    """Clicks on a mask, rather far from its outline than near it."""
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
    """Up to `count` clicks beside a mask and near it."""
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


def _window(prompt: Prompt, visible: Mask, rng: np.random.Generator) -> CropWindow:
    """A crop as the outliner sees it: around the box, or of any size around the first click."""
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


def augment(
    planes: UInt8[Array, "m s s c"], key: Array
) -> tuple[Float[Array, "m s s d"], Float[Array, "m _s _s"]]:
    """Crops for the outliner, mirrored and of other brightness, and targets at half of their
    resolution."""
    keys = jax.random.split(key, 3)
    count = len(planes)
    flip = jax.random.bernoulli(keys[0], 0.5, (count, 1, 1, 1))
    planes = jnp.where(flip, planes[:, :, ::-1], planes).astype(jnp.float32)

    gain = 1 + 0.25 * jax.random.uniform(keys[1], (count, 1, 1, 3), minval=-1)
    gain = gain * (1 + 0.3 * jax.random.uniform(keys[2], (count, 1, 1, 1), minval=-1))
    colours = jnp.clip(planes[..., :3] * gain, 0, 255)
    crops = jnp.concatenate([colours, planes[..., 3:NUM_CHANNELS]], axis=-1)
    shares = reduce(planes[..., NUM_CHANNELS] / 255, "m (h p) (w q) -> m h w", "mean", p=2, q=2)
    return crops, (shares > 0.5).astype(jnp.float32)


def outline_loss(
    logits: Float[Array, "m h w"], iou: Float[Array, " m"], target: Float[Array, "m h w"]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Cross-entropy, soft IoU, and the squared error of the predicted IoU.

    Means over the examples that have an object.
    """
    area = target.sum((1, 2))
    entropy = optax.sigmoid_binary_cross_entropy(logits, target).sum((1, 2))
    entropy = entropy / (area + AREA_FLOOR * target[0].size)

    probability = jax.nn.sigmoid(logits)
    intersection = (probability * target).sum((1, 2))
    union = (probability + target - probability * target).sum((1, 2))
    soft_iou = (intersection + 1) / (union + 1)

    answer = logits > 0
    is_target = target > 0.5
    overlap = (answer & is_target).sum((1, 2))
    true_iou = overlap / jnp.maximum((answer | is_target).sum((1, 2)), 1)
    iou_error = (iou - true_iou) ** 2

    has_object = (area > 0).astype(jnp.float32)

    def mean(values: Float[Array, " m"]) -> Float[Array, ""]:
        return (values * has_object).sum() / jnp.maximum(has_object.sum(), 1)

    parts = {
        "entropy": mean(entropy),
        "soft_iou": mean(soft_iou),
        "iou_error": mean(iou_error),
        "iou": mean(true_iou),
    }
    return parts["entropy"] + 1 - parts["soft_iou"] + parts["iou_error"], parts


def make_loss(graphdef: Any) -> LossOf:
    """The loss of a training step, by the weights of the outliner and of its frozen backbone."""

    def loss_of(
        weights: nnx.State, frozen: nnx.State, planes: UInt8[Array, "m s s c"], key: Array
    ) -> tuple[Array, dict[str, Array]]:
        crops, target = augment(planes, key)
        logits, iou = nnx.merge(graphdef, weights, frozen)(crops)
        return outline_loss(logits, iou, target)

    return loss_of
