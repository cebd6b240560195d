"""Sentences written by hand, with the mask type that they ask for: never trained on.

The rules that the labels follow are in docs/intent.md. `intent/development.tsv` is for development, with a reason for
every label. `intent/test.tsv` is to test on: written without sight of the grammar and of the first list, with the
families easy, medium and hard, as its writers judged, and without reasons.
"""

import csv
from functools import cache
from importlib.resources import files
from typing import Any, Literal, cast

from r2sm_jax.query import Sentence


@cache
def intent_sentences(purpose: Literal["development", "test"] = "development") -> tuple[Sentence, ...]:
    """All sentences of a list, in its order."""
    text = (files("r2sm_jax.queries") / "intent" / f"{purpose}.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return tuple(Sentence(**cast(Any, row)) for row in rows)
