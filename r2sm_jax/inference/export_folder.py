"""The folder of an export (docs/export.md): how to find one and check it, without JAX."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError

from r2sm_jax.errors import InputError, refuse_dangling
from r2sm_jax.models.hub import HUB, MODEL_FILES, download, file_sha256

FORMAT_VERSION = 2
"""2: compact exports may store differences from published weights (small_weights.py)."""
MODEL_TYPE = "r2sm"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
FUNCTIONS = "model.stablehlo"
PREPROCESSOR = "preprocessor_config.json"
CHECKSUMS = "SHA256SUMS"
CARD = "README.md"
LANGUAGE_MODEL = "language_model"
FILES = (CONFIG, WEIGHTS, FUNCTIONS, PREPROCESSOR, CHECKSUMS, CARD, *MODEL_FILES)
FILES += tuple(f"{LANGUAGE_MODEL}/{name}" for name in MODEL_FILES)
"""All files that an export may have: names and patterns. Nothing else is fetched from the hub."""

RELEASED = Path(__file__).parents[1] / "released"
"""Exports that this package brings along, in folders by name."""
REMEDY = "export the run again or download the export again"


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export, even a damaged one."""
    config = read_export_config(folder)
    if config:
        return config.get("model_type") == MODEL_TYPE
    return (folder / CHECKSUMS).exists()


def read_export_config(folder: Path) -> dict[str, Any]:
    """Returns the `config.json` of a folder; empty where it is missing or damaged."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def find_folder(name: str | Path) -> Path:
    """Returns the folder of a run or an export.

    Args:
        name: a local folder, a released model of this package, or `hf:owner/name` of an export on
            the Hugging Face hub, which is downloaded. A local folder goes before a released model.

    Raises InputError if there is no such folder, or neither the hub nor its local cache has the
    export.
    """
    folder = Path(name)
    if folder.exists():
        return folder
    if (RELEASED / folder / CONFIG).is_file():
        return RELEASED / folder
    refuse_dangling(folder)
    if not str(name).startswith(HUB):
        released = ", ".join(sorted(path.name for path in RELEASED.iterdir() if path.is_dir()))
        raise InputError(
            f"{name}: no such run folder; give one that train wrote, an export, "
            f"or a released model ({released})"
        )
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


def write_checksums(folder: Path) -> None:
    """Writes `SHA256SUMS` in the format of `sha256sum`, without the card, which may be edited."""
    lines = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name not in (CARD, CHECKSUMS):
            lines.append(f"{file_sha256(file)}  {name}\n")
    (folder / CHECKSUMS).write_text("".join(lines), "utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the checksums of an export by the name of the file; empty if there are none."""
    checksums = folder / CHECKSUMS
    text = checksums.read_text("utf-8", errors="replace") if checksums.is_file() else ""
    digests = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        digests[name] = digest
    return digests


def check_version(folder: Path) -> None:
    """Raises InputError if a later version of this package wrote an export."""
    version = read_export_config(folder).get("format_version", FORMAT_VERSION)
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            f"{folder / CONFIG}: format version {version!r}, but this r2sm_jax reads up to "
            f"{FORMAT_VERSION}; upgrade it with pip install --upgrade r2sm_jax"
        )


def check_export(folder: Path) -> None:
    """Checks the files of an export against their checksums.

    Raises InputError if a later version of this package wrote it, or a file is missing or differs.
    """
    check_version(folder)
    digests = read_checksums(folder)
    if not {CONFIG, WEIGHTS} <= digests.keys():
        raise InputError(f"{folder / CHECKSUMS}: missing or not readable; {REMEDY}")

    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing; its sha256 must be {digest}; {REMEDY}")
        if file_sha256(path) != digest:
            raise InputError(f"{path}: changed or damaged; its sha256 must be {digest}; {REMEDY}")
