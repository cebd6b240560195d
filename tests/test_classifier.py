"""The classifier of a published backbone: its names, its evidence by hand, and a model with it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_efficientnet import DIMS, tiny_tensors
from tiny_models import TINY, WIDTH, fake_inputs

from r2sm_jax.cli import to_json
from r2sm_jax.config import DataConfig
from r2sm_jax.inference import stablehlo
from r2sm_jax.inference.export import export
from r2sm_jax.inference.load import Run, load_run
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.stablehlo import verify
from r2sm_jax.models import pretrained
from r2sm_jax.models.classifier import (
    NUM_CLASSES,
    TEMPERATURE,
    WEIGHT,
    WINDOW,
    Classifier,
    class_names,
    make_constants,
    unit,
)
from r2sm_jax.models.matching import flat_weights, put_weights
from r2sm_jax.models.pretrained import load_pretrained
from r2sm_jax.models.r2sm import build_model
from r2sm_jax.sources import open_split
from r2sm_jax.train import main

VISION = replace(
    TINY.vision,
    image_size=64,
    patch_size=16,
    encoder="efficientnet",
    efficientnet="tiny",
    efficientnet_dims=DIMS,
)
WITHOUT = replace(TINY, vision=VISION, presence_threshold=-np.inf)
WITH = replace(WITHOUT, classifier=True)
BALL, CUP = 3, 7
"""Two classes."""
SENTENCES = ["the cup", "the ball"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Published weights, found by whatever name."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file(tiny_tensors(), folder / "model.safetensors")
    monkeypatch.setattr(pretrained, "find_model", lambda *_: folder)
    return folder


# Names


def test_classes_have_their_own_names_and_those_of_what_they_are_kinds_of():
    names = class_names()
    assert len(names) == NUM_CLASSES and all(names)
    assert "tench" in names[0] and "toilet tissue" in names[999]
    retriever = names[207]
    assert {"golden retriever", "retriever", "sporting dog"} <= set(retriever)
    # More than 60 classes are dogs or things.
    assert not {"dog", "entity", "animal"} & set(retriever)


def vector_of(text: str) -> np.ndarray:
    return np.random.default_rng(list(text.encode())).normal(size=WIDTH).astype(np.float16)


def encode(texts):
    """Each text has a vector of its own in the last of two layers; the second token is padding."""
    states = np.zeros((len(texts), 2, 2, WIDTH), np.float16)
    states[:, 1] = 99
    states[:, 0, 1] = [vector_of(text) for text in texts]
    return states, np.array([[True, False]] * len(texts))


def test_vectors_are_nearest_to_those_of_their_names():
    vectors, mean = make_constants(encode, SENTENCES).values()
    assert vectors.shape == (NUM_CLASSES, WIDTH) and vectors.dtype == np.int8
    assert np.abs(vectors).max(1).tolist() == [127] * NUM_CLASSES
    expected = np.mean([unit(jnp.asarray(vector_of(text))) for text in SENTENCES], 0)
    np.testing.assert_allclose(mean, expected, atol=1e-3)
    tench = unit(jnp.asarray(vector_of("tench"), jnp.float32))
    assert np.argmax(unit(jnp.asarray(vectors, jnp.float32)) @ tench) == 0


# By hand


def make_classifier() -> Classifier:
    """Classes are channels of the features; two of them have words."""
    classifier = Classifier(16, WIDTH, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    for layer in (classifier.hidden, classifier.out):
        layer.kernel[...] = 8 * jnp.eye(*layer.kernel.shape)
    vectors = np.zeros((NUM_CLASSES, WIDTH), np.int8)
    vectors[BALL, 0] = vectors[CUP, 1] = 127
    classifier.class_vectors[...] = jnp.asarray(vectors)
    return classifier


def say(*words: tuple[float, float]):
    """Sentences [1 k], each of a token with so much of the ball and of the cup, and padding."""
    text = np.full((1, len(words), 3, 2, WIDTH), 9, np.float16)
    text[:, :, 0] = 0
    text[:, :, 0, -1, :2] = words
    return jnp.asarray(text), jnp.asarray([[[True, False, False]] * len(words)])


def test_what_a_cell_shows_is_likelier_than_what_none_shows():
    classifier = make_classifier()
    features = np.zeros((1, 2, 2, 16), np.float32)
    features[0, 0, 1, BALL] = features[0, 1, 0, CUP] = 1
    # The cup lies in the padding.
    image_mask = np.ones((1, 64, 64), bool)
    image_mask[:, 32:] = False
    probabilities = classifier(jnp.asarray(features), jnp.asarray(image_mask))
    assert probabilities.shape == (1, 4, NUM_CLASSES)
    np.testing.assert_allclose(probabilities.sum(-1)[0], [1, 1, 0, 0], atol=1e-5)
    ball, cup = classifier.presence_logit(probabilities, *say((5, 0), (0, 5)))[0]
    best = np.exp(48) / (np.exp(48) + NUM_CLASSES - 1)
    np.testing.assert_allclose(ball, WEIGHT * np.log(best + 1e-6), atol=1e-4)
    assert cup < WEIGHT * np.log(2 / NUM_CLASSES)


@pytest.mark.parametrize("gap", [0.1, 0.2])
def test_classes_that_are_nearly_as_similar_count_less_and_others_not_at_all(gap):
    probabilities = np.zeros((1, 1, NUM_CLASSES), np.float32)
    probabilities[..., CUP] = 1
    # A sentence of length 1 that is so much nearer to the ball.
    ball = max(np.roots([2, -2 * gap, gap**2 - 1]))
    sentence = say((ball, ball - gap))
    logit = make_classifier().presence_logit(jnp.asarray(probabilities), *sentence)
    weight = np.exp(-gap / TEMPERATURE) if gap < WINDOW else 0
    np.testing.assert_allclose(logit, WEIGHT * np.log(weight + 1e-6), atol=0.05)


def test_a_strip_narrower_than_half_a_cell_is_seen():
    image_mask = np.zeros((1, 64, 64), bool)
    image_mask[:, :6] = True
    probabilities = make_classifier()(jnp.ones((1, 2, 2, 16)), jnp.asarray(image_mask))
    assert (probabilities.sum(-1) > 0.9).tolist() == [[True, True, False, False]]


# In the segmenter


def published_model(config, folder):
    """A model with the published weights and words that `encode` knows."""
    graphdef, params, constants = nnx.split(build_model(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params, constants, reports = load_pretrained(config, params, constants)
    constants = put_weights(constants, make_constants(encode, SENTENCES))
    return nnx.merge(graphdef, params, constants), next(iter(reports.values()))


@nnx.jit
def answer(model, plain, inputs):
    """The answers of both models, and the evidence of the first."""
    classes = model.encode_image(inputs["image"], inputs["image_mask"]).classes
    evidence = model.classifier.presence_logit(classes, inputs["text"], inputs["text_mask"])
    return model(**inputs), plain(**inputs), evidence


def test_the_evidence_moves_the_presence_of_the_fused_mask_alone(folder):
    model, report = published_model(WITH, folder)
    plain, plain_report = published_model(WITHOUT, folder)
    assert not report.unused and len(plain_report.unused) == 4
    trained, plain_trained = (flat_weights(nnx.state(m, nnx.Param)) for m in (model, plain))
    assert trained.keys() == plain_trained.keys()

    out, without, evidence = answer(model, plain, fake_inputs(WITH, 2, 3))
    difference = np.asarray(out.presence - without.presence)
    np.testing.assert_allclose(difference[..., 0], evidence, atol=1e-5)
    assert np.ptp(evidence) > 0.1 and not difference[..., 1:].any()
    for name in ("masks", "iou", "amodal_logit"):
        np.testing.assert_allclose(getattr(out, name), getattr(without, name), atol=1e-5)


@pytest.fixture
def run(folder, tiny_run, tmp_path) -> Run:
    """A run with a classifier: that of all tests, with another image encoder."""
    before = load_run(tiny_run)
    text = before.predictor.text_encoder
    model = replace(WITH, text=replace(WITH.text, name=str(text.folder)))
    config = replace(before.config, model=model)
    module, _ = published_model(model, folder)
    weights = put_weights(nnx.state(module), make_constants(text, SENTENCES))
    folder = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"config": to_json(config)}))
    return Run(folder, config, 4, Predictor(model, nnx.graphdef(module), weights, text))


@pytest.mark.slow
def test_an_export_has_it_and_a_compact_one_finds_it_by_name(run, tmp_path, monkeypatch):
    monkeypatch.setattr(stablehlo, "PLATFORMS", ("cpu",))  # lowering takes most of the time
    scene = open_split(DataConfig(), "val", count=1, size=64)[0]
    export(run, tmp_path / "whole")
    assert "differences" in verify(run, tmp_path / "whole", [scene])

    text_folder = run.predictor.text_encoder.folder
    monkeypatch.setattr("r2sm_jax.language.states.find_model", lambda *_: text_folder)
    export(run, tmp_path / "compact", compact=True)
    stored = load_file(tmp_path / "compact" / "model.safetensors")
    own = {name: x for name, x in stored.items() if name.startswith("classifier.")}
    assert own.keys() == {"classifier.class_vectors", "classifier.sentence_mean"}
    assert own["classifier.class_vectors"].dtype == np.int8
    weights = flat_weights(run.predictor.weights)
    for name in ("whole", "compact"):
        loaded = flat_weights(load_run(tmp_path / name).predictor.weights)
        for key in filter(re.compile("classifier").match, weights):
            np.testing.assert_allclose(loaded[key], weights[key], rtol=1e-3, err_msg=key)


@pytest.mark.slow
@pytest.mark.usefixtures("steps_alone")
def test_a_run_computes_the_vectors_at_its_start(published_flags, folder, tmp_path, command):
    encoder = ["--model.vision.encoder", "efficientnet", "--model.vision.efficientnet", folder]
    run_folder = tmp_path / "run"
    flags = [*published_flags, *encoder, "--model.classifier"]
    end = command(main, *flags, "--run", run_folder)
    assert end.code == 0, end
    weights = load_file(run_folder / "model.safetensors")
    assert np.abs(weights["classifier.class_vectors"]).max() == 127
    published = tiny_tensors()["_fc.weight"].T
    np.testing.assert_array_equal(weights["classifier.out.kernel"], published)
