"""What only a GPU can show; skipped where JAX has none. scripts/gpu_check.sh runs these tests,
too."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from r2sm_jax import train
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
