"""The one scorer: the prediction for a query, of our own segmenter or of any other system, against
the truth.

Pixels are counted in run-length encoding. The two true masks of a query are nested (modal ⊆
amodal), so a predicted mask's overlaps with both also give its overlap with the hidden part between
them.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import ImageTruth, Instance, Source
from r2sm_jax.data.masks import RLE
from r2sm_jax.evaluation.instances import QueryDetections, rank_detections
from r2sm_jax.evaluation.iou import Overlap, boundary_overlap, count_overlap
from r2sm_jax.inference.prediction import Candidate
from r2sm_jax.query import MaskType, Query


class Pair(NamedTuple):
    """Two things of one kind: of or with the modal mask, and of or with the amodal one."""

    modal: Any
    amodal: Any

    def of_type(self, mask_type: MaskType) -> Any:
        """Returns the one of a mask type."""
        return self.amodal if mask_type == "amodal" else self.modal


# The truth


class QueryTruth(NamedTuple):
    """A query and the true masks of its instances."""

    query: Query
    index: int
    """Index of the image in its source."""
    image_id: int
    masks: Pair
    """Unions of the instances, RLEs. The amodal one has the visible part of those whose complete
    shape is not annotated."""
    instances: tuple[Instance, ...]
    """The targets, with RLEs as masks, without those that are regions to ignore."""
    ignored: RLE | None
    """The region of the image that counts nowhere."""

    @property
    def requested(self) -> RLE:
        """The mask that the query asks for."""
        return self.masks.of_type(self.query.mask_type)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image."""
        height, width = self.masks.modal["size"]
        return height, width

    @property
    def has_amodal(self) -> bool:
        """Whether the complete shape of every instance is annotated."""
        return all(instance.amodal is not None for instance in self.instances)

    @property
    def left_out(self) -> str:
        """Why the query does not count; "" where it does."""
        if self.query.instance_ids and self._is_ignored():
            return "mean only regions to ignore"
        if self.query.mask_type == "amodal" and not self.has_amodal:
            return "ask for a complete shape that is not annotated"
        return ""

    def _is_ignored(self) -> bool:
        # If such a query were scored, an empty answer would be right.
        if self.ignored is None or not self.instances:
            return not self.instances
        in_ignored = masks.intersect(self.requested, self.ignored)
        area, ignored_area = masks.areas([self.requested, in_ignored])
        return 0 < area == ignored_area


def query_truths(source: Source) -> Iterator[QueryTruth]:
    """Yields every query of a source, in order."""
    for index in range(len(source)):
        yield from truths_of_image(source.truth_at(index), index)


def truths_of_image(truth: ImageTruth, index: int) -> list[QueryTruth]:
    """Returns the queries of one image, which has an index in its source, with their truth."""
    by_id = {instance.id: instance for instance in truth.instances}
    ignored_masks = [instance.complete for instance in truth.instances if instance.ignore]
    ignored = masks.merge(ignored_masks, *truth.size) if ignored_masks else None
    truths = []
    for query in truth.queries:
        instance_ids = dict.fromkeys(query.instance_ids)  # without doubles
        targets = tuple(by_id[i] for i in instance_ids if not by_id[i].ignore)
        pair = Pair(
            modal=masks.merge([target.modal for target in targets], *truth.size),
            amodal=masks.merge([target.complete for target in targets], *truth.size),
        )
        truths.append(QueryTruth(query, index, truth.image_id, pair, targets, ignored))
    return truths


# The result of one query


class Answer(NamedTuple):
    """What a system says to one query."""

    mask: RLE
    both: Pair | None = None
    """Its visible and its complete mask, RLEs; None where it gives one mask."""
    mask_type: MaskType | None = None
    """The decision; None where the system makes none."""
    amodal_probability: float | None = None
    predicted_iou: float | None = None
    candidates: Sequence[Candidate] = ()
    """The instances that it detects."""
    presence: float | None = None
    """Probability that the query has a target."""


@dataclass(frozen=True)
class QueryResult:
    """The counts of one query, from which every figure of a report follows.

    Ignored regions count nowhere.
    """

    truth: QueryTruth
    said: Answer = field(compare=False)
    overlaps: Pair
    """`Overlap`s of the answer with each true mask."""
    overlaps_of_both: Pair | None
    """The same of its visible and of its complete mask; None where it gives one mask."""
    boundary: Overlap
    """Boundaries of the answer and of the requested mask."""
    detections: QueryDetections = field(compare=False)

    @property
    def query(self) -> Query:
        """The query."""
        return self.truth.query

    @property
    def mask_type(self) -> MaskType:
        """The requested type."""
        return self.truth.query.mask_type

    @property
    def has_hidden_part(self) -> bool:
        """Whether a part of the target is hidden, as far as is known."""
        # The true masks are nested, so equal areas are equal masks.
        return self.truth.has_amodal and self.overlaps.amodal.truth > self.overlaps.modal.truth

    @property
    def overlap(self) -> Overlap:
        """The answer against the requested mask."""
        return self.overlaps.of_type(self.mask_type)

    @property
    def complete_overlap(self) -> Overlap | None:
        """The predicted against the true complete shape, whatever was requested.

        None where the shape is not annotated, or the system gives one mask for a modal query.
        """
        if not self.truth.has_amodal:
            return None
        if self.overlaps_of_both is not None:
            return self.overlaps_of_both.amodal.amodal
        return self.overlaps.amodal if self.mask_type == "amodal" else None

    @property
    def occluded_overlap(self) -> Overlap | None:
        """The answer against the hidden part, both without the visible truth (as in C2F-Seg).

        None unless the query asks for the complete shape of something that is partly hidden.
        """
        if self.mask_type == "modal" or not self.has_hidden_part:
            return None
        modal, amodal = self.overlaps
        return count_overlap(
            intersection=amodal.intersection - modal.intersection,
            predicted=amodal.predicted - modal.intersection,
            truth=amodal.truth - modal.truth,
        )


def score(said: Answer, truth: QueryTruth) -> QueryResult:
    """Scores the answer to one query."""
    ignored = None if truth.ignored is None else masks.expand(truth.ignored)
    return QueryResult(
        truth=truth,
        said=said,
        overlaps=count_overlaps(said.mask, truth),
        overlaps_of_both=said.both and Pair(*(count_overlaps(rle, truth) for rle in said.both)),
        boundary=boundary_overlap(said.mask, truth.requested, ignored),
        detections=find_detections(said.candidates, truth),
    )


def find_detections(candidates: Sequence[Candidate], truth: QueryTruth) -> QueryDetections:
    """Ranks the instances of a prediction, and compares them with the true ones."""
    true_rates = []
    for instance in truth.instances:
        visible_area, complete_area = masks.areas([instance.modal, instance.complete])
        rate = 1 - visible_area / max(1, complete_area)
        true_rates.append(None if instance.amodal is None else rate)
    is_amodal = truth.query.mask_type == "amodal"
    return rank_detections(
        [candidate.mask for candidate in candidates],
        [candidate.score for candidate in candidates],
        [candidate.is_present for candidate in candidates],
        [i.complete if is_amodal else i.modal for i in truth.instances],
        [] if truth.ignored is None else [truth.ignored],
        occlude_rates=[candidate.occlude_rate for candidate in candidates],
        true_occlude_rates=true_rates,
    )


def count_overlaps(mask: RLE, truth: QueryTruth) -> Pair:
    """Counts the pixels of a predicted mask and of each true mask."""
    modal, amodal = truth.masks
    if truth.ignored is not None:
        counted = masks.encode(~masks.expand(truth.ignored))
        mask, modal, amodal = (masks.intersect(rle, counted) for rle in (mask, modal, amodal))
    both = [masks.intersect(mask, modal), masks.intersect(mask, amodal)]
    in_modal, in_amodal, area, modal_area, amodal_area = masks.areas([*both, mask, modal, amodal])
    return Pair(
        count_overlap(in_modal, area, modal_area), count_overlap(in_amodal, area, amodal_area)
    )


# The results of a split


@dataclass
class EvalResults:
    """The results of all queries of one split."""

    source: Source
    results: list[QueryResult] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of queries that are not scored, by reason."""
    missing: list[int] = field(default_factory=list)
    """Ids of the queries without a prediction; an empty mask is counted in its place."""
    seen: set[int] | None = None
    """Indices of the images that the model was trained on; None where that is not known."""

    @property
    def data_sha256(self) -> str:
        """Hash of the queries, requested types and true masks, in the order of the query ids.

        It is the same for the same data, whatever file they come from and however their RLEs are
        spelt.
        """
        digest = hashlib.sha256()
        for result in sorted(self.results, key=lambda result: result.query.id):
            query = result.query
            parts = [f"{query.id} {query.mask_type} {query.text}"]
            for rle in result.truth.masks:
                parts.append(masks.encode(masks.decode(rle))["counts"])
            digest.update("\0".join([*parts, ""]).encode())
        return digest.hexdigest()


Evaluated = Mapping[str, EvalResults]
"""The results of each split."""
