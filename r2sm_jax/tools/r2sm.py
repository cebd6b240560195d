"""Reads R2SM's text queries and joins them to a dataset file of their images.

R2SM has not published how its files are laid out, so the names of the fields are settings.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2sm_jax.data.dataset import is_id
from r2sm_jax.query import MASK_TYPES, MaskType
from r2sm_jax.tools.entries import BadRecord, Entry, RecordError, read_list_files
from r2sm_jax.tools.records import ImageRecord, Item, QueryRecord, Record
from r2sm_jax.tools.referring import named_ids


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
    records: Mapping[str, Any],
    fields: R2SMFields = R2SMFields(),
    mask_type: MaskType | None = None,
) -> Iterator[Item]:
    """R2SM's text queries about the images of a dataset file.

    Sources are JSON lists, or JSON Lines files (.jsonl). Instances are given as ids or named in the
    answer. Their ids are the `source_id` of the file's annotations, or the `id` of one without.

    Args:
        sources: The files of queries.
        records: The dataset file that was converted from the annotations of the images.
        fields: Names of the fields.
        mask_type: The mask type of all queries; None: each says its own.
    """
    index = _Index(records)
    for entry in read_list_files(sources, "a list of queries, or one JSON object a line (.jsonl)"):
        if isinstance(entry, BadRecord):
            yield entry
            continue
        try:
            yield _read_query(entry, index, fields, mask_type)
        except RecordError as error:
            yield error.bad_record


def _read_query(
    entry: Entry, index: _Index, fields: R2SMFields, mask_type: MaskType | None
) -> Record:
    name = entry.require(fields.image, int, str)
    image_id = index.image_id(name)
    if image_id is None:
        problem = f"image {name!r} is not in the dataset, or several have this name"
        raise entry.error(problem, "convert the images first, and name it as the dataset does")

    answer = entry.get(fields.answer)
    numbers = entry.get(fields.instances)
    if numbers is None and isinstance(answer, str):
        numbers = _read_ids(entry, answer)
    if not isinstance(numbers, list):
        problem = f"it has neither {fields.instances} nor {fields.answer}"
        raise entry.error(problem, "name its instances")
    for number in numbers:
        if not is_id(number) or (image_id, number) not in index.annotation_ids:
            raise entry.error(f"image {name!r} has no instance {number!r}", "correct the id")

    own_type = mask_type or entry.require(fields.mask_type, str)
    if own_type not in MASK_TYPES:
        raise entry.error(f"its mask type is {own_type!r}", 'write "modal" or "amodal"')
    targets = [index.annotation_ids[image_id, number] for number in numbers]
    query = QueryRecord(entry.text(fields.text), own_type, targets, {"task": "reasoning"}, answer)
    image = index.images[image_id]
    size = image["height"], image["width"]
    return Record(ImageRecord(image_id, image["file_name"], size), queries=[query])


def _read_ids(entry: Entry, answer: str) -> list[int]:
    """The ids in an answer as R2SM writes it; none if it names no instance.

    Raises RecordError if it names some in another form.
    """
    ids = named_ids(answer)
    mentions = re.findall(r"instance id", answer, re.IGNORECASE)
    several = re.search(r"instance id is\s*\[?\s*\w+\]?\s*(,|and)\s*\d", answer, re.IGNORECASE)
    if several or len(ids) != len(mentions) or not all(map(str.isdecimal, ids)):
        problem = "the ids in its answer cannot be read"
        raise entry.error(problem, "write 'instance id is [3]' for each of them")
    return [int(number) for number in ids]
