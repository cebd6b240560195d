"""Prints what a training step needs: `python scripts/estimate.py [CONFIG.py] [--devices N]`.

Parameters, memory per device and FLOPs come from shapes alone: no weights are made, no model is
run, no data is opened. XLA compiles the step of train.py and analyses it, for this machine, or with
--devices N for a CPU that imitates N devices (--distributed.fsdp M divides large weights among M of
them). Weights and optimizer are exact. Temporaries are only a guide: a GPU's compiler fuses other
operations, and a CPU's widens bfloat16. Compiling SAM-B takes minutes.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from r2sm_jax.cli import cli_main, parse_config
from r2sm_jax.config import Config
from r2sm_jax.data.batches import NUM_TYPE_SENTENCES
from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import find_model
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.models.pretrained import fill_sizes
from r2sm_jax.models.text_encoder import abstract_text_encoder
from r2sm_jax.synthetic.sources import open_source
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.run_folder import resolve_auto
from r2sm_jax.training.sharding import AXES, make_mesh, shardings
from r2sm_jax.training.step import abstract_state, jit_train_step

QUERY_TOKENS = 26
"""Tokens that 99 % of the queries of `scenes` do not exceed; training pads to them."""
TYPE_TOKENS = 42
"""The same for sentences without an image."""
VOCABULARY = {"category": 100}
"""Group -> number of names, for data other than scenes, which is not opened here. Other numbers
hardly change the figures."""
KEEP_REMAT = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""Keeps the barriers of rematerialisation. XLA's CPU back end removes them early, and then computes
only once what should be computed again to save memory; other back ends keep them longer."""


def vocabulary(config: Config) -> dict[str, int]:
    """Returns group -> number of names that pixels are compared with."""
    if config.data.source != "scenes":
        return VOCABULARY
    source = open_source("scenes", "train", count=1)
    return {group: len(names) for group, names in source.vocabulary.items()}


def batch_shapes(config: Config) -> dict[str, Any]:
    """Returns the shapes of a training batch, as data/batches.py lists them."""
    b = config.train.batch_size
    k = config.data.queries
    m = config.data.instances
    size = config.model.vision.image_size
    mask = config.model.mask_size
    slots = config.model.decoder.slots
    text = config.model.text
    t = min(QUERY_TOKENS, text.max_tokens)
    type_t = min(TYPE_TOKENS, text.max_tokens)

    # Name -> shape of one row, and type.
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "image": ((size, size, 3), jnp.uint8),
        "image_mask": ((size, size), jnp.bool_),
        "modal": ((m, mask, mask), jnp.uint8),
        "amodal": ((m, mask, mask), jnp.uint8),
        "has_amodal": ((m,), jnp.bool_),
        "boxes": ((m, 4), jnp.float32),
        "pixel_weight": ((mask, mask), jnp.uint8),
        "query_instances": ((k, m), jnp.bool_),
        "slot_targets": ((k, slots), jnp.int32),
        "is_amodal": ((k,), jnp.bool_),
        "query_mask": ((k,), jnp.bool_),
        "text": ((k, t, len(text.layers), text.dim), jnp.float16),
        "text_mask": ((k, t), jnp.bool_),
        "index": ((), jnp.int32),
    }
    if config.model.head in LEARNED:
        f = NUM_TYPE_SENTENCES
        shapes |= {
            "type_text": ((f, type_t, len(text.layers), text.dim), jnp.float16),
            "type_text_mask": ((f, type_t), jnp.bool_),
            "type_is_amodal": ((f,), jnp.bool_),
            "type_valid": ((f,), jnp.bool_),
        }

    batch: dict[str, Any] = {}
    for name, (shape, dtype) in shapes.items():
        batch[name] = jax.ShapeDtypeStruct((b, *shape), dtype)
    labels = jax.ShapeDtypeStruct((b, m), jnp.int32)
    batch["labels"] = dict.fromkeys(vocabulary(config), labels)
    return batch


def estimate(config: Config) -> Iterator[tuple[str, str]]:
    """Yields names and figures, as soon as each is known.

    Raises InputError if the batch does not divide by the devices and parts.
    """
    config = resolve_auto(config)
    config = replace(config, model=fill_sizes(config.model))
    mesh = make_mesh(config.train, config.distributed.fsdp)

    # Weights.
    graphdef, state, constants = abstract_state(config)
    yield "trainable parameters", f"{count(state.params):,}"
    text_name = config.model.text.name
    try:
        language_model = abstract_text_encoder(find_model(text_name, "--model.text.name"))
        yield f"frozen: {text_name}", f"{count(language_model):,}"
    except InputError as error:
        yield f"frozen: {text_name}", f"not counted: {error}"

    # Inputs of the step, divided among devices as in training.
    embeddings = {}
    for group, num_names in vocabulary(config).items():
        embeddings[group] = jax.ShapeDtypeStruct((num_names, config.model.text.dim), jnp.float32)
    state = shard_shapes(state, shardings(mesh, state))
    constants = shard_shapes(constants, shardings(mesh, constants))
    embeddings = shard_shapes(embeddings, shardings(mesh, embeddings))
    yield "weights and optimizer a device", gigabytes(bytes_a_device((state, constants)))

    batch = batch_shapes(config)
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    batch = shard_shapes(batch, jax.tree.map(lambda _: rows, batch))
    inputs = (state, constants, batch, embeddings)

    # FLOPs. XLA counts the body of a loop once, so they are those of a step without accumulation.
    optimizer = make_optimizer(config.optimizer, config.train.steps, config.train.matmul_precision)
    in_one_part = replace(config, train=replace(config.train, accumulate=1))
    lowered = jit_train_step(graphdef, optimizer, in_one_part, state).lower(*inputs)
    flops = count_flops(lowered)
    yield "FLOPs a step, all devices", f"{flops:.3g}"
    yield "FLOPs of the run", f"{flops * config.train.steps:.3g} in {config.train.steps:,} steps"

    # Memory.
    lowered = jit_train_step(graphdef, optimizer, config, state).lower(*inputs)
    memory = lowered.compile(compiler_options=KEEP_REMAT).memory_analysis()
    yield "devices", f"{mesh.size}, {config.train.batch_size // mesh.size} images each"
    yield "arguments a device (weights, optimizer, batch)", gigabytes(memory.argument_size_in_bytes)
    yield "activations and other temporaries a device", gigabytes(memory.temp_size_in_bytes)
    # Outputs take the place of arguments that are given away (aliases).
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + new_outputs
    yield "in all a device, without the language model", gigabytes(peak)


def count_flops(lowered: Any) -> float:
    """Returns the FLOPs that XLA counts before it optimises, or after it."""
    # For a GPU, XLA counts nothing before it compiles.
    analysis = lowered.cost_analysis() or lowered.compile().cost_analysis()
    if isinstance(analysis, list):
        analysis = analysis[0]
    return float(analysis["flops"])


def count(tree: Any) -> int:
    """Counts the numbers in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def bytes_a_device(tree: Any) -> int:
    """Counts the bytes that one device holds of shapes that have shardings."""
    num_bytes = 0
    for leaf in jax.tree.leaves(tree):
        part = leaf.sharding.shard_shape(leaf.shape)
        num_bytes += math.prod(part) * leaf.dtype.itemsize
    return num_bytes


def shard_shapes(tree: Any, shardings_of_leaves: Any) -> Any:
    """Gives each shape in a tree its sharding."""

    def shard(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shard, tree, shardings_of_leaves)


def gigabytes(num_bytes: int) -> str:
    """Formats a number of bytes."""
    return f"{num_bytes / 1e9:.3g} GB"


def take_devices(args: list[str]) -> tuple[list[str], int | None]:
    """Takes `--devices N` out of the arguments; returns the others and N.

    Raises InputError if N is not a number of devices.
    """
    others = []
    devices = None
    remaining = iter(args)
    for arg in remaining:
        name, _, value = arg.partition("=")
        if name != "--devices":
            others.append(arg)
            continue
        if "=" not in arg:
            value = next(remaining, "nothing")
        if not value.isdigit() or int(value) < 1:
            raise InputError(f"--devices {value}: give a number of devices, at least 1")
        devices = int(value)
    return others, devices


def main() -> None:
    """Command line."""
    args, devices = take_devices(sys.argv[1:])
    config = parse_config(args)
    if devices is not None:
        # Before any device is used: JAX chooses its devices once.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    for name, figure in estimate(config):
        print(f"{name}: {figure}", flush=True)


if __name__ == "__main__":
    cli_main(main)
