"""Which mask a sentence asks for: what is checked before it is read, and the decision."""

import re
import unicodedata
import warnings
from typing import NamedTuple

import numpy as np

from r2sm_jax.config import NO_HEAD
from r2sm_jax.errors import InputError
from r2sm_jax.query import REFERENCES, MaskType

ENGLISH = frozenset(
    "a all an and any are as at be behind but by complete entire everything for from full hidden "
    "if in is it its not of on only or part that the their there they this to under visible "
    "what where which who whole with you".split()
)
"""Words that nearly every English sentence has some of."""
NOT_ENGLISH = frozenset(
    # German, Dutch
    "aber auch auf bitte das dem den der des ein eine einem einen einer ganze ganzen hinter ist "
    "mit nicht nur oder über und unter vom von vor welche zum "
    "achter alleen dat een het met niet onder op "
    # French, Spanish, Portuguese, Italian
    "au aux avec cette ces dans derrière des du est et la le les ou pas qui sous sur "
    "toute une debajo del detrás el en las lo los para por que sin sobre toda una y atrás "
    "ao com da dos não sob uma che coperta della delle di dietro gli il sono sotto".split()
)
"""Words of languages that are written with Latin letters."""


class NotEnglish(UserWarning):
    """A query is probably not in English, which is all that the language model knows."""


class TruncatedQuery(UserWarning):
    """A query is longer than the language model's limit; its end was not read.

    `Prediction.unread` holds the end of one, and `predict` and `decide` give this warning.
    """


def warn_of_unread(unread: str) -> None:
    """Warns (`TruncatedQuery`) of the end of a sentence that the language model did not read; "" is
    none."""
    if unread:
        warnings.warn(
            "a sentence is longer than the language model reads; this was not read: "
            f"{unread[:200]!r}",
            TruncatedQuery,
            stacklevel=3,
        )


def check_query(query: str) -> None:
    """Raises InputError for a query without words, or with characters that UTF-8 cannot encode.
    Warns of one that is probably not in English (`NotEnglish`)."""
    if not isinstance(query, str) or not re.search(r"\w", query):
        raise InputError(
            "the query is empty or has no words; say what to segment, such as 'the red mug'"
        )
    if re.search("[\ud800-\udfff]", query):
        raise InputError("the query holds half of a character; write it in UTF-8")
    if not is_english(query):
        # Without the query, so that a file of such sentences gives one warning.
        warnings.warn(
            "a sentence does not look like English, the only language that the model reads",
            NotEnglish,
            stacklevel=1,
        )


def is_english(query: str) -> bool:
    """Whether a query may be in English: it has Latin letters alone, and a word of `ENGLISH` or
    none of `NOT_ENGLISH`."""
    letters = filter(str.isalpha, query)
    if not all(unicodedata.name(letter, "").startswith("LATIN") for letter in letters):
        return False
    words = set(re.findall(r"\w+", query.lower()))
    return bool(words & ENGLISH) or not words & NOT_ENGLISH


def check_abstain(margin: float) -> None:
    """Raises InputError for a margin outside of 0 to 0.5."""
    if not 0 <= margin <= 0.5:
        raise InputError(f"abstain {margin}: a margin of probability lies between 0 and 0.5")


class Decision(NamedTuple):
    """Which mask a query asks for."""

    mask_type: MaskType | None
    """Modal where there are no words. None for the head `none`, which decides nothing. What the
    caller forces goes before both."""
    amodal_probability: float | None
    """Probability of amodal by the head, also where the caller forces a type; None where there are
    no words or the head decides nothing."""
    undecided: bool = False
    """The probability is too near to 0.5 to decide."""
    target: str | None = None
    """The words that name what is meant, such as "the saucer" of "the saucer as if the cup were
    gone"; None if none do, or the model cannot tell."""


def decide(
    head: str,
    query: str,
    amodal_logit: float,
    mask_type: str = "auto",
    *,
    abstain: float = 0.0,
) -> Decision:
    """Decides which mask a query asks for.

    Args:
        head: name of the mask-type head (`ModelConfig.head`).
        query: the sentence. An empty one asks for nothing hidden.
        amodal_logit: calibrated logit of a learned head; other heads do not use it.
        mask_type: modal or amodal forces the type; auto lets the head decide.
        abstain: a probability that is nearer than this to 0.5 is undecided.

    Raises InputError for the oracle where no type is forced.
    """
    forced: MaskType | None = None
    if mask_type != "auto":
        forced = "amodal" if mask_type == "amodal" else "modal"
    if not query:
        return Decision(forced or "modal", None)
    if head == NO_HEAD:
        return Decision(forced, None)

    if head in REFERENCES:
        if head == "oracle" and forced is None:
            raise InputError(
                "this run's head is the oracle, which needs the truth; pass --mask-type modal or "
                "amodal"
            )
        # The oracle repeats the type that it is told; the other rules ignore it.
        rule_type = REFERENCES[head](query, forced)
        probability = float(rule_type == "amodal")
    else:
        probability = float(np.exp(-np.logaddexp(0, -amodal_logit)))

    if forced is not None:
        return Decision(forced, probability)
    decided: MaskType = "amodal" if probability > 0.5 else "modal"
    return Decision(decided, probability, undecided=abs(probability - 0.5) < abstain)
