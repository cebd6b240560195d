"""Published tensors -> our parameters: key tables, and an account of every key and every parameter.

A family of weights has a table (keys.py). Loading is loud: all keys that are unknown or have
another shape, and all parameters that no key fills, are named at once.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from r2sm_jax.errors import InputError

Tensor = np.ndarray | jax.Array
"""A stored value, or a traced one when a model is exported with its weights as arguments."""
Shapes = Mapping[str, tuple[int, ...]]
"""Of our parameters, by dotted path."""
MAX_PROBLEMS = 20
"""So many keys that do not fit are named."""


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
    fit: Callable[[str, Tensor, Shapes], Tensor] = lambda path, value, shapes: value
    """The value for one of our paths, such as positions of another image size."""

    def rename(self, key: str) -> str | None:
        """Returns our path for a key without its prefix; None if no pattern matches."""
        for pattern, path in self.keys.items():
            matched = re.fullmatch(pattern, key)
            if matched:
                return matched.expand(path)
        return None


class LoadReport(NamedTuple):
    """Values for our parameters, and what became of every key and of every parameter. Dotted paths
    are ours."""

    values: dict[str, Tensor]
    """By path, in our layout."""
    loaded: dict[str, str]
    """Path -> published key."""
    initialised: list[str]
    """Paths that no published key fills, freshly drawn."""
    unused: list[str]
    """Published keys that this model has no use for."""

    def __str__(self) -> str:
        return (
            f"{len(self.loaded)} loaded, {len(self.initialised)} initialised, "
            f"{len(self.unused)} unused"
        )


def match_weights(
    tensors: Mapping[str, Tensor], state: nnx.State, table: KeyTable, source: Path
) -> LoadReport:
    """Assigns every tensor of a file to its parameter. `state` may be abstract; `source` is the
    file or folder, for the message.

    Raises InputError if a key is unknown, has no parameter or another shape, or a parameter has no
    key; it names all of them at once.
    """
    shapes = {path: leaf.shape for path, leaf in flat_weights(state).items()}
    missing = {path for path in shapes if _matches_any(path, table.within)}
    report = LoadReport({}, {}, [], [])
    problems = []
    for full_key, tensor in tensors.items():
        key = _without_prefix(full_key, table.prefixes)
        if _matches_any(key, table.unused):
            report.unused.append(full_key)
            continue
        renamed = table.rename(key)
        if renamed is None:
            problems.append(f"unknown key {full_key}")
            continue
        path, value = _from_torch(renamed, tensor)
        if path not in missing:
            problems.append(f"no place for key {full_key}")
            continue
        missing.remove(path)
        value = table.fit(path, value, shapes)
        if value.ndim == 4 and len(shapes[path]) == 2:
            value = value[0, 0]  # a 1 x 1 convolution, which here is a dense layer
        if value.shape != shapes[path]:
            problems.append(f"{full_key} has shape {value.shape}, not {shapes[path]}")
        report.values[path] = value
        report.loaded[path] = full_key

    for path in sorted(missing):
        if _matches_any(path, table.new):
            report.initialised.append(path)
        else:
            problems.append(f"missing {path}")
    if problems:
        named = "; ".join(problems[:MAX_PROBLEMS])
        raise InputError(
            f"{source} does not fit its config.json: {named} ({len(problems)} problems in all)"
        )
    return report


# A state and its values by dotted path, such as "decoder.image.kernel"


def flat_weights(state: nnx.State) -> dict[str, Any]:
    """Returns the values of a state by dotted path; of an abstract one, shapes and types."""
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def put_weights(
    state: nnx.State, values: Mapping[str, Tensor], *, keep_types: bool = False
) -> nnx.State:
    """Returns `state` with values by dotted path, in the types of its leaves, or of the values with
    `keep_types`. Other leaves stay the same."""
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        value = values.get(".".join(map(str, path)))
        if value is not None:
            dtype = value.dtype if keep_types else leaf.dtype
            leaf = leaf.replace(jnp.asarray(value, dtype))
        leaves.append((path, leaf))
    return nnx.from_flat_state(leaves)


def _without_prefix(key: str, prefixes: Iterable[str]) -> str:
    for prefix in prefixes:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


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
