"""Random regions of a picture: they stand for stuff, which lies behind the objects.

Photos with masks of objects have none of walls, floors and tables. But what is completed in life is
often such a thing, or has such things as neighbours. A region is drawn as a whole; the objects that
lie on it hide parts of it.
"""

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFilter
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.masks import Mask

KINDS = ("half", "band", "polygon", "blob", "segments", "segments")
"""What is drawn, equally often; segments twice, since they are of the photo itself."""
MAX_WAVINESS = 0.06  # by which an edge departs from a line, in longer sides of the picture
MIN_SEGMENTS, MAX_SEGMENTS = 4, 10  # of a photo
COLOUR_WEIGHT = 2.0  # of a difference in colour (0 to 1), against one in place, in longer sides


def draw_region(image: UInt8[np.ndarray, "H W 3"], objects: Mask, rng: np.random.Generator) -> Mask:
    """Draws a region `[H W]`: a half of the picture, a band, a polygon, a blob, or some segments of
    the background. `objects`: the visible masks of all objects."""
    height, width = objects.shape
    kind = rng.choice(KINDS)
    if kind == "segments":
        return draw_segments(image, objects, rng)
    if kind == "polygon":
        return draw_polygon(height, width, rng)

    waves = smooth_noise(height, width, rng)
    if kind == "blob":
        return waves > np.quantile(waves, rng.uniform(0.4, 0.8))

    rows, columns = np.mgrid[:height, :width] / max(height, width)
    angle = rng.uniform(0, 2 * np.pi)
    row, column = rng.uniform(0.15, 0.85, 2) * (rows[-1, -1], columns[-1, -1])
    distance = np.sin(angle) * (rows - row) + np.cos(angle) * (columns - column)
    distance += rng.uniform(0, MAX_WAVINESS) * waves
    return np.abs(distance) < rng.uniform(0.05, 0.2) if kind == "band" else distance > 0


def draw_polygon(height: int, width: int, rng: np.random.Generator) -> Mask:
    """Draws a polygon of three to seven corners around a point of the picture."""
    angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 8)))
    radii = rng.uniform(0.15, 0.6, len(angles)) * max(height, width)
    x, y = rng.uniform(0.15, 0.85, 2) * (width, height)
    corners = np.stack([x + radii * np.cos(angles), y + radii * np.sin(angles)], axis=1)
    picture = Image.new("1", (width, height))
    ImageDraw.Draw(picture).polygon(corners.ravel().tolist(), fill=1)
    return np.array(picture)


def draw_segments(
    image: UInt8[np.ndarray, "H W 3"], objects: Mask, rng: np.random.Generator
) -> Mask:
    """Draws one to three segments of the background: what is like a pixel of it, in colour and
    place. Behind an object is what is next to it.

    Where objects cover the whole picture, the region is empty.
    """
    if objects.all():
        return np.zeros_like(objects)
    height, width = objects.shape
    smooth = Image.fromarray(image).filter(ImageFilter.BoxBlur(5))
    colours = np.asarray(smooth, np.float32) / 255
    places = np.moveaxis(np.mgrid[:height, :width], 0, -1) / max(height, width)
    features = np.concatenate([COLOUR_WEIGHT * colours, places], axis=-1, dtype=np.float32)

    count = rng.integers(MIN_SEGMENTS, MAX_SEGMENTS + 1)
    seeds = features[~objects][rng.integers(masks.area(~objects), size=count)]
    distances = np.stack([((features - seed) ** 2).sum(-1) for seed in seeds])
    chosen = distances.argmin(0) < rng.integers(1, 4)
    nearest = ndimage.distance_transform_edt(objects, return_distances=False, return_indices=True)
    rows, columns = np.asarray(nearest)
    return chosen[rows, columns]


def smooth_noise(
    height: int, width: int, rng: np.random.Generator
) -> Float[np.ndarray, "{height} {width}"]:
    """Draws smooth noise of variance about one."""
    cells = rng.integers(4, 8, 2)
    noise = Image.fromarray(rng.normal(size=cells).astype(np.float32))
    return np.array(noise.resize((width, height), Image.Resampling.BICUBIC))
