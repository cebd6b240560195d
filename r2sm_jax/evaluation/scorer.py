"""The one scorer: the prediction for a query, of our own segmenter or of any other system, against
the truth.

Pixels are counted in run-length encoding. The two true masks of a query are nested (modal ⊆
amodal), so a predicted mask's overlaps with both also give its overlap with the hidden part between
them.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import ImageTruth, Instance, Source
from r2sm_jax.data.masks import RLE
from r2sm_jax.evaluation.instances import QueryDetections, rank_detections
from r2sm_jax.evaluation.iou import Overlap, boundary_overlap, count_overlap
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.query import MaskType, Query


class MaskPair(NamedTuple):
    """A modal and an amodal mask as RLEs."""

    modal: RLE
    amodal: RLE

    def of_type(self, mask_type: MaskType) -> RLE:
        """Returns the mask of one type."""
        return self.amodal if mask_type == "amodal" else self.modal


# The truth


class QueryTruth(NamedTuple):
    """A query and the true masks of its instances."""

    query: Query
    index: int
    """Index of the image in its source."""
    image_id: int
    masks: MaskPair
    """Unions of the instances. The amodal one has the visible part of those whose complete shape is
    not annotated."""
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
        pair = MaskPair(
            modal=masks.merge([target.modal for target in targets], *truth.size),
            amodal=masks.merge([target.complete for target in targets], *truth.size),
        )
        truths.append(QueryTruth(query, index, truth.image_id, pair, targets, ignored))
    return truths


# The result of one query


class TruthOverlaps(NamedTuple):
    """A predicted mask against the two true masks of its query. Ignored regions count nowhere."""

    with_modal: Overlap
    with_amodal: Overlap | None
    """None where the complete shape is not annotated."""


@dataclass(frozen=True)
class QueryResult:
    """The counts of one query, from which every figure of a report follows."""

    truth: QueryTruth
    answer: TruthOverlaps
    """Overlaps of the mask that the system answers with."""
    predicted_modal: TruthOverlaps | None
    """Overlaps of its modal mask; None where the system gives one mask only."""
    predicted_amodal: TruthOverlaps | None
    """Overlaps of its amodal mask; None where the system gives one mask only."""
    boundary: Overlap
    """Boundaries of the answer and of the requested mask."""
    predicted_type: MaskType | None
    """The decision; None where the system makes none."""
    amodal_probability: float | None
    predicted_iou: float | None
    detections: QueryDetections = field(compare=False)
    predicted_masks: MaskPair
    """Both are the same where a system gives one mask."""
    is_missing: bool = False
    """There is no prediction; an empty mask is counted in its place."""

    @property
    def query(self) -> Query:
        """The query."""
        return self.truth.query

    @property
    def mask_type(self) -> MaskType:
        """The requested type."""
        return self.truth.query.mask_type

    @property
    def overlap(self) -> Overlap:
        """The answer against the requested mask."""
        if self.mask_type == "modal":
            return self.answer.with_modal
        assert self.answer.with_amodal is not None  # else the query is not scored
        return self.answer.with_amodal

    @property
    def amodal_overlap(self) -> Overlap | None:
        """The predicted against the true complete shape, whatever was requested.

        None where the shape is not annotated, or the system gives one mask for a modal query.
        """
        if self.predicted_amodal is not None:
            return self.predicted_amodal.with_amodal
        if self.mask_type == "amodal":
            return self.answer.with_amodal
        return None

    @property
    def occluded_overlap(self) -> Overlap | None:
        """The answer against the hidden part, both without the visible truth (as in C2F-Seg).

        None unless the query asks for the complete shape of something that is partly hidden.
        """
        modal, amodal = self.answer
        if self.mask_type == "modal" or amodal is None or amodal.truth <= modal.truth:
            return None
        return count_overlap(
            intersection=amodal.intersection - modal.intersection,
            predicted=amodal.predicted - modal.intersection,
            truth=amodal.truth - modal.truth,
        )


def score(prediction: Prediction | None, truth: QueryTruth) -> QueryResult:
    """Scores the prediction for one query; None counts as an empty mask."""
    is_missing = prediction is None
    if prediction is None:
        empty = np.zeros(truth.size, bool)
        prediction = Prediction(
            truth.query.text, None, None, None, empty, empty, has_both_masks=False
        )

    mask = prediction.rle("mask")
    predicted_masks = MaskPair(mask, mask)
    modal_overlaps = None
    amodal_overlaps = None
    if prediction.has_both_masks:
        predicted_masks = MaskPair(prediction.rle("modal"), prediction.rle("amodal"))
        modal_overlaps = count_overlaps(predicted_masks.modal, truth)
        amodal_overlaps = count_overlaps(predicted_masks.amodal, truth)
    ignored = None if truth.ignored is None else masks.expand(truth.ignored)
    return QueryResult(
        truth=truth,
        answer=count_overlaps(mask, truth),
        predicted_modal=modal_overlaps,
        predicted_amodal=amodal_overlaps,
        boundary=boundary_overlap(mask, truth.requested, ignored),
        predicted_type=prediction.mask_type,
        amodal_probability=prediction.amodal_probability,
        predicted_iou=prediction.score,
        detections=find_detections(prediction, truth),
        predicted_masks=predicted_masks,
        is_missing=is_missing,
    )


def find_detections(prediction: Prediction, truth: QueryTruth) -> QueryDetections:
    """Ranks the instances of a prediction, and compares them with the true ones."""
    is_amodal = truth.query.mask_type == "amodal"
    candidates = prediction.candidates
    true_rates = []
    for instance in truth.instances:
        rate = None
        if instance.amodal is not None:
            visible_area, complete_area = masks.areas([instance.modal, instance.amodal])
            rate = 1 - visible_area / max(1, complete_area)
        true_rates.append(rate)
    return rank_detections(
        [candidate.mask for candidate in candidates],
        [candidate.score for candidate in candidates],
        [candidate.is_present for candidate in candidates],
        [i.complete if is_amodal else i.modal for i in truth.instances],
        [] if truth.ignored is None else [truth.ignored],
        occlude_rates=[candidate.occlude_rate for candidate in candidates],
        true_occlude_rates=true_rates,
    )


def count_overlaps(mask: RLE, truth: QueryTruth) -> TruthOverlaps:
    """Counts the pixels of a predicted mask, of both true masks, and of what they share."""
    modal, amodal = truth.masks
    if truth.ignored is not None:
        counted = masks.encode(~masks.expand(truth.ignored))
        mask = masks.intersect(mask, counted)
        modal = masks.intersect(modal, counted)
        amodal = masks.intersect(amodal, counted)

    with_modal = masks.intersect(mask, modal)
    with_amodal = masks.intersect(mask, amodal)
    area, modal_area, amodal_area, in_modal, in_amodal = masks.areas(
        [mask, modal, amodal, with_modal, with_amodal]
    )
    modal_overlap = count_overlap(in_modal, area, modal_area)
    amodal_overlap = count_overlap(in_amodal, area, amodal_area)
    return TruthOverlaps(modal_overlap, amodal_overlap if truth.has_amodal else None)


# The results of a split


@dataclass
class EvalResults:
    """The results of all queries of one split."""

    results: list[QueryResult] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of queries that are not scored, by reason."""

    @property
    def missing(self) -> list[int]:
        """Ids of the queries without a prediction."""
        return [result.query.id for result in self.results if result.is_missing]

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
