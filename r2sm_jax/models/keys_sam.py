"""Published SAM weights -> the parameters of our image encoder and of SAM's mask decoder.

A file has the names of Hugging Face's `SamModel` (facebook/sam-vit-base, -large, -huge), or those
of the original repository (facebookresearch/segment-anything), which are renamed first.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from r2sm_jax.models.keys_plain_vit import resize_grid
from r2sm_jax.models.matching import (
    KeyTable,
    LoadReport,
    Tensor,
    match_weights,
    parameter_shapes,
    rename_keys,
)

NUM_SAM_MASKS = 4
"""Mask tokens in SAM: one for a mask that is meant clearly, three for whole, part and part of part.
"""

ENCODER_KEYS = {
    "vision_encoder.patch_embed.projection.(weight|bias)": r"vision.stem.\1",
    "vision_encoder.pos_embed": "vision.positions",
    r"vision_encoder.layers.(\d+).layer_norm1.(weight|bias)": r"vision.blocks.\1.norm1.\2",
    r"vision_encoder.layers.(\d+).layer_norm2.(weight|bias)": r"vision.blocks.\1.norm2.\2",
    r"vision_encoder.layers.(\d+).attn.qkv.(weight|bias)": r"vision.blocks.\1.attention.qkv.\2",
    r"vision_encoder.layers.(\d+).attn.proj.(weight|bias)": r"vision.blocks.\1.attention.out.\2",
    r"vision_encoder.layers.(\d+).attn.rel_pos_h": r"vision.blocks.\1.attention.rel_pos_h",
    r"vision_encoder.layers.(\d+).attn.rel_pos_w": r"vision.blocks.\1.attention.rel_pos_w",
    r"vision_encoder.layers.(\d+).mlp.lin1.(weight|bias)": r"vision.blocks.\1.mlp.layers.0.\2",
    r"vision_encoder.layers.(\d+).mlp.lin2.(weight|bias)": r"vision.blocks.\1.mlp.layers.1.\2",
    "vision_encoder.neck.conv1.weight": "vision.neck1.weight",
    "vision_encoder.neck.conv2.weight": "vision.neck2.weight",
    "vision_encoder.neck.layer_norm1.(weight|bias)": r"vision.neck_norm1.\1",
    "vision_encoder.neck.layer_norm2.(weight|bias)": r"vision.neck_norm2.\1",
}
DECODER_KEYS = {
    "shared_image_embedding.positional_embedding": "decoder.frequencies",
    "prompt_encoder.no_mask_embed.weight": "decoder.no_mask",
    "mask_decoder.iou_token.weight": "decoder.iou_token",
    "mask_decoder.mask_tokens.weight": "decoder.mask_tokens",
    r"mask_decoder.transformer.layers.(\d+).self_attn.q_proj.(weight|bias)": r"decoder.blocks.\1.self_attention.query.\2",
    r"mask_decoder.transformer.layers.(\d+).self_attn.k_proj.(weight|bias)": r"decoder.blocks.\1.self_attention.key.\2",
    r"mask_decoder.transformer.layers.(\d+).self_attn.v_proj.(weight|bias)": r"decoder.blocks.\1.self_attention.value.\2",
    r"mask_decoder.transformer.layers.(\d+).self_attn.out_proj.(weight|bias)": r"decoder.blocks.\1.self_attention.out.\2",
    r"mask_decoder.transformer.layers.(\d+).cross_attn_token_to_image.q_proj.(weight|bias)": r"decoder.blocks.\1.to_image.query.\2",
    r"mask_decoder.transformer.layers.(\d+).cross_attn_token_to_image.k_proj.(weight|bias)": r"decoder.blocks.\1.to_image.key.\2",
    r"mask_decoder.transformer.layers.(\d+).cross_attn_token_to_image.v_proj.(weight|bias)": r"decoder.blocks.\1.to_image.value.\2",
    r"mask_decoder.transformer.layers.(\d+).cross_attn_token_to_image.out_proj.(weight|bias)": r"decoder.blocks.\1.to_image.out.\2",
    r"mask_decoder.transformer.layers.(\d+).cross_attn_image_to_token.q_proj.(weight|bias)": r"decoder.blocks.\1.to_tokens.query.\2",
    r"mask_decoder.transformer.layers.(\d+).cross_attn_image_to_token.k_proj.(weight|bias)": r"decoder.blocks.\1.to_tokens.key.\2",
    r"mask_decoder.transformer.layers.(\d+).cross_attn_image_to_token.v_proj.(weight|bias)": r"decoder.blocks.\1.to_tokens.value.\2",
    r"mask_decoder.transformer.layers.(\d+).cross_attn_image_to_token.out_proj.(weight|bias)": r"decoder.blocks.\1.to_tokens.out.\2",
    r"mask_decoder.transformer.layers.(\d+).layer_norm1.(weight|bias)": r"decoder.blocks.\1.norms.0.\2",
    r"mask_decoder.transformer.layers.(\d+).layer_norm2.(weight|bias)": r"decoder.blocks.\1.norms.1.\2",
    r"mask_decoder.transformer.layers.(\d+).layer_norm3.(weight|bias)": r"decoder.blocks.\1.norms.2.\2",
    r"mask_decoder.transformer.layers.(\d+).layer_norm4.(weight|bias)": r"decoder.blocks.\1.norms.3.\2",
    r"mask_decoder.transformer.layers.(\d+).mlp.lin1.(weight|bias)": r"decoder.blocks.\1.mlp.layers.0.\2",
    r"mask_decoder.transformer.layers.(\d+).mlp.lin2.(weight|bias)": r"decoder.blocks.\1.mlp.layers.1.\2",
    "mask_decoder.transformer.final_attn_token_to_image.q_proj.(weight|bias)": r"decoder.last.query.\1",
    "mask_decoder.transformer.final_attn_token_to_image.k_proj.(weight|bias)": r"decoder.last.key.\1",
    "mask_decoder.transformer.final_attn_token_to_image.v_proj.(weight|bias)": r"decoder.last.value.\1",
    "mask_decoder.transformer.final_attn_token_to_image.out_proj.(weight|bias)": r"decoder.last.out.\1",
    "mask_decoder.transformer.layer_norm_final_attn.(weight|bias)": r"decoder.last_norm.\1",
    "mask_decoder.upscale_conv1.(weight|bias)": r"decoder.upscale.up1.\1",
    "mask_decoder.upscale_conv2.(weight|bias)": r"decoder.upscale.up2.\1",
    "mask_decoder.upscale_layer_norm.(weight|bias)": r"decoder.upscale.norm.\1",
    r"mask_decoder.output_hypernetworks_mlps.(\d+).proj_in.(weight|bias)": r"decoder.modal.\1.layers.0.\2",
    r"mask_decoder.output_hypernetworks_mlps.(\d+).layers.0.(weight|bias)": r"decoder.modal.\1.layers.1.\2",
    r"mask_decoder.output_hypernetworks_mlps.(\d+).proj_out.(weight|bias)": r"decoder.modal.\1.layers.2.\2",
    "mask_decoder.iou_prediction_head.proj_in.(weight|bias)": r"decoder.iou.layers.0.\1",
    "mask_decoder.iou_prediction_head.layers.0.(weight|bias)": r"decoder.iou.layers.1.\1",
    "mask_decoder.iou_prediction_head.proj_out.(weight|bias)": r"decoder.iou.layers.2.\1",
}
ENCODER_PATHS = ("vision.stem.*", "vision.positions", "vision.blocks.*", "vision.neck.*")

ENCODER = KeyTable(
    ENCODER_KEYS,
    unused=("mask_decoder.*", "prompt_encoder.*", "shared_image_embedding.*"),
    within=ENCODER_PATHS,
)
ENCODER_AND_DECODER = KeyTable(
    ENCODER_KEYS | DECODER_KEYS,
    # Boxes, clicks and masks as prompts, and a second copy of the frequencies in old files.
    unused=(
        "prompt_encoder.point_embed.*",
        "prompt_encoder.not_a_point_embed.weight",
        "prompt_encoder.mask_embed.*",
        "prompt_encoder.mask_downscaling.*",
        "prompt_encoder.shared_embedding.positional_embedding",
    ),
    new=("decoder.text.*", "decoder.text_norm.*", "decoder.presence.*", "decoder.type_token"),
    within=(*ENCODER_PATHS, "decoder.*"),
)

# Names of the original repository -> names of `transformers`.
ORIGINAL_NAMES = KeyTable(
    {
        "image_encoder.patch_embed.proj.(weight|bias)": r"vision_encoder.patch_embed.projection.\1",
        "image_encoder.pos_embed": "vision_encoder.pos_embed",
        r"image_encoder.blocks.(\d+).norm1.(weight|bias)": r"vision_encoder.layers.\1.layer_norm1.\2",
        r"image_encoder.blocks.(\d+).norm2.(weight|bias)": r"vision_encoder.layers.\1.layer_norm2.\2",
        "image_encoder.blocks.(.*)": r"vision_encoder.layers.\1",
        "image_encoder.neck.0.(weight|bias)": r"vision_encoder.neck.conv1.\1",
        "image_encoder.neck.1.(weight|bias)": r"vision_encoder.neck.layer_norm1.\1",
        "image_encoder.neck.2.(weight|bias)": r"vision_encoder.neck.conv2.\1",
        "image_encoder.neck.3.(weight|bias)": r"vision_encoder.neck.layer_norm2.\1",
        "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix": "shared_image_embedding.positional_embedding",
        r"mask_decoder.transformer.layers.(\d+).norm(\d+).(weight|bias)": r"mask_decoder.transformer.layers.\1.layer_norm\2.\3",
        "mask_decoder.transformer.norm_final_attn.(weight|bias)": r"mask_decoder.transformer.layer_norm_final_attn.\1",
        "mask_decoder.output_upscaling.0.(weight|bias)": r"mask_decoder.upscale_conv1.\1",
        "mask_decoder.output_upscaling.1.(weight|bias)": r"mask_decoder.upscale_layer_norm.\1",
        "mask_decoder.output_upscaling.3.(weight|bias)": r"mask_decoder.upscale_conv2.\1",
        r"mask_decoder.output_hypernetworks_mlps.(\d+).layers.0.(weight|bias)": r"mask_decoder.output_hypernetworks_mlps.\1.proj_in.\2",
        r"mask_decoder.output_hypernetworks_mlps.(\d+).layers.1.(weight|bias)": r"mask_decoder.output_hypernetworks_mlps.\1.layers.0.\2",
        r"mask_decoder.output_hypernetworks_mlps.(\d+).layers.2.(weight|bias)": r"mask_decoder.output_hypernetworks_mlps.\1.proj_out.\2",
        "mask_decoder.iou_prediction_head.layers.0.(weight|bias)": r"mask_decoder.iou_prediction_head.proj_in.\1",
        "mask_decoder.iou_prediction_head.layers.1.(weight|bias)": r"mask_decoder.iou_prediction_head.layers.0.\1",
        "mask_decoder.iou_prediction_head.layers.2.(weight|bias)": r"mask_decoder.iou_prediction_head.proj_out.\1",
    }
)


def match_sam(
    state: nnx.State,
    tensors: Mapping[str, Tensor],
    source: Path,
    *,
    num_slots: int,
    with_decoder: bool,
) -> LoadReport:
    """The weights of SAM for the image encoder of a state, and for its mask decoder if that is
    SAM's. Raises InputError as `match_weights`."""
    table = ENCODER_AND_DECODER if with_decoder else ENCODER
    shapes = parameter_shapes(state, table)
    renamed = rename_keys(to_transformers_names(tensors), table)
    fitted = []
    for weight in renamed.weights:
        paths = our_paths(weight.path, num_slots)
        if not paths:
            renamed.unused.append(weight.key)
        for path in paths:
            value = weight.value
            if path in shapes:
                value = fit_sam(path, value, shapes[path])
            fitted.append(weight._replace(path=path, value=value))
    return match_weights(renamed._replace(weights=fitted), shapes, table, source=source)


def to_transformers_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A SAM file under the names of `transformers`, whichever of both it has."""
    if not any(key.startswith("image_encoder.") for key in tensors):
        return dict(tensors)
    return {ORIGINAL_NAMES.rename(key) or key: value for key, value in tensors.items()}


def sam_mask(token: int) -> int:
    """The mask of SAM that one of ours starts as: the fused one as its single mask, slots as its
    three in turn."""
    if token == 0:
        return 0
    return 1 + (token - 1) % (NUM_SAM_MASKS - 1)


def our_paths(path: str, num_slots: int) -> list[str]:
    """All our parameters that start as the one of this path. A hypernetwork of SAM starts the modal
    and the occluded one of each of our masks that begins as its mask; there may be none."""
    hypernetwork = re.fullmatch(r"decoder\.modal\.(\d+)\.(.*)", path)
    if hypernetwork is None:
        return [path]
    number, rest = hypernetwork.groups()
    tokens = [token for token in range(1 + num_slots) if sam_mask(token) == int(number)]
    modal = [f"decoder.modal.{token}.{rest}" for token in tokens]
    occluded = [f"decoder.occluded.{token}.{rest}" for token in tokens]
    return modal + occluded


def fit_sam(path: str, value: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """A value of SAM in the shape of our parameter."""
    value = np.asarray(value, np.float32)
    if path == "vision.positions":
        return resize_grid(value[0], shape[0])
    if "rel_pos" in path:
        # Linear with half-pixel centres, without antialiasing, as in modeling/image_encoder.py,
        # get_rel_pos.
        size = (shape[0], value.shape[1])
        return np.asarray(jax.image.resize(value, size, "linear", antialias=False))
    if path == "vision.neck1.kernel":  # a 1 x 1 convolution
        return value[0, 0]
    if path.startswith("decoder.upscale.up"):  # a 2 x 2 transposed convolution
        if value.ndim == 1:
            return np.tile(value, 4)
        return value.transpose(3, 0, 1, 2).reshape(value.shape[3], -1)
    if path == "decoder.mask_tokens":
        return value[[sam_mask(token) for token in range(shape[0])]]
    if path.startswith("decoder.iou.layers.2"):  # modal and amodal IoU of each mask
        masks = [sam_mask(token) for token in range(shape[-1] // 2)]
        return value[..., masks * 2]
    return value
