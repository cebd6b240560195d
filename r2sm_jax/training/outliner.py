"""Training of the outliner: crops around boxes and clicks, and what is learned.

An example is a crop around a box or clicks that mean one object, and the object's visible mask.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import reduce
from jaxtyping import Array, Float, Key, UInt8
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.crops import (
    BOX_EXTENT,
    MIN_WINDOW_SIDE,
    WHOLE_EXTENT,
    CropWindow,
    cut_prompt_crop,
    window_at,
    window_of_box,
)
from r2sm_jax.data.dataset import Sample
from r2sm_jax.data.masks import Mask
from r2sm_jax.models.crop_unet import NUM_CHANNELS, CropOutput, CropUNet, make_outliner
from r2sm_jax.query import Click, Prompt
from r2sm_jax.training.crops import CropPart, object_weight, true_iou, vary
from r2sm_jax.training.step import Loss, Losses

MIN_OUTLINED_PIXELS = 60  # below it an object is no example
BOX_SHARE = 0.5  # of the examples have a box
BOX_AND_CLICKS_SHARE = 0.3  # of those with a box have clicks as well
BOX_NOISE = 0.04  # standard deviation of a box's sides, of its width or height
ROUGH_BOX_SHARE = 0.25  # of the boxes have `ROUGH_BOX` times this noise: boxes drawn in haste
ROUGH_BOX = 2.5
SIZE_NOISE = 0.15  # of the crop around a box, in the logarithm
MORE_CLICKS_SHARE = 0.3  # of the examples with clicks have two or three
NEGATIVE_SHARE = 0.3  # of the examples with clicks have one or two beside the object
CLICK_EXTENT = (0.35, 7.0)
"""Side of the crop around clicks, of the longer side of the object. Clicks do not say how large the
object is, so some of the crops that are read show a part of it. Training on such crops teaches the
predicted IoU to be low there."""
CLICK_SHIFT = 0.12  # by which that crop is moved, of its side, each way
AREA_FLOOR = 1 / 30  # of the mask's cells: bounds the cross-entropy of tiny objects

LOSS_WEIGHTS = {"entropy": 1.0, "soft_iou_error": 1.0, "iou_error": 1.0, "iou": 0.0}


# Examples


def cut_prompt_examples(
    sample: Sample, size: int, rng: np.random.Generator
) -> Iterator[UInt8[np.ndarray, "s s c"]]:
    """Yields one example of each object of a sample, with a random prompt."""
    for instance in sample.instances:
        visible = instance.modal
        if instance.ignore or masks.area(visible) < MIN_OUTLINED_PIXELS:
            continue
        prompt = random_prompt(visible, rng)
        window = prompt_window(prompt, visible, rng)
        crop = cut_prompt_crop(sample.image, window, size, prompt)
        target = window.cut(visible, size)[..., None]
        share = np.full_like(target, math.ceil(255 * shown_share(window, visible)))
        yield np.concatenate([crop, target, share], axis=2)


def random_prompt(visible: Mask, rng: np.random.Generator) -> Prompt:
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
    side = max(MIN_WINDOW_SIDE, int(min(side, WHOLE_EXTENT * max(height, width))))
    shift_x, shift_y = rng.uniform(-CLICK_SHIFT, CLICK_SHIFT, 2) * side
    first = prompt.clicks[0]
    return window_at(first.x + shift_x, first.y + shift_y, side, height, width)


def shown_share(window: CropWindow, visible: Mask) -> float:
    """Computes the share of a mask's area that a window shows."""
    rows = slice(max(0, window.y), window.y + window.side)
    columns = slice(max(0, window.x), window.x + window.side)
    return masks.area(visible[rows, columns]) / masks.area(visible)


# Losses


class OutlineTargets(NamedTuple):
    """Crops for the outliner, and what it should answer."""

    crops: Float[Array, "m s s c"]
    visible: Float[Array, "m _s _s"]
    """At half of the crop's resolution; 0 or 1."""
    shown_share: Float[Array, " m"]
    """Of the object's visible area that the crop shows."""
    weight: Float[Array, " m"]


def vary_outline(planes: UInt8[Array, "m s s 9"], key: Key[Array, ""]) -> OutlineTargets:
    """Varies examples."""
    planes = vary(planes, jax.random.split(key, 3))
    shares = reduce(planes[..., NUM_CHANNELS] / 255, "m (h p) (w q) -> m h w", "mean", p=2, q=2)
    visible = (shares > 0.5).astype(jnp.float32)
    shown = planes[:, 0, 0, NUM_CHANNELS + 1] / 255
    return OutlineTargets(planes[..., :NUM_CHANNELS], visible, shown, object_weight(visible > 0.5))


def outliner_losses(outliner: CropUNet, targets: OutlineTargets) -> Losses:
    """Computes the losses of some examples."""
    return outline_losses(outliner(targets.crops), targets)


def outline_losses(output: CropOutput, targets: OutlineTargets) -> Losses:
    """Compares answers with visible masks: cross-entropy, soft IoU, and the squared error of the
    predicted IoU. `iou` is that of the answers with whole objects, also beyond the crops."""
    logits, target = output.mask_logits, targets.visible
    area = target.sum((1, 2))
    entropy = optax.sigmoid_binary_cross_entropy(logits, target).sum((1, 2))
    entropy = entropy / (area + AREA_FLOOR * target[0].size)

    probability = jax.nn.sigmoid(logits)
    intersection = (probability * target).sum((1, 2))
    union = (probability + target - probability * target).sum((1, 2))
    soft_iou = (intersection + 1) / (union + 1)

    beyond = area * (1 / targets.shown_share - 1)
    iou = true_iou(logits > 0, target > 0.5, beyond)
    of_objects = {
        "entropy": entropy,
        "soft_iou_error": 1 - soft_iou,
        "iou_error": (output.iou - iou) ** 2,
        "iou": iou,
    }
    return {name: (values * targets.weight).sum() for name, values in of_objects.items()}


LOSS = Loss(vary_outline, outliner_losses, LOSS_WEIGHTS)
OUTLINER = CropPart(make_outliner, cut_prompt_examples, LOSS)
