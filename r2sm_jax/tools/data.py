"""The benchmark tool-box: `python -m r2sm_jax.data convert|check|stats|show|queries|build|compose|cutouts ...`."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tyro.conf import OmitArgPrefixes, Positional
from tyro.extras import SubcommandApp

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, Instance, Sample, group_by_image, read_records
from r2sm_jax.data.sheet import Panel, save_sheet
from r2sm_jax.data.sources import load_json_split, open_source, stored_splits
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.synthetic.queries.write import write_queries
from r2sm_jax.synthetic.scenes.scene import describe_objects, forbidden_targets
from r2sm_jax.tools import referring
from r2sm_jax.tools.check import check, counts_of
from r2sm_jax.tools.coco import PRESETS, MaskOptions, Preset, read_coco_like
from r2sm_jax.tools.compose import compose, cutouts
from r2sm_jax.tools.convert import Conversion, Files, write_json
from r2sm_jax.tools.entries import by_reason
from r2sm_jax.tools.folders import FolderNames, read_mask_folders
from r2sm_jax.tools.queries import parse, requests
from r2sm_jax.tools.stats import stats

READERS: dict[str, Callable[..., Conversion]] = {
    "mmr": referring.read_mmr,
    "reasonseg": referring.read_reasonseg,
    "lisa++": referring.read_lisa_plus_plus,
    "refcoco": referring.read_refcoco,
    "amodal-qa": referring.read_amodal_qa,
    "r2sm": referring.read_r2sm,
}
"""Formats with queries of their own, by the name of their command. A new one is added here."""
NOTES_SHOWN = 20
"""How many places are listed where the same is wrong."""


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class TemplateOptions:
    """Which queries to write."""

    queries: int = 8
    """How many queries to write for an image, from the grammar of the scenes; 0 for none."""
    seed: int = 0
    """Another seed gives other queries."""


def coco_command(name: str, preset: Preset) -> Callable[..., None]:
    """`convert` for annotations without queries, which the template then writes."""

    def command(files: Files, options: MaskOptions, template: TemplateOptions) -> None:
        _write(files, name, lambda: read_coco_like(files, preset, options), template)

    command.__doc__ = preset.about
    return command


def folders(files: Files, names: FolderNames, template: TemplateOptions) -> None:
    """Folders of images and of masks, one PNG an object; pix2gestalt's layout by default."""
    _write(files, "folders", lambda: read_mask_folders(files, names), template)


def reader_command(name: str, read: Callable[..., Conversion]) -> Callable[..., None]:
    """`convert` for annotations with queries; its flags and its help are those of the reader."""

    @wraps(read)
    def command(files: Files, **options: Any) -> None:
        _write(files, name, lambda: read(files, **options), TemplateOptions(queries=0))

    return command


def _write(
    files: Files, name: str, read: Callable[[], Conversion], template: TemplateOptions
) -> None:
    """Reads, writes, and says what was written, what was left out and what else the user should know, by reason;
    refuses what cannot succeed before anything is read."""
    if not files.sources:
        raise InputError("convert: there is nothing to read; give annotation files")
    if template.queries < 0 or template.seed < 0:
        raise InputError("convert: --queries and --seed cannot be negative; give 0 or more")
    refuse_overwrite(files.out, files.overwrite)
    found = read()
    elsewhere = found.name_images(files.out)
    records = found.records(
        f"converted from {name}: {', '.join(path.name for path in files.sources)}"
    )
    if template.queries:
        add_template_queries(files.out, records, template.queries, template.seed)
    write_json(files.out, records, files.overwrite)
    if found.bad:
        total = found.good + len(found.bad)
        print(
            f"note: {len(found.bad)} of {total} records cannot be used and were left out",
            file=sys.stderr,
        )
    for same in (*by_reason(found.bad), *by_reason(found.notes)):
        others = [note.where for note in same[1:]]
        listed = ", ".join(others[:NOTES_SHOWN]) + (", ..." if len(others) > NOTES_SHOWN else "")
        print(
            f"note: {same[0]}" + (f" (and {len(others)} more: {listed})" if others else ""),
            file=sys.stderr,
        )
    types = Counter(query["mask_type"] for query in records["queries"])
    print(
        f"wrote {files.out}: {counts_of(records)} ({types['modal']} modal, {types['amodal']} amodal)"
    )
    if elsewhere:
        print(f"the images are not below {files.out.parent}; pass {elsewhere} with the dataset")


def template(
    dataset: Positional[Path],
    /,
    out: Path,
    queries: int = 8,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Adds queries from the embedded grammar to a copy of a dataset file, half modal and half amodal.

    An `ignore` annotation gets no query, one whose complete mask is not known gets only modal ones, and COCOA's stuff
    (`isStuff`) gets queries only where there is nothing else.

    Args:
        dataset: The dataset file. Its class names become the nouns; its masks tell what hides what.
        out: The dataset file to write.
        queries: How many queries to write for an image.
        seed: Another seed gives other queries.
        overwrite: Replace the dataset file if it exists.
    """
    if queries < 1 or seed < 0:
        raise InputError("queries template: give --queries 1 or more and --seed 0 or more")
    refuse_overwrite(out, overwrite)
    records = read_records(dataset)
    before, images = len(records["queries"]), len(records["images"])
    add_template_queries(dataset, records, queries, seed)
    write_json(out, records, overwrite)
    added = records["queries"][before:]
    types = Counter(query["mask_type"] for query in added)
    print(
        f"wrote {out}: {len(added)} queries more ({types['modal']} modal, {types['amodal']} amodal)"
    )
    if without := images - len({query["image_id"] for query in added}):
        print(
            f"{without} of {images} images got none: nothing in them can be asked for by its class"
        )


def add_template_queries(path: Path, records: Mapping[str, Any], count: int, seed: int) -> None:
    """Appends up to `count` queries about every image to the records of the checked dataset file `path`.

    Raises InputError for a mask that cannot be read.
    """
    dataset, annotations = Dataset(path, records), group_by_image(records, "annotations")
    number = max((query["id"] for query in records["queries"]), default=0)
    for index, image in enumerate(dataset.images):  # only one image's masks are in memory at a time
        instances = [instance.convert(masks.expand) for instance in dataset.rles_at(index)]
        rng = np.random.default_rng((seed, image["id"] % 2**63))
        forbidden = forbidden_targets(instances, background_ids(annotations[image["id"]]))
        for query in write_queries(
            describe_objects(instances), rng=rng, count=count, forbidden=forbidden
        ):
            number += 1
            records["queries"].append(
                {
                    "id": number,
                    "image_id": image["id"],
                    "text": query.text,
                    "mask_type": query.mask_type,
                }
                | {"instance_ids": list(query.instance_ids), "kind": dict(query.kind)}
            )


def background_ids(annotations: Sequence[Mapping[str, Any]]) -> set[int]:
    """The annotations of an image that no query asks for: `ignore` ones, and COCOA's stuff (floor, carpet, sky) unless
    there is nothing else."""
    ignored = {annotation["id"] for annotation in annotations if annotation.get("ignore")}
    stuff = {annotation["id"] for annotation in annotations if annotation.get("isStuff")}
    return ignored if len(ignored | stuff) == len(annotations) else ignored | stuff


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
        data: What to show: scenes, compose:FILE, cutouts:DIR, json:FILE or json:FOLDER.
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
        raise InputError(
            "show: --count and --size must be 1 or more, --queries and --seed 0 or more"
        )
    refuse_overwrite(out, overwrite)
    source = open_source(
        data, split, count=count, seed=seed, size=size, images_dir=images, backgrounds=backgrounds
    )
    chosen = np.random.default_rng(seed).permutation(len(source))[:count]
    rows = [sample_row(source[int(index)], queries, seed) for index in sorted(chosen)]
    save_sheet(out, rows, title=f"{data}, {split}")
    print(f"wrote {out}: {len(rows)} samples")


def sample_row(sample: Sample, queries: int = 3, seed: int = 0) -> list[Panel]:
    """A sample as panels: its image, then up to `queries` of its queries with the masks that they mean.

    Queries are drawn at random, but both mask types are shown where the sample has both.
    """
    areas = [instance.convert(masks.area) for instance in sample.instances if not instance.ignore]
    counts = f"{len(areas)} instances, {sum(area.complete > area.modal for area in areas)} occluded"
    row = [Panel(sample.image, caption=f"{sample.file_name}\n{counts}")]
    by_id = {instance.id: instance for instance in sample.instances}
    order = np.random.default_rng(seed).permutation(len(sample.queries)).tolist()
    first = {sample.queries[i].mask_type: i for i in reversed(order)}
    chosen = list(dict.fromkeys([*first.values(), *order]))[:queries]
    for query in (sample.queries[i] for i in sorted(chosen)):
        meant = [by_id[number] for number in query.instance_ids]
        shape = sample.image.shape[:2]
        visible = masks.union((instance.modal for instance in meant), shape)
        occluded = masks.union((instance.complete for instance in meant), shape) & ~visible
        row.append(
            Panel(
                sample.image, query.text, _target_caption(meant), visible, occluded, query.mask_type
            )
        )
    return row


def _target_caption(meant: Sequence[Instance]) -> str:
    if not meant:
        return "no target"
    areas = [instance.convert(masks.area) for instance in meant]
    hidden = max((a.complete - a.modal) / max(1, a.complete) for a in areas)
    share = (
        f"{'up to ' if len(meant) > 1 else ''}{100 * hidden:.0f} % occluded"
        if hidden
        else "fully visible"
    )
    if any(instance.amodal is None for instance in meant):
        share = "amodal mask unknown"
    names = ", ".join(sorted({instance.category for instance in meant}))
    return (
        f"{names} · {share}" if len(meant) == 1 else f"{len(meant)} instances · {names} · {share}"
    )


def build(
    data: Positional[str], /, out: Path, images: Path | None = None, splits: tuple[str, ...] = ()
) -> None:
    """Writes a TFDS data set (array_record, encoded images, RLE masks), which `--data.source tfds:OUT` trains from.

    Args:
        data: json:FILE or json:FOLDER.
        out: The folder to write; it must not hold such a data set yet.
        images: Folder of the images, where they do not lie beside the dataset file.
        splits: Splits to write; default: train, dev and val of a file; every *.json of a folder, and dev beside train.
    """
    from r2sm_jax.data.tfds import NAME, write_tfds  # imports slowly

    kind, _, name = data.partition(":")
    if kind != "json" or not name:
        raise InputError(f"build: {data} is not json:FILE or json:FOLDER; give one of these")
    if any((out / NAME).rglob("dataset_info.json")):  # a failure leaves the folder
        raise InputError(f"{out}: there is a {NAME} data set already; give another --out")
    path = Path(name)
    stored = stored_splits(path) if path.is_dir() else ["train", "dev", "val"]
    chosen = splits or sorted({*stored} | ({"dev"} if "train" in stored else set()))
    written = write_tfds(
        {split: load_json_split(path, split, images_dir=images) for split in chosen}, out
    )
    print(
        f"wrote {out}: "
        + ", ".join(f"{count} images in {split}" for split, count in written.items())
    )


def main() -> None:
    """Runs the command that the arguments name."""
    app, convert, queries = SubcommandApp(), SubcommandApp(), SubcommandApp()
    for name, preset in PRESETS.items():
        convert.command(name=name)(coco_command(name, preset))
    for name, read in READERS.items():
        convert.command(name=name)(reader_command(name, read))
    convert.command(folders)
    for command in (requests, parse, template):
        queries.command(command)
    app.command(convert, name="convert")
    for command in (check, stats, show, build, compose, cutouts):
        app.command(command)
    app.command(queries, name="queries")
    app.cli(
        prog="python -m r2sm_jax.data",
        description="Tools for datasets of modal and amodal queries.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
