"""Compares what several systems did, query by query.

    write_queries    results of a report              -> `queries.csv`, a line for each query
    compare          `queries.csv` of several reports -> figures and paired differences, as a dict

tables.py formats a comparison.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from r2sm_jax.errors import InputError, load_json
from r2sm_jax.evaluation.iou import Ratio, interval, iou_ratios, mean_ratio
from r2sm_jax.evaluation.scorer import Evaluated
from r2sm_jax.evaluation.tables import COMPARED
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
    "seen",
)


Rows = Sequence[dict[str, str]]
"""Lines of `queries.csv`."""


def write_queries(path: Path, evaluated: Evaluated) -> None:
    """Writes the queries of all splits in one table.

    Areas are in pixels. `seen` is 1 where the model was trained on the image. A cell is empty where
    a value is not defined.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for split, results in evaluated.items():
            for result in results.results:
                row = [split, result.query.id, result.truth.image_id, result.mask_type]
                row += [result.said.mask_type, result.said.amodal_probability]
                row += [result.overlap.predicted, result.overlap.truth]
                for overlap in (result.overlap, result.occluded_overlap, result.boundary):
                    row += overlap[:2] if overlap is not None else (None, None)
                is_seen = None if results.seen is None else int(result.truth.index in results.seen)
                row.append(is_seen)
                writer.writerow(row)


def read_queries(folder: Path) -> dict[str, Rows]:
    """Reads the queries of a report by split, in the order of their ids."""
    tables: dict[str, list[dict[str, str]]] = {}
    with (folder / QUERIES_FILE).open(encoding="utf-8", newline="") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: int(row["query_id"])):
            tables.setdefault(row["split"], []).append(row)
    return dict(tables)


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
        for name in COMPARED.values():
            figures[kind][name] = _compare_figure(images, [ratio[name] for ratio in ratios])
    return figures


def _figure_ratios(rows: Rows) -> dict[str, Ratio]:
    def overlaps(prefix: str) -> Float[np.ndarray, "n 2"]:
        names = (f"{prefix}intersection", f"{prefix}union")
        counts = [[float(row[name] or "nan") for name in names] for row in rows]
        return np.array(counts, float).reshape(-1, 2)

    is_right = [float(row["said"] == row["mask_type"]) if row["said"] else np.nan for row in rows]
    ratios = iou_ratios(overlaps(""), overlaps("occluded_"), overlaps("boundary_"))
    return ratios | {"accuracy": mean_ratio(np.array(is_right, float))}


def _compare_figure(images: Int[np.ndarray, " n"], ratios: Sequence[Ratio]) -> dict[str, Any]:
    values = [float(top.sum() / bottom.sum()) if bottom.any() else None for top, bottom in ratios]
    differences = []
    for value, ratio in zip(values[1:], ratios[1:], strict=True):
        difference = None if value is None or values[0] is None else value - values[0]
        # Paired: both are resampled by the same images, so what images share cancels out.
        bounds = interval(images, ratio, minus=ratios[0])
        differences.append({"value": difference, "interval": bounds})
    return {"values": values, "differences": differences}
