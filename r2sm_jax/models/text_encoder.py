"""Frozen language models: BERT, and decoder-only ones such as Llama and Qwen, loaded from their
Hugging Face folders.

Numerics follow `transformers`, and hidden states are counted as there: 0 is the embeddings. The
output layer is never read. Weights stay in the type that the file has (bfloat16, float16 or
float32). Everything is computed in float32: each kernel is widened where it is used.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from flax import nnx
from jaxtyping import Array, Bool, Float, Float16, Int

from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import read_model_config, read_tensors
from r2sm_jax.models.keys_text import BERT, DECODER_ONLY
from r2sm_jax.models.layers import ACTIVATIONS, Linear, attend
from r2sm_jax.models.matching import Tensor, fill_state

BERT_TYPES = ("bert", "roberta", "xlm-roberta")
DECODER_TYPES = ("llama", "qwen2", "qwen3")
"""By the `model_type` of a config.json."""
MASKED = -1e9
"""Added to attention scores of tokens that must not be seen."""


@dataclass(frozen=True)
class BertSizes:
    """Sizes of a BERT or RoBERTa (transformers, models/bert, roberta)."""

    vocab_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    num_positions: int
    """Rows of the position table, of which the last `max_tokens` are used."""
    max_tokens: int
    """The longest sentence that it reads."""
    token_types: int
    activation: str
    epsilon: float
    """Of all norms."""
    pool: Literal["mean", "last"] = "mean"
    """Token states that make one vector."""


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder-only model (transformers, models/llama, qwen2, qwen3)."""

    vocab_size: int
    dim: int
    depth: int
    heads: int
    key_heads: int
    """Heads of keys and values."""
    head_dim: int
    mlp_dim: int
    max_tokens: int
    activation: str
    epsilon: float
    query_key_norms: bool
    """Queries and keys of each head have norms (Qwen3)."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    frequencies: tuple[float, ...]
    """Radians a token that each pair of channels rotates by."""
    pool: Literal["mean", "last"] = "last"
    """Only the last token knows the whole sentence."""


TextSizes = BertSizes | DecoderSizes


class TextEncoder(nnx.Module):
    """Token ids -> token states. All parameters are frozen: nothing trains them, no optimizer sees
    them."""

    sizes: TextSizes

    def hidden_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]
    ) -> list[Float[Array, "b t e"]]:
        """The embeddings and the token states after every block. `mask` is True on real tokens,
        which come first; states of padding are meaningless."""
        raise NotImplementedError  # each layout has its own

    def __call__(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float[Array, "b t l e"]:
        """Token states after each of `layers` (0 = the embeddings)."""
        states = self.hidden_states(ids, mask)
        return jnp.stack([states[layer] for layer in layers], axis=2)

    def float16_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float16[Array, "b t l e"]:
        """Token states as the segmenter reads them and caches store them."""
        return self(ids, mask, layers).astype(jnp.float16)


# BERT


class BertBlock(nnx.Module):
    """A post-norm transformer layer: the norms follow the residual sums."""

    def __init__(self, sizes: BertSizes, *, rngs: nnx.Rngs):
        self.heads = sizes.heads
        self.activation = sizes.activation
        dim = sizes.dim
        self.query = Linear(dim, dim, rngs=rngs)
        self.key = Linear(dim, dim, rngs=rngs)
        self.value = Linear(dim, dim, rngs=rngs)
        self.out = Linear(dim, dim, rngs=rngs)
        self.norm1 = _layer_norm(dim, sizes.epsilon, rngs)
        self.up = Linear(dim, sizes.mlp_dim, rngs=rngs)
        self.down = Linear(sizes.mlp_dim, dim, rngs=rngs)
        self.norm2 = _layer_norm(dim, sizes.epsilon, rngs)

    def __call__(self, x: Float[Array, "b t e"], mask: Bool[Array, "b t"]) -> Float[Array, "b t e"]:
        query, key, value = self.query(x), self.key(x), self.value(x)
        attended = attend(query, key, value, heads=self.heads, mask=mask)
        x = self.norm1(x + self.out(attended))
        hidden = ACTIVATIONS[self.activation](self.up(x))
        return self.norm2(x + self.down(hidden))


class BertEncoder(TextEncoder):
    """BERT and RoBERTa."""

    sizes: BertSizes

    def __init__(self, sizes: BertSizes, *, rngs: nnx.Rngs):
        self.sizes = sizes
        self.words = nnx.Embed(sizes.vocab_size, sizes.dim, rngs=rngs)
        self.positions = nnx.Embed(sizes.num_positions, sizes.dim, rngs=rngs)
        self.token_types = (
            nnx.Embed(sizes.token_types, sizes.dim, rngs=rngs) if sizes.token_types else None
        )
        self.norm_before = _layer_norm(sizes.dim, sizes.epsilon, rngs)
        self.blocks = nnx.List([BertBlock(sizes, rngs=rngs) for _ in range(sizes.depth)])

    def hidden_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]
    ) -> list[Float[Array, "b t e"]]:
        # The tables may have 16 bits a number. Only the rows that are looked up become float32,
        # since a float32 copy of a whole table would take much memory. RoBERTa's table of positions
        # begins with rows that no token uses.
        first = self.sizes.num_positions - self.sizes.max_tokens
        rows = first + jnp.arange(ids.shape[1])
        x = self.words.embedding[...][ids].astype(jnp.float32)
        x = x + self.positions.embedding[...][rows].astype(jnp.float32)
        if self.token_types is not None:
            x = x + self.token_types.embedding[0].astype(jnp.float32)

        states = [self.norm_before(x)]
        for block in self.blocks:
            states.append(block(states[-1], mask))
        return states


def _layer_norm(dim: int, epsilon: float, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # Residual sums have large means, so the variance must be the exact one.
    return nnx.LayerNorm(dim, epsilon=epsilon, use_fast_variance=False, rngs=rngs)


# Decoder-only models


class DecoderBlock(nnx.Module):
    """A pre-norm layer: RMS norms, causal attention with rotary positions and shared key heads, a
    gated MLP."""

    def __init__(self, sizes: DecoderSizes, *, rngs: nnx.Rngs):
        self.heads = sizes.heads
        self.key_heads = sizes.key_heads
        self.activation = sizes.activation
        dim = sizes.dim
        query_dim = sizes.heads * sizes.head_dim
        key_dim = sizes.key_heads * sizes.head_dim

        self.norm1 = nnx.RMSNorm(dim, epsilon=sizes.epsilon, rngs=rngs)
        self.query = Linear(dim, query_dim, use_bias=sizes.qkv_bias, rngs=rngs)
        self.key = Linear(dim, key_dim, use_bias=sizes.qkv_bias, rngs=rngs)
        self.value = Linear(dim, key_dim, use_bias=sizes.qkv_bias, rngs=rngs)
        self.out = Linear(query_dim, dim, use_bias=sizes.out_bias, rngs=rngs)
        if sizes.query_key_norms:
            self.query_norm = nnx.RMSNorm(sizes.head_dim, epsilon=sizes.epsilon, rngs=rngs)
            self.key_norm = nnx.RMSNorm(sizes.head_dim, epsilon=sizes.epsilon, rngs=rngs)
        else:
            self.query_norm = None
            self.key_norm = None

        self.norm2 = nnx.RMSNorm(dim, epsilon=sizes.epsilon, rngs=rngs)
        self.gate = Linear(dim, sizes.mlp_dim, use_bias=sizes.mlp_bias, rngs=rngs)
        self.up = Linear(dim, sizes.mlp_dim, use_bias=sizes.mlp_bias, rngs=rngs)
        self.down = Linear(sizes.mlp_dim, dim, use_bias=sizes.mlp_bias, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t e"],
        mask: Bool[Array, "b t"],
        bias: Float[Array, "t t"],
        angles: Float[Array, "t _f"],
    ) -> Float[Array, "b t e"]:
        """`bias` is added to attention scores, `angles` are those of rotary positions."""
        x = x + self._attention(self.norm1(x), mask, bias, angles)
        normed = self.norm2(x)
        gate = ACTIVATIONS[self.activation](self.gate(normed))
        return x + self.down(gate * self.up(normed))

    def _attention(self, x: Array, mask: Array, bias: Array, angles: Array) -> Array:
        query = rearrange(self.query(x), "b t (h d) -> b t h d", h=self.heads)
        key = rearrange(self.key(x), "b t (h d) -> b t h d", h=self.key_heads)
        value = rearrange(self.value(x), "b t (h d) -> b t h d", h=self.key_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query = self.query_norm(query)
            key = self.key_norm(key)
        query = rotate(query, angles)
        key = rotate(key, angles)

        # Several query heads share one head of keys and values.
        groups = self.heads // self.key_heads
        query = rearrange(query, "b t h d -> b t (h d)")
        key = repeat(key, "b t h d -> b t (h g d)", g=groups)
        value = repeat(value, "b t h d -> b t (h g d)", g=groups)
        return self.out(attend(query, key, value, heads=self.heads, mask=mask, bias=bias))


def rotate(x: Float[Array, "b t h d"], angles: Float[Array, "t _f"]) -> Float[Array, "b t h d"]:
    """Rotary positions: channel i of the first half and of the second rotate together by the angle
    of frequency i."""
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class DecoderEncoder(TextEncoder):
    """Llama, Qwen2 and Qwen3."""

    sizes: DecoderSizes

    def __init__(self, sizes: DecoderSizes, *, rngs: nnx.Rngs):
        self.sizes = sizes
        self.words = nnx.Embed(sizes.vocab_size, sizes.dim, rngs=rngs)
        self.blocks = nnx.List([DecoderBlock(sizes, rngs=rngs) for _ in range(sizes.depth)])
        self.norm_after = nnx.RMSNorm(sizes.dim, epsilon=sizes.epsilon, rngs=rngs)

    def hidden_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]
    ) -> list[Float[Array, "b t e"]]:
        tokens = jnp.arange(ids.shape[1])
        causal_bias = jnp.where(tokens[:, None] >= tokens, 0.0, MASKED)
        angles = tokens[:, None] * jnp.array(self.sizes.frequencies)
        states = [self.words.embedding[...][ids].astype(jnp.float32)]
        for block in self.blocks:
            states.append(block(states[-1], mask, causal_bias, angles))
        states[-1] = self.norm_after(states[-1])
        return states

    def float16_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float16[Array, "b t l e"]:
        # Residual sums grow with depth, beyond what float16 holds, so each token state is divided
        # by its root mean square.
        states = self(ids, mask, layers)
        mean_square = jnp.square(states).mean(-1, keepdims=True)
        return (states * jax.lax.rsqrt(mean_square + 1e-12)).astype(jnp.float16)


# Published models


def text_sizes(config: Any) -> BertSizes | DecoderSizes:
    """The sizes of a configuration of `transformers`. Raises InputError for another architecture,
    activation or scaling of rotary positions."""
    if config.model_type not in BERT_TYPES + DECODER_TYPES:
        raise InputError(
            f"model_type {config.model_type!r} is not a language model that can be loaded; these "
            "are: "
            f"{', '.join(BERT_TYPES + DECODER_TYPES)}"
        )
    if config.hidden_act not in ACTIVATIONS:
        raise InputError(f"activation {config.hidden_act!r} is not known: {', '.join(ACTIVATIONS)}")
    if config.model_type in BERT_TYPES:
        return bert_sizes(config)
    return decoder_sizes(config)


def bert_sizes(config: Any) -> BertSizes:
    """The sizes of a BERT or RoBERTa."""
    # RoBERTa's positions start behind its padding id.
    first = 0 if config.model_type == "bert" else config.pad_token_id + 1
    return BertSizes(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=config.num_attention_heads,
        mlp_dim=config.intermediate_size,
        num_positions=config.max_position_embeddings,
        max_tokens=config.max_position_embeddings - first,
        token_types=config.type_vocab_size,
        activation=config.hidden_act,
        epsilon=config.layer_norm_eps,
    )


def decoder_sizes(config: Any) -> DecoderSizes:
    """The sizes of a decoder-only model."""
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    # Beyond a sliding window attention would be another one, so longer sentences are not read.
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    attention_bias = getattr(config, "attention_bias", False)
    return DecoderSizes(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=head_dim,
        mlp_dim=config.intermediate_size,
        max_tokens=min(window, config.max_position_embeddings),
        activation=config.hidden_act,
        epsilon=config.rms_norm_eps,
        query_key_norms=config.model_type == "qwen3",
        # Qwen2 has this bias whatever its configuration says.
        qkv_bias=attention_bias or config.model_type == "qwen2",
        out_bias=attention_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        frequencies=rotary_frequencies(config.rope_parameters, head_dim),
    )


def rotary_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Plain, linearly scaled, or scaled as in Llama 3.1 (transformers, modeling_rope_utils.py)."""
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


def abstract_text_encoder(folder: Path) -> TextEncoder:
    """The structure and shapes of a Hugging Face folder's language model, by its `config.json`.
    Raises InputError if the file is missing or unreadable, or the architecture is another one."""

    def build(config: Any) -> TextEncoder:
        sizes = text_sizes(config)
        if isinstance(sizes, BertSizes):
            return nnx.eval_shape(lambda: BertEncoder(sizes, rngs=nnx.Rngs(0)))
        return nnx.eval_shape(lambda: DecoderEncoder(sizes, rngs=nnx.Rngs(0)))

    return read_model_config(folder, build)


def load_text_encoder(folder: Path, tensors: Mapping[str, Tensor] | None = None) -> TextEncoder:
    """The language model of a Hugging Face folder, with weights in the type that the file has.

    `tensors`: the weights, if they were read already or are traced. Raises InputError as
    `abstract_text_encoder`; or the weights are missing or damaged, or any key or shape does not fit
    (all of them are listed).
    """
    encoder = abstract_text_encoder(folder)
    graphdef, state = nnx.split(encoder)
    if tensors is None:
        tensors = read_tensors(folder)
    table = BERT if isinstance(encoder, BertEncoder) else DECODER_ONLY
    state = fill_state(state, tensors, table, source=folder, keep_types=True)
    return nnx.merge(graphdef, state)
