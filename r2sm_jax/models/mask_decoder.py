"""The pixel decoder (once per image) and the two mask decoders (once per query).

Both mask decoders follow SAM (segment_anything/modeling/mask_decoder.py, transformer.py) with text as the prompt:
learned output tokens attend to the prompt and the image, and small hypernetworks turn each token into a kernel, whose
dot product with upscaled pixel features is a mask. `MaskDecoder` is ours: all queries share keys, values and pixel
features that are computed once per image. `SamMaskDecoder` is the one that SAM's published weights fit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange, reduce
from flax import nnx
from jaxtyping import Array, Bool, Float

from r2sm_jax.config import DECODER_HEAD, PLACE, DecoderConfig, ModelConfig
from r2sm_jax.models.image_encoder import VisionFeatures
from r2sm_jax.models.layers import MLP, Attention, Buffer, ConvBlock, Linear

PRIOR = -3.0
"""Initial mask logit: a mask fills about a twentieth of the image."""
FOCUS = 3.0
"""Largest logit by which a block's mask shifts the next block's attention (after Mask2Former's masked attention)."""
SHUFFLE = "b h w (y x c) -> b (h y) (w x) c"
"""A dense layer and this pixel shuffle are a 2x2 transposed convolution."""


class PixelFeatures(NamedTuple):
    """Upscaled image features: `coarse` (half the resolution of `fine`) carries dense supervision."""

    coarse: Float[Array, "b _h _w _c"]
    fine: Float[Array, "b h w c"]


class Upscale(nnx.Module):
    """Doubles the resolution by a 2x2 transposed convolution."""

    def __init__(
        self, in_dim: int, out_dim: int, skip_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.up = Linear(in_dim, 4 * out_dim, dtype=dtype, rngs=rngs)
        self.skip = Linear(skip_dim, out_dim, dtype=dtype, rngs=rngs) if skip_dim else None

    def __call__(
        self, x: Float[Array, "b h w d"], skip: Float[Array, "b _h _w _c"] | None
    ) -> Float[Array, "b _h _w c"]:
        """`skip` is given exactly where the layer was made with `skip_dim`."""
        x = rearrange(self.up(x), SHUFFLE, y=2, x=2)
        if self.skip is None:
            return x
        assert skip is not None  # for the type checker: a stem with skips always gives them
        return x + self.skip(skip)


class PixelDecoder(nnx.Module):
    """Token grid and skips of any encoder -> pixel features at 4 times the token resolution."""

    def __init__(self, config: ModelConfig, skip_dims: tuple[int, ...], *, rngs: nnx.Rngs):
        """`skip_dims`: channels of `VisionFeatures.skips`; 0 where there are none."""
        decoder, dtype = config.decoder, jnp.dtype(config.dtype)
        fine_dim, coarse_dim = skip_dims
        self.coarse = Upscale(
            config.vision.out_dim, decoder.fine_dim, coarse_dim, dtype=dtype, rngs=rngs
        )
        self.refine = ConvBlock(decoder.fine_dim, dtype=dtype, rngs=rngs)
        self.fine = Upscale(decoder.fine_dim, decoder.mask_dim, fine_dim, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(decoder.mask_dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.out = Linear(decoder.mask_dim, decoder.mask_dim, dtype=dtype, rngs=rngs)

    def __call__(self, features: VisionFeatures) -> PixelFeatures:
        fine_skip, coarse_skip = features.skips
        coarse = self.refine(self.coarse(features.tokens, coarse_skip))
        fine = self.fine(coarse, fine_skip)
        fine = fine + self.out(nnx.relu(self.norm(fine)))
        return PixelFeatures(coarse, fine)


def places(size: int) -> Float[Array, "h w 4"]:
    """x, y, x², y² of every pixel, so that a kernel can confine its mask to a soft window, away from similar things."""
    at = grid_centres(size).reshape(size, size, 2)
    return 2 * jnp.concatenate([at, at**2], axis=-1)


class DecoderBlock(nnx.Module):
    """Tokens attend to one another and the text, then to the image, then an MLP (pre-norm)."""

    def __init__(self, config: DecoderConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d = config.dim
        self.prompt = Attention(d, config.heads, dtype=dtype, rngs=rngs)
        self.image = Attention(d, config.heads, dtype=dtype, rngs=rngs)
        self.mlp = MLP((d, config.mlp_dim, d), dtype=dtype, rngs=rngs)
        self.norms = nnx.List(
            [nnx.LayerNorm(d, epsilon=1e-5, dtype=dtype, rngs=rngs) for _ in range(3)]
        )

    def __call__(
        self,
        tokens: Float[Array, "b k q d"],
        text: Float[Array, "b k t d"],
        text_mask: Bool[Array, "b k t"],
        image: Float[Array, "b n d"],
        positions: Float[Array, "n d"],
        focus: Float[Array, "b k q n"] | None,
    ) -> Float[Array, "b k q d"]:
        """`focus` shifts attention to the image tokens where the last block saw the mask."""
        b, k, q, _ = tokens.shape
        normed = self.norms[0](tokens)
        prompt = jnp.concatenate([normed, text], axis=2)
        seen = jnp.concatenate([jnp.ones((b, k, q), bool), text_mask], axis=2)
        tokens = tokens + self.prompt(normed, prompt, prompt, seen)
        merged = rearrange(self.norms[1](tokens), "b k q d -> b (k q) d")
        bias = None if focus is None else rearrange(focus, "b k q n -> b 1 (k q) n")
        attended = self.image(merged, image + positions, image, bias=bias)
        tokens = tokens + rearrange(attended, "b (k q) d -> b k q d", k=k)
        return tokens + self.mlp(self.norms[2](tokens))


class Kernels(NamedTuple):
    """Masks before they are drawn: weights over channels of pixel features, for the modal and the completing mask."""

    weights: Float[Array, "b k q 2 c"]
    biases: Float[Array, "b k q 2"]

    def of(self, tokens: slice) -> "Kernels":
        """The kernels of some of the q tokens."""
        return Kernels(self.weights[:, :, tokens], self.biases[:, :, tokens])


class MaskTokens(NamedTuple):
    """The mask decoder's output for every query, without any pixel. Token 0 is the fused one."""

    kernels: Kernels
    early: tuple[Kernels, ...]
    """The same after every block but the last: supervised in training, and the `focus` of the next block."""
    presence: Float[Array, "b k q"]
    """Logit that the token has a target."""
    iou: Float[Array, "b k q 2"]
    """Predicted IoU of the modal and the amodal mask that are answered. SAM's decoder is linear here, so it can leave
    0..1."""
    type_state: Float[Array, "b k d"] | None = None
    """The type token, for the `decoder` mask-type head."""
    pixels: Float[Array, "b k h w c"] | None = None
    """Pixel features of each query, where they are not those of the image."""
    second: Kernels | None = None
    """The kernels of the second look (`R2SM.refine_kernels`), where there is one."""

    @property
    def answered(self) -> Kernels:
        """The kernels that answers are drawn with."""
        return self.kernels if self.second is None else self.second

    def canvas(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b *k _h _w _c"]:
        """The pixel features that the kernels are multiplied with: those of the image, or the queries' own."""
        return pixels if self.pixels is None else self.pixels


class MaskDecoder(nnx.Module):
    """Text and image -> kernels of the fused mask and of N instance slots."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """The `decoder` mask-type head gets one more token, which draws no mask."""
        decoder, d, dtype = config.decoder, config.decoder.dim, jnp.dtype(config.dtype)
        self.masks, self.type_token = 1 + decoder.slots, config.head == DECODER_HEAD
        init = nnx.initializers.truncated_normal(1.0)
        self.output_tokens = nnx.Param(init(rngs.params(), (self.masks + self.type_token, d)))
        # SAM's random Fourier features of the cell centres (prompt_encoder.py, PositionEmbeddingRandom).
        frequencies = jax.random.normal(rngs.params(), (2, d // 2))
        self.positions = Buffer(fourier_features(grid_centres(config.vision.grid), frequencies))
        self.text = Linear(config.text.dim * len(config.text.layers), d, dtype=dtype, rngs=rngs)
        self.text_norm = nnx.LayerNorm(d, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.image = Linear(config.vision.out_dim, d, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [DecoderBlock(decoder, dtype=dtype, rngs=rngs) for _ in range(decoder.depth)]
        )
        self.norm = nnx.LayerNorm(d, epsilon=1e-5, dtype=dtype, rngs=rngs)
        out = 2 * (decoder.kernel_dim + 1)
        self.fused = MLP((d, d, d, out), dtype=dtype, rngs=rngs)
        self.slots = MLP((d, d, d, out), dtype=dtype, rngs=rngs)
        self.scores = MLP((d, d, 3), dtype=dtype, rngs=rngs)

    def __call__(
        self,
        image: Float[Array, "b h w d"],
        pixels: Float[Array, "b _h _w c"],
        text: Float[Array, "b k t e"],
        text_mask: Bool[Array, "b k t"],
    ) -> MaskTokens:
        b, k, _, _ = text.shape
        words = self.text_norm(self.text(text))
        keys = self.image(rearrange(image, "b h w d -> b (h w) d"))
        cell = pixels.shape[1] // image.shape[1]
        grid = reduce(pixels, "b (h y) (w x) c -> b h w c", "mean", y=cell, x=cell)
        positions = self.positions[...].astype(keys.dtype)
        tokens = self.output_tokens[...].astype(words.dtype)
        tokens = jnp.broadcast_to(tokens, (b, k, *tokens.shape))
        drawn: list[Kernels] = []
        focus = None
        for block in self.blocks:
            tokens = block(tokens, words, text_mask, keys, positions, focus)
            drawn.append(self._kernels(self.norm(tokens[:, :, : self.masks])))
            seen = draw_masks(drawn[-1], grid).max(3)
            focus = rearrange(
                jax.lax.stop_gradient(jnp.clip(seen, -FOCUS, FOCUS)), "b k q h w -> b k q (h w)"
            )
            focus = jnp.pad(focus, ((0, 0), (0, 0), (0, int(self.type_token)), (0, 0)))
        tokens = self.norm(tokens)
        scores = self.scores(tokens[:, :, : self.masks]).astype(jnp.float32)
        iou, state = jax.nn.sigmoid(scores[..., 1:]), tokens[:, :, -1] if self.type_token else None
        return MaskTokens(drawn[-1], tuple(drawn[:-1]), scores[..., 0], iou, state)

    def _kernels(self, tokens: Float[Array, "b k q d"]) -> Kernels:
        out = jnp.concatenate([self.fused(tokens[:, :, :1]), self.slots(tokens[:, :, 1:])], axis=2)
        return make_kernels(out)


def make_kernels(out: Float[Array, "b k q _o"]) -> Kernels:
    """The 2 (c + 1) outputs of a hypernetwork for each token as float32 weights and biases."""
    out = rearrange(out, "b k q (two c) -> b k q two c", two=2).astype(jnp.float32)
    weights = out[..., :-1]
    return Kernels(weights * weights.shape[-1] ** -0.5, out[..., -1] + PRIOR)


def grid_centres(grid: int) -> Float[Array, "n 2"]:
    """x and y of the cell centres of a square, row by row, in -1..1."""
    centres = (jnp.arange(grid) + 0.5) / grid * 2 - 1
    return jnp.stack(jnp.meshgrid(centres, centres, indexing="xy"), axis=-1).reshape(-1, 2)


def fourier_features(
    points: Float[Array, "n 2"], frequencies: Float[Array, "2 _f"]
) -> Float[Array, "n _d"]:
    """Sines, then cosines, of points in -1..1 at random frequencies."""
    angles = 2 * jnp.pi * points @ frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def draw_masks(
    kernels: Kernels, pixels: Float[Array, "b *k h w _c"]
) -> Float[Array, "b k q 2 h w"]:
    """Mask logits in float32: every kernel times every pixel, of the image or of its own query.

    Kernels for an image's pixels have `PLACE` more channels than these, for the pixel's place.
    """
    b, k, q, two, _ = kernels.weights.shape
    if pixels.ndim == 5:
        logits = jnp.einsum("bkqtc,bkhwc->bkqthw", kernels.weights, pixels.astype(jnp.float32))
        return logits + kernels.biases[..., None, None]
    flat = rearrange(kernels.weights, "b k q two c -> b (k q two) c")
    logits = jnp.einsum("bqc,bhwc->bqhw", flat[..., :-PLACE], pixels.astype(flat.dtype))
    logits += jnp.einsum("bqc,hwc->bqhw", flat[..., -PLACE:], places(pixels.shape[1]))
    return logits.reshape(b, k, q, two, *pixels.shape[1:3]) + kernels.biases[..., None, None]


def draw_pair(
    kernels: Kernels, pixels: Float[Array, "b *k h w c"]
) -> tuple[Float[Array, "b k q h w"], Float[Array, "b k q h w"]]:
    """Modal and amodal logits: the amodal one is the larger of modal and completing, so modal ⊆ amodal."""
    logits = draw_masks(kernels, pixels)
    return logits[:, :, :, 0], logits.max(3)


# The decoder that SAM's weights fit. It updates the image tokens for each query, which costs more.


class TwoWayBlock(nnx.Module):
    """Tokens attend to one another and to the image, then an MLP; then the image attends to the tokens (post-norm)."""

    def __init__(self, config: DecoderConfig, first: bool, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, heads = config.dim, config.heads
        self.first = first
        self.self_attention = Attention(d, heads, dtype=dtype, rngs=rngs)
        self.to_image = Attention(d, heads, inner=d // 2, dtype=dtype, rngs=rngs)
        self.mlp = MLP((d, config.mlp_dim, d), dtype=dtype, rngs=rngs, activation="relu")
        self.to_tokens = Attention(d, heads, inner=d // 2, dtype=dtype, rngs=rngs)
        self.norms = nnx.List(
            [nnx.LayerNorm(d, epsilon=1e-6, dtype=dtype, rngs=rngs) for _ in range(4)]
        )

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
        image = self.norms[3](
            image + self.to_tokens(image + positions, tokens + places, tokens, seen)
        )
        return tokens, image


class SamUpscale(nnx.Module):
    """Two 2x2 transposed convolutions: 4 times the resolution."""

    def __init__(self, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.up1 = Linear(dim, 4 * (dim // 4), dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(dim // 4, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.up2 = Linear(dim // 4, 4 * (dim // 8), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "n h w d"]) -> Float[Array, "n _h _w _c"]:
        x = self.norm(rearrange(self.up1(x), SHUFFLE, y=2, x=2))
        x = nnx.gelu(x, approximate=False)
        return nnx.gelu(rearrange(self.up2(x), SHUFFLE, y=2, x=2), approximate=False)


class SamMaskDecoder(nnx.Module):
    """Text and image -> kernels of the fused mask and of N instance slots, and the pixel features of each query.

    Text tokens replace points and boxes. Each mask token has a second hypernetwork for the occluded part and a presence
    logit. With three slots, and SAM's prompts in place of the text, it computes exactly SAM's four masks and IoUs.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """The `decoder` mask-type head gets one more token."""
        decoder, d, dtype = config.decoder, config.decoder.dim, jnp.dtype(config.dtype)
        masks, init = 1 + decoder.slots, nnx.initializers.truncated_normal(1.0)
        self.iou_token = nnx.Param(init(rngs.params(), (1, d)))
        self.mask_tokens = nnx.Param(init(rngs.params(), (masks, d)))
        self.type_token = (
            nnx.Param(init(rngs.params(), (1, d))) if config.head == DECODER_HEAD else None
        )
        self.no_mask = nnx.Param(jnp.zeros((1, d)))
        self.frequencies = Buffer(jax.random.normal(rngs.params(), (2, d // 2)))
        self.text = Linear(config.text.dim * len(config.text.layers), d, dtype=dtype, rngs=rngs)
        self.text_norm = nnx.LayerNorm(d, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [TwoWayBlock(decoder, i == 0, dtype=dtype, rngs=rngs) for i in range(decoder.depth)]
        )
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
        self,
        image: Float[Array, "b h w d"],
        prompts: Float[Array, "b k t d"],
        seen: Bool[Array, "b k t"],
    ) -> MaskTokens:
        """The same from prompt tokens of any origin, such as SAM's points and boxes; `seen` is False on padding."""
        b, k, _, d = prompts.shape
        h, w = image.shape[1:3]
        masks = len(self.modal)
        learned = [
            self.iou_token,
            self.mask_tokens,
            *([] if self.type_token is None else [self.type_token]),
        ]
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
