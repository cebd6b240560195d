"""What a dataset file must satisfy to be read safely. (`check.py` looks further, at masks and images.)"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.errors import InputError

T = TypeVar("T")

LISTS = ("images", "annotations", "categories", "queries")
MASKS = ("segmentation", "visible_mask")


class Problem(NamedTuple):
    """One thing that is wrong with a dataset file."""

    records: str
    """The list that the record is in; "" for the file itself."""
    index: int
    """Position in that list; -1 for the list or the file itself."""
    where: str
    """The record's name for the user, such as "annotation 7"."""
    what: str
    remedy: str
    mend: Callable[[], str] | None = None
    """Sets it right in place and says what was done; None where only leaving the record out helps."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}" if self.where else f"{self.what}; {self.remedy}"


def bad_record(path: Path, record: str, problem: str, remedy: str) -> InputError:
    """The sentence for a record that cannot be used, as an error to raise."""
    return InputError(f"{path}: {record}: {problem}; {remedy}")


def annotation_masks(
    path: Path, annotation: Mapping[str, Any], height: int, width: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """The modal mask `[H W]` of a checked annotation, and the amodal one if it is known: with the visible fringes that
    annotators leave outside it. Raises InputError for a mask that cannot be read."""
    decoded = _read_masks(masks.from_segmentation, path, annotation, height, width)
    amodal = decoded.get("segmentation")
    modal = decoded["visible_mask"] if amodal is None else decoded.get("visible_mask", amodal)
    return modal, None if amodal is None else amodal | modal


def annotation_rles(
    path: Path, annotation: Mapping[str, Any], height: int, width: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The same as compressed RLEs, which are not expanded where the file has such."""
    found = _read_masks(masks.compressed, path, annotation, height, width)
    amodal = found.get("segmentation")
    modal = found["visible_mask"] if amodal is None else found.get("visible_mask", amodal)
    return modal, amodal if amodal is None or amodal is modal else dict(masks.merge([amodal, modal], height, width))


def _read_masks(
    read: Callable[[Any, int, int], T], path: Path, annotation: Mapping[str, Any], height: int, width: int
) -> dict[str, T]:
    found: dict[str, T] = {}
    for key in MASKS:
        if annotation.get(key) is not None:
            try:
                found[key] = read(annotation[key], height, width)
            except ValueError as error:
                problem = f"its {key} cannot be read ({error})"
                raise bad_record(path, f"annotation {annotation['id']}", problem, "write the mask again") from error
    return found


def check_records(path: Path, records: Any) -> None:
    """Checks keys, types, ids and mask sizes of a whole dataset file, decoding no mask and opening no image.

    Raises InputError for the first thing that is wrong, with `path`, the record and the remedy.
    """
    for problem in find_problems(records):
        raise InputError(f"{path}: {problem}")


def find_problems(records: Any) -> Iterator[Problem]:
    """Everything that is wrong with keys, types, ids and mask sizes, record by record."""
    if not isinstance(records, dict):
        what = f"this is JSON, but not one object with {', '.join(LISTS)}"
        yield Problem("", -1, "", what, "give a dataset file")
        return
    if not isinstance(records.get("info") or {}, dict):
        remedy = "make it one or leave it out"
        yield Problem("", -1, "", "'info' is not an object", remedy, lambda: _set(records, "info", {}))
    known: dict[str, dict[int, dict[str, Any]]] = {}
    for key in LISTS:
        if not isinstance(records.get(key), list):
            hint = "an empty list where there are none" if key == "queries" else "see the dataset format"
            mend = None if key != "queries" else lambda: _set(records, "queries", [])
            yield Problem("", -1, "", f"the list {key!r} is missing", f"add it ({hint})", mend)
        else:
            known[key] = {}
            yield from _id_problems(key, records[key], known[key])
    if len(known) < len(LISTS):
        return
    for key, check in (
        ("categories", lambda c: _text_problems(c, "name")),
        ("images", _image_problems),
        ("annotations", lambda a: _annotation_problems(a, known["images"], known["categories"])),
        ("queries", lambda q: _query_problems(q, known["images"], known["annotations"])),
    ):
        for index, record in enumerate(records[key]):
            if isinstance(record, dict) and is_id(record.get("id")):
                name = (
                    f"{'category' if key == 'categories' else 'query' if key == 'queries' else key[:-1]} {record['id']}"
                )
                for what, remedy in check(record):
                    yield Problem(key, index, name, what, remedy)


def is_id(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number (True and False are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def leads_outside(name: str) -> bool:
    """Whether a file name, on any system, points out of the folder that it is meant to lie in."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    outside = posix.is_absolute() or ".." in posix.parts or ".." in windows.parts
    return bool(outside or windows.drive or windows.root or "\0" in name)


Found = Iterator[tuple[str, str]]
"""Pairs of what is wrong and the remedy."""


def _id_problems(key: str, records: list[Any], known: dict[int, dict[str, Any]]) -> Iterator[Problem]:
    for index, record in enumerate(records):
        if not isinstance(record, dict) or not is_id(record.get("id")):
            what = "it is not an object with a whole number as id"
            yield Problem(key, index, f"{key}[{index}]", what, "give it one")
        elif record["id"] in known:
            yield Problem(key, index, f"{key} id {record['id']}", "it occurs twice", "give every record its own id")
        else:
            known[record["id"]] = record


def _image_problems(image: Mapping[str, Any]) -> Found:
    yield from _text_problems(image, "file_name")
    name = image.get("file_name")
    if isinstance(name, str) and leads_outside(name):
        yield f"file_name {name!r} leads out of the image folder", "give a path relative to it"
    missing = [key for key in ("height", "width") if not is_id(image.get(key)) or image[key] < 1]
    for key in missing:
        yield f"{key} is not a positive whole number", "add the image's size"
    if not missing:
        try:
            masks.check_size(image["height"], image["width"])
        except ValueError as error:
            yield f"its size cannot be ({error})", "give the image's own"


def _annotation_problems(
    annotation: Mapping[str, Any], images: Mapping[int, Mapping[str, Any]], categories: Mapping[int, Any]
) -> Found:
    yield from _reference_problems(annotation, "image_id", images)
    yield from _reference_problems(annotation, "category_id", categories)
    if all(annotation.get(key) is None for key in MASKS):
        yield "it has neither segmentation nor visible_mask", "add one of them or remove the record"
    image_id = annotation.get("image_id")
    image = images.get(image_id, {}) if is_id(image_id) else {}
    size = (image.get("height"), image.get("width"))
    for key in MASKS:
        mask = annotation.get(key)
        if isinstance(mask, dict):
            try:
                stated = masks.rle_size(mask)
            except ValueError as error:
                yield f"in {key}, {error}", "write the mask again"
                continue
            if image and stated != size:
                what = f"{key} is {stated[0]} x {stated[1]} but its image is {size[0]} x {size[1]}"
                yield what, "write the mask at the image's size"
        elif mask is not None and (not isinstance(mask, list) or not mask):
            yield f"{key} is neither an RLE nor a list of polygons", "write the mask as one of these, or null"
    attributes = annotation.get("attributes") or {}
    if not isinstance(attributes, dict) or not all(isinstance(value, str) for value in attributes.values()):
        yield "attributes is not an object of strings", "make it one or leave it out"


def _query_problems(query: Mapping[str, Any], images: Mapping[int, Any], annotations: Mapping[int, Any]) -> Found:
    yield from _reference_problems(query, "image_id", images)
    yield from _text_problems(query, "text")
    if query.get("mask_type") not in ("modal", "amodal"):
        yield f"mask_type is {query.get('mask_type')!r}", 'write "modal" or "amodal"'
    ids = query.get("instance_ids")
    if not isinstance(ids, list):
        yield "the list instance_ids is missing", "add it ([] where nothing is meant)"
        ids = []
    for number in ids:
        target = annotations.get(number) if is_id(number) else None
        if target is None:
            yield f"instance {number!r} is not in the annotations", "correct the id"
        elif target.get("image_id") != query.get("image_id"):
            what = f"instance {number} is on image {target.get('image_id')}, not on {query.get('image_id')}"
            yield what, "correct the id"
    if not isinstance(query.get("kind") or {}, dict):
        yield "kind is not an object", "make it one or leave it out"


def _text_problems(holder: Mapping[str, Any], key: str) -> Found:
    value = holder.get(key)
    if not isinstance(value, str) or not value.strip():
        yield f"its {key} is missing or empty", "write one"


def _reference_problems(holder: Mapping[str, Any], key: str, known: Mapping[int, Any]) -> Found:
    value = holder.get(key)
    if not is_id(value) or value not in known:
        what = f"{key} {value!r} does not exist in this file" if key in holder else f"its {key} is missing"
        yield what, "correct it or remove the record"


def _set(records: dict[str, Any], key: str, value: Any) -> str:
    records[key] = value
    return f"{key!r} set to {value!r}"
