"""`data stats`: the counts of the R2SM paper's Table 1 for any data, further counts, and a figure.

Images of a dataset file are never opened.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from r2sm_jax.config import DataConfig
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import ImageTruth, Source
from r2sm_jax.errors import atomic_write, refuse_overwrite
from r2sm_jax.query import keyword_mask_type
from r2sm_jax.sources import SourceSpec, open_split, stored_splits
from r2sm_jax.synthetic.procedural import ProceduralSource

FIGURES = (
    *("images", "instances", "amodal_queries", "modal_queries", "all_queries"),  # of Table 1
    *("images_without_query", "queries_without_target", "queries_of_several_instances"),
    *("queries_against_keyword_rule", "instances_with_known_amodal", "occluded_instances"),
    *("occluded_by_more_than_0.15", "ignore_regions"),
)
HIDDEN_RATE = 0.15
"""VRSP's reader of COCOA-cls counts an object as occluded from this rate on."""


@dataclass
class Statistics:
    """The counts of one split, and the hidden share of each instance that is known as a whole."""

    counts: Counter[str] = field(default_factory=Counter)
    occlusion_rates: list[float] = field(default_factory=list)

    def add_image(self, truth: ImageTruth) -> None:
        """Counts the annotations of one image."""
        counts = self.counts
        counts["images"] += 1
        counts["images_without_query"] += not truth.queries
        for instance in truth.instances:
            if instance.ignore:
                counts["ignore_regions"] += 1
                continue
            counts["instances"] += 1
            if instance.amodal is not None:
                modal_area, amodal_area = masks.areas([instance.modal, instance.amodal])
                rate = (amodal_area - modal_area) / max(1, amodal_area)
                counts["instances_with_known_amodal"] += 1
                counts["occluded_instances"] += rate > 0
                counts["occluded_by_more_than_0.15"] += rate > HIDDEN_RATE
                self.occlusion_rates.append(rate)

        for query in truth.queries:
            # A target that is named twice counts once, as in scoring.
            num_targets = len(set(query.instance_ids))
            counts["all_queries"] += 1
            counts[f"{query.mask_type}_queries"] += 1
            counts["queries_without_target"] += num_targets == 0
            counts["queries_of_several_instances"] += num_targets > 1
            counts["queries_against_keyword_rule"] += (
                keyword_mask_type(query.text) != query.mask_type
            )

    def figures(self) -> dict[str, int]:
        """The counts in the order of `FIGURES`."""
        return {name: self.counts[name] for name in FIGURES}


def stats(
    data: Positional[str],
    /,
    splits: tuple[str, ...] = (),
    scenes: int = 256,
    out: Path | None = None,
    overwrite: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Counts images, instances and queries by split, as the R2SM paper's Table 1 does.

    Images are not needed. Regions marked `ignore` are not counted as instances.

    Args:
        data: What to count: scenes, json:FILE or json:FOLDER.
        splits: The splits to count, such as train val; by default all that are stored. A single
            file is counted as one split ("all"), or with "train val" as training divides it.
        scenes: How many scenes to draw for a split.
        out: Folder to write stats.json and stats.png (how much of the instances is hidden) into.
        overwrite: Replace these files if they exist.
        as_json: Print one JSON object instead of a table.
    """
    if out is not None:
        refuse_overwrite(out / "stats.json", overwrite)
    of_splits: dict[str, Statistics] = {}
    for split, source in _open_splits(data, splits, scenes).items():
        statistics = Statistics()
        for index in range(len(source)):  # the truth of one image is in memory at a time
            statistics.add_image(source.truth_at(index))
        of_splits[split] = statistics

    report = {"splits": {split: counted.figures() for split, counted in of_splits.items()}}
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report["splits"])
    if out is not None:
        with atomic_write(out / "stats.json") as part:
            part.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        with atomic_write(out / "stats.png") as part:
            draw(of_splits, part)


def _open_splits(data: str, splits: tuple[str, ...], num_scenes: int) -> dict[str, Source]:
    """Opens the splits of a source, or those that are asked for."""
    spec = SourceSpec.parse(data)
    if spec.path is not None and spec.path.is_dir():
        # Each stored split is counted as it is: `dev` is not held out of `train`.
        names = splits or stored_splits(spec.path)
        files = {name: DataConfig(f"json:{spec.path / name}.json") for name in names}
        return {name: open_split(file, "all", need_images=False) for name, file in files.items()}
    names = splits or (ProceduralSource.splits if spec.kind == "scenes" else ("all",))
    config = DataConfig(data)
    return {name: open_split(config, name, count=num_scenes, need_images=False) for name in names}


def print_table(figures_of_splits: dict[str, dict[str, int]]) -> None:
    """Prints a row for each figure and a column for each split."""
    table = Table("", *figures_of_splits)
    for name in FIGURES:
        counts = [f"{figures[name]:,}" for figures in figures_of_splits.values()]
        table.add_row(name.replace("_", " "), *counts)
    Console().print(table)


def draw(of_splits: dict[str, Statistics], path: Path) -> None:
    """Writes a PNG: a histogram of the occlusion rates of each split."""
    from matplotlib.figure import Figure  # takes seconds to import

    page = Figure(dpi=150, layout="constrained")
    axes = page.subplots()
    rates = [statistics.occlusion_rates for statistics in of_splits.values()]
    axes.hist(rates, list(np.linspace(0, 1, 21)), label=list(of_splits))
    axes.set(title="How much of an instance is hidden", xlabel="occlusion rate")
    axes.legend()
    page.savefig(path, format="png")
