"""Queries written by a vision-language model: requests to send to it, and what it answered read
back.

Requests have the form of the OpenAI-compatible batch interfaces, one line of JSON for each image
and mask type. Answers have the form of R2SM, `<Q>…</Q><A>instance id is [3], class name is [mug];
…</A>`, or of LISA++ ("label name is"). Reading them is lenient; then unusable queries are left out.
Prompts and reasons are in llm_queries.toml.
"""

import json
import re
import shutil
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, category_names, group_by_image, read_json, read_records
from r2sm_jax.data.images import data_url
from r2sm_jax.errors import InputError, read_bytes, refuse, refuse_overwrite, writing
from r2sm_jax.query import MASK_TYPES, MaskType
from r2sm_jax.synthetic.queries.nouns import same_class, says_name, words_of
from r2sm_jax.synthetic.queries.objects import MIN_HIDDEN_SHARE
from r2sm_jax.tools.convert import write_json

TEXTS = tomllib.loads((files("r2sm_jax.tools") / "llm_queries.toml").read_text("utf-8"))
REASONS: dict[str, str] = TEXTS["reasons"]
PATTERNS = {
    name: re.compile(text, re.VERBOSE | re.IGNORECASE) for name, text in TEXTS["patterns"].items()
}
_AROUND_QUESTION, _AROUND_NAME = "\"'`*“” ", " \t.,:\"'`*()[]"
SIMILAR = 0.8
"""Two questions are near-duplicates from this share on: words in common, of the words in either."""

# Requests


def requests(
    dataset: Positional[Path],
    /,
    out: Path,
    images: Path | None = None,
    image: Literal["reference", "embed"] = "reference",
    model: str | None = None,
    queries: int = 5,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes requests for queries to a vision-language model: one line for each image and mask
    type.

    Send the lines to a batch interface, or to any chat model, and give the answers to `queries
    parse`.

    Args:
        dataset: The dataset file.
        out: The JSON Lines file to write, such as requests.jsonl.
        images: Folder of the images to embed; by default they are beside the dataset file.
        image: Name the image by its file name, or embed it as a JPEG in base64.
        model: Name of the model to put into every request; by default the field is left out.
        queries: How many questions to ask for in a request.
        resume: Keep the lines of an unfinished or older file and add the missing requests.
        overwrite: Replace the file if it exists.
    """
    images_unread = images is not None and image == "reference"
    refuse(
        {
            f"--queries {queries}: nothing to ask for; give 1 or more": queries < 1,
            f"--images {images}: images are read to embed them; add --image embed": images_unread,
            "--resume keeps the file, but --overwrite replaces it; give one of them": resume
            and overwrite,
            f"--out {out}: this is the dataset file itself; give another name": out.resolve()
            == dataset.resolve(),
        }
    )
    refuse_overwrite(out, overwrite or resume)
    data, written = read_json(dataset, images, need_images=False), Counter[str]()
    with writing(out) as part:
        kept = _keep_requests(out, part) if resume else set()
        with part.open("ab" if resume else "wb") as file:
            for index, entry in enumerate(
                data.images
            ):  # only one image's masks are in memory at a time
                missing: list[MaskType] = [
                    t for t in MASK_TYPES if _request_id(entry["id"], t) not in kept
                ]
                instances = (
                    [i.convert(masks.expand) for i in data.rles_at(index) if not i.ignore]
                    if missing
                    else []
                )
                drawn: dict[MaskType, str] = {t: "\n".join(_rows(instances, t)) for t in missing}
                tables: dict[MaskType, str] = {t: table for t, table in drawn.items() if table}
                url = entry["file_name"]
                if tables and image == "embed":
                    url = data_url(data.image_at(index), "JPEG", quality=90)
                for mask_type, table in tables.items():
                    file.write(_json_line(_request(entry, mask_type, table, url, queries, model)))
                    written[mask_type] += 1
    counts = f"{written.total()} requests ({written['modal']} modal, {written['amodal']} amodal)"
    print(
        f"wrote {out}: {counts}{f', {len(kept)} were there' if resume else ''}, prompts version {TEXTS['version']}"
    )


def _keep_requests(out: Path, part: Path) -> set[str]:
    """Makes `part` the complete lines of `out`, or of what an interrupted command left in `part`;
    gives their ids."""
    if out.exists():
        shutil.copyfile(out, part)
    kept, end = set(), 0
    with part.open("ab+") as file:
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                kept.add(json.loads(line)["custom_id"])
            except (ValueError, TypeError, KeyError, RecursionError):
                raise InputError(
                    f"{out}: line {number} is no request; remove it or use --overwrite"
                ) from None
            end += len(line)
        file.truncate(end)
    return kept


def _request(
    image: Mapping[str, Any],
    mask_type: MaskType,
    table: str,
    url: str,
    count: int,
    model: str | None,
) -> dict[str, Any]:
    user = Template(TEXTS["user"]).substitute(image, table=table, count=count)
    content = [{"type": "text", "text": user}, {"type": "image_url", "image_url": {"url": url}}]
    system = {"role": "system", "content": system_prompt(mask_type, count)}
    body = ({"model": model} if model else {}) | {
        "messages": [system, {"role": "user", "content": content}]
    }
    custom_id = _request_id(image["id"], mask_type)
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def system_prompt(mask_type: MaskType, count: int) -> str:
    """The rules for `count` queries of a mask type, the form of the answers, and an example."""
    return Template(TEXTS["system"]).substitute(TEXTS[mask_type], count=count)


def _request_id(image_id: int, mask_type: MaskType) -> str:
    return f"img{image_id}-{mask_type}"


def _rows(instances: list[Instance], mask_type: MaskType) -> Iterator[str]:
    """One line of JSON about each instance that has pixels in its mask of this type."""
    for instance in instances:
        mask = instance.modal if mask_type == "modal" else instance.amodal
        if mask is None or not mask.any():
            continue
        areas = instance.convert(masks.area)
        is_occluded = (
            None if areas.amodal is None else areas.modal <= (1 - MIN_HIDDEN_SHARE) * areas.amodal
        )
        row = {"id": instance.id, "class_name": instance.category, "box": masks.coco_box(mask)}
        row |= {"polygon": masks.outline(mask), "is_occluded": is_occluded}
        yield json.dumps(row, ensure_ascii=False)


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
    """Adds the queries in a model's answers to a copy of a dataset file, and leaves out unusable
    ones.

    Args:
        dataset: The dataset file that the requests were made from. answers: JSON Lines files: the
        output of a batch interface, or lines with custom_id and text. out: The dataset file to
        write. rejected: JSON Lines file to write with what was left out, and why. overwrite:
        Replace these files if they exist.
    """
    if not answers:
        raise InputError(
            "queries parse: there are no answers; give the files with the model's answers"
        )
    for flag, path, taken in (
        ("--out", out, answers),
        ("--rejected", rejected, (*answers, dataset, out)),
    ):
        if path is not None and path.resolve() in {other.resolve() for other in taken}:
            raise InputError(
                f"{flag} {path}: this file is used for something else; give another name"
            )
        if path is not None:
            refuse_overwrite(path, overwrite)
    records = read_records(dataset)
    before = len(records["queries"])
    left_out = list(_add_queries(records, answers))
    if rejected is not None:
        with writing(rejected, overwrite) as part:
            part.write_bytes(b"".join(map(_json_line, left_out)))
    write_json(out, records, overwrite)
    added = Counter(query["mask_type"] for query in records["queries"][before:])
    reasons = Counter(row["reason"] for row in left_out)
    for mask_type in MASK_TYPES:
        print(f"{f'added, {mask_type}':<16}{added[mask_type]:>8}")
    for reason, meaning in REASONS.items():
        print(f"{reason:<16}{reasons[reason]:>8}  {meaning}")
    print(f"{'left out':<16}{len(left_out):>8}")
    print(f"wrote {out}: {len(records['queries'])} queries, {added.total()} of them new")


def _add_queries(records: dict[str, Any], paths: tuple[Path, ...]) -> Iterator[dict[str, Any]]:
    """Appends the usable queries to the records and yields the others, each with its reason."""
    names, by_image = category_names(records), group_by_image(records, "annotations")
    requested: dict[str, tuple[int, MaskType]] = {
        _request_id(i, t): (i, t) for i in by_image for t in MASK_TYPES
    }
    earlier: dict[Any, list[frozenset[str]]] = defaultdict(list)
    for query in records["queries"]:
        earlier[query["image_id"], query["mask_type"]].append(_content_words(query["text"]))
    number = max((query["id"] for query in records["queries"]), default=0)
    for where, text, reason in _read_lines(paths):
        if reason or where["custom_id"] not in requested:
            yield where | {"reason": reason or "unknown request", "question": "", "answer": text}
            continue
        image_id, mask_type = place = requested[where["custom_id"]]
        known = [
            a
            for a in by_image[image_id]
            if mask_type == "modal" or a.get("segmentation") is not None
        ]
        offered = {a["id"]: names[a["category_id"]] for a in known if not a.get("ignore")}
        for found in read_answer(text):
            if reason := _fault(found, offered, earlier[place]):
                yield where | {"reason": reason, "question": found.question, "answer": found.answer}
                continue
            number += 1
            earlier[place].append(_content_words(found.question))
            ids = list(dict.fromkeys(instance_id for instance_id, _ in found.named))
            records["queries"].append(
                {"id": number, "image_id": image_id, "text": found.question, "mask_type": mask_type}
                | {
                    "instance_ids": ids,
                    "kind": {"task": "reasoning", "multi": len(ids) > 1, "source": "llm"},
                }
                | {"answer": found.answer}
            )


def _read_lines(paths: tuple[Path, ...]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """For each line that is not blank: its place, its text, and why that is none ("" if it is one)."""
    for path in paths:
        for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
            if line.strip():
                custom_id, text, reason = _read_line(line)
                yield {"file": str(path), "line": number, "custom_id": custom_id}, text, reason


def _read_line(line: bytes) -> tuple[str, str, str]:
    record: Any = None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
    custom_id = record.get("custom_id") if isinstance(record, dict) else None
    if not isinstance(custom_id, str):
        return "", line.decode("utf-8", "replace").strip(), "bad line"
    content = record.get("text")
    with suppress(KeyError, IndexError, TypeError):
        content = (
            content
            if content is not None
            else record["response"]["body"]["choices"][0]["message"]["content"]
        )
    if isinstance(content, list):  # some services give a message in parts
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    if not isinstance(content, str) or not content.strip():
        return custom_id, json.dumps(record["error"]) if record.get("error") else "", "no answer"
    return (
        custom_id,
        content.encode("utf-8", "replace").decode("utf-8"),
        "",
    )  # half characters cannot be written


class QuestionAndAnswer(NamedTuple):
    """As a model wrote them. `named` holds ids and class names; it is empty where the answer cannot
    be read."""

    question: str
    answer: str
    named: tuple[tuple[int, str], ...]


def read_answer(text: str) -> list[QuestionAndAnswer]:
    """The questions and answers in what a model wrote, one for each `<Q>`; never fails.

    Closing tags, and the one that opens the answer, may be missing. Numbering, brackets, case and
    text around the tags do not matter. Text without any `<Q>` counts as one question that cannot be
    read.
    """
    _, *parts = PATTERNS["question"].split(text)
    return [_read_one(part) for part in parts] or [QuestionAndAnswer("", text.strip(), ())]


def _read_one(text: str) -> QuestionAndAnswer:
    """A question and its answer from the text between one `<Q>` and the next."""
    end = PATTERNS["question_end"].search(text) or PATTERNS["instance"].search(text)
    question = PATTERNS["tag"].sub(" ", text if end is None else text[: end.start()])
    question = " ".join(question.split()).strip(_AROUND_QUESTION)
    question = PATTERNS["numbering"].sub("", question).strip(_AROUND_QUESTION)
    answer = "" if end is None else text[end.start() :]
    opened = PATTERNS["answer"].search(answer) or PATTERNS["question_end"].search(answer)
    answer = (answer if opened is None else answer[opened.end() :]).lstrip()
    answer = PATTERNS["tag"].split(answer, maxsplit=1)[0].strip()
    starts, named = [match.start() for match in PATTERNS["instance"].finditer(answer)], []
    for start, end in pairwise([*starts, len(answer)]):
        if found := PATTERNS["id_and_name"].match(answer[start:end]):
            name = found[2] or PATTERNS["after_name"].sub("", found[3])
            named.append((int(found[1]), name.strip(_AROUND_NAME)))
    is_readable = (
        words_of(question) and len(named) == len(starts) and all(name for _, name in named)
    )
    return QuestionAndAnswer(question, answer, tuple(named) if is_readable else ())


def _fault(
    found: QuestionAndAnswer, offered: Mapping[int, str], earlier: list[frozenset[str]]
) -> str:
    """The reason to leave a query out, or "". `offered` has class names by instance id."""
    words = _content_words(found.question)
    if not found.named:
        return "bad format"
    if any(number not in offered for number, _ in found.named):
        return "unknown instance"
    if not all(same_class(name, offered[number]) for number, name in found.named):
        return "wrong class"
    if any(says_name(found.question, offered[number]) for number, _ in found.named):
        return "class name"
    if PATTERNS["coordinates"].search(found.question):
        return "coordinates"
    if any(len(words & other) >= SIMILAR * len(words | other) for other in earlier):
        return "near-duplicate"
    return ""


def _content_words(question: str) -> frozenset[str]:
    """The words that can tell a question from another one, without a final s."""
    words, common = words_of(question), TEXTS["common_words"].split()
    return frozenset(word.removesuffix("s") for word in words if word not in common) or frozenset(
        words
    )
