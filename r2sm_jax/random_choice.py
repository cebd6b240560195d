"""The random choice that scenes and queries share."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    """One of some items, each as likely. Takes one random number, other than `rng.choice`."""
    return items[int(rng.random() * len(items))]
