"""Published weights of image encoders, and of SAM's mask decoder: their sizes, and loading them
into a model.

`fill_sizes` comes before a model is built, `load_pretrained` after that. keys.py says how the
tensors of each family become our parameters.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from flax import nnx

from r2sm_jax.config import DecoderConfig, ModelConfig, VisionConfig, check_model
from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import find_model, read_model_config, read_tensors
from r2sm_jax.models.keys import (
    EFFICIENTNET,
    EFFICIENTNET_CLASSIFIER,
    SAM,
    SAM_ENCODER,
    VITS,
    read_block_dims,
    read_efficientnet,
    read_sam,
)
from r2sm_jax.models.matching import LoadReport, match_weights, put_weights
from r2sm_jax.models.plain_vit import NORM_EPSILON

C = TypeVar("C", VisionConfig, DecoderConfig)

SAM_FLAG = "--model.vision.sam"
VIT_FLAG = "--model.vision.vit"
EFFICIENTNET_FLAG = "--model.vision.efficientnet"
VIT_FAMILIES = {
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2",
    "clip": "clip",
    "clip_vision_model": "clip",
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
}
"""By the `model_type` of a config.json."""
VIT_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
"""By the `hidden_act` of a config.json."""
DECODER_SIZES = ("dim", "depth", "heads", "mlp_dim")
VISION_SIZES = (
    *DECODER_SIZES,
    "patch_size",
    "window_size",
    "global_blocks",
    "relative_positions",
    "out_dim",
    "activation",
    "vit_family",
    "vit_patch_size",
    "vit_registers",
    "efficientnet_dims",
)


# Sizes


def fill_sizes(model: ModelConfig, known: ModelConfig | None = None) -> ModelConfig:
    """Returns the configuration with the sizes of the published weights that it names.

    Finds the weights, or downloads them. `known` is the configuration of a run with the same
    weights, which has their sizes: then no file is needed.

    Raises InputError if weights cannot be found, are of another architecture, do not fit the model,
    or have other sizes than the flags say.
    """
    vision, decoder = model.vision, model.decoder
    if known is not None and known.vision.pretrained == vision.pretrained != []:
        vision_sizes = {name: getattr(known.vision, name) for name in VISION_SIZES}
        decoder_sizes = {name: getattr(known.decoder, name) for name in DECODER_SIZES}
    else:
        vision_sizes, decoder_sizes = read_sizes(vision)
    vision = _take_sizes(vision, vision_sizes, "--model.vision")
    if vision.sam and decoder.type == "sam":
        decoder = _take_sizes(decoder, decoder_sizes, "--model.decoder")
    filled = replace(model, vision=vision, decoder=decoder)
    check_model(filled)
    return filled


def _take_sizes(config: C, sizes: Mapping[str, Any], flag: str) -> C:
    """Raises InputError if the user gave a size, so one that is not the default, that contradicts
    the weights."""
    defaults = {field.name: field.default for field in fields(config)}
    for name, size in sizes.items():
        value = getattr(config, name)
        if value not in (defaults[name], size):
            raise InputError(
                f"{flag}.{name.replace('_', '-')} {value}: the published weights have {size}; "
                "leave the flag out"
            )
    return replace(config, **sizes)


def read_sizes(vision: VisionConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sizes of published weights: by the fields of `VisionConfig`, and by those of
    `DecoderConfig` for SAM's mask decoder. Raises InputError as `fill_sizes`."""
    if vision.sam:
        return sam_sizes(read_model_config(find_model(vision.sam, SAM_FLAG)))
    if vision.vit:
        return vit_sizes(read_model_config(find_model(vision.vit, VIT_FLAG))), {}
    if vision.efficientnet:
        source = find_model(vision.efficientnet, EFFICIENTNET_FLAG)
        return {"efficientnet_dims": read_block_dims(read_efficientnet(source), source)}, {}
    return {}, {}


def sam_sizes(published: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sizes of SAM's image encoder and of its mask decoder, if there is one."""
    if published.model_type not in ("sam", "sam_vision_model"):
        raise InputError(
            f"{SAM_FLAG} needs SAM, not model_type {published.model_type!r}; "
            f"pass DINOv2, CLIP and SigLIP as {VIT_FLAG}"
        )
    vision = getattr(published, "vision_config", published)
    vision_sizes = {
        "patch_size": vision.patch_size,
        "dim": vision.hidden_size,
        "depth": vision.num_hidden_layers,
        "heads": vision.num_attention_heads,
        "mlp_dim": vision.mlp_dim,
        "window_size": vision.window_size,
        "global_blocks": tuple(vision.global_attn_indexes),
        "relative_positions": vision.use_rel_pos,
        "out_dim": vision.output_channels,
        "activation": vision.hidden_act,
    }
    decoder = getattr(published, "mask_decoder_config", None)
    if decoder is None:
        return vision_sizes, {}
    return vision_sizes, {
        "dim": decoder.hidden_size,
        "depth": decoder.num_hidden_layers,
        "heads": decoder.num_attention_heads,
        "mlp_dim": decoder.mlp_dim,
    }


def vit_sizes(published: Any) -> dict[str, Any]:
    """Returns the sizes of the image encoder of a DINOv2, CLIP or SigLIP."""
    kind = published.model_type
    if kind not in VIT_FAMILIES:
        raise InputError(
            f"{VIT_FLAG} cannot load it: model_type {kind!r} is none of "
            f"{', '.join(VIT_FAMILIES)}; SAM is given as {SAM_FLAG}"
        )
    family = VIT_FAMILIES[kind]
    vision = getattr(published, "vision_config", published)
    is_dinov2 = family == "dinov2"
    # What else differs shows in the keys and shapes of the weights.
    if vision.layer_norm_eps != NORM_EPSILON[family]:
        raise InputError(f"{VIT_FLAG}: its layer norms are not those of the published {family}")
    return {
        "dim": vision.hidden_size,
        "depth": vision.num_hidden_layers,
        "heads": vision.num_attention_heads,
        "mlp_dim": (
            int(vision.hidden_size * vision.mlp_ratio) if is_dinov2 else vision.intermediate_size
        ),
        "activation": VIT_ACTIVATIONS[vision.hidden_act],
        "vit_family": family,
        "vit_patch_size": vision.patch_size,
        "vit_registers": getattr(vision, "num_register_tokens", 0),
    }


# Loading


def load_pretrained(
    config: ModelConfig, params: nnx.State, frozen: nnx.State
) -> tuple[nnx.State, nnx.State, dict[str, LoadReport]]:
    """Returns the parameters and constants of a model with its published weights in place, and a
    report for each of these.

    Raises InputError if the weights cannot be found or read, a key has no parameter or another
    shape, or a parameter has no key; all such problems are named at once.
    """
    reports = match_pretrained(config, nnx.merge_state(params, frozen))
    for report in reports.values():
        params = put_weights(params, report.values)
        frozen = put_weights(frozen, report.values)
    return params, frozen, reports


def match_pretrained(config: ModelConfig, state: nnx.State) -> dict[str, LoadReport]:
    """Returns the published weights for the parameters of a state, which may be abstract, by their
    name; {} if there are none. Raises as `load_pretrained`."""
    vision, decoder = config.vision, config.decoder
    if vision.sam:
        name, source = vision.sam, find_model(vision.sam, SAM_FLAG)
        tensors = read_sam(source, num_masks=1 + decoder.slots)
        table = SAM if decoder.type == "sam" else SAM_ENCODER
    elif vision.vit:
        name, source = vision.vit, find_model(vision.vit, VIT_FLAG)
        tensors = read_tensors(source)
        table = VITS[vision.vit_family]
    elif vision.efficientnet:
        name, source = vision.efficientnet, find_model(vision.efficientnet, EFFICIENTNET_FLAG)
        tensors = read_efficientnet(source)
        table = EFFICIENTNET_CLASSIFIER if config.classifier else EFFICIENTNET
    else:
        return {}
    return {name: match_weights(tensors, state, table, source)}
