"""Masks as annotation files hold them: RLEs and polygons in several layouts, and a polygon as OpenCV draws it."""

from typing import Any

import numpy as np
from jaxtyping import Int

from r2sm_jax.data import masks
from r2sm_jax.data.masks import Mask

Point = tuple[int, int]
"""Column and row."""
ONE = 1 << 16
"""A pixel, in the parts in which OpenCV places edges."""


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

    The outline belongs to the mask, so that one point is a pixel and two are a line. The rules are those of OpenCV 4.11
    and later (modules/imgproc/src/drawing.cpp). Raises ValueError for anything else than points.
    """
    try:
        corners = np.asarray(points, np.float64)
    except (TypeError, ValueError, OverflowError):
        corners = np.zeros(0)
    if corners.ndim != 2 or corners.shape[-1] != 2 or not (np.abs(corners) < 1 << 31).all():
        raise ValueError("it is not a list of points [x, y]")
    mask, edges = np.zeros(size, bool), []
    columns, rows = np.trunc(corners).astype(int).T.tolist()
    ring: list[Point] = list(zip(columns, rows, strict=True))
    for start, end in zip([ring[-1], *ring], ring, strict=False):
        first, last, visible = _clip(start, end, size)
        if visible:
            mask[_line(first, last)] = True
        if start[1] != end[1]:
            edges.append(_edge(start, end, first, last))
    if edges:
        _fill(mask, np.array(edges, np.int64))
    return mask


def _clip(start: Point, end: Point, size: tuple[int, int]) -> tuple[Point, Point, bool]:
    """The part of a line in the image, and whether there is one; if not, the line clipped as far as OpenCV does."""
    ends, limits = [list(start), list(end)], (size[1] - 1, size[0] - 1)

    def beside() -> bool:
        both = list(zip(*ends, limits, strict=True))
        return any(max(one, other) < 0 or min(one, other) > limit for one, other, limit in both)

    for axis in (1, 0):  # rows, then columns
        if beside():
            break
        for point in ends:
            inside = min(max(point[axis], 0), limits[axis])
            if inside != point[axis]:
                run, rise = (ends[1][place] - ends[0][place] for place in (1 - axis, axis))
                point[1 - axis] += _divide((inside - point[axis]) * run, rise)
                point[axis] = inside
    return (ends[0][0], ends[0][1]), (ends[1][0], ends[1][1]), not beside()


def _divide(number: int, by: int) -> int:
    """Integer division as C has it, cut towards zero."""
    quotient = abs(number) // abs(by)
    return quotient if (number < 0) == (by < 0) else -quotient


def _line(start: Point, end: Point) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pixels of a line (Bresenham), from left to right."""
    (x0, y0), (x1, y1) = sorted((start, end), key=lambda point: point[0])
    width, height, down = x1 - x0, abs(y1 - y0), 1 if y1 > y0 else -1
    longer = max(width, height)
    along = np.arange(longer + 1)
    aside = (2 * min(width, height) * along + longer - 1) // (2 * longer) if longer else along
    return (y0 + down * aside, x0 + along) if width >= height else (y0 + down * along, x0 + aside)


def _edge(start: Point, end: Point, first: Point, last: Point) -> tuple[int, int, int, int]:
    """The side of a polygon from `start` to `end`, clipped from `first` to `last`: its first row, the row after its
    last one, and in parts of a pixel the column where it starts and what it moves by in a row."""
    if first[1] == last[1]:
        first, last = (first[0], start[1]), (last[0], end[1])
    slope = _divide((last[0] - first[0]) * ONE, last[1] - first[1])
    top, clipped = (start, first) if start[1] < end[1] else (end, last)
    return top[1], max(start[1], end[1]), clipped[0] * ONE + (top[1] - clipped[1]) * slope, slope


def _fill(mask: Mask, edges: Int[np.ndarray, "n 4"]) -> None:
    """Fills, in every row, from the first edge that crosses it to the second, from the third to the fourth, ..."""
    clipped = edges[:, :2].clip(0, len(mask))
    rows = np.concatenate([np.arange(top, bottom) for top, bottom in clipped])
    tops, _, columns, slopes = np.repeat(edges, np.diff(clipped)[:, 0], axis=0).T
    crossings = columns + (rows - tops) * slopes
    order = np.lexsort((crossings, rows))
    rows, crossings = rows[order], crossings[order]
    lefts, rights = (crossings[::2] + ONE - 1) // ONE, crossings[1::2] // ONE
    for row, left, right in zip(rows[::2], lefts.clip(0), (rights + 1).clip(0), strict=True):
        mask[row, left:right] = True
