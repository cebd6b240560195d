"""`queries.csv`: one line for every query that was scored, to compare systems and to look closer with any tool."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from r2sm_jax.errors import InputError
from r2sm_jax.metrics.iou import Overlap
from r2sm_jax.metrics.scoring import QueryResult

NAME = "queries.csv"
COUNTS = {"": "answered", "occluded_": "occluded", "boundary_": "boundary"}
"""Prefix of the columns `intersection` and `union`, and the field of a result that they hold."""
COLUMNS = (
    "split", "query_id", "image_id", "mask_type", "said", "amodal_probability", "predicted", "truth",
    *(f"{prefix}{name}" for prefix in COUNTS for name in ("intersection", "union")),
)  # fmt: skip


def write_queries(path: Path, results: Mapping[str, Sequence[QueryResult]]) -> None:
    """All splits in one table. Areas are in pixels; a cell is empty where there is nothing to say."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for split, queries in results.items():
            writer.writerows({"split": split} | _cells(result) for result in queries)


def _cells(result: QueryResult) -> dict[str, Any]:
    answered = result.answered
    cells = {
        "query_id": result.query_id, "image_id": result.image_id, "mask_type": result.mask_type, "said": result.said,
        "amodal_probability": result.probability, "predicted": answered.predicted, "truth": answered.truth,
    }  # fmt: skip
    for prefix, field in COUNTS.items():
        counts: Overlap | None = getattr(result, field)
        if counts is not None:
            cells |= {f"{prefix}intersection": counts.intersection, f"{prefix}union": counts.union}
    return cells


@dataclass(frozen=True)
class Queries:
    """The table of one split, in the order of its query ids."""

    query_id: Int[np.ndarray, " n"]
    image_id: Int[np.ndarray, " n"]
    truth: Int[np.ndarray, " n"]
    """Area of the requested mask."""
    amodal: Bool[np.ndarray, " n"]
    """Whether that was asked for."""
    right: Float[np.ndarray, " n"]
    """1 where the mask type was decided as asked, 0 where not, NaN where nothing was said."""
    counts: dict[str, Float[np.ndarray, "n 2"]]
    """Intersection and union by prefix of `COUNTS`; NaN where there are none."""


def read_queries(folder: Path) -> dict[str, Queries]:
    """The tables of every split of a report.

    Raises:
        InputError: the folder has no such table, or it cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        raise InputError(
            f"{folder}: there is no {NAME}; give a folder that `evaluate --out` wrote, or evaluate the run again"
        )
    rows: dict[str, list[dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row.get("split") or "", []).append(row)
    try:
        tables = {split: _table(sorted(found, key=lambda r: int(r["query_id"]))) for split, found in rows.items()}
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: this is no table of queries; evaluate again with --out") from None
    if not tables:
        raise InputError(f"{path}: there are no queries in it; evaluate again with --out")
    return tables


def _table(rows: Sequence[dict[str, str]]) -> Queries:
    def numbers(column: str) -> np.ndarray:
        return np.array([float(row[column]) if row[column] else np.nan for row in rows])

    def whole(column: str) -> np.ndarray:
        return np.array([int(row[column]) for row in rows], np.int64)

    said = [row["said"] for row in rows]
    return Queries(
        whole("query_id"),
        whole("image_id"),
        whole("truth"),
        np.array([row["mask_type"] == "amodal" for row in rows]),
        np.array([float(s == row["mask_type"]) if s else np.nan for s, row in zip(said, rows, strict=True)]),
        {p: np.stack([numbers(f"{p}intersection"), numbers(f"{p}union")], axis=1) for p in COUNTS},
    )
