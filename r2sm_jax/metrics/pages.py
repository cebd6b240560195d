"""A report as Markdown and as one self-contained HTML file.

The published figures of R2SM (arXiv 2506.01795, Tables 1 to 3) are shown only beside a split that has the benchmark's
own numbers of images and queries (Table 1), never beside other data.
"""

import base64
import io
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from r2sm_jax.metrics.score import QueryResult, Scored, truths_at

_FILES = files("r2sm_jax.metrics")
_PAPER = tomllib.loads(_FILES.joinpath("published.toml").read_text(encoding="utf-8"))

TABLE_1 = ("images", "instances", "amodal_queries", "modal_queries", "all_queries")
PUBLISHED: dict[str, dict[str, list[int]]] = _PAPER["table_1"]
"""Published counts by dataset and split, in the order of `TABLE_1`."""
TABLE_2: dict[str, dict[str, list[float]]] = _PAPER["table_2"]
"""By dataset and system: gIoU and cIoU of all queries, then of the amodal ones, in percent."""
TABLE_3: dict[str, dict[str, list[float]]] = _PAPER["table_3"]
"""By dataset and row: AP, AP50, AP75, APs, APm, APl and AR in percent."""
TYPES = ("all", "modal", "amodal")
MASKS = {
    "gIoU": "giou", "cIoU": "ciou", "occluded IoU": "occluded_iou", "occluded cIoU": "occluded_ciou",
    "complete IoU": "complete_iou", "boundary IoU": "boundary_iou", "wrong-type gap": "wrong_type_gap",
}  # fmt: skip
INSTANCES = {
    "AP": "ap", "AP50": "ap50", "AP75": "ap75", "APs": "ap_small", "APm": "ap_medium", "APl": "ap_large",
    "AR": "ar", "AR@1": "ar1", "AR@10": "ar10",
}  # fmt: skip
DECISIONS = {
    "accuracy": "accuracy", "of modal": "modal", "of amodal": "amodal", "F1": "f1", "MCC": "mcc", "ECE": "ece",
    "keyword rule": "keyword",
}  # fmt: skip
THERE = ("found, of what is there", "refused, of what is not", "error of the predicted IoU")
"""Columns of the tables with a row for each split, and for each type of query or for sentences without images."""
HASHES = {"weights": "weights_sha256", "predictions": "predictions_sha256", "language model": "language_model_sha256"}
DETAILS = 4
"""Number of tables at the end of a page that a brief page leaves out."""
PICTURE = 288
"""Pixels of a picture's longer side."""
Galleries = Mapping[str, Mapping[str, Sequence[Sequence[Panel]]]]
"""Rows of panels by split and title."""

LEGEND = (
    '<p class="legend"><i style="background:#1f6fd6"></i>visible'
    '<i style="background:repeating-linear-gradient(135deg,#f08416 0 3px,#f7bf85 3px 6px)"></i>occluded'
    '<i style="border:2px solid var(--ink)"></i>outlined: the mask that was asked for, or answered</p>'
)


def benchmark_of(*, images: int, modal: int, amodal: int) -> str | None:
    """The R2SM dataset whose validation split has these numbers of images and queries (Table 1)."""
    for name in TABLE_2:
        counts = dict(zip(TABLE_1, PUBLISHED[name]["val"], strict=True))
        if (counts["images"], counts["modal_queries"], counts["amodal_queries"]) == (images, modal, amodal):
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


def _cells(figures: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Figures as percent, with their intervals where they have one."""
    bounds = {name: interval_of(figures, name) for name in names}
    return [percent(figures[name]) + (f" ({shown})" if shown else "") for name, shown in bounds.items()]


def _published(table: dict[str, dict[str, list[float]]], dataset: str) -> list[list[str]]:
    return [
        [f"{dataset}, {system}", *(f"{value:.2f}" for value in values)]
        for system, values in table.get(dataset, {}).items()
    ]


def _mask_types(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of the decisions in each split, and in each list of sentences without images."""
    splits = {name: split["mask_type"] for name, split in report["splits"].items()} | report["sentences"]
    return {name: figures for name, figures in splits.items() if figures["accuracy"] is not None}


def _tables(report: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of each table."""
    splits, benchmark = report["splits"], report["meta"].get("benchmark", {})
    groups = [(f"{name}, {kind}", s[kind]) for name, s in splits.items() for kind in TYPES]
    rows = [[name, str(f["queries"]), *_cells(f, MASKS.values())] for name, f in groups]
    yield "Masks", ["", "queries", *MASKS], rows
    rows = [[name, f"{f['detections'] or 0:.1f}", *_cells(f, INSTANCES.values())] for name, f in groups]
    yield "Instances", ["", "detections a query", *INSTANCES], rows
    if decided := _mask_types(report):
        yield "Mask type", ["", *DECISIONS], [[name, *_cells(f, DECISIONS.values())] for name, f in decided.items()]
    rows = [
        [
            name,
            *(percent(f) for f in (gres["target_accuracy"], gres["no_target_accuracy"], s["predicted_iou"]["error"])),
        ]
        for name, s in splits.items()
        for gres in [s["variants"]["gres"]]
    ]
    yield "Is it there, and how good is the mask?", ["", *THERE], rows
    names = [name for name, f in next(iter(splits.values()))["references"].items() if f["giou"] is not None]
    rows = [
        [name, *(f"{percent(s['references'][r]['giou'])} / {percent(s['references'][r]['ciou'])}" for r in names)]
        for name, s in splits.items()
    ]
    title = "The same masks with another decision, and true masks of one type for all (gIoU / cIoU)"
    yield title, ["", *(name.replace("_", " ") for name in names)], rows
    rows = []
    for name, s in splits.items():
        rows.append([name, *(percent(s[kind][key]) for kind in ("all", "amodal") for key in ("giou", "ciou"))])
        rows += _published(TABLE_2, benchmark.get(name, ""))
    yield "R2SM, Table 2", ["", "All gIoU", "All cIoU", "Amodal gIoU", "Amodal cIoU"], rows
    columns = {label: key for label, key in INSTANCES.items() if "@" not in label}
    rows = []
    for name, s in splits.items():
        for kind in ("all", "amodal"):
            rows.append([f"{name}, {kind}", *(percent(s[kind][key]) for key in columns.values())])
        rows += _published(TABLE_3, benchmark.get(name, ""))
    yield "R2SM, Table 3", ["", *columns], rows
    rows = [
        [f"{name}, {variant}", percent(scores["giou"]), percent(scores.get("ciou"))]
        for name, s in splits.items()
        for variant, scores in s["variants"].items()
    ]
    yield "Other definitions of the same names", ["", "gIoU", "cIoU"], rows
    rows = [
        [f"{name}, {group}: {value}", str(f["queries"]), *(percent(f[key]) for key in ("giou", "ciou", "occluded_iou"))]
        for name, s in splits.items()
        for group, values in s["breakdowns"].items()
        for value, f in values.items()
    ]
    yield "Kinds of queries", ["", "queries", "gIoU", "cIoU", "occluded IoU"], rows


def described(report: dict[str, Any]) -> str:
    """A paragraph on the data, the model or file, and the settings of the evaluation."""
    meta = report["meta"]
    what = f"`{meta['source']}`"
    what += f", checkpoint at step {meta['step']}" if "step" in meta else f", predictions of `{meta['predictions']}`"
    what += f", variant `{meta['variant']}`, at {meta['resolution']} resolution"
    if meta.get("threshold") is not None:
        what += f", mask threshold {meta['threshold']}"
    data = [
        f"{name} {meta['images'][name]:,} images, {split['all']['queries']:,} queries "
        f"(`{meta['data_sha256'][name][:12]}`)"
        for name, split in report["splits"].items()
    ]
    others = [f"{name} `{meta[key][:12]}`" for name, key in HASHES.items() if meta.get(key)]
    return (
        f"{what}. All figures are percent, in brackets 95 % intervals over images.\n\n"
        f"Data (hash): {'; '.join(data)}. {'Hashes: ' + ', '.join(others) + '. ' if others else ''}"
        f"r2sm_jax {meta['version']}."
    )


def selection(report: Mapping[str, Any]) -> str:
    """On what the checkpoint was selected, and which splits hold images that the run was selected or trained on; "" for
    predictions of other systems, and for a checkpoint that was not selected."""
    meta, sentences = report["meta"], []
    own = meta.get("trained_on") == meta["source"]
    if chosen := meta.get("selected_on"):
        optimistic = ", which is reported here, as in the paper's protocol: its figures are optimistic"
        more = f" of `{meta['trained_on']}`" if not own else optimistic if chosen in report["splits"] else ""
        sentences.append(f"The checkpoint was selected on `{chosen}`{more}.")
    seen = [name for name in report["splits"] if own and name in ("all", "train")]
    return " ".join(sentences + [f"The run was trained on images of `{name}`." for name in seen])


def markdown(report: dict[str, Any], *, brief: bool = False) -> str:
    """The report as Markdown; `brief` leaves out the paper's columns, other definitions and kinds of queries."""
    meta = report["meta"]
    lines = ["# R2SM evaluation", "", described(report), ""]
    if text := selection(report):
        lines += [text, ""]
    if missing := meta.get("missing"):
        shown = ", ".join(map(str, missing[:10])) + (", .." if len(missing) > 10 else "")
        lines += [f"{len(missing)} queries have no prediction and count as answered with an empty mask: {shown}.", ""]
    for title, header, rows in list(_tables(report))[: -DETAILS if brief else None]:
        lines += [f"## {title}", "", *table(header, rows)]
    return "\n".join(lines)


# The page, with pictures of the best, median and worst answers


def choose(results: Sequence[QueryResult], each: int = 4) -> dict[str, list[QueryResult]]:
    """The queries of the highest, the middle and the lowest IoU, each group of different images, and none twice."""
    iou = [r.answered.intersection / r.answered.union if r.answered.union else 1.0 for r in results]
    order = np.argsort(iou, kind="stable")
    from_middle = sorted(range(len(order)), key=lambda i: abs(i - len(order) // 2))
    chosen, taken = {}, set()
    for title, places in {"Worst": order, "Best": order[::-1], "Median": order[from_middle]}.items():
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
    """The whole page of a report; a split without a gallery is said to have no images."""
    title, _, tables = markdown(report).partition("\n## ")
    parts = [render(title), *_tiles(report["splits"])]
    for place, (split, groups) in enumerate(galleries.items()):
        title = f"<h2>{escape(split)}: best, median and worst answers</h2>"
        parts += [f"<details{'' if place else ' open'}><summary>{title}</summary>", LEGEND]
        for name, rows in groups.items():
            parts += [f"<h3>{escape(name)}</h3>", '<div class="cards">', *map(_card, rows), "</div>"]
        parts.append("</details>")
    without = [escape(split) for split in report["splits"] if split not in galleries]
    parts += [f"<p>{split}: no answers are shown, since there are no images here.</p>" for split in without]
    parts += [render(f"## {tables}"), *_calibration(report)]
    return page("R2SM evaluation", "\n".join(parts))


def page(title: str, body: str) -> str:
    """A document around a body."""
    page, style = (_FILES.joinpath(name).read_text() for name in ("report.html", "report.css"))
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


def _calibration(report: dict[str, Any]) -> list[str]:
    """Reliability diagrams of the mask type and of the predicted IoU, where they are told."""
    types = {
        f"{name}, ECE {percent(figures['ece'])}": figures["reliability"]
        for name, figures in _mask_types(report).items()
        if figures["reliability"]
    }
    masks = {
        f"{name}, mean error {percent(split['predicted_iou']['error'])}": split["predicted_iou"]["curve"]
        for name, split in report["splits"].items()
        if split["predicted_iou"]["curve"]
    }
    return [
        *_chart("Calibration of the mask-type probability", types, 0.5, "confidence", "share right"),
        *_chart("Honesty of the predicted IoU", masks, 0.0, "predicted IoU", "true IoU"),
    ]


def _chart(heading: str, curves: dict[str, list[dict[str, float]]], least: float, x: str, y: str) -> list[str]:
    """A heading and a reliability diagram for each of `curves`, whose x axes begin at `least`."""
    if not curves:
        return []
    blue, buffer = "#1f6fd6", io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}):
        figure = Figure(figsize=(3.2 * len(curves), 3.2), layout="constrained")
        for axes, (title, bins) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
            confidence, accuracy, counts = ([b[key] for b in bins] for key in ("confidence", "accuracy", "queries"))
            axes.plot([least, 1], [least, 1], color="#9aa0a8", linewidth=1, linestyle="--")
            axes.plot(confidence, accuracy, color=blue, linewidth=1.2)
            axes.scatter(confidence, accuracy, [12 + 160 * c / max(counts) for c in counts], color=blue, alpha=0.7)
            axes.set(xlim=(least - 0.02, 1.02), ylim=(-0.02, 1.05), xlabel=x, ylabel=y)
            axes.set_title(title, fontsize=9)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return [
        f"<h2>{heading}</h2>",
        f"<p>On the dashed line, {y} equals {x}. Larger dots hold more queries.</p>",
        f'<div class="chart"><svg{buffer.getvalue().partition("<svg")[2]}</div>',
    ]
