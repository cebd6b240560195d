"""Compares what several systems did, sentence by sentence.

    write_queries    results of a report              -> `queries.csv`, a line for each query
    compare          `queries.csv` of several reports -> figures and paired differences, as a dict
    score_decisions  decisions about sentences alone, and their labels -> figures, as a dict

tables.py formats a comparison.
"""

import csv
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Float, Int

from r2sm_jax.errors import InputError, load_json, read_bytes
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


Rows = Sequence[dict[str, str]]
"""Lines of `queries.csv`."""


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


def read_queries(folder: Path) -> dict[str, Rows]:
    """Reads the queries of a report by split, in the order of their ids."""
    rows: dict[str, list[dict[str, str]]] = {}
    with (folder / QUERIES_FILE).open(encoding="utf-8", newline="") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: int(row["query_id"])):
            rows.setdefault(row["split"], []).append(row)
    return dict(rows)


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Compares reports with the first one, query by query, on the splits of which all have the same
    data.

    Returns `{"reports": [..], "splits": {split: {type: {figure: {"values": [..], "differences":
    [{"value", "interval"}]}}}}}`. Raises InputError if a folder has no report, or they share no
    data.
    """
    if len(folders) < 2:
        raise InputError("--compare: give two reports or more, such as --compare runs/a runs/b")
    hashes = []
    for folder in folders:
        # Of the texts, the requested types and the true masks.
        hashes.append(load_json(folder / "report.json", "report")["meta"]["data_sha256"])
    shared = [split for split in hashes[0] if len({of.get(split) for of in hashes}) == 1]
    if not shared:
        raise InputError("--compare: no split of the reports has the same data; evaluate the same")
    tables = [read_queries(folder) for folder in folders]
    splits = {split: _compare_split([table[split] for table in tables]) for split in shared}
    return {"reports": [str(folder) for folder in folders], "splits": splits}


def _compare_split(tables: Sequence[Rows]) -> dict[str, Any]:
    """Computes the figures of all, of modal and of amodal queries of one split."""
    figures: dict[str, Any] = {}
    for kind in QUERY_TYPES:
        of_kind = [[row for row in table if kind in ("all", row["mask_type"])] for table in tables]
        images = np.array([row["image_id"] for row in of_kind[0]], np.int64)
        ratios = [_figure_ratios(rows) for rows in of_kind]
        figures[kind] = {}
        for _, name, _ in COMPARED:
            first = ratios[0][name]
            figures[kind][name] = {
                "values": [_value(ratio[name]) for ratio in ratios],
                "differences": [_difference(images, ratio[name], first) for ratio in ratios[1:]],
            }
    return figures


def _figure_ratios(rows: Rows) -> dict[str, Ratio]:
    def overlaps(prefix: str) -> Float[np.ndarray, "n 2"]:
        names = (f"{prefix}intersection", f"{prefix}union")
        counts = [[float(row[name] or "nan") for name in names] for row in rows]
        return np.array(counts, float).reshape(-1, 2)

    is_right = [float(row["said"] == row["mask_type"]) if row["said"] else np.nan for row in rows]
    ratios = iou_ratios(overlaps(""), overlaps("occluded_"), overlaps("boundary_"))
    return ratios | {"accuracy": mean_ratio(np.array(is_right, float))}


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


class Said(msgspec.Struct):
    """One decision about a sentence, as `decide --json` prints it."""

    query: str
    mask_type: MaskType | None = None
    """Where it is left out, the probability decides."""
    amodal_probability: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    def __post_init__(self):
        self.query = self.query.strip()
        if self.mask_type is None:
            if self.amodal_probability is None:
                raise ValueError("there is neither mask_type nor amodal_probability")
            self.mask_type = "amodal" if self.amodal_probability > 0.5 else "modal"


def score_decisions(path: Path, sentences: Sequence[Sentence], name: str) -> dict[str, Any]:
    """Scores a file of decisions.

    Returns the figures of `sentence_figures`, the name of the labelled sentences, and hashes.
    Decisions about other sentences do not count.

    Args:
        path: JSON Lines, or one JSON list, of `Said`. The probability may be left out.
        sentences: labelled ones.
        name: theirs.

    Raises InputError as `read_decisions`, or if a labelled sentence has no decision.
    """
    decisions = read_decisions(path)
    missing = [s.text for s in sentences if s.text not in decisions]
    if missing:
        raise InputError(
            f"{path}: {len(missing)} of {len(sentences)} sentences of {name} have no decision "
            f"(the first: {missing[0]!r}); give one for each, with the same text"
        )
    said = [decisions[sentence.text] for sentence in sentences]
    predicted = np.array([one.mask_type == "amodal" for one in said], bool)
    probabilities = [one.amodal_probability for one in said]
    text = "\n".join(f"{sentence.mask_type}\t{sentence.text}" for sentence in sentences)
    return {
        "sentences": name,
        "sentences_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "decisions": path.name,
        "decisions_sha256": hashlib.sha256(read_bytes(path)).hexdigest(),
        "ignored": len(decisions.keys() - {sentence.text for sentence in sentences}),
        **sentence_figures(sentences, predicted, probabilities),
        "queries": len(sentences),
    }


def read_decisions(path: Path) -> dict[str, Said]:
    """Reads decisions by the text of their sentence.

    Raises InputError for a bad value, and for a sentence with two different decisions.
    """
    content = read_bytes(path)
    try:
        if content.lstrip().startswith(b"["):
            entries = msgspec.json.decode(content, type=list[Said])
        else:
            entries = msgspec.json.Decoder(Said).decode_lines(content)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: {error}; see docs/intent.md") from error
    decisions: dict[str, Said] = {}
    for entry in entries:
        if decisions.setdefault(entry.query, entry) != entry:
            raise InputError(f"{path}: {entry.query!r} has two decisions; keep one of them")
    return decisions


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
            sentence = msgspec.convert({"family": ""} | row, Sentence)
        except msgspec.ValidationError as error:
            raise InputError(f"{path}: {row}: {error}; see docs/intent.md") from error
        if sentence.text in sentences:
            raise InputError(f"{path}: {sentence.text!r} is there twice; keep one of the two")
        sentences[sentence.text] = sentence
    if not sentences:
        raise InputError(f"{path}: there is no sentence below the columns mask_type and text")
    return list(sentences.values())
