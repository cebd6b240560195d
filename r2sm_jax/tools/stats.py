"""`data stats`: the counts of the R2SM paper's Table 1 for any data, further counts, and a figure.

Images of a dataset file are never opened.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tyro.conf import Positional

from r2sm_jax.config import DataConfig
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.split_summary import SplitSummary, summarize
from r2sm_jax.errors import atomic_write, refuse_overwrite, write_json
from r2sm_jax.markdown import Table, print_markdown
from r2sm_jax.sources import ALL, SourceSpec, open_split, split_names, stored_splits

HIDDEN_RATE = 0.15
"""VRSP's reader of COCOA-cls counts an object as occluded from this rate on."""


def figures_of(summary: SplitSummary) -> dict[str, int]:
    """Returns the counts of a split, those of Table 1 first."""
    return {
        "images": summary.num_images,
        "instances": summary.num_objects - summary.num_ignored,
        "amodal_queries": summary.num_amodal,
        "modal_queries": summary.num_queries - summary.num_amodal,
        "all_queries": summary.num_queries,
        "images_without_query": summary.num_without_query,
        "queries_without_target": summary.num_queries - summary.num_with_targets,
        "queries_of_several_instances": summary.num_of_several,
        "queries_against_keyword_rule": summary.num_against_rule,
        "instances_with_known_amodal": summary.num_complete,
        "occluded_instances": summary.num_occluded,
        "occluded_by_more_than_0.15": sum(s > HIDDEN_RATE for s in summary.hidden_shares),
        "ignore_regions": summary.num_ignored,
    }


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
        data: What to count, such as scenes, json:FILE, json:FOLDER or compose:FILE.
        splits: The splits to count, such as train val; by default all that are stored. A single
            file is counted as one split ("all"), or with "train val" as training divides it.
        scenes: How many scenes to draw for a split.
        out: Folder to write stats.json and stats.png (how much of the instances is hidden) into.
        overwrite: Replace these files if they exist.
        as_json: Print one JSON object instead of a table.
    """
    if out is not None:
        refuse_overwrite(out / "stats.json", overwrite)
    of_splits: dict[str, SplitSummary] = {}
    for split, source in _open_counted(data, splits, scenes).items():
        # The truth of one image is in memory at a time.
        of_splits[split] = summarize(source.truth_at(index) for index in range(len(source)))

    report = {"splits": {split: figures_of(summary) for split, summary in of_splits.items()}}
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report["splits"])
    if out is not None:
        write_json(out / "stats.json", report)
        with atomic_write(out / "stats.png") as part:
            draw(of_splits, part)


def _open_counted(data: str, splits: tuple[str, ...], num_scenes: int) -> dict[str, Source]:
    """Opens the splits of a source, or those that are asked for."""
    spec = SourceSpec.parse(data)
    if spec.kind == "json" and spec.paths[0].is_dir():
        # Each stored split is counted as it is: `dev` is not held out of `train`.
        folder = spec.paths[0]
        names = splits or stored_splits(folder)
        files = {name: DataConfig(f"json:{folder / name}.json") for name in names}
        return {name: open_split(file, "all", need_images=False) for name, file in files.items()}
    by_default = ["all"] if spec.kind == "json" else ["train", *split_names(data, ALL), "dev"]
    names = splits or by_default
    config = DataConfig(data)
    return {name: open_split(config, name, count=num_scenes, need_images=False) for name in names}


def print_table(figures_of_splits: dict[str, dict[str, int]]) -> None:
    """Prints a row for each figure and a column for each split."""
    rows = []
    for name in next(iter(figures_of_splits.values())):
        counts = [f"{figures[name]:,}" for figures in figures_of_splits.values()]
        rows.append([name.replace("_", " "), *counts])
    print_markdown("\n".join(Table("", ["", *figures_of_splits], rows).markdown()))


def draw(of_splits: dict[str, SplitSummary], path: Path) -> None:
    """Writes a PNG: a histogram of the hidden shares of each split."""
    from matplotlib.figure import Figure  # takes seconds to import

    page = Figure(dpi=150, layout="constrained")
    axes = page.subplots()
    rates = [summary.hidden_shares for summary in of_splits.values()]
    axes.hist(rates, list(np.linspace(0, 1, 21)), label=list(of_splits))
    axes.set(title="How much of an instance is hidden", xlabel="occlusion rate")
    axes.legend()
    page.savefig(path, format="png")
