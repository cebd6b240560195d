"""Shapley values of words, against hand-computed ones."""

import numpy as np
import pytest
from explain_head import main, shapley_values
from hypothesis import given, strategies as st


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=30))
def test_shares_of_a_sum_are_its_terms(terms):
    def logits(sentences):
        return np.array([0.5 + sum(terms[int(word)] for word in s.split()) for s in sentences])

    words = [str(i) for i in range(len(terms))]
    assert shapley_values(words, logits) == pytest.approx(terms, abs=1e-9)


def test_words_of_the_same_meaning_divide_the_share():
    def logits(sentences):
        return np.array([2.0 * ("whole" in s or "complete" in s) - 1.0 for s in sentences])

    shares = shapley_values(["whole", "complete", "mug"], logits)
    assert shares == pytest.approx([1.0, 1.0, 0.0])


def test_the_script_prints_one_line_a_word(tiny_run, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["explain_head", str(tiny_run), "the whole mug"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["the", "whole", "mug"]
