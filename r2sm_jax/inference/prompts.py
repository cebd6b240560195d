"""Reads what a caller gives about an object: a sentence, its visible mask, a box around what shows
of it, clicks."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import check_query
from r2sm_jax.query import MAX_CLICKS, Click, Prompt

MASK_TYPE_CHOICES = ("auto", "modal", "amodal")
"""auto: the query decides."""
SPECK_SHARE = 0.01
"""Of the mask's area: smaller parts and holes are dropped by `clean`."""


class Request(NamedTuple):
    """What is asked about one object of an image."""

    text: str
    """The sentence; empty where a mask, a box or clicks stand in its place."""
    mask_type: str = "auto"
    """One of `MASK_TYPE_CHOICES`."""
    mask: Mask | None = None
    """What shows of the object, as the caller says."""
    prompt: Prompt | None = None


def read_requests(
    queries: str | Iterable[str | None] | None,
    size: tuple[int, int],
    mask_type: str = "auto",
    masks: Iterable[Any] | None = None,
    boxes: Iterable[Any] | None = None,
    points: Iterable[Any] | None = None,
) -> list[Request]:
    """Reads what is asked about an image of this height and width, as `Predictor.predict` takes it.

    Raises InputError if the mask type is unknown, there is not one mask, box or list of points for
    each query, one of them cannot be used, or a query has neither words nor a place, or a mask and
    another place.
    """
    if mask_type not in MASK_TYPE_CHOICES:
        raise InputError(f"mask type {mask_type!r} is unknown; say auto, modal or amodal")
    given = {"masks": masks, "boxes": boxes, "points": points}
    places = {name: list(values) for name, values in given.items() if values is not None}
    if queries is None:
        queries = [None] * max(map(len, places.values()), default=0)
    texts = [queries] if isinstance(queries, str) else list(queries)
    for name, values in places.items():
        if len(values) != len(texts):
            raise InputError(
                f"{len(values)} {name}, but {len(texts)} queries; give one, or None, for each query"
            )

    requests = []
    for index, text in enumerate(texts):
        where = f"query {index + 1}"
        of_query = {name: values[index] for name, values in places.items()}
        mask, box, clicks = (of_query.get(name) for name in ("masks", "boxes", "points"))
        if mask is not None:
            mask = read_mask(mask, size, f"the mask of {where}")
        clicks = [] if clicks is None else list(clicks)
        prompt = None
        if box is not None or clicks:
            prompt = _read_prompt(box, clicks, size, where)
        if mask is not None and prompt is not None:
            raise InputError(f"{where} has a mask, and a box or points as well; give one of them")
        if text or (mask is None and prompt is None):
            check_query(text or "")
        requests.append(Request(text or "", mask_type, mask, prompt))
    return requests


def read_mask(value: Any, size: tuple[int, int], name: str, *, may_be_empty: bool = False) -> Mask:
    """Reads a mask `[H W]` in any usual layout, into an array of its own.

    Args:
        value: an array or a tensor `[H W]` (booleans, 0 and 1, 0 and 255, or probabilities), with
            or without leading axes of length 1; COCO's RLE, compressed or not; a list of polygons,
            each `[x1, y1, x2, y2, ...]` or `[n 2]`; or an object that holds one of these as
            `segmentation`.
        size: height and width of the image.
        name: what a message calls the mask.

    Raises InputError for anything else, for another size, and for an empty mask unless it may be.
    """
    try:
        mask = _to_mask(value, size)
        if not may_be_empty and not mask.any():
            raise ValueError("it is empty")
    except ValueError as error:
        raise InputError(
            f"{name} cannot be used ({error}); give the visible part of one object, in a mask of "
            "the image's size"
        ) from error
    return mask


def read_others(others: Iterable[Any], size: tuple[int, int]) -> Mask:
    """Reads visible masks as `read_mask` does, and returns their union `[H W]`."""
    union = np.zeros(size, bool)
    for number, mask in enumerate(others, start=1):
        union |= read_mask(mask, size, f"mask {number} of the others", may_be_empty=True)
    return union


def _to_mask(value: Any, size: tuple[int, int]) -> Mask:
    if isinstance(value, Mapping) and "segmentation" in value:
        value = masks.of_annotation(value)
    if isinstance(value, Mapping | list | tuple):
        return masks.from_segmentation(value, *size)
    array = np.asarray(value)
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if array.shape != size:
        turned = "; it seems to be turned" if array.shape == size[::-1] else ""
        raise ValueError(f"its shape is {list(array.shape)}, its image's {list(size)}{turned}")
    return array.copy() if array.dtype == bool else masks.from_pixels(array)


def _read_prompt(box: Any, points: Iterable[Any], size: tuple[int, int], where: str) -> Prompt:
    """Reads x0 y0 x1 y1, or None, and clicks (x, y) or (x, y, is_positive).

    What lies outside of the image is cut off from a box. Raises InputError for a box without area
    in the image, for a click outside of it, for labels other than 0 and 1, for shares of the
    image's size, and for clicks that are all beside the object or more than `MAX_CLICKS`.
    """
    height, width = size
    if box is not None:
        x0, y0, x1, y1 = map(float, box)
        if max(x0, y0, x1, y1) <= 1:
            raise InputError(f"the box of {where} has shares of the image's size; give pixels")
        box = (max(x0, 0.0), max(y0, 0.0), min(x1, float(width)), min(y1, float(height)))
        # Not `>=`, so that NaN is refused, too.
        if not (box[0] < box[2] and box[1] < box[3]):
            raise InputError(
                f"the box of {where} has no area in the image of {width} x {height} pixels; give "
                "its corners, x0 y0 x1 y1 with x0 < x1 and y0 < y1"
            )

    clicks = []
    for point in points:
        x, y, *label = map(float, point)
        if label not in ([], [0], [1]):
            raise InputError(
                f"a point of {where} has the label {label[0]:g}; give 1 on the object, 0 beside it"
            )
        if not (0 <= x <= width and 0 <= y <= height):
            raise InputError(
                f"a point of {where}, {x:g} {y:g}, is not in the image of {width} x {height}"
            )
        clicks.append(Click(x, y, label != [0]))
    if clicks and all(click.x < 1 and click.y < 1 for click in clicks):
        raise InputError(f"the points of {where} are shares of the image's size; give pixels")
    if len(clicks) > MAX_CLICKS:
        raise InputError(f"{where} has {len(clicks)} points; give at most {MAX_CLICKS}")
    if box is None and not any(click.is_positive for click in clicks):
        raise InputError(
            f"the points of {where} all lie beside its object; give one on the object as well, or "
            "a box"
        )
    return Prompt(box, tuple(clicks))


def clean(mask: Mask) -> Mask:
    """Returns a mask without its specks and holes: parts and holes below a hundredth of its area.

    The largest part always stays, and what opens to the image's border is no hole.
    """
    min_pixels = SPECK_SHARE * masks.area(mask)
    # `stays` says it by the number of a part, and `stays[parts]` for each pixel.
    parts, sizes = _label_parts(mask)
    stays = sizes >= min(min_pixels, sizes[1:].max(initial=0))
    stays[0] = False  # number 0 is outside of the mask
    without_specks = stays[parts]

    holes, sizes = _label_parts(~without_specks)
    is_filled = sizes < min_pixels
    is_filled[0] = False  # number 0 is the mask itself
    # What touches the border of the image is no hole.
    for edge in (holes[0], holes[-1], holes[:, 0], holes[:, -1]):
        is_filled[edge] = False
    return without_specks | is_filled[holes]


def _label_parts(mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of the connected part that each pixel belongs to `[H W]`, 0 outside of the
    mask, and the number of pixels by part."""
    parts = np.empty(mask.shape, np.int32)
    ndimage.label(mask, output=parts)
    return parts, np.bincount(parts.ravel())
