"""`data convert FORMAT`: annotation files of other projects become one dataset file.

How a file becomes training queries, for COCOA as an example:

1. `read_coco_like` (coco.py) reads it and yields a `Record` for each image and each object.
2. `collect` (records.py) numbers and gathers the records, and counts those that are bad.
3. `add_template_queries` (template.py) writes queries about the objects, since COCOA has none.
4. `write_json` (records.py) checks all and writes the dataset file, which training reads.

A new format is a reader, a command here that passes its records to `convert`, and a line in
`FORMATS`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from r2sm_jax.data.dataset import read_records
from r2sm_jax.data.split_summary import CROWD_REMEDY, has_only_ignored
from r2sm_jax.data.validation import check_records, find_shared_files, is_ignored
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.query import MaskType
from r2sm_jax.tools.check import counts_of, find_repeated
from r2sm_jax.tools.coco import PRESETS, MaskOptions, Preset, read_coco_like
from r2sm_jax.tools.entries import Note, group_by_reason
from r2sm_jax.tools.folders import FolderNames, read_mask_folders
from r2sm_jax.tools.r2sm import R2SMFields, read_r2sm
from r2sm_jax.tools.records import Collector, Item, collect, write_json
from r2sm_jax.tools.referring import (
    read_lisa_plus_plus,
    read_mmr,
    read_reasonseg,
    read_refcoco,
)
from r2sm_jax.tools.template import add_template_queries

MAX_LOCATIONS = 20
"""How many locations are listed of records for which the same is noted."""


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class Files:
    """Files to read and to write."""

    out: Path
    """The dataset file to write, such as cocoa/train.json."""
    images: Path | None = None
    """Folder of the images. By default they are beside the annotation files, if needed."""
    overwrite: bool = False
    """Replace the dataset file if it exists."""
    max_bad: float = 0.01
    """Share of the records that may be bad, 0 to 1. Bad ones are left out; if there are more,
    nothing is written."""
    sources: Positional[tuple[Path, ...]] = ()
    """Annotation files; for formats with one file an image also folders of them."""


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class TemplateOptions:
    """Queries to write, for formats without any."""

    queries: int = 8
    """How many queries to write for an image, from the grammar of the scenes; 0 for none."""
    seed: int = 0
    """Another seed gives other queries."""


def coco_command(name: str, preset: Preset) -> Callable[..., None]:
    """The command of a COCO-like format."""

    def command(files: Files, options: MaskOptions, template: TemplateOptions) -> None:
        padded_dir = files.out.with_name(files.out.stem + "_padded")
        items = read_coco_like(
            files.sources, preset, options, images_dir=files.images, padded_dir=padded_dir
        )
        convert(files, name, items, template)

    command.__doc__ = preset.help
    return command


def coco(
    files: Files,
    template: TemplateOptions,
    crowds: Literal["ignore", "objects"] = "ignore",
) -> None:
    """COCO's own instances files, and any like them: visible masks alone, so all queries are modal.

    Args:
        crowds: Whether `iscrowd` 1 marks a region to ignore, as in COCO, or an object, as in files
            of CVAT and Datumaro.
    """
    items = read_coco_like(
        files.sources, PRESETS["coco"], MaskOptions(crowds=crowds), images_dir=files.images
    )
    convert(files, "coco", items, template)
    source = files.sources[0]
    print(
        "only visible masks are known, so all queries are modal; for complete shapes train with "
        f"--data.source compose:{source}, or complete the masks: data complete {source} --images "
        "DIR --out FILE"
    )


def folders(files: Files, names: FolderNames, template: TemplateOptions) -> None:
    """Folders of images and of masks, one PNG an object; pix2gestalt's layout by default."""
    items = read_mask_folders(files.sources, names, files.images)
    convert(files, "folders", items, template)


def mmr(files: Files) -> None:
    """MMR: questions about objects and parts, several targets each; visible masks.

    Of a file with "train" in its name, questions are left out whose text answer has another number
    of `{seg}` than answers, as in MMR's own loader.
    """
    convert(files, "mmr", read_mmr(files.sources, files.images))


def reasonseg(files: Files, explanatory: Path | None = None) -> None:
    """ReasonSeg: X.json beside X.jpg; ignore regions are preserved; visible masks.

    Args:
        explanatory: explanatory/train.json, for textual answers.
    """
    convert(files, "reasonseg", read_reasonseg(files.sources, explanatory, files.images))


def lisa_plus_plus(files: Files) -> None:
    """LISA++ (ReasonSeg-Inst): questions with polygons for each instance id; visible masks."""
    convert(files, "lisa++", read_lisa_plus_plus(files.sources, files.images))


def refcoco(files: Files, instances: Path, split: str = "train") -> None:
    """RefCOCO, RefCOCO+, RefCOCOg (refs(...).p, plain data only), gRefCOCO (grefs(...).json);
    visible masks.

    Args:
        instances: COCO's instances.json.
        split: The split to take; test is testA and testB.
    """
    convert(files, "refcoco", read_refcoco(files.sources, instances, split, files.images))


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
    check_arguments(files)
    if over is None:
        items = read_r2sm(files.sources, None, fields, mask_type, files.images)
        convert(files, "r2sm", items)
        return
    records = read_records(over)
    info = records.get("info")
    names = ", ".join(path.name for path in files.sources)
    records["info"] = {**(info if isinstance(info, dict) else {}), "queries": names}
    items = read_r2sm(files.sources, records, fields, mask_type)
    convert(files, "r2sm", items, dataset=records)


FORMATS: dict[str, Callable[..., None]] = {
    "coco": coco,
    **{name: coco_command(name, preset) for name, preset in PRESETS.items() if preset.amodal},
    "folders": folders,
    "mmr": mmr,
    "reasonseg": reasonseg,
    "lisa++": lisa_plus_plus,
    "refcoco": refcoco,
    "r2sm": r2sm,
}
"""The command of each format by its name."""


def convert(
    files: Files,
    name: str,
    items: Iterable[Item],
    template: TemplateOptions = TemplateOptions(queries=0),
    dataset: dict[str, Any] | None = None,
) -> None:
    """Writes the dataset file of what a reader yields, and says what was left out and noted.

    `items` is a generator, so nothing is read before the arguments are checked. `dataset` is a
    dataset file whose queries are replaced.
    """
    check_arguments(files)
    if template.queries < 0 or template.seed < 0:
        raise InputError("convert: --queries and --seed cannot be negative; give 0 or more")

    collector = collect(items, files.max_bad, dataset)
    num_bad = len(collector.bad_records)
    if num_bad:
        what = f"{num_bad} of {collector.num_records} records cannot be used and were left out"
        print(f"note: {what}", file=sys.stderr)
    print_notes(collector.bad_records)
    print_notes(collector.notes)

    image_folder = collector.make_file_names_relative(files.out)
    sources = ", ".join(path.name for path in files.sources)
    records = collector.to_records(f"converted from {name}: {sources}")
    if template.queries:
        # The template opens a `Dataset`, whose records must be checked. `write_json` checks the new
        # queries too.
        check_records(files.out, records)
        add_template_queries(files.out, records, template.queries, template.seed)
        if not records["queries"]:
            remedy = "name the classes, or write queries with `data queries requests`"
            print(f"note: no query could be written; {remedy}", file=sys.stderr)
    print_notes(notes_on_all_records(collector, records, ", ".join(map(str, files.sources))))
    write_json(files.out, records, files.overwrite)
    types = Counter(query["mask_type"] for query in records["queries"])
    counts = f"{types['modal']} modal, {types['amodal']} amodal"
    print(f"wrote {files.out}: {counts_of(records)} ({counts})")
    if image_folder != files.out.resolve().parent:
        flag = f"--data.images {image_folder}"
        print(f"the images are not below {files.out.parent}; pass {flag} with the dataset")


def notes_on_all_records(
    collector: Collector, records: Mapping[str, Any], sources: str
) -> Iterator[Note]:
    """Yields notes on what the author of the converted files may not have meant.

    Raises InputError if most images share their file with another one.
    """
    for contradiction in find_shared_files([image["file_name"] for image in records["images"]]):
        if contradiction.is_systematic:
            raise InputError(f"{sources}: {contradiction}")
        yield Note(sources, str(contradiction))

    num_objects = len(collector.annotations)
    num_ignored = collector.num_ignored.total()
    if num_ignored:
        causes = ", ".join(f"{n} by {flag}" for flag, n in collector.num_ignored.items())
        sentence = f"{num_ignored} of {num_objects} objects are ignored in training and metrics"
        sentence += f" ({causes})"
        if collector.num_ignored["iscrowd"] >= num_objects / 2:
            sentence += f"; {CROWD_REMEDY}"
        yield Note(sources, sentence)

    rates = [a["occlude_rate"] for a in collector.annotations if "occlude_rate" in a]
    if rates and not any(rates):
        sentence = f"no pixel of the {len(rates)} objects is hidden; check the names of the fields"
        yield Note(sources, sentence)

    for sentence in find_repeated(records):
        yield Note(sources, sentence)

    ignored_ids = {a["id"] for a in records["annotations"] if is_ignored(a)}
    num_useless = 0
    for query in records["queries"]:
        num_useless += has_only_ignored(query["instance_ids"], ignored_ids)
    if num_useless:
        sentence = f"{num_useless} of {len(records['queries'])} queries mean ignored objects only"
        yield Note(sources, f"{sentence}, so that nothing is learnt or scored there")


def check_arguments(files: Files) -> None:
    """Raises InputError if there is nothing to read, or the output cannot be written."""
    if not files.sources:
        raise InputError("convert: there is nothing to read; give annotation files")
    refuse_overwrite(files.out, files.overwrite)


def print_notes(notes: Iterable[Note]) -> None:
    """Prints one line for each reason, with the locations of the other records."""
    for first, *others in group_by_reason(notes):
        line = f"note: {first}"
        if others:
            locations = ", ".join(note.location for note in others[:MAX_LOCATIONS])
            more = ", ..." if len(others) > MAX_LOCATIONS else ""
            line += f" (and {len(others)} more: {locations}{more})"
        print(line, file=sys.stderr)
