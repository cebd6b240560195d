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
from r2sm_jax.data.dataset import Source
from r2sm_jax.evaluation.decisions import calibration_curve, mask_type_scores
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
from r2sm_jax.evaluation.scorer import EvalResults, QueryResult
from r2sm_jax.query import MASK_TYPES, MaskType, Query, Sentence, keyword_mask_type

MAX_OCCLUSION = {"none": 0.0, "0-0.15": 0.15, "0.15-0.25": 0.25, "0.25-0.40": 0.40, "0.40-1": 1.0}
"""Upper edges of the occlusion bins. An edge belongs to the bin below it."""
MAX_AREA = {"small": 32**2, "medium": 96**2, "large": 1e10}
"""Upper edges of the bins by area of the target in pixels, as in COCO."""

PAPER: dict[str, Any] = tomllib.loads(
    files("r2sm_jax.evaluation").joinpath("published.toml").read_text(encoding="utf-8")
)
"""Tables 1 to 3 of R2SM (arXiv 2506.01795)."""

Evaluated = Mapping[str, tuple[Source, EvalResults]]
"""The data of each split, and the results of its queries."""


def stack(overlaps: Iterable[Overlap | None]) -> Int[np.ndarray, "n 4"]:
    """Returns overlaps as rows, without those that are None."""
    rows = [overlap for overlap in overlaps if overlap is not None]
    return np.array(rows, np.int64).reshape(-1, 4)


def split_figures(results: Sequence[QueryResult]) -> dict[str, Any]:
    """Computes all figures of one split from the results of all of its queries."""
    overlaps = stack(result.overlap for result in results)
    detections = [result.detections for result in results]
    variants = {name: variant(overlaps) for name, variant in VARIANTS.items()}
    variants["muse"] = muse(detections)
    figures: dict[str, Any] = {"all": mask_figures(results)}
    for mask_type in MASK_TYPES:
        figures[mask_type] = mask_figures([r for r in results if r.mask_type == mask_type])
    figures["mask_type"] = decision_figures(results)
    figures["pairs"] = pair_figures(results)
    figures["cgf1"] = cgf1_figures(detections, figures["mask_type"]["mcc"])
    figures["predicted_iou"] = predicted_iou_figures(results)
    figures["references"] = reference_figures(results)
    figures["variants"] = variants
    figures["breakdowns"] = breakdowns(results)
    return figures


def mask_figures(results: Sequence[QueryResult]) -> dict[str, Any]:
    """Computes the figures of the masks of some queries, with intervals over images."""
    overlaps = stack(result.overlap for result in results)
    occluded = stack(result.occluded_overlap for result in results)
    complete = stack(result.amodal_overlap for result in results)
    boundary = stack(result.boundary for result in results)
    occluded_iou = lisa(occluded)
    complete_iou = lisa(complete)
    figures: dict[str, Any] = {
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
    }

    images = np.array([result.truth.image_id for result in results], np.int64)
    # One row a query, NaN where it does not count, so that all figures resample the same images.
    occluded_rows = [result.occluded_overlap or [np.nan] * 4 for result in results]
    ratios = iou_ratios(overlaps, np.array(occluded_rows, float).reshape(-1, 4), boundary)
    figures["interval"] = {name: interval(images, ratio) for name, ratio in ratios.items()}
    # COCOeval breaks ties of scores by the order of queries.
    in_order = sorted(results, key=lambda result: result.query.id)
    detections = [result.detections for result in in_order]
    return figures | instance_figures(detections) | occlusion_figures(detections)


def wrong_type_gap(results: Sequence[QueryResult]) -> float | None:
    """Computes the mean IoU of the answer with the requested mask less that with the other one.

    It is over the queries whose two true masks differ, and tells how much better an answer fits the
    requested mask than the other one.
    """
    gaps = []
    for result in results:
        modal, amodal = result.answer
        # modal ⊆ amodal, so equal areas are equal masks.
        if amodal is not None and amodal.truth != modal.truth:
            other = modal if result.mask_type == "amodal" else amodal
            requested_iou, other_iou = lisa_iou(stack([result.overlap, other]))
            gaps.append(requested_iou - other_iou)
    return float(np.mean(gaps)) if gaps else None


def leak(results: Sequence[QueryResult]) -> float | None:
    """Computes the mean share of the hidden part that answers to modal queries paint.

    That is |P ∩ (A − M)| / |A − M|, over modal queries whose target is partly hidden.
    """
    shares = []
    for result in results:
        modal, amodal = result.answer
        if result.mask_type == "modal" and amodal is not None and amodal.truth > modal.truth:
            painted = amodal.intersection - modal.intersection
            shares.append(painted / (amodal.truth - modal.truth))
    return float(np.mean(shares)) if shares else None


# References: the same masks with another decision, and the true masks of one type for all.


def reference_figures(results: Sequence[QueryResult]) -> dict[str, Scores]:
    """Computes gIoU and cIoU of every reference; None where the system gives one mask only."""
    rules: dict[str, Callable[[QueryResult], MaskType]] = {
        "always_modal": lambda result: "modal",
        "always_amodal": lambda result: "amodal",
        "keyword": lambda result: keyword_mask_type(result.query.text),
        "oracle_type": lambda result: result.mask_type,
    }
    figures = {}
    for name, rule in rules.items():
        figures[name] = lisa(stack(overlap_with_type(result, rule(result)) for result in results))
    for mask_type in MASK_TYPES:
        answers = [overlap_of_truth(result, mask_type) for result in results]
        figures[f"true_{mask_type}_for_all"] = lisa(stack(answers))
    return figures


def overlap_with_type(result: QueryResult, mask_type: MaskType) -> Overlap | None:
    """Returns the overlap of the answer that the system would give with this decision."""
    answer = result.predicted_amodal if mask_type == "amodal" else result.predicted_modal
    if answer is None:
        return None
    return answer.with_amodal if result.mask_type == "amodal" else answer.with_modal


def overlap_of_truth(result: QueryResult, mask_type: MaskType) -> Overlap | None:
    """Returns the overlap of one true mask as the answer.

    It tells what a split allows to a system with perfect masks that does not understand the type.
    """
    modal, amodal = result.answer
    if amodal is None:
        return None
    predicted = modal.truth if mask_type == "modal" else amodal.truth
    truth = result.overlap.truth
    # The modal mask lies in the amodal one.
    return Overlap(min(predicted, truth), max(predicted, truth), predicted, truth)


# Breakdowns by kind of query


def breakdowns(results: Sequence[QueryResult]) -> dict[str, dict[str, Any]]:
    """Computes gIoU, cIoU, occluded IoU and number of queries of each group of every breakdown."""
    groups = [groups_of(result) for result in results]
    # Bins stand in their order, other groups by name.
    order = [*MAX_OCCLUSION, *MAX_AREA]
    figures: dict[str, dict[str, Any]] = {}
    for breakdown in groups[0] if groups else ():
        figures[breakdown] = {}
        names = {name for of in groups if (name := of[breakdown]) is not None}
        for name in sorted(names, key=lambda name: (name in order and order.index(name), name)):
            members = [r for r, of in zip(results, groups, strict=True) if of[breakdown] == name]
            figures[breakdown][name] = {
                **lisa(stack(result.overlap for result in members)),
                "occluded_iou": lisa(stack(r.occluded_overlap for r in members))["giou"],
                "queries": len(members),
            }
    return figures


def groups_of(result: QueryResult) -> dict[str, str | None]:
    """Returns the group of a query in each breakdown; None where it belongs to none."""
    kind = result.query.kind
    modal, amodal = result.answer
    occlusion = None
    if amodal is not None and amodal.truth:
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


def decision_figures(results: Sequence[QueryResult]) -> dict[str, Any]:
    """Computes the figures of the decisions about the mask type, with an interval over images."""
    decided = [result for result in results if result.predicted_type is not None]
    return sentence_figures(
        [result.query for result in decided],
        np.array([result.predicted_type == "amodal" for result in decided], bool),
        [result.amodal_probability for result in decided],
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


def pair_figures(results: Sequence[QueryResult]) -> Scores:
    """Computes shares of the pairs of a modal and an amodal sentence about the same instances.

    A system that ignores the sentence answers both alike. Returns `both_right`, `swapped`,
    `both_modal`, `both_amodal`, which sum to 1, and the number of `pairs`.
    """
    # Decisions by image and instances, then by the requested type.
    decisions: dict[Any, dict[str, list[str]]] = {}
    for result in results:
        if result.predicted_type is not None and result.query.instance_ids:
            target = (result.truth.image_id, frozenset(result.query.instance_ids))
            by_type = decisions.setdefault(target, {"modal": [], "amodal": []})
            by_type[result.mask_type].append(result.predicted_type)

    counts: Counter[tuple[str, str]] = Counter()
    for by_type in decisions.values():
        counts.update(product(by_type["modal"], by_type["amodal"]))
    num_pairs = counts.total()
    names = {
        "both_right": ("modal", "amodal"),
        "swapped": ("amodal", "modal"),
        "both_modal": ("modal", "modal"),
        "both_amodal": ("amodal", "amodal"),
    }
    figures: Scores = {
        name: counts[pair] / num_pairs if num_pairs else None for name, pair in names.items()
    }
    return figures | {"pairs": num_pairs}


def predicted_iou_figures(results: Sequence[QueryResult]) -> dict[str, Any]:
    """Computes the mean absolute error of the predicted IoU, and its calibration curve.

    Only queries that have a target count: without one, the IoU is 0 or 1 by presence alone.
    """
    counted = [r for r in results if r.predicted_iou is not None and r.overlap.truth]
    if not counted:
        return {"error": None, "curve": []}
    predicted = np.array([result.predicted_iou for result in counted], float)
    iou = lisa_iou(stack(result.overlap for result in counted))
    error = float(np.abs(predicted - iou).mean())
    return {"error": error, "curve": calibration_curve(predicted, predicted, iou)}


# The whole report


def make_report(
    evaluated: Evaluated, sentences: Mapping[str, dict[str, Any]] | None = None, **meta: Any
) -> dict[str, Any]:
    """Computes the figures of every split.

    Args:
        evaluated: source and results of every split.
        sentences: figures of sentences without images (`sentence_figures`).
        meta: what was evaluated and how; at least the data's SPEC as `source`.
    """
    splits = {}
    images = {}
    benchmarks = {}
    for name, (source, results) in evaluated.items():
        splits[name] = split_figures(results.results)
        images[name] = len(source)
        benchmark = find_benchmark(len(source), splits[name])
        if benchmark and not source.is_procedural:
            benchmarks[name] = benchmark
    meta |= {"variant": "lisa", "resolution": "original", "images": images}
    meta["data_sha256"] = {name: results.data_sha256 for name, (_, results) in evaluated.items()}
    meta |= {"benchmark": benchmarks, "version": r2sm_jax.__version__}
    return {"splits": splits, "sentences": dict(sentences or {}), "meta": meta}


def find_benchmark(num_images: int, figures: Mapping[str, Any]) -> str | None:
    """Finds the R2SM dataset whose validation split has these numbers of images and queries (Table
    1), so that published figures stand beside no other data; None if none has."""
    counts = [num_images, figures["amodal"]["queries"], figures["modal"]["queries"]]
    for name in PAPER["table_2"]:
        images, _, num_amodal, num_modal, _ = PAPER["table_1"][name]["val"]
        if counts == [images, num_amodal, num_modal]:
            return name
    return None
