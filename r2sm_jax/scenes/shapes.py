"""Shapes, colours and the painter of the procedural pictures: one object becomes an anti-aliased image.

A drawing is a list of parts, painted one over the other. A part is a role (what it is painted with) and a
polygon `[N 2]` in unit coordinates: x to the right, y down, the object within about [-1, 1]. Parts with the
role `HOLE` cut the background free again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

T = TypeVar("T")
Part = tuple[int, np.ndarray]
RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (212, 40, 44),
    "orange": (246, 130, 28),
    "yellow": (250, 208, 46),
    "green": (52, 156, 72),
    "blue": (40, 102, 208),
    "purple": (122, 62, 168),
    "pink": (246, 138, 182),
    "brown": (122, 76, 44),
    "white": (244, 244, 240),
}
PATTERNS = ("plain", "striped", "dotted", "checked")

# What a part is painted with. The first five take the object's colour; SURFACE of them carry its pattern.
(HOLE, MAIN, SHADE, DEEP, LIGHT, GLOW, DETAIL, DETAIL_SHADE, CREAM, CREAM_SHADE, INK, METAL, METAL_SHADE,
 WOOD, WOOD_SHADE, LEAF, GLASS, GLASS_LIGHT, FLAME, ROSE) = range(20)  # fmt: skip
SURFACE = (MAIN, SHADE, LIGHT)
FIXED: dict[int, RGB] = {
    CREAM: (252, 244, 226), CREAM_SHADE: (226, 210, 184), INK: (44, 42, 54), METAL: (176, 186, 198),
    METAL_SHADE: (132, 142, 158), WOOD: (226, 182, 122), WOOD_SHADE: (190, 140, 84), LEAF: (104, 158, 82),
    GLASS: (158, 204, 226), GLASS_LIGHT: (212, 236, 246), FLAME: (255, 178, 62), ROSE: (240, 150, 150),
}  # fmt: skip
ACCENTS: tuple[RGB, ...] = ((52, 64, 96), (250, 238, 214), (74, 138, 142), (66, 60, 70), (226, 190, 128))
PRINTS: dict[str, RGB] = {"white": (128, 144, 172), "yellow": (166, 112, 24), "pink": (196, 56, 120)}
PATTERN_BIT = 32
TILE = 64  # pixels per period of a pattern tile
PERIODS = 16
FINE = 3  # supersampling along each side


def pick(rng: np.random.Generator, choices: Sequence[T]) -> T:
    """One of the choices, all equally likely."""
    return choices[int(rng.random() * len(choices))]


# ---------------------------------------------------------------------------------------------- shapes


@cache
def _circle(count: int) -> np.ndarray:
    angle = np.arange(count) * (2 * np.pi / count)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


@cache
def _spline(count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The Catmull-Rom basis `[steps 4]` and which four control points each of `count` spans uses."""
    t = np.arange(steps)[:, None] / steps
    basis = 0.5 * np.concatenate([-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3,
                                  -(t**2) + t**3], 1)  # fmt: skip
    return basis, (np.arange(count)[:, None] + np.arange(-1, 3)) % count


def polygon(*points: tuple[float, float]) -> np.ndarray:
    return np.array(points)


def ellipse(x: float, y: float, rx: float, ry: float | None = None, count: int = 28) -> np.ndarray:
    return _circle(count) * (rx, rx if ry is None else ry) + (x, y)


def box(x0: float, y0: float, x1: float, y1: float, radius: float = 0.0) -> np.ndarray:
    """A rectangle with round corners."""
    if not radius:
        return np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])
    corner = _circle(20) * radius
    points = np.concatenate([corner[:6], corner[5:11], corner[10:16], corner[15:], corner[:1]])
    points[:6] += (x1 - radius, y1 - radius)
    points[6:12] += (x0 + radius, y1 - radius)
    points[12:18] += (x0 + radius, y0 + radius)
    points[18:] += (x1 - radius, y0 + radius)
    return points


def curve(*points: tuple[float, float], steps: int = 5) -> np.ndarray:
    """A smooth closed curve through the points; a point given twice is a corner."""
    basis, spans = _spline(len(points), steps)
    kept = [k for k, point in enumerate(points) if point != points[k + 1 - len(points)]]
    return (basis @ np.array(points)[spans[kept]]).reshape(-1, 2)


def twofold(*right: tuple[float, float], smooth: bool = True, x: float = 0.0) -> np.ndarray:
    """A shape that is symmetric about the vertical at `x`, from its right half listed top to bottom."""
    points = [(x + dx, y) for dx, y in right] + [(x - dx, y) for dx, y in reversed(right)]
    return curve(*points) if smooth else np.array(points)


def flipped(points: np.ndarray) -> np.ndarray:
    """The mirror image about x = 0."""
    return points * (-1.0, 1.0)


def turned(points: np.ndarray, degrees: float, x: float = 0.0, y: float = 0.0) -> np.ndarray:
    """The shape turned clockwise about (x, y)."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return (points - (x, y)) @ np.array([(c, s), (-s, c)]) + (x, y)


def stroke(*points: tuple[float, float], width: float, taper: float = 1.0) -> np.ndarray:
    """A thick line through the points; its width goes from `width` to `width * taper`."""
    line = np.array(points, float)
    along = line.copy()
    along[:-1] = line[1:]
    along[1:] -= line[:-1]
    along[0] -= line[0]
    half = np.linspace(width / 2, width * taper / 2, len(line)) / np.hypot(along[:, 0], along[:, 1])
    side = along[:, ::-1] * (-1, 1) * half[:, None]
    return np.concatenate([line + side, (line - side)[::-1]])


# ---------------------------------------------------------------------------------------------- colours


def mix(a: RGB | np.ndarray, b: RGB | np.ndarray, share: float) -> np.ndarray:
    """`a` with a share of `b`."""
    return np.asarray(a, np.float64) * (1 - share) + np.asarray(b, np.float64) * share


@cache
def palette(colour: str, accent: int) -> np.ndarray:
    """The paint of every role for one colour, `float64 [64 3]`; from `PATTERN_BIT` on, as printed."""
    pale = colour == "white"
    main, shadow = COLOURS[colour], (96, 104, 136) if pale else (40, 16, 60)
    rgb = np.zeros((PATTERN_BIT * 2, 3))
    for role, fixed in FIXED.items():
        rgb[role] = fixed
    if pale:
        rgb[CREAM], rgb[CREAM_SHADE] = (206, 212, 224), (176, 184, 200)
    rgb[MAIN], rgb[SHADE], rgb[DEEP] = main, mix(main, shadow, 0.24), mix(main, shadow, 0.5)
    rgb[LIGHT], rgb[GLOW] = mix(main, (255, 250, 240), 0.25), mix(main, (255, 255, 250), 0.62)
    detail = ACCENTS[0 if pale and ACCENTS[accent][0] > 200 else accent]
    rgb[DETAIL], rgb[DETAIL_SHADE] = detail, mix(detail, (40, 16, 60), 0.25)
    rgb[PATTERN_BIT:] = rgb[:PATTERN_BIT]
    print_colour = PRINTS.get(colour, mix(main, (255, 252, 244), 0.74))
    for role in SURFACE:
        rgb[PATTERN_BIT + role] = mix(print_colour, rgb[role], 0.15)
    return rgb


def words_of(rgb: np.ndarray) -> np.ndarray:
    """A palette as little-endian RGBa words, `uint32 [64]`; the hole is transparent."""
    rgba = np.full((len(rgb), 4), 255, np.uint8)
    rgba[:, :3] = np.minimum(np.maximum(rgb, 0), 255)
    rgba[HOLE::PATTERN_BIT] = 0
    return rgba.view("<u4")[:, 0]


@cache
def pattern_tile(pattern: str) -> Image.Image:
    """A stretch of the pattern, mode L, `PERIODS` periods wide: `PATTERN_BIT` where it is printed, else 0."""
    u = (np.arange(TILE * PERIODS) % TILE + 0.5) / TILE
    v = u[:, None]
    if pattern == "striped":
        printed = np.broadcast_to(v < 0.45, (len(u), len(u)))
    elif pattern == "dotted":
        near = ((u - 0.25) ** 2 + (v - 0.25) ** 2).clip(max=9), (u - 0.75) ** 2 + (v - 0.75) ** 2
        printed = np.minimum(*near) < 0.2**2
    else:
        printed = ((u < 0.48) & (v < 0.48)) | ((u >= 0.5) & (u < 0.98) & (v >= 0.5) & (v < 0.98))
    return Image.fromarray(np.where(printed, PATTERN_BIT, 0).astype(np.uint8))


# ---------------------------------------------------------------------------------------------- painting


@dataclass(frozen=True)
class Figure:
    """One object ready to be painted at any size. Lengths are in units of the layout.

    `points` are all corners of its parts `[N 2]`, relative to its centre; `roles` and `counts` say how they
    split into polygons. `weave` maps a point to the pattern tile: `(scale * angle matrix [2 2], shift [2])`.
    """

    points: np.ndarray
    roles: tuple[int, ...]
    counts: tuple[int, ...]
    paint: np.ndarray
    pattern: str
    weave: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Sprite:
    """A painted object: its image (mode RGBA), its mask `bool [h w]` and where its upper left corner is."""

    image: Image.Image
    mask: np.ndarray
    x: int
    y: int


def make_figure(rng: np.random.Generator, parts: Sequence[Part], colour: str, pattern: str, extent: float,
                degrees: float, mirror: bool) -> Figure:  # fmt: skip
    """The drawing turned, mirrored and scaled so that its longer side is `extent`, centred on the origin."""
    points = np.concatenate([shape for _, shape in parts])
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn = np.array([(-c, -s) if mirror else (c, s), (-s, c)])
    placed = points @ turn
    low, high = placed.min(0), placed.max(0)
    scale = extent / (high - low).max()
    placed = (placed - (low + high) / 2) * scale
    period = max(6.0, extent * rng.uniform(0.17, 0.22)) * (1.25 if pattern in ("dotted", "checked") else 1.0)
    slant = np.radians(degrees + pick(rng, (0, 0, 45, 90, 135)))
    c, s = np.cos(slant) * TILE / period, np.sin(slant) * TILE / period
    weave = np.array([(c, s), (-s, c)]), TILE * (PERIODS / 2 + rng.uniform(0, 1, 2))
    counts = tuple(len(shape) for _, shape in parts)
    rgb = palette(colour, pick(rng, range(len(ACCENTS)))) + rng.normal(0, 4, 3)
    return Figure(placed, tuple(role for role, _ in parts), counts, words_of(rgb), pattern, weave)


def paint(figure: Figure, scale: float, x: float, y: float) -> Sprite:
    """The figure at `scale` pixels per unit with its centre at pixel position (x, y), anti-aliased."""
    x0, y0 = (int(v) for v in np.floor(figure.points.min(0) * scale + (x, y)))
    points = (figure.points * scale + (x - x0, y - y0)) * FINE
    width, height = (int(v) // FINE + 1 for v in points.max(0))
    labels = Image.new("L", (width * FINE, height * FINE))
    draw = ImageDraw.Draw(labels).draw
    flat = points.ravel().tolist()
    start = 0
    for role, count in zip(figure.roles, figure.counts, strict=True):
        draw.draw_polygon(flat[start : start + 2 * count], role, 1)
        start += 2 * count
    index = np.frombuffer(labels.tobytes(), np.uint8)
    if figure.pattern != "plain":
        matrix, shift = figure.weave
        m = matrix / (FINE * scale)
        origin = m @ ((x0 - x) * FINE, (y0 - y) * FINE) + shift
        coefficients = (m[0, 0], m[0, 1], origin[0], m[1, 0], m[1, 1], origin[1])
        tile = pattern_tile(figure.pattern)
        woven = tile.transform(labels.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST)
        index = index + np.frombuffer(woven.tobytes(), np.uint8)
    words = figure.paint.take(index).tobytes()
    image = Image.frombuffer("RGBa", labels.size, words, "raw", "RGBa", 0, 1).reduce(FINE).convert("RGBA")
    return Sprite(image, np.asarray(image.getchannel("A")) >= 128, x0, y0)
