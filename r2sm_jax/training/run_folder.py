"""Run folders: their configuration, their lock, checkpoints and logs.

    runs/20260102-030405/   config.json  model.safetensors  trained_on.txt  checkpoints/
                            metrics.jsonl  events.*  samples/  report.*
    runs/latest             points at the newest run that has a checkpoint

`config.json` holds all sizes, and with `model.safetensors`, the best weights so far, a run folder
is an export in the making (inference/load.py). `checkpoints/` is for `--resume` alone.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict
from orbax import checkpoint as ocp
from safetensors.numpy import save
from tensorboardX import SummaryWriter

import r2sm_jax
from r2sm_jax.cli import from_json, to_json
from r2sm_jax.config import FORMAT_VERSION, Config, DistributedConfig, LoopConfig
from r2sm_jax.errors import InputError, atomic_write, load_json, write_json
from r2sm_jax.models.hub import CONFIG, WEIGHTS, read_tensors
from r2sm_jax.models.matching import flat_weights
from r2sm_jax.models.matmul import choose_matmul_precision
from r2sm_jax.training.processes import is_main_process, run_on_main

if sys.platform != "win32":
    import fcntl

RUNS = Path("runs")
LATEST = RUNS / "latest"
MAY_CHANGE = {
    "run",
    "resume",
    "train.log_every",
    "train.checkpoint_every",
    "train.evaluate_every",
    "train.report_samples",
    "train.devices",
    "train.accumulate",
    "distributed.fsdp",
    "data.source",
    "data.images",
    "data.backgrounds",
    "data.cutouts",
    "data.workers",
    "language_model.name",
}
"""Fields that a resumed run may change: they change no parameter, or only by the order in which
numbers are added. Data may lie elsewhere, since their hash is compared."""
Inputs = Mapping[str, Mapping[str, Any]]
"""What else decides the result, by the names of config.json: hashes of the data and of the language
model."""
PRINTED_LOSSES = ("loss", "modal", "amodal", "slots", "type", "dense_category", "dense_hidden")


# The configuration


def resolve_auto(config: Config) -> Config:
    """Replaces what depends on this machine by what it uses: `auto`, 0 devices, and a link to the
    run that is started from, since a new run may move it.

    How processes connect is left out of the result, since it differs from process to process.
    """
    loop = config.train
    if loop.matmul_precision == "auto":
        precision = choose_matmul_precision()
        if loop.part != "segmenter" and precision == "bfloat16":
            # Completer and outliner have small layers: a step takes 1.8 s, with bfloat16 2.6 s.
            precision = "float32"
        loop = replace(loop, matmul_precision=precision)
    loop = replace(loop, devices=loop.devices or jax.device_count())
    init = config.init
    if init is not None and Path(init).is_symlink():
        init = str(Path(init).resolve())
    distributed = DistributedConfig(fsdp=config.distributed.fsdp)
    return replace(config, train=loop, init=init, distributed=distributed)


def read_config(folder: Path) -> Config:
    """Reads the configuration of a run or an export. Raises InputError if it is neither."""
    path = folder / CONFIG
    stored = load_json(path, "the configuration of a run")
    return from_json(Config, stored.get("config"), str(path))


def check_unchanged(folder: Path, config: Config, inputs: Inputs) -> None:
    """Raises InputError if a resumed run would go on with another configuration or other inputs.

    Fields of `MAY_CHANGE` are not compared.
    """
    stored = load_json(folder / CONFIG, "the configuration of a run")
    # A field that is newer than the run has its default there.
    before = flatten_dict(to_json(read_config(folder)), sep=".")
    before |= flatten_dict({kind: stored[kind] for kind in inputs}, sep=".")
    now = flatten_dict(to_json(config), sep=".") | flatten_dict(dict(inputs), sep=".")
    changes = [
        f"{name} ({before.get(name)} in the run, {value} now)"
        for name, value in now.items()
        if name not in MAY_CHANGE and before.get(name) != value
    ]
    if changes:
        # The rates of a run fall to zero at its last step, so more steps are another training.
        raise InputError(
            f"{folder} was trained with another configuration or other data: {'; '.join(changes)}; "
            f"use what it had, or start a new run from its weights with --init {folder}"
        )


# The folder


def find_run(config: Config) -> Path:
    """Returns the folder that `--resume` continues; a link is followed now, since a new run may
    move it."""
    return Path(config.run or LATEST).resolve()


def check_run_folder(config: Config) -> None:
    """Looks at the folder of a run before its data are opened, which takes minutes.

    Raises InputError for a new run in a folder that holds a run or a model of others, and for one
    to be continued whose checkpoints or best weights are gone or damaged.
    """
    folder = find_run(config)
    if not config.resume:
        if config.run is None:
            return
        if has_checkpoint(folder) or (folder / WEIGHTS).exists():
            raise InputError(
                f"{folder} holds a run already; continue it with --resume or give another --run"
            )
        path = folder / CONFIG
        if path.exists() and "r2sm_jax_version" not in load_json(path, "a configuration"):
            raise InputError(f"{path} is of another program; give another --run")
        return

    has_weights = "step" in load_json(folder / CONFIG, "the configuration of a run")
    if has_weights:
        try:
            read_tensors(folder / WEIGHTS)
        except InputError:
            raise InputError(
                f"{folder / WEIGHTS}: the best weights of the run are missing or damaged; put the "
                "file back from a copy, or start a new run"
            ) from None
    if not has_checkpoint(folder):
        if has_weights:
            raise InputError(
                f"{folder} has no checkpoint to go on from; start a new run from its weights with "
                f"--init {folder}"
            )
        print(f"{folder} has no checkpoint yet; it begins at step 1", flush=True)


@contextmanager
def open_run(config: Config, inputs: Inputs) -> Iterator[Path]:
    """Gives the folder of a resolved configuration, which no other command may train in meanwhile.

    Raises InputError if another command trains there, or as `check_unchanged`.
    """
    folder = find_run(config) if config.resume else run_on_main(lambda: make_folder(config.run))
    with locked(folder):
        if config.resume:
            check_unchanged(folder, config, inputs)
        elif is_main_process():
            stored = {
                "architectures": ["R2SM"],
                "model_type": "r2sm",
                "format_version": FORMAT_VERSION,
                "r2sm_jax_version": r2sm_jax.__version__,
                "compact": False,
                **inputs,
                "config": to_json(config),
            }
            write_json(folder / CONFIG, stored)
        yield folder


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has saved something to go on from."""
    return any(path.name.isdecimal() for path in (folder / "checkpoints").glob("*"))


def make_folder(run: str | None) -> Path:
    """Makes the folder of a new run: `run`, or else a dated one in runs/, which must be new."""
    folder = Path(run or RUNS / datetime.now().strftime("%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=run is not None)
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other commands from training in a run folder.

    The system ends the lock with this process, however that ends. Windows and some network file
    systems have no such locks. Raises InputError if another command has the lock.
    """
    if not is_main_process() or sys.platform == "win32":
        yield
        return
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another process trains this run now; wait until it ends, or give "
                "another --run"
            ) from None
        except OSError:
            print(f"{folder}: this file system has no locks; do not train one run twice at a time")
        yield


def point_latest(folder: Path) -> None:
    """Lets `runs/latest` point at a run, if that is in runs/. Copying makes a folder of the link,
    which stays."""
    if is_main_process() and folder.parent.resolve() == RUNS.resolve():
        if LATEST.is_dir() and not LATEST.is_symlink():
            print(f"warning: {LATEST} is a folder and no link; it does not name this run")
            return
        # Replaced in one step, so that there is a link at any time.
        link = LATEST.with_name(f".latest-{os.getpid()}")
        link.symlink_to(folder.name, target_is_directory=True)
        link.replace(LATEST)


def write_model(folder: Path, part: str, weights: nnx.State, stored: Mapping[str, Any]) -> None:
    """Writes the weights of a run, and what belongs to them into its `config.json`.

    Args:
        part: segmenter, or the part whose name stands before those of its weights.
        stored: entries of config.json.
    """
    prefix = "" if part == "segmenter" else f"{part}."
    values = jax.device_get(flat_weights(weights))
    tensors = {prefix + path: value for path, value in values.items()}
    with atomic_write(folder / WEIGHTS) as file:
        # Not save_file(), whose file nobody else may read.
        file.write_bytes(save(tensors, {"format": "np"}))
    before = load_json(folder / CONFIG, "the configuration of a run")
    write_json(folder / CONFIG, before | dict(stored))


# Checkpoints


class Checkpoints:
    """Saves and restores the state of training in the folder `checkpoints/` of a run.

    The latest two are kept. Arrays are stored by path, without library classes.
    """

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        path = (folder / "checkpoints").absolute()
        self._orbax = ocp.CheckpointManager(path, options=options)

    def save(self, step: int, state: Any, loop: Mapping[str, Any]) -> None:
        """Saves arrays, and what the loop knows beside them, as JSON. Waits until it is on disk.

        Raises InputError if the disk is full or cannot be written.
        """
        content = {
            "state": ocp.args.StandardSave(by_path(state)),
            "loop": ocp.args.JsonSave(dict(loop)),
        }
        try:
            self._orbax.save(step, args=ocp.args.Composite(**content), force=True)
        except Exception as error:  # orbax wraps the operating system's errors in many ways
            raise InputError(
                f"{self._orbax.directory}: checkpoint {step} could not be saved "
                f"({str(error)[:200]}); free disk space, then --resume from the one before"
            ) from error

    def restore(self, state: Any) -> tuple[Any, dict[str, Any]] | None:
        """Reads the latest checkpoint; None if there is none.

        `state` gives structure, shapes and shardings; its arrays are not read. Raises InputError if
        the checkpoint is damaged or does not fit.
        """
        step = self._orbax.latest_step()
        if step is None:
            return None
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, by_path(state))
        content = {"state": ocp.args.StandardRestore(shapes), "loop": ocp.args.JsonRestore()}
        try:
            restored = self._orbax.restore(step, args=ocp.args.Composite(**content))
        except Exception as error:  # damaged files fail in orbax, tensorstore or json
            raise InputError(
                f"{self._orbax.directory / str(step)}: this checkpoint is damaged or does not fit "
                f"({str(error)[:200]}); remove it, and --resume continues from the one before"
            ) from error
        leaves = [restored["state"][name] for name in by_path(state)]
        return jax.tree.unflatten(jax.tree.structure(state), leaves), restored["loop"]

    def close(self) -> None:
        """Ends orbax's threads."""
        self._orbax.close()


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a pytree by path, such as `.params['decoder']`, in their order."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# Logs


class Logs:
    """Averages losses over intervals of steps; prints the means, and records them in
    `metrics.jsonl` and in TensorBoard's event files."""

    def __init__(self, folder: Path, loop: LoopConfig, *, start: int):
        """Opens the logs of a run folder. `start`: the step that training begins after."""
        self._folder, self._loop = folder, loop
        # Other processes write nothing, so that there is one log.
        path = folder / "metrics.jsonl" if is_main_process() else Path(os.devnull)
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder), write_to_disk=is_main_process())
        # Values stay on the device until they are printed or checked.
        self._interval: list[Mapping[str, Any]] = []
        self._unchecked: list[tuple[int, Mapping[str, Any]]] = []
        self._first = start + 1
        self.restart_clock(start)

    def restart_clock(self, step: int) -> None:
        """Begins to measure the speed. What lies before is not part of it: compiling, evaluating,
        saving."""
        self._clock, self._clock_step = time.monotonic(), step

    def add(self, step: int, values: Mapping[str, Any], *, wait: bool) -> None:
        """Adds the losses of a step.

        They are read one step late, so that the device never waits for Python; with `wait`, and
        where a line is printed, at once. Raises InputError if the loss or its gradient is not
        finite.
        """
        self._interval.append(values)
        self._unchecked.append((step, values))
        is_printed = step % self._loop.log_every == 0 or step == self._loop.steps
        num_unread = 0 if is_printed or wait else 1
        while len(self._unchecked) > num_unread:
            self._check(*self._unchecked.pop(0))
        if is_printed:
            self._write(step)
        elif step == self._first:
            jax.block_until_ready(values)
            print(f"step {step}/{self._loop.steps}: the first one is done", flush=True)
            self.restart_clock(step)

    def _check(self, step: int, values: Mapping[str, Any]) -> None:
        for name, words in (("loss", "the loss"), ("gradient_norm", "the gradient")):
            if not math.isfinite(float(values[name])):
                flags = "--optimizer.learning-rate"
                if self._loop.part == "segmenter":
                    flags += " and --optimizer.muon-learning-rate"
                has_weights = (self._folder / WEIGHTS).exists()
                start = f", from its best weights with --init {self._folder}" if has_weights else ""
                raise InputError(
                    f"step {step}: {words} is not finite; start a new run with a lower {flags}"
                    f"{start}"
                )

    def _write(self, step: int) -> None:
        """Prints and records the means of the interval that ends with a step."""
        count = len(self._interval)
        means = {
            name: sum(float(values[name]) for values in self._interval) / count
            for name in self._interval[0]
        }
        recorded = {f"train/{name}": value for name, value in means.items()}
        losses = "  ".join(f"{name} {means[name]:.3f}" for name in PRINTED_LOSSES if name in means)
        line = f"step {step}/{self._loop.steps}  {losses}"
        # The first step of a process compiles, which says nothing about the speed.
        if step != self._first:
            seconds = (time.monotonic() - self._clock) / (step - self._clock_step)
            recorded["train/seconds_per_step"] = seconds
            rate = self._loop.batch_size / seconds
            minutes, rest = divmod(int(seconds * (self._loop.steps - step)), 60)
            line += f"  {rate:.1f} images/s  {minutes}:{rest:02d} left"
        self._interval = []
        self.restart_clock(step)
        print(line, flush=True)
        self.record(step, recorded)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Appends to metrics.jsonl and to the event file."""
        row = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes the rest of both files and closes them."""
        self._file.close()
        self._events.close()
