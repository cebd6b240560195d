"""What is in a data source: the counts of the R2SM paper's Table 1, further counts, and histograms.

Images of a dataset file are never opened. `stats.toml` names the counts and the bins.
"""

import json
import sys
import tomllib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.markdown import Markdown
from tyro.conf import Positional

from r2sm_jax.data import masks, sheet
from r2sm_jax.data.dataset import Instance
from r2sm_jax.data.sources import load_json_split, open_source, stored_splits
from r2sm_jax.errors import InputError, refuse_overwrite, writing
from r2sm_jax.evaluation.published import PUBLISHED, TABLE_1
from r2sm_jax.evaluation.tables import markdown_table
from r2sm_jax.query import Query, keyword_mask_type
from r2sm_jax.synthetic.procedural import ProceduralSource
from r2sm_jax.tools.check import progress


@dataclass(frozen=True)
class Bins:
    """A histogram's bins. Each includes its upper edge; the last has none."""

    title: str
    edges: Sequence[float]
    labels: Sequence[str]
    series: Sequence[str] = ("modal", "amodal")
    heading: str = ""
    unit: str = ""


_DEFINITIONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SHARES: dict[str, str] = _DEFINITIONS["shares"]
HISTOGRAMS = {name: Bins(**fields) for name, fields in _DEFINITIONS["histograms"].items()}
TITLES = {name: name.replace("_", " ") for name in (*TABLE_1, *SHARES)}
FILES = ("stats.json", "stats.md", "stats.png")
INK, FAINT, VISIBLE, OCCLUDED = (
    f"#{bytes(colour).hex()}" for colour in (sheet.INK, sheet.FAINT, sheet.VISIBLE, sheet.OCCLUDED)
)
COLOURS = {"modal": VISIBLE, "amodal": OCCLUDED, "instances": FAINT}

Counts = Counter[str | tuple[str, ...]]
"""How often each thing occurs; a tuple names a histogram (or "tasks"), its series and the bin."""


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

    Images are not needed. Regions marked `ignore` are not counted as instances.

    Args:
        data: What to count: scenes, json:FILE, json:FOLDER, or a path to a .json file or a folder of them.
        splits: The splits to count, such as train val; by default all that exist. A single file is counted whole
            ("all"), or with "train val" as training divides it.
        compare: Show the counts that the paper states for this dataset beside the counted ones.
        scenes: How many procedural scenes to draw for a split.
        out: Folder to write stats.json, stats.md and stats.png into.
        overwrite: Replace these files if they exist.
        as_json: Print one JSON object instead of tables.
    """
    if not data or scenes < 1:
        raise InputError(
            "stats: nothing to count; give scenes, json:FILE or json:FOLDER, and --scenes 1 or more"
        )
    chosen = {spec: _choose_splits(spec, splits) for spec in data}
    files = [
        path
        for found in chosen.values()
        for path in {part[0].resolve() for part in found.values() if part}
    ]
    if len(chosen) < len(data) or len(set(files)) < len(files):
        raise InputError(f"stats: {' '.join(data)} would count the same data twice; give it once")
    if compare and not any({"train", "val"} & found.keys() for found in chosen.values()):
        raise InputError(
            f"--compare {compare}: the paper counts train and val; give a folder with these splits"
        )
    if out is not None:
        if out.is_file() or out.resolve() in {path.parent for path in files}:
            raise InputError(
                f"--out {out}: this is a file, or stats.json would look like a split; give another folder"
            )
        for name in FILES:
            refuse_overwrite(out / name, overwrite)
    counts = {
        spec: {
            s: count_file(*part) if part else count_scenes(s, scenes) for s, part in found.items()
        }
        for spec, found in chosen.items()
    }
    report = make_report(counts, compare)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(Markdown(markdown(report)))
    if out is not None:
        title = f"{', '.join(report['sources'])}: {', '.join(report['splits'])}"
        texts = [json.dumps(report, indent=1) + "\n", markdown(report)]
        contents = [
            *(text.encode(errors="replace") for text in texts),
            draw(report["total"], title),
        ]
        for name, content in zip(FILES, contents, strict=True):
            with writing(out / name) as part:
                part.write_bytes(content)
        print(f"wrote {', '.join(str(out / name) for name in FILES)}", file=sys.stderr)


def _choose_splits(spec: str, wanted: Sequence[str]) -> dict[str, tuple[Path, str] | None]:
    """The splits of a source that are `wanted`, or all: each with a file and the file's split; None for scenes."""
    path = Path(spec.removeprefix("json:"))
    if spec == "scenes":
        found: dict[str, tuple[Path, str] | None] = dict.fromkeys(ProceduralSource.splits)
    elif spec == "json:" or not (
        spec.startswith("json:") or path.exists() or path.suffix == ".json"
    ):
        raise InputError(f"data source {spec!r} is unknown; use scenes, json:FILE or json:FOLDER")
    elif path.is_dir():
        found = {split: (path / f"{split}.json", "all") for split in stored_splits(path)}
    else:
        found = {split: (path, split) for split in ("all", "train", "dev", "val")}
        if "all" in wanted and len(wanted) > 1:
            raise InputError(
                f"--splits {' '.join(wanted)}: all of {spec} are train, dev and val together; give either"
            )
        wanted = wanted or ("all",)
    for split in wanted:
        if split not in found:
            raise InputError(
                f"--splits {split}: {spec} has only {', '.join(found)}; choose of these, or give a folder"
            )
    return {split: found[split] for split in wanted or found}


def count_file(path: Path, split: str = "all") -> Counts:
    """The counts of one dataset file or of one of its splits. Raises InputError for one that is missing or damaged."""
    dataset, counts = load_json_split(path, split, need_images=False), Counts()
    for index in progress(range(len(dataset)), "images"):
        instances, (height, width) = dataset.rles_at(index), dataset.size_at(index)
        areas = [i.convert(lambda rle: masks.areas([rle])[0]) for i in instances if not i.ignore]
        counts["ignore_regions"] += len(instances) - len(areas)
        _count_image(counts, height * width, areas, dataset.queries_at(index))
    return counts


def count_scenes(split: str, number: int) -> Counts:
    """The counts of the first `number` procedural scenes of a split."""
    source, counts = open_source("scenes", split, count=number), Counts()
    for index in progress(range(number), "scenes"):
        sample = source[index]
        areas = [instance.convert(masks.area) for instance in sample.instances]
        _count_image(counts, sample.image[..., 0].size, areas, sample.queries)
    return counts


def _count_image(
    counts: Counts, pixels: int, areas: Iterable[Instance[int]], queries: Iterable[Query]
) -> None:
    """Adds an image of so many pixels; `areas` holds the areas of its instances."""
    counts["images"] += 1
    counts["images_without_query"] += not queries
    for area in areas:
        counts["instances"] += 1
        counts[f"instances_with_{'unknown' if area.amodal is None else 'known'}_amodal"] += 1
        if area.amodal is not None:
            rate = (area.amodal - area.modal) / max(1, area.amodal)
            counts["occluded_instances"] += rate > 0
            counts["occluded_by_more_than_0.15"] += rate > 0.15
            _count_bin(counts, "occlusion_rate", "instances", rate)
        for mask_type, size in (("modal", area.modal), ("amodal", area.amodal)):
            if size is not None:
                _count_bin(counts, "area_share", mask_type, size / pixels)
                _count_bin(counts, "coco_size", mask_type, size)
    for query in queries:
        mask_type, targets = query.mask_type, len(set(query.instance_ids))
        counts["all_queries"] += 1
        counts[f"{mask_type}_queries"] += 1
        counts["queries_without_target"] += targets == 0
        counts["queries_of_several_instances"] += targets > 1
        counts[f"{mask_type}_queries_against_keyword_rule"] += (
            keyword_mask_type(query.text) != mask_type
        )
        counts["tasks", str(query.kind.get("task") or "not stated")] += 1
        _count_bin(counts, "words", mask_type, len(query.text.split()))
        _count_bin(counts, "instances_per_query", mask_type, targets)


def _count_bin(counts: Counts, name: str, series: str, value: float) -> None:
    bins = HISTOGRAMS[name]
    counts[name, series, bins.labels[bisect_left(bins.edges, value)]] += 1


def make_report(
    counts: Mapping[str, Mapping[str, Counts]], compare: str | None = None
) -> dict[str, Any]:
    """The figures of counts by source and split: for each, for every split of all sources together, and in total.

    With `compare`, `published` holds what the paper states for the splits, and their total where it states all.
    """
    splits: dict[str, Counts] = {}
    for found in counts.values():
        for split, part in found.items():
            splits.setdefault(split, Counter()).update(part)
    report: dict[str, Any] = {
        "sources": {
            spec: {split: _figures(c) for split, c in found.items()}
            for spec, found in counts.items()
        },
        "splits": {split: _figures(c) for split, c in splits.items()},
        "total": _figures(sum(splits.values(), Counter())),
    }
    if compare is not None:
        stated = {
            s: dict(zip(TABLE_1, n, strict=True))
            for s, n in PUBLISHED[compare].items()
            if s in splits
        }
        total = {name: sum(counts[name] for counts in stated.values()) for name in TABLE_1}
        whole = len(stated) == len(splits)
        report["published"] = {
            "dataset": compare,
            "splits": stated,
            "total": total if whole else None,
        }
    return report


def _figures(counts: Counts) -> dict[str, Any]:
    figures: dict[str, Any] = {name: counts[name] for name in (*TABLE_1, *SHARES, "ignore_regions")}
    figures["shares"] = {
        name: counts[name] / counts[of] if counts[of] else None for name, of in SHARES.items()
    }
    figures["tasks"] = dict(
        sorted((key[1], number) for key, number in counts.items() if key[0] == "tasks")
    )
    figures["histograms"] = {
        name: {
            series: {label: counts[name, series, label] for label in bins.labels}
            for series in bins.series
        }
        for name, bins in HISTOGRAMS.items()
    }
    return figures


def markdown(report: dict[str, Any]) -> str:
    """The report as a page of tables."""
    lines = ["# Dataset statistics", ""]
    for title, header, rows in _tables(report):
        escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
        lines += [f"## {title}", "", *markdown_table(["", *header], escaped)]
    return "\n".join(lines)


def _tables(report: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of every table; a row starts with its name."""
    published = report.get("published") or {"splits": {}, "total": None}
    columns = {
        split: (figures, published["splits"].get(split))
        for split, figures in report["splits"].items()
    }
    if len(columns) > 1:
        columns["total"] = report["total"], published["total"]
    header, every = list(columns), [figures for figures, _ in columns.values()]
    several = len(report["sources"]) > 1
    for spec, splits in report["sources"].items() if several else ():
        yield (
            spec,
            list(splits),
            [[TITLES[name], *(f"{f[name]:,}" for f in splits.values())] for name in TABLE_1],
        )
    title = "all sources" if several else next(iter(report["sources"]))
    title += f", beside {published['dataset']} as published" if "dataset" in published else ""
    yield (
        title,
        header,
        [[TITLES[n], *(_beside(f[n], p and p[n]) for f, p in columns.values())] for n in TABLE_1],
    )
    rows = [
        [TITLES[name], *(_with_share(f[name], f[of]) for f in every)] for name, of in SHARES.items()
    ]
    rows.append(["ignore regions", *(f"{f['ignore_regions']:,}" for f in every)])
    for task in report["total"]["tasks"]:
        rows.append(
            [
                f"task: {task}",
                *(_with_share(f["tasks"].get(task, 0), f["all_queries"]) for f in every),
            ]
        )
    yield "Besides", header, rows
    rows = []
    for name, bins in HISTOGRAMS.items():
        for label in bins.labels:
            cells = (
                " / ".join(f"{f['histograms'][name][s][label]:,}" for s in bins.series)
                for f in every
            )
            rows.append([f"{bins.title}: {label}", *cells])
    yield "Histograms (modal / amodal)", header, rows


def _with_share(part: int, whole: int) -> str:
    return f"{part:,} ({_percent(part, whole)})"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _beside(count: int, stated: int | None) -> str:
    if stated is None or count == stated:
        return f"{count:,}" if stated is None else f"{count:,} (as published)"
    return f"{count:,} (published {stated:,}, {count - stated:+,})"


def draw(figures: dict[str, Any], title: str) -> bytes:
    """A PNG of four histograms: occlusion rate, mask size, query length and instances per query."""
    from matplotlib import style  # matplotlib takes seconds to import
    from matplotlib.figure import Figure

    known, content = figures["instances_with_known_amodal"], BytesIO()
    sizes = figures["histograms"]["coco_size"]["amodal"]
    notes = (
        f"{_percent(figures['occluded_instances'], known)} of {known:,} are occluded",
        f"amodal masks by COCO: {', '.join(f'{_percent(n, known)} {name}' for name, n in sizes.items())}",
        f"{figures['modal_queries']:,} modal, {figures['amodal_queries']:,} amodal",
        f"{figures['queries_without_target']:,} mean none, {figures['queries_of_several_instances']:,} several",
    )
    with style.context(Path(__file__).with_suffix(".mplstyle")):
        page = Figure()
        axes = page.subplots(2, 2).ravel()
        drawn = [name for name, bins in HISTOGRAMS.items() if bins.heading]
        for ax, name, note in zip(axes, drawn, notes, strict=True):
            _draw_histogram(ax, HISTOGRAMS[name], figures["histograms"][name], note)
        title = title if len(title) <= 64 else f"…{title[-63:]}"
        page.text(
            0.065,
            0.955,
            title,
            fontsize=14,
            fontweight="bold",
            color=INK,
            va="center",
            parse_math=False,
        )
        handles = axes[1].get_legend_handles_labels()
        page.legend(*handles, loc="center right", bbox_to_anchor=(0.985, 0.955), ncols=2)
        page.savefig(content, format="png")
    return content.getvalue()


def _draw_histogram(
    ax: Any, bins: Bins, counts: Mapping[str, Mapping[str, int]], note: str
) -> None:
    """Draws the series of a histogram side by side, as shares of each series."""
    width = 0.8 / len(counts)
    for number, (series, by_bin) in enumerate(counts.items()):
        values = np.array(list(by_bin.values()), float)
        places = np.arange(len(values)) + (number - (len(counts) - 1) / 2) * width
        shares = 100 * values / max(1, values.sum())
        bars = ax.bar(places, shares, 0.94 * width, color=COLOURS[series], label=series)
        ax.bar_label(
            bars, [f"{v:,.0f}" if v else "" for v in values], padding=2, fontsize=7, color=FAINT
        )
    labels = [label.replace("-", "–").replace(" or more", "+") for label in bins.labels]
    ax.set(xticks=range(len(labels)), xticklabels=labels, ylim=(0, max(1.12 * ax.dataLim.ymax, 1)))
    ax.set(xlabel=bins.title, ylabel=f"% of {bins.unit}", title=bins.heading)
    ax.text(0, 1.035, note, transform=ax.transAxes, fontsize=8.5, color=FAINT)
