"""Writes a report to files and draws its HTML page.

The page needs no other file: styles, pictures and charts are inside. It shows the tables and
headline figures of tables.py, the examples of gallery.py, and calibration charts.
"""

import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from r2sm_jax.data.images import data_url
from r2sm_jax.data.sheet import Panel, draw_panel
from r2sm_jax.errors import atomic_write
from r2sm_jax.evaluation.compare import QUERIES_FILE, write_queries
from r2sm_jax.evaluation.gallery import example_rows, select_examples
from r2sm_jax.evaluation.report import Evaluated
from r2sm_jax.evaluation.tables import (
    Table,
    decision_figures_by_name,
    percent,
    report_intro,
    report_markdown,
    report_tables,
    split_tiles,
)

PICTURE_SIZE = 288
"""Pixels of a picture's longer side."""
TRAINING_LOG = "metrics.jsonl"
"""What a run logs, in its folder."""
SVG_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 9,
}
"""Text stays text, and ids come from a fixed salt."""

Gallery = Mapping[str, Sequence[Sequence[Panel]]]
"""Title -> rows of panels; a row is one query."""
Curve = list[dict[str, float]]


class Chart(NamedTuple):
    """A drawing of curves."""

    title: str
    text: str
    """What the drawing shows."""
    svg: str


def write_report(report: dict[str, Any], evaluated: Evaluated, folder: Path) -> None:
    """Writes `report.json`, `report.md`, `report.html` and `queries.csv`.

    Raises InputError if the folder cannot be written.
    """
    galleries: dict[str, Gallery] = {}
    for name, (source, results) in evaluated.items():
        if not source.has_images:
            # Predictions can be scored by the annotations alone.
            continue
        examples = select_examples(results.results)
        galleries[name] = {title: example_rows(source, examples[title]) for title in examples}

    with atomic_write(folder / "report.json") as part:
        part.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        (folder / "report.md").write_text(report_markdown(report), "utf-8")
        page = report_page(report, galleries, read_training_log(folder))
        (folder / "report.html").write_text(page, "utf-8")
        results_by_split = {name: results.results for name, (_, results) in evaluated.items()}
        write_queries(folder / QUERIES_FILE, results_by_split)


def read_training_log(folder: Path) -> list[dict[str, float]]:
    """Reads what a run has logged, in the order of its steps; [] where a folder is not a run."""
    path = folder / TRAINING_LOG
    if not path.is_file():
        return []
    by_step: dict[int, dict[str, float]] = {}
    for line in path.read_text("utf-8").splitlines():
        try:
            row = json.loads(line)
            # A run that was resumed has logged some steps twice, and a step may have two rows.
            by_step[row["step"]] = by_step.get(row["step"], {}) | row
        except (ValueError, KeyError, TypeError):
            # The line that a run was writing when it was killed.
            continue
    return [by_step[step] for step in sorted(by_step)]


def report_page(
    report: dict[str, Any],
    galleries: Mapping[str, Gallery],
    training_log: Sequence[Mapping[str, float]] = (),
) -> str:
    """Draws the HTML page of a report.

    Args:
        report: the figures.
        galleries: examples by split; splits without are said to have no images.
        training_log: what the run has logged (`read_training_log`), for its curves.
    """
    tiles = {}
    for name, split in report["splits"].items():
        tiles[f"{name}, {split['all']['queries']:,} queries"] = split_tiles(split)
    return render_page(
        "R2SM evaluation",
        report_intro(report),
        report_tables(report),
        tiles=tiles,
        galleries=galleries,
        without_images=[name for name in report["splits"] if name not in galleries],
        charts=training_charts(training_log) + calibration_charts(report),
    )


def render_page(
    title: str, paragraphs: Sequence[str], tables: Sequence[Table], **parts: Any
) -> str:
    """Draws a page of paragraphs, tables, and other parts of page.html where they are given.

    Args:
        parts: tiles, galleries, without_images, charts.
    """
    folder = files("r2sm_jax.evaluation")
    # Undefined names are errors, and all text is escaped.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    empty: dict[str, Any] = {"tiles": {}, "galleries": {}, "without_images": [], "charts": []}
    return template.render(
        empty | parts,
        title=title,
        paragraphs=[code_to_html(paragraph) for paragraph in paragraphs],
        tables=tables,
        css=folder.joinpath("page.css").read_text(encoding="utf-8"),
        picture=picture_url,
    )


def code_to_html(text: str) -> str:
    """Escapes text for HTML; what is in backticks becomes code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))


def picture_url(panel: Panel) -> str:
    """Draws the image and masks of a panel, as a data URL."""
    ratio = PICTURE_SIZE / max(panel.image.shape[:2])
    return data_url(draw_panel(panel, ratio), "WEBP", quality=82)


def calibration_charts(report: Mapping[str, Any]) -> list[Chart]:
    """Draws the calibration of the mask-type probability and of the predicted IoU.

    Splits without probabilities or predicted IoUs are left out.
    """
    charts = []
    mask_type_curves = {}
    for name, figures in decision_figures_by_name(report).items():
        if figures["reliability"]:
            mask_type_curves[f"{name}, ECE {percent(figures['ece'])}"] = figures["reliability"]
    if mask_type_curves:
        title, x, y = "Calibration of the mask-type probability", "confidence", "share right"
        svg = draw_curves(mask_type_curves, 0.5, x, y)
        charts.append(Chart(title, describe_calibration(x, y), svg))

    iou_curves = {}
    for name, split in report["splits"].items():
        figures = split["predicted_iou"]
        if figures["curve"]:
            iou_curves[f"{name}, mean error {percent(figures['error'])}"] = figures["curve"]
    if iou_curves:
        title, x, y = "Honesty of the predicted IoU", "predicted IoU", "true IoU"
        svg = draw_curves(iou_curves, 0.0, x, y)
        charts.append(Chart(title, describe_calibration(x, y), svg))
    return charts


def describe_calibration(x: str, y: str) -> str:
    """Says how a calibration curve is read."""
    return f"On the dashed line, {y} equals {x}. Larger dots hold more queries."


def training_charts(training_log: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Draws the loss and the figures of the quick evaluations over the steps of a run.

    There is no chart where nothing was logged.
    """
    panels = {
        "loss": {"loss": "train/loss"},
        "dev": {"gIoU": "dev/giou", "mask type right": "dev/type_accuracy"},
    }
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for panel, names in panels.items():
        for label, name in names.items():
            points = [(row["step"], row[name]) for row in training_log if name in row]
            if points:
                curves.setdefault(panel, {})[label] = points
    if not curves:
        return []
    text = "The loss is a mean over the steps between two points. dev is held out of training."
    return [Chart("Training", text, draw_training(curves))]


def draw_training(curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    """Draws curves over steps as SVG: a panel for each title, in it points by label."""
    with matplotlib.rc_context(SVG_SETTINGS):
        figure = Figure(figsize=(4.2 * len(curves), 3.0), layout="constrained")
        all_axes = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, (title, of_panel) in zip(all_axes, curves.items(), strict=True):
            for label, points in of_panel.items():
                steps, values = zip(*points, strict=True)
                axes.plot(steps, values, linewidth=1.2, marker=".", markersize=3, label=label)
            axes.set(xlabel="step", ylim=(0, None))
            axes.set_title(title, fontsize=9)
            if len(of_panel) > 1:
                axes.legend(fontsize=8, frameon=False)
        return to_svg(figure)


def to_svg(figure: Figure) -> str:
    """Writes a figure as an SVG element; the same figure gives the same bytes."""
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    # An HTML page holds the element without the XML header before it.
    return "<svg" + content.getvalue().partition("<svg")[2]


def draw_curves(curves: Mapping[str, Curve], min_x: float, x: str, y: str) -> str:
    """Draws calibration curves side by side as SVG. Larger dots hold more queries.

    Args:
        min_x: both axes begin here; confidences of two choices begin at 0.5.
    """
    blue = "#1f6fd6"
    with matplotlib.rc_context(SVG_SETTINGS):
        figure = Figure(figsize=(3.2 * len(curves), 3.2), layout="constrained")
        all_axes = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, (title, curve) in zip(all_axes, curves.items(), strict=True):
            confidence = [point["confidence"] for point in curve]
            accuracy = [point["accuracy"] for point in curve]
            max_queries = max(point["queries"] for point in curve)
            sizes = [12 + 160 * point["queries"] / max_queries for point in curve]
            axes.plot([min_x, 1], [min_x, 1], color="#9aa0a8", linewidth=1, linestyle="--")
            axes.plot(confidence, accuracy, color=blue, linewidth=1.2)
            axes.scatter(confidence, accuracy, sizes, color=blue, alpha=0.7)
            axes.set(xlim=(min_x - 0.02, 1.02), ylim=(-0.02, 1.05), xlabel=x, ylabel=y)
            axes.set_title(title, fontsize=9)
        return to_svg(figure)
