"""Sentences without an image, for training and for measuring: balanced, and none in both; and the
keyword rule."""

import re
from collections import Counter

import numpy as np
import pytest
from query_samples import words_of

from r2sm_jax.query import Sentence, keyword_mask_type
from r2sm_jax.synthetic.queries.sentences import (
    intent_sentences,
    write_text_only_queries,
    written_sentences,
)


@pytest.fixture(scope="module")
def sentences() -> list[Sentence]:
    return write_text_only_queries(5000, seed=0)


def test_they_are_different_balanced_and_hard_both_ways(sentences):
    assert len({(s.text, s.mask_type) for s in sentences}) == 5000
    amodal = np.array([s.mask_type == "amodal" for s in sentences])
    hard = np.array([keyword_mask_type(s.text) != s.mask_type for s in sentences])
    assert 0.45 < amodal.mean() < 0.55
    assert 0.3 < hard[amodal].mean() < 0.6 and 0.3 < hard[~amodal].mean() < 0.6
    assert all(s.family.startswith(s.mask_type) for s in sentences)
    assert len({s.family for s in sentences}) > 30
    undecidable = Counter(s.mask_type for s in sentences if s.family.endswith(": nothing"))
    assert min(undecidable.values()) > 25 and undecidable.total() < 500


def test_all_fields_are_filled(sentences):
    for sentence in sentences:
        text = sentence.text.replace("conf=0.9", "")
        if not sentence.family.endswith("nothing"):  # these have punctuation alone, among others
            assert not re.search(r"[{}\[\]<>|~]", text), text
        assert text.strip()


def test_six_of_ten_are_in_the_manner_of_r2sm_and_may_leave_an_author_out(sentences):
    r2sm = [s for s in sentences if "r2sm" in s.family]
    assert 0.5 < len(r2sm) / len(sentences) < 0.7
    assert len({s.family for s in r2sm if ", " in s.family}) == 6  # with a second sentence
    by_author = {s.text.lower() for s in written_sentences() if s.family == "author a"}
    without = write_text_only_queries(1000, seed=0, without=["author a"])
    assert not by_author & {s.text.lower() for s in without}
    assert by_author & {s.text.lower() for s in sentences}


def test_training_and_measuring_lists_have_authors_and_sentences_of_their_own():
    train, val = written_sentences(), intent_sentences("val_r2sm")
    assert len(train) >= 800 and len(val) >= 200
    assert not {s.family for s in train} & {s.family for s in val}
    assert not {s.text.lower() for s in train} & {s.text.lower() for s in val}
    assert {s.reason for s in train} == {"plain", "restricted", "hidden or whole"}
    for sentences in (train, val):
        assert 0.3 < np.mean([s.mask_type == "amodal" for s in sentences]) < 0.6
    assert all((s.reason == "hidden or whole") == (s.mask_type == "amodal") for s in train)


@pytest.mark.parametrize("purpose", ["development", "test"])
def test_measuring_lists_are_balanced_and_without_repetition(purpose):
    rows = intent_sentences(purpose)
    assert len({words_of(row.text) for row in rows}) == len(rows) >= 200
    assert 0.45 < np.mean([row.mask_type == "amodal" for row in rows]) < 0.55


def test_the_lists_of_docs_intent_are_explained_and_share_no_sentence():
    rows, test_rows = intent_sentences(), intent_sentences("test")
    assert all(row.family and row.reason for row in rows)
    assert np.mean([row.mask_type != keyword_mask_type(row.text) for row in rows]) > 1 / 3
    assert {row.family for row in test_rows} == {"easy", "medium", "hard"}
    assert not {words_of(row.text) for row in rows} & {words_of(row.text) for row in test_rows}


# The keyword rule, which decides for modal or amodal by words alone.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the red mug", "modal"),
        ("the mug behind the box", "modal"),
        ("what can be seen of the mug", "modal"),
        ("only the visible part of the cat", "modal"),
        ("the cat as the camera sees it", "modal"),
        ("the uncovered part of the hat", "modal"),
        ("Where is the fish?", "modal"),
        ("the modal mask of the fish", "modal"),
        ("the amodal mask of the fish", "amodal"),
        ("the complete mug", "amodal"),
        ("Segment the mug completely.", "amodal"),
        ("the WHOLE hat", "amodal"),
        ("the entire hat", "amodal"),
        ("the hat in its entirety", "amodal"),
        ("the full shape of the hat", "amodal"),
        ("the hat, hidden parts too", "amodal"),
        ("the hat and whatever hides behind the box", "amodal"),
        ("the hat, occlusion undone", "amodal"),
        ("the hat, including any part that might be obscured", "amodal"),
        ("the hat with blocked areas", "amodal"),
        ("the hat with what is covered", "amodal"),
        ("the hat with the concealed part", "amodal"),
        ("the hat, obstructed or not", "amodal"),
        ("even the parts we cannot see", "amodal"),
        ("also what can't be seen", "amodal"),
        ("including what is not visible", "amodal"),
        ("the hat where it is out of sight", "amodal"),
        # What the rule gets wrong is what the package is about.
        ("the entire row of bottles", "amodal"),
        ("without guessing the hidden part", "amodal"),
        ("the partially hidden cat", "amodal"),
        ("the cat, as if nothing stood in front of it", "modal"),
        ("its true silhouette", "modal"),
        ("Lift away the box: trace the cat.", "modal"),
    ],
)
def test_keyword_rule(text, expected):
    assert keyword_mask_type(text) == expected
