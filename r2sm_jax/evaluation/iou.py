"""gIoU and cIoU in every definition that the field reports under these names, their intervals, and
boundary IoU.

All follow from integer counts of pixels. docs/metrics.md tells what each definition does with empty
masks.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple, SupportsFloat

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.ndimage import minimum_filter
from scipy.stats import DegenerateDataWarning, bootstrap

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE

EPSILON = 1e-5
BOUNDARY_RATIO = 0.02
"""Width of boundaries as a share of the image's diagonal."""
PRECISION_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
NUM_RESAMPLES = 1000
RESAMPLES_AT_ONCE = 100
"""More take more memory."""

Scores = dict[str, float | None]
Ratio = tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]
"""A figure as the ratio of two sums over queries: numerators and denominators. Both are 0 where a
query does not count."""


class Overlap(NamedTuple):
    """Numbers of pixels of a predicted and a true mask."""

    intersection: int
    union: int
    predicted: int
    truth: int


def count_overlap(intersection: int, predicted: int, truth: int) -> Overlap:
    """The counts of two masks by their areas and that of their intersection."""
    return Overlap(intersection, predicted + truth - intersection, predicted, truth)


def overlap(
    predicted: Bool[np.ndarray, "H W"],
    truth: Bool[np.ndarray, "H W"],
    ignore: Bool[np.ndarray, "H W"] | None = None,
) -> Overlap:
    """Counts the pixels of two masks. Ignored pixels count nowhere."""
    if ignore is not None:
        predicted = predicted & ~ignore
        truth = truth & ~ignore
    intersection = int(np.count_nonzero(predicted & truth))
    return count_overlap(
        intersection, int(np.count_nonzero(predicted)), int(np.count_nonzero(truth))
    )


def overlaps_at_shifts(
    logits: Float[np.ndarray, "H W"],
    truth: Bool[np.ndarray, "H W"],
    shifts: Float[np.ndarray, " s"],
    ignore: Bool[np.ndarray, "H W"] | None = None,
) -> Int[np.ndarray, "s 4"]:
    """The `Overlap` of a true mask with the masks of the pixels whose logits exceed each shift.

    Args:
        shifts: ascending.
        ignore: pixels that count nowhere.
    """
    # Most pixels are in none of the masks.
    is_candidate = logits > shifts[0]
    if ignore is not None:
        is_candidate &= ~ignore
        truth = truth & ~ignore
    # The number of masks, from that of the first shift on, which a pixel is in.
    levels = np.searchsorted(shifts, logits[is_candidate])

    def areas(levels: Int[np.ndarray, " n"]) -> Int[np.ndarray, " s"]:
        num_pixels = np.bincount(levels, minlength=len(shifts) + 1)
        # A pixel of a level is in the masks of all lower levels: a sum from the right.
        return num_pixels[:0:-1].cumsum()[::-1]

    predicted = areas(levels)
    intersection = areas(levels[truth[is_candidate]])
    area = np.full(len(shifts), np.count_nonzero(truth))
    union = predicted + area - intersection
    return np.stack([intersection, union, predicted, area], axis=1)


def mean(values: Iterable[SupportsFloat]) -> float | None:
    """Computes the mean of some values; None without any."""
    values = np.asarray(list(values))
    return float(values.mean()) if len(values) else None


def lisa_iou(counts: Shaped[np.ndarray, "n _c"]) -> Float[np.ndarray, " n"]:
    """IoU of every query, as LISA defines it; an empty truth with an empty prediction has 1.

    The first two columns of `counts` are intersection and union.
    """
    intersection = counts[:, 0]
    union = counts[:, 1]
    return np.where(union == 0, 1.0, intersection / (union + EPSILON))


def lisa(counts: Shaped[np.ndarray, "n _c"]) -> Scores:
    """LISA's `validate()` (train_ds.py); GLaMM, PixelLM, PSALM, Sa2VA and X-SAM do the same. False
    positives on an empty truth score 0 and add to the union. None without queries, as in all
    definitions. Rows of NaN do not count."""
    counts = counts[~np.isnan(counts[:, 0])]
    if not len(counts):
        return {"giou": None, "ciou": None}
    return {
        "giou": mean(lisa_iou(counts)),
        "ciou": float(counts[:, 0].sum() / (counts[:, 1].sum() + 1e-10)),
    }


def precision_at(counts: Shaped[np.ndarray, "n 4"]) -> Scores:
    """Pr@0.5 to Pr@0.9 of referring segmentation: the shares of the queries with a target whose IoU
    is at least that much."""
    of_targets = counts[counts[:, 3] > 0]
    iou = of_targets[:, 0] / np.maximum(of_targets[:, 1], 1)
    return {f"pr@{threshold}": mean(iou >= threshold) for threshold in PRECISION_THRESHOLDS}


def gres(counts: Shaped[np.ndarray, "n 4"]) -> Scores:
    """ReLA's evaluation of gRefCOCO (refer_evaluation.py), with an empty prediction as its
    no-target decision.

    Beside gIoU and cIoU the shares of `precision_at`, and the accuracies of the decision where
    there is a target and where there is none.
    """
    intersection, union, predicted, truth = counts.T
    no_target = truth == 0
    predicts_none = predicted == 0
    iou = np.where(predicts_none, no_target, intersection / np.maximum(union, 1))
    total_union = union[~(predicts_none & no_target)].sum()
    return {
        "giou": mean(iou),
        "ciou": float(intersection.sum() / total_union) if total_union else None,
        **precision_at(counts),
        "target_accuracy": mean(~predicts_none[~no_target]),
        "no_target_accuracy": mean(predicts_none[no_target]),
    }


def segzero(counts: Shaped[np.ndarray, "n 4"]) -> Scores:
    """Seg-Zero's calculate_iou.py: an empty union scores 0, even where empty was right. There is no
    cIoU."""
    return {"giou": mean(counts[:, 0] / np.maximum(counts[:, 1], 1))}


def mmr(counts: Shaped[np.ndarray, "n 4"]) -> Scores:
    """MMR's evaluation: as `lisa`, but queries without any output are left out, which flatters."""
    return lisa(counts[counts[:, 2] > 0])


VARIANTS: dict[str, Callable[[Shaped[np.ndarray, "n 4"]], Scores]] = {
    "lisa": lisa,
    "gres": gres,
    "segzero": segzero,
    "mmr": mmr,
}
"""Definitions by name."""


def mean_ratio(values: Float[np.ndarray, " n"]) -> Ratio:
    """A mean over queries, without those that have no number (NaN)."""
    return np.nan_to_num(values), (~np.isnan(values)).astype(float)


def interval(
    images: Int[np.ndarray, " n"], ratio: Ratio, *, minus: Ratio | None = None
) -> list[float] | None:
    """The 95 % percentile interval of a ratio, or of its difference from `minus` on the same
    images.

    `images` is the image of each query: the bootstrap resamples images, since the queries of one
    are not independent. None with fewer than two images, or where a resample has no denominator.
    """
    ids, image_of_query = np.unique(images, return_inverse=True)
    if len(ids) < 2:
        return None

    def figure(*sums: np.ndarray, axis: int) -> np.ndarray:
        top, bottom, *others = (of_images.sum(axis) for of_images in sums)
        return top / bottom - (others[0] / others[1] if others else 0)

    values = ratio if minus is None else (*ratio, *minus)
    # A resample without a denominator makes both ends NaN.
    with (
        np.errstate(invalid="ignore"),
        warnings.catch_warnings(action="ignore", category=DegenerateDataWarning),
    ):
        resampled = bootstrap(
            [np.bincount(image_of_query, weights=of_queries) for of_queries in values],
            figure,
            paired=True,
            n_resamples=NUM_RESAMPLES,
            batch=RESAMPLES_AT_ONCE,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    low, high = map(float, resampled.confidence_interval)
    return None if math.isnan(low) else [low, high]


def boundary_width(height: int, width: int) -> int:
    """Width in pixels of the boundaries of masks in an image of this size: 2 % of its diagonal."""
    return max(1, round(BOUNDARY_RATIO * math.hypot(height, width)))


def boundary(mask: Bool[np.ndarray, "_H _W"], width: int) -> Bool[np.ndarray, "_H _W"]:
    """The pixels of a mask that are within `width` pixels of its outside.

    They disappear when the mask is eroded with a square of side 2 `width` + 1; beyond the image's
    edge is outside. After boundary-iou-api, boundary_iou/utils/boundary_utils.py.
    """
    return mask & (minimum_filter(mask, 2 * width + 1, mode="constant", cval=0) == 0)


def boundary_overlap(
    predicted: RLE, truth: RLE, ignore: Bool[np.ndarray, "H W"] | None = None
) -> Overlap:
    """Counts the boundaries of two masks (Cheng et al., CVPR 2021).

    It tells how well outlines agree, which the IoU of a large mask hardly shows. Only the box that
    either mask reaches is decoded.
    """
    boxes = np.asarray(masks.coco.toBbox([predicted, truth]))  # [2 4] of x, y, width, height
    boxes = boxes[boxes[:, 2] > 0].astype(int)
    if not len(boxes):
        return Overlap(0, 0, 0, 0)
    left, top = boxes[:, :2].min(0).tolist()
    right, bottom = (boxes[:, :2] + boxes[:, 2:]).max(0).tolist()
    rows = slice(top, bottom)

    width = boundary_width(*truth["size"])
    predicted_boundary = boundary(masks.expand(predicted, left, right)[rows], width)
    true_boundary = boundary(masks.expand(truth, left, right)[rows], width)
    if ignore is not None:
        ignore = ignore[rows, left:right]
    return overlap(predicted_boundary, true_boundary, ignore)
