"""Verifies an export: the run, the export, and its StableHLO without this package must agree."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from scipy.special import expit

from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.tokenizer import pad_ids
from r2sm_jax.errors import InputError
from r2sm_jax.inference.load import Run, load
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.models.hub import weight_files
from r2sm_jax.synthetic.sources import open_source

NUM_IMAGES = 3
NUM_QUERIES = 4
MAX_DIFFERENCE = 1e-4
"""Of mask logits and probabilities from the same token states: what float32 rounding explains."""
MAX_STATE_DIFFERENCE = 2**-10
"""Relative, of token states: one step of float16, to which they are rounded."""
MIN_STATE = 2**-4
"""Smaller token states are compared as if they were as large as this: float16 is coarse there."""


def verify(run: Run, folder: Path) -> str:
    """Returns the largest differences between a run and its export, in a few lines.

    Three programs predict: the run, the export as `load` opens it, and the export's
    StableHLO in a new process that does not import this package.

    Raises InputError if the differences are larger than rounding explains, or the StableHLO does
    not run.
    """
    exported = load(folder).predictor
    images, queries = _samples(exported.config.vision.image_size)
    expected = _predict(run.predictor, images, queries)
    from_safetensors = _predict(exported, images, queries)

    inputs = _stablehlo_inputs(exported, images, queries)
    language_model = weight_files(exported.text_encoder.folder)
    outputs = _run_stablehlo(folder, language_model, inputs)
    from_same_states = _answers(outputs, "given", expected)
    from_own_states = _answers(outputs, "own", expected)

    title = "StableHLO without r2sm_jax"
    lines = [
        f"verified on {NUM_IMAGES} images x {NUM_QUERIES} queries; largest differences from the "
        "run:",
        _compare(folder, "safetensors", expected, from_safetensors),
        _compare(folder, f"{title}, the run's token states", expected, from_same_states),
        # Its own states may round to the next float16, so any difference is allowed.
        _compare(folder, f"{title}, its own token states", expected, from_own_states, limit=np.inf),
        _compare_states(folder, inputs["states"], outputs["states"], inputs["mask"]),
    ]
    return "\n".join(lines)


def _samples(image_size: int) -> tuple[list[np.ndarray], list[list[str]]]:
    """Scenes of several shapes, each with the same number of queries."""
    source = open_source("scenes", "val", count=NUM_IMAGES, size=image_size)
    images = []
    queries = []
    for i in range(NUM_IMAGES):
        sample = source[i]
        images.append(sample.image[: image_size - 7 * i])
        queries.append([query.text for query in sample.queries[:NUM_QUERIES]])
    return images, queries


def _predict(
    predictor: Predictor, images: list[np.ndarray], queries: list[list[str]]
) -> dict[str, np.ndarray]:
    """Mask logits and type logits of all queries."""
    outputs = []
    for of_image in predictor.predict_logits(images, queries):
        outputs += of_image
    return {
        "modal": np.stack([output.modal for output in outputs]),
        "amodal": np.stack([output.amodal for output in outputs]),
        "amodal_logit": np.stack([output.amodal_logit for output in outputs]),
    }


def _stablehlo_inputs(
    predictor: Predictor, images: list[np.ndarray], queries: list[list[str]]
) -> dict[str, np.ndarray]:
    """The INPUTS of run_stablehlo.py: frames, tokens, and token states."""
    frames = []
    valid = []
    for image in images:
        letterbox = Letterbox(image.shape[0], image.shape[1], predictor.config.vision.image_size)
        frames.append(letterbox.image(image))
        valid.append(letterbox.valid())

    sentences = []
    for of_image in queries:
        sentences += of_image
    token_ids = predictor.text_encoder.tokenizer(sentences)
    ids, mask = pad_ids(token_ids, len(token_ids), max(map(len, token_ids)))
    states, _ = predictor.text_encoder(sentences)
    return {
        "image": np.stack(frames),
        "valid": np.stack(valid),
        "ids": ids,
        "mask": mask,
        # The encoder pads to its token limit, the tokens end with the longest sentence.
        "states": np.ascontiguousarray(states[:, : ids.shape[1]]),
    }


def _run_stablehlo(
    folder: Path, language_model: Sequence[Path], inputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Runs the export in a new process (run_stablehlo.py), which does not import this package."""
    program = Path(__file__).with_name("run_stablehlo.py")
    with tempfile.TemporaryDirectory() as work:
        inputs_path = Path(work) / "inputs.safetensors"
        outputs_path = Path(work) / "outputs.safetensors"
        save_file(inputs, inputs_path)
        command = [sys.executable, "-I", program, folder, inputs_path, outputs_path]
        ended = subprocess.run([*command, *language_model], capture_output=True, text=True)
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or ["the verification ended early"]
            raise InputError(
                f"{folder}: the StableHLO does not run ({lines[-1]}); export the run again"
            )
        return load_file(outputs_path)


def _answers(
    outputs: Mapping[str, np.ndarray], prefix: str, expected: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The answers of run_stablehlo.py `[b k ...]`, with one axis for all queries."""
    answers = {}
    for name, value in expected.items():
        answers[name] = outputs[f"{prefix}.{name}"].reshape(value.shape)
    return answers


def _compare(
    folder: Path,
    title: str,
    expected: Mapping[str, np.ndarray],
    answers: Mapping[str, np.ndarray],
    limit: float = MAX_DIFFERENCE,
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
    if not (in_logits <= limit and in_probability <= limit):
        raise InputError(
            f"{folder}: {title}, differs from the run: {measured}; {limit:g} is allowed"
        )
    return f"  {title}: {measured}"


def _compare_states(
    folder: Path, expected: np.ndarray, states: np.ndarray, mask: np.ndarray
) -> str:
    """The same for the token states of the StableHLO, relative to their size."""
    expected = expected.astype(np.float32)
    differences = np.abs(states - expected) / np.maximum(np.abs(expected), MIN_STATE)
    largest = differences[mask].max()
    if not largest <= MAX_STATE_DIFFERENCE:
        raise InputError(
            f"{folder}: the token states of StableHLO differ by {largest:.2g}, more than float16 "
            "rounds"
        )
    return (
        f"  token states: {largest:.2g} of their size; one step of float16 is "
        f"{MAX_STATE_DIFFERENCE:.2g}"
    )
