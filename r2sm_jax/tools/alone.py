"""Answers queries by an export's StableHLO in a process that knows nothing of r2sm_jax:

python -I alone.py EXPORT INPUTS.safetensors OUTPUTS.safetensors LANGUAGE_MODEL.safetensors [more shards]

`INPUTS` holds `image` [b S S 3], `valid` [b S S], `ids` and `mask` [b*k t], and token states [b*k t l e] of another
program. `OUTPUTS` gets the states by `encode_text`, and what `answer` says of them (`own.*`) and of those (`given.*`).
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
