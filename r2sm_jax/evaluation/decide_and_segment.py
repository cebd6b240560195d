"""Metrics of decision and masks together: SAM 3's cgF1, its form with the mask type, pairs of
sentences about one target, and what an answer paints of the hidden part."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.optimize import linear_sum_assignment

from r2sm_jax.evaluation.instances import QueryDetections, drop_ignored
from r2sm_jax.evaluation.iou import Scores
from r2sm_jax.evaluation.scorer import QueryResult
from r2sm_jax.query import MASK_TYPES

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)


def matthews_correlation(tp: int, fp: int, fn: int, tn: int) -> float | None:
    """The Matthews correlation of yes-no decisions; None where it is undefined."""
    denominator = float(np.sqrt(float(tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    return (tp * tn - fp * fn) / denominator if denominator else None


def positive_micro_f1(queries: Sequence[QueryDetections]) -> float | None:
    """F1 of the instances of queries that have a target, as the mean over the IoU thresholds.

    Detections and instances are paired for the greatest sum of IoUs. As in SAM 3's
    sam3/eval/cgf1_eval.py, queries without a target count in the correlation only.
    """
    num_truths = 0
    num_detections = 0
    num_right = np.zeros(len(IOU_THRESHOLDS), np.int64)
    for query in queries:
        iou, _, truth_areas = drop_ignored(query)
        if not len(truth_areas):
            continue
        num_truths += len(truth_areas)
        num_detections += len(iou)
        paired_iou = iou[linear_sum_assignment(-iou)]
        # An IoU at the threshold is right; 1e-9 undoes the rounding of linspace.
        num_right += (paired_iou[:, None] >= IOU_THRESHOLDS - 1e-9).sum(0)
    if not num_truths:
        return None
    return float(np.mean(2 * num_right / (num_truths + num_detections)))


def presence_correlation(queries: Sequence[QueryDetections]) -> float | None:
    """SAM 3's IL_MCC: the Matthews correlation of "there is a target" over queries."""
    counts = np.zeros(4, np.int64)
    for query in queries:
        iou, _, truth_areas = drop_ignored(query)
        counts[2 * (len(truth_areas) > 0) + (len(iou) > 0)] += 1
    tn, fp, fn, tp = counts.tolist()
    return matthews_correlation(tp, fp, fn, tn)


def cgf1_figures(queries: Sequence[QueryDetections], type_mcc: float | None) -> Scores:
    """cgF1 = F1 of the instances times the correlation of presence, and its typed form with the
    correlation of the mask type in place of presence. None where a factor is undefined."""
    f1 = positive_micro_f1(queries)
    presence_mcc = presence_correlation(queries)
    return {
        "positive_micro_f1": f1,
        "presence_mcc": presence_mcc,
        "cgf1": None if f1 is None or presence_mcc is None else f1 * presence_mcc,
        "typed_cgf1": None if f1 is None or type_mcc is None else f1 * type_mcc,
    }


def pair_figures(results: Sequence[QueryResult]) -> Scores:
    """Shares of the pairs of a modal and an amodal sentence about the same instances.

    A system that ignores the sentence answers both alike. Returns `both_right`, `swapped`,
    `both_modal`, `both_amodal`, which sum to 1, and the number of `pairs`.
    """
    # Decisions by image and instances, then by the requested type.
    decisions: dict[tuple[int, frozenset[int]], dict[str, list[str]]] = {}
    for result in results:
        if result.predicted_type is None or not result.query.instance_ids:
            continue
        target = (result.image_id, frozenset(result.query.instance_ids))
        by_type = decisions.setdefault(target, {mask_type: [] for mask_type in MASK_TYPES})
        by_type[result.mask_type].append(result.predicted_type)

    names = {
        ("modal", "amodal"): "both_right",
        ("amodal", "modal"): "swapped",
        ("modal", "modal"): "both_modal",
        ("amodal", "amodal"): "both_amodal",
    }
    counts = dict.fromkeys(names.values(), 0)
    for by_type in decisions.values():
        for pair in product(by_type["modal"], by_type["amodal"]):
            counts[names[pair]] += 1
    num_pairs = sum(counts.values())
    figures: Scores = {name: n / num_pairs if num_pairs else None for name, n in counts.items()}
    figures["pairs"] = num_pairs
    return figures


def leak(results: Sequence[QueryResult]) -> float | None:
    """Mean share of the hidden part that answers to modal queries paint: |P ∩ (A − M)| / |A − M|.

    Over modal queries whose target is partly hidden.
    """
    shares = []
    for result in results:
        modal, amodal = result.mask
        if result.mask_type == "amodal" or amodal is None or amodal.truth <= modal.truth:
            continue
        painted = amodal.intersection - modal.intersection
        shares.append(painted / (amodal.truth - modal.truth))
    return float(np.mean(shares)) if shares else None
