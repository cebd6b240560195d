"""SAM's mask decoder with text as the prompt: the one that SAM's published weights fit.

The layout is that of segment-anything (segment_anything/modeling/mask_decoder.py, transformer.py).
It updates the image tokens for each query, so it costs more than the decoder in mask_decoder.py,
where queries share them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from r2sm_jax.config import DECODER_HEAD, DecoderConfig, ModelConfig
from r2sm_jax.models.layers import MLP, Attention, Buffer, Linear, truncated_normal
from r2sm_jax.models.mask_decoder import (
    PIXEL_SHUFFLE,
    DecoderOutput,
    MaskKernels,
    fourier_features,
    grid_centres,
)


class TwoWayBlock(nnx.Module):
    """Tokens attend to one another and to the image, then an MLP; then the image attends to the
    tokens (post-norm)."""

    def __init__(self, config: DecoderConfig, first: bool, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, heads = config.dim, config.heads
        self.first = first
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.self_attention = Attention(d, heads, **options)
        self.to_image = Attention(d, heads, inner=d // 2, **options)
        self.mlp = MLP((d, config.mlp_dim, d), activation="relu", **options)
        self.to_tokens = Attention(d, heads, inner=d // 2, **options)
        self.norms = nnx.List([nnx.LayerNorm(d, epsilon=1e-6, **options) for _ in range(4)])

    def __call__(
        self,
        tokens: Float[Array, "n t d"],
        image: Float[Array, "n s d"],
        token_positions: Float[Array, "n t d"],
        image_positions: Float[Array, "s d"],
        token_mask: Bool[Array, "n t"],
    ) -> tuple[Float[Array, "n t d"], Float[Array, "n s d"]]:
        """For n queries at once. SAM uses the input tokens as `token_positions`; `token_mask` is
        False on padding."""
        if self.first:
            # SAM's first block has neither positions nor a residual here.
            tokens = self.norms[0](self.self_attention(tokens, tokens, tokens, token_mask))
        else:
            query = tokens + token_positions
            attended = self.self_attention(query, query, tokens, token_mask)
            tokens = self.norms[0](tokens + attended)

        placed_image = image + image_positions
        tokens = self.norms[1](
            tokens + self.to_image(tokens + token_positions, placed_image, image)
        )
        tokens = self.norms[2](tokens + self.mlp(tokens))
        attended = self.to_tokens(placed_image, tokens + token_positions, tokens, token_mask)
        return tokens, self.norms[3](image + attended)


class SamUpscale(nnx.Module):
    """Two 2x2 transposed convolutions: 4 times the resolution."""

    def __init__(self, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.up1 = Linear(dim, 4 * (dim // 4), dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(dim // 4, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.up2 = Linear(dim // 4, 4 * (dim // 8), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "n h w d"]) -> Float[Array, "n _h _w _c"]:
        x = self.norm(rearrange(self.up1(x), PIXEL_SHUFFLE, y=2, x=2))
        x = nnx.gelu(x, approximate=False)
        x = rearrange(self.up2(x), PIXEL_SHUFFLE, y=2, x=2)
        return nnx.gelu(x, approximate=False)


class SamMaskDecoder(nnx.Module):
    """Words and image -> kernels of the fused mask and of N instance slots, and the pixel features
    of each query.

    Words stand in the place of SAM's points and boxes. Each mask token has a second MLP, for the
    completing mask, and a presence logit. With three slots, and SAM's prompt tokens in place of
    words, it computes exactly SAM's four masks and IoUs.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """The `decoder` mask-type head gets one more token."""
        decoder = config.decoder
        d = decoder.dim
        num_masks = 1 + decoder.slots
        options: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "rngs": rngs}

        def draw(count: int) -> nnx.Param:
            """Draws this number of tokens."""
            return nnx.Param(truncated_normal(rngs.params(), (count, d), std=1.0))

        self.iou_token = draw(1)
        self.mask_tokens = draw(num_masks)
        self.type_token = draw(1) if config.head == DECODER_HEAD else None
        # SAM adds this to the image where no mask is given as a prompt.
        self.no_mask = nnx.Param(jnp.zeros((1, d)))
        self.frequencies = Buffer(jax.random.normal(rngs.params(), (2, d // 2)))
        self.text = Linear(config.text.dim * len(config.text.layers), d, **options)
        self.text_norm = nnx.LayerNorm(d, epsilon=1e-5, **options)
        blocks = [TwoWayBlock(decoder, i == 0, **options) for i in range(decoder.depth)]
        self.blocks = nnx.List(blocks)
        self.last = Attention(d, decoder.heads, inner=d // 2, **options)
        self.last_norm = nnx.LayerNorm(d, epsilon=1e-5, **options)
        self.upscale = SamUpscale(d, **options)
        options["activation"] = "relu"
        self.modal = nnx.List([MLP((d, d, d, d // 8), **options) for _ in range(num_masks)])
        # Of the completing masks, as `MaskKernels` calls them; checkpoints have this name.
        self.occluded = nnx.List([MLP((d, d, d, d // 8), **options) for _ in range(num_masks)])
        self.iou = MLP((d, d, d, 2 * num_masks), **options)
        self.presence = MLP((d, d, 1), **options)

    def __call__(
        self,
        image: Float[Array, "b h w d"],
        pixel_features: Float[Array, "b _h _w _c"],
        text: Float[Array, "b k t e"],
        text_mask: Bool[Array, "b k t"],
    ) -> DecoderOutput:
        """`pixel_features` of the image are not used: each query makes its own."""
        return self.decode_prompts(image, self.text_norm(self.text(text)), text_mask)

    def decode_prompts(
        self,
        image: Float[Array, "b h w d"],
        prompts: Float[Array, "b k t d"],
        prompt_mask: Bool[Array, "b k t"],
    ) -> DecoderOutput:
        """Decodes prompt tokens of any origin, such as SAM's points and boxes; `prompt_mask` is
        False on padding."""
        b, k, _, d = prompts.shape
        size = image.shape[1]
        num_masks = len(self.modal)

        # Tokens: IoU, masks, mask type if its head reads one, prompts. Every query is a row of its
        # own.
        learned = [self.iou_token[...], self.mask_tokens[...]]
        if self.type_token is not None:
            learned.append(self.type_token[...])
        outputs = jnp.concatenate(learned).astype(prompts.dtype)
        outputs = jnp.broadcast_to(outputs, (b, k, *outputs.shape))
        tokens = rearrange(jnp.concatenate([outputs, prompts], axis=2), "b k t d -> (b k) t d")
        mask = jnp.concatenate([jnp.ones(outputs.shape[:3], bool), prompt_mask], axis=2)
        mask = rearrange(mask, "b k t -> (b k) t")
        token_positions = tokens

        image = image + self.no_mask[...].astype(image.dtype)
        keys = jnp.repeat(rearrange(image, "b h w d -> b (h w) d"), k, axis=0)
        positions = fourier_features(grid_centres(size), self.frequencies[...]).astype(keys.dtype)
        for block in self.blocks:
            tokens, keys = block(tokens, keys, token_positions, positions, mask)
        attended = self.last(tokens + token_positions, keys + positions, keys)
        tokens = self.last_norm(tokens + attended).reshape(b, k, -1, d)

        pixel_features = self.upscale(rearrange(keys, "n (h w) d -> n h w d", h=size))
        mask_tokens = tokens[:, :, 1 : 1 + num_masks]
        weights = [
            jnp.stack([modal(mask_tokens[:, :, i]), occluded(mask_tokens[:, :, i])], axis=2)
            for i, (modal, occluded) in enumerate(zip(self.modal, self.occluded, strict=True))
        ]
        weights = jnp.stack(weights, axis=2).astype(jnp.float32)
        kernels = MaskKernels(weights, jnp.zeros(weights.shape[:-1]))
        iou = self.iou(tokens[:, :, 0]).astype(jnp.float32)
        return DecoderOutput(
            kernels=kernels,
            aux_kernels=(),
            refined_kernels=kernels,
            presence=self.presence(mask_tokens)[..., 0].astype(jnp.float32),
            iou=rearrange(iou, "b k (two q) -> b k q two", two=2),
            pixel_features=rearrange(pixel_features, "(b k) h w c -> b k h w c", b=b),
            type_state=None if self.type_token is None else tokens[:, :, 1 + num_masks],
        )
