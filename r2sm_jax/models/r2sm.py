"""The segmenter: an image and the token states of its queries -> the masks of every query, and the
mask type it asks for."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from r2sm_jax.config import DECODER_HEAD, NO_HEAD, ModelConfig
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.calibration import NOT_CALIBRATED, Calibration
from r2sm_jax.models.classifier import Classifier
from r2sm_jax.models.image_encoder import VisionEncoder, freeze_published
from r2sm_jax.models.layers import MLP, Linear, build_abstract, freeze
from r2sm_jax.models.mask_decoder import (
    DecoderOutput,
    MaskDecoder,
    MaskKernels,
    PixelDecoder,
    coordinate_features,
    make_kernels,
    predict_masks,
)
from r2sm_jax.models.sam_decoder import SamMaskDecoder
from r2sm_jax.query import MODAL

# ImageNet's mean and deviation in 0..255, with which SAM, DINOv2 and most image encoders were
# trained.
PIXEL_MEAN = np.array([123.675, 116.28, 103.53], np.float32)
PIXEL_STD = np.array([58.395, 57.12, 57.375], np.float32)

ABSENT_LOGIT = -10.0
"""Upper bound on the mask logits of queries whose target is absent."""
INSTANCE_MLP_DIM = 64
"""Hidden channels between the mean feature of an instance and its kernels."""


class ImageFeatures(NamedTuple):
    """What is computed once per image."""

    tokens: Float[Array, "b h w d"]
    """Of the image encoder, at stride `patch_size`."""
    coarse: Float[Array, "b _h2 _w2 _c2"]
    """Pixel features at half of that stride, for dense supervision."""
    fine: Float[Array, "b _h4 _w4 _c4"]
    """Pixel features at a quarter of that stride: masks are dot products of kernels with them."""
    classes: Float[Array, "b n _k"] | None = None
    """Probability of each class in each cell, where the model has a classifier."""


class R2SMOutput(NamedTuple):
    """The model's answer to every query.

    The axis q is 1 + slots. Pair 0 of each query is the fused one, of all instances that the query
    means; the others are slots, for one instance each. The axis 2 is `MODAL, AMODAL`. Mask logits
    are float32 at `ModelConfig.mask_size`. They are shifted by `ModelConfig.mask_threshold` and
    `Calibration.mask_shift`, so that a pixel is mask where its logit is > 0.
    """

    amodal_logit: Float[Array, "*b"]
    """> 0: the query asks for the amodal mask. Calibrated."""
    masks: Float[Array, "*b q 2 h w"]
    """Logits of visible regions and of complete shapes. modal ⊆ amodal for any weights."""
    presence: Float[Array, "*b q"]
    """Logit that the pair has a target. Calibrated for the fused one."""
    iou: Float[Array, "*b q 2"]
    """Predicted IoU of each mask. Calibrated."""


class DenseOutput(NamedTuple):
    """Predictions of every pixel about the object that it lies on, for losses in training."""

    visible: Float[Array, "b h w e"]
    """Compared with the embeddings of category and attribute names."""
    hidden: Float[Array, "b h w e"]
    """The same for objects that are occluded here."""
    box: Float[Array, "b h w 4"]
    """Amodal box of the visible object: offsets of its left, top, right and bottom edge from the
    pixel, signed, in units of the image side."""


class R2SM(nnx.Module):
    """Image encoder, pixel decoder, mask decoder and mask-type head.

    The language model is not part of it: its token states are inputs, computed once per unique
    query.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """`config` has the sizes of its published weights (`pretrained.fill_sizes`). All weights
        are random; see `build_model`."""
        dtype = jnp.dtype(config.dtype)
        decoder = config.decoder

        self.config = config
        self.vision = VisionEncoder(config.vision, dtype=dtype, rngs=rngs)
        self.pixel_decoder = PixelDecoder(config, self.vision.skip_dims, rngs=rngs)
        if decoder.type == "sam":
            self.decoder = SamMaskDecoder(config, rngs=rngs)
        else:
            self.decoder = MaskDecoder(config, rngs=rngs)

        # One of the two, or neither: reference heads read the sentence on the host, and `none`
        # decides nothing.
        self.head = None
        self.decoder_head = None
        if config.head in heads.LEARNED:
            make_head = heads.LEARNED[config.head]
            head = make_head(config.text.dim, len(config.text.layers), rngs=rngs)
            self.head = nnx.data(head)
        elif config.head == DECODER_HEAD:
            self.decoder_head = nnx.data(heads.DecoderHead(decoder.dim, rngs=rngs))

        # Supervised per pixel and per instance. The instance MLP also refines kernels.
        self.dense_head = Linear(decoder.fine_dim, 2 * decoder.dim + 4, dtype=dtype, rngs=rngs)
        region_dim = decoder.region_dim
        instance_dims = (region_dim, INSTANCE_MLP_DIM, 2 * (region_dim + 1))
        self.instance_mlp = MLP(instance_dims, dtype=dtype, rngs=rngs)
        self.name_projection = Linear(config.text.dim, decoder.dim, rngs=rngs)

        self.classifier = None
        if config.classifier:
            dim = config.vision.efficientnet_dims[-1]
            self.classifier = nnx.data(Classifier(dim, config.text.dim, dtype=dtype, rngs=rngs))

        # Nothing here reads it: `decide` and `Predictor.targets` do.
        self.target_head = None
        if config.target:
            marker = heads.TargetHead(config.text.dim, len(config.text.layers), rngs=rngs)
            freeze(marker)
            self.target_head = nnx.data(marker)

    def __call__(
        self,
        image: UInt8[Array, "b H W 3"],
        image_mask: Bool[Array, "b H W"],
        text: Float[Array, "b k t l e"],
        text_mask: Bool[Array, "b k t"],
        calibration: Calibration = NOT_CALIBRATED,
    ) -> R2SMOutput:
        """Segments k queries in each of b images.

        Args:
            image: RGB in the letterbox frame.
            image_mask: False on letterbox padding.
            text: token states of l layers of the language model.
            text_mask: False on padding.
            calibration: fitted after training.
        """
        image_features = self.encode_image(image, image_mask)
        return self.decode(image_features, text, text_mask, calibration)

    def encode_image(
        self, image: UInt8[Array, "b H W 3"], image_mask: Bool[Array, "b H W"]
    ) -> ImageFeatures:
        """Computes tokens and pixel features, once per image."""
        features = self.vision(self._normalize(image, image_mask))
        coarse, fine = self.pixel_decoder(features)
        classes = None
        if self.classifier is not None and features.last is not None:
            classes = self.classifier(features.last, image_mask)
        return ImageFeatures(features.tokens, coarse, fine, classes)

    def decode(
        self,
        image_features: ImageFeatures,
        text: Float[Array, "b k t l e"],
        text_mask: Bool[Array, "b k t"],
        calibration: Calibration = NOT_CALIBRATED,
    ) -> R2SMOutput:
        """Computes masks, scores and mask type, calibrated, once per query."""
        decoded = self.decode_kernels(image_features, text, text_mask)

        # A mask is the dot product of a kernel with the pixel features.
        masks = predict_masks(decoded.refined_kernels, decoded.pixel_features)
        masks = masks - self.config.mask_threshold

        # Does the query ask for the complete shape? Is its target there? How good are the masks?
        amodal_logit = self.amodal_logit(text, text_mask, decoded) / calibration.type_temperature
        # Selected by a comparison, since ONNX cannot write into a part of an array whose batch size
        # is free.
        is_fused = jnp.arange(decoded.presence.shape[-1]) == 0  # [q]
        presence = decoded.presence + jnp.where(is_fused, calibration.presence_bias, 0.0)
        if self.classifier is not None and image_features.classes is not None:
            evidence = self.classifier.presence_logit(image_features.classes, text, text_mask)
            presence = presence + jnp.where(is_fused, evidence[..., None], 0.0)
        # Stability is measured before `mask_shift`, at the threshold of training, for which the
        # decoder predicts IoUs. So fitting the shift changes no score.
        iou = calibration.iou(stable_iou(decoded.iou, masks))
        masks = masks - calibration.mask_shift

        if self.config.head == NO_HEAD:
            # One mask, whatever the query asks for.
            masks = jnp.broadcast_to(masks[:, :, :, :1], masks.shape)
            iou = jnp.broadcast_to(iou[..., :1], iou.shape)

        # Absent targets have empty fused masks. Slots keep theirs, since AP ranks them by their own
        # presence.
        is_absent = is_fused & (presence <= self.config.presence_threshold)
        limit = jnp.where(is_absent, ABSENT_LOGIT, jnp.inf)[..., None, None, None]
        return R2SMOutput(amodal_logit, jnp.minimum(masks, limit), presence, iou)

    def decode_kernels(
        self,
        image_features: ImageFeatures,
        text: Float[Array, "b k t l e"],
        text_mask: Bool[Array, "b k t"],
    ) -> DecoderOutput:
        """Computes the mask decoder's kernels and scores, which losses read; `decode` makes masks
        of them."""
        states = rearrange(text, "b k t l e -> b k t (l e)").astype(self.config.dtype)
        decoded = self.decoder(image_features.tokens, image_features.fine, states, text_mask)
        if not self.config.refines:
            return decoded
        refined_kernels = self.refine_kernels(decoded.kernels, decoded.presence, image_features)
        return decoded._replace(refined_kernels=refined_kernels)

    def refine_kernels(
        self, kernels: MaskKernels, presence: Float[Array, "b k q"], image_features: ImageFeatures
    ) -> MaskKernels:
        """Averages kernels with `instance_kernels` of the modal masks that they predict.

        Kernels from words know which instance is meant, kernels from its pixels know what it looks
        like; they make different errors. A mean feature describes one instance, so the fused kernel
        changes only where exactly one slot has a target.
        """
        modal = predict_masks(kernels, image_features.fine)[:, :, :, MODAL]
        # In training `instance_kernels` gets true masks, which end sharply. Predicted masks have
        # long tails of small probabilities; a power above 1 makes these smaller.
        probability = jax.nn.sigmoid(modal) ** self.config.decoder.refine_exponent
        # `instance_kernels` takes any number of regions of an image, so the masks of all queries
        # are one list of regions.
        regions = rearrange(probability, "b k q h w -> b (k q) h w")
        from_pixels = jax.tree.map(
            lambda x: x.reshape(presence.shape + x.shape[3:]),
            self.instance_kernels(image_features, regions),
        )

        # How much of a kernel the pixels decide: half of a slot's, and half or nothing of the fused
        # one's.
        num_present = (presence[..., 1:] > 0).sum(-1, keepdims=True)
        is_fused = jnp.arange(presence.shape[-1]) == 0
        share = jnp.where(is_fused & (num_present != 1), 0.0, 0.5)

        weights = kernels.weights + share[..., None, None] * (from_pixels.weights - kernels.weights)
        biases = kernels.biases + share[..., None] * (from_pixels.biases - kernels.biases)
        return MaskKernels(weights, biases)

    def instance_kernels(
        self, image_features: ImageFeatures, regions: Float[Array, "b m h w"]
    ) -> MaskKernels:
        """Makes kernels [b 1 m] of the mean pixel feature of each region, without language.

        Training supervises them with the regions of all instances; `refine_kernels` uses predicted
        regions.
        """
        fine = image_features.fine
        coordinates = coordinate_features(regions.shape[-1])
        feature_sum = jnp.einsum("bmhw,bhwc->bmc", regions.astype(fine.dtype), fine)
        coordinate_sum = jnp.einsum("bmhw,hwc->bmc", regions, coordinates)
        area = regions.sum((-2, -1))[..., None]
        # + 1 pixel, so that an empty region gives zeros.
        mean = jnp.concatenate([feature_sum, coordinate_sum], axis=-1) / (area + 1)
        return make_kernels(self.instance_mlp(mean[:, None].astype(fine.dtype)))

    def amodal_logit(
        self,
        text: Float[Array, "b k t l e"],
        text_mask: Bool[Array, "b k t"],
        decoded: DecoderOutput | None = None,
    ) -> Float[Array, "b k"]:
        """Computes the mask-type head's logit that a query asks for the amodal mask, uncalibrated.

        The `decoder` head reads `decoded`, the other learned heads the words alone. Without a
        learned head the logit is 0.
        """
        if self.head is not None:
            return self.head(text.astype(jnp.float32), text_mask)
        if self.decoder_head is not None and decoded is not None:
            assert decoded.type_state is not None
            return self.decoder_head(decoded.type_state)
        return jnp.zeros(text.shape[:2])

    def dense_output(self, image_features: ImageFeatures) -> DenseOutput:
        """Predicts what only losses read, per pixel."""
        dim = self.config.decoder.dim
        dense = self.dense_head(image_features.coarse).astype(jnp.float32)
        visible, hidden, box = jnp.split(dense, [dim, 2 * dim], axis=-1)
        return DenseOutput(visible, hidden, box)

    def _normalize(
        self, image: UInt8[Array, "b H W 3"], image_mask: Bool[Array, "b H W"]
    ) -> Float[Array, "b H W 3"]:
        normalized = (image.astype(jnp.float32) - PIXEL_MEAN) / PIXEL_STD
        # SAM pads after normalisation, so padding has the mean colour.
        return jnp.where(image_mask[..., None], normalized, 0).astype(self.config.dtype)


def stable_iou(
    predicted: Float[Array, "b k q 2"],
    masks: Float[Array, "b k q 2 h w"],
) -> Float[Array, "b k q 2"]:
    """Predicts the IoU of each mask, between the decoder's own prediction and the mask's stability.

    A mask that hardly changes with its threshold is good: SAM's stability score
    (segment_anything/utils/amg.py), the IoU of the masks at the thresholds 1 and -1.
    """
    smaller = (masks > 1).sum((-2, -1))
    larger = (masks > -1).sum((-2, -1))
    stability = smaller / jnp.maximum(larger, 1)
    # The mean of both logits.
    halves = Calibration(iou_scale=0.5, agreement_scale=0.5)
    return halves.iou(predicted, stability)


def build_model(config: ModelConfig, *, rngs: nnx.Rngs) -> R2SM:
    """Builds a new model whose published parts are frozen where `config.vision` says so.

    The weights of those parts are still random: `pretrained.load_pretrained` brings them.
    """
    model = R2SM(config, rngs=rngs)
    freeze_published(model.vision)
    return model


def abstract_model(config: ModelConfig) -> R2SM:
    """Builds a model with shapes in place of arrays; nothing is computed."""
    return build_abstract(partial(build_model, config))


def input_spec(config: ModelConfig, batch: int, queries: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Lists shapes and dtypes of `R2SM.__call__`'s arguments: one source for tests, tracing and
    export."""
    size = config.vision.image_size
    text_shape = (batch, queries, config.text.max_tokens)
    state_shape = (*text_shape, len(config.text.layers), config.text.dim)
    return {
        "image": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8),
        "image_mask": jax.ShapeDtypeStruct((batch, size, size), jnp.bool_),
        "text": jax.ShapeDtypeStruct(state_shape, jnp.float16),
        "text_mask": jax.ShapeDtypeStruct(text_shape, jnp.bool_),
    }
