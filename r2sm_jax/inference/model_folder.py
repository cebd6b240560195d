"""Folders of runs and exports (docs/export.md): how to find one and check it, without JAX."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from r2sm_jax.config import FORMAT_VERSION
from r2sm_jax.errors import InputError, atomic_write, load_json
from r2sm_jax.models.hub import (
    CONFIG,
    DOWNLOAD_ERRORS,
    HUB,
    MODEL_FILES,
    WEIGHTS,
    download,
    file_sha256,
    in_short,
)

FUNCTIONS = "model.stablehlo"
PREPROCESSOR = "preprocessor_config.json"
CHECKSUMS = "SHA256SUMS"
TRAINED_ON = "trained_on.txt"
"""Has a line for each picture file that the weights were trained on, its `fingerprint`."""
CARD = "README.md"
LANGUAGE_MODEL = "language_model"
EXPORT_FILES = (CONFIG, WEIGHTS, FUNCTIONS, PREPROCESSOR, TRAINED_ON, CHECKSUMS, CARD, *MODEL_FILES)
EXPORT_FILES += tuple(f"{LANGUAGE_MODEL}/{name}" for name in MODEL_FILES)
"""All files that an export may have: names and patterns. Nothing else is fetched from the hub."""

RELEASED = Path(__file__).parents[1] / "released"
"""Exports that this package brings along, in folders by name."""


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
    if not str(name).startswith(HUB):
        released = ", ".join(sorted(path.name for path in RELEASED.iterdir() if path.is_dir()))
        raise InputError(
            f"{name}: no such run folder; give one that train wrote, an export, "
            f"or a released model ({released})"
        )
    try:
        return download(str(name), EXPORT_FILES, read_stored)
    except DOWNLOAD_ERRORS as error:
        raise InputError(
            f"{name}: the Hugging Face hub did not give this export ({in_short(error)}); "
            f"check the name, which is {HUB}owner/name, and the network connection"
        ) from None


def read_stored(folder: Path) -> dict[str, Any]:
    """Returns the `config.json` of a run or an export. Raises InputError if there is none, or a
    later version of this package wrote it."""
    path = folder / CONFIG
    stored = load_json(path, "the configuration of a run")
    if not isinstance(stored, dict) or stored.get("model_type") != "r2sm":
        raise InputError(f"{path}: this is neither a run folder nor an export; check its name")
    version = stored["format_version"]
    if not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {version}, but this r2sm_jax reads up to {FORMAT_VERSION}; "
            "upgrade it with pip install --upgrade r2sm_jax"
        )
    return stored


def hash_model(folder: Path) -> str:
    """Hashes the configuration and the weights of a run or an export."""
    return " ".join(file_sha256(folder / name) for name in (CONFIG, WEIGHTS))


def language_model_of(folder: Path, stored: Mapping[str, Any]) -> str:
    """Returns the folder or the name of the language model of a run or an export. `stored`: its
    config.json."""
    language_model = stored["language_model"]
    is_embedded = language_model.get("embedded", False)
    return str(folder / LANGUAGE_MODEL) if is_embedded else language_model["name"]


def read_trained_on(folder: Path) -> set[str] | None:
    """Returns the fingerprints of the pictures that a model was trained on; None where its run or
    export is older than they are."""
    path = folder / TRAINED_ON
    return set(path.read_text("utf-8").split()) if path.exists() else None


def write_trained_on(folder: Path, fingerprints: Iterable[str], sources: Iterable[Path]) -> None:
    """Writes the fingerprints of the pictures that a model was trained on, and those of the runs
    and exports that its weights come from. If one of these does not say them, there is no file."""
    (folder / TRAINED_ON).unlink(missing_ok=True)
    known = set(fingerprints)
    for source in sources:
        of_source = read_trained_on(source)
        if of_source is None:
            return
        known |= of_source
    # A made picture has none.
    lines = [f"{name}\n" for name in sorted(known - {""})]
    with atomic_write(folder / TRAINED_ON) as part:
        part.write_text("".join(lines), "utf-8")


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export, which has checksums, and not a run."""
    return (folder / CHECKSUMS).exists()


def write_checksums(folder: Path) -> None:
    """Writes `SHA256SUMS` in the format of `sha256sum`, without the card, which may be edited."""
    lines = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name not in (CARD, CHECKSUMS):
            lines.append(f"{file_sha256(file)}  {name}\n")
    (folder / CHECKSUMS).write_text("".join(lines), "utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the checksums of an export by the name of the file."""
    digests = {}
    for line in (folder / CHECKSUMS).read_text("utf-8").splitlines():
        digest, _, name = line.partition("  ")
        digests[name] = digest
    return digests


def verify_files(folder: Path) -> None:
    """Checks the files of an export against their checksums. Raises InputError if one differs."""
    for name, digest in read_checksums(folder).items():
        path = folder / name
        if not path.is_file() or file_sha256(path) != digest:
            raise InputError(
                f"{path}: missing, changed or damaged; its sha256 must be {digest}; export the run "
                "again or download the export again"
            )
