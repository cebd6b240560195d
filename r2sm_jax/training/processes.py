"""Several processes of one training and several devices: how they connect, talk and share arrays.

Every process runs the same command with its own `--distributed.process`, or with
`--distributed.detect` under a launcher. With one process, nothing here does anything special.
"""

import os
import pickle
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from r2sm_jax.cli import print_error
from r2sm_jax.config import LoopConfig, ProcessConfig
from r2sm_jax.errors import InputError

T = TypeVar("T")
AXES = ("data", "fsdp")
"""Axes of the mesh. The rows of a batch are divided among both, large weights along the second."""
LARGE_BYTES = 4 << 20
"""Smaller arrays are whole on every device: to collect their parts would take longer than it saves
memory."""
SHUTDOWN_SECONDS = 600
"""The first process may write its report for so long after the others are done."""
LAUNCHERS = {"SLURM_STEP_NODELIST": "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
"""A variable that a launcher sets in each of its processes -> the one with their number."""


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""There is an NVIDIA GPU where this file exists."""


def describe_devices() -> str:
    """Names the devices that JAX uses, and warns of a GPU that it does not use.

    Raises InputError if JAX has none of those that JAX_PLATFORMS asks for.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"JAX finds no device ({error}); take JAX_PLATFORMS away, or install JAX for that "
            "device, for an NVIDIA GPU with pip install -e '.[cuda]'"
        ) from error
    kinds = Counter(device.device_kind for device in devices)
    line = "devices: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if devices[0].platform == "cpu" and NVIDIA_DRIVER.exists():
        line += "\nwarning: JAX does not use the GPU; pip install -e '.[cuda]' (docs/scale.md)"
    return line


# Connecting and ending


@contextmanager
def running(config: ProcessConfig) -> Iterator[None]:
    """Connects this process with the others; in the block, only the first process prints.

    It must be entered before any device is used. If one process ends with an error, all do. Raises
    InputError for processes of a launcher that would not know of one another.
    """
    _connect(config)
    if jax.process_count() == 1:
        yield
        return
    try:
        if is_main_process():
            yield
        else:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                yield
        jax.distributed.shutdown()
    except BaseException as error:
        code = int(error.code or 0) if isinstance(error, SystemExit) else print_error(error)
        if code is None:
            traceback.print_exception(error)
        sys.stderr.flush()
        # At once: Python's own way out would wait for the other processes, which wait for this one.
        os._exit(1 if code is None else code)


def _connect(config: ProcessConfig) -> None:
    """Connects this process with the others, if flags or JAX's environment variables say so."""
    flags = (config.coordinator, config.processes, config.process)
    in_environment = "JAX_COORDINATOR_ADDRESS" in os.environ
    if not config.detect and not in_environment and flags == (None, None, None):
        for mark, variable in LAUNCHERS.items():
            if mark in os.environ and os.environ.get(variable, "1") != "1":
                raise InputError(
                    f"a launcher started {os.environ[variable]} of these processes ({variable}), "
                    "which would not know of one another; add --distributed.detect, or start one"
                )
        return
    # JAX would catch SIGTERM with its own service, which ends no process before training begins.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        *flags,
        local_device_ids=list(range(config.local_devices)) or None,
        cluster_detection_method=None if config.detect else "deactivate",
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )


# What processes tell each other. All of them must make these calls, in the same order.


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def broadcast(value: T) -> T:
    """Returns the value of the first process, anything that pickle takes, in all of them."""
    if jax.process_count() == 1:
        return value
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(content), np.int32)))
    buffer = content if is_main_process() else np.zeros(size, np.uint8)
    return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())


def run_on_main(function: Callable[[], T]) -> T:
    """Calls a function in the first process only, and returns its result in all.

    An InputError of the function is raised in all processes.
    """
    result: Any = None
    if is_main_process():
        try:
            result = function()
        except InputError as error:
            result = error
    result = broadcast(result)
    if isinstance(result, InputError):
        raise result
    return result


def check_same(settings: dict[str, Any]) -> None:
    """Raises InputError, which names the setting, unless all processes have the same settings."""
    for name, value in broadcast(settings).items():
        if settings[name] != value:
            raise InputError(
                f"{name} is {settings[name]} in process {jax.process_index()} and {value} in the "
                "first; give all processes the same flags"
            )


class AnyProcess:
    """Tells all processes, one call later, that one of them has raised a flag.

    The answer is that of the call before, so no device waits for it, and all processes learn of a
    flag in the same step.
    """

    def __init__(self) -> None:
        mesh = Mesh(np.array(jax.devices()), AXES[:1])
        self._rows = NamedSharding(mesh, PartitionSpec(AXES[0]))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._any = jax.jit(lambda flags: flags.any(), out_shardings=everywhere)
        self._pending: jax.Array | None = None

    def __call__(self, flag: bool) -> bool:
        """Takes this process's flag; returns whether any was raised at the call before."""
        if jax.process_count() == 1:
            return flag
        flags = np.full(jax.local_device_count(), flag)
        previous = self._pending
        self._pending = self._any(jax.make_array_from_process_local_data(self._rows, flags))
        return previous is not None and bool(previous)


# Where arrays lie


def make_mesh(loop: LoopConfig, fsdp: int = 1) -> Mesh:
    """Makes the mesh of devices `[data fsdp]`.

    Args:
        loop: a resolved configuration, which says how many devices there are in all.
        fsdp: number of devices among which large weights are divided.

    Raises InputError if there are not so many devices, several processes would not use all of
    theirs, or the batch does not divide evenly among devices and parts.
    """
    devices, total = loop.devices, jax.device_count()
    if devices > total or devices % fsdp or (jax.process_count() > 1 and devices != total):
        raise InputError(
            f"--train.devices {devices}, --distributed.fsdp {fsdp}: there are {total} devices; use "
            "no more, with several processes all, and as many as --distributed.fsdp divides"
        )
    shares = devices * loop.accumulate
    if loop.batch_size % shares:
        raise InputError(
            f"--train.batch-size {loop.batch_size} does not divide by the {devices} devices and "
            f"the {loop.accumulate} parts of --train.accumulate; give a multiple of {shares}"
        )
    return jax.make_mesh(
        (devices // fsdp, fsdp),
        AXES,
        # XLA chooses where intermediate values lie.
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:devices],
    )


def shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """Returns the sharding of each array or shape in a tree of weights.

    Arrays of `LARGE_BYTES` or more are divided among `fsdp`, along the largest axis that this
    number divides. Others are whole on every device.
    """
    num_parts = mesh.shape["fsdp"]

    def choose(array: Any) -> NamedSharding:
        divisible = [axis for axis, size in enumerate(array.shape) if size % num_parts == 0]
        num_bytes = array.size * array.dtype.itemsize
        if num_parts == 1 or num_bytes < LARGE_BYTES or not divisible:
            return NamedSharding(mesh, PartitionSpec())
        largest = max(divisible, key=lambda axis: array.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * largest, "fsdp"))

    return jax.tree.map(choose, tree)


def place(mesh: Mesh, tree: Any) -> Any:
    """Puts arrays that every process has on the devices, with their `shardings`."""

    def put(array: Any, sharding: NamedSharding) -> jax.Array:
        # Each process gives the parts that its own devices hold.
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings(mesh, tree))


def shard_locally(parts: int, tree: Any) -> Any:
    """Divides weights among up to `parts` devices of this process.

    For computations that each process does for itself, such as encoding its sentences.
    """
    count = min(parts, jax.local_device_count())
    if count == 1:
        return tree
    mesh = Mesh(np.array(jax.local_devices()[:count]).reshape(1, count), AXES)
    return jax.device_put(tree, shardings(mesh, tree))


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """Makes the global batch of the rows that each process has: an equal share on each device."""
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    return jax.tree.map(partial(jax.make_array_from_process_local_data, rows), batch)


def to_host(tree: Any) -> Any:
    """Brings arrays that lie in several processes to each of them; those of one process stay where
    they are."""
    if jax.process_count() == 1:
        return tree
    return multihost_utils.process_allgather(tree, tiled=True)
