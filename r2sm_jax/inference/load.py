"""Loads trained models: run folders and exports, which have the same files, for inference.

`config.json` holds all sizes and the calibration, `model.safetensors` the weights by dotted path:
those of the segmenter, and with `completer.` or `outliner.` before their names those of the parts
that can stand beside it.

A compact export has few bytes. A published weight that training left as it was is not stored: it is
found by its model's name. All others are stored in float16. Earlier exports, photos-small among
them, store a published weight that was trained on as the difference from the published one, in 8
bits, with a unit for each output channel under `NAME.unit`.
"""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from r2sm_jax.cli import from_json, to_json
from r2sm_jax.config import CompleterConfig, Config, MatmulPrecision, ModelConfig, OutlinerConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import CropModel, MaskCompleter, MaskOutliner
from r2sm_jax.inference.model_folder import (
    CONFIG,
    WEIGHTS,
    find_folder,
    is_export,
    language_model_of,
    read_stored,
    verify_files,
)
from r2sm_jax.inference.parts import Parts, no_part
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.language.states import open_language_model
from r2sm_jax.models.calibration import Calibration
from r2sm_jax.models.hub import EFFICIENTNETS, cache_dir, find_model, read_tensors
from r2sm_jax.models.keys import first_blocks
from r2sm_jax.models.matching import Tensor, flat_weights, put_weights
from r2sm_jax.models.pretrained import EFFICIENTNET_FLAG, match_pretrained
from r2sm_jax.models.r2sm import abstract_model

PARTS: dict[str, tuple[type[CropModel], type]] = {
    "completer": (MaskCompleter, CompleterConfig),
    "outliner": (MaskOutliner, OutlinerConfig),
}
"""What can stand beside a segmenter: its class, and that of its sizes."""
SEGMENTER = "segmenter"
UNIT = ".unit"
"""Ends the name of the units of a difference."""
MAX_CACHE_BYTES = 512 << 20
"""Limit for the compiled programs in the user's cache folder; a program has 40 kB on average."""

Tensors = Mapping[str, np.ndarray]
"""Weights by dotted path."""


@dataclass(frozen=True)
class Run:
    """A trained segmenter, ready to predict: from a run folder or an export."""

    folder: Path
    config: Config
    step: int
    predictor: Predictor


def load_run(name: str | Path, *, matmul_precision: MatmulPrecision = "float32") -> Run:
    """Loads a run folder, an export, a released model or an export on the hub (`hf:owner/name`).

    Args:
        matmul_precision: how dense layers multiply (models/matmul.py).

    Raises InputError as `find_folder`, if there are no weights or they do not fit the
    configuration, or if the language model, or the image encoder of a compact export, cannot be had
    or is another one than in training.
    """
    folder = find_folder(name)
    stored = read_stored(folder)
    config = from_json(Config, stored["config"], str(folder / CONFIG))
    tensors = read_weights(folder, stored)
    if not tensors[SEGMENTER]:
        part = config.train.part
        raise InputError(
            f"{folder}: this is the run of the part {part}, which finds nothing by itself; put it "
            f"into an export with python -m r2sm_jax.export RUN --{part} {folder} --out DIR"
        )
    graphdef, shapes = nnx.split(abstract_model(config.model))
    parts = {part: make_part(part, folder, stored, tensors, matmul_precision) for part in PARTS}
    text = config.model.text
    predictor = Predictor(
        config.model,
        graphdef,
        fill_shapes(shapes, tensors[SEGMENTER], folder),
        open_language_model(
            text, language_model_of(folder, stored), stored["language_model"], str(folder)
        ),
        Calibration(**stored.get("calibration", {})),
        matmul_precision,
        Parts(**parts),
    )
    if jax.config.read("jax_enable_x64"):
        raise InputError(f"float64 is on, and {name} computes in float32; leave JAX_ENABLE_X64 out")
    if stored["compact"] and predictor.weights_sha256 != stored["weights_sha256"]:
        raise InputError(
            f"{folder}: with the published image encoder that was found, its weights have sha256 "
            f"{predictor.weights_sha256}, not {stored['weights_sha256']}; get the encoder that it "
            "was trained with"
        )
    return Run(folder, config, stored["step"], predictor)


def load_part(name: str | Path, part: str) -> Any:
    """Loads a completer or an outliner alone, without segmenter and language model.

    Args:
        name: that of a model, as `load_run` reads it, or of the run of the part.

    Raises InputError as `load_run`, or if the model has none.
    """
    folder = find_folder(name)
    stored = read_stored(folder)
    found = make_part(part, folder, stored, read_weights(folder, stored))
    if found is None:
        raise no_part(part, str(name))
    return found


def load_weights(name: str | Path, config: ModelConfig) -> nnx.State:
    """Loads the segmenter's weights alone, to train on from them.

    Raises InputError as `load_run`, or if the model has another architecture than `config`.
    """
    folder = find_folder(name)
    stored = read_stored(folder)
    before = from_json(Config, stored["config"], str(folder / CONFIG)).model
    if before != config:
        now = flatten_dict(to_json(config), sep=".")
        changes = [
            f"{field} ({value} there, {now[field]} here)"
            for field, value in flatten_dict(to_json(before), sep=".").items()
            if value != now[field]
        ]
        raise InputError(
            f"--init {name}: its model differs in {len(changes)} fields of --model: "
            f"{', '.join(changes[:8])}; give the flags or the config file that it was trained with"
        )
    shapes = nnx.state(abstract_model(config))
    return fill_shapes(shapes, read_weights(folder, stored)[SEGMENTER], folder)


def make_part(
    part: str,
    folder: Path,
    stored: Mapping[str, Any],
    tensors: Mapping[str, Tensors],
    matmul_precision: MatmulPrecision = "float32",
) -> Any:
    """Makes the completer or outliner of a folder; None if it has none."""
    if not tensors[part]:
        return None
    model, sizes = PARTS[part]
    # A run that was stopped before its first evaluation has no entry yet.
    entry = stored.get(part) or {"config": stored["config"]["model"][part]}
    config = from_json(sizes, entry["config"], str(folder / CONFIG))
    weights = fill_shapes(nnx.state(model.abstract(config)), tensors[part], folder)
    # A kind that is not fitted may be null.
    kinds = {k: Calibration(**v) for k, v in entry.get("calibration", {}).items() if v}
    return model(config, weights, entry.get("threshold", 0.0), matmul_precision, kinds)


# Weights by dotted path


def read_weights(folder: Path, stored: Mapping[str, Any]) -> dict[str, Tensors]:
    """Reads the weights of the segmenter and of each of `PARTS`; {} for what is not there.

    Raises InputError if there are none yet, a file of an export differs from its checksum, or a
    published encoder of a compact one cannot be had.
    """
    if is_export(folder):
        verify_files(folder)
    elif not (folder / WEIGHTS).exists():
        raise InputError(f"{folder}: the run has no weights yet; train on with --resume")
    weights: dict[str, dict[str, np.ndarray]] = {part: {} for part in (SEGMENTER, *PARTS)}
    for path, value in read_tensors(folder / WEIGHTS).items():
        first, _, rest = path.partition(".")
        if first in PARTS:
            weights[first][rest] = value
        else:
            weights[SEGMENTER][path] = value
    if not stored["compact"]:
        return dict(weights)
    return {
        part: restore_compact(tensors, published_weights(part, stored)) if tensors else {}
        for part, tensors in weights.items()
    }


def published_weights(part: str, stored: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Returns the published weights that the segmenter or a part starts from, by dotted path; {}
    for those of a file of its own. `stored`: the config.json. Raises InputError if they cannot be
    had."""
    if part == SEGMENTER:
        config = from_json(Config, stored["config"], CONFIG).model
        weights: dict[str, Tensor] = {}
        for report in match_pretrained(config, nnx.state(abstract_model(config))).values():
            weights |= report.values
        return weights
    model, sizes = PARTS[part]
    config = from_json(sizes, stored[part]["config"], CONFIG)
    if part != "outliner" or config.efficientnet not in EFFICIENTNETS:
        return {}
    backbone = nnx.state(model.abstract(config))["efficientnet"]
    filled = first_blocks(backbone, find_model(config.efficientnet, EFFICIENTNET_FLAG))
    return jax.device_get({f"efficientnet.{path}": x for path, x in flat_weights(filled).items()})


def restore_compact(stored: Tensors, published: Mapping[str, Tensor]) -> Tensors:
    """Returns all weights of a compact export in float32. A difference is multiplied by its unit
    and added to the published weight."""
    weights = {name: np.asarray(value, np.float32) for name, value in published.items()}
    for name, value in stored.items():
        if name.endswith(UNIT):
            continue
        weight = value.astype(np.float32)
        if name + UNIT in stored:
            weight = weights[name] + weight * stored[name + UNIT]
        weights[name] = weight
    return weights


def fill_shapes(shapes: nnx.State, weights: Mapping[str, Any], folder: Path) -> nnx.State:
    """Returns a state with weights by dotted path, in the types of `shapes`.

    Raises InputError if a weight is missing, unknown or of another shape.
    """
    expected = flat_weights(shapes)
    problems = [f"missing {name}" for name in expected if name not in weights]
    for name, value in weights.items():
        if name not in expected:
            problems.append(f"unknown {name}")
        elif value.shape != expected[name].shape:
            problems.append(f"{name} is {value.shape}, not {expected[name].shape}")
    if problems:
        raise InputError(
            f"{folder / WEIGHTS} does not fit its {CONFIG}: {'; '.join(problems[:3])} "
            f"({len(problems)} in all); export or download it again"
        )
    return put_weights(shapes, weights)


# Compiled programs


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
    with suppress(OSError):  # another process prunes it, too
        _prune(folder, MAX_CACHE_BYTES)
    settings.update("jax_compilation_cache_dir", str(folder))
    # Where the disk is full or a stored program is damaged, JAX compiles the program again. The
    # answer is the same, so JAX's warnings, one for each program, are not shown.
    message = "Error (reading|writing) persistent compilation cache"
    warnings.filterwarnings("ignore", message)
    # By default JAX stores only programs that took a second to compile. A start has a hundred that
    # take less each, so all are stored.
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _prune(folder: Path, max_bytes: int) -> None:
    """Deletes the files of a folder that were not read for longest, until `max_bytes` are left."""
    # JAX's own jax_compilation_cache_max_size reads the dates of all programs each time that it
    # adds one: 0.17 s with 3,000 of them, a hundred times at a start.
    files = [(path, path.stat()) for path in folder.glob("*")]
    files.sort(key=lambda file: max(file[1].st_atime, file[1].st_mtime), reverse=True)
    num_bytes = 0
    for path, status in files:
        num_bytes += status.st_size
        if num_bytes > max_bytes:
            path.unlink()
