"""The random choices that scenes and queries share.

Each takes exactly one number from the generator.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def pick(rng: np.random.Generator, choices: Sequence[T]) -> T:
    """One of the choices, all equally likely. `rng.choice` may take more than one number."""
    return choices[int(rng.random() * len(choices))]


def choose(rng: np.random.Generator, cumulative_shares: np.ndarray) -> int:
    """A random index, given the cumulative shares of all of them."""
    return int(np.searchsorted(cumulative_shares[:-1], rng.random(), "right"))
