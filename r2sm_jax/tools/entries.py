"""Entries of annotation files, which know their file and place, and what is wrong with them; masks in all layouts."""

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import is_id, is_text
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError, read_bytes

T = TypeVar("T")
Size = tuple[int, int]
"""Height and width in pixels."""
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}


class Note(NamedTuple):
    """What the user should know about a record: where it stands, and a sentence."""

    where: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


def by_reason(notes: Sequence[Note]) -> list[list[Note]]:
    """Notes that say the same, but for numbers, together; the most frequent first."""
    groups: dict[str, list[Note]] = {}
    for note in notes:
        groups.setdefault(re.sub(r"\d+", "N", note.sentence), []).append(note)
    return sorted(groups.values(), key=len, reverse=True)


class RecordError(InputError):
    """A record of an annotation file cannot be used; `note` says why."""

    def __init__(self, note: Note) -> None:
        super().__init__(str(note))
        self.note = note


@dataclass(frozen=True)
class Entry:
    """A JSON value of an annotation file, normally an object. Its methods name its file and place in every error."""

    path: Path
    place: str
    """Such as "annotation 7" or "[3].answers[0]"; empty for the whole file."""
    value: Any

    def error(self, problem: str, remedy: str) -> RecordError:
        """An error about this entry, to raise."""
        return RecordError(Note(str(self), f"{problem}; {remedy}"))

    def __str__(self) -> str:
        return f"{self.path}: {self.place}" if self.place else str(self.path)

    def get(self, key: str) -> Any:
        """The value of a field; None where it is missing."""
        return self.value.get(key) if isinstance(self.value, Mapping) else None

    def need(self, key: str, *types: type) -> Any:
        """The value of a field of one of the `types`, of `JSON_TYPES`. Raises InputError for any other."""
        value = self.get(key)
        if not isinstance(value, types) or isinstance(value, bool):
            wanted = " or ".join(JSON_TYPES[kind] for kind in types)
            found = "missing" if value is None else JSON_TYPES.get(type(value), repr(value))
            raise self.error(
                f"its {key!r} is {found}, not {wanted}", "check that the format is the right one"
            )
        return value

    def text(self, key: str) -> str:
        """A string that is not blank. Raises InputError for anything else."""
        if not is_text(text := self.need(key, str)):
            raise self.error(f"its {key!r} is empty or holds half of a character", "write it")
        return text

    def refer(self, key: str, known: Mapping[int, T], number: Any = None) -> T:
        """What the id in a field, or `number`, stands for. Raises InputError for an id that is not `known`."""
        number = self.need(key, int) if number is None else number
        if not is_id(number) or number not in known:
            remedy = "correct the id, or give files that belong together"
            raise self.error(f"{key} {number!r} is not in the file", remedy)
        return known[number]

    def entry(self, key: str) -> "Entry":
        """The object in a field. Raises InputError where there is none."""
        return Entry(self.path, f"{self.place}.{key}", self.need(key, dict))

    def entries(self, key: str, name: str | None = None) -> list["Entry"]:
        """The objects of a list. With `name`, an entry that has an id is called "NAME ID". Raises InputError where
        there is no list."""
        place = f"{self.place}.{key}" if self.place else key
        listed = [
            Entry(self.path, f"{place}[{index}]", value)
            for index, value in enumerate(self.need(key, list))
        ]
        return [
            replace(e, place=f"{name} {e.get('id')}") if name and is_id(e.get("id")) else e
            for e in listed
        ]

    def size(self) -> Size:
        """Height and width of an image. Raises InputError where masks cannot have this size."""
        size = self.need("height", int), self.need("width", int)
        try:
            masks.check_size(*size)
        except ValueError as error:
            raise self.error(
                f"its size is not possible ({error})", "give the image's own size"
            ) from error
        return size


class _PlainData(pickle.Unpickler):
    """An unpickler that knows no classes: reading a pickle can run code, and here nothing can run."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def read_pickle(path: Path) -> Any:
    """The plain data of a pickle. Raises InputError for one that holds more, and for a damaged one."""
    content = read_bytes(path)
    try:
        try:
            return _PlainData(BytesIO(content), encoding="utf-8").load()
        except UnicodeDecodeError:  # strings of Python 2 in another encoding
            return _PlainData(BytesIO(content), encoding="cp1252", errors="replace").load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise InputError(
            f"{path}: the pickle holds more than plain data or is damaged ({error}); it is not read, since pickles "
            "can run code; write it again as JSON (a list of refs) with a .json name"
        ) from error


def read_mask(value: Any, size: Size) -> tuple[Mask, int]:
    """The mask `[H W]` of an image of this size, and how many rings were left out.

    `value` is an RLE, a list of RLEs, one polygon, or a list of polygons; of several the union is meant. A polygon is a
    list of numbers or of points. Rings of fewer than three points are left out, unless there are no others. Raises
    ValueError, with a reason, for anything else.
    """
    if not isinstance(value, list) or not value:
        return masks.from_segmentation(value, *size), 0
    if all(isinstance(part, dict) for part in value):
        rles = [masks.compressed(part, *size) for part in value]
        return masks.decode(masks.merge(rles, *size)), 0
    rings = [_numbers(ring) for ring in ([value] if _is_ring(value) else value)]
    long = [ring for ring in rings if not isinstance(ring, list) or len(ring) >= 6] or rings
    return masks.from_segmentation(long, *size), len(rings) - len(long)


def _is_ring(value: list[Any]) -> bool:
    """Whether a list is a single polygon. A list of lists of two numbers is one, since no polygon has two numbers."""
    pairs = all(isinstance(part, list) and len(part) == 2 for part in value)
    return isinstance(value[0], int | float) or (
        pairs and not any(isinstance(x, list) for part in value for x in part)
    )


def _numbers(ring: Any) -> Any:
    """A polygon as a flat list of numbers."""
    if not isinstance(ring, list) or not any(isinstance(point, list) for point in ring):
        return ring
    if not all(isinstance(point, list) and len(point) == 2 for point in ring):
        raise ValueError("a polygon is neither a list of numbers nor of points [x, y]")
    return [number for point in ring for number in point]


def draw_polygon(points: Any, size: Size) -> Mask:
    """The mask `[H W]` that OpenCV's `polylines` and `fillPoly` draw for points `[[x, y], ...]`, cut to whole numbers.

    The outline belongs to the mask, so that one point is a pixel and two are a line. Raises ValueError for anything
    else than points, and InputError where OpenCV is missing.
    """
    try:
        import cv2  # no other format needs it
    except ImportError:
        raise InputError(
            "OpenCV draws these polygons and is missing; pip install opencv-python-headless"
        ) from None
    try:
        corners = np.asarray(points, np.float64)
    except (TypeError, ValueError, OverflowError):
        corners = np.zeros(0)
    if corners.ndim != 2 or corners.shape[-1] != 2 or not (np.abs(corners) < 1 << 31).all():
        raise ValueError("it is not a list of points [x, y]")
    drawn, ring = np.zeros(size, np.uint8), corners.astype(np.int32)
    cv2.polylines(drawn, [ring], True, 1)
    cv2.fillPoly(drawn, [ring], 1)
    return drawn.astype(bool)
