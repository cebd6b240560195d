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
from r2sm_jax.data.images import data_url
from r2sm_jax.data.sheet import BLANK, Panel, paint
from r2sm_jax.errors import InputError, atomic_write, write_json
from r2sm_jax.evaluation.compare import QUERIES_FILE
from r2sm_jax.evaluation.counts import overlap_of_rows, write_tables
from r2sm_jax.evaluation.iou import lisa_iou
from r2sm_jax.evaluation.scorer import EvalResults, Evaluated
from r2sm_jax.evaluation.tables import (
    decided,
    format_figure,
    report_intro,
    report_markdown,
    report_tables,
)
from r2sm_jax.markdown import Table

PICTURE_SIZE = 288
"""Pixels of a picture's longer side."""
MAX_EXAMPLES = 4
"""Of the best, of the middle and of the worst answers."""
LOGGED = ("train/loss", "giou", "type_accuracy")
"""Curves of the chart of a training: names in the log, or their ends after that of a split."""

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
        examples = select_examples(results) if results.source.has_images else {}
        galleries[name] = {
            title: example_rows(results, chosen) for title, chosen in examples.items()
        }
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
    with atomic_write(folder / "report.html") as part:
        part.write_text(page, "utf-8")
        write_json(folder / "report.json", report)
        (folder / "report.md").write_text(report_markdown(report), "utf-8")
        tables = {name: results.rows for name, results in evaluated.items()}
        write_tables(folder / QUERIES_FILE, tables)


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


def select_examples(results: EvalResults) -> dict[str, list[int]]:
    """Selects the answers of the highest, the middle and the lowest IoU, each at most once. Returns
    their indices."""
    ranked = np.argsort(-lisa_iou(overlap_of_rows(results.rows)), kind="stable").tolist()
    count = min(MAX_EXAMPLES, -(-len(ranked) // 3))
    others = ranked[: len(ranked) - count]
    best, middle = others[:count], others[count:]
    skipped = max(0, len(middle) - count) // 2
    return {
        "Best": best,
        "Median": middle[skipped : skipped + count],
        "Worst": ranked[len(ranked) - count :],
    }


def sample_queries(results: EvalResults, count: int) -> list[int]:
    """Selects one query of each of the first `count` images. Returns their indices.

    It is the first query of the first image, the second of the second, and so on, so that different
    kinds of queries are seen.
    """
    by_image: dict[int, list[int]] = {}
    for index, result in enumerate(results.results):
        by_image.setdefault(result.truth.image_id, []).append(index)
    groups = list(by_image.values())[:count]
    return [of_image[i % len(of_image)] for i, of_image in enumerate(groups)]


def example_rows(results: EvalResults, chosen: Iterable[int]) -> list[list[Panel]]:
    """Makes a row of image, truth and prediction for each of the chosen queries.

    Only the image is read from the source, since results hold the masks. An image that is missing
    is left blank.
    """
    ious = lisa_iou(overlap_of_rows(results.rows))
    rows = []
    for index in chosen:
        truth, answer, _ = results.results[index]
        size = truth.size
        image = np.full((*size, 3), BLANK, np.uint8)
        with suppress(InputError):
            image = results.source[truth.index].image
        caption = f"{answer.mask_type or 'no decision'}, IoU {ious[index]:.2f}"
        if answer.amodal_probability is not None:
            caption += f", probability of amodal {answer.amodal_probability:.2f}"
        modal, amodal = map(masks.decode, truth.masks)
        predicted = answer.both or (answer.mask, answer.mask)
        predicted_modal, predicted_amodal = map(masks.decode, predicted)
        nothing = np.zeros_like(modal)
        shown = partial(paint, image, ratio=PICTURE_SIZE / max(size))
        asked = truth.query.mask_type
        rows.append(
            [
                Panel(shown(nothing, nothing), truth.query.text),
                Panel(shown(modal, amodal, asked), f"{asked} asked for"),
                Panel(shown(predicted_modal, predicted_amodal, answer.mask_type), caption),
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
    for logged in LOGGED:
        for name in dict.fromkeys(name for row in rows.values() for name in row):
            split, _, figure = name.partition("/")
            if logged in (name, figure):
                curve = [(step, rows[step][name]) for step in sorted(rows) if name in rows[step]]
                panels.setdefault("loss" if logged == name else split, {})[name] = curve
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
