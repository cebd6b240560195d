"""Post-hoc calibration of the mask type, the predicted IoU and the presence of a target.

The weights do not change. The temperature of the mask type is fitted on sentences that nothing is
trained on; IoU and presence on the split that selects checkpoints. Masks stay as they are, except
those whose presence falls below its threshold: they become empty.
"""

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, logit

MIN_TEMPERATURE = 0.2
MAX_TEMPERATURE = 5.0
MIN_VALUES = 50
"""With fewer queries nothing is fitted, since it would follow their noise."""
MISSED_SHARE = 0.04
"""The share of targets that are there for which the model may answer that nothing is."""


def fit_temperature(logits: Float[np.ndarray, " n"], amodal: Bool[np.ndarray, " n"]) -> float:
    """The temperature T at which sigmoid(logits / T) has the smallest cross entropy.

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2.
    """
    signed = np.where(amodal, logits, -logits)

    def cross_entropy(log_temperature: float) -> float:
        return float(np.logaddexp(0, -signed / np.exp(log_temperature)).mean())

    bounds = np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE)
    optimum = minimize_scalar(cross_entropy, bounds=bounds, method="bounded")
    return float(np.exp(optimum.x))


def fit_iou(
    predicted: Float[np.ndarray, " n"], true: Float[np.ndarray, " n"]
) -> tuple[float, float]:
    """The scale and shift of the logits of predicted IoUs with which they are nearest to the true
    ones, by the mean absolute error; (1, 0) where there are few."""
    if len(true) < MIN_VALUES:
        return 1.0, 0.0
    logits = logit(np.clip(predicted, 0.001, 0.999))

    # The scale is positive, so that the order of the predicted IoUs stays.
    def error(scale_and_shift: np.ndarray) -> float:
        scale, shift = scale_and_shift
        return float(np.abs(expit(abs(scale) * logits + shift) - true).mean())

    # The mean absolute error has kinks, which Nelder-Mead does not mind.
    optimum = minimize(error, (1.0, 0.0), method="Nelder-Mead")
    scale, shift = optimum.x
    return abs(float(scale)), float(shift)


def fit_presence(logits: Float[np.ndarray, " n"], threshold: float) -> float:
    """The bias with which `MISSED_SHARE` of the presence logits of targets that are there fall
    below the threshold; 0 where there are few."""
    if len(logits) < MIN_VALUES:
        return 0.0
    return float(threshold - np.quantile(logits, MISSED_SHARE))
