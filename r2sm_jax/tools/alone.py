"""Runs an export's StableHLO without r2sm_jax; copy this file to wherever you need it.

python -I alone.py EXPORT INPUTS.safetensors OUTPUTS.safetensors LANGUAGE_MODEL.safetensors [more shards]

INPUTS holds `image` [b S S 3], `valid` [b S S], `ids` and `mask` [b*k t], and `states` [b*k t l e], token states that
another program computed. OUTPUTS gets the states that `encode_text` computes, and the answers from those (`own.*`) and
from the given ones (`given.*`).
"""

import sys
import zipfile
from typing import Any

import numpy as np
from jax import export
from safetensors.numpy import load_file, save_file


def main(folder: str, inputs: str, outputs: str, *language_model: str) -> None:
    weights, given = load_file(f"{folder}/model.safetensors"), load_file(inputs)
    with zipfile.ZipFile(f"{folder}/model.stablehlo") as file:
        encode_text, encode_image, answer = (
            export.deserialize(bytearray(file.read(name))).call for name in ("encode_text", "encode_image", "answer")
        )
    text_weights = {name: value for shard in language_model for name, value in load_file(shard).items()}
    features = encode_image(weights, given["image"], given["valid"])
    states = np.asarray(encode_text(text_weights, given["ids"], given["mask"]))
    found = {"states": states}
    for name, text in (("own", states), ("given", given["states"])):
        text, mask = (x.reshape(len(given["image"]), -1, *x.shape[1:]) for x in (text, given["mask"]))
        answers: Any = answer(weights, features, text, mask)
        found |= {f"{name}.{field}": np.asarray(value) for field, value in answers.items()}
    assert not {"r2sm_jax", "flax", "transformers"} & set(sys.modules)
    save_file(found, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
