"""Completer and outliner: crops of an image in, masks at the image's resolution out.

The completer makes visible masks complete. The outliner draws the visible mask of what a box or
clicks mean. Both are a `CropUNet`.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Bool, Float, UInt8
from scipy.special import expit

from r2sm_jax.cli import to_json
from r2sm_jax.config import UNSURE_BELOW, CompleterConfig, MatmulPrecision, OutlinerConfig
from r2sm_jax.data import masks
from r2sm_jax.data.crops import (
    CropWindow,
    cut_crop,
    cut_prompt_crop,
    paste_mean,
    window_of_box,
    windows_of_clicks,
)
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.models.calibration import NOT_CALIBRATED, Calibration
from r2sm_jax.models.crop_unet import CropOutput, CropUNet, make_completer, make_outliner
from r2sm_jax.models.layers import build_abstract
from r2sm_jax.models.matmul import JAX_PRECISION
from r2sm_jax.query import Prompt

BATCH_SIZES = (1, 4, 8)
"""Crops that are read at once; fewer are padded, so that few shapes are compiled."""
VIEWS = ((1.0, False), (0.85, True), (1.2, True))
"""Sizes of the crops in which the completer looks at an object, and whether they are mirrored. What
it says of them is averaged. Measured on composed photos and on COCOA: as good as all six views of
these sizes, at half of their time; one view has .01 less IoU of the hidden part (docs/log.md)."""
OUTSIDE_LOGIT = -20.0  # nothing is added where the crop does not reach
COMPARED_SIDE = 640
"""Masks are subsampled to at most this many pixels on the longer side before they are compared."""
SAME_FROM = 0.8
"""IoU from which on two outlines are of the same thing."""
SIZE_WEIGHT = 0.15
"""This times ln(side of a crop) is added to the consensus about its mask. Measured on `dev`: IoU of
one click 0.566, 0.512 without it, 0.500 by predicted IoU (docs/log.md)."""


class CropModel:
    """A trained network over crops."""

    config: Any
    calibration: Mapping[str, Calibration]
    """Kind of answers (`box`, `click`, ...) -> its `Calibration`; kinds that are not fitted are
    missing."""
    make: Callable[..., CropUNet]
    """Builds the network from its configuration."""

    def __init__(
        self,
        config: Any,
        weights: nnx.State,
        threshold: float = 0.0,
        matmul_precision: MatmulPrecision = "float32",
        calibration: Mapping[str, Calibration] | None = None,
    ):
        """Takes sizes and weights, with those of a frozen backbone if it has one.

        Args:
            threshold: the logit above which a pixel belongs to the mask.
            calibration: by kind of answers; None changes nothing.
        """
        self.config = config
        self.weights = weights
        self.threshold = threshold
        self.calibration = calibration or {}
        self._compute = _compiled(nnx.graphdef(self.abstract(config)), matmul_precision)

    @classmethod
    def abstract(cls, config: Any) -> CropUNet:
        """Returns the network with shapes in place of weights."""
        return build_abstract(partial(cls.make, config))

    def updated(self, **values: Any) -> Any:
        """Returns a model with other weights, threshold or calibration, which shares the compiled
        function of this one."""
        other = copy.copy(self)
        vars(other).update(values)
        return other

    def read(self, crops: UInt8[np.ndarray, "m s s 7"]) -> CropOutput:
        """Computes what the network says about crops, as NumPy arrays."""
        outputs = []
        for start in range(0, len(crops), BATCH_SIZES[-1]):
            part = crops[start : start + BATCH_SIZES[-1]]
            count = next(count for count in BATCH_SIZES if count >= len(part))
            padding = [(0, count - len(part))] + 3 * [(0, 0)]
            outputs.append(self._compute(self.weights, np.pad(part, padding)))
        # Only the last part is padded.
        return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(crops)], *outputs)


@lru_cache(8)
def _compiled(graphdef: nnx.GraphDef, precision: MatmulPrecision) -> Callable[..., CropOutput]:
    """Compiles a network, of which all of the same sizes share the program."""

    @jax.jit
    def compute(weights: nnx.State, crops: jax.Array) -> CropOutput:
        with jax.default_matmul_precision(JAX_PRECISION[precision]):
            return nnx.merge(graphdef, weights)(crops)

    return compute


class Completion(NamedTuple):
    """The complete mask of one object."""

    mask: Mask
    """`[H W]`. It contains the given one, and equals it where a hidden part is unlikely."""
    iou: float
    """The predicted IoU of the mask with the true one."""
    hidden_probability: float
    """Calibrated probability that a part is hidden."""
    unsure_below: float
    """An IoU below this is called unsure."""


class RawCompletion(NamedTuple):
    """What the network of the completer says about one object, before threshold and calibration."""

    logits: Float[np.ndarray, "H W"]
    """Of the complete mask."""
    iou: float
    hidden_logit: float


class MaskCompleter(CropModel):
    """A trained completer. Its threshold is chosen on `dev`."""

    config: CompleterConfig
    make = staticmethod(make_completer)

    def complete(
        self,
        image: UInt8[np.ndarray, "_H _W 3"],
        visible_masks: Iterable[np.ndarray],
        all_visible: Bool[np.ndarray, "_H _W"] | None = None,
    ) -> Iterator[Completion]:
        """Yields the complete masks of some objects of one image.

        Args:
            visible_masks: what shows of each object. Eight are held at a time.
            all_visible: the union of what shows of all objects, with or without these; None where
                it is not known.

        Raises InputError for an empty mask and for one of another size than the image's.
        """
        waiting = iter(visible_masks)
        number = 1
        while visible := list(islice(waiting, BATCH_SIZES[-1])):
            for mask in visible:
                check_mask(mask, number, image.shape[:2])
                number += 1
            for mask, raw in zip(visible, self.draw(image, visible, all_visible), strict=True):
                yield self.finish(mask, raw, knows_others=all_visible is not None)

    def draw(
        self,
        image: UInt8[np.ndarray, "_H _W 3"],
        visible_masks: Sequence[np.ndarray],
        all_visible: Bool[np.ndarray, "_H _W"] | None,
    ) -> Iterator[RawCompletion]:
        """Yields what the network says of each object, averaged over `VIEWS`. `all_visible`: as in
        `complete`."""
        height, width = image.shape[:2]
        windows, crops = [], []
        for visible in visible_masks:
            middle = CropWindow.around(visible)
            for ratio, is_mirrored in VIEWS:
                windows.append(middle.scaled(ratio))
                crop = self._cut(image, windows[-1], visible, all_visible)
                crops.append(crop[:, ::-1] if is_mirrored else crop)
        output = self.read(np.stack(crops))
        assert output.hidden_logit is not None
        for start in range(0, len(crops), len(VIEWS)):
            views = slice(start, start + len(VIEWS))
            pairs = zip(output.mask_logits[views], VIEWS, strict=True)
            logits = [one[:, ::-1] if is_mirrored else one for one, (_, is_mirrored) in pairs]
            yield RawCompletion(
                paste_mean(windows[views], logits, height, width, OUTSIDE_LOGIT),
                float(output.iou[views].mean()),
                float(output.hidden_logit[views].mean()),
            )

    def finish(self, visible: Mask, raw: RawCompletion, *, knows_others: bool) -> Completion:
        """Makes the complete mask of one object, and its scores, by threshold and calibration."""
        name = "neighbours" if knows_others else "alone"
        kind = self.calibration.get(name, NOT_CALIBRATED)
        completed = visible | (raw.logits > self.threshold)
        added = added_share(visible, completed)
        hidden = float(expit(kind.hidden_logit(raw.hidden_logit, added)))
        mask = visible if hidden < kind.kept_below else completed
        return Completion(mask, float(kind.iou(raw.iou)), hidden, float(kind.unsure_below))

    def _cut(
        self,
        image: np.ndarray,
        window: CropWindow,
        visible: np.ndarray,
        all_visible: np.ndarray | None,
    ) -> UInt8[np.ndarray, "s s 7"]:
        """Cuts the crop of an object: colours, inside, the visible mask, the others' masks, and
        whether these are known."""
        others = np.zeros_like(visible) if all_visible is None else all_visible & ~visible
        crop = cut_crop(image, window, self.config.size, (visible, others))
        known = np.full_like(crop[..., :1], 255 * (all_visible is not None))
        return np.concatenate([crop, known], axis=2)


def added_share(visible: Mask, completed: Mask) -> float:
    """Computes the area that is added to a visible mask, as a share of its own."""
    return masks.area(completed) / masks.area(visible) - 1


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
    """What shows of one object: the answer to a prompt, or a given mask."""

    mask: Mask
    """`[H W]`."""
    iou: float
    """The predicted IoU of the mask with the true one; 1 of a given mask."""
    agreement: float = 0.5
    """Of clicks: the mean IoU of the mask with those of the next larger and the next smaller crop.
    The answer, which a second look draws, is also compared with the mask that it came from."""
    unsure_below: float = UNSURE_BELOW
    """An IoU below this is called unsure."""
    candidates: tuple["Outline", ...] = ()
    """What else clicks may mean: the different masks of the crops, the likeliest first."""
    completed_calibration: Calibration | None = None
    """For the score of the complete mask drawn from this outline; None if it is not fitted."""
    is_given: bool = False
    """The mask is the caller's own, or that of a finder: it has no score."""
    presence: float = 1.0
    """Probability that the object is there: below 1 only where a finder says so."""


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
            return self._calibrated(outline, "box")

        windows = windows_of_clicks(prompt.clicks, height, width)
        outlines = self._read(image, windows, prompt)
        chosen = choose_outline(outlines, windows)
        found = outlines[chosen]
        if found.mask.any():
            box = masks.box(found.mask)
            (second,) = self._read(image, [window_of_box(box)], Prompt(box, prompt.clicks))
            found = second if second.mask.any() else found

        # The right mask is found in crops of about the same size, too. Its IoU with their masks
        # says more of how good it is than the predicted IoU (docs/log.md).
        scored = []
        for number, outline in [(chosen, found), *enumerate(outlines)]:
            near = outlines[max(0, number - 1) : number + 2]
            # A mask always agrees with itself. That of a second look is none of the `outlines`.
            near = [other for other in near if other is not outline] or near
            ious = pairwise_iou([one.mask for one in (outline, *near)])[0, 1:]
            outline = outline._replace(agreement=float(ious.mean()))
            scored.append(self._calibrated(outline, "click"))
        first, *others = scored
        return first._replace(candidates=different_outlines(first, others))

    def _read(
        self, image: np.ndarray, windows: Sequence[CropWindow], prompt: Prompt
    ) -> list[Outline]:
        """Returns the answer of each window, as it comes from the network."""
        height, width = image.shape[:2]
        crops = [cut_prompt_crop(image, w, self.config.size, prompt) for w in windows]
        output = self.read(np.stack(crops))
        outlines = []
        for window, logits, iou in zip(windows, output.mask_logits, output.iou, strict=True):
            image_logits = window.paste(logits, height, width, OUTSIDE_LOGIT)
            outlines.append(Outline(image_logits > self.threshold, float(iou)))
        return outlines

    def _calibrated(self, outline: Outline, name: str) -> Outline:
        """Returns an outline of the network with the scores of its kind."""
        kind = self.calibration.get(name, NOT_CALIBRATED)
        return outline._replace(
            iou=float(kind.iou(outline.iou, outline.agreement)),
            unsure_below=float(kind.unsure_below),
            completed_calibration=self.calibration.get(f"completed_{name}"),
        )


def choose_outline(outlines: Sequence[Outline], windows: Sequence[CropWindow]) -> int:
    """Returns the number of the window whose mask agrees best with the masks of all windows.

    A window that is too small shows a part of the object, and each such window another part. The
    mask of the whole object is found in several windows. The predicted IoU alone often prefers a
    part; here it says how much the mask of a window counts.
    """
    ious = pairwise_iou([outline.mask for outline in outlines])
    weights = np.array([outline.iou for outline in outlines])
    consensus = ious @ weights / weights.sum()
    sides = np.array([window.side for window in windows])
    return int(np.argmax(consensus + SIZE_WEIGHT * np.log(sides)))


def different_outlines(first: Outline, others: Sequence[Outline]) -> tuple[Outline, ...]:
    """Returns those of the `others` that differ from the first one and from one another, the
    likeliest first."""
    kept = [first]
    for outline in sorted(others, key=lambda outline: -outline.iou):
        ious = pairwise_iou([outline.mask, *(one.mask for one in kept)])[0, 1:]
        if outline.mask.any() and ious.max() < SAME_FROM:
            kept.append(outline)
    return tuple(kept[1:])


def pairwise_iou(compared: Sequence[Mask]) -> Float[np.ndarray, "w w"]:
    """Computes the pairwise IoUs of masks `[H W]`, approximately, since they are subsampled; 0 for
    two empty ones."""
    step = math.ceil(max(compared[0].shape) / COMPARED_SIDE)
    coarse = np.stack([mask[::step, ::step] for mask in compared]).astype(np.float32)
    flat = rearrange(coarse, "w h x -> w (h x)")
    intersections = flat @ flat.T
    areas = np.diag(intersections)
    unions = areas[:, None] + areas - intersections
    return intersections / np.maximum(unions, 1)


def part_json(part: CropModel) -> dict[str, Any]:
    """Returns what `config.json` holds of a part: sizes, threshold and calibration."""
    return {
        "config": to_json(part.config),
        "threshold": part.threshold,
        "calibration": {name: kind._asdict() for name, kind in part.calibration.items()},
    }
