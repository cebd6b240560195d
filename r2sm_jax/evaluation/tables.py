"""Formats the figures of report.py and compare.py: tables, headline figures, text and Markdown.

Nothing is computed here. Figures are fractions of 1 and are written in percent.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from r2sm_jax.evaluation.iou import PRECISION_THRESHOLDS
from r2sm_jax.evaluation.published import TABLE_2, TABLE_3
from r2sm_jax.query import QUERY_TYPES

# Columns of each table: header -> name of the figure that fills it.
MASKS = {
    "gIoU": "giou",
    "cIoU": "ciou",
    "occluded IoU": "occluded_iou",
    "occluded cIoU": "occluded_ciou",
    "complete IoU": "complete_iou",
    "boundary IoU": "boundary_iou",
    "wrong-type gap": "wrong_type_gap",
    "leak": "leak",
}
PRECISION = {
    "AP": "ap",
    "AP50": "ap50",
    "AP75": "ap75",
    "APs": "ap_small",
    "APm": "ap_medium",
    "APl": "ap_large",
    "AR": "ar",
}
INSTANCES = PRECISION | {"AR@1": "ar1", "AR@10": "ar10"}
BY_OCCLUSION = {
    "AP of ≥ 15 % hidden": "ap_occluded_15",
    "AP of ≥ 25 % hidden": "ap_occluded_25",
    "AP of ≥ 40 % hidden": "ap_occluded_40",
}
DECISIONS = {
    "accuracy": "accuracy",
    "of modal": "modal",
    "of amodal": "amodal",
    "F1": "f1",
    "MCC": "mcc",
    "ECE": "ece",
    "keyword rule": "keyword",
}
PRECISION_AT = {f"Pr@{threshold}": f"pr@{threshold}" for threshold in PRECISION_THRESHOLDS}
CGF1 = {"cgF1": "cgf1", "typed cgF1": "typed_cgf1", "F1 of instances": "positive_micro_f1"}
PAIRS = {
    "both right": "both_right",
    "swapped": "swapped",
    "both modal": "both_modal",
    "both amodal": "both_amodal",
}
COMPARED_ROWS = {
    "gIoU": "giou",
    "cIoU": "ciou",
    "occluded IoU": "occluded_iou",
    "boundary IoU": "boundary_iou",
    "mask type right": "accuracy",
}
"""Rows of a comparison: title -> name of the figure."""
HASHES = {
    "weights": "weights_sha256",
    "predictions": "predictions_sha256",
    "language model": "language_model_sha256",
}
"""Hashes that the introduction names: text -> key of `meta`."""


COMPARISON_TITLE = "R2SM evaluations side by side"


class Table(NamedTuple):
    """A table with a title. The first column holds names, the others figures."""

    title: str
    header: list[str]
    rows: list[list[str]]


class Tile(NamedTuple):
    """A headline figure of the page."""

    label: str
    value: str
    interval: str


def percent(value: float | None) -> str:
    """Formats a fraction as percent with two decimals; a dash where it is undefined."""
    return "–" if value is None else f"{100 * value:.2f}"


def interval_text(figures: Mapping[str, Any], name: str) -> str:
    """Formats the interval of a figure in percent; "" where it has none."""
    bounds = figures["interval"].get(name)
    return "" if bounds is None else f"{percent(bounds[0])}-{percent(bounds[1])}"


def cells(figures: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    """Formats figures in percent, with their intervals where they have one."""
    texts = []
    for name in columns.values():
        bounds = interval_text(figures, name)
        text = percent(figures[name])
        texts.append(f"{text} ({bounds})" if bounds else text)
    return texts


def report_tables(report: Mapping[str, Any], *, brief: bool = False) -> list[Table]:
    """Makes the tables of a report.

    Args:
        brief: leave out the paper's tables, other definitions and kinds of queries.
    """
    splits = report["splits"]
    tables = [_mask_table(splits), _instance_table(splits)]
    if decided := decision_figures_by_name(report):
        rows = [[name, *cells(figures, DECISIONS)] for name, figures in decided.items()]
        tables.append(Table("Mask type", ["", *DECISIONS], rows))
    tables += [_joint_table(splits), _presence_table(splits), _reference_table(splits)]
    if any("completion" in split for split in splits.values()):
        tables.append(_completion_table(splits))
    if any("prompts" in split for split in splits.values()):
        tables.append(_prompt_table(splits))
    if not brief:
        benchmarks = report["meta"].get("benchmark", {})
        tables += [_paper_table_2(splits, benchmarks), _paper_table_3(splits, benchmarks)]
        tables += [_precision_table(splits), _occlusion_table(splits)]
        tables += [_variant_table(splits), _breakdown_table(splits)]
    return tables


def _mask_table(splits: Mapping[str, Any]) -> Table:
    rows = []
    for name, split in splits.items():
        for kind in QUERY_TYPES:
            figures = split[kind]
            rows.append([f"{name}, {kind}", f"{figures['queries']}", *cells(figures, MASKS)])
    return Table("Masks", ["", "queries", *MASKS], rows)


def _instance_table(splits: Mapping[str, Any]) -> Table:
    rows = []
    for name, split in splits.items():
        for kind in QUERY_TYPES:
            figures = split[kind]
            # Not a percentage, so it stands apart from the other figures.
            num_detections = f"{figures['detections'] or 0:.1f}"
            rows.append([f"{name}, {kind}", num_detections, *cells(figures, INSTANCES)])
    return Table("Instances", ["", "detections a query", *INSTANCES], rows)


def _occlusion_table(splits: Mapping[str, Any]) -> Table:
    rows = []
    for name, split in splits.items():
        for kind in QUERY_TYPES:
            values = [percent(split[kind][key]) for key in BY_OCCLUSION.values()]
            rows.append([f"{name}, {kind}", *values])
    return Table("Instances by occlusion (VRSP, AISFormer)", ["", *BY_OCCLUSION], rows)


def _completion_table(splits: Mapping[str, Any]) -> Table:
    """The completer alone: with the true visible mask given, beside rules that learn nothing."""
    header = ["", "hidden objects", "amodal IoU", "occluded IoU", "others", "amodal IoU of others"]
    rows = []
    for name, split in splits.items():
        for way, figures in split.get("completion", {}).items():
            hidden, others = figures["hidden"], figures["not_hidden"]
            row = [f"{name}, {way}", f"{hidden['objects']}", percent(hidden["amodal_iou"])]
            row += [percent(hidden["occluded_iou"])]
            row += [f"{others['objects']}", percent(others["amodal_iou"])]
            rows.append(row)
    return Table("Completion of true visible masks", header, rows)


def _prompt_table(splits: Mapping[str, Any]) -> Table:
    """The visible masks of single objects by box or click."""
    rows = []
    for name, split in splits.items():
        for prompt, figures in split.get("prompts", {}).items():
            rows.append([f"{name}, {prompt}", f"{figures['objects']}", percent(figures["iou"])])
    return Table("Visible masks by prompt", ["", "objects", "modal IoU"], rows)


def _joint_table(splits: Mapping[str, Any]) -> Table:
    rows = []
    for name, split in splits.items():
        joint = [percent(split["cgf1"][key]) for key in CGF1.values()]
        pairs = [percent(split["pairs"][key]) for key in PAIRS.values()]
        rows.append([name, *joint, f"{split['pairs']['pairs']}", *pairs])
    return Table("Decision and masks together", ["", *CGF1, "pairs", *PAIRS], rows)


def _precision_table(splits: Mapping[str, Any]) -> Table:
    rows = []
    for name, split in splits.items():
        for kind in QUERY_TYPES:
            values = [percent(split[kind][key]) for key in PRECISION_AT.values()]
            rows.append([f"{name}, {kind}", *values])
    return Table("Targets with at least this IoU", ["", *PRECISION_AT], rows)


def _presence_table(splits: Mapping[str, Any]) -> Table:
    header = [
        "",
        "found, of what is there",
        "refused, of what is not",
        "error of the predicted IoU",
    ]
    rows = []
    for name, split in splits.items():
        gres = split["variants"]["gres"]
        found = percent(gres["target_accuracy"])
        refused = percent(gres["no_target_accuracy"])
        rows.append([name, found, refused, percent(split["predicted_iou"]["error"])])
    return Table("Is it there, and how good is the mask?", header, rows)


def _reference_table(splits: Mapping[str, Any]) -> Table:
    # Systems that give one mask have no reference with another decision.
    first = next(iter(splits.values()))["references"]
    references = [name for name, scores in first.items() if scores["giou"] is not None]
    rows = []
    for name, split in splits.items():
        row = [name]
        for reference in references:
            scores = split["references"][reference]
            row.append(f"{percent(scores['giou'])} / {percent(scores['ciou'])}")
        rows.append(row)
    title = "The same masks with another decision, and true masks of one type for all (gIoU / cIoU)"
    return Table(title, ["", *(name.replace("_", " ") for name in references)], rows)


def _paper_table_2(splits: Mapping[str, Any], benchmarks: Mapping[str, str]) -> Table:
    rows = []
    for name, split in splits.items():
        row = [name]
        for kind in ("all", "amodal"):
            row += [percent(split[kind]["giou"]), percent(split[kind]["ciou"])]
        rows.append(row)
        rows += _published_rows(TABLE_2, benchmarks.get(name))
    header = ["", "All gIoU", "All cIoU", "Amodal gIoU", "Amodal cIoU"]
    return Table("R2SM, Table 2", header, rows)


def _paper_table_3(splits: Mapping[str, Any], benchmarks: Mapping[str, str]) -> Table:
    rows = []
    for name, split in splits.items():
        for kind in ("all", "amodal"):
            values = [percent(split[kind][key]) for key in PRECISION.values()]
            rows.append([f"{name}, {kind}", *values])
        rows += _published_rows(TABLE_3, benchmarks.get(name))
    return Table("R2SM, Table 3", ["", *PRECISION], rows)


def _published_rows(
    published: Mapping[str, Mapping[str, Sequence[float]]], benchmark: str | None
) -> list[list[str]]:
    if benchmark is None:
        return []
    rows = []
    for system, values in published.get(benchmark, {}).items():
        # TOML has no null: nan marks a cell that the paper's text does not show.
        texts = ["–" if math.isnan(value) else f"{value:.2f}" for value in values]
        rows.append([f"{benchmark}, {system}", *texts])
    return rows


def _variant_table(splits: Mapping[str, Any]) -> Table:
    rows = []
    for name, split in splits.items():
        for variant, scores in split["variants"].items():
            # Seg-Zero defines no cIoU.
            giou = percent(scores["giou"])
            rows.append([f"{name}, {variant}", giou, percent(scores.get("ciou"))])
    return Table("Other definitions of the same names", ["", "gIoU", "cIoU"], rows)


def _breakdown_table(splits: Mapping[str, Any]) -> Table:
    columns = {"gIoU": "giou", "cIoU": "ciou", "occluded IoU": "occluded_iou"}
    rows = []
    for name, split in splits.items():
        for breakdown, groups in split["breakdowns"].items():
            for group, figures in groups.items():
                values = [percent(figures[key]) for key in columns.values()]
                label = f"{name}, {breakdown}: {group}"
                rows.append([label, f"{figures['queries']}", *values])
    return Table("Kinds of queries", ["", "queries", *columns], rows)


# Headline figures


def split_tiles(split: Mapping[str, Any]) -> list[Tile]:
    """Formats the headline figures of a split."""
    shown = [(f"gIoU, {kind}", split[kind], "giou") for kind in QUERY_TYPES]
    shown.append(("cIoU, all", split["all"], "ciou"))
    shown.append(("occluded IoU", split["all"], "occluded_iou"))
    if split["mask_type"]["accuracy"] is not None:
        shown.append(("mask type right", split["mask_type"], "accuracy"))
    return [
        Tile(label, percent(figures[key]), interval_text(figures, key))
        for label, figures, key in shown
    ]


def decision_figures_by_name(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the figures of the decisions in each split, and in each list of sentences.

    Those without any decision are left out.
    """
    figures = {name: split["mask_type"] for name, split in report["splits"].items()}
    figures |= report["sentences"]
    return {name: f for name, f in figures.items() if f["accuracy"] is not None}


# A comparison of reports


def comparison_tables(compared: dict[str, Any]) -> list[Table]:
    """Makes a table for each split, with differences from the first report."""
    names = _short_names(compared)
    header = ["", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    tables = []
    for split, kinds in compared["splits"].items():
        rows = []
        for title, key in COMPARED_ROWS.items():
            for kind, figures in kinds.items():
                values = [percent(value) for value in figures[key]["values"]]
                differences = [_difference_text(d) for d in figures[key]["differences"]]
                rows.append([f"{title}, {kind}", *values, *differences])
        tables.append(Table(split, header, rows))
    return tables


def comparison_intro(compared: dict[str, Any]) -> list[str]:
    """Returns paragraphs on the reports that are compared, and on how differences are written."""
    names = _short_names(compared)
    reports = [f"{name}: `{path}`" for name, path in zip(names, compared["reports"], strict=True)]
    return [
        "; ".join(reports),
        f"Percent; differences from {names[0]} with 95 % intervals of a paired bootstrap over "
        "images. A star: the interval leaves out 0.",
    ]


def comparison_markdown(compared: dict[str, Any]) -> str:
    """Writes a comparison as Markdown."""
    return to_markdown(COMPARISON_TITLE, comparison_intro(compared), comparison_tables(compared))


def _short_names(compared: dict[str, Any]) -> list[str]:
    """Returns the names of the folders, or letters where two names are the same."""
    names = [Path(report).name for report in compared["reports"]]
    if len(set(names)) < len(names):
        names = [chr(ord("A") + i) for i in range(len(names))]
    return names


def _difference_text(difference: dict[str, Any]) -> str:
    if difference["value"] is None:
        return "–"
    text = f"{100 * difference['value']:+.2f}"
    if difference["interval"] is not None:
        low, high = difference["interval"]
        # The interval leaves out 0.
        star = " *" if low > 0 or high < 0 else ""
        text += f" ({100 * low:+.2f} to {100 * high:+.2f}){star}"
    return text


# Text


def report_intro(report: Mapping[str, Any]) -> list[str]:
    """Returns paragraphs on what was evaluated and how; code stands in backticks."""
    meta = report["meta"]
    what = f"`{meta['source']}`"
    if "step" in meta:
        what += f", checkpoint at step {meta['step']}"
    else:
        what += f", predictions of `{meta['predictions']}`"
    what += f", variant `{meta['variant']}`, at {meta['resolution']} resolution"
    if meta.get("threshold") is not None:
        what += f", mask threshold {meta['threshold']}"
    paragraphs = [f"{what}. All figures are percent, in brackets 95 % intervals over images."]

    data = []
    for name, split in report["splits"].items():
        counts = f"{meta['images'][name]:,} images, {split['all']['queries']:,} queries"
        data.append(f"{name} {counts} (`{meta['data_sha256'][name][:12]}`)")
    hashes = [f"{name} `{meta[key][:12]}`" for name, key in HASHES.items() if meta.get(key)]
    sentences = [f"Data (hash): {'; '.join(data)}."]
    if hashes:
        sentences.append(f"Hashes: {', '.join(hashes)}.")
    sentences.append(f"r2sm_jax {meta['version']}.")
    paragraphs.append(" ".join(sentences))

    if selection := describe_selection(report):
        paragraphs.append(selection)
    if missing := meta.get("missing"):
        ids = ", ".join(str(query_id) for query_id in missing[:10])
        more = ", .." if len(missing) > 10 else ""
        paragraphs.append(
            f"{len(missing)} queries have no prediction and count as answered with an empty mask: "
            f"{ids}{more}."
        )
    return paragraphs


def report_markdown(report: Mapping[str, Any], *, brief: bool = False) -> str:
    """Writes a report as Markdown; `brief` as in `report_tables`."""
    return to_markdown("R2SM evaluation", report_intro(report), report_tables(report, brief=brief))


def describe_result(report: Mapping[str, Any]) -> list[str]:
    """Says in two lines what a run reached on the first split, and what that is."""
    meta = report["meta"]
    name, split = next(iter(report["splits"].items()))
    masks = [f"{kind} {percent(split[kind]['giou'])}" for kind in QUERY_TYPES[1:]]
    reached = f"gIoU {percent(split['all']['giou'])} % ({', '.join(masks)})"
    reached += f", occluded IoU {percent(split['all']['occluded_iou'])} %"
    for where, figures in decision_figures_by_name(report).items():
        if where == name or where in report["sentences"]:
            reached += f", mask type right in {percent(figures['accuracy'])} % of {where}"
    counts = f"{meta['images'][name]:,} images and {split['all']['queries']:,} queries"
    where = f"{name} of {meta['source']}, {counts}; step {meta['step']}, {meta['minutes']} minutes"
    return [f"reached: {reached}", f"on: {where}"]


def to_markdown(title: str, paragraphs: Sequence[str], tables: Sequence[Table]) -> str:
    """Writes paragraphs and tables as Markdown."""
    lines = [f"# {title}", ""]
    for paragraph in paragraphs:
        lines += [paragraph, ""]
    for table in tables:
        lines += [f"## {table.title}", "", *markdown_table(table.header, table.rows)]
    return "\n".join(lines)


def print_markdown(text: str) -> None:
    """Prints Markdown. Tables are not cut where the output is no terminal."""
    width = None if sys.stdout.isatty() else 150
    Console(width=width).print(Markdown(text))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, with an empty line at the end."""
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return [*lines, ""]


def describe_selection(report: Mapping[str, Any]) -> str:
    """Says on what a checkpoint was selected, and which splits hold images that the run saw.

    Empty for predictions of other systems, and for a checkpoint that was not selected.
    """
    meta = report["meta"]
    splits = report["splits"]
    # A run that is evaluated on other data has seen none of it, whatever the splits are called.
    is_own_data = meta.get("trained_on") == meta["source"]
    sentences = []
    if selected_on := meta.get("selected_on"):
        sentence = f"The checkpoint was selected on `{selected_on}`"
        if not is_own_data:
            sentence += f" of `{meta['trained_on']}`"
        elif selected_on in splits:
            sentence += (
                ", which is reported here, as in the paper's protocol: its figures are optimistic"
            )
        sentences.append(f"{sentence}.")
    for name in splits:
        if is_own_data and name in ("all", "train"):
            sentences.append(f"The run was trained on images of `{name}`.")
    return " ".join(sentences)
