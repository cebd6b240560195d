"""`data complete`: visible masks of any system become a dataset file with complete ones.

1. A reader goes through the file or the folder and gives a `Draft`: images, categories, and for
   each object an annotation whose mask is the visible one. A bad annotation is noted.
2. `check_records` checks the draft before any time is spent.
3. `complete_image` completes all objects of an image in one batch. Each sees the visible masks of
   all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import UInt8
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import mask_fields
from r2sm_jax.data.crops import others_of
from r2sm_jax.data.images import IMAGE_SUFFIXES, image_folders, open_annotated
from r2sm_jax.data.validation import BoxComparison, check_records, is_id, is_ignored
from r2sm_jax.errors import InputError, load_json, refuse_overwrite
from r2sm_jax.progress import show_progress
from r2sm_jax.tools.convert import print_notes
from r2sm_jax.tools.entries import (
    BadRecord,
    Entry,
    Note,
    RecordError,
    Size,
    group_by_reason,
    index_by_id,
    read_mask,
)
from r2sm_jax.tools.folders import category_of, find_image_key, list_files, read_mask_file
from r2sm_jax.tools.records import ImageRecord, make_image, write_json

if TYPE_CHECKING:
    # It loads JAX. The other data commands need none, and a slip in a flag should be told at once.
    from r2sm_jax.inference.crop_models import MaskCompleter

MIN_OCCLUDER_SHARE = 0.1
"""Of the added part: an object whose visible mask covers as much of it hides the object."""
HIDDEN_FROM = 0.01
"""Share of the complete mask: less than this is the rounding of two masks."""
NO_NAME = "object"
"""The class of objects whose class is not known. No query names it."""
REPLACED = ("bbox", "area", "segmentation", "visible_mask", "invisible_mask", "occlude_rate")
"""Fields of an annotation that completing makes anew."""


@dataclass
class Draft:
    """What a reader found: the records of a dataset file with visible masks."""

    images: dict[Any, ImageRecord] = field(default_factory=dict)
    """By the id in the source."""
    categories: list[dict[str, Any]] = field(default_factory=list)
    annotations: dict[Any, list[dict[str, Any]]] = field(default_factory=dict)
    """By the image's id. `segmentation` is the visible mask as an RLE; crowds and ignored regions
    are as they are in the source."""
    queries: list[dict[str, Any]] = field(default_factory=list)
    info: Mapping[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    boxes: BoxComparison = field(default_factory=BoxComparison)
    """Compares the boxes and areas in the source with the masks that were read."""

    def add(self, image_id: Any, annotation: dict[str, Any]) -> None:
        self.annotations.setdefault(image_id, []).append(annotation)

    def to_records(self) -> dict[str, Any]:
        """The records of a dataset file. Queries about annotations that were left out are left
        out."""
        images = []
        for image_id, image in self.images.items():
            height, width = image.size
            images.append(
                {"id": image_id, "file_name": image.file_name, "height": height, "width": width}
            )
        annotations = [a for of_image in self.annotations.values() for a in of_image]
        ids = {annotation["id"] for annotation in annotations}
        queries = [query for query in self.queries if not _lacks_targets(query, ids)]
        return {
            "images": images,
            "annotations": annotations,
            "categories": self.categories,
            "queries": queries,
            "info": dict(self.info),
        }


@dataclass(frozen=True)
class ReadOptions:
    """What the readers need besides their file."""

    images_dir: Path
    annotations: Path | None = None
    """The COCO file with the images and categories of results."""
    min_score: float = 0.0
    crowds_are_objects: bool = False


def _lacks_targets(query: dict[str, Any], ids: set[int]) -> bool:
    """Whether a query means annotations that are not among those with these ids."""
    targets = query.get("instance_ids")
    return isinstance(targets, list) and any(is_id(k) and k not in ids for k in targets)


def complete(
    source: Positional[Path],
    /,
    out: Path,
    images: Path | None = None,
    model: str = "photos-small",
    annotations: Path | None = None,
    min_score: float = 0.0,
    crowds: Literal["keep", "objects"] = "keep",
    max_bad: float = 0.1,
    overwrite: bool = False,
) -> None:
    """Completes the visible masks of a data set: an amodal draft of it, with the ids that it has.

    Args:
        source: A COCO instances file, a COCO results file, or a folder of mask PNGs, named
            IMAGE/anything.png or IMAGE_1.png after the image.
        out: The dataset file to write.
        images: Folder of the images.
        model: A model that has a completer: an export, a released model, or the run folder of a
            completer.
        annotations: For a results file: the COCO file with its images and categories; default: an
            image is the file in --images that is named as its id.
        min_score: Results with a lower score are left out.
        crowds: What `iscrowd` 1 marks: a region to keep as it is, or an object, as in files of
            supervision and CVAT.
        max_bad: Share of the annotations that may be bad, 0 to 1. Bad ones are left out and listed;
            if there are more, nothing is written.
        overwrite: Replace the dataset file if it exists.
    """
    if images is None:
        raise InputError("--images: completing looks at the images; give their folder")
    if not images.is_dir():
        raise InputError(f"--images {images}: there is no such folder; give that of the images")
    if not 0 <= max_bad <= 1:
        raise InputError(f"--max-bad {max_bad}: this is not a share; give 0 to 1")
    refuse_overwrite(out, overwrite)

    from r2sm_jax.inference.crop_models import open_completer  # loads JAX

    completer = open_completer(model)

    options = ReadOptions(images, annotations, min_score, crowds == "objects")
    draft = read_source(source, options)
    refuse_too_many_bad(source, draft, max_bad)
    check_records(source, draft.to_records())
    complete_draft(draft, completer, str(source))
    refuse_too_many_bad(source, draft, max_bad)
    print_notes(draft.notes)

    draft.info = {**draft.info, "description": f"{source.name}, completed by {model}"}
    write_json(out, draft.to_records(), overwrite)
    print(f"wrote {out}: {summary(draft)}")
    beside_out = [folder.resolve() for folder in image_folders(out, None)]
    if images.resolve() not in beside_out:
        print(f"the images are in {images}; pass --data.images {images} with the dataset")


def summary(draft: Draft) -> str:
    """How many objects were completed, and how much is hidden of them."""
    annotations = draft.to_records()["annotations"]
    rates = [a["occlude_rate"] for a in annotations if "occluded_by" in a]
    hidden = [rate for rate in rates if rate >= HIDDEN_FROM]
    text = f"{len(rates)} objects completed in {len(draft.images)} images"
    if hidden:
        text += (
            f", {len(hidden)} of them larger now by {HIDDEN_FROM:.0%} and more, hidden by "
            f"{np.mean(hidden):.0%} on average"
        )
    if len(annotations) > len(rates):
        text += f"; {len(annotations) - len(rates)} crowds or ignored regions kept as they are"
    return text


def refuse_too_many_bad(source: Path, draft: Draft, max_bad: float) -> None:
    """Raises InputError if there is nothing to complete, or more than this share is bad."""
    bad = [note for note in draft.notes if isinstance(note, BadRecord)]
    num_records = len(bad) + sum(map(len, draft.annotations.values()))
    if not num_records:
        raise InputError(f"{source}: there are no masks to complete in it; give another file")
    if len(bad) > max_bad * num_records:
        first, *others = group_by_reason(bad)[0]
        raise InputError(
            f"{first} ({1 + len(others)} of {num_records} annotations are bad for this reason, "
            f"{len(bad)} in all; --max-bad {max_bad:g} allows {int(max_bad * num_records)})"
        )
    annotations = draft.to_records()["annotations"]
    if all(is_ignored(annotation) for annotation in annotations):
        raise InputError(
            f"{source}: all {len(annotations)} annotations are crowds or ignored regions, which "
            "are not completed; if crowds are objects there, pass --crowds objects"
        )


# Reading


def read_source(source: Path, options: ReadOptions) -> Draft:
    """Reads a file or a folder of visible masks. Raises InputError if it is none of the kinds."""
    is_results = False
    if source.is_dir():
        if options.annotations is not None:
            raise InputError(f"--annotations: {source} is a folder of masks; leave the flag out")
        draft = read_folder(source, options)
    else:
        content = load_json(source, "a COCO instances or results file")
        if isinstance(content, list):
            is_results = True
            draft = read_results(Entry(source, "", content), options)
        elif isinstance(content, dict) and "annotations" in content and "images" in content:
            if options.annotations is not None:
                raise InputError(
                    f"--annotations: {source} lists its images itself; leave the flag out"
                )
            draft = read_instances(Entry(source, "", content), options)
        else:
            raise InputError(
                f"{source}: this is neither a COCO instances file with 'images' and 'annotations' "
                "nor a list of COCO results; give one of them, or a folder of mask PNGs"
            )
    draft.info = {**draft.info, "source": source.name}
    for contradiction in draft.boxes.contradictions():
        # The boxes of a detector are not those of its masks, but those of annotations are.
        if contradiction.is_systematic and not is_results:
            raise InputError(f"{source}: {contradiction}")
        draft.notes.append(Note(str(source), str(contradiction)))
    return draft


def read_instances(file: Entry, options: ReadOptions) -> Draft:
    """Reads a COCO instances file. Where an annotation has a `visible_mask`, that is completed.

    Ids and all fields that completing does not make anew are kept.
    """
    draft = Draft(categories=_objects(file, "categories"), queries=_objects(file, "queries"))
    if isinstance(file.get("info"), dict):
        draft.info = file.get("info")
    images, bad_images = index_by_id(file.children("images", "image"))
    draft.notes += bad_images
    entries, bad_annotations = index_by_id(file.children("annotations", "annotation"))
    draft.notes += bad_annotations
    has_categories = bool(draft.categories)
    if not has_categories:
        draft.categories = [{"id": 1, "name": NO_NAME}]

    unusable: dict[int, str] = {}
    used = {entry.get("image_id") for entry in entries.values() if is_id(entry.get("image_id"))}
    for image_id, entry in images.items():
        try:
            # Images without annotations are kept, and need not be there.
            is_needed = image_id in used or _stated_size(entry) is None
            folder = options.images_dir if is_needed else None
            draft.images[image_id] = _listed_image(entry, image_id, folder)
        except RecordError as error:
            unusable[image_id] = error.bad_record.sentence

    for annotation_id, entry in entries.items():
        try:
            image_id = entry.require("image_id", int)
            if image_id in unusable:
                raise RecordError(BadRecord(str(entry), unusable[image_id]))
            image = entry.look_up("image_id", draft.images)
            if not _is_sure(entry, options.min_score):
                continue
            fields = {} if has_categories else {"category_id": 1}
            annotation = _read_annotation(entry, image.size, options, draft)
            draft.add(image_id, annotation | fields | {"id": annotation_id})
        except RecordError as error:
            draft.notes.append(error.bad_record)
    return draft


def read_results(file: Entry, options: ReadOptions) -> Draft:
    """Reads a COCO results file: a list of objects with `image_id` and `segmentation`.

    Results have no ids, so they are numbered from 1 in the order of the file. Without
    `options.annotations`, an image is the file whose name is its id, with or without zeros before
    it. Raises InputError if no result has a mask.
    """
    entries = [Entry(file.path, f"[{index}]", value) for index, value in enumerate(file.value)]
    if not any(entry.get("segmentation") is not None for entry in entries):
        raise InputError(
            f"{file}: none of the {len(entries)} results has a mask in 'segmentation'; give the "
            "results of a model that segments"
        )
    draft = Draft()
    find_result_image = _ImagesByName(options.images_dir)
    if options.annotations is not None:
        content = load_json(options.annotations, "the COCO file of the results")
        coco = Entry(options.annotations, "", content)
        listed, bad_images = index_by_id(coco.children("images", "image"))
        draft.notes += bad_images
        draft.categories = _objects(coco, "categories")
        find_result_image = _ListedImages(listed, options.images_dir)
    known_categories = {category.get("id") for category in draft.categories}

    image_ids: dict[Any, int] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            if not _is_sure(entry, options.min_score):
                continue
            key = entry.get("image_id")
            image = find_result_image(entry, key)
            # Tools that name an image by its file give strings, which are numbered.
            image_id = key if is_id(key) else image_ids.setdefault(key, len(image_ids) + 1)
            annotation = _read_annotation(entry, image.size, options, draft)
            category_id = annotation.get("category_id")
            if not is_id(category_id):
                category_id = 0
            if category_id not in known_categories:
                known_categories.add(category_id)
                draft.categories.append({"id": category_id, "name": NO_NAME})
            draft.images[image_id] = replace(image, id=image_id)
            ids = {"id": number, "image_id": image_id, "category_id": category_id}
            draft.add(image_id, annotation | ids)
        except RecordError as error:
            draft.notes.append(error.bad_record)
    return draft


class _ListedImages:
    """Finds the images of results in a COCO file."""

    def __init__(self, listed: Mapping[int, Entry], images_dir: Path):
        self.listed = listed
        self.images_dir = images_dir
        self.images: dict[int, ImageRecord] = {}

    def __call__(self, result: Entry, key: Any) -> ImageRecord:
        image = result.look_up("image_id", self.listed)
        if key not in self.images:
            self.images[key] = _listed_image(image, key, self.images_dir)
        return self.images[key]


class _ImagesByName:
    """Finds the images of results by their file name without its ending."""

    def __init__(self, images_dir: Path):
        self.images_dir = images_dir
        self.images: dict[Any, ImageRecord] = {}
        self.paths: dict[Any, Path] = {}
        for path in sorted(images_dir.rglob("*")):
            if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("."):
                self.paths.setdefault(path.stem, path)
                if path.stem.isdecimal():
                    self.paths.setdefault(int(path.stem), path)

    def __call__(self, result: Entry, key: Any) -> ImageRecord:
        if key is None:
            raise result.error(
                "it has no image_id, so its image is not known",
                "give each result one, or make a folder of mask PNGs, IMAGE/0.png",
            )
        if not isinstance(key, int | str) or key not in self.paths:
            raise result.error(
                f"no image in {self.images_dir} is named {key!r}, as its image_id",
                "give the COCO file with the names of the images as --annotations",
            )
        if key not in self.images:
            name = self.paths[key].relative_to(self.images_dir).as_posix()
            self.images[key] = make_image(result, [name], self.images_dir)
        return self.images[key]


def read_folder(folder: Path, options: ReadOptions) -> Draft:
    """Reads a folder of masks, one file an object: IMAGE/anything.png or IMAGE_1_red cup.png, where
    IMAGE is the image's name without its ending; words after it are the class.

    Images and annotations are numbered from 1 in the order of the names.
    """
    draft = Draft()
    images_dir = options.images_dir
    image_files, notes = list_files(images_dir)
    draft.notes += notes
    mask_files, notes = list_files(folder)
    draft.notes += notes

    category_ids: dict[str, int] = {}
    images: dict[str, ImageRecord] = {}
    for number, (key, path) in enumerate(sorted(mask_files.items()), start=1):
        entry = Entry(path, "", {})
        try:
            image_key = find_image_key(entry, key, image_files, images_dir)
            if image_key not in images:
                name = image_files[image_key].relative_to(images_dir).as_posix()
                image = make_image(entry, [name], images_dir, len(images) + 1)
                images[image_key] = image
            image = images[image_key]
            mask = read_mask_file(entry, path, image.size)
            if not mask.any():
                raise entry.error("its mask has no pixel", "correct it")
        except RecordError as error:
            draft.notes.append(error.bad_record)
            continue
        draft.images[image.id] = image
        name = category_of(key.removeprefix(image_key)) or NO_NAME
        annotation = {
            "id": number,
            "image_id": image.id,
            "category_id": category_ids.setdefault(name, len(category_ids) + 1),
            "segmentation": masks.encode(mask),
        }
        draft.add(image.id, annotation)
    draft.categories = [{"id": number, "name": name} for name, number in category_ids.items()]
    return draft


def _listed_image(entry: Entry, image_id: int, folder: Path | None) -> ImageRecord:
    """The image of an entry of a COCO file. Raises RecordError as `make_image`."""
    return make_image(entry, [entry.text("file_name")], folder, image_id, _stated_size(entry))


def _stated_size(image: Entry) -> Size | None:
    """The size that a file states for an image; None if the image file itself counts."""
    is_stated = image.get("height") is not None or image.get("width") is not None
    return image.size() if is_stated else None


def _objects(file: Entry, key: str) -> list[dict[str, Any]]:
    """The objects of a list in a file; none if there is no list."""
    values = file.get(key)
    return [value for value in values if isinstance(value, dict)] if values else []


def _is_sure(entry: Entry, min_score: float) -> bool:
    """Whether a result has at least this score, or none."""
    score = entry.get("score")
    return not isinstance(score, int | float) or score >= min_score


def _read_annotation(
    entry: Entry, size: Size, options: ReadOptions, draft: Draft
) -> dict[str, Any]:
    """An annotation with its visible mask as `segmentation`, or as it is if it is a crowd or an
    ignored region. Raises RecordError if its mask cannot be used or is empty.

    Args:
        draft: gets notes, and the comparison of the annotation's box with its masks.
    """
    key = entry.first_present(("visible_mask", "segmentation"))
    if key is None:
        raise entry.error("it has no segmentation", "give it a mask")
    mask, mask_notes = entry.mask(key, size)
    draft.notes += mask_notes
    if not mask.any():
        raise entry.error(f"its {key} has no pixel in the image", "correct it")
    rle = masks.encode(mask)
    rles = [rle]
    if key == "visible_mask" and entry.get("segmentation") is not None:
        complete_mask, _ = entry.mask("segmentation", size)
        rles.append(masks.encode(complete_mask))
    draft.boxes.add(entry.value, rles)

    annotation = dict(entry.value)
    attributes = annotation.get("attributes") or {}
    if not isinstance(attributes, dict) or not all(isinstance(v, str) for v in attributes.values()):
        del annotation["attributes"]
        draft.notes.append(entry.note("its attributes are not all strings and were left out"))
    if not entry.flag_that_ignores(options.crowds_are_objects):
        annotation["iscrowd"] = 0
        annotation = {name: v for name, v in annotation.items() if name not in REPLACED}
        annotation["segmentation"] = rle
    return annotation


# Completing


def complete_draft(draft: Draft, completer: "MaskCompleter", source: str) -> None:
    """Completes all objects of a draft, image by image. Those of an image that cannot be read are
    noted and left out."""
    with show_progress("completing the objects of images", len(draft.annotations)) as advance:
        for image_id, annotations in list(draft.annotations.items()):
            image = draft.images[image_id]
            try:
                assert image.path is not None  # the readers look for images with annotations
                pixels = open_annotated(image.path, image.size, source)
                draft.annotations[image_id] = complete_image(completer, pixels, annotations)
            except InputError as error:
                del draft.annotations[image_id]
                for annotation in annotations:
                    where = f"{source}: annotation {annotation['id']}"
                    draft.notes.append(BadRecord(where, str(error)))
            advance(1)


def complete_image(
    completer: "MaskCompleter",
    pixels: UInt8[np.ndarray, "H W 3"],
    annotations: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The annotations of one image with complete masks, and which object hides which.

    Crowds and ignored regions stay as they are, and count as objects that can hide others.
    """
    size = pixels.shape[0], pixels.shape[1]
    visible_masks = []
    for annotation in annotations:
        mask, _ = read_mask(annotation.get("visible_mask") or annotation["segmentation"], size)
        visible_masks.append(mask)
    visible_rles = [masks.encode(mask) for mask in visible_masks]
    neighbours = others_of(visible_masks)

    to_complete = [k for k, annotation in enumerate(annotations) if not is_ignored(annotation)]
    complete_masks = completer(
        pixels,
        [visible_masks[k] for k in to_complete],
        neighbours=[neighbours[k] for k in to_complete],
    )
    completed = [dict(annotation) for annotation in annotations]
    for k, complete_mask in zip(to_complete, complete_masks, strict=True):
        completed[k] |= mask_fields(visible_masks[k], complete_mask)
        completed[k]["visible_mask"] = visible_rles[k]

        others = {}
        for annotation, rle in zip(annotations, visible_rles, strict=True):
            if annotation is not annotations[k]:
                others[annotation["id"]] = rle
        added = masks.encode(complete_mask & ~visible_masks[k])
        completed[k]["occluded_by"] = find_occluders(added, others)
    return completed


def find_occluders(added: masks.RLE, others: Mapping[int, masks.RLE]) -> list[int]:
    """The ids of the objects that hide another one: their visible masks cover at least a tenth of
    what was added to it. The one that covers most stands first."""
    (num_added,) = masks.areas([added])
    if not num_added:
        return []
    overlaps = masks.areas([masks.intersect(added, rle) for rle in others.values()])
    shares = {key: n / num_added for key, n in zip(others, overlaps, strict=True)}
    occluders = [key for key, share in shares.items() if share >= MIN_OCCLUDER_SHARE]
    return sorted(occluders, key=lambda key: -shares[key])
