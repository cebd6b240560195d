"""The random choice that scenes and queries share."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def pick(rng: np.random.Generator, choices: Sequence[T]) -> T:
    """One of the choices, each as likely. Takes one number from `rng`, whereas `rng.choice` may take more."""
    return choices[int(rng.random() * len(choices))]
