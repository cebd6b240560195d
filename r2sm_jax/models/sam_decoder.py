"""SAM's two-way mask decoder with text as prompt: the one that SAM's published weights fit.

The layout follows segment-anything (segment_anything/modeling/mask_decoder.py, transformer.py): post-norm blocks in
which tokens and image tokens attend to one another, upscaling of the image tokens, a hypernetwork for each mask token,
IoU from a token of its own. Text tokens replace points and boxes. Each mask token, the fused one and N slots, has a
second hypernetwork for the occluded part and a presence logit. With three slots, and SAM's prompts in place of the
text, it computes exactly SAM's four masks and IoUs.

Image tokens are updated for each query, so queries share no pixel features. It costs more than decoder.py.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from r2sm_jax.config import DECODER_HEAD, DecoderConfig, ModelConfig
from r2sm_jax.models.decoder import Kernels, MaskTokens, fourier_features, grid_centres
from r2sm_jax.models.layers import MLP, Attention, Buffer, Linear


class TwoWayBlock(nnx.Module):
    """Tokens attend to one another and to the image, then an MLP; then the image attends to the tokens (post-norm)."""

    def __init__(self, config: DecoderConfig, first: bool, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, heads = config.dim, config.heads
        self.first = first
        self.self_attention = Attention(d, heads, dtype=dtype, rngs=rngs)
        self.to_image = Attention(d, heads, inner=d // 2, dtype=dtype, rngs=rngs)
        self.mlp = MLP((d, config.mlp_dim, d), dtype=dtype, rngs=rngs, activation="relu")
        self.to_tokens = Attention(d, heads, inner=d // 2, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(d, epsilon=1e-6, dtype=dtype, rngs=rngs) for _ in range(4)])

    def __call__(
        self,
        tokens: Float[Array, "n t d"],
        image: Float[Array, "n s d"],
        places: Float[Array, "n t d"],
        positions: Float[Array, "s d"],
        seen: Bool[Array, "n t"],
    ) -> tuple[Float[Array, "n t d"], Float[Array, "n s d"]]:
        """n queries at once. `places` are the input tokens, which SAM adds as positions; `seen` is False on padding of
        the text."""
        if self.first:
            tokens = self.norms[0](self.self_attention(tokens, tokens, tokens, seen))
        else:
            placed = tokens + places
            tokens = self.norms[0](tokens + self.self_attention(placed, placed, tokens, seen))
        tokens = self.norms[1](tokens + self.to_image(tokens + places, image + positions, image))
        tokens = self.norms[2](tokens + self.mlp(tokens))
        image = self.norms[3](image + self.to_tokens(image + positions, tokens + places, tokens, seen))
        return tokens, image


class SamUpscale(nnx.Module):
    """Two 2x2 transposed convolutions, written as dense layers and pixel shuffles: 4 times the resolution."""

    def __init__(self, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.up1 = Linear(dim, 4 * (dim // 4), dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(dim // 4, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.up2 = Linear(dim // 4, 4 * (dim // 8), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "n h w d"]) -> Float[Array, "n _h _w _c"]:
        shuffle = "n h w (y x c) -> n (h y) (w x) c"
        x = self.norm(rearrange(self.up1(x), shuffle, y=2, x=2))
        x = nnx.gelu(x, approximate=False)
        return nnx.gelu(rearrange(self.up2(x), shuffle, y=2, x=2), approximate=False)


class SamMaskDecoder(nnx.Module):
    """Text and image -> kernels of the fused mask and of N instance slots, and the pixel features of each query."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """The `decoder` mask-type head gets one more token."""
        decoder, d, dtype = config.decoder, config.decoder.dim, jnp.dtype(config.dtype)
        masks, init = 1 + decoder.slots, nnx.initializers.truncated_normal(1.0)
        self.iou_token = nnx.Param(init(rngs.params(), (1, d)))
        self.mask_tokens = nnx.Param(init(rngs.params(), (masks, d)))
        self.type_token = nnx.Param(init(rngs.params(), (1, d))) if config.head == DECODER_HEAD else None
        self.no_mask = nnx.Param(jnp.zeros((1, d)))
        self.frequencies = Buffer(jax.random.normal(rngs.params(), (2, d // 2)))
        self.text = Linear(config.text.dim * len(config.text.layers), d, dtype=dtype, rngs=rngs)
        self.text_norm = nnx.LayerNorm(d, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([TwoWayBlock(decoder, i == 0, dtype=dtype, rngs=rngs) for i in range(decoder.depth)])
        self.last = Attention(d, decoder.heads, inner=d // 2, dtype=dtype, rngs=rngs)
        self.last_norm = nnx.LayerNorm(d, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.upscale = SamUpscale(d, dtype=dtype, rngs=rngs)
        options = {"dtype": dtype, "rngs": rngs, "activation": "relu"}
        self.modal = nnx.List([MLP((d, d, d, d // 8), **options) for _ in range(masks)])
        self.occluded = nnx.List([MLP((d, d, d, d // 8), **options) for _ in range(masks)])
        self.iou = MLP((d, d, d, 2 * masks), **options)
        self.presence = MLP((d, d, 1), **options)

    def __call__(
        self,
        image: Float[Array, "b h w d"],
        pixels: Float[Array, "b _h _w _c"],
        text: Float[Array, "b k t e"],
        text_mask: Bool[Array, "b k t"],
    ) -> MaskTokens:
        """`pixels`, which the other decoder's queries share, are not used: each query makes its own."""
        return self.prompted(image, self.text_norm(self.text(text)), text_mask)

    def prompted(
        self, image: Float[Array, "b h w d"], prompts: Float[Array, "b k t d"], seen: Bool[Array, "b k t"]
    ) -> MaskTokens:
        """The same from prompt tokens of any origin, such as SAM's points and boxes; `seen` is False on padding."""
        b, k, _, d = prompts.shape
        h, w = image.shape[1:3]
        masks = len(self.modal)
        learned = [self.iou_token, self.mask_tokens, *([] if self.type_token is None else [self.type_token])]
        own = jnp.concatenate([tokens[...] for tokens in learned]).astype(prompts.dtype)
        tokens = jnp.concatenate([jnp.broadcast_to(own, (b, k, *own.shape)), prompts], axis=2)
        seen = jnp.concatenate([jnp.ones((b, k, len(own)), bool), seen], axis=2)
        tokens, seen = (rearrange(x, "b k ... -> (b k) ...") for x in (tokens, seen))
        places = tokens
        keys = rearrange(image + self.no_mask[...].astype(image.dtype), "b h w d -> b (h w) d")
        keys = jnp.repeat(keys, k, axis=0)
        positions = fourier_features(grid_centres(h), self.frequencies[...]).astype(keys.dtype)
        for block in self.blocks:
            tokens, keys = block(tokens, keys, places, positions, seen)
        tokens = self.last_norm(tokens + self.last(tokens + places, keys + positions, keys))

        features = self.upscale(keys.reshape(b * k, h, w, d)).reshape(b, k, 4 * h, 4 * w, d // 8)
        drawn = tokens[:, 1 : 1 + masks].reshape(b, k, masks, d)
        pairs = [
            jnp.stack([modal(drawn[:, :, i]), occluded(drawn[:, :, i])], axis=2)
            for i, (modal, occluded) in enumerate(zip(self.modal, self.occluded, strict=True))
        ]
        weights = jnp.stack(pairs, axis=2).astype(jnp.float32)
        iou = self.iou(tokens[:, 0]).astype(jnp.float32)
        return MaskTokens(
            Kernels(weights, jnp.zeros(weights.shape[:-1])),
            (),
            self.presence(drawn)[..., 0].astype(jnp.float32),
            rearrange(iou, "(b k) (two q) -> b k q two", b=b, two=2),
            None if self.type_token is None else tokens[:, 1 + masks].reshape(b, k, d),
            features,
        )
