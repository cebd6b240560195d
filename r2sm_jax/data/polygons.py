"""Masks as polygons of few points, for readers of text."""

from itertools import pairwise

import contourpy
import numpy as np

from r2sm_jax.data import masks

MOST_PARTS = 4
MOST_POINTS = 24


def outline(mask: masks.Mask) -> list[list[int]]:
    """The outlines of the largest parts of a mask `[H W]`, as `[x1, y1, x2, y2, ...]`, holes left out.

    At most `MOST_PARTS` parts, each simplified to at most `MOST_POINTS` points (Douglas and Peucker 1973, with
    a tolerance that doubles until it is enough). An empty mask has no outline.
    """
    return [_simplify(ring) for ring in _outer_rings(mask)[:MOST_PARTS]]


def polygons(mask: masks.Mask, tolerance: float = 0.5) -> list[list[float]]:
    """The outlines of all parts of a mask `[H W]`, largest first, as `[x1, y1, x2, y2, ...]` in pixels, holes left
    out. No outline moves by more than `tolerance` pixels."""
    rings = (_douglas_peucker(ring, tolerance)[:-1] for ring in _outer_rings(mask))
    return [ring.round(2).ravel().tolist() for ring in rings if len(ring) > 2]


def _outer_rings(mask: masks.Mask) -> list[np.ndarray]:
    """The closed outlines `[n 2]` of a mask's parts, largest first."""
    x0, y0, x1, y1 = masks.box(mask)
    if x1 == x0:
        return []
    framed = np.pad(mask[y0:y1, x0:x1].astype(np.float32), 1)
    lines = contourpy.contour_generator(z=framed, line_type="Separate").lines(0.5)
    corner = np.array([x0 - 0.5, y0 - 0.5])  # centre of the top left pixel of the frame
    rings = [np.asarray(line, np.float64) + corner for line in lines]
    return sorted((ring for ring in rings if _signed_area(ring) > 0), key=_signed_area, reverse=True)


def _signed_area(ring: np.ndarray) -> float:
    """Area inside a closed ring `[n 2]`; below zero for holes."""
    x, y = ring.T
    return float(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1]) / 2)


def _simplify(ring: np.ndarray) -> list[int]:
    tolerance = 1.0
    while len(points := _douglas_peucker(ring, tolerance)) - 1 > MOST_POINTS:
        tolerance *= 2
    corners = np.rint(points).astype(int).tolist()
    distinct = [point for point, following in pairwise(corners) if point != following]
    if len(distinct) < 3:  # a few pixels: their box
        (x0, y0), (x1, y1) = np.floor(ring.min(0)).astype(int).tolist(), np.ceil(ring.max(0)).astype(int).tolist()
        distinct = [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]
    return [coordinate for point in distinct for coordinate in point]


def _douglas_peucker(points: np.ndarray, tolerance: float) -> np.ndarray:
    """Those of the points `[n 2]` of a line without which it would move by more than `tolerance`."""
    keep = np.zeros(len(points), bool)
    keep[[0, -1]] = True
    spans = [(0, len(points) - 1)]
    while spans:
        start, end = spans.pop()
        if end - start < 2:
            continue
        chord, between = points[end] - points[start], points[start + 1 : end] - points[start]
        length = float(chord @ chord)
        along = np.clip(between @ chord / length, 0, 1) if length else np.zeros(len(between))
        distances = np.linalg.norm(between - along[:, None] * chord, axis=1)
        farthest = int(distances.argmax())
        if distances[farthest] > tolerance:
            middle = start + 1 + farthest
            keep[middle] = True
            spans += [(start, middle), (middle, end)]
    return points[keep]
