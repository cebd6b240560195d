"""`queries.csv`, a line for every query that was scored, and reports side by side by these files."""

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.evaluation.iou import Ratio, interval, mean_ratio, ratios
from r2sm_jax.evaluation.scorer import QueryResult
from r2sm_jax.evaluation.tables import TEMPLATES, TYPES

NAME = "queries.csv"
COUNTS = {"": "answered", "occluded_": "occluded", "boundary_": "boundary"}
"""Prefix of the columns `intersection` and `union`, and the field of a result that fills them."""
COLUMNS = (
    "split",
    "query_id",
    "image_id",
    "mask_type",
    "said",
    "amodal_probability",
    "predicted",
    "truth",
    *(f"{prefix}{name}" for prefix in COUNTS for name in ("intersection", "union")),
)
NUMBERS = ("query_id", "image_id", "truth")
Table = dict[str, np.ndarray]
"""The queries of one split, in the order of their ids: `NUMBERS`; `amodal`, whether the amodal mask was requested;
`right`, 1 where the decision was right, 0 where wrong, NaN without one; and for each prefix of `COUNTS` the
intersections and unions `[n 2]`, NaN where there are none."""


def write_queries(path: Path, results: Mapping[str, Sequence[QueryResult]]) -> None:
    """All splits in one table. Areas are in pixels; a cell is empty where a value is not defined."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for split, queries in results.items():
            for r in queries:
                counts = [
                    n for field in COUNTS.values() for n in (getattr(r, field) or (None, None))[:2]
                ]
                cells = split, r.query_id, r.image_id, r.mask_type, r.decision, r.probability
                writer.writerow([*cells, r.answered.predicted, r.answered.truth, *counts])


def read_queries(folder: Path) -> dict[str, Table]:
    """The tables of every split of a report. Raises InputError if the folder has no such table, or it cannot be
    read."""
    path = folder / NAME
    if not path.is_file():
        raise InputError(f"{folder}: there is no {NAME}; give a folder that `evaluate --out` wrote")
    text = StringIO(read_bytes(path).decode("utf-8", "replace"), newline="")
    try:
        rows = list(csv.DictReader(text, restval="missing"))
        splits = list(dict.fromkeys(row["split"] for row in rows))
        tables = {split: _table([row for row in rows if row["split"] == split]) for split in splits}
    except (KeyError, ValueError, OverflowError, csv.Error):
        tables = {}
    if not tables:
        raise InputError(f"{path}: this is no table of queries; evaluate again with --out")
    return tables


def _table(rows: Sequence[dict[str, str]]) -> Table:
    text = {name: np.array([row[name] for row in rows]) for name in COLUMNS}
    found = {name: text[name].astype(np.int64) for name in NUMBERS}
    found["amodal"] = text["mask_type"] == "amodal"
    found["right"] = np.where(text["said"] == "", np.nan, text["said"] == text["mask_type"])
    for prefix in COUNTS:
        counts = np.stack([text[f"{prefix}intersection"], text[f"{prefix}union"]], axis=1)
        found[prefix] = np.where(counts == "", "nan", counts).astype(float)
    order = np.argsort(found["query_id"])
    return {name: values[order] for name, values in found.items()}


FIGURES = {
    "gIoU": "giou",
    "cIoU": "ciou",
    "occluded IoU": "occluded_iou",
    "boundary IoU": "boundary_iou",
    "mask type right": "accuracy",
}


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Figures of every report, and the differences of the others from the first with paired intervals: `{"reports":
    [..], "splits": {split: {type: {figure: {"values": [..], "differences": [{"value", "interval"}]}}}}}`. Raises
    InputError if a folder has no report, or they are of different queries."""
    if len(folders) < 2:
        raise InputError("--compare: give two reports or more, such as --compare runs/a runs/b")
    reports = [read_queries(folder) for folder in folders]
    shared = [split for split in reports[0] if all(split in report for report in reports)]
    if not shared:
        raise InputError(
            f"--compare: {folders[0]} and {folders[1]} have no split in common; evaluate the same data"
        )
    for folder, report in zip(folders[1:], reports[1:], strict=True):
        for split in shared:
            _check_same(
                reports[0][split], report[split], f"{folders[0]} and {folder}, split {split}"
            )
            if len({_hash_of(other, split) for other in (folders[0], folder)} - {None}) > 1:
                what = f"the queries or masks of {split} in {folders[0]} and {folder} differ"
                raise InputError(f"--compare: {what}; evaluate the same data")
    splits = {split: _compare([report[split] for report in reports]) for split in shared}
    return {"reports": [str(folder) for folder in folders], "splits": splits}


def _hash_of(folder: Path, split: str) -> str | None:
    """The hash of the data that a report states; None where it is not there."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads((folder / "report.json").read_text("utf-8"))["meta"]["data_sha256"][split]
    return None


def _check_same(one: Table, other: Table, where: str) -> None:
    if not np.array_equal(one["query_id"], other["query_id"]):
        odd = np.setxor1d(one["query_id"], other["query_id"])[0]
        raise InputError(
            f"--compare: {where}: query {odd} is in one of them only; evaluate the same data"
        )
    differ = np.any([one[name] != other[name] for name in ("truth", "amodal", "image_id")], axis=0)
    if differ.any():
        number = one["query_id"][differ][0]
        raise InputError(
            f"--compare: {where}: query {number} has another true mask there; evaluate the same data"
        )


def _compare(tables: Sequence[Table]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in TYPES:
        amodal = tables[0]["amodal"]
        rows = np.ones_like(amodal) if kind == "all" else amodal == (kind == "amodal")
        images, each = tables[0]["image_id"][rows], [_ratios(queries, rows) for queries in tables]
        found[kind] = {
            name: {
                "values": [_value(r[name]) for r in each],
                "differences": [_difference(images, r[name], each[0][name]) for r in each[1:]],
            }
            for name in FIGURES.values()
        }
    return found


def _ratios(queries: Table, rows: np.ndarray) -> dict[str, Ratio]:
    found = ratios(*(queries[prefix][rows] for prefix in COUNTS))
    return found | {"accuracy": mean_ratio(queries["right"][rows])}


def _value(ratio: Ratio) -> float | None:
    total = ratio[1].sum()
    return float(ratio[0].sum() / total) if total else None


def _difference(images: np.ndarray, ratio: Ratio, first: Ratio) -> dict[str, Any]:
    value, base = _value(ratio), _value(first)
    if value is None or base is None:
        return {"value": None, "interval": None}
    return {"value": value - base, "interval": interval(images, ratio, minus=first)}


def markdown(compared: dict[str, Any]) -> str:
    """The comparison as Markdown. A difference whose interval leaves out 0 is marked with a star."""
    names = [Path(report).name for report in compared["reports"]]
    if len(set(names)) < len(names):
        names = [chr(ord("A") + i) for i in range(len(names))]
    return TEMPLATES.get_template("compare.md").render(compared, names=names, FIGURES=FIGURES)
