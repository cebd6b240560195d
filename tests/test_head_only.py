"""Heads trained alone on token states, the list of sentences written by hand, and the ablation over both."""

import csv
import json
import re
import runpy
from collections import Counter
from pathlib import Path

import head_only
import numpy as np
import pytest
from head_only import (
    Sentences,
    intent_list,
    listed,
    pad,
    scene_sentences,
    text_only_queries,
    train_head,
)

from r2sm_jax.data.text_states import TextStates
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.query import keyword_mask_type
from r2sm_jax.synthetic.queries.sentences import intent_sentences, written_sentences

SCRIPT = Path(__file__).parents[1] / "scripts" / "ablate_heads.py"


@pytest.fixture(scope="module")
def texts(tiny_config) -> TextStates:
    text = tiny_config.model.text
    return TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def test_the_list_is_large_balanced_hard_and_explained():
    rows = intent_sentences()
    assert len(rows) >= 200 and len({words(row.text) for row in rows}) == len(rows)
    assert {row.mask_type for row in rows} == {"modal", "amodal"} and all(
        row.family and row.reason for row in rows
    )
    share = np.mean([row.mask_type == "amodal" for row in rows])
    hard = np.mean([keyword_mask_type(row.text) != row.mask_type for row in rows])
    assert 0.45 < share < 0.55 and hard > 1 / 3


def test_the_list_to_test_on_is_balanced_and_no_sentence_is_in_both():
    rows = intent_sentences("test")
    assert len(rows) >= 200 and len({words(row.text) for row in rows}) == len(rows)
    assert {row.family for row in rows} == {"easy", "medium", "hard"}
    assert 0.45 < np.mean([row.mask_type == "amodal" for row in rows]) < 0.55
    assert not {words(row.text) for row in rows} & {words(row.text) for row in intent_sentences()}


@pytest.mark.parametrize("purpose", ["development", "test", "calibration", "val_r2sm"])
def test_the_lists_are_not_what_the_grammar_writes(purpose):
    written = {
        words(text)
        for split in ("train", "val_phrasing")
        for text in scene_sentences(split, 60).texts
    }
    written |= {words(text) for text in text_only_queries(3000).texts}
    assert not written & {words(row.text) for row in intent_sentences(purpose)}


def test_sentences_of_scenes_have_labels_and_families():
    sentences = scene_sentences("val", 10)
    assert (
        len(set(sentences.texts))
        == len(sentences.texts)
        == len(sentences.amodal)
        == len(sentences.families)
    )
    for amodal, family in zip(sentences.amodal, sentences.families, strict=True):
        assert family.startswith("amodal: " if amodal else "modal: ")
    name = sentences.families[0]
    rest, only = sentences.without(name), sentences.only(name)
    both = rest.joined(only)
    assert (
        sorted(both.texts) == sorted(sentences.texts)
        and both.amodal.sum() == sentences.amodal.sum()
    )
    assert set(only.families) == {name} and name not in rest.families
    assert sorted(rest.texts + only.texts) == sorted(sentences.texts)


def test_padding_keeps_every_sentence_and_changes_no_state(texts):
    sentences = ["the mug", "the whole mug " * 12, "a " * 80, "the red book"]
    groups = pad(texts, sentences)
    assert sorted(np.concatenate([group.rows for group in groups]).tolist()) == [0, 1, 2, 3]
    for group in groups:
        for row, states, mask in zip(group.rows, group.states, group.mask, strict=True):
            known = texts.states_of(sentences[row])
            np.testing.assert_array_equal(states[mask], known[: mask.sum()])
            assert mask.sum() == min(len(known), states.shape[0])


@pytest.mark.parametrize("name", LEARNED)
def test_every_head_learns_a_word(name, texts, monkeypatch):
    """One word decides, whatever stands around it."""
    monkeypatch.setattr(head_only, "BATCH", 32)
    nouns = ["mug", "book", "dog", "red car", "two hats", "boat"]
    made = [
        (f"{a} the {n} {b}", a == "whole")
        for a in ("whole", "seen")
        for n in nouns
        for b in ("here", "there")
    ]
    sentences = Sentences(
        tuple(text for text, _ in made),
        np.array([amodal for _, amodal in made]),
        ("x",) * len(made),
    )
    groups = pad(texts, sentences.texts)
    steps = 4000 if name == "linear" else 150  # its few numbers are AdamW's, at a low rate
    head = train_head(name, groups, sentences.amodal, steps=steps)
    logits = head.logits(groups)
    least = 0.7 if name == "linear" else 0.9  # the mean of random states hardly tells one word
    assert ((logits > 0) == sentences.amodal).mean() >= least and head.parameters > 0
    again = train_head(name, groups, sentences.amodal, steps=steps)
    np.testing.assert_array_equal(again.logits(groups), logits)


@pytest.fixture
def ablate(tiny_config, tmp_path, command):
    """Runs the script on the tiny language model."""
    config = tmp_path / "tiny.py"
    config.write_text(
        "from dataclasses import replace\nfrom r2sm_jax.config import Config\n"
        f"def get_config():\n    from r2sm_jax.cli import from_json\n    import json\n"
        f"    return from_json(Config, json.loads({json.dumps(json.dumps(_plain(tiny_config)))}), 'tiny')\n"
    )
    main = runpy.run_path(str(SCRIPT))["main"]
    return lambda *flags: command(main, "--config", config, "--out", tmp_path / "out", *flags)


def _plain(config) -> dict:
    from r2sm_jax.cli import to_json

    return to_json(config)


def test_authors_that_are_left_out_are_not_trained_on():
    written = listed(written_sentences())
    names = list(dict.fromkeys(written.families))[:2]
    own = [{text.lower() for text in written.only(name).texts} for name in names]
    assert all(own) and not set.union(*own) & {
        text.lower() for text in text_only_queries(2000, without=names).texts
    }
    everything = {text.lower() for text in text_only_queries(2000).texts}
    assert all(texts & everything for texts in own)


def test_the_ablation_writes_its_table_and_finishes_cells_once(ablate, tmp_path, tiny_run):
    flags = [
        "--text-only",
        "--heads",
        "linear",
        "mlp",
        "--seeds",
        2,
        "--scenes",
        60,
        "--test-scenes",
        4,
        "--steps",
        3,
    ]
    flags += ["--text-only-queries", 100]
    end = ablate(*flags, "--leave-one-out", "family", "--run", tiny_run)
    assert end.code == 0, end.err
    out = tmp_path / "out"
    text = (out / "text.md").read_text()
    assert "linear - mlp" in text and "did not see" in text and "| keyword (reference) |" in text
    masks = text.split("gIoU of the masks of")[1].split("\n## ")[0]
    found = {
        row.split("|")[1].strip(): row.split("|")[2]
        for row in masks.splitlines()
        if row.startswith("|")
    }
    assert {"always modal", "keyword", "linear", "mlp", "oracle type"} <= found.keys()
    assert "±" in found["linear"] and 0 <= float(found["oracle type"]) <= 100
    with (out / "text.csv").open(newline="") as file:
        rows = {row["head"]: row for row in csv.DictReader(file)}
    cells = [json.loads((out / f"text_linear_{seed}.json").read_text()) for seed in range(2)]
    wanted = intent_list("val_r2sm").amodal
    shares = [((np.array(c["probabilities"]["val_r2sm"]) > 0.5) == wanted).mean() for c in cells]
    assert float(rows["linear"]["val_r2sm accuracy"]) == pytest.approx(np.mean(shares))
    assert 0.5 < float(rows["bag of words (reference)"]["val_r2sm accuracy"]) <= 1
    assert (out / "text.png").stat().st_size > 5000
    before = (out / "text_linear_0.json").stat().st_mtime_ns
    again = ablate(*flags, "--leave-one-out", "author")
    assert again.code == 0, again.err
    left_out = (out / "text.md").read_text().split("did not see")[1]
    names = {
        name
        for name, number in Counter(s.family for s in written_sentences()).items()
        if number >= 20
    }
    assert all(f"| {name} |" in left_out and f"without {name}:" in again.out for name in names)
    assert (out / "text_linear_0.json").stat().st_mtime_ns == before
    assert (
        ablate(*flags, "--steps", 4).code == 0
        and (out / "text_linear_0.json").stat().st_mtime_ns != before
    )


def test_whole_runs_are_compared_by_their_reports(ablate, tmp_path):
    end = ablate("--heads", "linear", "--seeds", 1)
    assert end.code == 0, end.err
    text = (tmp_path / "out" / "runs.md").read_text()
    report = json.loads((tmp_path / "out" / "run_linear_0" / "report.json").read_text())
    assert re.search(r"\| linear \|.*\| [1-9]\d* \|", text)  # parameters of the head
    assert (
        "val gIoU, oracle type" in text
        and f"{100 * report['splits']['val']['all']['giou']:.2f}" in text
    )
    assert ablate("--heads", "linear", "--seeds", 1).code == 0
    config = tmp_path / "tiny.py"
    config.write_text(config.read_text().replace('\\"batch_size\\": 8', '\\"batch_size\\": 4'))
    other = ablate("--heads", "linear", "--seeds", 1)
    assert (
        other.code == 2
        and "was trained with another configuration: train.batch_size (8 in the run" in other.err
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--heads", "linar"], "did you mean 'linear'"),
        (["--heads", "keyword", "--text-only"], "nothing of it is learned"),
        (["--leave-one-out", "author"], "add --text-only"),
        (["--run", "runs/latest"], "add --text-only"),
        (["--text-only", "--run", "nowhere"], "no such run folder"),
        (["--seeds", "0"], "at least 1"),
    ],
)
def test_bad_flags_are_one_sentence(ablate, flags, words):
    end = ablate(*flags)
    assert end.code == 2 and words in end.err and "Traceback" not in end.err


def test_the_documented_head_works(texts, monkeypatch):
    """The example of docs/heads.md, put into the registry."""
    text = (SCRIPT.parents[1] / "docs" / "heads.md").read_text()
    code = text.split("```python\n")[1].split("LEARNED =")[0]
    names = vars(heads) | {}
    exec(compile(code, "docs/heads.md", "exec"), names)
    monkeypatch.setitem(LEARNED, "max", names["MaxHead"])
    groups = pad(texts, ["the whole mug", "the mug", "a book as seen"])
    head = train_head("max", groups, np.array([True, False, False]), steps=40)
    assert head.logits(groups).shape == (3,)
    for name in [*heads.REFERENCES, *heads.LEARNED]:
        assert f"`{name}`" in text or name == "max", name
