"""Heads trained alone on token states, the lists of sentences, and the ablation command."""

import json
from pathlib import Path

import numpy as np
import optax
import pytest
from query_samples import words_of

from r2sm_jax import ablate
from r2sm_jax.ablate import Sizes, scene_sentences
from r2sm_jax.config import OptimizerConfig
from r2sm_jax.evaluation.ablation import percent_over_seeds
from r2sm_jax.language.numpy_bert import target_head
from r2sm_jax.language.states import TextStates
from r2sm_jax.language.target import target_words
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.query import REFERENCES, Sentence
from r2sm_jax.synthetic.queries.sentences import (
    intent_sentences,
    write_text_only_queries,
)
from r2sm_jax.training import head as training_head
from r2sm_jax.training.head import pad_sentences, train_head, train_target_head
from r2sm_jax.training.optimizer import make_optimizer

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def texts(tiny_config) -> TextStates:
    text = tiny_config.model.text
    return TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)


def make_steps(num_steps: int) -> optax.GradientTransformation:
    return make_optimizer(OptimizerConfig(), num_steps)


# Sentences


def test_nothing_that_is_trained_on_stands_in_a_list_that_measures():
    written = write_text_only_queries(3000, seed=0)
    for split in ("train", "val_phrasing"):
        written += scene_sentences(split, 60)
    written = {words_of(sentence.text) for sentence in written}
    for purpose in ("development", "test", "calibration", "val_r2sm"):
        assert not written & {words_of(row.text) for row in intent_sentences(purpose)}, purpose


# Training a head


def test_padding_keeps_every_sentence_and_changes_no_state(texts):
    sentences = ["the mug", "the whole mug " * 12, "a " * 80, "the red book"]
    groups = pad_sentences(texts, sentences)
    assert sorted(np.concatenate([group.rows for group in groups]).tolist()) == [0, 1, 2, 3]
    for group in groups:
        for row, states, mask in zip(group.rows, group.states, group.mask, strict=True):
            expected, is_real = texts([sentences[row]])
            np.testing.assert_array_equal(states[mask], expected[0][: mask.sum()])
            assert mask.sum() == min(is_real.sum(), len(states))


@pytest.mark.parametrize("name", LEARNED)
def test_every_head_learns_a_word(name, texts, monkeypatch):
    """One word decides, whatever stands around it."""
    monkeypatch.setattr(training_head, "BATCH_SIZE", 32)
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
    if name == "mlp":  # which is quick to compile
        np.testing.assert_array_equal(train().amodal_logits(groups), logits)


def test_a_target_head_learns_a_word(texts, monkeypatch):
    """Returns the weights of a head that marks a word, whatever stands around it."""
    monkeypatch.setattr(training_head, "BATCH_SIZE", 32)
    sentences = [
        Sentence(f"{start} the mug {place}", "modal", target="mug")
        for start in ("mark", "show me", "the book behind")
        for place in ("here", "on the table", "and the dog")
    ]
    sentences += [Sentence("the dog", "modal", target=""), Sentence("a hat", "modal")] * 3
    monkeypatch.setattr(training_head, "TARGET_ROUNDS", 1000)
    weights = train_target_head(texts, sentences, seed=0)
    params = {name.removeprefix("target_head."): np.asarray(x) for name, x in weights.items()}
    assert len(params) == len(weights)
    for sentence in sentences[:9]:
        states, mask = texts([sentence.text])
        (logits,) = target_head(params, states.astype(np.float32), mask)
        spans = texts.tokenizer.spans(sentence.text)
        assert target_words(sentence.text, spans, logits) == "the mug", sentence.text


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


# The command


@pytest.fixture
def run_ablate(tiny_config, tmp_path, command, monkeypatch):
    """Runs the command on the tiny language model and a few sentences."""
    text = tiny_config.model.text
    sizes = Sizes(num_steps=3, num_scenes=60, num_text_only=100, num_test_scenes=4, every_plain=100)
    monkeypatch.setattr(ablate, "QUICK", sizes)
    flags = ["--quick", "--text.name", text.name, "--text.layers", *text.layers]
    flags += ["--text.max-tokens", text.max_tokens, "--out", tmp_path / "out"]
    return lambda *more: command(ablate.main, *flags, *more)


def test_the_command_writes_table_figure_and_scores(run_ablate, tmp_path):
    end = run_ablate("--heads", "linear", "mlp")
    assert end.code == 0, end.err
    assert "keyword rule" in end.out and "attention" not in end.out
    assert "--quick" in end.out
    out = tmp_path / "out"
    results = {row["head"]: row for row in json.loads((out / "heads.json").read_text())}
    assert list(results) == ["keyword rule", "linear", "mlp"]
    accuracy = results["linear"]["accuracy"]
    assert list(accuracy) == ["val_r2sm", "val", "val_phrasing", "val_hard", "written", "plain"]
    table = (out / "heads.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith("| linear |")]
    assert row.split(" | ")[1] == percent_over_seeds(accuracy["val_r2sm"])
    assert len(accuracy["val_r2sm"]) == 2 and "phrasing" in table
    assert "--quick" in table
    assert "| amodal: " in table and "| modal: " in table
    assert (out / "heads.png").stat().st_size > 5000
