"""The one scorer: the answer to a query, of our own segmenter or of any other system, against the
truth. It makes a row of the table of counts.

Pixels are counted in run-length encoding. The two true masks of a query are nested (modal ⊆
amodal), so a predicted mask's overlaps with both also give its overlap with the hidden part between
them.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import ImageTruth, Instance, Source
from r2sm_jax.data.masks import RLE
from r2sm_jax.evaluation.counts import ROW, Rows
from r2sm_jax.evaluation.instances import QueryDetections, rank_detections
from r2sm_jax.evaluation.iou import boundary_overlap
from r2sm_jax.query import MaskType, Query

MIN_IOU_OF_OBJECT = 0.1
"""Below this IoU with every object an answer means none."""


class Pair(NamedTuple):
    """One mask of each type, RLEs."""

    modal: RLE
    amodal: RLE

    def of_type(self, mask_type: MaskType) -> RLE:
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
    """Unions of the instances. The amodal one has the visible part of those whose complete shape
    is not annotated."""
    instances: tuple[Instance, ...]
    """The targets, with RLEs as masks, without those that are regions to ignore."""
    others: tuple[Instance, ...]
    """The other objects of the image, without those that are regions to ignore."""
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

    def without_ignored(self, rles: Iterable[RLE]) -> list[RLE]:
        """Returns masks of the image without the region that counts nowhere."""
        if self.ignored is None:
            return list(rles)
        counted = masks.encode(~masks.expand(self.ignored))
        return [masks.intersect(rle, counted) for rle in rles]

    def _is_ignored(self) -> bool:
        """Whether all targets are regions to ignore, or each pixel of the requested mask lies in
        one. Then an empty answer would be right."""
        if not self.instances:
            return True
        if self.ignored is None:
            return False
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
        others = tuple(
            instance
            for instance in truth.instances
            if instance.id not in instance_ids and not instance.ignore
        )
        truths.append(QueryTruth(query, index, truth.image_id, pair, targets, others, ignored))
    return truths


# The result of one query


class Detection(NamedTuple):
    """One instance that a system detects."""

    mask: RLE
    score: float
    """Ranks it for average precision."""
    is_present: bool = True
    """Whether it is part of the answer; others are ranked only."""
    occlude_rate: float | None = None
    """Share of it that is hidden; None where the system does not tell."""


class Answer(NamedTuple):
    """What a system says to one query."""

    mask: RLE
    both: Pair | None = None
    """Its visible and its complete mask; None where it gives one mask."""
    mask_type: MaskType | None = None
    """The decision; None where the system makes none."""
    amodal_probability: float | None = None
    predicted_iou: float | None = None
    detections: Sequence[Detection] = ()
    presence: float | None = None
    """Probability that the query has a target."""


class QueryResult(NamedTuple):
    """The answer to one query beside the truth."""

    truth: QueryTruth
    said: Answer
    row: tuple[Any, ...]
    """What is counted, a row of the table (`ROW`)."""


def score(said: Answer, truth: QueryTruth) -> QueryResult:
    """Scores the answer to one query."""
    query = truth.query
    ignored = None if truth.ignored is None else masks.expand(truth.ignored)
    boundary = boundary_overlap(said.mask, truth.requested, ignored)
    values = {
        "query_id": query.id,
        "image_id": truth.image_id,
        "text": query.text,
        "mask_type": query.mask_type,
        "target": " ".join(map(str, sorted(set(query.instance_ids)))),
        "task": str(query.kind.get("task") or ""),
        "difficulty": {True: "hard", False: "easy"}.get(query.kind.get("hard", ""), ""),
        "instances": {True: "several", False: "one"}.get(query.kind.get("multi", ""), ""),
        "said": said.mask_type or "",
        "amodal_probability": said.amodal_probability,
        "predicted_iou": said.predicted_iou,
        "presence": said.presence,
        "seen": None,
        "rivals": None,
        "right_object": None,
        **find_object(said.mask, truth),
        **count_pixels(said, truth),
        "boundary_intersection": boundary.intersection,
        "boundary_union": boundary.union,
        "detections": find_detections(said.detections, truth),
    }
    # numpy reads None as NaN.
    return QueryResult(truth, said, tuple(values[name] for name in ROW.fields or ()))


def find_object(mask: RLE, truth: QueryTruth) -> dict[str, float]:
    """Counts the rivals of the target, and tells whether the answer means it and no other object.

    Only queries with one target have these.
    """
    if len(truth.instances) != 1:
        return {}
    (target,) = truth.instances
    is_amodal = truth.query.mask_type == "amodal"
    objects = [one.complete if is_amodal else one.modal for one in (target, *truth.others)]
    mask, *objects = truth.without_ignored([mask, *objects])
    (ious,) = masks.ious([mask], objects, [False] * len(objects))
    return {
        "rivals": sum(other.category == target.category for other in truth.others),
        "right_object": float(ious[0] == ious.max() and ious[0] >= MIN_IOU_OF_OBJECT),
    }


def count_pixels(said: Answer, truth: QueryTruth) -> dict[str, Any]:
    """Counts the pixels of the answer, of the system's masks, of the true masks, and of what they
    share."""
    predicted = truth.without_ignored([said.mask, *(said.both or ())])
    true = truth.without_ignored(truth.masks)
    shared_masks = [masks.intersect(*pair) for pair in product(predicted, true)]
    shared = np.array(masks.areas(shared_masks), float).reshape(-1, 2)
    predicted_areas = np.array(masks.areas(predicted), float)
    true_areas = np.array(masks.areas(true), float)
    if not truth.has_amodal:
        shared[:, 1] = true_areas[1] = np.nan
    return {
        "predicted": predicted_areas[0],
        "shared": shared[0],
        "truth": true_areas,
        "both": predicted_areas[1:] if said.both else np.nan,
        "both_shared": shared[1:] if said.both else np.nan,
    }


def find_detections(detections: Sequence[Detection], truth: QueryTruth) -> QueryDetections:
    """Ranks the instances of an answer, and compares them with the true ones."""
    is_amodal = truth.query.mask_type == "amodal"
    return rank_detections(
        [one.mask for one in detections],
        [one.score for one in detections],
        [one.is_present for one in detections],
        [i.complete if is_amodal else i.modal for i in truth.instances],
        [] if truth.ignored is None else [truth.ignored],
        occlude_rates=[one.occlude_rate for one in detections],
        true_occlude_rates=[true_occlude_rate(instance) for instance in truth.instances],
    )


def true_occlude_rate(instance: Instance[RLE]) -> float | None:
    """Share of an object that is hidden; None where its complete shape is not annotated."""
    visible_area, complete_area = masks.areas([instance.modal, instance.complete])
    return None if instance.amodal is None else 1 - visible_area / max(1, complete_area)


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
    def rows(self) -> Rows:
        """The table of counts."""
        rows = np.array([result.row for result in self.results], ROW)
        if self.seen is not None:
            rows["seen"] = [result.truth.index in self.seen for result in self.results]
        return rows

    @property
    def data_sha256(self) -> str:
        """Hash of the queries, requested types, true masks and ignored regions, in the order of the
        query ids.

        It is the same for the same data, whatever file they come from and however their RLEs are
        spelt.
        """
        digest = hashlib.sha256()
        for truth in sorted((result.truth for result in self.results), key=lambda t: t.query.id):
            query = truth.query
            parts = [f"{query.id} {query.mask_type} {query.text}"]
            for rle in (*truth.masks, *([truth.ignored] if truth.ignored else [])):
                parts.append(masks.encode(masks.decode(rle))["counts"])
            digest.update("\0".join([*parts, ""]).encode())
        return digest.hexdigest()


Evaluated = Mapping[str, EvalResults]
"""The results of each split."""
