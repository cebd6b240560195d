"""Completer and outliner: crops of an image in, masks at the image's resolution out.

The completer makes visible masks complete. The outliner draws the visible mask of what a box or
clicks mean. Both are a `CropUNet`.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import UInt8

from r2sm_jax.config import CompleterConfig, MatmulPrecision, OutlinerConfig
from r2sm_jax.data import masks
from r2sm_jax.data.crops import (
    CropWindow,
    cut_crop,
    cut_prompt_crop,
    others_of,
    window_of_box,
    windows_of_clicks,
)
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.models.crop_unet import CropOutput, CropUNet, make_completer, make_outliner
from r2sm_jax.models.matmul import JAX_PRECISION
from r2sm_jax.query import Prompt

BATCH_SIZES = (1, 4, 8)
"""Crops that are read at once; fewer are padded, so that few shapes are compiled."""
OUTSIDE_LOGIT = -20.0  # nothing is added where the crop does not reach
COMPARED_SIDE = 640
"""Masks of different crops are compared on about so many pixels of the longer side."""
SIZE_WEIGHT = 0.1
"""How much a crop of e times the side is preferred, as a difference of agreement. Measured on
photos that were trained on: IoU of one click 0.527, 0.498 without it, 0.452 by predicted IoU."""


class CropModel:
    """A trained network over crops."""

    config: Any
    make: Callable[..., CropUNet]
    """Builds the network from its configuration."""

    def __init__(
        self,
        config: Any,
        weights: nnx.State,
        threshold: float = 0.0,
        matmul_precision: MatmulPrecision = "float32",
    ):
        """Takes sizes and weights, with those of a frozen backbone if it has one.

        `threshold`: the logit above which a pixel belongs to the mask.
        """
        self.config = config
        self.weights = weights
        self.threshold = threshold
        graphdef, _ = nnx.split(self.abstract(config))

        @jax.jit
        def compute(weights: nnx.State, crops: jax.Array) -> CropOutput:
            with jax.default_matmul_precision(JAX_PRECISION[matmul_precision]):
                return nnx.merge(graphdef, weights)(crops)

        self._compute = compute

    @classmethod
    def abstract(cls, config: Any) -> CropUNet:
        """Returns the network with shapes in place of weights."""
        return nnx.eval_shape(lambda: cls.make(config, rngs=nnx.Rngs(0)))

    def updated(self, **values: Any) -> Any:
        """Returns a model with other weights, or another threshold, which shares the compiled
        function of this one."""
        other = copy.copy(self)
        vars(other).update(values)
        return other

    def read(self, crops: UInt8[np.ndarray, "m s s 7"]) -> CropOutput:
        """Computes what the network says about up to `BATCH_SIZES[-1]` crops, as NumPy arrays."""
        count = next(count for count in BATCH_SIZES if count >= len(crops))
        padding = [(0, count - len(crops))] + 3 * [(0, 0)]
        output = self._compute(self.weights, np.pad(crops, padding))
        return jax.tree.map(lambda values: np.asarray(values)[: len(crops)], output)


class MaskCompleter(CropModel):
    """A trained completer. Its threshold is chosen on `dev`."""

    config: CompleterConfig
    make = staticmethod(make_completer)

    def __call__(
        self,
        image: UInt8[np.ndarray, "_H _W 3"],
        visible_masks: Sequence[np.ndarray],
        *,
        neighbours: Sequence[np.ndarray | None] | None = None,
    ) -> list[Mask]:
        """Returns the complete masks `[H W]` of `complete`, all at once."""
        return list(self.complete(image, visible_masks, neighbours=neighbours))

    def complete(
        self,
        image: UInt8[np.ndarray, "_H _W 3"],
        visible_masks: Sequence[np.ndarray],
        *,
        neighbours: Sequence[np.ndarray | None] | None = None,
    ) -> Iterator[Mask]:
        """Yields the complete masks `[H W]` of some objects of one image; each contains the visible
        one. Of `visible_masks` and `neighbours` it holds no copies.

        Args:
            visible_masks: what shows of each object.
            neighbours: for each object the union of the visible masks of all other objects; None
                for an object whose surroundings are not known. Default: the union of the other
                `visible_masks`, or not known where there is only one.

        Raises InputError for an empty mask and for one of another size than the image's.
        """
        height, width = image.shape[:2]
        for number, mask in enumerate(visible_masks, start=1):
            check_mask(mask, number, (height, width))
        if neighbours is None:
            neighbours = others_of(visible_masks)

        for start in range(0, len(visible_masks), BATCH_SIZES[-1]):
            end = start + BATCH_SIZES[-1]
            of_batch = visible_masks[start:end]
            windows = [CropWindow.around(visible) for visible in of_batch]
            crops = []
            for window, visible, others in zip(
                windows, of_batch, neighbours[start:end], strict=True
            ):
                crops.append(self._cut(image, window, visible, others))
            logits = self.read(np.stack(crops)).mask_logits
            for window, visible, crop_logits in zip(windows, of_batch, logits, strict=True):
                image_logits = window.paste(crop_logits, height, width, OUTSIDE_LOGIT)
                yield visible | (image_logits > self.threshold)

    def _cut(
        self, image: np.ndarray, window: CropWindow, visible: np.ndarray, others: np.ndarray | None
    ) -> UInt8[np.ndarray, "s s 7"]:
        """Cuts the crop of an object: colours, inside, the visible mask, the others' masks, and
        whether these are known."""
        is_known = others is not None
        others = others & ~visible if is_known else np.zeros_like(visible)
        crop = cut_crop(image, window, self.config.size, (visible, others))
        known = np.full_like(crop[..., :1], 255 * is_known)
        return np.concatenate([crop, known], axis=2)


def check_mask(mask: np.ndarray, number: int, size: tuple[int, int]) -> None:
    """Raises InputError for a visible mask that is empty or not of the image's size."""
    if mask.shape != size:
        raise InputError(
            f"mask {number} has the size {' x '.join(map(str, mask.shape))}, its image "
            f"{size[0]} x {size[1]}; give a mask of the image's size"
        )
    if not masks.area(mask):
        raise InputError(f"mask {number} is empty; give the visible part of an object")


class Outline(NamedTuple):
    """The answer to one prompt."""

    mask: Mask
    """What shows of the object, `[H W]`."""
    iou: float
    """The predicted IoU of the mask with the true one."""


class MaskOutliner(CropModel):
    """A trained outliner."""

    config: OutlinerConfig
    make = staticmethod(make_outliner)

    def __call__(
        self, image: UInt8[np.ndarray, "H W 3"], prompts: Sequence[Prompt]
    ) -> list[Outline]:
        """Returns the visible mask that each prompt means.

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
        """Returns the answer of each window."""
        height, width = image.shape[:2]
        outlines = []
        for start in range(0, len(windows), BATCH_SIZES[-1]):
            of_batch = windows[start : start + BATCH_SIZES[-1]]
            crops = [cut_prompt_crop(image, w, self.config.size, prompt) for w in of_batch]
            output = self.read(np.stack(crops))
            assert output.iou is not None
            for window, window_logits, iou in zip(
                of_batch, output.mask_logits, output.iou, strict=True
            ):
                image_logits = window.paste(window_logits, height, width, OUTSIDE_LOGIT)
                outlines.append(Outline(image_logits > self.threshold, float(iou)))
        return outlines


def choose_outline(outlines: Sequence[Outline], windows: Sequence[CropWindow]) -> Outline:
    """Returns the outline of the window whose mask agrees best with the masks of all windows.

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


def no_part(part: str, name: str) -> InputError:
    """Returns the error for a model without a completer or outliner, to raise."""
    return InputError(
        f"{name} has no {part}; put one in with python -m r2sm_jax.export MODEL --{part} RUN "
        "--out DIR, or use another model"
    )
