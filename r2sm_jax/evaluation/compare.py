"""Compares what several systems did, query by query: from `queries.csv` of several reports to
figures and paired differences, as a dict, which tables.py formats.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from r2sm_jax.errors import InputError, load_json
from r2sm_jax.evaluation.counts import NO_ROWS, Rows, of_type, read_tables
from r2sm_jax.evaluation.iou import Ratio, interval
from r2sm_jax.evaluation.report import figure_ratios
from r2sm_jax.evaluation.tables import COMPARED
from r2sm_jax.query import QUERY_TYPES

QUERIES_FILE = "queries.csv"
SAME = ["query_id", "image_id", "mask_type"]
"""Columns that are the same in all reports on the same data."""


def compare_reports(folders: Sequence[Path]) -> dict[str, Any]:
    """Compares reports with the first one, query by query, on the splits of which all have the same
    data.

    Returns `{"reports": [..], "splits": {split: {type: {figure: {"values": [..], "differences":
    [{"value", "interval"}]}}}}}`. Raises InputError if a folder has no report, or one that was
    changed, or they share no data.
    """
    if len(folders) < 2:
        raise InputError("--compare: give two reports or more, such as --compare runs/a runs/b")
    hashes = [_read_hashes(folder / "report.json") for folder in folders]
    shared = [split for split in hashes[0] if len({of.get(split) for of in hashes}) == 1]
    if not shared:
        raise InputError("--compare: no split of the reports has the same data; evaluate the same")
    tables = [_read_rows(folder / QUERIES_FILE) for folder in folders]
    splits = {}
    for split in shared:
        of_split = [table.get(split, NO_ROWS) for table in tables]
        for folder, rows in zip(folders, of_split, strict=True):
            if not np.array_equal(rows[SAME], of_split[0][SAME]):
                raise InputError(
                    f"{folder / QUERIES_FILE}: it has other queries than {folders[0]}, though the "
                    f"data of {split} are the same; evaluate again"
                )
        splits[split] = _compare_split(of_split)
    return {"reports": [str(folder) for folder in folders], "splits": splits}


def _read_hashes(path: Path) -> dict[str, str]:
    """Returns the hash of the data of each split of a report."""
    try:
        return dict(load_json(path, "report")["meta"]["data_sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: it does not say which data it is of; evaluate again") from error


def _read_rows(path: Path) -> dict[str, Rows]:
    """Reads the queries of a report by split, in the order of their ids."""
    tables = read_tables(path)
    return {split: rows[np.argsort(rows["query_id"])] for split, rows in tables.items()}


def _compare_split(tables: Sequence[Rows]) -> dict[str, Any]:
    """Computes the figures of all, of modal and of amodal queries of one split."""
    figures: dict[str, Any] = {}
    for kind in QUERY_TYPES:
        selections = [of_type(table, kind) for table in tables]
        ratios = [figure_ratios(rows) for rows in selections]
        figures[kind] = {}
        for name in COMPARED.values():
            of_figure = [ratio[name] for ratio in ratios]
            figures[kind][name] = _compare_figure(selections[0]["image_id"], of_figure)
    return figures


def _compare_figure(images: Int[np.ndarray, " n"], ratios: Sequence[Ratio]) -> dict[str, Any]:
    values = [float(top.sum() / bottom.sum()) if bottom.any() else None for top, bottom in ratios]
    differences = []
    for value, ratio in zip(values[1:], ratios[1:], strict=True):
        difference = None if value is None or values[0] is None else value - values[0]
        # Paired: both are resampled by the same images, so what images share cancels out.
        bounds = interval(images, ratio, minus=ratios[0])
        differences.append({"value": difference, "interval": bounds})
    return {"values": values, "differences": differences}
