"""Formats the figures of report.py and compare.py: tables, and paragraphs of text.

Nothing is computed here. Figures are fractions of 1 and are written in percent. A table is data:
its rows are named figures, its columns are titles and paths of figures.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from r2sm_jax.evaluation.iou import PRECISION_THRESHOLDS
from r2sm_jax.evaluation.report import PAPER
from r2sm_jax.markdown import Table, to_markdown
from r2sm_jax.query import QUERY_TYPES

COMPARISON_TITLE = "R2SM evaluations side by side"
COMPARISON_INTRO = (
    "Percent; differences from the first report with 95 % intervals of a paired bootstrap over "
    "images. A star: the interval leaves out 0."
)


# Columns: title -> path of the figure in a row

Figures = Mapping[str, Any]
NamedFigures = Iterable[tuple[str, Figures]]
Columns = Mapping[str, str]

IOUS = {"gIoU": "giou", "cIoU": "ciou"}
OCCLUDED_IOU = {"occluded IoU": "occluded_iou"}
QUERY_COLUMNS = {"queries": "queries", **IOUS, **OCCLUDED_IOU, "right object": "right_object"}
MASK_COLUMNS = {
    **QUERY_COLUMNS,
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
INSTANCES = {"detections a query": "detections", **PRECISION, "AR@1": "ar1", "AR@10": "ar10"}
DECISIONS = {
    "accuracy": "accuracy",
    "of modal": "modal",
    "of amodal": "amodal",
    "F1": "f1",
    "MCC": "mcc",
    "ECE": "ece",
    "keyword rule": "keyword",
}
JOINT = {
    "cgF1": "cgf1/cgf1",
    "typed cgF1": "cgf1/typed_cgf1",
    "F1 of instances": "cgf1/positive_micro_f1",
    "pairs": "pairs/pairs",
    "both right": "pairs/both_right",
    "swapped": "pairs/swapped",
    "both modal": "pairs/both_modal",
    "both amodal": "pairs/both_amodal",
}
PRESENCE = {
    "found, of what is there": "variants/gres/target_accuracy",
    "refused, of what is not": "variants/gres/no_target_accuracy",
    "error of the predicted IoU": "predicted_iou/error",
}
KNOWN = {
    "queries": "queries",
    "of what is not there": "absent_queries",
    "AUC": "auc",
    "refused, where 95 % of what is there is found": "refused_at_95",
    "where 90 % is found": "refused_at_90",
}
COMPLETION = {
    "hidden objects": "hidden/objects",
    "amodal IoU": "hidden/amodal_iou",
    "occluded IoU": "hidden/occluded_iou",
    "others": "not_hidden/objects",
    "amodal IoU of others": "not_hidden/amodal_iou",
    "error of the predicted IoU": "iou_error",
    "AUC of what is hidden": "hidden_auc",
}
PROMPT_COLUMNS = {
    "objects": "objects",
    "modal IoU": "iou",
    "error of the predicted IoU": "iou_error",
}
PAPER_TABLE_2 = {
    "All gIoU": "all/giou",
    "All cIoU": "all/ciou",
    "Amodal gIoU": "amodal/giou",
    "Amodal cIoU": "amodal/ciou",
}
PRECISION_AT = {f"Pr@{share}": f"pr@{share}" for share in PRECISION_THRESHOLDS}
BY_OCCLUSION = {f"AP of ≥ {share} % hidden": f"ap_occluded_{share}" for share in (15, 25, 40)}
DETECTIONS = {
    "objects": "objects",
    "AP": "ap",
    "AP50": "ap50",
    "AP75": "ap75",
    "AR": "ar",
    **{
        f"{name.upper()} {share}": f"{name}_occluded_{share}"
        for name in ("ap", "ar")
        for share in (15, 25, 40)
    },
}
"""The last are of what is hidden by so many percent."""
COMPARED = {**IOUS, **OCCLUDED_IOU, "boundary IoU": "boundary_iou", "mask type right": "accuracy"}


def format_figure(value: Any, path: str = "") -> str:
    """Writes shares in percent, counts as they are, gIoU and cIoU side by side, and a dash for what
    is undefined."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return f"{format_figure(value['giou'])} / {format_figure(value['ciou'])}"
    if path == "detections":  # a mean number
        return f"{value:.1f}"
    return f"{100 * value:.2f}"


def make_table(title: str, rows: NamedFigures, columns: Columns) -> Table:
    """Fills a table. A figure has its interval in brackets where its row has one."""
    texts = []
    for name, figures in rows:
        cells = [name]
        for path in columns.values():
            value: Any = figures
            for key in path.split("/"):
                value = value.get(key)
            text = format_figure(value, path)
            if bounds := figures.get("interval", {}).get(path):
                text += f" ({format_figure(bounds[0])}-{format_figure(bounds[1])})"
            cells.append(text)
        texts.append(cells)
    return Table(title, ["", *columns], texts)


# The tables of a report


def by_type(splits: Figures, kinds: Sequence[str] = QUERY_TYPES) -> Iterator[tuple[str, Figures]]:
    """Yields the figures of all, of modal and of amodal queries of each split."""
    for name, split in splits.items():
        for kind in kinds:
            yield f"{name}, {kind}", split[kind]


def by_group(splits: Figures, key: str) -> Iterator[tuple[str, Figures]]:
    """Yields the figures of each group that splits have under a key."""
    for name, split in splits.items():
        for group, figures in split.get(key, {}).items():
            yield f"{name}, {group}", figures


def decided(report: Figures) -> dict[str, Figures]:
    """Returns the figures of the decisions in each split and list of sentences that has any."""
    figures = {name: split["mask_type"] for name, split in report["splits"].items()}
    figures |= report["sentences"]
    return {name: f for name, f in figures.items() if f["accuracy"] is not None}


def report_tables(report: Figures, *, brief: bool = False) -> list[Table]:
    """Makes the tables of a report.

    Args:
        brief: leave out the paper's tables, other definitions and kinds of queries.
    """
    splits = report["splits"]
    # Systems that give one mask have no reference with another decision.
    references = {}
    for figures in splits.values():
        for name, scores in figures["references"].items():
            if scores["giou"] is not None:
                references[name.replace("_", " ")] = f"references/{name}"
    kinds = []
    for name, breakdown in by_group(splits, "breakdowns"):
        kinds += [(f"{name}: {group}", figures) for group, figures in breakdown.items()]

    presence = report["presence"]
    pooled = [] if presence["auc"] is None else [("all, val and val_absent", presence)]
    other_decisions = "The same masks with another decision, and true masks of one type for all"
    tables = [
        make_table("Masks", by_type(splits), MASK_COLUMNS),
        make_table("Instances", by_type(splits), INSTANCES),
        make_table("Mask type", decided(report).items(), DECISIONS),
        make_table("Decision and masks together", splits.items(), JOINT),
        make_table("Is it there, and how good is the mask?", splits.items(), PRESENCE),
        make_table("Does presence tell what is there from what is not?", pooled, KNOWN),
        make_table(f"{other_decisions} (gIoU / cIoU)", splits.items(), references),
        make_table("Completion of true visible masks", by_group(splits, "completion"), COMPLETION),
        make_table("Visible masks by prompt", by_group(splits, "prompts"), PROMPT_COLUMNS),
    ]
    if not brief:
        variants = by_group(splits, "variants")
        tables += [
            _paper_table("table_2", report, splits.items(), PAPER_TABLE_2),
            _paper_table("table_3", report, by_type(splits, ("all", "amodal")), PRECISION),
            make_table("Targets with at least this IoU", by_type(splits), PRECISION_AT),
            make_table("Instances by occlusion (VRSP, AISFormer)", by_type(splits), BY_OCCLUSION),
            make_table("Other definitions of the same names", variants, IOUS),
            make_table("Kinds of queries", kinds, QUERY_COLUMNS),
        ]
    return [table for table in tables if table.rows]


def _paper_table(key: str, report: Figures, rows: NamedFigures, columns: Columns) -> Table:
    """Makes a table of the paper, with its own figures below where the data are its own."""
    table = make_table(f"R2SM, {key.replace('_', ' ').title()}", rows, columns)
    texts = list(table.rows)
    for benchmark in report["meta"]["benchmark"].values():
        for system, values in PAPER[key][benchmark].items():
            # TOML has no null: nan marks a cell that the paper's text does not show.
            cells = ["–" if math.isnan(value) else f"{value:.2f}" for value in values]
            texts.append([f"{benchmark}, {system}", *cells])
    return table._replace(rows=texts)


# A comparison of reports


def comparison_tables(compared: Figures) -> list[Table]:
    """Makes a table for each split, with differences from the first report."""
    reports = compared["reports"]
    header = ["", *reports, *(f"{report} - {reports[0]}" for report in reports[1:])]
    tables = []
    for split, kinds in compared["splits"].items():
        rows = []
        for title, key in COMPARED.items():
            for kind, figures in kinds.items():
                values = map(format_figure, figures[key]["values"])
                differences = map(_difference_text, figures[key]["differences"])
                rows.append([f"{title}, {kind}", *values, *differences])
        tables.append(Table(split, header, rows))
    return tables


def _difference_text(difference: Figures) -> str:
    if difference["value"] is None:
        return "–"
    text = f"{100 * difference['value']:+.2f}"
    if difference["interval"] is not None:
        low, high = difference["interval"]
        star = " *" if low > 0 or high < 0 else ""
        text += f" ({100 * low:+.2f} to {100 * high:+.2f}){star}"
    return text


# Text


def report_intro(report: Figures) -> list[str]:
    """Returns paragraphs on what was evaluated and how; code stands in backticks."""
    meta = report["meta"]
    splits = report["splits"]
    system = f"predictions of `{meta.get('predictions')}`"
    if "step" in meta:
        system = f"checkpoint at step {meta['step']}"
    counts = []
    for name, split in splits.items():
        count = f"{meta['images'][name]:,} images, {split['all']['queries']:,} queries"
        counts.append(f"{name} {count} (`{meta['data_sha256'][name][:12]}`)")
    paragraphs = [
        f"`{meta['source']}`, {system}, variant `{meta['variant']}`, at {meta['resolution']} "
        "resolution. All figures are percent, in brackets 95 % intervals over images.",
        f"Data (hash): {'; '.join(counts)}. r2sm_jax {meta['version']}.",
    ]
    if selection := describe_selection(report):
        paragraphs.append(selection)
    if missing := meta.get("missing"):
        ids = ", ".join(map(str, missing[:10]))
        paragraphs.append(
            f"{len(missing)} queries have no prediction and count as answered with an empty mask; "
            f"the first: {ids}."
        )
    return paragraphs


def describe_selection(report: Figures) -> str:
    """Says on what a checkpoint was selected, and which splits hold images that the run saw."""
    meta = report["meta"]
    splits = report["splits"]
    # A run that is evaluated on other data has seen none of it, whatever the splits are called.
    is_own_data = meta.get("trained_on") == meta["source"]
    sentences = []
    if selected_on := meta.get("selected_on"):
        sentences.append(
            f"The checkpoint was selected on `{selected_on}` of `{meta['trained_on']}`."
        )
        if is_own_data and selected_on in splits:
            sentences.append("Its figures are optimistic, as in the paper's protocol.")
    seen = meta.get("images_seen", {})
    for name in splits:
        if count := seen.get(name):
            total = meta["images"][name]
            sentences.append(f"The run was trained on {count} of the {total} images of `{name}`.")
        elif is_own_data and name in ("all", "train"):
            sentences.append(f"The run was trained on images of `{name}`.")
    if "step" in meta and None in seen.values():
        sentences.append(
            "Which images it was trained on is not known: it is older than `trained_on.txt`, or "
            "started from a run that is."
        )
    return " ".join(sentences)


def report_markdown(report: Figures, *, brief: bool = False) -> str:
    """Writes a report as Markdown; `brief` as in `report_tables`."""
    return to_markdown("R2SM evaluation", report_intro(report), report_tables(report, brief=brief))


def describe_result(report: Figures) -> list[str]:
    """Says in two lines what a run reached on the first split, and what that is."""
    meta = report["meta"]
    name, split = next(iter(report["splits"].items()))
    figures = split["all"]
    giou = {kind: format_figure(split[kind]["giou"]) for kind in QUERY_TYPES}
    reached = f"gIoU {giou['all']} % (modal {giou['modal']}, amodal {giou['amodal']})"
    reached += f", occluded IoU {format_figure(figures['occluded_iou'])} %"
    reached += f", mask type right in {format_figure(split['mask_type']['accuracy'])} %"
    counts = f"{meta['images'][name]:,} images and {figures['queries']:,} queries"
    where = f"{name} of {meta['source']}, {counts}; step {meta['step']}, {meta['minutes']} minutes"
    return [f"reached: {reached}", f"on: {where}"]
