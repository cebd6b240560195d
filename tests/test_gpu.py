"""What only a GPU can show, skipped where JAX has none; and scripts/gpu.py, which runs these tests
too, without one."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import gpu
import jax
import numpy as np
import pytest
from flax import nnx

from r2sm_jax import train
from r2sm_jax.cli import parse_config
from r2sm_jax.config import TextConfig
from r2sm_jax.models.r2sm import R2SM

cuda_only = pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX has no GPU here")


@cuda_only
def test_a_model_answers_on_the_gpu_as_on_the_cpu(tiny_config):
    config = tiny_config.model
    graphdef, weights = nnx.split(R2SM(config, rngs=nnx.Rngs(0)))
    text: TextConfig = config.text
    size, rng = config.vision.image_size, np.random.default_rng(0)
    inputs = (
        rng.integers(0, 255, (2, size, size, 3), np.uint8),
        np.ones((2, size, size), bool),
        rng.normal(size=(2, 3, 6, len(text.layers), text.dim)).astype(np.float16),
        np.ones((2, 3, 6), bool),
    )
    answers = []
    for device in (jax.devices("cpu")[0], jax.devices("gpu")[0]):
        with jax.default_device(device), jax.default_matmul_precision("float32"):
            placed = jax.device_put((weights, inputs), device)
            answers.append(
                jax.jit(lambda weights, inputs: nnx.merge(graphdef, weights)(*inputs))(*placed)
            )
    for ours, theirs in zip(*map(jax.tree.leaves, answers), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_the_flag_for_equal_bits_reaches_xla(tiny_flags, monkeypatch, command):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    xla_flags = []
    monkeypatch.setattr(train, "train", lambda config: xla_flags.append(os.environ["XLA_FLAGS"]))
    assert command(train.main, *tiny_flags, "--train.deterministic").code == 0
    assert xla_flags == ["--xla_cpu_enable_fast_math=false --xla_gpu_deterministic_ops=true"]


@cuda_only
def test_two_deterministic_runs_have_the_same_losses(tiny_flags, tmp_path):
    losses = []
    for name in ("one", "two"):
        words = [
            sys.executable,
            "-m",
            "r2sm_jax.train",
            *map(str, tiny_flags),
            "--run",
            tmp_path / name,
        ]
        subprocess.run([*words, "--train.deterministic"], check=True)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
    assert losses[0] == losses[1] and losses[0]


# scripts/gpu.py. Its profile has more parts, which measure other configurations in the same way.
DRY_PARTS = gpu.PARTS | {"profile": ("photos_grouped_convolutions", "sam")}


@pytest.mark.slow
@pytest.mark.parametrize("piece", DRY_PARTS)
def test_every_piece_runs_dry(piece, tiny_flags, tmp_path, monkeypatch, command):
    monkeypatch.setattr(gpu, "PARTS", DRY_PARTS)
    words = [piece, "--out", tmp_path, "--dry-run", f"--flags={shlex.join(tiny_flags)}"]
    end = command(gpu.main, *words)
    assert end.code == 0, [log.read_text("utf-8")[-2000:] for log in tmp_path.glob("*.log")]
    for part in DRY_PARTS[piece]:
        result = json.loads((tmp_path / f"{part}.json").read_text("utf-8"))
        assert "seconds" in str(result)
    # There is nothing left to do.
    assert command(gpu.main, *words).out == "dry run: no GPU was used, and no figure counts\n"


def test_the_tests_for_a_gpu_are_there():
    assert all(Path(__file__).with_name(f"{name}.py").exists() for name in gpu.TESTS)


@pytest.mark.parametrize("part", ["completer", "outliner", "segmenter", "default"])
def test_a_real_training_has_flags_that_fit_together(part):
    args = gpu.GpuConfig("release", data="compose:photos.json")
    config = parse_config(gpu.training_flags(args)[part])
    assert config.train.part == (part if part != "default" else "segmenter")


def test_a_training_that_has_no_time_left_goes_on_in_the_next_call(
    tiny_flags, tmp_path, monkeypatch, command
):
    monkeypatch.setattr(gpu, "PARTS", {"checks": ("default",)})
    monkeypatch.setattr(gpu, "WORTH_STARTING", 0)
    flags = shlex.join(tiny_flags)
    words = ["checks", "--out", tmp_path, "--dry-run", f"--flags={flags}"]
    first = command(gpu.main, *words, "--minutes", 0.001)
    assert first.out == "default: left\ncall it again for default\n"
    last = command(gpu.main, *words)
    assert last.code == 0, (tmp_path / "default.log").read_text("utf-8")
    assert json.loads((tmp_path / "default.json").read_text("utf-8"))["printed"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_no_piece_starts(tmp_path, refused):
    assert "--dry-run" in refused(gpu.main, "profile", "--out", tmp_path)
    assert not list(tmp_path.iterdir())
