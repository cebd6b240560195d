"""The table of counts: a row for each query of a split, a column for each thing known of it.

A table is a structured array of `ROW`: `rows["said"]` is a column, `rows[selection]` fewer rows.
Every figure of report.py and of compare.py is computed from a selection. `queries.csv` holds the
tables of all splits and is read back to the same ones, but for the detections.
"""

import csv
import io
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.query import MASK_TYPES

ROW = np.dtype(
    [
        ("query_id", np.int64),
        ("image_id", np.int64),
        ("text", object),
        ("mask_type", "U6"),  # that is asked for
        ("target", object),  # ids of the instances that are meant: "3 7"
        ("task", object),
        ("difficulty", object),
        ("instances", object),  # one, several
        ("said", "U6"),  # the decision; "" where the system makes none
        ("amodal_probability", float),
        ("predicted_iou", float),
        ("presence", float),
        ("seen", float),  # 1 where the model was trained on the image
        # Of one target: how many other objects have its class, and 1 where the answer overlaps more
        # with it than with any other object.
        ("rivals", float),
        ("right_object", float),
        # Numbers of pixels, without those of ignored regions. The last axis is the true mask type.
        ("predicted", float),  # of the answer
        ("shared", float, 2),  # of the answer with each true mask
        ("truth", float, 2),
        ("both", float, 2),  # of the system's visible and its complete mask
        ("both_shared", float, (2, 2)),
        ("boundary_intersection", float),
        ("boundary_union", float),
        ("detections", object),  # `QueryDetections`
    ]
)
"""The columns. A number that is not defined is NaN: what the system does not say, and all of a
complete shape that is not annotated."""
DERIVED = ("truth", "intersection", "union", "occluded_intersection", "occluded_union")
"""Columns of `queries.csv` for its readers, which follow from others."""

Rows = np.ndarray
"""A table, `[n]` of `ROW`."""
NO_ROWS: Rows = np.zeros(0, ROW)
Overlaps = Float[np.ndarray, "n 4"]
"""Intersection, union, area of the answer and of the truth; NaN where a row does not count."""


# Selections, and overlaps of rows


def of_type(rows: Rows, kind: str) -> Rows:
    """Selects the rows of one of `QUERY_TYPES`."""
    return rows if kind == "all" else rows[rows["mask_type"] == kind]


def requested(rows: Rows) -> Int[np.ndarray, " n"]:
    """Returns the index in `MASK_TYPES` of what each query asks for."""
    return (rows["mask_type"] == "amodal").astype(int)


def has_hidden_part(rows: Rows) -> Bool[np.ndarray, " n"]:
    """Tells where a part of the target is hidden, as far as is known."""
    # True masks are nested, so equal areas are equal masks.
    return rows["truth"][:, 1] > rows["truth"][:, 0]


def _stack_counts(shared: np.ndarray, predicted: np.ndarray, truth: np.ndarray) -> Overlaps:
    return np.stack([shared, predicted + truth - shared, predicted, truth], axis=1)


def overlap_of_rows(rows: Rows, true: Int[np.ndarray, " n"] | None = None) -> Overlaps:
    """Compares answers with the true masks of some types, by default with the requested ones."""
    every = np.arange(len(rows))
    if true is None:
        true = requested(rows)
    return _stack_counts(rows["shared"][every, true], rows["predicted"], rows["truth"][every, true])


def overlap_of_both(rows: Rows, said: Int[np.ndarray, " n"]) -> Overlaps:
    """Compares the system's masks of some types with the requested masks. NaN where it gives one
    mask."""
    every = np.arange(len(rows))
    true = requested(rows)
    shared = rows["both_shared"][every, said, true]
    return _stack_counts(shared, rows["both"][every, said], rows["truth"][every, true])


def overlap_of_truth(rows: Rows, said: Int[np.ndarray, " n"]) -> Overlaps:
    """Compares the true masks of some types, as answers, with the requested ones.

    It tells what a split allows to a system with perfect masks that does not understand the type.
    """
    every = np.arange(len(rows))
    predicted, truth = rows["truth"][every, said], rows["truth"][every, requested(rows)]
    # The modal mask lies in the amodal one.
    return _stack_counts(np.minimum(predicted, truth), predicted, truth)


def complete_overlap(rows: Rows) -> Overlaps:
    """Compares the predicted with the true complete shapes, whatever is asked for.

    NaN where the shape is not annotated, or the system gives one mask for a modal query.
    """
    shared = rows["both_shared"][:, 1, 1]
    of_both = _stack_counts(shared, rows["both"][:, 1], rows["truth"][:, 1])
    of_answer = np.where(requested(rows)[:, None] == 1, overlap_of_rows(rows), np.nan)
    return np.where(np.isnan(rows["both"][:, :1]), of_answer, of_both)


def occluded_overlap(rows: Rows) -> Overlaps:
    """Compares answers with the hidden parts, both without the visible truth (as in C2F-Seg).

    NaN unless a query asks for the complete shape of something that is partly hidden.
    """
    (in_modal, in_amodal), (modal, amodal) = rows["shared"].T, rows["truth"].T
    overlaps = _stack_counts(in_amodal - in_modal, rows["predicted"] - in_modal, amodal - modal)
    is_counted = (requested(rows) == 1) & has_hidden_part(rows)
    return np.where(is_counted[:, None], overlaps, np.nan)


# The file


def _cell_names(column: str) -> list[str]:
    """Returns the names of a column's cells: "both_shared" -> "both_shared_modal_amodal", ..."""
    types = product(MASK_TYPES, repeat=len(ROW[column].shape))
    return ["_".join([column, *of_axes]) for of_axes in types]


STORED = {name: _cell_names(name) for name in ROW.fields or () if name != "detections"}


def _as_text(value: int | float | str) -> int | float | str:
    """Writes what is not defined as nothing, and whole numbers without a point."""
    if isinstance(value, float):
        if np.isnan(value):
            return ""
        if value.is_integer():
            return int(value)
    return value


def write_tables(path: Path, tables: Mapping[str, Rows]) -> None:
    """Writes the tables of all splits into one file. Areas are in pixels; a cell is empty where a
    value is not defined."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        names = [cell for cells in STORED.values() for cell in cells]
        writer.writerow(["split", *names, *DERIVED])
        for split, rows in tables.items():
            if not len(rows):
                continue
            columns = [rows[name].reshape(len(rows), -1) for name in STORED]
            columns += [overlap_of_rows(rows)[:, [3, 0, 1]], occluded_overlap(rows)[:, :2]]
            for cells in zip(*(column.tolist() for column in columns), strict=True):
                writer.writerow([split, *(_as_text(value) for cell in cells for value in cell)])


def read_tables(path: Path) -> dict[str, Rows]:
    """Reads what `write_tables` wrote, by split. Raises InputError for anything else."""
    read = {"i": int, "f": lambda cell: float(cell or "nan"), "U": str, "O": str}
    try:
        text = read_bytes(path).decode("utf-8")
        lines = list(csv.DictReader(io.StringIO(text, newline="")))
        rows = np.zeros(len(lines), ROW)
        for name, cells in STORED.items():
            column = ROW[name]
            values = [[read[column.base.kind](line[cell]) for cell in cells] for line in lines]
            rows[name] = np.array(values, column.base).reshape(-1, *column.shape)
        splits = np.array([line["split"] for line in lines], object)
        if not np.isin(rows["mask_type"], MASK_TYPES).all():
            raise ValueError("a mask_type is neither modal nor amodal")
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise InputError(
            f"{path}: the file was changed, or is of another version ({error}); evaluate again"
        ) from error
    return {split: rows[splits == split] for split in dict.fromkeys(splits.tolist())}
