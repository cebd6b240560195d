"""gIoU and cIoU in every definition that the field reports under these names, their intervals, and boundary IoU.

All follow from integer counts of pixels. docs/metrics.md tells what each definition does with empty masks.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.ndimage import minimum_filter

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE

EPSILON = 1e-5
BOUNDARY_RATIO = 0.02
RESAMPLES = 1000
CHUNK = 100
"""Resamples that are drawn at once, to spare memory."""

Scores = dict[str, float | None]
Ratio = tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]
"""A figure as the ratio of two sums over queries: numerators and denominators, which both are 0 where a query does not
count."""


class Overlap(NamedTuple):
    """Pixels of a predicted and a true mask."""

    intersection: int
    union: int
    predicted: int
    truth: int


def overlap(
    predicted: Bool[np.ndarray, "H W"],
    truth: Bool[np.ndarray, "H W"],
    ignore: Bool[np.ndarray, "H W"] | None = None,
) -> Overlap:
    """The counts of two masks; ignored pixels count nowhere."""
    if ignore is not None:
        predicted, truth = predicted & ~ignore, truth & ~ignore
    both, drawn, wanted = (int(np.count_nonzero(x)) for x in (predicted & truth, predicted, truth))
    return Overlap(both, drawn + wanted - both, drawn, wanted)


def _mean(values: Shaped[np.ndarray, " n"]) -> float | None:
    return float(values.mean()) if len(values) else None


def lisa_iou(counts: Shaped[np.ndarray, "n _c"]) -> Float[np.ndarray, " n"]:
    """IoU of every query from columns that begin with intersection and union; an empty truth with an empty prediction
    has 1."""
    intersection, union = counts[:, 0], counts[:, 1]
    return np.where(union == 0, 1.0, intersection / (union + EPSILON))


def lisa(counts: Int[np.ndarray, "n 4"]) -> Scores:
    """LISA's `validate()` (train_ds.py); GLaMM, PixelLM, PSALM, Sa2VA and X-SAM do the same. False positives on an
    empty truth score 0 and add to the union. None without queries, as in all definitions."""
    if not len(counts):
        return {"giou": None, "ciou": None}
    return {
        "giou": _mean(lisa_iou(counts)),
        "ciou": float(counts[:, 0].sum() / (counts[:, 1].sum() + 1e-10)),
    }


def gres(counts: Int[np.ndarray, "n 4"]) -> Scores:
    """ReLA's evaluation of gRefCOCO (refer_evaluation.py), with an empty prediction as its no-target decision.

    Beside gIoU and cIoU the share of targets found with an IoU of at least .7, .8 and .9, and the accuracies of the
    decision where there is a target and where there is none.
    """
    intersection, union, predicted, truth = counts.T
    no_target, none_predicted = truth == 0, predicted == 0
    iou = np.where(none_predicted, no_target, intersection / np.maximum(union, 1))
    counted = ~(none_predicted & no_target)
    with_target = iou[~no_target]
    return {
        "giou": _mean(iou),
        "ciou": float(intersection.sum() / union[counted].sum()) if union[counted].sum() else None,
        **{f"pr@{t}": _mean(with_target >= t) for t in (0.7, 0.8, 0.9)},
        "target_accuracy": _mean(~none_predicted[~no_target]),
        "no_target_accuracy": _mean(none_predicted[no_target]),
    }


def segzero(counts: Int[np.ndarray, "n 4"]) -> Scores:
    """Seg-Zero's calculate_iou.py: an empty union scores 0, even where empty was right. There is no cIoU."""
    return {"giou": _mean(counts[:, 0] / np.maximum(counts[:, 1], 1))}


def mmr(counts: Int[np.ndarray, "n 4"]) -> Scores:
    """MMR's evaluation: as `lisa`, but queries without any output are left out, which flatters."""
    return lisa(counts[counts[:, 2] > 0])


VARIANTS: dict[str, Callable[[Int[np.ndarray, "n 4"]], Scores]] = {
    f.__name__: f for f in (lisa, gres, segzero, mmr)
}
"""Definitions by name. PixelLM's `muse` needs a query's instances, see instances.py."""


def mean_ratio(values: Float[np.ndarray, " n"]) -> Ratio:
    """A mean over queries, without those that have no number (NaN)."""
    return np.nan_to_num(values), (~np.isnan(values)).astype(float)


def ratios(
    answered: Shaped[np.ndarray, "n _c"],
    occluded: Shaped[np.ndarray, "n _c"],
    boundary: Shaped[np.ndarray, "n _c"],
) -> dict[str, Ratio]:
    """gIoU, cIoU, occluded and boundary IoU of queries, from columns that begin with intersection and union; rows of
    NaN where a query has none."""
    return {
        "giou": mean_ratio(lisa_iou(answered)),
        "ciou": (answered[:, 0].astype(float), answered[:, 1].astype(float)),
        "occluded_iou": mean_ratio(lisa_iou(occluded)),
        "boundary_iou": mean_ratio(lisa_iou(boundary)),
    }


def interval(
    images: Int[np.ndarray, " n"], ratio: Ratio, *, minus: Ratio | None = None
) -> list[float] | None:
    """The 95 % percentile interval of a ratio of sums, or of its difference from `minus` on the same images.

    `images` is the image of each query: the bootstrap draws images, since the queries of one are not independent. None
    with fewer than two images, or where a resample has no denominator.
    """
    numbers, place = np.unique(images, return_inverse=True)
    count = len(numbers)
    if count < 2:
        return None
    sums = [
        np.bincount(place, weights=values, minlength=count) for values in (*ratio, *(minus or ()))
    ]
    rng = np.random.default_rng(0)
    drawn: list[np.ndarray] = []
    for _ in range(RESAMPLES // CHUNK):
        weights = rng.multinomial(count, np.full(count, 1 / count), size=CHUNK).astype(float)
        totals = [weights @ s for s in sums]
        if any((denominator <= 0).any() for denominator in totals[1::2]):
            return None
        ratios = [a / b for a, b in zip(totals[::2], totals[1::2], strict=True)]
        drawn.append(ratios[0] - ratios[1] if minus else ratios[0])
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    return [float(low), float(high)]


def boundary_width(height: int, width: int) -> int:
    """Width in pixels of the boundaries of masks in an image of this size: 2 % of its diagonal."""
    return max(1, round(BOUNDARY_RATIO * math.hypot(height, width)))


def boundary(mask: Bool[np.ndarray, "_H _W"], width: int) -> Bool[np.ndarray, "_H _W"]:
    """The pixels of a mask that are within `width` pixels of its outside.

    They disappear when the mask is eroded with a square of side 2 `width` + 1; beyond the image's edge is outside.
    After boundary-iou-api, boundary_iou/utils/boundary_utils.py.
    """
    return mask & (minimum_filter(mask, 2 * width + 1, mode="constant", cval=0) == 0)


def boundary_overlap(
    predicted: RLE, truth: RLE, ignore: Bool[np.ndarray, "H W"] | None = None
) -> Overlap:
    """The counts of two masks' boundaries (Cheng et al., CVPR 2021): how well the outlines agree, which the IoU of a
    large mask hardly shows. Only the box that either mask reaches is expanded."""
    boxes = np.asarray(masks.coco.toBbox([predicted, truth]))
    boxes = boxes[boxes[:, 2] > 0].astype(int)
    if not len(boxes):
        return Overlap(0, 0, 0, 0)
    (left, top), (right, bottom) = (
        boxes[:, :2].min(0).tolist(),
        (boxes[:, :2] + boxes[:, 2:]).max(0).tolist(),
    )
    rows, width = slice(top, bottom), boundary_width(*truth["size"])
    drawn, wanted = (
        boundary(masks.expand(rle, left, right)[rows], width) for rle in (predicted, truth)
    )
    return overlap(drawn, wanted, None if ignore is None else ignore[rows, left:right])
