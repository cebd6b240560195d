"""What a dataset file must satisfy to be read safely. (`data check` looks further, at the masks.)"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeGuard

from r2sm_jax.data import masks
from r2sm_jax.errors import InputError

_LISTS = ("images", "annotations", "categories", "queries")


def bad_record(path: Path, record: str, problem: str, remedy: str) -> InputError:
    """The sentence for a record that cannot be used, as an error to raise."""
    return InputError(f"{path}: {record}: {problem}; {remedy}")


def check_records(path: Path, records: Any) -> None:
    """Checks keys, types, ids and mask sizes of a whole dataset file, decoding no mask and opening no image.

    Raises InputError for the first thing that is wrong, with `path`, the record and the remedy.
    """
    if not isinstance(records, dict):
        raise InputError(f"{path}: this is JSON, but not one object with {', '.join(_LISTS)}; give a dataset file")
    for key in _LISTS:
        if not isinstance(records.get(key), list):
            hint = "an empty list where there are none" if key == "queries" else "see the dataset format"
            raise InputError(f"{path}: the list {key!r} is missing; add it ({hint})")
        for index, record in enumerate(records[key]):
            if not isinstance(record, dict) or not _is_id(record.get("id")):
                name = f"{key}[{index}]"
                raise bad_record(path, name, "it is not an object with a whole number as id", "give it one")
    if not isinstance(records.get("info") or {}, dict):
        raise InputError(f"{path}: 'info' is not an object; make it one or leave it out")
    by_id = {key: _by_id(path, key, records[key]) for key in _LISTS}
    for category in records["categories"]:
        _need_text(path, f"category {category['id']}", category, "name")
    for image in records["images"]:
        _check_image(path, image)
    for annotation in records["annotations"]:
        _check_annotation(path, annotation, by_id["images"], by_id["categories"])
    for query in records["queries"]:
        _check_query(path, query, by_id["images"], by_id["annotations"])


def _by_id(path: Path, key: str, records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["id"] in found:
            raise bad_record(path, f"{key} id {record['id']}", "it occurs twice", "give every record its own id")
        found[record["id"]] = record
    return found


def _check_image(path: Path, image: Mapping[str, Any]) -> None:
    record = f"image {image['id']}"
    name = _need_text(path, record, image, "file_name")
    inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
    windows = PureWindowsPath(name)
    if not inside or windows.drive or windows.root or ".." in windows.parts or "\0" in name:
        raise bad_record(
            path, record, f"file_name {name!r} leads out of the image folder", "give a path relative to it"
        )
    for key in ("height", "width"):
        if not _is_id(image.get(key)) or image[key] < 1:
            raise bad_record(path, record, f"{key} is not a positive whole number", "add the image's size")


def _check_annotation(
    path: Path, annotation: Mapping[str, Any], images: Mapping[int, Any], categories: Mapping[int, Any]
) -> None:
    record = f"annotation {annotation['id']}"
    image = _need_known(path, record, annotation, "image_id", images)
    _need_known(path, record, annotation, "category_id", categories)
    if annotation.get("segmentation") is None and annotation.get("visible_mask") is None:
        raise bad_record(
            path,
            record,
            "it has neither segmentation nor visible_mask",
            "add one of them or remove the record",
        )
    size = (image["height"], image["width"])
    for key in ("segmentation", "visible_mask"):
        mask = annotation.get(key)
        if isinstance(mask, dict):
            try:
                stated = masks.rle_size(mask)
            except ValueError as error:
                raise bad_record(path, record, f"in {key}, {error}", "write the mask again") from error
            if stated != size:
                problem = f"{key} is {stated[0]} x {stated[1]} but its image is {size[0]} x {size[1]}"
                raise bad_record(path, record, problem, "write the mask at the image's size")
        elif mask is not None and (not isinstance(mask, list) or not mask):
            problem = f"{key} is neither an RLE nor a list of polygons"
            raise bad_record(path, record, problem, "write the mask as one of these, or null")
    attributes = annotation.get("attributes") or {}
    if not isinstance(attributes, dict) or not all(isinstance(value, str) for value in attributes.values()):
        raise bad_record(path, record, "attributes is not an object of strings", "make it one or leave it out")


def _check_query(
    path: Path, query: Mapping[str, Any], images: Mapping[int, Any], annotations: Mapping[int, Any]
) -> None:
    record = f"query {query['id']}"
    _need_known(path, record, query, "image_id", images)
    _need_text(path, record, query, "text")
    if query.get("mask_type") not in ("modal", "amodal"):
        problem = f"mask_type is {query.get('mask_type')!r}"
        raise bad_record(path, record, problem, 'write "modal" or "amodal"')
    ids = query.get("instance_ids")
    if not isinstance(ids, list):
        raise bad_record(path, record, "the list instance_ids is missing", "add it ([] where nothing is meant)")
    for number in ids:
        target = annotations.get(number) if _is_id(number) else None
        if target is None:
            raise bad_record(path, record, f"instance {number!r} is not in the annotations", "correct the id")
        if target["image_id"] != query["image_id"]:
            problem = f"instance {number} is on image {target['image_id']}, not on {query['image_id']}"
            raise bad_record(path, record, problem, "correct the id")
    if not isinstance(query.get("kind") or {}, dict):
        raise bad_record(path, record, "kind is not an object", "make it one or leave it out")


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _need_text(path: Path, record: str, holder: Mapping[str, Any], key: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str) or not value.strip():
        raise bad_record(path, record, f"its {key} is missing or empty", "write one")
    return value


def _need_known(
    path: Path, record: str, holder: Mapping[str, Any], key: str, known: Mapping[int, Any]
) -> Mapping[str, Any]:
    value = holder.get(key)
    if not _is_id(value) or value not in known:
        problem = f"{key} {value!r} does not exist in this file" if key in holder else f"its {key} is missing"
        raise bad_record(path, record, problem, "correct it or remove the record")
    return known[value]
