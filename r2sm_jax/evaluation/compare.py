"""Compares what several systems did, sentence by sentence.

    write_queries    results of a report              -> `queries.csv`, a line for each query
    compare          `queries.csv` of several reports -> figures and paired differences, as a dict
    score_decisions  decisions about sentences alone, and their labels -> figures, as a dict

tables.py formats a comparison.
"""

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Float, Int

from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.evaluation.iou import Ratio, interval, iou_ratios, mean_ratio
from r2sm_jax.evaluation.report import sentence_figures
from r2sm_jax.evaluation.scorer import QueryResult
from r2sm_jax.evaluation.tables import COMPARED
from r2sm_jax.query import QUERY_TYPES, MaskType, Sentence

QUERIES_FILE = "queries.csv"
COLUMNS = (
    "split",
    "query_id",
    "image_id",
    "mask_type",
    "said",
    "amodal_probability",
    "predicted",
    "truth",
    "intersection",
    "union",
    "occluded_intersection",
    "occluded_union",
    "boundary_intersection",
    "boundary_union",
)


class QueryTable(NamedTuple):
    """The queries of one split, in the order of their ids."""

    query_id: Int[np.ndarray, " n"]
    image_id: Int[np.ndarray, " n"]
    truth_area: Int[np.ndarray, " n"]
    is_amodal: Bool[np.ndarray, " n"]
    """Whether the amodal mask was requested."""
    is_right: Float[np.ndarray, " n"]
    """1 where the decision was right, 0 where wrong, NaN without one."""
    mask: Float[np.ndarray, "n 2"]
    """Intersection and union of the answer and the requested mask."""
    occluded: Float[np.ndarray, "n 2"]
    """Intersection and union of the hidden parts; NaN where a query has none."""
    boundary: Float[np.ndarray, "n 2"]
    """Intersection and union of the boundaries."""


def write_queries(path: Path, results: Mapping[str, Sequence[QueryResult]]) -> None:
    """Writes the queries of all splits in one table.

    Areas are in pixels. A cell is empty where a value is not defined.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for split, results_of_split in results.items():
            for result in results_of_split:
                row = [split, result.query.id, result.truth.image_id, result.mask_type]
                row += [result.predicted_type, result.amodal_probability]
                row += [result.overlap.predicted, result.overlap.truth]
                for overlap in (result.overlap, result.occluded_overlap, result.boundary):
                    row += overlap[:2] if overlap is not None else (None, None)
                writer.writerow(row)


def read_queries(folder: Path) -> dict[str, QueryTable]:
    """Reads the queries of a report by split.

    Raises InputError if the folder has no such table, or it cannot be read.
    """
    path = folder / QUERIES_FILE
    rows_by_split: dict[str, list[dict[str, str]]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                rows_by_split.setdefault(row["split"], []).append(row)
        return {split: _read_table(rows) for split, rows in rows_by_split.items()}
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise InputError(
            f"{path}: no table of queries can be read ({error!r}); evaluate again with --out"
        ) from error


def _read_table(rows: Sequence[dict[str, str]]) -> QueryTable:
    # Reports of one data set may list its queries in another order.
    rows = sorted(rows, key=lambda row: int(row["query_id"]))
    text = {name: np.array([row[name] for row in rows], str) for name in COLUMNS}

    def read_overlaps(prefix: str) -> Float[np.ndarray, "n 2"]:
        counts = np.stack([text[f"{prefix}intersection"], text[f"{prefix}union"]], axis=1)
        return np.where(counts == "", "nan", counts).astype(float)

    return QueryTable(
        query_id=text["query_id"].astype(np.int64),
        image_id=text["image_id"].astype(np.int64),
        truth_area=text["truth"].astype(np.int64),
        is_amodal=text["mask_type"] == "amodal",
        is_right=np.where(text["said"] == "", np.nan, text["said"] == text["mask_type"]),
        mask=read_overlaps(""),
        occluded=read_overlaps("occluded_"),
        boundary=read_overlaps("boundary_"),
    )


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Compares reports with the first one, query by query.

    Returns `{"reports": [..], "splits": {split: {type: {figure: {"values": [..], "differences":
    [{"value", "interval"}]}}}}}`. Raises InputError if a folder has no report, or they are of
    different queries.
    """
    if len(folders) < 2:
        raise InputError("--compare: give two reports or more, such as --compare runs/a runs/b")
    reports = [read_queries(folder) for folder in folders]
    shared = [split for split in reports[0] if all(split in report for report in reports)]
    if not shared:
        raise InputError("--compare: the reports have no split in common; evaluate the same data")
    for folder, report in zip(folders, reports, strict=True):
        for split in shared:
            if not _is_same_data(folders[0], reports[0][split], folder, report[split], split):
                raise InputError(
                    f"--compare: {folders[0]} and {folder}, split {split}: the queries or masks "
                    "differ; evaluate the same data"
                )
    splits = {split: _compare_split([report[split] for report in reports]) for split in shared}
    return {"reports": [str(folder) for folder in folders], "splits": splits}


def _is_same_data(
    folder: Path, table: QueryTable, other_folder: Path, other: QueryTable, split: str
) -> bool:
    """Whether two reports are of the same queries, as their tables and stated hashes say."""
    for name in ("query_id", "image_id", "truth_area", "is_amodal"):
        if not np.array_equal(getattr(table, name), getattr(other, name)):
            return False
    # The table has areas only; the hash covers texts and masks too.
    hashes = {_stated_hash(folder, split), _stated_hash(other_folder, split)} - {None}
    return len(hashes) < 2


def _stated_hash(folder: Path, split: str) -> str | None:
    """Reads the hash of the data from a report; None where there is no report.json or no hash."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        report = json.loads((folder / "report.json").read_text("utf-8"))
        return report["meta"]["data_sha256"][split]
    return None


def _compare_split(tables: Sequence[QueryTable]) -> dict[str, Any]:
    """Computes the figures of all, of modal and of amodal queries of one split."""
    figures: dict[str, Any] = {}
    for kind in QUERY_TYPES:
        is_amodal = tables[0].is_amodal
        rows = np.ones_like(is_amodal) if kind == "all" else is_amodal == (kind == "amodal")
        images = tables[0].image_id[rows]
        ratios = [_figure_ratios(table, rows) for table in tables]
        figures[kind] = {}
        for _, name, _ in COMPARED:
            first = ratios[0][name]
            figures[kind][name] = {
                "values": [_value(ratio[name]) for ratio in ratios],
                "differences": [_difference(images, ratio[name], first) for ratio in ratios[1:]],
            }
    return figures


def _figure_ratios(table: QueryTable, rows: Bool[np.ndarray, " q"]) -> dict[str, Ratio]:
    ratios = iou_ratios(table.mask[rows], table.occluded[rows], table.boundary[rows])
    ratios["accuracy"] = mean_ratio(table.is_right[rows])
    return ratios


def _value(ratio: Ratio) -> float | None:
    numerators, denominators = ratio
    total = denominators.sum()
    return float(numerators.sum() / total) if total else None


def _difference(images: Int[np.ndarray, " n"], ratio: Ratio, first: Ratio) -> dict[str, Any]:
    value = _value(ratio)
    first_value = _value(first)
    if value is None or first_value is None:
        return {"value": None, "interval": None}
    # Paired: both reports are resampled by the same images, so what images share cancels out.
    return {"value": value - first_value, "interval": interval(images, ratio, minus=first)}


# Decisions about sentences, without images (docs/intent.md)


class SaidType(msgspec.Struct):
    """One decision about a sentence, as `decide --json` prints it."""

    query: str
    mask_type: MaskType | None = None
    """Where it is left out, the probability decides."""
    amodal_probability: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


def score_decisions(path: Path, sentences: Sequence[Sentence], name: str) -> dict[str, Any]:
    """Scores a file of decisions.

    Returns the figures of `sentence_figures`, the name of the labelled sentences, and hashes.
    Decisions about other sentences do not count.

    Args:
        path: JSON Lines, or one JSON list, of `SaidType`. The probability may be left out of all.
        sentences: labelled ones.
        name: theirs.

    Raises InputError if a file cannot be read, or a labelled sentence has no decision, or two.
    """
    decisions = read_decisions(path)
    missing = [s.text for s in sentences if s.text not in decisions]
    if missing:
        raise InputError(
            f"{path}: {len(missing)} of {len(sentences)} sentences of {name} have no decision "
            f"(the first: {missing[0]!r}); give one for each, with the same text"
        )
    of_sentences = [decisions[sentence.text] for sentence in sentences]
    predicted = np.array([mask_type == "amodal" for mask_type, _ in of_sentences], bool)
    probabilities = [probability for _, probability in of_sentences]
    calibrated = None not in probabilities
    probability = np.array(probabilities if calibrated else predicted, float)
    text = "\n".join(f"{sentence.mask_type}\t{sentence.text}" for sentence in sentences)
    return {
        "sentences": name,
        "sentences_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "decisions": path.name,
        "decisions_sha256": hashlib.sha256(read_bytes(path)).hexdigest(),
        "ignored": len(decisions.keys() - {sentence.text for sentence in sentences}),
        **sentence_figures(sentences, probability, predicted, calibrated=calibrated),
    }


def read_decisions(path: Path) -> dict[str, tuple[MaskType, float | None]]:
    """Reads mask type and probability of amodal, if there is one, by the text of the sentence.

    Raises InputError for a bad value, and for a sentence with two different decisions.
    """
    content = read_bytes(path)
    is_list = content.lstrip().startswith(b"[")
    try:
        if is_list:
            entries = msgspec.json.decode(content, type=list[SaidType])
        else:
            entries = msgspec.json.Decoder(SaidType).decode_lines(content)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: {error}; see docs/intent.md") from error

    decisions: dict[str, tuple[MaskType, float | None]] = {}
    for entry in entries:
        mask_type, probability = entry.mask_type, entry.amodal_probability
        if mask_type is None and probability is not None:
            mask_type = "amodal" if probability > 0.5 else "modal"
        text = entry.query.strip()
        if mask_type is None:
            raise InputError(f"{path}: {text!r} has neither mask_type nor amodal_probability")
        if decisions.setdefault(text, (mask_type, probability)) != (mask_type, probability):
            raise InputError(f"{path}: {text!r} has two decisions; keep one of them")
    num_missing = sum(probability is None for _, probability in decisions.values())
    if 0 < num_missing < len(decisions):
        raise InputError(
            f"{path}: {num_missing} of {len(decisions)} decisions have no amodal_probability; "
            "give it for every decision or for none"
        )
    return decisions


class LabelledLine(msgspec.Struct):
    """A line of a file of labelled sentences."""

    text: str
    mask_type: MaskType
    family: str = ""


def read_sentences(path: Path) -> list[Sentence]:
    """Reads labelled sentences: tab-separated columns, mask_type and text among them. Lines that
    begin with # are comments.

    Raises InputError if the file has no such columns, a line has another mask type, or a sentence
    is there twice.
    """
    lines = read_bytes(path).decode("utf-8-sig").splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    sentences: dict[str, Sentence] = {}
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        try:
            values = msgspec.convert(row, LabelledLine)
        except msgspec.ValidationError as error:
            raise InputError(f"{path}: {row}: {error}; see docs/intent.md") from error
        text = values.text.strip()
        if text in sentences:
            raise InputError(f"{path}: {text!r} is there twice; keep one of the two")
        sentences[text] = Sentence(text, values.mask_type, values.family)
    if not sentences:
        raise InputError(f"{path}: there is no sentence below the columns mask_type and text")
    return list(sentences.values())
