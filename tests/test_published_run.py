"""Runs that start from published image encoders: train, stop, resume and predict without the files."""

import shutil

import numpy as np
import pytest
from run_files import arrays, with_flags

from r2sm_jax.inference.load import load_run
from r2sm_jax.train import main
from r2sm_jax.training.run_folder import read_config

pytest.importorskip("torch")
import published_models as published

SAM = "--model.vision.encoder sam --model.vision.sam"
VIT = "--model.vision.encoder vit --model.vision.vit"


@pytest.mark.slow
def test_a_run_stands_on_its_own(published_flags, published_folders, tmp_path, command):
    """Frozen SAM, SAM's decoder trained. The published files are gone after the start."""
    run, source = tmp_path / "run", tmp_path / "sam"
    shutil.copytree(published_folders["sam"], source)
    theirs = published.load(source)
    flags = [*SAM.split(), source, "--model.vision.sam-frozen", "--model.decoder.type", "sam"]
    flags = with_flags(published_flags, "--run", run, *flags, "--train.steps", 2)
    end = command(main, *flags)
    assert end.code == 0, end
    # 18 weights of SAM's masks are those of several slots.
    assert "frozen: vision" in end.out and "171 loaded, 8 initialised" in end.out
    model = read_config(run).model
    assert model.vision.dim == 32 and model.vision.global_blocks == (1,) and model.decoder.dim == 16

    one, two = arrays(run, 1), arrays(run, 2)
    moved = {name for name in one if not np.array_equal(one[name], two[name])}
    frozen = {name for name in one if name.startswith("[1]")}
    assert not moved & frozen
    assert any("occluded" in name for name in moved)
    assert any("frequencies" in name for name in frozen)
    (kernel,) = (one[name] for name in frozen if "qkv" in name and "kernel" in name and "0" in name)
    np.testing.assert_array_equal(kernel, theirs["vision_encoder.layers.0.attn.qkv.weight"].T)
    optimized = {name for name in one if "opt_state" in name}
    assert not any("qkv" in name and "vision" in name for name in optimized)

    shutil.rmtree(source)
    shutil.rmtree(run / "checkpoints" / "2")
    assert command(main, "--resume", "--run", run).code == 0
    again = arrays(run, 2)
    assert all(two[name].tobytes() == again[name].tobytes() for name in two)
    (prediction,) = load_run(run).predictor.predict(
        ["the red mug"], image=np.zeros((40, 70, 3), np.uint8)
    )
    assert prediction.mask.shape == (40, 70)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (f"{SAM} {{dinov2}}", "needs SAM, not model_type 'dinov2'"),
        (f"{VIT} {{sam}}", "cannot load it: model_type 'sam'"),
        (f"{SAM} {{sam}} --model.vision.dim 63", "dim 63: the published weights have 32"),
        (f"{SAM} {{sam}} --model.vision.image-size 60", "--model.vision.image-size"),
        (f"{SAM} no/such/folder/here", "--model.vision.sam"),
        ("--model.vision.sam-frozen", "--model.vision.sam-frozen"),
        ("--model.vision.encoder vit", "--model.vision.vit"),
        ("--model.vision.vit {dinov2}", "--model.vision.encoder vit"),
        ("--model.decoder.type sam --model.decoder.dim 24", "--model.vision.out-dim"),
    ],
)
def test_refusals_leave_no_run(flags, word, published_folders, tmp_path, refused, bert_folder):
    words = flags.format(**published_folders).split()
    words += ["--model.text.name", bert_folder, "--model.vision.patch-size", "16"]
    assert word in refused(main, "--run", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()
