"""Frozen language models: one transformer that loads BERT, CLIP and decoder-only models from their folders.

Numerics follow `transformers`, and hidden states are counted as there: 0 is the embeddings. `TextSizes` says in what
the three layouts differ. The output layer is never read.
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
from r2sm_jax.models.layers import ACTIVATIONS, Linear, attend
from r2sm_jax.models.weights import (
    SIZES,
    Tensor,
    fill,
    key_table,
    read_published,
    read_tensors,
    sizes_of,
)

Layout = Literal["bert", "clip_text", "llama"]
"""Also a table of keys.toml.

    bert       post-norm blocks, learned positions (transformers, models/bert, roberta)
    clip_text  pre-norm blocks, learned positions; CLIP is causal, SigLIP is not (models/clip, siglip)
    llama      RMSNorm before attention and gated MLP, rotary positions, fewer key than query heads, causal
               (models/llama, qwen3, modeling_rope_utils.py)
"""
LAYOUTS: dict[str, Layout] = SIZES["layouts"]
"""By `model_type`."""


@dataclass(frozen=True)
class TextSizes:
    """Sizes and switches of a language model, from its published configuration."""

    layout: Layout
    vocab_size: int
    dim: int
    depth: int
    heads: int
    key_heads: int
    """Heads of keys and values."""
    head_dim: int
    mlp_dim: int
    max_tokens: int
    """The longest sentence that it reads."""
    activation: str
    epsilon: float
    """Of all norms."""
    positions: int = 0
    """Rows of the learned position table, of which the last `max_tokens` count; 0 = rotary positions."""
    token_types: int = 0
    causal: bool = False
    reads_padding: bool = False
    """SigLIP was trained on sentences padded to `max_tokens` and attends to the padding."""
    normed_heads: bool = False
    """Queries and keys of each head have norms (Qwen3)."""
    input_bias: bool = True
    """Of query, key and value."""
    out_bias: bool = True
    mlp_bias: bool = True
    frequencies: tuple[float, ...] = ()
    """Radians a token that each pair of channels rotates by."""

    @property
    def post_norm(self) -> bool:
        """Norms after each residual sum, not before; otherwise hidden states are raw sums, whose size grows with
        depth."""
        return self.layout == "bert"

    @property
    def pool(self) -> Literal["mean", "last"]:
        """Token states that make one vector. CLIP, SigLIP and causal models know the whole sentence at the last."""
        return "mean" if self.layout == "bert" else "last"


def text_sizes(config: Any) -> TextSizes:
    """The sizes of a configuration of `transformers`. Raises InputError for another architecture, activation or scaling
    of rotary positions."""
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise InputError(
            f"model_type {config.model_type!r} is not a language model that can be loaded; these are: "
            f"{', '.join(LAYOUTS)}"
        )
    config = getattr(config, "text_config", config)
    kind, rows = config.model_type, config.max_position_embeddings
    if config.hidden_act not in ACTIVATIONS:
        raise InputError(f"activation {config.hidden_act!r} is not known: {', '.join(ACTIVATIONS)}")
    sizes = sizes_of(config, "text") | {
        "head_dim": config.hidden_size // config.num_attention_heads
    }
    if layout == "llama":
        # Beyond a sliding window attention would be another one, so longer sentences are not read.
        window = getattr(config, "sliding_window", None) or rows
        bias, head_dim = getattr(config, "attention_bias", False), getattr(config, "head_dim", None)
        head_dim = head_dim or sizes["head_dim"]
        sizes |= {
            "max_tokens": min(window, rows),
            "epsilon": config.rms_norm_eps,
            "causal": True,
            "key_heads": config.num_key_value_heads,
            "head_dim": head_dim,
            "normed_heads": kind == "qwen3",
            "input_bias": bias or kind == "qwen2",  # Qwen2 has it whatever its configuration says
            "out_bias": bias,
            "mlp_bias": getattr(config, "mlp_bias", False),
            "frequencies": _rotary_frequencies(config.rope_parameters, head_dim),
        }
    else:
        sizes |= {"positions": rows, "epsilon": config.layer_norm_eps}
    if layout == "bert":  # RoBERTa's positions start behind its padding id
        first = 0 if kind == "bert" else config.pad_token_id + 1
        sizes |= {"max_tokens": rows - first, "token_types": config.type_vocab_size}
    if layout == "clip_text":
        causal = kind == "clip_text_model"
        sizes |= {"causal": causal, "reads_padding": not causal}
    return TextSizes(layout, **sizes)


def _rotary_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Plain, linearly scaled, or scaled as in Llama 3.1."""
    kind = rope.get("rope_type", "default")
    plain = (
        1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    ).astype(np.float32)
    if kind == "default":
        scaled = plain
    elif kind == "linear":
        scaled = plain / np.float32(rope["factor"])
    elif (
        kind == "llama3"
    ):  # long wavelengths are stretched by `factor`, short ones kept, those between mixed
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        scaled = ((1 - share) * plain / rope["factor"] + share * plain).astype(np.float32)
    else:
        raise InputError(
            f"rotary scaling {kind!r} cannot be loaded; default, linear and llama3 can"
        )
    return tuple(map(float, scaled))


def _norm(sizes: TextSizes, dim: int, rngs: nnx.Rngs) -> nnx.Module:
    if sizes.layout == "llama":
        return nnx.RMSNorm(dim, epsilon=sizes.epsilon, rngs=rngs)
    # Residual sums have large means, so the variance must be the exact one.
    return nnx.LayerNorm(dim, epsilon=sizes.epsilon, use_fast_variance=False, rngs=rngs)


class TextBlock(nnx.Module):
    """One transformer layer of any of the layouts."""

    def __init__(self, sizes: TextSizes, *, rngs: nnx.Rngs):
        self.sizes = sizes
        inner, key_inner = sizes.heads * sizes.head_dim, sizes.key_heads * sizes.head_dim
        gated, normed = sizes.layout == "llama", sizes.normed_heads
        self.norm1 = _norm(sizes, sizes.dim, rngs)
        self.query = Linear(sizes.dim, inner, use_bias=sizes.input_bias, rngs=rngs)
        self.key = Linear(sizes.dim, key_inner, use_bias=sizes.input_bias, rngs=rngs)
        self.value = Linear(sizes.dim, key_inner, use_bias=sizes.input_bias, rngs=rngs)
        self.out = Linear(inner, sizes.dim, use_bias=sizes.out_bias, rngs=rngs)
        self.query_norm = _norm(sizes, sizes.head_dim, rngs) if normed else None
        self.key_norm = _norm(sizes, sizes.head_dim, rngs) if normed else None
        self.norm2 = _norm(sizes, sizes.dim, rngs)
        self.gate = (
            Linear(sizes.dim, sizes.mlp_dim, use_bias=sizes.mlp_bias, rngs=rngs) if gated else None
        )
        self.up = Linear(sizes.dim, sizes.mlp_dim, use_bias=sizes.mlp_bias, rngs=rngs)
        self.down = Linear(sizes.mlp_dim, sizes.dim, use_bias=sizes.mlp_bias, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t e"],
        mask: Bool[Array, "b t"],
        bias: Float[Array, "t t"] | None,
        angles: Float[Array, "t _f"] | None,
    ) -> Float[Array, "b t e"]:
        """`mask` is False on padding, `bias` is added to attention scores, `angles` are those of rotary positions."""
        if self.sizes.post_norm:
            x = self.norm1(x + self._attention(x, mask, bias, angles))
            return self.norm2(x + self._mlp(x))
        x = x + self._attention(self.norm1(x), mask, bias, angles)
        return x + self._mlp(self.norm2(x))

    def _attention(self, x: Array, mask: Array, bias: Array | None, angles: Array | None) -> Array:
        query = rearrange(self.query(x), "b t (h d) -> b t h d", h=self.sizes.heads)
        key = rearrange(self.key(x), "b t (h d) -> b t h d", h=self.sizes.key_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        groups = self.sizes.heads // self.sizes.key_heads
        query = rearrange(query, "b t h d -> b t (h d)")
        key = repeat(key, "b t h d -> b t (h g d)", g=groups)
        value = repeat(self.value(x), "b t (h d) -> b t (h g d)", h=self.sizes.key_heads, g=groups)
        return self.out(attend(query, key, value, heads=self.sizes.heads, mask=mask, bias=bias))

    def _mlp(self, x: Array) -> Array:
        activate = ACTIVATIONS[self.sizes.activation]
        if self.gate is None:
            return self.down(activate(self.up(x)))
        return self.down(activate(self.gate(x)) * self.up(x))


def rotate(x: Float[Array, "b t h d"], angles: Float[Array, "t _f"]) -> Float[Array, "b t h d"]:
    """Rotary positions: channel i of the first half and of the second rotate together by the angle of frequency i."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class TextEncoder(nnx.Module):
    """Token ids -> token states. All parameters are frozen: nothing trains them, no optimizer sees them.

    Weights stay in the type that the file has (bfloat16, float16 or float32). Everything is computed in float32: each
    kernel is widened where it is used.
    """

    def __init__(self, sizes: TextSizes, *, rngs: nnx.Rngs):
        self.sizes = sizes
        self.words = nnx.Embed(sizes.vocab_size, sizes.dim, rngs=rngs)
        self.positions = (
            nnx.Embed(sizes.positions, sizes.dim, rngs=rngs) if sizes.positions else None
        )
        self.token_types = (
            nnx.Embed(sizes.token_types, sizes.dim, rngs=rngs) if sizes.token_types else None
        )
        self.norm_before = _norm(sizes, sizes.dim, rngs) if sizes.post_norm else None
        self.blocks = nnx.List([TextBlock(sizes, rngs=rngs) for _ in range(sizes.depth)])
        self.norm_after = _norm(sizes, sizes.dim, rngs) if sizes.layout == "llama" else None

    def __call__(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float[Array, "b t l e"]:
        """Token states after each of `layers` (0 = the embeddings).

        `mask` is True on real tokens, which come first; states of padding tokens are meaningless.
        """
        states = [self._embed(ids)]
        tokens = jnp.arange(ids.shape[1])
        bias = jnp.where(tokens[:, None] >= tokens, 0.0, -1e9) if self.sizes.causal else None
        angles = (
            tokens[:, None] * jnp.array(self.sizes.frequencies) if self.sizes.frequencies else None
        )
        for block in self.blocks:
            states.append(block(states[-1], mask, bias, angles))
        if self.norm_after is not None:
            states[-1] = self.norm_after(states[-1])
        return jnp.stack([states[layer] for layer in layers], axis=2)

    def _embed(self, ids: Int[Array, "b t"]) -> Float[Array, "b t e"]:
        """In float32; the tables themselves are never widened."""
        x = self.words.embedding[...][ids].astype(jnp.float32)
        if self.positions is not None:
            rows = self.sizes.positions - self.sizes.max_tokens + jnp.arange(ids.shape[1])
            x = x + self.positions.embedding[...][rows].astype(jnp.float32)
        if self.token_types is not None:
            x = x + self.token_types.embedding[0].astype(jnp.float32)
        return x if self.norm_before is None else self.norm_before(x)

    def kept_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float16[Array, "b t l e"]:
        """The states as the segmenter reads them: float16, and raw residual sums divided by their root mean square."""
        states = self(ids, mask, layers)
        if not self.sizes.post_norm:
            states = states * jax.lax.rsqrt(jnp.square(states).mean(-1, keepdims=True) + 1e-12)
        return states.astype(jnp.float16)


def abstract_text_encoder(folder: Path) -> TextEncoder:
    """The structure and shapes of a Hugging Face folder's language model, by its `config.json`. Raises InputError if
    the file is missing or unreadable, or the architecture is another one."""

    def encoder_of(config: Any) -> TextEncoder:
        sizes = text_sizes(config)
        return nnx.eval_shape(lambda: TextEncoder(sizes, rngs=nnx.Rngs(0)))

    return read_published(folder, encoder_of)


def load_text_encoder(folder: Path, tensors: Mapping[str, Tensor] | None = None) -> TextEncoder:
    """The language model of a Hugging Face folder, with weights in the type that the file has.

    `tensors`: the weights, if they were read already or are traced. Raises InputError as `abstract_text_encoder`; or
    the weights are missing or damaged, or any key or shape does not fit (all of them are listed).
    """
    encoder = abstract_text_encoder(folder)
    graphdef, state = nnx.split(encoder)
    tensors = read_tensors(folder) if tensors is None else tensors
    filled = fill(state, tensors, key_table(encoder.sizes.layout), source=folder, keep_types=True)
    return nnx.merge(graphdef, filled)
