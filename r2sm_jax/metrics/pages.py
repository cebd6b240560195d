"""A report as Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any

from r2sm_jax.metrics.published import TABLE_2, TABLE_3

TYPES = ("all", "modal", "amodal")
FIGURES = {
    "Masks": {
        "gIoU": "giou", "cIoU": "ciou", "occluded IoU": "occluded_iou", "occluded cIoU": "occluded_ciou",
        "complete IoU": "complete_iou", "boundary IoU": "boundary_iou", "wrong-type gap": "wrong_type_gap",
    },
    "Instances": {
        "AP": "ap", "AP50": "ap50", "AP75": "ap75", "APs": "ap_small", "APm": "ap_medium", "APl": "ap_large",
        "AR": "ar", "AR@1": "ar1", "AR@10": "ar10",
    },
}  # fmt: skip
"""Tables with a row for each split and type of query."""
TABLE_3_COLUMNS = {name: key for name, key in FIGURES["Instances"].items() if "@" not in name}
HASHES = {"weights": "weights_sha256", "predictions": "predictions_sha256", "language model": "language_model_sha256"}
DETAILS = 4
"""Number of tables at the end of a page that a brief page leaves out."""


def percent(value: float | None) -> str:
    """A fraction as percent with two decimals; a dash where it is undefined."""
    return "–" if value is None else f"{100 * value:.2f}"


def _count(value: float | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def with_interval(figures: dict[str, Any], name: str) -> str:
    """A figure as percent, with its interval where it has one."""
    bounds = interval_of(figures, name)
    return percent(figures[name]) + (f" ({bounds})" if bounds else "")


def interval_of(figures: dict[str, Any], name: str) -> str:
    """The interval of a figure as percent; nothing where it has none."""
    bounds = figures["interval"].get(name)
    return "" if bounds is None else f"{percent(bounds[0])}-{percent(bounds[1])}"


def _paper(splits: dict[str, Any], benchmark: dict[str, str]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """The rows of the paper's Tables 2 and 3 in its columns, beside the published ones where the split is R2SM's."""
    header = ["", "All gIoU", "All cIoU", "Amodal gIoU", "Amodal cIoU"]
    rows = []
    for name, s in splits.items():
        rows.append([name, *(percent(s[kind][key]) for kind in ("all", "amodal") for key in ("giou", "ciou"))])
        for system, values in TABLE_2.get(benchmark.get(name, ""), {}).items():
            rows.append([f"{benchmark[name]}, {system}", *(f"{value:.2f}" for value in values)])
    yield "R2SM, Table 2", header, rows
    if any("ap" in s["all"] for s in splits.values()):
        rows = []
        for name, s in splits.items():
            for kind in ("all", "amodal"):
                rows.append([f"{name}, {kind}", *(percent(s[kind][key]) for key in TABLE_3_COLUMNS.values())])
            for system, values in TABLE_3.get(benchmark.get(name, ""), {}).items():
                rows.append([f"{benchmark[name]}, {system}", *(f"{value:.2f}" for value in values)])
        yield "R2SM, Table 3", ["", *TABLE_3_COLUMNS], rows


def _tables(splits: dict[str, Any], benchmark: dict[str, str]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of each table."""
    groups = [(f"{name}, {kind}", s[kind]) for name, s in splits.items() for kind in TYPES]
    for title, columns in FIGURES.items():
        known = {label: key for label, key in columns.items() if any(key in figures for _, figures in groups)}
        if known:
            key, label = ("queries", "queries") if title == "Masks" else ("detections", "detections a query")
            rows = [
                [name, _count(f[key]), *(with_interval(f, column) for column in known.values())] for name, f in groups
            ]
            yield title, ["", label, *known], rows
    decided = {name: s["mask_type"] for name, s in splits.items() if s["mask_type"]["accuracy"] is not None}
    if decided:
        header, keys = ["", "accuracy", "F1", "MCC", "ECE"], ("accuracy", "f1", "mcc", "ece")
        yield "Mask type", header, [[name, *(with_interval(f, key) for key in keys)] for name, f in decided.items()]
    names = [name for name, f in next(iter(splits.values()))["references"].items() if f["giou"] is not None]
    rows = [
        [name, *(f"{percent(s['references'][r]['giou'])} / {percent(s['references'][r]['ciou'])}" for r in names)]
        for name, s in splits.items()
    ]
    title = "The same masks with another decision, and true masks of one type for all (gIoU / cIoU)"
    yield title, ["", *(name.replace("_", " ") for name in names)], rows
    yield from _paper(splits, benchmark)
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
