"""The vision encoder: SAM's ViT, from a size that trains on a laptop to the published ones.

Layout follows segment-anything (segment_anything/modeling/image_encoder.py): pre-norm blocks, windowed or global
attention, decomposed relative positions, a two-convolution neck. The `conv` stem is ours: overlapping strided
convolutions whose stride-2 and stride-4 features are handed to the pixel decoder.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.models.layers import MLP, Linear


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision encoder; the defaults are `tiny`."""

    image_size: int = 96
    """Pixels of the square input."""
    patch_size: int = 8
    """Pixels a token, each way."""
    stem: Literal["conv", "patch"] = "conv"
    """`conv`: strided convolutions, better from scratch; `patch`: SAM's patch embedding."""
    stem_depth: int = 1
    """Residual convolutions at each stride of the `conv` stem."""
    dim: int = 192
    depth: int = 3
    heads: int = 3
    mlp_dim: int = 576
    window_size: int = 0
    """Tokens a window, each way; 0 = global attention in every block."""
    global_blocks: tuple[int, ...] = ()
    """Blocks that attend globally where windows are used."""
    relative_positions: bool = False
    """SAM's decomposed relative positions."""
    out_dim: int = 128
    """Channels after the neck."""
    remat: bool = False
    """Compute the insides of every block anew in the backward pass: less memory, a third more time."""

    @property
    def grid(self) -> int:
        """Tokens each way."""
        return self.image_size // self.patch_size


class VisionFeatures(NamedTuple):
    """What one image becomes. `skips` run from fine (stride 2) to coarse (stride 4); empty for the patch stem."""

    tokens: Float[Array, "b h w d"]
    skips: tuple[Float[Array, "b _h _w _c"], ...]


class ConvStem(nnx.Module):
    """Halves the resolution log2(patch) times by 3x3 convolutions, with residual ones at each stride from 4 on;
    the strides 2 and 4 are kept as skips."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        steps = config.patch_size.bit_length() - 1
        self.dims = [3] + [min(config.dim, 32 * 2**i) for i in range(steps - 1)] + [config.dim]
        pairs = list(zip(self.dims[:-1], self.dims[1:], strict=True))
        self.convs = nnx.List([nnx.Conv(i, o, (3, 3), strides=2, padding=1, dtype=dtype, rngs=rngs) for i, o in pairs])
        self.residuals = nnx.List(
            [nnx.List([ConvBlock(o, dtype=dtype, rngs=rngs) for _ in range(config.stem_depth)]) for _, o in pairs[1:]]
        )

    def __call__(
        self, image: Float[Array, "b H W 3"]
    ) -> tuple[Float[Array, "b h w d"], tuple[Float[Array, "b _h _w _c"], ...]]:
        skips = [nnx.relu(self.convs[0](image))]
        for conv, residuals in zip(self.convs[1:], self.residuals, strict=True):
            x = conv(skips[-1])
            for residual in residuals:
                x = residual(x)
            skips.append(x)
        return skips[-1], tuple(skips[:2])


class ConvBlock(nnx.Module):
    """A pre-norm residual 3x3 convolution."""

    def __init__(self, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.conv = nnx.Conv(dim, dim, (3, 3), padding=1, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        return x + self.conv(nnx.relu(self.norm(x)))


class Attention(nnx.Module):
    """Multi-head self-attention on a token grid, with SAM's decomposed relative positions if asked for."""

    def __init__(self, config: VisionConfig, grid: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        head_dim = config.dim // config.heads
        self.heads = config.heads
        self.qkv = Linear(config.dim, 3 * config.dim, dtype=dtype, rngs=rngs)
        self.out = Linear(config.dim, config.dim, dtype=dtype, rngs=rngs)
        table = jnp.zeros((2 * grid - 1, head_dim))
        self.rel_pos_h = nnx.Param(table) if config.relative_positions else None
        self.rel_pos_w = nnx.Param(table) if config.relative_positions else None

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        height, width = x.shape[1:3]
        q, k, v = rearrange(self.qkv(x), "b h w (three g d) -> three b g (h w) d", three=3, g=self.heads)
        scores = jnp.einsum("bgqd,bgsd->bgqs", q, k) * q.shape[-1] ** -0.5
        if self.rel_pos_h is not None and self.rel_pos_w is not None:
            grid_q = rearrange(q, "b g (h w) d -> b g h w d", h=height)
            rel_h = jnp.einsum("bghwd,hkd->bghwk", grid_q, _relative(self.rel_pos_h[...], height).astype(q.dtype))
            rel_w = jnp.einsum("bghwd,wkd->bghwk", grid_q, _relative(self.rel_pos_w[...], width).astype(q.dtype))
            scores = rearrange(scores, "b g (h w) (y x) -> b g h w y x", h=height, y=height)
            scores = scores + rel_h[..., :, None] + rel_w[..., None, :]
            scores = rearrange(scores, "b g h w y x -> b g (h w) (y x)")
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
        attended = jnp.einsum("bgqs,bgsd->bgqd", weights, v)
        return self.out(rearrange(attended, "b g (h w) d -> b h w (g d)", h=height))


def _relative(table: Float[Array, "_n d"], size: int) -> Float[Array, "_size _size d"]:
    """Rows of a relative-position table for every (query, key) pair along one axis."""
    offset = (table.shape[0] + 1) // 2 - 1
    return table[jnp.arange(size)[:, None] - jnp.arange(size)[None, :] + offset]


class Block(nnx.Module):
    """Pre-norm ViT block; attention inside windows where `window` > 0."""

    def __init__(self, config: VisionConfig, window: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.window = window
        self.norm1 = nnx.LayerNorm(config.dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, window or config.grid, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(config.dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.mlp = MLP((config.dim, config.mlp_dim, config.dim), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        normed = self.norm1(x)
        if self.window:
            b, h, w, _ = x.shape
            pad_h, pad_w = -h % self.window, -w % self.window
            normed = jnp.pad(normed, ((0, 0), (0, pad_h), (0, pad_w), (0, 0)))
            rows = (h + pad_h) // self.window
            split = "b (r y) (c x) d -> (b r c) y x d"
            windows = self.attention(rearrange(normed, split, y=self.window, x=self.window))
            back = "(b r c) y x d -> b (r y) (c x) d"
            attended = rearrange(windows, back, b=b, r=rows)[:, :h, :w]
        else:
            attended = self.attention(normed)
        x = x + attended
        return x + self.mlp(self.norm2(x))


class VisionEncoder(nnx.Module):
    """Image -> token grid [b h w d] at stride `patch_size`, with finer skips from a `conv` stem."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        if config.stem == "conv":
            self.stem = ConvStem(config, dtype=dtype, rngs=rngs)
        else:
            size = (config.patch_size, config.patch_size)
            self.stem = nnx.Conv(3, config.dim, size, strides=size, padding="VALID", dtype=dtype, rngs=rngs)
        init = nnx.initializers.truncated_normal(0.02)
        self.positions = nnx.Param(init(rngs.params(), (config.grid, config.grid, config.dim)))
        windows = [0 if i in config.global_blocks else config.window_size for i in range(config.depth)]
        self.blocks = nnx.List([Block(config, w, dtype=dtype, rngs=rngs) for w in windows])
        self.neck1 = Linear(config.dim, config.out_dim, use_bias=False, dtype=dtype, rngs=rngs)
        self.neck_norm1 = nnx.LayerNorm(config.out_dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.neck2 = nnx.Conv(config.out_dim, config.out_dim, (3, 3), padding=1, use_bias=False, dtype=dtype, rngs=rngs)
        self.neck_norm2 = nnx.LayerNorm(config.out_dim, epsilon=1e-6, dtype=dtype, rngs=rngs)

    def __call__(self, image: Float[Array, "b H W 3"]) -> VisionFeatures:
        """`image` is normalised to zero mean and unit scale; padding is zero."""
        stem = self.stem(image)
        x, skips = stem if isinstance(stem, tuple) else (stem, ())
        x = x + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = jax.checkpoint(block)(x) if self.config.remat else block(x)
        x = self.neck_norm2(self.neck2(self.neck_norm1(self.neck1(x))))
        return VisionFeatures(x, skips)
