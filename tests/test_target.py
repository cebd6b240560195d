"""The words that name what is meant: the lists, which tokens they are, and the text that is made of
logits."""

import re

import numpy as np
import pytest

from r2sm_jax.language.target import WORD, is_named, target_words
from r2sm_jax.synthetic.queries.sentences import (
    target_sentences,
    write_text_only_queries,
    written_sentences,
)


def spans_of(sentence: str) -> list[tuple[int, int]]:
    """Those of a tokenizer that splits words in two, with a token at each end."""
    spans = [(0, 0)]
    for match in WORD.finditer(sentence):
        middle = (match.start() + match.end() + 1) // 2
        spans += [(match.start(), middle), (middle, match.end())]
    return [*(span for span in spans if span[0] < span[1] or span == (0, 0)), (0, 0)]


@pytest.mark.parametrize(
    ("sentence", "target", "expected"),
    [
        ("the saucer as if the cup were gone", "saucer", "the saucer"),
        ("whatever keeps food cold", "whatever keeps food cold", "whatever keeps food cold"),
        ("Show me the whole red mug, hidden parts included.", "red mug", "the red mug"),
        ("Behind the lamp, an old book", "old book", "an old book"),
        ("Mark the cat and the big dog.", "cat and the big dog", "the cat and the big dog"),
        ("a mug! The MUG, I say", "mug", "a mug"),
        ("the man's whole shape", "man", "the man"),
        ("the screws, nuts and bolts", "screws, nuts and bolts", "the screws, nuts and bolts"),
        ("the girl's bike", "girl's bike", "the girl's bike"),
        ("Wie geht es dir?", "", None),
    ],
)
def test_words_become_tokens_and_tokens_words(sentence, target, expected):
    spans = spans_of(sentence)
    named = is_named(sentence, target, spans)
    assert named is not None and not named[0] and not named[-1]
    assert target_words(sentence, spans, np.where(named, 2.0, -1.0)) == expected


def test_a_word_has_the_mean_of_its_tokens_and_none_beyond_the_limit():
    spans = spans_of("mug book")
    assert target_words("mug book", spans, np.array([9, 3, -1, 1, -3, 9])) == "mug"
    assert target_words("mug book", spans[:3], np.array([0, 3, 3])) == "mug"
    # Polite words at the start have none.
    assert target_words("please: mug book", [(8, 11), (12, 16)], np.array([3, -1])) == "mug"
    # One run, over a word that is doubtful alone, and not to one that is far away.
    sentence = "what on it cuts and then a hat"
    of_words = dict(zip(sentence.split(), (3, -1, 2, 2, -9, -3, -3, 4), strict=True))
    spans = [match.span() for match in WORD.finditer(sentence)]
    logits = np.array([of_words[sentence[a:b]] for a, b in spans], float)
    assert target_words(sentence, spans, logits) == "what on it cuts"
    assert is_named("the mgu", "mug", spans_of("the mgu")) is None


def test_written_lists_have_the_words_of_their_targets():
    train, test = target_sentences("target_train"), target_sentences("target_test")
    assert len(train) >= 500 and len(test) == 100
    for sentence in (*train, *test):
        assert is_named(sentence.text, sentence.target, spans_of(sentence.text)) is not None
    texts = {sentence.text for sentence in written_sentences()}
    assert {sentence.text for sentence in train} <= texts
    assert not {sentence.text for sentence in test} & texts
    assert [sentence.family for sentence in test] == ["named"] * 50 + ["described"] * 50


def test_generated_sentences_say_what_they_name():
    sentences = write_text_only_queries(3000, seed=0)
    known = [sentence for sentence in sentences if sentence.target is not None]
    assert len(known) > 900
    # The others have a spelling mistake in it.
    found = [s for s in known if is_named(s.text, s.target, spans_of(s.text)) is not None]
    assert len(found) > 0.94 * len(known)
    plain = [s for s in found if ": plain: " in s.family]
    assert not any(re.search("whole|visible|hidden", s.target) for s in plain)
    nothing = [s for s in sentences if s.family.endswith("nothing")]
    assert nothing and {s.target for s in nothing} == {""}
