"""The whole segmenter: from an image and text states to the masks of every query, and which mask type it asks for."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from r2sm_jax.config import DECODER_HEAD, NO_HEAD, ModelConfig, check_head
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.encoder_sizes import NO_SIZES, EncoderSizes, with_sizes
from r2sm_jax.models.image_encoder import FrozenFeatures, VisionEncoder, freeze_published
from r2sm_jax.models.layers import MLP, Linear
from r2sm_jax.models.mask_decoder import (
    Kernels,
    MaskDecoder,
    MaskTokens,
    PixelDecoder,
    PixelFeatures,
    SamMaskDecoder,
    draw_pair,
    make_kernels,
    places,
)

PIXEL_MEAN = np.array([123.675, 116.28, 103.53], np.float32)
PIXEL_STD = np.array([58.395, 57.12, 57.375], np.float32)


class Calibration(NamedTuple):
    """Four numbers that are fitted to a trained model's answers (training/calibration.py). The defaults change nothing.

    They are an argument of the model rather than a part of its weights: a checkpoint or an export stores them as
    metadata, and refitting them neither copies weights nor compiles anything anew.
    """

    type_temperature: float | Float[Array, ""] = 1.0
    """Divides the logit that a query asks for the amodal mask."""
    iou_scale: float | Float[Array, ""] = 1.0
    """Multiplies the logit of the predicted IoU."""
    iou_shift: float | Float[Array, ""] = 0.0
    """Is added to it then."""
    presence_bias: float | Float[Array, ""] = 0.0
    """Is added to the logit that a query has a target."""


NOT_CALIBRATED = Calibration()


class DenseOutput(NamedTuple):
    """Predictions of single pixels about the object that they lie on; for losses in training only."""

    visible: Float[Array, "b h w e"]
    """Compared with the embeddings of category and attribute names."""
    hidden: Float[Array, "b h w e"]
    """The same for objects that are occluded here."""
    box: Float[Array, "b h w 4"]
    """Amodal box of the visible object: left, top, right, bottom distances in units of the image side."""


ABSENT_LOGIT = -10.0
"""Greatest logit of a fused mask where the query means nothing in the image."""


class R2SMOutput(NamedTuple):
    """The model's answer to every query. Mask logits are float32 at `ModelConfig.mask_size`, minus
    `ModelConfig.mask_threshold`: > 0 is mask."""

    amodal_logit: Float[Array, "b k"]
    """> 0: the query asks for the amodal mask. Calibrated: divided by the temperature (`calibrate` in train.py)."""
    modal: Float[Array, "b k h w"]
    """Visible region of all instances that the query means."""
    amodal: Float[Array, "b k h w"]
    """Complete shape: the maximum of `modal` and a completing mask, so modal ⊆ amodal for any weights."""
    presence: Float[Array, "b k"]
    """Logit that the query has a target."""
    iou: Float[Array, "b k 2"]
    """Predicted IoU of `modal` and `amodal`: from what the decoder says and how stable the mask is."""
    slot_modal: Float[Array, "b k q h w"]
    slot_amodal: Float[Array, "b k q h w"]
    slot_presence: Float[Array, "b k q"]
    slot_iou: Float[Array, "b k q 2"]


class R2SM(nnx.Module):
    """Vision encoder, pixel decoder, mask decoder and mask-type head. The language model is not part of it: its states
    are inputs, computed once per unique query. `build_model` also freezes published weights."""

    def __init__(self, config: ModelConfig, sizes: EncoderSizes = NO_SIZES, *, rngs: nnx.Rngs):
        check_head(config.head)
        config = with_sizes(config, sizes)
        dtype = jnp.dtype(config.dtype)
        decoder = config.decoder
        self.config = config
        self.vision = VisionEncoder(config.vision, sizes, dtype=dtype, rngs=rngs)
        self.pixels = PixelDecoder(config, self.vision.skip_dims, rngs=rngs)
        self.decoder = (SamMaskDecoder if decoder.type == "sam" else MaskDecoder)(config, rngs=rngs)
        head = heads.LEARNED.get(config.head)
        self.head = head(config.text.dim, len(config.text.layers), rngs=rngs) if head else None
        self.decoder_head = (
            heads.DecoderHead(decoder.dim, rngs=rngs) if config.head == DECODER_HEAD else None
        )
        self.dense = Linear(decoder.fine_dim, 2 * decoder.dim + 4, dtype=dtype, rngs=rngs)
        channels = decoder.kernel_dim
        self.dense_kernels = MLP((channels, 64, 2 * (channels + 1)), dtype=dtype, rngs=rngs)
        self.dense_names = Linear(config.text.dim, decoder.dim, rngs=rngs)

    def encode_image(
        self,
        image: UInt8[Array, "b H W 3"],
        valid: Bool[Array, "b H W"],
        frozen: FrozenFeatures | None = None,
    ) -> tuple[Array, PixelFeatures]:
        """All that is computed once per image: tokens [b h w d] and pixel features.

        `valid` is False on letterbox padding, which becomes zero after normalisation. `frozen`: the `frozen_features`
        of these images, if they are cached.
        """
        if frozen is not None:
            frozen = jax.tree.map(lambda x: x.astype(self.config.dtype), frozen)
        features = self.vision(self._normalised(image, valid), frozen)
        return features.tokens, self.pixels(features)

    def frozen_features(
        self, image: UInt8[Array, "b H W 3"], valid: Bool[Array, "b H W"]
    ) -> FrozenFeatures:
        """The part of `encode_image` that no training changes."""
        return self.vision.frozen_features(self._normalised(image, valid))

    def _normalised(
        self, image: UInt8[Array, "b H W 3"], valid: Bool[Array, "b H W"]
    ) -> Float[Array, "b H W 3"]:
        normalised = (image.astype(jnp.float32) - PIXEL_MEAN) / PIXEL_STD
        return jnp.where(valid[..., None], normalised, 0).astype(self.config.dtype)

    def decode(
        self,
        tokens: Float[Array, "b h w d"],
        pixels: PixelFeatures,
        text: Float[Array, "b k t l e"],
        text_mask: Bool[Array, "b k t"],
    ) -> MaskTokens:
        """All that is computed once per query, except the mask type and the masks themselves."""
        states = rearrange(text, "b k t l e -> b k t (l e)").astype(self.config.dtype)
        masks = self.decoder(tokens, pixels.fine, states, text_mask)
        return (
            masks._replace(second=self.refine_kernels(masks, pixels))
            if self.config.refines
            else masks
        )

    def amodal_logit(
        self,
        text: Float[Array, "b k t l e"],
        mask: Bool[Array, "b k t"],
        masks: MaskTokens | None = None,
    ) -> Float[Array, "b k"]:
        """The logit of the mask-type head, not calibrated; 0 where no head is learned. The `decoder` head reads
        `masks`."""
        if self.decoder_head is not None and masks is not None and masks.type_state is not None:
            return self.decoder_head(masks.type_state)
        return self.head(text.astype(jnp.float32), mask) if self.head else jnp.zeros(text.shape[:2])

    def dense_output(self, pixels: PixelFeatures) -> DenseOutput:
        """Per-pixel predictions for dense supervision."""
        e = self.config.decoder.dim
        dense = self.dense(pixels.coarse).astype(jnp.float32)
        return DenseOutput(dense[..., :e], dense[..., e : 2 * e], dense[..., 2 * e :])

    def instance_kernels(self, pixels: PixelFeatures, visible: Float[Array, "b m h w"]) -> Kernels:
        """Kernels [b 1 m] from the mean pixel feature of each instance's visible region, without language: for dense
        supervision, and for `refine_kernels`."""
        total = jnp.einsum("bmhw,bhwc->bmc", visible.astype(pixels.fine.dtype), pixels.fine)
        place = jnp.einsum("bmhw,hwc->bmc", visible, places(visible.shape[-1]))
        mean = jnp.concatenate([total, place], axis=-1) / (visible.sum((-2, -1))[..., None] + 1)
        return make_kernels(self.dense_kernels(mean[:, None].astype(total.dtype)))

    def refine_kernels(self, masks: MaskTokens, pixels: PixelFeatures) -> Kernels:
        """The second look: the kernels of `masks`, averaged with `instance_kernels` of the modal masks that they draw.

        Kernels from words know which instance is meant, kernels from its pixels know what it looks like; they make
        different errors. A mean feature describes one instance, so the fused mask changes only where exactly one slot
        has a target.
        """
        first = masks.kernels
        visible = jax.nn.sigmoid(draw_pair(first, pixels.fine)[0])
        again = self.instance_kernels(pixels, rearrange(visible, "b k q h w -> b (k q) h w"))
        again = Kernels(
            *(rearrange(x, "b 1 (k q) ... -> b k q ...", q=visible.shape[2]) for x in again)
        )
        one = (masks.presence[..., 1:] > 0).sum(-1) == 1
        share = (
            jnp.full(masks.presence.shape, 0.5).at[..., 0].set(jnp.where(one, 0.5, 0))[..., None]
        )
        weights = first.weights + share[..., None] * (again.weights - first.weights)
        return Kernels(weights, first.biases + share * (again.biases - first.biases))

    def __call__(
        self,
        image: UInt8[Array, "b H W 3"],
        valid: Bool[Array, "b H W"],
        text: Float[Array, "b k t l e"],
        text_mask: Bool[Array, "b k t"],
        calibration: Calibration = NOT_CALIBRATED,
    ) -> R2SMOutput:
        """Answers k queries about each of b images."""
        return self.answer(*self.encode_image(image, valid), text, text_mask, calibration)

    def answer(
        self,
        tokens: Float[Array, "b h w d"],
        pixels: PixelFeatures,
        text: Float[Array, "b k t l e"],
        text_mask: Bool[Array, "b k t"],
        calibration: Calibration = NOT_CALIBRATED,
    ) -> R2SMOutput:
        """Answers k queries about each of b images, given what `encode_image` returns. Fused masks are empty where the
        logit of presence is not above `presence_threshold`. With the head `none` there is one mask, which is returned
        as modal and as amodal."""
        masks = self.decode(tokens, pixels, text, text_mask)
        amodal_logit = self.amodal_logit(text, text_mask, masks)
        modal, amodal = (
            x - self.config.mask_threshold
            for x in draw_pair(masks.answered, masks.canvas(pixels.fine))
        )
        presence = masks.presence[..., 0] + calibration.presence_bias
        limit = jnp.where(presence > self.config.presence_threshold, jnp.inf, ABSENT_LOGIT)[
            ..., None, None
        ]
        # A mask that hardly changes with the threshold is good: SAM's stability score (segment_anything/utils/amg.py).
        stable = [
            (x > 1).sum((-2, -1)) / jnp.maximum((x > -1).sum((-2, -1)), 1) for x in (modal, amodal)
        ]
        quality = jnp.clip(jnp.stack([masks.iou, jnp.stack(stable, axis=-1)]), 0.001, 0.999)
        mean_logit = jax.scipy.special.logit(quality).mean(0)
        iou = jax.nn.sigmoid(calibration.iou_scale * mean_logit + calibration.iou_shift)
        if self.config.head == NO_HEAD:
            amodal, iou = modal, jnp.broadcast_to(iou[..., :1], iou.shape)
        return R2SMOutput(
            amodal_logit / calibration.type_temperature,
            jnp.minimum(modal[:, :, 0], limit),
            jnp.minimum(amodal[:, :, 0], limit),
            presence,
            iou[..., 0, :],
            modal[:, :, 1:],
            amodal[:, :, 1:],
            masks.presence[..., 1:],
            iou[..., 1:, :],
        )


def build_model(config: ModelConfig, sizes: EncoderSizes = NO_SIZES, *, rngs: nnx.Rngs) -> R2SM:
    """A freshly initialised model whose published parts are frozen where `config.vision` says so.

    The weights of those parts are still random: `pretrained.load_pretrained` brings them.
    """
    model = R2SM(config, sizes, rngs=rngs)
    freeze_published(model.vision)
    return model


def abstract_model(config: ModelConfig, sizes: EncoderSizes = NO_SIZES) -> R2SM:
    """A model with shapes in place of arrays; nothing is computed."""
    return nnx.merge(*_abstract(config, sizes))


@lru_cache(maxsize=8)
def _abstract(config: ModelConfig, sizes: EncoderSizes) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: build_model(config, sizes, rngs=nnx.Rngs(0))))


def input_spec(config: ModelConfig, batch: int, queries: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of `R2SM.__call__`'s arguments: one source for tests, tracing and export."""
    size, tokens, text = config.vision.image_size, config.text.max_tokens, config.text
    return {
        "image": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8),
        "valid": jax.ShapeDtypeStruct((batch, size, size), jnp.bool_),
        "text": jax.ShapeDtypeStruct(
            (batch, queries, tokens, len(text.layers), text.dim), jnp.float16
        ),
        "text_mask": jax.ShapeDtypeStruct((batch, queries, tokens), jnp.bool_),
    }
