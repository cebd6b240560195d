"""Backdrops of the drawn scenes: wall and floor, sky and lawn, or a floor alone."""

from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from r2sm_jax.synthetic.random_choice import pick
from r2sm_jax.synthetic.scenes.paint import COLOUR_TABLES

OUTDOOR_SHARE = 0.25
FLOOR_ONLY_FROM = 0.7  # the style is uniform in [0, 1); from here on the floor fills the picture
NUM_VARIANTS = 6
TEXTURE_SIDE = 1.5  # sides of a texture in pictures, so that a picture can show any part of it


class Surface(NamedTuple):
    """A material, its mean colour `[3]` and the contrast of its texture in grey levels."""

    material: str
    colour: np.ndarray
    contrast: float


def draw_backdrop(rng: np.random.Generator, size: int) -> Image.Image:
    """A random backdrop of `size` by `size` pixels, mode RGB, lit from one spot."""
    style = rng.random()
    variant = pick(rng, range(NUM_VARIANTS))
    shift_x, shift_y = rng.uniform(0, 0.5, 2)
    lamp_x, lamp_y = rng.uniform(0, 1, 2)

    # The order of the random numbers is part of the data: here the upper surface comes first,
    # indoors the floor.
    if style < OUTDOOR_SHARE:
        ground = "grass" if rng.random() < 0.7 else "sand"
        upper = Surface("clouds", _random_tone(rng, "skies"), 18.0)
        lower = Surface(ground, _random_tone(rng, ground), 14.0)
        horizon = rng.uniform(0.25, 0.6)
        hill_height = rng.uniform(-0.08, 0.08)
    else:
        floor = pick(rng, ("wood", "wood", "tiles", "weave", "smooth"))
        lower = Surface(floor, _random_tone(rng, floor), rng.uniform(9, 17))
        wall = pick(rng, ("smooth", "smooth", "dots", "stripes", "panels"))
        upper = Surface(wall, _random_tone(rng, "walls"), rng.uniform(8, 15))
        horizon = rng.uniform(0.3, 0.65) if style < FLOOR_ONLY_FROM else 0.0
        hill_height = 0.0

    # Light falls off with the square of the distance from the lamp, `float32 [size size]`.
    t = (np.arange(size, dtype=np.float32) + 0.5) / size
    light = 10 - 34 * ((t[:, None] - lamp_y) ** 2 + (t[None] - lamp_x) ** 2)
    x, y = int(shift_x * size), int(shift_y * size)

    def paint_rows(surface: Surface, rows: slice) -> np.ndarray:
        """Some rows of the picture, all of the surface, `float [rows size 3]`."""
        part = texture(surface.material, variant, size)[y : y + size, x : x + size][rows]
        grey = part * np.float32(surface.contrast) + light[rows]
        return grey[:, :, None] + surface.colour.astype(np.float32)

    # Only the rows around the edge between the surfaces are blended.
    edge = horizon + hill_height * np.sin(t * 5 + shift_x * 12)
    low = max(int(edge.min() * size) - 1, 0)
    high = min(int(edge.max() * size) + 2, size)
    lower_share = np.clip((t[low:high, None] - edge) * size + 0.5, 0, 1)[:, :, None]

    above = paint_rows(upper, slice(0, high))
    below = paint_rows(lower, slice(low, None))
    above[low:] += (below[: high - low] - above[low:]) * lower_share
    canvas = np.concatenate([above, below[high - low :]])
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))


def _random_tone(rng: np.random.Generator, surface: str) -> np.ndarray:
    """A colour of the surface `[3]`, with noise in each channel and in its brightness."""
    colour = np.array(pick(rng, COLOUR_TABLES["backdrops"][surface]))
    return colour + rng.normal(0, 4, 3) + rng.normal(0, 5)


@cache
def noise(seed: int, cells: tuple[int, int], size: int) -> np.ndarray:
    """Smooth noise in -1..1, `float32 [size size]`, with `cells` blobs down and across."""
    values = np.random.default_rng(seed).uniform(-1, 1, cells).astype(np.float32)
    return np.asarray(Image.fromarray(values).resize((size, size), Image.Resampling.BICUBIC))


@cache
def texture(material: str, variant: int, size: int) -> np.ndarray:
    """How light a material is, in about -1..1: `float32 [side side]`, side = `TEXTURE_SIDE` * size.

    It is made once and each picture shows a part of it.
    """
    side = int(TEXTURE_SIDE * size)
    seed = 1000 + variant * 17
    t = (np.arange(side, dtype=np.float32) + 0.5) / size
    v, u = np.meshgrid(t, t, indexing="ij")
    blobs = noise(seed, (6, 6), side)

    def lines_at_integers(t: np.ndarray, width: float) -> np.ndarray:
        """1 within `width` of the whole numbers, with a soft edge of a pixel or two."""
        distance = np.abs(t - np.round(t))
        return np.clip((width - distance) * size / 8 + 0.5, 0, 1)

    if material == "wood":
        num_planks = (3.5, 4.5, 5.5)[variant % 3]
        plank = np.floor(v * num_planks)
        shade = np.sin(plank * 12.9 + variant * 4) * 0.5
        grain = np.sin((v * 34 + 1.6 * noise(seed + 1, (9, 3), side)) * 3 + plank * 5) * 0.16
        gaps = lines_at_integers(v * num_planks, 0.03)
        joints = lines_at_integers(u * 0.75 + plank * 0.37, 0.008)
        return 0.5 * shade + grain + 0.2 * blobs - 1.5 * np.maximum(gaps, joints)

    if material == "tiles":
        num_tiles = (3.0, 4.0, 5.0)[variant % 3]
        if variant % 2:
            checker = (np.floor(u * num_tiles) + np.floor(v * num_tiles)) % 2
        else:
            checker = np.zeros_like(u)
        across = lines_at_integers(u * num_tiles, 0.035)
        down = lines_at_integers(v * num_tiles, 0.035)
        grout = np.maximum(across, down)
        return 0.25 * blobs - 0.9 * checker * (1 - grout) + 0.9 * grout + 0.15

    if material == "weave":
        threads = np.sin(u * 2 * np.pi * 16) * np.sin(v * 2 * np.pi * 16)
        stripes = 0.5 * lines_at_integers(v * 3, 0.12) if variant % 2 else 0
        return 0.3 * threads + 0.3 * blobs + stripes

    if material == "grass":
        return 0.45 * noise(seed + 2, (22, 60), side) + 0.5 * blobs

    if material == "sand":
        return 0.25 * noise(seed + 3, (70, 70), side) + 0.35 * np.sin(v * 40 + 3 * blobs) * 0.6

    if material == "clouds":
        return np.clip(noise(seed + 4, (9, 5), side) * 1.6 - 0.4, 0, 1) * 1.5

    if material == "dots":
        staggered = v * 9 + np.floor(u * 9) % 2 * 0.5
        distance = np.hypot(u * 9 % 1 - 0.5, staggered % 1 - 0.5)
        return 0.8 * np.clip((0.2 - distance) * 12, 0, 1)

    if material == "stripes":
        return 0.5 * lines_at_integers(u * (5, 7, 9)[variant % 3], 0.25)

    if material == "panels":
        bright = 0.6 * lines_at_integers(u * 2.5, 0.012)
        dark = 0.8 * lines_at_integers(u * 2.5 + 0.02, 0.012)
        return bright - dark + 0.2 * blobs

    return 0.3 * blobs  # smooth
