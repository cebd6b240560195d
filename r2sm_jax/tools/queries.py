"""`data queries`: queries that a vision-language model writes (`requests`, `parse`), and queries of
the grammar of the scenes (`template`).

The first is how the queries of the R2SM paper were made. Requests have the form of the
OpenAI-compatible batch interfaces, one line of JSON for each image and mask type. Answers have the
form of R2SM, `<Q>…</Q><A>instance id is [3], class name is [mug]; …</A>`, or of LISA++ ("label name
is"). The prompts are in llm_queries.toml.
"""

import base64
import json
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import ImageTruth, Instance, read_json
from r2sm_jax.errors import InputError, atomic_write, load_json, refuse_overwrite
from r2sm_jax.query import MASK_TYPES, MaskType, Query
from r2sm_jax.synthetic.queries.nouns import same_class, says_name, words_of
from r2sm_jax.synthetic.queries.objects import MIN_HIDDEN_SHARE
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

QUESTION = re.compile(r"<\s?Q\s?\d{0,2}\s?>", re.IGNORECASE)
"""The opening of a question: <Q>, < q > or <Q1>. Its closing tag may be missing."""
TAG = re.compile(r"<\s?/?\s?[QA]\s?\d{0,2}\s?>", re.IGNORECASE)
INSTANCE = re.compile(
    r"instance[\s_]id\W{0,4}(?:is)?[\W_]{0,6}(\d{1,18})\W{1,6}(?:and )?(?:the )?"
    r"(?:class|label)[\s_]name\W{0,4}(?:is)?\W{0,6}([^\]\n;:.*\"')]+)",
    re.IGNORECASE,
)
COORDINATES = re.compile(
    r"[\[(]\s?-?\d{1,9}\s?[,;]\s?-?\d|\d\s?,\s-?\d|\b[xy]\s?[=:]\s?-?\d"
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
    stuff = stuff_ids(load_json(dataset, "a dataset file"))
    counts = Counter[str]()
    with atomic_write(out, overwrite) as part, part.open("w", encoding="utf-8") as file:
        for index in range(len(data)):  # only one image's masks are in memory at a time
            truth = data.truth_at(index)
            tables = make_tables(truth, find_background(truth, stuff))
            url = truth.file_name
            if tables and image == "embed":
                url = to_data_url(data[index].image)
            for mask_type, table in tables.items():
                request = make_request(truth, mask_type, table, url, queries, model)
                file.write(json.dumps(request, ensure_ascii=False) + "\n")
                counts[mask_type] += 1

    types = f"{counts['modal']} modal, {counts['amodal']} amodal"
    version = PROMPTS["version"]
    print(f"wrote {out}: {counts.total()} requests ({types}), prompts version {version}")


def make_tables(truth: ImageTruth, background: set[int]) -> dict[MaskType, str]:
    """Lists an image's instances for each mask type that has some, one line of JSON each."""
    tables: dict[MaskType, str] = {}
    for mask_type in MASK_TYPES:
        rows = []
        for instance in truth.instances:
            mask = instance.modal if mask_type == "modal" else instance.amodal
            if mask is None or instance.id in background or not masks.areas([mask])[0]:
                continue
            rows.append(_row(instance, masks.expand(mask)))
        if rows:
            tables[mask_type] = "\n".join(rows)
    return tables


def _row(instance: Instance, mask: masks.Mask) -> str:
    is_occluded = None
    if instance.amodal is not None:
        visible_area, area = masks.areas([instance.modal, instance.amodal])
        is_occluded = visible_area <= (1 - MIN_HIDDEN_SHARE) * area
    row = {
        "id": instance.id,
        "class_name": instance.category,
        "box": masks.coco_box(mask),
        "polygon": masks.outline(mask),
        "is_occluded": is_occluded,
    }
    return json.dumps(row, ensure_ascii=False)


def make_request(
    truth: ImageTruth, mask_type: MaskType, table: str, url: str, count: int, model: str | None
) -> dict[str, Any]:
    """Makes one line of a batch, which asks for `count` queries of a mask type about an image."""
    height, width = truth.size
    # The order of the paper's requests: rules and example, then the list, then the image.
    user = Template(PROMPTS["user"]).substitute(
        height=height, width=width, table=table, count=count
    )
    content = [{"type": "text", "text": user}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [
        {"role": "system", "content": system_prompt(mask_type, count)},
        {"role": "user", "content": content},
    ]
    body: dict[str, Any] = {"messages": messages}
    if model:
        body = {"model": model, **body}
    custom_id = request_id(truth.image_id, mask_type)
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def system_prompt(mask_type: MaskType, count: int) -> str:
    """The rules for `count` queries of a mask type, the form of the answers, and an example."""
    return Template(PROMPTS["system"]).substitute(PROMPTS[mask_type], count=count)


def request_id(image_id: int, mask_type: MaskType) -> str:
    """The `custom_id` of a request, from which `parse` tells what an answer is about."""
    return f"img{image_id}-{mask_type}"


def to_data_url(image: Any) -> str:
    """A URL that holds an image `uint8 [H W 3]` itself, as a JPEG."""
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


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
    records = load_json(dataset, "a dataset file")
    added, left_out = collect_queries(
        [data.truth_at(index) for index in range(len(data))], stuff_ids(records), answers
    )
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

    records["queries"] += added
    with atomic_write(out, overwrite) as part:
        part.write_text(json.dumps(records, ensure_ascii=False) + "\n", "utf-8")
    types = Counter(query["mask_type"] for query in added)
    print(f"wrote {out}: {types['modal']} modal and {types['amodal']} amodal queries more")


def collect_queries(
    truths: Sequence[ImageTruth], stuff: set[int], paths: Sequence[Path]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Collects the queries of files of answers.

    Returns the records of the usable ones, and rows that say why the others were left out.
    """
    requested: dict[str, tuple[ImageTruth, MaskType]] = {}
    # The words of each question so far by image and mask type, to find near-duplicates.
    earlier: dict[tuple[int, str], list[frozenset[str]]] = defaultdict(list)
    next_id = 1
    for truth in truths:
        for mask_type in MASK_TYPES:
            requested[request_id(truth.image_id, mask_type)] = truth, mask_type
        for query in truth.queries:
            earlier[truth.image_id, query.mask_type].append(_content_words(query.text))
            next_id = max(next_id, query.id + 1)

    added, left_out = [], []
    for place, custom_id, text in _read_lines(paths):
        if custom_id not in requested:
            left_out.append(place | {"reason": "unreadable", "answer": text})
            continue
        truth, mask_type = requested[custom_id]
        background = find_background(truth, stuff)
        offered = {
            instance.id: instance.category
            for instance in truth.instances
            if instance.id not in background
            and (mask_type == "modal" or instance.amodal is not None)
        }
        earlier_questions = earlier[truth.image_id, mask_type]
        for written in read_answer(text):
            reason = _fault(written, offered, earlier_questions)
            if reason:
                row = {"reason": reason, "question": written.question, "answer": written.answer}
                left_out.append(place | row)
                continue
            earlier_questions.append(_content_words(written.question))
            ids = list(dict.fromkeys(number for number, _ in written.instances))
            query = {
                "id": next_id,
                "image_id": truth.image_id,
                "text": written.question,
                "mask_type": mask_type,
                "instance_ids": ids,
                "kind": {"task": "reasoning", "multi": len(ids) > 1, "source": "llm"},
                "answer": written.answer,
            }
            added.append(query)
            next_id += 1
    return added, left_out


def _read_lines(paths: Sequence[Path]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields place, request id and text of each line; both are "" where it cannot be read."""
    for path in paths:
        lines = path.read_text("utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            custom_id, text = "", line
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
        instances = INSTANCE.findall(answer)
        # An instance that cannot be read makes the whole answer doubtful.
        is_complete = len(instances) == len(re.findall(r"instance[\s_]id", answer, re.IGNORECASE))
        pairs = [(int(number), name.strip()) for number, name in instances]
        is_readable = bool(words_of(question)) and is_complete
        written.append(WrittenQuery(question, answer.strip(), tuple(pairs) if is_readable else ()))
    return written


def _fault(
    written: WrittenQuery, offered: Mapping[int, str], earlier: Sequence[frozenset[str]]
) -> str:
    """The reason to leave a query out, or "". `offered` has class names by instance id."""
    if not written.instances:
        return "unreadable"
    for number, name in written.instances:
        if number not in offered or not same_class(name, offered[number]):
            return "wrong instance"
    gives_name = any(
        says_name(written.question, offered[number]) for number, _ in written.instances
    )
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
    records = load_json(dataset, "a dataset file")
    stuff = stuff_ids(records)
    number = max((query["id"] for query in records["queries"]), default=0)
    added = []
    for index in range(len(data)):  # only one image's masks are in memory at a time
        truth = data.truth_at(index)
        for query in template_queries(truth, queries, seed, stuff):
            number += 1
            record = {
                "id": number,
                "image_id": truth.image_id,
                "text": query.text,
                "mask_type": query.mask_type,
                "instance_ids": list(query.instance_ids),
                "kind": dict(query.kind),
            }
            added.append(record)
    records["queries"] += added
    with atomic_write(out, overwrite) as part:
        part.write_text(json.dumps(records, ensure_ascii=False) + "\n", "utf-8")
    types = Counter(query["mask_type"] for query in added)
    num_without = len(data) - len({query["image_id"] for query in added})
    print(
        f"wrote {out}: {len(added)} queries more ({types['modal']} modal, {types['amodal']} "
        f"amodal); {num_without} of {len(data)} images got none"
    )


def template_queries(
    truth: ImageTruth, count: int, seed: int, stuff: Collection[int] = ()
) -> list[Query]:
    """Writes up to `count` queries about an image, without those that it has already.

    `stuff` are the ids of COCOA's stuff. Raises ValueError for a mask that cannot be read.
    """
    instances = [instance.convert(masks.expand) for instance in truth.instances]
    forbidden = forbidden_targets(instances, find_background(truth, stuff))
    # A generator of its own for each image, so that queries do not depend on the other images.
    # A seed cannot be negative, and ids can.
    rng = np.random.default_rng((seed, truth.image_id % 2**63))
    facts = describe_objects(instances)
    earlier = {(query.text, frozenset(query.instance_ids)) for query in truth.queries}
    return [
        query
        for query in write_queries(facts, rng=rng, count=count, forbidden=forbidden)
        if (query.text, frozenset(query.instance_ids)) not in earlier
    ]


def stuff_ids(records: Mapping[str, Any]) -> set[int]:
    """The ids of COCOA's stuff (floor, carpet, sky) among the records of a dataset file."""
    return {record["id"] for record in records["annotations"] if record.get("isStuff")}


def find_background(truth: ImageTruth, stuff: Collection[int]) -> set[int]:
    """The ids of the objects of an image that no query asks for: ignored ones, and stuff unless
    there is nothing else."""
    ids = {instance.id for instance in truth.instances}
    ignored = {instance.id for instance in truth.instances if instance.ignore}
    background = ignored | ids.intersection(stuff)
    return ignored if background == ids else background
