"""Paints masks over images, and lays pictures out in a sheet to look at.

Two colours throughout: blue is the visible (modal) part, orange with hatching the occluded one. A
white-edged outline goes around the mask that the query asks for, so a modal query outlines the blue
part and an amodal one both.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import atomic_write
from r2sm_jax.query import MaskType

VISIBLE = (31, 111, 214)
OCCLUDED = (240, 132, 22)
BLANK = (244, 245, 246)
"""The colour of an image that is missing."""

Picture = UInt8[np.ndarray, "_H _W 3"]

CELL = 464
"""Pixels of a side of a picture in a sheet."""
MARGIN = 24
TEXT_SIZE = 20
MAX_LINES = 5
SMOOTH_BELOW = 1_000_000
"""Pixels of a picture whose hatching and outlines get smooth edges, which needs four times the
memory."""


class Panel(NamedTuple):
    """One cell of a sheet: a picture with text below it."""

    picture: Picture
    text: str


def paint(
    image: UInt8[np.ndarray, "H W 3"],
    modal: Mask,
    amodal: Mask,
    mask_type: MaskType | None = "amodal",
    ratio: float = 1.0,
) -> Picture:
    """Tints the visible part of an image, tints and hatches the occluded one, and outlines a mask.

    Args:
        modal, amodal: the visible and the complete mask of the image.
        mask_type: "modal" outlines the visible part, "amodal" both together, None nothing.
        ratio: size of the picture, in sizes of the image.
    """
    size = (max(1, round(image.shape[1] * ratio)), max(1, round(image.shape[0] * ratio)))
    picture = image
    if ratio != 1:
        picture = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
    if not amodal.any() and not modal.any():
        return picture.copy()

    # Drawn at twice the size, so that hatching and outlines are smooth when they are reduced.
    fold = 2 if size[0] * size[1] <= SMOOTH_BELOW else 1
    large = (fold * size[0], fold * size[1])
    visible = _resize(modal, large)
    occluded = _resize(amodal | modal, large) & ~visible
    tint = _tint(visible, occluded, mask_type, line=max(1.0, min(large) / 220))
    tint = tint.reshape(size[1], fold, size[0], fold, 4).mean((1, 3))
    # Paler colours, on which the two tints stand out.
    grey = picture @ np.array([0.299, 0.587, 0.114], np.float32)
    pale = np.float32(0.45) * picture + np.float32(0.45) * grey[..., None] + np.float32(25.5)
    return (pale * (1 - tint[..., 3:]) + tint[..., :3]).round().clip(0, 255).astype(np.uint8)


def _tint(
    visible: Mask, occluded: Mask, mask_type: MaskType | None, line: float
) -> Float[np.ndarray, "H W 4"]:
    """The layer over an image `[H W 4]`: colour multiplied by alpha, and alpha.

    `line` is the width of the outline in pixels.
    """
    tint = np.zeros((*visible.shape, 4), np.float32)

    def tint_where(where: np.ndarray, colour: Sequence[float], alpha: float) -> None:
        tint[where] = [*(alpha * channel for channel in colour), alpha]

    rows, columns = np.arange(visible.shape[0])[:, None], np.arange(visible.shape[1])
    stripes = (rows + columns) % (6 * line) < 2 * line
    tint_where(visible, VISIBLE, 0.55)
    tint_where(occluded, OCCLUDED, 0.52)
    tint_where(occluded & stripes, OCCLUDED, 0.95)
    if mask_type is not None:
        # A white edge outside the mask and a coloured one inside show on any picture.
        outlined = visible if mask_type == "modal" else visible | occluded
        colour = VISIBLE if mask_type == "modal" else OCCLUDED
        tint_where(_dilate(outlined, 2.1 * line) & ~outlined, (255, 255, 255), 0.95)
        tint_where(outlined & _dilate(~outlined, line), colour, 1.0)
    return tint


def _dilate(mask: Mask, radius: float) -> Mask:
    """The mask grown by about `radius` pixels, with round corners."""
    # A blur of half that width reaches so far.
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    blurred = image.filter(ImageFilter.GaussianBlur(radius / 2))
    return np.asarray(blurred) > 5


def _resize(mask: Mask, size: tuple[int, int]) -> Bool[np.ndarray, "_h _w"]:
    """The mask at another size `(width, height)`."""
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC)) > 127


def grid(rows: Sequence[Sequence[Panel]], title: str = "") -> Picture:
    """Lays rows of panels out in a sheet, below a title and what the colours mean."""
    font = ImageFont.load_default(TEXT_SIZE)
    leading = round(1.3 * TEXT_SIZE)
    step = CELL + MARGIN
    row_height = CELL + MAX_LINES * leading + MARGIN
    columns = max((len(row) for row in rows), default=1)
    size = (MARGIN + columns * step, 3 * leading + len(rows) * row_height)
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    legend = "blue: visible, orange: hidden, outlined: the mask that is asked for"
    draw.text((MARGIN, leading // 2), f"{title}\n{legend}", "black", font)
    for number, row in enumerate(rows):
        for column, panel in enumerate(row):
            x, y = MARGIN + column * step, 3 * leading + number * row_height
            picture = Image.fromarray(panel.picture)
            picture.thumbnail((CELL, CELL))
            page.paste(picture, (x, y))
            letters = CELL // (TEXT_SIZE // 2)
            lines = [
                line for text in panel.text.splitlines() for line in textwrap.wrap(text, letters)
            ]
            draw.text((x, y + picture.height), "\n".join(lines[:MAX_LINES]), "black", font)
    return np.asarray(page)


def save_sheet(path: Path, rows: Sequence[Sequence[Panel]], title: str = "") -> None:
    """Writes a sheet as PNG. Raises InputError where it cannot be written."""
    with atomic_write(path) as part:
        Image.fromarray(grid(rows, title)).save(part, format="PNG")
