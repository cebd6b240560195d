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

from r2sm_jax.data.images import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.models.weights import weight_files
from r2sm_jax.predictor import Outputs, Predictor
from r2sm_jax.runs import Run, open_run
from r2sm_jax.sources import open_source
from r2sm_jax.tools import alone

IMAGES, QUERIES = 3, 4
TOLERANCE = 1e-4
"""Largest difference of mask logits and probabilities that float32 rounding explains, for the same token states."""
STATES = 2**-10
"""Largest relative difference of token states: one step of float16, to which they are rounded."""
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
    boxes = [Letterbox(image.shape[0], image.shape[1], size) for image in images]
    frames = [box.image(image) for box, image in zip(boxes, images, strict=True)]
    texts = [[q.text for q in sample.queries[:QUERIES]] for sample in samples]
    return Inputs(np.stack(frames), np.stack([box.valid() for box in boxes]), texts)


def alone_answers(folder: Path, predictor: Predictor, inputs: Inputs) -> dict[str, np.ndarray]:
    """What the StableHLO says in a process of its own, see alone.py.

    Raises:
        InputError: it does not run there.
    """
    texts = predictor.texts
    sentences = [query for row in inputs.texts for query in row]
    ids, mask = texts.tokens(sentences)
    states = np.ascontiguousarray(texts(sentences)[0][:, : ids.shape[1]])
    given = {"image": inputs.image, "valid": inputs.valid, "ids": ids, "mask": mask, "states": states}
    with tempfile.TemporaryDirectory() as work:
        save_file(given, f"{work}/inputs.safetensors")
        command = [sys.executable, "-I", alone.__file__, str(folder), f"{work}/inputs.safetensors"]
        command += [f"{work}/outputs.safetensors", *map(str, weight_files(texts.folder))]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise InputError(f"{folder / 'model.stablehlo'}: it does not run without r2sm_jax ({last})")
        found = load_file(f"{work}/outputs.safetensors")
    apart = np.abs(found.pop("states").astype(np.float32) - states)
    found["states"] = (apart / np.maximum(np.abs(states.astype(np.float32)), 2**-4))[mask].max()
    return found


def as_answers(found: dict[str, np.ndarray], name: str) -> Outputs:
    """The answers of alone.py in the predictor's terms."""
    fields = {key.removeprefix(f"{name}."): value for key, value in found.items() if key.startswith(f"{name}.")}
    for field, logit in (("probability", "type_logit"), ("slot_presence", "slot_presence")):
        fields[field] = 1 / (1 + np.exp(-fields[logit].astype(np.float64)))
    return Outputs(**{field: fields[field] for field in Outputs._fields})


def verify(run: Run, folder: Path) -> str:
    """Some lines on how far the export is from its run.

    Raises:
        InputError: farther than rounding explains.
    """
    inputs = some_inputs(run.predictor)
    expected = run.predictor.answer(*inputs)
    loaded = open_run(folder).predictor
    again = loaded.answer(*inputs)
    found = alone_answers(folder, loaded, inputs)
    given, own = as_answers(found, "given"), as_answers(found, "own")
    lines = [f"verified on {IMAGES} images x {QUERIES} queries; largest differences from the run:"]
    for name, answers, allowed in (
        ("safetensors", again, TOLERANCE),
        ("StableHLO in a process without r2sm_jax, the run's token states", given, TOLERANCE),
        ("StableHLO in a process without r2sm_jax, its own token states", own, None),
    ):
        masks = max(float(np.abs(getattr(expected, n) - getattr(answers, n)).max()) for n in LOGITS)
        decision = float(np.abs(expected.probability - answers.probability).max())
        pixels = int(sum(((getattr(expected, n) > 0) != (getattr(answers, n) > 0)).sum() for n in LOGITS[:2]))
        said = f"{masks:.2g} in mask logits, {decision:.2g} in the probability of amodal, {pixels} mask pixels differ"
        if allowed and not max(masks, decision) <= allowed:
            raise InputError(f"{folder}: {name}, is not the run: {said}, and {allowed:g} is allowed; export again")
        lines.append(f"  {name}: {said}")
    states = float(found["states"])
    if not states <= STATES:
        raise InputError(f"{folder}: StableHLO's token states differ by {states:.2g}, more than float16; export again")
    lines.append(
        f"  token states: {states:.2g} of their size, one step of float16 being {STATES:.2g}: hence the line above"
    )
    return "\n".join(lines)
