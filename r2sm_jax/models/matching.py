"""Published tensors -> our parameters: key tables, and an account of every key and every parameter.

A family of weights has a table (keys_text.py, keys_sam.py, ...). Loading is loud: all keys that are
unknown or have another shape, and all parameters that no key fills, are named at once.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import weight_files

Tensor = np.ndarray | jax.Array
"""A stored value, or a traced one when a model is exported with its weights as arguments."""
MAX_PROBLEMS = 20
"""Keys that do not fit and are named; of more, the number."""


class KeyTable(NamedTuple):
    """How the keys of a family of weights become our paths. All patterns are regular expressions of
    whole names; their dots are not escaped, since no two names differ in a dot alone."""

    keys: Mapping[str, str]
    """Key -> our dotted path, which can name the groups of the pattern. The first that matches
    counts. A path that ends in `weight` becomes `scale` (a norm) or `kernel` (a dense layer or
    convolution), with its axes in our order."""
    prefixes: tuple[str, ...] = ()
    """Removed from a key first: names of the tower in a larger model. No patterns."""
    unused: tuple[str, ...] = ()
    """Keys that our model does not need."""
    new: tuple[str, ...] = ()
    """Our paths that no key fills: new layers, trained by us."""
    within: tuple[str, ...] = (".*",)
    """Our paths of the part of the model that the file fills."""

    def rename(self, key: str) -> str | None:
        """Our path for a key without its prefix; None if no pattern matches."""
        for pattern, path in self.keys.items():
            matched = re.fullmatch(pattern, key)
            if matched:
                return matched.expand(path)
        return None


class Weight(NamedTuple):
    """A published tensor on its way to a parameter."""

    key: str
    path: str
    value: Tensor
    """In our order of axes."""


class Renamed(NamedTuple):
    """A file of tensors under our names."""

    weights: list[Weight]
    unused: list[str]
    """Keys that our model does not need."""
    unknown: list[str]
    """Keys that the table does not have."""


class LoadReport(NamedTuple):
    """Values for our parameters, and what became of every key and of every parameter. Dotted paths
    are ours."""

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
        return (
            f"{len(self.loaded)} loaded, {len(self.copied)} copied, "
            f"{len(self.initialised)} initialised, {len(self.unused)} unused"
        )

    def lines(self) -> list[str]:
        """One line for every key."""
        lines = [f"loaded       {path} <- {key}" for path, key in self.loaded.items()]
        lines += [f"copied       {path} <- {key}" for path, key in self.copied.items()]
        lines += [f"initialised  {path}" for path in self.initialised]
        lines += [f"unused       {key}" for key in self.unused]
        return lines


def rename_keys(tensors: Mapping[str, Tensor], table: KeyTable) -> Renamed:
    """The tensors of a file under our paths and with our order of axes."""
    renamed = Renamed([], [], [])
    for full_key, value in tensors.items():
        key = full_key
        for prefix in table.prefixes:
            if full_key.startswith(prefix):
                key = full_key.removeprefix(prefix)
                break
        path = table.rename(key)
        if _matches_any(key, table.unused):
            renamed.unused.append(full_key)
        elif path is None:
            renamed.unknown.append(full_key)
        else:
            path, value = _from_torch(path, value)
            renamed.weights.append(Weight(full_key, path, value))
    return renamed


def _from_torch(path: str, value: Tensor) -> tuple[str, Tensor]:
    """Our name and order of axes of a value whose path ends in torch's `weight`."""
    if not path.endswith(".weight"):
        return path, value
    path = path.removesuffix("weight")
    if value.ndim == 1:
        return path + "scale", value
    if value.ndim == 4:
        return path + "kernel", value.transpose(2, 3, 1, 0)
    return path + "kernel", value.T


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def parameter_shapes(state: nnx.State, table: KeyTable) -> dict[str, tuple[int, ...]]:
    """Dotted paths of the parameters that a file must fill, with their shapes; `state` may be
    abstract."""
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    return {path: shape for path, shape in shapes.items() if _matches_any(path, table.within)}


def match_weights(
    renamed: Renamed,
    shapes: Mapping[str, tuple[int, ...]],
    table: KeyTable,
    *,
    source: Path,
    layout: str = "its config.json",
) -> LoadReport:
    """Assigns every weight to its parameter. For messages, `source` is the file or folder, and
    `layout` says where its shapes come from.

    Raises InputError if a key is unknown, has no parameter or another shape, or a parameter has no
    key; it names all of them at once.
    """
    report = LoadReport({}, {}, {}, [], list(renamed.unused))
    problems = [f"unknown key {key}" for key in renamed.unknown]
    missing = dict(shapes)
    used_keys = set()
    for key, path, value in renamed.weights:
        shape = missing.pop(path, None)
        if shape is None:
            problems.append(f"no place for key {key}")
            continue
        if value.shape != shape:
            problems.append(f"{key} has shape {value.shape}, not {shape}")
        report.values[path] = value
        if key in used_keys:
            report.copied[path] = key
        else:
            report.loaded[path] = key
        used_keys.add(key)
    for path in missing:
        if _matches_any(path, table.new):
            report.initialised.append(path)
        else:
            problems.append(f"missing {path}")

    if problems:
        more = ""
        if len(problems) > MAX_PROBLEMS:
            more = f"; and {len(problems) - MAX_PROBLEMS} more"
        file = source if source.suffix else weight_files(source)[0]
        raise InputError(
            f"{file} does not fit {layout}: {'; '.join(problems[:MAX_PROBLEMS])}{more}"
        )
    return report


def put_weights(
    state: nnx.State, values: Mapping[str, Tensor], *, keep_types: bool = False
) -> nnx.State:
    """`state` with values by dotted path, in the types of its leaves, or of the values with
    `keep_types`. Other leaves stay the same."""
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        value = values.get(".".join(map(str, path)))
        if value is not None:
            dtype = value.dtype if keep_types else leaf.dtype
            leaf = leaf.replace(jnp.asarray(value, dtype))
        leaves.append((path, leaf))
    return nnx.from_flat_state(leaves)


def fill_state(
    state: nnx.State,
    tensors: Mapping[str, Tensor],
    table: KeyTable,
    *,
    source: Path,
    keep_types: bool = False,
    layout: str = "its config.json",
) -> Any:
    """An abstract state with every leaf loaded; errors and `layout` as in `match_weights`, types as
    in `put_weights`."""
    shapes = parameter_shapes(state, table)
    renamed = rename_keys(tensors, table)
    report = match_weights(renamed, shapes, table, source=source, layout=layout)
    return put_weights(state, report.values, keep_types=keep_types)
