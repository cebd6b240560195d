"""Arrays of TIPS's JAX checkpoints -> the parameters of plain_vit.py and text_encoder.py.

Names are those of google-deepmind/tips (scenic/models/tips.py, vit.py, text.py), joined by "/".
Kernels are those of flax, as ours are; attention has an axis of heads more.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from r2sm_jax.errors import InputError
from r2sm_jax.models.encoder_sizes import PlainViTSizes
from r2sm_jax.models.matching import (
    KeyTable,
    LoadReport,
    match_weights,
    parameter_shapes,
    rename_keys,
)
from r2sm_jax.models.tips import Tower, check_shapes, read_arrays, shape_of

NORM_EPSILON = 1e-6
"""That of flax, which the checkpoints were trained with."""
LAYOUT = "the layout of TIPS"

VISION = KeyTable(
    {
        "encoder/ToTokenSequence_0/embedding/(kernel|bias)": r"vision.vit.patches.\1",
        "encoder/ToTokenSequence_0/posembed_input": "vision.vit.positions",
        "encoder/ToTokenSequence_0/cls": "vision.vit.registers",
        r"encoder/transformer/encoderblock_(\d+)/LayerNorm_0/(scale|bias)": r"vision.vit.blocks.\1.norm1.\2",
        r"encoder/transformer/encoderblock_(\d+)/LayerNorm_1/(scale|bias)": r"vision.vit.blocks.\1.norm2.\2",
        r"encoder/transformer/encoderblock_(\d+)/MultiHeadDotProductAttention_0/(query|key|value|out)/(kernel|bias)": r"vision.vit.blocks.\1.attention.\2.\3",
        r"encoder/transformer/encoderblock_(\d+)/MlpBlock_0/Dense_([01])/(kernel|bias)": r"vision.vit.blocks.\1.mlp.layers.\2.\3",
        "encoder/encoder_norm/(scale|bias)": r"vision.vit.norm_after.\1",
    },
    new=("vision.join.kernel",),
    within=("vision.vit.*", "vision.join.*"),
)
TEXT = KeyTable(
    {
        "token_emb/emb_var": "words.embedding",
        r"transformer/encoderblock_(\d+)/LayerNorm_0/(scale|bias)": r"blocks.\1.norm1.\2",
        r"transformer/encoderblock_(\d+)/LayerNorm_1/(scale|bias)": r"blocks.\1.norm2.\2",
        r"transformer/encoderblock_(\d+)/MultiHeadDotProductAttention_0/(query|key|value|out)/(kernel|bias)": r"blocks.\1.\2.\3",
        r"transformer/encoderblock_(\d+)/MlpBlock_0/Dense_0/(kernel|bias)": r"blocks.\1.up.\2",
        r"transformer/encoderblock_(\d+)/MlpBlock_0/Dense_1/(kernel|bias)": r"blocks.\1.down.\2",
        "text_encoder_norm/(scale|bias)": r"norm_after.\1",
    },
    # Of the contrastive training.
    unused=("temperature", "temperature_contrastive"),
)


def tips_vit_sizes(arrays: Mapping[str, np.ndarray], file: Path) -> PlainViTSizes:
    """Sizes of a vision tower, from the shapes of its arrays. Raises InputError if the file is no
    such tower, or an array has a shape that does not fit the others."""
    start = "encoder/ToTokenSequence_0"
    block = "encoder/transformer/encoderblock_0"
    patch, _, _, dim = shape_of(arrays, f"{start}/embedding/kernel", 4, file, "vision")
    _, registers, _ = shape_of(arrays, f"{start}/cls", 3, file, "vision")
    side, _, _ = shape_of(arrays, f"{start}/posembed_input", 4, file, "vision")[1:]
    heads, mlp_dim = block_sizes(arrays, block, file, "vision")

    depth = num_blocks(arrays, "encoder/transformer")
    shapes = {
        f"{start}/embedding/kernel": (patch, patch, 3, dim),
        f"{start}/embedding/bias": (dim,),
        f"{start}/posembed_input": (1, side, side, dim),
        f"{start}/cls": (1, registers, dim),
        "encoder/encoder_norm/scale": (dim,),
        "encoder/encoder_norm/bias": (dim,),
    }
    for number in range(depth):
        prefix = f"encoder/transformer/encoderblock_{number}"
        shapes |= block_shapes(prefix, dim=dim, heads=heads, mlp_dim=mlp_dim)
    check_shapes(arrays, shapes, file)
    return PlainViTSizes(
        "tips",
        dim=dim,
        depth=depth,
        heads=heads,
        mlp_dim=mlp_dim,
        patch_size=patch,
        activation="gelu_tanh",  # flax's gelu is the approximate one
        norm_epsilon=NORM_EPSILON,
        registers=registers,
    )


def block_sizes(
    arrays: Mapping[str, np.ndarray], block: str, file: Path, tower: Tower
) -> tuple[int, int]:
    """Attention heads and MLP channels of a transformer block. Raises InputError as `shape_of`, or
    if the heads do not divide the channels."""
    query = f"{block}/MultiHeadDotProductAttention_0/query/kernel"
    dim, heads, _ = shape_of(arrays, query, 3, file, tower)
    if heads == 0 or dim % heads:
        raise InputError(
            f"{file}: its array {query} has shape {arrays[query].shape}, whose heads do not divide "
            "its channels; download it again"
        )
    _, mlp_dim = shape_of(arrays, f"{block}/MlpBlock_0/Dense_0/kernel", 2, file, tower)
    return heads, mlp_dim


def num_blocks(arrays: Mapping[str, np.ndarray], transformer: str) -> int:
    """The number of transformer blocks whose first norm is there."""
    number = 0
    while f"{transformer}/encoderblock_{number}/LayerNorm_0/scale" in arrays:
        number += 1
    return number


def block_shapes(block: str, *, dim: int, heads: int, mlp_dim: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a transformer block's arrays by name."""
    head_dim = dim // heads
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in ("LayerNorm_0", "LayerNorm_1"):
        shapes[f"{block}/{norm}/scale"] = (dim,)
        shapes[f"{block}/{norm}/bias"] = (dim,)
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for name in ("query", "key", "value"):
        shapes[f"{attention}/{name}/kernel"] = (dim, heads, head_dim)
        shapes[f"{attention}/{name}/bias"] = (heads, head_dim)
    shapes[f"{attention}/out/kernel"] = (heads, head_dim, dim)
    shapes[f"{attention}/out/bias"] = (dim,)
    shapes[f"{block}/MlpBlock_0/Dense_0/kernel"] = (dim, mlp_dim)
    shapes[f"{block}/MlpBlock_0/Dense_0/bias"] = (mlp_dim,)
    shapes[f"{block}/MlpBlock_0/Dense_1/kernel"] = (mlp_dim, dim)
    shapes[f"{block}/MlpBlock_0/Dense_1/bias"] = (dim,)
    return shapes


def match_tips_vit(state: nnx.State, file: Path) -> LoadReport:
    """The weights of a vision tower for the parameters of a state. Raises InputError as
    `tips_vit_sizes` and `match_weights`."""
    arrays = read_arrays(file)
    tips_vit_sizes(arrays, file)  # every shape fits the others
    shapes = parameter_shapes(state, VISION)
    renamed = rename_keys(join_heads(arrays), VISION)
    fitted = []
    for weight in renamed.weights:
        value = np.asarray(weight.value)
        if weight.path == "vision.vit.positions":
            num_positions, dim = shapes[weight.path]
            side = int(num_positions**0.5)
            # `jax.image.resize`, as the published model does it.
            resized = jax.image.resize(value[0], (side, side, dim), "bilinear")
            value = np.asarray(resized).reshape(num_positions, dim)
        elif weight.path == "vision.vit.registers":
            value = value[0]
        fitted.append(weight._replace(value=value))
    return match_weights(
        renamed._replace(weights=fitted), shapes, VISION, source=file, layout=LAYOUT
    )


def join_heads(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a tower with the heads of attention side by side in one axis."""
    joined = {}
    for name, value in arrays.items():
        layer = name.split("/")[-2:]
        if layer[0] in ("query", "key", "value"):
            value = value.reshape(*value.shape[:-2], -1)
        elif layer == ["out", "kernel"]:
            value = value.reshape(-1, value.shape[-1])
        joined[name] = value
    return joined


class TipsTextShape(NamedTuple):
    """Sizes of a text tower that its arrays tell."""

    vocab_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int


def tips_text_shape(arrays: Mapping[str, np.ndarray], file: Path) -> TipsTextShape:
    """Sizes of a text tower, from the shapes of its arrays. Raises InputError if the file is no
    such tower, or an array has a shape that does not fit the others."""
    vocab_size, dim = shape_of(arrays, "token_emb/emb_var", 2, file, "text")
    heads, mlp_dim = block_sizes(arrays, "transformer/encoderblock_0", file, "text")
    depth = num_blocks(arrays, "transformer")
    shapes: dict[str, tuple[int, ...]] = {
        "text_encoder_norm/scale": (dim,),
        "text_encoder_norm/bias": (dim,),
    }
    for number in range(depth):
        prefix = f"transformer/encoderblock_{number}"
        shapes |= block_shapes(prefix, dim=dim, heads=heads, mlp_dim=mlp_dim)
    check_shapes(arrays, shapes, file)
    return TipsTextShape(vocab_size, dim, depth, heads, mlp_dim)
