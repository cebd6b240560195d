"""Keys of published weights -> paths of our parameters: a table for each family of models.

A table also says how a value is fitted where ours has another shape. Keys are those of Hugging Face
`transformers`; of SAM also those of facebookresearch/segment-anything, which are renamed first; of
EfficientNet-Lite those of `EfficientNet-PyTorch`.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from r2sm_jax.errors import InputError
from r2sm_jax.models.efficientnet import STAGES
from r2sm_jax.models.hub import read_pickle, read_tensors
from r2sm_jax.models.matching import KeyTable, Shapes, Tensor, match_weights, put_weights

# Positions


def resize_grid(
    table: Float[np.ndarray, "h w d"], size: int, *, antialias: bool = False
) -> Float[np.ndarray, "_h _w d"]:
    """Resizes an absolute position table to `size` x `size`, bicubic with half-pixel centres.

    The kernel is that of torch, as DINOv2, CLIP and SigLIP are resized. `antialias`: that of DINOv2
    with registers.
    """
    kernel = "cubic" if antialias else "cubic-pytorch"
    shape = (size, size, table.shape[2])
    return np.asarray(jax.image.resize(table, shape, kernel, antialias=antialias))


# SAM

SAM_ENCODER_KEYS = {
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
SAM_DECODER_KEYS = {
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
    # As `spread_masks` names them.
    r"mask_decoder.(modal|occluded).(\d+).proj_in.(weight|bias)": r"decoder.\1.\2.layers.0.\3",
    r"mask_decoder.(modal|occluded).(\d+).layers.0.(weight|bias)": r"decoder.\1.\2.layers.1.\3",
    r"mask_decoder.(modal|occluded).(\d+).proj_out.(weight|bias)": r"decoder.\1.\2.layers.2.\3",
    "mask_decoder.iou_prediction_head.proj_in.(weight|bias)": r"decoder.iou.layers.0.\1",
    "mask_decoder.iou_prediction_head.layers.0.(weight|bias)": r"decoder.iou.layers.1.\1",
    "mask_decoder.iou_prediction_head.proj_out.(weight|bias)": r"decoder.iou.layers.2.\1",
}


def fit_sam(path: str, value: Tensor, shapes: Shapes) -> Tensor:
    """Fits a value of SAM to our parameter."""
    shape = shapes[path]
    if path == "vision.positions":
        return resize_grid(np.asarray(value[0], np.float32), shape[0])
    if "rel_pos" in path:
        # Half-pixel centres, without antialiasing, as in modeling/image_encoder.py, get_rel_pos.
        return np.asarray(jax.image.resize(value, shape, "linear", antialias=False))
    if path.startswith("decoder.upscale.up"):  # a 2 x 2 transposed convolution
        if value.ndim == 1:
            return np.tile(value, 4)
        return value.transpose(3, 0, 1, 2).reshape(value.shape[3], -1)
    return value


SAM_ENCODER_PATHS = ("vision.stem.*", "vision.positions", "vision.blocks.*", "vision.neck.*")
SAM_ENCODER = KeyTable(
    SAM_ENCODER_KEYS,
    unused=("mask_decoder.*", "prompt_encoder.*", "shared_image_embedding.*"),
    within=SAM_ENCODER_PATHS,
    fit=fit_sam,
)
SAM = KeyTable(
    SAM_ENCODER_KEYS | SAM_DECODER_KEYS,
    # Boxes, clicks and masks as prompts, and a second copy of the frequencies in old files.
    unused=(
        "prompt_encoder.point_embed.*",
        "prompt_encoder.not_a_point_embed.weight",
        "prompt_encoder.mask_embed.*",
        "prompt_encoder.mask_downscaling.*",
        "prompt_encoder.shared_embedding.positional_embedding",
    ),
    new=("decoder.text.*", "decoder.text_norm.*", "decoder.presence.*", "decoder.type_token"),
    within=(*SAM_ENCODER_PATHS, "decoder.*"),
    fit=fit_sam,
)
"""With the mask decoder."""
ORIGINAL_SAM = KeyTable(
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
"""Names of the original repository -> names of `transformers`."""


def read_sam(source: Path, num_masks: int) -> dict[str, np.ndarray]:
    """Reads a SAM under the names of `transformers`, with `num_masks` masks."""
    tensors = read_tensors(source)
    if any(key.startswith("image_encoder.") for key in tensors):
        tensors = {ORIGINAL_SAM.rename(key) or key: value for key, value in tensors.items()}
    return spread_masks(tensors, num_masks)


def spread_masks(tensors: Mapping[str, np.ndarray], num_masks: int) -> dict[str, np.ndarray]:
    """Gives the weights of SAM's four masks to ours.

    The fused mask starts as the first, which is meant clearly; slots as the other three, which are
    whole, part and part of part, in turn. Modal and completing masks of a token start alike.
    """
    origins = [0, *(1 + slot % 3 for slot in range(num_masks - 1))]
    spread = {}
    for key, value in tensors.items():
        hypernetwork = re.fullmatch(r"mask_decoder\.output_hypernetworks_mlps\.(\d)\.(.*)", key)
        if hypernetwork:
            for token, origin in enumerate(origins):
                if origin == int(hypernetwork[1]):
                    spread[f"mask_decoder.modal.{token}.{hypernetwork[2]}"] = value
                    spread[f"mask_decoder.occluded.{token}.{hypernetwork[2]}"] = value
        elif key == "mask_decoder.mask_tokens.weight":
            spread[key] = value[origins]
        elif key.startswith("mask_decoder.iou_prediction_head.proj_out."):
            spread[key] = value[origins * 2]  # IoUs of modal, then of amodal masks
        else:
            spread[key] = value
    return spread


# DINOv2, CLIP, SigLIP

DINOV2_KEYS = {
    "embeddings.cls_token": "vision.vit.class_token",
    "embeddings.register_tokens": "vision.vit.registers",
    "embeddings.position_embeddings": "vision.vit.positions",
    "embeddings.patch_embeddings.projection.(weight|bias)": r"vision.vit.patches.\1",
    r"encoder.layer.(\d+).norm1.(weight|bias)": r"vision.vit.blocks.\1.norm1.\2",
    r"encoder.layer.(\d+).norm2.(weight|bias)": r"vision.vit.blocks.\1.norm2.\2",
    r"encoder.layer.(\d+).attention.attention.query.(weight|bias)": r"vision.vit.blocks.\1.attention.query.\2",
    r"encoder.layer.(\d+).attention.attention.key.(weight|bias)": r"vision.vit.blocks.\1.attention.key.\2",
    r"encoder.layer.(\d+).attention.attention.value.(weight|bias)": r"vision.vit.blocks.\1.attention.value.\2",
    r"encoder.layer.(\d+).attention.output.dense.(weight|bias)": r"vision.vit.blocks.\1.attention.out.\2",
    r"encoder.layer.(\d+).layer_scale1.lambda1": r"vision.vit.blocks.\1.scale1",
    r"encoder.layer.(\d+).layer_scale2.lambda1": r"vision.vit.blocks.\1.scale2",
    r"encoder.layer.(\d+).mlp.fc1.(weight|bias)": r"vision.vit.blocks.\1.mlp.layers.0.\2",
    r"encoder.layer.(\d+).mlp.fc2.(weight|bias)": r"vision.vit.blocks.\1.mlp.layers.1.\2",
    "layernorm.(weight|bias)": r"vision.vit.norm_after.\1",
}
# CLIP and SigLIP differ in what stands before and after the same blocks.
CLIP_BLOCKS = {
    "embeddings.position_embedding.weight": "vision.vit.positions",
    r"encoder.layers.(\d+).layer_norm1.(weight|bias)": r"vision.vit.blocks.\1.norm1.\2",
    r"encoder.layers.(\d+).layer_norm2.(weight|bias)": r"vision.vit.blocks.\1.norm2.\2",
    r"encoder.layers.(\d+).self_attn.q_proj.(weight|bias)": r"vision.vit.blocks.\1.attention.query.\2",
    r"encoder.layers.(\d+).self_attn.k_proj.(weight|bias)": r"vision.vit.blocks.\1.attention.key.\2",
    r"encoder.layers.(\d+).self_attn.v_proj.(weight|bias)": r"vision.vit.blocks.\1.attention.value.\2",
    r"encoder.layers.(\d+).self_attn.out_proj.(weight|bias)": r"vision.vit.blocks.\1.attention.out.\2",
    r"encoder.layers.(\d+).mlp.fc1.(weight|bias)": r"vision.vit.blocks.\1.mlp.layers.0.\2",
    r"encoder.layers.(\d+).mlp.fc2.(weight|bias)": r"vision.vit.blocks.\1.mlp.layers.1.\2",
}
CLIP_KEYS = {
    "embeddings.class_embedding": "vision.vit.class_token",
    "embeddings.patch_embedding.weight": "vision.vit.patches.weight",
    "pre_layrnorm.(weight|bias)": r"vision.vit.norm_before.\1",
}
SIGLIP_KEYS = {
    "embeddings.patch_embedding.(weight|bias)": r"vision.vit.patches.\1",
    "post_layernorm.(weight|bias)": r"vision.vit.norm_after.\1",
}


def fit_vit(path: str, value: Tensor, shapes: Shapes) -> Tensor:
    """Fits a value of a plain ViT to our parameter. Positions are resized once here, while
    `transformers` does it in every call."""
    if path in ("vision.vit.class_token", "vision.vit.registers"):
        return value[0] if value.ndim == 3 else value.reshape(1, -1)
    if path != "vision.vit.positions":
        return value
    num_positions, dim = shapes[path]
    size = int(num_positions**0.5)
    # The position of a class token comes first and is not interpolated.
    table = np.asarray(value, np.float32).reshape(-1, dim)
    side = int(len(table) ** 0.5)
    num_others = len(table) - side * side
    grid = table[num_others:].reshape(side, side, dim)
    grid = resize_grid(grid, size, antialias="vision.vit.registers" in shapes)
    return np.concatenate([table[:num_others], grid.reshape(size * size, dim)])


DINOV2 = KeyTable(
    DINOV2_KEYS,
    prefixes=("dinov2.", "dinov2_with_registers."),
    unused=("embeddings.mask_token", "classifier.*"),
    new=("vision.join.kernel",),
    within=("vision.vit.*", "vision.join.*"),
    fit=fit_vit,
)
VITS = {
    "dinov2": DINOV2,
    "clip": DINOV2._replace(
        keys=CLIP_BLOCKS | CLIP_KEYS,
        prefixes=("vision_model.",),
        # The last hidden state is the one before the final norm, as in `transformers`.
        unused=(
            "post_layernorm.*",
            "visual_projection.*",
            "text_.*",
            "logit_scale",
            "embeddings.position_ids",
        ),
    ),
    "siglip": DINOV2._replace(
        keys=CLIP_BLOCKS | SIGLIP_KEYS,
        prefixes=("vision_model.",),
        unused=("head.*", "text_model.*", "logit_scale", "logit_bias", "embeddings.position_ids"),
    ),
}
"""By family."""

# EfficientNet-Lite

EFFICIENTNET_CLASSIFIER = KeyTable(
    {
        "_conv_stem.(weight|bias)": r"vision.efficientnet.first.\1",
        r"_blocks.(\d+)._expand_conv.(weight|bias)": r"vision.efficientnet.blocks.\1.expand.\2",
        r"_blocks.(\d+)._depthwise_conv.(weight|bias)": r"vision.efficientnet.blocks.\1.depthwise.\2",
        r"_blocks.(\d+)._project_conv.(weight|bias)": r"vision.efficientnet.blocks.\1.project.\2",
        "_conv_head.(weight|bias)": r"classifier.hidden.\1",
        "_fc.(weight|bias)": r"classifier.out.\1",
    },
    new=("classifier.class_vectors", "classifier.sentence_mean"),
    within=("vision.efficientnet.*", "classifier.*"),
)
EFFICIENTNET = EFFICIENTNET_CLASSIFIER._replace(
    unused=("_conv_head.*", "_fc.*"), new=(), within=("vision.efficientnet.*",)
)
"""Without the classifier."""
NORM_OF = {
    "_conv_stem": "_bn0",
    "_expand_conv": "_bn0",
    "_depthwise_conv": "_bn1",
    "_project_conv": "_bn2",
    "_conv_head": "_bn1",
}
"""Published name of a convolution -> that of the batch norm after it."""
NORM_EPSILON = 1e-3


def read_efficientnet(source: Path) -> dict[str, np.ndarray]:
    """Reads a model folder, a safetensors file, or a `.pth`, which may be alone in a folder, and
    folds the batch norms. Raises InputError if the file cannot be read."""
    pickles = [source] if source.suffix == ".pth" else list(source.glob("*.pth"))
    tensors = read_pickle(pickles[0]) if len(pickles) == 1 else read_tensors(source)
    return fold_batch_norms(tensors)


def fold_batch_norms(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Makes each batch norm a part of the convolution before it, whose bias it becomes, so training
    changes kernels and biases only. Raises KeyError if a norm has no statistics."""
    folded = {}
    for key, value in tensors.items():
        layer = key.rpartition(".")[0]
        block, dot, name = layer.rpartition(".")
        if name in NORM_OF:
            norm = block + dot + NORM_OF[name]
            variance = tensors[f"{norm}.running_var"].astype(np.float64)
            scale = tensors[f"{norm}.weight"] / np.sqrt(variance + NORM_EPSILON)
            bias = tensors[f"{norm}.bias"] - tensors[f"{norm}.running_mean"] * scale
            folded[key] = (value * scale[:, None, None, None]).astype(np.float32)
            folded[f"{layer}.bias"] = bias.astype(np.float32)
        elif not name.startswith("_bn"):
            folded[key] = value
    return folded


def read_block_dims(weights: Mapping[str, np.ndarray], source: Path) -> tuple[int, ...]:
    """Returns the channels after each block. Raises InputError if these are not the stages of an
    EfficientNet-Lite."""
    dims: list[int] = []
    while (kernel := weights.get(f"_blocks.{len(dims)}._project_conv.weight")) is not None:
        dims.append(len(kernel))
    if len(list(groupby(dims))) != len(STAGES):
        raise InputError(
            f"{source}: not an EfficientNet-Lite, since its blocks are not of seven kinds"
        )
    return tuple(dims)


def first_blocks(backbone: nnx.State, source: Path) -> nnx.State:
    """Fills the state of an `EfficientNetLite` that has the first blocks alone with published
    weights. Raises InputError if the file cannot be read, or its blocks have other channels."""
    tensors = {}
    for key, value in read_efficientnet(source).items():
        block = re.match(r"_blocks\.(\d+)\.", key)
        if block is None or int(block[1]) < len(backbone["blocks"]):
            tensors[key] = value
    state = nnx.State({"vision": nnx.State({"efficientnet": backbone})})
    report = match_weights(tensors, state, EFFICIENTNET, source)
    return put_weights(state, report.values)["vision"]["efficientnet"]


# Language models

BERT = KeyTable(
    {
        "embeddings.word_embeddings.weight": "words.embedding",
        "embeddings.position_embeddings.weight": "positions.embedding",
        "embeddings.token_type_embeddings.weight": "token_types.embedding",
        "embeddings.LayerNorm.(weight|bias)": r"norm_before.\1",
        r"encoder.layer.(\d+).attention.self.query.(weight|bias)": r"blocks.\1.attention.query.\2",
        r"encoder.layer.(\d+).attention.self.key.(weight|bias)": r"blocks.\1.attention.key.\2",
        r"encoder.layer.(\d+).attention.self.value.(weight|bias)": r"blocks.\1.attention.value.\2",
        r"encoder.layer.(\d+).attention.output.dense.(weight|bias)": r"blocks.\1.attention.out.\2",
        r"encoder.layer.(\d+).attention.output.LayerNorm.(weight|bias)": r"blocks.\1.norm1.\2",
        r"encoder.layer.(\d+).intermediate.dense.(weight|bias)": r"blocks.\1.mlp.layers.0.\2",
        r"encoder.layer.(\d+).output.dense.(weight|bias)": r"blocks.\1.mlp.layers.1.\2",
        r"encoder.layer.(\d+).output.LayerNorm.(weight|bias)": r"blocks.\1.norm2.\2",
    },
    prefixes=("bert.", "roberta."),
    # The pooler, heads of the training task, and a buffer of old files.
    unused=("pooler.*", "cls.*", "lm_head.*", "embeddings.position_ids"),
)
DECODER_ONLY = KeyTable(
    {
        "embed_tokens.weight": "words.embedding",
        r"layers.(\d+).input_layernorm.weight": r"blocks.\1.norm1.weight",
        r"layers.(\d+).post_attention_layernorm.weight": r"blocks.\1.norm2.weight",
        r"layers.(\d+).self_attn.q_proj.(weight|bias)": r"blocks.\1.query.\2",
        r"layers.(\d+).self_attn.k_proj.(weight|bias)": r"blocks.\1.key.\2",
        r"layers.(\d+).self_attn.v_proj.(weight|bias)": r"blocks.\1.value.\2",
        r"layers.(\d+).self_attn.o_proj.(weight|bias)": r"blocks.\1.out.\2",
        r"layers.(\d+).self_attn.q_norm.weight": r"blocks.\1.query_norm.weight",
        r"layers.(\d+).self_attn.k_norm.weight": r"blocks.\1.key_norm.weight",
        r"layers.(\d+).mlp.gate_proj.(weight|bias)": r"blocks.\1.gate.\2",
        r"layers.(\d+).mlp.up_proj.(weight|bias)": r"blocks.\1.up.\2",
        r"layers.(\d+).mlp.down_proj.(weight|bias)": r"blocks.\1.down.\2",
        "norm.weight": "norm_after.weight",
    },
    prefixes=("model.",),
    unused=("lm_head.weight", ".*rotary_emb.inv_freq"),
)
