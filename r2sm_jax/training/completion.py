"""Training of the completer: examples from any sample with complete masks, loss and step.

An example is a crop around the visible mask of one object. Hidden objects come from pictures in
which others lie over them. Objects that nothing hides are examples, too: the completer must learn
to add nothing to them.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, UInt8

from r2sm_jax.data import masks
from r2sm_jax.data.crops import CropWindow, cut_crop
from r2sm_jax.data.dataset import Sample
from r2sm_jax.models.completion import make_inputs
from r2sm_jax.training.parts import LossOf

MIN_VISIBLE_PIXELS = 40  # below it a visible mask says too little about its object
MIN_HIDDEN_SHARE = 0.05  # from which on an object counts as hidden
UNHIDDEN_KEPT = 0.35  # share of the examples without a hidden part that training uses
JITTER_SCALE = (0.8, 1.3)  # of the crop's side
JITTER_SHIFT = 0.1  # of the crop's side, each way

# Given masks as they are in life: noise moves their outline, parts of them are missing.
CLEAN_SHARE = 0.4  # of the examples keep the true visible mask
OTHERS_SHARE = 0.65  # of the examples know the masks of the other objects
MAX_OUTLINE_NOISE = 0.5  # of the blurred mask's value, by which the outline moves in or out
ERASED_SHARE = 0.25  # of the noisy examples lack what lies in a random box
VISIBLE_WEIGHT = 0.1  # of a pixel inside the visible mask in the cross-entropy: it is given


def cut_examples(
    sample: Sample, size: int, rng: np.random.Generator | None = None
) -> Iterator[UInt8[np.ndarray, "s s 7"]]:
    """The examples of a sample; with `rng`, crops are moved and scaled at random.

    Planes of an example: colours, inside of the image, visible mask, visible masks of the other
    objects, complete mask.
    """
    image = sample.image
    visible_masks = [instance.modal for instance in sample.instances]
    # How many visible masks cover a pixel: the others' masks are those without one's own.
    counts = np.sum(visible_masks, axis=0, dtype=np.int32) if visible_masks else None
    for instance in sample.instances:
        if instance.ignore or instance.amodal is None:
            continue
        visible, complete = instance.modal, instance.amodal
        if masks.area(visible) < MIN_VISIBLE_PIXELS:
            continue
        is_hidden = masks.occlude_rate(visible, complete) >= MIN_HIDDEN_SHARE
        if rng is not None and not is_hidden and rng.random() > UNHIDDEN_KEPT:
            continue

        window = CropWindow.around(visible)
        if rng is not None:
            window = jitter_window(window, rng)
        others = (counts - visible) > 0
        yield cut_crop(image, window, size, (visible, others, complete))


def jitter_window(window: CropWindow, rng: np.random.Generator) -> CropWindow:
    """The window at another size and place."""
    side = max(8, round(window.side * rng.uniform(*JITTER_SCALE)))
    shift_x, shift_y = rng.uniform(-JITTER_SHIFT, JITTER_SHIFT, 2) * side
    centre_x, centre_y = window.x + window.side / 2, window.y + window.side / 2
    return CropWindow(
        round(centre_x - side / 2 + shift_x), round(centre_y - side / 2 + shift_y), side
    )


def augment(
    planes: UInt8[Array, "m s s 7"], key: Array
) -> tuple[Float[Array, "m s s c"], Float[Array, "m s s"], Float[Array, "m s s"]]:
    """Inputs of the completer, the visible masks given to it, and the complete masks.

    Mirrors examples, changes brightness, hides the others' masks from some, and makes noise on the
    given masks of most.
    """
    keys = jax.random.split(key, 10)
    count = planes.shape[0]
    flip = jax.random.bernoulli(keys[0], 0.5, (count, 1, 1, 1))
    planes = jnp.where(flip, planes[:, :, ::-1], planes)

    gain = 1 + 0.25 * jax.random.uniform(keys[1], (count, 1, 1, 3), minval=-1)
    gain = gain * (1 + 0.3 * jax.random.uniform(keys[2], (count, 1, 1, 1), minval=-1))
    colours = jnp.clip(planes[..., :3] * gain, 0, 255)
    inside, visible, others, complete = (planes[..., k] / 255.0 for k in range(3, 7))

    is_clean = jax.random.bernoulli(keys[3], CLEAN_SHARE, (count,))
    noisy = disturb(visible, others, keys[4])
    given = jnp.where(is_clean[:, None, None], visible, noisy)
    noisy_others = move_outline(others, keys[5])
    others = jnp.where(is_clean[:, None, None], others, noisy_others)
    others_known = jax.random.bernoulli(keys[6], OTHERS_SHARE, (count,)).astype(jnp.float32)
    inputs = make_inputs(colours, inside, given, others, others_known)
    return inputs, given, complete


def disturb(
    visible: Float[Array, "m s s"], others: Float[Array, "m s s"], key: Array
) -> Float[Array, "m s s"]:
    """Visible masks as finders give them: outlines moved, a part missing, a bit of a neighbour."""
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
    """Masks whose outline moves in or out, evenly and by smooth noise."""
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
    """The mean over a square of 2 radius + 1 pixels, twice: nearly a Gaussian."""
    side = 2 * radius + 1
    for _ in range(2):
        mask = jax.lax.reduce_window(mask, 0.0, jax.lax.add, (1, side, 1), (1, 1, 1), "SAME")
        mask = jax.lax.reduce_window(mask, 0.0, jax.lax.add, (1, 1, side), (1, 1, 1), "SAME")
        mask = mask / side**2
    return mask


def low_noise(key: Array, count: int, size: int, cells: int) -> Float[Array, "m s s"]:
    """Smooth noise of variance about one, with `cells` independent values each way."""
    noise = jax.random.normal(key, (count, cells, cells))
    return jax.image.resize(noise, (count, size, size), "cubic")


def completion_loss(
    logits: Float[Array, "m s s"],
    given: Float[Array, "m s s"],
    complete: Float[Array, "m s s"],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Cross-entropy, soft IoU of the whole answer, and dice of what is added.

    Means over the examples that have an object.
    """
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

    has_object = target.any((1, 2)).astype(jnp.float32)

    def mean(values: Float[Array, " m"]) -> Float[Array, ""]:
        return (values * has_object).sum() / jnp.maximum(has_object.sum(), 1)

    loss = mean(entropy) + mean(1 - soft_iou) + 0.5 * mean(1 - dice)
    return loss, {"entropy": mean(entropy), "soft_iou": mean(soft_iou), "dice": mean(dice)}


def make_loss(graphdef: Any) -> LossOf:
    """The loss of a training step, by the weights of the completer and of a frozen backbone."""

    def loss_of(
        weights: nnx.State, frozen: nnx.State, planes: UInt8[Array, "m s s 7"], key: Array
    ) -> tuple[Array, dict[str, Array]]:
        inputs, given, complete = augment(planes, key)
        return completion_loss(nnx.merge(graphdef, weights, frozen)(inputs), given, complete)

    return loss_of
