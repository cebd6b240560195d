"""What a training run carries from step to step, and the one jitted step."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from r2sm_jax.config import LossConfig, ModelConfig, Products
from r2sm_jax.cpu import products
from r2sm_jax.models.r2sm import R2SM
from r2sm_jax.models.vision import FrozenFeatures
from r2sm_jax.training import losses
from r2sm_jax.training.losses import Mean, SharedMeans, Targets, masked_mean

Names = dict[str, Float[Array, "_v e"]]
Logs = dict[str, Float[Array, ""]]


class TrainState(NamedTuple):
    """Everything that a step changes. Only trainable parameters have optimizer state."""

    params: nnx.State
    opt_state: optax.OptState
    step: Int[Array, ""]


def split_model(config: ModelConfig, seed: int) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """A freshly initialised model as (graph, trainable parameters, constants).

    The frozen language model is not part of it: its states are inputs.
    """
    graphdef, params, constants = nnx.split(R2SM(config, rngs=nnx.Rngs(seed)), nnx.Param, ...)
    return graphdef, params, constants


def init_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(params, jax.jit(optimizer.init)(params), jnp.zeros((), jnp.int32))


def make_targets(batch: dict[str, Any]) -> Targets:
    """The truth of a batch (data/pipeline.py) as float32 coverages."""

    def scale(coverage: Array) -> Array:
        return coverage.astype(jnp.float32) / 255

    return Targets(
        modal=scale(batch["modal"]),
        amodal=scale(batch["amodal"]),
        amodal_known=batch["amodal_known"],
        members=batch["members"],
        slots=batch["slots"],
        wants_amodal=batch["wants_amodal"],
        query_valid=batch["query_valid"],
        valid=scale(batch["loss_valid"]),
        labels=batch["labels"],
        boxes=batch["boxes"],
    )


def compute_losses(
    model: R2SM, batch: dict[str, Any], names: Names, config: LossConfig, mean: Mean = masked_mean
) -> tuple[Array, Logs]:
    """Total loss and its parts. `names` are the text embeddings of each attribute's values."""
    targets = make_targets(batch)
    frozen = FrozenFeatures(batch.get("frozen_trunk"), batch.get("frozen_plain"))
    tokens, pixels = model.encode_image(batch["image"], batch["valid"], frozen)
    masks = model.decode(tokens, pixels, batch["text"], batch["text_mask"])
    head, threshold = model.config.head, model.config.mask_threshold
    canvas = masks.canvas(pixels.fine)
    parts = losses.query_losses(masks, canvas, targets, config, head=head, threshold=threshold, mean=mean)
    if model.head is not None:
        readings = model.type_readings(batch["type_text"], batch["type_mask"])
        wants, valid = batch["type_amodal"], batch["type_valid"]
    else:
        readings = model.type_logit(batch["text"], batch["text_mask"], masks)[None]
        wants, valid = targets.wants_amodal, targets.query_valid
    parts["type"] = losses.type_loss(readings, wants, valid, config, mean=mean)
    parts |= losses.slot_losses(masks, canvas, targets, config, threshold=threshold, mean=mean)
    kernels = model.instance_kernels(pixels, targets.modal)
    parts |= losses.instance_losses(kernels, pixels.fine, targets, config, mean=mean)
    projected = {group: model.dense_names(embeddings) for group, embeddings in names.items()}
    parts |= losses.dense_losses(model.dense_output(pixels), projected, targets, mean=mean)
    return losses.total_loss(parts, config), parts


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    config: LossConfig,
    accumulate: int = 1,
    *,
    unroll: bool = False,
    kind: Products = "float32",
) -> Callable[[TrainState, nnx.State, dict[str, Any], Names], tuple[TrainState, Logs]]:
    """The jitted step `(state, constants, batch, names) -> (state, logs)`; the state's memory is reused.

    With `accumulate` parts the batch is worked off one part after the other, which takes the memory of one: losses and
    gradients are those of the whole batch, as every mean is taken over the valid entries of all parts.
    With `unroll` they are no loop, which takes the memory of the whole batch, and on CPU a sixth of the loop's time.
    `kind`: of dense layers' products.
    """

    def gradients(params: nnx.State, constants: nnx.State, batch: dict[str, Any], names: Names, mean: Mean):
        def loss_fn(params):
            return compute_losses(nnx.merge(graphdef, params, constants), batch, names, config, mean)

        return jax.value_and_grad(loss_fn, has_aux=True)(params)

    def accumulated(params: nnx.State, constants: nnx.State, batch: dict[str, Any], names: Names):
        # Rows of a part lie `accumulate` apart, so that every device keeps an equal share of each part.
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0), batch)

        def counts(part: dict[str, Any]) -> list[Array]:
            means = SharedMeans()
            compute_losses(nnx.merge(graphdef, params, constants), part, names, config, means)
            return means.counts  # of the truth alone: the model is not run for them

        totals = [count.sum(0) for count in jax.lax.map(counts, parts)]

        def add(sums: Any, part: dict[str, Any]):
            return jax.tree.map(jnp.add, sums, gradients(params, constants, part, names, SharedMeans(totals))), None

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(lambda: gradients(params, constants, first, names, SharedMeans(totals)))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, parts, unroll=unroll)[0]

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, constants: nnx.State, batch: dict[str, Any], names: Names):
        with products(kind):
            if accumulate == 1:
                (loss, logs), grads = gradients(state.params, constants, batch, names, masked_mean)
            else:
                (loss, logs), grads = accumulated(state.params, constants, batch, names)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = cast(nnx.State, optax.apply_updates(state.params, updates))
        logs = logs | {"loss": loss, "gradient_norm": optax.global_norm(grads)}
        return TrainState(params, opt_state, state.step + 1), logs

    return train_step
