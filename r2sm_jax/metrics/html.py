"""A report as one self-contained HTML file, with pictures of the best, median and worst answers."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import matplotlib
import numpy as np
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Source
from r2sm_jax.data.sheet import GROUND, Panel, draw_panel, prediction_row
from r2sm_jax.errors import InputError
from r2sm_jax.metrics.pages import TYPES, interval_of, markdown, percent
from r2sm_jax.metrics.score import QueryResult, Scored, truths_at

PICTURE = 288
"""Pixels of a picture's longer side."""
Galleries = Mapping[str, Mapping[str, Sequence[Sequence[Panel]]]]
"""Rows of panels by split and title."""

LEGEND = (
    '<p class="legend"><i style="background:#1f6fd6"></i>visible'
    '<i style="background:repeating-linear-gradient(135deg,#f08416 0 3px,#f7bf85 3px 6px)"></i>occluded'
    '<i style="border:2px solid var(--ink)"></i>outlined: the mask that was asked for, or answered</p>'
)


def choose(scored: Scored, each: int = 4) -> dict[str, list[QueryResult]]:
    """The queries of the highest, the middle and the lowest IoU, each group of different images, and none twice."""
    iou = [r.answered.intersection / r.answered.union if r.answered.union else 1.0 for r in scored.results]
    order = [scored.results[i] for i in np.argsort(iou, kind="stable")]
    middle = len(order) // 2
    from_middle = [order[i] for i in sorted(range(len(order)), key=lambda i: abs(i - middle))]
    taken: set[int] = set()

    def first(candidates: Sequence[QueryResult]) -> list[QueryResult]:
        by_image = _by_image(scored, (r for r in candidates if r.query_id not in taken))
        found = [of_image[0] for of_image in by_image[:each]]
        taken.update(result.query_id for result in found)
        return found

    worst, best = first(order), first(order[::-1])
    return {"Best": best, "Median": first(from_middle), "Worst": worst}


def first_of_images(scored: Scored, count: int) -> list[QueryResult]:
    """One query of each of the first images: the first of the first image, the second of the second, ..."""
    by_image = _by_image(scored, scored.results)[:count]
    return [queries[i % len(queries)] for i, queries in enumerate(by_image)]


def _by_image(scored: Scored, results: Iterable[QueryResult]) -> list[list[QueryResult]]:
    found: dict[int, list[QueryResult]] = {}
    for result in results:
        found.setdefault(scored.drawings[result.query_id].index, []).append(result)
    return list(found.values())


def panels(source: Source, scored: Scored, results: Iterable[QueryResult]) -> list[list[Panel]]:
    """Image, truth and answer of each query. A missing image is left blank."""
    rows = []
    for result in results:
        drawing = scored.drawings[result.query_id]
        truth = next(t for t in truths_at(source, drawing.index) if t.query.id == result.query_id)
        modal, amodal, visible, whole = map(masks.decode, (truth.modal, truth.amodal, drawing.modal, drawing.amodal))
        try:
            image = source[truth.index].image
        except InputError:
            image = np.full((truth.height, truth.width, 3), GROUND, np.uint8)
        row = prediction_row(
            image, truth.query.text, result.mask_type, (modal, amodal & ~modal),
            result.decision, result.probability, (visible, whole & ~visible),
        )  # fmt: skip
        rows.append(row)
    return rows


def html(report: dict[str, Any], galleries: Galleries) -> str:
    """The whole page of a report."""
    title, _, tables = markdown(report).partition("\n## ")
    parts = [render(title), *_tiles(report["splits"])]
    for place, (split, groups) in enumerate(galleries.items()):
        title = f"<h2>{escape(split)}: best, median and worst answers</h2>"
        parts += [f"<details{'' if place else ' open'}><summary>{title}</summary>", LEGEND]
        for name, rows in groups.items():
            parts += [f"<h3>{escape(name)}</h3>", '<div class="cards">', *map(_card, rows), "</div>"]
        parts.append("</details>")
    parts += [render(f"## {tables}"), *_calibration(report["splits"])]
    return page("R2SM evaluation", "\n".join(parts))


def page(title: str, body: str) -> str:
    """A document around a body."""
    page, style = (files("r2sm_jax.metrics").joinpath(name).read_text() for name in ("report.html", "report.css"))
    return Template(page).substitute(title=escape(title), style=style, body=body)


def render(text: str) -> str:
    """Markdown as HTML; tables can be scrolled sideways on a narrow screen."""
    made = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    made = made.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return made.replace("</table>", "</table></div>")


def _tiles(splits: dict[str, Any]) -> list[str]:
    """The main figures of each split."""
    parts = []
    for name, split in splits.items():
        parts += [f"<h2>{escape(name)}, {split['all']['queries']:,} queries</h2>", '<div class="tiles">']
        shown = [(f"gIoU, {kind}", split[kind], "giou") for kind in TYPES]
        shown += [("cIoU, all", split["all"], "ciou"), ("occluded IoU", split["all"], "occluded_iou")]
        if split["mask_type"]["accuracy"] is not None:
            shown.append(("mask type right", split["mask_type"], "accuracy"))
        parts += [
            f'<div class="tile"><span>{label}</span><b>{percent(figures[key])}</b>'
            f"<span>{interval_of(figures, key)}&nbsp;</span></div>"
            for label, figures, key in shown
        ]
        parts.append("</div>")
    return parts


def _card(row: Sequence[Panel]) -> str:
    texts = ("", row[1].caption, row[2].caption)
    names = ("the image", "the truth", "the answer")
    figures = "".join(
        f'<figure><img alt="{name}" src="{_picture(panel)}"><figcaption>{escape(text)}</figcaption></figure>'
        for panel, text, name in zip(row, texts, names, strict=True)
    )
    return f'<div class="card"><q>{escape(row[0].text)}</q><div>{figures}</div></div>'


def _picture(panel: Panel) -> str:
    drawn = draw_panel(panel, PICTURE / max(panel.image.shape[:2]))
    buffer = io.BytesIO()
    Image.fromarray(drawn).save(buffer, "WEBP", quality=82)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _calibration(splits: dict[str, Any]) -> list[str]:
    """The reliability diagram of the splits whose decisions have probabilities."""
    known = {name: s["mask_type"] for name, s in splits.items() if s["mask_type"]["reliability"]}
    if not known:
        return []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}):
        figure = Figure(figsize=(3.2 * len(known), 3.2), layout="constrained")
        for axes, (name, scores) in zip(figure.subplots(1, len(known), squeeze=False)[0], known.items(), strict=True):
            bins = scores["reliability"]
            confidence, accuracy, counts = ([b[key] for b in bins] for key in ("confidence", "accuracy", "queries"))
            axes.plot([0.5, 1], [0.5, 1], color="#9aa0a8", linewidth=1, linestyle="--")
            axes.plot(confidence, accuracy, color="#1f6fd6", linewidth=1.2)
            sizes = [12 + 160 * count / max(counts) for count in counts]
            axes.scatter(confidence, accuracy, s=sizes, color="#1f6fd6", alpha=0.7)
            axes.set(xlim=(0.48, 1.02), ylim=(-0.02, 1.05), xlabel="confidence", ylabel="share right")
            axes.set_title(f"{name}, ECE {percent(scores['ece'])}", fontsize=9)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawn = buffer.getvalue()
    return [
        "<h2>Calibration of the mask-type probability</h2>",
        "<p>On the dashed line, accuracy equals confidence. Larger dots hold more queries.</p>",
        f'<div class="chart">{drawn[drawn.index("<svg") :]}</div>',
    ]
