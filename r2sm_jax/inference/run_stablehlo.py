"""Runs the StableHLO of an export with JAX alone, for verification.py. It must not import r2sm_jax.

python -I run_stablehlo.py EXPORT INPUTS OUTPUTS LANGUAGE_MODEL...

All but EXPORT are safetensors files. INPUTS holds images, tokens and token states. OUTPUTS gets the
token states of the StableHLO (`states`), and its answers from the given token states (`given.*`)
and from its own (`own.*`).
"""

import sys
import zipfile

import numpy as np
from jax import export
from safetensors.numpy import load_file, save_file

PARTS = ("completer.", "outliner.")


def main(folder: str, inputs_path: str, outputs_path: str, *language_model: str) -> None:
    """Writes OUTPUTS."""
    weights = load_file(f"{folder}/model.safetensors")
    # The functions are those of the segmenter.
    weights = {k: value for k, value in weights.items() if not k.startswith(PARTS)}
    inputs = load_file(inputs_path)
    text_weights = {}
    for shard in language_model:
        text_weights |= load_file(shard)
    functions = {}
    with zipfile.ZipFile(f"{folder}/model.stablehlo") as file:
        for name in file.namelist():
            functions[name] = export.deserialize(bytearray(file.read(name))).call

    features = functions["encode_image"](weights, inputs["image"], inputs["valid"])
    states = np.asarray(functions["encode_text"](text_weights, inputs["ids"], inputs["mask"]))
    outputs = {"states": states}
    num_images = len(inputs["image"])
    mask = inputs["mask"].reshape(num_images, -1, *inputs["mask"].shape[1:])
    for prefix, text in (("given", inputs["states"]), ("own", states)):
        text = text.reshape(num_images, -1, *text.shape[1:])
        answers = functions["answer"](weights, features, text, mask)
        outputs |= {f"{prefix}.{name}": np.asarray(value) for name, value in answers.items()}
    save_file(outputs, outputs_path)
    assert not {"r2sm_jax", "flax", "transformers"} & set(sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
