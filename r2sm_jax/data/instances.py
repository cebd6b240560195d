"""The instances of a dataset file image by image, with their masks but without opening the image."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from r2sm_jax.data.schema import Instance
from r2sm_jax.data.validate import annotation_masks


def annotations_by_image(records: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The annotations of every image of a dataset file, by image id."""
    found: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in records["images"]}
    for annotation in records["annotations"]:
        found[annotation["image_id"]].append(annotation)
    return found


def category_names(records: Mapping[str, Any]) -> dict[int, str]:
    """The category names of a dataset file, by category id."""
    return {category["id"]: category["name"] for category in records["categories"]}


def decode_instances(
    path: Path, image: Mapping[str, Any], annotations: Iterable[Mapping[str, Any]], names: Mapping[int, str]
) -> list[Instance]:
    """The instances that checked records of one image describe; `path` is the file that they are from.

    Raises InputError for a mask that cannot be read.
    """
    return [_decode(path, image, annotation, names) for annotation in annotations]


def _decode(path: Path, image: Mapping[str, Any], annotation: Mapping[str, Any], names: Mapping[int, str]) -> Instance:
    modal, amodal = annotation_masks(path, annotation, image["height"], image["width"])
    return Instance(
        id=annotation["id"],
        category=names[annotation["category_id"]],
        modal=modal,
        amodal=amodal,
        attributes=annotation.get("attributes") or {},
        ignore=bool(annotation.get("ignore", False)),
    )
