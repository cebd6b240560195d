"""Published EfficientNet-Lite weights -> the parameters of efficientnet.py.

Keys are those of `EfficientNet-PyTorch`. Each batch norm is folded into the convolution before it,
so training changes kernels and biases only.
"""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from r2sm_jax.errors import InputError
from r2sm_jax.models.efficientnet import STAGES
from r2sm_jax.models.hub import read_tensors
from r2sm_jax.models.matching import (
    KeyTable,
    LoadReport,
    match_weights,
    parameter_shapes,
    rename_keys,
)
from r2sm_jax.models.pickles import read_pickle

TABLE = KeyTable(
    {
        "_conv_stem.(weight|bias)": r"vision.efficientnet.first.\1",
        r"_blocks.(\d+)._expand_conv.(weight|bias)": r"vision.efficientnet.blocks.\1.expand.\2",
        r"_blocks.(\d+)._depthwise_conv.(weight|bias)": r"vision.efficientnet.blocks.\1.depthwise.\2",
        r"_blocks.(\d+)._project_conv.(weight|bias)": r"vision.efficientnet.blocks.\1.project.\2",
    },
    # The classifier.
    unused=("_conv_head.*", "_fc.*"),
    within=("vision.efficientnet.*",),
)
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
    """The weights of a model folder, a safetensors file or a `.pth`, with batch norms folded.
    Raises InputError if the file cannot be read, or lacks the statistics of a batch norm."""
    tensors = read_pickle(source) if source.suffix == ".pth" else read_tensors(source)
    try:
        return fold_batch_norms(tensors)
    except KeyError as error:
        raise InputError(
            f"{source}: not an EfficientNet-Lite, since it has no {error}; give a published one"
        ) from None


def fold_batch_norms(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each batch norm as part of the convolution before it, whose bias it becomes. Raises KeyError
    if one has no statistics."""
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
    """Channels after each block. Raises InputError if these are not the stages of an
    EfficientNet-Lite."""
    dims: list[int] = []
    while True:
        kernel = weights.get(f"_blocks.{len(dims)}._project_conv.weight")
        if kernel is None:
            break
        dims.append(len(kernel))
    num_stages = len(list(groupby(dims)))
    if num_stages != len(STAGES):
        raise InputError(
            f"{source}: not an EfficientNet-Lite, since its blocks are not of seven kinds"
        )
    return tuple(dims)


def match_efficientnet(state: nnx.State, source: Path) -> LoadReport:
    """The weights of an EfficientNet-Lite for the parameters of a state. Raises InputError as
    `match_weights`."""
    shapes = parameter_shapes(state, TABLE)
    renamed = rename_keys(read_efficientnet(source), TABLE)
    fitted = []
    for weight in renamed.weights:
        value = weight.value
        # The file has 1x1 convolutions [1 1 c d] where this model has dense layers [c d].
        if value.ndim == 4 and len(shapes.get(weight.path, ())) == 2:
            value = value[0, 0]
        fitted.append(weight._replace(value=value))
    return match_weights(renamed._replace(weights=fitted), shapes, TABLE, source=source)


def fill_first_blocks(backbone: nnx.State, source: Path, flag: str) -> nnx.State:
    """The state of an `EfficientNetLite` that has the first blocks alone, with published weights.

    Args:
        flag: that of the blocks' channels, for the message.

    Raises InputError if the file cannot be read, or has no such blocks.
    """
    renamed = rename_keys(read_efficientnet(source), TABLE)
    published = {weight.path: weight.value for weight in renamed.weights}
    filled = []
    for path, leaf in nnx.to_flat_state(backbone):
        name = "vision.efficientnet." + ".".join(map(str, path))
        value = published.get(name)
        if value is not None and value.ndim == 4 and leaf.ndim == 2:
            value = value[0, 0]  # as in `match_efficientnet`
        if value is None or value.shape != leaf.shape:
            raise InputError(
                f"{source}: it has no {name} of the shape {leaf.shape}; give weights whose blocks "
                f"have the channels of {flag}"
            )
        filled.append((path, leaf.replace(jnp.asarray(value, leaf.dtype))))
    return nnx.from_flat_state(filled)
