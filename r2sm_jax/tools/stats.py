"""What is in a data source: the counts of the R2SM paper's Table 1, what they leave out, and histograms.

A dataset file is counted from its records, one mask at a time; images are never opened.
"""

import json
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.progress import announce
from r2sm_jax.data.records import read_records
from r2sm_jax.data.samples import annotation_masks, images_of_split
from r2sm_jax.data.sheet import FAINT, INK, OCCLUDED, VISIBLE
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.metrics.published import PUBLISHED, TABLE_1
from r2sm_jax.query import Query, keyword_mask_type
from r2sm_jax.sources import SPLITS, open_source

OTHERS = {
    "images_without_query": "images",
    "queries_without_target": "all_queries",
    "queries_of_several_instances": "all_queries",
    "modal_queries_against_keyword_rule": "modal_queries",
    "amodal_queries_against_keyword_rule": "amodal_queries",
    "instances_with_known_amodal": "instances",
    "instances_with_unknown_amodal": "instances",
    "occluded_instances": "instances_with_known_amodal",
    "occluded_by_more_than_0.15": "instances_with_known_amodal",
}
"""What else is counted, and the count that it is a share of."""


class Bins(NamedTuple):
    """A histogram's bins. Each takes in its upper edge; the last has none."""

    title: str
    edges: tuple[float, ...]
    labels: tuple[str, ...]
    series: tuple[str, ...] = ("modal", "amodal")

    def label(self, value: float) -> str:
        return self.labels[bisect_left(self.edges, value)]


HISTOGRAMS = {
    "occlusion_rate": Bins("occlusion rate", (0, 0.15, 0.25, 0.40),
                           ("0", "0-0.15", "0.15-0.25", "0.25-0.40", "0.40-1"), ("instances",)),
    "area_share": Bins("share of the image", (0.01, 0.05, 0.10, 0.25, 0.50),
                       ("0-1 %", "1-5 %", "5-10 %", "10-25 %", "25-50 %", "50-100 %")),
    # COCO's sizes: below 32², below 96², and more pixels.
    "coco_size": Bins("mask size", (32**2 - 1, 96**2 - 1), ("small", "medium", "large")),
    "words": Bins("words in a query", (4, 8, 12, 16, 20, 30),
                  ("1-4", "5-8", "9-12", "13-16", "17-20", "21-30", "31 or more")),
    "instances_per_query": Bins("instances in a query", (0, 1, 2, 3, 4), ("0", "1", "2", "3", "4", "5 or more")),
}  # fmt: skip
FILES = ("stats.json", "stats.md", "stats.png")

Counts = Counter[str | tuple[str, ...]]
"""How often each thing occurs; a tuple names a thing and its kind."""


def stats(
    data: Positional[tuple[str, ...]],
    /,
    splits: tuple[str, ...] = (),
    compare: Literal["cocoa-cls", "d2sa", "muva", "total"] | None = None,
    scenes: int = 256,
    out: Path | None = None,
    overwrite: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Counts images, instances and queries by split, as the R2SM paper's Table 1 does, and draws histograms.

    Images are not needed. Regions marked `ignore` are no instances.

    Args:
        data: What to count: scenes, json:FILE, json:FOLDER, or a path to a .json file or a folder of them.
        splits: The splits to count, such as train val; without it, all that there are. A single file is counted whole
            ("all"), or with "train val" as training divides it.
        compare: Put the counts that the paper states for this dataset beside, and mark differences.
        scenes: How many procedural scenes to draw for a split.
        out: Folder to write stats.json, stats.md and stats.png into.
        overwrite: Replace these files if they exist.
        as_json: Print one JSON object instead of tables.
    """
    if not data or scenes < 1:
        raise InputError("stats: nothing to count; give scenes, json:FILE or json:FOLDER, and --scenes 1 or more")
    chosen = {spec: _choose_splits(spec, splits) for spec in data}
    files = [path for found in chosen.values() for path in {part.path.resolve() for part in found.values() if part}]
    if len(chosen) < len(data) or len(set(files)) < len(files):
        raise InputError(f"stats: {' '.join(data)} would count the same data twice; give it once")
    if compare and not any({"train", "val"} & found.keys() for found in chosen.values()):
        raise InputError(f"--compare {compare}: the paper counts train and val; give a folder with these splits")
    if out is not None:
        if out.is_file():
            raise InputError(f"--out {out}: this is a file; give a folder")
        if out.resolve() in {path.parent for path in files}:
            raise InputError(f"--out {out}: there stats.json would pass for a split of the data; give another folder")
        for name in FILES:
            refuse_overwrite(out / name, overwrite)
    counts = {
        spec: {s: count_file(*part) if part else count_scenes(s, scenes) for s, part in found.items()}
        for spec, found in chosen.items()
    }
    report = make_report(counts, compare)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    if out is not None:
        _write(out, report)
        print(f"wrote {', '.join(str(out / name) for name in FILES)}", file=sys.stderr)


class Part(NamedTuple):
    """A dataset file, and what is counted of it: "all", or the images that it has for "train" or "val"."""

    path: Path
    split: str = "all"


def count_file(path: Path, split: str = "all") -> Counts:
    """The counts of one dataset file or of one of its splits. Raises InputError for one that is missing or damaged."""
    records = read_records(path)
    counts: Counts = Counter()
    sizes = {image["id"]: (image["height"], image["width"]) for image in records["images"]}
    chosen = images_of_split(path, tuple(sizes), split)
    sizes = {image_id: size for image_id, size in sizes.items() if image_id in chosen}
    annotations, queries = ([r for r in records[key] if r["image_id"] in sizes] for key in ("annotations", "queries"))
    counts["images"] = len(sizes)
    counts["images_without_query"] = len(sizes.keys() - {query["image_id"] for query in queries})
    for annotation in announce(annotations, f"{path}: annotations"):
        if annotation.get("ignore", False):
            counts["ignore_regions"] += 1
        else:
            _count_instance(counts, *annotation_masks(path, annotation, *sizes[annotation["image_id"]]))
    for q in queries:
        _count_query(counts, Query(q["id"], q["text"], q["mask_type"], tuple(q["instance_ids"]), q.get("kind") or {}))
    return counts


def count_scenes(split: str, number: int) -> Counts:
    """The counts of the first `number` procedural scenes of a split."""
    source = open_source("scenes", split, count=number)
    counts: Counts = Counter()
    for index in announce(range(number), f"scenes, {split}"):
        sample = source[index]
        counts["images"] += 1
        counts["images_without_query"] += not sample.queries
        for instance in sample.instances:
            _count_instance(counts, instance.modal, instance.amodal)
        for query in sample.queries:
            _count_query(counts, query)
    return counts


def make_report(counts: Mapping[str, Mapping[str, Counts]], compare: str | None = None) -> dict[str, Any]:
    """The figures of counts by source and split: for each, for every split of all sources together, and in total.

    With `compare`, `published` holds what the paper states for the splits, and for their total where it states all.
    """
    splits: dict[str, Counts] = {}
    for found in counts.values():
        for split, part in found.items():
            splits.setdefault(split, Counter()).update(part)
    report: dict[str, Any] = {
        "sources": {spec: {split: _figures(c) for split, c in found.items()} for spec, found in counts.items()},
        "splits": {split: _figures(c) for split, c in splits.items()},
        "total": _figures(sum(splits.values(), Counter())),
    }
    if compare is not None:
        stated = {s: dict(zip(TABLE_1, n, strict=True)) for s, n in PUBLISHED[compare].items() if s in splits}
        total = {name: sum(counts[name] for counts in stated.values()) for name in TABLE_1}
        whole = len(stated) == len(splits)
        report["published"] = {"dataset": compare, "splits": stated, "total": total if whole else None}
    return report


def markdown(report: dict[str, Any]) -> str:
    """The report as a page of tables."""
    lines = ["# Dataset statistics", ""]
    for title, header, rows in _tables(report):
        lines += [f"## {title}", "", f"| | {' | '.join(header)} |", "|---" + "|---:" * len(header) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows] + [""]
    return "\n".join(lines)


def draw(figures: dict[str, Any], title: str) -> bytes:
    """A PNG of four histograms: occlusion rate, mask size, query length and instances per query."""
    from matplotlib.figure import Figure  # takes seconds to import, which only this function should cost

    histograms, known = figures["histograms"], figures["instances_with_known_amodal"]
    ink, faint, blue, orange = (tuple(channel / 255 for channel in rgb) for rgb in (INK, FAINT, VISIBLE, OCCLUDED))
    colours = {"modal": blue, "amodal": orange, "instances": faint}
    by_size = ", ".join(f"{_percent(n, known)} {name}" for name, n in histograms["coco_size"]["amodal"].items())
    panels = (
        ("occlusion_rate", "How much of an instance is hidden", "instances",
         f"{_percent(figures['occluded_instances'], known)} of {known:,} are occluded"),
        ("area_share", "How large masks are", "masks", f"amodal masks by COCO: {by_size}"),
        ("words", "How long queries are", "queries",
         f"{figures['modal_queries']:,} modal, {figures['amodal_queries']:,} amodal"),
        ("instances_per_query", "How many instances a query means", "queries",
         f"{figures['queries_without_target']:,} mean none, {figures['queries_of_several_instances']:,} several"),
    )  # fmt: skip
    page = Figure(figsize=(11, 7.8), dpi=150, facecolor="white")
    page.subplots_adjust(left=0.065, right=0.98, top=0.84, bottom=0.07, hspace=0.52, wspace=0.16)
    axes = page.subplots(2, 2).ravel()
    for ax, (name, heading, unit, note) in zip(axes, panels, strict=True):
        series = histograms[name]
        width = 0.8 / len(series)
        for number, (kind, bins) in enumerate(series.items()):
            values = np.array(list(bins.values()), float)
            places = np.arange(len(bins)) + (number - (len(series) - 1) / 2) * width
            bars = ax.bar(places, 100 * values / max(1, values.sum()), 0.94 * width, color=colours[kind], label=kind)
            ax.bar_label(bars, [f"{v:,.0f}" if v else "" for v in values], padding=2, fontsize=7, color=faint)
        labels = [label.replace("-", "–").replace(" or more", "+") for label in HISTOGRAMS[name].labels]
        ax.set(xticks=range(len(labels)), xticklabels=labels, ylim=(0, max(1.12 * ax.dataLim.ymax, 1)))
        ax.set(xlabel=HISTOGRAMS[name].title, ylabel=f"% of {unit}", axisbelow=True)
        ax.set_title(heading, loc="left", fontsize=11, fontweight="bold", color=ink, pad=22)
        ax.text(0, 1.035, note, transform=ax.transAxes, fontsize=8.5, color=faint)
        ax.tick_params(labelsize=8.5, length=0, colors=ink)
        ax.grid(axis="y", color="#e4e6e8", linewidth=0.8)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color("#b4b8bc")
    title = title if len(title) <= 64 else f"…{title[-63:]}"
    page.text(0.065, 0.955, title, fontsize=14, fontweight="bold", color=ink, va="center", parse_math=False)
    page.legend(*axes[1].get_legend_handles_labels(), loc="center right", bbox_to_anchor=(0.985, 0.955),
                ncols=2, frameon=False, fontsize=9.5, handlelength=1.1, handleheight=0.9)  # fmt: skip
    content = BytesIO()
    page.savefig(content, format="png")
    return content.getvalue()


def _choose_splits(spec: str, wanted: Sequence[str]) -> dict[str, Part | None]:
    """The splits of a source with their files, none for scenes; those `wanted`, or else all."""
    path = Path(spec.removeprefix("json:"))
    if spec == "scenes":
        found: dict[str, Part | None] = dict.fromkeys(SPLITS)
    elif spec == "json:" or not (spec.startswith("json:") or path.exists() or path.suffix == ".json"):
        raise InputError(f"data source {spec!r} is unknown; use scenes, json:FILE or json:FOLDER")
    elif path.is_dir():
        found = {file.stem: Part(file) for file in sorted(path.glob("*.json"))}
        if not found:
            raise InputError(f"{path}: there is no .json file in this folder; give one with train.json, val.json, ...")
    else:
        found = {split: Part(path, split) for split in ("all", "train", "val")}
        if "all" in wanted and len(wanted) > 1:
            raise InputError(f"--splits {' '.join(wanted)}: all of {spec} are train and val together; give either")
        wanted = wanted or ("all",)
    for split in wanted:
        if split not in found:
            raise InputError(f"--splits {split}: {spec} has only {', '.join(found)}; choose of these, or give a folder")
    return {split: found[split] for split in wanted or found}


def _count_instance(counts: Counts, modal: masks.Mask, amodal: masks.Mask | None) -> None:
    areas = {"modal": masks.area(modal)}
    counts["instances"] += 1
    counts[f"instances_with_{'unknown' if amodal is None else 'known'}_amodal"] += 1
    if amodal is not None:
        areas["amodal"] = masks.area(amodal)
        rate = (areas["amodal"] - areas["modal"]) / max(1, areas["amodal"])
        counts["occluded_instances"] += rate > 0
        counts["occluded_by_more_than_0.15"] += rate > 0.15
        counts["occlusion_rate", "instances", HISTOGRAMS["occlusion_rate"].label(rate)] += 1
    for kind, area in areas.items():
        for name, value in (("area_share", area / modal.size), ("coco_size", area)):
            counts[name, kind, HISTOGRAMS[name].label(value)] += 1


def _count_query(counts: Counts, query: Query) -> None:
    mask_type, meant = query.mask_type, len(set(query.instance_ids))
    counts["all_queries"] += 1
    counts[f"{mask_type}_queries"] += 1
    counts["queries_without_target"] += meant == 0
    counts["queries_of_several_instances"] += meant > 1
    counts[f"{mask_type}_queries_against_keyword_rule"] += keyword_mask_type(query.text) != mask_type
    counts["tasks", str(query.kind.get("task") or "not stated")] += 1
    for name, value in (("words", len(query.text.split())), ("instances_per_query", meant)):
        counts[name, mask_type, HISTOGRAMS[name].label(value)] += 1


def _figures(counts: Counts) -> dict[str, Any]:
    """The counts of one split as they stand in the JSON."""
    figures: dict[str, Any] = {name: counts[name] for name in (*TABLE_1, *OTHERS, "ignore_regions")}
    figures["shares"] = {name: counts[name] / counts[of] if counts[of] else None for name, of in OTHERS.items()}
    figures["tasks"] = dict(sorted((key[1], number) for key, number in counts.items() if key[0] == "tasks"))
    figures["histograms"] = {
        name: {kind: {label: counts[name, kind, label] for label in bins.labels} for kind in bins.series}
        for name, bins in HISTOGRAMS.items()
    }
    return figures


def _tables(report: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of every table; a row starts with its name."""
    published = report.get("published")
    columns = [(split, f, published and published["splits"].get(split)) for split, f in report["splits"].items()]
    if len(columns) > 1:
        columns.append(("total", report["total"], published and published["total"]))
    header, every = [name for name, _, _ in columns], [figures for _, figures, _ in columns]
    if len(report["sources"]) > 1:
        for spec, splits in report["sources"].items():
            yield spec, list(splits), [[_words(n), *(f"{f[n]:,}" for f in splits.values())] for n in TABLE_1]
    source = "all sources" if len(report["sources"]) > 1 else next(iter(report["sources"]))
    title = f"{source}, beside {published['dataset']} as published" if published else source
    rows = [[_words(n), *(_beside(f[n], stated and stated[n]) for _, f, stated in columns)] for n in TABLE_1]
    yield title, header, rows
    rows = [
        [_words(name), *(f"{f[name]:,} ({_percent(f[name], f[of])})" for f in every)] for name, of in OTHERS.items()
    ]
    rows.append(["ignore regions", *(f"{f['ignore_regions']:,}" for f in every)])
    for task in report["total"]["tasks"]:
        numbers = [(f["tasks"].get(task, 0), f["all_queries"]) for f in every]
        rows.append([f"task: {task}", *(f"{number:,} ({_percent(number, of)})" for number, of in numbers)])
    yield "Besides", header, rows
    rows = []
    for name, bins in HISTOGRAMS.items():
        for n in bins.labels:
            cells = [" / ".join(f"{f['histograms'][name][kind][n]:,}" for kind in bins.series) for f in every]
            rows.append([f"{bins.title}: {n}", *cells])
    yield "Histograms (modal / amodal)", header, rows


def _words(name: str) -> str:
    return name.replace("_", " ")


def _beside(count: int, stated: int | None) -> str:
    if stated is None or count == stated:
        return f"{count:,}" if stated is None else f"{count:,} (as published)"
    return f"{count:,} (published {stated:,}, {count - stated:+,})"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _write(out: Path, report: dict[str, Any]) -> None:
    """Writes the three files, all of them whole."""
    title = f"{', '.join(report['sources'])}: {', '.join(report['splits'])}"
    texts = [json.dumps(report, indent=1) + "\n", markdown(report)]
    contents = [*(text.encode(errors="replace") for text in texts), draw(report["total"], title)]
    parts = [out / f"{name}.part" for name in FILES]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for part, content in zip(parts, contents, strict=True):
            part.write_bytes(content)
        for part in parts:
            part.replace(part.with_suffix(""))
    except OSError as error:
        raise InputError(f"--out {out}: cannot write there ({error.strerror}); give another folder") from error


def _print(report: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, header, rows in _tables(report):
        console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
        table = Table("", *(Column(escape(name), justify="right") for name in header))
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
