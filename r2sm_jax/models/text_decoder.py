"""Decoder-only models as frozen language models: Llama, SmolLM, Qwen2, Qwen3.

Layout and numerics follow `transformers` (models/llama/modeling_llama.py, models/qwen3/modeling_qwen3.py,
modeling_rope_utils.py): RMSNorm before attention and gated MLP, rotary positions, fewer key than query heads, causal
mask. As there, the last hidden state is the one after the final norm. The output layer is not read, so tied or not it
makes no difference.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from r2sm_jax.errors import InputError
from r2sm_jax.models.layers import Linear, attend
from r2sm_jax.models.text_encoder import TextEncoder, causal_bias

_LAYER = r"layers\.(\d+)\."


class DecoderLayer(nnx.Module):
    """One pre-norm layer with rotary positions and a gated MLP."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.rms_norm_eps
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        size = head_dim(config)
        # Qwen2 has biases on query, key and value whatever its config says; Llama and Qwen3 on all or none.
        bias = getattr(config, "attention_bias", False)
        input_bias = bias or config.model_type == "qwen2"
        mlp_bias = getattr(config, "mlp_bias", False)
        self.norm1 = nnx.RMSNorm(d, epsilon=eps, rngs=rngs)
        self.query = Linear(d, self.heads * size, use_bias=input_bias, rngs=rngs)
        self.key = Linear(d, self.key_heads * size, use_bias=input_bias, rngs=rngs)
        self.value = Linear(d, self.key_heads * size, use_bias=input_bias, rngs=rngs)
        self.out = Linear(self.heads * size, d, use_bias=bias, rngs=rngs)
        normed = config.model_type == "qwen3"
        self.query_norm = nnx.RMSNorm(size, epsilon=eps, rngs=rngs) if normed else None
        self.key_norm = nnx.RMSNorm(size, epsilon=eps, rngs=rngs) if normed else None
        self.norm2 = nnx.RMSNorm(d, epsilon=eps, rngs=rngs)
        self.gate = Linear(d, config.intermediate_size, use_bias=mlp_bias, rngs=rngs)
        self.up = Linear(d, config.intermediate_size, use_bias=mlp_bias, rngs=rngs)
        self.down = Linear(config.intermediate_size, d, use_bias=mlp_bias, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t e"],
        mask: Bool[Array, "b t"],
        bias: Float[Array, "t t"],
        angles: Float[Array, "t _f"],
    ) -> Float[Array, "b t e"]:
        y = self.norm1(x)
        query = rearrange(self.query(y), "b t (h d) -> b t h d", h=self.heads)
        key = rearrange(self.key(y), "b t (h d) -> b t h d", h=self.key_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        groups = self.heads // self.key_heads
        query = rearrange(rotate(query, angles), "b t h d -> b t (h d)")
        key = repeat(rotate(key, angles), "b t h d -> b t (h g d)", g=groups)
        value = repeat(self.value(y), "b t (h d) -> b t (h g d)", h=self.key_heads, g=groups)
        x = x + self.out(attend(query, key, value, heads=self.heads, mask=mask, bias=bias))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class DecoderEncoder(TextEncoder):
    """A decoder-only model without its output layer."""

    KEYS = (
        (r"embed_tokens\.weight", r"words.embedding"),
        (_LAYER + r"input_layernorm\.weight", r"blocks.\1.norm1.weight"),
        (_LAYER + r"post_attention_layernorm\.weight", r"blocks.\1.norm2.weight"),
        (_LAYER + r"self_attn\.q_proj\.(weight|bias)", r"blocks.\1.query.\2"),
        (_LAYER + r"self_attn\.k_proj\.(weight|bias)", r"blocks.\1.key.\2"),
        (_LAYER + r"self_attn\.v_proj\.(weight|bias)", r"blocks.\1.value.\2"),
        (_LAYER + r"self_attn\.o_proj\.(weight|bias)", r"blocks.\1.out.\2"),
        (_LAYER + r"self_attn\.q_norm\.weight", r"blocks.\1.query_norm.weight"),
        (_LAYER + r"self_attn\.k_norm\.weight", r"blocks.\1.key_norm.weight"),
        (_LAYER + r"mlp\.(gate|up|down)_proj\.(weight|bias)", r"blocks.\1.\2.\3"),
        (r"norm\.weight", r"norm.weight"),
    )
    PREFIX = r"model\."
    UNUSED = r"lm_head\.weight|.*rotary_emb\.inv_freq"
    POOL = "last"
    PRE_NORM = True

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        # Beyond a sliding window, where there is one, attention would be another.
        window = getattr(config, "sliding_window", None) or config.max_position_embeddings
        super().__init__(config, min(window, config.max_position_embeddings), rngs=rngs)
        self.frequencies = tuple(map(float, rotary_frequencies(config)))
        self.blocks = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(self.depth)])
        self.norm = nnx.RMSNorm(self.dim, epsilon=config.rms_norm_eps, rngs=rngs)

    def hidden_states(self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]) -> list[Float[Array, "b t e"]]:
        tokens = ids.shape[1]
        angles = jnp.arange(tokens)[:, None] * jnp.array(self.frequencies, jnp.float32)
        states = [self.embed(ids)]
        for block in self.blocks:
            states.append(block(states[-1], mask, causal_bias(tokens), angles))
        return [*states[:-1], self.norm(states[-1])]


def head_dim(config: Any) -> int:
    """Channels a head, which need not be the width divided by the heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotate(x: Float[Array, "b t h d"], angles: Float[Array, "t _f"]) -> Float[Array, "b t h d"]:
    """Rotary positions: channel i of the first half and of the second turn together by the angle of frequency i."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotary_frequencies(config: Any) -> Float32[np.ndarray, "_f"]:
    """Radians a token of each pair of channels; plain, linearly scaled, or scaled as in Llama 3.1.

    Raises:
        InputError: another scaling.
    """
    rope = config.rope_parameters
    size, kind = head_dim(config), rope.get("rope_type", "default")
    plain = (1.0 / rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float32) / size)).astype(np.float32)
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / np.float32(rope["factor"])
    if kind != "llama3":
        raise InputError(f"rotary scaling {kind!r} cannot be loaded; default, linear and llama3 can")
    # Long wavelengths are stretched by `factor`, short ones left, those between mixed.
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - share) * plain / rope["factor"] + share * plain).astype(np.float32)
