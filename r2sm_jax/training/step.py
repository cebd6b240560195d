"""The training step: what it changes, and the function that is compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from r2sm_jax.config import Config, LoopConfig, ModelConfig
from r2sm_jax.cpu import products
from r2sm_jax.errors import InputError
from r2sm_jax.models.r2sm import R2SM, build_model
from r2sm_jax.models.vision import FrozenFeatures
from r2sm_jax.training import losses
from r2sm_jax.training.losses import Outputs, Targets

Batch = dict[str, Any]
Names = dict[str, Float[Array, "_v e"]]
"""Text embeddings of each attribute's values."""
Values = dict[str, Float[Array, ""]]
"""The losses of a step and the norm of its gradient, by name."""


class TrainState(NamedTuple):
    """Everything that a step changes. Only trainable parameters have optimizer state."""

    params: nnx.State
    opt_state: optax.OptState
    step: Int[Array, ""]


def split_model(config: ModelConfig, seed: int) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """A new model as (graph, trainable parameters, constants). The frozen language model is not part of it."""
    graphdef, params, constants = nnx.split(build_model(config, rngs=nnx.Rngs(seed)), nnx.Param, ...)
    return graphdef, params, constants


def init_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(params, jax.jit(optimizer.init)(params), jnp.zeros((), jnp.int32))


def make_targets(batch: Batch) -> Targets:
    """The truth of a batch (data/batches.py), with coverages in float32."""

    def scale(coverage: Array) -> Array:
        return coverage.astype(jnp.float32) / 255

    unchanged = ("amodal_known", "members", "slots", "wants_amodal", "query_valid", "labels", "boxes")
    return Targets(
        modal=scale(batch["modal"]),
        amodal=scale(batch["amodal"]),
        valid=scale(batch["loss_valid"]),
        type_amodal=batch.get("type_amodal", batch["wants_amodal"]),
        type_valid=batch.get("type_valid", batch["query_valid"]),
        **{name: batch[name] for name in unchanged},
    )


def run_model(model: R2SM, batch: Batch, names: Names, targets: Targets) -> Outputs:
    """Everything that the losses compare with the truth. The kernels of instances are made where the truth has them."""
    frozen = FrozenFeatures(batch.get("frozen_trunk"), batch.get("frozen_plain"))
    tokens, pixels = model.encode_image(batch["image"], batch["valid"], frozen)
    masks = model.decode(tokens, pixels, batch["text"], batch["text_mask"])
    if model.head is not None:
        type_readings = model.type_readings(batch["type_text"], batch["type_mask"])
    else:
        type_readings = model.type_logit(batch["text"], batch["text_mask"], masks)[None]
    return Outputs(
        masks=masks,
        pixels=pixels,
        type_readings=type_readings,
        instances=model.instance_kernels(pixels, targets.modal),
        dense=model.dense_output(pixels),
        names={group: model.dense_names(embeddings) for group, embeddings in names.items()},
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
    """One step of a resolved configuration."""
    model, loop = config.model, config.train
    entries = losses.counted_entries(make_targets(batch), config.loss, model.head)
    counts = {name: counted.sum(dtype=jnp.float32) for name, counted in entries.items()}

    def loss_fn(params: nnx.State, part: Batch) -> tuple[Array, Values]:
        targets = make_targets(part)
        outputs = run_model(nnx.merge(graphdef, params, constants), part, names, targets)
        counted = losses.counted_entries(targets, config.loss, model.head)
        found = losses.compute_losses(outputs, targets, config.loss, head=model.head, threshold=model.mask_threshold)
        means = losses.mean_losses(found, counted, counts)
        return losses.total_loss(means, config.loss), means

    with products(loop.products):
        gradient_fn = partial(jax.value_and_grad(loss_fn, has_aux=True), state.params)
        (loss, values), grads = add_parts(gradient_fn, batch, loop.accumulate, unroll=loop.unroll)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = cast(nnx.State, optax.apply_updates(state.params, updates))
    values |= {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
    return TrainState(params, opt_state, state.step + 1), values


def add_parts(function: Callable[[Batch], Any], batch: Batch, count: int, *, unroll: bool) -> Any:
    """The sum of a function over `count` parts of a batch, one after the other.

    The parts are a loop, which takes the memory of one part. With `unroll` they are not: that takes the memory of the
    whole batch, and on a CPU a sixth of the loop's time.
    """
    if count == 1:
        return function(batch)
    # The rows of a part lie `count` apart, so that every device holds an equal share of each part.
    parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    return jax.lax.scan(add, zeros, parts, unroll=unroll)[0]


def jit_train_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, config: Config
) -> Callable[[TrainState, nnx.State, Batch, Names], tuple[TrainState, Values]]:
    """`train_step` compiled for a resolved configuration; the memory of the old state is reused."""
    return jax.jit(partial(train_step, graphdef=graphdef, optimizer=optimizer, config=config), donate_argnums=0)


def make_mesh(loop: LoopConfig) -> jax.sharding.Mesh:
    """The devices of a resolved configuration along one `data` axis.

    Raises:
        InputError: there are not so many devices, or the batch does not divide evenly among devices and parts.
    """
    devices = loop.devices
    if devices > jax.local_device_count():
        raise InputError(f"--train.devices {devices}: this machine has {jax.local_device_count()}; give fewer")
    if loop.batch_size % (devices * loop.accumulate):
        raise InputError(
            f"--train.batch-size {loop.batch_size} does not divide by the {devices} devices and the {loop.accumulate} "
            f"parts of --train.accumulate; give a multiple of {devices * loop.accumulate}"
        )
    axis = jax.sharding.AxisType.Auto
    return jax.make_mesh((devices,), ("data",), axis_types=(axis,), devices=jax.local_devices()[:devices])
