"""Prediction files and folders of any system, read as the `Prediction`s that the scorer takes.

Formats, by name:

    coco    JSON list of COCO results with `query_id` in place of `image_id` (`Entry`). Several
            entries of a query are instances; the answer is their union, or the entry marked `fused`
    png     folder of `<query id>.png`; what is brighter than half of white is mask
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.images import find_images
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.evaluation.scorer import EvalResults, QueryTruth, query_truths, score
from r2sm_jax.inference.prediction import Candidate, Prediction
from r2sm_jax.query import MaskType

FORMATS = ("coco", "png")

Sizes = Mapping[int, tuple[int, int]]
"""Height and width of the image of each query, by the query's id."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Entry(msgspec.Struct):
    """One entry of a `coco` file."""

    query_id: int
    segmentation: Any
    """A COCO RLE or polygons, of the size of the query's image."""
    score: float | None = None
    """Ranks instances; of a fused mask its predicted IoU."""
    mask_type: MaskType | None = None
    amodal_probability: Share | None = None
    fused: bool = False
    occlude_rate: Share | None = None
    """Share of the instance that is hidden."""


@dataclass
class PredictedMasks:
    """The answer to one query. Masks stay RLEs, so that those of all queries fit in memory."""

    fused: RLE | None = None
    """The mask of all instances together; None: the union of `instances`."""
    instances: list[Candidate] = field(default_factory=list)
    mask_type: MaskType | None = None
    """The named one, or else the more probable one; None without either."""
    amodal_probability: float | None = None
    score: float | None = None
    """Predicted IoU of the fused mask."""

    def to_prediction(self, truth: QueryTruth) -> Prediction:
        """Makes the record that the scorer takes."""
        rle = self.fused
        if rle is None:
            rle = masks.merge([instance.mask for instance in self.instances], *truth.size)
        mask = masks.decode(rle)
        return Prediction(
            query=truth.query.text,
            mask_type=self.mask_type,
            amodal_probability=self.amodal_probability,
            score=self.score,
            modal=mask,
            amodal=mask,
            candidates=tuple(self.instances),
            has_both_masks=False,
        )


def score_predictions(path: Path, source: Source, form: str = "auto") -> EvalResults:
    """Scores predictions for all queries of a source. Raises InputError like `read_predictions`."""
    truths = list(query_truths(source))
    sizes = {truth.query.id: truth.size for truth in truths}
    predicted = read_predictions(path, sizes, form)
    results = EvalResults()
    for truth in truths:
        if not truth.is_scored:
            results.count_left_out(truth)
            continue
        answer = predicted.get(truth.query.id)
        prediction = None if answer is None else answer.to_prediction(truth)
        results.results.append(score(prediction, truth))
    return results


def read_predictions(path: Path, sizes: Sizes, form: str = "auto") -> dict[int, PredictedMasks]:
    """Reads the predictions for the queries of `sizes`; those without any are not in the result.

    Raises InputError, which names the entry or the file, for an unreadable file, a query that does
    not exist or has two answers, and a mask of the wrong size.
    """
    if form == "auto":
        form = "png" if path.is_dir() else "coco"
    if form not in FORMATS:
        raise InputError(f"--format {form!r} is unknown; use {' or '.join(FORMATS)}")
    predicted = _read_coco(path, sizes) if form == "coco" else _read_pngs(path, sizes)
    if not predicted:
        raise InputError(f"{path}: there are no predictions in the file; give one for each query")
    return predicted


def _read_coco(path: Path, sizes: Sizes) -> dict[int, PredictedMasks]:
    try:
        entries = msgspec.json.decode(read_bytes(path), type=list[Entry])
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: {error}; see docs/metrics.md") from error

    by_query: dict[int, list[Entry]] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: entry {number}"
        if entry.query_id not in sizes:
            raise InputError(
                f"{where}: the data have no query {entry.query_id}; score the data that were "
                "predicted"
            )
        try:
            entry.segmentation = masks.compressed(entry.segmentation, *sizes[entry.query_id])
        except ValueError as error:
            raise InputError(f"{where}: {error}; see docs/metrics.md") from error
        by_query.setdefault(entry.query_id, []).append(entry)

    num_scored = sum(entry.score is not None for entry in entries)
    if 0 < num_scored < len(entries):
        raise InputError(
            f"{path}: {len(entries) - num_scored} of {len(entries)} entries have no score; give it "
            "for every entry or for none"
        )
    predicted = {}
    for query_id, of_query in by_query.items():
        try:
            predicted[query_id] = _combine(of_query)
        except ValueError as error:
            raise InputError(f"{path}: query {query_id} {error}; see docs/metrics.md") from error
    undecided = [query_id for query_id, answer in predicted.items() if answer.mask_type is None]
    if 0 < len(undecided) < len(predicted):
        raise InputError(
            f"{path}: query {undecided[0]} has an answer without mask_type, others have one; "
            "give it for every answer or for none"
        )
    return predicted


def _combine(entries: Sequence[Entry]) -> PredictedMasks:
    """Makes one answer of all entries of a query. Raises ValueError where two contradict each
    other."""
    types: set[MaskType] = {e.mask_type for e in entries if e.mask_type is not None}
    probabilities = {e.amodal_probability for e in entries if e.amodal_probability is not None}
    if len(types) > 1:
        raise ValueError("is called modal and amodal")
    if len(probabilities) > 1:
        raise ValueError("has several amodal_probability")
    mask_type = next(iter(types), None)
    probability = next(iter(probabilities), None)
    if mask_type is None and probability is not None:
        mask_type = "amodal" if probability > 0.5 else "modal"

    answer = PredictedMasks(mask_type=mask_type, amodal_probability=probability)
    for entry in entries:
        if entry.fused:
            if answer.fused is not None:
                raise ValueError("has two fused masks")
            answer.fused = entry.segmentation
            answer.score = entry.score
        else:
            answer.instances.append(_to_candidate(entry))
    # A system that gives one mask for a query has one detection.
    if not answer.instances:
        answer.instances = [_to_candidate(entry) for entry in entries]
    return answer


def _to_candidate(entry: Entry) -> Candidate:
    score = 1.0 if entry.score is None else entry.score
    return Candidate(entry.segmentation, score, occlude_rate=entry.occlude_rate)


def _read_pngs(path: Path, sizes: Sizes) -> dict[int, PredictedMasks]:
    """Reads one file for each query, named after its id."""
    predicted: dict[int, PredictedMasks] = {}
    for file in find_images(path, (".png",), "masks that are named after their query ids"):
        query_id = int(file.stem) if file.stem.isdecimal() else -1
        if query_id not in sizes:
            raise InputError(f"{file}: the data have no such query; name it <query id>.png")
        if query_id in predicted:
            raise InputError(
                f"{file}: query {query_id} is answered by another file already; keep one"
            )
        rle = masks.encode(masks.read_file(file, sizes[query_id]))
        predicted[query_id] = PredictedMasks(instances=[Candidate(rle, 1.0)])
    return predicted
