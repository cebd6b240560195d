"""Published plain ViTs that read images: DINOv2 (with or without registers), CLIP and SigLIP.

Layout and numerics follow Hugging Face `transformers` (models/dinov2, dinov2_with_registers, clip,
siglip).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.config import VisionConfig
from r2sm_jax.models.layers import MLP, Attention, Conv, resize, truncated_normal

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "dinov2": IMAGENET,
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "efficientnet_lite": ((127 / 255,) * 3, (128 / 255,) * 3),
}
"""Mean and standard deviation of the pixels, 0..1, that each family was trained with."""
NORM_EPSILON = {"dinov2": 1e-6, "clip": 1e-5, "siglip": 1e-6}
"""Of the layer norms, by family."""


class PlainBlock(nnx.Module):
    """A pre-norm block; DINOv2 scales both of its branches per channel."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d = config.dim
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.norm1 = exact_norm(config, **options)
        self.attention = Attention(d, config.heads, **options)
        self.norm2 = exact_norm(config, **options)
        self.mlp = MLP((d, config.mlp_dim, d), activation=config.activation, **options)
        scaled = config.vit_family == "dinov2"
        self.scale1 = nnx.Param(jnp.ones(d)) if scaled else None
        self.scale2 = nnx.Param(jnp.ones(d)) if scaled else None

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        y = self.norm1(x)
        x = x + _scaled(self.attention(y, y, y), self.scale1)
        return x + _scaled(self.mlp(self.norm2(x)), self.scale2)


def exact_norm(config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Makes a layer norm with the variance as torch computes it: published ViTs have channels far
    from zero."""
    epsilon = NORM_EPSILON[config.vit_family]
    return nnx.LayerNorm(
        config.dim, epsilon=epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs
    )


def _scaled(x: Float[Array, "b n d"], scale: nnx.Variable | None) -> Float[Array, "b n d"]:
    return x if scale is None else x * scale[...].astype(x.dtype)


class PlainViT(nnx.Module):
    """Image -> grid of patch tokens, as `transformers` gives them in `last_hidden_state`."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.grid = config.vit_grid or config.grid
        dim = config.dim
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        is_clip = config.vit_family == "clip"
        has_class_token = config.vit_family != "siglip"
        patch = (config.vit_patch_size, config.vit_patch_size)
        self.patches = Conv(
            3, dim, patch, strides=patch, padding="VALID", use_bias=not is_clip, **options
        )

        def draw(count: int) -> nnx.Param | None:
            """Draws this number of tokens or positions."""
            if not count:
                return None
            return nnx.Param(truncated_normal(rngs.params(), (count, dim), std=0.02))

        self.positions = nnx.Param(
            truncated_normal(rngs.params(), (self.grid**2 + has_class_token, dim), std=0.02)
        )
        self.class_token = draw(int(has_class_token))
        self.registers = draw(config.vit_registers)

        # CLIP has a norm before the blocks and, for tokens, none after them.
        norm = exact_norm(config, **options)
        self.norm_before = norm if is_clip else None
        self.blocks = nnx.List([PlainBlock(config, **options) for _ in range(config.depth)])
        self.norm_after = None if is_clip else norm

    def __call__(self, image: Float[Array, "b H W 3"]) -> Float[Array, "b h w d"]:
        """Computes patch tokens. `image` is normalised by ImageNet's mean and deviation and can
        have any square size: it is resized to one token a patch and normalised as the family
        needs."""
        image = normalise(image, self.config.vit_family)
        x = self.patches(resize(image, self.grid * self.config.vit_patch_size))
        x = rearrange(x, "b h w d -> b (h w) d")
        num_patches = x.shape[1]

        # Registers stand between the class token and the patches, and have no positions.
        positions = self.positions[...].astype(x.dtype)
        x = x + positions[-num_patches:]
        first = []
        if self.class_token is not None:
            first.append(self.class_token[...].astype(x.dtype) + positions[:1])
        if self.registers is not None:
            first.append(self.registers[...].astype(x.dtype))
        if first:
            tokens = jnp.concatenate(first)
            tokens = jnp.broadcast_to(tokens, (len(x), *tokens.shape))
            x = jnp.concatenate([tokens, x], axis=1)

        if self.norm_before is not None:
            x = self.norm_before(x)
        for block in self.blocks:
            x = jax.checkpoint(block)(x) if self.config.remat else block(x)
        if self.norm_after is not None:
            x = self.norm_after(x)
        return rearrange(x[:, -num_patches:], "b (h w) d -> b h w d", h=self.grid)


def normalise(image: Float[Array, "b H W 3"], family: str) -> Float[Array, "b H W 3"]:
    """Normalises an image, which is normalised by ImageNet's mean and deviation, as one of the
    `NORMALISATION`s."""
    (from_mean, from_std), (mean, std) = (np.array(x) for x in (IMAGENET, NORMALISATION[family]))
    return image * jnp.asarray(from_std / std, image.dtype) + jnp.asarray(
        (from_mean - mean) / std, image.dtype
    )
