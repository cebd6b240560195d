"""Published image encoders, and SAM's mask decoder: their sizes, and loading their weights into a model.

SAM comes as a Hugging Face `SamModel` (facebook/sam-vit-base, -large, -huge) or under the names of the original
repository (facebookresearch/segment-anything). Plain ViTs are DINOv2, CLIP and SigLIP. Backbones are EfficientNet-Lite
(backbone.py). keys.toml maps their keys.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from r2sm_jax.config import DecoderConfig, ModelConfig, VisionConfig, check_sizes
from r2sm_jax.errors import InputError
from r2sm_jax.models.efficientnet import fit_dense, read_block_dims, read_efficientnet
from r2sm_jax.models.encoder_sizes import (
    KNOWN_SIZES,
    EfficientNetSizes,
    EncoderSizes,
    PlainViTSizes,
    SamDecoderSizes,
    SamSizes,
    with_sizes,
)
from r2sm_jax.models.layers import ACTIVATIONS
from r2sm_jax.models.weights import (
    BACKBONES,
    Match,
    find_model,
    key_table,
    match,
    place,
    read_published,
    read_tensors,
)

SAM_FLAG = "--model.vision.sam"
VIT_FLAG = "--model.vision.vit"
EFFICIENTNET_FLAG = "--model.vision.efficientnet"
SAM_MASKS = 4
"""Mask tokens in SAM: one for a mask that is meant clearly, three for whole, part and part of part."""


# Sizes


def read_encoder_sizes(config: ModelConfig, *, use_table: bool = False) -> EncoderSizes:
    """Sizes of the published image encoders that a model starts from.

    Finds the weights, or downloads them. With `use_table`, the sizes of well-known models come from `KNOWN_SIZES`
    instead. Raises InputError if weights cannot be found, are of another architecture, or do not fit the model.
    """
    vision = config.vision
    table = KNOWN_SIZES if use_table else {}
    sizes = EncoderSizes()
    if vision.sam in table:
        sizes = table[vision.sam]
    elif vision.sam:
        sizes = read_published(_folder(vision.sam, SAM_FLAG), sam_sizes)

    if vision.vit in table:
        sizes = replace(sizes, vit=table[vision.vit].vit)
    elif vision.vit:
        sizes = replace(sizes, vit=read_published(_folder(vision.vit, VIT_FLAG), plain_vit_sizes))

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
    """Raises InputError if the user gave a size, so one that is not the default, that contradicts SAM's weights."""
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


def find_efficientnet(name: str) -> Path:
    """The folder or safetensors file of an EfficientNet-Lite, or its `.pth`, which may be alone in a folder."""
    local = Path(name).expanduser()
    pickles = [local] if local.is_file() else sorted(local.glob("*.pth"))
    if len(pickles) == 1 and pickles[0].suffix == ".pth":
        return pickles[0]
    if not local.exists() and name not in BACKBONES:
        raise InputError(
            f"{EFFICIENTNET_FLAG} {name}: neither a folder or file nor one of {', '.join(BACKBONES)}"
        )
    return find_model(name, EFFICIENTNET_FLAG)


def sam_sizes(published: Any) -> EncoderSizes:
    """Sizes of SAM's image encoder, and of its mask decoder if the configuration has one. Raises InputError if it is
    not SAM, or a SAM with parts that the published ones do not have."""
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
            and decoder.num_multimask_outputs == SAM_MASKS - 1
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
    """Sizes of the image encoder of a DINOv2, CLIP or SigLIP. Raises InputError if it is another architecture."""
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
) -> tuple[nnx.State, nnx.State, dict[str, Match]]:
    """The parameters and constants of a model with its published weights in place, and a report for each of them.

    Raises InputError if the weights cannot be found or read, a key has no parameter or another shape, or a parameter
    has no key; all such problems are named at once.
    """
    report = match_pretrained(config, sizes, nnx.merge_state(params, frozen))
    for matched in report.values():
        params = place(params, matched.values)
        frozen = place(frozen, matched.values)
    return params, frozen, report


def match_pretrained(
    config: ModelConfig, sizes: EncoderSizes, state: nnx.State
) -> dict[str, Match]:
    """The values of all published weights for a state, which may be abstract; raises as `load_pretrained`."""
    vision = config.vision
    matches = {}
    if vision.sam:
        source = find_model(vision.sam, SAM_FLAG)
        matches[vision.sam] = match_sam(config, state, read_tensors(source), source)
    if vision.vit:
        assert sizes.vit is not None
        source, table = find_model(vision.vit, VIT_FLAG), key_table(sizes.vit.family)
        fit = partial(_fit_plain, antialias=bool(sizes.vit.registers))
        matches[vision.vit] = match(state, read_tensors(source), table, source=source, fit=fit)
    if vision.efficientnet:
        source, table = find_efficientnet(vision.efficientnet), key_table("efficientnet_lite")
        matches[vision.efficientnet] = match(
            state, read_efficientnet(source), table, source=source, fit=fit_dense
        )
    return matches


def match_sam(
    config: ModelConfig, state: nnx.State, tensors: Mapping[str, np.ndarray], source: Path
) -> Match:
    """Values for the image encoder of a state, and for its decoder if that is SAM's; raises as `match`."""
    table = key_table("sam" if config.decoder.type == "sam" else "sam_encoder")

    def targets(path: str) -> list[str]:
        """Hypernetworks of SAM start one or more of ours, or none."""
        hypernetwork = re.fullmatch(r"decoder\.modal\.(\d+)\.(.*)", path)
        if not hypernetwork:
            return [path]
        masks = [i for i in range(1 + config.decoder.slots) if sam_mask(i) == int(hypernetwork[1])]
        return [
            f"decoder.{kind}.{i}.{hypernetwork[2]}" for kind in ("modal", "occluded") for i in masks
        ]

    return match(state, sam_names(tensors), table, source=source, fit=_fit_sam, targets=targets)


def sam_names(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A SAM file under the names of `transformers`, whichever of both it has."""
    if not any(key.startswith("image_encoder.") for key in tensors):
        return dict(tensors)
    table = key_table("sam_original")
    return {table.rename(key) or key: value for key, value in tensors.items()}


def sam_mask(token: int) -> int:
    """The mask of SAM that one of ours starts as: the fused one as its single mask, slots as its three in turn."""
    return 0 if token == 0 else 1 + (token - 1) % (SAM_MASKS - 1)


def _fit_sam(path: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A value of SAM in the shape of our parameter."""
    value = np.asarray(value, np.float32)
    if path == "vision.positions":
        return resize_grid(value[0], shape[0])
    if "rel_pos" in path:
        # Linear with half-pixel centres, without antialiasing, as in modeling/image_encoder.py, get_rel_pos
        return np.asarray(
            jax.image.resize(value, (shape[0], value.shape[1]), "linear", antialias=False)
        )
    if path == "vision.neck1.kernel":  # a 1 x 1 convolution
        return value[0, 0]
    if path.startswith("decoder.upscale.up"):  # a 2 x 2 transposed convolution
        return (
            np.tile(value, 4)
            if value.ndim == 1
            else value.transpose(3, 0, 1, 2).reshape(value.shape[3], -1)
        )
    if path == "decoder.mask_tokens":
        return value[[sam_mask(i) for i in range(shape[0])]]
    if path.startswith("decoder.iou.layers.2"):
        return value[..., [sam_mask(i) for i in range(shape[-1] // 2)] * 2]
    return value


def _fit_plain(
    path: str, value: np.ndarray, shape: tuple[int, ...], *, antialias: bool
) -> np.ndarray:
    """A value of a plain ViT in the shape of our parameter; the position of a class token is not interpolated."""
    if path in ("vision.vit.class_token", "vision.vit.registers"):
        return value.reshape(shape)
    if path != "vision.vit.positions":
        return value
    table = value.astype(np.float32).reshape(-1, shape[-1])
    side, size = int(len(table) ** 0.5), int(shape[0] ** 0.5)
    first = len(table) - side * side
    grid = resize_grid(table[first:].reshape(side, side, -1), size, antialias=antialias)
    return np.concatenate([table[:first], grid.reshape(size * size, -1)])


# Positions: what `transformers` interpolates in every call, done once


def resize_grid(
    table: Float[np.ndarray, "H W d"], size: int, *, antialias: bool = False
) -> Float[np.ndarray, "_h _w d"]:
    """An absolute position table at `size` x `size`, bicubic with half-pixel centres.

    The kernel is torch's (a = -0.75, no antialiasing, edges repeated), as DINOv2, CLIP and SigLIP are resized.
    `antialias` is the kernel of DINOv2 with registers (a = -0.5, widened where it shrinks).
    """
    if table.shape[:2] == (size, size):
        return table
    if antialias:
        return np.asarray(
            jax.image.resize(table, (size, size, table.shape[2]), "cubic", antialias=True)
        )
    rows, columns = (_bicubic(side, size) for side in table.shape[:2])
    return np.einsum("hH,wW,HWd->hwd", rows, columns, table, optimize=True).astype(np.float32)


def _bicubic(source: int, target: int, a: float = -0.75) -> Float[np.ndarray, "target source"]:
    centres = (np.arange(target) + 0.5) * (source / target) - 0.5
    first = np.floor(centres).astype(int)
    matrix = np.zeros((target, source))
    for tap in range(-1, 3):
        x = np.abs(centres - first - tap)
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * (x**3 - 5 * x**2 + 8 * x - 4)
        at = np.clip(first + tap, 0, source - 1)
        np.add.at(matrix, (np.arange(target), at), np.where(x <= 1, near, far))
    return matrix
