"""Prediction files and folders of any system, read as the `Prediction`s that the scorer takes.

Formats, by name:

    coco    JSON list of COCO results with `query_id` in place of `image_id` (`Entry`). Several
            entries of a query are instances; the answer is their union, or the entry marked `fused`
    png     folder of `<query id>.png`; what is brighter than half of white is mask
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.images import find_images
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

    def __post_init__(self):
        if self.mask_type is None and self.amodal_probability is not None:
            self.mask_type = "amodal" if self.amodal_probability > 0.5 else "modal"


Answers = Mapping[int, Sequence[Entry]]
"""The entries of each query that has any, by its id. Masks are compressed RLEs, so that those of
all queries fit in memory."""


def score_predictions(path: Path, source: Source, form: str = "auto") -> EvalResults:
    """Scores predictions for all queries of a source. Raises InputError like `read_predictions`."""
    truths = list(query_truths(source))
    answers = read_predictions(path, {truth.query.id: truth.size for truth in truths}, form)
    results = EvalResults()
    for truth in truths:
        if reason := truth.left_out:
            results.left_out[reason] += 1
            continue
        entries = answers.get(truth.query.id)
        prediction = to_prediction(entries, truth) if entries else None
        results.results.append(score(prediction, truth))
    return results


def to_prediction(entries: Sequence[Entry], truth: QueryTruth) -> Prediction:
    """Makes the record that the scorer takes of all entries of a query."""
    fused = next((entry for entry in entries if entry.fused), None)
    # A system that gives one mask for a query has one detection.
    instances = [entry for entry in entries if not entry.fused] or entries
    rle = fused.segmentation if fused else None
    if rle is None:
        rle = masks.merge([entry.segmentation for entry in instances], *truth.size)
    mask = masks.decode(rle)
    probabilities = (entry.amodal_probability for entry in entries)
    candidates = []
    for entry in instances:
        confidence = 1.0 if entry.score is None else entry.score
        candidates.append(
            Candidate(entry.segmentation, confidence, occlude_rate=entry.occlude_rate)
        )
    return Prediction(
        query=truth.query.text,
        mask_type=next((entry.mask_type for entry in entries if entry.mask_type), None),
        amodal_probability=next((p for p in probabilities if p is not None), None),
        score=fused.score if fused else None,
        modal=mask,
        amodal=mask,
        candidates=tuple(candidates),
        has_both_masks=False,
    )


def read_predictions(path: Path, sizes: Sizes, form: str = "auto") -> Answers:
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


def _read_coco(path: Path, sizes: Sizes) -> Answers:
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
    num_decided = 0
    for query_id, of_query in by_query.items():
        types = {entry.mask_type for entry in of_query} - {None}
        probabilities = {entry.amodal_probability for entry in of_query} - {None}
        num_fused = sum(entry.fused for entry in of_query)
        if max(len(types), len(probabilities), num_fused) > 1:
            raise InputError(
                f"{path}: query {query_id} has several mask_type, amodal_probability or fused "
                "masks; give one"
            )
        num_decided += len(types)
    if 0 < num_decided < len(by_query):
        raise InputError(
            f"{path}: {len(by_query) - num_decided} of {len(by_query)} answers have no mask_type; "
            "give it for every answer or for none"
        )
    return by_query


def _read_pngs(path: Path, sizes: Sizes) -> Answers:
    """Reads one file for each query, named after its id."""
    predicted: dict[int, list[Entry]] = {}
    for file in find_images(path, (".png",), "masks that are named after their query ids"):
        query_id = int(file.stem) if file.stem.isdecimal() else -1
        if query_id not in sizes:
            raise InputError(f"{file}: the data have no such query; name it <query id>.png")
        if query_id in predicted:
            raise InputError(
                f"{file}: query {query_id} is answered by another file already; keep one"
            )
        rle = masks.encode(masks.read_file(file, sizes[query_id]))
        predicted[query_id] = [Entry(query_id, rle)]
    return predicted
