"""The instances of a dataset file image by image, with their masks but without opening the image."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from r2sm_jax.data.samples import Instance, read_instance


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
    return [read_instance(path, image, annotation, names[annotation["category_id"]]) for annotation in annotations]
