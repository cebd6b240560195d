"""Reads the lists of COCO files of all dialects: with both masks of each object (COCOA, COCOA-cls,
D2SA, KINS, AISFormer, aistron, MUVA, the dataset format), COCO's own, with the visible mask alone,
and COCO results.

All but results and original COCOA are COCO files that differ in field names (amazon-science/c2f-seg
data/dataloader_*.py, UARK-AICV/AISFormer tools/proc_cocoa.py and the files it prepares, aistron,
deocclusion datasets/reader.py). A file of original COCOA (Zhu et al., "Semantic Amodal
Segmentation") holds one annotator's regions of one image, `image_id`, `url`, `regions`, or a list
of these under `annotations`, beside their `images`. Its masks are flat polygons, and a
`visible_mask` stands only where a region is occluded.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from r2sm_jax.data.collector import Collector
from r2sm_jax.data.dataset import NO_NAME
from r2sm_jax.data.images import images_below
from r2sm_jax.data.mask_reader import holds_mask
from r2sm_jax.data.validation import (
    COMPLETED_BY,
    LISTS,
    MASK_FIELDS,
    NULL,
    OTHER_MASKS,
    Annotation,
    Category,
    is_text,
    value_faults,
)
from r2sm_jax.errors import InputError, parse_json, paused_collection, read_bytes

AMODAL_FIELDS = ("amodal_segm", "a_segm", "segmentation")
"""Fields of the complete mask; the first that is present counts."""
VISIBLE_FIELDS = ("visible_mask", *OTHER_MASKS)
"""Fields of the visible mask. An object without any is fully visible."""
BOTH_MASKS = {*VISIBLE_FIELDS, "invisible_mask", "occlude_rate", "amodal_segm", "a_segm"}
"""A file with any of these fields has complete masks; in others `segmentation` is what shows."""
STATED_ANEW = {*AMODAL_FIELDS, *BOTH_MASKS, *Annotation.__struct_fields__} - {
    "isStuff",
    COMPLETED_BY,
}
"""Fields of an annotation that `to_records` computes. All others are copied."""
OF_IMAGE = {"id", "file_name", "file_names", "height", "width"}
"""Fields of an image that `to_records` computes."""
NAMELESS = f"objects of a category without a name are called {NO_NAME!r}"
DRAWN_FROM = "visible_mask_from"
"""Field of an object that has no mask: what its mask is drawn from."""
KINS_CATEGORIES = {
    1: "cyclist",
    2: "pedestrian",
    4: "car",
    5: "tram",
    6: "truck",
    7: "van",
    8: "misc",
}
Kind = Literal["any", "coco", "cocoa", "cocoa-cls", "d2sa", "kins", "muva", "refcoco"]
Raws = dict[str, msgspec.Raw]
"""A record whose values are not decoded yet."""
R = TypeVar("R")


class Dialect(NamedTuple):
    """The fields of an annotation that hold its masks."""

    amodal: tuple[str, ...]
    """Of the complete mask; the first that is there counts. Empty where only visible masks are
    known."""
    visible: tuple[str, ...]
    needs_amodal: bool = False
    """Whether some annotation must have a field of a complete mask."""
    needs_visible: bool = False


BOTH = Dialect(AMODAL_FIELDS, VISIBLE_FIELDS, needs_amodal=True, needs_visible=True)
VISIBLE_ALONE = Dialect((), ("segmentation",), needs_visible=True)
DIALECTS: dict[Kind, Dialect] = {
    "any": Dialect(AMODAL_FIELDS, VISIBLE_FIELDS),
    "coco": VISIBLE_ALONE,
    # RefCOCO means what `segmentation` shows, whatever else its COCO file holds.
    "refcoco": VISIBLE_ALONE,
    # It stores a visible mask only where a region is occluded.
    "cocoa": Dialect(AMODAL_FIELDS, VISIBLE_FIELDS, needs_amodal=True),
    "cocoa-cls": BOTH,
    "d2sa": BOTH,
    "kins": BOTH,
    "muva": BOTH,
}


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
    min_score: float = 0.0
    """Annotations with a lower score are left out."""
    boxes: bool = False
    """Whether the box of an object that has no mask stands for it (`DRAWN_FROM`)."""
    annotations: Path | None = None
    """Of results: the COCO file with their images and categories."""
    image_ids: Container[int | str] | None = None
    """The images to read; None: all."""


class ListedImage(msgspec.Struct, gc=False):
    """An image as COCO files list it."""

    id: int | str
    file_name: str | None = None
    coco_url: str | None = None
    height: int | float | None = None
    width: int | float | None = None
    file_names: list[str] = []
    """Names that it may have, where none is stated."""


class Listing(NamedTuple):
    """The records of a COCO file."""

    path: Path
    images: list[Raws]
    annotations: list[Raws]
    queries: list[Raws]
    names: dict[int, str]
    """The classes by id."""
    dialect: Dialect
    word: str = "annotation"
    """What an annotation is called."""


class _Result(msgspec.Struct):
    """One annotator's regions of an image, in original COCOA."""

    image_id: int | str
    regions: list[msgspec.Raw] = []
    url: str | None = None


def read_listing(
    path: Path, options: COCOOptions, collector: Collector, images_dir: Path | None
) -> Listing:
    """Reads the lists of a COCO file, or of COCO results about images in `images_dir`.

    Records that are no objects are left to `collector`, which gets the categories and what else the
    file holds. Raises InputError for a file that is not of the kind, and for a category that is
    none.
    """
    with paused_collection():
        content = _read_json(path)
        if content[:1] == b"[":
            return _read_results(path, content, options, collector, images_dir)
        if options.annotations is not None:
            raise InputError(f"--annotations is for COCO results, a list; {path} is none")
        listing = _read_file(path, content, options, collector)
        return listing._replace(annotations=_keep_sure(listing, options.min_score))


def read_keys(path: Path) -> set[str]:
    """The names in a JSON file; none if it is a list. Raises InputError for other files."""
    content = _read_json(path)
    return set(msgspec.json.decode(content, type=Raws)) if content[:1] == b"{" else set()


def _read_json(path: Path) -> bytes:
    """The JSON in a file. A number that is none (NaN), as pandas writes it, becomes null."""
    content = read_bytes(path).strip()
    try:
        msgspec.json.decode(content, type=msgspec.Raw)
    except (ValueError, RecursionError):
        values = parse_json(content, str(path), "a COCO file")
        try:
            content = msgspec.json.encode(values)
        except UnicodeEncodeError:
            raise InputError(f"{path}: a text in it holds half of a character") from None
    return content


def _read_file(path: Path, content: bytes, options: COCOOptions, collector: Collector) -> Listing:
    """Reads the lists of instances, of original COCOA or of a dataset file."""
    lists: Raws = msgspec.json.decode(content, type=Raws) if content[:1] == b"{" else {}
    annotations = _records(path, lists, "annotations", collector)
    if "regions" in lists or any("regions" in annotation for annotation in annotations):
        if options.kind not in ("any", "cocoa"):
            raise InputError(f"{path}: this is original COCOA; use data convert cocoa")
        listing = _from_regions(path, lists, annotations, collector)
        return listing._replace(dialect=_choose_dialect(listing, options))
    if options.kind == "cocoa" or "images" not in lists:
        raise InputError(f"{path}: there are no 'regions' of COCOA, or no 'images' of COCO in it")

    names = _read_categories(path, lists, collector)
    if not names and options.kind == "kins":
        names = KINS_CATEGORIES
    if annotations and not names:
        collector.note(str(path), NAMELESS)
    listing = Listing(
        path,
        _records(path, lists, "images", collector),
        annotations,
        _records(path, lists, "queries", collector),
        names,
        DIALECTS[options.kind],
    )
    return listing._replace(dialect=_choose_dialect(listing, options))


def _records(path: Path, lists: Raws, key: str, collector: Collector) -> list[Raws]:
    """The objects of a list in a file; none if there is no list."""
    try:
        values = msgspec.json.decode(lists.get(key, NULL), type=list[msgspec.Raw] | None)
    except msgspec.ValidationError:
        raise InputError(f"{path}: {key!r} is no list; give a COCO file") from None
    return list(_objects(values or (), f"{path}: {key}", collector))


def _objects(values: Sequence[msgspec.Raw], where: str, collector: Collector) -> Iterator[Raws]:
    for index, value in enumerate(values):
        if _begins(value, b"{"):
            yield msgspec.json.decode(value, type=Raws)
        else:
            with collector.record(f"{where}[{index}]"):
                raise ValueError("it is no object; give one with fields")


def _begins(raw: msgspec.Raw, characters: bytes) -> bool:
    """Whether a value begins with one of these characters."""
    return memoryview(raw)[0] in characters


def _read_categories(path: Path, lists: Raws, collector: Collector) -> dict[int, str]:
    """The names of the categories of a file by id; `collector` gets their records, and what the
    file holds beside its lists. Raises InputError for one that cannot be read, and for an id with
    two names."""
    for name, value in lists.items():
        # What is written describes itself in `info`, an object.
        if name not in LISTS and (name != "info" or _begins(value, b"{")):
            collector.other.setdefault(name, msgspec.json.decode(value))
    names: dict[int, str] = {}
    strict = Collector(is_strict=True)
    for index, record in enumerate(_records(path, lists, "categories", strict)):
        with strict.record(f"{path}: categories[{index}] is no class with an id and a name"):
            category = decode_as(Category, record)
        name = " ".join(category.name.split())
        if not is_text(category.name):
            name = NO_NAME
            collector.note(str(path), NAMELESS)
        if names.setdefault(category.id, name) != name:
            both = f"{names[category.id]!r} and {name!r}"
            raise InputError(
                f"{path}: category {category.id} is {both}; give each an id of its own"
            )
        collector.add_category(name, {key: msgspec.json.decode(record[key]) for key in record})
    return names


def decode_as(kind: type[R], record: Mapping[str, msgspec.Raw], *required: str) -> R:
    """Decodes a record as a type. Raises KeyError for a required field that is missing or null, and
    ValueError for a field of another type."""
    for name in required:
        if bytes(record.get(name, NULL)) == b"null":
            raise KeyError(name)
    return msgspec.json.decode(msgspec.json.encode(record), type=kind)


def decode_annotation(
    record: Raws, dialect: Dialect, boxes: bool
) -> tuple[Annotation, dict[str, Any]]:
    """An annotation by the names of the dataset format, and its other fields.

    `boxes`: whether the box of one without a mask stands for it. Raises KeyError or ValueError for
    what `write` would refuse.
    """
    in_our_names = {name: raw for name, raw in record.items() if name not in BOTH_MASKS}
    for name, names in zip(MASK_FIELDS, dialect[:2], strict=True):
        in_our_names[name] = record.get(name_of_mask(record, names), NULL)
    if "occlude_rate" in record:
        in_our_names["occlude_rate"] = record["occlude_rate"]
    # Some tools write an empty list where there are none.
    if bytes(record.get("attributes", NULL)) == b"[]":
        in_our_names["attributes"] = NULL
    annotation = decode_as(Annotation, in_our_names, "id", "image_id", "category_id")
    for fault in value_faults(annotation):
        raise ValueError(fault)

    known = {*STATED_ANEW, *dialect.amodal, *dialect.visible}
    fields = {name: msgspec.json.decode(raw) for name, raw in record.items() if name not in known}
    others = {k: v for k, v in (annotation.attributes or {}).items() if k not in annotation.words}
    if others:
        fields["attributes"] = others
    has_mask = any(
        bytes(raw) not in (b"null", b"[]")
        for raw in (annotation.segmentation, annotation.visible_mask)
    )
    if not has_mask and boxes and annotation.bbox is not None:
        corners = msgspec.json.encode([corners_of(annotation.bbox)])
        annotation.visible_mask = msgspec.Raw(corners)
        fields |= {DRAWN_FROM: "bbox", "source_bbox": annotation.bbox}
    return annotation, fields


def name_of_mask(record: Raws, names: Sequence[str]) -> str:
    """The first of the fields that is there; "" if none is."""
    return next((name for name in names if bytes(record.get(name, NULL)) != b"null"), "")


def corners_of(box: Any) -> list[float]:
    """The polygon of a box x y width height. Raises ValueError for anything else."""
    numbers = box if isinstance(box, list) else []
    is_box = len(numbers) == 4 and all(isinstance(number, int | float) for number in numbers)
    if not is_box or min(numbers[2:]) <= 0:
        raise ValueError(f"its bbox is {box}; give x, y, width and height in pixels")
    x, y, width, height = numbers
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def _choose_dialect(listing: Listing, options: COCOOptions) -> Dialect:
    """The dialect of a file. Raises InputError for a file without any known field, or of another
    kind."""
    path, annotations = listing.path, listing.annotations
    dialect = DIALECTS[options.kind]
    present = set().union(*annotations)
    has_both = present & BOTH_MASKS
    if any(_begins(annotation.get(COMPLETED_BY, NULL), b"{") for annotation in annotations):
        has_both.add(COMPLETED_BY)
    if options.kind == "coco" and has_both:
        raise InputError(
            f"{path}: segmentation is the complete mask, as there is "
            f"{min(has_both)}; use data convert cocoa-cls, d2sa, kins or muva"
        )
    if options.kind == "any" and annotations and not has_both:
        dialect = VISIBLE_ALONE
    if options.amodal_field is not None:
        dialect = dialect._replace(amodal=(options.amodal_field,))
    if options.visible_field is not None:
        dialect = dialect._replace(visible=(options.visible_field,))
    if not annotations:
        return dialect

    known = {*dialect.amodal, *dialect.visible, *AMODAL_FIELDS, *BOTH_MASKS}
    for annotation in annotations:
        for name, value in annotation.items():
            may_hold = name not in known and _begins(value, b"{[")
            if may_hold and holds_mask(msgspec.json.decode(value)):
                raise InputError(
                    f"{path}: {name} of annotation {shown(annotation, 'id')} holds a mask, too, "
                    "and may be what shows; name it with --visible-field or --amodal-field of data "
                    "convert muva, or remove it"
                )
    # Where a box may stand for a mask, there may be boxes alone.
    needs_visible = dialect.needs_visible and not (options.boxes and "bbox" in present)
    for is_needed, names, flag in (
        (needs_visible, dialect.visible, "--visible-field"),
        (dialect.needs_amodal, dialect.amodal, "--amodal-field"),
    ):
        if is_needed and not present & set(names):
            of_boxes = "; of boxes data complete makes masks" if "bbox" in present else ""
            raise InputError(
                f"{path}: no annotation has {' or '.join(names)}; there are "
                f"{', '.join(sorted(present))}; name the field with {flag}, or, if only visible "
                f"masks are known, use data convert coco{of_boxes}"
            )
    return dialect


def shown(record: Raws, name: str) -> str:
    """A field of a record as it is in the file."""
    return bytes(record.get(name, b"None")).decode()


def _keep_sure(listing: Listing, min_score: float) -> list[Raws]:
    """The annotations whose score is not lower. Raises InputError if one has none."""
    if not min_score:
        return listing.annotations
    kept = []
    for record in listing.annotations:
        score = msgspec.json.decode(record.get("score", NULL))
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            raise InputError(
                f"{listing.path}: {listing.word} {shown(record, 'id')} has the score {score!r}; to "
                f"leave out low scores, give every {listing.word} a number from 0 to 1"
            )
        if score >= min_score:
            kept.append(record)
    return kept


# Results


def _read_results(
    path: Path,
    content: bytes,
    options: COCOOptions,
    collector: Collector,
    images_dir: Path | None,
) -> Listing:
    """Reads COCO results, a list of masks or boxes with `image_id`, as visible masks; ids count
    from 1.

    Without `annotations` an image is the file that is named as the id, with or without zeros before
    it. Ids that are names get numbers above the others.
    """
    if images_dir is None or options.kind not in ("any", "coco"):
        raise InputError(
            f"{path}: it is a list, as COCO results are; give --images DIR, or a COCO file"
        )
    listed: dict[bytes, Raws] = {}
    ids_of_files: defaultdict[bytes, list[bytes]] = defaultdict(list)
    names: dict[int, str] = {}
    if options.annotations is not None:
        file = _read_json(options.annotations)
        lists: Raws = msgspec.json.decode(file, type=Raws) if file[:1] == b"{" else {}
        strict = Collector(is_strict=True)
        for index, image in enumerate(_records(options.annotations, lists, "images", strict)):
            with strict.record(f"{options.annotations}: images[{index}]"):
                stem = PurePosixPath(decode_as(ListedImage, image, "id").file_name or "").stem
                ids_of_files[msgspec.json.encode(stem)].append(bytes(image["id"]))
                if bytes(image["id"]) in listed:
                    raise ValueError(f"its id {shown(image, 'id')} occurs twice")
            listed[bytes(image["id"])] = image
        if not listed:
            raise InputError(f"--annotations {options.annotations}: it lists no images of COCO")
        names = _read_categories(options.annotations, lists, collector)

    values = msgspec.json.decode(content, type=list[msgspec.Raw])
    results = []
    for number, result in enumerate(_objects(values, f"{path}: results", collector), start=1):
        results.append(result | {"id": msgspec.Raw(b"%d" % number)})
    if not names and any("category_id" in result for result in results):
        remedy = "give the COCO file that names their classes as --annotations"
        collector.note(str(path), f"all objects are called {NO_NAME!r}; {remedy}")
    listing = Listing(path, [], results, [], names, VISIBLE_ALONE, "result")
    results = _keep_sure(listing, options.min_score)

    of_images = defaultdict(list)
    for result in results:
        # Keys are JSON. What is no listed id may be the name of one listed file, as Ultralytics
        # gives it.
        key = bytes(result.get("image_id", NULL))
        named = [] if key in listed else ids_of_files.get(key, [])
        of_images[named[0] if len(named) == 1 else key].append(result)
    numbers = [int(key) for key in of_images if key.isdigit()]
    first_new = max(numbers, default=0) + 1
    files = {} if listed else _files_by_stem(images_dir)
    images, kept = [], []
    for key, of_image in of_images.items():
        value = msgspec.json.decode(key)
        try:
            image = listed[key] if listed else _image_named(value, files, images_dir)
        except (KeyError, ValueError) as error:
            reason = error
            if listed:
                some = ", ".join(shown(image, "id") for image in list(listed.values())[:3])
                reason = f"it is not one image of {options.annotations}, whose ids are {some}, ..."
            with collector.record(f"{path}: image {value!r}"):
                raise ValueError(reason) from None
            continue
        number = key
        if not isinstance(value, int):
            number = b"%d" % first_new
            first_new += 1
        images.append(image | {"id": msgspec.Raw(number)})
        kept += [result | {"image_id": msgspec.Raw(number)} for result in of_image]
    return listing._replace(images=images, annotations=kept)


def _image_named(value: Any, files: Mapping[Any, list[Path]], folder: Path) -> Raws:
    """The image whose file is named as an id. Raises ValueError if it is not one file."""
    named = files.get(value, []) if isinstance(value, int | str) else []
    if len(named) != 1:
        found = ", ".join(map(str, named)) or "no image"
        remedy = "give the COCO file of the images as --annotations"
        raise ValueError(f"{found} has this name; {remedy}")
    name = named[0].relative_to(folder).as_posix()
    return {"file_name": msgspec.Raw(msgspec.json.encode(name))}


def _files_by_stem(folder: Path) -> Mapping[Any, list[Path]]:
    """The images below a folder by their name without its ending, as text and as number."""
    files = defaultdict(list)
    for file in images_below(folder):
        files[file.stem].append(file)
        if file.stem.isdecimal():
            files[int(file.stem)].append(file)
    return files


# Original COCOA


def _from_regions(
    path: Path, lists: Raws, annotations: Sequence[Raws], collector: Collector
) -> Listing:
    """Original COCOA as a COCO file; of several annotators of an image the first counts.

    A region's name is free text and stands in the place of a category.
    """
    entries = annotations or [lists]
    listed = {
        bytes(image.get("id", NULL)): image for image in _records(path, lists, "images", collector)
    }
    images: dict[bytes, Raws] = {}
    regions: list[Raws] = []
    numbers: dict[str, int] = {}
    for record in entries:
        with collector.record(f"{path}: regions"):
            entry = decode_as(_Result, record, "image_id")
            key = bytes(record["image_id"])
            if key in images:
                where = f"{path}: image {entry.image_id}"
                collector.note(where, "another annotator's regions are left out")
                continue
            # A file with one annotation is named as its image, a file with several as none.
            file_names = [path.stem + suffix for suffix in (".jpg", ".png")]
            file_names = [] if record is not lists or key in listed else file_names
            file_names += [PurePosixPath(entry.url or "").name]
            file_names = msgspec.json.encode([name for name in file_names if name])
            image = listed.get(key, {"id": msgspec.Raw(key)})
            images[key] = image | {"file_names": msgspec.Raw(file_names)}
            where = f"{path}: regions of image {entry.image_id}"
            for region in _objects(entry.regions, where, collector):
                name = msgspec.json.decode(region.pop("name", NULL))
                name = str(name or "").strip().lower() or NO_NAME
                number = numbers.setdefault(name, len(numbers) + 1)
                region |= {
                    "id": msgspec.Raw(b"%d" % (len(regions) + 1)),
                    "image_id": msgspec.Raw(key),
                }
                regions.append(region | {"category_id": msgspec.Raw(b"%d" % number)})
    names = {number: name for name, number in numbers.items()}
    return Listing(path, list(images.values()), regions, [], names, DIALECTS["cocoa"])
