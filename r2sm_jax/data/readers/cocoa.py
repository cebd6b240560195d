"""Reads original COCOA annotations (Zhu et al., "Semantic Amodal Segmentation") into the one dataset format.

A file holds one annotator's regions of one image: `regions`, `image_id`, `url`. Each region has a flat amodal
polygon, a free-text `name`, a depth `order` (1 is in front) and, only where something hides it,
`visible_mask` and `invisible_mask`. A file that lists several such objects under `annotations` is read too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.queries import Thing
from r2sm_jax.data.transforms import image_size
from r2sm_jax.data.validate import bad_record
from r2sm_jax.errors import InputError

# Stored and recomputed occlusion may differ by this much before it is reported.
RATE_TOLERANCE = 0.02

# A region in front counts as hiding another one from this share of its amodal mask on.
HIDING_SHARE = 0.01


@dataclass
class Cocoa:
    """What was read: records without queries, ids of category names, where images lie, and notes to the
    user."""

    images: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    categories: dict[str, int] = field(default_factory=dict)
    image_paths: dict[int, Path] = field(default_factory=dict)
    things: dict[int, list[Thing]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_cocoa(sources: Sequence[Path], images_dir: Path | None = None) -> Cocoa:
    """Reads COCOA files, or folders of them, into records; `file_name` is the image's bare name.

    An image is looked for in `images_dir`, or else beside its file, under the file's own stem and under the
    name in its url. Of several annotations of one image the first is kept. `things` has, for every image,
    what queries can be about: its objects, or its stuff where there is nothing else. Raises InputError for a
    file that is not COCOA, an image that is missing, and regions that cannot be used.
    """
    found = Cocoa()
    first_file: dict[int, Path] = {}
    for path, record in _records(sources, found.notes):
        image_id = record.get("image_id")
        if type(image_id) is not int or image_id < 0:
            raise InputError(f"{path}: there is no image_id; give an original COCOA annotation")
        if image_id in first_file:
            found.notes.append(f"{path}: left out, image {image_id} has been read from {first_file[image_id]}")
            continue
        first_file[image_id] = path
        image_path = _find_image(path, record, images_dir)
        height, width = image_size(image_path)
        found.image_paths[image_id] = image_path
        found.images.append({"id": image_id, "file_name": image_path.name, "height": height, "width": width})
        _read_regions(found, path, record, image_id, (height, width))
    if not found.images:
        places = ", ".join(str(source) for source in sources)
        raise InputError(f"{places}: there is no COCOA annotation here; give its JSON files or their folder")
    return found


def _records(sources: Sequence[Path], notes: list[str]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for source in sources:
        if not source.exists():
            raise InputError(f"{source}: there is no such file or folder; check the path")
        for path in sorted(source.glob("*.json")) if source.is_dir() else [source]:
            try:
                content = json.loads(path.read_bytes())
            except OSError as error:
                raise InputError(f"{path}: cannot read the file ({error.strerror}); check its rights") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: this is not JSON ({error}); give COCOA annotations") from error
            listed = content.get("annotations") if isinstance(content, dict) else None
            records = listed if isinstance(listed, list) else [content]
            if records and all(isinstance(r, dict) and isinstance(r.get("regions"), list) for r in records):
                yield from ((path, record) for record in records)
            elif source.is_dir():
                notes.append(f"{path}: left out, it has no COCOA regions")
            else:
                raise InputError(f"{path}: there is no list of 'regions'; give an original COCOA annotation")


def _find_image(path: Path, record: Mapping[str, Any], images_dir: Path | None) -> Path:
    names = [path.stem + suffix for suffix in (".jpg", ".jpeg", ".png")]
    if isinstance(record.get("url"), str) and record["url"]:
        names.append(PurePosixPath(record["url"]).name)
    folder = images_dir or path.parent
    for name in names:
        if (folder / name).is_file():
            return folder / name
    wanted = " nor ".join([names[0], *names[3:]])
    raise InputError(f"{path}: no image {wanted} in {folder}; give its folder with --images DIR")


def _read_regions(found: Cocoa, path: Path, record: Mapping[str, Any], image_id: int, size: tuple[int, int]) -> None:
    amodals: list[np.ndarray] = []
    kept: list[dict[str, Any]] = []
    names: list[str] = []
    for index, region in enumerate(record["regions"], start=1):
        where = f"region {index}"
        if not isinstance(region, dict):
            raise bad_record(path, where, "it is not an object", "give an original COCOA annotation")
        amodal, modal = _region_masks(path, where, region, size)
        if not amodal.any():
            found.notes.append(f"{path}: {where}: left out, its polygon covers no pixel")
            continue
        rate = 1 - masks.area(modal) / masks.area(amodal)
        stored = region.get("occlude_rate")
        if isinstance(stored, int | float) and abs(stored - rate) > RATE_TOLERANCE:
            found.notes.append(
                f"{path}: {where}: occlude_rate {stored:.3f} is stored, but the masks give {rate:.3f} (used)"
            )
        order = region.get("order")
        name = " ".join(str(region.get("name") or "").lower().split()) or "object"
        annotation = {
            "id": len(found.annotations) + len(kept) + 1,
            "image_id": image_id,
            "category_id": found.categories.setdefault(name, len(found.categories) + 1),
            "bbox": masks.coco_box(amodal),
            "area": masks.area(amodal),
            "iscrowd": 0,
            "segmentation": masks.encode(amodal),
            "occlude_rate": rate,
            "order": order if isinstance(order, int) else index,
            "isStuff": int(region.get("isStuff") == 1),
        }
        if not np.array_equal(amodal, modal):
            annotation["visible_mask"] = masks.encode(modal)
            annotation["invisible_mask"] = masks.encode(amodal & ~modal)
        kept.append(annotation)
        names.append(name)
        amodals.append(amodal)
    found.annotations += kept
    found.things[image_id] = _things(kept, names, amodals)


def _region_masks(
    path: Path, where: str, region: Mapping[str, Any], size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The amodal and the modal mask `[H W]` of a region, modal ⊆ amodal."""
    key = "segmentation"
    try:
        amodal = masks.from_segmentation(region.get(key), *size)
        key = "visible_mask"
        if region.get(key) is None:
            return amodal, amodal
        modal = masks.from_segmentation(region[key], *size)
    except ValueError as error:
        problem = f"its {key} cannot be used ({error})"
        raise bad_record(path, where, problem, "give the annotation and the image that belong together") from error
    return amodal | modal, modal


def _things(
    annotations: Sequence[Mapping[str, Any]], names: Sequence[str], amodals: Sequence[np.ndarray]
) -> list[Thing]:
    """What queries can be about. Stuff (floor, carpet, sky) hides things but is asked for only if it is
    alone."""
    only_stuff = all(annotation["isStuff"] for annotation in annotations)
    things = []
    for annotation, name, amodal in zip(annotations, names, amodals, strict=True):
        if annotation["isStuff"] and not only_stuff:
            continue
        hidden_by = [
            other["id"]
            for other, mask in zip(annotations, amodals, strict=True)
            if other["order"] < annotation["order"] and masks.area(mask & amodal) >= HIDING_SHARE * annotation["area"]
        ]
        visible = amodal
        if "visible_mask" in annotation:
            visible = masks.decode(annotation["visible_mask"])
        things.append(
            Thing(
                id=annotation["id"],
                category=name,
                box=masks.box(amodal),
                area=annotation["area"],
                occlusion=annotation["occlude_rate"],
                hidden_by=tuple(hidden_by),
                visible_box=masks.box(visible),
            )
        )
    return things
