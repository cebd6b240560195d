"""Reads questions with textual answers whose layout is not published, so that the field names are settings."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2sm_jax.tools.conversion import Conversion, read_list


@dataclass(frozen=True)
class AmodalQAFields:
    """Names of the fields of a record, and of the objects in it."""

    image: str = "image"
    question: str = "question"
    answer: str = "answer"
    objects: str = "objects"
    name: str = "name"
    visible: str = "visible_mask"
    amodal: str = "amodal_mask"


@dataclass(frozen=True)
class R2SMFields:
    """Names of the fields of a query record."""

    image: str = "image_id"
    """Image id or file name."""
    text: str = "text"
    mask_type: str = "mask_type"
    instances: str = "instance_ids"
    """List of annotation ids; where it is missing the answer is read."""
    answer: str = "answer"


AMODAL_QA, R2SM = AmodalQAFields(), R2SMFields()


def named_ids(answer: str) -> list[str]:
    """The ids in an answer of the form "instance id is 3, class name is cup; ..."; brackets and tags are optional."""
    return re.findall(r"instance id is\s*\[?\s*(\w+)", answer, re.IGNORECASE)


def read_amodal_qa(
    sources: Sequence[Path], fields: AmodalQAFields = AMODAL_QA, images_dir: Path | None = None
) -> Conversion:
    """Reads lists of questions with a visible and an amodal mask for each object that answers them.

    AmodalReasonSeg (arXiv 2503.10225) describes such files, but they are not released. Queries are amodal. Masks are
    RLE or polygons; objects of one image with the same masks are one annotation. Raises InputError for files that do
    not fit the format.
    """
    found = Conversion(images_dir)
    for path in sources:
        for entry in read_list(path, "a list of questions"):
            number = found.add_image(entry, [entry.file_name(fields.image)])
            meant = []
            for target in entry.entries(fields.objects):
                key = repr([target.need(mask, dict, list) for mask in (fields.visible, fields.amodal)])
                name = str(target.get(fields.name) or "object")
                meant.append(
                    found.add_object(number, name, target, modal=fields.visible, amodal=fields.amodal, key=key)
                )
            answer = entry.get(fields.answer)
            found.add_query(number, entry.text(fields.question), "amodal", meant, answer, task="reasoning")
    return found


def join_queries(
    path: Path, records: Mapping[str, Any], fields: R2SMFields, mask_type: str | None = None
) -> list[dict[str, Any]]:
    """R2SM's queries in `path` (JSON list or .jsonl) as records of the dataset `records`.

    `mask_type` is for files that hold one type only. Instances are given as ids or named in the answer. Their ids are
    those of the annotations' `source_id` where there is one, else of the annotations. Raises InputError for a query
    that does not fit the dataset.
    """
    images = {image["id"]: image["id"] for image in records["images"]}
    images |= {Path(image["file_name"]).name: image["id"] for image in records["images"]}
    ids = {(a["image_id"], a.get("source_id", a["id"])): a["id"] for a in records["annotations"]}
    found = Conversion()
    for entry in read_list(path, "a list of queries, or one JSON object a line (.jsonl)"):
        name = entry.need(fields.image, int, str)
        image_id = images.get(Path(name).name if isinstance(name, str) else name)
        if image_id is None:
            raise entry.error(f"image {name!r} is not in the dataset", "convert the images first")
        answer, listed = entry.get(fields.answer), entry.get(fields.instances)
        if listed is None and isinstance(answer, str):
            listed = [int(number) for number in named_ids(answer) if number.isdecimal()]
        if not isinstance(listed, list):
            raise entry.error(f"it has neither {fields.instances} nor {fields.answer}", "name its instances")
        for number in listed:
            if not isinstance(number, int) or (image_id, number) not in ids:
                raise entry.error(f"image {name!r} has no instance {number!r}", "correct the id")
        wanted = mask_type or entry.need(fields.mask_type, str)
        if wanted not in ("modal", "amodal"):
            raise entry.error(f"its mask type is {wanted!r}", 'write "modal" or "amodal"')
        meant = [ids[image_id, number] for number in listed]
        found.add_query(image_id, entry.text(fields.text), wanted, meant, answer, task="reasoning")
    return found.queries
