"""Run folders: made by training, opened by everything else.

runs/20260102-030405/   config.json  inputs.json  checkpoints/  metrics.jsonl  events.*  samples/  report.*
runs/latest             points at the newest
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from r2sm_jax.cli import from_json, to_json
from r2sm_jax.config import Config, DistributedConfig, LoopConfig, MatmulPrecision
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError, load_json, writing
from r2sm_jax.inference.export_folder import (
    CONFIG,
    LANGUAGE_MODEL,
    WEIGHTS,
    check_export,
    find_folder,
    is_export,
    model_with_weights,
    published_weights,
    read_export_config,
)
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.models.encoder_sizes import NO_SIZES, EncoderSizes
from r2sm_jax.models.hub import cache_dir, read_tensors
from r2sm_jax.models.matmul import choose_matmul_precision
from r2sm_jax.models.pretrained import read_encoder_sizes
from r2sm_jax.models.r2sm import Calibration, abstract_model
from r2sm_jax.training.checkpoints import Checkpoints
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.step import TrainState, init_state

if sys.platform != "win32":
    import fcntl

RUNS = Path("runs")
LATEST = RUNS / "latest"
INPUTS, LOCK = "inputs.json", ".lock"
MAY_CHANGE = (
    *(
        "resume",
        "run",
        "train.log_every",
        "train.checkpoint_every",
        "train.evaluate_every",
        "train.report_samples",
    ),
    *("train.devices", "train.accumulate", "distributed.fsdp"),
)
"""Fields that a resumed run may change: they change no parameter, or only by the order in which numbers are added."""


def enable_compilation_cache() -> None:
    """Lets a command find the programs that earlier ones compiled, in the user's cache folder. The environment variable
    JAX_COMPILATION_CACHE_DIR gives another folder; JAX_ENABLE_COMPILATION_CACHE=0 turns it off."""
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
        jax.config.update(
            "jax_persistent_cache_min_compile_time_secs", 0.0
        )  # a start has a hundred small programs


def read_config(folder: Path) -> Config:
    """The configuration of a run folder. Raises InputError if it is not a run folder."""
    path = folder / "config.json"
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
    """The run that `--resume` means."""
    return Path(config.run) if config.run else LATEST


def resolve(config: Config) -> Config:
    """The configuration with real values for this machine in place of `auto` and 0.

    A run that is resumed on another machine keeps its values; only the number of devices is chosen again. How the
    processes of this call connect (`--distributed`) is not part of a resolved configuration. Raises
    InputError if the run cannot be read.
    """
    parent = read_config(resumed_folder(config)) if config.resume else None
    return resolve_loop(config, resolve_loop(parent) if parent else None)


def resolve_loop(config: Config, parent: Config | None = None) -> Config:
    """`resolve`, given the resolved configuration of a resumed run."""
    loop = config.train
    devices = loop.devices or jax.device_count()
    if parent:
        used = parent.train
    else:
        used = LoopConfig(matmul_precision=choose_matmul_precision(), select_on="dev")
    loop = replace(
        loop,
        devices=devices,
        matmul_precision=used.matmul_precision
        if loop.matmul_precision == "auto"
        else loop.matmul_precision,
        select_on=used.select_on if loop.select_on == "auto" else loop.select_on,
    )
    return replace(config, train=loop, distributed=DistributedConfig(fsdp=config.distributed.fsdp))


def start_folder(config: Config, locks: ExitStack) -> Path:
    """Makes the folder of a new run, or compares the configuration of a resumed one; `config` must be resolved. Until
    `locks` end no other process can do so. Raises InputError if a new run's folder holds a run or cannot be written, a
    resumed run's configuration differs, or another process trains in the folder."""
    own = read_config(resumed_folder(config)) if config.resume else None
    try:
        folder = resumed_folder(config) if own else _new_folder(config)
        locks.enter_context(lock_run(folder))
    except OSError as error:
        where = config.run or RUNS
        raise InputError(
            f"{where}: cannot write there ({error.strerror}); permit it or give another --run"
        ) from error
    if own:
        before, now = (flatten_dict(to_json(c), sep=".") for c in (resolve_loop(own), config))
        differ = [name for name in before if before[name] != now[name] and name not in MAY_CHANGE]
        if found := [f"{name} ({before[name]} in the run, {now[name]} now)" for name in differ]:
            problem = f"was trained with another configuration: {'; '.join(found)}"
            raise InputError(f"{folder} {problem}; use these or another --run")
        return folder
    if (folder / "config.json").exists():
        raise InputError(
            f"{folder} holds a run already; continue it with --resume or give another --run"
        )
    with writing(folder / "config.json") as part:
        part.write_text(json.dumps(to_json(config), indent=1) + "\n", "utf-8")
        (folder / "samples").mkdir(exist_ok=True)
        if config.run is None:  # replaced in one step, so that there is always a link
            link = LATEST.with_name(f".latest-{os.getpid()}")
            link.symlink_to(folder.name, target_is_directory=True)
            link.replace(LATEST)
    return folder


def _new_folder(config: Config) -> Path:
    """Makes `--run`, or a dated folder that nobody else has: in the next second if there is one of this second."""
    parent = Path(config.run) if config.run else RUNS
    parent.mkdir(parents=True, exist_ok=True)
    while not config.run:
        folder = RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        time.sleep(0.1)
    return parent


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keeps other processes from training in a run folder. The system ends the lock with this process, however that
    ends. Raises InputError if another process has it. Windows and some network file systems have no such locks."""
    with (folder / LOCK).open("a") as file:
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"{folder}: another process trains this run now"
            raise InputError(f"{problem}; wait until it ends, or give another --run") from None
        except OSError:
            print(
                f"{folder}: this file system has no locks; do not train one run twice at a time",
                file=sys.stderr,
            )
        yield


def find_encoder_sizes(config: Config) -> EncoderSizes:
    """Sizes of the published image encoders of a run: those of the run that it resumes or starts from, which needs no
    published files, or else of the weights themselves. Raises InputError as `read_encoder_sizes`."""
    if config.resume:
        return read_sizes(resumed_folder(config))
    if config.init:
        return read_sizes(Path(config.init))
    return read_encoder_sizes(config.model)


def read_sizes(folder: Path) -> EncoderSizes:
    """Sizes of the published image encoders of a run. A run that never got as far as writing them reads the weights."""
    config, inputs = read_config(folder), read_inputs(folder)
    if "image_encoder" in inputs:
        return EncoderSizes.from_json(inputs["image_encoder"])
    return read_encoder_sizes(config.model)


def check_inputs(
    folder: Path, config: Config, sizes: EncoderSizes, texts: TextStates, data_sha256: str
) -> None:
    """Writes the sizes of the image encoders and the hashes of the language model, its tokenizer and the training data
    into the folder of a new run, and compares the hashes of a resumed run, or of the run that it starts from. Raises InputError if they differ."""
    if config.init and (first := read_inputs(Path(config.init))):
        check_language_model(texts, first["language_model"], f"--init {config.init}")
    if config.resume and (before := read_inputs(folder)):
        check_language_model(texts, before["language_model"], f"the run {folder}")
        if before["data"]["sha256"] != data_sha256:
            raise InputError(
                f"{config.data.source}: not the training data that the run {folder} began with, by their hash; restore "
                f"them, or start a new run from its weights with --init {folder}"
            )
        return
    inputs = {
        "image_encoder": to_json(sizes),
        "language_model": {"name": config.model.text.name, **texts.identity},
        "data": {"source": config.data.source, "sha256": data_sha256},
    }
    with writing(folder / INPUTS) as part:
        part.write_text(json.dumps(inputs, indent=1) + "\n", "utf-8")


def read_inputs(folder: Path) -> dict[str, dict[str, Any]]:
    """What `check_inputs` wrote; empty for an export, and for a run of an earlier version."""
    return (
        load_json(folder / INPUTS, "the file that the run wrote")
        if (folder / INPUTS).exists()
        else {}
    )


def abstract_state(
    config: Config, sizes: EncoderSizes = NO_SIZES
) -> tuple[nnx.GraphDef, TrainState, nnx.State]:
    """Graph, training state and constants of a run as shapes; nothing is computed."""
    graphdef, params, constants = nnx.split(abstract_model(config.model, sizes), nnx.Param, ...)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    return graphdef, jax.eval_shape(partial(init_state, optimizer=optimizer), params), constants


class Stored(NamedTuple):
    """The weights of one checkpoint."""

    config: Config
    sizes: EncoderSizes
    graphdef: nnx.GraphDef
    params: nnx.State
    constants: nnx.State
    calibration: Calibration
    step: int


def restore_weights(folder: Path, *, checkpoint: str = "best") -> Stored:
    """Reads the weights of a run, without the language model. Raises InputError if it has no usable checkpoint, or
    `checkpoint` is not best, latest or a step, or is a damaged step."""
    config = read_config(folder)
    checkpoints = Checkpoints(folder)
    steps = checkpoints.steps
    if not steps:
        raise InputError(f"{folder}: the run has no checkpoint yet; train on with --resume")
    named = {str(step): step for step in steps} | {
        "latest": steps[-1],
        "best": checkpoints.best or steps[-1],
    }
    if checkpoint not in named:
        known = f"best, latest or one of the steps {', '.join(map(str, steps))}"
        raise InputError(
            f"--checkpoint {checkpoint!r}: the run has no such checkpoint; give {known}"
        )
    sizes = read_sizes(folder)
    graphdef, state, constants = abstract_state(config, sizes)
    state, constants, calibration = checkpoints.restore(
        state, constants, step=named[checkpoint], only=checkpoint.isdigit()
    )
    checkpoints.close()
    return Stored(config, sizes, graphdef, state.params, constants, calibration, int(state.step))


@dataclass(frozen=True)
class Run:
    """A trained segmenter, ready to predict: from a run folder or an export."""

    folder: Path
    config: Config
    sizes: EncoderSizes
    """Sizes of its published image encoders."""
    step: int
    predictor: Predictor
    is_export: bool = False


def load(
    name: str | Path, *, checkpoint: str = "best", matmul_precision: MatmulPrecision = "float32"
) -> Run:
    """Loads a run folder, an export, a released model or an export on the hub (`hf:owner/name`).

    Raises InputError as `find_folder`, `load_run` and `load_export`.
    """
    folder = find_folder(name)
    if not is_export(folder):
        return load_run(folder, checkpoint=checkpoint, matmul_precision=matmul_precision)
    if checkpoint != "best":
        raise InputError(
            f"--checkpoint {checkpoint}: the export {folder} holds one only; leave the flag out"
        )
    return load_export(folder, matmul_precision=matmul_precision)


def load_run(
    folder: Path, *, checkpoint: str = "best", matmul_precision: MatmulPrecision = "float32"
) -> Run:
    """Loads a checkpoint of a run folder.

    Args:
        checkpoint: best, latest or a step.
        matmul_precision: how dense layers and convolutions multiply (models/matmul.py).

    Raises InputError as `restore_weights`, or if the language model cannot be had or is another one than in
    training.
    """
    stored = restore_weights(folder, checkpoint=checkpoint)
    config = stored.config
    text = config.model.text
    text_encoder = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)
    trained = read_inputs(folder).get("language_model", {})
    check_language_model(text_encoder, trained, f"the run {folder}")

    weights = nnx.merge_state(stored.params, stored.constants)
    predictor = Predictor(
        config.model, stored.graphdef, weights, text_encoder, stored.calibration, matmul_precision
    )
    return Run(folder, config, stored.sizes, stored.step, predictor)


def load_export(folder: Path, *, matmul_precision: MatmulPrecision = "float32") -> Run:
    """Loads an export.

    Raises InputError as `check_export`, if the weights do not fit the configuration, or if the language model,
    or the image encoder of a compact export, cannot be had or is another one than in training.
    """
    check_export(folder)
    stored = read_export_config(folder)
    config = from_json(Config, stored["config"], str(folder / CONFIG))
    sizes = EncoderSizes.from_json(stored["image_encoder"])
    weights: dict[str, Any] = {**read_tensors(folder / WEIGHTS)}
    if stored["compact"]:
        # The file has only what was trained, in float16.
        trained = {name: value.astype(np.float32) for name, value in weights.items()}
        weights = published_weights(config.model, sizes) | trained
    model = model_with_weights(config.model, sizes, weights, folder / WEIGHTS)

    text = config.model.text
    language_model = stored["language_model"]
    name = str(folder / LANGUAGE_MODEL) if language_model["embedded"] else text.name
    text_encoder = TextStates(name, layers=text.layers, max_tokens=text.max_tokens)
    check_language_model(text_encoder, language_model, "this export")

    graphdef, state = nnx.split(model)
    calibration = Calibration(**stored["calibration"])
    predictor = Predictor(
        config.model, graphdef, state, text_encoder, calibration, matmul_precision
    )
    if stored["compact"] and predictor.weights_sha256 != stored["weights_sha256"]:
        raise InputError(
            f"{folder}: with the published image encoder that was found, its weights have sha256 "
            f"{predictor.weights_sha256}, not {stored['weights_sha256']}; get the encoder that it was trained with"
        )
    return Run(folder, config, sizes, stored["step"], predictor, is_export=True)


def check_language_model(text_encoder: TextStates, trained: Mapping[str, Any], user: str) -> None:
    """Raises InputError if a language model or its tokenizer is another one than in training.

    Args:
        trained: `TextStates.identity` in training, and its `name`; a hash that is missing is not compared.
        user: the run or the export, for messages.
    """
    identity = text_encoder.identity
    for part, key in (("weights have", "sha256"), ("tokenizer has", "tokenizer_sha256")):
        if trained.get(key, identity[key]) == identity[key]:
            continue
        revision = f", revision {trained['revision']}" if trained.get("revision") else ""
        raise InputError(
            f"{text_encoder.folder}: its {part} sha256 {identity[key]}, but {user} needs {trained[key]}; "
            f"get the {trained['name']} that it was trained with{revision}"
        )
