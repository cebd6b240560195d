"""Which words drove the decision: Shapley values of a query's words for the mask-type head's logit.

A word that the head does not see is left out by the head's token mask, just as tokens are left out in training
(`--data.token-drop`), so nothing is asked of the head that it did not learn. Words are added one by one in many random
orders, each followed by its reverse; the share of a word is the mean change of the logit when it comes. Shares add up
to what all words together change, and words that say the same thing divide it (Shapley 1953; sampled as in Castro et
al. 2009, "Polynomial calculation of the Shapley value based on sampling").
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

ORDERS = 12
"""Random orders; their reverses are added."""


class WordShare(NamedTuple):
    """A word as it was written, and the logits that it adds: above 0 it speaks for amodal, below for modal."""

    word: str
    share: float


def words_of(query: str) -> list[tuple[str, int, int]]:
    """Words with the places of their characters; punctuation stays with its word."""
    return [(match.group(), match.start(), match.end()) for match in re.finditer(r"\S+", query)]


def word_shares(
    logits: Callable[[Bool[np.ndarray, "n t"]], Float[np.ndarray, " n"]], word_of: Int[np.ndarray, " t"], words: int
) -> Float[np.ndarray, " w"]:
    """Share of each of `words` words.

    `logits` answers for sets of tokens that are seen; `word_of` is the word of each token, -1 for tokens that belong
    to none and are always seen, such as the first. A word without tokens has share 0.
    """
    rng = np.random.default_rng(0)
    orders = [rng.permutation(words) for _ in range(ORDERS)]
    orders += [order[::-1] for order in orders]
    always = word_of < 0
    seen = np.stack([always | (np.argsort(order)[word_of] < count) for order in orders for count in range(words + 1)])
    steps = np.diff(logits(seen).reshape(len(orders), words + 1), axis=1)
    shares = np.zeros(words)
    for order, step in zip(orders, steps, strict=True):
        shares[order] += step
    return shares / len(orders)
