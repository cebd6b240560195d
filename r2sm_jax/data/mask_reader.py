"""Reads the mask of an object in any layout: a file, an array, an RLE, polygons, an annotation."""

from collections.abc import Mapping
from numbers import Number
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from r2sm_jax.data import images
from r2sm_jax.data.masks import Mask, from_segmentation
from r2sm_jax.errors import InputError, load_json

MAX_GREY_LEVELS = 80
"""Labels of objects are small numbers (this leaves room for more than VOC's 20), while the soft
edge of a mask reaches higher."""
MIN_SOFT_LEVELS = 8
"""Values that a mask with soft edges has at least, where the highest is not white."""
INVERTED = "all corners of the image are mask; are black and white inverted?"


def covers_corners(mask: Mask) -> bool:
    """Whether all corners of the image are mask, as where black and white are inverted."""
    return bool(mask[np.ix_([0, -1], [0, -1])].all())


def read_mask(value: Any, size: tuple[int, int], name: str, *, may_be_empty: bool = False) -> Mask:
    """Reads a mask `[H W]` into an array of its own.

    Args:
        value: the path of a picture, white on black or drawn in the transparency, or of a JSON file
            with one of the following; an array or a tensor `[H W]` (booleans, 0 and 1, 0 and 255,
            or probabilities), with or without leading axes of length 1; COCO's RLE, compressed or
            not; a list of polygons, each `[x1, y1, x2, y2, ...]` or `[n 2]`; or an object that
            holds one of these as `segmentation`.
        size: height and width of the image.
        name: what a message calls the mask.

    Raises InputError for anything else, for another size, and for an empty mask unless it may be.
    """
    try:
        mask = _to_mask(value, size)
        if not may_be_empty and not mask.any():
            raise ValueError("it is empty")
    except (InputError, ValueError) as error:
        reason = str(error).removeprefix(f"{name}: ")
        raise InputError(
            f"{name} cannot be used ({reason}); give the mask of one object, of the image's size"
        ) from error
    return mask


def read_union(values: Any, size: tuple[int, int], name: str) -> Mask:
    """Reads masks as `read_mask` does, and returns their union `[H W]`. A JSON file may hold a list
    of them."""
    union = np.zeros(size, bool)
    for number, mask in enumerate(list_masks(values), start=1):
        union |= read_mask(mask, size, f"{name}: mask {number}", may_be_empty=True)
    return union


def list_masks(masks: Any) -> list[Any]:
    """Returns some masks as a list; a single one may stand without a list around it."""
    if isinstance(masks, str | PathLike):
        masks = _load(Path(masks))
    if isinstance(masks, Mapping) or getattr(masks, "ndim", None) == 2:
        return [masks]
    masks = list(masks)
    return [masks] if masks and is_number(masks[0]) else masks


def is_number(value: Any) -> bool:
    """Whether a value is a number, of Python or of an array."""
    return isinstance(value, Number) or getattr(value, "ndim", None) == 0


def _load(path: Path) -> Any:
    """What is in a file: the levels of a picture, or JSON."""
    if path.suffix.lower() == ".json":
        return load_json(path, "a mask, an RLE or polygons")
    return levels(images.decode(path))


def _to_mask(value: Any, size: tuple[int, int]) -> Mask:
    if isinstance(value, str | PathLike):
        value = _load(Path(value))
    if isinstance(value, Mapping) and "segmentation" in value:
        value = of_annotation(value)
    if isinstance(value, Mapping | list | tuple):
        return from_segmentation(value, *size)
    array = np.asarray(value)
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if array.shape != size:
        turned = "; it seems to be turned" if array.shape == size[::-1] else ""
        raise ValueError(f"its shape is {list(array.shape)}, its image's {list(size)}{turned}")
    return array.copy() if array.dtype == bool else from_pixels(array)


def of_annotation(annotation: Mapping[str, Any]) -> Any:
    """Returns the `segmentation` of an annotation. Raises ValueError if it has another mask, too,
    since the complete one may be taken for what shows."""
    for name, value in annotation.items():
        if name != "segmentation" and holds_mask(value):
            raise ValueError(f"{name} holds a mask, too; give the visible one alone")
    return annotation["segmentation"]


def holds_mask(value: Any) -> bool:
    """Whether the field of an annotation holds a mask: an RLE, or polygons."""
    if isinstance(value, dict):
        return "counts" in value
    return isinstance(value, list) and any(isinstance(v, list) and len(v) >= 6 for v in value)


def levels(image: Image.Image) -> np.ndarray:
    """How much each pixel of a drawn mask is part of it `[H W]`: the transparency where it varies,
    or else the brightest channel.

    A palette of greys counts as greys. In a palette with colours, or all black, the pixels are
    labels of objects: label k counts as 256 + k, the background as 0. That is what is black or
    transparent, or else label 0.
    """
    if len(image.getbands()) == 1 and image.mode != "P":
        return np.asarray(image)
    rgba = np.asarray(image.convert("RGBA"))
    colour = rgba[..., :3]
    alpha = rgba[..., 3]
    if image.mode != "P":
        return alpha if np.ptp(alpha) else colour.max(-1)

    values = colour.max(-1) * (alpha > 0)
    is_grey = (np.ptp(colour, axis=-1) == 0).all()
    if is_grey and any(image.getpalette() or ()):
        # Greys that begin above 0 are shifted; one grey alone says nothing of a background.
        return values - values.min() if np.ptp(values) else values
    labels = np.asarray(image, np.int32)
    has_background = 0 < np.count_nonzero(values) < values.size
    is_object = values > 0 if has_background else labels > 0
    # 256 is added so that no label is taken for white, which is 255 (`from_pixels`).
    return np.where(is_object, labels + 256, 0)


def from_pixels(values: np.ndarray) -> Mask:
    """The mask `[H W]` of the pixels of a drawn mask.

    It is what is brighter than half of white, or than half of the only value besides 0. Numbers
    with fractions from 0 to 1 are probabilities. Raises ValueError, with a reason, where that
    cannot be told: several labels, logits, a photo, a mask that never falls to black.
    """
    if np.issubdtype(values.dtype, np.floating):
        if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
            raise ValueError("its numbers are no probabilities from 0 to 1; cut logits at 0")
        return values > 0.5
    highest, lowest = int(values.max()), int(values.min())
    threshold = highest // 2
    distinct = np.unique(values)
    if len(distinct) == 1 and highest not in (0, 1, 255, 65_535):
        raise ValueError(f"it is {highest} everywhere; draw black as 0 and white as 255")
    # The values of a soft mask are many, and reach into the upper half of what a picture can have.
    is_high = 127 < highest <= 255 or highest > 32_767
    is_soft = is_high and len(distinct) >= MIN_SOFT_LEVELS
    if len(distinct) > 2 and highest not in (255, 65_535) and not is_soft:
        raise ValueError(f"it holds {len(distinct)} values; give each object its own mask")
    # Values between black and white are soft edges of one mask, labels of several objects, such as
    # Pascal VOC's, inside of a thin border of 255, or the pixels of a photo. Of a mask the greater
    # part is white.
    between = distinct[(distinct > 0) & (distinct < highest)]
    is_mostly_white = (values == highest).sum() >= (values > 0).sum() / 2
    if len(between) and between.max() <= MAX_GREY_LEVELS and not is_mostly_white:
        raise ValueError(
            f"it holds labels up to {between.max()} and a border of {highest}; give each object "
            "its own mask"
        )
    # JPEG leaves a little noise in what was black or white.
    num_lit = (values > 0.1 * highest).sum()
    if (values >= 0.9 * highest).sum() < num_lit / 2:
        raise ValueError("most of it is neither black nor white, as in a photo; draw a mask")
    if len(distinct) > 1 and lowest > threshold:
        raise ValueError(f"its values never fall to 0, the lowest is {lowest}; draw black as 0")
    return values > threshold
