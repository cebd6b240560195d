"""Which words drove the decision: Shapley values of a query's words for the mask-type head's logit.

Words are added one by one, from the empty sentence to the whole query, in random orders, each followed by its reverse;
the share of a word is the mean change of the logit when it comes. Every such sentence goes through the language model
anew, since the states of the other tokens would tell of a word that is merely hidden from the head. Shares add up to
what all words together change, and words that say the same thing divide it (Shapley 1953; sampled as in Castro et al.
2009, "Polynomial calculation of the Shapley value based on sampling").
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

SENTENCES = 192
"""About so many are asked about a query: the more words, the fewer orders, but one and its reverse at least."""


class WordShare(NamedTuple):
    """A word as it was written, and the logits that it adds: above 0 it speaks for amodal, below for modal."""

    word: str
    share: float


def words_of(query: str) -> list[tuple[str, int, int]]:
    """Words with the places of their characters; punctuation stays with its word."""
    return [(match.group(), match.start(), match.end()) for match in re.finditer(r"\S+", query)]


def word_shares(
    logits: Callable[[Bool[np.ndarray, "n w"]], Float[np.ndarray, " n"]], words: int
) -> Float[np.ndarray, " w"]:
    """Share of each of `words` words; `logits` answers for sets of words that are there."""
    rng = np.random.default_rng(0)
    orders = [rng.permutation(words) for _ in range(max(1, SENTENCES // (2 * (words + 1))))]
    orders += [order[::-1] for order in orders]
    there = np.stack([np.argsort(order) < count for order in orders for count in range(words + 1)])
    steps = np.diff(logits(there).reshape(len(orders), words + 1), axis=1)
    shares = np.zeros(words)
    for order, step in zip(orders, steps, strict=True):
        shares[order] += step
    return shares / len(orders)
