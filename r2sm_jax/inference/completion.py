"""Completes visible masks of an image: crops in, complete masks at the image's resolution out."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from r2sm_jax.config import CompleterConfig
from r2sm_jax.data import masks
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.models.completion import Completer, CropWindow, cut_crop, make_inputs

BATCH_SIZES = (1, 4, 16)
"""Objects that are completed at once; fewer are padded, so that few shapes are compiled."""
OUTSIDE_LOGIT = -20.0  # where the crop does not reach, nothing is added


class MaskCompleter:
    """A trained completer behind one call.

    Attributes:
        config: Sizes of the completer.
        weights: Its weights.
        threshold: Logit above which a pixel belongs to the complete mask, chosen on `dev`.
    """

    def __init__(self, config: CompleterConfig, weights: nnx.State, threshold: float = 0.0):
        self.config = config
        self.weights = weights
        self.threshold = threshold
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: Completer(config, rngs=nnx.Rngs(0))))

        @jax.jit
        def compute_logits(
            weights: nnx.State, planes: UInt8[jax.Array, "m s s 6"], others_known: jax.Array
        ) -> jax.Array:
            shares = planes[..., 3:].astype(jnp.float32) / 255
            inputs = make_inputs(
                planes[..., :3], shares[..., 0], shares[..., 1], shares[..., 2], others_known
            )
            return nnx.merge(graphdef, weights)(inputs)

        self._compute_logits = compute_logits

    def __call__(
        self,
        image: UInt8[np.ndarray, "_H _W 3"],
        visible_masks: Sequence[np.ndarray],
        *,
        neighbours: Sequence[np.ndarray | None] | None = None,
    ) -> list[Mask]:
        """The complete masks `[H W]` of some objects of one image; each contains the visible one.

        Args:
            visible_masks: what shows of each object.
            neighbours: for each object the union of the visible masks of all other objects; None
                for an object whose surroundings are not known. Default: the union of the other
                `visible_masks`, or not known where there is only one.

        Raises InputError for an empty mask and for one of another size than the image's.
        """
        check_masks(visible_masks, image.shape[:2])
        if neighbours is None:
            neighbours = others_of(visible_masks)

        completed: list[Mask] = []
        start = 0
        while start < len(visible_masks):
            left = len(visible_masks) - start
            count = next((n for n in BATCH_SIZES if n >= left), BATCH_SIZES[-1])
            part = slice(start, start + count)
            completed += self._complete_batch(image, visible_masks[part], neighbours[part], count)
            start += count
        return completed

    def _complete_batch(
        self,
        image: np.ndarray,
        visible_masks: Sequence[Mask],
        neighbours: Sequence[Mask | None],
        count: int,
    ) -> list[Mask]:
        size = self.config.size
        planes = np.zeros((count, size, size, 6), np.uint8)
        others_known = np.zeros(count, np.float32)
        windows = []
        for row, (visible, others) in enumerate(zip(visible_masks, neighbours, strict=True)):
            window = CropWindow.around(visible)
            windows.append(window)
            if others is not None:
                others_known[row] = 1
                others = others & ~visible
            else:
                others = np.zeros_like(visible)
            planes[row] = cut_crop(image, window, size, (visible, others))

        logits = np.asarray(self._compute_logits(self.weights, planes, others_known))
        height, width = image.shape[:2]
        completed = []
        for window, visible, logit in zip(windows, visible_masks, logits, strict=False):
            logit_in_image = window.paste(logit, height, width, OUTSIDE_LOGIT)
            completed.append(visible | (logit_in_image > self.threshold))
        return completed


def others_of(visible_masks: Sequence[Mask]) -> list[Mask | None]:
    """For each mask the union of all others; None where there is only one."""
    if len(visible_masks) < 2:
        return [None] * len(visible_masks)
    # A pixel belongs to another object if more masks cover it than one's own.
    counts = np.sum(visible_masks, axis=0, dtype=np.int32)
    return [(counts - mask) > 0 for mask in visible_masks]


def check_masks(visible_masks: Sequence[np.ndarray], size: tuple[int, ...]) -> None:
    """Raises InputError for a mask that is empty or not of the image's size."""
    for number, mask in enumerate(visible_masks, start=1):
        if mask.shape != size:
            raise InputError(
                f"mask {number} has the size {' x '.join(map(str, mask.shape))}, its image "
                f"{size[0]} x {size[1]}; give a mask of the image's size"
            )
        if not masks.area(mask):
            raise InputError(f"mask {number} is empty; give the visible part of an object")


def completer_weights(config: CompleterConfig, tensors: Mapping[str, Any]) -> nnx.State:
    """The weights of a completer from arrays by dotted path. Raises InputError for other shapes."""
    _, state = nnx.split(nnx.eval_shape(lambda: Completer(config, rngs=nnx.Rngs(0))))
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        value = tensors.get(name)
        if value is None or value.shape != leaf.shape:
            raise InputError(
                f"the weights of the completer lack {name} of the shape {leaf.shape}; export the "
                "run again or download the export again"
            )
        filled.append((path, leaf.replace(jnp.asarray(value, leaf.dtype))))
    return nnx.from_flat_state(filled)
