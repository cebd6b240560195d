"""Writes a report to files and draws its HTML page.

The page needs no other file: styles, pictures and charts are inside. It shows the tables of
tables.py, examples of answers, and curves of calibration and training.
"""

import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jinja2 import Template
from matplotlib.figure import Figure

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.images import data_url
from r2sm_jax.data.sheet import BLANK, Panel, paint
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.evaluation.compare import QUERIES_FILE, write_queries
from r2sm_jax.evaluation.scorer import Evaluated, QueryResult
from r2sm_jax.evaluation.tables import (
    Table,
    decided,
    format_figure,
    report_intro,
    report_markdown,
    report_tables,
)

PICTURE_SIZE = 288
"""Pixels of a picture's longer side."""
MAX_EXAMPLES = 4
"""Of the best, of the middle and of the worst answers."""
LOGGED = {"loss": ["train/loss"], "dev": ["dev/giou", "dev/type_accuracy"]}
"""Panels of the chart of a training, with the names of their curves in the log."""

Curve = Sequence[tuple[float, float]]
Panels = Mapping[str, Mapping[str, Curve]]
"""Curves by the title of their panel and their label."""


def write_report(report: dict[str, Any], evaluated: Evaluated, folder: Path) -> None:
    """Writes `report.json`, `report.md`, `report.html` and `queries.csv`.

    Raises InputError if the folder cannot be written.
    """
    galleries = {}
    for name, results in evaluated.items():
        # Predictions can be scored by the annotations alone.
        examples = select_examples(results.results) if results.source.has_images else {}
        galleries[name] = {title: example_rows(results.source, e) for title, e in examples.items()}
    charts = {
        "Training": training_curves(folder / "metrics.jsonl"),
        "Calibration of probabilities": calibration_curves(report),
    }
    page = render_page(
        "R2SM evaluation",
        report_intro(report),
        report_tables(report),
        galleries=galleries,
        charts={title: draw_curves(panels) for title, panels in charts.items() if panels},
    )
    with atomic_write(folder / "report.json") as part:
        part.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        (folder / "report.md").write_text(report_markdown(report), "utf-8")
        (folder / "report.html").write_text(page, "utf-8")
        write_queries(folder / QUERIES_FILE, evaluated)


def render_page(
    title: str, paragraphs: Sequence[str], tables: Sequence[Table], **drawn: Mapping[str, Any]
) -> str:
    """Draws a page.

    Args:
        paragraphs: text; what is in backticks becomes code.
        drawn: `galleries`, rows of pictures by split and title, and `charts`, SVG by title.
    """
    folder = files("r2sm_jax.evaluation")
    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    template = Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return template.render(
        title=title,
        paragraphs=[re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(p)) for p in paragraphs],
        tables=tables,
        css=folder.joinpath("page.css").read_text(encoding="utf-8"),
        picture=partial(data_url, form="WEBP", quality=82),
        **drawn,
    )


# Examples of answers


def answer_iou(result: QueryResult) -> float:
    """Returns the IoU of an answer; an empty one to a query without a target is right."""
    intersection, union = result.overlap[:2]
    return intersection / union if union else 1.0


def select_examples(results: Sequence[QueryResult]) -> dict[str, list[QueryResult]]:
    """Selects answers of the highest, the middle and the lowest IoU, all of different images."""
    ranked = sorted(sample_queries(results), key=answer_iou, reverse=True)
    count = min(MAX_EXAMPLES, -(-len(ranked) // 3))
    middle = (len(ranked) - count) // 2
    return {
        "Best": ranked[:count],
        "Median": ranked[middle : middle + count],
        "Worst": ranked[len(ranked) - count :],
    }


def sample_queries(results: Iterable[QueryResult], count: int | None = None) -> list[QueryResult]:
    """Selects one query of each of the first `count` images, or of all.

    It is the first query of the first image, the second of the second, and so on, so that different
    kinds of queries are seen.
    """
    by_image: dict[int, list[QueryResult]] = {}
    for result in results:
        by_image.setdefault(result.truth.image_id, []).append(result)
    groups = list(by_image.values())[:count]
    return [queries[i % len(queries)] for i, queries in enumerate(groups)]


def example_rows(source: Source, results: Iterable[QueryResult]) -> list[list[Panel]]:
    """Makes a row of image, truth and prediction for each query.

    Only the image is read from the source, since results hold the masks. An image that is missing
    is left blank.
    """
    rows = []
    for result in results:
        size = result.truth.size
        image = np.full((*size, 3), BLANK, np.uint8)
        with suppress(InputError):
            image = source[result.truth.index].image
        said = result.said.mask_type
        caption = f"{said or 'no decision'}, IoU {answer_iou(result):.2f}"
        if result.said.amodal_probability is not None:
            caption += f", probability of amodal {result.said.amodal_probability:.2f}"
        modal, amodal = map(masks.decode, result.truth.masks)
        predicted = result.said.both or (result.said.mask, result.said.mask)
        predicted_modal, predicted_amodal = map(masks.decode, predicted)
        nothing = np.zeros_like(modal)
        shown = partial(paint, image, ratio=PICTURE_SIZE / max(size))
        rows.append(
            [
                Panel(shown(nothing, nothing), result.query.text),
                Panel(shown(modal, amodal, result.mask_type), f"{result.mask_type} asked for"),
                Panel(shown(predicted_modal, predicted_amodal, said), caption),
            ]
        )
    return rows


# Charts


def calibration_curves(report: Mapping[str, Any]) -> Panels:
    """Makes panels of the mask-type probability and of the predicted IoU against what is true.

    Splits without them are left out.
    """
    measured = {}
    for name, figures in decided(report).items():
        error = format_figure(figures["ece"])
        measured[f"{name}, mask type, ECE {error}"] = figures["reliability"]
    for name, split in report["splits"].items():
        error = format_figure(split["predicted_iou"]["error"])
        measured[f"{name}, predicted IoU, error {error}"] = split["predicted_iou"]["curve"]
    panels = {}
    for title, points in measured.items():
        if points:
            curve = [(point["confidence"], point["accuracy"]) for point in points]
            panels[title] = {"ideal": [(0, 0), (1, 1)], "measured": curve}
    return panels


def training_curves(log: Path) -> Panels:
    """Reads the loss and the figures of the quick evaluations from the log of a run, if there is
    one."""
    rows: dict[int, dict[str, float]] = {}
    for line in log.read_text("utf-8").splitlines() if log.is_file() else ():
        # The last line may be half, where a run was killed.
        with suppress(ValueError):
            row = json.loads(line)
            # A run that was resumed has logged some steps twice, and a step may have two rows.
            rows.setdefault(row["step"], {}).update(row)
    panels: dict[str, dict[str, Curve]] = {}
    for title, names in LOGGED.items():
        for name in names:
            curve = [(step, rows[step][name]) for step in sorted(rows) if name in rows[step]]
            if curve:
                panels.setdefault(title, {})[name] = curve
    return panels


def draw_curves(panels: Panels) -> str:
    """Draws panels side by side as an SVG element."""
    # Text stays text.
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(3.6 * len(panels), 3.1), layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
            for label, curve in curves.items():
                axes.plot(*np.transpose(curve), marker=".", label=label)
            axes.set_title(title, fontsize=9)
            axes.legend(fontsize=8, frameon=False)
        content = io.StringIO()
        figure.savefig(content, format="svg")
    # An HTML page holds the element without the XML header before it.
    return "<svg" + content.getvalue().partition("<svg")[2]
