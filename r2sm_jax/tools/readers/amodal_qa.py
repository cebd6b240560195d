"""Reads questions with a textual answer and a visible and an amodal mask for every object that answers them.

This is what AmodalReasonSeg (arXiv 2503.10225) describes. Its files are not released, so the field names are settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.readers.conversion import Conversion, draw, find_image, need, need_name


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


def read_amodal_qa(sources: Sequence[Path], fields: AmodalQAFields, images_dir: Path | None = None) -> Conversion:
    """Reads lists of records into records with amodal queries. Masks are RLE or polygons; objects of one image with the
    same masks are one annotation. Raises InputError for anything that is not right."""
    found = Conversion()
    image_ids: dict[Path, tuple[int, int, int]] = {}
    ids: dict[tuple[int, str], int] = {}
    for path in sources:
        listed = load_json(path, "a list of questions")
        if not isinstance(listed, list):
            raise InputError(f"{path}: this is no list of questions; give one")
        for index, record in enumerate(listed):
            where = f"[{index}]"
            name = need_name(path, where, record, fields.image)
            image = find_image(path, where, images_dir or path.parent, name)
            if image not in image_ids:
                image_ids[image] = found.add_image(image)
                found.images[-1]["file_name"] = name
            number, *size = image_ids[image]
            meant = []
            for at, thing in enumerate(need(path, where, record, fields.objects, list)):
                there = f"{where}.{fields.objects}[{at}]"
                drawn = [need(path, there, thing, key, (dict, list)) for key in (fields.visible, fields.amodal)]
                key = (number, repr(drawn))
                if key not in ids:
                    modal, amodal = (draw(path, there, mask, size[0], size[1]) for mask in drawn)
                    label = str(thing.get(fields.name) or "object")
                    ids[key] = found.add_annotation(number, label, modal=modal, amodal=amodal)
                meant.append(ids[key])
            question = need(path, where, record, fields.question, str)
            answer = record.get(fields.answer)
            answer = answer if isinstance(answer, str) else None
            found.add_query(
                number, question, "amodal", list(dict.fromkeys(meant)), kind={"task": "reasoning"}, answer=answer
            )
    return found
