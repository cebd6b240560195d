"""Training of the completer: crops around visible masks, how they are varied, and what is learned.

An example is a crop around the visible mask of one object whose complete mask is known. Hidden
objects come from pictures in which others lie over them. Objects that nothing hides are examples,
too: the completer must learn to add nothing to them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Key, UInt8
from PIL import Image, ImageDraw, ImageFilter
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.crops import MIN_COMPLETED_PIXELS, MIN_HIDDEN_SHARE, CropWindow, cut_crop
from r2sm_jax.data.dataset import Sample
from r2sm_jax.data.masks import Mask
from r2sm_jax.models.crop_unet import CropOutput, CropUNet, make_completer
from r2sm_jax.training.crops import CropPart, object_weight, true_iou, vary
from r2sm_jax.training.step import Loss, Losses

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

LOSS_WEIGHTS = {
    "entropy": 1.0,
    "soft_iou_error": 1.0,
    "dice_error": 0.5,
    "iou_error": 1.0,
    "hidden_entropy": 0.3,
}


# Examples


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


# Variations


class CompletionTargets(NamedTuple):
    """Crops for the completer, and what it should answer."""

    crops: Float[Array, "m s s c"]
    given: Float[Array, "m s s"]
    """The visible masks that it reads, from 0 to 1."""
    complete: Float[Array, "m s s"]
    is_hidden: Bool[Array, " m"]
    """Whether anything is hidden."""
    weight: Float[Array, " m"]


def vary_completion(planes: UInt8[Array, "m s s 7"], key: Key[Array, ""]) -> CompletionTargets:
    """Varies examples, hides the others' masks from some, and makes noise on the given masks of
    most."""
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
    is_hidden = 1 - shown >= MIN_HIDDEN_SHARE
    return CompletionTargets(crops, given, complete, is_hidden, object_weight(complete > 0.5))


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


# Losses


def completer_losses(completer: CropUNet, targets: CompletionTargets) -> Losses:
    """Computes the losses of some examples."""
    return completion_losses(completer(targets.crops), targets)


def completion_losses(output: CropOutput, targets: CompletionTargets) -> Losses:
    """Compares answers with complete masks: cross-entropy, soft IoU of the whole answer, dice of
    what is added, the squared error of the predicted IoU, and the cross-entropy of whether anything
    is hidden."""
    logits, iou, hidden_logit = output
    assert hidden_logit is not None
    given, target = targets.given, (targets.complete > 0.5).astype(jnp.float32)
    entropy = optax.sigmoid_binary_cross_entropy(logits, target)
    pixel_weight = jnp.where(given > 0.5, VISIBLE_WEIGHT, 1.0)
    # A sum over all pixels of the crop, as a share of the object's area: an error of a tenth of the
    # object costs about the same for all sizes. 32 pixels more bound it for tiny objects.
    entropy = (entropy * pixel_weight).sum((1, 2)) / (target.sum((1, 2)) + 32)

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
    of_objects = {
        "entropy": entropy,
        "soft_iou_error": 1 - soft_iou,
        "dice_error": 1 - dice,
        "iou_error": (iou - true_iou(is_answer, target > 0.5)) ** 2,
        "hidden_entropy": optax.sigmoid_binary_cross_entropy(hidden_logit, targets.is_hidden),
    }
    return {name: (values * targets.weight).sum() for name, values in of_objects.items()}


LOSS = Loss(vary_completion, completer_losses, LOSS_WEIGHTS)
COMPLETER = CropPart(make_completer, cut_examples, LOSS)


# Regions of stuff: walls, floors and tables lie behind objects, and photos have no masks of them. A
# region of a picture stands for such a thing; the objects that lie on it hide parts of it.

REGION_KINDS = ("half", "band", "polygon", "blob", "segments", "segments")
"""What is drawn, equally often; segments twice, since they are of the photo itself."""
MAX_WAVINESS = 0.06  # by which an edge departs from a line, in longer sides of the picture
MIN_SEGMENTS, MAX_SEGMENTS = 4, 10  # of a photo
COLOUR_WEIGHT = 2.0  # of a difference in colour (0 to 1), against one in place, in longer sides


def draw_region(image: UInt8[np.ndarray, "H W 3"], objects: Mask, rng: np.random.Generator) -> Mask:
    """Draws a region `[H W]`: a half of the picture, a band, a polygon, a blob, or some segments of
    the background. `objects`: the visible masks of all objects."""
    height, width = objects.shape
    kind = rng.choice(REGION_KINDS)
    if kind == "segments":
        return draw_segments(image, objects, rng)
    if kind == "polygon":
        return draw_polygon(height, width, rng)

    waves = smooth_noise(height, width, rng)
    if kind == "blob":
        return waves > np.quantile(waves, rng.uniform(0.4, 0.8))

    rows, columns = np.mgrid[:height, :width] / max(height, width)
    angle = rng.uniform(0, 2 * np.pi)
    row, column = rng.uniform(0.15, 0.85, 2) * (rows[-1, -1], columns[-1, -1])
    distance = np.sin(angle) * (rows - row) + np.cos(angle) * (columns - column)
    distance += rng.uniform(0, MAX_WAVINESS) * waves
    return np.abs(distance) < rng.uniform(0.05, 0.2) if kind == "band" else distance > 0


def draw_polygon(height: int, width: int, rng: np.random.Generator) -> Mask:
    """Draws a polygon of three to seven corners around a point of the picture."""
    angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 8)))
    radii = rng.uniform(0.15, 0.6, len(angles)) * max(height, width)
    x, y = rng.uniform(0.15, 0.85, 2) * (width, height)
    corners = np.stack([x + radii * np.cos(angles), y + radii * np.sin(angles)], axis=1)
    picture = Image.new("1", (width, height))
    ImageDraw.Draw(picture).polygon(corners.ravel().tolist(), fill=1)
    return np.array(picture)


def draw_segments(
    image: UInt8[np.ndarray, "H W 3"], objects: Mask, rng: np.random.Generator
) -> Mask:
    """Draws one to three segments of the background: what is like a pixel of it, in colour and
    place. Behind an object is what is next to it.

    Where objects cover the whole picture, the region is empty.
    """
    if objects.all():
        return np.zeros_like(objects)
    height, width = objects.shape
    smooth = Image.fromarray(image).filter(ImageFilter.BoxBlur(5))
    colours = np.asarray(smooth, np.float32) / 255
    places = np.moveaxis(np.mgrid[:height, :width], 0, -1) / max(height, width)
    features = np.concatenate([COLOUR_WEIGHT * colours, places], axis=-1, dtype=np.float32)

    count = rng.integers(MIN_SEGMENTS, MAX_SEGMENTS + 1)
    seeds = features[~objects][rng.integers(masks.area(~objects), size=count)]
    distances = np.stack([((features - seed) ** 2).sum(-1) for seed in seeds])
    chosen = distances.argmin(0) < rng.integers(1, 4)
    nearest = ndimage.distance_transform_edt(objects, return_distances=False, return_indices=True)
    rows, columns = np.asarray(nearest)
    return chosen[rows, columns]


def smooth_noise(
    height: int, width: int, rng: np.random.Generator
) -> Float[np.ndarray, "{height} {width}"]:
    """Draws smooth noise of variance about one."""
    cells = rng.integers(4, 8, 2)
    noise = Image.fromarray(rng.normal(size=cells).astype(np.float32))
    return np.array(noise.resize((width, height), Image.Resampling.BICUBIC))
