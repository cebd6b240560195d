"""Computes the figures of a report from the tables of counts.

The figures of queries pass through five files:

    scorer.py     answer and truth of a query    -> a row
    counts.py     rows of a split                -> a table, `queries.csv`
    report.py     tables                         -> figures as a dict, `report.json`
    tables.py     figures                        -> tables to read and text, `report.md`
    page.py       these, pictures, charts        -> `report.html`

Those of boxes, clicks and completed masks are of completion.py; evaluator.py adds them. This file
selects the rows of each figure. What a figure is, is defined in docs/metrics.md and computed by
iou.py (masks), instances.py (detections) and decisions.py (mask types).
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

import r2sm_jax
from r2sm_jax.evaluation import counts
from r2sm_jax.evaluation.counts import Rows, has_hidden_part, of_type, overlap_of_rows, requested
from r2sm_jax.evaluation.decisions import (
    area_under_curve,
    calibration_curve,
    mask_type_scores,
)
from r2sm_jax.evaluation.instances import (
    cgf1_figures,
    instance_figures,
    occlusion_figures,
)
from r2sm_jax.evaluation.iou import (
    VARIANTS,
    Ratio,
    Scores,
    interval,
    lisa,
    lisa_iou,
    mean_ratio,
    precision_at,
)
from r2sm_jax.evaluation.scorer import Evaluated
from r2sm_jax.query import MASK_TYPES, QUERY_TYPES, keyword_mask_type

OCCLUSION_BINS = {"none": 0.0, "0-0.15": 0.15, "0.15-0.25": 0.25, "0.25-0.40": 0.40, "0.40-1": 1.0}
"""Upper edges of the bins by hidden share of the target. An edge belongs to the bin below it."""
RIVALS_BINS = {"one of its kind": 0.0, "one of several": 1e10}
"""Upper edges of the bins by the number of other objects that have the class of the target."""
AREA_BINS = {"small": 32**2, "medium": 96**2, "large": 1e10}
"""Upper edges of the bins by area of the target in pixels, as in COCO."""

PRESENCE_SPLITS = ("all", "val", "val_absent")
"""Splits that are pooled for the figures of presence. Others have new names or hard wordings."""
FOUND = (0.95, 0.90)
"""The shares of what is there that are found where refusals are compared."""

PAPER: dict[str, Any] = tomllib.loads(
    files("r2sm_jax.evaluation").joinpath("published.toml").read_text(encoding="utf-8")
)
"""Tables 1 to 3 of R2SM (arXiv 2506.01795)."""


def split_figures(rows: Rows) -> dict[str, Any]:
    """Computes all figures of one split from the rows of all of its queries."""
    overlaps = overlap_of_rows(rows)
    detections = rows["detections"].tolist()
    decisions = decision_figures(
        rows["text"], rows["mask_type"], rows["said"], rows["amodal_probability"], rows["image_id"]
    )
    return {
        **{kind: mask_figures(of_type(rows, kind)) for kind in QUERY_TYPES},
        "mask_type": decisions,
        "pairs": pair_figures(rows),
        "cgf1": cgf1_figures(detections, decisions["mcc"]),
        "predicted_iou": predicted_iou_figures(rows),
        "references": reference_figures(rows),
        "variants": {name: variant(overlaps) for name, variant in VARIANTS.items()},
        "breakdowns": breakdowns(rows),
    }


# Masks


def figure_ratios(rows: Rows) -> dict[str, Ratio]:
    """Returns the figures that have an interval, as ratios of sums over the rows."""
    mask = overlap_of_rows(rows)
    is_right = np.where(rows["said"] == "", np.nan, rows["said"] == rows["mask_type"])
    boundary = np.stack([rows["boundary_intersection"], rows["boundary_union"]], axis=1)
    return {
        "giou": mean_ratio(lisa_iou(mask)),
        "ciou": (mask[:, 0], mask[:, 1]),
        "occluded_iou": mean_ratio(lisa_iou(counts.occluded_overlap(rows))),
        "boundary_iou": mean_ratio(lisa_iou(boundary)),
        "right_object": mean_ratio(rows["right_object"]),
        "accuracy": mean_ratio(is_right),
    }


def mask_figures(rows: Rows) -> dict[str, Any]:
    """Computes the figures of the masks of some queries, with intervals over images."""
    overlaps = overlap_of_rows(rows)
    occluded = counts.occluded_overlap(rows)
    occluded_iou = lisa(occluded)
    complete_iou = lisa(counts.complete_overlap(rows))
    boundary = np.stack([rows["boundary_intersection"], rows["boundary_union"]], axis=1)
    # That of the accuracy stands with the decisions.
    ratios = {name: r for name, r in figure_ratios(rows).items() if name != "accuracy"}
    # COCOeval breaks ties of scores by the order of queries.
    detections = rows[np.argsort(rows["query_id"], kind="stable")]["detections"].tolist()
    return {
        **lisa(overlaps),
        "occluded_iou": occluded_iou["giou"],
        "occluded_ciou": occluded_iou["ciou"],
        "complete_iou": complete_iou["giou"],
        "complete_ciou": complete_iou["ciou"],
        "boundary_iou": lisa(boundary)["giou"],
        "wrong_type_gap": wrong_type_gap(rows),
        "leak": leak(rows),
        "right_object": right_object(rows),
        **precision_at(overlaps),
        "queries": len(rows),
        "occluded_queries": int((~np.isnan(occluded[:, 0])).sum()),
        "interval": {name: interval(rows["image_id"], ratio) for name, ratio in ratios.items()},
        **instance_figures(detections),
        **occlusion_figures(detections),
    }


def wrong_type_gap(rows: Rows) -> float | None:
    """Computes the mean IoU of the answer with the requested mask less that with the other one.

    It is over the queries whose two true masks differ, and tells how much better an answer fits the
    requested mask than the other one.
    """
    hidden = rows[has_hidden_part(rows)]
    other = overlap_of_rows(hidden, 1 - requested(hidden))
    gaps = lisa_iou(overlap_of_rows(hidden)) - lisa_iou(other)
    return float(gaps.mean()) if len(hidden) else None


def leak(rows: Rows) -> float | None:
    """Computes the mean share of the hidden part that answers to modal queries paint.

    That is |P ∩ (A − M)| / |A − M|, over modal queries whose target is partly hidden.
    """
    hidden = of_type(rows[has_hidden_part(rows)], "modal")
    painted, true = np.diff(hidden["shared"]), np.diff(hidden["truth"])
    return float((painted / true).mean()) if len(hidden) else None


def right_object(rows: Rows) -> float | None:
    """Computes the share of answers to queries with one target that mean it and no other object."""
    right = rows["right_object"]
    known = right[~np.isnan(right)]
    return float(known.mean()) if len(known) else None


# References: the same masks with another decision, and the true masks of one type for all.


def reference_figures(rows: Rows) -> dict[str, Scores]:
    """Computes gIoU and cIoU of every reference; None where the system gives one mask only."""
    rules = {
        "always_modal": np.zeros(len(rows), int),
        "always_amodal": np.ones(len(rows), int),
        "keyword": np.array([MASK_TYPES.index(keyword_mask_type(t)) for t in rows["text"]], int),
        "oracle_type": requested(rows),
    }
    figures = {}
    for name, said in rules.items():
        figures[name] = lisa(counts.overlap_of_both(rows, said))
    known = rows[~np.isnan(rows["truth"][:, 1])]
    for index, mask_type in enumerate(MASK_TYPES):
        said = np.full(len(known), index)
        figures[f"true_{mask_type}_for_all"] = lisa(counts.overlap_of_truth(known, said))
    return figures


# Breakdowns by kind of query


def breakdowns(rows: Rows) -> dict[str, dict[str, Any]]:
    """Computes gIoU, cIoU, occluded IoU and number of queries of each group of every breakdown."""
    figures: dict[str, dict[str, Any]] = {}
    for breakdown, groups in groups_of(rows).items():
        # Bins stand in their order, other groups by name.
        order = {"class": [*RIVALS_BINS], "occlusion": [*OCCLUSION_BINS], "size": [*AREA_BINS]}
        figures[breakdown] = {}
        for group in order.get(breakdown, sorted(set(groups.tolist()) - {""})):
            selected = rows[groups == group]
            if len(selected):
                figures[breakdown][group] = {
                    **lisa(overlap_of_rows(selected)),
                    "occluded_iou": lisa(counts.occluded_overlap(selected))["giou"],
                    "right_object": right_object(selected),
                    "queries": len(selected),
                }
    return figures if len(rows) else {}


def groups_of(rows: Rows) -> dict[str, Shaped[np.ndarray, " n"]]:
    """Returns the group of each query in every breakdown; "" where it belongs to none."""
    modal, amodal = rows["truth"].T
    area = overlap_of_rows(rows)[:, 3]
    with np.errstate(invalid="ignore"):
        hidden_share = 1 - modal / amodal
    return {
        "task": rows["task"],
        "difficulty": rows["difficulty"],
        "instances": rows["instances"],
        "class": bins_of(rows["rivals"], RIVALS_BINS),
        "occlusion": bins_of(hidden_share, OCCLUSION_BINS),
        "size": bins_of(np.where(area > 0, area, np.nan), AREA_BINS),
    }


def bins_of(
    values: Float[np.ndarray, " n"], upper_edges: Mapping[str, float]
) -> Shaped[np.ndarray, " n"]:
    """Returns the name of the first bin whose upper edge each value does not exceed; "" for NaN."""
    names = np.array([*upper_edges, ""], object)
    return names[np.searchsorted([*upper_edges.values()], values)]


# Decisions about the mask type


def decision_figures(
    texts: Sequence[str] | Shaped[np.ndarray, " n"],
    mask_types: Sequence[str] | Shaped[np.ndarray, " n"],
    said: Sequence[str] | Shaped[np.ndarray, " n"],
    probability: Float[np.ndarray, " n"],
    units: Int[np.ndarray, " n"] | None = None,
) -> dict[str, Any]:
    """Computes the figures of decisions about sentences, with an interval.

    Args:
        texts: the sentences.
        mask_types: what they ask for.
        said: the decisions; "" where there is none, and the sentence is left out.
        probability: of amodal; NaN where there is none, which calibration leaves out.
        units: what is resampled for the interval, such as images; by default sentences.
    """
    said, mask_types = np.asarray(said, str), np.asarray(mask_types, str)
    if units is None:
        units = np.arange(len(said))
    decided = said != ""
    is_amodal, predicted = mask_types[decided] == "amodal", said[decided] == "amodal"
    keyword_said = np.array([keyword_mask_type(text) for text in texts], str)
    keyword_right = (keyword_said == mask_types)[decided]
    is_right = mean_ratio((predicted == is_amodal).astype(float))
    return {
        **mask_type_scores(probability[decided], is_amodal, predicted),
        "keyword": float(keyword_right.mean()) if decided.any() else None,
        "interval": {"accuracy": interval(units[decided], is_right)},
    }


def pair_figures(rows: Rows) -> Scores:
    """Computes shares of the pairs of a modal and an amodal sentence about the same instances.

    A system that ignores the sentence answers both alike. Returns `both_right`, `swapped`,
    `both_modal`, `both_amodal`, which sum to 1, and the number of `pairs`.
    """
    # Decisions by image and instances, then by the requested type.
    decisions: dict[Any, dict[str, list[str]]] = {}
    decided = rows[(rows["said"] != "") & (rows["target"] != "")]
    for image_id, target, mask_type, said in decided[
        ["image_id", "target", "mask_type", "said"]
    ].tolist():
        by_type = decisions.setdefault((image_id, target), {"modal": [], "amodal": []})
        by_type[mask_type].append(said)

    pairs: Counter[tuple[str, ...]] = Counter()
    for by_type in decisions.values():
        pairs.update(product(by_type["modal"], by_type["amodal"]))

    def share(*pair: str) -> float | None:
        if not pairs:
            return None
        return pairs[pair] / pairs.total()

    return {
        "both_right": share("modal", "amodal"),
        "swapped": share("amodal", "modal"),
        "both_modal": share("modal", "modal"),
        "both_amodal": share("amodal", "amodal"),
        "pairs": pairs.total(),
    }


def predicted_iou_figures(rows: Rows) -> dict[str, Any]:
    """Computes the mean absolute error of the predicted IoU, and its calibration curve.

    Only queries that have a target count: without one, the IoU is 0 or 1 by presence alone.
    """
    overlaps = overlap_of_rows(rows)
    is_counted = ~np.isnan(rows["predicted_iou"]) & (overlaps[:, 3] > 0)
    if not is_counted.any():
        return {"error": None, "curve": []}
    predicted = rows["predicted_iou"][is_counted]
    iou = lisa_iou(overlaps[is_counted])
    error = float(np.abs(predicted - iou).mean())
    return {"error": error, "curve": calibration_curve(predicted, predicted, iou)}


def presence_figures(rows: Rows) -> dict[str, Any]:
    """Computes how well `presence` tells queries that have a target from those without.

    `refused_at_95`: the share of queries without a target that are refused at the presence which
    95 % of those with a target reach. None where one of the two kinds is missing, or presence is
    not said.
    """
    said = rows[~np.isnan(rows["presence"])]
    has_target = overlap_of_rows(said)[:, 3] > 0
    there, absent = said["presence"][has_target], said["presence"][~has_target]
    is_known = len(there) > 0 and len(absent) > 0
    figures: dict[str, Any] = {"queries": len(there), "absent_queries": len(absent)}
    figures["auc"] = area_under_curve(there, absent) if is_known else None
    for share in FOUND:
        refused = float((absent < np.quantile(there, 1 - share)).mean()) if is_known else None
        figures[f"refused_at_{round(100 * share)}"] = refused
    return figures


# The whole report


def make_report(
    evaluated: Evaluated, sentences: Mapping[str, dict[str, Any]] | None = None, **meta: Any
) -> dict[str, Any]:
    """Computes the figures of every split.

    Args:
        evaluated: the results of every split.
        sentences: figures of sentences without images (`decision_figures`).
        meta: what was evaluated and how; at least the data's SPEC as `source`.
    """
    tables = {name: results.rows for name, results in evaluated.items()}
    splits = {name: split_figures(rows) for name, rows in tables.items()}
    images = {name: len(results.source) for name, results in evaluated.items()}
    benchmarks = {}
    for name, results in evaluated.items():
        benchmark = find_benchmark(images[name], splits[name])
        if benchmark and not results.source.is_procedural:
            benchmarks[name] = benchmark
    meta |= {
        "variant": "lisa",
        "resolution": "original",
        "images": images,
        "images_seen": {
            name: None if results.seen is None else len(results.seen)
            for name, results in evaluated.items()
        },
        "data_sha256": {name: results.data_sha256 for name, results in evaluated.items()},
        "benchmark": benchmarks,
        "version": r2sm_jax.__version__,
    }
    pooled = [tables[name] for name in PRESENCE_SPLITS if name in tables]
    return {
        "splits": splits,
        "presence": presence_figures(np.concatenate([counts.NO_ROWS, *pooled])),
        "sentences": dict(sentences or {}),
        "meta": meta,
    }


def find_benchmark(num_images: int, figures: Mapping[str, Any]) -> str | None:
    """Finds the R2SM dataset whose validation split has these numbers of images and queries (Table
    1), so that published figures stand beside no other data; None if none has."""
    counts = [num_images, figures["amodal"]["queries"], figures["modal"]["queries"]]
    for name in PAPER["table_2"]:
        images, _, num_amodal, num_modal, _ = PAPER["table_1"][name]["val"]
        if counts == [images, num_amodal, num_modal]:
            return name
    return None
