"""The one scorer: predictions of our own segmenter or of any other system against the truth.

Pixels are counted in run-length encoding. The two true masks of a query are nested (modal ⊆
amodal), so a predicted mask's overlaps with both also give its overlap with the hidden part between
them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.special import logit

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample, Source, truth_of_sample
from r2sm_jax.data.masks import RLE
from r2sm_jax.evaluation.instances import QueryDetections, rank_detections
from r2sm_jax.evaluation.iou import (
    Overlap,
    boundary_overlap,
    count_overlap,
    overlaps_at_shifts,
)
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import BATCH_ROWS, FramedImage, Predictor
from r2sm_jax.inference.reading import NUM_THREADS, read_ahead
from r2sm_jax.models.r2sm import R2SMOutput
from r2sm_jax.progress import show_progress
from r2sm_jax.query import MaskType, Query, keyword_mask_type
from r2sm_jax.training.sharding import allgather

# The truth


class QueryTruth(NamedTuple):
    """A query and the true masks of its instances."""

    query: Query
    index: int
    """Index of the image in its source."""
    image_id: int
    height: int
    width: int
    instances: tuple[Instance, ...]
    """The targets, with RLEs as masks, without those that are regions to ignore."""
    ignored: RLE | None
    """The region of the image that counts nowhere."""

    @property
    def has_amodal(self) -> bool:
        """Whether the complete shape of every instance is annotated."""
        return all(instance.amodal is not None for instance in self.instances)

    @property
    def is_ignored(self) -> bool:
        """Whether all that the query means lies in regions to ignore."""
        # If it were scored, an empty answer would be right.
        if not self.query.instance_ids:
            return False
        if not self.instances:
            return True
        if self.ignored is None:
            return False
        requested = self.amodal if self.query.mask_type == "amodal" else self.modal
        area, ignored_area = masks.areas([requested, masks.intersect(requested, self.ignored)])
        return 0 < area == ignored_area

    @property
    def is_scored(self) -> bool:
        """Whether the query counts: not ignored, and its requested mask is annotated."""
        is_annotated = self.query.mask_type == "modal" or self.has_amodal
        return is_annotated and not self.is_ignored

    @property
    def modal(self) -> RLE:
        """The visible part of all instances."""
        return masks.merge([i.modal for i in self.instances], self.height, self.width)

    @property
    def amodal(self) -> RLE:
        """The complete shape of all instances; their visible part where no more is annotated."""
        return masks.merge([i.complete for i in self.instances], self.height, self.width)


def query_truths(source: Source) -> Iterator[QueryTruth]:
    """Yields every query of a source, in order."""
    for index in range(len(source)):
        yield from query_truths_at(source, index)


def query_truths_at(source: Source, index: int, sample: Sample | None = None) -> list[QueryTruth]:
    """Returns the queries of one image with their truth.

    Args:
        sample: the sample at `index`, if it is at hand; procedural sources would make it again.
    """
    truth = source.truth_at(index) if sample is None else truth_of_sample(sample)
    height, width = truth.size
    by_id = {instance.id: instance for instance in truth.instances}
    ignored_masks = [instance.complete for instance in truth.instances if instance.ignore]
    ignored = masks.merge(ignored_masks, height, width) if ignored_masks else None
    truths = []
    for query in truth.queries:
        instance_ids = dict.fromkeys(query.instance_ids)  # without doubles
        targets = tuple(by_id[i] for i in instance_ids if not by_id[i].ignore)
        truths.append(QueryTruth(query, index, truth.image_id, height, width, targets, ignored))
    return truths


# The result of one query


class TruthOverlaps(NamedTuple):
    """A predicted mask against the two true masks of its query. Ignored regions count nowhere."""

    with_modal: Overlap
    with_amodal: Overlap | None
    """None where the complete shape is not annotated."""


class MaskPair(NamedTuple):
    """A modal and an amodal mask as RLEs."""

    modal: RLE
    amodal: RLE


@dataclass(frozen=True)
class QueryResult:
    """The counts of one query, from which every figure of a report follows."""

    query: Query
    index: int
    """Index of the image in its source."""
    image_id: int
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
    presence: float | None = field(compare=False)
    """Logit that the image has what the query means. It is rounded differently in other batches."""
    detections: QueryDetections = field(compare=False)
    true_masks: MaskPair
    predicted_masks: MaskPair
    """Both are the same where a system gives one mask."""
    is_missing: bool = False
    """There is no prediction; an empty mask is counted in its place."""
    overlaps_at_shifts: Int[np.ndarray, "s 4"] | None = field(default=None, compare=False)
    """The `overlap` at other mask thresholds. Filled in only on request."""

    @property
    def query_id(self) -> int:
        """The id of the query."""
        return self.query.id

    @property
    def mask_type(self) -> MaskType:
        """The requested type."""
        return self.query.mask_type

    @property
    def keyword_type(self) -> MaskType:
        """The decision of the keyword rule."""
        return keyword_mask_type(self.query.text)

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

    @property
    def occlusion_rate(self) -> float | None:
        """Share of the target that is hidden; None where the complete shape is not annotated."""
        modal, amodal = self.answer
        if amodal is None or not amodal.truth:
            return None
        return 1 - modal.truth / amodal.truth


def score(
    prediction: Prediction | None,
    truth: QueryTruth,
    shifts: Float[np.ndarray, " s"] | None = None,
) -> QueryResult:
    """Scores the prediction for one query; None counts as an empty mask.

    Args:
        shifts: of the mask threshold, for `QueryResult.overlaps_at_shifts`. They need a prediction
            with `mask_logits`.
    """
    is_missing = prediction is None
    if prediction is None:
        empty = np.zeros((truth.height, truth.width), bool)
        prediction = Prediction(
            truth.query.text, None, None, None, empty, empty, has_both_masks=False
        )

    true_masks = MaskPair(truth.modal, truth.amodal)
    mask = prediction.rle("mask")
    predicted_masks = MaskPair(mask, mask)
    modal_overlaps = None
    amodal_overlaps = None
    if prediction.has_both_masks:
        predicted_masks = MaskPair(prediction.rle("modal"), prediction.rle("amodal"))
        modal_overlaps = count_overlaps(predicted_masks.modal, true_masks, truth)
        amodal_overlaps = count_overlaps(predicted_masks.amodal, true_masks, truth)

    is_amodal = truth.query.mask_type == "amodal"
    requested = true_masks.amodal if is_amodal else true_masks.modal
    ignored = None if truth.ignored is None else masks.expand(truth.ignored)
    shifted = None
    if shifts is not None:
        assert prediction.mask_logits is not None
        shifted = overlaps_at_shifts(
            prediction.mask_logits, masks.expand(requested), shifts, ignored
        )
    return QueryResult(
        query=truth.query,
        index=truth.index,
        image_id=truth.image_id,
        answer=count_overlaps(mask, true_masks, truth),
        predicted_modal=modal_overlaps,
        predicted_amodal=amodal_overlaps,
        boundary=boundary_overlap(mask, requested, ignored),
        predicted_type=prediction.mask_type,
        amodal_probability=prediction.amodal_probability,
        predicted_iou=prediction.score,
        presence=float(logit(prediction.presence)) if prediction.has_both_masks else None,
        detections=rank_detections(
            [candidate.mask for candidate in prediction.candidates],
            [candidate.score for candidate in prediction.candidates],
            [candidate.is_present for candidate in prediction.candidates],
            [i.complete if is_amodal else i.modal for i in truth.instances],
            [] if truth.ignored is None else [truth.ignored],
            occlude_rates=[candidate.occlude_rate for candidate in prediction.candidates],
            true_occlude_rates=[_occlude_rate(instance) for instance in truth.instances],
        ),
        true_masks=true_masks,
        predicted_masks=predicted_masks,
        is_missing=is_missing,
        overlaps_at_shifts=shifted,
    )


def _occlude_rate(instance: Instance) -> float | None:
    """Share of an instance that is hidden; None where its complete shape is not annotated."""
    if instance.amodal is None:
        return None
    visible_area, complete_area = masks.areas([instance.modal, instance.amodal])
    return 1 - visible_area / max(1, complete_area)


def count_overlaps(mask: RLE, true_masks: MaskPair, truth: QueryTruth) -> TruthOverlaps:
    """Counts the pixels of a predicted mask, of both true masks, and of what they share."""
    modal, amodal = true_masks
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
    num_ignored: int = 0
    """Queries that are left out, since all of their targets are regions to ignore."""
    num_not_annotated: int = 0
    """Amodal queries that are left out, since the complete shape of a target is not annotated."""
    oddities: list[str] = field(default_factory=list)
    """What may be wrong with the predictions of another system, one sentence each."""

    def add(self, result: QueryResult) -> None:
        """Adds the result of one query."""
        self.results.append(result)

    def count_left_out(self, truth: QueryTruth) -> None:
        """Counts a query that is not scored, by its reason."""
        if truth.is_ignored:
            self.num_ignored += 1
        else:
            self.num_not_annotated += 1

    def merge(self, other: "EvalResults") -> None:
        """Appends the results of other images of the split."""
        self.results += other.results
        self.num_ignored += other.num_ignored
        self.num_not_annotated += other.num_not_annotated

    def describe_left_out(self) -> str:
        """Returns a sentence on the queries that are left out, with reasons; "" if none is."""
        parts = []
        if self.num_ignored:
            parts.append(f"{self.num_ignored} mean only regions to ignore")
        if self.num_not_annotated:
            parts.append(f"{self.num_not_annotated} ask for a complete shape that is not annotated")
        num_left_out = self.num_ignored + self.num_not_annotated
        return f"{num_left_out} queries are left out: {', '.join(parts)}" if parts else ""

    @property
    def missing(self) -> list[int]:
        """Ids of the queries without a prediction."""
        return [result.query_id for result in self.results if result.is_missing]

    @property
    def data_sha256(self) -> str:
        """Hash of the queries, requested types and true masks, in the order of the query ids.

        It is the same for the same data, whatever file they come from.
        """
        digest = hashlib.sha256()
        for result in sorted(self.results, key=lambda result: result.query_id):
            query = result.query
            parts = [f"{query.id} {query.mask_type} {query.text}".encode()]
            for rle in result.true_masks:
                counts = rle["counts"]
                parts.append(counts if isinstance(counts, bytes) else counts.encode())
            digest.update(b"\0".join([*parts, b""]))
        return digest.hexdigest()


def evaluate_source(
    predictor: Predictor,
    source: Source,
    shifts: Float[np.ndarray, " s"] | None = None,
    *,
    name: str = "a split",
) -> EvalResults:
    """Predicts and scores every query of a source whose requested mask is annotated.

    The decision of the model selects the mask. Masks are compared at the images' own resolution.
    Several processes divide the images, and each gets the results of all: the same as one process
    would compute.

    Args:
        predictor: the segmenter.
        source: the images and their queries.
        shifts: ascending shifts of the mask threshold, for `QueryResult.overlaps_at_shifts`.
        name: of the split, for the progress that is shown.
    """
    # Parts of one batch each, so that batches are the same whatever the number of processes.
    images = [index for index in range(len(source)) if source.queries_at(index)]
    parts = [images[start : start + BATCH_ROWS] for start in range(0, len(images), BATCH_ROWS)]
    num_processes = jax.process_count()
    own_parts = parts[jax.process_index() :: num_processes]

    sentences = [query.text for part in own_parts for i in part for query in source.queries_at(i)]
    # All sentences at once: the language model is fastest in large batches.
    predictor.text_encoder.encode(sentences)
    own_results = []
    with (
        show_progress(f"evaluating images of {name}", sum(map(len, own_parts))) as advance,
        ThreadPoolExecutor(NUM_THREADS) as pool,
    ):
        # While the model computes one part, threads read the next one and score the last one.
        scoring: list[Future[EvalResults]] = []
        for reading in read_ahead(pool, partial(_read_image, predictor, source), own_parts):
            images = [future.result() for future in reading]
            queries = [[truth.query.text for truth in image.truths] for image in images]
            outputs = predictor.predict_logits([image.frame for image in images], queries)

            finished = scoring
            scoring = []
            for image, of_image in zip(images, outputs, strict=True):
                scoring.append(pool.submit(_score_image, predictor, image, of_image, shifts))
            # Only now, so that no thread waits for the next ones.
            if finished:
                own_results.append(_merge_images(finished))
            advance(len(images))
        if scoring:
            own_results.append(_merge_images(scoring))

    results_of_processes = allgather(own_results)
    merged = EvalResults()
    # Part i was evaluated by process i % num_processes, as its i // num_processes-th part.
    for number in range(len(parts)):
        merged.merge(results_of_processes[number % num_processes][number // num_processes])
    return merged


class _Image(NamedTuple):
    """What evaluation needs of an image before the model has seen it."""

    frame: FramedImage
    truths: list[QueryTruth]
    """Those of the queries that are scored."""
    left_out: list[QueryTruth]


def _read_image(predictor: Predictor, source: Source, index: int) -> _Image:
    """Reads image `index` of a source with its truth."""
    sample = source[index]
    truths = query_truths_at(source, index, sample)
    return _Image(
        frame=predictor.frame(sample.image),
        truths=[truth for truth in truths if truth.is_scored],
        left_out=[truth for truth in truths if not truth.is_scored],
    )


def _score_image(
    predictor: Predictor,
    image: _Image,
    outputs: Sequence[R2SMOutput],
    shifts: Float[np.ndarray, " s"] | None,
) -> EvalResults:
    """Scores the model's outputs for the queries about one image."""
    # The oracle head is told the requested type.
    is_oracle = predictor.config.head == "oracle"
    results = EvalResults()
    for truth in image.left_out:
        results.count_left_out(truth)
    # One query after the other, since the masks of a large image are large.
    for truth, output in zip(image.truths, outputs, strict=True):
        (prediction,) = predictor.to_predictions(
            [truth.query.text],
            [output],
            image.frame.letterbox,
            [truth.query.mask_type if is_oracle else "auto"],
            with_candidates=True,
            with_logits=shifts is not None,
        )
        results.add(score(prediction, truth, shifts))
    return results


def _merge_images(scoring: Sequence[Future[EvalResults]]) -> EvalResults:
    """The results of the images of one part, in order, once they are there."""
    results = EvalResults()
    for future in scoring:
        results.merge(future.result())
    return results
