"""The words of a sentence that name what is meant, and the tokens that they are.

"The saucer" of "the saucer as if the cup were gone", and "whatever keeps food cold" of a
description (docs/intent.md). A head gives each token a logit (`TargetHead`), words have the mean of
their tokens.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from r2sm_jax.query import TARGET_PARTS

WORD = re.compile(r"[^\W_]+(?:[-'\u2019.](?!s\b)[^\W_]+)*")
"""A word, without the 's of a possessive."""
SENTENCE_END = re.compile(r"[.;:?!]")
ARTICLES = ("the", "a", "an")
MAX_BEFORE = 3
"""So many words can stand between an article and the words that name: "the whole visible mug"."""

Spans = Sequence[tuple[int, int]]
"""Where tokens lie in a sentence: the first character and the one after the last; empty for tokens
that are no part of it."""


def is_named(sentence: str, target: str, spans: Spans) -> list[bool] | None:
    """Tells which tokens name the target (`Sentence.target`); None if its words are not in the
    sentence, such as those with a spelling mistake."""
    named: list[tuple[int, int]] = []
    for part in filter(None, target.split(TARGET_PARTS)):
        found = list(re.finditer(rf"\b{re.escape(part)}", sentence, re.IGNORECASE))
        if not found:
            return None
        named += [match.span() for match in found]
    return [any(start < b and a < end for a, b in named) for start, end in spans]


def target_words(sentence: str, spans: Spans, logits: Float[np.ndarray, " t"]) -> str | None:
    """Returns the words that name what is meant, with their article; None if none do.

    They are the run of words with the largest sum of logits, so that a word of a description which
    is doubtful alone stays in it.
    """
    words = [match.span() for match in WORD.finditer(sentence)]
    best, first, last = 0.0, 0, 0
    total, start = 0.0, 0
    for number, (a, b) in enumerate(words):
        of_word = [logits[i] for i, (begin, end) in enumerate(spans) if begin < b and a < end]
        if not of_word:
            continue  # a polite word at the start, or one beyond the language model's limit
        before = sentence[words[number - 1][1] : a] if number else ""
        if total <= 0 or SENTENCE_END.search(before):
            total, start = 0.0, number
        total += float(np.mean(of_word))
        if total > best:
            best, first, last = total, start, number
    if best <= 0:
        return None
    article = find_article(sentence, words[max(0, first - MAX_BEFORE) : first])
    return f"{article} {sentence[words[first][0] : words[last][1]]}".strip()


def find_article(sentence: str, before: Sequence[tuple[int, int]]) -> str:
    """Returns the last article among words, or nothing."""
    articles = [sentence[a:b] for a, b in before if sentence[a:b].lower() in ARTICLES]
    return articles[-1] if articles else ""
