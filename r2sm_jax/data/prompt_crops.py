"""Crops around a box or around clicks, with the prompt drawn into planes of its own.

The outliner (models/outliner.py) reads such crops.
"""

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import UInt8

from r2sm_jax.data.crops import CropWindow, cut_crop
from r2sm_jax.query import Click, Prompt

BOX_EXTENT = 1.6  # side of the crop, as a multiple of the longer side of a box
WHOLE_EXTENT = 1.05  # side of the largest crop around a click, of the longer side of the image
WINDOW_RATIO = 1.8  # each crop around a click is smaller than the one before by this factor
MIN_WINDOW_SIDE = 30  # pixels, of crops around a click
MIN_BOX_SIDE = 16  # pixels, of crops around a box
CLICK_RADIUS = 0.025  # standard deviation of a drawn click, as a share of the crop's side


def window_of_box(box: tuple[float, float, float, float], extent: float = BOX_EXTENT) -> CropWindow:
    """The window around a box x0 y0 x1 y1 in pixels."""
    x0, y0, x1, y1 = box
    side = max(MIN_BOX_SIDE, round(extent * max(x1 - x0, y1 - y0)))
    return CropWindow(round((x0 + x1 - side) / 2), round((y0 + y1 - side) / 2), side)


def windows_of_clicks(clicks: Iterable[Click], height: int, width: int) -> list[CropWindow]:
    """Windows of several sizes around clicks, since clicks do not say how large the object is.

    The first shows the whole image. Each contains all positive clicks.
    """
    positive = [(click.x, click.y) for click in clicks if click.is_positive]
    x, y = np.mean(positive, axis=0)
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
) -> UInt8[np.ndarray, "s s c"]:
    """A crop of an image with the planes that the outliner reads, `outliner.NUM_CHANNELS`."""
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
