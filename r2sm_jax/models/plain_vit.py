"""One plain ViT that loads DINOv2 (with or without registers), CLIP and SigLIP image encoders.

Layout and numerics follow `transformers` (models/dinov2, dinov2_with_registers, clip, siglip): pre-norm blocks with
global attention and one learned position table. The families differ in a few switches, see `PlainViTConfig`; each
has a key table and its own input normalisation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.config import Family, PlainViTConfig
from r2sm_jax.models.layers import MLP, attend
from r2sm_jax.models.lora import projection

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "dinov2": IMAGENET,
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and standard deviation of the pixels, 0..1, that each family was trained with."""


class PlainAttention(nnx.Module):
    """Multi-head self-attention with separate projections, as the published files hold them."""

    def __init__(self, config: PlainViTConfig, *, lora: tuple[int, float], dtype: jnp.dtype, rngs: nnx.Rngs):
        d, options = config.dim, {"rank": lora[0], "alpha": lora[1], "dtype": dtype, "rngs": rngs}
        self.heads = config.heads
        self.query = projection(d, d, **options)
        self.key = projection(d, d, **options)
        self.value = projection(d, d, **options)
        self.out = projection(d, d, **options)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return self.out(attend(self.query(x), self.key(x), self.value(x), heads=self.heads))


class PlainBlock(nnx.Module):
    """A pre-norm block; DINOv2 scales both of its branches per channel."""

    def __init__(self, config: PlainViTConfig, *, lora: tuple[int, float], dtype: jnp.dtype, rngs: nnx.Rngs):
        d = config.dim
        self.norm1 = exact_norm(d, config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.attention = PlainAttention(config, lora=lora, dtype=dtype, rngs=rngs)
        self.norm2 = exact_norm(d, config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.mlp = MLP((d, config.mlp_dim, d), dtype=dtype, rngs=rngs, activation=config.activation)
        scaled = config.family == "dinov2"
        self.scale1 = nnx.Param(jnp.ones(d)) if scaled else None
        self.scale2 = nnx.Param(jnp.ones(d)) if scaled else None

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        x = x + _scaled(self.attention(self.norm1(x)), self.scale1)
        return x + _scaled(self.mlp(self.norm2(x)), self.scale2)


def exact_norm(dim: int, epsilon: float, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer norm with the variance as torch computes it: published ViTs have channels far from zero."""
    return nnx.LayerNorm(dim, epsilon=epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs)


def _scaled(x: Float[Array, "b n d"], scale: nnx.Variable | None) -> Float[Array, "b n d"]:
    return x if scale is None else x * scale[...].astype(x.dtype)


class PlainViT(nnx.Module):
    """Image -> grid of patch tokens, as `transformers` gives them in `last_hidden_state`."""

    def __init__(
        self, config: PlainViTConfig, grid: int, *, lora: tuple[int, float] = (0, 0.0), remat: bool = False,
        dtype: jnp.dtype, rngs: nnx.Rngs,
    ):  # fmt: skip
        """`grid` tokens each way; `lora` is rank and alpha, rank 0 is none; `remat` as in `VisionConfig`."""
        d, patch = config.dim, (config.patch_size, config.patch_size)
        self.config, self.grid, self.remat = config, grid, remat
        use_bias = config.family != "clip"
        self.patches = nnx.Conv(
            3, d, patch, strides=patch, padding="VALID", use_bias=use_bias, dtype=dtype, rngs=rngs
        )  # fmt: skip
        init = nnx.initializers.truncated_normal(0.02)
        self.positions = nnx.Param(init(rngs.params(), (grid * grid + config.class_token, d)))
        self.class_token = nnx.Param(init(rngs.params(), (1, d))) if config.class_token else None
        self.registers = nnx.Param(init(rngs.params(), (config.registers, d))) if config.registers else None
        before, after = config.family == "clip", config.family != "clip"
        self.norm_before = exact_norm(d, config.norm_epsilon, dtype=dtype, rngs=rngs) if before else None
        self.blocks = nnx.List([PlainBlock(config, lora=lora, dtype=dtype, rngs=rngs) for _ in range(config.depth)])
        self.norm_after = exact_norm(d, config.norm_epsilon, dtype=dtype, rngs=rngs) if after else None

    def __call__(self, image: Float[Array, "b H W 3"]) -> Float[Array, "b h w d"]:
        """`image` is normalised by ImageNet's mean and deviation, of any square size: it is resized to one token a
        patch, and normalised as the family wants it."""
        x = self.patches(resize(self._normalise(image), self.grid * self.config.patch_size))
        x = rearrange(x, "b h w d -> b (h w) d")
        if self.class_token is not None:
            x = jnp.concatenate([_repeat(self.class_token, x), x], axis=1)
        x = x + self.positions[...].astype(x.dtype)
        if self.registers is not None:
            x = jnp.concatenate([x[:, :1], _repeat(self.registers, x), x[:, 1:]], axis=1)
        if self.norm_before is not None:
            x = self.norm_before(x)
        for block in self.blocks:
            x = jax.checkpoint(block)(x) if self.remat else block(x)
        if self.norm_after is not None:
            x = self.norm_after(x)
        return rearrange(x[:, -(self.grid**2) :], "b (h w) d -> b h w d", h=self.grid)

    def _normalise(self, image: Float[Array, "b H W 3"]) -> Float[Array, "b H W 3"]:
        (from_mean, from_std), (mean, std) = (np.array(x) for x in (IMAGENET, NORMALISATION[self.config.family]))
        if np.array_equal(from_mean, mean):
            return image
        return image * jnp.asarray(from_std / std, image.dtype) + jnp.asarray((from_mean - mean) / std, image.dtype)


def _repeat(tokens: nnx.Variable, x: Float[Array, "b n d"]) -> Float[Array, "b _t d"]:
    return jnp.broadcast_to(tokens[...].astype(x.dtype), (x.shape[0], *tokens.shape))


def resize(x: Float[Array, "b h w d"], size: int) -> Float[Array, "b _h _w d"]:
    """Bilinear to `size` each way, antialiased where it shrinks; untouched where it has that size."""
    if x.shape[1:3] == (size, size):
        return x
    return jax.image.resize(x, (x.shape[0], size, size, x.shape[3]), "bilinear")


_BLOCK_KEYS = (
    (r"encoder\.layers?\.(\d+)\.(?:layer_)?norm([12])\.(weight|bias)", r"blocks.\1.norm\2.\3"),
    (r"encoder\.layers\.(\d+)\.self_attn\.q_proj\.(weight|bias)", r"blocks.\1.attention.query.\2"),
    (r"encoder\.layers\.(\d+)\.self_attn\.k_proj\.(weight|bias)", r"blocks.\1.attention.key.\2"),
    (r"encoder\.layers\.(\d+)\.self_attn\.v_proj\.(weight|bias)", r"blocks.\1.attention.value.\2"),
    (r"encoder\.layers\.(\d+)\.self_attn\.out_proj\.(weight|bias)", r"blocks.\1.attention.out.\2"),
    (r"encoder\.layers?\.(\d+)\.mlp\.fc1\.(weight|bias)", r"blocks.\1.mlp.layers.0.\2"),
    (r"encoder\.layers?\.(\d+)\.mlp\.fc2\.(weight|bias)", r"blocks.\1.mlp.layers.1.\2"),
)
KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "dinov2": (
        *_BLOCK_KEYS,
        (r"embeddings\.cls_token", r"class_token"),
        (r"embeddings\.register_tokens", r"registers"),
        (r"embeddings\.position_embeddings", r"positions"),
        (r"embeddings\.patch_embeddings\.projection\.(weight|bias)", r"patches.\1"),
        (
            r"encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.(weight|bias)",
            r"blocks.\1.attention.\2.\3",
        ),
        (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(weight|bias)", r"blocks.\1.attention.out.\2"),
        (r"encoder\.layer\.(\d+)\.layer_scale([12])\.lambda1", r"blocks.\1.scale\2"),
        (r"layernorm\.(weight|bias)", r"norm_after.\1"),
    ),
    "clip": (
        *_BLOCK_KEYS,
        (r"embeddings\.class_embedding", r"class_token"),
        (r"embeddings\.position_embedding\.weight", r"positions"),
        (r"embeddings\.patch_embedding\.weight", r"patches.weight"),
        (r"pre_layrnorm\.(weight|bias)", r"norm_before.\1"),
    ),
    "siglip": (
        *_BLOCK_KEYS,
        (r"embeddings\.position_embedding\.weight", r"positions"),
        (r"embeddings\.patch_embedding\.(weight|bias)", r"patches.\1"),
        (r"post_layernorm\.(weight|bias)", r"norm_after.\1"),
    ),
}
"""Keys of `transformers` models -> our paths, after the prefix of the model that holds the tower."""
PREFIX = r"(?:dinov2|dinov2_with_registers)\.|vision_model\."
UNUSED = {
    "dinov2": r"embeddings\.mask_token|classifier\..*",
    "clip": r"post_layernorm\..*|visual_projection\..*|text_.*|logit_scale|embeddings\.position_ids",
    "siglip": r"head\..*|text_model\..*|logit_(scale|bias)|embeddings\.position_ids",
}
"""Text towers, projections and poolers: not part of the patch tokens."""


def plain_config(published: Any) -> PlainViTConfig | str:
    """The sizes in a published configuration of `transformers`, or why its model cannot be loaded."""
    kind = published.model_type
    vision = getattr(published, "vision_config", published)
    families: dict[str, Family] = {"dinov2": "dinov2", "dinov2_with_registers": "dinov2", "clip": "clip"}
    families |= {"clip_vision_model": "clip", "siglip": "siglip", "siglip_vision_model": "siglip"}
    if kind not in families:
        return f"model_type {kind!r} is none of {', '.join(families)}"
    activation = "gelu_tanh" if vision.hidden_act == "gelu_pytorch_tanh" else vision.hidden_act
    if activation not in ("gelu", "gelu_tanh", "quick_gelu"):
        return f"activation {activation!r} is not known"
    if families[kind] == "dinov2" and (vision.use_swiglu_ffn or not vision.qkv_bias):
        return "only DINOv2 with a plain MLP and biases is supported (small, base, large)"
    return PlainViTConfig(
        families[kind],
        dim=vision.hidden_size,
        depth=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        mlp_dim=getattr(vision, "intermediate_size", None) or int(vision.hidden_size * vision.mlp_ratio),
        patch_size=vision.patch_size,
        activation=activation,
        norm_epsilon=vision.layer_norm_eps,
        registers=getattr(vision, "num_register_tokens", 0),
    )
