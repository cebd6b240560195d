"""Published weights of image encoders, and of SAM's mask decoder: their sizes, and loading them
into a model.

`read_encoder_sizes` comes before a model is built, `load_pretrained` after that. A file for each
family (keys_sam.py, keys_plain_vit.py, keys_efficientnet.py) says how its tensors
become our parameters.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from flax import nnx

from r2sm_jax.config import DecoderConfig, ModelConfig, VisionConfig, check_sizes
from r2sm_jax.errors import InputError
from r2sm_jax.models.encoder_sizes import (
    KNOWN_SIZES,
    EfficientNetSizes,
    EncoderSizes,
    PlainViTSizes,
    SamDecoderSizes,
    SamSizes,
    with_sizes,
)
from r2sm_jax.models.hub import EFFICIENTNETS, find_model, read_model_config, read_tensors
from r2sm_jax.models.keys_efficientnet import (
    match_efficientnet,
    read_block_dims,
    read_efficientnet,
)
from r2sm_jax.models.keys_plain_vit import match_plain_vit
from r2sm_jax.models.keys_sam import NUM_SAM_MASKS, match_sam
from r2sm_jax.models.layers import ACTIVATIONS
from r2sm_jax.models.matching import LoadReport, put_weights

SAM_FLAG = "--model.vision.sam"
VIT_FLAG = "--model.vision.vit"
EFFICIENTNET_FLAG = "--model.vision.efficientnet"


# Sizes


def read_encoder_sizes(config: ModelConfig, *, use_table: bool = False) -> EncoderSizes:
    """Sizes of the published image encoders that a model starts from.

    Finds the weights, or downloads them. With `use_table`, the sizes of well-known models come from
    `KNOWN_SIZES` instead. Raises InputError if weights cannot be found, are of another
    architecture, or do not fit the model.
    """
    vision = config.vision
    table = KNOWN_SIZES if use_table else {}
    sizes = EncoderSizes()
    if vision.sam in table:
        sizes = table[vision.sam]
    elif vision.sam:
        sizes = read_model_config(_folder(vision.sam, SAM_FLAG), sam_sizes)

    if vision.vit in table:
        sizes = replace(sizes, vit=table[vision.vit].vit)
    elif vision.vit:
        vit = read_model_config(_folder(vision.vit, VIT_FLAG), plain_vit_sizes)
        sizes = replace(sizes, vit=vit)

    if vision.efficientnet in table:
        sizes = replace(sizes, efficientnet=table[vision.efficientnet].efficientnet)
    elif vision.efficientnet:
        source = find_efficientnet(vision.efficientnet)
        block_dims = read_block_dims(read_efficientnet(source), source)
        sizes = replace(sizes, efficientnet=EfficientNetSizes(block_dims))

    if sizes.sam is not None:
        _check_given(vision, sizes.sam, "--model.vision")
    if sizes.sam_decoder is not None and config.decoder.type == "sam":
        _check_given(config.decoder, sizes.sam_decoder, "--model.decoder")
    check_sizes(with_sizes(config, sizes))
    return sizes


def _check_given(
    config: VisionConfig | DecoderConfig, sizes: SamSizes | SamDecoderSizes, flag: str
) -> None:
    """Raises InputError if the user gave a size, so one that is not the default, that contradicts
    SAM's weights."""
    default = type(config)()
    for name, size in asdict(sizes).items():
        value = getattr(config, name)
        if value not in (getattr(default, name), size):
            raise InputError(
                f"{flag}.{name.replace('_', '-')} {value}: the published weights have {size}; "
                "leave the flag out"
            )


def _folder(name: str, flag: str) -> Path:
    """The folder that holds config.json, beside the safetensors file if `name` is one."""
    path = find_model(name, flag)
    return path if path.is_dir() else path.parent


def find_efficientnet(name: str, flag: str = EFFICIENTNET_FLAG) -> Path:
    """The folder or safetensors file of an EfficientNet-Lite, or its `.pth`, which may be alone in
    a folder. Raises InputError, which names the flag, if there is none."""
    local = Path(name).expanduser()
    pickles = [local] if local.is_file() else sorted(local.glob("*.pth"))
    if len(pickles) == 1 and pickles[0].suffix == ".pth":
        return pickles[0]
    if not local.exists() and name not in EFFICIENTNETS:
        raise InputError(
            f"{flag} {name}: neither a folder or file nor one of {', '.join(EFFICIENTNETS)}"
        )
    return find_model(name, flag)


def sam_sizes(published: Any) -> EncoderSizes:
    """Sizes of SAM's image encoder, and of its mask decoder if the configuration has one. Raises
    InputError if it is not SAM, or a SAM with parts that the published ones do not have."""
    if published.model_type not in ("sam", "sam_vision_model"):
        raise InputError(
            f"{SAM_FLAG} needs SAM, not model_type {published.model_type!r}; "
            f"pass DINOv2, CLIP and SigLIP as {VIT_FLAG}"
        )
    vision = getattr(published, "vision_config", published)
    decoder = getattr(published, "mask_decoder_config", None)
    is_published = (
        vision.hidden_act == "gelu"
        and vision.use_abs_pos
        and vision.qkv_bias
        and vision.num_channels == 3
        and vision.patch_size == 16
    )
    if decoder is not None:
        is_published = (
            is_published
            and decoder.attention_downsample_rate == 2
            and decoder.iou_head_depth == 3
            and decoder.iou_head_hidden_dim == decoder.hidden_size
            and decoder.num_multimask_outputs == NUM_SAM_MASKS - 1
        )
    if not is_published:
        raise InputError(
            "it differs from the published SAM in more than its sizes; give that or a copy of it"
        )
    encoder_sizes = SamSizes(
        patch_size=vision.patch_size,
        dim=vision.hidden_size,
        depth=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        mlp_dim=vision.mlp_dim,
        window_size=vision.window_size,
        global_blocks=tuple(vision.global_attn_indexes),
        relative_positions=vision.use_rel_pos,
        out_dim=vision.output_channels,
    )
    decoder_sizes = None
    if decoder is not None:
        decoder_sizes = SamDecoderSizes(
            dim=decoder.hidden_size,
            depth=decoder.num_hidden_layers,
            heads=decoder.num_attention_heads,
            mlp_dim=decoder.mlp_dim,
        )
    return EncoderSizes(sam=encoder_sizes, sam_decoder=decoder_sizes)


PLAIN_VIT_FAMILIES: dict[str, Literal["dinov2", "clip", "siglip"]] = {
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2",
    "clip": "clip",
    "clip_vision_model": "clip",
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
}
"""By the `model_type` of a config.json."""


def plain_vit_sizes(published: Any) -> PlainViTSizes:
    """Sizes of the image encoder of a DINOv2, CLIP or SigLIP. Raises InputError if it is another
    architecture."""
    kind = published.model_type
    vision = getattr(published, "vision_config", published)
    family = PLAIN_VIT_FAMILIES.get(kind)
    if family is None:
        hint = f"; pass SAM as {SAM_FLAG}" if kind.startswith("sam") else ""
        raise InputError(
            f"{VIT_FLAG} cannot load it: model_type {kind!r} is none of "
            f"{', '.join(PLAIN_VIT_FAMILIES)}{hint}"
        )
    if vision.hidden_act not in ACTIVATIONS:
        raise InputError(f"{VIT_FLAG} cannot load it: activation {vision.hidden_act!r} is unknown")
    if family == "dinov2" and (vision.use_swiglu_ffn or not vision.qkv_bias):
        raise InputError(
            f"{VIT_FLAG} loads only DINOv2 with a plain MLP and biases (small, base, large)"
        )
    # DINOv2 has a ratio instead.
    mlp_dim = getattr(vision, "intermediate_size", None)
    if mlp_dim is None:
        mlp_dim = int(vision.hidden_size * vision.mlp_ratio)
    return PlainViTSizes(
        family,
        dim=vision.hidden_size,
        depth=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        mlp_dim=mlp_dim,
        patch_size=vision.patch_size,
        activation=vision.hidden_act,
        norm_epsilon=vision.layer_norm_eps,
        registers=getattr(vision, "num_register_tokens", 0),
    )


# Loading


def load_pretrained(
    config: ModelConfig, sizes: EncoderSizes, params: nnx.State, frozen: nnx.State
) -> tuple[nnx.State, nnx.State, dict[str, LoadReport]]:
    """The parameters and constants of a model with its published weights in place, and a report for
    each of them.

    Raises InputError if the weights cannot be found or read, a key has no parameter or another
    shape, or a parameter has no key; all such problems are named at once.
    """
    reports = match_pretrained(config, sizes, nnx.merge_state(params, frozen))
    for report in reports.values():
        params = put_weights(params, report.values)
        frozen = put_weights(frozen, report.values)
    return params, frozen, reports


def match_pretrained(
    config: ModelConfig, sizes: EncoderSizes, state: nnx.State
) -> dict[str, LoadReport]:
    """All published weights for the parameters of a state, which may be abstract; raises as
    `load_pretrained`."""
    vision = config.vision
    reports = {}
    if vision.sam:
        source = find_model(vision.sam, SAM_FLAG)
        reports[vision.sam] = match_sam(
            state,
            read_tensors(source),
            source,
            num_slots=config.decoder.slots,
            with_decoder=config.decoder.type == "sam",
        )
    if vision.vit:
        assert sizes.vit is not None
        source = find_model(vision.vit, VIT_FLAG)
        reports[vision.vit] = match_plain_vit(state, sizes.vit, source)
    if vision.efficientnet:
        source = find_efficientnet(vision.efficientnet)
        reports[vision.efficientnet] = match_efficientnet(state, source)
    return reports
