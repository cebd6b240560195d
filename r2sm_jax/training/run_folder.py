"""Run folders: how training makes, locks, checks and resumes them.

runs/20260102-030405/   config.json  inputs.json  checkpoints/  metrics.jsonl  events.*  samples/
                        report.*
runs/latest             points at the newest run that has a checkpoint
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from r2sm_jax.cli import from_json, to_json
from r2sm_jax.config import Config, DistributedConfig
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.data.tokenizer import check_language_model
from r2sm_jax.errors import InputError, atomic_write, load_json, refuse_dangling
from r2sm_jax.models.matmul import choose_matmul_precision

if sys.platform != "win32":
    import fcntl

RUNS = Path("runs")
LATEST = RUNS / "latest"
CONFIG = "config.json"
INPUTS = "inputs.json"
LOCK = ".lock"
PART_CONFIGS = ("completer.json", "outliner.json")
"""What the run of a completer or an outliner has in place of checkpoints."""
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
}
"""Fields that a resumed run may change: they change no parameter, or only by the order in which
numbers are added. Data may lie elsewhere, since `check_inputs` compares their hash."""


# The configuration.


def read_config(folder: Path) -> Config:
    """Reads the configuration of a run folder. Raises InputError if it is not a run folder."""
    refuse_dangling(folder)
    path = folder / CONFIG
    if not path.exists():
        raise InputError(
            f"{folder}: no such run folder, its config.json is missing; give one that train wrote"
        )
    try:
        values = json.loads(path.read_text("utf-8"))
        if "model_type" in values:
            raise InputError(
                f"{folder}: this is an export, which cannot be trained on; give the run folder"
            )
        return from_json(Config, values, str(path))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not a readable configuration ({error}); restore it or train again"
        ) from None


def resumed_folder(config: Config) -> Path:
    """Returns the run folder that `--resume` continues."""
    return Path(config.run) if config.run else LATEST


def resolve_auto(config: Config, resumed: Config | None = None) -> Config:
    """Replaces `auto` and 0 in a configuration by what this machine uses.

    A resumed run keeps the precision and the split that it began with, which change its results.
    Only the number of devices is chosen again. How processes connect is left out of the result,
    since it differs from process to process.
    """
    loop = config.train
    matmul_precision = loop.matmul_precision
    if matmul_precision == "auto" and resumed is not None:
        matmul_precision = resumed.train.matmul_precision
    if matmul_precision == "auto":
        matmul_precision = choose_matmul_precision()

    select_on = loop.select_on
    if select_on == "auto" and resumed is not None:
        select_on = resumed.train.select_on
    if select_on == "auto":
        select_on = "dev"

    loop = replace(
        loop,
        devices=loop.devices or jax.device_count(),
        matmul_precision=matmul_precision,
        select_on=select_on,
    )
    return replace(config, train=loop, distributed=DistributedConfig(fsdp=config.distributed.fsdp))


def check_unchanged(folder: Path, resumed: Config, config: Config) -> None:
    """Raises InputError if a resumed run would go on with another configuration.

    Fields of `MAY_CHANGE` are not compared.
    """
    # By dotted names, which are also the flags: "train.batch_size" is --train.batch-size.
    before = flatten_dict(to_json(resumed), sep=".")
    now = flatten_dict(to_json(config), sep=".")
    changed = [name for name in before if name not in MAY_CHANGE and before[name] != now[name]]
    if not changed:
        return
    changes = [f"{name} ({before[name]} in the run, {now[name]} now)" for name in changed]
    remedy = "use these or another --run"
    if "train.steps" in changed:
        # The rates of a run fall to zero at its last step, so more steps would be another training.
        remedy = (
            "its learning rates follow from its number of steps; to train on from its weights, "
            f"start a new run with --init {folder} in place of --resume"
        )
    raise InputError(
        f"{folder} was trained with another configuration: {'; '.join(changes)}; {remedy}"
    )


# The folder.


def make_folder(run: str | None) -> Path:
    """Makes the folder of a new run: `run`, or else a dated one in runs/.

    Raises InputError if it cannot be written.
    """
    try:
        if run is not None:
            folder = Path(run)
            folder.mkdir(parents=True, exist_ok=True)
            return folder

        # The time names the folder, so folders sort by age.
        RUNS.mkdir(exist_ok=True)
        while True:
            folder = RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
            with suppress(FileExistsError):  # another run of this second; take the next one
                folder.mkdir()
                return folder
            time.sleep(0.1)
    except OSError as error:
        raise InputError(
            f"{run or RUNS}: cannot write there ({error.strerror}); permit it or give another --run"
        ) from error


@contextmanager
def new_run(config: Config) -> Iterator[Path]:
    """Begins a new run: makes its folder, locks it and writes the configuration into it.

    If the block fails or is interrupted before the run has saved weights, what it wrote is removed,
    so that a failed start leaves nothing behind.

    Raises InputError as `make_folder` and `lock_run`, or if the folder holds a run already.
    """
    target = Path(config.run) if config.run else RUNS / "new"
    missing = [path for path in (target, *target.parents) if not path.exists()]
    folder = make_folder(config.run)
    with lock_run(folder):
        if (folder / CONFIG).exists():
            raise InputError(
                f"{folder} holds a run already; continue it with --resume or give another --run"
            )
        # Read under the lock: another run writes no file here from now on.
        other_files = set(folder.iterdir()) - {folder / LOCK}
        try:
            with termination_as_interrupt():
                write_config(folder, config)
                yield folder
        except BaseException:
            if not has_weights(folder):
                remove_files(folder, other_files)
                if missing:
                    remove_empty([folder, *missing[1:]])
            raise


def write_config(folder: Path, config: Config) -> None:
    """Writes the configuration of a run. Raises InputError if the folder cannot be written."""
    with atomic_write(folder / CONFIG) as part:
        part.write_text(json.dumps(to_json(config), indent=1) + "\n", "utf-8")
        (folder / "samples").mkdir(exist_ok=True)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Lets SIGTERM, which schedulers send, raise KeyboardInterrupt as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def has_weights(folder: Path) -> bool:
    """Whether a run has saved weights: a checkpoint, a state that is not finite, or a completer."""
    saved = [*folder.glob("checkpoints/*"), *folder.glob("not_finite/checkpoints/*")]
    has_part = any((folder / name).exists() for name in PART_CONFIGS)
    return has_part or any(path.name.isdecimal() for path in saved)


def remove_files(folder: Path, others: Set[Path]) -> None:
    """Removes what a folder holds, except `others`. What cannot be removed stays."""
    for path in set(folder.iterdir()) - others:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders, the innermost first, up to the first that holds something."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def point_latest(folder: Path) -> None:
    """Lets `runs/latest` point at a run. A run does so once it has a checkpoint."""
    # Replaced in one step, so that there is a link at any time.
    link = LATEST.with_name(f".latest-{os.getpid()}")
    link.symlink_to(folder.name, target_is_directory=True)
    link.replace(LATEST)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keeps other commands from training in a run folder.

    The system ends the lock with this process, however that ends. Windows and some network file
    systems have no such locks.

    Raises InputError if another command has the lock.
    """
    try:
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise InputError(
            f"{folder}: cannot write there ({error.strerror}); permit it or give another --run"
        ) from error
    with file:
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another process trains this run now; wait until it ends, or give "
                "another --run"
            ) from None
        except OSError:
            print(
                f"{folder}: this file system has no locks; do not train one run twice at a time",
                file=sys.stderr,
            )
        yield


# What a run was trained with: published weights and data.


def read_inputs(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the `inputs.json` of a run; {} if it was stopped before that was written."""
    path = folder / INPUTS
    return load_json(path, "the file that the run wrote") if path.exists() else {}


def check_inputs(folder: Path, config: Config, texts: TextStates, data_sha256: str) -> None:
    """Writes the inputs of a new run, or compares them with those of a resumed run.

    Inputs are hashes of the language model, its tokenizer and the training data. Raises InputError
    if a hash differs, also from that of the run that this one starts from (`--init`).
    """
    if config.init:
        initial = read_inputs(Path(config.init))
        if initial:
            check_language_model(
                texts.folder, texts.identity, initial["language_model"], f"--init {config.init}"
            )

    before = read_inputs(folder) if config.resume else {}
    if before:
        check_language_model(
            texts.folder, texts.identity, before["language_model"], f"the run {folder}"
        )
        # By content, since files may have been moved (`MAY_CHANGE`).
        if before["data"]["sha256"] != data_sha256:
            raise InputError(
                f"{config.data.source}: not the training data that the run {folder} began with, by "
                "their hash; restore "
                f"them, or start a new run from its weights with --init {folder}"
            )
        return

    inputs = {
        "language_model": {"name": config.model.text.name, **texts.identity},
        "data": {"source": config.data.source, "sha256": data_sha256},
    }
    with atomic_write(folder / INPUTS) as part:
        part.write_text(json.dumps(inputs, indent=1) + "\n", "utf-8")
