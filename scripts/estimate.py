"""What a training step of a configuration needs: `python scripts/estimate.py [CONFIG.py] [--flags]
[--devices N]`.

Prints parameters, memory per device and FLOPs. XLA gives them for the compiled step
(`compile().memory_analysis()`, `lower().cost_analysis()`) from shapes alone: no weights are made,
no model is run, no data is opened. The step is that of `train.py`, with its parts of a batch and
its products, compiled for this machine, or with --devices N for a CPU that imitates N devices
(--distributed.fsdp M divides large weights among M of them). A GPU's compiler fuses other
operations, and a CPU's widens bfloat16, so the memory is only a guide; weights and optimizer are
exact. Compiling SAM-B takes minutes.
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
from r2sm_jax.data.sources import open_source
from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import find_model
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.models.pretrained import read_encoder_sizes
from r2sm_jax.models.text_encoder import abstract_text_encoder
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.run_folder import resolve_auto
from r2sm_jax.training.sharding import AXES, make_mesh, shardings
from r2sm_jax.training.step import abstract_state, jit_train_step

QUERY_TOKENS, TYPE_TOKENS = 26, 42
"""What 99 % of the queries of `scenes` do not exceed, and of the sentences about anything: training
pads to these."""
VOCABULARY = {"category": 100}
"""Group -> number of names that pixels are compared with, for data that is not opened here. Other
numbers hardly change the figures."""

KEEP_REMAT = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""XLA's CPU back end removes early the barriers around what is computed again, and then computes it
only once; other back ends keep them longer."""


def vocabulary(config: Config) -> dict[str, int]:
    """Group -> number of names that pixels are compared with."""
    if config.data.source != "scenes":
        return VOCABULARY
    return {
        group: len(names)
        for group, names in open_source("scenes", "train", count=1).vocabulary.items()
    }


def batch_shapes(config: Config) -> dict[str, Any]:
    """Shapes of a training batch (data/batches.py, `ExampleBuilder`)."""
    b, k, m = config.train.batch_size, config.data.queries, config.data.instances
    size, mask = config.model.vision.image_size, config.model.mask_size
    text, slots = config.model.text, config.model.decoder.slots
    t, type_t = (min(tokens, text.max_tokens) for tokens in (QUERY_TOKENS, TYPE_TOKENS))
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
    batch: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((b, *shape), kind) for name, (shape, kind) in shapes.items()
    }
    return batch | {
        "labels": {group: jax.ShapeDtypeStruct((b, m), jnp.int32) for group in vocabulary(config)}
    }


def estimate(config: Config) -> Iterator[tuple[str, str]]:
    """Names and figures, as they come.

    Raises:
        InputError: the batch does not divide by the devices and parts.
    """
    config = resolve_auto(config)
    sizes = read_encoder_sizes(config.model, use_table=True)
    mesh = make_mesh(config.train, config.distributed.fsdp)
    graphdef, state, constants = abstract_state(config, sizes)
    yield "trainable parameters", f"{count(state.params):,}"
    try:
        language_model = abstract_text_encoder(
            find_model(config.model.text.name, "--model.text.name")
        )
        yield f"frozen: {config.model.text.name}", f"{count(language_model):,}"
    except InputError as error:
        yield f"frozen: {config.model.text.name}", f"not counted: {error}"

    optimizer = make_optimizer(config.optimizer, config.train.steps, config.train.matmul_precision)
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    width = config.model.text.dim
    names = {
        g: jax.ShapeDtypeStruct((size, width), jnp.float32)
        for g, size in vocabulary(config).items()
    }
    state, constants, names = (
        placed(tree, shardings(mesh, tree)) for tree in (state, constants, names)
    )
    yield "weights and optimizer a device", gigabytes(bytes_a_device((state, constants)))
    batch = batch_shapes(config)
    arguments = (state, constants, placed(batch, jax.tree.map(lambda _: rows, batch)), names)
    # The cost analysis counts the body of a loop once, so FLOPs are those of the step without
    # accumulation.
    whole = replace(config, train=replace(config.train, accumulate=1))
    flops = flops_of(jit_train_step(graphdef, optimizer, whole, state).lower(*arguments))
    yield "FLOPs a step, all devices", f"{flops:.3g}"
    yield "FLOPs of the run", f"{flops * config.train.steps:.3g} in {config.train.steps:,} steps"
    step = jit_train_step(graphdef, optimizer, config, state)
    memory = step.lower(*arguments).compile(compiler_options=KEEP_REMAT).memory_analysis()
    yield "devices", f"{mesh.size}, {config.train.batch_size // mesh.size} images each"
    yield "arguments a device (weights, optimizer, batch)", gigabytes(memory.argument_size_in_bytes)
    yield "activations and other temporaries a device", gigabytes(memory.temp_size_in_bytes)
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
    yield "in all a device, without the language model", gigabytes(peak)


def flops_of(lowered: Any) -> float:
    """The FLOPs that XLA counts: before it optimises, or after it where only that is counted."""
    # For a GPU, XLA counts nothing before it compiles.
    analysis = lowered.cost_analysis() or lowered.compile().cost_analysis()
    return float((analysis[0] if isinstance(analysis, list) else analysis)["flops"])


def count(tree: Any) -> int:
    """Numbers in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def bytes_a_device(tree: Any) -> int:
    """What one device holds of shapes that have shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def placed(tree: Any, where: Any) -> Any:
    """The same shapes, spread over the devices as `where` says for each of them."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, where
    )


def gigabytes(size: int) -> str:
    """A number of bytes, for people."""
    return f"{size / 1e9:.3g} GB"


def take_devices(args: list[str]) -> tuple[list[str], int | None]:
    """The arguments without `--devices N`, and N.

    Raises:
        InputError: N is not a number of devices.
    """
    args = [
        part
        for arg in args
        for part in (arg.split("=", 1) if arg.startswith("--devices=") else [arg])
    ]
    if "--devices" not in args:
        return args, None
    at = args.index("--devices")
    value = (args[at + 1 : at + 2] or ["nothing"])[0]
    if not value.isdigit() or int(value) < 1:
        raise InputError(f"--devices {value}: give a number of devices, at least 1")
    return args[:at] + args[at + 2 :], int(value)


def main() -> None:
    args, devices = take_devices(sys.argv[1:])
    config = parse_config(args)
    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    for name, figure in estimate(config):
        print(f"{name}: {figure}", flush=True)


if __name__ == "__main__":
    cli_main(main)
