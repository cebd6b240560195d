"""The training step: the state that it changes, and the function that is compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from r2sm_jax.config import Config, ModelConfig
from r2sm_jax.data.batches import Batch
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.matmul import JAX_PRECISION, set_matmul_precision
from r2sm_jax.models.r2sm import R2SM, build_model
from r2sm_jax.training.losses import TrainingOutput, compute_losses, total_loss
from r2sm_jax.training.supervision import Targets, make_targets

Names = dict[str, Float[Array, "_v e"]]
"""Attribute -> text embeddings of the names of its v values."""
Values = dict[str, Float[Array, ""]]
"""The losses of a step and the norm of its gradient, by name."""


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


def split_model(config: ModelConfig, seed: int) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Builds a new model as (graph, trainable parameters, constants), without the frozen language
    model."""
    graphdef, params, constants = nnx.split(
        build_model(config, rngs=nnx.Rngs(seed)), nnx.Param, ...
    )
    return graphdef, params, constants


def init_state(
    params: nnx.State, optimizer: optax.GradientTransformation, *, averaged: bool = False
) -> TrainState:
    """Makes the state before the first step; `averaged`: with an average of the parameters."""
    opt_state = jax.jit(optimizer.init)(params)
    average = jax.tree.map(jnp.copy, params) if averaged else None
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), average)


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


def predict_for_training(
    model: R2SM, batch: Batch, names: Names, instance_regions: Float[Array, "b m h w"]
) -> TrainingOutput:
    """Predicts everything that the losses compare with the targets."""
    image_features = model.encode_image(batch["image"], batch["image_mask"])
    decoder = model.decode_kernels(image_features, batch["text"], batch["text_mask"])

    if model.head is not None:
        # Heads that read words alone learn from sentences of their own, some without an image. In
        # training they never read the queries in batch["text"].
        states = batch["type_text"].astype(jnp.float32)
        type_logits = heads.member_logits(model.head, states, batch["type_text_mask"])
    else:
        # The `decoder` head. References and `none` learn nothing here: their logit 0 adds the
        # constant log 2 = 0.69, without a gradient, to the logged type loss and to the total.
        type_logits = model.amodal_logit(batch["text"], batch["text_mask"], decoder)[None]

    return TrainingOutput(
        decoder=decoder,
        image_features=image_features,
        type_logits=type_logits,
        instance_kernels=model.instance_kernels(image_features, instance_regions),
        dense=model.dense_output(image_features),
        names={group: model.name_projection(embeddings) for group, embeddings in names.items()},
    )


def train_step(
    state: TrainState,
    constants: nnx.State,
    batch: Batch,
    names: Names,
    *,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    config: Config,
) -> tuple[TrainState, Values]:
    """Takes one step of a resolved configuration."""
    targets = make_targets(batch, config.loss, head=config.model.head)

    def loss_of_part(params: nnx.State, part: Batch, part_targets: Targets) -> tuple[Array, Values]:
        model = nnx.merge(graphdef, params, constants)
        set_matmul_precision(model, config.train.matmul_precision)
        output = predict_for_training(model, part, names, part_targets.instance_regions)
        threshold = config.model.mask_threshold
        losses = compute_losses(output, part_targets, config.loss, threshold=threshold)
        return total_loss(losses, config.loss), losses

    def gradient_of_part(
        part_and_targets: tuple[Batch, Targets],
    ) -> tuple[tuple[Array, Values], nnx.State]:
        gradient_fn = jax.value_and_grad(loss_of_part, has_aux=True)
        return gradient_fn(state.params, *part_and_targets)

    with jax.default_matmul_precision(JAX_PRECISION[config.train.matmul_precision]):
        (loss, losses), grads = add_parts(
            gradient_of_part, (batch, targets), config.train.accumulate
        )
        new_state = update(state, grads, optimizer, config.train.ema)
    return new_state, losses | {"loss": loss, "gradient_norm": optax.tree.norm(grads)}


def add_parts(function: Callable[[Any], Any], batch: Any, count: int) -> Any:
    """Adds up a function over `count` parts of a batch, one after the other, in the memory of one
    part. The weights of the targets make it the value of the whole batch, however parts differ."""
    if count == 1:
        return function(batch)

    # The rows of a part lie `count` apart, so that every device holds an equal share of each part.
    def divide(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)

    parts = jax.tree.map(divide, batch)
    shapes = jax.eval_shape(lambda parts: function(jax.tree.map(lambda x: x[0], parts)), parts)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, shapes), parts)
    return total


def jit_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    config: Config,
    state: TrainState | None = None,
) -> Callable[[TrainState, nnx.State, Batch, Names], tuple[TrainState, Values]]:
    """`train_step` compiled for a resolved configuration. The memory of the old state is reused,
    and every new one lies as `state` does (arrays or shapes with their shardings)."""
    step = partial(train_step, graphdef=graphdef, optimizer=optimizer, config=config)
    if state is None:
        return jax.jit(step, donate_argnums=0)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings.step))
