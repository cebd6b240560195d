"""Quality of the decisions about the mask type. Amodal is the positive class."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float

BINS = 10


def decision_scores(predicted: Bool[np.ndarray, " n"], requested: Bool[np.ndarray, " n"]) -> dict[str, Any]:
    """Accuracy, F1, Matthews correlation and the confusion counts of decisions for amodal; no calibration.

    F1 and MCC are None where they are undefined, and everything is None without queries.
    """
    if not len(predicted):
        return dict.fromkeys(("accuracy", "f1", "mcc", "ece", "confusion", "reliability"))
    tp, tn = int((predicted & requested).sum()), int((~predicted & ~requested).sum())
    fp, fn = int((predicted & ~requested).sum()), int((~predicted & requested).sum())
    denominator = float(np.sqrt(float(tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    return {
        "accuracy": (tp + tn) / len(predicted),
        "f1": 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else None,
        "mcc": (tp * tn - fp * fn) / denominator if denominator else None,
        "ece": None,
        "confusion": {"amodal_as_amodal": tp, "amodal_as_modal": fn, "modal_as_amodal": fp, "modal_as_modal": tn},
        "reliability": None,
    }


def mask_type_scores(probability: Float[np.ndarray, " n"], requested: Bool[np.ndarray, " n"]) -> dict[str, Any]:
    """The same from probabilities of amodal, which decide above 0.5, and the calibration of the probabilities."""
    scores = decision_scores(probability > 0.5, requested)
    if len(probability):
        scores |= {"ece": calibration_error(probability, requested), "reliability": reliability(probability, requested)}
    return scores


def _confidence(
    probability: Float[np.ndarray, " n"], requested: Bool[np.ndarray, " n"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence in each decision, whether it was right, and its bin."""
    confidence = np.maximum(probability, 1 - probability)
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    return confidence, (probability > 0.5) == requested, bins


def calibration_error(probability: Float[np.ndarray, " n"], requested: Bool[np.ndarray, " n"]) -> float:
    """Mean gap between confidence in the decision and how often it is right, weighted by bin size
    (Guo et al. 2017, arXiv 1706.04599)."""
    confidence, right, bins = _confidence(probability, requested)
    gaps = [abs(confidence[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    return float(sum(gaps))


def reliability(probability: Float[np.ndarray, " n"], requested: Bool[np.ndarray, " n"]) -> list[dict[str, float]]:
    """For each of the 10 bins of confidence that has queries: their number, mean confidence and accuracy."""
    confidence, right, bins = _confidence(probability, requested)
    return [
        {
            "queries": int((bins == b).sum()),
            "confidence": float(confidence[bins == b].mean()),
            "accuracy": float(right[bins == b].mean()),
        }
        for b in np.unique(bins)
    ]
