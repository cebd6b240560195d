"""Writes a report to files and draws its HTML page.

The page needs no other file: styles, pictures and charts are inside. It shows the tables and
headline figures of tables.py, examples of answers, and curves of calibration and training.
"""

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.images import data_url
from r2sm_jax.data.sheet import BLANK, Panel, paint
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.evaluation.compare import QUERIES_FILE, write_queries
from r2sm_jax.evaluation.report import Evaluated
from r2sm_jax.evaluation.scorer import QueryResult
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
LOGGED = {
    "loss": {"loss": "train/loss"},
    "dev": {"gIoU": "dev/giou", "mask type right": "dev/type_accuracy"},
}
"""Panels of the chart of a training, with their curves: label -> name in the log."""
SVG_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 9,
}
"""Text stays text, and ids come from a fixed salt."""


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
    galleries = {}
    for name, (source, results) in evaluated.items():
        # Predictions can be scored by the annotations alone.
        if source.has_images:
            examples = select_examples(results.results)
            galleries[name] = {title: example_rows(source, examples[title]) for title in examples}
    page = render_page(
        "R2SM evaluation",
        report_intro(report),
        report_tables(report),
        tiles={
            f"{name}, {split['all']['queries']:,} queries": split_tiles(split)
            for name, split in report["splits"].items()
        },
        galleries=galleries,
        without_images=[name for name in report["splits"] if name not in galleries],
        charts=training_charts(read_training_log(folder)) + calibration_charts(report),
    )
    with atomic_write(folder / "report.json") as part:
        part.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        (folder / "report.md").write_text(report_markdown(report), "utf-8")
        (folder / "report.html").write_text(page, "utf-8")
        results_by_split = {name: results.results for name, (_, results) in evaluated.items()}
        write_queries(folder / QUERIES_FILE, results_by_split)


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
    """Writes the picture of a panel as a data URL."""
    return data_url(panel.picture, "WEBP", quality=82)


# Examples of answers


def select_examples(results: Sequence[QueryResult], count: int = 4) -> dict[str, list[QueryResult]]:
    """Selects the queries of the highest, the middle and the lowest IoU.

    Up to `count` of each, of different images. No query is selected twice.
    """
    iou = []
    for result in results:
        # An empty answer to a query without a target is right.
        intersection, union = result.overlap[:2]
        iou.append(intersection / union if union else 1.0)
    worst_first = np.argsort(iou, kind="stable").tolist()
    middle = len(worst_first) // 2
    ranks_from_middle = sorted(range(len(worst_first)), key=lambda rank: abs(rank - middle))
    orders = {
        "Worst": worst_first,
        "Best": worst_first[::-1],
        "Median": [worst_first[rank] for rank in ranks_from_middle],
    }
    # In the order of choice: where there are few queries, the worst are shown.
    examples: dict[str, list[QueryResult]] = {}
    used: set[int] = set()
    for title, order in orders.items():
        unused = [results[i] for i in order if results[i].query.id not in used]
        examples[title] = [of_image[0] for of_image in group_by_image(unused)[:count]]
        used |= {result.query.id for result in examples[title]}
    return {title: examples[title] for title in ("Best", "Median", "Worst")}


def sample_queries(results: Sequence[QueryResult], count: int) -> list[QueryResult]:
    """Selects one query of each of the first `count` images.

    It is the first query of the first image, the second of the second, and so on, so that different
    kinds of queries are seen.
    """
    by_image = group_by_image(results)[:count]
    return [queries[i % len(queries)] for i, queries in enumerate(by_image)]


def group_by_image(results: Iterable[QueryResult]) -> list[list[QueryResult]]:
    """Groups results by image, in the order in which images first come."""
    groups: dict[int, list[QueryResult]] = {}
    for result in results:
        groups.setdefault(result.truth.image_id, []).append(result)
    return list(groups.values())


def example_rows(source: Source, results: Iterable[QueryResult]) -> list[list[Panel]]:
    """Makes a row of image, truth and prediction for each query.

    Only the image is read from the source, since results hold the masks. An image that is missing
    is left blank.
    """
    rows = []
    for result in results:
        modal, amodal = map(masks.decode, result.truth.masks)
        predicted_modal, predicted_amodal = map(masks.decode, result.predicted_masks)
        try:
            image = source[result.truth.index].image
        except InputError:
            image = np.full((*modal.shape, 3), BLANK, np.uint8)
        ratio = PICTURE_SIZE / max(image.shape[:2])
        nothing = np.zeros_like(modal)
        asked = paint(image, modal, amodal, result.mask_type, ratio)
        said = paint(image, predicted_modal, predicted_amodal, result.predicted_type, ratio)
        rows.append(
            [
                Panel(paint(image, nothing, nothing, None, ratio), result.query.text),
                Panel(asked, f"{result.mask_type} asked for"),
                Panel(said, describe(result)),
            ]
        )
    return rows


def describe(result: QueryResult) -> str:
    """Names the mask type of an answer, its probability if it has one, and the IoU of its mask."""
    intersection, union = result.overlap[:2]
    iou = f"IoU {intersection / union if union else 1.0:.2f}"
    if result.predicted_type is None:
        return iou
    verdict = "right" if result.predicted_type == result.mask_type else "wrong"
    probability = result.amodal_probability
    if probability is None:
        return f"{result.predicted_type} ({verdict}), {iou}"
    probability = probability if result.predicted_type == "amodal" else 1 - probability
    return f"{result.predicted_type} with probability {probability:.2f} ({verdict}), {iou}"


# Charts


def calibration_charts(report: Mapping[str, Any]) -> list[Chart]:
    """Draws the calibration of the mask-type probability and of the predicted IoU.

    Splits without probabilities or predicted IoUs are left out.
    """
    types = {
        f"{name}, ECE {percent(figures['ece'])}": figures["reliability"]
        for name, figures in decision_figures_by_name(report).items()
    }
    ious = {}
    for name, split in report["splits"].items():
        figures = split["predicted_iou"]
        ious[f"{name}, mean error {percent(figures['error'])}"] = figures["curve"]
    charts = []
    # Confidences of two choices begin at 0.5.
    for title, x, y, min_x, all_curves in [
        ("Calibration of the mask-type probability", "confidence", "share right", 0.5, types),
        ("Honesty of the predicted IoU", "predicted IoU", "true IoU", 0.0, ious),
    ]:
        curves = {label: curve for label, curve in all_curves.items() if curve}
        if curves:
            text = f"On the dashed line, {y} equals {x}. Larger dots hold more queries."
            charts.append(Chart(title, text, draw_calibration(curves, min_x, x, y)))
    return charts


def draw_calibration(
    curves: Mapping[str, Sequence[Mapping[str, float]]], min_x: float, x: str, y: str
) -> str:
    """Draws calibration curves side by side as SVG. Larger dots hold more queries."""
    blue = "#1f6fd6"

    def draw(axes: Axes, title: str) -> None:
        queries, confidence, accuracy = (
            np.array([point[name] for point in curves[title]])
            for name in ("queries", "confidence", "accuracy")
        )
        axes.plot([min_x, 1], [min_x, 1], color="#9aa0a8", linewidth=1, linestyle="--")
        axes.plot(confidence, accuracy, color=blue, linewidth=1.2)
        sizes = 12 + 160 * queries / queries.max()
        axes.scatter(confidence, accuracy, sizes, color=blue, alpha=0.7)
        axes.set(xlim=(min_x - 0.02, 1.02), ylim=(-0.02, 1.05), xlabel=x, ylabel=y)

    return draw_panels(list(curves), draw, width=3.2)


def read_training_log(folder: Path) -> list[dict[str, float]]:
    """Reads what a run has logged, in the order of its steps; [] where a folder is not a run."""
    path = folder / TRAINING_LOG
    by_step: dict[int, dict[str, float]] = {}
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            # The line that a run was writing when it was killed.
            continue
        # A run that was resumed has logged some steps twice, and a step may have two rows.
        by_step[row["step"]] = by_step.get(row["step"], {}) | row
    return [by_step[step] for step in sorted(by_step)]


def training_charts(training_log: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Draws the loss and the figures of the quick evaluations over the steps of a run.

    There is no chart where nothing was logged.
    """
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for panel, names in LOGGED.items():
        for label, name in names.items():
            points = [(row["step"], row[name]) for row in training_log if name in row]
            if points:
                curves.setdefault(panel, {})[label] = points
    if not curves:
        return []

    def draw(axes: Axes, title: str) -> None:
        for label, points in curves[title].items():
            axes.plot(*np.transpose(points), linewidth=1.2, marker=".", markersize=3, label=label)
        axes.set(xlabel="step", ylim=(0, None))
        if len(curves[title]) > 1:
            axes.legend(fontsize=8, frameon=False)

    text = "The loss is a mean over the steps between two points. dev is held out of training."
    return [Chart("Training", text, draw_panels(list(curves), draw, width=4.2))]


def draw_panels(titles: Sequence[str], draw: Callable[[Axes, str], None], width: float) -> str:
    """Draws panels side by side as an SVG element; the same panels give the same bytes."""
    with matplotlib.rc_context(SVG_SETTINGS):
        figure = Figure(figsize=(width * len(titles), 3.1), layout="constrained")
        all_axes = figure.subplots(1, len(titles), squeeze=False)[0]
        for axes, title in zip(all_axes, titles, strict=True):
            draw(axes, title)
            axes.set_title(title, fontsize=9)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    # An HTML page holds the element without the XML header before it.
    return "<svg" + content.getvalue().partition("<svg")[2]
