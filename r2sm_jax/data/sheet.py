"""Draws masks over images, and sheets of samples and predictions to look at.

Two colours throughout: blue is the visible (modal) part, orange with hatching the occluded one. A white-edged
outline goes around the mask that the query asks for, so a modal query outlines the blue part and an amodal
one both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Instance, Sample
from r2sm_jax.query import MaskType, Query

VISIBLE = (31, 111, 214)
OCCLUDED = (240, 132, 22)
INK = (28, 30, 34)
FAINT = (120, 124, 130)
GROUND = (244, 245, 246)

# The sheet's measures in points; a sheet is drawn at `scale` pixels a point.
_CELL, _GAP, _MARGIN = 232, 16, 22
_TEXT_SIZE, _SMALL_SIZE, _TAG_SIZE = 11, 9, 8
_MAX_LINES, _LEADING = 4, 1.36


@dataclass(frozen=True)
class Panel:
    """One cell of a sheet: an image `[H W 3]`, text above, and masks `[H W]` over it where there are any."""

    image: UInt8[np.ndarray, "H W 3"]
    text: str = ""
    caption: str = ""
    visible: Bool[np.ndarray, "H W"] | None = None
    occluded: Bool[np.ndarray, "H W"] | None = None
    mask_type: MaskType | None = None


def overlay(
    image: UInt8[np.ndarray, "H W 3"],
    visible: Bool[np.ndarray, "H W"],
    occluded: Bool[np.ndarray, "H W"],
    mask_type: MaskType | None = "amodal",
) -> UInt8[np.ndarray, "H W 3"]:
    """The image with its visible part tinted, the occluded part tinted and hatched, and the mask of
    `mask_type` outlined: the visible part for "modal", both together for "amodal", nothing for None."""
    height, width = visible.shape
    line = max(1.0, min(height, width) / 220)
    # Drawn at twice the size, where hatching and outlines get smooth edges when they are reduced again.
    tint = _tint(visible.repeat(2, 0).repeat(2, 1), occluded.repeat(2, 0).repeat(2, 1), mask_type, 2 * line)
    tint = tint.reshape(height, 2, width, 2, 4).mean((1, 3))
    alpha = tint[..., 3:]
    quiet = _quiet(image) if visible.any() or occluded.any() else image.astype(np.float32)
    return (quiet * (1 - alpha) + tint[..., :3]).round().clip(0, 255).astype(np.uint8)


def sample_row(sample: Sample, queries: int = 3, seed: int = 0) -> list[Panel]:
    """A sample as panels: its image, then up to `queries` of its queries with the masks that they mean.

    Queries are drawn at random, but both mask types are shown where the sample has both.
    """
    row = [Panel(sample.image, caption=_image_caption(sample))]
    by_id = {instance.id: instance for instance in sample.instances}
    for query in _choose(sample.queries, queries, seed):
        meant = [by_id[number] for number in query.instance_ids]
        shape = sample.image.shape[:2]
        visible = masks.union((instance.modal for instance in meant), shape)
        whole = masks.union((i.modal if i.amodal is None else i.amodal for i in meant), shape)
        occluded = whole & ~visible
        row.append(Panel(sample.image, query.text, _target_caption(meant), visible, occluded, query.mask_type))
    return row


def prediction_row(
    image: UInt8[np.ndarray, "H W 3"],
    query: str,
    mask_type: MaskType,
    truth: tuple[Bool[np.ndarray, "H W"], Bool[np.ndarray, "H W"]],
    predicted_type: MaskType | None,
    amodal_probability: float | None,
    prediction: tuple[Bool[np.ndarray, "H W"], Bool[np.ndarray, "H W"]],
) -> list[Panel]:
    """A prediction as three panels: image and query, the truth, and the prediction with its mask type.

    `truth` and `prediction` are pairs `(visible, occluded)`. Below the prediction stand its mask type, with a
    probability where it has one, and the IoU of the mask that it chose with the mask that was asked for. Without a
    mask type there is one mask, which is `prediction[0]`.
    """
    asked = truth[0] if mask_type == "modal" else truth[0] | truth[1]
    given = prediction[0] | prediction[1] if predicted_type == "amodal" else prediction[0]
    union = masks.area(asked | given)
    caption = f"IoU {masks.area(asked & given) / union if union else 1.0:.2f}"
    if predicted_type is not None:
        verdict = "right" if predicted_type == mask_type else "wrong"
        said = f"{predicted_type} ({verdict})"
        if amodal_probability is not None:
            probability = amodal_probability if predicted_type == "amodal" else 1 - amodal_probability
            said = f"{predicted_type} with probability {probability:.2f} ({verdict})"
        caption = f"{said} · {caption}"
    return [
        Panel(image, query),
        Panel(image, "Truth", f"{mask_type} asked for", *truth, mask_type),
        Panel(image, "Prediction", caption, *prediction, predicted_type),
    ]


def draw_sheet(rows: Sequence[Sequence[Panel]], title: str = "", scale: int = 2) -> UInt8[np.ndarray, "height width 3"]:
    """Draws rows of panels, with a title and a legend above, at `scale` pixels a point."""
    columns = max((len(row) for row in rows), default=1)
    width = 2 * _MARGIN + columns * _CELL + (columns - 1) * _GAP
    pen = _Pen(scale)
    layouts = [_layout(pen, row) for row in rows]
    head = 52
    height = head + sum(sum(layout) + _GAP for layout in layouts) + _MARGIN - _GAP
    pen.start(width, round(height))
    _draw_head(pen, width, title)
    y = float(head)
    for row, (text_height, image_height, caption_height) in zip(rows, layouts, strict=True):
        for column, panel in enumerate(row):
            x = _MARGIN + column * (_CELL + _GAP)
            text = pen.wrap(panel.text, _TEXT_SIZE, _CELL, _MAX_LINES)
            text_top = y + text_height - 7 - len(text) * _TEXT_SIZE * _LEADING  # on the image, not in mid-air
            pen.lines(x, text_top, text, _TEXT_SIZE, INK)
            _draw_image(pen, panel, x, y + text_height, image_height)
            caption = pen.wrap(panel.caption, _SMALL_SIZE, _CELL, 2)
            pen.lines(x, y + text_height + image_height + 5, caption, _SMALL_SIZE, FAINT)
        y += text_height + image_height + caption_height + _GAP
    return np.asarray(pen.page)


def save_sheet(path: Path, rows: Sequence[Sequence[Panel]], title: str = "", scale: int = 2) -> None:
    """Writes a sheet as PNG (or what else the suffix says)."""
    Image.fromarray(draw_sheet(rows, title, scale)).save(path)


class _Pen:
    """A page that is measured in points and drawn in pixels."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def start(self, width: float, height: float) -> None:
        self.page = Image.new("RGB", (self.px(width), self.px(height)), "white")
        self.draw = ImageDraw.Draw(self.page)

    def px(self, points: float) -> int:
        return round(points * self.scale)

    def font(self, size: float, bold: bool = False) -> ImageFont.FreeTypeFont:
        return _font(self.px(size), bold)

    def width(self, text: str, size: float, bold: bool = False) -> float:
        return self.font(size, bold).getlength(text) / self.scale

    def text(self, x: float, y: float, text: str, size: float, colour, bold: bool = False, anchor: str = "ls"):
        self.draw.text((self.px(x), self.px(y)), text, colour, self.font(size, bold), anchor=anchor)

    def lines(self, x: float, y: float, lines: Sequence[str], size: float, colour) -> None:
        for number, line in enumerate(lines):
            self.text(x, y + size + number * size * _LEADING, line, size, colour)

    def wrap(self, text: str, size: float, width: float, most: int) -> list[str]:
        """Breaks the text into at most `most` lines of `width` points; what does not fit ends in an
        ellipsis."""
        lines: list[str] = []
        for paragraph in text.splitlines():
            lines.append("")
            for word in paragraph.split():
                if lines[-1] and self.width(f"{lines[-1]} {word}", size) <= width:
                    lines[-1] += f" {word}"
                    continue
                if lines[-1]:
                    lines.append("")
                while len(word) > 1 and self.width(word, size) > width:  # no blank to break at: cut
                    fits = next(n for n in range(len(word) - 1, 0, -1) if n == 1 or self.width(word[:n], size) <= width)
                    lines[-1] = word[:fits]
                    lines.append("")
                    word = word[fits:]
                lines[-1] = word
        if len(lines) > most:
            last = lines[most - 1]
            while last and self.width(f"{last}…", size) > width:
                last = last[:-1]
            lines = [*lines[: most - 1], f"{last.rstrip(' ,.;')}…"]
        return lines


def with_words(picture: UInt8[np.ndarray, "H W 3"], words: Sequence[tuple[str, float]]) -> UInt8[np.ndarray, "_H _W 3"]:
    """The picture with words below it, each on a ground that is blue where it spoke for the visible mask (a negative
    number), orange for the complete one, and the stronger the louder. Narrow pictures are given a wider page."""
    height, width = picture.shape[:2]
    size = max(13, round(min(height, width) / 28))
    page_width, pen, loudest = max(width, 24 * size), _Pen(1), max(abs(share) for _, share in words) or 1.0
    line, gap, x, places = 2 * size, size // 2, size, []
    y = height + gap
    for word, share in words:
        needed = round(pen.width(word, size)) + gap
        if x > size and x + needed > page_width - size:
            x, y = size, y + line
        places.append((x, y, needed, word, share))
        x += needed + gap // 2
    pen.start(page_width, y + line + gap // 2)
    pen.page.paste(Image.fromarray(picture), ((page_width - width) // 2, 0))
    for x, y, needed, word, share in places:
        strength = 0.75 * min(1.0, abs(share) / loudest)
        ground = np.array(OCCLUDED if share > 0 else VISIBLE) * strength + 255 * (1 - strength)
        pen.draw.rounded_rectangle([x, y, x + needed, y + round(1.6 * size)], size // 4, fill=tuple(ground.astype(int)))
        pen.text(x + gap / 2, y + 0.82 * size, word, size, INK, anchor="lm")
    return np.asarray(pen.page)


def _layout(pen: _Pen, row: Sequence[Panel]) -> tuple[float, float, float]:
    """Heights in points of a row's text, images and captions."""
    text = max((len(pen.wrap(panel.text, _TEXT_SIZE, _CELL, _MAX_LINES)) for panel in row), default=0)
    caption = max((len(pen.wrap(panel.caption, _SMALL_SIZE, _CELL, 2)) for panel in row), default=0)
    # A row is as high as its images are at full width, but never higher than square.
    image = max((min(1.0, panel.image.shape[0] / panel.image.shape[1]) * _CELL for panel in row), default=0)
    return (
        text * _TEXT_SIZE * _LEADING + 7 if text else 0.0,
        image,
        caption * _SMALL_SIZE * _LEADING + 7 if caption else 0.0,
    )


def _draw_head(pen: _Pen, width: float, title: str) -> None:
    baseline = 30
    x = width - _MARGIN
    for label, kind in (
        ("mask asked for", "outline"),
        ("occluded part", "occluded"),
        ("visible (modal)", "visible"),
    ):
        x -= pen.width(label, _SMALL_SIZE)
        pen.text(x, baseline, label, _SMALL_SIZE, INK)
        x -= 20
        _draw_swatch(pen, x, baseline - 8.5, kind)
        x -= 16
    room = x - _MARGIN
    for line in pen.wrap(title, 13, room, 1):
        pen.text(_MARGIN, baseline, line, 13, INK, bold=True)


def _draw_swatch(pen: _Pen, x: float, y: float, kind: str) -> None:
    width, height = pen.px(14), pen.px(10)
    if kind == "outline":
        box = [pen.px(x), pen.px(y), pen.px(x) + width - 1, pen.px(y) + height - 1]
        pen.draw.rectangle(box, outline=INK, width=pen.px(1.2))
        return
    full, none = np.ones((height, width), bool), np.zeros((height, width), bool)
    visible, occluded = (full, none) if kind == "visible" else (none, full)
    tint = _tint(visible, occluded, None, 0.8 * pen.scale)
    swatch = 225 * (1 - tint[..., 3:]) + tint[..., :3]
    pen.page.paste(Image.fromarray(swatch.clip(0, 255).astype(np.uint8)), (pen.px(x), pen.px(y)))


def draw_panel(panel: Panel, ratio: float) -> UInt8[np.ndarray, "_H _W 3"]:
    """The panel's image enlarged by `ratio`, with its masks drawn at that size."""
    rows, columns = panel.image.shape[:2]
    size = (max(1, round(columns * ratio)), max(1, round(rows * ratio)))
    picture = np.asarray(Image.fromarray(panel.image).resize(size, Image.Resampling.LANCZOS))
    if panel.visible is None:
        return picture
    visible = _resize_mask(panel.visible, size)
    occluded = panel.occluded if panel.occluded is not None else np.zeros_like(panel.visible)
    return overlay(picture, visible, _resize_mask(panel.visible | occluded, size) & ~visible, panel.mask_type)


def _draw_image(pen: _Pen, panel: Panel, x: float, y: float, height: float) -> None:
    """Fits the panel's image into its cell, masks at the cell's resolution, the tag in its corner."""
    rows, columns = panel.image.shape[:2]
    ratio = min(pen.px(_CELL) / columns, pen.px(height) / rows)
    picture = draw_panel(panel, ratio)
    left = pen.px(x) + (pen.px(_CELL) - picture.shape[1]) // 2
    top = pen.px(y) + (pen.px(height) - picture.shape[0]) // 2
    cell = [pen.px(x), pen.px(y), pen.px(x + _CELL) - 1, pen.px(y + height) - 1]
    pen.draw.rectangle(cell, fill=GROUND)
    pen.page.paste(Image.fromarray(picture), (left, top))
    if panel.mask_type:
        _draw_tag(pen, panel.mask_type, x + 6, y + 6)


def _draw_tag(pen: _Pen, mask_type: MaskType, x: float, y: float) -> None:
    width = pen.width(mask_type, _TAG_SIZE, bold=True) + 12
    box = [pen.px(x), pen.px(y), pen.px(x + width), pen.px(y + 15)]
    colour = VISIBLE if mask_type == "modal" else OCCLUDED
    pen.draw.rounded_rectangle(box, pen.px(7.5), fill=colour, outline="white", width=pen.px(0.75))
    pen.text(x + width / 2, y + 7.6, mask_type, _TAG_SIZE, "white", bold=True, anchor="mm")


def _tint(
    visible: Bool[np.ndarray, "H W"],
    occluded: Bool[np.ndarray, "H W"],
    mask_type: MaskType | None,
    line: float,
) -> Float[np.ndarray, "H W 4"]:
    """What lies over the image: colour multiplied by alpha, and alpha. `line` is the outline's width in
    pixels."""
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


def _dilate(mask: Bool[np.ndarray, "H W"], radius: float) -> Bool[np.ndarray, "H W"]:
    """The mask grown by about `radius` pixels, with round corners: where a blur of half that width still
    reaches."""
    blurred = Image.fromarray(mask.astype(np.uint8) * 255).filter(ImageFilter.GaussianBlur(radius / 2))
    return np.asarray(blurred) > 5


def _quiet(image: UInt8[np.ndarray, "H W 3"]) -> Float[np.ndarray, "H W 3"]:
    """The image with paler colours, on which the two tints stand out."""
    pixels = image.astype(np.float32)
    grey = pixels @ np.array([0.299, 0.587, 0.114], np.float32)
    return 0.45 * pixels + 0.45 * grey[..., None] + 0.10 * 255


def _resize_mask(mask: Bool[np.ndarray, "H W"], size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """The mask at another size `(width, height)`, the stairs that enlarging makes rounded off within a
    pixel."""
    resized = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BILINEAR)
    plain = np.asarray(resized) > 127
    factor = size[1] / mask.shape[0]
    if factor <= 1.5:
        return plain
    smooth = np.asarray(resized.filter(ImageFilter.GaussianBlur(0.6 * factor))) > 127
    # Thin and tiny masks would be rounded away.
    return smooth if masks.area(smooth) > 0.85 * masks.area(plain) else plain


def _choose(queries: Sequence[Query], count: int, seed: int) -> list[Query]:
    """Up to `count` queries at random, in their own order, with both mask types where there are both."""
    order = np.random.default_rng(seed).permutation(len(queries))
    first = {queries[i].mask_type: int(i) for i in reversed(order)}
    chosen = [*first.values(), *(int(i) for i in order if int(i) not in first.values())][:count]
    return [queries[i] for i in sorted(chosen)]


def _target_caption(meant: Sequence[Instance]) -> str:
    if not meant:
        return "no target"
    hidden = [masks.area(i.amodal & ~i.modal) / max(1, masks.area(i.amodal)) for i in meant if i.amodal is not None]
    if len(hidden) < len(meant):
        share = "amodal mask unknown"
    elif max(hidden):
        share = f"{'up to ' if len(meant) > 1 else ''}{100 * max(hidden):.0f} % occluded"
    else:
        share = "fully visible"
    names = ", ".join(sorted({instance.category for instance in meant}))
    return f"{names} · {share}" if len(meant) == 1 else f"{len(meant)} instances · {names} · {share}"


def _image_caption(sample: Sample) -> str:
    known = [instance for instance in sample.instances if not instance.ignore]
    hidden = sum(i.amodal is not None and masks.area(i.amodal & ~i.modal) > 0 for i in known)
    return f"{sample.file_name}\n{len(known)} instances, {hidden} occluded"


@lru_cache(maxsize=32)
def _font(pixels: int, bold: bool) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib and so is there on every machine."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), pixels)
