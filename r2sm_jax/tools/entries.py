"""Entries of annotation files: how they are read, named in errors, and turned into masks."""

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.validation import find_polygon_fault, is_id, is_text, parse_flag
from r2sm_jax.errors import InputError, describe_content, load_json, parse_json, read_bytes

T = TypeVar("T")
Size = tuple[int, int]
"""Height and width in pixels."""
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}


@dataclass(frozen=True)
class Note:
    """Something that the user should know about a record: its location, and a sentence."""

    location: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.location}: {self.sentence}"


class BadRecord(Note):
    """Why a record cannot be used and is left out."""


class RecordError(InputError):
    """A record cannot be used.

    Where the rest of the file can, the reader catches this error, yields its `bad_record` and goes
    on. Where it cannot, such as without the list of annotations, nobody catches it, and it ends the
    command as any InputError.
    """

    def __init__(self, bad_record: BadRecord) -> None:
        super().__init__(str(bad_record))
        self.bad_record = bad_record


def group_by_reason(notes: Iterable[Note]) -> list[list[Note]]:
    """Groups notes whose sentences differ in numbers only; the largest group first."""
    groups: dict[str, list[Note]] = {}
    for note in notes:
        reason = re.sub(r"\d+", "N", note.sentence)
        groups.setdefault(reason, []).append(note)
    return sorted(groups.values(), key=len, reverse=True)


@dataclass(frozen=True)
class Entry:
    """A JSON value of an annotation file, normally an object. Every error names its location."""

    path: Path
    name: str
    """Where it is in the file: "annotation 7", "[3].answers[0]"; empty for the file itself."""
    value: Any

    def __str__(self) -> str:
        return str(self.path) if self.is_whole_file else f"{self.path}: {self.name}"

    @property
    def is_whole_file(self) -> bool:
        """Whether this is the content of the file, and not a part of it."""
        return not self.name

    def error(self, problem: str, remedy: str) -> RecordError:
        """An error about this entry, to raise."""
        return RecordError(BadRecord(str(self), f"{problem}; {remedy}"))

    def note(self, sentence: str) -> Note:
        return Note(str(self), sentence)

    def get(self, key: str) -> Any:
        """The value of a field; None if it is missing."""
        return self.value.get(key) if isinstance(self.value, Mapping) else None

    def first_present(self, keys: Sequence[str]) -> str | None:
        """The first of the fields that is there."""
        return next((key for key in keys if self.get(key) is not None), None)

    def require(self, key: str, *types: type) -> Any:
        """The value of a field. Raises RecordError if it has none of the `types`.

        They are keys of JSON_TYPES.
        """
        value = self.get(key)
        if isinstance(value, types) and not isinstance(value, bool):
            return value
        if not isinstance(self.value, Mapping):
            kind = JSON_TYPES.get(type(self.value), repr(self.value))
            problem = f"it is {kind}, not an object with {key!r}"
            raise self.error(problem, "check that the format is the right one")
        expected = " or ".join(JSON_TYPES[kind] for kind in types)
        actual = "missing" if value is None else JSON_TYPES.get(type(value), repr(value))
        raise self.error(
            f"its {key!r} is {actual}, not {expected}", "check that the format is the right one"
        )

    def text(self, key: str) -> str:
        """A string that is not blank. Raises RecordError for anything else."""
        text = self.require(key, str)
        if not is_text(text):
            raise self.error(f"its {key!r} is empty or holds half of a character", "write it")
        return text

    def look_up(self, key: str, table: Mapping[int, T], number: Any = None) -> T:
        """The value in `table` for the id in a field, or for `number`.

        Raises RecordError if there is none.
        """
        if number is None:
            number = self.require(key, int)
        if not is_id(number) or number not in table:
            remedy = "correct the id, or give files that belong together"
            raise self.error(f"{key} {number!r} is not in the file", remedy)
        return table[number]

    def child(self, key: str) -> "Entry":
        """The object in a field. Raises RecordError if there is none."""
        return Entry(self.path, f"{self.name}.{key}", self.require(key, dict))

    def children(self, key: str, noun: str | None = None) -> list["Entry"]:
        """The values of a list in a field; with `noun`, one with an id is named "NOUN ID".

        Raises RecordError if there is no list.
        """
        prefix = f"{self.name}.{key}" if self.name else key
        entries = []
        for index, value in enumerate(self.require(key, list)):
            entry = Entry(self.path, f"{prefix}[{index}]", value)
            if noun is not None and is_id(entry.get("id")):
                entry = Entry(self.path, f"{noun} {entry.get('id')}", value)
            entries.append(entry)
        return entries

    def size(self) -> Size:
        """Height and width of an image. Raises RecordError if no image can have this size."""
        height = self.require("height", int)
        width = self.require("width", int)
        self.check_size(height, width)
        return height, width

    def check_size(self, height: int, width: int) -> None:
        """Raises RecordError if no image can have this size."""
        try:
            masks.check_size(height, width)
        except ValueError as error:
            problem = f"its size is not possible ({error})"
            raise self.error(problem, "give the image's own size") from error

    def flag_that_ignores(self, crowds_are_objects: bool = False) -> str:
        """The flag that leaves an annotation out of loss, queries and metrics, "" if none does.

        Raises RecordError for a flag that is neither yes nor no.
        """
        flags = {}
        for name in ("ignore", "iscrowd"):
            flags[name] = parse_flag(self.get(name))
            if flags[name] is None:
                raise self.error(f"its {name} is {self.get(name)!r}", "write 0 or 1")
        if flags["ignore"]:
            return "ignore"
        return "iscrowd" if flags["iscrowd"] and not crowds_are_objects else ""

    def mask(self, key: str, size: Size) -> tuple[Mask, list[Note]]:
        """The mask `[H W]` in a field, as `read_mask`, and a note if rings were left out.

        Raises RecordError for anything that is no mask of this size.
        """
        try:
            mask, num_short = read_mask(self.get(key), size)
        except ValueError as error:
            remedy = "give the annotation and the image that belong together"
            raise self.error(f"its {key} cannot be used ({error})", remedy) from error
        polygons = self.get(key)
        if isinstance(polygons, list) and (fault := find_polygon_fault(polygons, size)):
            raise self.error(f"its {key} is not where the image is", fault)
        notes = []
        if num_short:
            what = f"{num_short} rings of fewer than three points in its {key} were left out"
            notes.append(self.note(what))
        return mask, notes


# Reading files


def read_json_files(sources: Sequence[Path], description: str) -> Iterator[Entry | Note]:
    """Yields the content of JSON files, and of the *.json files in folders.

    `description` names the format. In a folder, a file that is not JSON is a bad record, and a
    `._*.json` file of macOS is left out with a note. Raises InputError for a file that is not JSON
    if `sources` names it, and for a path that does not exist.
    """
    for source in sources:
        if not source.exists():
            raise InputError(f"{source}: there is no such file or folder; check the path")
        if not source.is_dir():
            yield Entry(source, "", load_json(source, description))
            continue
        for path in sorted(source.glob("*.json")):
            if path.name.startswith("._"):  # macOS writes them beside files on other disks
                yield Note(str(path), "left out, it holds attributes of macOS and no annotations")
                continue
            try:
                yield Entry(path, "", load_json(path, description))
            except InputError as error:
                yield BadRecord(str(path), str(error).removeprefix(f"{path}: "))


def read_list_files(sources: Sequence[Path], description: str) -> Iterator[Entry | BadRecord]:
    """Yields the entries of lists in JSON files, pickles (.p) or JSON Lines files (.jsonl).

    A line that is not JSON is a bad record. Raises InputError for a file that holds no list.
    """
    for path in sources:
        if path.suffix == ".jsonl":
            yield from _read_json_lines(path, description)
            continue
        values = read_pickle(path) if path.suffix == ".p" else load_json(path, description)
        if not isinstance(values, list):
            raise InputError(f"{path}: this is not a list; give {description}")
        for index, value in enumerate(values):
            yield Entry(path, f"[{index}]", value)


def _read_json_lines(path: Path, description: str) -> Iterator[Entry | BadRecord]:
    """Yields the lines of a JSON Lines file that are not blank."""
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        if not line.strip():
            continue
        location = f"{path}: line {number}"
        try:
            yield Entry(path, f"line {number}", parse_json(line, location, description))
        except InputError as error:
            yield BadRecord(location, str(error).removeprefix(f"{location}: "))


def index_by_id(entries: Iterable[Entry]) -> tuple[dict[int, Entry], list[BadRecord]]:
    """Entries by their id. One without an id, or with the id of an earlier one, is a bad record."""
    by_id: dict[int, Entry] = {}
    bad_records = []
    for entry in entries:
        try:
            if entry.require("id", int) in by_id:
                raise entry.error("its id occurs twice", "give each its own; the first is used")
            by_id[entry.get("id")] = entry
        except RecordError as error:
            bad_records.append(error.bad_record)
    return by_id, bad_records


class _PlainDataUnpickler(pickle.Unpickler):
    """Loads no class and no function, so that a pickle cannot run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def read_pickle(path: Path) -> Any:
    """The plain data of a pickle. Raises InputError if it holds more, or is damaged."""
    content = read_bytes(path)
    try:
        try:
            return _PlainDataUnpickler(BytesIO(content), encoding="utf-8").load()
        except UnicodeDecodeError:  # strings of Python 2 in another encoding
            return _PlainDataUnpickler(BytesIO(content), encoding="cp1252", errors="replace").load()
    except Exception as error:  # damaged pickles raise nearly anything
        described = "" if content.startswith(b"\x80") else describe_content(content)
        if described:
            raise InputError(f"{path}: this is no pickle, it is {described}") from error
        raise InputError(
            f"{path}: the pickle holds more than plain data or is damaged ({error}); it is not "
            "read, "
            "since pickles can run code; write it again as JSON (a list of refs) with a .json name"
        ) from error


# Masks


def read_mask(value: Any, size: Size) -> tuple[Mask, int]:
    """The mask `[H W]` of an image of this size, and how many rings were left out.

    `value` is an RLE, a list of RLEs, one ring (polygon), or a list of rings; several are united. A
    ring is a list of numbers or of points. Rings of fewer than three points are left out unless
    there are no others. Raises ValueError, with a reason, for anything else.
    """
    if not isinstance(value, list) or not value:
        return masks.from_segmentation(value, *size), 0
    if all(isinstance(part, dict) for part in value):
        rles = [masks.compressed(rle, *size) for rle in value]
        return masks.decode(masks.merge(rles, *size)), 0

    rings = [value] if _is_ring(value) else value
    rings = [_flatten(ring) for ring in rings]
    # A value that is no list stays, so that `from_segmentation` says what is wrong with it.
    is_kept = [not isinstance(ring, list) or len(ring) >= 6 for ring in rings]
    if not any(is_kept):
        return masks.from_segmentation(rings, *size), 0
    kept_rings = list(compress(rings, is_kept))
    return masks.from_segmentation(kept_rings, *size), is_kept.count(False)


def _is_ring(value: list[Any]) -> bool:
    """Whether a list is one ring, of numbers or of points, and not a list of rings.

    A list of pairs of numbers has points, since no ring consists of two numbers.
    """
    if isinstance(value[0], int | float):
        return True
    for part in value:
        if not isinstance(part, list) or len(part) != 2:
            return False
        if any(isinstance(coordinate, list) for coordinate in part):
            return False
    return True


def _flatten(ring: Any) -> Any:
    """A ring of points as a flat list of numbers; anything else as it is.

    Raises ValueError for a list of points with something else among them.
    """
    if not isinstance(ring, list) or not any(isinstance(point, list) for point in ring):
        return ring
    if not all(isinstance(point, list) and len(point) == 2 for point in ring):
        raise ValueError("a polygon is neither a list of numbers nor of points [x, y]")
    return [number for point in ring for number in point]


def draw_polygon(points: Any, size: Size) -> Mask:
    """The mask `[H W]` that OpenCV's `polylines` and `fillPoly` draw for points `[[x, y], ...]`.

    Coordinates are cut to whole numbers. The outline belongs to the mask, so that one point is a
    pixel and two are a line. Raises ValueError for anything but points, and InputError if OpenCV is
    missing.
    """
    try:
        import cv2  # an optional dependency: no other format needs it
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
    canvas = np.zeros(size, np.uint8)
    ring = corners.astype(np.int32)
    cv2.polylines(canvas, [ring], True, 1)
    cv2.fillPoly(canvas, [ring], 1)
    return canvas.astype(bool)
