"""The benchmark tool-box: `python -m r2sm_jax.data convert|check|stats|show|queries|build ... --help`."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from tyro.conf import OmitArgPrefixes, Positional
from tyro.extras import SubcommandApp

from r2sm_jax.data import masks
from r2sm_jax.data.records import read_records
from r2sm_jax.data.samples import Instance, Sample, load_json_split
from r2sm_jax.data.sheet import Panel, save_sheet
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.query import MaskType, Query
from r2sm_jax.sources import open_source
from r2sm_jax.tools import referring
from r2sm_jax.tools.check import check
from r2sm_jax.tools.coco import PRESETS, Oversize, Preset, read_coco_like
from r2sm_jax.tools.conversion import Conversion, write_json
from r2sm_jax.tools.llm_queries import parse, requests
from r2sm_jax.tools.referring import AmodalQAFields, R2SMFields
from r2sm_jax.tools.stats import stats
from r2sm_jax.tools.template import add_template_queries, template

app, convert, queries = SubcommandApp(), SubcommandApp(), SubcommandApp()
app.command(convert, name="convert")
app.command(check)
app.command(stats)
app.command(queries, name="queries")
for command in (requests, parse, template):
    queries.command(command)
NOTES_SHOWN = 20


@dataclass(frozen=True)
class Files:
    """What to read and to write."""

    out: Path
    """The dataset file to write, such as cocoa/train.json."""
    images: Path | None = None
    """Folder of the images; by default where the format has them, if they are needed."""
    overwrite: bool = False
    """Replace the dataset file if it exists."""
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
    convert.command(name=name)(command)


for _name, _preset in PRESETS.items():
    _add_coco_command(_name, _preset)


@convert.command
def mmr(files: IO) -> None:
    """MMR: questions about objects and parts, several targets each; visible masks."""
    _convert(files, referring.read_mmr, "MMR")


@convert.command
def reasonseg(files: IO, explanatory: Path | None = None) -> None:
    """ReasonSeg: X.json beside X.jpg; ignore regions are kept as such; visible masks.

    Args:
        files: What to read and to write.
        explanatory: explanatory/train.json, for textual answers.
    """
    _convert(files, partial(referring.read_reasonseg, explanatory=explanatory), "ReasonSeg")


@convert.command(name="lisa++")
def lisa_plus_plus(files: IO) -> None:
    """LISA++ instance annotations; visible masks."""
    _convert(files, referring.read_lisa_plus_plus, "LISA++")


@convert.command
def refcoco(files: IO, instances: Path, split: str = "train") -> None:
    """RefCOCO, RefCOCO+ and RefCOCOg (refs(...).p, plain data only), gRefCOCO (grefs(...).json); visible masks.

    Args:
        files: What to read and to write.
        instances: COCO's instances.json.
        split: The split to take.
    """
    read = partial(referring.read_refcoco, instances=instances, split=split)
    _convert(files, read, f"{', '.join(path.name for path in files.sources)}, split {split}")


@convert.command(name="amodal-qa")
def amodal_qa(files: IO, fields: AmodalQAFields) -> None:
    """Questions with a textual answer and visible and amodal masks, as AmodalReasonSeg describes its own."""
    _convert(files, partial(referring.read_amodal_qa, fields=fields), "amodal questions and answers")


def _convert(
    files: Files, read: Callable[..., Conversion], origin: str, options: MaskOptions = MaskOptions(queries=0)
) -> None:
    """Reads, writes and says what was written; refuses what cannot succeed before anything is read."""
    if not files.sources:
        raise InputError("convert: there is nothing to read; give annotation files")
    refuse_overwrite(files.out, files.overwrite)
    found = read(files.sources, images_dir=files.images)
    elsewhere = found.name_images(files.out)
    records = found.records(f"converted from {origin}")
    if options.queries:
        add_template_queries(records, options.queries, options.seed)
    write_json(files.out, records, files.overwrite)
    for note in found.notes[:NOTES_SHOWN]:
        print(f"note: {note}", file=sys.stderr)
    if len(found.notes) > NOTES_SHOWN:
        print(f"note: and {len(found.notes) - NOTES_SHOWN} more like these", file=sys.stderr)
    _print_counts(files.out, records)
    if elsewhere:
        print(f"the images are not below {files.out.parent}; pass {elsewhere} with the dataset")


@convert.command
def r2sm(
    queries: Positional[Path],
    /,
    over: Path,
    out: Path,
    fields: R2SMFields,
    mask_type: MaskType | None = None,
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
    records["queries"] = referring.join_queries(queries, records, fields, mask_type)
    records["info"] = {**(records.get("info") or {}), "queries": queries.name}
    write_json(out, records, overwrite)
    _print_counts(out, records)


def _print_counts(out: Path, records: dict[str, Any]) -> None:
    types = Counter(query["mask_type"] for query in records["queries"])
    print(
        f"wrote {out}: {len(records['images'])} images, {len(records['annotations'])} annotations, "
        f"{len(records['categories'])} categories, {len(records['queries'])} queries "
        f"({types['modal']} modal, {types['amodal']} amodal)"
    )


@app.command
def show(
    data: str,
    out: Path,
    split: str = "train",
    count: int = 6,
    queries: int = 3,
    seed: int = 0,
    size: int = 96,
    images: Path | None = None,
    backgrounds: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Draws a sheet of samples: images, queries, and the masks that they ask for.

    Args:
        data: What to show: scenes, cutouts:DIR, json:FILE or json:FOLDER.
        out: The PNG file to write.
        split: The split to choose samples from.
        count: How many images to show, one in a row.
        queries: How many queries of every image to show.
        seed: Another seed shows other samples.
        size: Side of procedural and composed scenes in pixels.
        images: Folder of the images, where they do not lie beside the dataset file.
        backgrounds: Folder of photos to lay cut-outs over.
        overwrite: Replace the PNG file if it exists.
    """
    if out.suffix.lower() != ".png":
        raise InputError(f"--out {out}: the sheet is a PNG; give a name that ends in .png")
    if count < 1 or queries < 0 or size < 1 or seed < 0:
        raise InputError("show: --count and --size must be 1 or more, --queries and --seed 0 or more")
    refuse_overwrite(out, overwrite)
    folder, photos = (None if path is None else str(path) for path in (images, backgrounds))
    source = open_source(data, split, count=count, seed=seed, size=size, images_dir=folder, backgrounds=photos)
    chosen = np.random.default_rng(seed).permutation(len(source))[:count]
    rows = [sample_row(source[int(index)], queries, seed) for index in sorted(chosen)]
    save_sheet(out, rows, title=f"{data}, {split}")
    print(f"wrote {out}: {len(rows)} samples")


def sample_row(sample: Sample, queries: int = 3, seed: int = 0) -> list[Panel]:
    """A sample as panels: its image, then up to `queries` of its queries with the masks that they mean.

    Queries are drawn at random, but both mask types are shown where the sample has both.
    """
    row = [Panel(sample.image, caption=_image_caption(sample))]
    by_id = {instance.id: instance for instance in sample.instances}
    for query in _choose(sample.queries, queries, seed):
        meant = [by_id[number] for number in query.instance_ids]
        shape = sample.image.shape[:2]
        visible = masks.union((instance.modal for instance in meant), shape)
        occluded = masks.union((instance.complete for instance in meant), shape) & ~visible
        row.append(Panel(sample.image, query.text, _target_caption(meant), visible, occluded, query.mask_type))
    return row


def _choose(queries: Sequence[Query], count: int, seed: int) -> list[Query]:
    """Up to `count` queries at random, in their own order, with both mask types where there are both."""
    order = np.random.default_rng(seed).permutation(len(queries))
    first = {queries[i].mask_type: int(i) for i in reversed(order)}
    chosen = [*first.values(), *(int(i) for i in order if int(i) not in first.values())][:count]
    return [queries[i] for i in sorted(chosen)]


def _target_caption(meant: Sequence[Instance]) -> str:
    if not meant:
        return "no target"
    hidden = [masks.area(i.amodal & ~i.modal) / max(1, masks.area(i.amodal)) for i in meant if i.amodal is not None]
    if len(hidden) < len(meant):
        share = "amodal mask unknown"
    elif max(hidden):
        share = f"{'up to ' if len(meant) > 1 else ''}{100 * max(hidden):.0f} % occluded"
    else:
        share = "fully visible"
    names = ", ".join(sorted({instance.category for instance in meant}))
    return f"{names} · {share}" if len(meant) == 1 else f"{len(meant)} instances · {names} · {share}"


def _image_caption(sample: Sample) -> str:
    known = [instance for instance in sample.instances if not instance.ignore]
    hidden = sum(i.amodal is not None and masks.area(i.amodal & ~i.modal) > 0 for i in known)
    return f"{sample.file_name}\n{len(known)} instances, {hidden} occluded"


@app.command
def build(data: Positional[str], /, out: Path, images: Path | None = None, splits: tuple[str, ...] = ()) -> None:
    """Writes a TFDS data set (array_record, encoded images, RLE masks), which `--data.source tfds:OUT` trains from.

    Args:
        data: json:FILE or json:FOLDER.
        out: The folder to write; it must not hold such a data set yet.
        images: Folder of the images, where they do not lie beside the dataset file.
        splits: Splits to write; default: train and val of a file, every *.json of a folder.
    """
    from r2sm_jax.data.tfds import NAME, write_tfds  # imports slowly

    kind, _, name = data.partition(":")
    if kind != "json" or not name:
        raise InputError(f"build: {data} is not json:FILE or json:FOLDER; give one of these")
    if (out / NAME).exists():
        raise InputError(f"{out}: there is a {NAME} data set already; give another --out")
    path = Path(name)
    chosen = splits or (tuple(sorted(f.stem for f in path.glob("*.json"))) if path.is_dir() else ("train", "val"))
    written = write_tfds({split: load_json_split(path, split, images_dir=images) for split in chosen}, out)
    print(f"wrote {out}: " + ", ".join(f"{count} images in {split}" for split, count in written.items()))


def main() -> None:
    """Runs the command that the arguments name."""
    app.cli(
        prog="python -m r2sm_jax.data",
        description="Tools for datasets of modal and amodal queries.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
