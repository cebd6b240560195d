"""BERT and the mask-type heads in NumPy, for decisions about sentences without JAX.

JAX takes a second to import and another one to compile a model for each length of sentences; this
needs neither. `text_encoder.py` and `mask_type_heads.py` define, and train, what is computed here.
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
FEW_ROWS = 32
BLOCK_COLUMNS = 64
"""Up to so many rows are multiplied by blocks of so many columns: 1.3 to 2.5 times as fast."""
GELU_BLOCK = 16384
"""Numbers whose GELU is computed at once. What they need fits the cache of a processor core."""
TRANSFORMER_HEADS = {"attention": 4, "layers": 2}
"""Attention heads of `TransformerHead` in each mask-type head."""


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
        self,
        block: Params,
        x: Float[np.ndarray, "b t e"],
        mask: Bool[np.ndarray, "b t"],
    ) -> Float[np.ndarray, "b t e"]:
        attended = self_attention(linear(block, "qkv", x), mask, self._heads)
        x = x + linear(block, "out", attended)
        x = layer_norm(x, block["norm1.scale"], block["norm1.bias"], self._epsilon)
        hidden = gelu(linear(block, "up", x))
        x = x + linear(block, "down", hidden)
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
    """A dense layer."""
    kernel = params[f"{name}.kernel"]
    rows = multiply(x.reshape(-1, x.shape[-1]), kernel)
    rows += params[f"{name}.bias"]
    return rows.reshape(*x.shape[:-1], kernel.shape[-1])


def multiply(
    rows: Float[np.ndarray, "n i"], kernel: Float[np.ndarray, "i o"]
) -> Float[np.ndarray, "n o"]:
    """The product of two matrices, in blocks of the kernel's columns where there are few rows.

    OpenBLAS copies a kernel before it multiplies, which takes longer than few rows take. Kernels
    that are as small as one of these blocks it does not copy.
    """
    num_columns = kernel.shape[1]
    if len(rows) > FEW_ROWS or num_columns % BLOCK_COLUMNS:
        return rows @ kernel
    blocks = kernel.reshape(len(kernel), -1, BLOCK_COLUMNS).swapaxes(0, 1)  # a view
    return np.matmul(rows, blocks).swapaxes(0, 1).reshape(len(rows), num_columns)


def layer_norm(
    x: Float[np.ndarray, "... d"],
    scale: Float[np.ndarray, " d"] | float,
    bias: Float[np.ndarray, " d"] | float,
    epsilon: float,
) -> Float[np.ndarray, "... d"]:
    """Zero mean and unit variance over the channels, then `scale` and `bias`."""
    x = x - x.mean(-1, keepdims=True)
    variance = np.einsum("...d,...d->...", x, x)[..., None] / np.float32(x.shape[-1])
    x /= np.sqrt(variance + np.float32(epsilon))
    x *= scale
    x += bias
    return x


def self_attention(
    qkv: Float[np.ndarray, "b t _d"], mask: Bool[np.ndarray, "b t"], heads: int
) -> Float[np.ndarray, "b t _e"]:
    """Multi-head attention of projections that hold query, key and value side by side."""
    b, t, dim = qkv.shape
    head_dim = dim // (3 * heads)
    query, key, value = qkv.reshape(b, t, 3, heads, head_dim).transpose(2, 0, 3, 1, 4)
    scores = query @ key.swapaxes(-1, -2) * np.float32(head_dim**-0.5)  # [b heads t t]
    scores = np.where(mask[:, None, None], scores, np.float32(MASKED))
    attended = softmax(scores) @ value
    return attended.transpose(0, 2, 1, 3).reshape(b, t, dim // 3)


def softmax(scores: Float[np.ndarray, "... n"]) -> Float[np.ndarray, "... n"]:
    """Softmax over the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def gelu(x: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """The exact GELU: x times the normal distribution function."""
    flat = x.reshape(-1)
    out = np.maximum(flat, 0)
    for start in range(0, len(flat), GELU_BLOCK):
        out[start : start + GELU_BLOCK] -= _gelu_tail(flat[start : start + GELU_BLOCK])
    return out.reshape(x.shape)


def _gelu_tail(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """How far GELU is below max(x, 0): |x| (1 - erf(|x| / sqrt 2)) / 2.

    The error function is that of Abramowitz and Stegun, 7.1.26, which is right to 1.5e-7: SciPy's
    takes a quarter of the time of the whole model. Arrays are changed in place, since new ones
    would take longer than the arithmetic.
    """
    magnitude = np.abs(x)
    z = magnitude * np.float32(0.5**0.5)
    t = z * np.float32(0.3275911)
    t += 1
    np.reciprocal(t, out=t)
    tail = t * np.float32(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail += np.float32(coefficient)
        tail *= t
    z *= z
    np.negative(z, out=z)
    tail *= np.exp(z, out=z)
    tail *= magnitude
    tail *= np.float32(0.5)
    return tail


def gelu_tanh(x: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """GELU by a hyperbolic tangent."""
    inner = x * x * np.float32(0.044715)
    inner += 1
    inner *= x
    inner *= np.float32((2 / np.pi) ** 0.5)
    np.tanh(inner, out=inner)
    inner += 1
    inner *= x
    inner *= np.float32(0.5)
    return inner


def mlp(params: Params, name: str, x: Float[np.ndarray, "... _in"]) -> np.ndarray:
    """`layers.MLP`: two dense layers with a GELU between them."""
    return linear(params, f"{name}.layers.1", gelu_tanh(linear(params, f"{name}.layers.0", x)))


# Mask-type heads


def linear_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """`LinearHead`."""
    pooled = mean_pool(states[:, :, -1], mask)
    return linear(params, "out", layer_norm(pooled, 1.0, 0.0, 1e-6))[:, 0]


def mlp_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """`MLPHead`."""
    pooled = mean_pool(states.reshape(*mask.shape, -1), mask)
    return mlp(params, "mlp", pooled)[:, 0]


def attention_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """`AttentionHead`."""
    num_members = len({name.split(".")[1] for name in params})
    heads = TRANSFORMER_HEADS["attention"]
    members = []
    for number in range(num_members):
        members.append(transformer_head(params, f"members.{number}.", states, mask, heads))
    return np.mean(members, axis=0)


def layers_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """`LayersHead`."""
    shares = softmax(params["mix"])
    scales = shares / np.sqrt(np.square(states).mean(-1) + np.float32(1e-6))
    mixed = (states * scales[..., None]).sum(-2, keepdims=True)
    return transformer_head(params, "transformer.", mixed, mask, TRANSFORMER_HEADS["layers"])


def transformer_head(
    params: Params,
    prefix: str,
    states: Float[np.ndarray, "b t l e"],
    mask: Bool[np.ndarray, "b t"],
    heads: int,
) -> Float[np.ndarray, " b"]:
    """`TransformerHead`, whose weights begin with `prefix`."""

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return layer_norm(x, params[f"{prefix}{name}.scale"], params[f"{prefix}{name}.bias"], 1e-5)

    x = linear(params, f"{prefix}down", states.reshape(*mask.shape, -1))
    qkv = linear(params, f"{prefix}qkv", norm("norm1", x))
    x = x + linear(params, f"{prefix}attention_out", self_attention(qkv, mask, heads))
    x = norm("norm3", x + mlp(params, f"{prefix}mlp", norm("norm2", x)))
    scores = linear(params, f"{prefix}pool", x)[..., 0]
    weights = softmax(np.where(mask, scores, np.float32(MASKED)))
    pooled = (weights[..., None] * x).sum(1)
    return linear(params, f"{prefix}out", pooled)[:, 0]


def mean_pool(
    states: Float[np.ndarray, "b t e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, "b e"]:
    """Mean of the states of real tokens."""
    weights = mask[..., None].astype(np.float32)
    return (states * weights).sum(1) / np.maximum(weights.sum(1), 1)


HEADS: dict[str, Callable[[Params, np.ndarray, np.ndarray], np.ndarray]] = {
    "linear": linear_head,
    "mlp": mlp_head,
    "layers": layers_head,
    "attention": attention_head,
}
"""Heads that decide from the words alone: (weights, states [b t l e], mask [b t]) -> logits [b]."""
