"""The weights of a compact export, which has few bytes.

A published weight that training left as it was is not stored: it is found by its model's name. One
that was trained on is stored as the difference from the published one, in 8 bits, with a unit for
each output channel under `NAME.unit`. All other weights are stored in float16.
"""

from collections.abc import Mapping

import numpy as np

from r2sm_jax.errors import InputError
from r2sm_jax.models.matching import Tensor

UNIT = ".unit"
"""Ends the name of the units of a difference."""
LARGEST = 127
"""Of the whole numbers that a difference is stored in."""
SMALLEST = 1e-30
"""Counts as the largest difference of a channel that did not change."""
MAX_ERROR = 1e-3
"""How far a stored weight may be from the true one, as a share of the largest weight of its array.
A difference that would be rounded more is stored as a weight in float16."""


def to_stored(
    weights: Mapping[str, np.ndarray], published: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    """The tensors that a compact export has of some weights.

    Args:
        published: weights that a user finds by name, by the same paths.
    """
    stored = {}
    for name, value in weights.items():
        if name not in published:
            stored[name] = value.astype(np.float16)
            continue
        difference = value - np.asarray(published[name], np.float32)
        # By value: what is frozen in this run may have been trained in an earlier one.
        if not difference.any():
            continue
        unit = _units(difference)
        if value.ndim < 2 or unit.max() / 2 > MAX_ERROR * np.abs(value).max():
            stored[name] = value.astype(np.float16)
            continue
        stored[name] = np.rint(difference / unit).astype(np.int8)
        stored[name + UNIT] = unit
    return stored


def from_stored(
    stored: Mapping[str, np.ndarray], published: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    """All weights in float32, from what `to_stored` gives.

    Raises InputError for the difference from a weight that is not among the published ones.
    """
    weights = {name: np.asarray(value, np.float32) for name, value in published.items()}
    for name, value in stored.items():
        if name.endswith(UNIT):
            continue
        weight = value.astype(np.float32)
        if name + UNIT in stored:
            if name not in published or published[name].shape != value.shape:
                raise InputError(
                    f"{name} is stored as the difference from a published weight, but the encoder "
                    "that was found has none of that name and shape; get the encoder that it was "
                    "trained with"
                )
            weight = weights[name] + weight * stored[name + UNIT]
        weights[name] = weight
    return weights


def _units(difference: np.ndarray) -> np.ndarray:
    """For each output channel, the last axis, the difference that one step of 8 bits means."""
    largest = np.abs(difference).max(axis=tuple(range(difference.ndim - 1)))
    # No unit may be 0, since differences are divided by it.
    return (np.maximum(largest, SMALLEST) / LARGEST).astype(np.float32)
