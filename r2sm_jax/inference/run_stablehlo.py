"""Runs the StableHLO of an export with JAX alone, for stablehlo.py. It must not import r2sm_jax.

python -I run_stablehlo.py EXPORT INPUTS OUTPUTS

INPUTS is a safetensors file with images, token states and which tokens are real; OUTPUTS gets the
answers.
"""

import sys
import zipfile

import numpy as np
from jax import export
from safetensors.numpy import load_file, save_file

PARTS = ("completer.", "outliner.")
"""How the names of weights begin that are not the segmenter's."""


def main(folder: str, inputs_path: str, outputs_path: str) -> None:
    """Writes OUTPUTS."""
    weights = load_file(f"{folder}/model.safetensors")
    weights = {name: value for name, value in weights.items() if not name.startswith(PARTS)}
    inputs = load_file(inputs_path)
    functions = {}
    with zipfile.ZipFile(f"{folder}/model.stablehlo") as file:
        for name in ("encode_image", "answer"):
            functions[name] = export.deserialize(bytearray(file.read(name))).call
    features = functions["encode_image"](weights, inputs["image"], inputs["valid"])
    answers = functions["answer"](weights, features, inputs["states"], inputs["mask"])
    save_file({name: np.asarray(value) for name, value in answers.items()}, outputs_path)
    assert not {"r2sm_jax", "flax", "transformers"} & set(sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
