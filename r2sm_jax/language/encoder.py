"""Frozen language models: BERT, and decoder-only ones such as Llama and Qwen, loaded from their
Hugging Face folders.

Numerics follow `transformers`, and hidden states are counted as there: 0 is the embeddings. The
output layer is never read. Weights stay in the type that the file has (bfloat16, float16 or
float32). Everything is computed in float32: each kernel is widened where it is used.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Float16, Int

from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import read_model_config, read_tensors
from r2sm_jax.models.keys import BERT, DECODER_ONLY
from r2sm_jax.models.layers import ACTIVATIONS, MLP, Attention, Linear, attend, build_abstract
from r2sm_jax.models.matching import Tensor, match_weights, put_weights

MASKED = -1e9
"""Added to attention scores of tokens that must not be seen."""


@dataclass(frozen=True)
class TextSizes:
    """What users of a language model know of it."""

    vocab_size: int
    dim: int
    """Width of the token states."""
    depth: int
    """The number of the last hidden layer."""
    max_tokens: int
    """The longest sentence that it reads."""
    pool: Literal["mean", "last"]
    """Token states that make one vector. In decoder-only models the last token alone has read the
    whole sentence."""


class TextEncoder(nnx.Module):
    """Token ids -> token states. All parameters are frozen: nothing trains them, no optimizer sees
    them."""

    sizes: TextSizes
    is_scaled = False
    """Whether each state is divided by its root mean square before it becomes float16."""

    def hidden_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]
    ) -> list[Float[Array, "b t e"]]:
        """Returns the embeddings and the token states after every block. `mask` is True on real
        tokens, which come first; states of padding are meaningless."""
        raise NotImplementedError  # each layout has its own

    def chosen_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float[Array, "b t l e"]:
        """Computes token states after each of `layers` (0 = the embeddings)."""
        states = self.hidden_states(ids, mask)
        chosen = jnp.stack([states[layer] for layer in layers], axis=2)
        if self.is_scaled:
            mean_square = jnp.square(chosen).mean(-1, keepdims=True)
            chosen = chosen * jax.lax.rsqrt(mean_square + 1e-12)
        return chosen

    def float16_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float16[Array, "b t l e"]:
        """Computes them as the segmenter reads them and memory keeps them."""
        return self.chosen_states(ids, mask, layers).astype(jnp.float16)


# BERT


class BertBlock(nnx.Module):
    """A post-norm transformer layer: the norms follow the residual sums."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        dim = config.hidden_size
        dims = (dim, config.intermediate_size, dim)
        options = {"dtype": jnp.float32, "rngs": rngs}
        self.attention = Attention(dim, config.num_attention_heads, **options)
        self.norm1 = _layer_norm(config, rngs)
        self.mlp = MLP(dims, activation=config.hidden_act, **options)
        self.norm2 = _layer_norm(config, rngs)

    def __call__(self, x: Float[Array, "b t e"], mask: Bool[Array, "b t"]) -> Float[Array, "b t e"]:
        x = self.norm1(x + self.attention(x, x, x, mask))
        return self.norm2(x + self.mlp(x))


class BertEncoder(TextEncoder):
    """BERT and RoBERTa (transformers, models/bert, roberta)."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        """`config`: that of `transformers`."""
        dim, depth = config.hidden_size, config.num_hidden_layers
        # RoBERTa's table of positions begins with rows that no token uses.
        self.first_position = 0 if config.model_type == "bert" else config.pad_token_id + 1
        self.sizes = TextSizes(
            vocab_size=config.vocab_size,
            dim=dim,
            depth=depth,
            max_tokens=config.max_position_embeddings - self.first_position,
            pool="mean",
        )
        self.words = nnx.Embed(config.vocab_size, dim, rngs=rngs)
        self.positions = nnx.Embed(config.max_position_embeddings, dim, rngs=rngs)
        self.token_types = nnx.Embed(config.type_vocab_size, dim, rngs=rngs)
        self.norm_before = _layer_norm(config, rngs)
        self.blocks = nnx.List([BertBlock(config, rngs=rngs) for _ in range(depth)])

    def hidden_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]
    ) -> list[Float[Array, "b t e"]]:
        # The tables may have 16 bits a number. Only the rows that are looked up become float32,
        # since a float32 copy of a whole table would take much memory.
        rows = self.first_position + jnp.arange(ids.shape[1])
        x = self.words.embedding[...][ids].astype(jnp.float32)
        x = x + self.positions.embedding[...][rows].astype(jnp.float32)
        x = x + self.token_types.embedding[0].astype(jnp.float32)

        states = [self.norm_before(x)]
        for block in self.blocks:
            states.append(block(states[-1], mask))
        return states


def _layer_norm(config: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # Residual sums have large means, so the variance must be the exact one.
    epsilon = config.layer_norm_eps
    return nnx.LayerNorm(config.hidden_size, epsilon=epsilon, use_fast_variance=False, rngs=rngs)


# Decoder-only models


class DecoderBlock(nnx.Module):
    """A pre-norm layer: RMS norms, causal attention with rotary positions and shared key heads, a
    gated MLP."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.heads = config.num_attention_heads
        self.head_dim = head_dim(config)
        self.activation = ACTIVATIONS[config.hidden_act]
        dim, mlp_dim, epsilon = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        query_dim = config.num_attention_heads * self.head_dim
        key_dim = config.num_key_value_heads * self.head_dim
        out_bias = getattr(config, "attention_bias", False)
        # Qwen2 has this bias whatever its configuration says.
        bias = out_bias or config.model_type == "qwen2"
        mlp_bias = getattr(config, "mlp_bias", False)

        self.norm1 = nnx.RMSNorm(dim, epsilon=epsilon, rngs=rngs)
        self.query = Linear(dim, query_dim, use_bias=bias, rngs=rngs)
        self.key = Linear(dim, key_dim, use_bias=bias, rngs=rngs)
        self.value = Linear(dim, key_dim, use_bias=bias, rngs=rngs)
        self.out = Linear(query_dim, dim, use_bias=out_bias, rngs=rngs)
        norm = partial(nnx.RMSNorm, self.head_dim, epsilon=epsilon, rngs=rngs)
        is_normed = config.model_type == "qwen3"
        self.query_norm = norm() if is_normed else None
        self.key_norm = norm() if is_normed else None

        self.norm2 = nnx.RMSNorm(dim, epsilon=epsilon, rngs=rngs)
        self.gate = Linear(dim, mlp_dim, use_bias=mlp_bias, rngs=rngs)
        self.up = Linear(dim, mlp_dim, use_bias=mlp_bias, rngs=rngs)
        self.down = Linear(mlp_dim, dim, use_bias=mlp_bias, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t e"],
        mask: Bool[Array, "b t"],
        bias: Float[Array, "t t"],
        angles: Float[Array, "t _f"],
    ) -> Float[Array, "b t e"]:
        """`bias` is added to attention scores, `angles` are those of rotary positions."""
        normed = self.norm1(x)
        query = self._place(self.query(normed), self.query_norm, angles)
        key = self._place(self.key(normed), self.key_norm, angles)
        value = self.value(normed)
        x = x + self.out(attend(query, key, value, heads=self.heads, mask=mask, bias=bias))

        normed = self.norm2(x)
        return x + self.down(self.activation(self.gate(normed)) * self.up(normed))

    def _place(
        self, x: Float[Array, "b t _d"], norm: nnx.RMSNorm | None, angles: Float[Array, "t _f"]
    ) -> Float[Array, "b t _d"]:
        """Norms and rotates each head of queries or keys."""
        of_heads = rearrange(x, "b t (h d) -> b t h d", d=self.head_dim)
        if norm is not None:
            of_heads = norm(of_heads)
        return rotate(of_heads, angles).reshape(x.shape)


def rotate(x: Float[Array, "b t h d"], angles: Float[Array, "t _f"]) -> Float[Array, "b t h d"]:
    """Turns queries or keys by their positions: channel i of the first half and of the second
    rotate together by the angle of frequency i."""
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class DecoderEncoder(TextEncoder):
    """Llama, Qwen2 and Qwen3 (transformers, models/llama, qwen2, qwen3)."""

    # Residual sums grow with depth, beyond what float16 holds.
    is_scaled = True

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        """`config`: that of `transformers`."""
        dim, depth = config.hidden_size, config.num_hidden_layers
        # Beyond a sliding window attention would be another one, so longer sentences are not read.
        window = getattr(config, "sliding_window", None) or config.max_position_embeddings
        self.sizes = TextSizes(
            vocab_size=config.vocab_size,
            dim=dim,
            depth=depth,
            max_tokens=min(window, config.max_position_embeddings),
            pool="last",
        )
        self.frequencies = rotary_frequencies(config.rope_parameters, head_dim(config))
        self.words = nnx.Embed(config.vocab_size, dim, rngs=rngs)
        self.blocks = nnx.List([DecoderBlock(config, rngs=rngs) for _ in range(depth)])
        self.norm_after = nnx.RMSNorm(dim, epsilon=config.rms_norm_eps, rngs=rngs)

    def hidden_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]
    ) -> list[Float[Array, "b t e"]]:
        tokens = jnp.arange(ids.shape[1])
        causal_bias = jnp.where(tokens[:, None] >= tokens, 0.0, MASKED)
        angles = tokens[:, None] * jnp.array(self.frequencies)
        states = [self.words.embedding[...][ids].astype(jnp.float32)]
        for block in self.blocks:
            states.append(block(states[-1], mask, causal_bias, angles))
        states[-1] = self.norm_after(states[-1])
        return states


def head_dim(config: Any) -> int:
    """Returns the channels of an attention head."""
    stated = getattr(config, "head_dim", None)
    return stated or config.hidden_size // config.num_attention_heads


def rotary_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Returns the radians a token that each pair of channels rotates by: plain, linearly scaled, or
    scaled as in Llama 3.1 (transformers, modeling_rope_utils.py). Raises InputError for another
    scaling."""
    kind = rope.get("rope_type", "default")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    plain = (1.0 / rope["rope_theta"] ** exponents).astype(np.float32)
    if kind == "default":
        frequencies = plain
    elif kind == "linear":
        frequencies = plain / np.float32(rope["factor"])
    elif kind == "llama3":
        # Long wavelengths are stretched by `factor`, short ones stay, those between are mixed.
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        mixed = (1 - share) * plain / rope["factor"] + share * plain
        frequencies = mixed.astype(np.float32)
    else:
        raise InputError(
            f"rotary scaling {kind!r} cannot be loaded; default, linear and llama3 can"
        )
    return tuple(float(frequency) for frequency in frequencies)


# Published models

ENCODERS: dict[str, Callable[..., TextEncoder]] = {
    "bert": BertEncoder,
    "roberta": BertEncoder,
    "xlm-roberta": BertEncoder,
    "llama": DecoderEncoder,
    "qwen2": DecoderEncoder,
    "qwen3": DecoderEncoder,
}
"""By the `model_type` of a config.json."""


def abstract_text_encoder(folder: Path) -> TextEncoder:
    """Returns the structure and shapes of a Hugging Face folder's language model, by its
    `config.json`. Raises InputError as `read_model_config`, or for another architecture, activation
    or scaling of rotary positions."""
    config = read_model_config(folder)
    if config.model_type not in ENCODERS:
        raise InputError(
            f"{folder}: model_type {config.model_type!r} is not a language model that can be "
            f"loaded; these are: {', '.join(ENCODERS)}"
        )
    if config.hidden_act not in ACTIVATIONS:
        raise InputError(
            f"{folder}: activation {config.hidden_act!r} is not known: {', '.join(ACTIVATIONS)}"
        )
    return build_abstract(partial(ENCODERS[config.model_type], config))


def load_text_encoder(folder: Path, tensors: Mapping[str, Tensor] | None = None) -> TextEncoder:
    """Reads the language model of a Hugging Face folder, with weights in the type that the file
    has.

    `tensors`: the weights, if they were read already or are traced. Raises InputError as
    `abstract_text_encoder`; or the weights are missing or damaged, or any key or shape does not fit
    (all of them are listed).
    """
    encoder = abstract_text_encoder(folder)
    graphdef, state = nnx.split(encoder)
    if tensors is None:
        tensors = read_tensors(folder)
    table = BERT if isinstance(encoder, BertEncoder) else DECODER_ONLY
    report = match_weights(tensors, state, table, folder)
    return nnx.merge(graphdef, put_weights(state, report.values, keep_types=True))
