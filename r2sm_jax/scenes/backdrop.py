"""What the objects lie on: muted walls, floors, lawns and beaches with their textures."""

from functools import cache

import numpy as np
from PIL import Image

from r2sm_jax.queries.grammar import pick
from r2sm_jax.scenes.paint import COLOUR_TABLES

COLOURS = COLOUR_TABLES["backdrops"]


@cache
def noise(seed: int, cells: tuple[int, int], size: int) -> np.ndarray:
    """Smooth noise in -1..1, `float32 [size size]`, with `cells` blobs down and across."""
    values = np.random.default_rng(seed).uniform(-1, 1, cells).astype(np.float32)
    return np.asarray(Image.fromarray(values).resize((size, size), Image.Resampling.BICUBIC))


@cache
def texture(name: str, variant: int, size: int) -> np.ndarray:
    """The light and dark of a material in about -1..1, `float32 [T T]`, T = 1.5 size."""
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
        checker = (np.floor(u * count) + np.floor(v * count)) % 2 if variant % 2 else np.zeros_like(u)
        grout = np.maximum(band(u * count, 0.035), band(v * count, 0.035))
        return 0.25 * blobs - 0.9 * checker * (1 - grout) + 0.9 * grout + 0.15
    if name == "weave":
        across = np.sin(u * 2 * np.pi * 16) * np.sin(v * 2 * np.pi * 16)
        return 0.3 * across + 0.3 * blobs + (0.5 * band(v * 3, 0.12) if variant % 2 else 0)
    if name == "grass":
        blades = noise(seed + 2, (22, 60), full)
        return 0.45 * blades + 0.5 * blobs
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
    """An upper and a lower zone, lit from one spot: a wall and a floor, a sky and a lawn, or a floor alone.

    The picture has `size` by `size` pixels and mode RGB.
    """
    style = rng.random()
    variant = pick(rng, range(6))

    def tone(colours: str) -> np.ndarray:
        return np.array(pick(rng, COLOURS[colours])) + rng.normal(0, 4, 3) + rng.normal(0, 5)

    (shift_x, shift_y), glow = rng.uniform(0, 0.5, 2), rng.uniform(0, 1, 2)
    if style < 0.25:
        ground = "grass" if rng.random() < 0.7 else "sand"
        upper, lower = ("clouds", tone("skies"), 18.0), (ground, tone(ground), 14.0)
        horizon, hill = rng.uniform(0.25, 0.6), rng.uniform(-0.08, 0.08)
    else:
        floor = pick(rng, ("wood", "wood", "tiles", "weave", "smooth"))
        lower = floor, tone(floor), rng.uniform(9, 17)
        upper = pick(rng, ("smooth", "smooth", "dots", "stripes", "panels")), tone("walls"), rng.uniform(8, 15)
        horizon, hill = rng.uniform(0.3, 0.65) if style < 0.7 else 0.0, 0.0

    t = (np.arange(size, dtype=np.float32) + 0.5) / size
    light = 10 - 34 * ((t[:, None] - glow[1]) ** 2 + (t[None] - glow[0]) ** 2)
    x, y = int(shift_x * size), int(shift_y * size)

    def zone(name: str, colour: np.ndarray, strength: float, rows: slice) -> np.ndarray:
        value = texture(name, variant, size)[y : y + size, x : x + size][rows] * np.float32(strength)
        return (value + light[rows])[:, :, None] + colour.astype(np.float32)

    edge = horizon + hill * np.sin(t * 5 + shift_x * 12)
    low, high = max(int(edge.min() * size) - 1, 0), min(int(edge.max() * size) + 2, size)
    share = np.clip((t[low:high, None] - edge) * size + 0.5, 0, 1)[:, :, None]
    over, under = zone(*upper, slice(0, high)), zone(*lower, slice(low, None))
    over[low:] += (under[: high - low] - over[low:]) * share
    canvas = np.concatenate([over, under[high - low :]])
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
