"""`python -m r2sm_jax.data convert FORMAT ...`: one command for each format of annotations."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional
from tyro.extras import SubcommandApp

from r2sm_jax.data.records import read_records
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.query import MaskType
from r2sm_jax.tools.answers import AMODAL_QA, R2SM, AmodalQAFields, R2SMFields, join_queries, read_amodal_qa
from r2sm_jax.tools.coco import PRESETS, Oversize, Preset, read_coco_like
from r2sm_jax.tools.conversion import Conversion, write_json
from r2sm_jax.tools.referring import read_lisa_plus_plus, read_mmr, read_reasonseg, read_refcoco
from r2sm_jax.tools.template import add_template_queries

app = SubcommandApp()
NOTES_SHOWN = 20


@dataclass(frozen=True)
class Output:
    """What to write."""

    out: Path
    """The dataset file to write, such as cocoa/train.json."""
    images: Path | None = None
    """Folder of the images; by default where the format has them, if they are needed."""
    overwrite: bool = False
    """Replace the dataset file if it exists."""


@dataclass(frozen=True)
class Files(Output):
    """What to read and to write."""

    sources: Positional[tuple[Path, ...]] = ()
    """Annotation files; for formats with one file an image also folders of them."""


@dataclass(frozen=True)
class MaskOptions:
    """How to read masks, and which queries to write."""

    oversize: Oversize = "refuse"
    """Where masks are larger than their image: crop them to it, or pad the image (a copy beside --out)."""
    amodal_field: str | None = None
    """Field of an annotation with the complete mask, if it is not the format's own."""
    visible_field: str | None = None
    """Field of an annotation with the visible mask; fully visible where it is missing."""
    queries: int = 8
    """How many queries to write for an image, from the grammar of the scenes; 0 for none."""
    seed: int = 0
    """Another seed gives other queries."""


IO = Annotated[Files, OmitArgPrefixes]


def _add_coco_command(name: str, preset: Preset) -> None:
    def command(files: IO, options: Annotated[MaskOptions, OmitArgPrefixes] = MaskOptions()) -> None:
        if options.queries < 0 or options.seed < 0:
            raise InputError("convert: --queries and --seed cannot be negative; give 0 or more")
        fields = {"amodal": options.amodal_field, "modal": options.visible_field}
        layout = replace(preset, **{key: (field,) for key, field in fields.items() if field is not None})
        padded_dir = files.out.with_name(files.out.stem + "_padded")
        read = partial(read_coco_like, preset=layout, oversize=options.oversize, padded_dir=padded_dir)
        _convert(files, read, name, options)

    command.__doc__ = preset.about
    app.command(name=name)(command)


for _name, _preset in PRESETS.items():
    _add_coco_command(_name, _preset)


@app.command
def mmr(files: IO) -> None:
    """MMR: questions about objects and parts, several targets each; visible masks."""
    _convert(files, read_mmr, "MMR")


@app.command
def reasonseg(files: IO, explanatory: Path | None = None) -> None:
    """ReasonSeg: X.json beside X.jpg; ignore regions are kept as such; visible masks.

    Args:
        files: What to read and to write.
        explanatory: explanatory/train.json, for textual answers.
    """
    _convert(files, partial(read_reasonseg, explanatory=explanatory), "ReasonSeg")


@app.command(name="lisa++")
def lisa_plus_plus(files: IO) -> None:
    """LISA++ instance annotations; visible masks."""
    _convert(files, read_lisa_plus_plus, "LISA++")


@app.command
def refcoco(
    refs: Positional[Path], /, instances: Path, output: Annotated[Output, OmitArgPrefixes], split: str = "train"
) -> None:
    """RefCOCO, RefCOCO+, RefCOCOg, gRefCOCO; visible masks.

    Args:
        refs: refs(unc).p and the like (plain data only), or grefs(unc).json.
        instances: COCO's instances.json.
        output: What to write.
        split: The split to take.
    """
    refuse_overwrite(output.out, output.overwrite)
    found = read_refcoco(refs, instances, split=split, images_dir=output.images)
    _write(found, output, f"{refs.name}, split {split}")


@app.command(name="amodal-qa")
def amodal_qa(files: IO, fields: AmodalQAFields = AMODAL_QA) -> None:
    """Questions with a textual answer and visible and amodal masks, as AmodalReasonSeg describes its own."""
    _convert(files, partial(read_amodal_qa, fields=fields), "amodal questions and answers")


@app.command
def r2sm(
    queries: Positional[Path],
    /,
    over: Path,
    out: Path,
    mask_type: MaskType | None = None,
    fields: R2SMFields = R2SM,
    overwrite: bool = False,
) -> None:
    """R2SM's text queries, joined to the dataset file that was converted from their images' annotations.

    Args:
        queries: A JSON list of queries, or one JSON object a line (.jsonl).
        over: The dataset file with the images and annotations; its own queries are left out.
        out: The dataset file to write.
        mask_type: For files that hold one mask type only.
        fields: Names of the fields.
        overwrite: Replace the dataset file if it exists.
    """
    refuse_overwrite(out, overwrite)
    records = read_records(over)
    records["queries"] = join_queries(queries, records, fields, mask_type)
    records["info"] = {**(records.get("info") or {}), "queries": queries.name}
    write_json(out, records, overwrite)
    _report(out, records)


def _convert(
    files: Files, read: Callable[..., Conversion], format_name: str, options: MaskOptions | None = None
) -> None:
    """Reads and writes; refuses what cannot succeed before anything is read."""
    if not files.sources:
        raise InputError("convert: there is nothing to read; give annotation files")
    refuse_overwrite(files.out, files.overwrite)
    _write(read(files.sources, images_dir=files.images), files, format_name, options)


def _write(found: Conversion, output: Output, origin: str, options: MaskOptions | None = None) -> None:
    """Writes the dataset file and prints what is in it."""
    elsewhere = found.name_images(output.out)
    records = found.records(f"converted from {origin}")
    if options and options.queries:
        add_template_queries(records, options.queries, options.seed)
    write_json(output.out, records, output.overwrite)
    for note in found.notes[:NOTES_SHOWN]:
        print(f"note: {note}", file=sys.stderr)
    if len(found.notes) > NOTES_SHOWN:
        print(f"note: and {len(found.notes) - NOTES_SHOWN} more like these", file=sys.stderr)
    _report(output.out, records)
    if elsewhere:
        print(f"the images are not below {output.out.parent}; pass {elsewhere} with the dataset")


def _report(out: Path, records: dict[str, Any]) -> None:
    types = Counter(query["mask_type"] for query in records["queries"])
    print(
        f"wrote {out}: {len(records['images'])} images, {len(records['annotations'])} annotations, "
        f"{len(records['categories'])} categories, {len(records['queries'])} queries "
        f"({types['modal']} modal, {types['amodal']} amodal)"
    )
