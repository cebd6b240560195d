"""Reads annotations with both masks of each object (COCOA, COCOA-cls, D2SA, KINS, MUVA), and COCO's
own, with the visible mask alone.

All but COCOA and COCO are COCO files that differ in field names (amazon-science/c2f-seg
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
from r2sm_jax.data.annotations import mask_fields
from r2sm_jax.data.images import open_image
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.validation import MASKS, BoxComparison, is_id, is_text
from r2sm_jax.errors import InputError, atomic_write
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
    RATE_TOLERANCE,
    ImageRecord,
    Item,
    MaskComparison,
    ObjectRecord,
    Record,
    make_image,
    names_of_image,
)


@dataclass(frozen=True)
class Preset:
    """The field names of a format's annotations."""

    help: str
    amodal: tuple[str, ...] = ("amodal_segm", "a_segm", "segmentation")
    """Fields of the complete mask; the first that is present counts. Empty: it is not known."""
    modal: tuple[str, ...] = (
        "visible_mask",
        "visible_segm",
        "inmodal_seg",
        "i_segmentation",
        "i_segm",
    )
    """Fields of the visible mask; the first that is present counts. An object without any is fully
    visible. A file without any is refused, except one of COCOA's own (`read_coco_like`)."""
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
# The layouts are those of the loaders named beside them, and, for COCOA, of five real files.
PRESETS = {
    # Any file of instance masks. A mask is what is visible.
    "coco": Preset(
        "COCO instances and alike: each object's visible mask. Its queries are modal.",
        amodal=(),
        modal=("segmentation",),
    ),
    # XiaohangZhan/deocclusion datasets/reader.py. `order` counts from 1 at the front.
    "cocoa": Preset(
        "Original COCOA: one flat amodal polygon a region, RLE only where it is occluded.",
        amodal=("segmentation",),
        modal=("visible_mask",),
        order="order",
        copied=("order", "isStuff"),
        has_regions=True,
    ),
    # UARK-AICV/AISFormer tools/proc_cocoa.py takes `visible_mask` unconditionally: every object of
    # COCO_amodal_{train,val}2014_with_classes.json has one.
    "cocoa-cls": Preset("COCOA-cls: COCO with amodal `segmentation` and `visible_mask` as RLE."),
    # vothenguyen/amodal_shape_prediction scripts/dataset_d2sa.py. Some RLEs have 1534 x 1920 pixels
    # for an image of 1440 x 1920.
    "d2sa": Preset(
        "D2SA: like COCOA-cls, with objects that reach out of the image; several files are merged.",
        order="occl_depth",
        copied=("occl_depth",),
    ),
    # amazon-science/c2f-seg data/dataloader_KINS.py, and the README of the files of 2020.
    "kins": Preset(
        "KINS, old (`segmentation`, `inmodal_seg`) and of 2020 (`a_segm`, `i_segm`).",
        categories=KINS_CATEGORIES,
    ),
    # Its files are not published, so COCO's layout is a guess.
    "muva": Preset("MUVA, or any other COCO-like file: name the fields of the two masks."),
}
BOTH_MASKS = frozenset(
    (*Preset("").modal, "invisible_mask", "occlude_rate", "amodal_segm", "a_segm")
)
"""Fields of annotations that have a complete mask."""
PLAIN_COCO = "use data convert coco"


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class MaskOptions:
    """How to read masks."""

    oversize: Literal["refuse", "crop", "pad"] = "refuse"
    """What to do if masks are larger than their image: crop them, or pad a copy of the image.

    The copies are beside --out."""
    amodal_field: str | None = None
    """Field of an annotation with the complete mask, if it is not the format's own."""
    visible_field: str | None = None
    """Field of an annotation with the visible mask; fully visible if it is missing."""
    crowds: Literal["ignore", "objects"] = "ignore"
    """Whether `iscrowd` 1 marks a region to ignore, as in COCO, or an object.

    It is an object in files of CVAT and Datumaro, which mark each mask that was drawn with a brush.
    """


@dataclass(frozen=True)
class _ReadOptions:
    """The arguments of `read_coco_like` in the form in which the functions below need them."""

    preset: Preset
    """With the user's names of the mask fields in place of the format's."""
    visible_field_is_required: bool
    """Whether a file is refused if none of its objects has a visible mask."""
    images_dir: Path | None
    padded_dir: Path
    oversize: str
    crowds: str

    @property
    def trusts_stated_sizes(self) -> bool:
        """Whether an image has the size that its annotation file states.

        D2SA's files may state the size of masks that reach out of the image; then the image file
        says how large the image is.
        """
        return self.oversize == "refuse" or self.images_dir is None


@dataclass(frozen=True)
class _AnnotatedImage:
    """An image as it is listed in a file, before its masks are read."""

    entry: Entry
    """The entry that messages about the image name."""
    image: ImageRecord
    annotations: Sequence[Entry]
    """Its objects, each with the `name` of its category."""


@dataclass
class _Comparisons:
    """Comparisons of all objects of a source, of which each alone proves nothing."""

    masks: MaskComparison = field(default_factory=MaskComparison)
    boxes: BoxComparison = field(default_factory=BoxComparison)


def read_coco_like(
    sources: Sequence[Path],
    preset: Preset,
    options: MaskOptions = MaskOptions(),
    *,
    images_dir: Path | None = None,
    padded_dir: Path = Path("padded"),
) -> Iterator[Item]:
    """Reads files, or folders of files: for each image its record, then one of each object.

    Ids of images are preserved. If those of a later COCO file collide with earlier ones, all of its
    ids are shifted past them; of several COCOA annotations of one image the first is used. Images
    are needed if a file does not state their sizes, and to pad them (padded copies are written to
    `padded_dir`). Raises InputError for files that do not fit the format.
    """
    amodal_fields = preset.amodal
    if options.amodal_field is not None:
        amodal_fields = (options.amodal_field,)
    modal_fields = preset.modal
    if options.visible_field is not None:
        modal_fields = (options.visible_field,)
    # COCOA stores a visible mask only where a region is occluded, so a file may have none at all.
    # Other formats must have some, and so must a field that the user names in place of COCOA's own.
    has_own_field = options.visible_field is None or options.visible_field in preset.modal
    may_lack_visible_masks = preset.has_regions and has_own_field
    read_options = _ReadOptions(
        preset=replace(preset, amodal=amodal_fields, modal=modal_fields),
        visible_field_is_required=not may_lack_visible_masks,
        images_dir=images_dir,
        padded_dir=padded_dir,
        oversize=options.oversize,
        crowds=options.crowds,
    )

    comparisons = _Comparisons()
    find_images = _cocoa_images if preset.has_regions else _coco_images
    for item in find_images(sources, read_options):
        if isinstance(item, _AnnotatedImage):
            yield from _read_image(item, read_options, comparisons)
        else:
            yield item

    source_names = ", ".join(map(str, sources))
    for contradiction in comparisons.boxes.contradictions():
        if contradiction.is_systematic:
            raise InputError(f"{source_names}: {contradiction}")
        yield Note(source_names, str(contradiction))
    remedy = "exchange --amodal-field and --visible-field, if the file has them so"
    comparisons.masks.check(source_names, remedy)


# From files to images and the entries of their objects


def _coco_images(
    sources: Sequence[Path], options: _ReadOptions
) -> Iterator[_AnnotatedImage | BadRecord | Note]:
    """The images of COCO files."""
    used_ids: set[int] = set()
    for file in read_json_files(sources, "annotations of this format"):
        if not isinstance(file, Entry):
            yield file
            continue
        images, bad_images = index_by_id(file.children("images", "image"))
        yield from bad_images

        # D2SA's training files number their images on their own.
        shift = 0
        if used_ids & images.keys():
            shift = max(used_ids) + 1 - min(images)
            yield file.note(f"its image ids collide with those before; {shift} was added to each")
        for item in _images_of_file(file, images, shift, options):
            yield item
            if isinstance(item, _AnnotatedImage) and item.image.id is not None:
                used_ids.add(item.image.id)


def _images_of_file(
    file: Entry, images: Mapping[int, Entry], shift: int, options: _ReadOptions
) -> Iterator[_AnnotatedImage | BadRecord | Note]:
    """The images of one COCO file; `shift` is added to their ids."""
    categories, bad_categories = _categories_of_file(file, options.preset)
    yield from bad_categories

    annotations: list[Entry] = []
    if file.get("annotations") is not None:
        annotations = file.children("annotations", "annotation")
    if annotations:
        _check_fields(str(file), _field_names(annotations), options.preset)
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
            size = _stated_size(entry, options)
            names = _names_of(entry)
            image = make_image(entry, names, options.images_dir, image_id + shift, size)
        except RecordError as error:
            # An image takes its annotations along, so that --max-bad counts all that is lost.
            yield error.bad_record
            for annotation in by_image[image_id]:
                yield BadRecord(str(annotation), error.bad_record.sentence)
            continue
        yield _AnnotatedImage(entry, image, by_image[image_id])


def _categories_of_file(
    file: Entry, preset: Preset
) -> tuple[Mapping[int, Entry], Sequence[BadRecord]]:
    """The categories that a file lists by id, or those of its format if it lists none."""
    if file.get("categories") or not preset.categories:
        return index_by_id(file.children("categories", "category"))
    categories = {}
    for category_id, name in preset.categories.items():
        categories[category_id] = Entry(file.path, "", {"name": name})
    return categories, []


def _cocoa_images(
    sources: Sequence[Path], options: _ReadOptions
) -> Iterator[_AnnotatedImage | BadRecord | Note]:
    """The images of original COCOA files, with their regions as annotations."""
    used_ids: set[int] = set()
    region_fields: set[str] = set()
    for file in read_json_files(sources, "annotations of this format"):
        if not isinstance(file, Entry):
            yield file
            continue
        # A file holds one entry, with the regions of one annotator, or a list of them.
        entries = [file]
        if isinstance(file.get("annotations"), list):
            entries = file.children("annotations")
        if not entries or not all(isinstance(entry.get("regions"), list) for entry in entries):
            # A file that the user names must be COCOA's. A folder may hold others too.
            if file.path in sources:
                raise file.error("there is no list of 'regions'", _right_door(entries))
            yield file.note("left out, it has no COCOA regions")
            continue
        images: dict[int, Entry] = {}
        if file.get("images") is not None:
            images, bad_images = index_by_id(file.children("images", "image"))
            yield from bad_images

        for entry in entries:
            try:
                image_id = entry.require("image_id", int)
                # COCOA has several annotators an image; they would double every object.
                if image_id in used_ids:
                    yield entry.note(f"left out, image {image_id} has been read before")
                    continue
                image = _cocoa_image(entry, image_id, images, options)
            except RecordError as error:
                yield error.bad_record
                continue
            used_ids.add(image_id)
            regions = [
                _as_annotation(region, number)
                for number, region in enumerate(entry.children("regions"), start=1)
            ]
            region_fields |= _field_names(regions)
            yield _AnnotatedImage(entry, image, regions)

    # Of all files together, since the regions of one image may all be in full view.
    if region_fields and options.visible_field_is_required:
        _check_fields(", ".join(map(str, sources)), region_fields, options.preset)


def _cocoa_image(
    entry: Entry, image_id: int, images: Mapping[int, Entry], options: _ReadOptions
) -> ImageRecord:
    """The image of an entry: listed in its file (`images`), or named as the file or as its URL.

    Raises RecordError for an image without any name, and as `make_image`.
    """
    url = entry.get("url")
    url_name = PurePosixPath(url).name if is_text(url) else ""
    url_names = [url_name] if url_name else []
    if image_id in images:
        listed = images[image_id]
        names = [listed.text("file_name"), *url_names]
        size = _stated_size(listed, options)
        return make_image(listed, names, options.images_dir, image_id, size)
    # A file with one annotation is named as its image. A file with several is named as none.
    file_names = names_of_image(entry.path) if entry.is_whole_file else []
    names = [*file_names, *url_names]
    if not names:
        problem = f"image {image_id} is not listed under 'images', and there is no 'url'"
        raise entry.error(problem, "add one of the two")
    return make_image(entry, names, options.images_dir, image_id)


def _as_annotation(region: Entry, number: int) -> Entry:
    """A region of COCOA with the fields of an annotation.

    Regions are listed from front to back, so without an `order` the region's number counts.
    """
    fields = region.value if isinstance(region.value, dict) else {}
    # A region has no id. Its name is free text and stands in the place of a category; "" becomes
    # the class "object" in `Collector`.
    annotation = {
        **fields,
        "id": None,
        "name": str(fields.get("name") or "").lower(),
        "order": fields["order"] if is_id(fields.get("order")) else number,
        "isStuff": int(fields.get("isStuff") == 1),
    }
    return Entry(region.path, f"region {number}", annotation)


def _names_of(image: Entry) -> list[str]:
    """The names that the file of an image may have. LVIS gives its address alone, whose end is the
    folder and the name of COCO 2017."""
    address = image.get("coco_url")
    if image.get("file_name") is not None or not is_text(address):
        return [image.text("file_name")]
    path = PurePosixPath(address)
    return [path.name, f"{path.parent.name}/{path.name}"]


def _stated_size(image: Entry, options: _ReadOptions) -> Size | None:
    """The size that a file states for an image; None if the image file itself counts."""
    is_stated = image.get("height") is not None or image.get("width") is not None
    return image.size() if is_stated and options.trusts_stated_sizes else None


def _field_names(entries: Sequence[Entry]) -> set[str]:
    """The names of all fields that any of the entries has."""
    names: set[str] = set()
    for entry in entries:
        if isinstance(entry.value, Mapping):
            names.update(entry.value)
    return names


def _right_door(entries: Sequence[Entry]) -> str:
    """What to do with a file that is not of original COCOA."""
    fields = _field_names(entries)
    if fields & BOTH_MASKS:
        return "its annotations have both masks; use data convert cocoa-cls, d2sa, kins or muva"
    if "segmentation" in fields:
        return f"its annotations are COCO's; {PLAIN_COCO}"
    return "give an original COCOA annotation"


def _check_fields(source: str, fields: set[str], preset: Preset) -> None:
    """Raises InputError if no field holds a complete mask, or none a visible one."""
    if not preset.amodal:
        both = sorted(fields & BOTH_MASKS)
        if both:
            raise InputError(
                f"{source}: its annotations have {both[0]}, so that segmentation is the complete "
                "mask; use data convert cocoa-cls, d2sa, kins or muva"
            )
        if not fields.intersection(preset.modal):
            raise InputError(
                f"{source}: no annotation has a segmentation; there are "
                f"{', '.join(sorted(fields))}; give a file of instance masks"
            )
        return
    # Where nothing is hidden, the user can give the complete mask as the visible one too.
    visible_flag = f"--visible-field, {preset.amodal[-1]} if every object is fully visible"
    door = (
        f", or, if only visible masks are known, {PLAIN_COCO}" if "segmentation" in fields else ""
    )
    for names, flag in ((preset.amodal, "--amodal-field"), (preset.modal, visible_flag)):
        if not fields.intersection(names):
            raise InputError(
                f"{source}: no annotation has {' or '.join(names)}; there are "
                f"{', '.join(sorted(fields))}; check the format, name the field with {flag}{door}"
            )


# From an image to its records


def _read_image(
    annotated: _AnnotatedImage, options: _ReadOptions, comparisons: _Comparisons
) -> Iterator[Item]:
    """The record of an image, then one for each of its annotations.

    Raises InputError for masks that are larger than the image, if they are to be refused.
    """
    image = annotated.image
    original_size = image.size
    mask_size = _size_of_masks(annotated, options.preset)
    if mask_size != original_size and options.oversize == "refuse":
        problem = (
            f"its masks reach {mask_size[0]} x {mask_size[1]} "
            f"but it is {original_size[0]} x {original_size[1]}"
        )
        raise InputError(f"{annotated.entry}: {problem}; choose --oversize crop or --oversize pad")
    if mask_size != original_size and options.oversize == "pad":
        image = _pad_image(image, mask_size, options.padded_dir)

    # On its own, since an image without a usable object is kept. The records of its objects name
    # the image again, and the collector adds it once.
    yield Record(image)
    objects: list[tuple[Entry, ObjectRecord]] = []
    for annotation in annotated.annotations:
        try:
            modal, amodal, notes = _read_masks(annotation, options.preset, image, original_size)
            object_record = _make_object(annotation, modal, amodal, notes, options)
        except RecordError as error:
            yield error.bad_record
            continue
        if amodal is not None:
            comparisons.masks.add(modal, amodal, annotation.get("occlude_rate"))
        # A box of D2SA that reaches out of the image is not that of the cropped mask.
        if options.oversize != "crop":
            fields = object_record.fields
            rles = [fields[key] for key in MASKS if fields.get(key) is not None]
            comparisons.boxes.add(annotation.value, rles)
        objects.append((annotation, object_record))
        yield Record(image, [object_record])
    yield from _compare_order(annotated.entry, objects, options.preset.order)


def _size_of_masks(annotated: _AnnotatedImage, preset: Preset) -> Size:
    """The size that has room for an image and all of its RLEs.

    Raises RecordError if that is more than an image can have.
    """
    height, width = annotated.image.size
    for annotation in annotated.annotations:
        for key in (*preset.amodal, *preset.modal):
            rle_size = _size_of_covering_rle(annotation.get(key), annotated.image.size)
            if rle_size is not None:
                height = max(height, rle_size[0])
                width = max(width, rle_size[1])
    annotated.entry.check_size(height, width)
    return height, width


def _size_of_covering_rle(segmentation: Any, image_size: Size) -> Size | None:
    """The size of an RLE with room for an image of this size; None for any other mask.

    Polygons have no size. An RLE that is smaller than the image belongs to another image, and fails
    when it is decoded.
    """
    try:
        height, width = masks.rle_size(segmentation)
    except ValueError:  # polygons, or nothing
        return None
    is_covering = height >= image_size[0] and width >= image_size[1]
    return (height, width) if is_covering else None


def _pad_image(image: ImageRecord, size: Size, padded_dir: Path) -> ImageRecord:
    """Writes a PNG copy of an image with this size, black below and to the right of the image."""
    if image.path is None:
        raise InputError(
            "--oversize pad: the images are needed; give their folder with --images DIR"
        )
    # Pillow's sizes are width and height.
    padded = Image.new("RGB", (size[1], size[0]))
    padded.paste(Image.fromarray(open_image(image.path)))
    path = padded_dir / f"{image.file_name}.png"
    with atomic_write(path) as part:
        padded.save(part, format="PNG")
    return replace(image, size=size, path=path)


def _read_masks(
    annotation: Entry, preset: Preset, image: ImageRecord, original_size: Size
) -> tuple[Mask, Mask | None, list[Note]]:
    """The modal and the amodal mask `[H W]` of an annotation, and notes about them; amodal is None
    where the format has none.

    Both have the size of `image`, which may be padded; `original_size` is that before. Raises
    RecordError if they cannot be read or have no pixel.
    """
    amodal_key = annotation.first_present(preset.amodal)
    modal_key = annotation.first_present(preset.modal)
    if not preset.amodal:
        if modal_key is None:
            raise annotation.error("it has no mask", "add one, or leave the object out")
        modal, notes = _read_mask(annotation, modal_key, image.size, original_size)
        if not modal.any():
            raise annotation.error("its mask has no pixel in the image", "correct it")
        return modal, None, notes
    if amodal_key is None:
        problem = f"it has no {' or '.join(preset.amodal)}"
        raise annotation.error(problem, "check the format or the field names")
    amodal, notes = _read_mask(annotation, amodal_key, image.size, original_size)
    if modal_key is None:
        modal = amodal  # an object without a visible mask of its own is fully visible
    elif annotation.get(modal_key) == []:
        # KINS writes an empty list for an object of which nothing is visible.
        modal = np.zeros(image.size, bool)
    else:
        modal, more_notes = _read_mask(annotation, modal_key, image.size, original_size)
        notes = notes + more_notes

    if not (amodal | modal).any():
        raise annotation.error("its mask has no pixel in the image", "correct it")
    if not modal.any():
        notes = [*notes, annotation.note("nothing of it is visible")]
    return modal, amodal, notes


def _read_mask(
    annotation: Entry, key: str, size: Size, original_size: Size
) -> tuple[Mask, list[Note]]:
    """The mask in a field, cropped or padded to `[H W]` of this `size`, with notes about it."""
    rle_size = _size_of_covering_rle(annotation.get(key), original_size)
    if rle_size is None:
        return annotation.mask(key, size)
    mask, notes = annotation.mask(key, rle_size)
    # Image and mask share their top left corner, as in public loaders of D2SA.
    height, width = size
    cropped = mask[:height, :width]
    missing_rows = height - cropped.shape[0]
    missing_columns = width - cropped.shape[1]
    return np.pad(cropped, [(0, missing_rows), (0, missing_columns)]), notes


def _make_object(
    annotation: Entry,
    modal: Mask,
    amodal: Mask | None,
    mask_notes: Sequence[Note],
    options: _ReadOptions,
) -> ObjectRecord:
    """The object of an annotation with these masks, with notes where its fields contradict them.

    Raises RecordError for a flag that cannot be read.
    """
    notes = list(mask_notes)
    num_outside = 0 if amodal is None else masks.area(modal & ~amodal)
    if num_outside:
        what = f"{num_outside} visible pixels outside the amodal mask were added to it"
        notes.append(annotation.note(what))

    fields = mask_fields(modal, amodal)
    rate = fields.get("occlude_rate", 0.0)
    stored_rate = annotation.get("occlude_rate")
    if isinstance(stored_rate, int | float) and abs(stored_rate - rate) > RATE_TOLERANCE:
        what = f"occlude_rate {stored_rate:.3f} is stored, but the masks give {rate:.3f} (used)"
        notes.append(annotation.note(what))

    if is_id(annotation.get("id")):
        fields["source_id"] = annotation.get("id")
    for key in options.preset.copied:
        if is_id(annotation.get(key)):
            fields[key] = annotation.get(key)
    ignored_by = annotation.flag_that_ignores(crowds_are_objects=options.crowds == "objects")
    return ObjectRecord(
        category=annotation.get("name"), fields=fields, notes=tuple(notes), ignored_by=ignored_by
    )


def _compare_order(
    image: Entry, objects: Sequence[tuple[Entry, ObjectRecord]], order: str
) -> Iterator[Note]:
    """A note if objects overlap in another order than the one that the file states.

    `order` is the field of the depth order. Nothing is compared unless all objects have it; none
    has "", that of formats without an order.
    """
    if not all(order in object_record.fields for _, object_record in objects):
        return
    num_overlapping = 0
    wrong_pairs = []
    for (entry_a, a), (entry_b, b) in combinations(objects, 2):
        # Where the complete masks of two objects overlap, the nearer one is visible.
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
    """How many pixels of an object are visible inside the complete mask of another one.

    `fields` and `other` are the fields of the two (`mask_fields`).
    """
    modal = fields.get("visible_mask", fields["segmentation"])
    return masks.areas([masks.intersect(modal, other["segmentation"])])[0]
