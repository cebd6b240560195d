"""Every layout of a language model against `transformers` on torch, with small random models saved
by torch."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from r2sm_jax.models.hub import INDEX, weights_sha256
from r2sm_jax.models.text_encoder import load_text_encoder

torch = pytest.importorskip("torch", reason="parity needs torch: pip install -e '.[parity]'")
import transformers  # noqa: E402

SIZE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
}
GROUPED = {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 20,
}
MODELS = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "llama": ("LlamaModel", GROUPED),
    "llama, biases and a scaling": (
        "LlamaModel",
        GROUPED
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama, linear scaling": (
        "LlamaModel",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "qwen2": ("Qwen2Model", GROUPED),
    "qwen3": ("Qwen3Model", GROUPED | {"head_dim": 20}),
    "qwen3, biases": (
        "Qwen3Model",
        {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True},
    ),
}


def random_model(name: str, config: dict[str, Any]) -> Any:
    """A torch model whose every parameter, norms and biases too, is random and of a size that
    matters."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**SIZE | config)).eval()
    for key, parameter in model.named_parameters():
        # Attention must be far from uniform, or a wrong mask or position would not show.
        scale = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.data.normal_(1.0 if "norm" in key.lower() and "weight" in key else 0.0, scale)
    return model


def batch(lengths: tuple[int, ...], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Random sentences of these lengths, padded on the right."""
    rng = np.random.default_rng(0)
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    return np.where(mask, rng.integers(3, 99, mask.shape), pad).astype(np.int32), mask


def states_of(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[b t l e] as `transformers` has them."""
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(ids).long(),
            attention_mask=torch.tensor(mask).long(),
            output_hidden_states=True,
        )
    return np.stack([x.float().numpy() for x in out.hidden_states], axis=2)


def our_states(folder: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    encoder = load_text_encoder(folder)
    graphdef, state = nnx.split(encoder)
    layers = tuple(range(encoder.sizes.depth + 1))
    run = jax.jit(lambda state, ids, mask: nnx.merge(graphdef, state)(ids, mask, layers))
    return np.asarray(run(state, ids, mask))


@pytest.mark.parametrize("name", MODELS)
def test_all_hidden_states_are_those_of_transformers(name, tmp_path):
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path)
    ids, mask = batch((30, 1, 7, 19), model.config.pad_token_id or 0)
    theirs, ours = states_of(model, ids, mask), our_states(tmp_path, ids, mask)
    assert theirs.shape == ours.shape and theirs.shape[2] == SIZE["num_hidden_layers"] + 1
    difference = float(np.abs(theirs - ours)[mask].max())
    print(f"{name}: {difference:.1e}")
    assert difference <= 1e-4
    assert theirs[mask].std() > 0.3  # and there is something to compare


@pytest.mark.parametrize(
    "whole",
    [
        "BertForMaskedLM",
        "RobertaForMaskedLM",
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
    ],
)
def test_the_whole_model_of_the_task_loads_too(whole, tmp_path):
    """Output layers beside the language model are left out."""
    cls = getattr(transformers, whole)
    torch.manual_seed(0)
    config = cls.config_class(**SIZE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    model = cls(config).eval()
    inner = model.base_model
    model.save_pretrained(tmp_path)
    ids, mask = batch((9, 3), inner.config.pad_token_id or 0)
    assert np.abs(states_of(inner, ids, mask) - our_states(tmp_path, ids, mask))[mask].max() <= 1e-4


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_shards_give_the_same_states(name, tmp_path):
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    shards = set(json.loads((tmp_path / "many" / INDEX).read_text())["weight_map"].values())
    assert len(shards) > 2 and not (tmp_path / "many" / "model.safetensors").exists()
    ids, mask = batch((12, 5), 0)
    ours = [our_states(tmp_path / folder, ids, mask) for folder in ("one", "many")]
    np.testing.assert_array_equal(*ours)
    assert weights_sha256(tmp_path / "one") != weights_sha256(tmp_path / "many")


@pytest.mark.parametrize("name", ["bert", "llama", "qwen3"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_weights_stay_so_and_are_computed_with_in_float32(name, stored, tmp_path):
    random_model(*MODELS[name]).to(getattr(torch, stored)).save_pretrained(tmp_path)
    # Read anew: what is cast has also lost the digits of its rotary frequencies.
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    encoder = load_text_encoder(tmp_path)
    assert encoder.words.embedding[...].dtype == jnp.dtype(stored)
    ids, mask = batch((12, 5), 0)
    theirs, ours = states_of(model, ids, mask), our_states(tmp_path, ids, mask)
    assert ours.dtype == np.float32 and np.abs(theirs - ours)[mask].max() <= 1e-4
