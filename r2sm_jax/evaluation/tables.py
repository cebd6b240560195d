"""A report as Markdown and as one self-contained HTML file.

The published figures of R2SM (arXiv 2506.01795, Tables 1 to 3) are shown only beside a split that has the benchmark's
own numbers of images and queries (Table 1), never beside other data.
"""

import io
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import matplotlib
import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.images import data_url
from r2sm_jax.data.sheet import GROUND, Panel, draw_panel, prediction_row
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.scorer import QueryResult, Scored, truths_at

_FOLDER = files("r2sm_jax.evaluation")
_PAPER = tomllib.loads(_FOLDER.joinpath("published.toml").read_text(encoding="utf-8"))

TABLE_1 = ("images", "instances", "amodal_queries", "modal_queries", "all_queries")
PUBLISHED: dict[str, dict[str, list[int]]] = _PAPER["table_1"]
"""Published counts by dataset and split, in the order of `TABLE_1`."""
TABLE_2: dict[str, dict[str, list[float]]] = _PAPER["table_2"]
"""By dataset and system: gIoU and cIoU of all queries, then of the amodal ones, in percent."""
TABLE_3: dict[str, dict[str, list[float]]] = _PAPER["table_3"]
"""By dataset and row: AP, AP50, AP75, APs, APm, APl and AR in percent."""
TYPES = ("all", "modal", "amodal")
PICTURE = 288
"""Pixels of a picture's longer side."""
Galleries = Mapping[str, Mapping[str, Sequence[Sequence[Panel]]]]
"""Rows of panels by split and title."""


def benchmark_of(*, images: int, modal: int, amodal: int) -> str | None:
    """The R2SM dataset whose validation split has these numbers of images and queries (Table 1)."""
    for name in TABLE_2:
        counts = dict(zip(TABLE_1, PUBLISHED[name]["val"], strict=True))
        if (counts["images"], counts["modal_queries"], counts["amodal_queries"]) == (
            images,
            modal,
            amodal,
        ):
            return name
    return None


def percent(value: float | None) -> str:
    """A fraction as percent with two decimals; a dash where it is undefined."""
    return "–" if value is None else f"{100 * value:.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def interval_of(figures: dict[str, Any], name: str) -> str:
    """The interval of a figure as percent; nothing where it has none."""
    bounds = figures["interval"].get(name)
    return "" if bounds is None else f"{percent(bounds[0])}-{percent(bounds[1])}"


def cells(figures: dict[str, Any], names: Iterable[str]) -> str:
    """Cells of a Markdown table: figures as percent, with their intervals where they have one."""
    bounds = {name: interval_of(figures, name) for name in names}
    return " | ".join(
        percent(figures[name]) + (f" ({shown})" if shown else "") for name, shown in bounds.items()
    )


def _mask_types(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of the decisions in each split, and in each list of sentences without images."""
    splits = {name: split["mask_type"] for name, split in report["splits"].items()} | report[
        "sentences"
    ]
    return {name: figures for name, figures in splits.items() if figures["accuracy"] is not None}


def selection(report: Mapping[str, Any]) -> str:
    """On what the checkpoint was selected, and which splits hold images that the run was selected or trained on; "" for
    predictions of other systems, and for a checkpoint that was not selected."""
    meta, sentences = report["meta"], []
    own = meta.get("trained_on") == meta["source"]
    if chosen := meta.get("selected_on"):
        optimistic = (
            ", which is reported here, as in the paper's protocol: its figures are optimistic"
        )
        more = (
            f" of `{meta['trained_on']}`"
            if not own
            else optimistic
            if chosen in report["splits"]
            else ""
        )
        sentences.append(f"The checkpoint was selected on `{chosen}`{more}.")
    seen = [name for name in report["splits"] if own and name in ("all", "train")]
    return " ".join(sentences + [f"The run was trained on images of `{name}`." for name in seen])


def markdown(report: dict[str, Any], *, brief: bool = False) -> str:
    """The report as Markdown; `brief` leaves out the paper's columns, other definitions and kinds of queries."""
    template = TEMPLATES.get_template("report.md")
    return template.render(
        report, brief=brief, selection=selection(report), decided=_mask_types(report)
    )


# The page, with pictures of the best, median and worst answers


def choose(results: Sequence[QueryResult], each: int = 4) -> dict[str, list[QueryResult]]:
    """The queries of the highest, the middle and the lowest IoU, each group of different images, and none twice."""
    iou = [r.answered.intersection / r.answered.union if r.answered.union else 1.0 for r in results]
    order = np.argsort(iou, kind="stable")
    from_middle = sorted(range(len(order)), key=lambda i: abs(i - len(order) // 2))
    chosen, taken = {}, set()
    for title, places in {
        "Worst": order,
        "Best": order[::-1],
        "Median": order[from_middle],
    }.items():
        by_image = _by_image(results[i] for i in places if results[i].query_id not in taken)
        chosen[title] = [of_image[0] for of_image in by_image[:each]]
        taken |= {result.query_id for result in chosen[title]}
    return {title: chosen[title] for title in ("Best", "Median", "Worst")}


def first_of_images(results: Sequence[QueryResult], count: int) -> list[QueryResult]:
    """One query of each of the first images: the first of the first image, the second of the second, ..."""
    by_image = _by_image(results)[:count]
    return [queries[i % len(queries)] for i, queries in enumerate(by_image)]


def _by_image(results: Iterable[QueryResult]) -> list[list[QueryResult]]:
    found: dict[int, list[QueryResult]] = {}
    for result in results:
        found.setdefault(result.image_id, []).append(result)
    return list(found.values())


def panels(source: Source, scored: Scored, results: Iterable[QueryResult]) -> list[list[Panel]]:
    """Image, truth and answer of each query. A missing image is left blank."""
    rows = []
    for result in results:
        drawing = scored.drawings[result.query_id]
        truth = next(t for t in truths_at(source, drawing.index) if t.query.id == result.query_id)
        modal, amodal, visible, whole = map(
            masks.decode, (truth.modal, truth.amodal, drawing.modal, drawing.amodal)
        )
        try:
            image = source[truth.index].image
        except InputError:
            image = np.full((truth.height, truth.width, 3), GROUND, np.uint8)
        rows.append(
            prediction_row(
                image,
                truth.query.text,
                result.mask_type,
                (modal, amodal & ~modal),
                result.decision,
                result.probability,
                (visible, whole & ~visible),
            )
        )
    return rows


def html(report: dict[str, Any], galleries: Galleries) -> str:
    """The whole page of a report; a split without a gallery is said to have no images."""
    intro, _, tables = markdown(report).partition("\n## ")
    reliability = {
        f"{name}, ECE {percent(figures['ece'])}": figures["reliability"]
        for name, figures in _mask_types(report).items()
        if figures["reliability"]
    }
    honesty = {
        f"{name}, mean error {percent(split['predicted_iou']['error'])}": split["predicted_iou"][
            "curve"
        ]
        for name, split in report["splits"].items()
        if split["predicted_iou"]["curve"]
    }
    return TEMPLATES.get_template("report.html").render(
        report,
        galleries=galleries,
        intro=intro,
        tables=f"## {tables}",
        reliability=reliability,
        honesty=honesty,
    )


def page(title: str, body: str) -> str:
    """A document around a body, which is HTML."""
    return TEMPLATES.get_template("page.html").render(title=title, body=body)


def render(text: str) -> str:
    """Markdown as HTML; tables can be scrolled sideways on a narrow screen."""
    made = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    made = made.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return made.replace("</table>", "</table></div>")


def picture(panel: Panel) -> str:
    """A panel's image with its masks as an address that holds all of it."""
    return data_url(draw_panel(panel, PICTURE / max(panel.image.shape[:2])), "WEBP", quality=82)


def chart(curves: dict[str, list[dict[str, float]]], least: float, x: str, y: str) -> str:
    """A reliability diagram for each of `curves` as SVG; the x axes begin at `least`."""
    blue, buffer = "#1f6fd6", io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}):
        figure = Figure(figsize=(3.2 * len(curves), 3.2), layout="constrained")
        for axes, (title, bins) in zip(
            figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
        ):
            confidence, accuracy, counts = (
                [b[key] for b in bins] for key in ("confidence", "accuracy", "queries")
            )
            axes.plot([least, 1], [least, 1], color="#9aa0a8", linewidth=1, linestyle="--")
            axes.plot(confidence, accuracy, color=blue, linewidth=1.2)
            axes.scatter(
                confidence,
                accuracy,
                [12 + 160 * c / max(counts) for c in counts],
                color=blue,
                alpha=0.7,
            )
            axes.set(xlim=(least - 0.02, 1.02), ylim=(-0.02, 1.05), xlabel=x, ylabel=y)
            axes.set_title(title, fontsize=9)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "<svg" + buffer.getvalue().partition("<svg")[2]


TEMPLATES = Environment(
    loader=FunctionLoader(lambda name: _FOLDER.joinpath(name).read_text(encoding="utf-8")),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
"""The templates of this folder, which can call these functions."""
TEMPLATES.globals |= {"TYPES": TYPES, "TABLE_2": TABLE_2, "TABLE_3": TABLE_3}
TEMPLATES.globals |= {f.__name__: f for f in (cells, chart, interval_of, percent, picture, render)}
