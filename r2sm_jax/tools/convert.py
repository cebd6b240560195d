"""`data convert FORMAT`: annotation files of other projects become one dataset file.

How a file becomes training queries, for COCOA as an example:

1. `read_coco` (data/readers/coco.py) reads it and yields an `ImageTruth` for each image.
2. `Collector` (data/collector.py) counts the records that cannot be used.
3. `template_queries` (tools/queries.py) writes queries about the objects, since COCOA has none.
4. `write` (data/dataset.py) checks all and writes the dataset file, which training reads.

A new format is a reader (data/readers/), and a command here that passes it to `convert`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonpath
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from r2sm_jax.config import Crowds
from r2sm_jax.data.collector import Collector, check_share
from r2sm_jax.data.dataset import ImageTruth, read_json, write
from r2sm_jax.data.images import find_image, image_folders
from r2sm_jax.data.readers import (
    COCOOptions,
    Kind,
    R2SMFields,
    json_files,
    read_coco,
    read_corrected,
    read_lisa_plus_plus,
    read_mask_folders,
    read_mmr,
    read_r2sm,
    read_reasonseg,
    read_refcoco,
    read_yolo,
)
from r2sm_jax.data.split_summary import review
from r2sm_jax.data.validation import LISTS
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.query import MaskType
from r2sm_jax.tools.queries import template_queries

COCO_KINDS: dict[Kind, str] = {
    "coco": "COCO instances and alike: visible masks alone, so all queries are modal.",
    "cocoa": "Original COCOA: one flat amodal polygon a region, RLE only where it is occluded.",
    "cocoa-cls": "COCOA-cls: COCO with amodal `segmentation` and `visible_mask` as RLE.",
    "d2sa": "D2SA: objects may reach out of the image; several files are merged.",
    "kins": "KINS, old (`segmentation`, `inmodal_seg`) and of 2020 (`a_segm`, `i_segm`).",
    # MUVA's files are not published, so COCO's layout is a guess.
    "muva": "MUVA, or any other COCO-like file: name the fields of the two masks.",
}


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class Files:
    """Files to read and to write."""

    out: Path
    """The dataset file to write, such as cocoa/train.json."""
    images: Path | None = None
    """Folder of the images. By default they are beside an annotation file or in its `images`."""
    overwrite: bool = False
    """Replace the dataset file if it exists."""
    polygons: bool = False
    """Write masks as polygons, for tools that read no RLE."""
    max_bad: float = 0.01
    """Share of the records that may be bad, 0 to 1. Bad ones are left out; if there are more,
    nothing is written."""
    sources: Positional[tuple[Path, ...]] = ()
    """Annotation files; for formats with one file an image also folders of them."""


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class TemplateOptions:
    """Queries to write, for files without any."""

    queries: int = 8
    """How many queries to write for an image, from the grammar of the scenes; 0 for none."""
    seed: int = 0
    """Another seed gives other queries."""


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class MaskOptions:
    """How to read masks."""

    oversize: Literal["refuse", "crop"] = "refuse"
    """What to do if masks are larger than their image."""
    amodal_field: str | None = None
    """Field of an annotation with the complete mask, if it is not the format's own."""
    visible_field: str | None = None
    """Field of an annotation with the visible mask; fully visible if it is missing."""
    crowds: Crowds = "ignore"
    """Whether `iscrowd` 1 marks a region to ignore, as in COCO, or an object.

    It is an object in files of CVAT and Datumaro, which mark each mask that was drawn with a brush.
    """
    min_score: float = 0.0
    """Annotations with a lower score are left out."""


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class FolderNames:
    """Names of the folders below a source."""

    pictures: tuple[str, ...] = ("occlusion", "images")
    """Folder of the images, if --images does not name it; the first that exists."""
    whole: str = "whole_mask"
    """Folder of the complete masks."""
    visible: str = "visible_object_mask"
    """Folder of the visible masks."""


# Readers of files and folders


def read_coco_files(
    files: Files, options: COCOOptions, collector: Collector
) -> Iterator[ImageTruth]:
    """Reads COCO files, or folders of files of original COCOA.

    Where ids of images collide with those of an earlier file, as those of D2SA's training files do,
    all of the file are shifted past them; of two annotators of one image of COCOA the first counts.
    """
    used: set[int] = set()
    for path in json_files(files.sources):
        try:
            truths = list(read_coco(path, files.images, options, collector))
        except InputError as error:
            if path in files.sources:
                raise
            collector.note(str(path), f"left out: {error}")  # a folder may hold other files
            continue
        ids = {truth.image_id for truth in truths}
        shift = 0
        if options.kind == "cocoa":
            for image_id in sorted(ids & used):
                collector.note(f"{path}: image {image_id}", "left out, it has been read before")
            truths = [truth for truth in truths if truth.image_id not in used]
        elif ids & used:
            shift = max(used) + 1 - min(ids)
            collector.note(str(path), f"its image ids collide; {shift} was added to each")
        used.update(image_id + shift for image_id in ids)
        folders = image_folders(path, files.images)
        for truth in truths:
            yield with_path(replace(truth, image_id=truth.image_id + shift), folders)


def read_folders(files: Files, names: FolderNames, collector: Collector) -> Iterator[ImageTruth]:
    """Reads folders that hold images, complete masks and visible masks in three folders, as
    pix2gestalt's (cvlab-columbia/pix2gestalt ldm/data/simple.py)."""
    for source in files.sources:
        folders = [source / name for name in names.pictures]
        folder = files.images or next((path for path in folders if path.is_dir()), folders[0])
        whole, visible = source / names.whole, source / names.visible
        for truth in read_mask_folders(folder, visible, whole, collector):
            yield with_path(truth, [folder])


# Commands


def coco_command(kind: Kind) -> Callable[..., None]:
    """The command of a COCO-like format."""

    def command(files: Files, options: MaskOptions, template: TemplateOptions) -> None:
        coco = COCOOptions(
            kind,
            options.amodal_field,
            options.visible_field,
            crop=options.oversize == "crop",
            crowds_are_objects=options.crowds == "objects",
            min_score=options.min_score,
        )
        convert(files, kind, lambda collector: read_coco_files(files, coco, collector), template)
        if kind == "coco":
            print(
                "only visible masks are known, so all queries are modal; for complete shapes train "
                f"with --data.source compose:{files.sources[0]}, or complete the masks: data "
                f"complete {files.sources[0]} --images DIR --out FILE"
            )

    command.__doc__ = COCO_KINDS[kind]
    return command


def mask_folders(files: Files, names: FolderNames, template: TemplateOptions) -> None:
    """Folders of images and of masks, one PNG an object; pix2gestalt's layout by default."""
    convert(files, "folders", lambda collector: read_folders(files, names, collector), template)


def mmr(files: Files) -> None:
    """MMR: questions about objects and parts, several targets each; visible masks.

    Of a file with "train" in its name, questions are left out whose text answer has another number
    of `{seg}` than answers, as in MMR's own loader.
    """
    convert_questions(files, "mmr", read_mmr)


def reasonseg(files: Files, explanatory: Path | None = None) -> None:
    """ReasonSeg: X.json beside X.jpg; ignore regions are preserved; visible masks.

    Args:
        explanatory: explanatory/train.json, for textual answers.
    """
    convert_questions(files, "reasonseg", read_reasonseg, explanatory)


def lisa_plus_plus(files: Files) -> None:
    """LISA++ (ReasonSeg-Inst): questions with polygons for each instance id; visible masks."""
    convert_questions(files, "lisa++", read_lisa_plus_plus)


def refcoco(files: Files, instances: Path, split: str = "train") -> None:
    """RefCOCO, RefCOCO+, RefCOCOg (refs(...).p, plain data only), gRefCOCO (grefs(...).json);
    visible masks.

    Args:
        instances: COCO's instances.json.
        split: The split to take; test is testA and testB.
    """
    convert_questions(files, "refcoco", read_refcoco, instances, split)


def r2sm(
    files: Files,
    fields: R2SMFields,
    over: Path | None = None,
    mask_type: MaskType | None = None,
) -> None:
    """R2SM's text queries, joined to a converted dataset file or with masks of their own.

    PATH are files of queries: a JSON list, or one JSON object a line (.jsonl). Instances are given
    as ids or named in the answer; ids are the annotations' `source_id`, or their `id`. `--images`
    changes nothing with --over.

    Args:
        fields: Names of the fields.
        over: The dataset file with the images and annotations; its own queries are left out.
            Without it each query names its image file and holds its masks.
        mask_type: For files that hold one mask type only.
    """
    if over is None:
        convert_questions(files, "r2sm", read_r2sm, None, fields, mask_type)
        return
    info = read_json(over, need_images=False).file.info or {}
    names = ", ".join(path.name for path in files.sources)

    def read(collector: Collector) -> Iterator[ImageTruth]:
        truths = read_coco(over, collector=collector)
        return read_r2sm(files.sources, None, collector, truths, fields, mask_type)

    convert(files, "r2sm", read, info={**info, "queries": names})


def yolo(files: Files, template: TemplateOptions, split: str = "train") -> None:
    """YOLO's segmentation labels: data.yaml, and a text file an image; visible masks.

    Args:
        split: The split to take: train, val or test.
    """
    file = only_source(files)
    convert(files, "yolo", lambda found: read_yolo(file, files.images, split, found), template)


def only_source(files: Files) -> Path:
    """The one file to read. Raises InputError if there is another number of them."""
    if len(files.sources) != 1:
        raise InputError(f"convert: {len(files.sources)} files are given; give one")
    return files.sources[0]


def corrected(files: Files, over: Path) -> None:
    """A draft of data complete that comes back from an annotation tool.

    What people drew is the complete mask; the visible mask is that of the draft, unless FILE has
    another one. Objects are matched by their ids, or else by their overlap.

    Args:
        over: The draft, whose images, ids and other fields stay.
    """
    file = only_source(files)
    counts: Counter[str] = Counter()

    def read(collector: Collector) -> Iterator[ImageTruth]:
        for truth in read_corrected(file, over, files.images, collector, counts):
            yield truth if files.images is None else with_path(truth, [files.images])

    convert(files, "corrected", read, info={"corrected": file.name})
    what_happened = ("kept", "changed", "added", "dropped")
    print(", ".join(f"{counts[word]} {word}" for word in what_happened))


FORMATS: dict[str, Callable[..., None]] = {
    **{kind: coco_command(kind) for kind in COCO_KINDS},
    "folders": mask_folders,
    "mmr": mmr,
    "reasonseg": reasonseg,
    "lisa++": lisa_plus_plus,
    "refcoco": refcoco,
    "r2sm": r2sm,
    "yolo": yolo,
    "corrected": corrected,
}
"""The command of each format by its name."""


def convert_questions(
    files: Files, name: str, read: Callable[..., Iterator[ImageTruth]], *options: Any
) -> None:
    """Converts questions whose images are in --images, or beside the first file."""

    def read_with_paths(collector: Collector) -> Iterator[ImageTruth]:
        first = files.sources[0]
        folder = files.images or (first if first.is_dir() else first.parent)
        for truth in read(files.sources, folder, collector, *options):
            yield with_path(truth, [folder])

    convert(files, name, read_with_paths)


def convert(
    files: Files,
    name: str,
    read: Callable[[Collector], Iterable[ImageTruth]],
    template: TemplateOptions = TemplateOptions(queries=0),
    info: Mapping[str, Any] | None = None,
) -> None:
    """Writes the dataset file of what a reader yields, and says what was left out and noted.

    Raises InputError if there is nothing to read, too much of it is bad, the output cannot be
    written, or most images share their file with another.
    """
    if not files.sources:
        raise InputError("convert: there is nothing to read; give annotation files")
    check_share(files.max_bad)
    if template.queries < 0 or template.seed < 0:
        raise InputError("convert: --queries and --seed cannot be negative; give 0 or more")
    refuse_overwrite(files.out, files.overwrite)
    sources = ", ".join(path.name for path in files.sources)
    collector = Collector()
    truths, image_folder = with_relative_names(list(read(collector)), files.out)
    collector.check(files.max_bad)
    if not truths:
        collector.print()
        raise InputError(f"{sources}: there are no annotated images in it; is it of this format?")
    note_oddities(truths, sources, collector)
    if template.queries and not any(truth.queries for truth in truths):
        for index, truth in enumerate(truths):
            queries = template_queries(truth, template.queries, template.seed)
            truths[index] = replace(truth, queries=tuple(queries))
        if not any(truth.queries for truth in truths):
            collector.note(sources, "no query could be written; name the classes")
    collector.print()
    kept = collector.other
    info = {
        **kept.get("info", {}),
        **(info or {"description": f"converted from {name}: {sources}"}),
    }
    records = write(
        files.out, truths, info, collector.categories, files.overwrite, kept, files.polygons
    )

    counts = ", ".join(f"{len(records[key])} {key}" for key in LISTS)
    types = Counter(query["mask_type"] for query in records["queries"])
    print(f"wrote {files.out}: {counts} ({types['modal']} modal, {types['amodal']} amodal)")
    if image_folder != files.out.resolve().parent:
        flag = f"--data.images {image_folder}"
        print(f"the images are not below {files.out.parent}; pass {flag} with the dataset")


def note_oddities(truths: list[ImageTruth], source: str, collector: Collector) -> None:
    """Notes what the author of the files may not have meant. Raises InputError as `review`."""
    summary = review(source, truths, collector)
    if summary.num_ignored:
        collector.note(source, summary.ignored())
    if summary.num_complete and not summary.num_occluded:
        what = f"nothing of the {summary.num_complete} objects is hidden; check the fields"
        collector.note(source, what)


def with_path(truth: ImageTruth, folders: Sequence[Path]) -> ImageTruth:
    """An image with the path of its file in the folders as its name, if the file is there."""
    path = find_image(folders, truth.file_name)
    return truth if path is None else replace(truth, file_name=str(path.resolve()))


def with_relative_names(truths: list[ImageTruth], out: Path) -> tuple[list[ImageTruth], Path]:
    """Makes paths of image files relative to one folder, and returns that folder too.

    It is the folder of the dataset file `out`, in which a `Dataset` looks by default, or if an
    image does not lie below it, the nearest folder above all images.
    """
    paths = [Path(truth.file_name) for truth in truths]
    parents = [path.parent for path in paths if path.is_absolute()]
    folder = out.resolve().parent
    if not all(parent.is_relative_to(folder) for parent in parents):
        folder = Path(commonpath(parents))
    names = [path.relative_to(folder) if path.is_absolute() else path for path in paths]
    pairs = zip(truths, names, strict=True)
    return [replace(truth, file_name=name.as_posix()) for truth, name in pairs], folder
