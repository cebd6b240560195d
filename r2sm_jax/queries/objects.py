"""What the grammar works with: the things in an image, and words that pick some of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")

HIDDEN = 0.05
"""Share of its complete mask from which an object counts as partly hidden."""


@dataclass(frozen=True)
class ObjectFacts:
    """What the grammar knows of one object in an image. Boxes are `x0, y0, x1, y1` in pixels."""

    id: int
    category: str
    box: tuple[float, float, float, float]
    area: float
    occlusion: float
    hidden_by: tuple[int, ...]
    colour: str | None = None
    pattern: str | None = None
    visible_box: tuple[float, float, float, float] | None = None
    uses: tuple[str, ...] = ()
    """What it is for, as words that can follow "the thing": "to light a room", "that can be eaten"."""
    ideas: tuple[str, ...] = ()
    """What it brings to mind: "summer", "breakfast"."""


@dataclass(frozen=True)
class Phrase:
    """Words that pick exactly the things `ids`. `bare` is the text after "the" where adjectives may go."""

    text: str
    ids: tuple[int, ...]
    plural: bool = False
    bare: str | None = None
    possessive: str | None = None
    lead: str = ""
    reasoning: bool = False


def pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    """One of some items."""
    return items[int(rng.random() * len(items))]
