"""Computes the figures of a report from the results of queries.

A report passes through four files, and no other file computes, formats or draws one of its numbers:

    scorer.py     prediction and truth of a query       -> `QueryResult`: counts of pixels
    report.py     results of a split                    -> figures as a dict, `report.json`
    tables.py     figures                               -> tables and text, `report.md`
    page.py       tables, pictures, charts              -> `report.html`

This file selects the queries of each figure. What a figure is, is defined in docs/metrics.md and
computed by iou.py (masks), instances.py (detections) and decisions.py (mask types).
"""

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

import r2sm_jax
from r2sm_jax.evaluation.decisions import (
    area_under_curve,
    calibration_curve,
    mask_type_scores,
)
from r2sm_jax.evaluation.instances import (
    cgf1_figures,
    instance_figures,
    muse,
    occlusion_figures,
)
from r2sm_jax.evaluation.iou import (
    VARIANTS,
    Overlap,
    Scores,
    interval,
    iou_ratios,
    lisa,
    lisa_iou,
    precision_at,
)
from r2sm_jax.evaluation.scorer import Evaluated, QueryResult
from r2sm_jax.query import MASK_TYPES, MaskType, Query, Sentence, keyword_mask_type

MAX_OCCLUSION = {"none": 0.0, "0-0.15": 0.15, "0.15-0.25": 0.25, "0.25-0.40": 0.40, "0.40-1": 1.0}
"""Upper edges of the occlusion bins. An edge belongs to the bin below it."""
MAX_AREA = {"small": 32**2, "medium": 96**2, "large": 1e10}
"""Upper edges of the bins by area of the target in pixels, as in COCO."""

PRESENCE_SPLITS = ("all", "val", "val_absent")
"""Whose queries together say how well presence is known. In the other splits names are new, or
hard."""
FOUND = (0.95, 0.90)
"""The shares of what is there that are found where refusals are compared."""

Results = Sequence[QueryResult]
OTHER_TYPE: dict[MaskType, MaskType] = {"modal": "amodal", "amodal": "modal"}

PAPER: dict[str, Any] = tomllib.loads(
    files("r2sm_jax.evaluation").joinpath("published.toml").read_text(encoding="utf-8")
)
"""Tables 1 to 3 of R2SM (arXiv 2506.01795)."""


def stack(overlaps: Iterable[Overlap | None]) -> Int[np.ndarray, "n 4"]:
    """Returns overlaps as rows, without those that are None."""
    rows = [overlap for overlap in overlaps if overlap is not None]
    return np.array(rows, np.int64).reshape(-1, 4)


def split_figures(results: Results) -> dict[str, Any]:
    """Computes all figures of one split from the results of all of its queries."""
    overlaps = stack(result.overlap for result in results)
    detections = [result.detections for result in results]
    variants = {name: variant(overlaps) for name, variant in VARIANTS.items()}
    decisions = decision_figures(results)
    return {
        "all": mask_figures(results),
        "modal": mask_figures([r for r in results if r.mask_type == "modal"]),
        "amodal": mask_figures([r for r in results if r.mask_type == "amodal"]),
        "mask_type": decisions,
        "pairs": pair_figures(results),
        "cgf1": cgf1_figures(detections, decisions["mcc"]),
        "predicted_iou": predicted_iou_figures(results),
        "references": reference_figures(results),
        "variants": variants | {"muse": muse(detections)},
        "breakdowns": breakdowns(results),
    }


def mask_figures(results: Results) -> dict[str, Any]:
    """Computes the figures of the masks of some queries, with intervals over images."""
    overlaps = stack(result.overlap for result in results)
    occluded = stack(result.occluded_overlap for result in results)
    boundary = stack(result.boundary for result in results)
    occluded_iou = lisa(occluded)
    complete_iou = lisa(stack(result.complete_overlap for result in results))

    images = np.array([result.truth.image_id for result in results], np.int64)
    # One row a query, NaN where it does not count, so that all figures resample the same images.
    occluded_rows = [result.occluded_overlap or [np.nan] * 4 for result in results]
    ratios = iou_ratios(overlaps, np.array(occluded_rows, float).reshape(-1, 4), boundary)
    # COCOeval breaks ties of scores by the order of queries.
    in_order = sorted(results, key=lambda result: result.query.id)
    detections = [result.detections for result in in_order]
    return {
        **lisa(overlaps),
        "occluded_iou": occluded_iou["giou"],
        "occluded_ciou": occluded_iou["ciou"],
        "complete_iou": complete_iou["giou"],
        "complete_ciou": complete_iou["ciou"],
        "boundary_iou": lisa(boundary)["giou"],
        "wrong_type_gap": wrong_type_gap(results),
        "leak": leak(results),
        **precision_at(overlaps),
        "queries": len(results),
        "occluded_queries": len(occluded),
        "interval": {name: interval(images, ratio) for name, ratio in ratios.items()},
        **instance_figures(detections),
        **occlusion_figures(detections),
    }


def wrong_type_gap(results: Results) -> float | None:
    """Computes the mean IoU of the answer with the requested mask less that with the other one.

    It is over the queries whose two true masks differ, and tells how much better an answer fits the
    requested mask than the other one.
    """
    hidden = [result for result in results if result.has_hidden_part]
    requested = lisa_iou(stack(result.overlap for result in hidden))
    other = lisa_iou(stack(r.overlaps.of_type(OTHER_TYPE[r.mask_type]) for r in hidden))
    return float((requested - other).mean()) if hidden else None


def leak(results: Results) -> float | None:
    """Computes the mean share of the hidden part that answers to modal queries paint.

    That is |P ∩ (A − M)| / |A − M|, over modal queries whose target is partly hidden.
    """
    shares = []
    for result in results:
        if result.mask_type == "modal" and result.has_hidden_part:
            modal, amodal = result.overlaps
            painted = amodal.intersection - modal.intersection
            shares.append(painted / (amodal.truth - modal.truth))
    return float(np.mean(shares)) if shares else None


# References: the same masks with another decision, and the true masks of one type for all.

RULES: dict[str, Callable[[QueryResult], MaskType]] = {
    "always_modal": lambda result: "modal",
    "always_amodal": lambda result: "amodal",
    "keyword": lambda result: keyword_mask_type(result.query.text),
    "oracle_type": lambda result: result.mask_type,
}
"""Other decisions."""


def reference_figures(results: Results) -> dict[str, Scores]:
    """Computes gIoU and cIoU of every reference; None where the system gives one mask only."""
    figures = {}
    for name, rule in RULES.items():
        answers = []
        for result in results:
            if result.overlaps_of_both is not None:
                answers.append(
                    result.overlaps_of_both.of_type(rule(result)).of_type(result.mask_type)
                )
        figures[name] = lisa(stack(answers))
    for mask_type in MASK_TYPES:
        answers = [overlap_of_truth(r, mask_type) for r in results if r.truth.has_amodal]
        figures[f"true_{mask_type}_for_all"] = lisa(stack(answers))
    return figures


def overlap_of_truth(result: QueryResult, mask_type: MaskType) -> Overlap:
    """Returns the overlap of one true mask as the answer.

    It tells what a split allows to a system with perfect masks that does not understand the type.
    """
    predicted = result.overlaps.of_type(mask_type).truth
    truth = result.overlap.truth
    # The modal mask lies in the amodal one.
    return Overlap(min(predicted, truth), max(predicted, truth), predicted, truth)


# Breakdowns by kind of query


def breakdowns(results: Results) -> dict[str, dict[str, Any]]:
    """Computes gIoU, cIoU, occluded IoU and number of queries of each group of every breakdown."""
    members: dict[str, dict[str, list[QueryResult]]] = {}
    for result in results:
        for breakdown, group in groups_of(result).items():
            groups = members.setdefault(breakdown, {})
            if group is not None:
                groups.setdefault(group, []).append(result)
    # Bins stand in their order, other groups by name.
    order = [*MAX_OCCLUSION, *MAX_AREA]
    figures: dict[str, dict[str, Any]] = {}
    for breakdown, groups in members.items():
        figures[breakdown] = {}
        for name in sorted(groups, key=lambda name: (name in order and order.index(name), name)):
            figures[breakdown][name] = {
                **lisa(stack(result.overlap for result in groups[name])),
                "occluded_iou": lisa(stack(r.occluded_overlap for r in groups[name]))["giou"],
                "queries": len(groups[name]),
            }
    return figures


def groups_of(result: QueryResult) -> dict[str, str | None]:
    """Returns the group of a query in each breakdown; None where it belongs to none."""
    kind = result.query.kind
    modal, amodal = result.overlaps
    occlusion = None
    if result.truth.has_amodal and amodal.truth:
        occlusion = bin_of(1 - modal.truth / amodal.truth, MAX_OCCLUSION)
    area = result.overlap.truth
    return {
        "task": kind.get("task"),
        "difficulty": {True: "hard", False: "easy"}.get(kind.get("hard", "")),
        "instances": {True: "several", False: "one"}.get(kind.get("multi", "")),
        "occlusion": occlusion,
        "size": bin_of(area, MAX_AREA) if area else None,
    }


def bin_of(value: float, upper_edges: Mapping[str, float]) -> str:
    """Returns the name of the first bin whose upper edge a value does not exceed."""
    return next(name for name, edge in upper_edges.items() if value <= edge)


# Decisions about the mask type


def decision_figures(results: Results) -> dict[str, Any]:
    """Computes the figures of the decisions about the mask type, with an interval over images."""
    decided = [result for result in results if result.said.mask_type is not None]
    return sentence_figures(
        [result.query for result in decided],
        np.array([result.said.mask_type == "amodal" for result in decided], bool),
        [result.said.amodal_probability for result in decided],
        np.array([result.truth.image_id for result in decided], np.int64),
    )


def sentence_figures(
    sentences: Sequence[Sentence | Query],
    predicted: Bool[np.ndarray, " n"],
    probabilities: Sequence[float | None],
    units: Int[np.ndarray, " n"] | None = None,
) -> dict[str, Any]:
    """Computes the figures of decisions about sentences.

    Args:
        sentences: with the types that they ask for.
        predicted: the decisions.
        probabilities: of amodal; where one is None, the decisions count as certain, and have no
            calibration.
        units: what is resampled for the interval, such as images; by default sentences.
    """
    if units is None:
        units = np.arange(len(sentences))
    calibrated = None not in probabilities
    probability = np.array(probabilities if calibrated else predicted, float)
    is_amodal = np.array([sentence.mask_type == "amodal" for sentence in sentences], bool)
    # As a ratio of sums, right decisions over decisions, so that units can be resampled.
    is_right = (predicted == is_amodal).astype(float)
    keyword_right = [keyword_mask_type(s.text) == s.mask_type for s in sentences]
    return {
        **mask_type_scores(probability, is_amodal, predicted, calibrated=calibrated),
        "keyword": float(np.mean(keyword_right)) if sentences else None,
        "interval": {"accuracy": interval(units, (is_right, np.ones(len(sentences))))},
    }


def pair_figures(results: Results) -> Scores:
    """Computes shares of the pairs of a modal and an amodal sentence about the same instances.

    A system that ignores the sentence answers both alike. Returns `both_right`, `swapped`,
    `both_modal`, `both_amodal`, which sum to 1, and the number of `pairs`.
    """
    # Decisions by image and instances, then by the requested type.
    decisions: dict[Any, dict[str, list[str]]] = {}
    for result in results:
        if result.said.mask_type is not None and result.query.instance_ids:
            target = (result.truth.image_id, frozenset(result.query.instance_ids))
            by_type = decisions.setdefault(target, {"modal": [], "amodal": []})
            by_type[result.mask_type].append(result.said.mask_type)

    counts: Counter[tuple[str, ...]] = Counter()
    for by_type in decisions.values():
        counts.update(product(by_type["modal"], by_type["amodal"]))

    def share(*pair: str) -> float | None:
        return counts[pair] / counts.total() if counts else None

    return {
        "both_right": share("modal", "amodal"),
        "swapped": share("amodal", "modal"),
        "both_modal": share("modal", "modal"),
        "both_amodal": share("amodal", "amodal"),
        "pairs": counts.total(),
    }


def predicted_iou_figures(results: Results) -> dict[str, Any]:
    """Computes the mean absolute error of the predicted IoU, and its calibration curve.

    Only queries that have a target count: without one, the IoU is 0 or 1 by presence alone.
    """
    counted = [r for r in results if r.said.predicted_iou is not None and r.overlap.truth]
    if not counted:
        return {"error": None, "curve": []}
    predicted = np.array([result.said.predicted_iou for result in counted], float)
    iou = lisa_iou(stack(result.overlap for result in counted))
    error = float(np.abs(predicted - iou).mean())
    return {"error": error, "curve": calibration_curve(predicted, predicted, iou)}


def presence_figures(results: Results) -> dict[str, Any]:
    """Computes how well `presence` tells queries that have a target from those without.

    `refused_at_95`: the share of those without whose presence is below the limit above which 95 %
    of the others are. None where one of the two kinds is missing, or presence is not said.
    """
    said = [result for result in results if result.said.presence is not None]
    presence = np.array([result.said.presence for result in said], float)
    has_target = np.array([result.overlap.truth > 0 for result in said], bool)
    there, absent = presence[has_target], presence[~has_target]
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
        sentences: figures of sentences without images (`sentence_figures`).
        meta: what was evaluated and how; at least the data's SPEC as `source`.
    """
    splits = {name: split_figures(results.results) for name, results in evaluated.items()}
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
    pooled = []
    for name in PRESENCE_SPLITS:
        pooled += evaluated[name].results if name in evaluated else []
    return {
        "splits": splits,
        "presence": presence_figures(pooled),
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
