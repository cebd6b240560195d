"""Run folders: made by training, opened by everything else.

runs/20260102-030405/   config.json  checkpoints/  metrics.jsonl  events.*  samples/  report.json  report.md
runs/latest             points at the newest
"""

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jax
from flax import nnx

from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.exported import find_export, is_export, open_texts, read_weights
from r2sm_jax.flags import differences, from_json, to_json
from r2sm_jax.models.text_states import TextStates
from r2sm_jax.predictor import Predictor
from r2sm_jax.training.checkpoints import Checkpoints
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.step import TrainState, init_state, split_model

RUNS = Path("runs")
LATEST = RUNS / "latest"
MAY_CHANGE = (
    "resume",
    "run",
    "train.log_every",
    "train.checkpoint_every",
    "train.evaluate_every",
    "train.report_samples",
)
"""Fields that a resumed run may set anew: they do not touch the parameters."""


@dataclass(frozen=True)
class Run:
    """A trained run, ready to answer."""

    folder: Path
    config: Config
    step: int
    predictor: Predictor
    exported: bool = False
    """It is an export of a run."""


def read_config(folder: Path) -> Config:
    """The configuration of a run folder.

    Raises:
        InputError: it is not a run folder.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such run folder; train one with python -m r2sm_jax.train")
    if is_export(folder):
        raise InputError(f"{folder}: this is an export, which cannot be trained on; give the run folder")
    path = folder / "config.json"
    try:
        return from_json(Config, json.loads(path.read_text()), str(path))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: not a run folder, since config.json is missing; give one that train wrote"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not a readable configuration ({error}); restore it or train again") from None


def resumed_folder(config: Config) -> Path:
    """The run that `--resume` means."""
    return Path(config.run) if config.run else LATEST


def start_folder(config: Config) -> Path:
    """Makes the folder of a new run, or checks that a resumed one has the same configuration.

    Raises:
        InputError: the folder holds a run already, or a different one, or cannot be written.
    """
    if config.resume:
        folder = resumed_folder(config)
        found = differences(to_json(read_config(folder)), to_json(config))
        found = [d for d in found if d.split(" ")[0] not in MAY_CHANGE]
        if found:
            raise InputError(
                f"{folder} was trained with another configuration: {'; '.join(found)}; use these or another --run"
            )
        return folder
    folder = Path(config.run) if config.run else RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
    if (folder / "config.json").exists():
        raise InputError(f"{folder} holds a run already; continue it with --resume or give another --run")
    try:
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(to_json(config), indent=1) + "\n")
        if config.run is None:
            _point_latest_at(folder)
    except OSError as error:
        raise InputError(f"{folder}: the run folder cannot be written ({error.strerror}); give another --run") from None
    return folder


def _point_latest_at(folder: Path) -> None:
    """Moves the link in one step, so that it always points somewhere."""
    link = LATEST.with_name(f".latest-{os.getpid()}")
    link.symlink_to(folder.name, target_is_directory=True)
    os.replace(link, LATEST)


def abstract_state(config: Config) -> tuple[nnx.GraphDef, TrainState, nnx.State]:
    """Structure and shapes of a run's training state and constants, without computing anything."""
    graphdef, params, constants = nnx.split(
        nnx.eval_shape(lambda: nnx.merge(*split_model(config.model, 0))), nnx.Param, ...
    )
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    return graphdef, jax.eval_shape(lambda p: init_state(p, optimizer), params), constants


class Stored(NamedTuple):
    """The weights of one checkpoint."""

    config: Config
    graphdef: nnx.GraphDef
    params: nnx.State
    constants: nnx.State
    step: int


def restore_weights(folder: Path, *, checkpoint: str = "best") -> Stored:
    """Reads the weights of a run or an export, without the language model.

    Raises:
        InputError: the folder is neither, has no usable checkpoint, or `checkpoint` is not best, latest or a step.
    """
    if is_export(folder):
        if checkpoint != "best":
            raise InputError(f"--checkpoint {checkpoint}: the export {folder} holds one only; leave the flag out")
        return Stored(*read_weights(folder))
    config = read_config(folder)
    checkpoints = Checkpoints(folder)
    steps = checkpoints.steps
    if not steps:
        raise InputError(f"{folder}: the run has no checkpoint yet; train on with --resume")
    if checkpoint == "best":
        step = checkpoints.best or steps[-1]
    elif checkpoint == "latest":
        step = steps[-1]
    elif checkpoint.isdigit() and int(checkpoint) in steps:
        step = int(checkpoint)
    else:
        raise InputError(f"--checkpoint {checkpoint!r}: best, latest or one of the steps {', '.join(map(str, steps))}")
    graphdef, state, constants = abstract_state(config)
    state, constants = checkpoints.restore(state, constants, step=step)
    checkpoints.close()
    return Stored(config, graphdef, state.params, constants, int(state.step))


def open_run(folder: Path, *, checkpoint: str = "best") -> Run:
    """Loads a run, an export, or an export on the Hugging Face hub (`OWNER/NAME`) for inference.

    Raises:
        InputError: as `restore_weights`, or the language model or the hub's export cannot be had.
    """
    folder = find_export(folder)
    stored = restore_weights(folder, checkpoint=checkpoint)
    text, exported = stored.config.model.text, is_export(folder)
    if exported:
        texts = open_texts(folder, stored.config)
    else:
        texts = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)
    weights = nnx.merge_state(stored.params, stored.constants)
    predictor = Predictor(stored.config.model, stored.graphdef, weights, texts)
    return Run(folder, stored.config, stored.step, predictor, exported)
