"""BERT and the mask-type heads in NumPy, for decisions about sentences without JAX.

JAX takes a second to import and another one to compile a model for each length of sentences; this
needs neither. `text_encoder.py` and `mask_type_heads.py` define, and train, what is computed here.
Heads that are not here are computed by JAX (inference/decider.py).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Float16, Int

from r2sm_jax.models.hub import read_model_config, read_tensors

Params = Mapping[str, np.ndarray]
"""Weights in float32 by dotted path, such as "members.0.down.kernel"."""

MASKED = -1e9
"""The attention score of a token that must not be seen."""
ATTENTION_HEADS = 4
"""Of `TokenTransformer`."""


def reads_bert(folder: Path) -> bool:
    """Whether a folder's language model is one that `NumpyBert` computes."""
    config = read_model_config(folder)
    return config.model_type == "bert" and config.hidden_act == "gelu"


class NumpyBert:
    """Token ids -> token states, as `BertEncoder.float16_states` computes them."""

    def __init__(self, folder: Path):
        """Reads a model folder for which `reads_bert` is True. Raises InputError as
        `read_tensors`."""
        config = read_model_config(folder)
        self.vocab_size: int = config.vocab_size
        self._heads: int = config.num_attention_heads
        self._epsilon: float = config.layer_norm_eps
        self._params = {}
        for name, value in read_tensors(folder).items():
            layer, _, kind = name.removeprefix("bert.").rpartition(".")
            value = value.astype(np.float32, copy=False)
            if kind == "weight" and value.ndim == 1:
                kind = "scale"
            elif kind == "weight" and not layer.startswith("embeddings"):
                # Few rows are multiplied faster by kernels [in out] than by their transposes.
                kind, value = "kernel", np.ascontiguousarray(value.T)
            self._params[f"{layer}.{kind}"] = value

    def __call__(
        self, ids: Int[np.ndarray, "b t"], mask: Bool[np.ndarray, "b t"], layers: tuple[int, ...]
    ) -> Float16[np.ndarray, "b t l e"]:
        """Token states after each of `layers` (0 = the embeddings). `mask` is True on real tokens;
        states of padding are meaningless."""
        x = self._params["embeddings.word_embeddings.weight"][ids]
        x = x + self._params["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + self._params["embeddings.token_type_embeddings.weight"][0]
        states = [norm(self._params, "embeddings.LayerNorm", x, self._epsilon)]
        for number in range(max(layers)):
            states.append(self._block(f"encoder.layer.{number}", states[-1], mask))
        return np.stack([states[layer] for layer in layers], axis=2).astype(np.float16)

    def _block(
        self, name: str, x: Float[np.ndarray, "b t e"], mask: Bool[np.ndarray, "b t"]
    ) -> Float[np.ndarray, "b t e"]:
        """Computes a transformer block, which norms after each residual."""
        params, epsilon = self._params, self._epsilon
        projections = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        query, key, value = (linear(params, projection, x) for projection in projections)
        attended = attend(query, key, value, mask, self._heads)
        x = x + linear(params, f"{name}.attention.output.dense", attended)
        x = norm(params, f"{name}.attention.output.LayerNorm", x, epsilon)
        hidden = gelu(linear(params, f"{name}.intermediate.dense", x))
        x = x + linear(params, f"{name}.output.dense", hidden)
        return norm(params, f"{name}.output.LayerNorm", x, epsilon)


# Layers


def linear(params: Params, name: str, x: Float[np.ndarray, "... _in"]) -> np.ndarray:
    """Computes a dense layer."""
    return x @ params[f"{name}.kernel"] + params[f"{name}.bias"]


def standardise(x: Float[np.ndarray, "... d"], epsilon: float) -> Float[np.ndarray, "... d"]:
    """Scales to zero mean and unit variance over the channels."""
    x = x - x.mean(-1, keepdims=True)
    variance = np.square(x).mean(-1, keepdims=True)
    return x / np.sqrt(variance + np.float32(epsilon))


def norm(
    params: Params, name: str, x: Float[np.ndarray, "... d"], epsilon: float
) -> Float[np.ndarray, "... d"]:
    """Computes a layer norm."""
    return standardise(x, epsilon) * params[f"{name}.scale"] + params[f"{name}.bias"]


def attend(
    query: Float[np.ndarray, "b t e"],
    key: Float[np.ndarray, "b t e"],
    value: Float[np.ndarray, "b t e"],
    mask: Bool[np.ndarray, "b t"],
    heads: int,
) -> Float[np.ndarray, "b t e"]:
    """Computes multi-head attention; `mask` is False on keys that are hidden."""
    b, t, dim = query.shape
    query, key, value = (
        x.reshape(b, t, heads, dim // heads).swapaxes(1, 2) for x in (query, key, value)
    )
    scores = query @ key.swapaxes(-1, -2) * np.float32((dim // heads) ** -0.5)  # [b heads t t]
    scores = np.where(mask[:, None, None], scores, np.float32(MASKED))
    attended = softmax(scores) @ value
    return attended.swapaxes(1, 2).reshape(b, t, dim)


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


# Mask-type heads: (weights, states [b t l e], mask [b t]) -> logits [b]


def linear_head(params: Params, states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes `LinearHead`."""
    pooled = mean_pool(states[:, :, -1], mask)
    return linear(params, "out", standardise(pooled, 1e-6))[:, 0]


def mlp_head(params: Params, states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes `MLPHead`."""
    pooled = mean_pool(states.reshape(*mask.shape, -1), mask)
    return mlp(params, "mlp", pooled)[:, 0]


def attention_head(params: Params, states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes `AttentionHead`: the mean of its `TransformerHead`s."""
    members = sorted({name.partition(".down.")[0] for name in params if ".down." in name})
    x = states.reshape(*mask.shape, -1)
    return np.mean([transformer_head(params, member, x, mask) for member in members], axis=0)


def transformer_head(
    params: Params, name: str, x: Float[np.ndarray, "b t d"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, " b"]:
    """Computes the `TransformerHead` of this name."""
    x = token_transformer(params, f"{name}.", x, mask)
    scores = linear(params, f"{name}.pool", x)[..., 0]
    weights = softmax(np.where(mask, scores, np.float32(MASKED)))
    pooled = (weights[..., None] * x).sum(1)
    return linear(params, f"{name}.out", pooled)[:, 0]


def target_head(
    params: Params, states: Float[np.ndarray, "b t l e"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, "b t"]:
    """Computes `TargetHead`: a logit for each token."""
    x = token_transformer(params, "", states.reshape(*mask.shape, -1), mask)
    return linear(params, "out", x)[..., 0]


def token_transformer(
    params: Params, prefix: str, x: Float[np.ndarray, "b t d"], mask: Bool[np.ndarray, "b t"]
) -> Float[np.ndarray, "b t c"]:
    """Computes `TokenTransformer.tokens`; `prefix`: of its weights."""
    x = linear(params, f"{prefix}down", x)
    qkv = linear(params, f"{prefix}qkv", norm(params, f"{prefix}norm1", x, 1e-5))
    queries, keys, values = np.split(qkv, 3, axis=-1)
    attended = attend(queries, keys, values, mask, ATTENTION_HEADS)
    x = x + linear(params, f"{prefix}attention_out", attended)
    x = x + mlp(params, f"{prefix}mlp", norm(params, f"{prefix}norm2", x, 1e-5))
    return norm(params, f"{prefix}norm3", x, 1e-5)


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
"""Heads that decide from the words alone."""
