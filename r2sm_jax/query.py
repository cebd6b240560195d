"""What a query and a prompt are, which mask types there are, and the keyword rule that a learned
head has to beat."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MaskType = Literal["modal", "amodal"]
"""modal: the visible part; amodal: the complete shape, hidden parts included."""
MASK_TYPES: tuple[MaskType, ...] = ("modal", "amodal")
MODAL, AMODAL = 0, 1
"""Where they stand on the axis of a pair of masks: `[... 2 h w]`."""
QUERY_TYPES = ("all", *MASK_TYPES)
"""Groups of queries by the requested type. Every figure of masks is given for each."""


@dataclass(frozen=True)
class Query:
    """One sentence about one image, the mask type that it asks for, and the instances that it
    means.

    `kind` describes the sentence: `{"task": "referring"|"reasoning", "hard": bool, "multi": bool,
    ...}`. No `instance_ids` is a query without a target.
    """

    id: int
    text: str
    mask_type: MaskType
    instance_ids: tuple[int, ...]
    kind: Mapping[str, Any] = field(default_factory=dict)


TARGET_PARTS = " + "
"""Separates the parts of `Sentence.target`."""


@dataclass(frozen=True)
class Sentence:
    """A sentence without an image, and the mask type that it asks for. `family` names its kind of
    wording."""

    text: str
    mask_type: MaskType
    family: str = ""
    reason: str = ""
    """Why a sentence written by hand has this type; may be empty."""
    target: str | None = None
    """Its words that name what is meant, without an article, parts separated by `TARGET_PARTS`; ""
    where it names nothing, None where that is not known."""


@dataclass(frozen=True)
class Click:
    """A point of an image, in pixels: x = 0 is the left edge, x = 0.5 the middle of the first
    column. On the object that is meant, or not on it."""

    x: float
    y: float
    is_positive: bool = True


@dataclass(frozen=True)
class Prompt:
    """Where the object that is meant lies: a box, clicks, or both. It stands beside a sentence or
    in its place."""

    box: tuple[float, float, float, float] | None = None
    """x0 y0 x1 y1 in pixels of the image, around what shows of the object."""
    clicks: tuple[Click, ...] = ()


MAX_CLICKS = 6
"""Clicks of one prompt."""


# "behind" is left out: it mostly names a place, and with it the rule is right as often: 0.608
# against 0.606 of `train`, 0.629 against 0.631 of `val_phrasing`.
KEYWORDS = re.compile(
    r"\b(?:amodal|complet|whole|entire|full|hid(?:den|es?|ing)\b|occlu|obscur|obstruct|block|cover|conceal"
    r"|unseen|invisible|out of (?:sight|view)|crop|not (?:be )?(?:visible|seen?)\b"
    r"|can(?:no|')t (?:be )?seen?\b)",
    re.IGNORECASE,
)


def keyword_mask_type(text: str) -> MaskType:
    """The mask type by a keyword rule, the reference that a learned head has to beat."""
    return "amodal" if KEYWORDS.search(text) else "modal"


REFERENCES: dict[str, Callable[[str, MaskType | None], MaskType]] = {
    "keyword": lambda text, known: keyword_mask_type(text),
    "always_modal": lambda text, known: "modal",
    "always_amodal": lambda text, known: "amodal",
    "oracle": lambda text, known: known or "modal",
}
"""Rules that learn nothing, by name: (text, known type) -> type.

The known type is the truth in an evaluation, and the type that the caller forces in a prediction;
None where there is none. Only the oracle reads it.
"""
