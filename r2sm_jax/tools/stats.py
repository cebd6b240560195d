"""`data stats`: the counts of the R2SM paper's Table 1 for any data, further counts, a figure.

Images of a dataset file are never opened.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import ImageTruth, Source
from r2sm_jax.errors import InputError, atomic_write, refuse_overwrite
from r2sm_jax.evaluation.published import PUBLISHED, TABLE_1
from r2sm_jax.evaluation.tables import markdown_table
from r2sm_jax.query import MASK_TYPES, MaskType, keyword_mask_type
from r2sm_jax.synthetic.procedural import ProceduralSource
from r2sm_jax.synthetic.sources import load_json_split, open_source, stored_splits
from r2sm_jax.tools.check import progress

FILES = ("stats.json", "stats.md", "stats.png")
HIDDEN_RATE = 0.15
"""VRSP's reader of COCOA-cls counts an object as occluded from this rate on."""


def _lists() -> dict[MaskType, list]:
    return {mask_type: [] for mask_type in MASK_TYPES}


@dataclass
class Counts:
    """Counts of some images. Lists have one entry per instance or per query."""

    num_images: int = 0
    num_images_without_query: int = 0
    num_ignored: int = 0
    num_instances: int = 0
    num_against_keywords: int = 0
    """Queries whose type the keyword rule gets wrong."""
    occlusion_rates: list[float] = field(default_factory=list)
    """The hidden share of each instance whose complete mask is known."""
    area_shares: dict[MaskType, list[float]] = field(default_factory=_lists)
    """Mask area by image area, by mask type."""
    num_words: dict[MaskType, list[int]] = field(default_factory=_lists)
    num_targets: dict[MaskType, list[int]] = field(default_factory=_lists)

    def add_image(self, truth: ImageTruth) -> None:
        """Counts the annotations of one image."""
        height, width = truth.size
        self.num_images += 1
        self.num_images_without_query += not truth.queries
        for instance in truth.instances:
            if instance.ignore:
                self.num_ignored += 1
                continue
            self.num_instances += 1
            modal_area = _area(instance.modal)
            self.area_shares["modal"].append(modal_area / (height * width))
            if instance.amodal is not None:
                amodal_area = _area(instance.amodal)
                self.area_shares["amodal"].append(amodal_area / (height * width))
                self.occlusion_rates.append((amodal_area - modal_area) / max(1, amodal_area))
        for query in truth.queries:
            self.num_words[query.mask_type].append(len(query.text.split()))
            # A target that is named twice counts once, as in scoring.
            self.num_targets[query.mask_type].append(len(set(query.instance_ids)))
            self.num_against_keywords += keyword_mask_type(query.text) != query.mask_type

    def figures(self) -> dict[str, int]:
        """The columns of Table 1, then further counts."""
        targets = np.array(self.num_targets["modal"] + self.num_targets["amodal"])
        rates = np.array(self.occlusion_rates)
        return {
            "images": self.num_images,
            "instances": self.num_instances,
            "amodal_queries": len(self.num_targets["amodal"]),
            "modal_queries": len(self.num_targets["modal"]),
            "all_queries": len(targets),
            "images_without_query": self.num_images_without_query,
            "queries_without_target": int((targets == 0).sum()),
            "queries_of_several_instances": int((targets > 1).sum()),
            "queries_against_keyword_rule": self.num_against_keywords,
            "instances_with_known_amodal": len(rates),
            "occluded_instances": int((rates > 0).sum()),
            "occluded_by_more_than_0.15": int((rates > HIDDEN_RATE).sum()),
            "ignore_regions": self.num_ignored,
        }


def _area(rle: masks.RLE) -> int:
    """Number of pixels in a compressed RLE."""
    return masks.areas([rle])[0]


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
    """Counts images, instances and queries by split, as the R2SM paper's Table 1 does.

    Images are not needed. Regions marked `ignore` are not counted as instances.

    Args:
        data: What to count: scenes, json:FILE, json:FOLDER, or a path to a .json file or a folder
            of them.
        splits: The splits to count, such as train val; by default all that exist. A single file is
            counted as one split ("all"), or with "train val" as training divides it.
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
    parts = [(split, spec) for spec in data for split in _choose_splits(spec, splits)]
    if len({str(Path(spec.removeprefix("json:")).resolve()) for spec in data}) < len(data):
        raise InputError(f"stats: {' '.join(data)} would count the same data twice; give it once")
    names = list(dict.fromkeys(split for split, _ in parts))
    if compare is not None and not {"train", "val"} & set(names):
        remedy = "the paper counts train and val; give a folder with these splits"
        raise InputError(f"--compare {compare}: {remedy}")
    if out is not None:
        folders = {Path(spec.removeprefix("json:")).resolve() for spec in data}
        if out.resolve() in folders:
            raise InputError(
                f"--out {out}: stats.json would look like a split; give another folder"
            )
        for name in FILES:
            refuse_overwrite(out / name, overwrite)

    counts = {name: Counts() for name in names}
    total = Counts()
    for split, spec in parts:
        source = _open(spec, split, scenes)
        # The truth of one image is in memory at a time.
        for index in progress(range(len(source)), "images"):
            truth = source.truth_at(index)
            counts[split].add_image(truth)
            total.add_image(truth)

    report = make_report(counts, total, compare)
    text = json.dumps(report, indent=1) if as_json else markdown(report)
    print(text)
    if out is not None:
        contents = [json.dumps(report, indent=1).encode(), markdown(report).encode(), draw(total)]
        for name, content in zip(FILES, contents, strict=True):
            with atomic_write(out / name) as part:
                part.write_bytes(content)
        print(f"wrote {', '.join(str(out / name) for name in FILES)}", file=sys.stderr)


def _choose_splits(spec: str, splits: Sequence[str]) -> list[str]:
    """The splits of a source, or those of `splits`.

    Raises InputError for one that does not exist.
    """
    path = Path(spec.removeprefix("json:"))
    if spec == "scenes":
        existing = list(ProceduralSource.splits)
    elif spec != "json:" and path.is_dir():
        existing = stored_splits(path)
    elif path.suffix == ".json":
        existing = ["train", "dev", "val", "all"]
        if "all" in splits and len(splits) > 1:
            remedy = "all of a file are train, dev and val together; give either"
            raise InputError(f"--splits {' '.join(splits)}: {remedy}")
        splits = splits or ("all",)
    else:
        raise InputError(f"data source {spec!r} is unknown; use scenes, json:FILE or json:FOLDER")
    for split in splits:
        if split not in existing:
            remedy = "choose of these, or give a folder"
            raise InputError(f"--splits {split}: {spec} has only {', '.join(existing)}; {remedy}")
    return list(splits) or existing


def _open(spec: str, split: str, num_scenes: int) -> Source:
    """One split of a source."""
    if spec == "scenes":
        return open_source("scenes", split, count=num_scenes)
    path = Path(spec.removeprefix("json:"))
    if path.is_dir():
        # Each stored split is counted as it is: `dev` is not held out of `train`.
        return load_json_split(path / f"{split}.json", "all", need_images=False)
    return load_json_split(path, split, need_images=False)


def make_report(
    counts: Mapping[str, Counts], total: Counts, compare: str | None = None
) -> dict[str, Any]:
    """Figures by split and in total; with `compare`, what the paper states for these splits."""
    report: dict[str, Any] = {
        "splits": {split: of_split.figures() for split, of_split in counts.items()},
        "total": total.figures(),
    }
    if compare is not None:
        stated = PUBLISHED[compare]
        report["published"] = {
            split: dict(zip(TABLE_1, stated[split], strict=True))
            for split in counts
            if split in stated
        }
    return report


def markdown(report: Mapping[str, Any]) -> str:
    """The report as one table: a row for each figure, a column for each split."""
    columns = dict(report["splits"])
    if len(columns) > 1:
        columns["total"] = report["total"]
    published = report.get("published", {})
    rows = []
    for name in report["total"]:
        cells = []
        for split, figures in columns.items():
            stated = published.get(split, {}).get(name)
            cells.append(_cell(figures[name], stated))
        rows.append([name.replace("_", " "), *cells])
    return "\n".join(["# Dataset statistics", "", *markdown_table(["", *columns], rows)])


def _cell(count: int, stated: int | None) -> str:
    """A count, with what the paper states if that is known."""
    if stated is None:
        return f"{count:,}"
    if count == stated:
        return f"{count:,} (as published)"
    return f"{count:,} (published {stated:,}, {count - stated:+,})"


def draw(counts: Counts) -> bytes:
    """A PNG of four histograms: occlusion rate, mask size, query length and instances per query."""
    from matplotlib.figure import Figure  # takes seconds to import

    page = Figure(figsize=(11, 7.8), dpi=150, layout="constrained")
    axes = page.subplots(2, 2).ravel()
    axes[0].hist(counts.occlusion_rates, np.linspace(0, 1, 21))
    axes[0].set(title="How much of an instance is hidden", xlabel="occlusion rate")
    panels = [
        (counts.area_shares, np.linspace(0, 1, 21), "How large masks are", "share of the image"),
        (counts.num_words, np.arange(0.5, 41), "How long queries are", "words"),
        (counts.num_targets, np.arange(-0.5, 9), "How many instances a query has", "instances"),
    ]
    for ax, (values, bins, title, label) in zip(axes[1:], panels, strict=True):
        last = (bins[-2] + bins[-1]) / 2  # the last bin holds everything beyond it
        series = [np.minimum(values[mask_type], last) for mask_type in MASK_TYPES]
        ax.hist(series, bins, label=MASK_TYPES)
        ax.set(title=title, xlabel=label)
        ax.legend()
    content = BytesIO()
    page.savefig(content, format="png")
    return content.getvalue()
