"""Joins R2SM's text queries to a converted dataset file.

The layout of the released query files is not known, so the field names are settings: a JSON list, or one JSON object a
line. Instances are given as ids, or named in an answer, "instance id is 3, class name is cup; ..." (closing tags and
brackets are optional, as in the paper's printed samples).
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2sm_jax.data.records import bad_record, is_id
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.readers.conversion import need

NAMED_ID = re.compile(r"instance id is\s*\[?\s*(\d+)", re.IGNORECASE)


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


def join_queries(
    path: Path, records: Mapping[str, Any], fields: R2SMFields, mask_type: str | None = None
) -> list[dict[str, Any]]:
    """The queries of `path` as records of the dataset `records`.

    `mask_type` is for files that hold one type only. Ids of instances are those of the annotations' `source_id` where
    there is one, else of the annotations. Raises InputError for a query that does not fit the dataset.
    """
    images = {image["id"]: image["id"] for image in records["images"]}
    names = {Path(image["file_name"]).name: image["id"] for image in records["images"]}
    by_image: dict[int, dict[int, int]] = {}
    for annotation in records["annotations"]:
        own = by_image.setdefault(annotation["image_id"], {})
        own[annotation.get("source_id", annotation["id"])] = annotation["id"]
    queries = []
    for where, record in _queries(path):
        key = need(path, where, record, fields.image, (int, str))
        image_id = images.get(key) if is_id(key) else names.get(Path(str(key)).name)
        if image_id is None:
            raise bad_record(path, where, f"image {key!r} is not in the dataset", "convert the images first")
        answer = record.get(fields.answer)
        listed = record.get(fields.instances)
        if listed is None and isinstance(answer, str):
            listed = [int(number) for number in NAMED_ID.findall(answer)]
        if not isinstance(listed, list):
            raise bad_record(
                path, where, f"it has neither {fields.instances} nor {fields.answer}", "name its instances"
            )
        known = by_image.get(image_id, {})
        missing = [number for number in listed if not is_id(number) or number not in known]
        if missing:
            raise bad_record(path, where, f"image {key!r} has no instance {missing[0]!r}", "correct the id")
        wanted = mask_type or need(path, where, record, fields.mask_type, str)
        if wanted not in ("modal", "amodal"):
            raise bad_record(path, where, f"its mask type is {wanted!r}", 'write "modal" or "amodal"')
        text = need(path, where, record, fields.text, str)
        query = {"id": len(queries) + 1, "image_id": image_id, "text": " ".join(text.split()), "mask_type": wanted}
        query["instance_ids"] = [known[number] for number in dict.fromkeys(listed)]
        query["kind"] = {"task": "reasoning", "multi": len(query["instance_ids"]) > 1}
        queries.append(query | ({"answer": answer} if isinstance(answer, str) else {}))
    return queries


def _queries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix == ".jsonl":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot read the file ({error}); check the path") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise bad_record(path, f"line {number}", f"this is not JSON ({error})", "correct it") from error
        return
    listed = load_json(path, "a file of queries")
    if not isinstance(listed, list):
        raise InputError(f"{path}: this is no list of queries; give one, or one JSON object a line (.jsonl)")
    yield from ((f"[{index}]", record) for index, record in enumerate(listed))
