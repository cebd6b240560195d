"""Completes visible masks of an image: crops in, complete masks at the image's resolution out.

A completer is stored as parts.py says, with its `threshold`, a logit, as further value.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, UInt8

from r2sm_jax.cli import from_json
from r2sm_jax.config import CompleterConfig
from r2sm_jax.data import masks
from r2sm_jax.data.crops import CropWindow, cut_crop
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.inference.parts import fill_weights, find_part, read_part, save_part, to_stored
from r2sm_jax.models.completion import Completer, make_inputs

NAME = "completer"
"""Of this part (parts.py)."""

BATCH_SIZES = (1, 4, 16)
"""Objects that are completed at once; fewer are padded, so that few shapes are compiled."""
OUTSIDE_LOGIT = -20.0  # where the crop does not reach, nothing is added


class MaskCompleter:
    """A trained completer behind one call.

    Attributes:
        config: Sizes of the completer.
        weights: Its weights, with those of a frozen backbone if it has one.
        threshold: Logit above which a pixel belongs to the complete mask, chosen on `dev`.
    """

    def __init__(self, config: CompleterConfig, weights: nnx.State, threshold: float = 0.0):
        self.config = config
        self.weights = weights
        self.threshold = threshold
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: Completer(config, rngs=nnx.Rngs(0))))

        @jax.jit
        def compute_logits(
            weights: nnx.State, crops: UInt8[jax.Array, "m s s 6"], others_known: jax.Array
        ) -> jax.Array:
            return crop_logits(nnx.merge(graphdef, weights), crops, others_known)

        self._compute_logits = compute_logits

    def updated(
        self, *, weights: nnx.State | None = None, threshold: float | None = None
    ) -> "MaskCompleter":
        """A completer with other weights or another threshold, which shares the compiled function
        of this one."""
        other = copy.copy(self)
        if weights is not None:
            other.weights = weights
        if threshold is not None:
            other.threshold = threshold
        return other

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

    def logits(
        self,
        crops: UInt8[np.ndarray | jax.Array, "m s s 6"],
        others_known: Float[np.ndarray | jax.Array, " m"],
    ) -> Float[jax.Array, "m s s"]:
        """The logits of the complete masks of crops, whose channels are the colours, the inside of
        the image, the visible mask and the masks of the other objects. `others_known` is 1 where
        these are known, else 0."""
        return self._compute_logits(self.weights, crops, others_known)

    def _complete_batch(
        self,
        image: np.ndarray,
        visible_masks: Sequence[Mask],
        neighbours: Sequence[Mask | None],
        count: int,
    ) -> list[Mask]:
        """Completes up to `count` objects; the rest of the batch is padding."""
        size = self.config.size
        # Channels: colours, inside of the image, visible mask, masks of the other objects.
        crops = np.zeros((count, size, size, 6), np.uint8)
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
            crops[row] = cut_crop(image, window, size, (visible, others))

        logits = np.asarray(self.logits(crops, others_known))
        height, width = image.shape[:2]
        completed = []
        # Not strict: the rows of logits after the last window are padding.
        for window, visible, crop_logits in zip(windows, visible_masks, logits, strict=False):
            image_logits = window.paste(crop_logits, height, width, OUTSIDE_LOGIT)
            completed.append(visible | (image_logits > self.threshold))
        return completed


def crop_logits(
    model: Completer,
    crops: UInt8[jax.Array, "m s s 6"],
    others_known: Float[jax.Array, " m"],
) -> Float[jax.Array, "m s s"]:
    """The logits of `MaskCompleter.logits`, by the module."""
    colours = crops[..., :3]
    shares = crops[..., 3:].astype(jnp.float32) / 255
    inside, visible, others = (shares[..., channel] for channel in range(3))
    return model(make_inputs(colours, inside, visible, others, others_known))


def others_of(visible_masks: Sequence[Mask]) -> list[Mask | None]:
    """For each mask the union of all others; None where there is only one."""
    if len(visible_masks) < 2:
        return [None] * len(visible_masks)
    # How many masks cover each pixel. Without an object's own mask (0 or 1), what is left counts
    # the other objects there.
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
    return fill_weights(lambda: Completer(config, rngs=nnx.Rngs(0)), tensors, NAME)


def stored_completer(completer: MaskCompleter) -> dict[str, Any]:
    """The JSON object of a completer."""
    return to_stored(completer.config, threshold=float(completer.threshold))


def save_completer(folder: Path, completer: MaskCompleter) -> None:
    """Writes a completer into a folder. Raises InputError if it cannot be written."""
    save_part(folder, NAME, stored_completer(completer), completer.weights)


def load_completer(path: Path) -> MaskCompleter:
    """Loads the completer that `save_completer` wrote. Raises InputError as `read_part`, or if its
    weights do not fit its configuration. `path`: its folder, or one of the two files."""
    return restore_completer(*read_part(path, NAME), where=str(path))


def open_completer(name: str | Path) -> MaskCompleter:
    """Loads a completer alone, without the segmenter and the language model beside it.

    Raises InputError as `find_part`, or if the export has none. `name`: that of a model.
    """
    found = find_part(NAME, name)
    if found is None:
        raise no_completer(str(name))
    return restore_completer(*found, where=str(name))


def restore_completer(
    stored: Mapping[str, Any], tensors: Mapping[str, np.ndarray], where: str
) -> MaskCompleter:
    """Makes a completer of its JSON object and its weights. Raises InputError if something is
    missing or does not fit. `where`: what the message names."""
    if "threshold" not in stored:
        raise InputError(
            f"{where}: this holds no threshold of a completer; train or export it again"
        )
    config = from_json(CompleterConfig, stored["config"], where)
    weights = completer_weights(config, tensors)
    return MaskCompleter(config, weights, float(stored["threshold"]))


def no_completer(name: str) -> InputError:
    """The error for a model that cannot complete masks, to raise."""
    return InputError(
        f"{name} has no completer, so it cannot complete given masks; put one in with "
        "python -m r2sm_jax.export MODEL --completer RUN --out DIR, or use another model"
    )
