"""The completer: from a visible mask to the complete one.

Whoever found the object (this model, SAM, a detector, a hand) gives its visible mask. The completer
looks at a square crop of the image around that mask and adds the part that other objects hide. It
needs neither a class nor a sentence, so any masks of complete objects can teach it. It may also
read the visible masks of the other objects, since they say where something can be hidden; and the
features of a published backbone, which stays frozen, since they say what the object is.
"""

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Real

from r2sm_jax.config import CompleterConfig
from r2sm_jax.models.efficientnet import EfficientNetLite
from r2sm_jax.models.layers import MLP, Attention, Conv, Linear, freeze, resize

NUM_CHANNELS = 7
"""Channels of a crop: colours (3), inside of the image, visible mask, masks of the other objects,
whether these are known."""
BACKBONE_SIZE = 128
"""Pixels of the crop that the frozen backbone reads: it knows objects of a certain size."""


class ResidualBlock(nnx.Module):
    """Two 3x3 convolutions with a residual connection, normalised before each."""

    def __init__(self, dim: int, *, dtype, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(dim, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.convs = nnx.List(
            [Conv(dim, dim, (3, 3), padding=1, dtype=dtype, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, x: Float[Array, "m h w d"]) -> Float[Array, "m h w d"]:
        residual = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = conv(nnx.gelu(norm(x)))
        return residual + x


class TransformerBlock(nnx.Module):
    """Global attention and an MLP over the cells of the coarsest grid."""

    def __init__(self, dim: int, heads: int, *, dtype, rngs: nnx.Rngs):
        self.norm_attention = nnx.LayerNorm(dim, dtype=dtype, rngs=rngs)
        self.attention = Attention(dim, heads, dtype=dtype, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(dim, dtype=dtype, rngs=rngs)
        self.mlp = MLP((dim, 3 * dim, dim), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "m n d"]) -> Float[Array, "m n d"]:
        normed = self.norm_attention(x)
        x = x + self.attention(normed, normed, normed)
        return x + self.mlp(self.norm_mlp(x))


def climb(
    x: Float[Array, "m h w d"],
    skips: Sequence[Float[Array, "m _h _w _d"]],
    up: nnx.List,
    blocks: nnx.List,
) -> Float[Array, "m _H _W _D"]:
    """The way up of a U-Net: from the coarsest grid to the finest, with the features of the way
    down at each."""
    for level in reversed(range(len(blocks))):
        x = up[level](x)
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)  # nearest neighbour, cheap
        x = blocks[level](x + skips[level])
    return x


class Completer(nnx.Module):
    """A U-Net over crops, with attention on its coarsest grid. With a frozen backbone its last
    features are added there.

    The finest grid has half of the crop's resolution: a convolution there costs a quarter, and the
    visible part of the outline is known from the given mask anyway.
    """

    def __init__(self, config: CompleterConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.size = config.size
        dims = config.dims
        self.stem = Conv(4 * NUM_CHANNELS, dims[0], (3, 3), padding=1, dtype=dtype, rngs=rngs)
        self.encoder = nnx.List([ResidualBlock(dim, dtype=dtype, rngs=rngs) for dim in dims])
        self.down = nnx.List(
            [
                Conv(fine, coarse, (2, 2), strides=2, dtype=dtype, rngs=rngs)
                for fine, coarse in pairwise(dims)
            ]
        )
        grid = config.size // 2 ** len(dims)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (grid**2, dims[-1])))
        self.transformer = nnx.List(
            [
                TransformerBlock(dims[-1], config.heads, dtype=dtype, rngs=rngs)
                for _ in range(config.depth)
            ]
        )
        self.up = nnx.List(
            [Conv(coarse, fine, (1, 1), dtype=dtype, rngs=rngs) for fine, coarse in pairwise(dims)]
        )
        self.decoder = nnx.List([ResidualBlock(dim, dtype=dtype, rngs=rngs) for dim in dims[:-1]])
        self.norm = nnx.LayerNorm(dims[0], dtype=dtype, rngs=rngs)
        # Most of a crop is no part of the object, so logits start below zero.
        self.mask = Conv(
            dims[0],
            4,
            (3, 3),
            padding=1,
            bias_init=nnx.initializers.constant(-2.0),
            dtype=dtype,
            rngs=rngs,
        )
        if config.efficientnet:
            backbone = EfficientNetLite(config.block_dims, dtype=jnp.dtype(dtype), rngs=rngs)
            freeze(backbone)
            self.efficientnet = backbone
            feature_dim = backbone.dims[-1]
            self.feature_norm = nnx.LayerNorm(feature_dim, dtype=dtype, rngs=rngs)
            self.join = Linear(feature_dim, dims[-1], dtype=dtype, rngs=rngs)
        else:
            self.efficientnet = None
        self.dtype = dtype

    def __call__(self, crops: Float[Array, "m s s c"]) -> Float[Array, "m s s"]:
        """Logits of the complete mask, from the channels of `make_inputs`."""
        crops = crops.astype(self.dtype)
        x = rearrange(crops, "m (h p) (w q) c -> m h w (p q c)", p=2, q=2)
        x = self.stem(x)
        skips = []
        for level, block in enumerate(self.encoder):
            x = block(x)
            if level < len(self.down):
                skips.append(x)
                x = self.down[level](x)

        height = x.shape[1]
        if self.efficientnet is not None:
            features = self._read_features(self.efficientnet, crops)
            x = x + resize(features, height)
        tokens = rearrange(x, "m h w d -> m (h w) d") + self.positions[...].astype(self.dtype)
        for block in self.transformer:
            tokens = block(tokens)
        x = rearrange(tokens, "m (h w) d -> m h w d", h=height)

        x = climb(x, skips, self.up, self.decoder)
        logits = self.mask(nnx.gelu(self.norm(x))).astype(jnp.float32)
        return rearrange(logits, "m h w (p q) -> m (h p) (w q)", p=2, q=2)

    def _read_features(
        self, backbone: EfficientNetLite, crops: Float[Array, "m s s c"]
    ) -> Float[Array, "m _h _w d"]:
        """The last features of the backbone, with the channels of the coarsest grid."""
        features = backbone(resize(backbone_image(crops), BACKBONE_SIZE))[-1]
        return self.join(self.feature_norm(features))


def backbone_image(crops: Float[Array, "m s s c"]) -> Float[Array, "m s s 3"]:
    """The colours of `make_inputs` as published backbones read them: (pixels - 127) / 128, and 0
    outside of the image."""
    colours, inside = crops[..., :3], crops[..., 3:4]
    # `make_inputs` has (pixels / 127.5 - 1) * inside.
    return (127.5 * colours + 0.5 * inside) / 128


def make_inputs(
    image: Real[Array, "m s s 3"],
    inside: Float[Array, "m s s"],
    visible: Float[Array, "m s s"],
    others: Float[Array, "m s s"],
    others_known: Float[Array, " m"],
) -> Float[Array, "m s s c"]:
    """The channels that the completer reads; masks are from 0 to 1.

    Where the masks of other objects are not known they are all 0, and the last channel says so.
    """
    colours = image.astype(jnp.float32) / 127.5 - 1
    known = jnp.broadcast_to(others_known[:, None, None], visible.shape)
    mask_channels = jnp.stack([inside, visible, others * known, known], axis=-1)
    return jnp.concatenate([colours * inside[..., None], mask_channels], axis=-1)
