"""Decisions about sentences without an image: in NumPy as in JAX, the command, and its file
scored."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save

import r2sm_jax
from r2sm_jax import __main__ as package
from r2sm_jax.config import ModelConfig, TextConfig
from r2sm_jax.errors import InputError
from r2sm_jax.evaluate import main as evaluate
from r2sm_jax.inference.decider import BertStates, Decider, load_decider, open_head, open_states
from r2sm_jax.inference.decision import NotEnglish, TruncatedQuery, check_query, is_english
from r2sm_jax.inference.export import export
from r2sm_jax.inference.load import load_run
from r2sm_jax.inference.model_folder import CONFIG, WEIGHTS, write_checksums
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.language.encoder import load_text_encoder
from r2sm_jax.language.numpy_bert import NumpyBert, gelu, gelu_tanh, target_head
from r2sm_jax.language.states import TextStates, open_language_model
from r2sm_jax.language.tokenizer import QueryTokenizer, pad_ids, read_tokenizer_file
from r2sm_jax.models.hub import read_tensors
from r2sm_jax.models.mask_type_heads import LEARNED, TargetHead
from r2sm_jax.models.matching import flat_weights
from r2sm_jax.synthetic.queries.sentences import intent_sentences

SENTENCES = [
    "the red mug",
    "the whole red mug, hidden parts included, as if the book were not there",
    "mug",
    "what holds coffee?",
]
TEXT = TextConfig(layers=(1, 2), max_tokens=24, dim=32)


@pytest.fixture(scope="module")
def exported(tiny_run, tmp_path_factory) -> Path:
    """An export of the tiny run, without StableHLO."""
    folder = tmp_path_factory.mktemp("exports") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("r2sm_jax.inference.stablehlo.export_functions", lambda run: {})
        export(load_run(tiny_run), folder)
    return folder


@pytest.fixture(scope="module")
def main():
    """The command. Importing it must leave the function `r2sm_jax.decide` callable."""
    import r2sm_jax.decide as module

    return module.main


# NumPy computes what JAX does.


@pytest.mark.parametrize("name", [*LEARNED, "target"])
def test_heads_give_the_logits_of_those_in_jax(name):
    """In NumPy, and one that NumPy does not know by JAX."""
    rng = np.random.default_rng(0)
    head = (LEARNED | {"target": TargetHead})[name](32, 3, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(head)
    # New heads have biases of 0 and scales of 1, with which a mistake would not show.
    state = jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32), state)
    states = rng.normal(0, 1, (5, 9, 3, 32)).astype(np.float32)
    mask = np.arange(9) < np.array([[9], [1], [4], [9], [6]])

    expected = nnx.merge(graphdef, state)(jnp.asarray(states)[None], jnp.asarray(mask)[None])[0]
    weights = {path: np.asarray(value) for path, value in flat_weights(state).items()}
    if name == "target":  # which has a logit for each token
        logits, expected = target_head(weights, states, mask)[mask], np.asarray(expected)[mask]
    else:
        config = ModelConfig(head=name, text=TextConfig(layers=(0, 1, 2), dim=32))
        logits = open_head(config, weights)(states, mask)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_activations_are_those_of_jax():
    x = np.linspace(-9, 9, 40_000, dtype=np.float32).reshape(2, 4, 5000)
    np.testing.assert_allclose(gelu(x), nnx.gelu(jnp.asarray(x), approximate=False), atol=2e-6)
    np.testing.assert_allclose(gelu_tanh(x), nnx.gelu(jnp.asarray(x)), atol=2e-6)


def test_bert_in_numpy_gives_the_states_of_that_in_jax(bert_folder):
    ids, mask = pad_ids([[5, 9, 3, 7], [8], [2, 2, 4, 4, 1, 6]], 3, 6)
    layers = (0, 1, 2)
    states = NumpyBert(bert_folder)(ids, mask, layers)
    expected = load_text_encoder(bert_folder).float16_states(
        jnp.asarray(ids), jnp.asarray(mask), layers
    )
    assert states.dtype == np.float16
    np.testing.assert_allclose(states[mask], np.asarray(expected)[mask], rtol=2e-3, atol=2e-3)


# Loading.


@pytest.mark.parametrize("source", ["run", "export"])
def test_the_decider_decides_as_the_predictor(source, tiny_run, exported, predictor):
    decider = load_decider(tiny_run if source == "run" else exported)
    # More than a batch, not in the order of their lengths.
    sentences = [s.text for s in intent_sentences("development")][:30] + SENTENCES
    expected = predictor.amodal_logits(sentences)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncatedQuery)
        decisions = decider(sentences)
        alone = [decider(sentence)[0] for sentence in sentences]
        logits = [logit for logit, _ in decider.read(sentences)]
    np.testing.assert_allclose(logits, expected, atol=2e-3)
    for decision, one, logit in zip(decisions, alone, expected, strict=True):
        probability = 1 / (1 + np.exp(-logit))
        assert decision.amodal_probability == pytest.approx(probability, abs=1e-3)
        assert one.amodal_probability == pytest.approx(decision.amodal_probability, abs=1e-5)
        assert decision.mask_type == ("amodal" if decision.amodal_probability > 0.5 else "modal")
    assert all(d.undecided for d in decider(sentences, abstain=0.5) if d.amodal_probability != 0)


def test_an_export_is_loaded_without_jax_and_only_its_head_is_read(exported):
    program = (
        "import sys, r2sm_jax\n"
        "from r2sm_jax.inference import decider\n"
        "read = []\n"
        "tensors = decider.read_tensors\n"
        "decider.read_tensors = lambda *args: read.append(args[1:]) or tensors(*args)\n"
        f"print(*r2sm_jax.decide(['the red mug', 'mug'], model={str(exported)!r}))\n"
        "print(r2sm_jax.InputError.__name__, r2sm_jax.Decision.__name__, end=' ')\n"
        "print([name for name in ('jax', 'transformers', 'PIL') if name in sys.modules], read)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    decisions, loaded = ended.stdout.splitlines()
    assert decisions.count("amodal_probability") == 2
    assert loaded == "InputError Decision [] [('head.',), ('target_head.',)]"
    assert r2sm_jax.Predictor is Predictor and r2sm_jax.Prediction is Prediction
    with pytest.raises(AttributeError, match="Predicter"):
        r2sm_jax.Predicter  # noqa: B018


@pytest.mark.parametrize(("bias", "target"), [(1e3, "the red mug"), (-1e3, None)])
def test_a_model_with_a_target_head_says_what_is_named(bias, target, exported, tmp_path):
    folder = tmp_path / "with_target"
    shutil.copytree(exported, folder)
    stored = json.loads((folder / CONFIG).read_text())
    stored["config"]["model"]["target"] = True
    (folder / CONFIG).write_text(json.dumps(stored))
    text = stored["config"]["model"]["text"]
    head = TargetHead(text["dim"], len(text["layers"]), rngs=nnx.Rngs(0))
    head.out.bias[...] = jnp.full(1, bias)
    tensors = read_tensors(folder / WEIGHTS)
    for path, value in flat_weights(nnx.state(head)).items():
        tensors[f"target_head.{path}"] = np.asarray(value)
    (folder / WEIGHTS).write_bytes(save(tensors, {"format": "np"}))
    write_checksums(folder)

    (decision,) = r2sm_jax.decide("the red mug", folder)
    assert decision.target == target
    (before,) = r2sm_jax.decide("the red mug", exported)
    assert before == decision._replace(target=None)
    image = np.zeros((40, 60, 3), np.uint8)
    (prediction,) = load_run(folder).predictor.predict(["the red mug"], image=image)
    assert prediction.target == prediction.to_json()["target"] == target
    is_shown = 'target "the red mug"' in replace(prediction, presence=1.0).summary()
    assert is_shown == (target is not None)


def test_the_command_uses_one_thread_for_products_unless_it_is_told_otherwise():
    program = (
        "import os, runpy, sys\n"
        "sys.argv = ['decide', '--nothing-like-it']\n"
        "try:\n    runpy.run_module('r2sm_jax.decide', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "print(os.environ['OPENBLAS_NUM_THREADS'], os.environ['OMP_NUM_THREADS'],\n"
        "      'numpy' in sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    for given, expected in (({}, "1 1 False"), ({"OMP_NUM_THREADS": "3"}, "1 3 False")):
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=environment | given,
        )
        assert ended.stdout.split("\n")[-2] == expected, ended.stderr


def test_other_language_models_decide_with_jax(llama_folder):
    texts = open_states(TEXT, str(llama_folder), {}, "this run")
    assert isinstance(texts, TextStates)
    decider = Decider("mlp", lambda states, mask: states.mean((1, 2, 3)), texts, temperature=2.0)
    states, _ = texts(SENTENCES)
    # In one batch, as the decider has them.
    expected = states.astype(np.float32).mean((1, 2, 3)) / 2
    logits = [logit for logit, _ in decider.read(SENTENCES)]
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)


def test_a_tokenizer_is_read_from_its_file_where_that_is_known_to_be_right(bert_folder):
    slow = QueryTokenizer(bert_folder, vocab_size=10**6, max_tokens=6)
    assert read_tokenizer_file(bert_folder, None) is None
    assert read_tokenizer_file(bert_folder, "0" * 64) is None
    assert read_tokenizer_file(bert_folder, slow.sha256) is not None
    fast = QueryTokenizer(bert_folder, vocab_size=10**6, max_tokens=6, expected_sha256=slow.sha256)
    assert fast(SENTENCES) == slow(SENTENCES)
    assert fast.cut_off(SENTENCES[1]) == slow.cut_off(SENTENCES[1]) != ""


def test_a_language_model_of_other_weights_is_refused(bert_folder):
    texts = open_language_model(TEXT, str(bert_folder), {}, "this export")
    for opened in (texts.identity, {"tokenizer_sha256": texts.identity["tokenizer_sha256"]}):
        assert isinstance(open_states(TEXT, str(bert_folder), opened, "this export"), BertStates)
    for key in ("sha256", "tokenizer_sha256"):
        trained = texts.identity | {"name": "a/b", key: "0" * 64}
        with pytest.raises(InputError, match="get the a/b"):
            open_states(TEXT, str(bert_folder), trained, "this export")


@pytest.mark.parametrize("head", ["decoder", "none", "oracle"])
def test_heads_that_do_not_decide_by_words_are_refused(head, exported, tmp_path):
    with pytest.raises(InputError, match=f"mask-type head, {head}, .*linear, mlp"):
        load_decider(with_head(exported, tmp_path, head))


def with_head(exported: Path, tmp_path: Path, head: str) -> Path:
    """A folder with the configuration of an export whose head is another one, and no weights."""
    config = json.loads((exported / "config.json").read_text())
    config["config"]["model"]["head"] = head
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_keyword_rule_needs_no_language_model(exported, tmp_path):
    decider = load_decider(with_head(exported, tmp_path, "keyword"))
    decisions = decider(["the red mug", "the whole mug"])
    assert [(d.mask_type, d.amodal_probability) for d in decisions] == [("modal", 0), ("amodal", 1)]


def test_long_sentences_are_named_once(exported):
    long = "the red mug " * 20 + "hidden parts included"
    with pytest.warns(TruncatedQuery, match="not read: .*hidden parts included") as caught:
        load_decider(exported)(["mug", long, long])
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("the red mug", True),
        ("red mug, un-occluded", True),
        ("the café du monde sign", True),
        ("die rote Tasse hinter dem Buch", False),
        ("la tasse rouge derrière le livre", False),
        ("la taza roja detrás del libro", False),
        ("红色的杯子", False),
    ],
)
def test_a_sentence_that_is_not_english_is_named(sentence, expected):
    assert is_english(sentence) == expected
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_query(sentence)
    assert [one.category for one in caught] == ([] if expected else [NotEnglish])


@pytest.mark.parametrize("name", ["val_r2sm", "test", "calibration"])
def test_sentences_written_by_hand_are_english(name):
    assert all(is_english(sentence.text) for sentence in intent_sentences(name))


def test_a_model_that_has_changed_is_read_again(exported, tmp_path):
    """As a link to the latest run, or a run in training."""
    link = tmp_path / "latest"
    before = r2sm_jax.decide("the mug", exported)[0].amodal_probability

    def decide_hotter(name: str, factor: float) -> float:
        """The probability by the link, which leads to a model with a higher temperature."""
        path = tmp_path / name / "config.json"
        stored = json.loads(path.read_text())
        stored["calibration"]["type_temperature"] *= factor
        path.write_text(json.dumps(stored))
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        return r2sm_jax.decide("the mug", link)[0].amodal_probability

    for name in ("a", "b"):
        shutil.copytree(exported, tmp_path / name)
        assert abs(decide_hotter(name, 2) - 0.5) < abs(before - 0.5)
    assert decide_hotter("b", 1e6) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("sentence", ["", " ?!", "half \ud800 of one"])
def test_no_sentence_is_refused(sentence, exported):
    with pytest.raises(InputError):
        r2sm_jax.decide(["mug", sentence], model=exported)


# The command, and scores of its file.


def test_the_command_prints_lines_or_json(main, exported, command, tmp_path):
    assert callable(r2sm_jax.decide) and "decide" in package.COMMANDS
    (tmp_path / "s.txt").write_text("\ufeffmug\n\n  what holds\u2028coffee? \n")
    flags = ["--model", exported, "--file", tmp_path / "s.txt"]
    end = command(main, "the red mug", *flags)
    assert end.code == 0 and end.err == ""
    lines = end.out.splitlines()
    assert [line.split()[0] in ("modal", "amodal") for line in lines] == [True] * 3
    assert lines[2].endswith("what holds coffee?")

    end = command(main, "the red mug", *flags, "--json")
    rows = [json.loads(line) for line in end.out.splitlines()]
    (first, *_) = r2sm_jax.decide("the red mug", exported)
    probability = rows[0].pop("amodal_probability")
    assert probability == pytest.approx(first.amodal_probability, abs=1e-5)
    assert rows[0] == {
        "query": "the red mug",
        "mask_type": first.mask_type,
        "undecided": first.undecided,
        "target": None,
    }
    assert [row["query"] for row in rows] == ["the red mug", "mug", "what holds coffee?"]
    end = command(main, "the red mug", "--model", exported, "--abstain", 0.5)
    assert "undecided" in end.out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("s.tsv", '# made by hand\nmask_type\ttext\nmodal\ta "red" mug\namodal\ta cup, whole\n'),
        ("S.CSV", 'text,mask_type\n"a ""red"" mug",modal\n"a cup, whole",amodal\n'),
    ],
)
def test_of_a_table_the_column_text_is_read(name, content, main, exported, command, tmp_path):
    (tmp_path / name).write_text(content)
    end = command(main, "--file", tmp_path / name, "--model", exported, "--json")
    queries = [json.loads(line)["query"] for line in end.out.splitlines()]
    assert queries == ['a "red" mug', "a cup, whole"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--file"),
        (["?"], "no words"),
        (["mug", "--abstain", "0.6"], "abstain 0.6"),
        (["--file", "empty.txt"], "empty.txt"),
        (["--file", "gone.txt"], "gone.txt"),
        (["--file", "bad.txt"], "bad.txt: line 2"),
        (["--file", "other.tsv"], "column `text`"),
        (["mug", "--model", "nowhere"], "nowhere"),
    ],
)
def test_refusals_of_the_command(flags, word, main, exported, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.txt").write_text("mug\n...\n")
    (tmp_path / "other.tsv").write_text("query\tmask_type\nmug\tmodal\n")
    flags = [exported if flag == "EXPORT" else flag for flag in flags]
    assert word in refused(main, *flags)


LABELLED = "# made for a test\nmask_type\ttext\nmodal\tthe mug\namodal\tthe whole mug\nmodal\tcup\n"


def write_decisions(folder: Path, *rows: dict) -> Path:
    (folder / "labelled.tsv").write_text(LABELLED)
    path = folder / "decisions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_decisions_of_any_system_are_scored(command, tmp_path):
    path = write_decisions(
        tmp_path,
        {"query": "the whole mug", "mask_type": "amodal", "amodal_probability": 0.8},
        {"query": "the mug", "amodal_probability": 0.3},
        {"query": "cup", "mask_type": "amodal", "amodal_probability": 0.9},
        {"query": "another", "mask_type": "modal", "amodal_probability": 0.1},
    )
    flags = ["--decisions", path, "--sentences", tmp_path / "labelled.tsv"]
    end = command(evaluate, *flags, "--out", tmp_path)
    assert end.code == 0 and "1 decisions about other sentences" in end.out
    figures = json.loads((tmp_path / "decisions.json").read_text())
    assert figures["accuracy"] == pytest.approx(2 / 3) and figures["f1"] == pytest.approx(2 / 3)
    assert figures["mcc"] == pytest.approx(0.5) and figures["keyword"] == 1
    # Confidences .7, .8 and .9 lie in bins of their own; the first two are right.
    assert figures["ece"] == pytest.approx((0.3 + 0.2 + 0.9) / 3)
    assert figures["queries"] == 3 and figures["ignored"] == 1

    # A JSON list without probabilities: no calibration.
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    listed = [{"query": row["query"], "mask_type": "modal"} for row in rows]
    path.write_text(json.dumps(listed))
    assert command(evaluate, *flags, "--out", tmp_path).code == 0
    figures = json.loads((tmp_path / "decisions.json").read_text())
    assert figures["ece"] is None and figures["accuracy"] == pytest.approx(2 / 3)


def test_the_sentences_of_a_report_are_the_default(command, tmp_path):
    rows = [{"query": s.text, "mask_type": s.mask_type} for s in intent_sentences("val_r2sm")]
    path = write_decisions(tmp_path, *rows)
    end = command(evaluate, "--decisions", path, "--out", tmp_path)
    assert end.code == 0 and "val_r2sm" in end.out
    figures = json.loads((tmp_path / "decisions.json").read_text())
    assert figures["accuracy"] == 1 and figures["queries"] == len(rows)


MUG = {"query": "the mug", "mask_type": "modal"}
REST = [{"query": "the whole mug", "mask_type": "amodal"}, {"query": "cup", "mask_type": "modal"}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([MUG], "2 of 3 sentences"),
        ([MUG, MUG | {"mask_type": "amodal"}, *REST], "'the mug' has two decisions"),
        ([{"mask_type": "modal"}], "query"),
        ([MUG | {"mask_type": "whole"}], "mask_type"),
        ([{"query": "the mug"}], "have no decision"),
        ([MUG | {"amodal_probability": True}], "amodal_probability"),
    ],
)
def test_bad_decisions_are_refused(rows, words, refused, tmp_path):
    path = write_decisions(tmp_path, *rows)
    labelled = tmp_path / "labelled.tsv"
    message = refused(
        evaluate, "--decisions", path, "--sentences", labelled, "--out", tmp_path / "new"
    )
    assert words in message and str(path) in message and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("type\ttext\nmodal\tthe mug\n", "mask_type"),
        ("mask_type\ttext\nwhole\tthe mug\n", "whole"),
        ("mask_type\ttext\nmodal\tthe mug\n".encode("utf-16"), "no text in UTF-8"),
        ("mask_type\ttext\nmodal\tthe caf\u00e9\n".encode("latin1"), "no text in UTF-8"),
        ("mask_type\ttext\n", "there is no sentence in it"),
        ("modal\tthe mug\n", "there is no sentence in it"),
        ("", "there is no sentence in it"),
    ],
)
def test_bad_labelled_sentences_are_refused(content, words, refused, tmp_path):
    path = write_decisions(tmp_path, MUG)
    labelled = tmp_path / "labelled.tsv"
    labelled.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in refused(evaluate, "--decisions", path, "--sentences", labelled)
    assert "val_rsm" in refused(evaluate, "--decisions", path, "--sentences", "val_rsm")
    assert "--sentences" in refused(evaluate, "runs/x", "--sentences", "test")
