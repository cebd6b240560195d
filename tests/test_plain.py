"""The table of plain wordings and nouns, and that its held-out half is in nothing that is trained
on."""

import re
from collections import Counter

import numpy as np
import pytest
from query_samples import text_only

from r2sm_jax.evaluation.wordings import score_wordings
from r2sm_jax.query import MASK_TYPES
from r2sm_jax.synthetic.queries import sentences as sentences_module
from r2sm_jax.synthetic.queries.grammar import phrasebook, read_sections
from r2sm_jax.synthetic.queries.nouns import lexicon
from r2sm_jax.synthetic.queries.plain import HELD_OUT, plain_nouns, plain_sentences
from r2sm_jax.synthetic.queries.sentences import (
    text_only_templates,
    write_text_only_queries,
)


def test_the_table_has_every_plain_wording_over_hundreds_of_nouns():
    sentences = plain_sentences()
    assert len({sentence.text for sentence in sentences}) == len(sentences)
    assert not re.search(r"[{}\[\]|]", "".join(sentence.text for sentence in sentences))
    assert len(plain_nouns()) > 350 and len({s.noun for s in sentences}) == len(plain_nouns())
    for mask_type in MASK_TYPES:
        of_type = [s for s in sentences if s.mask_type == mask_type]
        nouns = Counter(s.family for s in of_type)
        assert len(nouns) > 50 and min(nouns.values()) > 90
        new = {s.family for s in of_type if s.is_new_wording}
        assert 12 < len(new) < len(nouns) / 2
        assert 0.15 < np.mean([s.is_new_noun for s in of_type]) < 0.45


@pytest.mark.parametrize(
    ("text", "mask_type"),
    [
        ("the full glass", "modal"),
        ("the full suitcase", "modal"),
        ("a full bottle", "modal"),
        ("the full bench", "amodal"),
        ("the full cat", "amodal"),
        ("the full xylophone", "amodal"),
        ("the full tankard", "modal"),
    ],
)
def test_what_can_be_full_of_something_is_meant_by_its_contents(text, mask_type):
    (sentence,) = [s for s in plain_sentences() if s.text == text]
    assert sentence.mask_type == mask_type


def test_nothing_of_the_held_out_half_is_trained_on():
    texts = text_only()
    texts += [line for lines in read_sections("wordings.txt").values() for line in lines]
    for entry in (*lexicon().classes.values(), *lexicon().groups.values()):
        texts += [*entry.classes, *entry.nouns, *entry.functions]
    everything = "\n".join(texts).lower()
    for noun, _, is_new in plain_nouns():
        if is_new:
            # A plain search first: the text is long.
            found = noun in everything and re.search(rf"\b{noun}(s|es)?\b", everything)
            assert not found, noun

    book = phrasebook("wordings")
    trained = {text for section in text_only_templates().values() for text in section}
    for mask_type in MASK_TYPES:
        trained |= {text for w in book.easy[mask_type] + book.hard[mask_type] for text in w.texts}
    for section, lines in read_sections(HELD_OUT).items():
        if section.startswith("plain"):
            assert not trained & set(lines)


def test_training_asks_for_the_whole_of_things_and_for_vessels_that_are_full(monkeypatch):
    monkeypatch.setattr(sentences_module, "MISSPELT_SHARE", 0)
    vessels = read_sections("words.txt")["vessel"]
    full = [s for s in write_text_only_queries(8000, seed=1) if s.family.endswith("plain: full")]
    assert len(full) > 80 and {s.mask_type for s in full} == set(MASK_TYPES)
    for sentence in full:
        is_vessel = any(sentence.target.endswith(vessel) for vessel in vessels)
        assert is_vessel == (sentence.mask_type == "modal"), sentence


def test_wordings_are_scored_worst_first_and_new_nouns_apart():
    families = ("the whole X", "the X from end to end")
    sentences = [s for s in plain_sentences() if s.family in families]
    is_right = np.array([not (s.is_new_noun and s.is_new_wording) for s in sentences], bool)
    scores = score_wordings(sentences, is_right)
    assert list(scores) == ["amodal: the X from end to end *", "amodal: the whole X"]
    worst, best = scores.values()
    assert worst["new_nouns"] == 0 and 0.5 < worst["accuracy"] < 1 and best["accuracy"] == 1
    assert worst["nouns"] + best["nouns"] == len(sentences)
