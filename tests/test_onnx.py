"""Models as ONNX files: the same answers in onnxruntime, and what is refused.

Needs the optional packages of docs/onnx.md.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from r2sm_jax.config import CompleterConfig
from r2sm_jax.data.tokenizer import pad_ids
from r2sm_jax.errors import InputError
from r2sm_jax.export import main
from r2sm_jax.inference import onnx_convert, onnx_export
from r2sm_jax.inference.crop_models import MaskCompleter, save_completer
from r2sm_jax.inference.decider import load_decider
from r2sm_jax.inference.onnx_export import SETTINGS, SMALL, completer_part, export_onnx, verify_part
from r2sm_jax.inference.run import load, load_run
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.synthetic.queries.sentences import intent_sentences

SENTENCES = [
    "the mug",
    "the whole red mug as if the book were not there",
    "what holds coffee?",
]


@pytest.fixture(scope="module")
def completer() -> MaskCompleter:
    config = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
    _, weights = nnx.split(make_completer(config, rngs=nnx.Rngs(0)))
    return MaskCompleter(config, weights, threshold=-2.0)


@pytest.fixture(scope="module")
def run(tiny_run):
    return load_run(tiny_run)


@pytest.fixture(scope="module")
def packages() -> None:
    for name in onnx_convert.PACKAGES:
        pytest.importorskip(name, reason=f"needs {onnx_convert.INSTALL}")


@pytest.fixture(scope="module")
def exported(packages, run, completer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "tiny"
    export_onnx(run, folder, completer)
    return folder


def call(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnx_convert.open_session(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def test_decide_gives_the_probabilities_of_the_package(exported, tiny_run, run):
    token_ids = run.predictor.text_encoder.tokenizer(SENTENCES)
    expected = load_decider(tiny_run).logits(SENTENCES)
    for rows in ([0], [0, 1, 2]):
        ids, mask = pad_ids(
            [token_ids[row] for row in rows], len(rows), max(len(token_ids[row]) for row in rows)
        )
        answer = call(exported / "decide.onnx", {"ids": ids, "mask": mask})
        # The package rounds token states to float16, these files do not.
        np.testing.assert_allclose(answer["logit"], expected[rows], atol=3e-3)
        probability = 1 / (1 + np.exp(-answer["logit"]))
        np.testing.assert_allclose(answer["probability"], probability, atol=1e-6)


def test_complete_gives_the_logits_of_the_package(exported, completer):
    rng = np.random.default_rng(1)
    for count in (1, 5):
        crops = rng.integers(0, 256, (count, 32, 32, 6), np.uint8)
        known = np.arange(count, dtype=np.float32) % 2
        answer = call(exported / "complete.onnx", {"crops": crops, "others_known": known})
        expected = np.asarray(completer.logits(crops, known))
        np.testing.assert_allclose(answer["logits"], expected, atol=1e-4)


def test_encoder_and_decoder_give_the_masks_of_the_predictor(exported, run):
    image = np.random.default_rng(2).integers(0, 256, (32, 32, 3), np.uint8)
    texts = run.predictor.text_encoder
    ids, mask = texts.tokens(SENTENCES)
    decided = call(exported / "decide.onnx", {"ids": np.asarray(ids), "mask": np.asarray(mask)})
    features = call(
        exported / "image_encoder.onnx",
        {"image": image[None], "valid": np.ones((1, 32, 32), bool)},
    )
    inputs = {"states": decided["states"][None], "mask": np.asarray(mask)[None]}
    answers = call(exported / "query_decoder.onnx", features | inputs)
    ((*expected,),) = run.predictor.predict_logits([image], [SENTENCES])
    for row, output in enumerate(expected):
        assert answers["amodal_logit"][0, row] == pytest.approx(
            float(output.amodal_logit), abs=3e-3
        )
        for name in ("modal", "amodal"):
            np.testing.assert_allclose(
                answers[name][0, row, 0], getattr(output, name)[0], atol=1e-2
            )


def test_a_completer_with_features_of_a_backbone_is_converted(packages, tmp_path):
    config = CompleterConfig(size=32, dims=(8, 16, 16), depth=1, heads=2)
    config = replace(config, efficientnet="efficientnet-lite2", block_dims=(4, 6, 8, 6, 8))
    weights = nnx.state(make_completer(config, rngs=nnx.Rngs(0)))
    completer = MaskCompleter(config, weights)
    part = completer_part(completer)
    onnx_convert.convert(part, tmp_path / part.file)
    assert verify_part(part, tmp_path / part.file) <= 1e-4
    crops, known = part.samples[1].values()
    (logits,) = call(tmp_path / part.file, dict(part.samples[1])).values()
    np.testing.assert_allclose(logits, completer.logits(crops, known), atol=1e-3)


def test_settings_and_page_lie_beside_the_files(exported, completer):
    settings = json.loads((exported / SETTINGS).read_text())
    assert settings["complete_threshold"] == completer.threshold
    assert (exported / settings["decide"]).is_file()
    for name in ("index.html", "page.mjs", "tokenizer.json", "README.md"):
        assert (exported / name).stat().st_size > 100
    assert "decide.onnx" in (exported / "README.md").read_text()


def test_a_part_that_differs_from_jax_is_not_written(packages, run, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "MAX_DIFFERENCE", -1.0)
    with pytest.raises(InputError, match=r"decide\.onnx differs from JAX"):
        export_onnx(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_noticed(packages, exported, completer):
    other = completer.updated(weights=nnx.state(make_completer(completer.config, rngs=nnx.Rngs(1))))
    assert verify_part(completer_part(completer), exported / "complete.onnx") <= 1e-4
    with pytest.raises(InputError, match="differs from JAX"):
        verify_part(completer_part(other), exported / "complete.onnx")


def test_smaller_weights_that_change_a_decision_are_not_written(
    packages, exported, run, tmp_path, monkeypatch
):
    (tmp_path / "decide.onnx").write_bytes((exported / "decide.onnx").read_bytes())
    signs = {"decide.onnx": 1.0}

    def decide_sentences(run, path, sentences):
        logits = np.ones(len(sentences))
        logits[0] = signs.get(path.name, -1.0)
        return logits

    monkeypatch.setattr(onnx_export, "decide_sentences", decide_sentences)
    chosen, notes = onnx_export.write_small(run, tmp_path)
    assert chosen is None and not (tmp_path / SMALL).exists()
    assert notes.count(": 1 of ") == 2


def test_weights_are_stored_in_float16_only_where_that_is_exact(packages, tmp_path):
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    exact = np.arange(2048, dtype=np.float32)
    inexact = exact + np.float32(1e-4)
    weights = [
        numpy_helper.from_array(exact, "exact"),
        numpy_helper.from_array(inexact, "inexact"),
    ]
    nodes = [helper.make_node("Sub", ["inexact", "exact"], ["out"])]
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, [2048])]
    graph = helper.make_graph(nodes, "test", [], outputs, weights)
    onnx.save(helper.make_model(graph), tmp_path / "a.onnx")
    onnx_convert.store_in_float16(tmp_path / "a.onnx", tmp_path / "b.onnx", exact=True)
    np.testing.assert_array_equal(call(tmp_path / "b.onnx", {})["out"], inexact - exact)
    assert 9_000 < (tmp_path / "b.onnx").stat().st_size < 14_000


# The command.


def test_the_command_writes_and_overwrites(
    packages, command, refused, tiny_run, completer, tmp_path, monkeypatch
):
    save_completer(tmp_path / "completer", completer.updated(threshold=0.5))
    out = tmp_path / "out"
    flags = [tiny_run, "--onnx", "--out", out, "--completer", tmp_path / "completer"]
    end = command(main, *flags)
    assert end.code == 0 and "complete.onnx" in end.out
    assert json.loads((out / SETTINGS).read_text())["complete_threshold"] == 0.5

    (out / "ort").mkdir()
    assert "--overwrite" in refused(main, *flags)
    # Without a completer nothing of the old one is left; what is not ours stays.
    assert command(main, *flags[:4], "--overwrite").code == 0
    assert not (out / "complete.onnx").exists() and not (out / "index.html").exists()
    assert (out / "ort").is_dir()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compact"], "--compact"),
        (["--verify"], "--verify"),
        (["--lm", "reference"], "--lm"),
        (["--push", "me/model"], "--push"),
        (["--out", "taken"], "taken"),
    ],
)
def test_refusals_of_the_command(flags, words, refused, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    out = [] if "--out" in flags else ["--out", "new"]
    assert words in refused(main, tiny_run, "--onnx", *flags, *out)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["config.json"]


def test_missing_packages_are_named(refused, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_convert, "PACKAGES", ("no_such_package",))
    message = refused(main, tiny_run, "--onnx", "--out", tmp_path / "new")
    assert "no_such_package" in message and "r2sm_jax[onnx]" in message


def test_heads_that_read_no_words_alone_are_refused(run):
    from dataclasses import replace

    model = replace(run.config.model, head="keyword")
    with pytest.raises(InputError, match="mask-type head keyword"):
        onnx_export.onnx_parts(replace(run, config=replace(run.config, model=model)), None)


@pytest.mark.slow
def test_the_released_model_decides_alike_in_onnx(packages, tmp_path):
    try:
        run = load("photos-small")
    except InputError as error:
        pytest.skip(f"its published parts cannot be had here: {error}")
    export_onnx(run, tmp_path / "out")
    sentences = [sentence.text for sentence in intent_sentences("val_r2sm")]
    expected = load_decider("photos-small").logits(sentences)
    for name in ("decide.onnx", json.loads((tmp_path / "out" / SETTINGS).read_text())["decide"]):
        logits = onnx_export.decide_sentences(run, tmp_path / "out" / name, sentences)
        assert ((logits > 0) == (expected > 0)).all()
