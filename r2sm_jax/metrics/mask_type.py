"""How well the mask type was decided: amodal is the positive class."""

import numpy as np

BINS = 10


def mask_type_scores(probability: np.ndarray, wants_amodal: np.ndarray) -> dict[str, float | None]:
    """Accuracy, F1, Matthews correlation and expected calibration error (10 equal bins of confidence).

    `probability` float [n] of amodal, `wants_amodal` bool [n]. F1 and MCC are None where they are undefined, and
    everything is None without queries.
    """
    if not len(probability):
        return dict.fromkeys(("accuracy", "f1", "mcc", "ece"))
    said = probability > 0.5
    tp, tn = int((said & wants_amodal).sum()), int((~said & ~wants_amodal).sum())
    fp, fn = int((said & ~wants_amodal).sum()), int((~said & wants_amodal).sum())
    denominator = float(np.sqrt(float(tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    return {
        "accuracy": (tp + tn) / len(said),
        "f1": 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else None,
        "mcc": (tp * tn - fp * fn) / denominator if denominator else None,
        "ece": calibration_error(probability, wants_amodal),
    }


def calibration_error(probability: np.ndarray, wants_amodal: np.ndarray) -> float:
    """Mean gap between confidence in the decision and how often it is right, weighted by bin size
    (Guo et al. 2017, arXiv 1706.04599)."""
    confidence = np.maximum(probability, 1 - probability)
    right = (probability > 0.5) == wants_amodal
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    gaps = [abs(confidence[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    return float(sum(gaps))
