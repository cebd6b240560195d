"""Published plain ViTs (DINOv2, CLIP, SigLIP) -> the parameters of plain_vit.py.

Keys are those of Hugging Face `transformers`. Positions are interpolated once here, while
`transformers` does it in every call.
"""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from r2sm_jax.config import VisionConfig
from r2sm_jax.models.hub import read_tensors
from r2sm_jax.models.matching import (
    KeyTable,
    LoadReport,
    Tensor,
    match_weights,
    parameter_shapes,
    rename_keys,
)

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
WITHIN = ("vision.vit.*", "vision.join.*")
NEW = ("vision.join.kernel",)

TABLES = {
    "dinov2": KeyTable(
        DINOV2_KEYS,
        prefixes=("dinov2.", "dinov2_with_registers."),
        unused=("embeddings.mask_token", "classifier.*"),
        new=NEW,
        within=WITHIN,
    ),
    "clip": KeyTable(
        CLIP_BLOCKS | CLIP_KEYS,
        prefixes=("vision_model.",),
        # The last hidden state is the one before the final norm, as in `transformers`.
        unused=(
            "post_layernorm.*",
            "visual_projection.*",
            "text_.*",
            "logit_scale",
            "embeddings.position_ids",
        ),
        new=NEW,
        within=WITHIN,
    ),
    "siglip": KeyTable(
        CLIP_BLOCKS | SIGLIP_KEYS,
        prefixes=("vision_model.",),
        unused=("head.*", "text_model.*", "logit_scale", "logit_bias", "embeddings.position_ids"),
        new=NEW,
        within=WITHIN,
    ),
}
"""By family."""


def match_plain_vit(state: nnx.State, config: VisionConfig, source: Path) -> LoadReport:
    """The weights of a plain ViT for the parameters of a state. Raises InputError as
    `match_weights`."""
    table = TABLES[config.vit_family]
    shapes = parameter_shapes(state, table)
    renamed = rename_keys(read_tensors(source), table)
    fitted = []
    for weight in renamed.weights:
        shape = shapes.get(weight.path)
        if shape is not None:
            antialias = config.vit_registers > 0
            value = fit_plain_vit(weight.path, weight.value, shape, antialias=antialias)
            weight = weight._replace(value=value)
        fitted.append(weight)
    return match_weights(renamed._replace(weights=fitted), shapes, table, source=source)


def fit_plain_vit(path: str, value: Tensor, shape: tuple[int, ...], *, antialias: bool) -> Tensor:
    """A value of a plain ViT in the shape of our parameter."""
    if path in ("vision.vit.class_token", "vision.vit.registers"):
        return value.reshape(shape)
    if path != "vision.vit.positions":
        return value
    # The position of a class token comes first and is not interpolated.
    table = np.asarray(value, np.float32).reshape(-1, shape[-1])
    side = int(len(table) ** 0.5)
    size = int(shape[0] ** 0.5)
    num_others = len(table) - side * side
    grid = table[num_others:].reshape(side, side, -1)
    grid = resize_grid(grid, size, antialias=antialias)
    return np.concatenate([table[:num_others], grid.reshape(size * size, -1)])


def resize_grid(
    table: Float[np.ndarray, "H W d"], size: int, *, antialias: bool = False
) -> Float[np.ndarray, "_h _w d"]:
    """An absolute position table at `size` x `size`, bicubic with half-pixel centres.

    The kernel is torch's (a = -0.75, no antialiasing, edges repeated), as DINOv2, CLIP and SigLIP
    are resized. `antialias` is the kernel of DINOv2 with registers (a = -0.5, widened where it
    shrinks).
    """
    if table.shape[:2] == (size, size):
        return table
    if antialias:
        shape = (size, size, table.shape[2])
        return np.asarray(jax.image.resize(table, shape, "cubic", antialias=True))
    rows = bicubic_weights(table.shape[0], size)
    columns = bicubic_weights(table.shape[1], size)
    resized = np.einsum("hH,wW,HWd->hwd", rows, columns, table, optimize=True)
    return resized.astype(np.float32)


def bicubic_weights(
    source: int, target: int, a: float = -0.75
) -> Float[np.ndarray, "target source"]:
    """The matrix that resizes one axis. `a` is the slope of the kernel at distance 1; torch has
    -0.75."""
    centres = (np.arange(target) + 0.5) * (source / target) - 0.5
    first = np.floor(centres).astype(int)
    matrix = np.zeros((target, source))
    for tap in range(-1, 3):
        distance = np.abs(centres - first - tap)
        near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
        far = a * (distance**3 - 5 * distance**2 + 8 * distance - 4)
        column = np.clip(first + tap, 0, source - 1)
        # Several taps can meet in the column at an edge, so they are added.
        np.add.at(matrix, (np.arange(target), column), np.where(distance <= 1, near, far))
    return matrix
