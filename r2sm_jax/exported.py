"""Exports: which files they hold, where to find one, and how to read it back.

config.json                 format version, language model, and the configuration of the run
model.safetensors           all weights except those of the language model, by dotted path
language_model/             the language model in Hugging Face's layout; only with --lm embed
tokenizer.json, ...         the tokenizer of the language model
preprocessor_config.json    how an image becomes the frame that the model takes
model.stablehlo             three functions that need only JAX, see tools/export_functions.py
README.md                   the model card; users may edit it
SHA256SUMS                  checksums of all files except the card
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from r2sm_jax.config import Config, ModelConfig
from r2sm_jax.errors import InputError
from r2sm_jax.flags import from_json
from r2sm_jax.models.r2sm import build_model
from r2sm_jax.models.text_states import TextStates
from r2sm_jax.models.weights import file_sha256

FORMAT_VERSION = 1
MODEL_TYPE = "r2sm"
CONFIG, WEIGHTS, FUNCTIONS, SUMS = "config.json", "model.safetensors", "model.stablehlo", "SHA256SUMS"
LANGUAGE_MODEL = "language_model"
CARD = "README.md"
REMEDY = "export the run again or download the export again"


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export (a damaged one included) and not a run."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE
    except (OSError, ValueError):
        return (folder / SUMS).exists()


def find_export(name: str | Path) -> Path:
    """A local folder; or else the folder into which the Hugging Face hub's `OWNER/NAME` is downloaded.

    Raises:
        InputError: neither the hub nor its local cache has it.
    """
    folder = Path(name)
    is_local = folder.exists() or (folder.parent.is_dir() and str(folder.parent) != ".")
    if is_local or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
        return folder
    try:
        return Path(huggingface_hub.snapshot_download(str(name), etag_timeout=5))
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: there is no such folder, and the Hugging Face hub did not give it ({type(error).__name__}); "
            "check the name and the network connection"
        ) from None


def write_sums(folder: Path) -> None:
    """Writes `SHA256SUMS` in the format of `sha256sum`."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    lines = [f"{file_sha256(folder / name)}  {name}\n" for name in names if name not in (CARD, SUMS)]
    (folder / SUMS).write_text("".join(lines))


def read_export(folder: Path) -> dict[str, Any]:
    """Checks all files of an export and returns its `config.json`.

    Raises:
        InputError: a later version wrote it, or a file is missing or differs from its checksum.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        version = config.get("format_version", FORMAT_VERSION)
    except (OSError, ValueError, AttributeError):
        config, version = {}, FORMAT_VERSION  # the checksum below tells what is wrong
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            f"{folder / CONFIG}: format version {version!r}, but this r2sm_jax reads up to {FORMAT_VERSION}; "
            "upgrade it with pip install --upgrade r2sm_jax"
        )
    try:
        lines = (folder / SUMS).read_text().splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        sums = {}
    if not {CONFIG, WEIGHTS} <= sums.keys():
        raise InputError(f"{folder / SUMS}: missing or not readable; {REMEDY}")
    for name, digest in sums.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing (sha256 {digest}); {REMEDY}")
        if (found := file_sha256(path)) != digest:
            raise InputError(f"{path}: changed or damaged, its sha256 is {found}, not {digest}; {REMEDY}")
    return config


def read_weights(folder: Path) -> tuple[Config, nnx.GraphDef, nnx.State, nnx.State, int]:
    """Configuration, graph, parameters, constants and step of an export.

    Raises:
        InputError: as `read_export`, or the weights do not fit the configuration.
    """
    written = read_export(folder)
    config = from_json(Config, written["config"], str(folder / CONFIG))
    graphdef, state = abstract_model(config.model)
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a safetensors file ({error}); {REMEDY}") from None
    wanted = {name: leaf.shape for name, leaf in by_dotted_path(state).items()}
    found = {name: array.shape for name, array in tensors.items()}
    if different := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise InputError(f"{path}: {different[0]} does not fit {CONFIG}; {REMEDY}")
    model = nnx.merge(graphdef, with_values(state, jax.tree.map(jnp.asarray, tensors)))
    graphdef, params, constants = nnx.split(model, nnx.Param, ...)
    return config, graphdef, params, constants, int(written["step"])


def open_texts(folder: Path, config: Config) -> TextStates:
    """The language model of an export: the copy in the folder, or else the published one that it names.

    Raises:
        InputError: it cannot be loaded, or it is not the one that the weights were trained with.
    """
    text, written = config.model.text, json.loads((folder / CONFIG).read_text())["language_model"]
    name = str(folder / LANGUAGE_MODEL) if written["embedded"] else text.name
    texts = TextStates(name, layers=text.layers, max_tokens=text.max_tokens)
    if texts.sha256 != written["sha256"]:
        raise InputError(
            f"{texts.folder}: its weights have sha256 {texts.sha256}, but this export needs {written['sha256']}; "
            f"get the {text.name} that it was trained with"
        )
    return texts


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure of a segmenter, and a state that holds shapes in place of values; computes nothing."""
    return nnx.split(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))


def by_dotted_path(state: nnx.State) -> dict[str, Any]:
    """The variables of a state by dotted path, such as "decoder.blocks.0.mlp.layers.0.kernel"."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def with_values(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """A state with other values; `values` holds one for every dotted path."""
    flat = [(path, variable.replace(values[".".join(map(str, path))])) for path, variable in nnx.to_flat_state(state)]
    return nnx.from_flat_state(flat)
