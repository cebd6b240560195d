"""Reads what a caller gives about an object: a sentence, its visible mask, a box around what shows
of it, clicks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import check_query
from r2sm_jax.query import MAX_CLICKS, Click, Prompt

SPECK_SHARE = 0.01
"""Of the mask's area: smaller parts and holes are dropped by `clean`."""


class Request(NamedTuple):
    """What is asked about one object of an image."""

    text: str
    """The sentence; empty where a mask, a box or clicks stand in its place."""
    mask: Mask | None = None
    """What shows of the object, as the caller says."""
    prompt: Prompt | None = None

    @property
    def has_place(self) -> bool:
        """Whether something else than words says where the object is."""
        return self.mask is not None or self.prompt is not None


def read_requests(
    queries: str | Iterable[str | None] | None,
    size: tuple[int, int],
    masks: Iterable[Any] | None = None,
    boxes: Iterable[Any] | None = None,
    points: Iterable[Any] | None = None,
) -> list[Request]:
    """Reads what is asked about an image of this height and width, as `Predictor.predict` takes it.

    Raises InputError if there is not one mask, box or list of points for each query, one of them
    cannot be used, or a query has neither words nor a place, or a mask and another place.
    """
    given: dict[str, list[Any]] = {}
    for name, values in {"masks": masks, "boxes": boxes, "points": points}.items():
        if values is not None:
            given[name] = list_masks(values) if name == "masks" else list(values)
    if queries is None:
        queries = [None] * max(map(len, given.values()), default=0)
    texts = [queries] if isinstance(queries, str) else list(queries)
    for name, values in given.items():
        if len(values) != len(texts):
            raise InputError(
                f"{len(values)} {name}, but {len(texts)} queries; give one, or None, for each query"
            )

    requests = []
    for index, text in enumerate(texts):
        of_query = {name: values[index] for name, values in given.items()}
        requests.append(_read_request(text or "", size, f"query {index + 1}", **of_query))
    return requests


def _read_request(
    text: str,
    size: tuple[int, int],
    where: str,
    masks: Any = None,
    boxes: Any = None,
    points: Any = None,
) -> Request:
    """Reads one query with its mask, its box and its list of points."""
    mask = None if masks is None else read_mask(masks, size, f"the mask of {where}")
    box = None if boxes is None else read_box(boxes, size, f"the box of {where}")
    clicks = () if points is None else read_clicks(points, size, f"the points of {where}")
    prompt = Prompt(box, clicks) if box or clicks else None
    if mask is not None and prompt is not None:
        raise InputError(f"{where} has a mask, and a box or points as well; give one of them")
    if clicks and box is None and not any(click.is_positive for click in clicks):
        raise InputError(
            f"the points of {where} all lie beside its object; give one on the object as well, or "
            "a box"
        )
    if text or (mask is None and prompt is None):
        check_query(text)
    return Request(text, mask, prompt)


def list_masks(values: Iterable[Any] | None) -> list[Any]:
    """Returns the masks that a caller gives for several objects, in the layouts of `to_mask`.

    Raises InputError for one mask alone, and for None, which some systems give where they have
    found nothing.
    """
    if values is None or isinstance(values, Mapping) or getattr(values, "ndim", None) == 2:
        raise InputError(
            "masks is None or one mask alone; give a list of masks, which is empty where nothing "
            "was found"
        )
    return list(values)


def read_mask(value: Any, size: tuple[int, int], name: str, *, may_be_empty: bool = False) -> Mask:
    """Reads a mask `[H W]` of an image of this size, in a layout of `to_mask`.

    Raises InputError for one that cannot be used, and for an empty one unless it may be. `name`:
    what the message calls it.
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


def to_mask(value: Any, size: tuple[int, int]) -> Mask:
    """Reads a mask `[H W]` in any usual layout, into an array of its own.

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
    if isinstance(value, Mapping | list | tuple):
        return masks.from_segmentation(value, *size)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on another device
        raise ValueError(f"it cannot be read as an array: {error}") from error
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or not (array.dtype == bool or np.issubdtype(array.dtype, np.number)):
        raise ValueError(f"it is no array [H W] but {array.dtype} {list(array.shape)}")
    if array.shape != size:
        turned = "; it seems to be turned" if array.shape == size[::-1] else ""
        raise ValueError(
            f"its size is {array.shape[0]} x {array.shape[1]}, its image's {size[0]} x {size[1]}"
            f"{turned}"
        )
    return array.copy() if array.dtype == bool else masks.from_pixels(array)


def read_box(value: Any, size: tuple[int, int], name: str) -> tuple[float, float, float, float]:
    """Reads x0 y0 x1 y1 from any sequence of four numbers; what lies outside of the image is cut
    off.

    Raises InputError for anything else, a box without area in the image, and shares of its size.
    `name`: what the message calls it.
    """
    height, width = size
    x0, y0, x1, y1 = corners = _numbers(value, (4,), f"{name}: give x0 y0 x1 y1 in pixels")
    if max(corners) <= 1:
        raise InputError(f"{name} has shares of the image's size; give x0 y0 x1 y1 in pixels")
    x0, x1 = max(x0, 0.0), min(x1, float(width))
    y0, y1 = max(y0, 0.0), min(y1, float(height))
    if x1 <= x0 or y1 <= y0:
        raise InputError(
            f"{name} has no area in the image of {width} x {height} pixels; give its corners, "
            "x0 y0 x1 y1 with x0 < x1 and y0 < y1"
        )
    return x0, y0, x1, y1


def read_clicks(value: Iterable[Any], size: tuple[int, int], name: str) -> tuple[Click, ...]:
    """Reads clicks from any sequence of (x, y) or (x, y, is_positive).

    Raises InputError for one outside of the image, for labels other than 0 and 1, for shares of the
    image's size, and for more than `MAX_CLICKS`. `name`: what the message calls them.
    """
    height, width = size
    clicks = []
    for entry in value:
        x, y, *labels = _numbers(entry, (2, 3), f"{name}: give x and y in pixels")
        if labels and labels[0] not in (0, 1):
            raise InputError(
                f"{name} have the label {labels[0]:g}; give 1 on the object, 0 beside it"
            )
        if not (0 <= x <= width and 0 <= y <= height):
            raise InputError(f"{name}: {x:g} {y:g} is not in the image of {width} x {height}")
        clicks.append(Click(x, y, labels != [0.0]))
    if clicks and all(click.x < 1 and click.y < 1 for click in clicks):
        raise InputError(f"{name} are shares of the image's size; give x and y in pixels")
    if len(clicks) > MAX_CLICKS:
        raise InputError(f"{name} are {len(clicks)}; give at most {MAX_CLICKS}")
    return tuple(clicks)


def _numbers(value: Any, counts: Sequence[int], fault: str) -> list[float]:
    """Returns the finite numbers of a flat sequence of so many. Raises InputError for others."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError):
        array = np.array([])
    if array.ndim != 1 or array.size not in counts or not np.isfinite(array).all():
        raise InputError(f"{fault}, not {value!r}")
    return array.tolist()


def clean(mask: Mask) -> Mask:
    """Returns a mask without its specks and holes: parts and holes below a hundredth of its area.

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
    """Returns the number of the connected part that each pixel belongs to `[H W]`, 0 outside of the
    mask, and the number of pixels by part."""
    parts = np.empty(mask.shape, np.int32)
    ndimage.label(mask, output=parts)
    return parts, np.bincount(parts.ravel())
