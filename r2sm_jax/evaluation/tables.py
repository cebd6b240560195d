"""Formats the figures of report.py and compare.py: tables, and paragraphs of text.

Nothing is computed here. Figures are fractions of 1 and are written in percent. A table is data:
its rows are named figures, its columns are (title, key, format).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from r2sm_jax.evaluation.iou import PRECISION_THRESHOLDS
from r2sm_jax.evaluation.report import PAPER
from r2sm_jax.query import QUERY_TYPES

COMPARISON_TITLE = "R2SM evaluations side by side"
COMPARISON_INTRO = (
    "Percent; differences from the first report with 95 % intervals of a paired bootstrap over "
    "images. A star: the interval leaves out 0."
)


class Table(NamedTuple):
    """A table with a title. The first column holds names, the others figures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Returns the lines of the table in Markdown, without its title."""
        lines = [f"| {' | '.join(row)} |" for row in [self.header, *self.rows]]
        return [lines[0], "|---" + "|---:" * (len(self.header) - 1) + "|", *lines[1:]]


# Formats of cells


def percent(value: float | None) -> str:
    """Formats a fraction as percent with two decimals; a dash where it is undefined."""
    return "–" if value is None else f"{100 * value:.2f}"


def number(value: float | None) -> str:
    """Formats a number that is no share."""
    return f"{value or 0:.1f}"


def two_ious(scores: Mapping[str, float | None]) -> str:
    """Formats gIoU and cIoU."""
    return f"{percent(scores['giou'])} / {percent(scores['ciou'])}"


# Columns: title, path of the figure in a row, and its format.

Figures = Mapping[str, Any]
Rows = Iterable[tuple[str, Figures]]
Column = tuple[str, str, Callable[[Any], str]]


def percents(**titles: str) -> list[Column]:
    """Makes columns of percents from the names of figures and their titles."""
    return [(title, key, percent) for key, title in titles.items()]


QUERIES: Column = ("queries", "queries", str)
IOUS = percents(giou="gIoU", ciou="cIoU")
OCCLUDED = percents(occluded_iou="occluded IoU")
MASKS = [
    QUERIES,
    *IOUS,
    *OCCLUDED,
    *percents(
        occluded_ciou="occluded cIoU",
        complete_iou="complete IoU",
        boundary_iou="boundary IoU",
        wrong_type_gap="wrong-type gap",
        leak="leak",
    ),
]
PRECISION = percents(
    ap="AP", ap50="AP50", ap75="AP75", ap_small="APs", ap_medium="APm", ap_large="APl", ar="AR"
)
INSTANCES = [
    ("detections a query", "detections", number),
    *PRECISION,
    *percents(ar1="AR@1", ar10="AR@10"),
]
DECISIONS = percents(
    accuracy="accuracy",
    modal="of modal",
    amodal="of amodal",
    f1="F1",
    mcc="MCC",
    ece="ECE",
    keyword="keyword rule",
)
JOINT: list[Column] = [
    ("cgF1", "cgf1/cgf1", percent),
    ("typed cgF1", "cgf1/typed_cgf1", percent),
    ("F1 of instances", "cgf1/positive_micro_f1", percent),
    ("pairs", "pairs/pairs", str),
    ("both right", "pairs/both_right", percent),
    ("swapped", "pairs/swapped", percent),
    ("both modal", "pairs/both_modal", percent),
    ("both amodal", "pairs/both_amodal", percent),
]
PRESENCE: list[Column] = [
    ("found, of what is there", "variants/gres/target_accuracy", percent),
    ("refused, of what is not", "variants/gres/no_target_accuracy", percent),
    ("error of the predicted IoU", "predicted_iou/error", percent),
]
COMPLETION: list[Column] = [
    ("hidden objects", "hidden/objects", str),
    ("amodal IoU", "hidden/amodal_iou", percent),
    ("occluded IoU", "hidden/occluded_iou", percent),
    ("others", "not_hidden/objects", str),
    ("amodal IoU of others", "not_hidden/amodal_iou", percent),
]
PROMPTS: list[Column] = [("objects", "objects", str), ("modal IoU", "iou", percent)]
PAPER_TABLE_2: list[Column] = [
    ("All gIoU", "all/giou", percent),
    ("All cIoU", "all/ciou", percent),
    ("Amodal gIoU", "amodal/giou", percent),
    ("Amodal cIoU", "amodal/ciou", percent),
]
PRECISION_AT: list[Column] = [(f"Pr@{t}", f"pr@{t}", percent) for t in PRECISION_THRESHOLDS]
BY_OCCLUSION: list[Column] = [
    (f"AP of ≥ {share} % hidden", f"ap_occluded_{share}", percent) for share in (15, 25, 40)
]
COMPARED = [*IOUS, *OCCLUDED, *percents(boundary_iou="boundary IoU", accuracy="mask type right")]


def make_table(title: str, rows: Rows, columns: Sequence[Column]) -> Table:
    """Fills a table. A figure has its interval in brackets where its row has one."""
    texts = []
    for name, figures in rows:
        intervals = figures.get("interval", {})
        texts.append([name])
        for _, key, form in columns:
            value: Any = figures
            for part in key.split("/"):
                value = value.get(part)
            text = form(value)
            if bounds := intervals.get(key):
                text += f" ({form(bounds[0])}-{form(bounds[1])})"
            texts[-1].append(text)
    return Table(title, ["", *(title for title, _, _ in columns)], texts)


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
    first = next(iter(splits.values()))["references"]
    references: list[Column] = [
        (name.replace("_", " "), f"references/{name}", two_ious)
        for name, scores in first.items()
        if scores["giou"] is not None
    ]
    other_decisions = "The same masks with another decision, and true masks of one type for all"
    tables = [
        make_table("Masks", by_type(splits), MASKS),
        make_table("Instances", by_type(splits), INSTANCES),
        make_table("Mask type", decided(report).items(), DECISIONS),
        make_table("Decision and masks together", splits.items(), JOINT),
        make_table("Is it there, and how good is the mask?", splits.items(), PRESENCE),
        make_table(f"{other_decisions} (gIoU / cIoU)", splits.items(), references),
        make_table("Completion of true visible masks", by_group(splits, "completion"), COMPLETION),
        make_table("Visible masks by prompt", by_group(splits, "prompts"), PROMPTS),
    ]
    if not brief:
        kinds = []
        for name, breakdown in by_group(splits, "breakdowns"):
            kinds += [(f"{name}: {group}", figures) for group, figures in breakdown.items()]
        variants = by_group(splits, "variants")
        tables += [
            _paper_table("table_2", report, splits.items(), PAPER_TABLE_2),
            _paper_table("table_3", report, by_type(splits, ("all", "amodal")), PRECISION),
            make_table("Targets with at least this IoU", by_type(splits), PRECISION_AT),
            make_table("Instances by occlusion (VRSP, AISFormer)", by_type(splits), BY_OCCLUSION),
            make_table("Other definitions of the same names", variants, IOUS),
            make_table("Kinds of queries", kinds, [QUERIES, *IOUS, *OCCLUDED]),
        ]
    return [table for table in tables if table.rows]


def _paper_table(key: str, report: Figures, rows: Rows, columns: Sequence[Column]) -> Table:
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
        for title, key, form in COMPARED:
            for kind, figures in kinds.items():
                values = [form(value) for value in figures[key]["values"]]
                differences = [_difference_text(d) for d in figures[key]["differences"]]
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
    for name in ("all", "train"):
        if is_own_data and name in splits:
            sentences.append(f"The run was trained on images of `{name}`.")
    return " ".join(sentences)


def report_markdown(report: Figures, *, brief: bool = False) -> str:
    """Writes a report as Markdown; `brief` as in `report_tables`."""
    return to_markdown("R2SM evaluation", report_intro(report), report_tables(report, brief=brief))


def describe_result(report: Figures) -> list[str]:
    """Says in two lines what a run reached on the first split, and what that is."""
    meta = report["meta"]
    name, split = next(iter(report["splits"].items()))
    figures = split["all"]
    masks = ", ".join(f"{kind} {percent(split[kind]['giou'])}" for kind in QUERY_TYPES[1:])
    reached = f"gIoU {percent(figures['giou'])} % ({masks})"
    reached += f", occluded IoU {percent(figures['occluded_iou'])} %"
    reached += f", mask type right in {percent(split['mask_type']['accuracy'])} %"
    counts = f"{meta['images'][name]:,} images and {figures['queries']:,} queries"
    where = f"{name} of {meta['source']}, {counts}; step {meta['step']}, {meta['minutes']} minutes"
    return [f"reached: {reached}", f"on: {where}"]


def to_markdown(title: str, paragraphs: Sequence[str], tables: Sequence[Table]) -> str:
    """Writes paragraphs and tables as Markdown."""
    lines = [f"# {title}", ""]
    for paragraph in paragraphs:
        lines += [paragraph, ""]
    for table in tables:
        lines += [f"## {table.title}", "", *table.markdown(), ""]
    return "\n".join(lines)


def print_markdown(text: str) -> None:
    """Prints Markdown. Tables are not cut where the output is no terminal."""
    width = None if sys.stdout.isatty() else 150
    Console(width=width).print(Markdown(text))
