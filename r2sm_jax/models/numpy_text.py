"""BERT and the mask-type heads in NumPy, for decisions about sentences without JAX.

JAX takes a second to import and another one to compile a model for each length of sentences; this
needs neither. `text_encoder.py` and `mask_type_heads.py` define, and train, what is computed here.
Heads that are not here are computed by JAX (inference/decider.py).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Float16, Int

from r2sm_jax.errors import load_json
from r2sm_jax.models.hub import CONFIG, read_tensors

Params = Mapping[str, np.ndarray]
"""Weights in float32 by dotted path, such as "members.0.down.kernel"."""

MASKED = -1e9
"""The attention score of a token that must not be seen."""
ATTENTION_HEADS = 4
"""Of `TransformerHead`."""


def reads_bert(folder: Path) -> bool:
    """Whether a folder's language model is one that `NumpyBert` computes."""
    config = load_json(folder / CONFIG, "the config.json that the model came with")
    return (
        isinstance(config, dict)
        and config.get("model_type") == "bert"
        and config.get("hidden_act") == "gelu"
    )


class NumpyBert:
    """Token ids -> token states, as `BertEncoder.float16_states` computes them."""

    def __init__(self, folder: Path):
        """Reads a model folder for which `reads_bert` is True. Raises InputError as
        `read_tensors`."""
        config = load_json(folder / CONFIG, "the config.json that the model came with")
        self.vocab_size: int = config["vocab_size"]
        self.max_tokens: int = config["max_position_embeddings"]
        self.depth: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]

        tensors = {}
        for name, value in read_tensors(folder).items():
            if np.issubdtype(value.dtype, np.floating):
                tensors[name.removeprefix("bert.")] = value.astype(np.float32, copy=False)
        self._words = tensors["embeddings.word_embeddings.weight"]
        token_type = tensors["embeddings.token_type_embeddings.weight"][0]
        self._positions = tensors["embeddings.position_embeddings.weight"] + token_type
        self._norm_before = _published_norm(tensors, "embeddings.LayerNorm")
        self._blocks = [_published_block(tensors, number) for number in range(self.depth)]

    def __call__(
        self, ids: Int[np.ndarray, "b t"], mask: Bool[np.ndarray, "b t"], layers: tuple[int, ...]
    ) -> Float16[np.ndarray, "b t l e"]:
        """Token states after each of `layers` (0 = the embeddings). `mask` is True on real tokens;
        states of padding are meaningless."""
        x = self._words[ids] + self._positions[: ids.shape[1]]
        x = layer_norm(x, *self._norm_before, self._epsilon)
        states = [x]
        for block in self._blocks[: max(layers)]:
            x = self._apply(block, x, mask)
            states.append(x)
        return np.stack([states[layer] for layer in layers], axis=2).astype(np.float16)

    def _apply(
        self, block: Params, x: Float[np.ndarray, "b t e"], mask: Bool[np.ndarray, "b t"]
    ) -> Float[np.ndarray, "b t e"]:
        """Applies a transformer block, which norms after each residual."""
        attended = self_attention(linear(block, "qkv", x), mask, self._heads)
        x = x + linear(block, "out", attended)
        x = layer_norm(x, block["norm1.scale"], block["norm1.bias"], self._epsilon)
        x = x + linear(block, "down", gelu(linear(block, "up", x)))
        return layer_norm(x, block["norm2.scale"], block["norm2.bias"], self._epsilon)


def _published_norm(tensors: Params, name: str) -> tuple[np.ndarray, np.ndarray]:
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def _published_block(tensors: Params, number: int) -> Params:
    """The weights of a block by the names of `BertBlock`, with one kernel for query, key and
    value."""
    prefix = f"encoder.layer.{number}"
    block = {}
    projections = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
    kernels = [tensors[f"{name}.weight"] for name in projections]
    block["qkv.kernel"] = np.ascontiguousarray(np.concatenate(kernels).T)
    block["qkv.bias"] = np.concatenate([tensors[f"{name}.bias"] for name in projections])
    for name, published in (
        ("out", "attention.output.dense"),
        ("up", "intermediate.dense"),
        ("down", "output.dense"),
    ):
        # Few rows are multiplied faster by kernels [in out] than by their transposes.
        kernel = tensors[f"{prefix}.{published}.weight"]
        block[f"{name}.kernel"] = np.ascontiguousarray(kernel.T)
        block[f"{name}.bias"] = tensors[f"{prefix}.{published}.bias"]
    for name, published in (("norm1", "attention.output.LayerNorm"), ("norm2", "output.LayerNorm")):
        scale, bias = _published_norm(tensors, f"{prefix}.{published}")
        block[f"{name}.scale"] = scale
        block[f"{name}.bias"] = bias
    return block


# Layers


def linear(params: Params, name: str, x: Float[np.ndarray, "... _in"]) -> np.ndarray:
    """Computes a dense layer."""
    return x @ params[f"{name}.kernel"] + params[f"{name}.bias"]


def layer_norm(
    x: Float[np.ndarray, "... d"],
    scale: Float[np.ndarray, " d"] | float,
    bias: Float[np.ndarray, " d"] | float,
    epsilon: float,
) -> Float[np.ndarray, "... d"]:
    """Scales to zero mean and unit variance over the channels, then by `scale` and `bias`."""
    x = x - x.mean(-1, keepdims=True)
    variance = np.square(x).mean(-1, keepdims=True)
    return x / np.sqrt(variance + np.float32(epsilon)) * scale + bias


def self_attention(
    qkv: Float[np.ndarray, "b t _d"], mask: Bool[np.ndarray, "b t"], heads: int
) -> Float[np.ndarray, "b t _e"]:
    """Computes multi-head attention of projections that hold query, key and value side by side."""
    b, t, dim = qkv.shape
    head_dim = dim // (3 * heads)
    query, key, value = qkv.reshape(b, t, 3, heads, head_dim).transpose(2, 0, 3, 1, 4)
    scores = query @ key.swapaxes(-1, -2) * np.float32(head_dim**-0.5)  # [b heads t t]
    scores = np.where(mask[:, None, None], scores, np.float32(MASKED))
    attended = softmax(scores) @ value
    return attended.transpose(0, 2, 1, 3).reshape(b, t, dim // 3)


def softmax(scores: Float[np.ndarray, "... n"]) -> Float[np.ndarray, "... n"]:
    """Computes the softmax over the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def gelu(x: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Computes the exact GELU: x times the normal distribution function.

    The error function is that of Abramowitz and Stegun, 7.1.26, which is right to 1.5e-7: importing
    SciPy's takes as long as reading the model.
    """
    magnitude = np.abs(x)
    t = 1 / (1 + 0.3275911 * 0.5**0.5 * magnitude)
    polynomial = 1.061405429 * t
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + coefficient) * t
    # How far it is below max(x, 0): |x| (1 - erf(|x| / sqrt 2)) / 2.
    tail = polynomial * np.exp(-0.5 * np.square(x)) * magnitude / 2
    return np.maximum(x, 0) - tail


def gelu_tanh(x: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Computes GELU by a hyperbolic tangent."""
    return x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x))) / 2


def mlp(params: Params, name: str, x: Float[np.ndarray, "... _in"]) -> np.ndarray:
    """Computes `layers.MLP`: two dense layers with a GELU between them."""
    return linear(params, f"{name}.layers.1", gelu_tanh(linear(params, f"{name}.layers.0", x)))


# Mask-type heads


def linear_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """Computes `LinearHead`."""
    pooled = mean_pool(states[:, :, -1], mask)
    return linear(params, "out", layer_norm(pooled, 1.0, 0.0, 1e-6))[:, 0]


def mlp_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """Computes `MLPHead`."""
    pooled = mean_pool(states.reshape(*mask.shape, -1), mask)
    return mlp(params, "mlp", pooled)[:, 0]


def attention_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """Computes `AttentionHead`: the mean of its `TransformerHead`s."""
    num_members = len({name.split(".")[1] for name in params})
    members = []
    for number in range(num_members):
        prefix = f"members.{number}."
        member = {
            name.removeprefix(prefix): value
            for name, value in params.items()
            if name.startswith(prefix)
        }
        members.append(transformer_head(member, states, mask))
    return np.mean(members, axis=0)


def transformer_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """Computes `TransformerHead`."""

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return layer_norm(x, params[f"{name}.scale"], params[f"{name}.bias"], 1e-5)

    x = linear(params, "down", states.reshape(*mask.shape, -1))
    attended = self_attention(linear(params, "qkv", norm("norm1", x)), mask, ATTENTION_HEADS)
    x = x + linear(params, "attention_out", attended)
    x = norm("norm3", x + mlp(params, "mlp", norm("norm2", x)))
    scores = linear(params, "pool", x)[..., 0]
    weights = softmax(np.where(mask, scores, np.float32(MASKED)))
    pooled = (weights[..., None] * x).sum(1)
    return linear(params, "out", pooled)[:, 0]


def mean_pool(
    states: Float[np.ndarray, "b t e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, "b e"]:
    """Averages the states of real tokens."""
    weights = mask[..., None].astype(np.float32)
    return (states * weights).sum(1) / np.maximum(weights.sum(1), 1)


HEADS: dict[str, Callable[[Params, np.ndarray, np.ndarray], np.ndarray]] = {
    "linear": linear_head,
    "mlp": mlp_head,
    "attention": attention_head,
}
"""Heads that decide from the words alone: (weights, states [b t l e], mask [b t]) -> logits [b]."""
