"""The one scorer: the predictions of our own segmenter or of any other system against the truth.

Everything is counted in run-length encoding. The two true masks of a query are nested (modal ⊆ amodal), so three counts
of a predicted mask give its overlap with either of them and with the hidden part between.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logit

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample, Source, truth_of_sample
from r2sm_jax.data.masks import RLE
from r2sm_jax.evaluation.instances import Unit, unit
from r2sm_jax.evaluation.iou import Overlap, boundary_overlap
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.query import MaskType, Query, keyword_mask_type


class QueryTruth(NamedTuple):
    """A query and the true masks of the instances that it means."""

    query: Query
    index: int
    """Of the sample in its source."""
    image_id: int
    height: int
    width: int
    instances: tuple[Instance, ...]
    """With RLEs as masks."""
    ignored: RLE | None
    """The region of the image that counts nowhere."""

    @property
    def known(self) -> bool:
        """Whether the complete shape of every instance is annotated."""
        return all(instance.amodal is not None for instance in self.instances)

    @property
    def scored(self) -> bool:
        """Whether the requested mask is annotated."""
        return self.query.mask_type == "modal" or self.known

    @property
    def modal(self) -> RLE:
        """The visible part of all instances."""
        return masks.merge([i.modal for i in self.instances], self.height, self.width)

    @property
    def amodal(self) -> RLE:
        """The complete shape of all instances; their visible part where no more is annotated."""
        return masks.merge([i.complete for i in self.instances], self.height, self.width)


def truths(source: Source) -> Iterator[QueryTruth]:
    """Every query of a source, in order."""
    for index in range(len(source)):
        yield from truths_at(source, index)


def truths_at(source: Source, index: int, sample: Sample | None = None) -> list[QueryTruth]:
    """The queries of one sample with their true masks.

    `sample`: the sample, where it was made already, so that a procedural source need not again.
    """
    truth = source.truth_at(index) if sample is None else truth_of_sample(sample)
    image_id = truth.image_id
    height, width = truth.size
    instances = truth.instances
    queries = truth.queries
    by_id = {instance.id: instance for instance in instances}
    regions = [instance.complete for instance in instances if instance.ignore]
    ignored = masks.merge(regions, height, width) if regions else None
    return [
        QueryTruth(
            q,
            index,
            image_id,
            height,
            width,
            tuple(by_id[i] for i in dict.fromkeys(q.instance_ids)),
            ignored,
        )
        for q in queries
    ]


class Overlaps(NamedTuple):
    """A predicted mask with the two true masks of its query; ignored regions count nowhere."""

    modal: Overlap
    amodal: Overlap | None
    """None where the complete shape is not annotated."""


@dataclass(frozen=True)
class QueryResult:
    """The counts of one query, from which every figure of a report follows."""

    query_id: int
    image_id: int
    mask_type: MaskType
    """The requested type."""
    chosen: Overlaps
    """The mask that was given as the answer."""
    decision: MaskType | None = None
    """The predicted type; None without a decision."""
    probability: float | None = None
    """Of amodal; None where none was given."""
    modal: Overlaps | None = None
    amodal: Overlaps | None = None
    """The answers with either decision; None where the system gives one mask only."""
    predicted_iou: float | None = None
    """What the system thinks that the IoU of its answer is."""
    presence: float | None = field(default=None, compare=False)
    """Logit that what was asked for is in the image; rounded differently in batches of other sizes."""
    boundary: Overlap | None = None
    """Overlap of the boundaries of the answer and of the requested mask."""
    keyword: MaskType = "modal"
    """The decision of the keyword rule."""
    kind: Mapping[str, Any] = field(default_factory=dict)
    """The query's task, hard, multi."""

    @property
    def answered(self) -> Overlap:
        """Overlap of the answer with the requested mask."""
        return getattr(self.chosen, self.mask_type)

    @property
    def occlusion_rate(self) -> float | None:
        """Share of the target that is hidden."""
        modal, amodal = self.chosen
        return 1 - modal.truth / amodal.truth if amodal is not None and amodal.truth else None

    @property
    def complete(self) -> Overlap | None:
        """Overlap of the predicted with the true complete shape, whatever was asked for; None where either is not
        known."""
        predicted = self.amodal or (self.chosen if self.mask_type == "amodal" else None)
        return None if predicted is None else predicted.amodal

    @property
    def occluded(self) -> Overlap | None:
        """Overlap of the answer with the hidden part, both without the visible truth (as in C2F-Seg); None unless the
        query asks for the complete shape of something hidden."""
        modal, amodal = self.chosen
        if self.mask_type == "modal" or amodal is None or amodal.truth <= modal.truth:
            return None
        both, drawn = (
            amodal.intersection - modal.intersection,
            amodal.predicted - modal.intersection,
        )
        hidden = amodal.truth - modal.truth
        return Overlap(both, drawn + hidden - both, drawn, hidden)


class Drawing(NamedTuple):
    """The masks that show an answer again. Both are the same where a system gives one mask."""

    index: int
    """Of the sample in its source."""
    modal: RLE
    amodal: RLE


@dataclass
class Scored:
    """The results of the queries of one split."""

    results: list[QueryResult] = field(default_factory=list)
    instances: dict[int, Unit] = field(default_factory=dict)
    drawings: dict[int, Drawing] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    """Queries without an answer; they count as answered with an empty mask."""
    _hashed: list[bytes] = field(default_factory=list)

    @property
    def data_sha256(self) -> str:
        """Hash of the queries, requested types and true masks by query id: the same for the same data, whatever file
        they come from, and in any order."""
        in_order = sorted(self._hashed, key=lambda entry: int(entry.partition(b" ")[0]))
        return hashlib.sha256(b"".join(in_order)).hexdigest()

    def merge(self, other: "Scored") -> None:
        """Adds the results of queries that come after these. Figures of the whole follow, as if one had scored all."""
        self.results += other.results
        self.instances |= other.instances
        self.drawings |= other.drawings
        self.missing += other.missing
        self._hashed += other._hashed

    def add(self, truth: QueryTruth, prediction: Prediction | None) -> None:
        """Scores the prediction for one query; None counts as an empty mask."""
        query, modal, amodal = truth.query, truth.modal, truth.amodal
        if prediction is None:
            self.missing.append(query.id)
            empty = np.zeros((truth.height, truth.width), bool)
            prediction = Prediction(
                query.text, None, None, None, empty, empty, has_both_masks=False
            )
        ignored = None if truth.ignored is None else masks.expand(truth.ignored)
        counted = None if ignored is None else masks.encode(~ignored)

        def kept(mask: RLE) -> RLE:
            return mask if counted is None else masks.intersect(mask, counted)

        sizes = masks.areas([kept(modal), kept(amodal)])

        def overlaps(mask: RLE) -> Overlaps:
            mask = kept(mask)
            area, *inside = masks.areas(
                [mask, masks.intersect(mask, modal), masks.intersect(mask, amodal)]
            )
            either = [
                Overlap(n, area + size - n, area, size)
                for n, size in zip(inside, sizes, strict=True)
            ]
            return Overlaps(either[0], either[1] if truth.known else None)

        fused = prediction.rle("mask")
        either = [fused, fused]
        if prediction.has_both_masks:
            either = [prediction.rle("modal"), prediction.rle("amodal")]
        self.results.append(
            QueryResult(
                query_id=query.id,
                image_id=truth.image_id,
                mask_type=query.mask_type,
                chosen=overlaps(fused),
                decision=prediction.mask_type,
                probability=prediction.amodal_probability,
                modal=overlaps(either[0]) if prediction.has_both_masks else None,
                amodal=overlaps(either[1]) if prediction.has_both_masks else None,
                predicted_iou=prediction.score,
                presence=float(logit(prediction.presence)) if prediction.has_both_masks else None,
                boundary=boundary_overlap(
                    fused, amodal if query.mask_type == "amodal" else modal, ignored
                ),
                keyword=keyword_mask_type(query.text),
                kind=query.kind,
            )
        )
        self.drawings[query.id] = Drawing(truth.index, *either)
        wanted = [i.complete if query.mask_type == "amodal" else i.modal for i in truth.instances]
        crowd = [] if truth.ignored is None else [truth.ignored]
        candidates = [candidate.mask for candidate in prediction.candidates]
        scores = [candidate.score for candidate in prediction.candidates]
        self.instances[query.id] = unit(candidates, scores, wanted, crowd)
        runs = [
            r if isinstance(r, bytes) else r.encode() for r in (modal["counts"], amodal["counts"])
        ]
        self._hashed.append(
            b"\0".join([f"{query.id} {query.mask_type} {query.text}".encode(), *runs, b""])
        )


def score(predicted: Iterable[tuple[QueryTruth, Prediction | None]]) -> Scored:
    """Scores queries with their predictions. Queries for a mask that is not annotated are left out."""
    scored = Scored()
    for truth, prediction in predicted:
        if truth.scored:
            scored.add(truth, prediction)
    return scored
