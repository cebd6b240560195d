"""Annotations that people make one by one, as on the web page, and the dataset file of them."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.validation import check_records
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.query import MaskType

FILE_NAME = "annotations.json"
"""The dataset file in its folder; the photos lie in `images` beside it."""
NO_CATEGORY = "object"
"""The class of an object without one, which no template query names."""


@dataclass(frozen=True)
class Annotation:
    """One object of a photo, and one sentence that means it."""

    photo: Path
    """The image file. Annotations with the same file are about one image."""
    name: str
    """The photo's name, without a folder."""
    text: str
    mask_type: MaskType
    """What the sentence asks for."""
    visible: RLE
    """The visible mask, at the size of the upright photo."""
    complete: RLE
    """The complete mask, which contains the visible one."""
    category: str = ""


def to_records(annotations: Sequence[Annotation], description: str = "") -> dict[str, Any]:
    """The records of a dataset file (docs/data.md).

    Annotations with the same visible mask of one photo are about one object, which gets a query for
    each of their sentences. Where two of them differ, the later one counts: in the complete mask,
    in the class, and in the mask type of a sentence that both have.
    """
    images: dict[Path, dict[str, Any]] = {}
    names = _unique_names(annotations)
    objects: dict[tuple[int, str], dict[str, Any]] = {}
    categories: dict[str, int] = {}
    queries: dict[tuple[int, str], dict[str, Any]] = {}
    for annotation in annotations:
        if annotation.photo not in images:
            height, width = annotation.visible["size"]
            images[annotation.photo] = {
                "id": len(images) + 1,
                "file_name": names[annotation.photo],
                "height": height,
                "width": width,
            }
        image_id = images[annotation.photo]["id"]

        key = (image_id, annotation.visible["counts"])
        object_id = objects[key]["id"] if key in objects else len(objects) + 1
        category = " ".join(annotation.category.split()) or NO_CATEGORY
        visible = masks.decode(annotation.visible)
        complete = masks.decode(annotation.complete)
        objects[key] = {
            "id": object_id,
            "image_id": image_id,
            "category_id": categories.setdefault(category, len(categories) + 1),
            **mask_fields(visible, complete),
        }

        text = " ".join(annotation.text.split())
        query_key = (object_id, text)
        query_id = queries[query_key]["id"] if query_key in queries else len(queries) + 1
        queries[query_key] = {
            "id": query_id,
            "image_id": image_id,
            "text": text,
            "mask_type": annotation.mask_type,
            "instance_ids": [object_id],
        }
    return {
        "images": list(images.values()),
        "annotations": list(objects.values()),
        "categories": [{"id": number, "name": name} for name, number in categories.items()],
        "queries": list(queries.values()),
        "info": {"description": description},
    }


def write_dataset(annotations: Sequence[Annotation], folder: Path, description: str = "") -> Path:
    """Writes photos and dataset file into a folder, and returns the path of the dataset file.

    Raises InputError if there is no annotation, if the folder holds such a file already or cannot
    be written, and for a text that a dataset file cannot hold.
    """
    if not annotations:
        raise InputError("there are no annotations yet; add one")
    path = folder / FILE_NAME
    records = to_records(annotations, description)
    check_records(path, records)
    names = _unique_names(annotations)
    # The dataset file appears when this block ends, so a folder that has it has the photos, too. An
    # OSError of any of the files becomes an InputError.
    with atomic_write(path, overwrite=False) as part:
        (folder / "images").mkdir(exist_ok=True)
        for photo, name in names.items():
            shutil.copyfile(photo, folder / "images" / name)
        part.write_text(json.dumps(records, ensure_ascii=False) + "\n", "utf-8")
    return path


def _unique_names(annotations: Sequence[Annotation]) -> dict[Path, str]:
    """A file name for each photo. The second of two with one name gets a number."""
    names: dict[Path, str] = {}
    taken = set()
    for annotation in annotations:
        if annotation.photo in names:
            continue
        wanted = PurePosixPath(annotation.name)
        name = wanted.name
        number = 1
        # Names that differ only in case are one name on some systems.
        while name.casefold() in taken:
            number += 1
            name = f"{wanted.stem}_{number}{wanted.suffix}"
        taken.add(name.casefold())
        names[annotation.photo] = name
    return names


def mask_fields(modal: np.ndarray, amodal: np.ndarray | None) -> dict[str, Any]:
    """The fields of an annotation that its masks `[H W]` determine.

    `amodal` is None if the complete mask is not known.
    """
    # As `Instance.complete`, the visible mask stands in for a complete one that is not known.
    # Visible fringes outside the complete mask are added to it: modal ⊆ amodal holds everywhere, as
    # losses and metrics assume.
    complete = modal if amodal is None else modal | amodal
    occluded = complete & ~modal
    fields: dict[str, Any] = {
        "bbox": masks.coco_box(complete),
        "area": masks.area(complete),
        "iscrowd": 0,
        "segmentation": None if amodal is None else masks.encode(complete),
    }
    # Without a visible mask an object counts as fully visible.
    if amodal is None or occluded.any():
        fields["visible_mask"] = masks.encode(modal)
    if amodal is not None:
        fields["occlude_rate"] = masks.area(occluded) / max(1, masks.area(complete))
        if occluded.any():
            fields["invisible_mask"] = masks.encode(occluded)
    return fields
