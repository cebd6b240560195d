"""Published weights of image encoders, and of SAM's mask decoder: their sizes, and loading them
into a model.

`fill_sizes` comes before a model is built, `load_pretrained` after that. keys.py says how the
tensors of each family become our parameters.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from flax import nnx

from r2sm_jax.config import DecoderConfig, ModelConfig, VisionConfig, check_model
from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import EFFICIENTNETS, find_model, read_model_config, read_tensors
from r2sm_jax.models.keys import (
    EFFICIENTNET,
    NUM_SAM_MASKS,
    SAM,
    SAM_ENCODER,
    VITS,
    read_block_dims,
    read_efficientnet,
    to_transformers_names,
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
VISION_SIZES = (
    "patch_size",
    "dim",
    "depth",
    "heads",
    "mlp_dim",
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
DECODER_SIZES = ("dim", "depth", "heads", "mlp_dim")


# Sizes


def fill_sizes(model: ModelConfig, known: ModelConfig | None = None) -> ModelConfig:
    """Returns the configuration with the sizes of the published weights that it names.

    Finds the weights, or downloads them. `known` is the configuration of a run with the same
    weights, which has their sizes: then no file is needed.

    Raises InputError if weights cannot be found, are of another architecture, or do not fit the
    model.
    """
    vision, decoder = model.vision, model.decoder
    if known is not None and known.vision.pretrained == vision.pretrained != []:
        vision = _copy(known.vision, vision, VISION_SIZES)
        if decoder.type == "sam" and vision.sam:
            decoder = _copy(known.decoder, decoder, DECODER_SIZES)
        return replace(model, vision=vision, decoder=decoder)

    if vision.sam:
        folder = _folder(vision.sam, SAM_FLAG)
        vision = _fill(vision, read_model_config(folder, sam_sizes), "--model.vision")
        if decoder.type == "sam":
            sizes = read_model_config(folder, sam_decoder_sizes)
            decoder = _fill(decoder, sizes, "--model.decoder")
    if vision.vit:
        sizes = read_model_config(_folder(vision.vit, VIT_FLAG), vit_sizes)
        vision = _fill(vision, sizes, "--model.vision")
    if vision.efficientnet:
        source = find_efficientnet(vision.efficientnet)
        dims = read_block_dims(read_efficientnet(source), source)
        vision = replace(vision, efficientnet_dims=dims)
    filled = replace(model, vision=vision, decoder=decoder)
    check_model(filled)
    return filled


def _copy(source: C, target: C, names: tuple[str, ...]) -> C:
    return replace(target, **{name: getattr(source, name) for name in names})


def _fill(config: C, sizes: Mapping[str, Any], flag: str) -> C:
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


def _folder(name: str, flag: str) -> Path:
    """Returns the folder that holds config.json, beside the safetensors file if `name` is one."""
    path = find_model(name, flag)
    return path if path.is_dir() else path.parent


def find_efficientnet(name: str, flag: str = EFFICIENTNET_FLAG) -> Path:
    """Returns the folder or safetensors file of an EfficientNet-Lite, or its `.pth`, which may be
    alone in a folder. Raises InputError, which names the flag, if there is none."""
    local = Path(name).expanduser()
    pickles = [local] if local.is_file() else sorted(local.glob("*.pth"))
    if len(pickles) == 1 and pickles[0].suffix == ".pth":
        return pickles[0]
    if not local.exists() and name not in EFFICIENTNETS:
        raise InputError(
            f"{flag} {name}: neither a folder or file nor one of {', '.join(EFFICIENTNETS)}"
        )
    return find_model(name, flag)


def sam_sizes(published: Any) -> dict[str, Any]:
    """Returns the sizes of SAM's image encoder, by the fields of `VisionConfig`. Raises InputError
    if it is not SAM, or differs from the published ones in more than its sizes."""
    if published.model_type not in ("sam", "sam_vision_model"):
        raise InputError(
            f"{SAM_FLAG} needs SAM, not model_type {published.model_type!r}; "
            f"pass DINOv2, CLIP and SigLIP as {VIT_FLAG}"
        )
    vision = getattr(published, "vision_config", published)
    is_published = (
        vision.hidden_act == "gelu"
        and vision.use_abs_pos
        and vision.qkv_bias
        and vision.num_channels == 3
        and vision.patch_size == 16
    )
    if not is_published:
        raise InputError("its image encoder is none of the published SAM's in other sizes")
    return {
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


def sam_decoder_sizes(published: Any) -> dict[str, Any]:
    """Returns the sizes of SAM's mask decoder, by the fields of `DecoderConfig`. Raises InputError
    as `sam_sizes`, or if the file has none."""
    decoder = getattr(published, "mask_decoder_config", None)
    if decoder is None:
        raise InputError("it has no mask decoder; leave out --model.decoder.type sam")
    is_published = (
        decoder.attention_downsample_rate == 2
        and decoder.iou_head_depth == 3
        and decoder.iou_head_hidden_dim == decoder.hidden_size
        and decoder.num_multimask_outputs == NUM_SAM_MASKS - 1
    )
    if not is_published:
        raise InputError("its mask decoder is none of the published SAM's in other sizes")
    return {
        "dim": decoder.hidden_size,
        "depth": decoder.num_hidden_layers,
        "heads": decoder.num_attention_heads,
        "mlp_dim": decoder.mlp_dim,
    }


def vit_sizes(published: Any) -> dict[str, Any]:
    """Returns the sizes of the image encoder of a DINOv2, CLIP or SigLIP, by the fields of
    `VisionConfig`. Raises InputError if it is another architecture."""
    kind = published.model_type
    if kind not in VIT_FAMILIES:
        raise InputError(
            f"{VIT_FLAG} cannot load it: model_type {kind!r} is none of "
            f"{', '.join(VIT_FAMILIES)}; SAM is given as {SAM_FLAG}"
        )
    family = VIT_FAMILIES[kind]
    vision = getattr(published, "vision_config", published)
    is_published = (
        vision.hidden_act in VIT_ACTIVATIONS and vision.layer_norm_eps == NORM_EPSILON[family]
    )
    if family == "dinov2":
        is_published = is_published and not vision.use_swiglu_ffn and vision.qkv_bias
        mlp_dim = int(vision.hidden_size * vision.mlp_ratio)
    else:
        mlp_dim = vision.intermediate_size
    if not is_published:
        raise InputError(
            f"{VIT_FLAG} loads {family} with a plain MLP and biases alone, in other sizes; of "
            "DINOv2 small, base and large"
        )
    return {
        "dim": vision.hidden_size,
        "depth": vision.num_hidden_layers,
        "heads": vision.num_attention_heads,
        "mlp_dim": mlp_dim,
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
    """Returns all published weights for the parameters of a state, which may be abstract; raises as
    `load_pretrained`."""
    vision = config.vision
    reports = {}
    if vision.sam:
        source = find_model(vision.sam, SAM_FLAG)
        tensors = to_transformers_names(read_tensors(source))
        table = SAM if config.decoder.type == "sam" else SAM_ENCODER
        reports[vision.sam] = match_weights(tensors, state, table, source)
    if vision.vit:
        source = find_model(vision.vit, VIT_FLAG)
        table = VITS[vision.vit_family]
        reports[vision.vit] = match_weights(read_tensors(source), state, table, source)
    if vision.efficientnet:
        source = find_efficientnet(vision.efficientnet)
        tensors = read_efficientnet(source)
        reports[vision.efficientnet] = match_weights(tensors, state, EFFICIENTNET, source)
    return reports
