"""Sizes of tiny completers and outliners, masks for them, and their training on given examples."""

from collections.abc import Iterable

import numpy as np
import optax
from flax import nnx

from r2sm_jax.config import CompleterConfig, LoopConfig, OutlinerConfig
from r2sm_jax.training.step import Loss, init_state, jit_train_step

COMPLETER = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
OUTLINER = OutlinerConfig(
    size=32, dims=(8, 16), depth=1, heads=2, efficientnet="", block_dims=(8, 16, 8)
)


def rectangle(height, width, x0, y0, x1, y1):
    mask = np.zeros((height, width), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def disc(height, width, x, y, radius):
    rows, columns = np.mgrid[:height, :width]
    return (rows + 0.5 - y) ** 2 + (columns + 0.5 - x) ** 2 <= radius**2


def trained(model: nnx.Module, loss: Loss, batches: Iterable[np.ndarray]):
    """The weights after a step on each batch, with the frozen ones, and the losses."""
    graphdef, params, constants = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(3e-3)
    step = jit_train_step(graphdef, loss, optimizer, LoopConfig(matmul_precision="float32"))
    state, losses = init_state(params, optimizer), []
    for batch in batches:
        state, values = step(state, constants, batch)
        losses.append(float(values["loss"]))
    return nnx.merge_state(state.params, constants), losses
