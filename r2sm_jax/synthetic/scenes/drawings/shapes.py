"""Polygons from which the drawings are built, and the `Paint` function that collects them.

A shape is a polygon `[n 2]` in unit coordinates: x to the right, y down, an object within about
[-1, 1].
"""

from functools import cache
from typing import Protocol

import numpy as np

Point = tuple[float, float]


class Paint(Protocol):
    """Adds a shape to a drawing, in front of all shapes so far.

    `role` is the material (`paint.ROLES`). `both_sides` also adds the mirror image about x = 0.
    """

    def __call__(self, role: str, shape: np.ndarray, *, both_sides: bool = False) -> None: ...


def polygon(*points: Point) -> np.ndarray:
    """The polygon through the points."""
    return np.array(points)


def ellipse(centre: Point, radii: Point | float, count: int = 28) -> np.ndarray:
    """An ellipse (or a circle, with one radius) with `count` corners."""
    return _unit_circle(count) * radii + centre


def box(low: Point, high: Point, radius: float = 0.0) -> np.ndarray:
    """A rectangle whose corners are rounded with `radius`."""
    x0, y0 = low
    x1, y1 = high
    if radius == 0:
        return np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])

    left, top = x0 + radius, y0 + radius
    right, bottom = x1 - radius, y1 - radius
    centres = [(right, bottom), (left, bottom), (left, top), (right, top)]

    # Each corner is a quarter of a circle with 20 corners: 6 points.
    circle = _unit_circle(20) * radius
    quarters = [circle[:6], circle[5:11], circle[10:16], circle[15:], circle[:1]]
    return np.concatenate(quarters) + np.repeat(centres, 6, axis=0)


def curve(*points: Point, steps: int = 5) -> np.ndarray:
    """A smooth closed curve through the points (Catmull-Rom).

    A point given twice in a row is a sharp corner.
    """
    basis, control_points = _catmull_rom(len(points), steps)
    is_span = [point != points[k + 1 - len(points)] for k, point in enumerate(points)]
    return (basis @ np.array(points)[control_points[is_span]]).reshape(-1, 2)


def symmetric(*right: Point, smooth: bool = True) -> np.ndarray:
    """A shape that is symmetric about x = 0, from the points of its right half, top to bottom."""
    left = [(-x, y) for x, y in reversed(right)]
    return curve(*right, *left) if smooth else np.array([*right, *left])


def stroke(*points: Point, width: float, taper: float = 1.0) -> np.ndarray:
    """A thick line through the points. Its width goes from `width` to `width * taper`."""
    line = np.array(points, float)
    tangent = np.gradient(line, axis=0)
    half_width = np.linspace(width / 2, width * taper / 2, len(line))
    half_width = half_width / np.hypot(tangent[:, 0], tangent[:, 1])
    normal = tangent[:, ::-1] * (-1, 1) * half_width[:, None]
    return np.concatenate([line + normal, (line - normal)[::-1]])


def mirror(points: np.ndarray) -> np.ndarray:
    """The mirror image about x = 0."""
    return points * (-1.0, 1.0)


def rotate(points: np.ndarray, degrees: float, x: float = 0.0, y: float = 0.0) -> np.ndarray:
    """The shape rotated clockwise about (x, y)."""
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return (points - (x, y)) @ np.array([(cos, sin), (-sin, cos)]) + (x, y)


def shift(points: np.ndarray, x: float, y: float) -> np.ndarray:
    """The shape moved by (x, y)."""
    return np.add(points, (x, y))


def scale(points: np.ndarray, factor: float, x: float, y: float) -> np.ndarray:
    """The shape scaled about (x, y)."""
    return factor * (points - (x, y)) + (x, y)


@cache
def _unit_circle(count: int) -> np.ndarray:
    angle = np.arange(count) * (2 * np.pi / count)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


@cache
def _catmull_rom(count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The basis `[steps 4]` and the indices of the control points of each span `[count 4]`."""
    t = np.arange(steps)[:, None] / steps
    weights = [
        -t + 2 * t**2 - t**3,
        2 - 5 * t**2 + 3 * t**3,
        t + 4 * t**2 - 3 * t**3,
        -(t**2) + t**3,
    ]
    basis = 0.5 * np.concatenate(weights, axis=1)
    control_points = np.arange(count)[:, None] + np.arange(-1, 3)
    return basis, control_points % count
