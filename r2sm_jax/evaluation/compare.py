"""Compares reports query by query.

    write_queries    results of a report              -> `queries.csv`, a line for each query
    compare          `queries.csv` of several reports -> figures and paired differences, as a dict

tables.py formats a comparison.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.evaluation.iou import Ratio, interval, iou_ratios, mean_ratio
from r2sm_jax.evaluation.scorer import QueryResult
from r2sm_jax.query import QUERY_TYPES

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
COMPARED = ("giou", "ciou", "occluded_iou", "boundary_iou", "accuracy")
"""Names of the figures of a comparison."""


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
    if not path.is_file():
        raise InputError(
            f"{folder}: there is no {QUERIES_FILE}; give a folder that `evaluate --out` wrote"
        )
    # Bytes that are no text become a refusal below, as every other content does.
    text = read_bytes(path).decode("utf-8", "replace")
    try:
        rows_by_split: dict[str, list[dict[str, str]]] = {}
        # A row that was cut off gets cells that are no numbers.
        for row in csv.DictReader(StringIO(text, newline=""), restval="missing"):
            rows_by_split.setdefault(row["split"], []).append(row)
        tables = {split: _read_table(rows) for split, rows in rows_by_split.items()}
    except (KeyError, ValueError, OverflowError, csv.Error):
        tables = {}
    if not tables:
        raise InputError(f"{path}: this is no table of queries; evaluate again with --out")
    return tables


def _read_table(rows: Sequence[dict[str, str]]) -> QueryTable:
    # Reports of one data set may list its queries in another order.
    rows = sorted(rows, key=lambda row: int(row["query_id"]))
    text = {name: np.array([row[name] for row in rows]) for name in COLUMNS}

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
    first = folders[0]
    shared = [split for split in reports[0] if all(split in report for report in reports)]
    if not shared:
        raise InputError(
            f"--compare: {first} and {folders[1]} have no split in common; evaluate the same data"
        )
    for folder, report in zip(folders[1:], reports[1:], strict=True):
        for split in shared:
            where = f"{first} and {folder}, split {split}"
            _check_same_queries(reports[0][split], report[split], where)
            # The table has areas only; the hash covers texts and masks too.
            hashes = {_stated_hash(first, split), _stated_hash(folder, split)} - {None}
            if len(hashes) > 1:
                raise InputError(
                    f"--compare: {where}: the queries or masks differ; evaluate the same data"
                )
    splits = {split: _compare_split([report[split] for report in reports]) for split in shared}
    return {"reports": [str(folder) for folder in folders], "splits": splits}


def _stated_hash(folder: Path, split: str) -> str | None:
    """Reads the hash of the data from a report; None where there is no report.json or no hash."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        report = json.loads((folder / "report.json").read_text("utf-8"))
        return report["meta"]["data_sha256"][split]
    return None


def _check_same_queries(first: QueryTable, other: QueryTable, where: str) -> None:
    if not np.array_equal(first.query_id, other.query_id):
        query_id = np.setxor1d(first.query_id, other.query_id)[0]
        raise InputError(
            f"--compare: {where}: query {query_id} is in one of them only; evaluate the same data"
        )
    # Rows are in the order of the ids, so row i is the same query in both.
    is_other = (
        (first.truth_area != other.truth_area)
        | (first.is_amodal != other.is_amodal)
        | (first.image_id != other.image_id)
    )
    if is_other.any():
        raise InputError(
            f"--compare: {where}: query {first.query_id[is_other][0]} has another true mask there; "
            "evaluate the same data"
        )


def _compare_split(tables: Sequence[QueryTable]) -> dict[str, Any]:
    """Computes the figures of all, of modal and of amodal queries of one split."""
    figures: dict[str, Any] = {}
    for kind in QUERY_TYPES:
        is_amodal = tables[0].is_amodal
        rows = np.ones_like(is_amodal) if kind == "all" else is_amodal == (kind == "amodal")
        images = tables[0].image_id[rows]
        ratios = [_figure_ratios(table, rows) for table in tables]
        figures[kind] = {}
        for name in COMPARED:
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
