"""Which words drove the decision: Shapley values of a query's words for the mask-type head's logit.

Words are added one by one, from the empty sentence to the whole query, in random orders and their reverses. The share
of a word is the mean change of the logit when it is added (Shapley 1953; sampled as in Castro et al. 2009, "Polynomial
calculation of the Shapley value based on sampling"). Every sentence goes through the language model anew: the states of
the other tokens would still carry a word that is only hidden from the head. Shares add up to what all words together
change; words of the same meaning divide it.
"""

import re
from collections.abc import Callable
from itertools import compress
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

SENTENCES = 192
"""Sentences asked about a query, roughly: the more words, the fewer orders, but at least one and its reverse."""
BATCH = 64
"""Sentences encoded at once; the last batch is padded."""


class WordShare(NamedTuple):
    """A word as it was written, and the logits that it adds: above 0 for amodal, below for modal."""

    word: str
    share: float


def explain_words(
    query: str,
    word_of_tokens: Callable[[str, list[list[int]]], np.ndarray],
    logits: Callable[[list[str]], Float[np.ndarray, " n"]],
) -> list[WordShare]:
    """The share of every word of a query; 0 for words beyond the language model's limit.

    Args:
        word_of_tokens: the word of each token that is read, from the query and the places of its words.
        logits: the calibrated logits of amodal of `BATCH` sentences.
    """
    words = words_of(query)
    read_words = int(word_of_tokens(query, [span for _, *span in words]).max(initial=-1)) + 1
    read = [word for word, *_ in words[:read_words]]

    def logits_of(present: np.ndarray) -> np.ndarray:
        sentences = [" ".join(compress(read, row)) for row in present]
        unique = list(dict.fromkeys(sentences))
        found: dict[str, float] = {}
        for start in range(0, len(unique), BATCH):
            part = unique[start : start + BATCH]
            values = logits([*part, *part[:1] * (BATCH - len(part))])
            found |= dict(zip(part, values.tolist(), strict=False))
        return np.array([found[sentence] for sentence in sentences])

    shares = [*word_shares(logits_of, len(read)), *[0.0] * (len(words) - len(read))]
    return [WordShare(word, float(share)) for (word, *_), share in zip(words, shares, strict=True)]


def words_of(query: str) -> list[tuple[str, int, int]]:
    """Words with the places of their first and behind their last character; punctuation stays with its word."""
    return [(match.group(), *match.span()) for match in re.finditer(r"\S+", query)]


def word_shares(
    logits: Callable[[Bool[np.ndarray, "n w"]], Float[np.ndarray, " n"]], words: int
) -> Float[np.ndarray, " w"]:
    """Share of each of `words` words; `logits` takes sets of words that are present."""
    rng = np.random.default_rng(0)
    orders = [rng.permutation(words) for _ in range(max(1, SENTENCES // (2 * (words + 1))))]
    orders += [order[::-1] for order in orders]
    present = np.stack([np.argsort(order) < count for order in orders for count in range(words + 1)])
    steps = np.diff(logits(present).reshape(len(orders), words + 1), axis=1)
    shares = np.zeros(words)
    for order, step in zip(orders, steps, strict=True):
        shares[order] += step
    return shares / len(orders)
