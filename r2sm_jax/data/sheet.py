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

# Overlays of larger images, in pixels, are drawn at the image's own size: twice the size of one of
# four megapixels would take half a gigabyte.
LARGE = 1_000_000

# Measures of a sheet in pixels.
_CELL = 464
_GAP = 32
_MARGIN = 44
_PADDING = 12
_TITLE_SIZE = 26
_TEXT_SIZE = 22
_CAPTION_SIZE = 18
_TAG_SIZE = 16
LEGEND = (
    ("outline: mask asked for", GROUND, INK),
    ("occluded", OCCLUDED, "white"),
    ("visible (modal)", VISIBLE, "white"),
)

# Of the head of a single overlay: pixels, and letters of text in a line of it.
_LEAST_WIDTH = 480
_LETTERS = 42


@dataclass(frozen=True)
class Panel:
    """One cell of a sheet: an image `[H W 3]` with text above it and a caption below.

    Masks `[H W]` lie over the image if there are any. The one of `mask_type` is outlined.
    """

    image: Picture
    text: str = ""
    caption: str = ""
    visible: Mask | None = None
    occluded: Mask | None = None
    mask_type: MaskType | None = None


def overlay(
    image: Picture, visible: Mask, occluded: Mask, mask_type: MaskType | None = "amodal"
) -> Picture:
    """Tints the visible part of an image, tints and hatches the occluded one, and outlines a mask.

    The outline of `mask_type` goes around the visible part for "modal", around both together for
    "amodal"; None draws none.
    """
    if not visible.any() and not occluded.any():
        return image.copy()
    height, width = visible.shape
    line = max(1.0, min(height, width) / 220)
    # Drawn at twice the size, so that hatching and outlines get smooth edges when they are reduced.
    fold = 2 if visible.size <= LARGE else 1
    large_visible = visible.repeat(fold, 0).repeat(fold, 1)
    large_occluded = occluded.repeat(fold, 0).repeat(fold, 1)
    tint = _tint(large_visible, large_occluded, mask_type, fold * line)
    tint = tint.reshape(height, fold, width, fold, 4).mean((1, 3))
    # Paler colours, on which the two tints stand out.
    grey = image @ np.array([0.299, 0.587, 0.114], np.float32)
    pale = np.float32(0.45) * image + np.float32(0.45) * grey[..., None] + np.float32(0.10 * 255)
    return (pale * (1 - tint[..., 3:]) + tint[..., :3]).round().clip(0, 255).astype(np.uint8)


def shrink(picture: Picture, step: int) -> UInt8[np.ndarray, "_h _w 3"]:
    """A picture each of whose pixels is the mean of `step` x `step`."""
    # Band by band, since Pillow copies what it reduces.
    rows = 64 * step
    bands = []
    for top in range(0, picture.shape[0], rows):
        bands.append(np.asarray(Image.fromarray(picture[top : top + rows]).reduce(step)))
    return np.concatenate(bands)


def add_head(
    picture: Picture, text: str, mask_type: MaskType | None, caption: str
) -> UInt8[np.ndarray, "_height _width 3"]:
    """Puts a head above an overlay: the text, then mask type, caption and a legend of the colours.

    The picture keeps its size. The page is wider than it if it is too narrow for the head.
    """
    height, width = picture.shape[:2]
    page_width = max(width, _LEAST_WIDTH)
    size = page_width // _LETTERS
    gap = size // 2
    title = _text_block(text, size, INK, 3, page_width - 2 * gap)
    line = gap + title.height + gap
    top = line + 2 * size + gap
    page = Image.new("RGB", (page_width, top + height), "white")
    page.paste(title, (gap, gap))
    page.paste(Image.fromarray(picture), (0, top))

    # The legend stands at the right end of the line, the rest at its left end.
    small = round(0.8 * size)
    x = page_width - gap
    for label, ground in (("hidden", OCCLUDED), ("visible", VISIBLE)):
        x -= _label_width(label, small)
        _draw_label(page, (x, line), label, small, ground, "white")
        x -= gap
    left = gap
    if mask_type is not None:
        ground = VISIBLE if mask_type == "modal" else OCCLUDED
        _draw_label(page, (left, line), mask_type, small, ground, "white")
        left += _label_width(mask_type, small) + gap
    if x > left:
        page.paste(_text_block(caption, small, FAINT, 1, x - left), (left, line + small // 4))
    return np.asarray(page)


def prediction_row(
    image: Picture,
    query: str,
    mask_type: MaskType,
    truth: tuple[Mask, Mask],
    predicted_type: MaskType | None,
    amodal_probability: float | None,
    prediction: tuple[Mask, Mask],
) -> list[Panel]:
    """A prediction as three panels: image and query, the truth, and the prediction.

    `truth` and `prediction` are pairs `(visible, occluded)`. Below the prediction stand its mask
    type, with a probability where it has one, and the IoU of the mask that it chose with the mask
    that was asked for. Without a mask type there is one mask, which is `prediction[0]`.
    """
    target = truth[0]
    if mask_type == "amodal":
        target = truth[0] | truth[1]
    predicted = prediction[0]
    if predicted_type == "amodal":
        predicted = prediction[0] | prediction[1]
    union = masks.area(target | predicted)
    # Two empty masks agree.
    iou = masks.area(target & predicted) / union if union else 1.0
    caption = f"IoU {iou:.2f}"
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
    """The title at the left and the legend at the right."""
    page = Image.new("RGB", (width, 104), "white")
    x = width - _MARGIN
    for label, ground, ink in LEGEND:
        x -= _label_width(label, _CAPTION_SIZE)
        _draw_label(page, (x, 38), label, _CAPTION_SIZE, ground, ink)
        x -= _PADDING
    room = x - _MARGIN
    if room > _TITLE_SIZE:
        page.paste(_text_block(title, _TITLE_SIZE, INK, 1, room), (_MARGIN, 36))
    return np.asarray(page)


def _draw_row(width: int, row: Sequence[Panel]) -> UInt8[np.ndarray, "_h width 3"]:
    """A row of panels, of which texts end and captions begin at the same height."""
    texts = [_text_block(panel.text, _TEXT_SIZE, INK, 4) for panel in row]
    captions = [_text_block(panel.caption, _CAPTION_SIZE, FAINT, 2) for panel in row]
    # A row is as high as its images are at full width, but never higher than square.
    height = max(
        (round(_CELL * min(1, panel.image.shape[0] / panel.image.shape[1])) for panel in row),
        default=0,
    )
    top = max((text.height for text in texts), default=0) + _PADDING
    bottom = top + max(1, height) + _PADDING
    caption_height = max((caption.height for caption in captions), default=0)
    page = Image.new("RGB", (width, bottom + caption_height + _GAP), "white")
    for column, (panel, text, caption) in enumerate(zip(row, texts, captions, strict=True)):
        x = _MARGIN + column * (_CELL + _GAP)
        page.paste(text, (x, top - _PADDING - text.height))
        page.paste(GROUND, (x, top, x + _CELL, top + height))
        ratio = min(_CELL / panel.image.shape[1], height / panel.image.shape[0])
        picture = draw_panel(panel, ratio)
        left = (_CELL - picture.shape[1]) // 2
        above = (height - picture.shape[0]) // 2
        page.paste(Image.fromarray(picture), (x + left, top + above))
        page.paste(caption, (x, bottom))
        if panel.mask_type:
            ground = VISIBLE if panel.mask_type == "modal" else OCCLUDED
            corner = (x + _PADDING, top + _PADDING)
            _draw_label(page, corner, panel.mask_type, _TAG_SIZE, ground, "white")
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
    """The width of a label in pixels: its text, and half the size at either end."""
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
    x, y = place
    width = _label_width(text, size)
    height = round(1.6 * size)
    draw = ImageDraw.Draw(page)
    draw.rounded_rectangle([x, y, x + width, y + height], size // 3, fill=ground)
    draw.text((x + width / 2, y + height / 2), text, ink, _font(size), anchor="mm")


@lru_cache(maxsize=32)
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib, so that every machine has it."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size)


def _tint(
    visible: Mask, occluded: Mask, mask_type: MaskType | None, line: float
) -> Float[np.ndarray, "H W 4"]:
    """The layer over an image `[H W 4]`: colour multiplied by alpha, and alpha.

    `line` is the width of the outline in pixels.
    """
    tint = np.zeros((*visible.shape, 4), np.float32)

    def paint(where: np.ndarray, colour: Sequence[float], alpha: float) -> None:
        tint[where] = [*(alpha * channel for channel in colour), alpha]

    rows, columns = np.arange(visible.shape[0])[:, None], np.arange(visible.shape[1])
    stripes = (rows + columns) % (6 * line) < 2 * line
    paint(visible, VISIBLE, 0.55)
    paint(occluded, OCCLUDED, 0.52)
    paint(occluded & stripes, OCCLUDED, 0.95)
    if mask_type:
        # A white edge outside the mask and a coloured one inside show on any picture.
        outlined = visible if mask_type == "modal" else visible | occluded
        colour = VISIBLE if mask_type == "modal" else OCCLUDED
        paint(_dilate(outlined, 2.1 * line) & ~outlined, (255, 255, 255), 0.95)
        paint(outlined & _dilate(~outlined, line), colour, 1.0)
    return tint


def _dilate(mask: Mask, radius: float) -> Mask:
    """The mask grown by about `radius` pixels, with round corners."""
    # A blur of half that width reaches so far.
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    blurred = image.filter(ImageFilter.GaussianBlur(radius / 2))
    return np.asarray(blurred) > 5


def _resize_mask(mask: Mask, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """The mask at another size `(width, height)`."""
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC)) > 127
