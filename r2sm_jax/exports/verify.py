"""Holds an export against its run: the same images and queries, three ways.

The run from its checkpoint; the export's safetensors through `r2sm_jax.load`; and its StableHLO in a fresh process that
does not import our code (alone.py).
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from r2sm_jax.data.sources import open_source
from r2sm_jax.data.transforms import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.exports import alone
from r2sm_jax.models.weights import weight_files
from r2sm_jax.predictor import Answers, Predictor
from r2sm_jax.runs import Run, open_run

IMAGES, QUERIES = 3, 4
TOLERANCE = 1e-3
"""Largest difference of mask logits that float32 rounding and float16 token states explain."""
LOGITS = ("modal", "amodal", "slot_modal", "slot_amodal")


class Inputs(NamedTuple):
    """Scenes and their queries as the model takes them."""

    image: np.ndarray
    valid: np.ndarray
    texts: list[list[str]]


def some_inputs(predictor: Predictor) -> Inputs:
    """The first scenes of `val`, cut to several shapes."""
    size = predictor.config.vision.image_size
    source = open_source("scenes", "val", count=IMAGES, size=size)
    samples = [source[i] for i in range(IMAGES)]
    images = [sample.image[: size - 7 * i] for i, sample in enumerate(samples)]
    boxes = [Letterbox(*image.shape[:2], size) for image in images]
    frames = [box.image(image) for box, image in zip(boxes, images, strict=True)]
    texts = [[q.text for q in sample.queries[:QUERIES]] for sample in samples]
    return Inputs(np.stack(frames), np.stack([box.valid() for box in boxes]), texts)


def alone_answers(folder: Path, predictor: Predictor, inputs: Inputs) -> dict[str, np.ndarray]:
    """What the StableHLO says in a process of its own.

    Raises:
        InputError: it does not run there.
    """
    texts = predictor.texts
    sentences = [query for row in inputs.texts for query in row]
    ids, mask = texts.tokens(sentences)
    with tempfile.TemporaryDirectory() as work:
        given = {"image": inputs.image, "valid": inputs.valid, "ids": ids, "mask": mask}
        save_file(given, f"{work}/inputs.safetensors")
        command = [sys.executable, "-I", alone.__file__, str(folder), f"{work}/inputs.safetensors"]
        command += [f"{work}/outputs.safetensors", *map(str, weight_files(texts.folder))]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise InputError(f"{folder / 'model.stablehlo'}: it does not run without r2sm_jax ({last})")
        return load_file(f"{work}/outputs.safetensors")


def verify(run: Run, folder: Path) -> str:
    """Three lines on how far the export is from its run.

    Raises:
        InputError: farther than rounding explains.
    """
    inputs = some_inputs(run.predictor)
    expected = run.predictor.answer(*inputs)
    loaded = open_run(folder).predictor
    again = loaded.answer(*inputs)
    found = alone_answers(folder, loaded, inputs)
    probability = 1 / (1 + np.exp(-found.pop("type_logit").astype(np.float64)))
    presence = 1 / (1 + np.exp(-found.pop("slot_presence").astype(np.float64)))
    without = Answers(
        probability=probability, slot_presence=presence, **{n: v for n, v in found.items() if n in Answers._fields}
    )
    lines = [f"verified on {IMAGES} images x {QUERIES} queries; largest differences from the run:"]
    for name, answers in (("safetensors", again), ("StableHLO, in a process without r2sm_jax", without)):
        masks = max(float(np.abs(getattr(expected, n) - getattr(answers, n)).max()) for n in LOGITS)
        decision = float(np.abs(expected.probability - answers.probability).max())
        pixels = int(sum(((getattr(expected, n) > 0) != (getattr(answers, n) > 0)).sum() for n in LOGITS[:2]))
        said = f"{masks:.2g} in mask logits, {decision:.2g} in the probability of amodal, {pixels} mask pixels differ"
        if not max(masks, decision) <= TOLERANCE:
            raise InputError(f"{folder}: the {name} is not the run: {said}, and {TOLERANCE:g} is allowed; export again")
        lines.append(f"  {name}: {said}")
    return "\n".join(lines)
