"""The frozen language model, by the layout that its `config.json` names."""

from dataclasses import fields
from pathlib import Path

from flax import nnx

from r2sm_jax.errors import InputError
from r2sm_jax.models.text_bert import BERT_KEYS, BERT_PREFIX, BERT_UNUSED, BertConfig, BertEncoder
from r2sm_jax.models.weights import fill, read_config, read_tensors


def load_text_encoder(folder: Path) -> BertEncoder:
    """The language model of a Hugging Face folder, in float32.

    Raises:
        InputError: a file is missing or unreadable, the architecture is another one, or any key or shape does not
            match (all of them are listed).
    """
    raw = read_config(folder)
    if raw.get("model_type") != "bert" or raw.get("hidden_act", "gelu") != "gelu":
        found = f"model_type {raw.get('model_type')!r} with activation {raw.get('hidden_act')!r}"
        raise InputError(f"{folder / 'config.json'}: {found} is not the BERT layout with exact GELU that can be loaded")
    config = BertConfig(**{f.name: raw[f.name] for f in fields(BertConfig) if f.name in raw})
    tensors = read_tensors(folder)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: BertEncoder(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, fill(state, tensors, BERT_KEYS, where=folder, prefix=BERT_PREFIX, unused=BERT_UNUSED))
