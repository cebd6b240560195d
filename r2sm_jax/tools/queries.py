"""`data queries requests` and `parse`: queries that a vision-language model writes.

That is how the queries of the R2SM paper were made. Requests have the form of the OpenAI-compatible
batch interfaces, one line of JSON for each image and mask type. Answers are read tolerantly
(answers.py); then unusable queries are left out. The prompts are in llm_queries.toml.
"""

import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import (
    Dataset,
    Instance,
    category_names,
    group_by_image,
    read_json,
    read_records,
)
from r2sm_jax.data.images import data_url
from r2sm_jax.errors import InputError, atomic_write, read_bytes, refuse_overwrite
from r2sm_jax.query import MASK_TYPES, MaskType
from r2sm_jax.synthetic.queries.nouns import same_class, says_name, words_of
from r2sm_jax.synthetic.queries.objects import MIN_HIDDEN_SHARE
from r2sm_jax.tools.answers import COORDINATES, QuestionAndAnswer, read_answer
from r2sm_jax.tools.records import write_json
from r2sm_jax.tools.template import background_ids

PROMPTS = tomllib.loads((files("r2sm_jax.tools") / "llm_queries.toml").read_text("utf-8"))
REASONS = {
    "bad line": "a line that is no JSON object with a custom_id",
    "no answer": "a request that failed or came back empty",
    "unknown request": "a custom_id that belongs to no image of the dataset",
    "bad format": "a question without a readable answer",
    "unknown instance": "an id that the request did not offer",
    "wrong class": "a class name that is not the one of its id",
    "class name": "a question that names the class of an object it asks for",
    "coordinates": "a question with coordinates, a box or a polygon",
    "near-duplicate": "a question nearly like an earlier one of the same image and mask type",
}
"""Why a query is left out, in the order in which it is checked."""
UNREADABLE = ("bad line", "no answer", "unknown request", "bad format")
"""Those of lines that hold no question for this dataset."""
MAX_SIMILARITY = 0.8
"""Two questions are near-duplicates from this share on: words in common, of the words in either."""
COMMON_WORDS = frozenset(
    """
    a an the this that these those it its they them their there here and or of in on at to for from
    with by as is are was were be been being do does did can could would will may might should i me
    my you your we us our who whom which what where how please
    """.split()
)
"""Words that do not tell one question from another."""

# Requests


def requests(
    dataset: Positional[Path],
    /,
    out: Path,
    images: Path | None = None,
    image: Literal["reference", "embed"] = "reference",
    model: str | None = None,
    queries: int = 5,
    overwrite: bool = False,
) -> None:
    """Writes requests for queries to a vision-language model.

    There is one line for each image and mask type. It offers what the template may ask for: no
    `ignore` annotation, and COCOA's stuff (`isStuff`) only if there is nothing else. Send the lines to a batch interface, or to any
    chat model, and give the answers to `queries parse`.

    Args:
        dataset: The dataset file.
        out: The JSON Lines file to write, such as requests.jsonl.
        images: Folder of the images to embed; by default they are beside the dataset file.
        image: Name the image by its file name, or embed it as a JPEG in base64.
        model: Name of the model to put into every request; by default the field is left out.
        queries: How many questions to ask for in a request.
        overwrite: Replace the file if it exists.
    """
    if queries < 1:
        raise InputError(f"--queries {queries}: nothing to ask for; give 1 or more")
    if images is not None and image == "reference":
        remedy = "images are read to embed them; add --image embed"
        raise InputError(f"--images {images}: {remedy}")
    if out.resolve() == dataset.resolve():
        raise InputError(f"--out {out}: this is the dataset file itself; give another name")

    data = read_json(dataset, images, need_images=False)
    counts = Counter[str]()
    with atomic_write(out, overwrite) as part, part.open("wb") as file:
        for index, record in enumerate(data.images):
            tables = _make_tables(data, index)
            url = record["file_name"]
            if tables and image == "embed":
                url = data_url(data.image_at(index), "JPEG", quality=90)
            for mask_type, table in tables.items():
                request = _make_request(record, mask_type, table, url, queries, model)
                file.write(_json_line(request))
                counts[mask_type] += 1

    types = f"{counts['modal']} modal, {counts['amodal']} amodal"
    version = PROMPTS["version"]
    print(f"wrote {out}: {counts.total()} requests ({types}), prompts version {version}")


def _make_tables(data: Dataset, index: int) -> dict[MaskType, str]:
    """The list of an image's instances for each mask type that has some."""
    background = background_ids(data.annotations_at(index))
    # Only one image's masks are in memory at a time.
    instances = [
        instance.convert(masks.expand)
        for instance in data.rles_at(index)
        if instance.id not in background
    ]
    tables: dict[MaskType, str] = {}
    for mask_type in MASK_TYPES:
        rows = list(_rows(instances, mask_type))
        if rows:
            tables[mask_type] = "\n".join(rows)
    return tables


def _rows(instances: Sequence[Instance], mask_type: MaskType) -> Iterator[str]:
    """One line of JSON about each instance that has pixels in its mask of this type."""
    for instance in instances:
        mask = instance.modal if mask_type == "modal" else instance.amodal
        if mask is None or not mask.any():
            continue
        is_occluded = None
        if instance.amodal is not None:
            visible_area = masks.area(instance.modal)
            is_occluded = visible_area <= (1 - MIN_HIDDEN_SHARE) * masks.area(instance.amodal)
        row = {
            "id": instance.id,
            "class_name": instance.category,
            "box": masks.coco_box(mask),
            "polygon": masks.outline(mask),
            "is_occluded": is_occluded,
        }
        yield json.dumps(row, ensure_ascii=False)


def _make_request(
    image: Mapping[str, Any],
    mask_type: MaskType,
    table: str,
    url: str,
    count: int,
    model: str | None,
) -> dict[str, Any]:
    """One line of a batch, which asks for `count` queries of a mask type about the image at `url`."""
    # The order of the paper's requests: rules and example, then the list, then the image.
    user = Template(PROMPTS["user"]).substitute(image, table=table, count=count)
    content = [{"type": "text", "text": user}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [
        {"role": "system", "content": system_prompt(mask_type, count)},
        {"role": "user", "content": content},
    ]
    body: dict[str, Any] = {"messages": messages}
    if model:
        body = {"model": model, **body}
    custom_id = request_id(image["id"], mask_type)
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def system_prompt(mask_type: MaskType, count: int) -> str:
    """The rules for `count` queries of a mask type, the form of the answers, and an example."""
    return Template(PROMPTS["system"]).substitute(PROMPTS[mask_type], count=count)


def request_id(image_id: int, mask_type: MaskType) -> str:
    """The `custom_id` of a request, from which `parse` tells what an answer is about."""
    return f"img{image_id}-{mask_type}"


def _json_line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


# Answers


def parse(
    dataset: Positional[Path],
    answers: Positional[tuple[Path, ...]],
    /,
    out: Path,
    rejected: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Adds the usable queries in a model's answers to a copy of a dataset file.

    Args:
        dataset: The dataset file that the requests were made from.
        answers: JSON Lines files: the output of a batch interface, or lines with custom_id and
            text.
        out: The dataset file to write. It is not written if no line holds a question for this
            dataset.
        rejected: JSON Lines file to write with what was left out, and why.
        overwrite: Replace these files if they exist.
    """
    if not answers:
        raise InputError(
            "queries parse: there are no answers; give the files with the model's answers"
        )
    _check_output("--out", out, answers, overwrite)
    if rejected is not None:
        _check_output("--rejected", rejected, (*answers, dataset, out), overwrite)

    records = read_records(dataset)
    num_before = len(records["queries"])
    left_out = _add_queries(records, answers)
    if rejected is not None:
        with atomic_write(rejected, overwrite) as part:
            part.write_bytes(b"".join(map(_json_line, left_out)))
    added = Counter(query["mask_type"] for query in records["queries"][num_before:])
    reasons = Counter(row["reason"] for row in left_out)
    _refuse_unreadable(answers, added, reasons)
    write_json(out, records, overwrite)

    for mask_type in MASK_TYPES:
        label = f"added, {mask_type}"
        print(f"{label:<16}{added[mask_type]:>8}")
    for reason, description in REASONS.items():
        print(f"{reason:<16}{reasons[reason]:>8}  {description}")
    print(f"{'left out':<16}{len(left_out):>8}")
    print(f"wrote {out}: {len(records['queries'])} queries, {added.total()} of them new")


def _check_output(flag: str, path: Path, used: Sequence[Path], overwrite: bool) -> None:
    """Raises InputError for a file that is among the `used` ones, or must not be replaced."""
    if path.resolve() in {other.resolve() for other in used}:
        raise InputError(f"{flag} {path}: this file is used for something else; give another name")
    refuse_overwrite(path, overwrite)


def _refuse_unreadable(answers: Sequence[Path], added: Counter[str], reasons: Counter[str]) -> None:
    """Raises InputError if no line of the answers holds a question for the dataset."""
    if added or reasons.keys() - set(UNREADABLE):
        return
    names = ", ".join(map(str, answers))
    if not reasons:
        raise InputError(f"{names}: there is no line; give the files with the model's answers")
    causes = ", ".join(f"{count} times {REASONS[reason]}" for reason, count in reasons.items())
    raise InputError(
        f"{names}: no line holds a question for this dataset ({causes}); give the answers to the "
        "requests that were made from it"
    )


class ModelAnswer(NamedTuple):
    """A line of a file of answers."""

    file: str
    line: int
    custom_id: str
    text: str
    reason: str
    """Why it has no text to read, a key of REASONS; "" if it has."""


def _add_queries(records: dict[str, Any], paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Appends the usable queries to the records. Returns the others, each with its reason."""
    by_image = group_by_image(records, "annotations")
    requested: dict[str, tuple[int, MaskType]] = {}
    for image_id in by_image:
        for mask_type in MASK_TYPES:
            requested[request_id(image_id, mask_type)] = image_id, mask_type
    # The words of each question so far by image and mask type, to find near-duplicates.
    earlier: dict[Any, list[frozenset[str]]] = defaultdict(list)
    for query in records["queries"]:
        earlier[query["image_id"], query["mask_type"]].append(_content_words(query["text"]))

    left_out = []
    next_id = max((query["id"] for query in records["queries"]), default=0) + 1
    names = category_names(records)
    for line in _read_lines(paths):
        location = {"file": line.file, "line": line.line, "custom_id": line.custom_id}
        reason = line.reason
        if not reason and line.custom_id not in requested:
            reason = "unknown request"
        if reason:
            left_out.append({**location, "reason": reason, "question": "", "answer": line.text})
            continue

        image_id, mask_type = requested[line.custom_id]
        offered = _offered_names(by_image[image_id], mask_type, names)
        earlier_questions = earlier[image_id, mask_type]
        for written in read_answer(line.text):
            question, answer = written.question, written.answer
            reason = _fault(written, offered, earlier_questions)
            if reason:
                rejected = {"reason": reason, "question": question, "answer": answer}
                left_out.append({**location, **rejected})
                continue
            earlier_questions.append(_content_words(question))
            instance_ids = list(dict.fromkeys(number for number, _ in written.instances))
            query = {
                "id": next_id,
                "image_id": image_id,
                "text": question,
                "mask_type": mask_type,
                "instance_ids": instance_ids,
                "kind": {"task": "reasoning", "multi": len(instance_ids) > 1, "source": "llm"},
                "answer": answer,
            }
            records["queries"].append(query)
            next_id += 1
    return left_out


def _offered_names(
    annotations: Sequence[Mapping[str, Any]], mask_type: MaskType, names: Mapping[int, str]
) -> dict[int, str]:
    """The class names, by id, of the annotations that a request of this mask type lists."""
    background = background_ids(annotations)
    offered = {}
    for annotation in annotations:
        has_mask = mask_type == "modal" or annotation.get("segmentation") is not None
        if has_mask and annotation["id"] not in background:
            offered[annotation["id"]] = names[annotation["category_id"]]
    return offered


def _read_lines(paths: Sequence[Path]) -> Iterator[ModelAnswer]:
    """Yields the lines of files of answers that are not blank."""
    for path in paths:
        for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
            if line.strip():
                yield ModelAnswer(str(path), number, *_read_line(line))


def _read_line(line: bytes) -> tuple[str, str, str]:
    """Request id, text and reason of a line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("custom_id"), str):
        return "", line.decode("utf-8", "replace").strip(), "bad line"

    custom_id = record["custom_id"]
    content = record.get("text")
    if content is None:
        try:
            content = record["response"]["body"]["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
    if isinstance(content, list):  # some services give a message in parts
        texts = [str(part.get("text") or "") for part in content if isinstance(part, dict)]
        content = "".join(texts)
    if not isinstance(content, str) or not content.strip():
        error = record.get("error")
        return custom_id, json.dumps(error) if error else "", "no answer"
    # Half characters cannot be written.
    return custom_id, content.encode("utf-8", "replace").decode("utf-8"), ""


def _fault(
    written: QuestionAndAnswer, offered: Mapping[int, str], earlier: Sequence[frozenset[str]]
) -> str:
    """The reason to leave a query out, or "". `offered` has class names by instance id."""
    if not written.instances:
        return "bad format"
    if any(number not in offered for number, _ in written.instances):
        return "unknown instance"
    if not all(same_class(name, offered[number]) for number, name in written.instances):
        return "wrong class"
    if any(says_name(written.question, offered[number]) for number, _ in written.instances):
        return "class name"
    if COORDINATES.search(written.question):
        return "coordinates"
    # The share of common words (Jaccard), as a model often asks the same with other small words.
    words = _content_words(written.question)
    if any(len(words & other) >= MAX_SIMILARITY * len(words | other) for other in earlier):
        return "near-duplicate"
    return ""


def _content_words(question: str) -> frozenset[str]:
    """The words that can tell a question from another one, without a final s."""
    words = words_of(question)
    content = frozenset(word.removesuffix("s") for word in words if word not in COMMON_WORDS)
    return content or frozenset(words)
