"""A U-Net over square crops of an image, in two configurations.

The completer adds the hidden part to a visible mask. The outliner draws the visible mask of what a
box or clicks mean. Neither needs a class or a sentence, so any masks can teach them. Few photos
are enough for outlines, but not for parts and textures: so the outliner reads the features of a
published backbone, which stays frozen.

A crop has `NUM_CHANNELS` channels from 0 to 255: colours (3), inside of the image, and three
planes. These are the visible mask, the visible masks of the other objects and whether those are
known (completer), or the inside of the box, positive and negative clicks (outliner).
"""

from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Real

from r2sm_jax.config import CompleterConfig, OutlinerConfig
from r2sm_jax.models.efficientnet import EfficientNetLite
from r2sm_jax.models.layers import MLP, Attention, Conv, Linear, freeze

NUM_CHANNELS = 7


class CropOutput(NamedTuple):
    """What the network says about each crop."""

    mask_logits: Float[Array, "m _s _s"]
    iou: Float[Array, " m"]
    """Predicted IoU of the mask: of the complete one, if this is a completer."""
    hidden_logit: Float[Array, " m"] | None
    """Whether at least `MIN_HIDDEN_SHARE` (data/crops.py) of the object is hidden; None of an
    outliner."""


class ResidualBlock(nnx.Module):
    """Two 3x3 convolutions with a residual connection, normalised before each."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for _ in range(2)])
        self.convs = nnx.List([Conv(dim, dim, (3, 3), padding=1, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Float[Array, "m h w d"]) -> Float[Array, "m h w d"]:
        residual = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = conv(nnx.gelu(norm(x)))
        return residual + x


class TransformerBlock(nnx.Module):
    """Global attention and an MLP over the cells of the coarsest grid."""

    def __init__(self, dim: int, heads: int, *, rngs: nnx.Rngs):
        self.norm_attention = nnx.LayerNorm(dim, rngs=rngs)
        self.attention = Attention(dim, heads, dtype=jnp.float32, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(dim, rngs=rngs)
        self.mlp = MLP((dim, 3 * dim, dim), dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: Float[Array, "m n d"]) -> Float[Array, "m n d"]:
        normed = self.norm_attention(x)
        x = x + self.attention(normed, normed, normed)
        return x + self.mlp(self.norm_mlp(x))


class CropUNet(nnx.Module):
    """Convolutions on each grid on the way down and up, attention on the coarsest one.

    The mask has two pixels each way in a cell of the finest grid.
    """

    def __init__(
        self,
        config: CompleterConfig | OutlinerConfig,
        *,
        patch: int,
        block_dims: tuple[int, ...] = (),
        predicts_hidden: bool = False,
        rngs: nnx.Rngs,
    ):
        """Builds the network with random weights.

        Args:
            patch: pixels of the crop in a cell of the finest grid, each way.
            block_dims: channels after each block of a frozen backbone, whose features are read on
                each grid; empty = none is read.
            predicts_hidden: whether the token that reads how good the mask is also reads if a part
                of the object is hidden.
        """
        dims = config.dims
        coarsest = dims[-1]
        self.patch = patch
        self.stem = Conv(patch**2 * NUM_CHANNELS, dims[0], (3, 3), padding=1, rngs=rngs)
        self.encoder = nnx.List([ResidualBlock(dim, rngs=rngs) for dim in dims])
        pairs = list(pairwise(dims))
        self.down = nnx.List([Conv(*pair, (2, 2), strides=2, rngs=rngs) for pair in pairs])
        grid = config.size // (patch * 2 ** len(pairs))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (grid**2, coarsest)))
        self.transformer = nnx.List(
            [TransformerBlock(coarsest, config.heads, rngs=rngs) for _ in range(config.depth)]
        )
        self.up = nnx.List([Conv(*reversed(pair), (1, 1), rngs=rngs) for pair in pairs])
        self.decoder = nnx.List([ResidualBlock(dim, rngs=rngs) for dim in dims[:-1]])
        self.norm = nnx.LayerNorm(dims[0], rngs=rngs)
        # Most of a crop is no part of the object, so logits start below zero.
        start = nnx.initializers.constant(-2.0)
        self.mask = Conv(dims[0], 4, (3, 3), padding=1, bias_init=start, rngs=rngs)
        self.efficientnet = None
        if block_dims:
            backbone = EfficientNetLite(block_dims, dtype=jnp.dtype("float32"), rngs=rngs)
            freeze(backbone)
            self.efficientnet = nnx.data(backbone)
            feature_dims = backbone.dims[-len(dims) :]
            self.feature_norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for dim in feature_dims])
            joins = zip(feature_dims, dims, strict=True)
            self.joins = nnx.List([Linear(*pair, rngs=rngs) for pair in joins])
        self.iou_token = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, coarsest)))
        self.iou = Linear(coarsest, 1, rngs=rngs)
        self.hidden = Linear(coarsest, 1, rngs=rngs) if predicts_hidden else None

    def __call__(self, crops: Real[Array, "m s s c"]) -> CropOutput:
        """Logits of the mask, with two pixels a patch, and what the token says of it."""
        channels = scale_planes(crops.astype(jnp.float32))
        features = self._read_features(channels)
        patches = rearrange(
            channels, "m (h p) (w q) c -> m h w (p q c)", p=self.patch, q=self.patch
        )
        x = self.stem(patches)
        skips = []
        for level, block in enumerate(self.encoder):
            if features:
                x = x + features[level]
            x = block(x)
            if level < len(self.down):
                skips.append(x)
                x = self.down[level](x)
        x, token = self._attend(x)
        for level in reversed(range(len(self.decoder))):
            x = self.up[level](x)
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)  # nearest neighbour, cheap
            x = self.decoder[level](x + skips[level])
        logits = self.mask(nnx.gelu(self.norm(x)))
        iou = jax.nn.sigmoid(self.iou(token)[:, 0])
        hidden_logit = self.hidden(token)[:, 0] if self.hidden is not None else None
        masks = rearrange(logits, "m h w (p q) -> m (h p) (w q)", p=2, q=2)
        return CropOutput(masks, iou, hidden_logit)

    def _read_features(self, channels: Float[Array, "m s s c"]) -> list[Float[Array, "m _h _w _d"]]:
        """The backbone's features with the channels of the grids that read them."""
        if self.efficientnet is None:
            return []
        # Published backbones read (pixels - 127) / 128, and 0 outside of the image.
        colours, inside = channels[..., :3], channels[..., 3:4]
        image = (127.5 * colours + 0.5 * inside) / 128
        levels = self.efficientnet(image)[-len(self.joins) :]
        return [
            join(norm(level))
            for join, norm, level in zip(self.joins, self.feature_norms, levels, strict=True)
        ]

    def _attend(
        self, x: Float[Array, "m h w d"]
    ) -> tuple[Float[Array, "m h w d"], Float[Array, "m d"]]:
        """Attention over the coarsest grid and the token."""
        height = x.shape[1]
        tokens = rearrange(x, "m h w d -> m (h w) d") + self.positions[...]
        # `shape[0]` and not `len`: in an ONNX export it is a symbol.
        first = jnp.broadcast_to(self.iou_token[...], (tokens.shape[0], *self.iou_token.shape))
        tokens = jnp.concatenate([first, tokens], axis=1)
        for block in self.transformer:
            tokens = block(tokens)
        return rearrange(tokens[:, 1:], "m (h w) d -> m h w d", h=height), tokens[:, 0]


def scale_planes(crops: Float[Array, "m s s c"]) -> Float[Array, "m s s c"]:
    """Colours from -1 to 1, and 0 outside of the image; planes from 0 to 1."""
    planes = crops[..., 3:] / 255
    colours = (crops[..., :3] / 127.5 - 1) * planes[..., :1]
    return jnp.concatenate([colours, planes], axis=-1)


def make_completer(config: CompleterConfig, *, rngs: nnx.Rngs) -> CropUNet:
    """Builds a completer. Its mask has the crop's resolution; its finest grid has half of it: a
    convolution there costs a quarter, and the visible part of the outline is given anyway."""
    return CropUNet(config, patch=2, predicts_hidden=True, rngs=rngs)


def make_outliner(config: OutlinerConfig, *, rngs: nnx.Rngs) -> CropUNet:
    """Builds an outliner. Its mask has half of the crop's resolution. The backbone's first grid has
    stride 2; the next ones are the grids of this network."""
    return CropUNet(config, patch=4, block_dims=config.block_dims, rngs=rngs)
