"""Paints drawings as sprites in colours and patterns, and pastes sprites with light and shadow."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from r2sm_jax.synthetic.random_choice import pick
from r2sm_jax.synthetic.scenes.drawings import Part

RGB = Sequence[int]
COLOUR_TABLES = tomllib.loads(
    files("r2sm_jax.synthetic.scenes").joinpath("colours.toml").read_text("utf-8")
)
COLOURS: dict[str, RGB] = COLOUR_TABLES["objects"]
PATTERNS = ("plain", "striped", "dotted", "checked")
COLOURED_ROLES = ("main", "shade", "deep", "light", "glow", "detail", "detail_shade")
ROLES = ("hole", *COLOURED_ROLES, *COLOUR_TABLES["fixed"])
"""What a part can be painted with. While an object is painted, the index of a role is its label."""
PATTERNED_ROLES = ("main", "shade", "light")
NUM_ACCENTS = len(COLOUR_TABLES["accents"]["details"])

PATTERN_BIT = 32  # added to the label of a role where the pattern is printed
TILE_PIXELS = 64  # per period of a pattern
TILE_PERIODS = 16
SUPERSAMPLING = 3  # along each side

SHADOW_COLOUR = (30, 22, 44)
LIGHT_COLOUR = (255, 255, 255)
SHADOW_OPACITY = [int(0.46 * alpha) for alpha in range(256)]


@dataclass(frozen=True)
class VectorDrawing:
    """A drawing that can be painted at any size.

    Lengths are in units of the layout, relative to its centre.

    `points` are the corners of all its polygons `[n 2]`, `splits` the indices at which the next
    polygon begins, and `labels[i]` the role of polygon i. `colours` are those of the labels, as
    little-endian RGBa words `uint32 [64]`. A point p is at `pattern_matrix @ p + pattern_shift` in
    the pattern tile.
    """

    points: np.ndarray
    labels: tuple[int, ...]
    splits: np.ndarray
    colours: np.ndarray
    pattern: str
    pattern_matrix: np.ndarray
    pattern_shift: np.ndarray


@dataclass(frozen=True)
class Sprite:
    """The picture of an object: image (mode RGBA), mask `bool [h w]`, and upper left corner (x, y).

    (x, y) is relative to the object's centre until the object is placed. `extent` is the requested
    length of its longer side in pixels of the layout. Drawn sprites keep their `drawing`, to be
    painted at other sizes.
    """

    image: Image.Image
    mask: np.ndarray
    x: int
    y: int
    extent: float
    drawing: VectorDrawing | None = None


def alpha_mask(image: Image.Image) -> np.ndarray:
    """The mask `bool [h w]` of an RGBA picture: where alpha is at least one half."""
    return np.asarray(image.getchannel("A")) >= 128


def centred_sprite(image: Image.Image, extent: float) -> Sprite:
    """The sprite of an RGBA picture, relative to its centre."""
    return Sprite(image, alpha_mask(image), -(image.width // 2), -(image.height // 2), extent)


def mix(a: RGB | np.ndarray, b: RGB | np.ndarray, share: float) -> np.ndarray:
    """`a` with a share of `b`."""
    return np.asarray(a, np.float64) * (1 - share) + np.asarray(b, np.float64) * share


@cache
def label_colours(colour: str, accent: int) -> np.ndarray:
    """The colour of every label on an object of a colour, `float64 [64 3]`."""
    main = COLOURS[colour]
    accents = COLOUR_TABLES["accents"]["details"]
    detail = accents[accent]
    shadow = (40, 16, 60)
    fixed = COLOUR_TABLES["fixed"]

    if colour == "white":
        shadow = (96, 104, 136)
        fixed = fixed | COLOUR_TABLES["fixed_on_white"]
        if detail[0] > 200:  # a bright accent would not stand out
            detail = accents[0]

    by_role = {
        "hole": (0, 0, 0),
        "main": main,
        "shade": mix(main, shadow, 0.24),
        "deep": mix(main, shadow, 0.5),
        "light": mix(main, (255, 250, 240), 0.25),
        "glow": mix(main, (255, 255, 250), 0.62),
        "detail": detail,
        "detail_shade": mix(detail, (40, 16, 60), 0.25),
        **fixed,
    }
    rgb = np.zeros((2, PATTERN_BIT, 3))
    rgb[:, : len(ROLES)] = [by_role[role] for role in ROLES]

    print_colour = COLOUR_TABLES["marks"].get(colour, mix(main, (255, 252, 244), 0.74))
    for role in PATTERNED_ROLES:
        rgb[1, ROLES.index(role)] = mix(print_colour, by_role[role], 0.15)
    return rgb.reshape(-1, 3)


@cache
def pattern_tile(pattern: str) -> Image.Image:
    """The pattern over `TILE_PERIODS` periods, mode L: `PATTERN_BIT` where it is printed."""
    u = (np.arange(TILE_PIXELS * TILE_PERIODS) % TILE_PIXELS + 0.5) / TILE_PIXELS
    v = u[:, None]
    if pattern == "striped":
        printed = np.broadcast_to(v < 0.45, (len(u), len(u)))
    elif pattern == "dotted":
        first = (u - 0.25) ** 2 + (v - 0.25) ** 2
        second = (u - 0.75) ** 2 + (v - 0.75) ** 2
        printed = np.minimum(first, second) < 0.2**2
    else:
        first = (u < 0.48) & (v < 0.48)
        second = (u >= 0.5) & (u < 0.98) & (v >= 0.5) & (v < 0.98)
        printed = first | second
    return Image.fromarray(np.where(printed, PATTERN_BIT, 0).astype(np.uint8))


def arrange_drawing(
    rng: np.random.Generator,
    parts: Sequence[Part],
    colour: str,
    pattern: str,
    extent: float,
    degrees: float,
    mirrored: bool,
) -> VectorDrawing:
    """The drawing rotated, perhaps mirrored, scaled to a longer side of `extent`, and centred."""
    points = np.concatenate([shape for _, shape in parts])
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    first_row = (-cos, -sin) if mirrored else (cos, sin)
    points = points @ np.array([first_row, (-sin, cos)])
    low, high = points.min(0), points.max(0)
    points = (points - (low + high) / 2) * (extent / (high - low).max())

    period = max(6.0, extent * rng.uniform(0.17, 0.22))
    if pattern in ("dotted", "checked"):
        period *= 1.25
    slant = np.radians(degrees + pick(rng, (0, 0, 45, 90, 135)))
    cos, sin = np.cos(slant) * TILE_PIXELS / period, np.sin(slant) * TILE_PIXELS / period
    pattern_matrix = np.array([(cos, sin), (-sin, cos)])
    pattern_shift = TILE_PIXELS * (TILE_PERIODS / 2 + rng.uniform(0, 1, 2))

    accent = pick(rng, range(NUM_ACCENTS))
    rgb = label_colours(colour, accent) + rng.normal(0, 4, 3)
    rgba = np.full((len(rgb), 4), 255, np.uint8)
    rgba[:, :3] = np.minimum(np.maximum(rgb, 0), 255)
    rgba[ROLES.index("hole") :: PATTERN_BIT] = 0

    return VectorDrawing(
        points=points,
        labels=tuple(ROLES.index(role) for role, _ in parts),
        splits=np.cumsum([len(shape) for _, shape in parts])[:-1],
        colours=rgba.view("<u4")[:, 0],
        pattern=pattern,
        pattern_matrix=pattern_matrix,
        pattern_shift=pattern_shift,
    )


def paint_drawing(
    drawing: VectorDrawing, extent: float, scale: float = 1.0, x: float = 0.0, y: float = 0.0
) -> Sprite:
    """The drawing, anti-aliased, at `scale` pixels per unit with its centre at pixel (x, y)."""
    x0, y0 = (int(v) for v in np.floor(drawing.points.min(0) * scale + (x, y)))
    points = (drawing.points * scale + (x - x0, y - y0)) * SUPERSAMPLING
    width, height = (int(v) // SUPERSAMPLING + 1 for v in points.max(0))

    # Labels first, then colours: a polygon of a hole takes away what is below it.
    canvas = Image.new("L", (width * SUPERSAMPLING, height * SUPERSAMPLING))
    draw = ImageDraw.Draw(canvas).draw  # the C object, which takes flat lists of any size quickly
    for label, corners in zip(drawing.labels, np.split(points, drawing.splits), strict=True):
        draw.draw_polygon(corners.ravel().tolist(), label, 1)
    labels = np.frombuffer(canvas.tobytes(), np.uint8)

    if drawing.pattern != "plain":
        matrix = drawing.pattern_matrix / (SUPERSAMPLING * scale)
        origin = matrix @ ((x0 - x) * SUPERSAMPLING, (y0 - y) * SUPERSAMPLING)
        origin = origin + drawing.pattern_shift
        coefficients = (*matrix[0], origin[0], *matrix[1], origin[1])
        printed = pattern_tile(drawing.pattern).transform(
            canvas.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST
        )
        labels = labels + np.frombuffer(printed.tobytes(), np.uint8)

    # RGBa (premultiplied) averages right at the edges.
    colours = drawing.colours.take(labels).tobytes()
    image = Image.frombuffer("RGBa", canvas.size, colours, "raw", "RGBa", 0, 1)
    image = image.reduce(SUPERSAMPLING).convert("RGBA")
    return Sprite(image, alpha_mask(image), x0, y0, extent, drawing)


def cast_shadow(
    canvas: Image.Image,
    sprite: Sprite,
    *,
    blur: float,
    pad: int,
    shift: tuple[int, int],
    opacity: Sequence[int],
) -> Image.Image:
    """Darkens the canvas (mode RGB) by the sprite's shadow.

    Returns the sprite's blurred alpha, `pad` pixels wider on each side. `opacity` is that of the
    shadow for each value 0..255 of the blurred alpha."""
    alpha = Image.new("L", (sprite.image.width + 2 * pad, sprite.image.height + 2 * pad))
    alpha.paste(sprite.image.getchannel("A"), (pad, pad))
    blurred = alpha.filter(ImageFilter.GaussianBlur(blur))
    corner = (sprite.x - pad + shift[0], sprite.y - pad + shift[1])
    canvas.paste(SHADOW_COLOUR, corner, blurred.point(opacity))
    return blurred


def paste_with_light(canvas: Image.Image, sprite: Sprite, scale: float) -> None:
    """Pastes the sprite on the canvas (mode RGB), lit from the upper left and with its shadow."""
    shift = max(1, round(1.3 * scale))
    pad = round(6 * scale)
    blurred = cast_shadow(
        canvas, sprite, blur=1.7 * scale, pad=pad, shift=(shift, 2 * shift), opacity=SHADOW_OPACITY
    )
    corner = (sprite.x, sprite.y)
    canvas.paste(sprite.image, corner, sprite.image)

    # The blurred alpha is a height map: its slope from upper left to lower right is how much light
    # a pixel gets.
    height, width = sprite.mask.shape
    heights = np.asarray(blurred, np.float32)

    def shifted(start: int) -> np.ndarray:
        return heights[start : start + height, start : start + width]

    alpha = np.asarray(sprite.image.getchannel("A"), np.float32) * (1 / 255)
    slope = shifted(pad + shift) - shifted(pad - shift)
    light = (0.22 * shifted(pad) + 0.26 * slope - 50) * alpha
    shade = Image.fromarray(np.maximum(-light, 0).astype(np.uint8))
    canvas.paste(SHADOW_COLOUR, corner, shade)
    canvas.paste(LIGHT_COLOUR, corner, Image.fromarray(np.maximum(light, 0).astype(np.uint8)))
