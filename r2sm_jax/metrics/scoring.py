"""One query: pixels of what was drawn and of what is true, from which every figure of a report follows.

The two true masks of a query are nested (modal ⊆ amodal), so three counts of a drawn mask tell its overlap with either
of them and with the hidden part between.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE
from r2sm_jax.metrics.boundary import boundary_overlap
from r2sm_jax.metrics.instances import InstanceScores
from r2sm_jax.metrics.iou import Overlap
from r2sm_jax.query import MaskType

Mask = Bool[np.ndarray, "H W"]


class Drawn(NamedTuple):
    """Pixels of a drawn mask, and of its parts in the true masks; ignored regions are counted nowhere."""

    area: int
    in_modal: int
    in_amodal: int


class Truth(NamedTuple):
    """Pixels of the true masks. `amodal` is None where the complete shape is not annotated."""

    modal: int
    amodal: int | None


@dataclass(frozen=True)
class QueryResult:
    """What the metrics need to know of one query."""

    query_id: int
    image_id: int
    mask_type: MaskType
    truth: Truth
    chosen: Drawn
    """The mask that was given as the answer."""
    said: MaskType | None = None
    """The type that was decided for; None where nothing was said."""
    probability: float | None = None
    """Of amodal; None where none was given."""
    modal: Drawn | None = None
    amodal: Drawn | None = None
    """What would have been the answer with either decision; None where one mask is all there is."""
    boundary: Overlap | None = None
    """Overlap of the boundaries of the answer and of the requested mask; None where nobody counted it."""
    keyword: MaskType = "modal"
    """What a keyword rule says."""
    kind: Mapping[str, Any] = field(default_factory=dict)
    """As of the query: task, hard, multi."""

    @cached_property
    def answered(self) -> Overlap:
        """Overlap of the answer with the requested mask."""
        return self.overlap(self.chosen)

    @property
    def rate(self) -> float | None:
        """Share of the target that is hidden."""
        if not self.truth.amodal:
            return None
        return 1 - self.truth.modal / self.truth.amodal

    @cached_property
    def complete(self) -> Overlap | None:
        """Overlap of the complete shape that was drawn with the true one, whatever was asked for; None where either is
        not known."""
        drawn = self.amodal or (self.chosen if self.mask_type == "amodal" else None)
        return None if drawn is None or self.truth.amodal is None else self.overlap(drawn, "amodal")

    def overlap(self, drawn: Drawn, mask_type: MaskType | None = None) -> Overlap:
        """Overlap with the requested mask, or that of a type."""
        amodal = (mask_type or self.mask_type) == "amodal"
        wanted = self.truth.amodal if amodal else self.truth.modal
        assert wanted is not None  # a query for a mask that nobody knows is not scored
        both = drawn.in_amodal if amodal else drawn.in_modal
        return Overlap(both, drawn.area + wanted - both, drawn.area, wanted)

    @cached_property
    def occluded(self) -> Overlap | None:
        """Overlap of the answer with the hidden part, both without the visible truth (as in C2F-Seg); None unless the
        query asks for the complete shape of something hidden."""
        modal, amodal = self.truth
        if self.mask_type == "modal" or amodal is None or amodal <= modal:
            return None
        outside, both = self.chosen.area - self.chosen.in_modal, self.chosen.in_amodal - self.chosen.in_modal
        return Overlap(both, outside + amodal - modal - both, outside, amodal - modal)


def draw_counts(mask: Mask, truth: tuple[Mask, Mask], ignore: Mask | None) -> Drawn:
    """The counts of a drawn mask against (modal, amodal)."""
    if ignore is not None:
        mask = mask & ~ignore
    return Drawn(*(int(np.count_nonzero(x)) for x in (mask, mask & truth[0], mask & truth[1])))


def truth_counts(truth: tuple[Mask, Mask], ignore: Mask | None, known: bool = True) -> Truth:
    """The counts of the true masks (modal, amodal); `known`: whether the complete shape is annotated."""
    modal, amodal = (int(np.count_nonzero(t if ignore is None else t & ~ignore)) for t in truth)
    return Truth(modal, amodal if known else None)


def score_query(
    *, query_id: int, image_id: int, mask_type: MaskType, probability: float | None, keyword: MaskType,
    predicted: tuple[Mask, Mask], truth: tuple[Mask, Mask], ignore: Mask | None, known: bool = True,
    kind: Mapping[str, Any] | None = None,
) -> QueryResult:  # fmt: skip
    """Compares both masks of our model with the truth; pairs are (modal, amodal)."""
    modal, amodal = (draw_counts(mask, truth, ignore) for mask in predicted)
    said: MaskType | None = None
    if probability is not None:
        said = "amodal" if probability > 0.5 else "modal"
    boundary = boundary_overlap(predicted[said == "amodal"], truth[mask_type == "amodal"], ignore)
    return QueryResult(
        query_id, image_id, mask_type, truth_counts(truth, ignore, known), amodal if said == "amodal" else modal,
        said, probability, modal, amodal, boundary, keyword, kind or {},
    )  # fmt: skip


def rle_counts(mask: RLE, modal: RLE, amodal: RLE) -> Drawn:
    """The counts of a drawn mask, all in compressed RLE of one size: no pixel is expanded."""
    return Drawn(*masks.areas([mask, masks.intersect(mask, modal), masks.intersect(mask, amodal)]))


class Drawing(NamedTuple):
    """What is needed to show the answer to a query again."""

    index: int
    """Of the sample in its source."""
    visible: RLE
    whole: RLE
    """The same as `visible` where a system gives one mask."""


@dataclass
class Scored:
    """What came out of the queries of one split."""

    results: list[QueryResult] = field(default_factory=list)
    instances: InstanceScores = field(default_factory=InstanceScores)
    drawings: dict[int, Drawing] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    """Queries without a prediction; they count as answered with an empty mask."""
    _digest: Any = field(default_factory=hashlib.sha256)

    def add(self, result: QueryResult, drawing: Drawing, text: str, truth: tuple[RLE, RLE]) -> None:
        """One query, with its sentence and its true masks (modal, amodal)."""
        self.results.append(result)
        self.drawings[result.query_id] = drawing
        counts = [c if isinstance(c, bytes) else c.encode() for c in (rle["counts"] for rle in truth)]
        self._digest.update(b"\0".join([f"{result.query_id} {result.mask_type} {text}".encode(), *counts, b""]))

    @property
    def data_sha256(self) -> str:
        """Of the sentences, requested types and true masks, in their order: the same for the same data, whatever
        file they come from."""
        return self._digest.hexdigest()
