"""Reads COCO files of all dialects: with both masks of each object (COCOA, COCOA-cls, D2SA, KINS,
AISFormer, aistron, MUVA), and COCO's own, with the visible mask alone.

All but original COCOA are COCO files that differ in field names (amazon-science/c2f-seg
data/dataloader_*.py, UARK-AICV/AISFormer tools/proc_cocoa.py and the files it prepares, aistron,
deocclusion datasets/reader.py). A file of original COCOA (Zhu et al., "Semantic Amodal
Segmentation") holds one annotator's regions of one image, `image_id`, `url`, `regions`, or a list
of these under `annotations`, beside their `images`. Its masks are flat polygons, and a
`visible_mask` stands only where a region is occluded.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.contradictions import MaskComparison, check
from r2sm_jax.data.dataset import NO_NAME, ImageTruth, Instance
from r2sm_jax.data.images import (
    check_stated_size,
    find_image,
    image_folders,
    image_size,
    images_below,
    leads_outside,
)
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.validation import parse_flag
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.query import Query

AMODAL_FIELDS = ("amodal_segm", "a_segm", "segmentation")
"""Fields of the complete mask; the first that is present counts."""
VISIBLE_FIELDS = ("visible_mask", "visible_segm", "inmodal_seg", "i_segmentation", "i_segm")
"""Fields of the visible mask. An object without any is fully visible."""
BOTH_MASKS = {*VISIBLE_FIELDS, "invisible_mask", "occlude_rate", "amodal_segm", "a_segm"}
"""A file with any of these fields has complete masks; in others `segmentation` is what shows."""
IDS = {"id", "image_id", "category_id"}
FLAGS = ("ignore", "iscrowd")
REPLACED = {*AMODAL_FIELDS, *BOTH_MASKS, *IDS, *FLAGS, "bbox", "area", "attributes", "name"}
"""Fields that a new file states anew; other numbers and words are kept."""
DRAWN_FROM = "visible_mask_from"
"""Field of a result that has no mask: what its mask is drawn from."""
KINS_CATEGORIES = {
    1: "cyclist",
    2: "pedestrian",
    4: "car",
    5: "tram",
    6: "truck",
    7: "van",
    8: "misc",
}
Kind = Literal["any", "coco", "cocoa", "cocoa-cls", "d2sa", "kins", "muva"]


@dataclass(frozen=True)
class COCOOptions:
    """How to read a COCO file."""

    kind: Kind = "any"
    """What the file is said to be. "any": its fields tell."""
    amodal_field: str | None = None
    """Field of the complete mask, if it is none of `AMODAL_FIELDS`."""
    visible_field: str | None = None
    """Field of the visible mask, if it is none of `VISIBLE_FIELDS`."""
    crop: bool = False
    """Whether RLEs that are larger than their image, as some of D2SA's, are cropped to it."""
    crowds_are_objects: bool = False
    """Whether `iscrowd` 1 marks an object, as in files of CVAT, and no region to ignore."""


def read_coco(
    path: Path,
    images_dir: Path | None = None,
    options: COCOOptions = COCOOptions(),
    collector: Collector | None = None,
    photo_folders: Sequence[Path] = (),
) -> Iterator[ImageTruth]:
    """Reads the annotations of each image of a COCO file, in the order of its images.

    Ids are kept. Without `images_dir` images are looked for, in `photo_folders` or as
    `image_folders` says, only if the file does not state their size; otherwise `file_name` is
    relative to that folder. Records that cannot be used are left to `collector`; without one the
    first is an InputError. Raises InputError for a file that is not of the kind, or whose masks are
    exchanged, inverted or of other objects.
    """
    collector = collector or Collector(is_strict=True)
    data = load_json(path, "a COCO file")
    data = data if isinstance(data, dict) else {}
    if "regions" in data or any("regions" in a for a in _dicts(data, "annotations")):
        if options.kind not in ("any", "cocoa"):
            raise InputError(f"{path}: this is original COCOA; use data convert cocoa")
        data = _from_regions(path, data, collector)
    elif options.kind == "cocoa" or "images" not in data:
        raise InputError(f"{path}: there are no 'regions' of COCOA, or no 'images' of COCO in it")
    annotations = _dicts(data, "annotations")
    fields = _mask_fields(path, annotations, options)
    names = _category_names(path, data, collector)
    if not names and options.kind == "kins":
        names = KINS_CATEGORIES

    if annotations and not all(map(str.strip, map(str, names.values() or [""]))):
        collector.note(str(path), f"objects of a category without a name are called {NO_NAME!r}")

    objects = defaultdict(list)
    queries = defaultdict(list)
    for annotation in annotations:
        objects[annotation.get("image_id")].append(annotation)
    for query in _dicts(data, "queries"):
        queries[query.get("image_id")].append(query)
    comparison = MaskComparison()
    seen: set[int] = set()
    for image in _dicts(data, "images"):
        with collector.record(f"{path}: image {image.get('id')}"):
            image_id = image["id"]
            if type(image_id) is not int or image_id in seen:
                raise ValueError(f"its id {image_id!r} is no whole number, or occurs twice")
            seen.add(image_id)
            is_needed = image_id in objects
            file_name, size = locate(
                path, image, images_dir, is_needed, options.crop, photo_folders
            )
            instances: dict[int, Instance[RLE]] = {}
            for annotation in objects.pop(image_id, ()):
                name = f"annotation {annotation.get('id')}"
                with collector.record(f"{path}: {name}"):
                    instance = _read_instance(annotation, size, fields, names, options)
                    if instance.id in instances:
                        raise ValueError("its id occurs twice")
                    instances[instance.id] = instance
                    # A box of D2SA that reaches out of the image is not that of the cropped mask.
                    unknown = {"bbox": None, "area": None} if options.crop else {}
                    comparison.add(name, instance.modal, instance.amodal, annotation | unknown)
            asked = _read_queries(path, queries[image_id], instances, collector)
            yield ImageTruth(image_id, file_name, size, tuple(instances.values()), asked)
    for image_id, strays in objects.items():
        for annotation in strays:
            with collector.record(f"{path}: annotation {annotation.get('id')}"):
                raise ValueError(f"image {image_id!r} is not in the file, or cannot be used")

    for contradiction in check(path, comparison.contradictions()):
        collector.note(str(path), str(contradiction))


def read_results(
    path: Path,
    images_dir: Path,
    listed_in: Path | None = None,
    min_score: float = 0.0,
    collector: Collector | None = None,
) -> Iterator[ImageTruth]:
    """Reads COCO results, a list of masks with `image_id`, as visible masks; ids count from 1. The
    mask of a result that has a box alone is the box, and its field `DRAWN_FROM` says so.

    `listed_in` is the COCO file with their images and categories. Without it an image is the file
    that is named as the id, with or without zeros before it. Ids that are names get numbers above
    the others. Raises InputError as `read_coco`.
    """
    collector = collector or Collector(is_strict=True)
    results = load_json(path, "a COCO results file")
    listing = {} if listed_in is None else load_json(listed_in, "the COCO file of the results")
    listed = {image["id"]: image for image in _dicts(listing, "images")}
    names = _category_names(listed_in or path, listing, collector)
    files = {} if listed else _files_by_stem(images_dir)

    of_images = defaultdict(list)
    for number, result in enumerate(results, start=1):
        score = result.get("score")
        if min_score and not (isinstance(score, int | float) and 0 <= score <= 1):
            raise InputError(
                f"{path}: result {number} has the score {score!r}; to leave out low scores, give "
                "every result a number from 0 to 1"
            )
        if not min_score or score >= min_score:
            of_images[result.get("image_id")].append(result | {"id": number})
    if not names and any("category_id" in result for result in results):
        remedy = "give the COCO file that names their classes as --annotations"
        collector.note(str(path), f"all objects are called {NO_NAME!r}; {remedy}")
    first_new = max((key for key in of_images if isinstance(key, int)), default=0) + 1
    comparison = MaskComparison()
    for key, of_image in of_images.items():
        with collector.record(f"{path}: image {key!r}"):
            if listed and key not in listed:
                some = ", ".join(map(repr, list(listed)[:3]))
                raise ValueError(f"it is no image of {listed_in}, whose ids are {some}, ...")
            if listed:
                image = listed[key]
            else:
                named = files.get(key, [])
                if len(named) != 1:
                    found = ", ".join(map(str, named)) or "no image"
                    remedy = "give the COCO file of the images as --annotations"
                    raise ValueError(f"{found} has this name; {remedy}")
                (file,) = named
                image = {"file_name": file.relative_to(images_dir).as_posix()}
            file_name, size = locate(path, image, images_dir, is_needed=True)
            instances = []
            for result in of_image:
                name = f"result {result['id']}"
                with collector.record(f"{path}: {name}"):
                    options = COCOOptions(kind="coco")
                    fields = (), ("segmentation",)
                    if result.get("segmentation") is None and "bbox" in result:
                        result |= {"segmentation": [_corners(result["bbox"])], DRAWN_FROM: "bbox"}
                    instance = _read_instance(result, size, fields, names, options)
                    comparison.add(name, instance.modal, None)
                    instances.append(instance)
            image_id = key if isinstance(key, int) else first_new
            first_new += image_id == first_new
            yield ImageTruth(image_id, file_name, size, tuple(instances), ())
    check(path, comparison.contradictions())


def _corners(box: Sequence[float]) -> list[float]:
    """The polygon of a box x y width height. Raises ValueError for anything else."""
    if len(box) != 4 or not all(map(math.isfinite, box)) or min(box[2:]) <= 0:
        raise ValueError(f"its bbox is {box}; give x, y, width and height in pixels")
    x, y, width, height = box
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def _files_by_stem(folder: Path) -> Mapping[Any, list[Path]]:
    """The images below a folder by their name without its ending, as text and as number."""
    files = defaultdict(list)
    for file in images_below(folder):
        files[file.stem].append(file)
        if file.stem.isdecimal():
            files[int(file.stem)].append(file)
    return files


def locate(
    source: Path,
    image: Mapping[str, Any],
    images_dir: Path | None,
    is_needed: bool,
    crop: bool = False,
    photo_folders: Sequence[Path] = (),
) -> tuple[str, tuple[int, int]]:
    """The file name and the size of a listed image, whose file is looked for if it is needed.

    Raises ValueError for a name outside of the folder or a file that is not there, and InputError
    for one of another size. If masks are cropped, the size of the file counts.
    """
    size = None
    if image.get("height") is not None:
        size = int(image["height"]), int(image["width"])
        masks.check_size(*size)
    names = _names_of(image)
    for name in names:
        if leads_outside(name):
            raise ValueError(f"the file name {name!r} leads out of the image folder")
    if size is not None and (images_dir is None or not is_needed):
        return names[0], size
    folders = list(photo_folders) or image_folders(source, images_dir)
    file = next((file for name in names if (file := find_image(folders, name))), None)
    if file is None:
        where = " or ".join(map(str, folders))
        raise ValueError(f"{' or '.join(names)} is not in {where}; give it with --images DIR")
    actual = image_size(file)
    if size is not None and not crop:
        check_stated_size(file, actual, size, str(source))
    folder = next((f for f in reversed(folders) if file.is_relative_to(f)), None)
    return file.relative_to(folder).as_posix() if folder else names[0], actual


def _names_of(image: Mapping[str, Any]) -> list[str]:
    """The names that the file of an image may have, those of COCO 2017 for COCO 2014 included.

    LVIS gives the address alone, whose end is the folder and the name of COCO 2017.
    """
    names = list(image.get("file_names", ()))
    if image.get("file_name") is not None:
        names.insert(0, image["file_name"])
    if not names:
        path = PurePosixPath(image["coco_url"])
        names = [path.name, f"{path.parent.name}/{path.name}"]
    of_2017 = [re.sub(r"COCO_(train|val|test)2014_", "", name) for name in names]
    return list(dict.fromkeys([*names, *of_2017]))


def _dicts(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects of a list in a file; none if there is no list."""
    values = data.get(key)
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []


def _category_names(path: Path, data: Mapping[str, Any], collector: Collector) -> dict[int, str]:
    """The names of the categories of a file by id, which `collector` gets as well. Raises
    InputError for an id with two names."""
    names: dict[int, str] = {}
    for category in _dicts(data, "categories"):
        number, name = category["id"], category["name"]
        if names.setdefault(number, name) != name:
            both = f"{names[number]!r} and {name!r}"
            raise InputError(f"{path}: category {number} is {both}; give each an id of its own")
        if type(number) is int:
            collector.category_ids.setdefault(" ".join(str(name).split()), number)
    return names


def _mask_fields(
    path: Path, annotations: Sequence[Mapping[str, Any]], options: COCOOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of the complete and of the visible mask in a file; no field of a complete mask if
    only visible ones are known.

    Raises InputError for a file without any known field, or of another kind.
    """
    present = set().union(*annotations)
    amodal = AMODAL_FIELDS if options.amodal_field is None else (options.amodal_field,)
    visible = VISIBLE_FIELDS if options.visible_field is None else (options.visible_field,)
    if not annotations:
        return amodal, visible
    known = ", ".join(sorted(present))
    fields = {*amodal, *visible, *AMODAL_FIELDS, *BOTH_MASKS}
    for annotation in annotations:
        for name, value in annotation.items():
            if name not in fields and masks.holds_mask(value):
                raise InputError(
                    f"{path}: {name} of annotation {annotation.get('id')} holds a mask, too, and "
                    "may be what shows; name it with --visible-field or --amodal-field of data "
                    "convert muva, or remove it"
                )
    has_both = bool(present & BOTH_MASKS)
    if options.kind == "coco" and has_both:
        raise InputError(
            f"{path}: segmentation is the complete mask, as there is "
            f"{min(present & BOTH_MASKS)}; use data convert cocoa-cls, d2sa, kins or muva"
        )
    is_plain = options.kind == "coco" or (options.kind == "any" and not has_both)
    if is_plain:
        amodal, visible = (), ("segmentation",)
    # COCOA stores a visible mask only where a region is occluded, and a file may know visible masks
    # alone, under their own name.
    needs_visible = is_plain or options.visible_field or options.kind not in ("any", "cocoa")
    needs_amodal = amodal and options.kind != "any"
    for is_needed, names, flag in (
        (needs_visible, visible, "--visible-field"),
        (needs_amodal, amodal, "--amodal-field"),
    ):
        if is_needed and not present & set(names):
            raise InputError(
                f"{path}: no annotation has {' or '.join(names)}; there are {known}; name the "
                f"field with {flag}, or, if only visible masks are known, use data convert coco"
            )
    return amodal, visible


def _read_instance(
    annotation: Mapping[str, Any],
    size: tuple[int, int],
    fields: tuple[tuple[str, ...], tuple[str, ...]],
    names: Mapping[int, str],
    options: COCOOptions,
) -> Instance[RLE]:
    """The object of an annotation. Raises KeyError or ValueError if it cannot be used."""
    values = [_first_of(annotation, keys) for keys in fields]
    amodal, modal = [_read_mask(value, size, options.crop) for value in values]
    # KINS writes an empty list for an object of which nothing is visible.
    if values[1] == [] and amodal is not None:
        modal = masks.merge([], *size)
    if modal is None:
        modal = amodal
    if modal is None:
        raise ValueError("it has no mask")
    if not any(masks.areas([modal] if amodal is None else [modal, amodal])):
        raise ValueError("its mask has no pixel in the image")

    flags = {name: parse_flag(annotation.get(name)) for name in FLAGS}
    for name, flag in flags.items():
        if flag is None:
            raise ValueError(f"its {name} is {annotation[name]!r}; write 0 or 1")
    ignore = flags["ignore"] or (flags["iscrowd"] and not options.crowds_are_objects)
    if annotation["id"] is None:
        raise KeyError("id")
    category_id = annotation["category_id"]
    if names and category_id not in names:
        raise ValueError(f"its category_id {category_id!r} is none of the file's categories")
    attributes = annotation.get("attributes") or {}
    kept = {
        name: value
        for name, value in annotation.items()
        if name not in REPLACED and isinstance(value, str | int | float)
    }
    return Instance(
        id=annotation["id"],
        category=names[category_id] if names else NO_NAME,
        modal=modal,
        amodal=amodal,
        attributes={k: v for k, v in attributes.items() if isinstance(v, str)},
        ignore=bool(ignore),
        fields=kept,
    )


def _first_of(annotation: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first of the fields that is there; None if none is."""
    return next((annotation[key] for key in keys if annotation.get(key) is not None), None)


def _read_mask(value: Any, size: tuple[int, int], crop: bool) -> RLE | None:
    """The mask in a field, cropped to the image if it is to be; None if there is none."""
    if value is None or value == []:
        return None
    if isinstance(value, dict):
        height, width = masks.rle_size(value)
        if (height, width) != size and height >= size[0] and width >= size[1]:
            if not crop:
                raise ValueError(f"its mask of {height} x {width} reaches out; use --oversize crop")
            # Image and mask share their top left corner, as in public loaders of D2SA.
            return masks.encode(masks.decode(value)[: size[0], : size[1]])
    return masks.compressed(value, *size)


def _read_queries(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    instances: Mapping[int, Instance[RLE]],
    collector: Collector,
) -> tuple[Query, ...]:
    """The queries of an image. One about an object that was left out is left out."""
    queries = []
    for record in records:
        with collector.record(f"{path}: query {record.get('id')}"):
            targets = tuple(record["instance_ids"])
            if not instances.keys() >= set(targets):
                raise ValueError("it means an annotation that is not used")
            kind = dict(record.get("kind") or {})
            if record.get("answer") is not None:
                kind["answer"] = record["answer"]
            query = Query(record["id"], record["text"], record["mask_type"], targets, kind)
            queries.append(query)
    return tuple(queries)


def _from_regions(path: Path, data: Mapping[str, Any], collector: Collector) -> dict[str, Any]:
    """Original COCOA as a COCO file; of several annotators of an image the first counts.

    A region's name is free text and stands in the place of a category.
    """
    entries = _dicts(data, "annotations") or [data]
    listed = {image["id"]: image for image in _dicts(data, "images")}
    images: dict[int, dict[str, Any]] = {}
    annotations: list[dict[str, Any]] = []
    categories: dict[str, int] = {}
    for entry in entries:
        with collector.record(f"{path}: regions"):
            image_id = entry["image_id"]
            if image_id in images:
                where = f"{path}: image {image_id}"
                collector.note(where, "another annotator's regions are left out")
                continue
            # A file with one annotation is named as its image, a file with several as none.
            file_names = [path.stem + suffix for suffix in (".jpg", ".png")]
            file_names = [] if entry is not data or image_id in listed else file_names
            file_names += [PurePosixPath(entry.get("url") or "").name]
            image = listed.get(image_id, {"id": image_id})
            images[image_id] = image | {"file_names": [name for name in file_names if name]}
            for region in _dicts(entry, "regions"):
                name = str(region.get("name") or "").strip().lower() or NO_NAME
                category_id = categories.setdefault(name, len(categories) + 1)
                ids = {"id": len(annotations) + 1, "image_id": image_id, "category_id": category_id}
                annotations.append(region | ids)
    return {
        "images": list(images.values()),
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for name, number in categories.items()],
    }
