"""The files of an export, and reading them back.

config.json                 what it is, in which version of the format; the run's configuration
model.safetensors           all weights but the language model's, by dotted path
language_model/             the language model in Hugging Face's layout; only with --lm embed
tokenizer.json, ...         the language model's tokenizer
preprocessor_config.json    from an image to the frame that the model sees
model.stablehlo             three functions that need no code of ours, see functions.py
README.md                   the model card; yours to edit
SHA256SUMS                  of every file but the card
"""

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
from flax import nnx
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.flags import from_json
from r2sm_jax.models.text_states import TextStates
from r2sm_jax.models.weights import file_sha256
from r2sm_jax.tools.functions import abstract_model, filled

FORMAT_VERSION = 1
MODEL_TYPE = "r2sm"
CONFIG, WEIGHTS, FUNCTIONS, SUMS = "config.json", "model.safetensors", "model.stablehlo", "SHA256SUMS"
LANGUAGE_MODEL = "language_model"
CARD = "README.md"


def is_export(folder: Path) -> bool:
    """Whether a folder is (or once was) an export and not a run."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE
    except (OSError, ValueError):
        return (folder / SUMS).exists()


def find_export(name: str | Path) -> Path:
    """A local folder, or else the export that the Hugging Face hub (or its cache here) has as `OWNER/NAME`.

    Raises:
        InputError: the hub cannot give it.
    """
    folder = Path(name)
    local = folder.exists() or (folder.parent.is_dir() and str(folder.parent) != ".")
    if local or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
        return folder
    try:
        return Path(huggingface_hub.snapshot_download(str(name), etag_timeout=5))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: there is no such folder, and the Hugging Face hub did not give it ({type(error).__name__}); "
            "check the name, or go online once so that it is kept"
        ) from None


def write_sums(folder: Path) -> None:
    """Writes `SHA256SUMS`, which `sha256sum --check` reads too."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    names = [p.relative_to(folder).as_posix() for p in files]
    lines = [f"{file_sha256(folder / name)}  {name}\n" for name in names if name not in (CARD, SUMS)]
    (folder / SUMS).write_text("".join(lines))


def read_export(folder: Path) -> dict[str, Any]:
    """The `config.json` of an export of which every file is whole.

    Raises:
        InputError: it was written by a later version, or a file is missing or was changed.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        config = {}  # its hash tells
    version = config.get("format_version", FORMAT_VERSION) if isinstance(config, dict) else FORMAT_VERSION
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            f"{folder / CONFIG}: format version {version!r}, but this r2sm_jax reads up to {FORMAT_VERSION}; "
            "upgrade it with pip install --upgrade r2sm_jax"
        )
    try:
        lines = (folder / SUMS).read_text().splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        raise InputError(f"{folder / SUMS}: missing or not readable; export the run again or fetch it anew") from None
    if lacks := sorted({CONFIG, WEIGHTS} - set(sums)):
        raise InputError(f"{folder / SUMS}: it lacks {lacks[0]}; export the run again or fetch it anew")
    for name, digest in sums.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing (sha256 {digest}); export the run again or fetch it anew")
        if (found := file_sha256(path)) != digest:
            raise InputError(f"{path}: changed or damaged, its sha256 is {found}, not {digest}; fetch it anew")
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
        raise InputError(f"{path}: not a safetensors file ({error}); fetch it anew") from None
    wanted = named_shapes(state)
    if found := sorted(name for name in wanted.keys() | tensors.keys() if wanted.get(name) != shape_of(tensors, name)):
        raise InputError(f"{path}: {found[0]} does not fit config.json; fetch both anew")
    graphdef, params, constants = nnx.split(
        nnx.merge(graphdef, filled(state, jax.tree.map(jnp.asarray, tensors))), nnx.Param, ...
    )
    return config, graphdef, params, constants, int(written["step"])


def named_shapes(state: nnx.State) -> dict[str, tuple[int, ...]]:
    """Shapes by dotted path."""
    return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}


def shape_of(tensors: dict[str, Any], name: str) -> tuple[int, ...] | None:
    """The shape of a tensor; None where there is none of this name."""
    return tensors[name].shape if name in tensors else None


def open_texts(folder: Path, config: Config) -> TextStates:
    """The language model of an export: its own copy, or the one that it names.

    Raises:
        InputError: it cannot be had, or is not the one that the weights were trained with.
    """
    text, said = config.model.text, json.loads((folder / CONFIG).read_text())["language_model"]
    name = str(folder / LANGUAGE_MODEL) if said["embedded"] else text.name
    texts = TextStates(name, layers=text.layers, max_tokens=text.max_tokens)
    if texts.sha256 != said["sha256"]:
        raise InputError(
            f"{texts.folder}: its model.safetensors has sha256 {texts.sha256}, but this export needs {said['sha256']}; "
            f"get the {text.name} that it was trained with"
        )
    return texts
