"""Metrics of decisions about the mask type, from arrays: scores, correlation and calibration."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped
from scipy.stats import mannwhitneyu

from r2sm_jax.query import MASK_TYPES

NUM_BINS = 10
"""Number of bins of a calibration curve."""


def mask_type_scores(
    probability: Float[np.ndarray, " n"],
    is_amodal: Bool[np.ndarray, " n"],
    predicted: Bool[np.ndarray, " n"] | None = None,
) -> dict[str, Any]:
    """Scores decisions for amodal, which is the positive class.

    Returns accuracy (of all, of modal and of amodal queries), F1, Matthews correlation, confusion
    counts, and the calibration of the probabilities. Figures are None where they are undefined.

    Args:
        probability: of amodal; NaN where there is none, which calibration leaves out.
        is_amodal: the truth.
        predicted: the decisions; by default probabilities above 0.5.
    """
    if not len(probability):
        names = ("accuracy", *MASK_TYPES, "f1", "mcc", "ece", "confusion", "reliability")
        return dict.fromkeys(names)
    if predicted is None:
        predicted = probability > 0.5
    tn, fp, fn, tp = np.bincount(2 * is_amodal + predicted, minlength=4).tolist()

    curve = None
    ece = None
    is_known = ~np.isnan(probability)
    if is_known.any():
        curve = reliability(probability[is_known], is_amodal[is_known])
        gaps = [abs(b["confidence"] - b["accuracy"]) * b["queries"] for b in curve]
        ece = sum(gaps) / int(is_known.sum())
    return {
        "accuracy": (tp + tn) / len(predicted),
        "modal": tn / (tn + fp) if tn + fp else None,
        "amodal": tp / (tp + fn) if tp + fn else None,
        "f1": 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else None,
        "mcc": matthews_correlation(tp, fp, fn, tn),
        "ece": ece,
        "confusion": {
            "amodal_as_amodal": tp,
            "amodal_as_modal": fn,
            "modal_as_amodal": fp,
            "modal_as_modal": tn,
        },
        "reliability": curve,
    }


def reliability(
    probability: Float[np.ndarray, " n"], is_amodal: Bool[np.ndarray, " n"]
) -> list[dict[str, float]]:
    """Computes the calibration curve of decisions, over confidences from 0.5 to 1.

    The mean gap of confidence and accuracy, weighted by queries, is the calibration error (ECE; Guo
    et al. 2017, arXiv 1706.04599).
    """
    confidence = np.maximum(probability, 1 - probability)
    is_right = (probability > 0.5) == is_amodal
    # Confidences lie in 0.5..1, and the bins divide that range.
    return calibration_curve((confidence - 0.5) * 2, confidence, is_right)


def matthews_correlation(tp: int, fp: int, fn: int, tn: int) -> float | None:
    """Computes the Matthews correlation of yes-no decisions; None where it is undefined."""
    # As floats: the product of four counts exceeds 64 bits from about 50,000 queries.
    denominator = float(np.sqrt(float(tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    return (tp * tn - fp * fn) / denominator if denominator else None


def calibration_curve(
    position: Float[np.ndarray, " n"],
    confidence: Float[np.ndarray, " n"],
    accuracy: Shaped[np.ndarray, " n"],
) -> list[dict[str, float]]:
    """Returns the number of queries, mean confidence and mean accuracy of each bin that has any.

    Args:
        position: in 0..1, selects one of `NUM_BINS` bins of equal width.
    """
    bins = np.minimum((position * NUM_BINS).astype(int), NUM_BINS - 1)
    curve = []
    for b in np.unique(bins):
        in_bin = bins == b
        point: dict[str, float] = {"queries": int(in_bin.sum())}
        point["confidence"] = float(confidence[in_bin].mean())
        point["accuracy"] = float(accuracy[in_bin].mean())
        curve.append(point)
    return curve


def area_under_curve(higher: Float[np.ndarray, " n"], lower: Float[np.ndarray, " m"]) -> float:
    """Returns the share of pairs of one value of each in the right order, where equal ones count
    half: the area under the ROC curve."""
    num_right = mannwhitneyu(higher, lower, method="asymptotic").statistic
    return float(num_right / (len(higher) * len(lower)))
