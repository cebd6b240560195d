"""Visible masks that a caller or a file gives: reading them in the layouts of other systems, and
cleaning them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.validation import find_polygon_fault
from r2sm_jax.errors import InputError

SPECK_SHARE = 0.01
"""Of the mask's area: smaller parts and holes are dropped by `clean`."""


def read_mask(value: Any, size: tuple[int, int], name: str, *, may_be_empty: bool = False) -> Mask:
    """The mask `[H W]` of an image of this size that a value means, as `to_mask`.

    Args:
        name: what messages call it.

    Raises InputError for one that cannot be used, and for an empty one unless it may be.
    """
    try:
        mask = to_mask(value, size)
        if not may_be_empty and not mask.any():
            raise ValueError("it is empty")
    except ValueError as error:
        raise InputError(
            f"{name} cannot be used ({error}); give the visible part of one object, in a mask of "
            "the image's size"
        ) from error
    return mask


def list_masks(values: Iterable[Any] | None) -> list[Any]:
    """The masks that a caller gives for several objects, in the layouts of `to_mask`.

    Raises InputError for one mask alone, and for None, which some systems give where they have
    found nothing.
    """
    if values is None:
        raise InputError(
            "masks is None; give a list of masks, which is empty where nothing was found"
        )
    if isinstance(values, Mapping) or getattr(values, "ndim", None) == 2:
        raise InputError("masks is one mask alone; give a list of masks, such as [mask]")
    return list(values)


def to_mask(value: Any, size: tuple[int, int]) -> Mask:
    """The mask `[H W]` that a value in any usual layout means.

    Args:
        value: an array or a tensor `[H W]` (booleans, 0 and 1, 0 and 255, or probabilities), with
            or without leading axes of length 1; COCO's RLE, compressed or not; a list of polygons,
            each `[x1, y1, x2, y2, ...]` or `[n 2]`; or an object that holds one of these as
            `segmentation`.
        size: height and width of the image.

    Raises ValueError, with a reason, for anything else and for another size.
    """
    if isinstance(value, Mapping) and "segmentation" in value:
        value = value["segmentation"]
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        value = [np.asarray(polygon).ravel().tolist() for polygon in value]
    if isinstance(value, list | tuple) and (fault := find_polygon_fault(value, size)):
        raise ValueError(fault)
    if isinstance(value, Mapping | list | tuple):
        return masks.from_segmentation(value, *size)
    return _from_array(value, size)


def _from_array(value: Any, size: tuple[int, int]) -> Mask:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on another device
        raise ValueError(f"it cannot be read as an array: {error}") from error
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or not (array.dtype == bool or np.issubdtype(array.dtype, np.number)):
        raise ValueError(f"it is no array [H W] but {array.dtype} {list(array.shape)}")
    if array.shape != size:
        problem = f"its size is {array.shape[0]} x {array.shape[1]}"
        turned = "; it seems to be turned" if array.shape == size[::-1] else ""
        raise ValueError(f"{problem}, its image's {size[0]} x {size[1]}{turned}")
    if array.dtype == bool:
        return array
    return masks.from_pixels(array)


def read_mask_file(path: Path, size: tuple[int, int]) -> Mask:
    """The mask `[H W]` in a file: a picture such as a PNG, white on black, or JSON with an RLE or
    polygons.

    Args:
        size: height and width of the image.

    Raises InputError if the file cannot be read, or holds no mask of this size or an empty one.
    """
    return read_mask(masks.read_file(path, size), size, str(path))


def clean(mask: Mask) -> Mask:
    """A mask without its specks and holes: parts and holes below a hundredth of its area.

    The largest part always stays, and what opens to the image's border is no hole.
    """
    min_pixels = SPECK_SHARE * masks.area(mask)
    # `stays` says it by the number of a part, and `stays[parts]` for each pixel.
    parts, sizes = label_parts(mask)
    stays = sizes >= min(min_pixels, sizes[1:].max(initial=0))
    stays[0] = False  # number 0 is outside of the mask
    without_specks = stays[parts]

    holes, sizes = label_parts(~without_specks)
    is_filled = sizes < min_pixels
    is_filled[0] = False  # number 0 is the mask itself
    # What touches the border of the image is no hole.
    for edge in (holes[0], holes[-1], holes[:, 0], holes[:, -1]):
        is_filled[edge] = False
    return without_specks | is_filled[holes]


def label_parts(mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """The number of the connected part that each pixel belongs to `[H W]`, 0 outside of the mask,
    and the number of pixels by part."""
    parts = np.empty(mask.shape, np.int32)
    ndimage.label(mask, output=parts)
    return parts, np.bincount(parts.ravel())
