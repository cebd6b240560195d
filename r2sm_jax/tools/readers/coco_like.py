"""Reads COCO files whose annotations have an amodal and a modal mask: COCOA-cls, D2SA, KINS, MUVA.

The dialects differ in field names only (amazon-science/c2f-seg data/dataloader_*.py, UARK-AICV/AISFormer
tools/proc_cocoa.py, deocclusion datasets/reader.py). D2SA's masks can be larger than their image, since objects reach
out of it. MUVA's field names are not published; give them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.records import bad_record, is_id
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.readers.conversion import Conversion, draw, find_image, need, need_name, need_size

Oversize = Literal["refuse", "crop", "pad"]
KINS_NAMES = {1: "cyclist", 2: "pedestrian", 4: "car", 5: "tram", 6: "truck", 7: "van", 8: "misc"}


@dataclass(frozen=True)
class Dialect:
    """Which fields of an annotation hold what; of several names the first that is there counts."""

    amodal: tuple[str, ...] = ("segmentation",)
    modal: tuple[str, ...] = ("visible_mask",)
    rate: str = "occlude_rate"
    order: str | None = None
    """Depth order, smaller is nearer; compared with what the masks show."""
    categories: Mapping[int, str] | None = None
    """Names, for files that list none."""


DIALECTS = {
    "cocoa-cls": Dialect(),
    "d2sa": Dialect(order="occl_depth"),
    "kins": Dialect(("a_segm", "segmentation"), ("i_segm", "inmodal_seg"), categories=KINS_NAMES),
    "muva": Dialect(),
}


def read_coco_like(
    sources: Sequence[Path], dialect: Dialect, *, images_dir: Path | None = None, oversize: Oversize = "refuse",
    padded_dir: Path | None = None,
) -> Conversion:  # fmt: skip
    """Reads one or several COCO files into records.

    An annotation without a modal mask is fully visible. Ids of images are kept; where those of a later file collide,
    all of that file's ids are shifted past the ones before. `oversize` says what to do where masks are larger than
    their image: `crop` them to it, or `pad` the image at the right and at the bottom, in a copy in `padded_dir`.
    Images are needed for `pad` only. Raises InputError for anything that is not right.
    """
    found = Conversion()
    for path in sources:
        content = load_json(path, "a COCO annotation file")
        if not isinstance(content, dict):
            raise InputError(f"{path}: this is no COCO file (not one object); give one")
        images = {need(path, f"images[{i}]", x, "id", int): x for i, x in enumerate(_list(path, content, "images"))}
        names = _names(path, content, dialect)
        taken = {image["id"] for image in found.images}
        shift = max(taken) + 1 - min(images) if taken & images.keys() else 0
        if shift:
            found.notes.append(f"{path}: its image ids collide with those before; {shift} was added to each")
        by_image: dict[int, list[tuple[str, Mapping[str, Any]]]] = {}
        for index, annotation in enumerate(_list(path, content, "annotations")):
            where = f"annotation {annotation.get('id', f'[{index}]')}" if isinstance(annotation, dict) else f"[{index}]"
            image_id = need(path, where, annotation, "image_id", int)
            if image_id not in images:
                raise bad_record(path, where, f"image {image_id} is not in the file", "correct the id")
            by_image.setdefault(image_id, []).append((where, annotation))
        for image_id, image in images.items():
            where = f"image {image_id}"
            name = need_name(path, where, image, "file_name")
            size = need_size(path, where, image)
            annotations = by_image.get(image_id, [])
            full = _full_size(path, annotations, dialect, size)
            if full != size and oversize == "refuse":
                what = f"its masks reach {full[0]} x {full[1]} but it is {size[0]} x {size[1]}"
                raise bad_record(path, where, what, "choose --oversize crop or --oversize pad")
            if full != size and oversize == "pad":
                if images_dir is None or padded_dir is None:
                    raise InputError("--oversize pad: the images are needed; give their folder with --images DIR")
                found.image_paths[image_id + shift] = _pad(images_dir / name, padded_dir / name, full)
                size = full
            elif images_dir is not None:
                found.image_paths[image_id + shift] = find_image(path, where, images_dir, name)
            found.images.append({"id": image_id + shift, "file_name": name, "height": size[0], "width": size[1]})
            _read_annotations(found, path, image_id + shift, annotations, dialect, names, size)
    if not found.images:
        raise InputError(f"{', '.join(map(str, sources))}: there is no image here; give COCO annotation files")
    return found


def _list(path: Path, content: Mapping[str, Any], key: str) -> list[Any]:
    return need(path, "the file", content, key, list)


def _names(path: Path, content: Mapping[str, Any], dialect: Dialect) -> dict[int, str]:
    if not content.get("categories") and dialect.categories:
        return dict(dialect.categories)
    names = {}
    for index, category in enumerate(_list(path, content, "categories")):
        where = f"categories[{index}]"
        names[need(path, where, category, "id", int)] = need(path, where, category, "name", str)
    return names


def _field(annotation: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((annotation[key] for key in keys if annotation.get(key) is not None), None)


def _full_size(
    path: Path, annotations: Sequence[tuple[str, Mapping[str, Any]]], dialect: Dialect, size: tuple[int, int]
) -> tuple[int, int]:
    """Height and width that hold the image and all of its masks."""
    height, width = size
    for where, annotation in annotations:
        for mask in (_field(annotation, dialect.amodal), _field(annotation, dialect.modal)):
            if isinstance(mask, dict):
                try:
                    stated = masks.rle_size(mask)
                    height, width = max(height, stated[0]), max(width, stated[1])
                    masks.check_size(height, width)
                except ValueError as error:
                    raise bad_record(path, where, f"a mask cannot be used ({error})", "write it again") from error
    return height, width


def _read_annotations(
    found: Conversion, path: Path, image_id: int, annotations: Sequence[tuple[str, Mapping[str, Any]]],
    dialect: Dialect, names: Mapping[int, str], size: tuple[int, int],
) -> None:  # fmt: skip
    ordered = []
    for where, annotation in annotations:
        category = annotation.get("category_id")
        if not is_id(category) or category not in names:
            raise bad_record(path, where, f"category_id {category!r} is not in the file", "correct the id")
        amodal, modal = _masks(path, where, annotation, dialect, size)
        if not (amodal | modal).any():
            found.notes.append(f"{path}: {where}: left out, its mask has no pixel in the image")
            continue
        outside = masks.area(modal & ~amodal)
        if outside:
            found.notes.append(f"{path}: {where}: {outside} visible pixels outside the amodal mask were added to it")
        extra: dict[str, Any] = {"ignore": True} if annotation.get("iscrowd") else {}
        if is_id(annotation.get("id")):
            extra["source_id"] = annotation["id"]
        if dialect.order and is_id(annotation.get(dialect.order)):
            extra[dialect.order] = annotation[dialect.order]
        found.add_annotation(image_id, names[category], modal=modal, amodal=amodal, **extra)
        found.compare_rate(f"{path}: {where}", annotation.get(dialect.rate))
        ordered.append(found.annotations[-1])
    if dialect.order and all(dialect.order in annotation for annotation in ordered):
        found.compare_order(f"{path}: image {image_id}", ordered, dialect.order)


def _masks(
    path: Path, where: str, annotation: Mapping[str, Any], dialect: Dialect, size: tuple[int, int]
) -> Iterator[np.ndarray]:
    amodal, modal = _field(annotation, dialect.amodal), _field(annotation, dialect.modal)
    if amodal is None:
        raise bad_record(path, where, f"it has no {' or '.join(dialect.amodal)}", "check the format or the field names")
    for mask in (amodal, amodal if modal is None else modal):
        stated = masks.rle_size(mask) if isinstance(mask, dict) else size
        drawn = draw(path, where, mask, *stated)
        fitted = np.zeros(size, bool)
        inside = drawn[: size[0], : size[1]]
        fitted[: inside.shape[0], : inside.shape[1]] = inside
        yield fitted


def _pad(source: Path, target: Path, size: tuple[int, int]) -> Path:
    """Writes a copy of an image with black below and to the right of it, as PNG."""
    image = open_image(source)
    padded = np.zeros((*size, 3), np.uint8)
    padded[: image.shape[0], : image.shape[1]] = image
    target = target.with_suffix(".png")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(padded).save(target)
    except OSError as error:
        raise InputError(f"{target}: cannot write there ({error.strerror}); give another --out") from error
    return target
