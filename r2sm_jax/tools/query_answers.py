"""From what a vision-language model answered to queries: lenient reading, strict cleaning.

Answers are in the form of R2SM, `<Q>…</Q><A>instance id is [3], class name is [mug]; …</A>`, or of LISA++ ("label name
is"). The paper removes queries in a bad form and with unknown instances; what else is removed stands in `REASONS`.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from r2sm_jax.data.records import read_records
from r2sm_jax.data.samples import category_names, group_by_image, write_json
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.query import MaskType
from r2sm_jax.tools.class_names import same_class, says_name, words_of
from r2sm_jax.tools.query_requests import MASK_TYPES, askable, request_id

REASONS = {
    "bad line": "a line that is no JSON object with a custom_id",
    "no answer": "a request that failed or came back empty",
    "unknown request": "a custom_id that belongs to no image of the dataset",
    "bad format": "a question without a readable answer",
    "unknown instance": "an id that the request did not offer",
    "wrong class": "a class name that is not the one of its id",
    "class name": "a question that says the class name of what it asks for",
    "coordinates": "a question with coordinates, a box or a polygon",
    "near-duplicate": "a question nearly like an earlier one of the same image and mask type",
}

# Share of words in common, of the words in either, from which two questions are near-duplicates.
SIMILAR = 0.8

# Words that tell no two questions apart.
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an the this that these those it its they them their there here and or of in on at to for from with by as is"
        " are was were be been being do does did can could would will may might should i me my you your we us our who"
        " whom which what where how please",
    )
)

_QUESTION = re.compile(r"<\s{0,3}q\s{0,3}\d{0,2}\s{0,3}>", re.IGNORECASE)
_QUESTION_END = re.compile(r"<\s{0,3}(?:/\s{0,3}q|a)\s{0,3}\d{0,2}\s{0,3}>", re.IGNORECASE)
_ANSWER = re.compile(r"<\s{0,3}a\s{0,3}\d{0,2}\s{0,3}>", re.IGNORECASE)
_TAG = re.compile(r"<\s{0,3}/?\s{0,3}[qa]\s{0,3}\d{0,2}\s{0,3}>", re.IGNORECASE)
_INSTANCE = re.compile(r"\binstance[\s_]{1,3}id", re.IGNORECASE)
_NAMED = re.compile(
    r"instance[\s_]{1,3}id\s{0,3}(?:is|:|=)?[\s\[(\"'#*]{0,6}(-?\d{1,18})(?!\d)[\s\])\"',;:.*]{0,6}"
    r"(?:and\s{1,3})?(?:the\s{1,3})?(?:class|label)[\s_]{1,3}name\s{0,3}(?:is|:|=)?\s{0,3}(.*)",
    re.IGNORECASE | re.DOTALL,
)
_NUMBERING = re.compile(r"^(?:question\s?)?(?:\(?\d{1,2}\s?[.):]\s|question\s?:\s?)", re.IGNORECASE)
_NUMBER = r"-?\d{1,9}(?:\.\d{1,9})?"
_COORDINATES = re.compile(
    rf"[\[(]\s?{_NUMBER}\s?[,;]\s?{_NUMBER}|{_NUMBER}\s?,\s{_NUMBER}|\b[xy]\s?[=:]\s?-?\d"
    r"|\bcoordinates\b|\bbounding[\s-]box|\bbbox|\bpolygons?\b",
    re.IGNORECASE,
)


class Written(NamedTuple):
    """One question and answer as they were written; `named` has ids and class names, and is empty where the
    answer cannot be read."""

    question: str
    answer: str
    named: tuple[tuple[int, str], ...]


def parse(
    dataset: Positional[Path],
    answers: Positional[tuple[Path, ...]],
    /,
    out: Path,
    rejected: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Adds the queries in a model's answers to a copy of a dataset file, and leaves out those that are no good.

    Args:
        dataset: The dataset file that the requests were made from.
        answers: JSON Lines files: the output of a batch interface, or lines with custom_id and text.
        out: The dataset file to write.
        rejected: JSON Lines file to write with what was left out, and why.
        overwrite: Replace these files if they exist.
    """
    if not answers:
        raise InputError("queries parse: there are no answers; give the files with the model's answers")
    _refuse_mixed_up(dataset, answers, out, rejected)
    for path in (out, *([rejected] if rejected else [])):
        refuse_overwrite(path, overwrite)
    records = read_records(dataset)
    before = len(records["queries"])
    left_out = list(_add_queries(records, answers))
    if rejected is not None:
        _write_lines(rejected, left_out)
    write_json(out, records, overwrite)
    added = Counter(query["mask_type"] for query in records["queries"][before:])
    _show(added, Counter(row["reason"] for row in left_out))
    print(f"wrote {out}: {len(records['queries'])} queries, {added.total()} of them new")


def read_answer(text: str) -> list[Written]:
    """The questions and answers in what a model wrote, one for each `<Q>`; never fails.

    Closing tags, and the one that opens the answer, may be missing; numbering, brackets, case and text around
    the tags do not matter. Text without any `<Q>` counts as one question that cannot be read.
    """
    _, *parts = _QUESTION.split(text)
    return [_read_one(part) for part in parts] or [Written("", text.strip(), ())]


def _read_one(text: str) -> Written:
    """A question and its answer from all that stands between one `<Q>` and the next."""
    end = _QUESTION_END.search(text) or _INSTANCE.search(text)
    question = _tidy(text if end is None else text[: end.start()])
    answer = "" if end is None else text[end.start() :]
    opened = _ANSWER.search(answer) or _QUESTION_END.search(answer)
    answer = (answer if opened is None else answer[opened.end() :]).lstrip()
    answer = _TAG.split(answer, maxsplit=1)[0].strip()
    starts = [match.start() for match in _INSTANCE.finditer(answer)]
    named = [_named(answer[start:end]) for start, end in pairwise([*starts, len(answer)])]
    good = [pair for pair in named if pair is not None]
    complete = bool(words_of(question)) and len(good) == len(named)
    return Written(question, answer, tuple(good) if complete else ())


def _tidy(question: str) -> str:
    """A question without numbering, quotation marks, asterisks and line breaks around it."""
    question = _TAG.sub(" ", question)
    return _NUMBERING.sub("", " ".join(question.split()).strip("\"'`*“” ")).strip("\"'`*“” ")


def _named(text: str) -> tuple[int, str] | None:
    """The id and the class name in "instance id is [3], class name is [mug];"."""
    found = _NAMED.match(text)
    if found is None:
        return None
    rest = found[2].lstrip()
    bracketed = re.match(r"\[([^\]\n]+)\]", rest)
    name = bracketed[1] if bracketed else re.split(r"[;\n]", rest, maxsplit=1)[0]
    if not bracketed:
        name = re.sub(r"\s\d{1,2}[.)]\s?$", "", name)  # the number of the next question
        name = re.sub(r"\sand$", "", name.strip(" \t.,:\"'`*()[]"))
    name = name.strip(" \t.,:\"'`*()[]")
    return (int(found[1]), name) if name else None


def _add_queries(records: dict[str, Any], answers: tuple[Path, ...]) -> Iterator[dict[str, Any]]:
    """Appends the queries that pass to the records, and gives what does not."""
    names, by_image = category_names(records), group_by_image(records, "annotations")
    requested: dict[str, tuple[int, MaskType]] = {
        request_id(image, mask_type): (image, mask_type) for image in by_image for mask_type in MASK_TYPES
    }
    earlier: dict[tuple[int, MaskType], list[frozenset[str]]] = {place: [] for place in requested.values()}
    for query in records["queries"]:
        earlier[query["image_id"], query["mask_type"]].append(_content(query["text"]))
    number = max((query["id"] for query in records["queries"]), default=0)
    for where, line in _lines(answers):
        custom_id, text, reason = _read_line(line)
        where |= {"custom_id": custom_id}
        if not reason and custom_id not in requested:
            reason = "unknown request"
        if reason:
            yield where | {"reason": reason, "question": "", "answer": text}
            continue
        image_id, mask_type = place = requested[custom_id]
        offered = {a["id"]: names[a["category_id"]] for a in by_image[image_id] if askable(a, mask_type)}
        for written in read_answer(text):
            reason = _why_not(written, offered, earlier[place])
            if reason:
                yield where | {"reason": reason, "question": written.question, "answer": written.answer}
                continue
            number += 1
            earlier[place].append(_content(written.question))
            ids = list(dict.fromkeys(instance_id for instance_id, _ in written.named))
            records["queries"].append(
                {"id": number, "image_id": image_id, "text": written.question, "mask_type": mask_type}
                | {"instance_ids": ids, "kind": {"task": "reasoning", "multi": len(ids) > 1, "source": "llm"}}
                | {"answer": written.answer}
            )


def _why_not(written: Written, offered: Mapping[int, str], earlier: list[frozenset[str]]) -> str:
    """The reason to leave a query out; "" for a good one. `offered` has class names by instance id."""
    if not written.named:
        return "bad format"
    if any(number not in offered for number, _ in written.named):
        return "unknown instance"
    if not all(same_class(name, offered[number]) for number, name in written.named):
        return "wrong class"
    if any(says_name(written.question, offered[number]) for number, _ in written.named):
        return "class name"
    if _COORDINATES.search(written.question):
        return "coordinates"
    words = _content(written.question)
    if any(len(words & other) >= SIMILAR * len(words | other) for other in earlier):
        return "near-duplicate"
    return ""


def _content(question: str) -> frozenset[str]:
    """The words of a question that can tell it from another one, without a final s."""
    words = words_of(question)
    return frozenset(word.removesuffix("s") for word in words if word not in _COMMON) or frozenset(words)


def _lines(paths: tuple[Path, ...]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The lines of all files that are not blank, with file and number."""
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield {"file": str(path), "line": number}, line
        except FileNotFoundError as error:
            raise InputError(f"{path}: there is no such file of answers; check the path") from error
        except OSError as error:
            raise InputError(f"{path}: cannot read the answers ({error.strerror}); check the path") from error


def _read_line(line: bytes) -> tuple[str, str, str]:
    """The custom_id and the text in a line, and why there is none ("" if there is)."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    custom_id = record.get("custom_id") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(custom_id, str):
        return "", line.decode("utf-8", "replace").strip(), "bad line"
    text = record.get("text")
    try:
        content = text if text is not None else record["response"]["body"]["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if isinstance(content, list):  # some services give a message in parts
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    if not isinstance(content, str) or not content.strip():
        return custom_id, json.dumps(record["error"]) if record.get("error") else "", "no answer"
    return custom_id, content.encode("utf-8", "replace").decode("utf-8"), ""  # half characters cannot be written


def _refuse_mixed_up(dataset: Path, answers: tuple[Path, ...], out: Path, rejected: Path | None) -> None:
    """Raises InputError where a file to write is a file of answers, or --rejected is a dataset file."""
    read = {path.resolve() for path in answers}
    if out.resolve() in read:
        raise InputError(f"--out {out}: this is a file of answers; give another name")
    if rejected is not None and rejected.resolve() in read | {dataset.resolve(), out.resolve()}:
        raise InputError(f"--rejected {rejected}: this file is used for something else; give another name")


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        part.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot write there ({error.strerror}); give another path") from error


def _show(added: Counter[str], left_out: Counter[str]) -> None:
    table = Table("", "number", "", title="queries", title_justify="left")
    for mask_type in MASK_TYPES:
        table.add_row(f"added, {mask_type}", str(added[mask_type]), "")
    table.add_section()
    for reason, meaning in REASONS.items():
        table.add_row(reason, str(left_out[reason]), meaning)
    table.add_section()
    table.add_row("left out", str(left_out.total()), "")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
