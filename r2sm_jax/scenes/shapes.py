"""Geometry of the drawings: polygons `[N 2]` in unit coordinates, from which the drawn classes are put together.

x runs to the right, y down, and an object lies within about [-1, 1]. A drawing is a list of parts that are painted one
over the other; a part is a polygon and the role whose paint fills it (`paint.ROLES`). The role "hole" cuts the
background free again.
"""

from functools import cache

import numpy as np

Point = tuple[float, float]
Part = tuple[str, np.ndarray]


@cache
def _circle(count: int) -> np.ndarray:
    angle = np.arange(count) * (2 * np.pi / count)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


@cache
def _spline(count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The Catmull-Rom basis `[steps 4]`, and the four control points of each of `count` spans `[count 4]`."""
    t = np.arange(steps)[:, None] / steps
    weights = [-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, -(t**2) + t**3]
    return 0.5 * np.concatenate(weights, 1), (np.arange(count)[:, None] + np.arange(-1, 3)) % count


def polygon(*points: Point) -> np.ndarray:
    """The polygon through the points."""
    return np.array(points)


def ellipse(centre: Point, radii: Point | float, count: int = 28) -> np.ndarray:
    """An ellipse, or a circle of one radius, with `count` corners."""
    return _circle(count) * radii + centre


def box(low: Point, high: Point, radius: float = 0.0) -> np.ndarray:
    """A rectangle, its corners rounded with `radius`."""
    (x0, y0), (x1, y1) = low, high
    if not radius:
        return np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])
    corner = _circle(20) * radius
    points = np.concatenate([corner[:6], corner[5:11], corner[10:16], corner[15:], corner[:1]])
    left, top, right, bottom = x0 + radius, y0 + radius, x1 - radius, y1 - radius
    return points + np.repeat([(right, bottom), (left, bottom), (left, top), (right, top)], 6, 0)


def curve(*points: Point, steps: int = 5) -> np.ndarray:
    """A smooth closed curve through the points; a point given twice is a corner."""
    basis, spans = _spline(len(points), steps)
    kept = [k for k, point in enumerate(points) if point != points[k + 1 - len(points)]]
    return (basis @ np.array(points)[spans[kept]]).reshape(-1, 2)


def twofold(*right: Point, smooth: bool = True) -> np.ndarray:
    """A shape that is symmetric about x = 0, from its right half listed from top to bottom."""
    points = [*right, *((-x, y) for x, y in reversed(right))]
    return curve(*points) if smooth else np.array(points)


def flipped(points: np.ndarray) -> np.ndarray:
    """The mirror image about x = 0."""
    return points * (-1.0, 1.0)


def both(role: str, points: np.ndarray) -> list[Part]:
    """A part and its mirror image."""
    return [(role, points), (role, flipped(points))]


def turned(points: np.ndarray, degrees: float, x: float = 0.0, y: float = 0.0) -> np.ndarray:
    """The shape turned clockwise about (x, y)."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return (points - (x, y)) @ np.array([(c, s), (-s, c)]) + (x, y)


def moved(points: np.ndarray, x: float, y: float) -> np.ndarray:
    """The shape moved by (x, y)."""
    return np.add(points, (x, y))


def scaled(points: np.ndarray, factor: float, x: float, y: float) -> np.ndarray:
    """The shape scaled about (x, y)."""
    return factor * (points - (x, y)) + (x, y)


def stroke(*points: Point, width: float, taper: float = 1.0) -> np.ndarray:
    """A thick line through the points; its width goes from `width` to `width * taper`."""
    line = np.array(points, float)
    along = line.copy()
    along[:-1] = line[1:]
    along[1:] -= line[:-1]
    along[0] -= line[0]
    half = np.linspace(width / 2, width * taper / 2, len(line)) / np.hypot(along[:, 0], along[:, 1])
    side = along[:, ::-1] * (-1, 1) * half[:, None]
    return np.concatenate([line + side, (line - side)[::-1]])


def star(radii: Point) -> np.ndarray:
    """A star of five points; `radii` are those of its points and of its notches."""
    angle = np.arange(10) * np.pi / 5 - np.pi / 2
    return np.stack([np.cos(angle), np.sin(angle)], 1) * np.where(np.arange(10) % 2, radii[1], radii[0])[:, None]


def belt(half: float) -> np.ndarray:
    """A bent belt around a ball of radius 1, its width twice `half`."""
    t = np.linspace(-1, 1, 9)
    edge = np.stack([t * 0.94, 0.22 * (1 - t**2)], 1)
    return np.concatenate([edge - (0, half), (edge - (0, -half))[::-1]])


def seam(width: float) -> np.ndarray:
    """A bent seam on the right half of a ball of radius 1."""
    t = np.linspace(-0.74, 0.74, 9)
    return stroke(*np.stack([0.26 + 0.38 * (t / 0.74) ** 2, t], 1), width=width)
