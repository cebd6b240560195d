"""`data queries`: queries that a vision-language model writes (`requests`, `parse`), and queries of
the grammar of the scenes (`template`).

The first is how the queries of the R2SM paper were made. Requests have the form of the
OpenAI-compatible batch interfaces, one line of JSON for each image and mask type. Answers have the
form of R2SM, `<Q>…</Q><A>instance id is [3], class name is [mug]; …</A>`, or of LISA++ ("label name
is"). The prompts are in llm_queries.toml.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

import numpy as np
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.crops import MIN_HIDDEN_SHARE
from r2sm_jax.data.dataset import ImageTruth, Instance, query_record, read_json, write_records
from r2sm_jax.data.images import data_url
from r2sm_jax.data.readers.answers import QUESTION, TAG, read_instances, without_thoughts
from r2sm_jax.errors import InputError, atomic_write, load_json, refuse_overwrite
from r2sm_jax.query import MASK_TYPES, MaskType, Query
from r2sm_jax.synthetic.queries.nouns import same_class, says_name, words_of
from r2sm_jax.synthetic.queries.write import write_queries
from r2sm_jax.synthetic.scenes.scene import describe_objects, forbidden_targets

PROMPTS = tomllib.loads((files("r2sm_jax.tools") / "llm_queries.toml").read_text("utf-8"))
REASONS = {
    "unreadable": "a line, question or answer that cannot be read, or is about no listed image",
    "wrong instance": "an id that the request did not offer, or with another class name",
    "gives away": "a question that names a class it asks for, or has coordinates",
    "near-duplicate": "a question nearly like an earlier one of the same image and mask type",
}
"""Why a query is left out, in the order in which it is checked."""
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

COORDINATES = re.compile(
    r"[\[(]\s?-?\d+\s?[,;]|\d\s?,\s-?\d|\b[xy]\s?[=:]\s?-?\d"
    r"|\b(?:coordinates|bounding box|polygon)\b",
    re.IGNORECASE,
)

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
    `ignore` annotation, and COCOA's stuff (`isStuff`) only if there is nothing else. Send the lines
    to a batch interface, or to any chat model, and give the answers to `queries parse`.

    Args:
        dataset: The dataset file.
        out: The JSON Lines file to write, such as requests.jsonl.
        images: Folder of the images to embed; by default they are beside the dataset file.
        image: Name the image by its file name, or embed it as a JPEG in base64.
        model: Name of the model to put into every request; by default the field is left out.
        queries: How many questions to ask for in a request.
        overwrite: Replace the file if it exists.
    """
    data = read_json(dataset, images, need_images=image == "embed")
    counts = Counter[str]()
    with atomic_write(out, overwrite) as part, part.open("w", encoding="utf-8") as file:
        for index in range(len(data)):  # only one image's masks are in memory at a time
            truth = data.truth_at(index)
            url = truth.file_name
            if image == "embed":
                url = data_url(data.image_at(index), "JPEG", quality=90)
            for mask_type in MASK_TYPES:
                if offered_objects(truth, mask_type):
                    request = make_request(truth, mask_type, url, queries, model)
                    file.write(json.dumps(request, ensure_ascii=False) + "\n")
                    counts[mask_type] += 1
    types = f"{counts['modal']} modal, {counts['amodal']} amodal"
    version = PROMPTS["version"]
    print(f"wrote {out}: {counts.total()} requests ({types}), prompts version {version}")


def offered_objects(truth: ImageTruth, mask_type: MaskType) -> dict[int, Instance]:
    """The objects of an image that a request may ask for, by id: those with a mask of this type."""
    background = find_background(truth)
    offered = {}
    for instance in truth.instances:
        mask = instance.modal if mask_type == "modal" else instance.amodal
        if mask is not None and instance.id not in background and masks.areas([mask])[0]:
            offered[instance.id] = instance
    return offered


def make_request(
    truth: ImageTruth, mask_type: MaskType, url: str, count: int, model: str | None
) -> dict[str, Any]:
    """Makes one line of a batch, which asks for `count` queries of a mask type about an image."""
    rows = []
    for instance in offered_objects(truth, mask_type).values():
        is_occluded = None
        if instance.amodal is not None:
            visible_area, area = masks.areas([instance.modal, instance.amodal])
            is_occluded = visible_area <= (1 - MIN_HIDDEN_SHARE) * area
        mask = masks.expand(instance.modal if mask_type == "modal" else instance.complete)
        row = {
            "id": instance.id,
            "class_name": instance.category,
            "box": masks.coco_box(mask),
            "polygon": masks.outline(mask),
            "is_occluded": is_occluded,
        }
        rows.append(json.dumps(row, ensure_ascii=False))
    height, width = truth.size
    # The order of the paper's requests: rules and example, then the list, then the image.
    user = Template(PROMPTS["user"]).substitute(
        height=height, width=width, table="\n".join(rows), count=count
    )
    content = [{"type": "text", "text": user}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [
        {"role": "system", "content": system_prompt(mask_type, count)},
        {"role": "user", "content": content},
    ]
    body = {"model": model, "messages": messages} if model else {"messages": messages}
    custom_id = request_id(truth.image_id, mask_type)
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def system_prompt(mask_type: MaskType, count: int) -> str:
    """The rules for `count` queries of a mask type, the form of the answers, and an example."""
    return Template(PROMPTS["system"]).substitute(PROMPTS[mask_type], count=count)


def request_id(image_id: int, mask_type: MaskType) -> str:
    """The `custom_id` of a request, from which `parse` tells what an answer is about."""
    return f"img{image_id}-{mask_type}"


# Answers


class WrittenQuery(NamedTuple):
    """A question and its answer as a model wrote them."""

    question: str
    answer: str
    instances: tuple[tuple[int, str], ...]
    """Ids and class names in the answer; empty if it cannot be read."""


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
        out: The dataset file to write. It is not written if no query is usable.
        rejected: JSON Lines file to write with what was left out, and why.
        overwrite: Replace these files if they exist.
    """
    data = read_json(dataset, need_images=False)
    truths = [data.truth_at(index) for index in range(len(data))]
    added, left_out = collect_queries(truths, answers)
    if rejected is not None:
        with atomic_write(rejected, overwrite) as part:
            part.write_text("".join(json.dumps(row) + "\n" for row in left_out), "utf-8")
    reasons = Counter(row["reason"] for row in left_out)
    for reason, description in REASONS.items():
        print(f"{reason:<16}{reasons[reason]:>8}  {description}")
    if not added and reasons.keys() <= {"unreadable"}:
        raise InputError(
            f"{', '.join(map(str, answers))}: no line holds a question for this dataset; give the "
            "answers to the requests that were made from it"
        )
    add_queries(dataset, added, out, overwrite)
    types = Counter(query.mask_type for _, query in added)
    print(f"wrote {out}: {types['modal']} modal and {types['amodal']} amodal queries more")


def collect_queries(
    truths: Sequence[ImageTruth], paths: Sequence[Path]
) -> tuple[list[tuple[int, Query]], list[dict[str, Any]]]:
    """Collects the queries of files of answers.

    Returns the usable ones with the ids of their images, and rows that say why the others were left
    out.
    """
    requested: dict[str, tuple[ImageTruth, MaskType]] = {}
    # The words of each question so far by request, to find near-duplicates.
    earlier: dict[str, list[frozenset[str]]] = {}
    for truth in truths:
        for mask_type in MASK_TYPES:
            custom_id = request_id(truth.image_id, mask_type)
            requested[custom_id] = truth, mask_type
            known = [query.text for query in truth.queries if query.mask_type == mask_type]
            earlier[custom_id] = [_content_words(text) for text in known]

    added, left_out = [], []
    for place, custom_id, text in _read_lines(paths):
        if custom_id not in requested:
            left_out.append(place | {"reason": "unreadable", "answer": text})
            continue
        truth, mask_type = requested[custom_id]
        offered = offered_objects(truth, mask_type)
        for written in read_answer(without_thoughts(text)):
            reason = _fault(written, offered, earlier[custom_id])
            if reason:
                row = {"reason": reason, "question": written.question, "answer": written.answer}
                left_out.append(place | row)
                continue
            earlier[custom_id].append(_content_words(written.question))
            ids = tuple(dict.fromkeys(number for number, _ in written.instances))
            kind = {"task": "reasoning", "multi": len(ids) > 1, "source": "llm"}
            kind["answer"] = written.answer
            query = Query(len(added), written.question, mask_type, ids, kind)
            added.append((truth.image_id, query))
    return added, left_out


def _read_lines(paths: Sequence[Path]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields place, request id and text of each line; both are "" where it cannot be read."""
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                    custom_id = record["custom_id"]
                    text = record.get("text")
                    if text is None:
                        text = record["response"]["body"]["choices"][0]["message"]["content"]
                    if isinstance(text, list):  # some services give a message in parts
                        text = "".join(part["text"] for part in text)
                except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                    custom_id, text = "", line
                yield {"file": str(path), "line": number}, str(custom_id), str(text)


def read_answer(text: str) -> list[WrittenQuery]:
    """Reads the questions and answers in what a model wrote, one for each `<Q>`.

    Closing tags, and the one that opens the answer, may be missing. Brackets, case and text around
    the tags do not matter. Text without any `<Q>` counts as one question that cannot be read.
    """
    _, *parts = QUESTION.split(text)
    written = []
    for part in parts or [""]:
        question, _, answer = TAG.sub("\n", part).partition("\n")
        question = " ".join(question.split())
        pairs = read_instances(answer)
        # An instance that cannot be read makes the whole answer doubtful.
        is_readable = bool(words_of(question)) and all(number and name for number, name in pairs)
        instances = [(int(number), name) for number, name in pairs if is_readable]
        written.append(WrittenQuery(question, answer.strip(), tuple(instances)))
    return written


def _fault(
    written: WrittenQuery, offered: Mapping[int, Instance], earlier: Sequence[frozenset[str]]
) -> str:
    """The reason to leave a query out, or "". `offered` are the objects of its request by id."""
    if not written.instances:
        return "unreadable"
    for number, name in written.instances:
        if number not in offered or not same_class(name, offered[number].category):
            return "wrong instance"
    names = {offered[number].category for number, _ in written.instances}
    gives_name = any(says_name(written.question, name) for name in names)
    if gives_name or COORDINATES.search(written.question):
        return "gives away"
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


# Template


def template(
    dataset: Positional[Path],
    /,
    out: Path,
    queries: int = 8,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Adds queries from the embedded grammar to a copy of a dataset file.

    Half of them are modal, half amodal. An `ignore` annotation gets no query, one whose complete
    mask is not known gets only modal ones, and COCOA's stuff (`isStuff`) gets queries only if there
    is nothing else. A query that the file has already is not added again.

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
    data = read_json(dataset, need_images=False)
    added = []
    for index in range(len(data)):  # only one image's masks are in memory at a time
        truth = data.truth_at(index)
        added += [(truth.image_id, query) for query in template_queries(truth, queries, seed)]
    add_queries(dataset, added, out, overwrite)
    types = Counter(query.mask_type for _, query in added)
    num_without = len(data) - len({image_id for image_id, _ in added})
    print(
        f"wrote {out}: {len(added)} queries more ({types['modal']} modal, {types['amodal']} "
        f"amodal); {num_without} of {len(data)} images got none"
    )


def template_queries(truth: ImageTruth, count: int, seed: int) -> list[Query]:
    """Writes up to `count` queries about an image, without those that it has already.

    Raises ValueError for a mask that cannot be read.
    """
    instances = [instance.map_masks(masks.expand) for instance in truth.instances]
    forbidden = forbidden_targets(instances, find_background(truth))
    # A generator of its own for each image, so that queries do not depend on the other images.
    # A seed cannot be negative, and ids can.
    rng = np.random.default_rng((seed, truth.image_id % 2**63))
    facts = describe_objects(instances)
    earlier = {(query.text, frozenset(query.instance_ids)) for query in truth.queries}
    return [
        query
        for query in write_queries(facts, rng=rng, count=count, forbidden=forbidden, of_photo=True)
        if (query.text, frozenset(query.instance_ids)) not in earlier
    ]


def find_background(truth: ImageTruth) -> set[int]:
    """The ids of the objects of an image that no query asks for: ignored ones, and COCOA's stuff
    (floor, carpet, sky) unless there is nothing else."""
    ignored = {instance.id for instance in truth.instances if instance.ignore}
    stuff = {instance.id for instance in truth.instances if instance.fields.get("isStuff")}
    return ignored if len(ignored | stuff) == len(truth.instances) else ignored | stuff


def add_queries(
    dataset: Path, added: Sequence[tuple[int, Query]], out: Path, overwrite: bool
) -> None:
    """Writes a copy of a dataset file with more queries, given with the ids of their images.

    They are numbered after those of the file.
    """
    records = load_json(dataset, "a dataset file")
    first = 1 + max((query["id"] for query in records["queries"]), default=0)
    for number, (image_id, query) in enumerate(added, first):
        records["queries"].append(query_record(image_id, replace(query, id=number)))
    write_records(out, records, overwrite)
