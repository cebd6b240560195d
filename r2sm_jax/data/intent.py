"""Sentences written by hand, with the mask type that they ask for and why: for development, never trained on.

The rules that the labels follow are in docs/intent.md.
"""

import csv
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, cast

from r2sm_jax.data.schema import MaskType


class IntentSentence(NamedTuple):
    """One line of the list."""

    mask_type: MaskType
    family: str
    text: str
    reason: str


@cache
def intent_sentences() -> tuple[IntentSentence, ...]:
    """The whole list."""
    text = (files("r2sm_jax.data") / "intent" / "sentences.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return tuple(IntentSentence(**cast(Any, row)) for row in rows)
