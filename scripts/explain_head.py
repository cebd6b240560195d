"""How much each word of a sentence moves the mask-type head.

    python scripts/explain_head.py RUN "SENTENCE"

Prints one line a word: its share of the calibrated logit, above 0 for amodal, below for modal.
Shares are Shapley values (1953), estimated from random orders of the words as in Castro et al.
2009, "Polynomial calculation of the Shapley value based on sampling". They add up to what all words
together change. Every partial sentence goes through the language model anew: the states of the
other tokens would still carry a word that is only masked in the head.
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

import r2sm_jax
from r2sm_jax.cli import cli_main
from r2sm_jax.config import LEARNED_HEADS
from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import check_query

NUM_SENTENCES = 192
"""Sentences for one query, roughly. Long queries get fewer orders, but at least one and its
reverse."""


def shapley_values(
    words: Sequence[str], logits: Callable[[list[str]], Float[np.ndarray, " n"]]
) -> Float[np.ndarray, " w"]:
    """The mean change of the logit when each word joins the earlier ones of an order, over random
    orders.

    An order and its reverse are taken together, which lowers the variance.
    """
    num_words = len(words)
    rng = np.random.default_rng(0)
    num_orders = max(1, NUM_SENTENCES // (2 * (num_words + 1)))
    orders = [rng.permutation(num_words) for _ in range(num_orders)]
    orders += [order[::-1] for order in orders]

    sentences = []
    for order in orders:
        for count in range(num_words + 1):
            present = sorted(order[:count])
            sentences.append(" ".join(words[int(i)] for i in present))

    unique = list(dict.fromkeys(sentences))
    logit_of = dict(zip(unique, logits(unique), strict=True))
    values = np.array([logit_of[sentence] for sentence in sentences], float)
    values = values.reshape(len(orders), num_words + 1)

    shares = np.zeros(num_words)
    for order, steps in zip(orders, np.diff(values, axis=1), strict=True):
        shares[order] += steps / len(orders)
    return shares


def main() -> None:
    """Command line."""
    if len(sys.argv) != 3:
        raise InputError('give a run or an export, and a sentence in quotes: RUN "SENTENCE"')
    run, query = sys.argv[1:]
    check_query(query)
    predictor = r2sm_jax.load(run)
    if predictor.config.head not in LEARNED_HEADS:
        raise InputError(
            f"{run}: its head, {predictor.config.head}, does not decide from the words"
        )
    words = query.split()
    for word, share in zip(words, shapley_values(words, predictor.amodal_logits), strict=True):
        print(f"{share:+6.2f}  {word}")
    print(f"{predictor.amodal_logits([query])[0]:+6.2f}  logit of the sentence (above 0: amodal)")


if __name__ == "__main__":
    cli_main(main)
