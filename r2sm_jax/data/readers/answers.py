"""Reads what language models wrote in the form of R2SM or LISA++: `<Q>…</Q><A>instance id is [3],
class name is [mug]; …</A>`, or "label name is"."""

import re

QUESTION = re.compile(r"<\s*Q\s*\d*\s*>", re.IGNORECASE)
"""The opening of a question: <Q>, < q > or <Q1>. Its closing tag may be missing."""
TAG = re.compile(r"<\s*/?\s*[QA]\s*\d*\s*>", re.IGNORECASE)
INSTANCE_ID = re.compile(r"instance[\s_]id", re.IGNORECASE)
CLASS_NAME = re.compile(r"(?:class|label)[\s_]name", re.IGNORECASE)
NAME = re.compile(r"[\W_]*(?:is\b)?[\W_]*([^];:,.*\"')\n]*)", re.IGNORECASE)
"""A class name up to the next punctuation."""


def without_thoughts(text: str) -> str:
    """What a model answers, without what it thought before: the part after `</think>`, or before a
    `<think>` that never ends."""
    answer = re.split("</think>", text, flags=re.IGNORECASE)[-1]
    return re.split("<think>", answer, flags=re.IGNORECASE)[0]


def read_instances(answer: str) -> list[tuple[str, str]]:
    """Reads ids and class names in an answer, as "instance id is [3], class name is [mug]; ...".

    Brackets are optional. What is missing is empty, and so is an id that is not one number.
    """
    pairs = []
    for mention in INSTANCE_ID.split(answer)[1:]:
        before, *after = CLASS_NAME.split(mention, maxsplit=1)
        numbers = re.findall(r"\d{1,18}", re.split("[;.\n]", before)[0])
        name = NAME.match(after[0]) if after else None
        pairs.append((numbers[0] if len(numbers) == 1 else "", name[1].strip() if name else ""))
    return pairs
