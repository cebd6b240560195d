"""Draws masks over images, and sheets of samples and predictions to look at.

Two colours throughout: blue is the visible (modal) part, orange with hatching the occluded one. A
white-edged outline goes around the mask that the query asks for, so a modal query outlines the blue
part and an amodal one both.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from r2sm_jax.data import masks
from r2sm_jax.errors import atomic_write
from r2sm_jax.query import MaskType

VISIBLE = (31, 111, 214)
OCCLUDED = (240, 132, 22)
INK = (28, 30, 34)
FAINT = (120, 124, 130)
GROUND = (244, 245, 246)

Colour = tuple[int, int, int]
Mask = Bool[np.ndarray, "H W"]
Picture = UInt8[np.ndarray, "H W 3"]

LARGE = 4_000_000  # pixels from which an overlay is drawn at the image's own size

# Measures of a sheet in pixels.
_CELL, _GAP, _MARGIN, _PADDING = 464, 32, 44, 12
_TITLE_SIZE, _TEXT_SIZE, _CAPTION_SIZE, _TAG_SIZE = 26, 22, 18, 16
LEGEND = (
    ("outline: mask asked for", GROUND, INK),
    ("occluded", OCCLUDED, "white"),
    ("visible (modal)", VISIBLE, "white"),
)


@dataclass(frozen=True)
class Panel:
    """One cell of a sheet: an image `[H W 3]`, text above, a caption below, and masks `[H W]` over
    it where there are any. `mask_type` is the mask that is outlined."""

    image: Picture
    text: str = ""
    caption: str = ""
    visible: Mask | None = None
    occluded: Mask | None = None
    mask_type: MaskType | None = None


def overlay(
    image: Picture, visible: Mask, occluded: Mask, mask_type: MaskType | None = "amodal"
) -> Picture:
    """The image with its visible part tinted, the occluded part tinted and hatched, and the mask of
    `mask_type` outlined: the visible part for "modal", both together for "amodal", nothing for
    None."""
    if not visible.any() and not occluded.any():
        return image.copy()
    height, width = visible.shape
    line = max(1.0, min(height, width) / 220)
    # Drawn at twice the size, where hatching and outlines get smooth edges when they are reduced
    # again.
    fold = 2 if visible.size <= LARGE else 1
    larger = (x.repeat(fold, 0).repeat(fold, 1) for x in (visible, occluded))
    tint = _tint(next(larger), next(larger), mask_type, fold * line)
    tint = tint.reshape(height, fold, width, fold, 4).mean((1, 3))
    # Paler colours, on which the two tints stand out.
    grey = image @ np.array([0.299, 0.587, 0.114], np.float32)
    pale = np.float32(0.45) * image + np.float32(0.45) * grey[..., None] + np.float32(0.10 * 255)
    return (pale * (1 - tint[..., 3:]) + tint[..., :3]).round().clip(0, 255).astype(np.uint8)


def prediction_row(
    image: Picture,
    query: str,
    mask_type: MaskType,
    truth: tuple[Mask, Mask],
    predicted_type: MaskType | None,
    amodal_probability: float | None,
    prediction: tuple[Mask, Mask],
) -> list[Panel]:
    """A prediction as three panels: image and query, the truth, and the prediction with its mask
    type.

    `truth` and `prediction` are pairs `(visible, occluded)`. Below the prediction stand its mask
    type, with a probability where it has one, and the IoU of the mask that it chose with the mask
    that was asked for. Without a mask type there is one mask, which is `prediction[0]`.
    """
    asked = truth[0] if mask_type == "modal" else truth[0] | truth[1]
    given = prediction[0] | prediction[1] if predicted_type == "amodal" else prediction[0]
    union = masks.area(asked | given)
    caption = f"IoU {masks.area(asked & given) / union if union else 1.0:.2f}"
    if predicted_type is not None:
        verdict = "(right)" if predicted_type == mask_type else "(wrong)"
        if amodal_probability is not None:
            probability = (
                amodal_probability if predicted_type == "amodal" else 1 - amodal_probability
            )
            verdict = f"with probability {probability:.2f} {verdict}"
        caption = f"{predicted_type} {verdict} · {caption}"
    return [
        Panel(image, query),
        Panel(image, "Truth", f"{mask_type} asked for", *truth, mask_type),
        Panel(image, "Prediction", caption, *prediction, predicted_type),
    ]


def draw_sheet(
    rows: Sequence[Sequence[Panel]], title: str = ""
) -> UInt8[np.ndarray, "height width 3"]:
    """Draws rows of panels, with a title and a legend above."""
    columns = max((len(row) for row in rows), default=1)
    width = 2 * _MARGIN + columns * (_CELL + _GAP) - _GAP
    return np.concatenate([_draw_head(width, title), *(_draw_row(width, row) for row in rows)])


def save_sheet(path: Path, rows: Sequence[Sequence[Panel]], title: str = "") -> None:
    """Writes a sheet as PNG. Raises InputError where it cannot be written."""
    with atomic_write(path) as part:
        Image.fromarray(draw_sheet(rows, title)).save(part, format="PNG")


def draw_panel(panel: Panel, ratio: float) -> UInt8[np.ndarray, "_H _W 3"]:
    """The panel's image enlarged by `ratio`, with its masks drawn at that size."""
    rows, columns = panel.image.shape[:2]
    size = (max(1, round(columns * ratio)), max(1, round(rows * ratio)))
    picture = np.asarray(Image.fromarray(panel.image).resize(size, Image.Resampling.LANCZOS))
    if panel.visible is None:
        return picture
    visible = _resize_mask(panel.visible, size)
    occluded = panel.occluded if panel.occluded is not None else np.zeros_like(panel.visible)
    return overlay(
        picture, visible, _resize_mask(panel.visible | occluded, size) & ~visible, panel.mask_type
    )


def _draw_head(width: int, title: str) -> UInt8[np.ndarray, "_h width 3"]:
    page = Image.new("RGB", (width, 104), "white")
    x = width - _MARGIN
    for label, ground, ink in LEGEND:
        x -= _label_width(label, _CAPTION_SIZE)
        _draw_label(page, (x, 38), label, _CAPTION_SIZE, ground, ink)
        x -= _PADDING
    if (room := x - _MARGIN) > _TITLE_SIZE:
        page.paste(_text_block(title, _TITLE_SIZE, INK, 1, room), (_MARGIN, 36))
    return np.asarray(page)


def _draw_row(width: int, row: Sequence[Panel]) -> UInt8[np.ndarray, "_h width 3"]:
    texts = [_text_block(panel.text, _TEXT_SIZE, INK, 4) for panel in row]
    captions = [_text_block(panel.caption, _CAPTION_SIZE, FAINT, 2) for panel in row]
    # A row is as high as its images are at full width, but never higher than square.
    height = max(
        (round(_CELL * min(1, panel.image.shape[0] / panel.image.shape[1])) for panel in row),
        default=0,
    )
    top = max((text.height for text in texts), default=0) + _PADDING
    bottom = top + max(1, height) + _PADDING
    page = Image.new(
        "RGB", (width, bottom + max((c.height for c in captions), default=0) + _GAP), "white"
    )
    for column, (panel, text, caption) in enumerate(zip(row, texts, captions, strict=True)):
        x = _MARGIN + column * (_CELL + _GAP)
        page.paste(text, (x, top - _PADDING - text.height))
        page.paste(GROUND, (x, top, x + _CELL, top + height))
        picture = draw_panel(
            panel, min(_CELL / panel.image.shape[1], height / panel.image.shape[0])
        )
        left, above = (_CELL - picture.shape[1]) // 2, (height - picture.shape[0]) // 2
        page.paste(Image.fromarray(picture), (x + left, top + above))
        page.paste(caption, (x, bottom))
        if panel.mask_type:
            ground = VISIBLE if panel.mask_type == "modal" else OCCLUDED
            _draw_label(
                page, (x + _PADDING, top + _PADDING), panel.mask_type, _TAG_SIZE, ground, "white"
            )
    return np.asarray(page)


def _text_block(text: str, size: int, colour: Colour, most: int, width: int = _CELL) -> Image.Image:
    """The text, broken into at most `most` lines of `width` pixels, on white."""
    letters = max(1, int(width / (0.56 * size)))  # so many fit into a line on average
    wrapped = (
        textwrap.wrap(paragraph, letters, max_lines=most, placeholder="…")
        for paragraph in text.splitlines()
    )
    lines = list(chain.from_iterable(wrapped))[:most]
    leading = round(1.36 * size)
    block = Image.new("RGB", (width, leading * len(lines)), "white")
    for number, line in enumerate(lines):
        ImageDraw.Draw(block).text((0, number * leading), line, colour, _font(size))
    return block


def _label_width(text: str, size: int) -> int:
    return round(_font(size).getlength(text)) + size


def _draw_label(
    page: Image.Image,
    place: tuple[int, int],
    text: str,
    size: int,
    ground: Colour,
    ink: str | Colour,
) -> None:
    """Text on a rounded ground, 1.6 times `size` high."""
    (x, y), width, height = place, _label_width(text, size), round(1.6 * size)
    draw = ImageDraw.Draw(page)
    draw.rounded_rectangle([x, y, x + width, y + height], size // 3, fill=ground)
    draw.text((x + width / 2, y + height / 2), text, ink, _font(size), anchor="mm")


@lru_cache(maxsize=32)
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib, so that every machine has it."""
    return ImageFont.truetype(
        str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size
    )


def _tint(
    visible: Mask, occluded: Mask, mask_type: MaskType | None, line: float
) -> Float[np.ndarray, "H W 4"]:
    """What lies over the image: colour multiplied by alpha, and alpha. `line` is the outline's
    width in pixels."""
    tint = np.zeros((*visible.shape, 4), np.float32)

    def paint(where: np.ndarray, colour: Sequence[float], alpha: float) -> None:
        tint[where] = [*(alpha * channel for channel in colour), alpha]

    rows, columns = np.arange(visible.shape[0])[:, None], np.arange(visible.shape[1])
    stripes = (rows + columns) % (6 * line) < 2 * line
    paint(visible, VISIBLE, 0.55)
    paint(occluded, OCCLUDED, 0.52)
    paint(occluded & stripes, OCCLUDED, 0.95)
    if mask_type:
        asked = visible if mask_type == "modal" else visible | occluded
        paint(_dilate(asked, 2.1 * line) & ~asked, (255, 255, 255), 0.95)
        paint(asked & _dilate(~asked, line), VISIBLE if mask_type == "modal" else OCCLUDED, 1.0)
    return tint


def _dilate(mask: Mask, radius: float) -> Mask:
    """The mask grown by about `radius` pixels, with round corners: all that a blur of half that
    width reaches."""
    blurred = Image.fromarray(mask.astype(np.uint8) * 255).filter(
        ImageFilter.GaussianBlur(radius / 2)
    )
    return np.asarray(blurred) > 5


def _resize_mask(mask: Mask, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """The mask at another size `(width, height)`."""
    return (
        np.asarray(
            Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BICUBIC)
        )
        > 127
    )
