"""Reads R2SM's text queries, which refer to a dataset file or carry their own masks.

R2SM has not published how its files are laid out, so the names of the fields are settings.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2sm_jax.data.annotations import mask_fields
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.validation import is_id, is_text
from r2sm_jax.query import MASK_TYPES, MaskType
from r2sm_jax.tools.entries import BadRecord, Entry, Note, RecordError, Size, read_list_files
from r2sm_jax.tools.records import (
    ImageRecord,
    Item,
    MaskComparison,
    ObjectRecord,
    QueryRecord,
    Record,
    make_image,
)
from r2sm_jax.tools.referring import named_objects

TAGS = re.compile("</?[QA]>")
"""Tags around questions and answers, which R2SM's prompts ask of a language model."""


@dataclass(frozen=True)
class R2SMFields:
    """Names of the fields of a query record."""

    image: str = "image_id"
    """Image id or file name."""
    text: str = "text"
    mask_type: str = "mask_type"
    instances: str = "instance_ids"
    """List of annotation ids; if it is missing the answer is read."""
    answer: str = "answer"
    visible: str = "visible_masks"
    """Without --over: visible masks (RLE or polygons) as {id: mask}, or a list beside the ids."""
    complete: str = "amodal_masks"
    """Without --over: complete masks, in the same form. Without them only modal ones are known."""


class _Index:
    """The images and annotations of a dataset file by the names that queries use."""

    def __init__(self, records: Mapping[str, Any]) -> None:
        self.images = {image["id"]: image for image in records["images"]}
        self._image_ids: dict[Any, int | None] = {}
        # A name without its folders means an image only if no other image has it.
        for image in records["images"]:
            name = Path(image["file_name"]).name
            self._image_ids[name] = None if name in self._image_ids else image["id"]
        for image in records["images"]:
            self._image_ids[image["id"]] = image["id"]
            self._image_ids[image["file_name"]] = image["id"]

        self.annotation_ids: dict[tuple[int, int], int] = {}
        for annotation in records["annotations"]:
            number = annotation.get("source_id")
            if not is_id(number):
                number = annotation["id"]
            self.annotation_ids[annotation["image_id"], number] = annotation["id"]

    def image_id(self, name: int | str) -> int | None:
        """The image of an id, a path or a file name; None if there is none, or several."""
        if name in self._image_ids:
            return self._image_ids[name]
        return self._image_ids.get(Path(name).name) if isinstance(name, str) else None


def read_r2sm(
    sources: Sequence[Path],
    records: Mapping[str, Any] | None,
    fields: R2SMFields = R2SMFields(),
    mask_type: MaskType | None = None,
    images_dir: Path | None = None,
) -> Iterator[Item]:
    """R2SM's text queries about the images of a dataset file, or with masks of their own.

    Sources are JSON lists, or JSON Lines files (.jsonl). Instances are given as ids or named in the
    answer. Their ids are the `source_id` of the file's annotations, or the `id` of one without.

    Args:
        sources: The files of queries.
        records: The dataset file that was converted from the annotations of the images. None: each
            query names an image file and holds the masks of its instances.
        fields: Names of the fields.
        mask_type: The mask type of all queries; None: each says its own.
        images_dir: Without `records`, the folder of the images; None: that of the queries.
    """
    index = None if records is None else _Index(records)
    comparison = MaskComparison()
    for entry in read_list_files(sources, "a list of queries, or one JSON object a line (.jsonl)"):
        if isinstance(entry, BadRecord):
            yield entry
            continue
        try:
            if index is None:
                yield _read_query_with_masks(entry, fields, mask_type, images_dir, comparison)
            else:
                yield _read_query(entry, index, fields, mask_type)
        except RecordError as error:
            yield error.bad_record
    remedy = "exchange --fields.visible and --fields.complete, if the file has them so"
    comparison.check(", ".join(map(str, sources)), remedy)


def _read_query(
    entry: Entry, index: _Index, fields: R2SMFields, mask_type: MaskType | None
) -> Record:
    """A query about instances of a dataset file."""
    name = entry.require(fields.image, int, str)
    image_id = index.image_id(name)
    if image_id is None:
        problem = f"image {name!r} is not in the dataset, or several have this name"
        raise entry.error(problem, "convert the images first, and name it as the dataset does")

    numbers = _instance_ids(entry, fields)
    targets = []
    for value in numbers:
        # JSON keys are strings, and so are ids in files that were made of them.
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if not is_id(number) or (image_id, number) not in index.annotation_ids:
            raise entry.error(f"image {name!r} has no instance {number!r}", "correct the id")
        targets.append(index.annotation_ids[image_id, number])
    image = index.images[image_id]
    size = image["height"], image["width"]
    query = _make_query(entry, fields, mask_type, targets)
    return Record(ImageRecord(image_id, image["file_name"], size), queries=[query])


def _read_query_with_masks(
    entry: Entry,
    fields: R2SMFields,
    mask_type: MaskType | None,
    images_dir: Path | None,
    comparison: MaskComparison,
) -> Record:
    """A query with the image and the masks that it brings along."""
    if isinstance(entry.get(fields.image), int):
        problem = f"its {fields.image!r} is a number, which only a dataset file can explain"
        raise entry.error(problem, "give the converted file with --over, or name the image file")
    if entry.get(fields.visible) is None:
        problem = f"it has no {fields.visible!r}, the visible masks of its instances"
        raise entry.error(problem, "name their field, or give the converted file with --over")
    image = make_image(entry, [entry.text(fields.image)], images_dir or entry.path.parent)
    numbers = _instance_ids(entry, fields)
    answer = entry.get(fields.answer)
    names = named_objects(answer) if isinstance(answer, str) else {}

    objects = []
    for position, number in enumerate(numbers):
        if not is_id(number) and not isinstance(number, str):
            raise entry.error(f"its instance {number!r} is no id", "write a number or a name")
        modal, notes = _read_own_mask(entry, fields.visible, numbers, position, image.size)
        amodal = None
        if entry.get(fields.complete) is not None:
            amodal, more = _read_own_mask(entry, fields.complete, numbers, position, image.size)
            notes += more
            comparison.add(modal, amodal)
        # Queries of one image may know different masks of an instance; each keeps what it knows.
        key = number, amodal is None
        category = names.get(str(number)) or "object"
        objects.append(ObjectRecord(category, mask_fields(modal, amodal), key, tuple(notes)))
    targets = [record.key for record in objects]
    return Record(image, objects, [_make_query(entry, fields, mask_type, targets)])


def _read_own_mask(
    entry: Entry, field: str, numbers: Sequence[Any], position: int, size: Size
) -> tuple[Mask, list[Note]]:
    """The mask `[H W]` of the instance at a position, from {id: mask} or a list beside the ids."""
    values = entry.require(field, dict, list)
    if isinstance(values, dict):
        value = values.get(str(numbers[position]))
    elif len(values) == len(numbers):
        value = values[position]
    else:
        problem = f"its {field!r} has {len(values)} masks for {len(numbers)} instances"
        raise entry.error(problem, "give one mask for each")
    name = f"mask of instance {numbers[position]!r} in {field}"
    mask, notes = Entry(entry.path, entry.name, {name: value}).mask(name, size)
    if not mask.any():
        raise entry.error(f"its {name} has no pixel in the image", "correct it")
    return mask, notes


def _instance_ids(entry: Entry, fields: R2SMFields) -> list[Any]:
    """The ids of the targets, from their field or from the answer."""
    answer = entry.get(fields.answer)
    numbers = entry.get(fields.instances)
    if is_id(numbers):
        numbers = [numbers]
    if numbers is None and isinstance(answer, str):
        numbers = _read_ids(entry, answer)
    if not isinstance(numbers, list):
        problem = f"it has neither {fields.instances} nor {fields.answer}"
        raise entry.error(problem, "name its instances")
    return numbers


def _make_query(
    entry: Entry, fields: R2SMFields, mask_type: MaskType | None, targets: Sequence[Hashable]
) -> QueryRecord:
    """The query of an entry; `targets` are the keys of its objects."""
    own_type = mask_type or entry.require(fields.mask_type, str).strip().lower()
    if own_type not in MASK_TYPES:
        raise entry.error(f"its mask type is {own_type!r}", 'write "modal" or "amodal"')
    answer = entry.get(fields.answer)
    text = TAGS.sub(" ", entry.text(fields.text))
    if not is_text(text):
        raise entry.error(f"its {fields.text!r} is empty", "write it")
    return QueryRecord(text, own_type, targets, {"task": "reasoning"}, answer)


def _read_ids(entry: Entry, answer: str) -> list[int]:
    """The ids in an answer as R2SM writes it; none if it names no instance.

    Raises RecordError if it names some in another form.
    """
    ids = re.findall(r"instance id is\s*\[?\s*(\w+)", answer, re.IGNORECASE)
    mentions = re.findall(r"instance id", answer, re.IGNORECASE)
    several = re.search(r"instance id is\s*\[?\s*\w+\]?\s*(,|and)\s*\d", answer, re.IGNORECASE)
    if several or len(ids) != len(mentions) or not all(map(str.isdecimal, ids)):
        problem = "the ids in its answer cannot be read"
        raise entry.error(problem, "write 'instance id is [3]' for each of them")
    return [int(number) for number in ids]
