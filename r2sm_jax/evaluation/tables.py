"""Formats the figures of report.py and compare.py: tables, headline figures, text and Markdown.

Nothing is computed here. Figures are fractions of 1 and are written in percent. A table is data:
its rows are named figures, its columns are (title, key, format).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from r2sm_jax.evaluation.iou import PRECISION_THRESHOLDS
from r2sm_jax.evaluation.report import PAPER
from r2sm_jax.query import QUERY_TYPES

COMPARISON_TITLE = "R2SM evaluations side by side"


class Table(NamedTuple):
    """A table with a title. The first column holds names, the others figures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Returns the lines of the table in Markdown, without its title."""
        lines = [f"| {' | '.join(row)} |" for row in [self.header, *self.rows]]
        return [lines[0], "|---" + "|---:" * (len(self.header) - 1) + "|", *lines[1:]]


class Tile(NamedTuple):
    """A headline figure of the page."""

    label: str
    value: str
    interval: str


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


def interval_text(figures: Mapping[str, Any], name: str) -> str:
    """Formats the interval of a figure in percent; "" where it has none."""
    bounds = figures.get("interval", {}).get(name)
    return "" if bounds is None else f"{percent(bounds[0])}-{percent(bounds[1])}"


# Rows of tables: names and figures. Columns: title, path of the figure in them, and its format.

Figures = Mapping[str, Any]
Rows = Iterable[tuple[str, Figures]]
Column = tuple[str, str, Callable[[Any], str]]


def percents(**titles: str) -> list[Column]:
    """Makes columns of percents from the names of figures and their titles."""
    return [(title, key, percent) for key, title in titles.items()]


QUERIES: Column = ("queries", "queries", str)
MASKS = percents(
    giou="gIoU",
    ciou="cIoU",
    occluded_iou="occluded IoU",
    occluded_ciou="occluded cIoU",
    complete_iou="complete IoU",
    boundary_iou="boundary IoU",
    wrong_type_gap="wrong-type gap",
    leak="leak",
)
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
BREAKDOWN = [QUERIES, *percents(giou="gIoU", ciou="cIoU", occluded_iou="occluded IoU")]
PRECISION_AT: list[Column] = [(f"Pr@{t}", f"pr@{t}", percent) for t in PRECISION_THRESHOLDS]
BY_OCCLUSION: list[Column] = [
    (f"AP of ≥ {share} % hidden", f"ap_occluded_{share}", percent) for share in (15, 25, 40)
]
COMPARED = percents(
    giou="gIoU",
    ciou="cIoU",
    occluded_iou="occluded IoU",
    boundary_iou="boundary IoU",
    accuracy="mask type right",
)


def make_table(title: str, rows: Rows, columns: Sequence[Column]) -> Table:
    """Fills a table. A figure has its interval in brackets where its row has one."""
    texts = []
    for name, figures in rows:
        texts.append([name])
        for _, key, form in columns:
            value: Any = figures
            for part in key.split("/"):
                value = value.get(part)
            bounds = interval_text(figures, key)
            texts[-1].append(f"{form(value)} ({bounds})" if bounds else form(value))
    return Table(title, ["", *(title for title, _, _ in columns)], texts)


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
    tables = [
        make_table("Masks", by_type(splits), [QUERIES, *MASKS]),
        make_table("Instances", by_type(splits), INSTANCES),
        make_table("Mask type", decision_figures_by_name(report).items(), DECISIONS),
        make_table("Decision and masks together", splits.items(), JOINT),
        make_table("Is it there, and how good is the mask?", splits.items(), PRESENCE),
        make_table(
            "The same masks with another decision, and true masks of one type for all "
            "(gIoU / cIoU)",
            splits.items(),
            references,
        ),
        make_table("Completion of true visible masks", by_group(splits, "completion"), COMPLETION),
        make_table("Visible masks by prompt", by_group(splits, "prompts"), PROMPTS),
    ]
    if not brief:
        breakdowns = []
        for name, split in splits.items():
            for breakdown, groups in split["breakdowns"].items():
                for group, figures in groups.items():
                    breakdowns.append((f"{name}, {breakdown}: {group}", figures))
        tables += [
            _paper_table("table_2", report, lambda one: one.items(), PAPER_TABLE_2),
            _paper_table("table_3", report, lambda one: by_type(one, ("all", "amodal")), PRECISION),
            make_table("Targets with at least this IoU", by_type(splits), PRECISION_AT),
            make_table("Instances by occlusion (VRSP, AISFormer)", by_type(splits), BY_OCCLUSION),
            make_table(
                "Other definitions of the same names",
                by_group(splits, "variants"),
                percents(giou="gIoU", ciou="cIoU"),
            ),
            make_table("Kinds of queries", breakdowns, BREAKDOWN),
        ]
    return [table for table in tables if table.rows]


def _paper_table(
    key: str, report: Figures, rows: Callable[[Figures], Rows], columns: Sequence[Column]
) -> Table:
    """Makes a table of the paper, with its own figures below those of a split of its data."""
    table = Table(f"R2SM, {key.replace('_', ' ').title()}", [], [])
    texts: list[Sequence[str]] = []
    for name, split in report["splits"].items():
        table = make_table(table.title, rows({name: split}), columns)
        texts += table.rows
        benchmark = report["meta"]["benchmark"].get(name)
        for system, values in PAPER[key].get(benchmark, {}).items():
            # TOML has no null: nan marks a cell that the paper's text does not show.
            cells = ["–" if math.isnan(value) else f"{value:.2f}" for value in values]
            texts.append([f"{benchmark}, {system}", *cells])
    return table._replace(rows=texts)


# Headline figures


def split_tiles(split: Figures) -> list[Tile]:
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


def decision_figures_by_name(report: Figures) -> dict[str, Figures]:
    """Returns the figures of the decisions in each split, and in each list of sentences.

    Those without any decision are left out.
    """
    figures = {name: split["mask_type"] for name, split in report["splits"].items()}
    figures |= report["sentences"]
    return {name: f for name, f in figures.items() if f["accuracy"] is not None}


# A comparison of reports


def comparison_tables(compared: Figures) -> list[Table]:
    """Makes a table for each split, with differences from the first report."""
    names = _short_names(compared)
    header = ["", *names, *(f"{name} - {names[0]}" for name in names[1:])]
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


def comparison_intro(compared: Figures) -> list[str]:
    """Returns paragraphs on the reports that are compared, and on how differences are written."""
    names = _short_names(compared)
    reports = [f"{name}: `{path}`" for name, path in zip(names, compared["reports"], strict=True)]
    return [
        "; ".join(reports),
        f"Percent; differences from {names[0]} with 95 % intervals of a paired bootstrap over "
        "images. A star: the interval leaves out 0.",
    ]


def _short_names(compared: Figures) -> list[str]:
    """Returns the names of the folders, or letters where two names are the same."""
    names = [Path(report).name for report in compared["reports"]]
    if len(set(names)) < len(names):
        names = [chr(ord("A") + i) for i in range(len(names))]
    return names


def _difference_text(difference: Figures) -> str:
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


def report_intro(report: Figures) -> list[str]:
    """Returns paragraphs on what was evaluated and how; code stands in backticks."""
    meta = report["meta"]
    system = f"predictions of `{meta.get('predictions')}`"
    if "step" in meta:
        system = f"checkpoint at step {meta['step']}"
    what = f"`{meta['source']}`, {system}, variant `{meta['variant']}`, "
    what += f"at {meta['resolution']} resolution"
    if meta.get("threshold") is not None:
        what += f", mask threshold {meta['threshold']}"

    data = []
    for name, split in report["splits"].items():
        counts = f"{meta['images'][name]:,} images, {split['all']['queries']:,} queries"
        data.append(f"{name} {counts} (`{meta['data_sha256'][name][:12]}`)")
    hashes = []
    for name in ("weights", "predictions", "language_model"):
        if sha256 := meta.get(f"{name}_sha256"):
            hashes.append(f"{name.replace('_', ' ')} `{sha256[:12]}`")
    paragraphs = [
        f"{what}. All figures are percent, in brackets 95 % intervals over images.",
        f"Data (hash): {'; '.join(data)}. Hashes: {', '.join(hashes) or 'none'}. "
        f"r2sm_jax {meta['version']}.",
    ]
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


def describe_selection(report: Figures) -> str:
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


def report_markdown(report: Figures, *, brief: bool = False) -> str:
    """Writes a report as Markdown; `brief` as in `report_tables`."""
    return to_markdown("R2SM evaluation", report_intro(report), report_tables(report, brief=brief))


def describe_result(report: Figures) -> list[str]:
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
        lines += [f"## {table.title}", "", *table.markdown(), ""]
    return "\n".join(lines)


def print_markdown(text: str) -> None:
    """Prints Markdown. Tables are not cut where the output is no terminal."""
    width = None if sys.stdout.isatty() else 150
    Console(width=width).print(Markdown(text))
