"""Files of language models: what is read of them, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_models import LAYERS

from r2sm_jax.errors import InputError
from r2sm_jax.language.encoder import load_text_encoder
from r2sm_jax.language.states import TextStates


def test_keys_with_a_prefix_and_those_that_are_not_token_states(bert_copy):
    before = nnx.to_flat_state(nnx.state(load_text_encoder(bert_copy)))
    file = bert_copy / "model.safetensors"
    tensors = {f"bert.{key}": value for key, value in load_file(file).items()}
    tensors["bert.pooler.dense.weight"] = np.zeros((4, 4), np.float32)
    tensors["bert.embeddings.position_ids"] = np.zeros((1, 8), np.int64)
    save_file(tensors, file)
    after = nnx.to_flat_state(nnx.state(load_text_encoder(bert_copy)))
    assert all((a == b).all() for a, b in zip(before.leaves, after.leaves, strict=True))


def delete(pattern: str):
    def spoil(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return spoil


def configure(**changes):
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return spoil


def write(file: str, content: str):
    return lambda folder: (folder / file).write_text(content)


def add_a_word(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["unheard"] = len(vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (delete("config.json"), "config.json"),
        (delete("model.safetensors"), "model.safetensors"),
        (delete("tokenizer*"), "tokenizer"),
        (write("config.json", "[1]"), r"config\.json: no configuration"),
        (write("config.json", "{"), r"config\.json: this is not JSON"),
        (
            configure(model_type="t5"),
            "model_type 't5' is not a language model .*: bert, .*qwen3",
        ),
        (configure(model_type=None), "no configuration of a known model_type"),
        (configure(hidden_act="gelu_new"), "activation 'gelu_new' is not known: .*gelu"),
        (write("tokenizer.json", "{"), "its tokenizer cannot be read"),
        (write("tokenizer.json", "[]"), "its tokenizer cannot be read"),
        (write("tokenizer.json", '{"model": 3}'), "its tokenizer cannot be read"),
        (add_a_word, r"ids up to \d+, the model \d+ embeddings; take the tokenizer that belongs"),
    ],
)
def test_files_that_do_not_fit_are_named(spoil, message, bert_copy):
    spoil(bert_copy)
    with pytest.raises(InputError, match=message) as caught:
        TextStates(str(bert_copy), layers=(1,), max_tokens=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "max_tokens", "message"),
    [
        ((1, LAYERS + 1), 8, f"layers 0 to {LAYERS}"),
        ((1,), 9999, r"--model\.text\.max-tokens 9999: .* reads at most \d+ tokens"),
    ],
)
def test_what_the_model_does_not_have_is_refused(layers, max_tokens, message, bert_folder):
    with pytest.raises(InputError, match=message):
        TextStates(str(bert_folder), layers=layers, max_tokens=max_tokens)
