"""What a dataset file must satisfy to be read. (tools/check.py looks further, at masks and images.)"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypeGuard

from r2sm_jax.data import masks
from r2sm_jax.errors import InputError, load_json

LISTS = {"images": "image", "annotations": "annotation", "categories": "category", "queries": "query"}
"""The lists of a dataset file, and what one of their records is called."""
MASKS = ("segmentation", "visible_mask")

Record = Mapping[str, Any]
ById = Mapping[str, Mapping[int, Record]]
"""The records of each list by their id."""


class Problem(NamedTuple):
    """One thing that is wrong with a dataset file.

    `records` is the list that the record is in, "" for the file itself, and `index` its place there, -1 for the list or
    the file. `where` names the record for the user, such as "annotation 7". `mend` corrects it in place and returns
    what was done; it is None where the record can only be left out.
    """

    records: str
    index: int
    where: str
    what: str
    remedy: str
    mend: Callable[[], str] | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}" if self.where else f"{self.what}; {self.remedy}"


def is_id(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number (True and False are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a string that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def leads_outside(name: str) -> bool:
    """Whether a file name, on any system, points out of the folder that it is meant to lie in."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    outside = posix.is_absolute() or ".." in posix.parts or ".." in windows.parts
    return bool(outside or windows.drive or windows.root or "\0" in name)


def read_records(path: Path) -> dict[str, Any]:
    """The content of a dataset file, checked. Raises InputError as `check_records`, and where there is no such file."""
    records = load_json(path, "a dataset file")
    check_records(path, records)
    return records


def check_records(path: Path, records: Any) -> None:
    """Checks keys, types, ids and mask sizes of a whole dataset file. Decodes no mask and opens no image.

    Raises InputError for the first problem, with `path`, the record, the field and the remedy.
    """
    for problem in find_problems(records):
        raise InputError(f"{path}: {problem}")


def find_problems(records: Any) -> Iterator[Problem]:
    """All problems with keys, types, ids and mask sizes, record by record."""
    if not isinstance(records, dict):
        yield Problem("", -1, "", f"this is JSON, but not one object with {', '.join(LISTS)}", "give a dataset file")
        return
    missing = [key for key in LISTS if not isinstance(records.get(key), list)]
    for key in missing:
        mend = partial(_set, records, key, []) if key == "queries" else None
        yield Problem("", -1, "", f"the list {key!r} is missing", "add it, [] where there are none", mend)
    if missing:
        return
    by_id: dict[str, dict[int, Record]] = {key: {} for key in LISTS}
    for key in LISTS:
        for index, record in enumerate(records[key]):
            if not isinstance(record, dict) or not is_id(record.get("id")):
                what = "it is not an object with a whole number as id"
                yield Problem(key, index, f"{key}[{index}]", what, "give it one")
            elif by_id[key].setdefault(record["id"], record) is not record:
                yield Problem(key, index, f"{key} id {record['id']}", "it occurs twice", "give every record its own id")
    for key, name in LISTS.items():
        for index, record in enumerate(records[key]):
            if isinstance(record, dict) and is_id(record.get("id")):
                for field, (wanted, valid) in FIELDS[key].items():
                    if not valid(record.get(field), record, by_id):
                        what = f"is {reprlib.repr(record[field])}" if field in record else "is missing"
                        yield Problem(key, index, f"{name} {record['id']}", f"{field} {what}", f"give {wanted}")


def _set(records: dict[str, Any], key: str, value: Any) -> str:
    records[key] = value
    return f"{key!r} set to {value!r}"


def _refers_to(key: str) -> Callable[[Any, Record, ById], bool]:
    return lambda value, _, by_id: is_id(value) and value in by_id[key]


def _fits_in_memory(width: Any, image: Record, _: ById) -> bool:
    height = image.get("height")
    return is_id(width) and width > 0 and (not is_id(height) or height * width <= masks.MAX_PIXELS)


def _is_mask(mask: Any, annotation: Record, by_id: ById) -> bool:
    if not isinstance(mask, dict):
        return mask is None or (isinstance(mask, list) and bool(mask))
    image_id = annotation.get("image_id")
    image = by_id["images"].get(image_id) if is_id(image_id) else None
    try:
        size = masks.rle_size(mask)
    except ValueError:
        return False
    return image is None or size == (image.get("height"), image.get("width"))


def _are_targets(numbers: Any, query: Record, by_id: ById) -> bool:
    if not isinstance(numbers, list):
        return False
    targets = [by_id["annotations"].get(number) if is_id(number) else None for number in numbers]
    return all(target is not None and target.get("image_id") == query.get("image_id") for target in targets)


# What each field of a record must hold, in words for the user and as a test of (value, record, all records).
FIELDS: dict[str, dict[str, tuple[str, Callable[[Any, Record, ById], bool]]]] = {
    "images": {
        "file_name": ("a path inside the image folder", lambda name, *_: is_text(name) and not leads_outside(name)),
        "height": ("the image's height in pixels", lambda height, *_: is_id(height) and height > 0),
        "width": (f"the image's width in pixels, of at most {masks.MAX_PIXELS} in all", _fits_in_memory),
    },
    "annotations": {
        "image_id": ("the id of an image in this file", _refers_to("images")),
        "category_id": ("the id of a category in this file", _refers_to("categories")),
        "segmentation": (
            "an RLE of the image's size or a list of polygons, or null where there is a visible_mask",
            lambda mask, a, by_id: _is_mask(mask, a, by_id) and any(a.get(key) is not None for key in MASKS),
        ),
        "visible_mask": ("an RLE of the image's size, a list of polygons, or null", _is_mask),
        "attributes": (
            "an object of strings, or leave it out",
            lambda words, *_: isinstance(words or {}, dict) and all(isinstance(w, str) for w in (words or {}).values()),
        ),
    },
    "categories": {"name": ("a name", lambda name, *_: is_text(name))},
    "queries": {
        "image_id": ("the id of an image in this file", _refers_to("images")),
        "text": ("a sentence", lambda text, *_: is_text(text)),
        "mask_type": ('"modal" or "amodal"', lambda mask_type, *_: mask_type in ("modal", "amodal")),
        "instance_ids": ("the ids of annotations of the same image, [] where nothing is meant", _are_targets),
        "kind": ("an object, or leave it out", lambda kind, *_: isinstance(kind or {}, dict)),
    },
}
