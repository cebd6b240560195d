"""The outliner: from a box or clicks to the visible mask of what they mean.

It looks at a square crop of the image and needs neither a class nor a sentence, so any instance
masks can teach it. Few photographs are enough for the outline of a thing, but not for its parts and
textures. So it reads the features of a published backbone, which stays frozen, beside the pixels.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Real

from r2sm_jax.config import OutlinerConfig
from r2sm_jax.models.completion import ResidualBlock, TransformerBlock, climb
from r2sm_jax.models.efficientnet import EfficientNetLite
from r2sm_jax.models.layers import Conv, Linear, freeze, truncated_normal

NUM_CHANNELS = 7
"""Channels of a crop: colours (3), inside of the image, inside of the box, positive clicks,
negative clicks."""
PATCH = 4  # pixels of the crop that a cell of the finest grid covers, each way


class Outliner(nnx.Module):
    """A U-Net over crops with features of a frozen backbone at each resolution, and attention on
    the coarsest grid, where a token reads how good the mask is."""

    def __init__(self, config: OutlinerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        dims = config.dims
        self.efficientnet = EfficientNetLite(config.block_dims, dtype=jnp.dtype(dtype), rngs=rngs)
        freeze(self.efficientnet)
        self.stem = Conv(
            PATCH**2 * NUM_CHANNELS, dims[0], (3, 3), padding=1, dtype=dtype, rngs=rngs
        )
        self.encoder = nnx.List([ResidualBlock(dim, dtype=dtype, rngs=rngs) for dim in dims])
        self.down = nnx.List(
            [
                Conv(fine, coarse, (2, 2), strides=2, dtype=dtype, rngs=rngs)
                for fine, coarse in pairwise(dims)
            ]
        )
        # The backbone's first grid has stride 2. The next ones are the grids of this network.
        feature_dims = self.efficientnet.dims[1:]
        self.feature_norms = nnx.List(
            [nnx.LayerNorm(dim, dtype=dtype, rngs=rngs) for dim in feature_dims]
        )
        self.joins = nnx.List(
            [
                Linear(feature_dim, dim, dtype=dtype, rngs=rngs)
                for feature_dim, dim in zip(feature_dims, dims, strict=True)
            ]
        )
        grid = config.size // (PATCH * 2 ** (len(dims) - 1))
        shape = (grid**2, dims[-1])
        self.positions = nnx.Param(truncated_normal(rngs.params(), shape, std=0.02))
        self.iou_token = nnx.Param(truncated_normal(rngs.params(), (1, dims[-1]), std=0.02))
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
        self.iou = Linear(dims[-1], 1, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(
        self, crops: Real[Array, "m s s c"]
    ) -> tuple[Float[Array, "m _s _s"], Float[Array, " m"]]:
        """Logits of the visible mask at half of the crop's resolution, and their predicted IoU.

        `crops`: 0 to 255 in all channels, see `NUM_CHANNELS`.
        """
        crops = crops.astype(self.dtype)
        colours, planes = crops[..., :3], crops[..., 3:] / 255
        inside = planes[..., :1]
        features = self.efficientnet((colours - 127) / 128 * inside)[1:]

        pixels = jnp.concatenate([(colours / 127.5 - 1) * inside, planes], axis=-1)
        patches = rearrange(pixels, "m (h p) (w q) c -> m h w (p q c)", p=PATCH, q=PATCH)
        x = self.stem(patches)
        skips = []
        for level, block in enumerate(self.encoder):
            x = x + self.joins[level](self.feature_norms[level](features[level]))
            x = block(x)
            if level < len(self.down):
                skips.append(x)
                x = self.down[level](x)

        height = x.shape[1]
        tokens = rearrange(x, "m h w d -> m (h w) d") + self.positions[...].astype(self.dtype)
        iou_token = self.iou_token[...].astype(self.dtype)
        iou_tokens = jnp.broadcast_to(iou_token, (len(tokens), *iou_token.shape))
        tokens = jnp.concatenate([iou_tokens, tokens], axis=1)
        for block in self.transformer:
            tokens = block(tokens)
        iou = jax.nn.sigmoid(self.iou(tokens[:, 0])[:, 0].astype(jnp.float32))
        x = rearrange(tokens[:, 1:], "m (h w) d -> m h w d", h=height)

        x = climb(x, skips, self.up, self.decoder)
        logits = self.mask(nnx.gelu(self.norm(x))).astype(jnp.float32)
        return rearrange(logits, "m h w (p q) -> m (h p) (w q)", p=2, q=2), iou
