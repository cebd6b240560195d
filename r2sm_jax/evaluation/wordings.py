"""The table of plain wordings and nouns (docs/intent.md): how often the decision about each wording
is right."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from r2sm_jax.evaluation.tables import make_table
from r2sm_jax.markdown import Table
from r2sm_jax.query import Sentence
from r2sm_jax.synthetic.queries.plain import PlainSentence

TITLE = "Plain wordings with several hundred nouns; * was never trained on"
COLUMNS = {"nouns": "nouns", "right": "accuracy", "right, nouns never trained on": "new_nouns"}


def score_wordings(
    sentences: Sequence[Sentence], is_right: Bool[np.ndarray, " n"]
) -> dict[str, dict[str, Any]]:
    """Returns, by wording, how many nouns it met and the share of right decisions, worst first.

    A wording is named with what it asks for: "amodal: the whole X", and ends with a * if nothing
    was trained on it. `new_nouns` is the share over nouns that nothing was trained on; None where
    it met none. Sentences of another kind have no row.
    """
    rows: dict[str, list[tuple[bool, bool]]] = {}
    for sentence, right in zip(sentences, is_right.tolist(), strict=True):
        if isinstance(sentence, PlainSentence):
            star = " *" if sentence.is_new_wording else ""
            name = f"{sentence.mask_type}: {sentence.family}{star}"
            rows.setdefault(name, []).append((right, sentence.is_new_noun))
    scores = {}
    for name, row in rows.items():
        of_new_nouns = [right for right, is_new in row if is_new]
        scores[name] = {
            "nouns": len(row),
            "accuracy": float(np.mean([right for right, _ in row])),
            "new_nouns": float(np.mean(of_new_nouns)) if of_new_nouns else None,
        }
    return dict(sorted(scores.items(), key=lambda item: item[1]["accuracy"]))


def wordings_table(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """Makes the table of one head."""
    return make_table(TITLE, scores.items(), COLUMNS)
