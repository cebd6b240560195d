"""Compares an export with its run on the same images and queries.

Three programs answer: the run from its checkpoint, the export loaded by `r2sm_jax.load`, and the export's StableHLO in
a new process that does not import this package (alone.py).
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from r2sm_jax.data.images import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.exported import FUNCTIONS
from r2sm_jax.models.weights import weight_files
from r2sm_jax.predictor import Predictor
from r2sm_jax.runs import Run, open_run
from r2sm_jax.sources import open_source
from r2sm_jax.tools import alone

IMAGES, QUERIES = 3, 4
TOLERANCE = 1e-4
"""Largest difference of mask logits and probabilities that float32 rounding explains, from the same token states."""
STATES_TOLERANCE = 2**-10
"""Largest relative difference of token states: one step of float16, to which they are rounded."""
LOGITS = ("modal", "amodal", "slot_modal", "slot_amodal")


def verify(run: Run, folder: Path) -> str:
    """The largest differences between an export and its run, in a few lines.

    Raises:
        InputError: they are larger than rounding explains, or the StableHLO does not run.
    """
    loaded = open_run(folder).predictor
    frames, valid, sentences = _inputs(run.predictor)
    expected = run.predictor.answer(frames, valid, sentences)._asdict()
    reloaded = loaded.answer(frames, valid, sentences)._asdict()
    all_sentences = [sentence for of_image in sentences for sentence in of_image]
    ids, mask = loaded.texts.tokens(all_sentences)
    states = np.ascontiguousarray(loaded.texts(all_sentences)[0][:, : ids.shape[1]])
    given = {"image": frames, "valid": valid, "ids": ids, "mask": mask, "states": states}
    outputs = _run_alone(folder, given, weight_files(loaded.texts.folder))
    lines = [f"verified on {IMAGES} images x {QUERIES} queries; largest differences from the run:"]
    for name, found, tolerance in (
        ("safetensors", reloaded, TOLERANCE),
        ("StableHLO in a process without r2sm_jax, the run's token states", _answers(outputs, "given."), TOLERANCE),
        ("StableHLO in a process without r2sm_jax, its own token states", _answers(outputs, "own."), None),
    ):
        apart = {field: np.abs(expected[field] - found[field]).max() for field in (*LOGITS, "probability")}
        pixels = sum(((expected[field] > 0) != (found[field] > 0)).sum() for field in LOGITS[:2])
        logits, probability = max(apart[field] for field in LOGITS), apart["probability"]
        measured = f"{logits:.2g} in mask logits, {probability:.2g} in the probability of amodal, {pixels} mask pixels"
        if tolerance and not max(logits, probability) <= tolerance:
            raise InputError(f"{folder}: {name}, differs from the run: {measured}; {tolerance:g} is allowed")
        lines.append(f"  {name}: {measured}")
    expected_states = states.astype(np.float32)
    relative = np.abs(outputs["states"].astype(np.float32) - expected_states) / np.maximum(
        np.abs(expected_states), 2**-4
    )
    if not (apart := relative[mask].max()) <= STATES_TOLERANCE:
        raise InputError(f"{folder}: the token states of StableHLO differ by {apart:.2g}, more than float16 rounds")
    lines.append(f"  token states: {apart:.2g} of their size; one step of float16 is {STATES_TOLERANCE:.2g}")
    return "\n".join(lines)


def _inputs(predictor: Predictor) -> tuple[np.ndarray, np.ndarray, list[list[str]]]:
    """Frames [b S S 3] of the first scenes of `val`, cropped to several shapes, their valid pixels, and k sentences
    about each."""
    size = predictor.config.vision.image_size
    source = open_source("scenes", "val", count=IMAGES, size=size)
    samples = [source[i] for i in range(IMAGES)]
    images = [sample.image[: size - 7 * i] for i, sample in enumerate(samples)]
    boxes = [Letterbox(image.shape[0], image.shape[1], size) for image in images]
    frames = [box.image(image) for box, image in zip(boxes, images, strict=True)]
    sentences = [[query.text for query in sample.queries[:QUERIES]] for sample in samples]
    return np.stack(frames), np.stack([box.valid() for box in boxes]), sentences


def _run_alone(folder: Path, given: dict[str, np.ndarray], language_model: Sequence[Path]) -> dict[str, np.ndarray]:
    """The outputs of alone.py in a new process. Raises InputError where it fails."""
    with tempfile.TemporaryDirectory() as work:
        inputs, outputs = f"{work}/inputs.safetensors", f"{work}/outputs.safetensors"
        save_file(given, inputs)
        command = [sys.executable, "-I", alone.__file__, folder, inputs, outputs, *language_model]
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise InputError(f"{folder / FUNCTIONS}: it does not run without r2sm_jax ({last})")
        return load_file(outputs)


def _answers(outputs: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The outputs with a prefix, and the probability of amodal."""
    found = {name.removeprefix(prefix): value for name, value in outputs.items() if name.startswith(prefix)}
    return found | {"probability": 1 / (1 + np.exp(-found["type_logit"].astype(np.float64)))}
