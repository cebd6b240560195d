"""Scores what other systems write: masks for the queries of a data set, and decisions about
sentences alone.

Masks come as

    coco    JSON list of COCO results with `query_id` in place of `image_id` (`Entry`). Several
            entries of a query are instances; the answer is their union, or the entry marked `fused`
    png     folder of `<query id>.png`; what is brighter than half of white is mask

The answers of our own segmenter are scored as the entries that `predict` writes of them.
"""

import hashlib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.images import find_images
from r2sm_jax.data.mask_reader import read_mask
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.evaluation.report import decision_figures
from r2sm_jax.evaluation.scorer import (
    Answer,
    Detection,
    EvalResults,
    Pair,
    QueryTruth,
    query_truths,
    score,
)
from r2sm_jax.evaluation.wordings import score_wordings
from r2sm_jax.query import MaskType, Sentence

T = TypeVar("T")

QuerySizes = Mapping[int, tuple[int, int]]
"""Height and width of the image of each query, by the query's id."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Typed(msgspec.Struct, kw_only=True):
    """What has a mask type. Where it is left out, the probability decides."""

    mask_type: MaskType | None = None
    amodal_probability: Share | None = None

    def __post_init__(self):
        if self.mask_type is None and self.amodal_probability is not None:
            self.mask_type = "amodal" if self.amodal_probability > 0.5 else "modal"


class Entry(Typed, kw_only=True):
    """One entry of a `coco` file."""

    query_id: int
    segmentation: Any
    """A COCO RLE or polygons, of the size of the query's image; null or [] where nothing is."""
    score: float | None = None
    """Ranks instances; of a fused mask its predicted IoU, which may be unknown."""
    fused: bool = False
    occlude_rate: Share | None = None
    """Share of the instance that is hidden."""
    presence: Share | None = None
    """Probability that the query has a target."""
    present: bool = True
    """False: no part of the answer, but ranked for average precision."""
    modal: Any = None
    """The system's visible mask of what it answers, where it gives both."""
    amodal: Any = None
    """The complete one."""


class Said(Typed, kw_only=True):
    """One decision about a sentence, as `decide --json` prints it."""

    query: str


Entries = Mapping[int, Sequence[Entry]]
"""The entries of each query that has any, by its id. Masks are compressed RLEs, so that those of
all queries fit in memory."""
FOR_ALL_OR_NONE = ("mask_type", "presence", "modal")
"""What a system says of every query that it answers, or of none."""


def read_entries(path: Path, kind: type[T]) -> list[T]:
    """Reads a JSON list, or JSON Lines. Raises InputError, which names the entry, for bad ones."""
    content = read_bytes(path)
    if not content.strip():
        raise InputError(f"{path}: the file is empty; give a JSON list of predictions")
    try:
        if content.lstrip().startswith(b"["):
            return msgspec.json.decode(content, type=GenericAlias(list, kind))
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
    entries = _read_pngs(path, sizes) if form == "png" else _read_answers(path, sizes)
    said = set()
    for of_query in entries.values():
        said |= {name for name in FOR_ALL_OR_NONE if _value(of_query, name) is not None}
    results = EvalResults(source)
    for truth in truths:
        if reason := truth.left_out:
            results.left_out[reason] += 1
            continue
        if truth.query.id in entries:
            answer = to_answer(entries[truth.query.id], truth)
        else:
            results.missing.append(truth.query.id)
            answer = no_answer(said, truth)
        results.results.append(score(answer, truth))
    return results


def to_answer(entries: Sequence[Entry], truth: QueryTruth) -> Answer:
    """Makes the record that the scorer takes of all entries of a query."""
    fused = [entry for entry in entries if entry.fused]
    # A system that gives one mask for a query has one detection.
    instances = [entry for entry in entries if not entry.fused] or fused
    answers = fused or [entry for entry in instances if entry.present]
    both = None
    if _value(entries, "modal") is not None:
        both = Pair(_merged(answers, "modal", truth), _merged(answers, "amodal", truth))
    detections = []
    for entry in instances:
        confidence = 1.0 if entry.score is None else entry.score
        detections.append(
            Detection(entry.segmentation, confidence, entry.present, entry.occlude_rate)
        )
    return Answer(
        mask=_merged(answers, "segmentation", truth),
        both=both,
        mask_type=_value(entries, "mask_type"),
        amodal_probability=_value(entries, "amodal_probability"),
        predicted_iou=fused[0].score if fused else None,
        detections=detections,
        presence=_value(entries, "presence"),
    )


def no_answer(said: Set[str], truth: QueryTruth) -> Answer:
    """Makes the answer to a query that a system left out: an empty mask, and the wrong mask type.

    `said`: those of `FOR_ALL_OR_NONE` that the system says of other queries.
    """
    nothing = masks.merge([], *truth.size)
    wrong_type: MaskType = "modal" if truth.query.mask_type == "amodal" else "amodal"
    return Answer(
        nothing,
        both=Pair(nothing, nothing) if "modal" in said else None,
        mask_type=wrong_type if "mask_type" in said else None,
        presence=0.0 if "presence" in said else None,
    )


def _value(entries: Sequence[Entry], name: str) -> Any:
    """Returns the first value of a field of a query; None without any."""
    values = (getattr(entry, name) for entry in entries)
    return next((value for value in values if value is not None), None)


def _merged(entries: Sequence[Entry], name: str, truth: QueryTruth) -> RLE:
    found = [getattr(entry, name) for entry in entries]
    return masks.merge([mask for mask in found if mask is not None], *truth.size)


def _read_answers(path: Path, sizes: QuerySizes) -> Entries:
    read = read_entries(path, Entry)
    entries: dict[int, list[Entry]] = {}
    for number, entry in enumerate(read):
        where = f"{path}: entry {number}"
        if entry.query_id not in sizes:
            raise InputError(
                f"{where}: the data have no query {entry.query_id}; score the data that were "
                "predicted"
            )
        height, width = sizes[entry.query_id]
        if entry.segmentation in (None, []):
            entry.segmentation = masks.merge([], height, width)
        try:
            for name in ("segmentation", "modal", "amodal"):
                if (mask := getattr(entry, name)) is not None:
                    setattr(entry, name, masks.compressed(mask, height, width))
        except ValueError as error:
            raise InputError(f"{where}: {error}; see docs/metrics.md") from error
        if (entry.modal is None) != (entry.amodal is None):
            raise InputError(f"{where}: it has one of modal and amodal; give both or none")
        of_query = entries.setdefault(entry.query_id, [])
        # What was appended a second time is no further instance.
        if entry not in of_query:
            of_query.append(entry)

    for query_id, of_query in entries.items():
        types = {entry.mask_type for entry in of_query} - {None}
        probabilities = {entry.amodal_probability for entry in of_query} - {None}
        presences = {entry.presence for entry in of_query} - {None}
        num_fused = sum(entry.fused for entry in of_query)
        if max(len(types), len(probabilities), len(presences), num_fused) > 1:
            raise InputError(
                f"{path}: query {query_id} has several mask_type, amodal_probability, presence or "
                "fused masks; give one"
            )
    # A fused mask beside instances is not ranked, and its predicted IoU may be unknown.
    scores = [
        entry.score
        for of_query in entries.values()
        for entry in of_query
        if not entry.fused or len(of_query) == 1
    ]
    _check_all_or_none(path, len(scores) - scores.count(None), len(scores), "entries", "score")
    for name in FOR_ALL_OR_NONE:
        count = sum(_value(of_query, name) is not None for of_query in entries.values())
        _check_all_or_none(path, count, len(entries), "answers", name)
    return entries


def _check_all_or_none(path: Path, count: int, total: int, what: str, field: str) -> None:
    if count not in (0, total):
        raise InputError(
            f"{path}: {total - count} of {total} {what} have no {field}; give it for all or none"
        )


def _read_pngs(path: Path, sizes: QuerySizes) -> Entries:
    """Reads one file for each query, named after its id."""
    entries: dict[int, list[Entry]] = {}
    for file in find_images(path, (".png",), "masks that are named after their query ids"):
        query_id = int(file.stem) if file.stem.isdecimal() else -1
        if query_id not in sizes or query_id in entries:
            raise InputError(
                f"{file}: the data have no such query, or another file answers it; name it "
                "<query id>.png"
            )
        rle = masks.encode(read_mask(file, sizes[query_id], str(file), may_be_empty=True))
        entries[query_id] = [Entry(query_id=query_id, segmentation=rle)]
    return entries


# Decisions about sentences, without images (docs/intent.md)


def score_decisions(path: Path, sentences: Sequence[Sentence], name: str) -> dict[str, Any]:
    """Scores a file of decisions.

    Returns the figures of `decision_figures`, those of each plain wording (`score_wordings`), the
    name of the labelled sentences, and hashes.
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
    probabilities = [one.amodal_probability for one in said]
    pairs = zip(said, sentences, strict=True)
    is_right = np.array([one.mask_type == sentence.mask_type for one, sentence in pairs], bool)
    text = "\n".join(f"{sentence.mask_type}\t{sentence.text}" for sentence in sentences)
    return {
        "sentences": name,
        "sentences_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "decisions": path.name,
        "decisions_sha256": hashlib.sha256(read_bytes(path)).hexdigest(),
        "ignored": len(decisions.keys() - {sentence.text for sentence in sentences}),
        **decision_figures(
            [sentence.text for sentence in sentences],
            [sentence.mask_type for sentence in sentences],
            [one.mask_type or "" for one in said],
            np.array(probabilities, float),
        ),
        "queries": len(sentences),
        "wordings": score_wordings(sentences, is_right),
    }
