"""Several processes of one command and several devices: how they connect, talk and share arrays.

    running               connects processes; if one ends with an error, all do
    allgather, barrier    what processes tell each other, by jax.experimental.multihost_utils
    make_mesh, shardings  which device holds which part of an array
    place, shard_batch    arrays of the host -> arrays on the devices; to_host goes back

Every process runs the same command with its own `--distributed.process`, or with
`--distributed.detect` under a launcher. With one process, nothing here does anything special.
"""

import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any, NoReturn, TypeVar

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
PIECE_BYTES = 64 << 20
"""Values that processes exchange travel in pieces. Every device holds the pieces of all processes
at once, which together have at most this size."""
HEARTBEAT_SECONDS = 30
"""JAX ends all processes when one was silent for so long."""
SHUTDOWN_SECONDS = 600
"""The first process may write its report for so long after the others are done."""
VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
"""Environment variables that stand for flags which are not given."""
FLAGS = ", ".join(f"--distributed.{name}" for name in VARIABLES)
LAUNCHERS = {"SLURM_STEP_NODELIST": "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
"""A variable that a launcher sets in each of its processes -> the one with their number."""
LOST = re.compile("gloo|nccl|connection|heartbeat|coordination service|barrier", re.IGNORECASE)
"""Words in JAX's messages when another process is gone."""


# Connecting and ending


@contextmanager
def running(config: ProcessConfig) -> Iterator[None]:
    """Connects this process with the others; in the block, only the first process prints.

    It must be entered before any device is used. If one process ends with an error, all do: those
    that wait for it notice a closed connection, or its silence after `HEARTBEAT_SECONDS`.

    Raises InputError for settings that are incomplete or impossible.
    """
    if not _connect(config):
        yield
        return
    try:
        with nullcontext() if is_main_process() else _say_nothing():
            yield
        jax.distributed.shutdown()
    except BaseException as error:
        _end(error)


@contextmanager
def _say_nothing() -> Iterator[None]:
    """Drops what the block prints, and the phases that it shows. Errors are still said."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _connect(config: ProcessConfig) -> bool:
    """Connects this process with the others. Returns whether there are others."""
    settings = _read_settings(config)
    if not config.detect:
        if all(value is None for value in settings.values()):
            _check_launched_alone()
            return False
        _check_settings(settings)
    _initialize(config, settings)
    return jax.process_count() > 1


def _read_settings(config: ProcessConfig) -> dict[str, Any]:
    """Reads coordinator, processes and process from the flags, or else from the environment."""
    settings = {}
    for name, variable in VARIABLES.items():
        value = getattr(config, name)
        text = os.environ.get(variable)
        if value is None and text:
            if name != "coordinator" and not text.isdigit():
                raise InputError(f"{variable} is {text!r} in the environment; give a number there")
            value = text if name == "coordinator" else int(text)
        settings[name] = value
    return settings


def _check_launched_alone() -> None:
    """Raises InputError if a launcher started several processes that would all train alone."""
    for mark, variable in LAUNCHERS.items():
        if mark in os.environ and os.environ.get(variable, "1") != "1":
            raise InputError(
                f"a launcher started {os.environ[variable]} of these processes ({variable}), "
                "which would not know of one another; add --distributed.detect, or start one"
            )


def _check_settings(settings: dict[str, Any]) -> None:
    """Raises InputError if a setting is missing or impossible."""
    missing = [f"--distributed.{name}" for name, value in settings.items() if value is None]
    if missing:
        raise InputError(
            f"several processes need all of {FLAGS}; give {', '.join(missing)} as well"
        )
    host = settings["coordinator"]
    process = settings["process"]
    count = settings["processes"]
    if not re.fullmatch(r".+:\d+", host):
        raise InputError(f"--distributed.coordinator {host}: give HOST:PORT of the first process")
    if not 0 <= process < count:
        raise InputError(
            f"--distributed.process {process} of {count} processes; give one from 0 to {count - 1}"
        )


def _initialize(config: ProcessConfig, settings: dict[str, Any]) -> None:
    """Calls `jax.distributed.initialize`, and checks that all processes have as many devices."""
    # JAX would catch SIGTERM with its own service, which ends no process before training begins.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            settings["coordinator"],
            settings["processes"],
            settings["process"],
            local_device_ids=list(range(config.local_devices)) or None,
            cluster_detection_method=None if config.detect else "deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        where = "as --distributed.detect says"
        if not config.detect:
            where = f"at {settings['coordinator']}"
        raise InputError(
            f"the processes could not connect {where} ({_first_line(error)}); start all of them "
            f"within five minutes, with a free port of the first one's host, or give {FLAGS}"
        ) from error
    if jax.device_count() != jax.process_count() * jax.local_device_count():
        raise InputError(
            f"this process has {jax.local_device_count()} of {jax.device_count()} devices; give "
            "every process as many (--distributed.local-devices)"
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def _end(error: BaseException) -> NoReturn:
    """Ends this process with the exit code and the message that `cli_main` would give.

    At once: Python's own way out would wait for the other processes, which wait for this one.
    """
    if isinstance(error, (ValueError, RuntimeError)) and LOST.search(str(error)):
        error = InputError(
            f"process {jax.process_index()} of {jax.process_count()} lost another one, whose "
            f"output says why ({_first_line(error)}); start all again, with --resume where a "
            "checkpoint was saved"
        )

    if isinstance(error, SystemExit):
        code = int(error.code or 0)
    else:
        code = print_error(error)
    if code is None:
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# What processes tell each other. All of them must make these calls, in the same order.


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def allgather(value: T) -> list[T]:
    """Returns the values that all processes give, in the order of the processes.

    A value may be anything that pickle takes, of any size.
    """
    if jax.process_count() == 1:
        return [value]
    content = pickle.dumps(value)
    # Sizes as pieces and rest: JAX's integers have 32 bits, which end at 2 GiB.
    size = np.array(divmod(len(content), PIECE_BYTES), np.int32)
    pieces_and_rests = multihost_utils.process_allgather(size)  # [processes 2]
    sizes = [int(pieces) * PIECE_BYTES + int(rest) for pieces, rest in pieces_and_rests]

    contents = [bytearray() for _ in sizes]
    piece_bytes = max(1, PIECE_BYTES // jax.process_count())
    for start in range(0, max(sizes), piece_bytes):
        # Rows must have one length, so processes with less to say pad theirs.
        length = min(piece_bytes, max(sizes) - start)
        piece = np.frombuffer(content[start : start + length], np.uint8)
        piece = np.pad(piece, (0, length - piece.size))
        rows = multihost_utils.process_allgather(piece)  # [processes length]
        for received, row, num_bytes in zip(contents, rows, sizes, strict=True):
            received += row[: max(0, num_bytes - start)].tobytes()
    return [pickle.loads(received) for received in contents]


def barrier() -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("barrier")


def run_on_main(function: Callable[[], T]) -> T:
    """Calls a function in the first process only, and returns its result in all.

    An InputError of the function is raised in all processes.
    """
    result: Any = None
    problem = ""
    if is_main_process():
        try:
            result = function()
        except InputError as error:
            problem = str(error)
    result, problem = allgather((result, problem))[0]
    if problem:
        raise InputError(problem)
    return result


def check_same_config(settings: dict[str, Any]) -> None:
    """Raises InputError, which names the setting, unless all processes have the same settings."""
    for process, others in enumerate(allgather(settings)):
        for name, value in settings.items():
            if others[name] != value:
                raise InputError(
                    f"{name} is {others[name]} in process {process} and {value} in process "
                    f"{jax.process_index()}; give all processes the same flags"
                )


class AnyProcess:
    """Tells all processes, one call later, that one of them has raised a flag.

    The answer is that of the call before, so no device waits for it, and all processes learn of a
    flag in the same step.
    """

    def __init__(self, mesh: Mesh):
        self._rows = row_sharding(mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._any = jax.jit(lambda flags: flags.any(), out_shardings=everywhere)
        self._pending: jax.Array | None = None

    def __call__(self, flag: bool) -> bool:
        """Gives this process's flag; returns whether any was raised at the call before."""
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
    devices = loop.devices
    shares = devices * loop.accumulate
    if devices > jax.device_count():
        raise InputError(
            f"--train.devices {devices}: this machine has {jax.device_count()}; give fewer"
        )
    if jax.process_count() > 1 and devices != jax.device_count():
        raise InputError(
            f"--train.devices {devices}: several processes use all {jax.device_count()} devices; "
            "give 0"
        )
    if devices % fsdp:
        raise InputError(
            f"--distributed.fsdp {fsdp} does not divide the {devices} devices; give a number that "
            "does"
        )
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
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
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


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Where the rows of a batch lie: an equal share on each device."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """Makes the global batch of the rows that each process has."""
    make = partial(jax.make_array_from_process_local_data, row_sharding(mesh))
    return jax.tree.map(make, batch)


def to_host(array: Any) -> Any:
    """Brings an array that lies in several processes to this one as a numpy array.

    Arrays of this process are returned as they are. All processes must make this call.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return array
    if is_sharded_across_processes(array):
        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def is_sharded_across_processes(array: Any) -> bool:
    """Whether an array lies in parts in several processes."""
    if not isinstance(array, jax.Array):
        return False
    return not (array.is_fully_addressable or array.is_fully_replicated)
