"""The painter: a drawing in a colour and a pattern becomes an anti-aliased picture, and pictures go on a canvas."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from r2sm_jax.queries.grammar import pick
from r2sm_jax.scenes.shapes import Part

RGB = Sequence[int]
COLOUR_TABLES = tomllib.loads(files("r2sm_jax.scenes").joinpath("colours.toml").read_text())
COLOURS: dict[str, RGB] = COLOUR_TABLES["objects"]
PATTERNS = ("plain", "striped", "dotted", "checked")
ROLES = ("hole", "main", "shade", "deep", "light", "glow", "detail", "detail_shade", *COLOUR_TABLES["fixed"])
"""What a part can be painted with; a role's index is its label while an object is painted."""
PATTERNED = ("main", "shade", "light")  # roles whose parts carry the object's pattern
PATTERN_BIT = 32  # added to the label of a role where the pattern is printed
TILE = 64  # pixels per period of a pattern tile
PERIODS = 16
FINE = 3  # supersampling along each side
SHADOW = (30, 22, 44)
SHADOW_DEPTH = [int(0.46 * k) for k in range(256)]


@dataclass(frozen=True)
class Figure:
    """A drawing that can be painted at any size. Lengths are in units of the layout.

    `points` are the corners of all its polygons `[N 2]`, relative to its centre; polygon i has `counts[i]` of them and
    the label `labels[i]`. `paint` is the colour of each label, as little-endian RGBa words `uint32 [64]`. `weave` maps
    a point to the pattern tile: `(scale * angle matrix [2 2], shift [2])`.
    """

    points: np.ndarray
    labels: tuple[int, ...]
    counts: tuple[int, ...]
    paint: np.ndarray
    pattern: str
    weave: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Sprite:
    """The picture of an object: image (mode RGBA), mask `bool [h w]`, and where its upper left corner is.

    A sprite without a place has its corner relative to its centre. `extent` is the length of its longer side as it was
    asked for, in pixels of the layout. `figure` is there where it can be painted at other sizes.
    """

    image: Image.Image
    mask: np.ndarray
    x: int
    y: int
    extent: float
    figure: Figure | None = None


def mix(a: RGB | np.ndarray, b: RGB | np.ndarray, share: float) -> np.ndarray:
    """`a` with a share of `b`."""
    return np.asarray(a, np.float64) * (1 - share) + np.asarray(b, np.float64) * share


@cache
def palette(colour: str, accent: int) -> np.ndarray:
    """The colour of every label on an object of a colour, `float64 [64 3]`."""
    white, main, accents = colour == "white", COLOURS[colour], COLOUR_TABLES["accents"]["details"]
    shadow = (96, 104, 136) if white else (40, 16, 60)
    detail = accents[0 if white and accents[accent][0] > 200 else accent]
    by_role = {
        "hole": (0, 0, 0),
        "main": main,
        "shade": mix(main, shadow, 0.24),
        "deep": mix(main, shadow, 0.5),
        "light": mix(main, (255, 250, 240), 0.25),
        "glow": mix(main, (255, 255, 250), 0.62),
        "detail": detail,
        "detail_shade": mix(detail, (40, 16, 60), 0.25),
        **COLOUR_TABLES["fixed"],
        **(COLOUR_TABLES["fixed_on_white"] if white else {}),
    }
    rgb = np.zeros((2, PATTERN_BIT, 3))
    rgb[:, : len(ROLES)] = [by_role[role] for role in ROLES]
    marks = COLOUR_TABLES["marks"].get(colour, mix(main, (255, 252, 244), 0.74))
    for role in PATTERNED:
        rgb[1, ROLES.index(role)] = mix(marks, by_role[role], 0.15)
    return rgb.reshape(-1, 3)


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


def make_figure(rng: np.random.Generator, parts: Sequence[Part], colour: str, pattern: str, extent: float,
                degrees: float, mirror: bool) -> Figure:  # fmt: skip
    """The drawing turned, mirrored and scaled so that its longer side is `extent`, centred on the origin."""
    points = np.concatenate([shape for _, shape in parts])
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn = np.array([(-c, -s) if mirror else (c, s), (-s, c)])
    placed = points @ turn
    low, high = placed.min(0), placed.max(0)
    placed = (placed - (low + high) / 2) * (extent / (high - low).max())
    period = max(6.0, extent * rng.uniform(0.17, 0.22)) * (1.25 if pattern in ("dotted", "checked") else 1.0)
    slant = np.radians(degrees + pick(rng, (0, 0, 45, 90, 135)))
    c, s = np.cos(slant) * TILE / period, np.sin(slant) * TILE / period
    weave = np.array([(c, s), (-s, c)]), TILE * (PERIODS / 2 + rng.uniform(0, 1, 2))
    labels = tuple(ROLES.index(role) for role, _ in parts)
    counts = tuple(len(shape) for _, shape in parts)
    rgb = palette(colour, pick(rng, range(5))) + rng.normal(0, 4, 3)
    paint = np.full((len(rgb), 4), 255, np.uint8)
    paint[:, :3] = np.minimum(np.maximum(rgb, 0), 255)
    paint[ROLES.index("hole") :: PATTERN_BIT] = 0
    return Figure(placed, labels, counts, paint.view("<u4")[:, 0], pattern, weave)


def paint_figure(figure: Figure, extent: float, scale: float = 1.0, x: float = 0.0, y: float = 0.0) -> Sprite:
    """The figure at `scale` pixels per unit with its centre at pixel position (x, y), anti-aliased."""
    x0, y0 = (int(v) for v in np.floor(figure.points.min(0) * scale + (x, y)))
    points = (figure.points * scale + (x - x0, y - y0)) * FINE
    width, height = (int(v) // FINE + 1 for v in points.max(0))
    canvas = Image.new("L", (width * FINE, height * FINE))
    draw = ImageDraw.Draw(canvas).draw
    flat = points.ravel().tolist()
    start = 0
    for label, count in zip(figure.labels, figure.counts, strict=True):
        draw.draw_polygon(flat[start : start + 2 * count], label, 1)
        start += 2 * count
    labels = np.frombuffer(canvas.tobytes(), np.uint8)
    if figure.pattern != "plain":
        matrix, shift = figure.weave
        m = matrix / (FINE * scale)
        origin = m @ ((x0 - x) * FINE, (y0 - y) * FINE) + shift
        coefficients = (m[0, 0], m[0, 1], origin[0], m[1, 0], m[1, 1], origin[1])
        tile = pattern_tile(figure.pattern)
        woven = tile.transform(canvas.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST)
        labels = labels + np.frombuffer(woven.tobytes(), np.uint8)
    words = figure.paint.take(labels).tobytes()
    image = Image.frombuffer("RGBa", canvas.size, words, "raw", "RGBa", 0, 1).reduce(FINE).convert("RGBA")
    return Sprite(image, opaque(image), x0, y0, extent, figure)


def opaque(image: Image.Image) -> np.ndarray:
    """The mask `bool [h w]` of a picture of mode RGBA: where alpha is at least one half."""
    return np.asarray(image.getchannel("A")) >= 128


def cast_shadow(canvas: Image.Image, sprite: Sprite, *, blur: float, pad: int, shift: tuple[int, int],
                depth: Sequence[int]) -> Image.Image:  # fmt: skip
    """Darkens the canvas (mode RGB) by the sprite's shadow; returns its blurred alpha, `pad` pixels wider on each side.

    `depth` is the opacity of the shadow for each value 0..255 of the blurred alpha.
    """
    alpha = Image.new("L", (sprite.image.width + 2 * pad, sprite.image.height + 2 * pad))
    alpha.paste(sprite.image.getchannel("A"), (pad, pad))
    soft = alpha.filter(ImageFilter.GaussianBlur(blur))
    canvas.paste(SHADOW, (sprite.x - pad + shift[0], sprite.y - pad + shift[1]), soft.point(depth))
    return soft


def paint_lit(canvas: Image.Image, sprite: Sprite, scale: float) -> None:
    """Paints the sprite, lit from the upper left and with its shadow, on the canvas (mode RGB)."""
    shift, pad = max(1, round(1.3 * scale)), round(6 * scale)
    soft = cast_shadow(canvas, sprite, blur=1.7 * scale, pad=pad, shift=(shift, 2 * shift), depth=SHADOW_DEPTH)
    corner = sprite.x, sprite.y
    canvas.paste(sprite.image, corner, sprite.image)

    height, width = sprite.mask.shape
    near = np.asarray(soft, np.float32)
    edge = near[pad : pad + height, pad : pad + width]
    lower = near[pad + shift : pad + shift + height, pad + shift : pad + shift + width]
    upper = near[pad - shift : pad - shift + height, pad - shift : pad - shift + width]
    cover = np.asarray(sprite.image.getchannel("A"), np.float32) * (1 / 255)
    light = (0.22 * edge + 0.26 * (lower - upper) - 50) * cover
    canvas.paste(SHADOW, corner, Image.fromarray(np.maximum(-light, 0).astype(np.uint8)))
    canvas.paste((255, 255, 255), corner, Image.fromarray(np.maximum(light, 0).astype(np.uint8)))
