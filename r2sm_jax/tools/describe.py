"""`data check --describe`: what is in an unknown annotation file, and which reader fits it best."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from r2sm_jax.data import masks
from r2sm_jax.errors import InputError, load_json, read_bytes
from r2sm_jax.query import MASK_TYPES
from r2sm_jax.tools.entries import read_pickle

MAX_RECORDS = 1000
"""How many records of a list are looked at."""
MAX_LENGTH = 60
"""Longer strings are cut where a record is shown."""
READERS = (
    ("json:FILE, this is a dataset file", {"images", "annotations", "categories", "queries"}),
    ("data convert cocoa", {"annotations.regions"}),
    ("data convert cocoa", {"image_id", "regions"}),
    ("data convert cocoa-cls", {"images", "annotations.segmentation", "annotations.visible_mask"}),
    (
        "data convert d2sa",
        {
            "images",
            "annotations.segmentation",
            "annotations.visible_mask",
            "annotations.occl_depth",
        },
    ),
    ("data convert kins", {"images", "annotations.segmentation", "annotations.inmodal_seg"}),
    ("data convert kins", {"images", "annotations.a_segm", "annotations.i_segm"}),
    (
        "data convert muva --visible-field segmentation, for COCO without hidden parts",
        {"images", "categories", "annotations.segmentation"},
    ),
    ("data convert mmr", {"image_id", "file_name", "questions", "answers"}),
    ("data convert reasonseg", {"text", "is_sentence", "shapes"}),
    ("data convert lisa++", {"English Question", "ID", "points"}),
    ("data convert lisa++", {"English Question", "English Answer", "info"}),
    ("data convert refcoco", {"ref_id", "ann_id", "image_id", "split", "sentences"}),
    ("data convert r2sm", {"image_id", "text", "mask_type", "instance_ids"}),
    ("none for panoptic files, make COCO instances first", {"images", "annotations.segments_info"}),
    ("none for labelme files, make a COCO file first", {"shapes", "imagePath", "imageHeight"}),
    ("evaluate --predictions", {"query_id", "segmentation", "score"}),
)
"""Readers, and the fields that they need: "annotations.X" is the field X of the annotations."""


def describe(path: Path) -> Iterator[str]:
    """Lines about a file: its keys and their types, one record, and the nearest reader.

    Raises InputError for a file that is neither JSON, nor JSON Lines, nor a pickle of plain data.
    """
    content = _load(path)
    yield f"{path}: {_type_of(content)}"
    fields: set[str] = set()
    records: Sequence[Any] = []
    if isinstance(content, list):
        records = content
        fields = _keys_of(records)
        yield from _describe_records(records)
    elif isinstance(content, Mapping):
        fields = set(content)
        for key, value in content.items():
            yield f"  {key}: {_type_of(value)}"
            if isinstance(value, list) and isinstance(next(iter(value), None), Mapping):
                fields |= {f"{key}.{name}" for name in _keys_of(value)}
                yield from _describe_records(value, "    ")

    command, needed = _nearest_reader(fields)
    present, missing = sorted(needed & fields), sorted(needed - fields)
    lacks = f", lacks {', '.join(missing)}" if missing else ""
    if present:
        yield f"nearest reader: {command} (has {', '.join(present)}{lacks})"
    else:
        yield "nearest reader: none, no field is known"
    if missing:
        yield from _guess_r2sm_fields(records)


def _load(path: Path) -> Any:
    """The content of a file; of JSON Lines, the list of its values."""
    if path.suffix == ".p":
        return read_pickle(path)
    if path.suffix != ".jsonl":
        try:
            return load_json(path, "an annotation file")
        except InputError:
            # Files of one object a line are often called .json.
            if not read_bytes(path).lstrip().startswith(b"{"):
                raise
    values = []
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                problem = f"neither JSON nor one JSON object a line (line {number}: {error})"
                raise InputError(f"{path}: this is {problem}; give an annotation file") from error
    return values


def _type_of(value: Any) -> str:
    """A type in words: "list of 24 objects", "RLE 80 x 96", "string"."""
    if isinstance(value, Mapping):
        try:
            height, width = masks.rle_size(value)
        except ValueError:
            return f"object of {len(value)} fields"
        return f"RLE {height} x {width}"
    if isinstance(value, list):
        kinds = {_type_of(entry).partition(" ")[0] for entry in islice(value, MAX_RECORDS)}
        return f"list of {len(value)}" + (f" ({', '.join(sorted(kinds))})" if kinds else "")
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")


def _keys_of(records: Sequence[Any]) -> set[str]:
    """The names of all fields that any of the first records has."""
    keys: set[str] = set()
    for record in records[:MAX_RECORDS]:
        if isinstance(record, Mapping):
            keys.update(map(str, record))
    return keys


def _describe_records(records: Sequence[Any], indent: str = "  ") -> Iterator[str]:
    """The fields of some records: how many have each, with which types; then the first record."""
    records = [record for record in records[:MAX_RECORDS] if isinstance(record, Mapping)]
    types: dict[str, Counter[str]] = {}
    for record in records:
        for key, value in record.items():
            types.setdefault(str(key), Counter())[_type_of(value).partition(" ")[0]] += 1
    for key, counts in types.items():
        share = f" (in {counts.total()} of {len(records)})"
        missing = share if counts.total() < len(records) else ""
        yield f"{indent}{key}: {' or '.join(counts)}{missing}"
    if records:
        yield f"{indent}first: {json.dumps(_shorten(records[0]), ensure_ascii=False, default=str)}"


def _shorten(value: Any) -> Any:
    """Cuts long strings and lists of a record, at every level."""
    if isinstance(value, str):
        return value if len(value) <= MAX_LENGTH else value[:MAX_LENGTH] + "..."
    if isinstance(value, list):
        return [_shorten(v) for v in value[:3]] + (["..."] if len(value) > 3 else [])
    if isinstance(value, Mapping):
        return {str(key): _shorten(v) for key, v in islice(value.items(), 20)}
    return value


def _nearest_reader(fields: set[str]) -> tuple[str, set[str]]:
    """The reader with the largest share of its fields; of equal ones that with the most fields."""

    def share(reader: tuple[str, set[str]]) -> tuple[float, int]:
        _, needed = reader
        present = len(needed & fields)
        return present / len(needed), present

    return max(READERS, key=share)


def _is_sentence(value: Any) -> bool:
    return isinstance(value, str) and " " in value.strip() and "instance id" not in value.lower()


def _is_image_name(value: Any) -> bool:
    suffixes = (".jpg", ".jpeg", ".png", ".webp")
    return isinstance(value, str) and value.lower().endswith(suffixes)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Mapping) and {"size", "counts"} <= value.keys()


def _has_masks(value: Any) -> bool:
    parts = list(value.values()) if isinstance(value, Mapping) else value
    return isinstance(parts, list) and bool(parts) and all(map(_is_mask, parts))


ROLES: dict[str, Callable[[str, Any], bool]] = {
    "image": lambda key, value: _is_image_name(value) or "image" in key.lower(),
    "mask-type": lambda key, value: value in MASK_TYPES,
    "answer": lambda key, value: isinstance(value, str) and "instance id" in value.lower(),
    "complete": lambda key, value: _has_masks(value) and "amodal" in key.lower(),
    "visible": lambda key, value: _has_masks(value),
    "instances": lambda key, value: isinstance(value, list) and all(type(v) is int for v in value),
    "text": lambda key, value: _is_sentence(value),
}
"""How the fields of a query in R2SM's manner can be told, by the flag that names them."""


def _guess_r2sm_fields(records: Sequence[Any]) -> Iterator[str]:
    """The flags of `convert r2sm` that fit a list of queries, if it is one."""
    if not records or not isinstance(records[0], Mapping):
        return
    guesses: dict[str, str] = {}
    for key, value in records[0].items():
        role = next((r for r, fits in ROLES.items() if r not in guesses and fits(key, value)), None)
        if role is not None:
            guesses[role] = key
    if "text" not in guesses or "image" not in guesses:
        return
    flags = [f"--fields.{role} {json.dumps(key)}" for role, key in guesses.items()]
    if "visible" not in guesses:
        flags.append("--over DATASET.json")
    yield f"as queries in R2SM's manner: data convert r2sm {' '.join(flags)} FILE"
