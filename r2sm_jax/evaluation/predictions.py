"""Scores what other systems write: masks for the queries of a data set, and decisions about
sentences alone.

Masks come as

    coco    JSON list of COCO results with `query_id` in place of `image_id` (`Entry`). Several
            entries of a query are instances; the answer is their union, or the entry marked `fused`
    png     folder of `<query id>.png`; what is brighter than half of white is mask
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.images import find_images
from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.evaluation.report import sentence_figures
from r2sm_jax.evaluation.scorer import Answer, EvalResults, QueryTruth, query_truths, score
from r2sm_jax.inference.prediction import Candidate
from r2sm_jax.query import MaskType, Sentence

T = TypeVar("T")

Sizes = Mapping[int, tuple[int, int]]
"""Height and width of the image of each query, by the query's id."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Decision(msgspec.Struct, kw_only=True):
    """A decision about the mask type. Where it is left out, the probability decides."""

    mask_type: MaskType | None = None
    amodal_probability: Share | None = None

    def __post_init__(self):
        if self.mask_type is None and self.amodal_probability is not None:
            self.mask_type = "amodal" if self.amodal_probability > 0.5 else "modal"


class Entry(Decision, kw_only=True):
    """One entry of a `coco` file."""

    query_id: int
    segmentation: Any
    """A COCO RLE or polygons, of the size of the query's image."""
    score: float | None = None
    """Ranks instances; of a fused mask its predicted IoU."""
    fused: bool = False
    occlude_rate: Share | None = None
    """Share of the instance that is hidden."""


class Said(Decision, kw_only=True):
    """One decision about a sentence, as `decide --json` prints it."""

    query: str


Answers = Mapping[int, Sequence[Entry]]
"""The entries of each query that has any, by its id. Masks are compressed RLEs, so that those of
all queries fit in memory."""


def read_entries(path: Path, kind: type[T]) -> list[T]:
    """Reads a JSON list, or JSON Lines. Raises InputError, which names the entry, for bad ones."""
    content = read_bytes(path)
    if not content.strip():
        raise InputError(f"{path}: the file is empty; give a JSON list of predictions")
    try:
        if content.lstrip().startswith(b"["):
            return msgspec.json.decode(content, type=list[kind])
        return msgspec.json.Decoder(kind).decode_lines(content)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: {error}; see docs/metrics.md and docs/intent.md") from error


# Masks


def score_predictions(path: Path, source: Source, form: str = "auto") -> EvalResults:
    """Scores predictions for all queries of a source.

    Args:
        path: a file or a folder.
        form: coco or png; auto: png for a folder.

    Raises InputError, which names the entry or the file, for an unreadable file, a query that does
    not exist or has two answers, and a mask of the wrong size.
    """
    truths = list(query_truths(source))
    sizes = {truth.query.id: truth.size for truth in truths}
    if form == "auto":
        form = "png" if path.is_dir() else "coco"
    answers = _read_pngs(path, sizes) if form == "png" else _read_coco(path, sizes)
    results = EvalResults(source)
    for truth in truths:
        if reason := truth.left_out:
            results.left_out[reason] += 1
            continue
        entries = answers.get(truth.query.id, ())
        if not entries:
            results.missing.append(truth.query.id)
        results.results.append(score(to_answer(entries, truth), truth))
    return results


def to_answer(entries: Sequence[Entry], truth: QueryTruth) -> Answer:
    """Makes the record that the scorer takes of all entries of a query; none is an empty mask."""
    fused = next((entry for entry in entries if entry.fused), None)
    # A system that gives one mask for a query has one detection.
    instances = [entry for entry in entries if not entry.fused] or entries
    mask = masks.merge([entry.segmentation for entry in instances], *truth.size)
    candidates = []
    for entry in instances:
        confidence = 1.0 if entry.score is None else entry.score
        candidates.append(
            Candidate(entry.segmentation, confidence, occlude_rate=entry.occlude_rate)
        )
    probabilities = (entry.amodal_probability for entry in entries)
    return Answer(
        fused.segmentation if fused else mask,
        mask_type=next((entry.mask_type for entry in entries if entry.mask_type), None),
        amodal_probability=next((p for p in probabilities if p is not None), None),
        predicted_iou=fused.score if fused else None,
        candidates=candidates,
    )


def _read_coco(path: Path, sizes: Sizes) -> Answers:
    entries = read_entries(path, Entry)
    answers: dict[int, list[Entry]] = {}
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
        answers.setdefault(entry.query_id, []).append(entry)

    num_decided = 0
    for query_id, of_query in answers.items():
        types = {entry.mask_type for entry in of_query} - {None}
        probabilities = {entry.amodal_probability for entry in of_query} - {None}
        num_fused = sum(entry.fused for entry in of_query)
        if max(len(types), len(probabilities), num_fused) > 1:
            raise InputError(
                f"{path}: query {query_id} has several mask_type, amodal_probability or fused "
                "masks; give one"
            )
        num_decided += len(types)
    num_scored = sum(entry.score is not None for entry in entries)
    _check_all_or_none(path, num_scored, len(entries), "entries", "score")
    _check_all_or_none(path, num_decided, len(answers), "answers", "mask_type")
    return answers


def _check_all_or_none(path: Path, count: int, total: int, what: str, field: str) -> None:
    if count not in (0, total):
        raise InputError(
            f"{path}: {total - count} of {total} {what} have no {field}; give it for all or none"
        )


def _read_pngs(path: Path, sizes: Sizes) -> Answers:
    """Reads one file for each query, named after its id."""
    answers: dict[int, list[Entry]] = {}
    for file in find_images(path, (".png",), "masks that are named after their query ids"):
        query_id = int(file.stem) if file.stem.isdecimal() else -1
        if query_id not in sizes or query_id in answers:
            raise InputError(
                f"{file}: the data have no such query, or another file answers it; name it "
                "<query id>.png"
            )
        rle = masks.encode(masks.read_file(file, sizes[query_id]))
        answers[query_id] = [Entry(query_id=query_id, segmentation=rle)]
    return answers


# Decisions about sentences, without images (docs/intent.md)


def score_decisions(path: Path, sentences: Sequence[Sentence], name: str) -> dict[str, Any]:
    """Scores a file of decisions.

    Returns the figures of `sentence_figures`, the name of the labelled sentences, and hashes.
    Decisions about other sentences do not count.

    Args:
        path: JSON Lines, or one JSON list, of `Said`.
        sentences: labelled ones.
        name: theirs.

    Raises InputError for a bad value, a sentence with two different decisions, and a labelled
    sentence without one.
    """
    decisions: dict[str, Said] = {}
    for entry in read_entries(path, Said):
        if decisions.setdefault(entry.query.strip(), entry) != entry:
            raise InputError(f"{path}: {entry.query!r} has two decisions; keep one of them")
    said = [decisions.get(sentence.text, Said(query="")) for sentence in sentences]
    missing = [s.text for s, one in zip(sentences, said, strict=True) if one.mask_type is None]
    if missing:
        raise InputError(
            f"{path}: {len(missing)} of {len(sentences)} sentences of {name} have no decision "
            f"(the first: {missing[0]!r}); give one for each, with the same text"
        )
    predicted = np.array([one.mask_type == "amodal" for one in said], bool)
    text = "\n".join(f"{sentence.mask_type}\t{sentence.text}" for sentence in sentences)
    return {
        "sentences": name,
        "sentences_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "decisions": path.name,
        "decisions_sha256": hashlib.sha256(read_bytes(path)).hexdigest(),
        "ignored": len(decisions.keys() - {sentence.text for sentence in sentences}),
        **sentence_figures(sentences, predicted, [one.amodal_probability for one in said]),
        "queries": len(sentences),
    }
