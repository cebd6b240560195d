"""Several processes of one command, on one machine or many: they connect, agree, share results, and
end together.

`jax.distributed` connects them. Every process runs the same command with its own
`--distributed.process`, or with `--distributed.detect` under a launcher. The functions below do
nothing special where there is one process only.
"""

import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from r2sm_jax.config import LoopConfig, ProcessConfig
from r2sm_jax.errors import InputError, cli_main

T = TypeVar("T")
AXES = ("data", "fsdp")
"""Axes of the mesh. The rows of a batch are divided among both, large weights along the second."""
LARGE_BYTES = 4 << 20
"""Smaller arrays are whole on every device: to collect their parts would take longer than it saves
memory."""
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
"""What a launcher's processes have in their environment, and where the number of processes stands.
"""
LOST = re.compile("gloo|nccl|connection|heartbeat|coordination service|barrier", re.IGNORECASE)
"""In the messages of JAX when another process is gone."""


@contextmanager
def running(config: ProcessConfig) -> Iterator[None]:
    """Connects this process with the others before any device is used. In the block only the first
    process prints.

    If one process ends with an error, all do: those that wait for it notice a closed connection, or
    its silence after `HEARTBEAT_SECONDS`. Raises InputError for settings that are incomplete or
    impossible.
    """
    if not _connect(config):
        yield
        return
    printed = sys.stdout
    try:
        if not is_main_process():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open for as long as the process prints
        yield
        jax.distributed.shutdown()
    except BaseException as error:
        _end(error)
    finally:
        sys.stdout = printed


def _connect(config: ProcessConfig) -> bool:
    """Whether there are several processes, which are now connected."""
    given = {name: getattr(config, name) for name in VARIABLES}
    for name, variable in VARIABLES.items():
        if given[name] is None and (value := os.environ.get(variable)):
            if name != "coordinator" and not value.isdigit():
                raise InputError(f"{variable} is {value!r} in the environment; give a number there")
            given[name] = value if name == "coordinator" else int(value)
    missing = [f"--distributed.{name}" for name, value in given.items() if value is None]
    if not config.detect and len(missing) == len(given):
        for mark, variable in LAUNCHERS.items():
            if mark in os.environ and os.environ.get(variable, "1") != "1":
                raise InputError(
                    f"a launcher started {os.environ[variable]} of these processes ({variable}), "
                    "which would not know "
                    "of one another; add --distributed.detect, or start one"
                )
        return False
    if not config.detect:
        if missing:
            raise InputError(
                f"several processes need all of {FLAGS}; give {', '.join(missing)} as well"
            )
        host, process, count = given["coordinator"], given["process"], given["processes"]
        if not re.fullmatch(r".+:\d+", host):
            raise InputError(
                f"--distributed.coordinator {host}: give HOST:PORT of the first process"
            )
        if not 0 <= process < count:
            raise InputError(
                f"--distributed.process {process} of {count} processes; give one from 0 to "
                f"{count - 1}"
            )
    _initialize(config, given)
    return jax.process_count() > 1


def _initialize(config: ProcessConfig, given: dict[str, Any]) -> None:
    # JAX would catch SIGTERM with its own service, which ends no process before training begins.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            given["coordinator"],
            given["processes"],
            given["process"],
            local_device_ids=list(range(config.local_devices)) or None,
            cluster_detection_method=None if config.detect else "deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        where = "as --distributed.detect says" if config.detect else f"at {given['coordinator']}"
        raise InputError(
            f"the processes could not connect {where} ({_first_line(error)}); start all of them "
            "within five minutes, "
            f"with a free port of the first one's host, or give {FLAGS}"
        ) from error
    if jax.device_count() != jax.process_count() * jax.local_device_count():
        counts = f"{jax.local_device_count()} of {jax.device_count()}"
        raise InputError(
            f"this process has {counts} devices; give every process as many "
            "(--distributed.local-devices)"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _end(error: BaseException) -> NoReturn:
    """Ends this process at once, without JAX's wait for the others, which wait for this one."""
    if isinstance(error, (ValueError, RuntimeError)) and LOST.search(str(error)):
        me, count = jax.process_index(), jax.process_count()
        error = InputError(
            f"process {me} of {count} lost another one, whose output says why "
            f"({_first_line(error)}); start all "
            "again, with --resume where a checkpoint was saved"
        )

    def fail() -> None:
        raise error

    try:
        cli_main(fail)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


# What processes tell each other. Each of these must be called by all of them, in the same order.


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def allgather(value: T) -> list[T]:
    """The values that all processes give, in their order. They travel pickled, between processes of
    one command."""
    if jax.process_count() == 1:
        return [value]
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([content.size], np.int32))[:, 0]
    rows = multihost_utils.process_allgather(np.pad(content, (0, sizes.max() - content.size)))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def barrier() -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("barrier")


def run_on_main(function: Callable[[], T]) -> T:
    """What the function gives in the first process, which alone calls it. Its InputError is raised
    in all."""
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
    """Raises InputError, which names the setting, unless all processes have the same."""
    for process, others in enumerate(allgather(settings)):
        for name, value in settings.items():
            if others[name] != value:
                raise InputError(
                    f"{name} is {others[name]} in process {process} and {value} in process "
                    f"{jax.process_index()}; give "
                    "all processes the same flags"
                )


class AnyProcess:
    """Whether any process has raised a flag, one call later: so no device waits for the answer."""

    def __init__(self, mesh: Mesh):
        self._rows = NamedSharding(mesh, PartitionSpec(AXES))
        self._any = jax.jit(
            lambda flags: flags.any(), out_shardings=NamedSharding(mesh, PartitionSpec())
        )
        self._earlier: jax.Array | None = None

    def __call__(self, flag: bool) -> bool:
        """Of the flags at the call before; of this one where there is one process."""
        if jax.process_count() == 1:
            return flag
        flags = np.full(jax.local_device_count(), flag)
        earlier, self._earlier = (
            self._earlier,
            self._any(jax.make_array_from_process_local_data(self._rows, flags)),
        )
        return earlier is not None and bool(earlier)


# Where arrays lie.


def make_mesh(loop: LoopConfig, fsdp: int = 1) -> Mesh:
    """The devices of a resolved configuration along the axes `data` and `fsdp`, the second of
    length `fsdp`. Raises InputError if there are not so many devices, several processes would not
    use all of theirs, or the batch does not divide evenly among devices and parts."""
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
            f"the {loop.accumulate} "
            f"parts of --train.accumulate; give a multiple of {shares}"
        )
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(
        (devices // fsdp, fsdp), AXES, axis_types=auto, devices=jax.devices()[:devices]
    )


def shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """For each array or shape in a tree of weights: large ones are divided among `fsdp` along the
    largest axis that this number divides, others are whole on every device."""
    parts = mesh.shape["fsdp"]

    def of(array: Any) -> NamedSharding:
        fitting = [axis for axis, size in enumerate(array.shape) if size % parts == 0]
        if parts == 1 or array.size * array.dtype.itemsize < LARGE_BYTES or not fitting:
            return NamedSharding(mesh, PartitionSpec())
        axis = max(fitting, key=lambda axis: array.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))

    return jax.tree.map(of, tree)


def place(mesh: Mesh, tree: Any) -> Any:
    """Arrays that every process has, as global arrays with their `shardings`."""

    def put(array: Any, sharding: NamedSharding) -> jax.Array:
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings(mesh, tree))


def shard_locally(parts: int, tree: Any) -> Any:
    """Weights divided among up to `parts` devices of this process, which computes with them
    alone."""
    count = min(parts, jax.local_device_count())
    if count == 1:
        return tree
    mesh = Mesh(np.array(jax.local_devices()[:count]).reshape(1, count), AXES)
    return jax.device_put(tree, shardings(mesh, tree))


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """The global batch of which every process has its rows."""
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    return jax.tree.map(partial(jax.make_array_from_process_local_data, rows), batch)


def to_host(array: Any) -> Any:
    """An array that is not whole in this process, as a numpy array that is; others as they are."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return array
    return (
        multihost_utils.process_allgather(array, tiled=True)
        if is_sharded_across_processes(array)
        else np.asarray(array)
    )


def is_sharded_across_processes(array: Any) -> bool:
    """Whether an array lies in parts in several processes."""
    return isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    )
