"""Published image encoders, and SAM's mask decoder: their sizes, their key tables, and loading into a model.

SAM comes as a Hugging Face `SamModel` (facebook/sam-vit-base, -large, -huge) or under the names of the original
repository (facebookresearch/segment-anything), which `ORIGINAL` turns into the former. Plain ViTs are in plain_vit.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from r2sm_jax.config import DecoderConfig, ModelConfig, PlainViTConfig, VisionConfig
from r2sm_jax.errors import InputError
from r2sm_jax.models import plain_vit
from r2sm_jax.models.plain_vit import plain_config
from r2sm_jax.models.positions import resize_grid, resize_line
from r2sm_jax.models.vision import VisionEncoder
from r2sm_jax.models.weights import Match, Tensor, find_model, match, place, read_config, read_tensors, weight_files

T = TypeVar("T", VisionConfig, DecoderConfig)

# Names of segment-anything -> names of `transformers`. The last three lines are needed since "layers.0" of the heads
# means something else in either.
ORIGINAL = (
    (r"image_encoder\.patch_embed\.proj\.(.*)", r"vision_encoder.patch_embed.projection.\1"),
    (r"image_encoder\.pos_embed", r"vision_encoder.pos_embed"),
    (r"image_encoder\.blocks\.(\d+)\.norm([12])\.(.*)", r"vision_encoder.layers.\1.layer_norm\2.\3"),
    (r"image_encoder\.blocks\.(.*)", r"vision_encoder.layers.\1"),
    (r"image_encoder\.neck\.0\.(.*)", r"vision_encoder.neck.conv1.\1"),
    (r"image_encoder\.neck\.1\.(.*)", r"vision_encoder.neck.layer_norm1.\1"),
    (r"image_encoder\.neck\.2\.(.*)", r"vision_encoder.neck.conv2.\1"),
    (r"image_encoder\.neck\.3\.(.*)", r"vision_encoder.neck.layer_norm2.\1"),
    (r"prompt_encoder\.pe_layer\.positional_encoding_gaussian_matrix", r"shared_image_embedding.positional_embedding"),
    (r"(mask_decoder\.transformer\.layers\.\d+)\.norm(\d)\.(.*)", r"\1.layer_norm\2.\3"),
    (r"mask_decoder\.transformer\.norm_final_attn\.(.*)", r"mask_decoder.transformer.layer_norm_final_attn.\1"),
    (r"mask_decoder\.output_upscaling\.0\.(.*)", r"mask_decoder.upscale_conv1.\1"),
    (r"mask_decoder\.output_upscaling\.1\.(.*)", r"mask_decoder.upscale_layer_norm.\1"),
    (r"mask_decoder\.output_upscaling\.3\.(.*)", r"mask_decoder.upscale_conv2.\1"),
    (r"(mask_decoder\.(?:output_hypernetworks_mlps\.\d+|iou_prediction_head))\.layers\.0\.(.*)", r"\1.proj_in.\2"),
    (r"(mask_decoder\.(?:output_hypernetworks_mlps\.\d+|iou_prediction_head))\.layers\.1\.(.*)", r"\1.layers.0.\2"),
    (r"(mask_decoder\.(?:output_hypernetworks_mlps\.\d+|iou_prediction_head))\.layers\.2\.(.*)", r"\1.proj_out.\2"),
)

VISION_KEYS = (
    (r"vision_encoder\.patch_embed\.projection\.(weight|bias)", r"vision.stem.\1"),
    (r"vision_encoder\.pos_embed", r"vision.positions"),
    (r"vision_encoder\.layers\.(\d+)\.layer_norm([12])\.(weight|bias)", r"vision.blocks.\1.norm\2.\3"),
    (r"vision_encoder\.layers\.(\d+)\.attn\.qkv\.(weight|bias)", r"vision.blocks.\1.attention.qkv.\2"),
    (r"vision_encoder\.layers\.(\d+)\.attn\.proj\.(weight|bias)", r"vision.blocks.\1.attention.out.\2"),
    (r"vision_encoder\.layers\.(\d+)\.attn\.rel_pos_([hw])", r"vision.blocks.\1.attention.rel_pos_\2"),
    (r"vision_encoder\.layers\.(\d+)\.mlp\.lin1\.(weight|bias)", r"vision.blocks.\1.mlp.layers.0.\2"),
    (r"vision_encoder\.layers\.(\d+)\.mlp\.lin2\.(weight|bias)", r"vision.blocks.\1.mlp.layers.1.\2"),
    (r"vision_encoder\.neck\.conv([12])\.weight", r"vision.neck\1.weight"),
    (r"vision_encoder\.neck\.layer_norm([12])\.(weight|bias)", r"vision.neck_norm\1.\2"),
)

_ATTENTIONS = (("self_attn", "self_attention"), ("cross_attn_token_to_image", "to_image"),
               ("cross_attn_image_to_token", "to_tokens"))  # fmt: skip
_PROJECTIONS = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"))
_SAM_LAYERS = r"mask_decoder\.transformer\.layers\.(\d+)"
DECODER_KEYS = (
    (r"shared_image_embedding\.positional_embedding", r"decoder.frequencies"),
    (r"prompt_encoder\.no_mask_embed\.weight", r"decoder.no_mask"),
    (r"mask_decoder\.iou_token\.weight", r"decoder.iou_token"),
    (r"mask_decoder\.mask_tokens\.weight", r"decoder.mask_tokens"),
    *(
        (rf"{_SAM_LAYERS}\.{a}\.{p}\.(weight|bias)", rf"decoder.blocks.\1.{ours}.{projection}.\2")
        for a, ours in _ATTENTIONS
        for p, projection in _PROJECTIONS
    ),
    *(
        (rf"mask_decoder\.transformer\.final_attn_token_to_image\.{p}\.(weight|bias)", rf"decoder.last.{projection}.\1")
        for p, projection in _PROJECTIONS
    ),
    *((rf"{_SAM_LAYERS}\.layer_norm{i + 1}\.(weight|bias)", rf"decoder.blocks.\1.norms.{i}.\2") for i in range(4)),
    *((rf"{_SAM_LAYERS}\.mlp\.lin{i + 1}\.(weight|bias)", rf"decoder.blocks.\1.mlp.layers.{i}.\2") for i in range(2)),
    (r"mask_decoder\.transformer\.layer_norm_final_attn\.(weight|bias)", r"decoder.last_norm.\1"),
    (r"mask_decoder\.upscale_conv([12])\.(weight|bias)", r"decoder.upscale.up\1.\2"),
    (r"mask_decoder\.upscale_layer_norm\.(weight|bias)", r"decoder.upscale.norm.\1"),
    *(
        (rf"mask_decoder\.{theirs}\.{name}\.(weight|bias)", rf"decoder.{ours}.layers.{i}.\{group}")
        for theirs, ours, group in (
            (r"output_hypernetworks_mlps\.(\d+)", r"modal.\1", 2), ("iou_prediction_head", "iou", 1)
        )
        for i, name in enumerate(("proj_in", r"layers\.0", "proj_out"))
    ),
)  # fmt: skip
# Point, box and mask prompts; the second copy of the frequencies in old files.
PROMPTS = r"prompt_encoder\.(?:mask_embed|mask_downscaling|point_embed|point_embeddings|not_a_point_embed)\..*"
PROMPTS += r"|prompt_encoder\.shared_embedding\.positional_embedding"
NO_DECODER = r"(?:mask_decoder|prompt_encoder|shared_image_embedding)\..*"
SAM_MASKS = 4
"""Mask tokens in SAM: one for a mask that is meant clearly, three for whole, part and part of part."""


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
        for what, names in (("copied", self.copied), ("initialised", self.initialised), ("unused", self.unused)):
            groups: dict[str, int] = {}
            for name in names:
                group = ".".join(name.split(".")[:2])
                groups[group] = groups.get(group, 0) + 1
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
        InputError: the weights cannot be had or are of another architecture, or a size was given that contradicts.
    """
    vision, decoder, init = model.vision, model.decoder, model.vision.init
    same = known is not None and (known.vision.init, known.vision.name) == (init, vision.name)
    if init:
        if known is not None and same:
            sizes = {f: getattr(known.vision, f) for f in _SIZES}
            decoder_sizes = {f: getattr(known.decoder, f) for f in _DECODER_SIZES}
        else:
            sizes, decoder_sizes = sam_sizes(_folder(init, "--model.vision.init"))
        vision = _derive(vision, sizes, init, "--model.vision")
        if decoder.kind == "sam":
            decoder = _derive(decoder, decoder_sizes, init, "--model.decoder")
    if vision.name:
        known_plain = known.vision.plain if known is not None and same else None
        vision = replace(vision, plain=known_plain or plain_sizes(_folder(vision.name, "--model.vision.name")))
    return replace(model, vision=vision, decoder=decoder)


_SIZES = (
    *("patch_size", "stem", "dim", "depth", "heads", "mlp_dim", "window_size", "global_blocks"),
    *("relative_positions", "out_dim", "activation"),
)
_DECODER_SIZES = ("dim", "depth", "heads", "mlp_dim")


def _derive(config: T, sizes: Mapping[str, Any], name: str, flag: str) -> T:
    """Sets the sizes; one that was given, so is not the default, must be the same."""
    given = {f: getattr(config, f) for f in sizes}
    default = type(config)()
    wrong = [f for f, v in given.items() if v not in (getattr(default, f), sizes[f])]
    if wrong:
        said = ", ".join(f"{flag}.{f.replace('_', '-')} {given[f]} (it has {sizes[f]})" for f in wrong)
        raise InputError(f"{name} has sizes of its own, which contradict {said}; leave these flags out")
    return replace(config, **sizes)


@cache
def _find(name: str, flag: str) -> Path:
    """A folder, or a safetensors file that has its config.json beside it; said once."""
    return find_model(name, what="vision encoder", flag=flag)


def _folder(name: str, flag: str) -> Path:
    found = _find(name, flag)
    return found if found.is_dir() else found.parent


def _published(folder: Path) -> Any:
    """The configuration, with what the file is silent about filled in by `transformers`."""
    from transformers import CONFIG_MAPPING

    raw = read_config(folder)
    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{folder / 'config.json'}: model_type {kind!r} is not an architecture that can be loaded")
    try:
        return CONFIG_MAPPING[kind].from_dict(raw)
    except Exception as error:  # validation errors of several libraries
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder / 'config.json'}: not a configuration of {kind} ({reason})") from None


def sam_sizes(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes of SAM's image encoder and mask decoder in a folder, as fields of `VisionConfig` and `DecoderConfig`.

    Raises:
        InputError: it is not SAM, or a SAM with parts that the published ones do not have.
    """
    published, file = _published(folder), folder / "config.json"
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
    published = _published(folder)
    config = plain_config(published)
    if isinstance(config, str):
        hint = "; pass SAM as --model.vision.init" if published.model_type.startswith("sam") else ""
        raise InputError(f"{folder / 'config.json'}: --model.vision.name cannot load it: {config}{hint}")
    return config


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
    for load, name in ((_load_sam, config.vision.init), (_load_plain, config.vision.name)):
        if name:
            loaded, report = load(config, state)
            params, constants = place(params, loaded), place(constants, loaded)
            reports.append(report)
    return params, constants, reports


def _load_sam(config: ModelConfig, state: nnx.State) -> tuple[dict[tuple, Tensor], Report]:
    assert config.vision.init is not None
    source = _find(config.vision.init, "--model.vision.init")
    return match_sam(config, state, read_tensors(source), source)


def match_sam(
    config: ModelConfig, state: nnx.State, tensors: Mapping[str, np.ndarray], source: Path
) -> tuple[dict[tuple, Tensor], Report]:
    """Values by path for the image encoder of a state, and for its decoder if that is SAM's.

    Raises:
        InputError: as `load_published`; it names `source`.
    """
    decoder = config.decoder.kind == "sam" and "decoder" in state
    spare = "|".join(map(str, range(1 + config.decoder.slots, SAM_MASKS)))
    unused = rf"{PROMPTS}|mask_decoder\.output_hypernetworks_mlps\.(?:{spare or '-'})\..*" if decoder else NO_DECODER
    table = VISION_KEYS + DECODER_KEYS if decoder else VISION_KEYS
    found = match(state, sam_names(tensors), table, unused=unused, change=_fit)
    loaded, copies = {".".join(map(str, path)) for path in found.loaded}, {}
    for path in found.missing:
        made = re.fullmatch(r"decoder\.(modal|occluded)\.(\d+)\.(.*)", path)
        other = f"decoder.modal.{sam_mask(int(made[2]))}.{made[3]}" if made else ""
        if other in loaded:
            copies[path] = other
    own = r"decoder\.(?:text\..*|text_norm\..*|presence\..*|type_token)" if decoder else r"decoder\..*"
    own += r"|vision\.(?:plain|join)\..*|.*\.lora_(?:in|out)|(?!vision|decoder).*"
    concerned = r"(?:decoder|vision\.(?!plain|join)).*" if decoder else r"vision\.(?!plain|join).*"
    return _finish(config.vision.init or "", source, found, copies, own, concerned)


def _load_plain(config: ModelConfig, state: nnx.State) -> tuple[dict[tuple, Tensor], Report]:
    assert config.vision.name is not None
    source = _find(config.vision.name, "--model.vision.name")
    family, registers = config.vision.plain.family, config.vision.plain.registers
    table = [(key, f"vision.plain.{path}") for key, path in plain_vit.KEYS[family]]

    def change(path: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if path == "vision.plain.positions":
            return _fit_plain(value.astype(np.float32), shape, antialias=bool(registers))
        return value.reshape(shape) if path.rsplit(".", 1)[1] in ("class_token", "registers") else value

    unused = plain_vit.UNUSED[family]
    found = match(
        state, read_tensors(source), table, unused=unused, prefix=plain_vit.PREFIX, change=change
    )  # fmt: skip
    own = r"(?!vision\.plain).*|.*\.lora_(?:in|out)"
    return _finish(config.vision.name, source, found, {}, own, r"vision\.(?:plain|join)\..*")


def _finish(
    name: str, source: Path, found: Match, copies: dict[str, str], own: str, concerned: str
) -> tuple[dict[tuple, Tensor], Report]:
    """Adds the copies and raises for what does not fit; `own` are paths that need no key, `concerned` are reported."""
    loaded = {".".join(map(str, path)): path for path in found.loaded}
    missing = [path for path in found.missing if path not in copies and not re.fullmatch(own, path)]
    if problems := found.unmatched + [f"missing {path}" for path in missing]:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        file = source if source.is_file() else weight_files(source)[0]
        raise InputError(f"{file} does not fit its config.json: {'; '.join(problems[:20])}{more}")
    values = dict(found.loaded)
    for path, other in copies.items():
        values[tuple(int(p) if p.isdigit() else p for p in path.split("."))] = found.loaded[loaded[other]]
    fresh = [p for p in found.missing if p not in copies and re.fullmatch(concerned, p)]
    return values, Report(name, found.sources, copies, fresh, found.unused)


def sam_names(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A SAM file under the names of `transformers`, whichever of both it has."""
    if not any(key.startswith("image_encoder.") for key in tensors):
        return dict(tensors)
    return {
        next((re.sub(a, b, key) for a, b in ORIGINAL if re.fullmatch(a, key)), key): v for key, v in tensors.items()
    }


def sam_mask(token: int) -> int:
    """Which of SAM's masks one of ours starts as: the fused one as its single mask, slots as its three in turn."""
    return 0 if token == 0 else 1 + (token - 1) % (SAM_MASKS - 1)


def _fit(path: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A value of SAM in the shape that ours has."""
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


def _fit_plain(
    table: Float[np.ndarray, "*_one n d"], shape: tuple[int, ...], *, antialias: bool
) -> Float[np.ndarray, "_m d"]:
    """A plain ViT's position table for another grid; the row of a class token stays."""
    table = table.reshape(-1, shape[-1])
    side, size = int(len(table) ** 0.5), int(shape[0] ** 0.5)
    first = len(table) - side * side
    grid = resize_grid(table[first:].reshape(side, side, -1), size, antialias=antialias)
    return np.concatenate([table[:first], grid.reshape(size * size, -1)])


def load_encoder(name: str, *, image_size: int | None, frozen: bool, dtype: jnp.dtype) -> VisionEncoder:
    """`VisionEncoder.from_pretrained`."""
    published = _published(_folder(name, "--model.vision.init"))
    size = image_size or getattr(published, "vision_config", published).image_size
    config = with_published_sizes(ModelConfig(vision=VisionConfig(init=name, image_size=size, frozen=frozen)))
    graphdef, params, constants = nnx.split(VisionEncoder(config.vision, dtype=dtype, rngs=nnx.Rngs(0)), nnx.Param, ...)
    parts = load_published(config, nnx.State({"vision": params}), nnx.State({"vision": constants}))[:2]
    return nnx.merge(graphdef, *(part["vision"] for part in parts if part))
