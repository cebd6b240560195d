"""Square crops around visible masks, boxes and clicks, and the way back to the image.

The networks of models/crop_unet.py read such crops.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.query import Click, Prompt

CROP_EXTENT = 2.2  # side of the crop, as a multiple of the longer side of the visible mask's box
MIN_CROP_SIDE = 16  # pixels
BOX_EXTENT = 1.6  # side of the crop, as a multiple of the longer side of a box
WHOLE_EXTENT = 1.05  # side of the largest crop around a click, of the longer side of the image
WINDOW_RATIO = 1.8  # each crop around a click is smaller than the one before by this factor
MIN_WINDOW_SIDE = 30  # pixels, of crops around a click
CLICK_RADIUS = 0.025  # standard deviation of a drawn click, as a share of the crop's side

MIN_COMPLETED_PIXELS = 40  # below it a visible mask says too little about its object
MIN_HIDDEN_SHARE = 0.05  # of the complete mask, from which on an object counts as hidden


@dataclass(frozen=True)
class CropWindow:
    """A square part of an image, in pixels; it can reach over the border."""

    x: int
    y: int
    side: int

    @classmethod
    def around(cls, mask: Bool[np.ndarray, "H W"]) -> "CropWindow":
        """The window around a visible mask that leaves room for what is hidden.

        Raises ValueError for an empty mask.
        """
        x0, y0, x1, y1 = masks.box(mask)
        if x1 == 0:
            raise ValueError("the mask is empty")
        side = max(MIN_CROP_SIDE, round(CROP_EXTENT * max(x1 - x0, y1 - y0)))
        return cls((x0 + x1 - side) // 2, (y0 + y1 - side) // 2, side)

    def cut(self, pixels: np.ndarray, size: int) -> UInt8[np.ndarray, "s s ..."]:
        """This part of an image or of a mask, scaled to `size`; 0 beyond the border.

        Scaled down, a pixel is the mean of what it covers. A mask `bool [H W]` gives the covered
        share of each pixel, 0 to 255.
        """
        height, width = pixels.shape[:2]
        columns = _Reach.of_image(self.x, width, self.side, size)
        rows = _Reach.of_image(self.y, height, self.side, size)
        crop = np.zeros((size, size, *pixels.shape[2:]), np.uint8)
        if rows.is_empty or columns.is_empty:
            return crop

        # Only what the image covers is scaled: a window around a panorama is mostly outside.
        part = np.zeros((rows.length, columns.length, *pixels.shape[2:]), np.uint8)
        top, left = self.y + rows.low, self.x + columns.low
        inside = pixels[max(0, top) : top + rows.length, max(0, left) : left + columns.length]
        if inside.dtype == bool:
            inside = inside * np.uint8(255)
        y, x = max(0, -top), max(0, -left)
        part[y : y + len(inside), x : x + inside.shape[1]] = inside
        box = (columns.start, rows.start, columns.end, rows.end)
        shape = (columns.last - columns.first, rows.last - rows.first)
        scaled = Image.fromarray(part).resize(shape, Image.Resampling.BILINEAR, box)
        crop[rows.first : rows.last, columns.first : columns.last] = np.asarray(scaled)
        return crop

    def paste(
        self, logits: Float[np.ndarray, "s s"], height: int, width: int, outside: float
    ) -> Float[np.ndarray, "H W"]:
        """Values of this part at the resolution of an image; `outside` where it does not reach."""
        return paste_mean([self], [logits], height, width, outside)

    def scaled(self, ratio: float) -> "CropWindow":
        """The window of `ratio` times the side with the same middle."""
        side = max(MIN_CROP_SIDE, round(ratio * self.side))
        shift = (self.side - side) // 2
        return CropWindow(self.x + shift, self.y + shift, side)


@dataclass(frozen=True)
class _Reach:
    """Along one axis: pixels `first` to `last` of a crop see the image. They read `length` pixels
    of the window from `low` on, among which they reach from `start` to `end`."""

    first: int
    last: int
    low: int
    length: int
    start: float
    end: float

    @classmethod
    def of_image(cls, start: int, length: int, side: int, size: int) -> "_Reach":
        """`start`: of a window of `side` pixels in an image of `length`; `size`: of the crop."""
        scale = side / size
        # A pixel of the crop reads up to one of its own, or of the image, beyond its edges.
        reach = max(1.0, scale)
        first = max(0, math.floor((-start - reach) / scale))
        last = min(size, math.ceil((length - start + reach) / scale))
        low = max(0, math.floor(first * scale - reach))
        high = min(side, math.ceil(last * scale + reach))
        return cls(first, last, low, high - low, first * scale - low, last * scale - low)

    @property
    def is_empty(self) -> bool:
        """Whether the window lies beside the image."""
        return self.last <= self.first


def cut_crop(
    image: UInt8[np.ndarray, "H W 3"],
    window: CropWindow,
    size: int,
    object_masks: Sequence[Bool[np.ndarray, "H W"]],
) -> UInt8[np.ndarray, "s s c"]:
    """A crop of an image: its colours, which pixels are inside of the image, and the given masks.

    So c is 4 and the number of masks. Masks are 0..255: the share of a pixel that they cover.
    """
    inside = np.broadcast_to(True, image.shape[:2])
    planes = [window.cut(mask, size)[..., None] for mask in (inside, *object_masks)]
    return np.concatenate([window.cut(image, size), *planes], axis=2)


def paste_mean(
    windows: Sequence[CropWindow],
    logits: Sequence[Float[np.ndarray, "s s"]],
    height: int,
    width: int,
    outside: float,
) -> Float[np.ndarray, "H W"]:
    """The mean of the values of several windows at the resolution of an image, of those that reach
    a pixel; `outside` where none does."""
    canvas = np.zeros((height, width), np.float32)
    counts = np.zeros((height, width), np.uint8)
    for window, values in zip(windows, logits, strict=True):
        left, top = max(0, window.x), max(0, window.y)
        right, bottom = min(width, window.x + window.side), min(height, window.y + window.side)
        if right <= left or bottom <= top:
            continue
        scale = len(values) / window.side
        edges = np.array([left, top, right, bottom]) - [window.x, window.y, window.x, window.y]
        part = Image.fromarray(np.asarray(values, np.float32)).resize(
            (right - left, bottom - top), Image.Resampling.BILINEAR, tuple(scale * edges)
        )
        canvas[top:bottom, left:right] += np.asarray(part)
        counts[top:bottom, left:right] += 1
    return np.where(counts, canvas / np.maximum(counts, 1), np.float32(outside))


# Boxes and clicks


def window_of_box(box: tuple[float, float, float, float], extent: float = BOX_EXTENT) -> CropWindow:
    """The window around a box x0 y0 x1 y1 in pixels."""
    x0, y0, x1, y1 = box
    side = max(MIN_CROP_SIDE, round(extent * max(x1 - x0, y1 - y0)))
    return CropWindow(round((x0 + x1 - side) / 2), round((y0 + y1 - side) / 2), side)


def windows_of_clicks(clicks: Iterable[Click], height: int, width: int) -> list[CropWindow]:
    """Windows of several sizes around clicks, since clicks do not say how large the object is.

    The first shows the whole image. Each contains all positive clicks.
    """
    positive = np.array([(click.x, click.y) for click in clicks if click.is_positive])
    # The middle of their box: the mean lies beside it where most clicks are on one side.
    x, y = (positive.min(axis=0) + positive.max(axis=0)) / 2
    spread = np.ptp(positive, axis=0).max()
    smallest = max(MIN_WINDOW_SIDE, 1.5 * spread)
    windows = []
    side = WHOLE_EXTENT * max(height, width)
    while not windows or side > smallest:
        windows.append(window_at(x, y, math.floor(side), height, width))
        side /= WINDOW_RATIO
    return windows


def window_at(x: float, y: float, side: int, height: int, width: int) -> CropWindow:
    """The window of a size around a point, moved into the image as far as it fits."""
    places = []
    for centre, length in ((x, width), (y, height)):
        if side <= length:
            place = min(max(centre - side / 2, 0), length - side)
        else:
            place = (length - side) / 2
        places.append(int(place))
    return CropWindow(places[0], places[1], side)


def cut_prompt_crop(
    image: UInt8[np.ndarray, "H W 3"], window: CropWindow, size: int, prompt: Prompt
) -> UInt8[np.ndarray, "s s 7"]:
    """A crop of an image with the planes of a prompt."""
    crop = cut_crop(image, window, size, ())
    return np.concatenate([crop, draw_prompt(window, size, prompt)], axis=2)


def draw_prompt(window: CropWindow, size: int, prompt: Prompt) -> UInt8[np.ndarray, "s s 3"]:
    """The planes of a prompt, 0 to 255: the share of a pixel inside of the box, and spots at
    positive and at negative clicks."""
    planes = np.zeros((size, size, 3), np.uint8)
    scale = size / window.side
    if prompt.box is not None:
        x0, y0, x1, y1 = prompt.box
        columns = _covered((x0 - window.x) * scale, (x1 - window.x) * scale, size)
        rows = _covered((y0 - window.y) * scale, (y1 - window.y) * scale, size)
        planes[..., 0] = 255 * rows[:, None] * columns

    centres = np.arange(size) + 0.5
    for click in prompt.clicks:
        along_x = centres - (click.x - window.x) * scale
        along_y = centres - (click.y - window.y) * scale
        spread = 2 * (CLICK_RADIUS * size) ** 2
        spot = np.exp(-(along_y**2) / spread)[:, None] * np.exp(-(along_x**2) / spread)
        plane = planes[..., 1 if click.is_positive else 2]
        np.maximum(plane, (255 * spot).astype(np.uint8), out=plane)
    return planes


def _covered(start: float, end: float, size: int) -> np.ndarray:
    """The share of each of `size` cells of length 1 that the interval covers."""
    cells = np.arange(size)
    return np.clip(np.minimum(cells + 1, end) - np.maximum(cells, start), 0, 1)
