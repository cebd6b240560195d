"""Painting: drawings become anti-aliased sprites in colours and patterns; sprites go on a canvas with a backdrop."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from r2sm_jax.synthetic.random_choice import pick

RGB = Sequence[int]
Part = tuple[str, np.ndarray]
"""A role and the polygon `[N 2]` that it paints."""
COLOUR_TABLES = tomllib.loads(
    files("r2sm_jax.synthetic.scenes").joinpath("colours.toml").read_text("utf-8")
)
COLOURS: dict[str, RGB] = COLOUR_TABLES["objects"]
PATTERNS = ("plain", "striped", "dotted", "checked")
ROLES = (
    "hole",
    "main",
    "shade",
    "deep",
    "light",
    "glow",
    "detail",
    "detail_shade",
    *COLOUR_TABLES["fixed"],
)
"""What a part can be painted with. While an object is painted, the index of a role is its label."""
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

    `points` are the corners of all its polygons `[N 2]`, relative to its centre, and are split at `ends`. Polygon i has
    the label `labels[i]`. `colours` are those of the labels, as little-endian RGBa words `uint32 [64]`. `weave` maps a
    point to the pattern tile: `(scale * angle matrix [2 2], shift [2])`.
    """

    points: np.ndarray
    labels: tuple[int, ...]
    ends: np.ndarray
    colours: np.ndarray
    pattern: str
    weave: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Sprite:
    """The picture of an object: image (mode RGBA), mask `bool [h w]`, and the position (x, y) of its upper left corner.

    Before it has a place in a picture, (x, y) is relative to its centre. `extent` is the wanted length of its longer
    side in pixels of the layout. Drawn sprites have their `figure`, to be painted at other sizes.
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


def make_figure(
    rng: np.random.Generator,
    parts: Sequence[Part],
    colour: str,
    pattern: str,
    extent: float,
    degrees: float,
    mirror: bool,
) -> Figure:
    """The drawing turned, mirrored and scaled so that its longer side is `extent`, centred on the origin."""
    points = np.concatenate([shape for _, shape in parts])
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn = np.array([(-c, -s) if mirror else (c, s), (-s, c)])
    placed = points @ turn
    low, high = placed.min(0), placed.max(0)
    placed = (placed - (low + high) / 2) * (extent / (high - low).max())
    period = max(6.0, extent * rng.uniform(0.17, 0.22)) * (
        1.25 if pattern in ("dotted", "checked") else 1.0
    )
    slant = np.radians(degrees + pick(rng, (0, 0, 45, 90, 135)))
    c, s = np.cos(slant) * TILE / period, np.sin(slant) * TILE / period
    weave = np.array([(c, s), (-s, c)]), TILE * (PERIODS / 2 + rng.uniform(0, 1, 2))
    labels = tuple(ROLES.index(role) for role, _ in parts)
    ends = np.cumsum([len(shape) for _, shape in parts])[:-1]
    rgb = palette(colour, pick(rng, range(5))) + rng.normal(0, 4, 3)
    colours = np.full((len(rgb), 4), 255, np.uint8)
    colours[:, :3] = np.minimum(np.maximum(rgb, 0), 255)
    colours[ROLES.index("hole") :: PATTERN_BIT] = 0
    return Figure(placed, labels, ends, colours.view("<u4")[:, 0], pattern, weave)


def paint_figure(
    figure: Figure, extent: float, scale: float = 1.0, x: float = 0.0, y: float = 0.0
) -> Sprite:
    """The figure at `scale` pixels per unit with its centre at pixel position (x, y), anti-aliased."""
    x0, y0 = (int(v) for v in np.floor(figure.points.min(0) * scale + (x, y)))
    points = (figure.points * scale + (x - x0, y - y0)) * FINE
    width, height = (int(v) // FINE + 1 for v in points.max(0))
    canvas = Image.new("L", (width * FINE, height * FINE))
    draw = ImageDraw.Draw(canvas).draw
    for label, corners in zip(figure.labels, np.split(points, figure.ends), strict=True):
        draw.draw_polygon(corners.ravel().tolist(), label, 1)
    labels = np.frombuffer(canvas.tobytes(), np.uint8)
    if figure.pattern != "plain":
        matrix, shift = figure.weave
        m = matrix / (FINE * scale)
        origin = m @ ((x0 - x) * FINE, (y0 - y) * FINE) + shift
        coefficients = (m[0, 0], m[0, 1], origin[0], m[1, 0], m[1, 1], origin[1])
        tile = pattern_tile(figure.pattern)
        woven = tile.transform(
            canvas.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST
        )
        labels = labels + np.frombuffer(woven.tobytes(), np.uint8)
    words = figure.colours.take(labels).tobytes()
    image = (
        Image.frombuffer("RGBa", canvas.size, words, "raw", "RGBa", 0, 1)
        .reduce(FINE)
        .convert("RGBA")
    )
    return Sprite(image, opaque(image), x0, y0, extent, figure)


def opaque(image: Image.Image) -> np.ndarray:
    """The mask `bool [h w]` of a picture of mode RGBA: where alpha is at least one half."""
    return np.asarray(image.getchannel("A")) >= 128


def cast_shadow(
    canvas: Image.Image,
    sprite: Sprite,
    *,
    blur: float,
    pad: int,
    shift: tuple[int, int],
    depth: Sequence[int],
) -> Image.Image:
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
    soft = cast_shadow(
        canvas, sprite, blur=1.7 * scale, pad=pad, shift=(shift, 2 * shift), depth=SHADOW_DEPTH
    )
    corner = sprite.x, sprite.y
    canvas.paste(sprite.image, corner, sprite.image)

    height, width = sprite.mask.shape
    near = np.asarray(soft, np.float32)
    edge, lower, upper = (
        near[at : at + height, at : at + width] for at in (pad, pad + shift, pad - shift)
    )
    cover = np.asarray(sprite.image.getchannel("A"), np.float32) * (1 / 255)
    light = (0.22 * edge + 0.26 * (lower - upper) - 50) * cover
    canvas.paste(SHADOW, corner, Image.fromarray(np.maximum(-light, 0).astype(np.uint8)))
    canvas.paste((255, 255, 255), corner, Image.fromarray(np.maximum(light, 0).astype(np.uint8)))


@cache
def noise(seed: int, cells: tuple[int, int], size: int) -> np.ndarray:
    """Smooth noise in -1..1, `float32 [size size]`, with `cells` blobs down and across."""
    values = np.random.default_rng(seed).uniform(-1, 1, cells).astype(np.float32)
    return np.asarray(Image.fromarray(values).resize((size, size), Image.Resampling.BICUBIC))


@cache
def texture(name: str, variant: int, size: int) -> np.ndarray:
    """How light a material is in about -1..1, `float32 [T T]` with T = 1.5 size."""
    full = size + size // 2
    v, u = np.meshgrid(*[(np.arange(full, dtype=np.float32) + 0.5) / size] * 2, indexing="ij")
    seed = 1000 + variant * 17
    blobs = noise(seed, (6, 6), full)

    def band(t: np.ndarray, width: float) -> np.ndarray:
        """1 within `width` of the whole numbers, with a soft edge of a pixel or two."""
        t = np.abs(t - np.round(t))
        return np.clip((width - t) * size / 8 + 0.5, 0, 1)

    if name == "wood":
        planks = (3.5, 4.5, 5.5)[variant % 3]
        row = np.floor(v * planks)
        shade = np.sin(row * 12.9 + variant * 4) * 0.5
        grain = np.sin((v * 34 + 1.6 * noise(seed + 1, (9, 3), full)) * 3 + row * 5) * 0.16
        joint = band(u * 0.75 + row * 0.37, 0.008)
        return 0.5 * shade + grain + 0.2 * blobs - 1.5 * np.maximum(band(v * planks, 0.03), joint)
    if name == "tiles":
        count = (3.0, 4.0, 5.0)[variant % 3]
        checker = (
            (np.floor(u * count) + np.floor(v * count)) % 2 if variant % 2 else np.zeros_like(u)
        )
        grout = np.maximum(band(u * count, 0.035), band(v * count, 0.035))
        return 0.25 * blobs - 0.9 * checker * (1 - grout) + 0.9 * grout + 0.15
    if name == "weave":
        across = np.sin(u * 2 * np.pi * 16) * np.sin(v * 2 * np.pi * 16)
        return 0.3 * across + 0.3 * blobs + (0.5 * band(v * 3, 0.12) if variant % 2 else 0)
    if name == "grass":
        return 0.45 * noise(seed + 2, (22, 60), full) + 0.5 * blobs
    if name == "sand":
        return 0.25 * noise(seed + 3, (70, 70), full) + 0.35 * np.sin(v * 40 + 3 * blobs) * 0.6
    if name == "clouds":
        return np.clip(noise(seed + 4, (9, 5), full) * 1.6 - 0.4, 0, 1) * 1.5
    if name == "dots":
        down = v * 9 + np.floor(u * 9) % 2 * 0.5
        return 0.8 * np.clip((0.2 - np.hypot(u * 9 % 1 - 0.5, down % 1 - 0.5)) * 12, 0, 1)
    if name == "stripes":
        return 0.5 * band(u * (5, 7, 9)[variant % 3], 0.25)
    if name == "panels":
        return 0.6 * band(u * 2.5, 0.012) - 0.8 * band(u * 2.5 + 0.02, 0.012) + 0.2 * blobs
    return 0.3 * blobs


def draw_backdrop(rng: np.random.Generator, size: int) -> Image.Image:
    """A wall and a floor, a sky and a lawn, or a floor alone, lit from one spot: `size` by `size` pixels, mode RGB."""
    style = rng.random()
    variant = pick(rng, range(6))

    def tone(colours: str) -> np.ndarray:
        return (
            np.array(pick(rng, COLOUR_TABLES["backdrops"][colours]))
            + rng.normal(0, 4, 3)
            + rng.normal(0, 5)
        )

    (shift_x, shift_y), glow = rng.uniform(0, 0.5, 2), rng.uniform(0, 1, 2)
    if style < 0.25:
        ground = "grass" if rng.random() < 0.7 else "sand"
        upper, lower = ("clouds", tone("skies"), 18.0), (ground, tone(ground), 14.0)
        horizon, hill = rng.uniform(0.25, 0.6), rng.uniform(-0.08, 0.08)
    else:
        floor = pick(rng, ("wood", "wood", "tiles", "weave", "smooth"))
        lower = floor, tone(floor), rng.uniform(9, 17)
        upper = (
            pick(rng, ("smooth", "smooth", "dots", "stripes", "panels")),
            tone("walls"),
            rng.uniform(8, 15),
        )
        horizon, hill = rng.uniform(0.3, 0.65) if style < 0.7 else 0.0, 0.0

    t = (np.arange(size, dtype=np.float32) + 0.5) / size
    light = 10 - 34 * ((t[:, None] - glow[1]) ** 2 + (t[None] - glow[0]) ** 2)
    x, y = int(shift_x * size), int(shift_y * size)

    def zone(name: str, colour: np.ndarray, strength: float, rows: slice) -> np.ndarray:
        value = texture(name, variant, size)[y : y + size, x : x + size][rows] * np.float32(
            strength
        )
        return (value + light[rows])[:, :, None] + colour.astype(np.float32)

    edge = horizon + hill * np.sin(t * 5 + shift_x * 12)
    low, high = max(int(edge.min() * size) - 1, 0), min(int(edge.max() * size) + 2, size)
    share = np.clip((t[low:high, None] - edge) * size + 0.5, 0, 1)[:, :, None]
    over, under = zone(*upper, slice(0, high)), zone(*lower, slice(low, None))
    over[low:] += (under[: high - low] - over[low:]) * share
    canvas = np.concatenate([over, under[high - low :]])
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
