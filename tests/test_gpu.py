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
from run_files import logged, with_flags
from tiny_models import TINY, fake_inputs

from r2sm_jax import train
from r2sm_jax.cli import parse_config
from r2sm_jax.models.r2sm import R2SM

cuda_only = pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX has no GPU here")


@cuda_only
def test_a_model_answers_on_the_gpu_as_on_the_cpu():
    graphdef, weights = nnx.split(R2SM(TINY, rngs=nnx.Rngs(0)))
    run = jax.jit(lambda weights, inputs: nnx.merge(graphdef, weights)(**inputs))
    answers = []
    for platform in ("cpu", "gpu"):
        device = jax.devices(platform)[0]
        with jax.default_device(device), jax.default_matmul_precision("float32"):
            answers.append(run(*jax.device_put((weights, fake_inputs(TINY, 2, 3)), device)))
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
        flags = [*tiny_flags, "--train.deterministic", "--run", str(tmp_path / name)]
        subprocess.run([sys.executable, "-m", "r2sm_jax.train", *flags], check=True)
        losses.append([line["train/loss"] for line in logged(tmp_path / name).values()])
    assert losses[0] == losses[1] and losses[0]


# scripts/gpu.py


@pytest.mark.slow
@pytest.mark.parametrize("piece", gpu.PARTS)
def test_every_piece_runs_dry(piece, tiny_flags, tmp_path, command):
    flags = with_flags(tiny_flags, "--train.steps", 1, "--train.evaluate-every", 1)
    words = [piece, "--out", tmp_path, "--dry-run", f"--flags={shlex.join(flags)}"]
    end = command(gpu.main, *words)
    assert end.code == 0, [log.read_text("utf-8")[-2000:] for log in tmp_path.glob("*.log")]
    for part in gpu.PARTS[piece]:
        result = json.loads((tmp_path / f"{part}.json").read_text("utf-8"))
        assert "seconds" in str(result)
    # There is nothing left to do.
    assert command(gpu.main, *words).out == "dry run: no GPU was used, and no figure counts\n"


def test_the_tests_for_a_gpu_are_there():
    assert all(Path(__file__).with_name(f"{name}.py").exists() for name in gpu.TESTS)


@pytest.mark.parametrize("part", ["completer", "outliner", "segmenter", "default"])
def test_a_real_training_has_flags_that_fit_together_and_is_resumed(part, tmp_path):
    args = gpu.GpuConfig("release", out=tmp_path, data="compose:photos.json")
    config = parse_config(gpu.training_flags(args)[part])
    assert config.train.part == (part if part != "default" else "segmenter")
    run = tmp_path / part
    run.mkdir()
    assert gpu.part_command(args, part)[3:] == ["--resume", "--run", str(run)]


def test_a_part_that_has_no_time_left_goes_on_in_the_next_call(tmp_path, monkeypatch, command):
    monkeypatch.setattr(gpu, "PARTS", {"checks": ("default",)})
    monkeypatch.setattr(gpu, "WORTH_STARTING", 0)
    program = "import time; time.sleep(0.5); print('trained')"
    monkeypatch.setattr(gpu, "part_command", lambda *_: [sys.executable, "-c", program])
    words = ["checks", "--out", tmp_path, "--dry-run"]
    first = command(gpu.main, *words, "--minutes", 0.001)
    assert first.out == "default: left\ncall it again for default\n"
    assert command(gpu.main, *words).code == 0
    assert json.loads((tmp_path / "default.json").read_text("utf-8"))["printed"] == ["trained"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_no_piece_starts(tmp_path, refused):
    assert "--dry-run" in refused(gpu.main, "profile", "--out", tmp_path)
    assert not list(tmp_path.iterdir())
