"""Exports: how to find one and read it back. docs/export.md lists the files of the folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from huggingface_hub.errors import HTTPError

from r2sm_jax.cli import from_json
from r2sm_jax.config import Config, ModelConfig
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.models.encoder_sizes import EncoderSizes
from r2sm_jax.models.pretrained import match_pretrained
from r2sm_jax.models.r2sm import R2SM, Calibration, abstract_model
from r2sm_jax.models.weights import (
    HUB,
    MODEL_FILES,
    KeyTable,
    Tensor,
    download,
    file_sha256,
    fill,
    read_tensors,
)

FORMAT_VERSION = 1
MODEL_TYPE = "r2sm"
CONFIG, WEIGHTS, FUNCTIONS, SUMS = (
    "config.json",
    "model.safetensors",
    "model.stablehlo",
    "SHA256SUMS",
)
LANGUAGE_MODEL = "language_model"
CARD = "README.md"
FILES = (CONFIG, WEIGHTS, FUNCTIONS, SUMS, CARD, "preprocessor_config.json", *MODEL_FILES)
FILES += tuple(f"{LANGUAGE_MODEL}/{name}" for name in MODEL_FILES)
"""All files that an export may have: names and patterns."""
RELEASED = Path(__file__).parents[1] / "released"
RELEASED_MODELS = sorted(path.parent.name for path in RELEASED.glob(f"*/{CONFIG}"))
"""Models that this package brings along, by name."""
REMEDY = "export the run again or download the export again"
SAME_NAMES = KeyTable({"**": "**"})
"""Files hold our weights under our own dotted paths."""


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export (a damaged one included) and not a run."""
    config = read_config(folder)
    return config.get("model_type") == MODEL_TYPE if config else (folder / SUMS).exists()


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder; empty where it is missing or damaged."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        return config if isinstance(config, dict) else {}
    except (OSError, ValueError):
        return {}


def find_export(name: str | Path) -> Path:
    """A local folder, a released model of this package, or the folder into which `hf:owner/name` is downloaded. A
    folder that does not exist is returned, too. Raises InputError if neither the Hugging Face hub nor its local cache
    has an export of that name."""
    folder = Path(name)
    if not folder.exists() and (RELEASED / folder / CONFIG).is_file():
        return RELEASED / folder
    if folder.exists() or not str(name).startswith(HUB):
        return folder
    try:
        return download(str(name), FILES, _check_is_export)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: the Hugging Face hub did not give this export ({type(error).__name__}); "
            f"check the name, which is {HUB}owner/name, and the network connection"
        ) from None


def _check_is_export(folder: Path) -> None:
    if not is_export(folder):
        raise InputError(f"{folder / CONFIG}: this model is no export of r2sm_jax; check its name")


def write_sums(folder: Path) -> None:
    """Writes `SHA256SUMS` in the format of `sha256sum`."""
    names = sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )
    lines = [
        f"{file_sha256(folder / name)}  {name}\n" for name in names if name not in (CARD, SUMS)
    ]
    (folder / SUMS).write_text("".join(lines), "utf-8")


def check_export(folder: Path) -> None:
    """Checks that this version can read an export, and all its files against their checksums. Raises InputError if a
    later version wrote it, or a file is missing or differs from its checksum."""
    version = read_config(folder).get("format_version", FORMAT_VERSION)
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            f"{folder / CONFIG}: format version {version!r}, but this r2sm_jax reads up to {FORMAT_VERSION}; "
            "upgrade it with pip install --upgrade r2sm_jax"
        )
    text = (folder / SUMS).read_text("utf-8", errors="replace") if (folder / SUMS).is_file() else ""
    sums = {
        name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())
    }
    if not {CONFIG, WEIGHTS} <= sums.keys():
        raise InputError(f"{folder / SUMS}: missing or not readable; {REMEDY}")
    for name, digest in sums.items():
        path = folder / name
        found = file_sha256(path) if path.is_file() else None
        if found != digest:
            problem = "missing" if found is None else "changed or damaged"
            raise InputError(f"{path}: {problem}; its sha256 must be {digest}; {REMEDY}")


def read_weights(
    folder: Path,
) -> tuple[Config, EncoderSizes, nnx.GraphDef, nnx.State, nnx.State, Calibration, int]:
    """Configuration, encoder sizes, graph, parameters, constants, calibration and step of an export. Raises InputError as `check_export`, or the
    weights do not fit the configuration."""
    check_export(folder)
    written, path = read_config(folder), folder / WEIGHTS
    config = from_json(Config, written["config"], str(folder / CONFIG))
    sizes = EncoderSizes.from_json(written["image_encoder"])
    tensors = read_tensors(path)
    if written.get("compact"):
        tensors = published_weights(config.model, sizes) | {
            k: np.asarray(x, np.float32) for k, x in tensors.items()
        }
    model = with_weights(config.model, sizes, tensors, path)
    graphdef, params, constants = nnx.split(model, nnx.Param, ...)
    calibration = Calibration(**written["calibration"])
    return config, sizes, graphdef, params, constants, calibration, int(written["step"])


def check_texts(texts: TextStates, trained: Mapping[str, Any], who: str) -> None:
    """Raises InputError if a language model is not the one that `who` was `trained` with: `TextStates.identity`, and
    its `name`. What was not stored is not compared."""
    found, revision = texts.identity, trained.get("revision")
    for part, key in (("weights have", "sha256"), ("tokenizer has", "tokenizer_sha256")):
        if trained.get(key, found[key]) != found[key]:
            raise InputError(
                f"{texts.folder}: its {part} sha256 {found[key]}, but {who} needs {trained[key]}; get the "
                f"{trained['name']} that it was trained with{f', revision {revision}' if revision else ''}"
            )


def check_weights(folder: Path, predictor: Predictor) -> None:
    """Raises InputError if the weights of a compact export, once opened, are not those that were exported: a published
    encoder to which it refers is another one."""
    written = read_config(folder)
    if written.get("compact") and predictor.weights_sha256 != written["weights_sha256"]:
        raise InputError(
            f"{folder}: with the published image encoder that was found, its weights have sha256 "
            f"{predictor.weights_sha256}, not {written['weights_sha256']}; get the encoder that it was trained with"
        )


def published_weights(config: ModelConfig, sizes: EncoderSizes) -> dict[str, Tensor]:
    """The published weights that training does not change, by dotted path. Raises InputError if they cannot be had."""
    state = nnx.state(abstract_model(config, sizes))
    constants = nnx.filter_state(state, nnx.Not(nnx.Param))
    frozen = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(constants)}
    found = match_pretrained(config, sizes, state)
    return {
        path: x for match in found.values() for path, x in match.values.items() if path in frozen
    }


def with_weights(
    config: ModelConfig, sizes: EncoderSizes, weights: Mapping[str, Tensor], path: Path
) -> R2SM:
    """A segmenter with weights by dotted path; nothing is computed but for them. `path` is their file, for messages.
    Raises InputError if a weight is missing, unknown or of another shape."""
    graphdef, state = nnx.split(abstract_model(config, sizes))
    return nnx.merge(graphdef, fill(state, weights, SAME_NAMES, source=path))


def by_dotted_path(state: nnx.State) -> dict[str, Any]:
    """The values of a state by dotted path, such as "decoder.blocks.0.mlp.layers.0.kernel"."""
    return {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}
