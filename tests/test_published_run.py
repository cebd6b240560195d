"""Runs that start from published image encoders: train, stop, resume, evaluate and predict, without
the files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from PIL import Image

from r2sm_jax import evaluate, predict
from r2sm_jax.cli import parse_config
from r2sm_jax.config import VisionConfig
from r2sm_jax.inference.run import load
from r2sm_jax.train import main, train
from r2sm_jax.training.checkpoints import Checkpoints, flatten
from r2sm_jax.training.run_folder import read_config, read_sizes
from r2sm_jax.training.step import abstract_state

torch = pytest.importorskip("torch")
import published_models as published  # noqa: E402

pytestmark = pytest.mark.slow

SAM = "--model.vision.encoder sam --model.vision.sam"


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    _, state, constants = abstract_state(read_config(run), read_sizes(run))
    return {
        name: np.asarray(leaf)
        for name, leaf in flatten(Checkpoints(run).restore(state, constants, step=step)).items()
    }


def test_sam_and_dinov2_and_sams_decoder(published_flags, published_folders, tmp_path, command):
    """Everything at once: frozen SAM, frozen DINOv2 beside it, SAM's decoder trained."""
    run = tmp_path / "run"
    sources = {name: tmp_path / name for name in published_folders}
    for name, folder in sources.items():
        shutil.copytree(published_folders[name], folder)
    flags = "--train.steps 2 --model.vision.encoder sam --model.decoder.type sam".split()
    flags += ["--model.vision.sam", sources["sam"], "--model.vision.sam-frozen"]
    flags += ["--model.vision.vit", sources["dinov2"]]
    end = command(main, *published_flags, "--run", run, *flags)
    assert end.code == 0, end
    assert "frozen: vision" in end.out and "18 copied" in end.out
    report = (run / "published_weights.txt").read_text()
    assert report.count("copied       decoder.occluded.") == 18
    assert "vision.blocks.0.attention.qkv.kernel <- vision_encoder.layers.0.attn.qkv" in report
    sizes = json.loads((run / "inputs.json").read_text())["image_encoder"]
    assert sizes["sam"]["dim"] == 32 and sizes["sam"]["global_blocks"] == [1]
    assert sizes["sam_decoder"]["dim"] == 16 and sizes["vit"]["family"] == "dinov2"
    assert read_config(run).model.vision.dim == VisionConfig().dim

    one, two = arrays(run, 1), arrays(run, 2)
    moved = {name for name in one if not np.array_equal(one[name], two[name])}
    frozen = {name for name in one if name.startswith(".constants")}
    assert not moved & frozen and any("attention" in name and "qkv" in name for name in frozen)
    optimized = {name for name in one if "opt_state" in name}
    assert not any("vision" in name and "qkv" in name and "kernel" in name for name in optimized)
    assert not any("patches" in name for name in optimized)
    assert any("frequencies" in name for name in frozen)
    assert any("occluded" in name for name in moved) and any("join" in name for name in moved)

    for folder in sources.values():  # the run stands on its own from here
        shutil.rmtree(folder)
    shutil.rmtree(run / "checkpoints" / "2")
    assert command(main, "--resume", "--run", run).code == 0
    again = arrays(run, 2)
    assert all(two[name].tobytes() == again[name].tobytes() for name in two)
    assert command(evaluate.main, run, "--samples", 2, "--out", tmp_path / "scores").code == 0
    image = tmp_path / "image.png"
    Image.fromarray(np.zeros((40, 70, 3), np.uint8)).save(image)
    end = command(predict.main, run, image, "the red mug", "--json")
    assert end.code == 0 and json.loads(end.out)["size"] == [40, 70]


@pytest.mark.usefixtures("steps_alone")
def test_the_weights_of_sam_are_where_training_starts(published_flags, published_folders, tmp_path):
    """Trained whole, with our decoder: after one step with a rate of zero they are still the
    published ones."""
    flags = [*SAM.split(), str(published_folders["sam"]), "--optimizer.learning-rate", "0"]
    config = parse_config([*published_flags, *flags])
    run = train(replace(config, run=str(tmp_path / "run"), train=replace(config.train, steps=1)))
    weights = load(run).predictor.weights
    theirs = dict(published.load(published_folders["sam"]))
    ours = {
        ".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(weights)
    }
    np.testing.assert_array_equal(
        ours["vision.blocks.0.attention.qkv.kernel"],
        theirs["vision_encoder.layers.0.attn.qkv.weight"].T,
    )
    assert ours["vision.positions"].shape == (4, 4, 32)
    params = nnx.to_flat_state(abstract_state(read_config(run), read_sizes(run))[1].params)
    assert "vision.blocks.0.mlp.layers.0.kernel" in {".".join(map(str, path)) for path, _ in params}


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (f"{SAM} {{dinov2}}", "needs SAM, not model_type 'dinov2'"),
        ("--model.vision.vit {sam}", "cannot load it: model_type 'sam'"),
        (f"{SAM} {{sam}} --model.vision.dim 63", "dim 63: the published weights have 32"),
        (f"{SAM} {{sam}} --model.vision.image-size 60", "--model.vision.image-size 60"),
        (f"{SAM} no/such/folder/here", "--model.vision.sam"),
        ("--model.vision.sam-frozen", "--model.vision.sam-frozen"),
        ("--model.vision.encoder vit", "--model.vision.vit"),
        ("--model.decoder.type sam --model.decoder.dim 24", "--model.vision.out-dim"),
    ],
)
def test_refusals_leave_no_run(flags, word, published_folders, tmp_path, refused, bert_folder):
    words = flags.format(**published_folders).split()
    words += ["--model.text.name", bert_folder, "--model.vision.patch-size", "16"]
    assert word in refused(main, "--run", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


BLOCK = "vision_encoder.layers"


@pytest.mark.parametrize(
    ("missing", "added", "messages"),
    [
        (
            [f"{BLOCK}.0.attn.qkv.weight", "vision_encoder.neck.conv1.weight"],
            {},
            ["missing vision.blocks.0.attention.qkv.kernel", "missing vision.neck1.kernel"],
        ),
        (
            [],
            {f"{BLOCK}.7.mlp.lin1.bias": 3, "ema": 1},
            [f"no place for key {BLOCK}.7.mlp.lin1.bias", "unknown key ema"],
        ),
        ([], {f"{BLOCK}.0.mlp.lin1.bias": 5}, [".0.mlp.lin1.bias has shape (5,), not (48,)"]),
    ],
)
def test_weights_that_do_not_fit_name_every_key(
    missing, added, messages, published_flags, published_folders, tmp_path, refused
):
    folder = tmp_path / "sam"
    shutil.copytree(published_folders["sam"], folder)
    tensors = published.load(folder)
    for key in missing:
        del tensors[key]
    for key, size in added.items():
        tensors[key] = np.zeros(size, np.float32)
    published.save(tensors, folder)
    flags = [*published_flags, "--run", tmp_path / "run", *SAM.split(), folder]
    sentence = refused(main, *flags)
    assert all(message in sentence for message in messages)
    assert "model.safetensors" in sentence.replace(str(folder), "")
