"""The parts that can stand beside a segmenter, completer and outliner: their files.

Training writes a part into a folder of its own:

    NAME.json           {"config": its sizes, and its further values}
    NAME.safetensors    its weights by dotted path

An export holds the same object as NAME in config.json, and the weights among those of
model.safetensors with `NAME.` before their names.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from r2sm_jax.cli import from_json, to_json
from r2sm_jax.config import Config
from r2sm_jax.errors import InputError, atomic_write, load_json
from r2sm_jax.inference.export_folder import (
    CONFIG,
    WEIGHTS,
    check_export,
    find_folder,
    is_export,
    read_export_config,
)
from r2sm_jax.inference.export_weights import flat_weights
from r2sm_jax.inference.small_weights import from_stored
from r2sm_jax.models.efficientnet import EfficientNetLite
from r2sm_jax.models.hub import EFFICIENTNETS, read_tensors
from r2sm_jax.models.keys import first_blocks
from r2sm_jax.models.pretrained import find_efficientnet

PARTS = ("completer", "outliner")


def to_stored(config: Any, **values: float) -> dict[str, Any]:
    """The JSON object of a part. `config`: its sizes; `values`: what else it needs."""
    return {"config": to_json(config), **values}


def save_part(folder: Path, name: str, stored: Mapping[str, Any], weights: nnx.State) -> None:
    """Writes a part into a folder. Raises InputError if it cannot be written."""
    tensors = {path: np.asarray(value) for path, value in flat_weights(weights).items()}
    with atomic_write(folder / f"{name}.safetensors") as part:
        save_file(tensors, part)
    with atomic_write(folder / f"{name}.json") as part:
        part.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


def read_part(path: Path, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON object and the weights that `save_part` wrote.

    Args:
        path: its folder, or one of the two files.

    Raises InputError if there is none, or it is damaged.
    """
    folder = path.parent if path.is_file() else path
    file = folder / f"{name}.json"
    if not file.is_file():
        raise InputError(f"{path}: there is no {file.name}; give the run folder of the {name}")
    stored = _check(load_json(file, f"the configuration of the {name}"), name, file)
    return stored, read_tensors(folder / f"{name}.safetensors")


def find_part(
    name: str, model: str | Path
) -> tuple[dict[str, Any], Mapping[str, np.ndarray]] | None:
    """A part by the name of a model, without the segmenter and the language model beside it.

    Args:
        model: the run folder of the part, or an export that holds one, also by the name of a
            released model or `hf:owner/name`.

    Returns None for an export without it. Raises InputError as `find_folder` and `read_part`, or if
    the export is damaged.
    """
    folder = find_folder(model)
    if not is_export(folder):
        return read_part(folder, name)
    check_export(folder)
    return part_of_export(folder, name, split_tensors(read_tensors(folder / WEIGHTS)))


def start_weights(
    config: Config, name: str, build: Callable[[], nnx.Module]
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The structure of a part that is going to be trained, its trained weights and the frozen ones.

    All weights are those of `--init MODEL`. Without it they are random, those of a frozen backbone
    published.

    Args:
        build: makes the module, with random weights.

    Raises InputError as `find_part`, for an export without the part, for a part of other sizes than
    configured, or if the published weights cannot be read.
    """
    sizes = getattr(config.model, name)
    graphdef, weights, frozen = nnx.split(build(), nnx.Param, ...)
    if config.init:
        part = find_part(name, config.init)
        if part is None:
            raise InputError(
                f"--init {config.init}: this export has no {name}; give the run folder of one, or "
                "an export that holds one"
            )
        stored, tensors = part
        stored_sizes = from_json(type(sizes), stored["config"], config.init)
        check_sizes(name, config.init, stored_sizes, sizes)
        weights, frozen = nnx.split_state(fill_weights(build, tensors, name), nnx.Param, ...)
        print(f"weights from {config.init}", flush=True)
    elif sizes.efficientnet:
        source = find_efficientnet(sizes.efficientnet, f"--model.{name}.efficientnet")
        frozen["efficientnet"] = first_blocks(frozen["efficientnet"], source)
    return graphdef, weights, frozen


def check_sizes(name: str, model: str, stored_sizes: Any, sizes: Any) -> None:
    """Raises InputError, which gives the flags, if a part has other sizes than configured."""
    configured = to_json(sizes)
    flags = []
    for field, value in to_json(stored_sizes).items():
        if value != configured[field]:
            values = value if isinstance(value, list) else [value]
            flags.append(f"--model.{name}.{field.replace('_', '-')}")
            flags += map(str, values)
    if flags:
        raise InputError(f"--init {model}: its {name} has other sizes; give {shlex.join(flags)}")


def part_of_export(
    folder: Path, name: str, tensors: Mapping[str, Mapping[str, np.ndarray]]
) -> tuple[dict[str, Any], Mapping[str, np.ndarray]] | None:
    """A part of an export, None where it has none.

    Reads config.json of the folder again, and the published weights that a compact export lacks.

    Args:
        tensors: as `split_tensors` gives them.

    Raises InputError for an object that is no part's, or as `published_backbone`.
    """
    export_config = read_export_config(folder)
    if export_config.get(name) is None:
        return None
    stored = _check(export_config[name], name, folder / CONFIG)
    if export_config["compact"]:
        return stored, from_stored(tensors[name], published_backbone(stored))
    return stored, tensors[name]


def published_backbone(stored: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The published weights of a part's frozen backbone, by dotted path, for compact exports.

    None where the part has no backbone, or one that only its folder names: such weights are stored.

    Args:
        stored: the JSON object of the part.

    Raises InputError if they cannot be had, or are of other sizes.
    """
    config = stored["config"]
    name = config.get("efficientnet")
    if name not in EFFICIENTNETS:
        return {}

    def build() -> EfficientNetLite:
        dims = tuple(config["block_dims"])
        return EfficientNetLite(dims, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))

    backbone = nnx.state(nnx.eval_shape(build))
    weights = first_blocks(backbone, find_efficientnet(name))
    return {
        f"efficientnet.{path}": np.asarray(value) for path, value in flat_weights(weights).items()
    }


def split_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Divides the tensors of an export: the segmenter's under "segmenter", and those of each part
    under its name."""
    divided: dict[str, dict[str, np.ndarray]] = {name: {} for name in ("segmenter", *PARTS)}
    for path, value in tensors.items():
        first, _, rest = path.partition(".")
        if first in PARTS:
            divided[first][rest] = value
        else:
            divided["segmenter"][path] = value
    return divided


def join_tensors(divided: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The inverse of `split_tensors`."""
    tensors = dict(divided["segmenter"])
    for name in PARTS:
        tensors |= {f"{name}.{path}": value for path, value in divided[name].items()}
    return tensors


def fill_weights(
    build: Callable[[], nnx.Module], tensors: Mapping[str, Any], name: str
) -> nnx.State:
    """The weights of a part from arrays by dotted path.

    Args:
        build: makes the module, with random weights.

    Raises InputError for missing weights and other shapes.
    """
    _, state = nnx.split(nnx.eval_shape(build))
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        dotted = ".".join(map(str, path))
        value = tensors.get(dotted)
        if value is None or value.shape != leaf.shape:
            raise InputError(
                f"the weights of the {name} lack {dotted} of the shape {leaf.shape}; export the "
                "run again or download the export again"
            )
        filled.append((path, leaf.replace(jnp.asarray(value, leaf.dtype))))
    return nnx.from_flat_state(filled)


def _check(stored: Any, name: str, where: Path) -> dict[str, Any]:
    """The JSON object of a part; raises InputError for anything else."""
    if not isinstance(stored, dict) or "config" not in stored:
        raise InputError(f"{where}: this holds no config of the {name}; train or export it again")
    return stored
