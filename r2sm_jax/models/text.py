"""Frozen language models: one transformer that loads BERT, CLIP and decoder-only models from their folders.

`TextSizes` says in what the three layouts differ. Numerics follow `transformers`:
    BERT, MiniLM, RoBERTa, XLM-RoBERTa (models/bert, roberta): post-norm blocks, learned positions;
    text towers of CLIP and SigLIP (models/clip, siglip): pre-norm blocks, learned positions; CLIP is causal;
    Llama, SmolLM, Qwen2, Qwen3 (models/llama, qwen3, modeling_rope_utils.py): RMSNorm before attention and gated MLP,
        rotary positions, fewer key than query heads, causal.
Hidden states are counted as there: 0 is the embeddings. The output layer is never read.
"""

import math
from collections.abc import Callable, Mapping
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
from r2sm_jax.models.weights import Tensor, fill, key_table, read_published_config, read_tensors


@dataclass(frozen=True)
class TextSizes:
    """Sizes and switches of a language model, from its published configuration."""

    keys: str
    """Table of keys.toml."""
    vocab_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    max_tokens: int
    """The longest sentence that it reads."""
    activation: str
    epsilon: float
    """Of all norms."""
    pool: Literal["mean", "last"]
    """Token states that make one vector: a causal model knows the whole sentence only at its last token."""
    positions: int = 0
    """Rows of the learned position table; 0 = rotary positions."""
    first_position: int = 0
    """Row of the first token: RoBERTa's positions start behind its padding id."""
    token_types: int = 0
    post_norm: bool = False
    """Norms after each residual sum, not before; otherwise hidden states are raw sums, whose size grows with depth."""
    causal: bool = True
    reads_padding: bool = False
    """SigLIP was trained on sentences padded to `max_tokens` and attends to the padding."""
    rms_norm: bool = False
    gated: bool = False
    """The MLP multiplies with a gate."""
    final_norm: bool = False
    key_heads: int = 0
    """Heads of keys and values; 0 = as many as `heads`."""
    head_dim: int = 0
    """0 = `dim / heads`."""
    normed_heads: bool = False
    """Queries and keys of each head have norms (Qwen3)."""
    input_bias: bool = True
    """Of query, key and value."""
    out_bias: bool = True
    mlp_bias: bool = True
    frequencies: tuple[float, ...] = ()
    """Radians a token that each pair of channels rotates by."""


def bert_sizes(config: Any) -> TextSizes:
    """BERT, RoBERTa and XLM-RoBERTa."""
    first = 0 if config.model_type == "bert" else config.pad_token_id + 1
    rows = config.max_position_embeddings
    return TextSizes(
        "bert", **_common_sizes(config), max_tokens=rows - first, epsilon=config.layer_norm_eps, pool="mean",
        positions=rows, first_position=first, token_types=config.type_vocab_size, post_norm=True, causal=False,
    )  # fmt: skip


def clip_sizes(config: Any) -> TextSizes:
    """The text towers of CLIP and SigLIP."""
    causal, rows = config.model_type == "clip_text_model", config.max_position_embeddings
    return TextSizes(
        "clip_text", **_common_sizes(config), max_tokens=rows, epsilon=config.layer_norm_eps, pool="last",
        positions=rows, causal=causal, reads_padding=not causal,
    )  # fmt: skip


def decoder_sizes(config: Any) -> TextSizes:
    """Llama, Qwen2 and Qwen3.

    Raises:
        InputError: another scaling of rotary positions.
    """
    # Beyond a sliding window attention would be another one, so longer sentences are not read.
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    bias, mlp_bias = getattr(config, "attention_bias", False), getattr(config, "mlp_bias", False)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return TextSizes(
        "llama", **_common_sizes(config), max_tokens=min(window, config.max_position_embeddings),
        epsilon=config.rms_norm_eps, pool="last", rms_norm=True, gated=True, final_norm=True,
        key_heads=config.num_key_value_heads, head_dim=head_dim, normed_heads=config.model_type == "qwen3",
        input_bias=bias or config.model_type == "qwen2",  # Qwen2 has it whatever its configuration says
        out_bias=bias, mlp_bias=mlp_bias, frequencies=_rotary_frequencies(config.rope_parameters, head_dim),
    )  # fmt: skip


def _common_sizes(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size, "dim": config.hidden_size, "depth": config.num_hidden_layers,
        "heads": config.num_attention_heads, "mlp_dim": config.intermediate_size, "activation": config.hidden_act,
    }  # fmt: skip


def _rotary_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Plain, linearly scaled, or scaled as in Llama 3.1."""
    kind = rope.get("rope_type", "default")
    plain = (1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    if kind == "default":
        scaled = plain
    elif kind == "linear":
        scaled = plain / np.float32(rope["factor"])
    elif kind == "llama3":  # long wavelengths are stretched by `factor`, short ones kept, those between mixed
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        scaled = ((1 - share) * plain / rope["factor"] + share * plain).astype(np.float32)
    else:
        raise InputError(f"rotary scaling {kind!r} cannot be loaded; default, linear and llama3 can")
    return tuple(map(float, scaled))


LAYOUTS: dict[str, Callable[[Any], TextSizes]] = {
    "bert": bert_sizes, "roberta": bert_sizes, "xlm-roberta": bert_sizes, "clip": clip_sizes,
    "clip_text_model": clip_sizes, "siglip": clip_sizes, "siglip_text_model": clip_sizes, "llama": decoder_sizes,
    "qwen2": decoder_sizes, "qwen3": decoder_sizes,
}  # fmt: skip
"""By `model_type`."""


def _norm(sizes: TextSizes, dim: int, rngs: nnx.Rngs) -> nnx.Module:
    if sizes.rms_norm:
        return nnx.RMSNorm(dim, epsilon=sizes.epsilon, rngs=rngs)
    # Residual sums have large means, so the variance must be the exact one.
    return nnx.LayerNorm(dim, epsilon=sizes.epsilon, use_fast_variance=False, rngs=rngs)


class TextBlock(nnx.Module):
    """One transformer layer of any of the layouts."""

    def __init__(self, sizes: TextSizes, *, rngs: nnx.Rngs):
        self.sizes = sizes
        self.key_heads = sizes.key_heads or sizes.heads
        head_dim = sizes.head_dim or sizes.dim // sizes.heads
        inner, key_inner = sizes.heads * head_dim, self.key_heads * head_dim
        self.norm1 = _norm(sizes, sizes.dim, rngs)
        self.query = Linear(sizes.dim, inner, use_bias=sizes.input_bias, rngs=rngs)
        self.key = Linear(sizes.dim, key_inner, use_bias=sizes.input_bias, rngs=rngs)
        self.value = Linear(sizes.dim, key_inner, use_bias=sizes.input_bias, rngs=rngs)
        self.out = Linear(inner, sizes.dim, use_bias=sizes.out_bias, rngs=rngs)
        self.query_norm = _norm(sizes, head_dim, rngs) if sizes.normed_heads else None
        self.key_norm = _norm(sizes, head_dim, rngs) if sizes.normed_heads else None
        self.norm2 = _norm(sizes, sizes.dim, rngs)
        self.gate = Linear(sizes.dim, sizes.mlp_dim, use_bias=sizes.mlp_bias, rngs=rngs) if sizes.gated else None
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
        key = rearrange(self.key(x), "b t (h d) -> b t h d", h=self.key_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        groups = self.sizes.heads // self.key_heads
        query = rearrange(query, "b t h d -> b t (h d)")
        key = repeat(key, "b t h d -> b t (h g d)", g=groups)
        value = repeat(self.value(x), "b t (h d) -> b t (h g d)", h=self.key_heads, g=groups)
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
        self.positions = nnx.Embed(sizes.positions, sizes.dim, rngs=rngs) if sizes.positions else None
        self.token_types = nnx.Embed(sizes.token_types, sizes.dim, rngs=rngs) if sizes.token_types else None
        self.norm_before = _norm(sizes, sizes.dim, rngs) if sizes.post_norm else None
        self.blocks = nnx.List([TextBlock(sizes, rngs=rngs) for _ in range(sizes.depth)])
        self.norm_after = _norm(sizes, sizes.dim, rngs) if sizes.final_norm else None

    def __call__(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float[Array, "b t l e"]:
        """Token states after each of `layers` (0 = the embeddings).

        `mask` is True on real tokens, which come first; states of padding tokens are meaningless.
        """
        states = [self._embed(ids)]
        tokens = jnp.arange(ids.shape[1])
        bias = jnp.where(tokens[:, None] >= tokens, 0.0, -1e9) if self.sizes.causal else None
        angles = tokens[:, None] * jnp.array(self.sizes.frequencies) if self.sizes.frequencies else None
        for block in self.blocks:
            states.append(block(states[-1], mask, bias, angles))
        if self.norm_after is not None:
            states[-1] = self.norm_after(states[-1])
        return jnp.stack([states[layer] for layer in layers], axis=2)

    def _embed(self, ids: Int[Array, "b t"]) -> Float[Array, "b t e"]:
        """In float32; the tables themselves are never widened."""
        x = self.words.embedding[...][ids].astype(jnp.float32)
        if self.positions is not None:
            rows = self.sizes.first_position + jnp.arange(ids.shape[1])
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
    """The structure and shapes of a Hugging Face folder's language model, by its `config.json`.

    Raises:
        InputError: the file is missing or unreadable, or the architecture is another one.
    """
    config, path = read_published_config(folder), folder / "config.json"
    name = config.model_type
    if name not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise InputError(f"{path}: model_type {name!r} is not a language model that can be loaded; these are: {known}")
    try:
        sizes = LAYOUTS[name](getattr(config, "text_config", config))
        if sizes.activation not in ACTIVATIONS:
            raise InputError(f"activation {sizes.activation!r} is not known: {', '.join(ACTIVATIONS)}")
        return nnx.eval_shape(lambda: TextEncoder(sizes, rngs=nnx.Rngs(0)))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # whatever strange values raise
        line = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"{path}: not a readable configuration of {name} ({type(error).__name__}: {line})") from None


def load_text_encoder(folder: Path, tensors: Mapping[str, Tensor] | None = None) -> TextEncoder:
    """The language model of a Hugging Face folder, with weights in the type that the file has.

    `tensors`: the weights, if they were read already or are traced.

    Raises:
        InputError: as `abstract_text_encoder`; or the weights are missing or damaged, or any key or shape does not fit
            (all of them are listed).
    """
    encoder = abstract_text_encoder(folder)
    graphdef, state = nnx.split(encoder)
    tensors = read_tensors(folder) if tensors is None else tensors
    filled = fill(state, tensors, key_table(encoder.sizes.keys), source=folder, keep_types=True)
    return nnx.merge(graphdef, filled)
