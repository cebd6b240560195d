"""Reads what a caller gives about an object: a sentence, its visible mask, a box around what shows
of it, clicks."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from r2sm_jax.data.mask_reader import is_number, list_masks, read_mask, read_union
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import Outline
from r2sm_jax.inference.decision import check_query
from r2sm_jax.query import MAX_CLICKS, Click, Prompt

MASK_TYPE_CHOICES = ("auto", "modal", "amodal")
"""auto: the query decides."""


Place = Mask | Prompt | tuple[Outline, ...]
"""Where an object is: what shows of it, as the caller says; a box or clicks; or what a finder found
and the sentence chose, which may be several objects or none."""


class Request(NamedTuple):
    """What is asked about one object of an image."""

    text: str
    """The sentence; empty if only a place is given."""
    mask_type: str = "auto"
    """One of `MASK_TYPE_CHOICES`."""
    place: Place | None = None
    """None: its words find it."""


def read_requests(
    queries: str | Iterable[str | None] | None,
    size: tuple[int, int],
    mask_type: str = "auto",
    masks: Any = None,
    boxes: Any = None,
    points: Any = None,
) -> list[Request]:
    """Reads what is asked about an image of this height and width, as `Predictor.predict` takes it.

    Raises InputError if the mask type is unknown, there is not one mask, box or list of points for
    each query, one of them cannot be used, or a query has neither words nor a place, or a mask and
    another place.
    """
    if mask_type not in MASK_TYPE_CHOICES:
        raise InputError(f"mask type {mask_type!r} is unknown; say auto, modal or amodal")
    given = {}
    if masks is not None:
        given["masks"] = list_masks(masks)
    if boxes is not None:
        given["boxes"] = _list_boxes(boxes)
    if points is not None:
        given["points"] = _list_points(points)
    if queries is None:
        queries = [None] * max(map(len, given.values()), default=0)
    texts = [queries] if isinstance(queries, str) else list(queries)
    for name, values in given.items():
        if len(values) != len(texts):
            raise InputError(
                f"{len(values)} {name}, but {len(texts)} queries; give one, or None, for each query"
            )

    nothing = [None] * len(texts)
    columns = [given.get(name, nothing) for name in ("masks", "boxes", "points")]
    requests = []
    for number, (text, mask, box, clicks) in enumerate(zip(texts, *columns, strict=True), start=1):
        where = f"query {number}"
        place = None if mask is None else read_mask(mask, size, f"the mask of {where}")
        clicks = [] if clicks is None else list(clicks)
        if box is not None or clicks:
            if place is not None:
                raise InputError(
                    f"{where} has a mask, and a box or points as well; give one of them"
                )
            place = read_prompt(box, clicks, size, where)
        if text or place is None:
            check_query(text or "")
        requests.append(Request(text or "", mask_type, place))
    return requests


def read_visible(masks: Any, size: tuple[int, int]) -> list[Mask]:
    """Reads what shows of each object, as `Predictor.complete` takes it. Raises InputError as
    `read_mask`."""
    numbered = enumerate(list_masks(masks), start=1)
    return [read_mask(mask, size, f"mask {number}") for number, mask in numbered]


def read_others(others: Any, size: tuple[int, int]) -> Mask | None:
    """Reads the union of what shows of all objects of an image; None where it is not known. Raises
    InputError as `read_mask`."""
    return None if others is None else read_union(others, size, "others")


def _list_boxes(boxes: Iterable[Any]) -> list[Any]:
    """Returns the box of each query; a single one may stand without a list around it."""
    boxes = list(boxes)
    return [boxes] if boxes and is_number(boxes[0]) else boxes


def _list_points(points: Iterable[Any]) -> list[Any]:
    """Returns the clicks of each query; those of a single one, or a single click, may stand without
    a list around them."""
    points = list(points)
    if points and is_number(points[0]):
        return [[points]]
    for of_query in points:
        if of_query is not None and len(of_query) and is_number(of_query[0]):
            return [points]
    return points


def read_prompt(box: Any, points: Iterable[Any], size: tuple[int, int], where: str) -> Prompt:
    """Reads x0 y0 x1 y1, or None, and clicks (x, y) or (x, y, is_positive).

    What lies outside of the image is cut off from a box. Raises InputError for a box without area
    in the image, for a click outside of it, for labels other than 0 and 1, for shares of the
    image's size, and for clicks that are all beside the object or more than `MAX_CLICKS`.
    """
    height, width = size
    if box is not None:
        try:
            x0, y0, x1, y1 = map(float, box)
        except (TypeError, ValueError):
            raise InputError(f"the box of {where} is {box}; give x0 y0 x1 y1 in pixels") from None
        if 0 < max(x0, y0, x1, y1) <= 1:
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
        try:
            x, y, *label = map(float, point)
        except (TypeError, ValueError):
            raise InputError(
                f"a point of {where} is {point}; give x y, or x y and a label, in pixels"
            ) from None
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
