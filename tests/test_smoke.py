"""The whole path in half a minute: train a tiny run, then evaluate it, ask it, and export it by the
commands."""

import json

import numpy as np
import pytest
from PIL import Image

import r2sm_jax
from r2sm_jax import evaluate, export, predict


@pytest.mark.slow
def test_a_tiny_run_is_evaluated_asked_and_exported(tiny_run, tmp_path, command):
    scored = command(evaluate.main, tiny_run, "--samples", 1, "--out", tmp_path / "scores")
    assert scored.code == 0, scored
    report = json.loads((tmp_path / "scores" / "report.json").read_text())
    assert 0 <= report["splits"]["val"]["all"]["giou"] <= 1

    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    answer = command(
        predict.main, tiny_run, tmp_path / "image.png", "the complete red mug", "--json"
    )
    assert answer.code == 0, answer
    record = json.loads(answer.out)
    assert record["mask_type"] in ("modal", "amodal") and record["size"] == [40, 60]

    exported = command(export.main, tiny_run, "--out", tmp_path / "export", "--lm", "reference")
    refused = "on this machine alone" in exported.err  # the tiny language model is one
    assert exported.code == (2 if refused else 0), exported
    exported = command(export.main, tiny_run, "--out", tmp_path / "export")
    assert exported.code == 0, exported

    by_export = r2sm_jax.load(tmp_path / "export")
    by_export.set_image(pixels)
    (prediction,) = by_export.predict(["the complete red mug"])
    assert prediction.mask_type == record["mask_type"]
    np.testing.assert_allclose(
        prediction.amodal_probability, record["amodal_probability"], atol=1e-5
    )
    assert not (prediction.modal & ~prediction.amodal).any()
