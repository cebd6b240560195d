"""Boundary IoU (Cheng et al., CVPR 2021): how well the outlines agree, which the IoU of a large mask hardly notices.

After boundary-iou-api, boundary_iou/utils/boundary_utils.py: a mask's boundary is what a square of side 2 d + 1
erodes, d = 2 % of the image's diagonal, at least one pixel; the image's edge counts as outside.
"""

import math

import numpy as np
from jaxtyping import Bool, UInt8
from scipy.ndimage import minimum_filter1d

from r2sm_jax.metrics.iou import Overlap, overlap

RATIO = 0.02

Mask = Bool[np.ndarray, "H W"]


def distance(height: int, width: int) -> int:
    """Width in pixels of the boundaries of masks in an image of this size."""
    return max(1, round(RATIO * math.hypot(height, width)))


def boundary(mask: Bool[np.ndarray, "_H _W"], width: int) -> Bool[np.ndarray, "_H _W"]:
    """The pixels of a mask that are within `width` pixels of its outside."""
    inner: UInt8[np.ndarray, "_H _W"] = mask.view(np.uint8)
    for axis in (0, 1):
        inner = minimum_filter1d(inner, 2 * width + 1, axis, mode="constant", cval=0)
    return mask & ~inner.view(bool)


def boundary_overlap(predicted: Mask, truth: Mask, ignore: Mask | None = None) -> Overlap:
    """The counts of both masks' boundaries; ignored pixels count nowhere."""
    width = distance(*truth.shape)
    either = predicted | truth
    rows, columns = np.flatnonzero(either.any(1)), np.flatnonzero(either.any(0))
    if not len(rows):
        return Overlap(0, 0, 0, 0)
    box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)  # what lies outside is outside of both
    drawn, wanted = (boundary(np.ascontiguousarray(mask[box]), width) for mask in (predicted, truth))
    return overlap(drawn, wanted, None if ignore is None else ignore[box])
