"""Reads the questions and answers that a language model wrote; tolerant of form, never fails.

Answers have the form of R2SM, `<Q>…</Q><A>instance id is [3], class name is [mug]; …</A>`, or of
LISA++ ("label name is").
"""

import re
from itertools import pairwise
from typing import NamedTuple

from r2sm_jax.synthetic.queries.nouns import words_of


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.VERBOSE | re.IGNORECASE)


# White space in a pattern does not count. Repetitions are bounded, so that long rubbish is read in
# linear time.

# The opening of a question: <Q>, < q > or <Q1>.
QUESTION = _pattern(r"<\s{0,3} q \s{0,3}\d{0,2}\s{0,3}>")
# What ends a question: </Q>, or the opening of its answer if that tag is missing.
QUESTION_END = _pattern(r"<\s{0,3} (?:/\s{0,3}q|a) \s{0,3}\d{0,2}\s{0,3}>")
# The opening of an answer: <A>, < a > or <A1>.
ANSWER = _pattern(r"<\s{0,3} a \s{0,3}\d{0,2}\s{0,3}>")
# Any of the four tags: <Q>, </Q>, <A>, </A>.
TAG = _pattern(r"<\s{0,3} /?\s{0,3}[qa] \s{0,3}\d{0,2}\s{0,3}>")
# The number of a question in its text: "Question 2: ", "(2) " or "2. ".
NUMBERING = _pattern(r"^(?:question\s?)?(?:\(?\d{1,2}\s?[.):]\s|question\s?:\s?)")
# The beginning of an instance in an answer.
INSTANCE = _pattern(r"\binstance[\s_]{1,3}id")
# An instance: "instance id is [3], class name is [mug]". The three groups are its id, and its name
# either in brackets or without them, up to a semicolon or the end of the line.
ID_AND_NAME = _pattern(
    r"""
    instance[\s_]{1,3}id \s{0,3}(?:is|:|=)? [\s\[(\"'#*]{0,6} (-?\d{1,18})(?!\d) [\s\])\"',;:.*]{0,6}
    (?:and\s{1,3})?(?:the\s{1,3})?
    (?:class|label)[\s_]{1,3}name \s{0,3}(?:is|:|=)?\s* (?:\[([^\]\n]+)\]|([^;\n]*))
    """
)
# The number of the next question, or "and" before the next instance.
AFTER_NAME = _pattern(r"\s(?:\d{1,2}[.)]|(?-i:and))\s?$")
# Coordinates in a question: "(12, 30", "12, 30", "x = 12", "bounding box".
COORDINATES = _pattern(
    r"""
    [\[(]\s?-?\d{1,9}(?:\.\d{1,9})?\s?[,;]\s?-?\d | \d\s?,\s-?\d | \b[xy]\s?[=:]\s?-?\d
    | \bcoordinates\b | \bbounding[\s-]box | \bbbox | \bpolygons?\b
    """
)
# Characters around a question or a class name that do not belong to it.
QUESTION_QUOTES = "\"'`*“” "
NAME_QUOTES = " \t.,:\"'`*()[]"


class QuestionAndAnswer(NamedTuple):
    """A question and its answer as a model wrote them."""

    question: str
    answer: str
    instances: tuple[tuple[int, str], ...]
    """Ids and class names in the answer; empty if it cannot be read."""


def read_answer(text: str) -> list[QuestionAndAnswer]:
    """The questions and answers in what a model wrote, one for each `<Q>`.

    Closing tags, and the one that opens the answer, may be missing. Numbering, brackets, case and
    text around the tags do not matter. Text without any `<Q>` counts as one question that cannot be
    read.
    """
    _, *parts = QUESTION.split(text)
    if not parts:
        return [QuestionAndAnswer("", text.strip(), ())]
    return [_read_part(part) for part in parts]


def _read_part(text: str) -> QuestionAndAnswer:
    """A question and its answer from the text between one `<Q>` and the next."""
    end = QUESTION_END.search(text) or INSTANCE.search(text)
    question = TAG.sub(" ", text if end is None else text[: end.start()])
    question = " ".join(question.split()).strip(QUESTION_QUOTES)
    question = NUMBERING.sub("", question).strip(QUESTION_QUOTES)

    answer = "" if end is None else text[end.start() :]
    opening = ANSWER.search(answer) or QUESTION_END.search(answer)
    if opening is not None:
        answer = answer[opening.end() :]
    answer = TAG.split(answer.lstrip(), maxsplit=1)[0].strip()
    instances = _read_instances(answer) if words_of(question) else ()
    return QuestionAndAnswer(question, answer, instances)


def _read_instances(answer: str) -> tuple[tuple[int, str], ...]:
    """Ids and class names of all instances in an answer; none if one of them cannot be read."""
    starts = [match.start() for match in INSTANCE.finditer(answer)]
    instances = []
    for start, end in pairwise([*starts, len(answer)]):
        match = ID_AND_NAME.match(answer[start:end])
        if match is None:
            return ()
        number, bracketed_name, bare_name = match.groups()
        name = (bracketed_name or AFTER_NAME.sub("", bare_name)).strip(NAME_QUOTES)
        if not name:
            return ()
        instances.append((int(number), name))
    return tuple(instances)
