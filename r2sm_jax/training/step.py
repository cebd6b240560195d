"""The training step: what it changes, the function that is compiled, and the features that it need not compute."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt8

from r2sm_jax.cli import to_json
from r2sm_jax.config import Config, LoopConfig, ModelConfig, VisionConfig
from r2sm_jax.data.batches import PreparedSource
from r2sm_jax.data.cache import FeatureCache, digest, to_float16
from r2sm_jax.errors import InputError
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.encoder_sizes import EncoderSizes
from r2sm_jax.models.image_encoder import FrozenFeatures
from r2sm_jax.models.matmul import products
from r2sm_jax.models.r2sm import R2SM, build_model
from r2sm_jax.training.losses import TrainingOutput, compute_losses, total_loss
from r2sm_jax.training.sharding import AXES, gather, whole
from r2sm_jax.training.supervision import Batch, Targets, make_targets

Names = dict[str, Float[Array, "_v e"]]
"""Text embeddings of each attribute's values."""
Values = dict[str, Float[Array, ""]]
"""The losses of a step and the norm of its gradient, by name."""


class TrainState(NamedTuple):
    """Everything that a step changes. Only trainable parameters have optimizer state."""

    params: nnx.State
    opt_state: optax.OptState
    step: Int[Array, ""]


def split_model(
    config: ModelConfig, sizes: EncoderSizes, seed: int
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """A new model as (graph, trainable parameters, constants). The frozen language model is not part of it."""
    graphdef, params, constants = nnx.split(
        build_model(config, sizes, rngs=nnx.Rngs(seed)), nnx.Param, ...
    )
    return graphdef, params, constants


def init_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(params, jax.jit(optimizer.init)(params), jnp.zeros((), jnp.int32))


def predict_for_training(
    model: R2SM, batch: Batch, names: Names, instance_regions: Float[Array, "b m h w"]
) -> TrainingOutput:
    """Everything that the losses compare with the targets."""
    frozen = FrozenFeatures(*(batch.get(f"frozen_{name}") for name in FrozenFeatures._fields))
    tokens, pixels = model.encode_image(batch["image"], batch["image_mask"], frozen)
    decoder = model.decode(tokens, pixels, batch["text"], batch["text_mask"])

    if model.head is not None:
        # Heads that read words alone also learn from sentences without an image.
        type_logits = heads.readings(
            model.head, batch["type_text"].astype(jnp.float32), batch["type_text_mask"]
        )
    else:
        type_logits = model.amodal_logit(batch["text"], batch["text_mask"], decoder)[None]

    return TrainingOutput(
        decoder=decoder,
        pixels=pixels,
        type_logits=type_logits,
        instance_kernels=model.instance_kernels(pixels, instance_regions),
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
    targets = make_targets(batch, config.loss, head=config.model.head)

    def loss_fn(params: nnx.State, batch: Batch, targets: Targets) -> tuple[Array, Values]:
        model = nnx.merge(graphdef, params, constants)
        output = predict_for_training(model, batch, names, targets.instance_regions)
        losses = compute_losses(output, targets, config.loss, threshold=config.model.mask_threshold)
        return total_loss(losses, config.loss), losses

    def gradient_fn(part: tuple[Batch, Targets]) -> tuple[tuple[Array, Values], nnx.State]:
        return jax.value_and_grad(loss_fn, has_aux=True)(state.params, *part)

    with products(config.train.matmul_precision):
        (loss, losses), grads = add_parts(gradient_fn, (batch, targets), config.train.accumulate)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = cast(nnx.State, optax.apply_updates(state.params, updates))

    values = losses | {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
    return TrainState(params, opt_state, state.step + 1), values


def add_parts(function: Callable[[Any], Any], batch: Any, count: int) -> Any:
    """The sum of a function over `count` parts of a batch, one after the other, in the memory of one part."""
    if count == 1:
        return function(batch)

    # The rows of a part lie `count` apart, so that every device holds an equal share of each part.
    def divide(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)

    parts = jax.tree.map(divide, batch)
    first_part = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(function, first_part)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    total, _ = jax.lax.scan(add, zeros, parts)
    return total


def jit_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    config: Config,
    state: TrainState | None = None,
) -> Callable[[TrainState, nnx.State, Batch, Names], tuple[TrainState, Values]]:
    """`train_step` compiled for a resolved configuration. The memory of the old state is reused, and every new one
    lies as `state` does (arrays or shapes with their shardings)."""
    step = partial(train_step, graphdef=graphdef, optimizer=optimizer, config=config)
    if state is None:
        return jax.jit(step, donate_argnums=0)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings.step))


def make_mesh(loop: LoopConfig, fsdp: int = 1) -> Mesh:
    """The devices of a resolved configuration along the axes `data` and `fsdp`, the second of length `fsdp`. Raises
    InputError if there are not so many devices, several processes would not use all of theirs, or the batch does not
    divide evenly among devices and parts."""
    devices, shares = loop.devices, loop.devices * loop.accumulate
    if devices > jax.device_count():
        raise InputError(
            f"--train.devices {devices}: this machine has {jax.device_count()}; give fewer"
        )
    if jax.process_count() > 1 and devices != jax.device_count():
        raise InputError(
            f"--train.devices {devices}: several processes use all {jax.device_count()} devices; give 0"
        )
    if devices % fsdp:
        raise InputError(
            f"--distributed.fsdp {fsdp} does not divide the {devices} devices; give a number that does"
        )
    if loop.batch_size % shares:
        raise InputError(
            f"--train.batch-size {loop.batch_size} does not divide by the {devices} devices and the {loop.accumulate} "
            f"parts of --train.accumulate; give a multiple of {shares}"
        )
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(
        (devices // fsdp, fsdp), AXES, axis_types=auto, devices=jax.devices()[:devices]
    )


# Features of the training images by frozen weights, computed once and kept on disk (`--data.cache-dir`).


class FrozenImages:
    """`images(index)`: the features of training image `index`, as entries of a batch. `compute` comes before that."""

    cache: FeatureCache
    keys: list[str]
    names: list[str]

    def __init__(self, folder: Path, prepared: PreparedSource):
        self.folder, self.prepared = folder, prepared

    def __call__(self, index: int) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.cache[self.keys[index]], strict=True))

    def compute(self, graphdef: nnx.GraphDef, weights: nnx.State, config: Config) -> int:
        """Computes the features that are not in the cache; returns of how many images. Every process computes its
        share. Raises InputError if the disk has too little space, or a feature does not fit into float16."""
        process, processes = jax.process_index(), jax.process_count()
        vision, rows = config.model.vision, config.train.batch_size // processes
        devices = np.array(jax.local_devices()[: config.train.devices // processes])
        replicated, sharding = (
            NamedSharding(Mesh(devices, "rows"), PartitionSpec(*axis)) for axis in ((), ("rows",))
        )
        weights = jax.device_put(jax.tree.map(whole, weights), replicated)
        frozen = [
            np.asarray(x)
            for x in jax.tree.leaves(nnx.filter_state(weights["vision"], nnx.Not(nnx.Param)))
        ]
        sizes = to_json(vision) | {
            name: getattr(vision, name) is not None for name in ("sam", "vit", "efficientnet")
        }
        self.cache = FeatureCache(self.folder, digest("vision", sizes, config.model.dtype, *frozen))
        self.keys = [
            digest(p["image"], p["image_mask"])
            for p in map(self.prepared.__getitem__, range(len(self.prepared)))
        ]
        # Those that the first process misses: another, which looks later, may find some that were written meanwhile.
        new = gather({key: i for i, key in enumerate(self.keys) if key not in self.cache})[0]

        @jax.jit
        def features(
            weights: nnx.State, image: UInt8[Array, "b H W 3"], valid: Bool[Array, "b H W"]
        ):
            model: R2SM = nnx.merge(graphdef, weights)
            return model.frozen_features(image, valid)

        def computed() -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
            mine = list(new)[process::processes]
            for start in range(0, len(mine), rows):
                keys = mine[start : start + rows]
                padded = [self.prepared[new[key]] for key in (keys * rows)[:rows]]
                images = (
                    np.stack([p["image"] for p in padded]),
                    np.stack([p["image_mask"] for p in padded]),
                )
                made = features(weights, *jax.device_put(images, sharding))
                arrays = [np.asarray(x, np.float32) for x in made if x is not None]
                yield from (
                    (key, tuple(to_float16(x[row]) for x in arrays)) for row, key in enumerate(keys)
                )

        one = self.prepared[0]
        spec = jax.eval_shape(features, weights, one["image"][None], one["image_mask"][None])
        self.names = [f"frozen_{name}" for name, x in spec._asdict().items() if x is not None]
        if new:
            self.cache.make_room(
                "images", len(new), len(new) * sum(2 * x.size for x in spec if x is not None)
            )
            self.cache.add(computed())
        gather(None)
        self.cache.refresh()
        return len(new)


def _stem_is_frozen(vision: VisionConfig) -> bool:
    """Whether what reads the pixels, apart from a plain ViT, is frozen."""
    return vision.sam_frozen or (
        vision.efficientnet is not None and vision.efficientnet_frozen_to > 2
    )


def frozen_images(config: Config, prepared: PreparedSource) -> FrozenImages | None:
    """The features of training images that are kept; None without --data.cache-dir. Also None, with the reason and
    flags printed, if features change during training: no frozen encoder, or augmented images."""
    vision, data = config.model.vision, config.data
    if data.cache_dir is None:
        return None
    if not (_stem_is_frozen(vision) or (vision.vit is not None and vision.vit_frozen)):
        obstacle = "no image encoder is frozen (--model.vision.sam-frozen, --model.vision.vit, --model.vision.efficientnet)"
    elif data.mirror or data.crop < 1 or data.colour_jitter:
        obstacle = "images are augmented (--data.no-mirror --data.crop 1 --data.colour-jitter 0)"
    else:
        return FrozenImages(Path(data.cache_dir), prepared)
    print(f"--data.cache-dir: image features are not cached, since {obstacle}", flush=True)
    return None
