"""Compares an export with its run. This program needs JAX but not r2sm_jax; tools/export_functions.py starts it.

python -I verify.py EXPORT GIVEN.safetensors LANGUAGE_MODEL.safetensors [more shards]

GIVEN holds images, tokens and token states, and the answers of the run (`run.*`) and of the export loaded by
`r2sm_jax.load` (`export.*`). The export's StableHLO answers here, from the given token states and from its own.
"""

import sys
import zipfile
from typing import Any

import numpy as np
from jax import export
from safetensors.numpy import load_file

TOLERANCE = 1e-4
"""Largest difference of mask logits and probabilities that float32 rounding explains, from the same token states."""
STATES_TOLERANCE = 2**-10
"""Largest relative difference of token states: one step of float16, to which they are rounded."""
LOGITS = ("modal", "amodal", "slot_modal", "slot_amodal")
FIELDS = (*LOGITS, "probability")


def main(folder: str, given_file: str, *language_model: str) -> None:
    """Prints the differences. Exits with code 1 and one sentence if they are too large."""
    weights, given = load_file(f"{folder}/model.safetensors"), load_file(given_file)
    with zipfile.ZipFile(f"{folder}/model.stablehlo") as file:
        encode_text, encode_image, answer = (
            export.deserialize(bytearray(file.read(name))).call for name in ("encode_text", "encode_image", "answer")
        )
    text_weights = {name: value for shard in language_model for name, value in load_file(shard).items()}
    features = encode_image(weights, given["image"], given["valid"])
    states = np.asarray(encode_text(text_weights, given["ids"], given["mask"]))

    def answers(states: np.ndarray) -> dict[str, np.ndarray]:
        text, mask = (x.reshape(len(given["image"]), -1, *x.shape[1:]) for x in (states, given["mask"]))
        found: Any = answer(weights, features, text, mask)
        probability = 1 / (1 + np.exp(-np.asarray(found["type_logit"], np.float64)))
        return {name: np.asarray(found[name]) for name in LOGITS} | {"probability": probability}

    stablehlo = "StableHLO in a process without r2sm_jax"
    run, loaded = ({name: given[f"{program}.{name}"] for name in FIELDS} for program in ("run", "export"))
    compare("safetensors", run, loaded, TOLERANCE)
    compare(f"{stablehlo}, the run's token states", run, answers(given["states"]), TOLERANCE)
    compare(f"{stablehlo}, its own token states", run, answers(states), np.inf)
    expected = given["states"].astype(np.float32)
    apart = np.abs(states.astype(np.float32) - expected) / np.maximum(np.abs(expected), 2**-4)
    largest = apart[given["mask"]].max()
    if not largest <= STATES_TOLERANCE:
        sys.exit(f"the token states of StableHLO differ by {largest:.2g}, more than float16 rounds")
    print(f"  token states: {largest:.2g} of their size; one step of float16 is {STATES_TOLERANCE:.2g}")
    assert not {"r2sm_jax", "flax", "transformers"} & set(sys.modules)


def compare(name: str, run: dict[str, np.ndarray], found: dict[str, np.ndarray], tolerance: float) -> None:
    """Prints the largest differences of a program's answers from those of the run."""
    apart = {field: np.abs(run[field] - found[field]).max() for field in run}
    pixels = sum(((run[field] > 0) != (found[field] > 0)).sum() for field in ("modal", "amodal"))
    logits, probability = max(apart[field] for field in LOGITS), apart["probability"]
    measured = f"{logits:.2g} in mask logits, {probability:.2g} in the probability of amodal, {pixels} mask pixels"
    if not max(logits, probability) <= tolerance:
        sys.exit(f"{name}, differs from the run: {measured}; {tolerance:g} is allowed")
    print(f"  {name}: {measured}")


if __name__ == "__main__":
    main(*sys.argv[1:])
