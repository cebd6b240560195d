"""Verifies an export: the run, the export, and its StableHLO without this package must agree."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from scipy.special import expit

from r2sm_jax.data.dataset import Sample
from r2sm_jax.errors import InputError
from r2sm_jax.inference.load import Run, load
from r2sm_jax.inference.predictor import Predictor

NUM_QUERIES = 4
MAX_DIFFERENCE = 1e-4
"""Of mask logits and probabilities from the same token states: what float32 rounding explains."""


def verify(run: Run, folder: Path, samples: Sequence[Sample]) -> str:
    """Returns the largest differences between a run and its export, in a few lines.

    Three programs predict: the run, the export as `load` opens it, and the export's
    StableHLO in a new process that does not import this package.

    Args:
        samples: images of the size of the model, with `NUM_QUERIES` queries each and more.

    Raises InputError if the differences are larger than rounding explains, or the StableHLO does
    not run.
    """
    exported = load(folder).predictor
    # Images of several shapes.
    size = exported.config.vision.image_size
    images = [sample.image[: size - 7 * number] for number, sample in enumerate(samples)]
    queries = [[query.text for query in sample.queries[:NUM_QUERIES]] for sample in samples]

    expected = _predict(run.predictor, images, queries)
    from_safetensors = _predict(exported, images, queries)
    from_stablehlo = _run_stablehlo(exported, folder, images, queries)
    lines = [
        f"verified on {len(images)} images x {NUM_QUERIES} queries; largest differences from the "
        "run:",
        _compare(folder, "safetensors", expected, from_safetensors),
        _compare(folder, "StableHLO without r2sm_jax", expected, from_stablehlo),
    ]
    return "\n".join(lines)


def _predict(
    predictor: Predictor, images: list[np.ndarray], queries: list[list[str]]
) -> dict[str, np.ndarray]:
    """Returns mask logits and type logits `[b k ...]`."""
    outputs = predictor.predict_logits(images, queries)
    answers = {}
    for name in ("modal", "amodal", "amodal_logit"):
        answers[name] = np.stack([[getattr(one, name) for one in row] for row in outputs])
    return answers


def _run_stablehlo(
    predictor: Predictor, folder: Path, images: list[np.ndarray], queries: list[list[str]]
) -> dict[str, np.ndarray]:
    """Runs the export in a new process (run_stablehlo.py), with the predictor's token states."""
    frames = [predictor.frame(image) for image in images]
    sentences = [sentence for of_image in queries for sentence in of_image]
    states, mask = predictor.text_encoder(sentences)
    shape = (len(images), NUM_QUERIES)
    inputs = {
        "image": np.stack([frame.pixels for frame in frames]),
        "valid": np.stack([frame.letterbox.valid() for frame in frames]),
        "states": states.reshape(*shape, *states.shape[1:]),
        "mask": mask.reshape(*shape, -1),
    }
    program = Path(__file__).with_name("run_stablehlo.py")
    with tempfile.TemporaryDirectory() as work:
        inputs_path = Path(work) / "inputs.safetensors"
        outputs_path = Path(work) / "outputs.safetensors"
        save_file(inputs, inputs_path)
        command = [sys.executable, "-I", program, folder, inputs_path, outputs_path]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or ["the verification ended early"]
            raise InputError(
                f"{folder}: the StableHLO does not run ({lines[-1]}); export the run again"
            )
        return load_file(outputs_path)


def _compare(
    folder: Path, title: str, expected: Mapping[str, np.ndarray], answers: Mapping[str, np.ndarray]
) -> str:
    """Returns a line on the largest differences. Raises InputError if they exceed the limit."""
    in_logits = 0.0
    num_pixels = 0
    for name in ("modal", "amodal"):
        # np.maximum and not max(), which would lose NaN.
        in_logits = np.maximum(in_logits, np.abs(expected[name] - answers[name]).max())
        num_pixels += ((expected[name] > 0) != (answers[name] > 0)).sum()
    probabilities = expit(expected["amodal_logit"]), expit(answers["amodal_logit"])
    in_probability = np.abs(probabilities[0] - probabilities[1]).max()

    measured = (
        f"{in_logits:.2g} in mask logits, {in_probability:.2g} in the probability of amodal, "
        f"{num_pixels} mask pixels"
    )
    # Not `>`, so that NaN is refused, too.
    if not (in_logits <= MAX_DIFFERENCE and in_probability <= MAX_DIFFERENCE):
        raise InputError(
            f"{folder}: {title}, differs from the run: {measured}; {MAX_DIFFERENCE:g} is allowed"
        )
    return f"  {title}: {measured}"
