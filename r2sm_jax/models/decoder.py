"""The pixel decoder (once per image) and the mask decoder (once per query).

The mask decoder follows SAM (segment_anything/modeling/mask_decoder.py, transformer.py): learned output tokens attend
to the prompt and the image, and small hypernetworks turn each token into a kernel, whose dot product with upscaled
pixel features is a mask. Two things differ. The prompt is text. And all queries share keys, values and pixel features
that are computed once per image, where SAM updates the image tokens for each prompt.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange, reduce
from flax import nnx
from jaxtyping import Array, Bool, Float

from r2sm_jax.config import DECODER_HEAD, PLACE, DecoderConfig, ModelConfig
from r2sm_jax.models.layers import MLP, Attention, Buffer, ConvBlock, Linear
from r2sm_jax.models.vision import VisionFeatures

PRIOR = -3.0
"""Initial mask logit: a mask fills about a twentieth of the image."""
FOCUS = 3.0
"""Largest logit by which a block's mask shifts the next block's attention (after Mask2Former's masked attention)."""


class PixelFeatures(NamedTuple):
    """Upscaled image features: `coarse` (half the resolution of `fine`) carries dense supervision."""

    coarse: Float[Array, "b _h _w _c"]
    fine: Float[Array, "b h w c"]


class Upscale(nnx.Module):
    """Doubles the resolution: a 2x2 transposed convolution, written as dense layer and pixel shuffle."""

    def __init__(self, in_dim: int, out_dim: int, skip_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.up = Linear(in_dim, 4 * out_dim, dtype=dtype, rngs=rngs)
        self.skip = Linear(skip_dim, out_dim, dtype=dtype, rngs=rngs) if skip_dim else None

    def __call__(
        self, x: Float[Array, "b h w d"], skip: Float[Array, "b _h _w _c"] | None
    ) -> Float[Array, "b _h _w c"]:
        """`skip` is given exactly where the layer was made with `skip_dim`."""
        x = rearrange(self.up(x), "b h w (y x c) -> b (h y) (w x) c", y=2, x=2)
        if self.skip is None:
            return x
        assert skip is not None  # for the type checker: a stem with skips always gives them
        return x + self.skip(skip)


class PixelDecoder(nnx.Module):
    """Token grid and skips of any encoder -> pixel features at 4 times the token resolution."""

    def __init__(self, config: ModelConfig, skip_dims: Mapping[int, int], *, rngs: nnx.Rngs):
        """`skip_dims`: channels of the encoder's skips by stride; those at a half and a quarter of the tokens' stride
        are used, if there are any."""
        decoder, stride, dtype = config.decoder, config.vision.patch_size, jnp.dtype(config.dtype)
        strides = list(skip_dims)
        self.skips = tuple(strides.index(s) if s in strides else None for s in (stride // 2, stride // 4))
        coarse_dim, fine_dim = (skip_dims.get(s, 0) for s in (stride // 2, stride // 4))
        self.coarse = Upscale(config.vision.out_dim, decoder.fine_dim, coarse_dim, dtype=dtype, rngs=rngs)
        self.refine = ConvBlock(decoder.fine_dim, dtype=dtype, rngs=rngs)
        self.fine = Upscale(decoder.fine_dim, decoder.mask_dim, fine_dim, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(decoder.mask_dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.out = Linear(decoder.mask_dim, decoder.mask_dim, dtype=dtype, rngs=rngs)

    def __call__(self, features: VisionFeatures) -> PixelFeatures:
        coarse_skip, fine_skip = (None if i is None else features.skips[i] for i in self.skips)
        coarse = self.refine(self.coarse(features.tokens, coarse_skip))
        fine = self.fine(coarse, fine_skip)
        fine = fine + self.out(nnx.relu(self.norm(fine)))
        return PixelFeatures(coarse, fine)


def places(size: int) -> Float[Array, "h w 4"]:
    """x, y, x², y² of every pixel, so that a kernel can confine its mask to a soft window, away from similar things."""
    at = (jnp.arange(size) + 0.5) / size * 2 - 1
    x, y = jnp.meshgrid(at, at, indexing="xy")
    return 2 * jnp.stack([x, y, x**2, y**2], axis=-1)


class DecoderBlock(nnx.Module):
    """Tokens attend to one another and the text, then to the image, then an MLP (pre-norm)."""

    def __init__(self, config: DecoderConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d = config.dim
        self.prompt = Attention(d, config.heads, dtype=dtype, rngs=rngs)
        self.image = Attention(d, config.heads, dtype=dtype, rngs=rngs)
        self.mlp = MLP((d, config.mlp_dim, d), dtype=dtype, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(d, epsilon=1e-5, dtype=dtype, rngs=rngs) for _ in range(3)])

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
    """Predicted IoU of the modal and the amodal mask. SAM's decoder is linear here, so it can leave 0..1."""
    type_state: Float[Array, "b k d"] | None = None
    """The type token, for the `decoder` mask-type head."""
    pixels: Float[Array, "b k h w c"] | None = None
    """Pixel features of each query, where they are not those of the image."""

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
        self.blocks = nnx.List([DecoderBlock(decoder, dtype=dtype, rngs=rngs) for _ in range(decoder.depth)])
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
            focus = rearrange(jax.lax.stop_gradient(jnp.clip(seen, -FOCUS, FOCUS)), "b k q h w -> b k q (h w)")
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


def fourier_features(points: Float[Array, "n 2"], frequencies: Float[Array, "2 _f"]) -> Float[Array, "n _d"]:
    """Sines, then cosines, of points in -1..1 at random frequencies."""
    angles = 2 * jnp.pi * points @ frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def draw_masks(kernels: Kernels, pixels: Float[Array, "b *k h w _c"]) -> Float[Array, "b k q 2 h w"]:
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
