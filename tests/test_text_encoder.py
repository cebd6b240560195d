"""Language models: every layout against `transformers` on torch, and files that do not fit."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from r2sm_jax.config import MINILM, DataConfig
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.models import hub
from r2sm_jax.models.text_encoder import load_text_encoder
from r2sm_jax.sources import open_split

# Files.


def test_keys_with_a_prefix_and_those_that_are_not_token_states(bert_copy):
    before = nnx.to_flat_state(nnx.state(load_text_encoder(bert_copy)))
    file = bert_copy / "model.safetensors"
    tensors = {f"bert.{key}": value for key, value in load_file(file).items()}
    tensors["bert.pooler.dense.weight"] = np.zeros((4, 4), np.float32)
    tensors["bert.embeddings.position_ids"] = np.zeros((1, 8), np.int64)
    save_file(tensors, file)
    after = nnx.to_flat_state(nnx.state(load_text_encoder(bert_copy)))
    assert all((a == b).all() for a, b in zip(before.leaves, after.leaves, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type 't5' is not a language model .*: bert, .*qwen3"),
        ({"model_type": None}, "no configuration of a known model_type"),
        ({"hidden_act": "gelu_new"}, "activation 'gelu_new' is not known: .*gelu"),
    ],
)
def test_another_architecture_is_refused(change, message, bert_copy):
    config = json.loads((bert_copy / "config.json").read_text())
    (bert_copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InputError, match=message):
        load_text_encoder(bert_copy)


@pytest.mark.parametrize("pattern", ["config.json", "model.safetensors", "tokenizer*"])
def test_missing_files_are_named(bert_copy, pattern):
    for path in bert_copy.glob(pattern):
        path.unlink()
    with pytest.raises(InputError, match=pattern.rstrip("*")):
        TextStates(str(bert_copy), layers=(1,), max_tokens=8)


# Parity with torch: `pip install -e '.[parity]'`.

SIZE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
}
GROUPED = {"num_key_value_heads": 2}
ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 20,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", ROBERTA),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA),
    "llama": ("LlamaModel", GROUPED),
    "llama, biases and a scaling": (
        "LlamaModel",
        GROUPED | BIASES | {"head_dim": 16, "rope_parameters": LLAMA3},
    ),
    "llama, linear scaling": ("LlamaModel", {"rope_parameters": LINEAR}),
    "qwen2": ("Qwen2Model", GROUPED),
    "qwen3": ("Qwen3Model", GROUPED | {"head_dim": 20}),
    "qwen3, biases": (
        "Qwen3Model",
        {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True},
    ),
}


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    import transformers

    return transformers


def random_model(name: str, config: dict[str, Any]) -> Any:
    """A torch model whose every parameter, norms and biases too, is random and of a size that
    matters."""
    import torch
    import transformers

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
    import torch

    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(ids).long(),
            attention_mask=torch.tensor(mask).long(),
            output_hidden_states=True,
        )
    return np.stack([x.float().numpy() for x in out.hidden_states], axis=2)


def our_states(folder: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    graphdef, state = nnx.split(load_text_encoder(folder))
    run = jax.jit(lambda state, ids, mask: nnx.merge(graphdef, state).hidden_states(ids, mask))
    return np.stack(run(state, ids, mask), axis=2)


def largest_difference(model: Any, folder: Path, ids: np.ndarray, mask: np.ndarray) -> float:
    theirs, ours = states_of(model, ids, mask), our_states(folder, ids, mask)
    assert theirs.shape == ours.shape and ours.dtype == np.float32
    difference = float(np.abs(theirs - ours)[mask].max())
    print(f"{type(model).__name__}: {difference:.1e}")
    return difference


@pytest.mark.parametrize("name", MODELS)
def test_all_hidden_states_are_those_of_transformers(name, tmp_path, transformers):
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path)
    ids, mask = batch((30, 1, 7, 19), model.config.pad_token_id or 0)
    theirs = states_of(model, ids, mask)
    assert theirs.shape[2] == SIZE["num_hidden_layers"] + 1
    assert theirs[mask].std() > 0.3  # there is something to compare
    assert largest_difference(model, tmp_path, ids, mask) <= 1e-4


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM", "Qwen3ForCausalLM"])
def test_output_layers_are_left_out(name, tmp_path, transformers):
    cls = getattr(transformers, name)
    config = cls.config_class(**SIZE, **GROUPED, head_dim=8, tie_word_embeddings=True)
    model = cls(config).eval()
    model.save_pretrained(tmp_path)
    inner = model.base_model
    ids, mask = batch((9, 3), inner.config.pad_token_id or 0)
    assert largest_difference(inner, tmp_path, ids, mask) <= 1e-4


@pytest.mark.parametrize(
    ("name", "stored"), [("bert", "float16"), ("llama", "bfloat16"), ("qwen3", "bfloat16")]
)
def test_half_precision_weights_stay_so_and_compute_in_float32(
    name, stored, tmp_path, transformers
):
    import torch

    random_model(*MODELS[name]).to(getattr(torch, stored)).save_pretrained(tmp_path)
    # Read anew: what is cast has also lost the digits of its rotary frequencies.
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    encoder = load_text_encoder(tmp_path)
    assert encoder.words.embedding[...].dtype == jnp.dtype(stored)
    ids, mask = batch((12, 5), 0)
    assert largest_difference(model, tmp_path, ids, mask) <= 1e-4


def test_the_published_minilm_gives_the_same_states(transformers):
    """On 50 sentences of mixed length: words, queries, and several queries in one."""
    try:
        folder = hub.find_model(MINILM, "--model.text.name")
    except InputError as error:
        # Wrong weights are a failure, no network is not.
        assert "not the published" not in str(error)
        pytest.skip(f"MiniLM cannot be had here: {error}")
    digest = hub.file_sha256(folder / "model.safetensors")
    assert digest.startswith("53aa51172d142c89d9012cce15ae4d6c")

    source = open_split(DataConfig(), count=10)
    queries = [query.text for i in range(10) for query in source.queries_at(i)]
    long = [" ".join(queries[i : i + 1 + i % 4]) for i in range(40, 50)]
    sentences = ["mug", "Segment.", *queries[:38], *long]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(
        sentences, padding=True, truncation=True, max_length=64, return_tensors="np"
    )
    ids, mask = encoded["input_ids"].astype(np.int32), encoded["attention_mask"].astype(bool)
    assert len(ids) == 50 and len(set(mask.sum(1))) > 8
    model = transformers.BertModel.from_pretrained(folder).eval()
    assert largest_difference(model, folder, ids, mask) <= 1e-4
