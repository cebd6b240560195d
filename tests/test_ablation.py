"""Heads trained alone on token states, the lists of sentences, and the ablation command."""

import json
from pathlib import Path

import numpy as np
import optax
import pytest
from query_samples import words_of

from r2sm_jax import ablate
from r2sm_jax.config import OptimizerConfig
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.evaluation.ablation import (
    TEST_SETS,
    AblationSizes,
    fit_logistic_regression,
    percent_over_seeds,
    scene_sentences,
    texts_of,
    word_terms,
)
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.query import REFERENCES
from r2sm_jax.synthetic.queries.sentences import (
    intent_sentences,
    write_text_only_queries,
)
from r2sm_jax.training import text_only
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.text_only import pad_sentences, train_head

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def texts(tiny_config) -> TextStates:
    text = tiny_config.model.text
    return TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)


def make_steps(num_steps: int) -> optax.GradientTransformation:
    return make_optimizer(OptimizerConfig(), num_steps)


# Sentences


def test_nothing_that_is_trained_on_stands_in_a_list_that_measures():
    written = texts_of(write_text_only_queries(3000, seed=0))
    for split in ("train", "val_phrasing"):
        written += texts_of(scene_sentences(split, 60))
    written = {words_of(text) for text in written}
    for purpose in ("development", "test", "calibration", "val_r2sm"):
        assert not written & {words_of(row.text) for row in intent_sentences(purpose)}, purpose


def test_scene_sentences_are_different_and_labelled():
    sentences = scene_sentences("val", 10)
    assert len({row.text for row in sentences}) == len(sentences)
    assert all(row.family.startswith(f"{row.mask_type}: ") for row in sentences)


# Training a head


def test_padding_keeps_every_sentence_and_changes_no_state(texts):
    sentences = ["the mug", "the whole mug " * 12, "a " * 80, "the red book"]
    groups = pad_sentences(texts, sentences)
    assert sorted(np.concatenate([group.rows for group in groups]).tolist()) == [0, 1, 2, 3]
    for group in groups:
        for row, states, mask in zip(group.rows, group.states, group.mask, strict=True):
            expected = texts.states_of(sentences[row])
            np.testing.assert_array_equal(states[mask], expected[: mask.sum()])
            assert mask.sum() == min(len(expected), states.shape[0])


@pytest.mark.parametrize("name", LEARNED)
def test_every_head_learns_a_word(name, texts, monkeypatch):
    """One word decides, whatever stands around it."""
    monkeypatch.setattr(text_only, "BATCH_SIZE", 32)
    sentences = [
        f"the {adjective} {noun} {place}"
        for adjective in ("whole", "seen")
        for noun in ("mug", "book", "dog", "red car", "two hats", "boat")
        for place in ("here", "there")
    ]
    is_amodal = np.array(["whole" in sentence for sentence in sentences])
    groups = pad_sentences(texts, sentences)

    # The few numbers of `linear` are AdamW's, at a low rate, and the mean of random states hardly
    # tells one word.
    num_steps = 4000 if name == "linear" else 150
    min_accuracy = 0.7 if name == "linear" else 0.9

    def train():
        return train_head(name, groups, is_amodal, make_steps(num_steps), num_steps=num_steps)

    head = train()
    logits = head.amodal_logits(groups)
    assert ((logits > 0) == is_amodal).mean() >= min_accuracy
    assert head.num_parameters > 0
    if name == "mlp":  # which is quick to compile
        np.testing.assert_array_equal(train().amodal_logits(groups), logits)


def test_the_documented_head_works(texts, monkeypatch):
    """The example of docs/heads.md, put into the registry."""
    page = (DOCS / "heads.md").read_text()
    code = page.split("```python\n")[1].split("LEARNED =")[0]
    names = dict(vars(heads))
    exec(compile(code, "docs/heads.md", "exec"), names)
    monkeypatch.setitem(LEARNED, "max", names["MaxHead"])
    groups = pad_sentences(texts, ["the whole mug", "the mug", "a book as seen"])
    is_amodal = np.array([True, False, False])
    head = train_head("max", groups, is_amodal, make_steps(40), num_steps=40)
    assert head.amodal_logits(groups).shape == (3,)
    for name in [*REFERENCES, *heads.LEARNED]:
        assert f"`{name}`" in page or name == "max", name


# References


def test_terms_are_words_and_pairs_of_words():
    assert word_terms("The mug, the Mug!") == {"the", "mug", "the mug", "mug the"}


def test_logistic_regression_equals_scikit_learns():
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    features = sparse.csr_array(rng.integers(0, 2, (200, 12)).astype(float))
    labels = rng.random(200) < 0.5
    weights = fit_logistic_regression(features, labels, num_terms=12)
    reference = LogisticRegression(tol=1e-8, max_iter=1000).fit(features, labels)
    np.testing.assert_allclose(weights[:-1], reference.coef_[0], atol=1e-3)
    np.testing.assert_allclose(weights[-1], reference.intercept_[0], atol=1e-3)


# The command


@pytest.fixture
def run_ablate(tiny_config, tmp_path, command, monkeypatch):
    """Runs the command on the tiny language model and a few sentences."""
    text = tiny_config.model.text
    sizes = AblationSizes(num_steps=3, num_scenes=60, num_text_only=100, num_test_scenes=4)
    monkeypatch.setattr(ablate, "QUICK", sizes)
    flags = ["--quick", "--text.name", text.name, "--text.layers", *text.layers]
    flags += ["--text.max-tokens", text.max_tokens, "--out", tmp_path / "out"]
    return lambda *more: command(ablate.main, *flags, *more)


def test_the_command_writes_table_figure_and_scores(run_ablate, tmp_path):
    end = run_ablate("--heads", "linear", "mlp")
    assert end.code == 0, end.err
    assert "attention" not in end.out and "…" not in end.out
    # A row of the table is a line of a terminal.
    table = end.out[end.out.index("mask type") : end.out.index("wrote ")]
    assert max(map(len, table.splitlines())) <= 80
    (line,) = [line for line in table.splitlines() if line.startswith(" keyword rule ")]
    assert len(line.split()) == 2 + len(TEST_SETS)

    out = tmp_path / "out"
    results = {row["head"]: row for row in json.loads((out / "heads.json").read_text())}
    assert list(results) == ["keyword rule", "bag of words", "linear", "mlp"]
    assert len(results["linear"]["accuracy"]["val_r2sm"]) == 2
    assert 0.5 < results["bag of words"]["accuracy"]["val_r2sm"][0] <= 1

    expected = percent_over_seeds(results["linear"]["accuracy"]["val_r2sm"])
    table = (out / "heads.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith("| linear |")]
    assert row.split(" | ")[1] == expected
    assert all(name.removeprefix("val_") in table for name in TEST_SETS)
    assert (out / "heads.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--heads", "keyword"], "--heads keyword"),
        (["--heads", "decoder"], "--heads decoder"),
        (["--seeds", "0"], "--seeds"),
        (["--steps", "0"], "--steps"),
        (["--stepz", "3"], "--stepz"),
        (["--text.name", "./nowhere"], "nowhere"),
    ],
)
def test_wrong_flags_are_refused(run_ablate, flags, word):
    end = run_ablate(*flags)
    assert end.code == 2
    assert end.err.count("error: ") == 1 and word in end.err
