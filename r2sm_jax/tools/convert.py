"""`python -m r2sm_jax.data convert FORMAT ...`: one command for each format of annotations."""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional
from tyro.extras import SubcommandApp

from r2sm_jax.data.records import read_records
from r2sm_jax.data.samples import write_json
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.tools.query_template import add_template_queries
from r2sm_jax.tools.readers.amodal_qa import AmodalQAFields, read_amodal_qa
from r2sm_jax.tools.readers.coco_like import DIALECTS, Dialect, Oversize, read_coco_like
from r2sm_jax.tools.readers.cocoa import read_cocoa
from r2sm_jax.tools.readers.conversion import Conversion
from r2sm_jax.tools.readers.lisa_plus_plus import read_lisa_plus_plus
from r2sm_jax.tools.readers.mmr import read_mmr
from r2sm_jax.tools.readers.r2sm import R2SMFields, join_queries
from r2sm_jax.tools.readers.reasonseg import read_reasonseg
from r2sm_jax.tools.readers.refcoco import read_refcoco

app = SubcommandApp()
NOTES_SHOWN = 20
Sources = Positional[tuple[Path, ...]]


@dataclass(frozen=True)
class Target:
    """What every conversion asks for."""

    out: Path
    """The dataset file to write, such as cocoa/train.json."""
    images: Path | None = None
    """Folder of the images; by default where the format has them, if they are needed."""
    overwrite: bool = False
    """Replace the dataset file if it exists."""


@dataclass(frozen=True)
class Template:
    """Queries for formats that have none, from the grammar of the scenes."""

    queries: int = 8
    """How many to write for an image; 0 for none."""
    seed: int = 0
    """Another seed gives other queries."""


Where = Annotated[Target, OmitArgPrefixes]
Write = Annotated[Template, OmitArgPrefixes]


@app.command
def cocoa(sources: Sources, /, target: Where, template: Write = Template()) -> None:
    """Original COCOA: one flat amodal polygon a region, RLE only where it is occluded.

    Args:
        sources: JSON files, or folders of them; images lie beside them or in --images.
        target: Where to.
        template: Queries to write.
    """
    _start(sources, target, template)
    _finish(read_cocoa(sources, target.images), target, "converted from original COCOA annotations", template)


@app.command(name="cocoa-cls")
def cocoa_cls(sources: Sources, /, target: Where, template: Write = Template()) -> None:
    """COCOA-cls: COCO with amodal `segmentation` and `visible_mask` as RLE.

    Args:
        sources: COCO_amodal_train2014_with_classes.json and the like.
        target: Where to.
        template: Queries to write.
    """
    _coco_like("cocoa-cls", sources, target, template)


@app.command
def d2sa(sources: Sources, /, target: Where, template: Write = Template(), oversize: Oversize = "refuse") -> None:
    """D2SA: like COCOA-cls, with objects that reach out of the image.

    Args:
        sources: D2S_amodal_training_rot0.json and the like; several are merged, ids that collide are shifted.
        target: Where to.
        template: Queries to write.
        oversize: Where masks are larger than their image: crop them to it, or pad the image (a copy beside --out).
    """
    _coco_like("d2sa", sources, target, template, oversize)


@app.command
def kins(sources: Sources, /, target: Where, template: Write = Template()) -> None:
    """KINS, old (`segmentation`, `inmodal_seg`) and of 2020 (`a_segm`, `i_segm`).

    Args:
        sources: instances_train.json, update_train_2020.json and the like.
        target: Where to.
        template: Queries to write.
    """
    _coco_like("kins", sources, target, template)


@app.command
def muva(
    sources: Sources,
    /,
    target: Where,
    template: Write = Template(),
    amodal_field: str = "segmentation",
    visible_field: str = "visible_mask",
    oversize: Oversize = "refuse",
) -> None:
    """MUVA, or any other COCO-like file: name the fields of the two masks.

    Args:
        sources: AiFi-MUVA_train.json and the like.
        target: Where to.
        template: Queries to write.
        amodal_field: Field of an annotation with the complete mask.
        visible_field: Field of an annotation with the visible mask; fully visible where it is missing.
        oversize: Where masks are larger than their image: crop them to it, or pad the image (a copy beside --out).
    """
    dialect = replace(DIALECTS["muva"], amodal=(amodal_field,), modal=(visible_field,))
    _coco_like("muva", sources, target, template, oversize, dialect)


@app.command
def mmr(sources: Sources, /, target: Where) -> None:
    """MMR: questions about objects and parts, several targets each; visible masks.

    Args:
        sources: MMR_train.json and the like.
        target: Where to.
    """
    _start(sources, target)
    _finish(read_mmr(sources, target.images), target, "converted from MMR")


@app.command
def reasonseg(sources: Sources, /, target: Where, explanatory: Path | None = None) -> None:
    """ReasonSeg: X.json beside X.jpg; ignore regions are kept as such; visible masks.

    Args:
        sources: JSON files, or folders of them.
        target: Where to.
        explanatory: explanatory/train.json, for textual answers.
    """
    _start(sources, target)
    _finish(read_reasonseg(sources, target.images, explanatory), target, "converted from ReasonSeg")


@app.command(name="lisa++")
def lisa_plus_plus(sources: Sources, /, target: Where) -> None:
    """LISA++ instance annotations; visible masks.

    Args:
        sources: data.json files.
        target: Where to.
    """
    _start(sources, target)
    _finish(read_lisa_plus_plus(sources, target.images), target, "converted from LISA++")


@app.command
def refcoco(refs: Positional[Path], /, instances: Path, target: Where, split: str = "train") -> None:
    """RefCOCO, RefCOCO+, RefCOCOg, gRefCOCO; visible masks.

    Args:
        refs: refs(unc).p and the like (plain data only), or grefs(unc).json.
        instances: COCO's instances.json.
        target: Where to.
        split: The split to take.
    """
    _start((refs,), target)
    found = read_refcoco(refs, instances, split=split, images_dir=target.images)
    _finish(found, target, f"converted from {refs.name}, split {split}")


@app.command(name="amodal-qa")
def amodal_qa(sources: Sources, /, target: Where, fields: AmodalQAFields = AmodalQAFields()) -> None:
    """Questions with a textual answer and visible and amodal masks, as AmodalReasonSeg describes its own.

    Args:
        sources: JSON lists of records.
        target: Where to.
        fields: Names of the fields.
    """
    _start(sources, target)
    _finish(read_amodal_qa(sources, fields, target.images), target, "converted from amodal questions and answers")


@app.command
def r2sm(
    queries: Positional[Path],
    /,
    over: Path,
    out: Path,
    mask_type: Literal["modal", "amodal"] | None = None,
    fields: R2SMFields = R2SMFields(),
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


def _coco_like(
    name: str, sources: tuple[Path, ...], target: Target, template: Template, oversize: Oversize = "refuse",
    dialect: Dialect | None = None,
) -> None:  # fmt: skip
    _start(sources, target, template)
    padded = target.out.with_name(target.out.stem + "_padded")
    found = read_coco_like(
        sources, dialect or DIALECTS[name], images_dir=target.images, oversize=oversize, padded_dir=padded
    )
    _finish(found, target, f"converted from {name}", template)


def _start(sources: tuple[Path, ...], target: Target, template: Template | None = None) -> None:
    """Refuses what cannot end well before anything is read."""
    if not sources:
        raise InputError("convert: there is nothing to read; give annotation files")
    if template and (template.queries < 0 or template.seed < 0):
        raise InputError("convert: --queries and --seed cannot be negative; give 0 or more")
    refuse_overwrite(target.out, target.overwrite)


def _finish(found: Conversion, target: Target, description: str, template: Template | None = None) -> None:
    """Writes the dataset file and says what is in it."""
    elsewhere = found.name_images(target.out)
    records = found.records(description)
    if template and template.queries:
        add_template_queries(records, template.queries, template.seed)
    write_json(target.out, records, target.overwrite)
    for note in found.notes[:NOTES_SHOWN]:
        print(f"note: {note}", file=sys.stderr)
    if len(found.notes) > NOTES_SHOWN:
        print(f"note: and {len(found.notes) - NOTES_SHOWN} more like these", file=sys.stderr)
    _report(target.out, records)
    if elsewhere:
        print(f"the images are not below {target.out.parent}; pass {elsewhere} with the dataset")


def _report(out: Path, records: dict[str, Any]) -> None:
    types = Counter(query["mask_type"] for query in records["queries"])
    print(
        f"wrote {out}: {len(records['images'])} images, {len(records['annotations'])} annotations, "
        f"{len(records['categories'])} categories, {len(records['queries'])} queries "
        f"({types['modal']} modal, {types['amodal']} amodal)"
    )
