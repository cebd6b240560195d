"""The pixel decoder (once per image) and the mask decoder whose queries share its features (once
per query).

The mask decoder follows SAM (segment_anything/modeling/mask_decoder.py, transformer.py) with text
as the prompt: learned output tokens attend to the prompt and the image, and small MLPs turn each
token into a pair of kernels. The dot products of the kernels with the pixel features are two masks:
the modal one, and one that completes it.

Here all queries of an image share keys, values and pixel features. sam_decoder.py has the decoder
that SAM's published weights fit; both return a `DecoderOutput`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange, reduce
from flax import nnx
from jaxtyping import Array, Bool, Float

from r2sm_jax.config import DECODER_HEAD, DecoderConfig, ModelConfig
from r2sm_jax.models.image_encoder import VisionFeatures
from r2sm_jax.models.layers import MLP, Attention, Buffer, ConvBlock, Linear, truncated_normal
from r2sm_jax.query import AMODAL, MODAL

MASK_BIAS_INIT = -3.0
"""Mask logit of an untrained model. At sigmoid(-3) = 0.05 a mask fills a twentieth of the image,
about as much as the masks of the data do. From 0, the first steps would only learn that most pixels
are background."""
MAX_ATTENTION_BIAS = 3.0
"""Largest logit by which a block's mask shifts the next block's attention. Mask2Former hides
everything outside of the mask. Factors between exp(-3) and exp(3) lead attention there as well, and
a mask that is wrong can still recover."""
PIXEL_SHUFFLE = "b h w (y x c) -> b (h y) (w x) c"
"""A dense layer and this rearrangement are a 2x2 transposed convolution."""


class MaskKernels(NamedTuple):
    """Weights over the channels of pixel features: for each token a modal and a completing mask.

    q counts output tokens, 1 + slots. Token 0 is the fused one, for all instances of a query
    together. The others are slots for one instance each.
    """

    weights: Float[Array, "b k q 2 c"]
    biases: Float[Array, "b k q 2"]

    @property
    def fused(self) -> "MaskKernels":
        return MaskKernels(self.weights[:, :, :1], self.biases[:, :, :1])

    @property
    def slots(self) -> "MaskKernels":
        return MaskKernels(self.weights[:, :, 1:], self.biases[:, :, 1:])


class DecoderOutput(NamedTuple):
    """What a mask decoder predicts for every query: kernels and scores of each token, and where to
    apply them."""

    kernels: MaskKernels
    aux_kernels: tuple[MaskKernels, ...]
    """The kernels after every block but the last, for auxiliary losses."""
    refined_kernels: MaskKernels
    """The kernels that masks are predicted with. A decoder gives `kernels` here;
    `R2SM.decode_kernels` replaces them by `R2SM.refine_kernels` where `ModelConfig.refines`."""
    presence: Float[Array, "b k q"]
    """Logit that the token has a target."""
    iou: Float[Array, "b k q 2"]
    """Predicted IoU of the modal and of the amodal mask. SAM's decoder is linear here, so it can
    leave 0..1."""
    pixel_features: Float[Array, "b *k h w c"]
    """Those of the image, or in SAM's decoder those of each query."""
    type_state: Float[Array, "b k d"] | None = None
    """The token that the `decoder` mask-type head reads."""


def make_kernels(outputs: Float[Array, "b k q _o"]) -> MaskKernels:
    """Splits the 2 (c + 1) outputs of an MLP for each token into float32 weights and biases."""
    outputs = rearrange(outputs, "b k q (two c) -> b k q two c", two=2).astype(jnp.float32)
    weights = outputs[..., :-1]
    biases = outputs[..., -1]
    # Scaled as attention logits are: the spread of a dot product over c channels then does not grow
    # with c.
    return MaskKernels(weights * weights.shape[-1] ** -0.5, biases + MASK_BIAS_INIT)


def predict_mask_logits(
    kernels: MaskKernels, pixel_features: Float[Array, "b *k h w _c"]
) -> Float[Array, "b k q 2 h w"]:
    """Applies every kernel to every pixel, in float32: logits of the modal and of the completing
    mask.

    Pixel features are those of the image [b h w c], or of each query [b k h w c] in SAM's decoder.
    Kernels for an image's features have `NUM_COORDINATES` more channels, for `coordinate_features`.
    """
    b, k, q, _, _ = kernels.weights.shape
    biases = kernels.biases[..., None, None]
    if pixel_features.ndim == 5:
        features = pixel_features.astype(jnp.float32)
        return jnp.einsum("bkqtc,bkhwc->bkqthw", kernels.weights, features) + biases

    # All kernels of an image meet the same features, so that this is one product.
    weights = rearrange(kernels.weights, "b k q two c -> b (k q two) c")
    features = pixel_features.astype(weights.dtype)
    coordinates = coordinate_features(features.shape[1])
    num_features = features.shape[-1]
    # Two products instead of one over concatenated channels: the coordinates need not be repeated
    # for every image.
    logits = jnp.einsum("bnc,bhwc->bnhw", weights[..., :num_features], features)
    logits += jnp.einsum("bnc,hwc->bnhw", weights[..., num_features:], coordinates)
    return rearrange(logits, "b (k q two) h w -> b k q two h w", b=b, k=k, q=q) + biases


def predict_masks(
    kernels: MaskKernels, pixel_features: Float[Array, "b *k h w _c"]
) -> Float[Array, "b k q 2 h w"]:
    """Modal and amodal mask logits. The amodal mask is the maximum of the modal and the completing
    one, so that the modal mask lies within the amodal one for any weights."""
    logits = predict_mask_logits(kernels, pixel_features)
    return jnp.maximum(logits, logits[:, :, :, MODAL, None])


def coordinate_features(size: int) -> Float[Array, "h w 4"]:
    """x, y, x², y² of every pixel. A kernel can confine its mask to an ellipse with them, away from
    similar things."""
    centres = grid_centres(size).reshape(size, size, 2)
    # Times 2 for a variance near 1, as that of the features beside them.
    return 2 * jnp.concatenate([centres, centres**2], axis=-1)


def grid_centres(size: int) -> Float[Array, "n 2"]:
    """x and y of the cell centres of a square, row by row, in -1..1."""
    centres = (jnp.arange(size) + 0.5) / size * 2 - 1
    return jnp.stack(jnp.meshgrid(centres, centres, indexing="xy"), axis=-1).reshape(-1, 2)


def fourier_features(
    points: Float[Array, "n 2"], frequencies: Float[Array, "2 _f"]
) -> Float[Array, "n _d"]:
    """Sines, then cosines, of points in -1..1 at random frequencies (SAM's prompt_encoder.py,
    PositionEmbeddingRandom)."""
    angles = 2 * jnp.pi * points @ frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Upscale(nnx.Module):
    """Doubles the resolution by a 2x2 transposed convolution, and adds encoder features of that
    resolution."""

    def __init__(
        self, in_dim: int, out_dim: int, skip_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.up = Linear(in_dim, 4 * out_dim, dtype=dtype, rngs=rngs)
        self.skip = Linear(skip_dim, out_dim, dtype=dtype, rngs=rngs) if skip_dim else None

    def __call__(
        self, x: Float[Array, "b h w d"], skip: Float[Array, "b _h _w _c"] | None
    ) -> Float[Array, "b _h _w c"]:
        x = rearrange(self.up(x), PIXEL_SHUFFLE, y=2, x=2)
        if self.skip is None:
            return x
        assert skip is not None  # an encoder with `skip_dims` always returns skips
        return x + self.skip(skip)


class PixelDecoder(nnx.Module):
    """Upsamples the token grid of any encoder to pixel features at 4 times its resolution."""

    def __init__(self, config: ModelConfig, skip_dims: tuple[int, ...], *, rngs: nnx.Rngs):
        """`skip_dims`: channels of `VisionFeatures.skips`; 0 where there are none."""
        options: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "rngs": rngs}
        fine_skip_dim, coarse_skip_dim = skip_dims
        # The names of the sizes are older: `fine_dim` is that of the coarse features.
        coarse_dim, fine_dim = config.decoder.fine_dim, config.decoder.mask_dim
        self.coarse = Upscale(config.vision.out_dim, coarse_dim, coarse_skip_dim, **options)
        self.refine = ConvBlock(coarse_dim, **options)
        self.fine = Upscale(coarse_dim, fine_dim, fine_skip_dim, **options)
        self.norm = nnx.LayerNorm(fine_dim, epsilon=1e-6, **options)
        self.out = Linear(fine_dim, fine_dim, **options)

    def __call__(
        self, features: VisionFeatures
    ) -> tuple[Float[Array, "b _h2 _w2 _c2"], Float[Array, "b _h4 _w4 _c4"]]:
        """Returns coarse and fine features: 2 and 4 times the resolution of the tokens."""
        fine_skip, coarse_skip = features.skips
        coarse = self.refine(self.coarse(features.tokens, coarse_skip))
        fine = self.fine(coarse, fine_skip)
        fine = fine + self.out(nnx.relu(self.norm(fine)))
        return coarse, fine


class DecoderBlock(nnx.Module):
    """Tokens attend to one another and the words, then to the image, then an MLP (pre-norm)."""

    def __init__(self, config: DecoderConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d = config.dim
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.token_attention = Attention(d, config.heads, **options)
        self.image_attention = Attention(d, config.heads, **options)
        self.mlp = MLP((d, config.mlp_dim, d), **options)
        self.norms = nnx.List([nnx.LayerNorm(d, epsilon=1e-5, **options) for _ in range(3)])

    def __call__(
        self,
        tokens: Float[Array, "b k q d"],
        words: Float[Array, "b k t d"],
        text_mask: Bool[Array, "b k t"],
        image: Float[Array, "b n d"],
        positions: Float[Array, "n d"],
        image_bias: Float[Array, "b k q n"] | None,
    ) -> Float[Array, "b k q d"]:
        """`image_bias` is added to the attention logits of the image tokens."""
        b, k, q, _ = tokens.shape
        normed = self.norms[0](tokens)
        keys = jnp.concatenate([normed, words], axis=2)
        key_mask = jnp.concatenate([jnp.ones((b, k, q), bool), text_mask], axis=2)
        tokens = tokens + self.token_attention(normed, keys, keys, key_mask)

        # The tokens of all queries are one sequence here, so that one attention reads the image
        # once.
        normed = rearrange(self.norms[1](tokens), "b k q d -> b (k q) d")
        bias = None
        if image_bias is not None:
            bias = rearrange(image_bias, "b k q n -> b 1 (k q) n")
        attended = self.image_attention(normed, image + positions, image, bias=bias)
        tokens = tokens + rearrange(attended, "b (k q) d -> b k q d", k=k)

        return tokens + self.mlp(self.norms[2](tokens))


class MaskDecoder(nnx.Module):
    """Words and image -> kernels of the fused mask and of N instance slots."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """The `decoder` mask-type head gets one more token, which predicts no mask."""
        decoder = config.decoder
        d = decoder.dim
        options: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "rngs": rngs}
        self.num_masks = 1 + decoder.slots
        self.has_type_token = config.head == DECODER_HEAD
        num_tokens = self.num_masks + int(self.has_type_token)
        tokens = truncated_normal(rngs.params(), (num_tokens, d), std=1.0)
        self.output_tokens = nnx.Param(tokens)
        frequencies = jax.random.normal(rngs.params(), (2, d // 2))
        self.positions = Buffer(fourier_features(grid_centres(config.vision.grid), frequencies))
        self.text = Linear(config.text.dim * len(config.text.layers), d, **options)
        self.text_norm = nnx.LayerNorm(d, epsilon=1e-5, **options)
        self.image = Linear(config.vision.out_dim, d, **options)
        self.blocks = nnx.List([DecoderBlock(decoder, **options) for _ in range(decoder.depth)])
        self.norm = nnx.LayerNorm(d, epsilon=1e-5, **options)
        num_outputs = 2 * (decoder.region_dim + 1)
        self.fused_kernels = MLP((d, d, d, num_outputs), **options)
        self.slot_kernels = MLP((d, d, d, num_outputs), **options)
        self.scores = MLP((d, d, 3), **options)

    def __call__(
        self,
        image: Float[Array, "b h w d"],
        pixel_features: Float[Array, "b _h _w c"],
        text: Float[Array, "b k t e"],
        text_mask: Bool[Array, "b k t"],
    ) -> DecoderOutput:
        """Reads image tokens and token states; `pixel_features` are the pixel decoder's fine
        ones."""
        b, k, _, _ = text.shape
        words = self.text_norm(self.text(text))
        tokens = self.output_tokens[...].astype(words.dtype)
        tokens = jnp.broadcast_to(tokens, (b, k, *tokens.shape))
        keys = self.image(rearrange(image, "b h w d -> b (h w) d"))
        positions = self.positions[...].astype(keys.dtype)
        cell = pixel_features.shape[1] // image.shape[1]
        grid_features = reduce(pixel_features, "b (h y) (w x) c -> b h w c", "mean", y=cell, x=cell)

        kernels_of_blocks: list[MaskKernels] = []
        image_bias = None
        for block in self.blocks:
            tokens = block(tokens, words, text_mask, keys, positions, image_bias)
            kernels = self._kernels(self.norm(tokens[:, :, : self.num_masks]))
            kernels_of_blocks.append(kernels)
            # The masks of a block lead the attention of the next one.
            image_bias = self._image_bias(kernels, grid_features)

        tokens = self.norm(tokens)
        scores = self.scores(tokens[:, :, : self.num_masks]).astype(jnp.float32)
        return DecoderOutput(
            kernels=kernels_of_blocks[-1],
            aux_kernels=tuple(kernels_of_blocks[:-1]),
            # Not refined yet: `R2SM.decode_kernels` does it, with the image's features.
            refined_kernels=kernels_of_blocks[-1],
            presence=scores[..., 0],
            iou=jax.nn.sigmoid(scores[..., 1:]),
            pixel_features=pixel_features,
            type_state=tokens[:, :, -1] if self.has_type_token else None,
        )

    def _kernels(self, tokens: Float[Array, "b k q d"]) -> MaskKernels:
        fused = self.fused_kernels(tokens[:, :, :1])
        slots = self.slot_kernels(tokens[:, :, 1:])
        return make_kernels(jnp.concatenate([fused, slots], axis=2))

    def _image_bias(
        self, kernels: MaskKernels, grid_features: Float[Array, "b h w c"]
    ) -> Float[Array, "b k _q n"]:
        """Attention logits of the n image tokens from the amodal masks of a block; 0 for the type
        token."""
        masks = predict_masks(kernels, grid_features)[:, :, :, AMODAL]
        # As in Mask2Former no gradient flows back through the attention mask.
        bias = jax.lax.stop_gradient(jnp.clip(masks, -MAX_ATTENTION_BIAS, MAX_ATTENTION_BIAS))
        bias = rearrange(bias, "b k q h w -> b k q (h w)")
        if not self.has_type_token:
            return bias
        return jnp.concatenate([bias, jnp.zeros_like(bias[:, :, :1])], axis=2)
