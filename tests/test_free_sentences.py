"""Sentences about anything: balanced, reproducible, and none of the held-out wordings."""

import re
from collections import Counter

import numpy as np

from r2sm_jax.query import keyword_mask_type
from r2sm_jax.synthetic.queries.sentences import (
    _r2sm_sentences,
    intent_sentences,
    text_only_templates,
    write_text_only_queries,
    written_sentences,
)


def test_they_are_different_balanced_and_hard_both_ways():
    found = write_text_only_queries(2000, seed=0)
    assert len({(sentence.text, sentence.mask_type) for sentence in found}) == 2000
    amodal = np.array([sentence.mask_type == "amodal" for sentence in found])
    hard = np.array([keyword_mask_type(sentence.text) != sentence.mask_type for sentence in found])
    assert 0.45 < amodal.mean() < 0.55
    assert 0.3 < hard[amodal].mean() < 0.6 and 0.3 < hard[~amodal].mean() < 0.6
    assert all(sentence.family.startswith(sentence.mask_type) for sentence in found)
    assert len({sentence.family for sentence in found}) > 30
    nothing = [sentence for sentence in found if sentence.family.endswith(": nothing")]
    assert 20 < len(nothing) < 200 and {sentence.mask_type for sentence in nothing} == {
        "modal",
        "amodal",
    }


def test_nothing_is_left_unfilled():
    for sentence in write_text_only_queries(3000, seed=1):
        if not sentence.family.endswith("nothing"):  # punctuation alone, among others
            assert not re.search(r"[{}\[\]<>|~]", sentence.text.replace("conf=0.9", "")), (
                sentence.text
            )
        assert sentence.text.strip()


def test_a_seed_gives_the_same_sentences_and_another_seed_others():
    one, again, other = (write_text_only_queries(200, seed=seed) for seed in (3, 3, 4))
    assert one == again and len(set(one) & set(other)) < 20
    assert write_text_only_queries(0, seed=0) == []


def test_the_words_are_many_and_the_development_sentences_are_not_r2sm_sentences():
    words_of = text_only_templates()
    assert len(words_of["thing"]) > 300
    assert all(
        len(set(words_of[name])) == len(words_of[name]) for name in ("thing", "person", "adjective")
    )

    def words(text: str) -> str:
        return " ".join(re.findall(r"[a-z]+", text.lower()))

    written = {words(sentence.text) for sentence in write_text_only_queries(5000, seed=0)}
    for name in ("development", "test", "calibration", "val_r2sm"):
        assert not written & {words(row.text) for row in intent_sentences(name)}, name


def test_sentences_of_r2sm_may_leave_an_author_out():
    """Six of ten sentences are of R2SM's manner; a second sentence may change what they ask for."""
    own = {row.text.lower() for row in written_sentences() if row.family == "author a"}
    written = write_text_only_queries(3000, seed=0)
    share = np.mean(["r2sm" in sentence.family for sentence in written])
    assert 0.5 < share < 0.7 and len({s.family for s in written if ", " in s.family}) == 6
    without = write_text_only_queries(1000, seed=0, without="author a")
    assert not own & {sentence.text.lower() for sentence in without}
    assert own & {sentence.text.lower() for sentence in written}


def test_all_r2sm_sentences_sentences_are_drawn_before_any_comes_again():
    written = _r2sm_sentences(np.random.default_rng(0), "")
    counts = Counter(row.reason for row in written_sentences())
    drawn: dict[str, list[str]] = {reason: [] for reason in counts}
    while len(drawn["restricted"]) < counts["restricted"]:
        sentence = next(written)
        form = sentence.family.split(": r2sm ")[1]
        reason, _, second = form.partition(", ")
        if not second:
            drawn[reason].append(sentence.text)
    for reason in ("restricted", "plain"):
        first = drawn[reason][: counts[reason] // 2]
        assert len(set(first)) == len(first) > 1000, reason


def test_lists_in_the_manner_of_r2sm_are_large_and_apart():
    """val_r2sm has authors, sentences and types of its own, and the grammar does not know it."""
    train, val = written_sentences(), intent_sentences("val_r2sm")
    assert len(train) >= 800 and len(val) >= 200
    assert not {row.family for row in train} & {row.family for row in val}
    assert not {row.text.lower() for row in train} & {row.text.lower() for row in val}
    assert {row.reason for row in train} == {"plain", "restricted", "hidden or whole"}
    for rows in (train, val):
        assert 0.3 < np.mean([row.mask_type == "amodal" for row in rows]) < 0.6
    assert all((row.reason == "hidden or whole") == (row.mask_type == "amodal") for row in train)
