"""Compares an export with its run. As a program it answers with the export's StableHLO, for which it needs JAX but not
r2sm_jax, so that this package is imported only inside of functions.

python -I verify.py EXPORT GIVEN.safetensors FOUND.safetensors LANGUAGE_MODEL.safetensors [more shards]

GIVEN holds images, tokens and token states. FOUND gets the token states of the StableHLO (`states`), and its answers
from the given token states (`given.*`) and from its own (`own.*`).
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jax import export
from safetensors.numpy import load_file, save_file
from scipy.special import expit

if TYPE_CHECKING:
    from r2sm_jax.inference.predictor import Predictor
    from r2sm_jax.inference.run import Run

IMAGES, QUERIES = 3, 4
"""Of the verification."""
TOLERANCE = 1e-4
"""Largest difference of mask logits and probabilities that float32 rounding explains, from the same token states."""
STATES_TOLERANCE = 2**-10
"""Largest relative difference of token states: one step of float16, to which they are rounded."""
LOGITS = ("modal", "amodal", "slot_modal", "slot_amodal")


def verify(run: "Run", folder: Path) -> str:
    """The largest differences between a run and its export on the same images and queries, in a few lines.

    Three programs answer: the run from its checkpoint, the export loaded by `r2sm_jax.load`, and the export's StableHLO
    in a new process that does not import this package. Raises InputError if the differences are larger than rounding
    explains, or the StableHLO does not run.
    """
    from r2sm_jax.data.images import Letterbox
    from r2sm_jax.data.sources import open_source
    from r2sm_jax.errors import InputError
    from r2sm_jax.inference.run import open_run
    from r2sm_jax.models.weights import weight_files

    loaded = open_run(folder).predictor
    source = open_source(
        "scenes", "val", count=IMAGES, size=(size := loaded.config.vision.image_size)
    )
    samples = [source[i] for i in range(IMAGES)]
    images = [sample.image[: size - 7 * i] for i, sample in enumerate(samples)]  # of several shapes
    boxes = [Letterbox(image.shape[0], image.shape[1], size) for image in images]
    frames = np.stack([box.image(image) for box, image in zip(boxes, images, strict=True)])
    valid = np.stack([box.valid() for box in boxes])
    sentences = [[query.text for query in sample.queries[:QUERIES]] for sample in samples]

    def answer(predictor: "Predictor") -> dict[str, np.ndarray]:
        outputs = list(chain(*predictor.predict_logits(images, sentences)))
        return {
            field: np.stack([getattr(o, field) for o in outputs])
            for field in (*LOGITS, "amodal_logit")
        }

    expected = answer(run.predictor)

    def compare(name: str, answers: Mapping[str, np.ndarray], tolerance: float) -> str:
        apart = max(np.abs(expected[field] - answers[field]).max() for field in LOGITS)
        probability = np.abs(expit(expected["amodal_logit"]) - expit(answers["amodal_logit"])).max()
        pixels = sum(
            ((expected[field] > 0) != (answers[field] > 0)).sum() for field in ("modal", "amodal")
        )
        measured = f"{apart:.2g} in mask logits, {probability:.2g} in the probability of amodal, {pixels} mask pixels"
        if not max(apart, probability) <= tolerance:
            raise InputError(
                f"{folder}: {name}, differs from the run: {measured}; {tolerance:g} is allowed"
            )
        return f"  {name}: {measured}"

    lines = [f"verified on {IMAGES} images x {QUERIES} queries; largest differences from the run:"]
    lines.append(compare("safetensors", answer(loaded), TOLERANCE))
    all_sentences = list(chain(*sentences))
    ids, mask = loaded.text_encoder.tokens(all_sentences)
    states = np.ascontiguousarray(loaded.text_encoder(all_sentences)[0][:, : ids.shape[1]])
    given = {"image": frames, "valid": valid, "ids": ids, "mask": mask, "states": states}
    found = _run_stablehlo(folder, weight_files(loaded.text_encoder.folder), given)
    for name, title, tolerance in (("given", "the run's", TOLERANCE), ("own", "its own", np.inf)):
        title = f"StableHLO without r2sm_jax, {title} token states"
        answers = {
            field: found[f"{name}.{field}"].reshape(known.shape)
            for field, known in expected.items()
        }
        lines.append(compare(title, answers, tolerance))
    known = states.astype(np.float32)
    largest = (np.abs(found["states"] - known) / np.maximum(np.abs(known), 2**-4))[mask].max()
    if not largest <= STATES_TOLERANCE:
        raise InputError(
            f"{folder}: the token states of StableHLO differ by {largest:.2g}, more than float16 rounds"
        )
    lines.append(
        f"  token states: {largest:.2g} of their size; one step of float16 is {STATES_TOLERANCE:.2g}"
    )
    return "\n".join(lines)


def _run_stablehlo(
    folder: Path, language_model: Sequence[Path], given: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What `main`, in a process of its own, makes of what is `given`."""
    from r2sm_jax.errors import InputError

    with tempfile.TemporaryDirectory() as work:
        places = [f"{work}/given.safetensors", f"{work}/found.safetensors"]
        save_file(given, places[0])
        command = [sys.executable, "-I", __file__, folder, *places, *language_model]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or ["the verification ended early"])[-1]
            raise InputError(
                f"{folder}: the StableHLO does not run ({reason}); export the run again"
            )
        return load_file(places[1])


def main(folder: str, given_file: str, found_file: str, *language_model: str) -> None:
    """Writes FOUND."""
    weights, given = load_file(f"{folder}/model.safetensors"), load_file(given_file)
    with zipfile.ZipFile(f"{folder}/model.stablehlo") as file:
        encode_text, encode_image, answer = (
            export.deserialize(bytearray(file.read(name))).call
            for name in ("encode_text", "encode_image", "answer")
        )
    text_weights = {
        name: value for shard in language_model for name, value in load_file(shard).items()
    }
    features = encode_image(weights, given["image"], given["valid"])
    found = {"states": np.asarray(encode_text(text_weights, given["ids"], given["mask"]))}
    for name, states in (("given", given["states"]), ("own", found["states"])):
        text, mask = (
            x.reshape(len(given["image"]), -1, *x.shape[1:]) for x in (states, given["mask"])
        )
        answers = answer(weights, features, text, mask)
        found |= {
            f"{name}.{field}": np.asarray(answers[field])
            for field in answers
            if answers[field] is not None
        }
    save_file(found, found_file)
    assert not {"r2sm_jax", "flax", "transformers"} & set(sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
