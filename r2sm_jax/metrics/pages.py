"""A report as Markdown, and the published figures of R2SM (arXiv 2506.01795, Tables 1 to 3) that stand in it.

They are shown only beside a split that has the benchmark's own numbers of images and queries (Table 1), never beside
other data.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any

_PAPER = tomllib.loads(files("r2sm_jax.metrics").joinpath("published.toml").read_text(encoding="utf-8"))

TABLE_1 = ("images", "instances", "amodal_queries", "modal_queries", "all_queries")
PUBLISHED: dict[str, dict[str, list[int]]] = _PAPER["table_1"]
"""Published counts by dataset and split, in the order of `TABLE_1`."""
TABLE_2: dict[str, dict[str, list[float]]] = _PAPER["table_2"]
"""By dataset and system: gIoU and cIoU of all queries, then of the amodal ones, in percent."""
TABLE_3: dict[str, dict[str, list[float]]] = _PAPER["table_3"]
"""By dataset and row: AP, AP50, AP75, APs, APm, APl and AR in percent."""
TYPES = ("all", "modal", "amodal")
MASKS = {
    "gIoU": "giou", "cIoU": "ciou", "occluded IoU": "occluded_iou", "occluded cIoU": "occluded_ciou",
    "complete IoU": "complete_iou", "boundary IoU": "boundary_iou", "wrong-type gap": "wrong_type_gap",
}  # fmt: skip
INSTANCES = {
    "AP": "ap", "AP50": "ap50", "AP75": "ap75", "APs": "ap_small", "APm": "ap_medium", "APl": "ap_large",
    "AR": "ar", "AR@1": "ar1", "AR@10": "ar10",
}  # fmt: skip
"""Columns of the tables with a row for each split and type of query."""
HASHES = {"weights": "weights_sha256", "predictions": "predictions_sha256", "language model": "language_model_sha256"}
DETAILS = 4
"""Number of tables at the end of a page that a brief page leaves out."""


def benchmark_of(*, images: int, modal: int, amodal: int) -> str | None:
    """The R2SM dataset whose validation split has these numbers of images and queries (Table 1)."""
    for name in TABLE_2:
        counts = dict(zip(TABLE_1, PUBLISHED[name]["val"], strict=True))
        if (counts["images"], counts["modal_queries"], counts["amodal_queries"]) == (images, modal, amodal):
            return name
    return None


def percent(value: float | None) -> str:
    """A fraction as percent with two decimals; a dash where it is undefined."""
    return "–" if value is None else f"{100 * value:.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def interval_of(figures: dict[str, Any], name: str) -> str:
    """The interval of a figure as percent; nothing where it has none."""
    bounds = figures["interval"].get(name)
    return "" if bounds is None else f"{percent(bounds[0])}-{percent(bounds[1])}"


def _cells(figures: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Figures as percent, with their intervals where they have one."""
    bounds = {name: interval_of(figures, name) for name in names}
    return [percent(figures[name]) + (f" ({shown})" if shown else "") for name, shown in bounds.items()]


def _published(table: dict[str, dict[str, list[float]]], dataset: str) -> list[list[str]]:
    return [
        [f"{dataset}, {system}", *(f"{value:.2f}" for value in values)]
        for system, values in table.get(dataset, {}).items()
    ]


def _tables(splits: dict[str, Any], benchmark: dict[str, str]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of each table."""
    groups = [(f"{name}, {kind}", s[kind]) for name, s in splits.items() for kind in TYPES]
    rows = [[name, str(f["queries"]), *_cells(f, MASKS.values())] for name, f in groups]
    yield "Masks", ["", "queries", *MASKS], rows
    rows = [[name, f"{f['detections'] or 0:.1f}", *_cells(f, INSTANCES.values())] for name, f in groups]
    yield "Instances", ["", "detections a query", *INSTANCES], rows
    decided = {name: s["mask_type"] for name, s in splits.items() if s["mask_type"]["accuracy"] is not None}
    if decided:
        rows = [[name, *_cells(f, ("accuracy", "f1", "mcc", "ece"))] for name, f in decided.items()]
        yield "Mask type", ["", "accuracy", "F1", "MCC", "ECE"], rows
    names = [name for name, f in next(iter(splits.values()))["references"].items() if f["giou"] is not None]
    rows = [
        [name, *(f"{percent(s['references'][r]['giou'])} / {percent(s['references'][r]['ciou'])}" for r in names)]
        for name, s in splits.items()
    ]
    title = "The same masks with another decision, and true masks of one type for all (gIoU / cIoU)"
    yield title, ["", *(name.replace("_", " ") for name in names)], rows
    rows = []
    for name, s in splits.items():
        rows.append([name, *(percent(s[kind][key]) for kind in ("all", "amodal") for key in ("giou", "ciou"))])
        rows += _published(TABLE_2, benchmark.get(name, ""))
    yield "R2SM, Table 2", ["", "All gIoU", "All cIoU", "Amodal gIoU", "Amodal cIoU"], rows
    columns = {label: key for label, key in INSTANCES.items() if "@" not in label}
    rows = []
    for name, s in splits.items():
        for kind in ("all", "amodal"):
            rows.append([f"{name}, {kind}", *(percent(s[kind][key]) for key in columns.values())])
        rows += _published(TABLE_3, benchmark.get(name, ""))
    yield "R2SM, Table 3", ["", *columns], rows
    rows = [
        [f"{name}, {variant}", percent(scores["giou"]), percent(scores.get("ciou"))]
        for name, s in splits.items()
        for variant, scores in s["variants"].items()
    ]
    yield "Other definitions of the same names", ["", "gIoU", "cIoU"], rows
    rows = [
        [f"{name}, {group}: {value}", str(f["queries"]), *(percent(f[key]) for key in ("giou", "ciou", "occluded_iou"))]
        for name, s in splits.items()
        for group, values in s["breakdowns"].items()
        for value, f in values.items()
    ]
    yield "Kinds of queries", ["", "queries", "gIoU", "cIoU", "occluded IoU"], rows


def described(report: dict[str, Any]) -> str:
    """A paragraph on the data, the model or file, and the settings of the evaluation."""
    meta = report["meta"]
    what = f"`{meta['source']}`"
    what += f", checkpoint at step {meta['step']}" if "step" in meta else f", predictions of `{meta['predictions']}`"
    what += f", variant `{meta['variant']}`, at {meta['resolution']} resolution"
    if meta.get("threshold") is not None:
        what += f", mask threshold {meta['threshold']}"
    data = [
        f"{name} {meta['images'][name]:,} images, {split['all']['queries']:,} queries "
        f"(`{meta['data_sha256'][name][:12]}`)"
        for name, split in report["splits"].items()
    ]
    others = [f"{name} `{meta[key][:12]}`" for name, key in HASHES.items() if meta.get(key)]
    return (
        f"{what}. All figures are percent, in brackets 95 % intervals over images.\n\n"
        f"Data (hash): {'; '.join(data)}. {'Hashes: ' + ', '.join(others) + '. ' if others else ''}"
        f"r2sm_jax {meta['version']}."
    )


def markdown(report: dict[str, Any], *, brief: bool = False) -> str:
    """The report as Markdown; `brief` leaves out the paper's columns, other definitions and kinds of queries."""
    meta, splits = report["meta"], report["splits"]
    lines = ["# R2SM evaluation", "", described(report), ""]
    if missing := meta.get("missing"):
        shown = ", ".join(map(str, missing[:10])) + (", .." if len(missing) > 10 else "")
        lines += [f"{len(missing)} queries have no prediction and count as answered with an empty mask: {shown}.", ""]
    for title, header, rows in list(_tables(splits, meta.get("benchmark", {})))[: -DETAILS if brief else None]:
        lines += [f"## {title}", "", *table(header, rows)]
    return "\n".join(lines)
