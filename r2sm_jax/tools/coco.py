"""Reads annotations with an amodal and a modal mask of each object: COCOA, COCOA-cls, D2SA, KINS,
MUVA.

All but COCOA are COCO files that differ in field names (amazon-science/c2f-seg
data/dataloader_*.py, UARK-AICV/AISFormer tools/proc_cocoa.py and the files it prepares, aistron,
deocclusion datasets/reader.py). Every name of these loaders is understood in every format, and a
file without any of them is refused. D2SA's masks can be larger than their image, since objects
reach out of it. MUVA's field names are not published, so the user gives them.

A file of original COCOA (Zhu et al., "Semantic Amodal Segmentation") holds one annotator's regions
of one image: `image_id`, `url`, `regions`. The published files list many of these under
`annotations`, and their `images`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import tyro
from PIL import Image
from tyro.conf import OmitArgPrefixes

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.validation import MASKS, BoxComparison, is_id, is_text
from r2sm_jax.errors import InputError, writing
from r2sm_jax.tools.entries import (
    BadRecord,
    Entry,
    Note,
    RecordError,
    Size,
    index_by_id,
    read_json_files,
)
from r2sm_jax.tools.records import (
    ImageRecord,
    Item,
    MaskComparison,
    ObjectRecord,
    Record,
    make_image,
    mask_fields,
    names_of_image,
)

RATE_TOLERANCE = 0.02
"""Stored and recomputed occlusion rates may differ by this much before the user is told."""


@dataclass(frozen=True)
class Preset:
    """The field names of a format's annotations."""

    help: str
    amodal: tuple[str, ...] = ("amodal_segm", "a_segm", "segmentation")
    """Fields of the complete mask; the first that is present counts."""
    modal: tuple[str, ...] = (
        "visible_mask",
        "visible_segm",
        "inmodal_seg",
        "i_segmentation",
        "i_segm",
    )
    """Fields of the visible mask. An object without any is fully visible, if others of its file
    have one."""
    order: str = ""
    """Depth order, smaller is nearer; compared with the order that the masks show."""
    copied: tuple[str, ...] = ()
    """Fields of whole numbers that are copied."""
    categories: Mapping[int, str] = field(default_factory=dict)
    """Category names by id, for files that list none."""
    has_regions: bool = False
    """Whether the layout is that of original COCOA, where each region has its own name."""


KINS_CATEGORIES = {
    1: "cyclist",
    2: "pedestrian",
    4: "car",
    5: "tram",
    6: "truck",
    7: "van",
    8: "misc",
}
PRESETS = {
    "cocoa": Preset(
        "Original COCOA: one flat amodal polygon a region, RLE only where it is occluded.",
        amodal=("segmentation",),
        modal=("visible_mask",),
        order="order",
        copied=("order", "isStuff"),
        has_regions=True,
    ),
    "cocoa-cls": Preset("COCOA-cls: COCO with amodal `segmentation` and `visible_mask` as RLE."),
    "d2sa": Preset(
        "D2SA: like COCOA-cls, with objects that reach out of the image; several files are merged.",
        order="occl_depth",
        copied=("occl_depth",),
    ),
    "kins": Preset(
        "KINS, old (`segmentation`, `inmodal_seg`) and of 2020 (`a_segm`, `i_segm`).",
        categories=KINS_CATEGORIES,
    ),
    "muva": Preset("MUVA, or any other COCO-like file: name the fields of the two masks."),
}


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class MaskOptions:
    """How to read masks."""

    oversize: Literal["refuse", "crop", "pad"] = "refuse"
    """If masks are larger than their image: crop them to it, or pad the image (a copy beside
    --out)."""
    amodal_field: str | None = None
    """Field of an annotation with the complete mask, if it is not the format's own."""
    visible_field: str | None = None
    """Field of an annotation with the visible mask; fully visible if it is missing."""
    crowds: Literal["ignore", "objects"] = "ignore"
    """What `iscrowd` 1 marks: a region to ignore, as in COCO, or an object, as in files of CVAT and
    Datumaro, which mark each mask that was drawn with a brush."""


@dataclass(frozen=True)
class _Options:
    """How to read: the arguments of `read_coco_like`, with the user's field names in the preset."""

    preset: Preset
    images_dir: Path | None
    oversize: str
    crowds: str
    padded_dir: Path
    comparison: MaskComparison = field(default_factory=MaskComparison)
    """Of all objects that were read."""
    boxes: BoxComparison = field(default_factory=BoxComparison)
    """Of the `bbox` and `area` that they state."""


def read_coco_like(
    sources: Sequence[Path],
    preset: Preset,
    options: MaskOptions = MaskOptions(),
    *,
    images_dir: Path | None = None,
    padded_dir: Path = Path("padded"),
) -> Iterator[Item]:
    """Reads files, or folders of files: first a record of each image, then one of each object.

    Ids of images are preserved. If those of a later COCO file collide with earlier ones, all of its
    ids are shifted past them; of several COCOA annotations of one image the first is used. Images
    are needed if a file does not state their sizes, and to pad them (padded copies are written to
    `padded_dir`). Raises InputError for files that do not fit the format.
    """
    if options.amodal_field is not None:
        preset = replace(preset, amodal=(options.amodal_field,))
    if options.visible_field is not None:
        preset = replace(preset, modal=(options.visible_field,))
    how = _Options(preset, images_dir, options.oversize, options.crowds, padded_dir)
    read = _read_cocoa if preset.has_regions else _read_coco

    yield from read(sources, how)
    source_names = ", ".join(map(str, sources))
    for contradiction in how.boxes.contradictions():
        if contradiction.is_systematic:
            raise InputError(f"{source_names}: {contradiction}")
        yield Note(source_names, str(contradiction))
    remedy = "exchange --amodal-field and --visible-field, if the file has them so"
    how.comparison.check(source_names, remedy)


def _read_coco(sources: Sequence[Path], how: _Options) -> Iterator[Item]:
    used_ids: set[int] = set()
    for file in read_json_files(sources, "annotations of this format"):
        if isinstance(file, Note):  # or a BadRecord, which is one
            yield file
            continue
        images, bad_images = index_by_id(file.children("images", "image"))
        yield from bad_images
        # D2SA's training files number their images on their own.
        shift = max(used_ids) + 1 - min(images) if used_ids & images.keys() else 0
        if shift:
            yield file.note(f"its image ids collide with those before; {shift} was added to each")
        for item in _read_coco_file(file, images, shift, how):
            yield item
            if isinstance(item, Record) and item.image.id is not None:
                used_ids.add(item.image.id)


def _read_coco_file(
    file: Entry, images: Mapping[int, Entry], shift: int, how: _Options
) -> Iterator[Item]:
    """Reads one file; `shift` is added to its image ids."""
    preset_categories = how.preset.categories
    if file.get("categories") or not preset_categories:
        categories, bad_categories = index_by_id(file.children("categories", "category"))
        yield from bad_categories
    else:
        categories = {
            i: Entry(file.path, "", {"name": name}) for i, name in preset_categories.items()
        }

    annotations: list[Entry] = []
    if file.get("annotations") is not None:
        annotations = file.children("annotations", "annotation")
    if annotations:
        _check_fields(str(file), _field_names(annotations), how.preset)
    else:
        yield file.note("it has no annotations; its images are kept")

    by_image: dict[int, list[Entry]] = {image_id: [] for image_id in images}
    for annotation in annotations:
        try:
            name = annotation.look_up("category_id", categories).require("name", str)
            of_image = annotation.look_up("image_id", by_image)
            of_image.append(replace(annotation, value=annotation.value | {"name": name}))
        except RecordError as error:
            yield error.bad_record

    for image_id, entry in images.items():
        try:
            size = _stated_size(entry, how)
            names = [entry.text("file_name")]
            image = make_image(entry, names, how.images_dir, image_id + shift, size)
        except RecordError as error:
            # An image takes its annotations along, so that --max-bad counts all that is lost.
            yield error.bad_record
            for annotation in by_image[image_id]:
                yield BadRecord(str(annotation), error.bad_record.sentence)
            continue
        yield from _read_image(entry, image, by_image[image_id], how)


def _read_cocoa(sources: Sequence[Path], how: _Options) -> Iterator[Item]:
    used_ids: set[int] = set()
    region_fields: set[str] = set()
    for file in read_json_files(sources, "annotations of this format"):
        if isinstance(file, Note):  # or a BadRecord, which is one
            yield file
            continue
        # A file holds one annotation, or a list of them.
        records = [file]
        if isinstance(file.get("annotations"), list):
            records = file.children("annotations")
        if not records or not all(isinstance(record.get("regions"), list) for record in records):
            # A file that the user names must be COCOA's. A folder may hold others too.
            if file.path in sources:
                raise file.error(
                    "there is no list of 'regions'", "give an original COCOA annotation"
                )
            yield file.note("left out, it has no COCOA regions")
            continue
        images: dict[int, Entry] = {}
        if file.get("images") is not None:
            images, bad_images = index_by_id(file.children("images", "image"))
            yield from bad_images

        for record in records:
            try:
                image_id = record.require("image_id", int)
                # COCOA has several annotators an image; they would double every object.
                if image_id in used_ids:
                    yield record.note(f"left out, image {image_id} has been read before")
                    continue
                image = _cocoa_image(record, image_id, images, how)
            except RecordError as error:
                yield error.bad_record
                continue
            used_ids.add(image_id)
            regions = [
                _as_annotation(region, number)
                for number, region in enumerate(record.children("regions"), start=1)
            ]
            region_fields |= _field_names(regions)
            yield from _read_image(record, image, regions, how)

    # COCOA's own `visible_mask` may be missing from every region. A field that the user names
    # (--visible-field) may not, and then the preset differs from COCOA's.
    if region_fields and how.preset.modal != PRESETS["cocoa"].modal:
        _check_fields(", ".join(map(str, sources)), region_fields, how.preset)


def _cocoa_image(
    record: Entry, image_id: int, images: Mapping[int, Entry], how: _Options
) -> ImageRecord:
    """The image of an annotation: listed in its file, or named as the file or as its URL."""
    url = record.get("url")
    url_names = [PurePosixPath(url).name] if is_text(url) else []
    if image_id in images:
        entry = images[image_id]
        names = [entry.text("file_name"), *url_names]
        return make_image(entry, names, how.images_dir, image_id, _stated_size(entry, how))
    # A file with one annotation is named as its image; the record is then the whole file.
    file_names = [] if record.name else names_of_image(record.path)
    return make_image(record, [*file_names, *url_names], how.images_dir, image_id)


def _as_annotation(region: Entry, number: int) -> Entry:
    """A region of COCOA with the fields of an annotation.

    Regions are listed from front to back, so without an `order` the region's number counts.
    """
    fields = region.value if isinstance(region.value, dict) else {}
    annotation = {
        **fields,
        "id": None,
        "name": str(fields.get("name") or "").lower(),
        "order": fields["order"] if is_id(fields.get("order")) else number,
        "isStuff": int(fields.get("isStuff") == 1),
    }
    return Entry(region.path, f"region {number}", annotation)


def _field_names(entries: Sequence[Entry]) -> set[str]:
    names: set[str] = set()
    for entry in entries:
        if isinstance(entry.value, Mapping):
            names.update(entry.value)
    return names


def _check_fields(source: str, fields: set[str], preset: Preset) -> None:
    """Raises InputError if no field holds a complete mask, or none a visible one."""
    visible_flag = f"--visible-field, {preset.amodal[-1]} if every object is fully visible"
    for names, flag in ((preset.amodal, "--amodal-field"), (preset.modal, visible_flag)):
        if not fields.intersection(names):
            raise InputError(
                f"{source}: no annotation has {' or '.join(names)}; there are "
                f"{', '.join(sorted(fields))}; check the format, or name the field with {flag}"
            )


def _stated_size(image: Entry, how: _Options) -> Size | None:
    """The size that a file states for an image; None if the image file itself counts."""
    if image.get("height") is None and image.get("width") is None:
        return None
    # D2SA's files may state the size of masks that reach out of the image.
    if how.oversize != "refuse" and how.images_dir is not None:
        return None
    return image.size()


def _read_image(
    entry: Entry, image: ImageRecord, annotations: Sequence[Entry], how: _Options
) -> Iterator[Item]:
    """The record of an image, then one for each of its annotations."""
    original_size = image.size
    mask_size = _size_of_masks(entry, annotations, original_size, how.preset)
    if mask_size != original_size and how.oversize == "refuse":
        problem = (
            f"its masks reach {mask_size[0]} x {mask_size[1]} "
            f"but it is {original_size[0]} x {original_size[1]}"
        )
        raise InputError(f"{entry}: {problem}; choose --oversize crop or --oversize pad")
    if mask_size != original_size and how.oversize == "pad":
        image = _pad_image(image, mask_size, how.padded_dir)

    # On its own, since an image without a usable object is kept.
    yield Record(image)
    records: list[tuple[Entry, ObjectRecord]] = []
    for annotation in annotations:
        try:
            record = _read_object(annotation, image.size, original_size, how)
        except RecordError as error:
            yield error.bad_record
            continue
        records.append((annotation, record))
        yield Record(image, [record])
    yield from _compare_order(entry, records, how.preset.order)


def _size_of_masks(image: Entry, annotations: Sequence[Entry], size: Size, preset: Preset) -> Size:
    """The size that has room for an image and all of its RLEs."""
    height, width = size
    for annotation in annotations:
        for key in (*preset.amodal, *preset.modal):
            rle_size = _oversize_of(annotation.get(key), size)
            if rle_size is not None:
                height = max(height, rle_size[0])
                width = max(width, rle_size[1])
    return replace(image, value={"height": height, "width": width}).size()


def _oversize_of(segmentation: Any, image_size: Size) -> Size | None:
    """The size that an RLE states, if an image of this size fits into it; otherwise None."""
    try:
        height, width = masks.rle_size(segmentation)
    except ValueError:  # polygons, or an RLE that fails when it is decoded
        return None
    fits = height >= image_size[0] and width >= image_size[1]
    return (height, width) if fits else None


def _pad_image(image: ImageRecord, size: Size, padded_dir: Path) -> ImageRecord:
    """Writes a PNG copy of an image with this size, black below and to the right of the image."""
    if image.path is None:
        raise InputError(
            "--oversize pad: the images are needed; give their folder with --images DIR"
        )
    padded = Image.new("RGB", (size[1], size[0]))
    padded.paste(Image.fromarray(open_image(image.path)))
    path = padded_dir / f"{image.file_name}.png"
    with writing(path) as part:
        padded.save(part, format="PNG")
    return replace(image, size=size, path=path)


def _read_object(annotation: Entry, size: Size, original_size: Size, how: _Options) -> ObjectRecord:
    """The object of an annotation, with masks of `size`; `original_size` is that before padding."""
    preset = how.preset
    notes: list[Note] = []
    amodal_key = annotation.first_present(preset.amodal)
    modal_key = annotation.first_present(preset.modal)
    if amodal_key is None:
        problem = f"it has no {' or '.join(preset.amodal)}"
        raise annotation.error(problem, "check the format or the field names")
    amodal = _fit_mask(annotation, amodal_key, size, original_size, notes)
    if modal_key is None:
        modal = amodal
    elif annotation.get(modal_key) == []:
        modal = np.zeros(size, bool)  # KINS: nothing is visible
    else:
        modal = _fit_mask(annotation, modal_key, size, original_size, notes)
    if not (amodal | modal).any():
        raise annotation.error("its mask has no pixel in the image", "correct it")
    if not modal.any():
        notes.append(annotation.note("nothing of it is visible"))
    how.comparison.add(modal, amodal)
    num_outside = masks.area(modal & ~amodal)
    if num_outside:
        what = f"{num_outside} visible pixels outside the amodal mask were added to it"
        notes.append(annotation.note(what))

    fields = mask_fields(modal, amodal)
    rate = fields["occlude_rate"]
    stored_rate = annotation.get("occlude_rate")
    if isinstance(stored_rate, int | float) and abs(stored_rate - rate) > RATE_TOLERANCE:
        what = f"occlude_rate {stored_rate:.3f} is stored, but the masks give {rate:.3f} (used)"
        notes.append(annotation.note(what))

    # A box of D2SA that reaches out of the image is not that of the cropped mask.
    if how.oversize != "crop":
        how.boxes.add(annotation.value, [fields[key] for key in MASKS if key in fields])

    if is_id(annotation.get("id")):
        fields["source_id"] = annotation.get("id")
    for key in preset.copied:
        if is_id(annotation.get(key)):
            fields[key] = annotation.get(key)
    ignored_by = annotation.flag_that_ignores(crowds_are_objects=how.crowds == "objects")
    return ObjectRecord(annotation.get("name"), fields, None, tuple(notes), ignored_by)


def _fit_mask(
    annotation: Entry, key: str, size: Size, original_size: Size, notes: list[Note]
) -> Mask:
    """The mask in a field, cropped or padded to `[H W]` of this size; appends to `notes`."""
    rle_size = _oversize_of(annotation.get(key), original_size)
    mask, mask_notes = annotation.mask(key, rle_size or size)
    notes += mask_notes
    inside = mask[: size[0], : size[1]]
    return np.pad(inside, [(0, size[0] - inside.shape[0]), (0, size[1] - inside.shape[1])])


def _compare_order(
    image: Entry, records: Sequence[tuple[Entry, ObjectRecord]], order: str
) -> Iterator[Note]:
    """A note if objects overlap in another order than the one that the file states."""
    if not all(order in record.fields for _, record in records):
        return
    num_overlapping = 0
    wrong_pairs = []
    for (entry_a, a), (entry_b, b) in combinations(records, 2):
        visible_a = _visible_area_inside(a.fields, b.fields)
        visible_b = _visible_area_inside(b.fields, a.fields)
        if visible_a != visible_b and a.fields[order] != b.fields[order]:
            num_overlapping += 1
            if (visible_a > visible_b) != (a.fields[order] < b.fields[order]):
                wrong_pairs.append(f"{entry_a.name} and {entry_b.name}")
    if wrong_pairs:
        examples = "; ".join(wrong_pairs[:3]) + ("; ..." if len(wrong_pairs) > 3 else "")
        yield image.note(
            f"{len(wrong_pairs)} of {num_overlapping} overlapping pairs are seen in another order "
            f"than {order} says ({examples}); masks are used"
        )


def _visible_area_inside(fields: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """How many pixels of an object are visible inside the complete mask of another one."""
    modal = fields.get("visible_mask", fields["segmentation"])
    return masks.areas([masks.intersect(modal, other["segmentation"])])[0]
