"""Boxes and clicks that a caller gives."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from r2sm_jax.errors import InputError
from r2sm_jax.query import MAX_CLICKS, Click, Prompt


def no_prompts(name: str) -> InputError:
    """The error for a model that reads no boxes and clicks. `name`: what the message calls it."""
    return InputError(
        f"{name} has no outliner, which reads boxes and clicks; take one with an outliner, such as "
        "photos-small, or give the visible mask"
    )


def one_for_each(
    values: Iterable[Any] | None, num_queries: int, plural: str, singular: str
) -> list[Any]:
    """The entry of each query; None for all of them where there are no values.

    Raises InputError for another number of entries. `plural`, `singular`: their names in it.
    """
    if values is None:
        return [None] * num_queries
    entries = list(values)
    if len(entries) != num_queries:
        raise InputError(
            f"{len(entries)} {plural}, but {num_queries} queries; give one {singular}, or None, "
            "for each query"
        )
    return entries


def read_prompts(
    boxes: Iterable[Any] | None,
    points: Iterable[Any] | None,
    num_queries: int,
    size: tuple[int, int],
) -> list[Prompt | None]:
    """The prompt of each query, None where a query has neither a box nor clicks.

    Args:
        boxes: for each query x0 y0 x1 y1 in pixels of the image, or None.
        points: for each query a list of clicks (x, y) or (x, y, is_positive), or None.
        size: height and width of the image.

    Raises InputError if there is not one entry for each query, a box or a click cannot be used, or
    all clicks of a query without a box lie beside its object.
    """
    all_boxes = one_for_each(boxes, num_queries, "boxes", "box")
    all_points = one_for_each(points, num_queries, "lists of points", "list")
    prompts: list[Prompt | None] = []
    for number, (box, clicks) in enumerate(zip(all_boxes, all_points, strict=True), start=1):
        prompt = Prompt(
            None if box is None else read_box(box, size, f"the box of query {number}"),
            () if clicks is None else read_clicks(clicks, size, f"query {number}"),
        )
        has_negative_only = prompt.clicks and not any(click.is_positive for click in prompt.clicks)
        if has_negative_only and prompt.box is None:
            raise InputError(
                f"the points of query {number} all lie beside its object; give one on the object "
                "as well, or a box"
            )
        prompts.append(prompt if prompt != Prompt() else None)
    return prompts


def read_box(value: Any, size: tuple[int, int], name: str) -> tuple[float, float, float, float]:
    """x0 y0 x1 y1 within the image, from any sequence of four numbers.

    What a box has outside of the image is cut off. Raises InputError for a box that has nothing
    within it, has no area, or is not made of four numbers. `name`: what the message calls it.
    """
    numbers = _numbers(value)
    if numbers is None or len(numbers) != 4:
        raise InputError(f"{name} is {value!r}; give four numbers, x0 y0 x1 y1 in pixels")
    height, width = size
    x0, y0, x1, y1 = numbers
    if x1 <= x0 or y1 <= y0:
        raise InputError(
            f"{name} ({x0:g} {y0:g} {x1:g} {y1:g}) has no area; give x0 y0 x1 y1 with x0 < x1 and "
            "y0 < y1, the corners and not a width and a height"
        )
    x0, x1 = max(x0, 0.0), min(x1, float(width))
    y0, y1 = max(y0, 0.0), min(y1, float(height))
    if x1 <= x0 or y1 <= y0:
        raise InputError(
            f"{name} ({' '.join(f'{number:g}' for number in numbers)}) lies outside of the image, "
            f"which has {width} x {height} pixels"
        )
    return x0, y0, x1, y1


def read_clicks(value: Any, size: tuple[int, int], name: str) -> tuple[Click, ...]:
    """Clicks, from any sequence of (x, y) or (x, y, is_positive).

    Raises InputError for one outside of the image, and for more than `MAX_CLICKS`. `name`: whose
    clicks they are, in the message.
    """
    height, width = size
    clicks = []
    for entry in list(value):
        numbers = _numbers(entry)
        if numbers is None or len(numbers) not in (2, 3):
            raise InputError(f"a point of {name} is {entry!r}; give x and y in pixels")
        x, y, *sign = numbers
        if not (0 <= x <= width and 0 <= y <= height):
            raise InputError(
                f"the point {x:g} {y:g} of {name} lies outside of the image, which has "
                f"{width} x {height} pixels"
            )
        clicks.append(Click(x, y, bool(sign[0]) if sign else True))
    if len(clicks) > MAX_CLICKS:
        raise InputError(f"{name} has {len(clicks)} points; give at most {MAX_CLICKS}")
    return tuple(clicks)


def _numbers(value: Any) -> list[float] | None:
    """The finite numbers of a flat sequence; None for anything else."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError):
        return None
    if array.ndim != 1 or not np.isfinite(array).all():
        return None
    return array.tolist()
