"""Masks as annotation files hold them: RLEs and polygons in several layouts, and polygons that OpenCV draws."""

from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError


def read_mask(value: Any, size: tuple[int, int]) -> tuple[Mask, int]:
    """The mask `[H W]` of an image of this size, and how many rings were left out.

    `value` is an RLE, a list of RLEs, one polygon, or a list of polygons; of several the union is meant. A polygon is a
    list of numbers or of points. Rings of fewer than three points are left out, unless there are no others. Raises
    ValueError, with a reason, for anything else.
    """
    if not isinstance(value, list) or not value:
        return masks.from_segmentation(value, *size), 0
    if all(isinstance(part, dict) for part in value):
        rles = [masks.compressed(part, *size) for part in value]
        return masks.decode(masks.merge(rles, *size)), 0
    rings = [_numbers(ring) for ring in ([value] if _is_ring(value) else value)]
    long = [ring for ring in rings if not isinstance(ring, list) or len(ring) >= 6] or rings
    return masks.from_segmentation(long, *size), len(rings) - len(long)


def _is_ring(value: list[Any]) -> bool:
    """Whether a list is a single polygon. A list of lists of two numbers is one, since no polygon has two numbers."""
    pairs = all(isinstance(part, list) and len(part) == 2 for part in value)
    return isinstance(value[0], int | float) or (pairs and not any(isinstance(x, list) for part in value for x in part))


def _numbers(ring: Any) -> Any:
    """A polygon as a flat list of numbers."""
    if not isinstance(ring, list) or not any(isinstance(point, list) for point in ring):
        return ring
    if not all(isinstance(point, list) and len(point) == 2 for point in ring):
        raise ValueError("a polygon is neither a list of numbers nor of points [x, y]")
    return [number for point in ring for number in point]


def draw_polygon(points: Any, size: tuple[int, int]) -> Mask:
    """The mask `[H W]` that OpenCV's `polylines` and `fillPoly` draw for points `[[x, y], ...]`, cut to whole numbers.

    The outline belongs to the mask, so that one point is a pixel and two are a line. Raises ValueError for anything
    else than points, and InputError where OpenCV is missing.
    """
    try:
        import cv2  # no other format needs it
    except ImportError:
        raise InputError("OpenCV draws these polygons and is missing; pip install opencv-python-headless") from None
    try:
        corners = np.asarray(points, np.float64)
    except (TypeError, ValueError, OverflowError):
        corners = np.zeros(0)
    if corners.ndim != 2 or corners.shape[-1] != 2 or not (np.abs(corners) < 1 << 31).all():
        raise ValueError("it is not a list of points [x, y]")
    drawn, ring = np.zeros(size, np.uint8), corners.astype(np.int32)
    cv2.polylines(drawn, [ring], True, 1)
    cv2.fillPoly(drawn, [ring], 1)
    return drawn.astype(bool)
