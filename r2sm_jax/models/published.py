"""Published image encoders, and SAM's mask decoder: their sizes, and loading their weights into a model.

SAM comes as a Hugging Face `SamModel` (facebook/sam-vit-base, -large, -huge) or under the names of the original
repository (facebookresearch/segment-anything). Plain ViTs are DINOv2, CLIP and SigLIP. keys.toml maps their keys.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from r2sm_jax.config import DecoderConfig, Family, ModelConfig, PlainViTConfig, VisionConfig
from r2sm_jax.errors import InputError
from r2sm_jax.models.vision import VisionEncoder, adapt_published
from r2sm_jax.models.weights import (
    Match,
    Tensor,
    check_match,
    find_model,
    key_table,
    match,
    place,
    read_published_config,
    read_tensors,
)

T = TypeVar("T", VisionConfig, DecoderConfig)

SAM_MASKS = 4
"""Mask tokens in SAM: one for a mask that is meant clearly, three for whole, part and part of part."""
FAMILIES: dict[str, Family] = {
    "dinov2": "dinov2", "dinov2_with_registers": "dinov2", "clip": "clip", "clip_vision_model": "clip",
    "siglip": "siglip", "siglip_vision_model": "siglip",
}  # fmt: skip
"""`model_type` of `transformers` -> family of plain ViTs."""


class Report(NamedTuple):
    """What became of every key and of every parameter that could have been loaded. Dotted paths are ours."""

    name: str
    loaded: dict[str, str]
    """Our path -> published key."""
    copied: dict[str, str]
    """Our path -> our path that it starts as a copy of."""
    initialised: list[str]
    """Ours alone, freshly drawn."""
    unused: list[str]
    """Published keys that this model has no use for."""

    def __str__(self) -> str:
        counts = f"{len(self.loaded)} loaded, {len(self.copied)} copied, {len(self.initialised)} initialised"
        lines = [f"{self.name}: {counts}, {len(self.unused)} unused"]
        for what in ("copied", "initialised", "unused"):
            groups = Counter(".".join(name.split(".")[:2]) for name in getattr(self, what))
            if groups:
                lines.append(f"  {what}: " + ", ".join(f"{group} ({n})" for group, n in groups.items()))
        return "\n".join(lines)

    def lines(self) -> list[str]:
        """One line for every key."""
        return [
            *(f"loaded       {path} <- {key}" for path, key in self.loaded.items()),
            *(f"copied       {path} <- {other}" for path, other in self.copied.items()),
            *(f"initialised  {path}" for path in self.initialised),
            *(f"unused       {key}" for key in self.unused),
        ]


# Sizes


def with_published_sizes(model: ModelConfig, known: ModelConfig | None = None) -> ModelConfig:
    """The configuration with the sizes that `--model.vision.init` and `--model.vision.name` imply; others stay.

    `known` is the configuration of a run that started from the same weights: it has the sizes, and the published files
    are not needed.

    Raises:
        InputError: the weights cannot be had or are of another architecture, or a given size contradicts theirs.
    """
    vision, decoder, init = model.vision, model.decoder, model.vision.init
    if known is not None and (known.vision.init, known.vision.name) != (init, vision.name):
        known = None
    if init:
        if known is None:
            sizes, decoder_sizes = sam_sizes(_folder(init, "--model.vision.init"))
        else:
            sizes = {name: getattr(known.vision, name) for name in _SIZES}
            decoder_sizes = {name: getattr(known.decoder, name) for name in _DECODER_SIZES}
        vision = _with_sizes(vision, sizes, init, "--model.vision")
        if decoder.kind == "sam":
            decoder = _with_sizes(decoder, decoder_sizes, init, "--model.decoder")
    if vision.name:
        plain = plain_sizes(_folder(vision.name, "--model.vision.name")) if known is None else known.vision.plain
        vision = replace(vision, plain=plain)
    return replace(model, vision=vision, decoder=decoder)


_SIZES = (
    *("patch_size", "stem", "dim", "depth", "heads", "mlp_dim", "window_size", "global_blocks"),
    *("relative_positions", "out_dim", "activation"),
)
_DECODER_SIZES = ("dim", "depth", "heads", "mlp_dim")


def _with_sizes(config: T, sizes: Mapping[str, Any], name: str, flag: str) -> T:
    """Sets the sizes. One that the user gave, so is not the default, must be the same."""
    given, default = {field: getattr(config, field) for field in sizes}, type(config)()
    wrong = [field for field, v in given.items() if v not in (getattr(default, field), sizes[field])]
    if wrong:
        flags = ", ".join(f"{flag}.{f.replace('_', '-')} {given[f]} (it has {sizes[f]})" for f in wrong)
        raise InputError(f"{name} has sizes of its own, which contradict {flags}; leave these flags out")
    return replace(config, **sizes)


@cache
def _find(name: str, flag: str) -> Path:
    """A folder, or a safetensors file that has its config.json beside it; cached, so that it is reported once."""
    return find_model(name, what="vision encoder", flag=flag)


def _folder(name: str, flag: str) -> Path:
    found = _find(name, flag)
    return found if found.is_dir() else found.parent


def sam_sizes(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes of SAM's image encoder and mask decoder in a folder, as fields of `VisionConfig` and `DecoderConfig`.

    Raises:
        InputError: it is not SAM, or a SAM with parts that the published ones do not have.
    """
    published, file = read_published_config(folder), folder / "config.json"
    if published.model_type not in ("sam", "sam_vision_model"):
        hint = "; pass DINOv2, CLIP and SigLIP as --model.vision.name"
        raise InputError(f"{file}: --model.vision.init needs SAM, not model_type {published.model_type!r}{hint}")
    vision = getattr(published, "vision_config", published)
    if (vision.hidden_act, vision.use_abs_pos, vision.qkv_bias, vision.num_channels) != ("gelu", True, True, 3):
        raise InputError(
            f"{file}: only SAM with exact GELU, absolute positions, biases and three channels can be loaded"
        )
    sizes = {
        "patch_size": vision.patch_size, "stem": "patch", "dim": vision.hidden_size,
        "depth": vision.num_hidden_layers, "heads": vision.num_attention_heads, "mlp_dim": vision.mlp_dim,
        "window_size": vision.window_size, "global_blocks": tuple(vision.global_attn_indexes),
        "relative_positions": vision.use_rel_pos, "out_dim": vision.output_channels, "activation": "gelu",
    }  # fmt: skip
    decoder = getattr(published, "mask_decoder_config", None)
    if decoder is None:
        return sizes, {}
    shape = decoder.attention_downsample_rate, decoder.iou_head_depth, decoder.num_multimask_outputs
    if shape != (2, 3, SAM_MASKS - 1) or decoder.iou_head_hidden_dim != decoder.hidden_size:
        raise InputError(f"{file}: its mask decoder differs from SAM's in more than width and depth")
    return sizes, {
        "dim": decoder.hidden_size, "depth": decoder.num_hidden_layers, "heads": decoder.num_attention_heads,
        "mlp_dim": decoder.mlp_dim,
    }  # fmt: skip


def plain_sizes(folder: Path) -> PlainViTConfig:
    """Sizes of a DINOv2, CLIP or SigLIP image encoder in a folder.

    Raises:
        InputError: it is another architecture.
    """
    published = read_published_config(folder)
    kind, vision = published.model_type, getattr(published, "vision_config", published)
    family, activation = FAMILIES.get(kind), getattr(vision, "hidden_act", None)
    if family is None:
        reason = f"model_type {kind!r} is none of {', '.join(FAMILIES)}"
        reason += "; pass SAM as --model.vision.init" if kind.startswith("sam") else ""
    elif activation not in ("gelu", "gelu_pytorch_tanh", "quick_gelu"):
        reason = f"activation {activation!r} is not known"
    elif family == "dinov2" and (vision.use_swiglu_ffn or not vision.qkv_bias):
        reason = "only DINOv2 with a plain MLP and biases is supported (small, base, large)"
    else:
        return PlainViTConfig(
            family,
            dim=vision.hidden_size,
            depth=vision.num_hidden_layers,
            heads=vision.num_attention_heads,
            mlp_dim=getattr(vision, "intermediate_size", None) or int(vision.hidden_size * vision.mlp_ratio),
            patch_size=vision.patch_size,
            activation="gelu_tanh" if activation == "gelu_pytorch_tanh" else activation,
            norm_epsilon=vision.layer_norm_eps,
            registers=getattr(vision, "num_register_tokens", 0),
        )
    raise InputError(f"{folder / 'config.json'}: --model.vision.name cannot load it: {reason}")


# Loading


def load_published(
    config: ModelConfig, params: nnx.State, constants: nnx.State
) -> tuple[nnx.State, nnx.State, list[Report]]:
    """The parameters and constants of a model of `config` with the published weights in their places.

    Raises:
        InputError: the weights cannot be had or read, a key has no place or another shape, or one is missing; all such
            keys are named at once.
    """
    state = nnx.merge_state(params, constants)
    reports = []
    for name, flag, match_family in (
        (config.vision.init, "--model.vision.init", match_sam),
        (config.vision.name, "--model.vision.name", match_plain),
    ):
        if name:
            source = _find(name, flag)
            values, report = match_family(config, state, read_tensors(source), source)
            params, constants = place(params, values), place(constants, values)
            reports.append(report)
    return params, constants, reports


def load_encoder(
    name: str, *, image_size: int | None = None, frozen: bool = False, dtype: str = "float32"
) -> VisionEncoder:
    """SAM's image encoder with published weights: `name` is a folder or a Hugging Face name.

    Positions are interpolated to `image_size` pixels; None = the published size. `frozen`: weights are constants.

    Raises:
        InputError: as `load_published`.
    """
    published = read_published_config(_folder(name, "--model.vision.init"))
    size = image_size or getattr(published, "vision_config", published).image_size
    config = with_published_sizes(ModelConfig(vision=VisionConfig(init=name, image_size=size, frozen=frozen)))
    encoder = VisionEncoder(config.vision, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    adapt_published(encoder, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(encoder)
    loaded, _, _ = load_published(config, nnx.State({"vision": state}), nnx.State({}))
    return nnx.merge(graphdef, loaded["vision"])


def match_sam(
    config: ModelConfig, state: nnx.State, tensors: Mapping[str, np.ndarray], source: Path
) -> tuple[dict[tuple, Tensor], Report]:
    """Values by path for the image encoder of a state, and for its decoder if that is SAM's.

    Raises:
        InputError: as `load_published`; it names `source`.
    """
    with_decoder = config.decoder.kind == "sam" and "decoder" in state
    table = key_table("sam" if with_decoder else "sam_encoder")
    if with_decoder:
        spare = [f"mask_decoder.output_hypernetworks_mlps.{i}.**" for i in range(1 + config.decoder.slots, SAM_MASKS)]
        table = table._replace(unused=[*table.unused, *spare])
    parts = {"vision": nnx.State({k: v for k, v in state["vision"].items() if k not in ("plain", "join")})}
    parts |= {"decoder": state["decoder"]} if with_decoder else {}
    found = match(nnx.State(parts), sam_names(tensors), table, change=_fit_sam)
    copies = {}
    for path in found.missing:
        hypernetwork = re.fullmatch(r"decoder\.(?:modal|occluded)\.(\d+)\.(.*)", path)
        original = f"decoder.modal.{sam_mask(int(hypernetwork[1]))}.{hypernetwork[2]}" if hypernetwork else ""
        if original in found.sources:
            copies[path] = original
    return _checked(config.vision.init, source, found, copies)


def match_plain(
    config: ModelConfig, state: nnx.State, tensors: Mapping[str, np.ndarray], source: Path
) -> tuple[dict[tuple, Tensor], Report]:
    """Values by path for the plain ViT of a state; raises as `match_sam`."""
    parts = nnx.State({k: v for k, v in state["vision"].items() if k in ("plain", "join")})
    change = partial(_fit_plain, antialias=bool(config.vision.plain.registers))
    table = key_table(config.vision.plain.family)
    return _checked(config.vision.name, source, match(nnx.State({"vision": parts}), tensors, table, change=change), {})


def _checked(
    name: str | None, source: Path, found: Match, copies: dict[str, str]
) -> tuple[dict[tuple, Tensor], Report]:
    """Adds the copies, and raises InputError for what does not fit."""
    check_match(found._replace(missing=[path for path in found.missing if path not in copies]), source)
    loaded = {".".join(map(str, path)): value for path, value in found.loaded.items()}
    values = dict(found.loaded)
    for path, original in copies.items():
        values[tuple(int(part) if part.isdigit() else part for part in path.split("."))] = loaded[original]
    return values, Report(name or "", found.sources, copies, found.fresh, found.unused)


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
        return resize_line(value, shape[0])
    if path == "vision.neck1.kernel":  # a 1 x 1 convolution
        return value[0, 0]
    if path.startswith("decoder.upscale.up"):  # a 2 x 2 transposed convolution
        return np.tile(value, 4) if value.ndim == 1 else value.transpose(3, 0, 1, 2).reshape(value.shape[3], -1)
    if path == "decoder.mask_tokens":
        return value[[sam_mask(i) for i in range(shape[0])]]
    if path.startswith("decoder.iou.layers.2"):
        return value[..., [sam_mask(i) for i in range(shape[-1] // 2)] * 2]
    return value


def _fit_plain(path: str, value: np.ndarray, shape: tuple[int, ...], *, antialias: bool) -> np.ndarray:
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
        return np.asarray(jax.image.resize(table, (size, size, table.shape[2]), "cubic", antialias=True))
    rows, columns = (_bicubic(side, size) for side in table.shape[:2])
    return np.einsum("hH,wW,HWd->hwd", rows, columns, table, optimize=True).astype(np.float32)


def resize_line(table: Float[np.ndarray, "n d"], size: int) -> Float[np.ndarray, "_m d"]:
    """A relative position table at another length, linear with half-pixel centres, without antialiasing: as in SAM
    (modeling/image_encoder.py, get_rel_pos)."""
    if len(table) == size:
        return table
    centres = (np.arange(size) + 0.5) * (len(table) / size) - 0.5
    columns = [np.interp(centres, np.arange(len(table)), column) for column in table.T]
    return np.stack(columns, axis=1).astype(np.float32)


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
