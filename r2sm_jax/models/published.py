"""Published image encoders, and SAM's mask decoder: their sizes, and loading their weights into a model.

SAM comes as a Hugging Face `SamModel` (facebook/sam-vit-base, -large, -huge) or under the names of the original
repository (facebookresearch/segment-anything). Plain ViTs are DINOv2, CLIP and SigLIP. Backbones are EfficientNet-Lite
(backbone.py). keys.toml maps their keys.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from r2sm_jax.config import DecoderConfig, ModelConfig, PlainViTConfig, VisionConfig
from r2sm_jax.errors import InputError
from r2sm_jax.models.efficientnet import block_dims, fit_dense, read_backbone
from r2sm_jax.models.layers import ACTIVATIONS
from r2sm_jax.models.weights import (
    BACKBONES,
    SIZES,
    Match,
    find_model,
    key_table,
    match,
    place,
    read_published,
    read_tensors,
    sizes_of,
)

T = TypeVar("T", VisionConfig, DecoderConfig)

INIT, NAME, BACKBONE = "--model.vision.init", "--model.vision.name", "--model.vision.efficientnet"
SAM_MASKS = 4
"""Mask tokens in SAM: one for a mask that is meant clearly, three for whole, part and part of part."""
SAM_ALWAYS = {"stem": "patch", "activation": "gelu"}
_find = cache(find_model)  # so that it is reported once where it was found


# Sizes


def with_published_sizes(model: ModelConfig, known: ModelConfig | None = None) -> ModelConfig:
    """The configuration with the sizes that the published weights of the image encoders imply; others stay.

    `known` is the configuration of a run that started from the same weights: it has the sizes, and the published files
    are not needed. Raises InputError if the weights cannot be had or are of another architecture, or a given size
    contradicts theirs.
    """
    vision, decoder = model.vision, model.decoder
    if known is None or known.vision.published != vision.published:
        known = ModelConfig()
        if vision.init:
            known = read_published(_folder(vision.init, INIT), sam_sizes)
        if vision.name:
            plain = read_published(_folder(vision.name, NAME), plain_sizes)
            known = replace(known, vision=replace(known.vision, plain=plain))
        if vision.efficientnet:
            source = _find_backbone(vision.efficientnet)
            sizes = {
                "patch_size": 16,
                "efficientnet_dims": block_dims(read_backbone(source), source),
            }
            known = replace(known, vision=replace(known.vision, **sizes))
    if vision.init:
        vision = _with_sizes(vision, known.vision, [*SIZES["sam"], *SAM_ALWAYS], "--model.vision")
        if decoder.type == "sam":
            decoder = _with_sizes(decoder, known.decoder, SIZES["sam_decoder"], "--model.decoder")
    if vision.efficientnet:
        vision = _with_sizes(
            vision, known.vision, ["patch_size", "efficientnet_dims"], "--model.vision"
        )
    return replace(model, vision=replace(vision, plain=known.vision.plain), decoder=decoder)


def _with_sizes(config: T, known: T, fields: Iterable[str], flag: str) -> T:
    """Takes the fields from `known`. One that the user gave, so is not the default, must be the same."""
    default, sizes = type(config)(), {field: getattr(known, field) for field in fields}
    for field, size in sizes.items():
        given = getattr(config, field)
        if given not in (getattr(default, field), size):
            raise InputError(
                f"{flag}.{field.replace('_', '-')} {given}: the published weights have {size}; leave the flag out"
            )
    return replace(config, **sizes)


def _folder(name: str, flag: str) -> Path:
    """The folder that holds config.json, beside the safetensors file if `name` is one."""
    found = _find(name, flag)
    return found if found.is_dir() else found.parent


def _find_backbone(name: str) -> Path:
    """The folder or safetensors file of a backbone, or its `.pth`, which may be alone in a folder."""
    local = Path(name).expanduser()
    pickles = [local] if local.is_file() else sorted(local.glob("*.pth"))
    if len(pickles) == 1 and pickles[0].suffix == ".pth":
        return pickles[0]
    if not local.exists() and name not in BACKBONES:
        raise InputError(
            f"{BACKBONE} {name}: neither a folder or file nor one of {', '.join(BACKBONES)}"
        )
    return _find(name, BACKBONE)


def sam_sizes(published: Any) -> ModelConfig:
    """Sizes of SAM's image encoder, and of its mask decoder if the configuration has one. Raises InputError if it is
    not SAM, or a SAM with parts that the published ones do not have."""
    if published.model_type not in ("sam", "sam_vision_model"):
        hint = f"pass DINOv2, CLIP and SigLIP as {NAME}"
        raise InputError(f"{INIT} needs SAM, not model_type {published.model_type!r}; {hint}")
    vision = getattr(published, "vision_config", published)
    decoder = getattr(published, "mask_decoder_config", None)
    same = (vision.hidden_act, vision.use_abs_pos, vision.qkv_bias, vision.num_channels) == (
        "gelu",
        True,
        True,
        3,
    )
    if decoder is not None:
        shape = (
            decoder.attention_downsample_rate,
            decoder.iou_head_depth,
            decoder.num_multimask_outputs,
        )
        same &= (
            shape == (2, 3, SAM_MASKS - 1) and decoder.iou_head_hidden_dim == decoder.hidden_size
        )
    if not same:
        raise InputError(
            "it differs from the published SAM in more than its sizes; give that or a copy of it"
        )
    sizes = sizes_of(vision, "sam")
    sizes["global_blocks"] = tuple(sizes["global_blocks"])
    of_decoder = sizes_of(decoder, "sam_decoder") if decoder else {}
    return ModelConfig(VisionConfig(**SAM_ALWAYS, **sizes), decoder=DecoderConfig(**of_decoder))


def plain_sizes(published: Any) -> PlainViTConfig:
    """Sizes of the image encoder of a DINOv2, CLIP or SigLIP. Raises InputError if it is another architecture."""
    kind, vision = published.model_type, getattr(published, "vision_config", published)
    family = SIZES["families"].get(kind)
    if family is None:
        hint = f"; pass SAM as {INIT}" if kind.startswith("sam") else ""
        raise InputError(
            f"{NAME} cannot load it: model_type {kind!r} is none of {', '.join(SIZES['families'])}{hint}"
        )
    if vision.hidden_act not in ACTIVATIONS:
        raise InputError(f"{NAME} cannot load it: activation {vision.hidden_act!r} is not known")
    if family == "dinov2" and (vision.use_swiglu_ffn or not vision.qkv_bias):
        raise InputError(
            f"{NAME} loads only DINOv2 with a plain MLP and biases (small, base, large)"
        )
    return PlainViTConfig(
        family,
        **sizes_of(vision, "plain"),
        mlp_dim=getattr(vision, "intermediate_size", None)
        or int(vision.hidden_size * vision.mlp_ratio),
        registers=getattr(vision, "num_register_tokens", 0),
    )


# Loading


def load_published(
    config: ModelConfig, params: nnx.State, constants: nnx.State
) -> tuple[nnx.State, nnx.State, dict[str, Match]]:
    """The parameters and constants of a model of `config` with the published weights in their places.

    Also returns what became of the keys of each of `VisionConfig.published`. Raises InputError if the weights cannot be
    had or read, a key has no place or another shape, or one is missing; all such keys are named at once.
    """
    matches = match_published(config, nnx.merge_state(params, constants))
    for found in matches.values():
        params, constants = place(params, found.values), place(constants, found.values)
    return params, constants, matches


def match_published(config: ModelConfig, state: nnx.State) -> dict[str, Match]:
    """The values of each of `VisionConfig.published` for a state, which may be abstract; raises as `load_published`."""
    vision, matches = config.vision, {}
    if vision.init:
        source = _find(vision.init, INIT)
        matches[vision.init] = match_sam(config, state, read_tensors(source), source)
    if vision.name:
        source, table = _find(vision.name, NAME), key_table(vision.plain.family)
        fit = partial(_fit_plain, antialias=bool(vision.plain.registers))
        matches[vision.name] = match(state, read_tensors(source), table, source=source, fit=fit)
    if vision.efficientnet:
        source, table = _find_backbone(vision.efficientnet), key_table("efficientnet_lite")
        matches[vision.efficientnet] = match(
            state, read_backbone(source), table, source=source, fit=fit_dense
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
    if path in ("vision.plain.class_token", "vision.plain.registers"):
        return value.reshape(shape)
    if path != "vision.plain.positions":
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
