"""Boundary IoU (Cheng et al., CVPR 2021): how well the outlines agree, which the IoU of a large mask hardly notices.

After boundary-iou-api, boundary_iou/utils/boundary_utils.py: a mask's boundary is what a square of side 2 d + 1
erodes, d = 2 % of the image's diagonal, at least one pixel; the image's edge counts as outside.
"""

import math

import numpy as np
from jaxtyping import Bool

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE
from r2sm_jax.metrics.iou import Overlap, overlap

RATIO = 0.02

Mask = Bool[np.ndarray, "H W"]


def distance(height: int, width: int) -> int:
    """Width in pixels of the boundaries of masks in an image of this size."""
    return max(1, round(RATIO * math.hypot(height, width)))


def boundary(mask: Bool[np.ndarray, "_H _W"], width: int) -> Bool[np.ndarray, "_H _W"]:
    """The pixels of a mask that are within `width` pixels of its outside."""
    return mask & ~_eroded(_eroded(mask, width).T, width).T


def _eroded(mask: Bool[np.ndarray, "_H _W"], width: int) -> Bool[np.ndarray, "_H _W"]:
    """Whether all pixels up to `width` above and below belong to the mask.

    Windows are doubled until they are wide enough: a few passes over the mask instead of one for each pixel of width.
    """
    inner = np.zeros((len(mask) + 2 * width, mask.shape[1]), bool)
    inner[width : width + len(mask)] = mask
    reach, wanted = 1, 2 * width + 1
    while reach < wanted:
        step = min(reach, wanted - reach)
        inner = inner[:-step] & inner[step:]
        reach += step
    return inner


def boundary_overlap(predicted: Mask, truth: Mask, ignore: Mask | None = None) -> Overlap:
    """The counts of both masks' boundaries; ignored pixels count nowhere."""
    return _overlap(predicted, truth, ignore, distance(*truth.shape))


def boundary_overlap_rles(predicted: RLE, truth: RLE, ignore: Mask | None = None) -> Overlap:
    """The same of compressed RLEs; only the columns that either mask reaches are expanded."""
    boxes = np.asarray(masks.coco.toBbox([predicted, truth]))
    boxes = boxes[boxes[:, 2] > 0].astype(int)
    if not len(boxes):
        return Overlap(0, 0, 0, 0)
    columns = int(boxes[:, 0].min()), int((boxes[:, 0] + boxes[:, 2]).max())
    drawn, wanted = (masks.expand_columns(rle, *columns) for rle in (predicted, truth))
    return _overlap(drawn, wanted, None if ignore is None else ignore[:, slice(*columns)], distance(*truth["size"]))


def _overlap(
    predicted: Bool[np.ndarray, "H _W"], truth: Bool[np.ndarray, "H _W"], ignore: Bool[np.ndarray, "H _W"] | None,
    width: int,
) -> Overlap:  # fmt: skip
    either = predicted | truth
    rows, columns = np.flatnonzero(either.any(1)), np.flatnonzero(either.any(0))
    if not len(rows):
        return Overlap(0, 0, 0, 0)
    box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)  # what lies outside is outside of both
    drawn, wanted = (boundary(mask[box], width) for mask in (predicted, truth))
    return overlap(drawn, wanted, None if ignore is None else ignore[box])
