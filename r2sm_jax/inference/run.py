"""Trained segmenters: loads a run folder or an export, with its language model, for inference."""

import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from r2sm_jax.cli import from_json
from r2sm_jax.config import Config, MatmulPrecision
from r2sm_jax.data.text_states import open_language_model
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import restore_completer, restore_outliner
from r2sm_jax.inference.export_folder import (
    CONFIG,
    LANGUAGE_MODEL,
    WEIGHTS,
    check_export,
    find_folder,
    is_export,
    read_export_config,
)
from r2sm_jax.inference.export_weights import model_with_weights, published_weights
from r2sm_jax.inference.parts import part_of_export, split_tensors
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.small_weights import from_stored
from r2sm_jax.models.hub import cache_dir, read_tensors
from r2sm_jax.models.r2sm import Calibration
from r2sm_jax.training.checkpoints import Checkpoints
from r2sm_jax.training.run_folder import (
    read_config,
    read_inputs,
)
from r2sm_jax.training.step import abstract_state

MAX_CACHE_BYTES = 512 << 20
"""Limit for the compiled programs in the user's cache folder; a program has 40 kB on average."""


def enable_compilation_cache() -> None:
    """Lets a command use the programs that earlier ones compiled, from the user's cache folder.

    Above `MAX_CACHE_BYTES`, programs that were not used for longest are deleted. The variable
    JAX_COMPILATION_CACHE_DIR gives another folder, which is not pruned;
    JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is not None:
        return
    folder = cache_dir() / "compiled"
    _prune(folder, MAX_CACHE_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Where the disk is full or a stored program is damaged, JAX compiles the program again. The
    # answer is the same, so JAX's warnings, one for each program, are not shown.
    message = "Error (reading|writing) persistent compilation cache"
    warnings.filterwarnings("ignore", message)
    # By default JAX stores only programs that took a second to compile. A start has a hundred that
    # take less each, so all are stored.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _prune(folder: Path, max_bytes: int) -> None:
    """Deletes the files of a folder that were not read for longest, until `max_bytes` are left."""
    # JAX's own jax_compilation_cache_max_size reads the dates of all programs each time that it
    # adds one: 0.17 s with 3,000 of them, a hundred times at a start.
    files = []
    for path in folder.glob("*"):
        try:
            status = path.stat()
        except OSError:  # another process has just deleted it
            continue
        files.append((max(status.st_atime, status.st_mtime), status.st_size, path))

    num_bytes = 0
    for _, size, path in sorted(files, reverse=True):
        num_bytes += size
        if num_bytes > max_bytes:
            with suppress(OSError):
                path.unlink()


class Stored(NamedTuple):
    """The weights of one checkpoint."""

    config: Config
    graphdef: nnx.GraphDef
    params: nnx.State
    constants: nnx.State
    calibration: Calibration
    step: int


def restore_weights(folder: Path, *, checkpoint: str = "best") -> Stored:
    """Reads the weights of a run, without the language model.

    Args:
        checkpoint: best, latest or a step.

    Raises InputError if there is no such checkpoint, or it is damaged.
    """
    config = read_config(folder)
    part = config.train.part
    if part != "segmenter":
        raise InputError(
            f"{folder}: this is the run of the part {part}, which finds nothing by itself; put it "
            f"into an export with python -m r2sm_jax.export RUN --{part} {folder} --out DIR"
        )
    checkpoints = Checkpoints(folder)
    steps = checkpoints.steps
    if not steps:
        raise InputError(f"{folder}: the run has no checkpoint yet; train on with --resume")
    if checkpoint == "best":
        step = checkpoints.best or steps[-1]
    elif checkpoint == "latest":
        step = steps[-1]
    elif checkpoint.isdecimal() and int(checkpoint) in steps:
        step = int(checkpoint)
    else:
        choices = ", ".join(map(str, steps))
        raise InputError(
            f"--checkpoint {checkpoint!r}: the run has no such checkpoint; give best, latest or "
            f"one of the steps {choices}"
        )

    graphdef, state, constants = abstract_state(config)
    # If the best or the latest checkpoint is damaged, `restore` takes another one. A user who named
    # a step gets that one or an error.
    restored = checkpoints.restore(state, constants, step=step, only=checkpoint.isdecimal())
    checkpoints.close()
    return Stored(
        config,
        graphdef,
        restored.state.weights,
        restored.constants,
        restored.calibration,
        int(restored.state.step),
    )


@dataclass(frozen=True)
class Run:
    """A trained segmenter, ready to predict: from a run folder or an export."""

    folder: Path
    config: Config
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
        matmul_precision: how dense layers multiply (models/matmul.py).

    Raises InputError as `restore_weights`, or if the language model cannot be had or is another one
    than in training.
    """
    restored = restore_weights(folder, checkpoint=checkpoint)
    config = restored.config
    text = config.model.text
    language_model = read_inputs(folder).get("language_model", {})
    text_encoder = open_language_model(text, text.name, language_model, f"the run {folder}")

    weights = nnx.merge_state(restored.params, restored.constants)
    predictor = Predictor(
        config.model,
        restored.graphdef,
        weights,
        text_encoder,
        restored.calibration,
        matmul_precision,
    )
    return Run(folder, config, restored.step, predictor)


def load_export(folder: Path, *, matmul_precision: MatmulPrecision = "float32") -> Run:
    """Loads an export.

    Raises InputError as `check_export`, if the weights do not fit the configuration, or if the
    language model, or the image encoder of a compact export, cannot be had or is another one than
    in training.
    """
    check_export(folder)
    export_config = read_export_config(folder)
    config = from_json(Config, export_config["config"], str(folder / CONFIG))
    weights: dict[str, Any]
    tensors = split_tensors(read_tensors(folder / WEIGHTS))
    weights = tensors["segmenter"]
    where = str(folder / CONFIG)
    stored_completer = part_of_export(folder, "completer", tensors)
    stored_outliner = part_of_export(folder, "outliner", tensors)
    if export_config["compact"]:
        weights = from_stored(weights, published_weights(config.model))
    model = model_with_weights(config.model, weights, folder / WEIGHTS)

    text = config.model.text
    language_model = export_config["language_model"]
    name = str(folder / LANGUAGE_MODEL) if language_model["embedded"] else text.name
    text_encoder = open_language_model(text, name, language_model, "this export")

    graphdef, state = nnx.split(model)
    calibration = Calibration(**export_config["calibration"])
    predictor = Predictor(
        config.model,
        graphdef,
        state,
        text_encoder,
        calibration,
        matmul_precision,
        completer=stored_completer
        and restore_completer(*stored_completer, where=where, matmul_precision=matmul_precision),
        outliner=stored_outliner
        and restore_outliner(*stored_outliner, where=where, matmul_precision=matmul_precision),
    )
    if export_config["compact"] and predictor.weights_sha256 != export_config["weights_sha256"]:
        raise InputError(
            f"{folder}: with the published image encoder that was found, its weights have sha256 "
            f"{predictor.weights_sha256}, not {export_config['weights_sha256']}; get the encoder "
            "that it was trained with"
        )
    return Run(folder, config, export_config["step"], predictor, is_export=True)
