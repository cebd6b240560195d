"""What the objects lie on: muted walls, floors, lawns and beaches with their textures."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from r2sm_jax.scenes.shapes import pick

WALLS = ((204, 194, 178), (178, 190, 188), (190, 186, 200), (196, 178, 172), (172, 184, 200), (186, 196, 174),
         (206, 198, 196), (164, 172, 176))  # fmt: skip
FLOORS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "wood": ((186, 160, 132), (170, 148, 128), (198, 178, 152), (160, 146, 134)),
    "tiles": ((188, 190, 186), (172, 182, 184), (198, 188, 176), (176, 174, 184)),
    "weave": ((168, 160, 170), (158, 170, 168), (186, 172, 158), (160, 164, 180)),
    "smooth": ((176, 170, 162), (160, 168, 172), (190, 182, 170), (182, 172, 178)),
    "grass": ((142, 164, 120), (154, 168, 130), (136, 156, 126)),
    "sand": ((206, 192, 160), (198, 184, 162)),
}
WALL_TEXTURES = ("smooth", "smooth", "dots", "stripes", "panels")
SKIES = ((176, 200, 214), (188, 204, 208), (206, 200, 200), (170, 190, 208))


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


@dataclass(frozen=True)
class Backdrop:
    """What the objects lie on: an upper and a lower zone, each `(texture, variant, colour, strength)`.

    `horizon` is the height of the border between them and `hill` its bend, in shares of the picture.
    `shift` moves the textures; `glow` is where the light falls.
    """

    upper: tuple[str, int, np.ndarray, float]
    lower: tuple[str, int, np.ndarray, float]
    horizon: float
    hill: float
    shift: tuple[float, float]
    glow: tuple[float, float]

    @staticmethod
    def sample(rng: np.random.Generator) -> "Backdrop":
        style = rng.random()
        variant = pick(rng, range(6))

        def tone(colours: tuple[tuple[int, int, int], ...]) -> np.ndarray:
            return np.array(pick(rng, colours)) + rng.normal(0, 4, 3) + rng.normal(0, 5)

        shift, glow = tuple(rng.uniform(0, 0.5, 2)), tuple(rng.uniform(0, 1, 2))
        if style < 0.25:
            ground = "grass" if rng.random() < 0.7 else "sand"
            upper = ("clouds", variant, tone(SKIES), 18.0)
            lower = (ground, variant, tone(FLOORS[ground]), 14.0)
            return Backdrop(upper, lower, rng.uniform(0.25, 0.6), rng.uniform(-0.08, 0.08), shift, glow)
        floor = pick(rng, ("wood", "wood", "tiles", "weave", "smooth"))
        lower = (floor, variant, tone(FLOORS[floor]), rng.uniform(9, 17))
        wall = pick(rng, WALL_TEXTURES)
        upper = (wall, variant, tone(WALLS), rng.uniform(8, 15))
        return Backdrop(upper, lower, rng.uniform(0.3, 0.65) if style < 0.7 else 0.0, 0.0, shift, glow)

    def paint(self, size: int) -> Image.Image:
        """The backdrop, `size` by `size` pixels, mode RGB."""
        dx, dy = (int(s * size) for s in self.shift)
        t = (np.arange(size, dtype=np.float32) + 0.5) / size
        light = 10 - 34 * ((t[:, None] - self.glow[1]) ** 2 + (t[None] - self.glow[0]) ** 2)

        def zone(name: str, variant: int, colour: np.ndarray, strength: float, rows: slice) -> np.ndarray:
            value = texture(name, variant, size)[dy : dy + size, dx : dx + size][rows] * np.float32(strength)
            return (value + light[rows])[:, :, None] + colour.astype(np.float32)

        edge = self.horizon + self.hill * np.sin(t * 5 + self.shift[0] * 12)
        low, high = max(int(edge.min() * size) - 1, 0), min(int(edge.max() * size) + 2, size)
        middle = slice(low, high)
        share = np.clip((t[middle, None] - edge) * size + 0.5, 0, 1)[:, :, None]
        over, under = zone(*self.upper, slice(0, high)), zone(*self.lower, slice(low, None))
        over[low:] += (under[: high - low] - over[low:]) * share
        canvas = np.concatenate([over, under[high - low :]])
        return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
