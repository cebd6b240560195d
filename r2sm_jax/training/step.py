"""The training step of every task: the state that it changes, and the function that is compiled."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from r2sm_jax.config import LoopConfig
from r2sm_jax.models.matmul import JAX_PRECISION, set_matmul_precision
from r2sm_jax.training.processes import place, shardings

Losses = dict[str, Float[Array, ""]]
"""Losses by their name in the log."""


class Loss(NamedTuple):
    """What a model learns from a batch."""

    inputs_and_targets: Callable[[Any, Key[Array, ""]], Any]
    """(batch, key) -> the model's inputs and their targets, arrays whose first axis is the batch.
    Weights among them are shares of the whole batch, not of a part."""
    losses: Callable[[Any, Any], Losses]
    """(model, some rows of inputs and targets) -> the losses of these rows. Those of all parts add
    up to the losses of the batch."""
    weights: Mapping[str, float]
    """The weight of each loss in the total; 0 = it is logged, but not trained."""


class TrainState(NamedTuple):
    """Everything that a step changes. Only trainable parameters have optimizer state."""

    params: nnx.State
    opt_state: optax.OptState
    step: Int[Array, ""]
    average: nnx.State | None = None
    """The running average of `params` (`--train.ema`), if there is one."""

    @property
    def weights(self) -> nnx.State:
        """What evaluation, selection and export use in place of `params`."""
        return self.params if self.average is None else self.average


def init_state(
    params: nnx.State,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    *,
    averaged: bool = False,
) -> TrainState:
    """Makes the state before the first step, of parameters that lie in a mesh if one is given;
    `averaged`: with an average of the parameters."""
    step = jnp.zeros((), jnp.int32)
    init = jax.jit(optimizer.init)
    if mesh is not None:
        layout = shardings(mesh, jax.eval_shape(optimizer.init, params))
        init, step = jax.jit(optimizer.init, out_shardings=layout), place(mesh, step)
    average = jax.tree.map(jnp.copy, params) if averaged else None
    return TrainState(params, init(params), step, average)


def update(
    state: TrainState, grads: nnx.State, optimizer: optax.GradientTransformation, decay: float
) -> TrainState:
    """Changes the parameters by their gradients. `decay`: of their running average."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = cast(nnx.State, optax.apply_updates(state.params, updates))
    average = state.average
    if average is not None:
        average = update_average(average, params, state.step, decay)
    return TrainState(params, opt_state, state.step + 1, average)


def update_average(
    average: nnx.State, params: nnx.State, step: Int[Array, ""], decay: float
) -> nnx.State:
    """Moves the running average after a step.

    In the first steps its decay is smaller, `(1 + step) / (10 + step)` as in TensorFlow's
    ExponentialMovingAverage, so that it forgets the random start.
    """
    decay_now = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda a, p: a + (1 - decay_now) * (p - a), average, params)


def total_loss(losses: Losses, weights: Mapping[str, float]) -> Float[Array, ""]:
    """The weighted sum that is differentiated. Raises KeyError for a loss without a weight."""
    return sum((weights[name] * loss for name, loss in losses.items()), jnp.zeros(()))


def train_step(
    state: TrainState,
    constants: nnx.State,
    batch: Any,
    *,
    graphdef: nnx.GraphDef,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    config: LoopConfig,
) -> tuple[TrainState, Losses]:
    """Takes one step of a resolved configuration. Its number decides what is random in it.

    Returns the losses, their total `loss` and the norm of its gradient, too.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), state.step + 1)

    def loss_of_part(params: nnx.State, part: Any) -> tuple[Array, Losses]:
        model = nnx.merge(graphdef, params, constants)
        set_matmul_precision(model, config.matmul_precision)
        losses = loss.losses(model, part)
        return total_loss(losses, loss.weights), losses

    gradient = partial(jax.value_and_grad(loss_of_part, has_aux=True), state.params)
    with jax.default_matmul_precision(JAX_PRECISION[config.matmul_precision]):
        rows = loss.inputs_and_targets(batch, key)
        (total, losses), grads = sum_over_parts(gradient, rows, config.accumulate)
        new_state = update(state, grads, optimizer, config.ema)
    return new_state, losses | {"loss": total, "gradient_norm": optax.tree.norm(grads)}


def sum_over_parts(function: Callable[[Any], Any], rows: Any, count: int) -> Any:
    """Adds up a function over `count` parts of the rows, one after the other, in the memory of one
    part. The weights of the targets make it the value of the whole batch, however parts differ."""
    if count == 1:
        return function(rows)

    # The rows of a part lie `count` apart, so that every device holds an equal share of each part.
    def divide(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)

    parts = jax.tree.map(divide, rows)
    shapes = jax.eval_shape(lambda parts: function(jax.tree.map(lambda x: x[0], parts)), parts)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, shapes), parts)
    return total


def jit_train_step(
    graphdef: nnx.GraphDef,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    config: LoopConfig,
    state: TrainState | None = None,
) -> Callable[[TrainState, nnx.State, Any], tuple[TrainState, Losses]]:
    """`train_step` compiled for a resolved configuration. The memory of the old state is reused,
    and every new one lies as `state` does (arrays or shapes with their shardings)."""
    step = partial(train_step, graphdef=graphdef, loss=loss, optimizer=optimizer, config=config)
    if state is None:
        return jax.jit(step, donate_argnums=0)
    layout = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(layout, layout.step))
