"""Loads trained models: run folders and exports, which have the same files, for inference.

`config.json` holds all sizes and the calibration, `model.safetensors` the weights by dotted path:
those of the segmenter, and with `completer.` or `outliner.` before their names those of the parts
that can stand beside it.

A compact export has few bytes. A published weight that training left as it was is not stored: it is
found by its model's name. One that was trained on is stored as the difference from the published
one, in 8 bits, with a unit for each output channel under `NAME.unit`. All other weights are stored
in float16.
"""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from r2sm_jax.cli import from_json
from r2sm_jax.config import CompleterConfig, Config, MatmulPrecision, ModelConfig, OutlinerConfig
from r2sm_jax.data.text_states import open_language_model
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import MaskCompleter, MaskOutliner, no_part
from r2sm_jax.inference.model_folder import (
    CONFIG,
    LANGUAGE_MODEL,
    WEIGHTS,
    check_files,
    find_folder,
    is_export,
    read_stored,
)
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.models.crop_unet import make_completer, make_outliner
from r2sm_jax.models.efficientnet import EfficientNetLite
from r2sm_jax.models.hub import EFFICIENTNETS, cache_dir, find_model, read_tensors
from r2sm_jax.models.keys import first_blocks
from r2sm_jax.models.matching import Tensor
from r2sm_jax.models.pretrained import EFFICIENTNET_FLAG, match_pretrained
from r2sm_jax.models.r2sm import Calibration, abstract_model

Part = Literal["segmenter", "completer", "outliner"]
PARTS: tuple[Part, ...] = ("segmenter", "completer", "outliner")
UNIT = ".unit"
"""Ends the name of the units of a difference."""
MAX_CACHE_BYTES = 512 << 20
"""Limit for the compiled programs in the user's cache folder; a program has 40 kB on average."""


@dataclass(frozen=True)
class Run:
    """A trained segmenter, ready to predict: from a run folder or an export."""

    folder: Path
    config: Config
    step: int
    predictor: Predictor


def load(name: str | Path, *, matmul_precision: MatmulPrecision = "float32") -> Run:
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
    tensors = read_parts(folder, stored)
    if not tensors["segmenter"]:
        part = config.train.part
        raise InputError(
            f"{folder}: this is the run of the part {part}, which finds nothing by itself; put it "
            f"into an export with python -m r2sm_jax.export RUN --{part} {folder} --out DIR"
        )
    graphdef, shapes = nnx.split(abstract_model(config.model))
    weights = fill(shapes, tensors["segmenter"], folder)

    text, language_model = config.model.text, stored["language_model"]
    is_embedded = language_model.get("embedded", False)
    text_encoder = open_language_model(
        text,
        str(folder / LANGUAGE_MODEL) if is_embedded else text.name,
        language_model,
        str(folder),
    )
    predictor = Predictor(
        config.model,
        graphdef,
        weights,
        text_encoder,
        Calibration(**stored.get("calibration", {})),
        matmul_precision,
        completer=make_part("completer", stored, tensors, folder, matmul_precision),
        outliner=make_part("outliner", stored, tensors, folder, matmul_precision),
    )
    if stored["compact"] and predictor.weights_sha256 != stored["weights_sha256"]:
        raise InputError(
            f"{folder}: with the published image encoder that was found, its weights have sha256 "
            f"{predictor.weights_sha256}, not {stored['weights_sha256']}; get the encoder that it "
            "was trained with"
        )
    return Run(folder, config, stored["step"], predictor)


def load_part(name: str | Path, part: Part) -> Any:
    """Loads a completer or an outliner alone, without segmenter and language model.

    Args:
        name: that of a model, as `load` reads it, or of the run of the part.

    Raises InputError as `load`, or if the model has none.
    """
    folder = find_folder(name)
    stored = read_stored(folder)
    found = make_part(part, stored, read_parts(folder, stored), folder)
    if found is None:
        raise no_part(part, str(name))
    return found


def load_completer(name: str | Path) -> MaskCompleter:
    """Loads a completer as `load_part`."""
    return load_part(name, "completer")


def load_weights(name: str | Path, config: ModelConfig) -> nnx.State:
    """Loads the segmenter's weights alone, to train on from them.

    Raises InputError as `load`, or if the model has another architecture than `config`.
    """
    folder = find_folder(name)
    stored = read_stored(folder)
    model = from_json(Config, stored["config"], str(folder / CONFIG)).model
    if model != config:
        raise InputError(
            f"--init {name}: its model differs from the configuration; use the same --model flags"
        )
    _, shapes = nnx.split(abstract_model(config))
    return fill(shapes, read_parts(folder, stored)["segmenter"], folder)


def make_part(
    part: Part,
    stored: Mapping[str, Any],
    tensors: Mapping[Part, Mapping[str, np.ndarray]],
    folder: Path,
    matmul_precision: MatmulPrecision = "float32",
) -> Any:
    """Makes a completer or outliner of its weights. Returns None if there are none."""
    if not tensors[part]:
        return None
    # A run that was stopped before its first evaluation has no entry yet.
    entry = stored.get(part) or {"config": stored["config"]["model"][part]}
    where = str(folder / CONFIG)
    if part == "completer":
        sizes = from_json(CompleterConfig, entry["config"], where)
        shapes = nnx.state(nnx.eval_shape(lambda: make_completer(sizes, rngs=nnx.Rngs(0))))
        weights = fill(shapes, tensors[part], folder)
        return MaskCompleter(sizes, weights, entry.get("threshold", 0.0), matmul_precision)
    sizes = from_json(OutlinerConfig, entry["config"], where)
    shapes = nnx.state(nnx.eval_shape(lambda: make_outliner(sizes, rngs=nnx.Rngs(0))))
    return MaskOutliner(sizes, fill(shapes, tensors[part], folder), matmul_precision)


# Weights by dotted path


def read_parts(folder: Path, stored: Mapping[str, Any]) -> dict[Part, dict[str, np.ndarray]]:
    """Reads the weights of the segmenter and of the parts beside it; {} for what is not there.

    Raises InputError if there are none yet, a file of an export differs from its checksum, or a
    published encoder of a compact one cannot be had.
    """
    if is_export(folder):
        check_files(folder)
    elif not (folder / WEIGHTS).exists():
        raise InputError(f"{folder}: the run has no weights yet; train on with --resume")
    parts: dict[Part, dict[str, np.ndarray]] = {part: {} for part in PARTS}
    for path, value in read_tensors(folder / WEIGHTS).items():
        first, _, rest = path.partition(".")
        if first in ("completer", "outliner"):
            parts[first][rest] = value
        else:
            parts["segmenter"][path] = value
    if stored["compact"]:
        for part, tensors in parts.items():
            if tensors:
                parts[part] = restore_differences(tensors, published_weights(part, stored))
    return parts


def published_weights(part: Part, stored: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Returns the published weights that a part starts from, by dotted path; {} for those of a file
    of its own. `stored`: the config.json. Raises InputError if they cannot be had."""
    if part == "segmenter":
        config = from_json(Config, stored["config"], CONFIG).model
        weights: dict[str, Tensor] = {}
        for report in match_pretrained(config, nnx.state(abstract_model(config))).values():
            weights |= report.values
        return weights
    sizes = stored[part]["config"]
    name = sizes["efficientnet"]
    if name not in EFFICIENTNETS:
        return {}
    dims, dtype = tuple(sizes["block_dims"]), jnp.dtype("float32")
    network = nnx.eval_shape(lambda: EfficientNetLite(dims, dtype=dtype, rngs=nnx.Rngs(0)))
    filled = first_blocks(nnx.state(network), find_model(name, EFFICIENTNET_FLAG))
    return {f"efficientnet.{path}": np.asarray(x) for path, x in flat_weights(filled).items()}


def restore_differences(
    stored: Mapping[str, np.ndarray], published: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    """Returns all weights of a compact export in float32.

    Raises InputError for the difference from a weight that is not among the published ones.
    """
    weights = {name: np.asarray(value, np.float32) for name, value in published.items()}
    for name, value in stored.items():
        if name.endswith(UNIT):
            continue
        weight = value.astype(np.float32)
        if name + UNIT in stored:
            if name not in published or published[name].shape != value.shape:
                raise InputError(
                    f"{name} is stored as the difference from a published weight, but the encoder "
                    "that was found has none of that name and shape; get the encoder that it was "
                    "trained with"
                )
            weight = weights[name] + weight * stored[name + UNIT]
        weights[name] = weight
    return weights


def fill(shapes: nnx.State, weights: Mapping[str, Any], folder: Path) -> nnx.State:
    """Returns a state with weights by dotted path, in the types of `shapes`.

    Raises InputError if a weight is missing, unknown or of another shape.
    """
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(shapes)}
    problems = [f"missing {name}" for name in sorted(leaves.keys() - weights.keys())]
    problems += [f"unknown {name}" for name in sorted(weights.keys() - leaves.keys())]
    for name in leaves.keys() & weights.keys():
        if weights[name].shape != leaves[name].shape:
            problems.append(f"{name} is {weights[name].shape}, not {leaves[name].shape}")
    if problems:
        raise InputError(
            f"{folder / WEIGHTS} does not fit its {CONFIG}: {'; '.join(problems[:3])} "
            f"({len(problems)} in all); export or download it again"
        )
    filled = []
    for path, leaf in nnx.to_flat_state(shapes):
        value = jnp.asarray(weights[".".join(map(str, path))], leaf.dtype)
        filled.append((path, leaf.replace(value)))
    return nnx.from_flat_state(filled)


def flat_weights(state: nnx.State) -> dict[str, Any]:
    """Returns the values of a state by dotted path, such as "decoder.image.kernel"."""
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


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
