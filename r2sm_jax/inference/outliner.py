"""Boxes and clicks on an image -> visible masks: crops in, masks at the image's resolution out.

An outliner is stored as parts.py says. It has no further values.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Float, UInt8

from r2sm_jax.cli import from_json
from r2sm_jax.config import OutlinerConfig
from r2sm_jax.data import masks
from r2sm_jax.data.crops import CropWindow
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.prompt_crops import cut_prompt_crop, window_of_box, windows_of_clicks
from r2sm_jax.inference.parts import fill_weights, read_part, save_part, to_stored
from r2sm_jax.models.outliner import Outliner
from r2sm_jax.query import Prompt

NAME = "outliner"
"""Of this part (parts.py)."""
BATCH_SIZES = (1, 8)
"""Crops that are read at once; fewer are padded, so that few shapes are compiled."""
OUTSIDE_LOGIT = -20.0  # nothing is added where the crop does not reach
COMPARED_SIDE = 640
"""Masks of different crops are compared on about so many pixels of the longer side."""
SIZE_WEIGHT = 0.1
"""How much a crop of e times the side is preferred, as a difference of agreement. Measured on
photos that were trained on: IoU of one click 0.527, 0.498 without it, 0.452 by predicted IoU."""


class Outline(NamedTuple):
    """The answer to one prompt."""

    mask: Mask
    """What shows of the object, `[H W]`."""
    iou: float
    """The predicted IoU of the mask with the true one."""


class MaskOutliner:
    """A trained outliner behind one call.

    Attributes:
        config: Sizes of the outliner.
        weights: Its weights, with those of the frozen backbone.
    """

    def __init__(self, config: OutlinerConfig, weights: nnx.State):
        self.config = config
        self.weights = weights
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: Outliner(config, rngs=nnx.Rngs(0))))

        @jax.jit
        def compute(
            weights: nnx.State, crops: UInt8[jax.Array, "m s s c"]
        ) -> tuple[jax.Array, jax.Array]:
            return nnx.merge(graphdef, weights)(crops)

        self._compute = compute

    def __call__(
        self, image: UInt8[np.ndarray, "H W 3"], prompts: Sequence[Prompt]
    ) -> list[Outline]:
        """The visible mask that each prompt means.

        A box says how large the object is, clicks do not. So crops of several sizes are read
        around clicks, and the mask that agrees best with those of the others is kept. A second
        look, at the box of that mask, draws a finer outline.
        """
        return [self._outline(image, prompt) for prompt in prompts]

    def _outline(self, image: np.ndarray, prompt: Prompt) -> Outline:
        height, width = image.shape[:2]
        if prompt.box is not None:
            (outline,) = self._read(image, [window_of_box(prompt.box)], prompt)
            return outline

        windows = windows_of_clicks(prompt.clicks, height, width)
        found = choose_outline(self._read(image, windows, prompt), windows)
        if not found.mask.any():
            return found
        x0, y0, x1, y1 = masks.box(found.mask)
        with_box = Prompt((x0, y0, x1, y1), prompt.clicks)
        (second,) = self._read(image, [window_of_box((x0, y0, x1, y1))], with_box)
        return second if second.mask.any() else found

    def _read(
        self, image: np.ndarray, windows: Sequence[CropWindow], prompt: Prompt
    ) -> list[Outline]:
        """The answer of each window."""
        size = self.config.size
        crops = np.stack([cut_prompt_crop(image, window, size, prompt) for window in windows])
        logits, ious = self._compute_padded(crops)
        height, width = image.shape[:2]
        outlines = []
        for window, window_logits, iou in zip(windows, logits, ious, strict=True):
            image_logits = window.paste(window_logits, height, width, OUTSIDE_LOGIT)
            outlines.append(Outline(image_logits > 0, float(iou)))
        return outlines

    def _compute_padded(
        self, crops: UInt8[np.ndarray, "m s s c"]
    ) -> tuple[Float[np.ndarray, "m _s _s"], Float[np.ndarray, " m"]]:
        """Logits and predicted IoUs of any number of crops, with few shapes to compile."""
        logits = []
        ious = []
        for start in range(0, len(crops), BATCH_SIZES[-1]):
            part = crops[start : start + BATCH_SIZES[-1]]
            count = next(count for count in BATCH_SIZES if count >= len(part))
            padded = np.zeros((count, *part.shape[1:]), np.uint8)
            padded[: len(part)] = part
            logits_of_part, ious_of_part = self._compute(self.weights, padded)
            logits.append(np.asarray(logits_of_part)[: len(part)])
            ious.append(np.asarray(ious_of_part)[: len(part)])
        return np.concatenate(logits), np.concatenate(ious)


def choose_outline(outlines: Sequence[Outline], windows: Sequence[CropWindow]) -> Outline:
    """The outline of the window whose mask agrees best with the masks of all windows.

    A window that is too small shows a part of the object, and each such window another part. The
    mask of the whole object is found in several windows. The predicted IoU alone often prefers a
    part; here it says how much the mask of a window counts.
    """
    step = math.ceil(max(outlines[0].mask.shape) / COMPARED_SIDE)
    compared = np.stack([outline.mask[::step, ::step] for outline in outlines]).astype(np.float32)
    flat = rearrange(compared, "w h x -> w (h x)")
    intersections = flat @ flat.T
    areas = np.diag(intersections)
    unions = areas[:, None] + areas - intersections
    ious = intersections / np.maximum(unions, 1)

    weights = np.array([outline.iou for outline in outlines])
    agreement = ious @ weights / weights.sum()
    sides = np.array([window.side for window in windows])
    return outlines[int(np.argmax(agreement + SIZE_WEIGHT * np.log(sides)))]


def save_outliner(folder: Path, outliner: MaskOutliner) -> None:
    """Writes an outliner into a folder. Raises InputError if it cannot be written."""
    save_part(folder, NAME, stored_outliner(outliner), outliner.weights)


def stored_outliner(outliner: MaskOutliner) -> dict[str, Any]:
    """The JSON object of an outliner."""
    return to_stored(outliner.config)


def load_outliner(path: Path) -> MaskOutliner:
    """Loads the outliner that `save_outliner` wrote. Raises InputError as `read_part`, or if its
    weights do not fit its configuration. `path`: its folder, or one of the two files."""
    return restore_outliner(*read_part(path, NAME), where=str(path))


def restore_outliner(
    stored: Mapping[str, Any], tensors: Mapping[str, np.ndarray], where: str
) -> MaskOutliner:
    """Makes an outliner of its JSON object and its weights. Raises InputError if something is
    missing or does not fit. `where`: what the message names."""
    config = from_json(OutlinerConfig, stored["config"], where)
    weights = fill_weights(lambda: Outliner(config, rngs=nnx.Rngs(0)), tensors, NAME)
    return MaskOutliner(config, weights)
