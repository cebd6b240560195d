"""A report as one HTML file that needs nothing else: pictures are inside it."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from PIL import Image

from r2sm_jax.data.sheet import Panel, draw_panel
from r2sm_jax.metrics.pages import TYPES, interval_of, markdown, percent

PICTURE = 288
"""Pixels of a picture's longer side."""
Galleries = Mapping[str, Mapping[str, Sequence[Sequence[Panel]]]]
"""Rows of panels by split and title."""

STYLE = """
:root { --ink: #1c1e22; --faint: #61666e; --ground: #fff; --card: #f5f6f7; --line: #dcdfe3; --accent: #1f6fd6;
  --occluded: #f08416; color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --faint: #a2a8b0; --ground: #15171a; --card: #202327;
  --line: #363b41; --accent: #6ea8f2 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1200px; padding: 24px 20px 64px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 19px; margin: 40px 0 12px; text-wrap: balance }
h3 { font-size: 15px; margin: 20px 0 8px; color: var(--faint) }
p { margin: 8px 0; overflow-wrap: anywhere; color: var(--faint) } code { color: var(--ink); font-size: .92em }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: 6px 8px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { color: var(--faint); font-weight: 600 } tr:last-child td { border-bottom: 0 }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--ground) }
tbody tr:hover td { background: var(--card) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px }
.tile { background: var(--card); border-radius: 8px; padding: 10px 14px }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums }
.tile span { color: var(--faint); font-size: 12.5px }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 14px }
.card { background: var(--card); border-radius: 8px; padding: 12px 14px; min-width: 0 }
.card q { font-weight: 600; overflow-wrap: anywhere }
.card div { display: grid; grid-template-columns: repeat(3, 1fr); gap: 8px; margin-top: 8px; align-items: start }
figure { margin: 0 } img { width: 100%; height: auto; border-radius: 4px; display: block }
figcaption { font-size: 12px; line-height: 1.35; color: var(--faint); margin-top: 4px }
.legend i { display: inline-block; width: 14px; height: 10px; border-radius: 2px; margin: 0 5px 0 14px }
.legend i:first-child { margin-left: 0 }
details { margin-top: 32px } summary { cursor: pointer } summary h2 { display: inline; margin: 0 }
.chart { max-width: 720px } .chart svg { width: 100%; height: auto; background: #fff; border-radius: 8px }
@media (max-width: 520px) { body { padding: 16px 12px 48px } h1 { font-size: 22px } th, td { padding: 6px 8px }
  .tiles { grid-template-columns: 1fr 1fr } .tile b { font-size: 21px } .card { padding: 10px }
  .card div { gap: 6px } td:first-child, th:first-child { white-space: normal; min-width: 92px } }
"""
LEGEND = (
    '<p class="legend"><i style="background:#1f6fd6"></i>visible'
    '<i style="background:repeating-linear-gradient(135deg,#f08416 0 3px,#f7bf85 3px 6px)"></i>occluded'
    '<i style="border:2px solid var(--ink)"></i>outlined: the mask that was asked for, or answered</p>'
)


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
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def render(text: str) -> str:
    """Markdown as HTML; tables can be scrolled sideways on a narrow screen."""
    made = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    made = made.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return made.replace("</table>", "</table></div>")


def _tiles(splits: dict[str, Any]) -> list[str]:
    """The headline figures of each split."""
    parts = []
    for name, split in splits.items():
        parts += [f"<h2>{escape(name)}, {split['all']['queries']:,} queries</h2>", '<div class="tiles">']
        figures = [
            *((f"gIoU, {kind}", *_value(split[kind], "giou")) for kind in TYPES),
            ("cIoU, all", *_value(split["all"], "ciou")),
            ("occluded IoU", *_value(split["all"], "occluded_iou")),
        ]
        if split["mask_type"]["accuracy"] is not None:
            figures.append(("mask type right", *_value(split["mask_type"], "accuracy")))
        for label, value, bounds in figures:
            parts.append(f'<div class="tile"><span>{label}</span><b>{value}</b><span>{bounds}&nbsp;</span></div>')
        parts.append("</div>")
    return parts


def _value(figures: dict[str, Any], name: str) -> tuple[str, str]:
    return percent(figures[name]), interval_of(figures, name)


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
    known = {name: s["mask_type"]["reliability"] for name, s in splits.items() if s["mask_type"]["reliability"]}
    if not known:
        return []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}):
        figure = Figure(figsize=(3.2 * len(known), 3.2), layout="constrained")
        for place, (name, bins) in enumerate(known.items(), start=1):
            axes = figure.add_subplot(1, len(known), place)
            axes.plot([0.5, 1], [0.5, 1], color="#9aa0a8", linewidth=1, linestyle="--")
            confidence, accuracy = [b["confidence"] for b in bins], [b["accuracy"] for b in bins]
            largest = max(b["queries"] for b in bins)
            sizes = [12 + 160 * b["queries"] / largest for b in bins]
            axes.plot(confidence, accuracy, color="#1f6fd6", linewidth=1.2)
            axes.scatter(confidence, accuracy, s=sizes, color="#1f6fd6", alpha=0.7)
            axes.set(xlim=(0.48, 1.02), ylim=(-0.02, 1.05), xlabel="confidence", ylabel="share right")
            axes.set_title(f"{name}, ECE {percent(splits[name]['mask_type']['ece'])}", fontsize=9)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawn = buffer.getvalue()
    return [
        "<h2>How far the probability of the mask type means what it says</h2>",
        "<p>On the dashed line decisions are right as often as they are sure. Larger dots hold more queries.</p>",
        f'<div class="chart">{drawn[drawn.index("<svg") :]}</div>',
    ]
