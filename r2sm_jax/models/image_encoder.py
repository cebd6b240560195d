"""The vision encoder: SAM's ViT, from a size that trains on a laptop to the published ones.

The layout follows segment-anything (segment_anything/modeling/image_encoder.py): pre-norm blocks,
windowed or global attention, decomposed relative positions, a neck of two convolutions. The `conv`
stem is ours: strided convolutions whose features finer than the tokens go to the pixel decoder; a
published backbone can take its place. A published plain ViT can stand in place of all but the neck.

An encoder has `skip_dims` and gives `VisionFeatures`; the pixel decoder needs no more of it.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.config import VisionConfig
from r2sm_jax.models.efficientnet import EfficientNetLite, Levels
from r2sm_jax.models.layers import (
    MLP,
    Conv,
    ConvBlock,
    Linear,
    attend,
    freeze,
    resize,
    truncated_normal,
)
from r2sm_jax.models.plain_vit import PlainViT, normalise

Skips = tuple[Float[Array, "b _h1 _w1 _c1"] | None, Float[Array, "b _h2 _w2 _c2"] | None]


class VisionFeatures(NamedTuple):
    """What an image encoder computes."""

    tokens: Float[Array, "b h w d"]
    skips: Skips = (None, None)
    """Features at a quarter and at half of the tokens' stride, with the encoder's `skip_dims`
    channels; or none."""
    last: Float[Array, "b _h _w _d"] | None = None
    """The last features of an EfficientNet, which its classifier reads."""


class ConvStem(nnx.Module):
    """3x3 convolutions that halve the resolution log2(patch_size) times, each but the first
    followed by residual ones.

    The features of the two strides before the tokens are its skips.
    """

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        halvings = config.patch_size.bit_length() - 1
        dims = [3, *(min(config.dim, 32 * 2**i) for i in range(halvings - 1)), config.dim]
        self.skip_dims = tuple(dims[-3:-1])
        pairs = list(pairwise(dims))
        self.convs = nnx.List(
            [Conv(i, o, (3, 3), strides=2, padding=1, dtype=dtype, rngs=rngs) for i, o in pairs]
        )
        self.residuals = nnx.List(
            [
                nnx.List([ConvBlock(o, dtype=dtype, rngs=rngs) for _ in range(config.stem_depth)])
                for _, o in pairs[1:]
            ]
        )

    def __call__(self, image: Float[Array, "b H W 3"]) -> VisionFeatures:
        features = [nnx.relu(self.convs[0](image))]
        for conv, residuals in zip(self.convs[1:], self.residuals, strict=True):
            x = conv(features[-1])
            for residual in residuals:
                x = residual(x)
            features.append(x)
        return VisionFeatures(features[-1], (features[-3], features[-2]))


class PatchStem(Conv):
    """SAM's patch embedding, which has no skips."""

    skip_dims = (0, 0)

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        size = (config.patch_size, config.patch_size)
        super().__init__(3, config.dim, size, strides=size, padding="VALID", dtype=dtype, rngs=rngs)

    def __call__(self, image: Float[Array, "b H W 3"]) -> VisionFeatures:
        return VisionFeatures(super().__call__(image))


class PyramidStem(nnx.Module):
    """A backbone's features at strides 4, 8, 16, 32 -> tokens at stride 16, and skips.

    Each level is normed, since published features have very different scales.
    """

    def __init__(
        self, dims: tuple[int, ...], config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        """`dims`: channels of the levels."""
        self.skip_dims = dims[:2]
        self.norms = nnx.List(
            [nnx.LayerNorm(dim, epsilon=1e-6, dtype=dtype, rngs=rngs) for dim in dims]
        )
        self.joins = nnx.List([Linear(dim, config.dim, dtype=dtype, rngs=rngs) for dim in dims[2:]])

    def __call__(self, levels: Levels) -> VisionFeatures:
        normed = [norm(level) for norm, level in zip(self.norms, levels, strict=True)]
        stride4, stride8, stride16, stride32 = normed
        tokens = self.joins[0](stride16) + resize(self.joins[1](stride32), stride16.shape[1])
        return VisionFeatures(tokens, (stride4, stride8), levels[-1])


class GridAttention(nnx.Module):
    """Multi-head self-attention on a token grid, with SAM's decomposed relative positions if asked
    for."""

    def __init__(self, config: VisionConfig, grid: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        """`grid`: tokens each way that attention runs over."""
        self.heads = config.heads
        self.qkv = Linear(config.dim, 3 * config.dim, dtype=dtype, rngs=rngs)
        self.out = Linear(config.dim, config.dim, dtype=dtype, rngs=rngs)
        shape = (2 * grid - 1, config.dim // config.heads)
        self.rel_pos_h = None
        self.rel_pos_w = None
        if config.relative_positions:
            # One array each: the training step cannot donate an array that two parameters share.
            self.rel_pos_h = nnx.data(nnx.Param(jnp.zeros(shape)))
            self.rel_pos_w = nnx.data(nnx.Param(jnp.zeros(shape)))

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        query, key, value = jnp.split(rearrange(self.qkv(x), "b h w d -> b (h w) d"), 3, axis=-1)
        bias = self._position_bias(query, *x.shape[1:3])
        return self.out(attend(query, key, value, heads=self.heads, bias=bias).reshape(x.shape))

    def _position_bias(
        self, query: Float[Array, "b n d"], h: int, w: int
    ) -> Float[Array, "b g n n"] | None:
        """The scores of SAM's decomposed relative positions: one of rows plus one of columns, for
        each head."""
        if self.rel_pos_h is None or self.rel_pos_w is None:
            return None
        query = rearrange(query, "b (h w) (g d) -> b g h w d", h=h, g=self.heads)
        row_table = _relative(self.rel_pos_h[...], h).astype(query.dtype)
        column_table = _relative(self.rel_pos_w[...], w).astype(query.dtype)
        # Part of the attention scores, so float32 as these are.
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        rows = product("bghwd,hkd->bghwk", query, row_table)
        columns = product("bghwd,wkd->bghwk", query, column_table)
        return rearrange(
            rows[..., :, None] + columns[..., None, :], "b g h w y x -> b g (h w) (y x)"
        )


def _relative(table: Float[Array, "_n d"], size: int) -> Float[Array, "_size _size d"]:
    """Rows of a relative-position table for every (query, key) pair along one axis."""
    offset = (table.shape[0] + 1) // 2 - 1
    return table[jnp.arange(size)[:, None] - jnp.arange(size)[None, :] + offset]


class Block(nnx.Module):
    """Pre-norm ViT block; attention inside windows where `window` > 0."""

    def __init__(self, config: VisionConfig, window: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.window = window
        # Published ViTs have channels far from zero, which the fast variance computes badly.
        norm = {"epsilon": 1e-6, "dtype": dtype, "use_fast_variance": config.sam is None}
        self.norm1 = nnx.LayerNorm(config.dim, **norm, rngs=rngs)
        self.attention = GridAttention(config, window or config.grid, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(config.dim, **norm, rngs=rngs)
        dims = (config.dim, config.mlp_dim, config.dim)
        self.mlp = MLP(dims, dtype=dtype, rngs=rngs, activation=config.activation)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        normed = self.norm1(x)
        x = x + (self._in_windows(normed) if self.window else self.attention(normed))
        return x + self.mlp(self.norm2(x))

    def _in_windows(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        """Attention inside each window; the grid is padded to whole windows with zeros."""
        b, h, w, _ = x.shape
        pad_h, pad_w = -h % self.window, -w % self.window
        x = jnp.pad(x, ((0, 0), (0, pad_h), (0, pad_w), (0, 0)))
        rows = (h + pad_h) // self.window
        windows = rearrange(x, "b (r y) (c x) d -> (b r c) y x d", y=self.window, x=self.window)
        back = rearrange(self.attention(windows), "(b r c) y x d -> b (r y) (c x) d", b=b, r=rows)
        return back[:, :h, :w]


class VisionEncoder(nnx.Module):
    """Image -> token grid [b h w d] at stride `patch_size`, with the skips of its stem."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        """`config` has the sizes of its published weights (`pretrained.fill_sizes`)."""
        self.config = config
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        dim, out_dim = config.dim, config.out_dim
        self.efficientnet = None
        self.stem = None
        self.vit = None
        if config.encoder == "conv":
            self.stem = nnx.data(ConvStem(config, **options))
        elif config.encoder == "sam":
            self.stem = nnx.data(PatchStem(config, **options))
        elif config.encoder == "efficientnet":
            backbone = EfficientNetLite(config.efficientnet_dims, **options)
            self.efficientnet = nnx.data(backbone)
            self.stem = nnx.data(PyramidStem(backbone.dims[1:], config, **options))
        self.skip_dims = (0, 0) if self.stem is None else self.stem.skip_dims
        if self.stem is not None:
            shape = (config.grid, config.grid, dim)
            self.positions = nnx.Param(truncated_normal(rngs.params(), shape, std=0.02))
            windows = [
                0 if i in config.global_blocks else config.window_size for i in range(config.depth)
            ]
            self.blocks = nnx.List([Block(config, window, **options) for window in windows])
            self.neck1 = Linear(dim, out_dim, use_bias=False, **options)
        self.neck_norm1 = nnx.LayerNorm(out_dim, epsilon=1e-6, **options)
        self.neck2 = Conv(out_dim, out_dim, (3, 3), padding=1, use_bias=False, **options)
        self.neck_norm2 = nnx.LayerNorm(out_dim, epsilon=1e-6, **options)
        if config.encoder == "vit":
            self.vit = nnx.data(PlainViT(config, **options))
            self.join = Linear(dim, out_dim, use_bias=False, **options)

    def __call__(self, image: Float[Array, "b H W 3"]) -> VisionFeatures:
        """Computes tokens and skips of an image, normalised to zero mean and unit scale; padding is
        zero."""
        if self.vit is not None:
            x = self.join(resize(self.vit(image), self.config.grid))
            skips, last = (None, None), None
        else:
            x, skips, last = self._read_stem(image)
            x = x + self.positions[...].astype(x.dtype)
            for block in self.blocks:
                # Recomputing a block in the backward pass saves its activations.
                x = jax.checkpoint(block)(x) if self.config.remat else block(x)
            x = self.neck1(x)
        x = self.neck_norm2(self.neck2(self.neck_norm1(x)))
        return VisionFeatures(x, skips, last)

    def _read_stem(self, image: Float[Array, "b H W 3"]) -> VisionFeatures:
        if isinstance(self.stem, PyramidStem):
            assert self.efficientnet is not None
            return self.stem(self.efficientnet(normalise(image, "efficientnet_lite"))[1:])
        assert self.stem is not None
        return self.stem(image)


def freeze_published(encoder: VisionEncoder) -> None:
    """Turns the published weights of a built encoder into constants, in place, where its
    configuration says so."""
    config = encoder.config
    if config.sam_frozen:
        freeze(encoder)
    if encoder.efficientnet is not None and config.efficientnet_frozen_to:
        encoder.efficientnet.freeze_to(config.efficientnet_frozen_to)
    if encoder.vit is not None and config.vit_frozen:
        freeze(encoder.vit)
