"""Post-hoc calibration of the mask type, the mask threshold, the predicted IoU, the presence of a
target, and of which answers are called unsure.

The weights do not change. The temperature of the mask type is fitted on sentences that nothing is
trained on; all else on the split that selects checkpoints. Masks whose presence falls below its
threshold become empty.
"""

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, logit

MIN_TEMPERATURE = 0.2
MAX_TEMPERATURE = 5.0
MIN_VALUES = 50
"""With fewer queries nothing is fitted, since it would follow their noise."""
MASK_SHIFTS = np.arange(-18, 17) / 10
"""Shifts of the mask threshold that are tried: with the default of `ModelConfig.mask_threshold`,
logits from -2.4 to 1. One of them is exactly 0."""
MISSED_SHARE = 0.04
"""The share of targets that are there for which the model may answer that nothing is."""
RIGHT_FROM = 0.5
"""The IoU above which an answer is called right."""
RIGHT_SHARE = 0.8
"""The share of right answers among those that are not called unsure."""
MIN_SURE = 10
"""So many answers are not called unsure, else all are: the share among fewer says little."""


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

    # The scale is positive, so that the order of the predicted IoUs stays.
    def error(scale_and_shift: np.ndarray) -> float:
        scale, shift = scale_and_shift
        return float(np.abs(calibrated_iou(predicted, abs(scale), shift) - true).mean())

    # The mean absolute error has kinks, which Nelder-Mead does not mind. Its own first simplex
    # would be 0.00025 wide along the shift, which starts at 0, and may stay there.
    simplex = [(1.0, 0.0), (1.5, 0.0), (1.0, 0.5)]
    optimum = minimize(
        error, simplex[0], method="Nelder-Mead", options={"initial_simplex": simplex}
    )
    scale, shift = optimum.x
    return abs(float(scale)), float(shift)


def best_shift(iou: Float[np.ndarray, "n s"]) -> int:
    """The index of the shift of `MASK_SHIFTS` with the highest mean IoU over n queries.

    Where several have it, that of the smallest shift; that of 0 where there are few queries.
    """
    order = np.argsort(np.abs(MASK_SHIFTS), kind="stable")
    if len(iou) < MIN_VALUES:
        return int(order[0])
    return int(order[np.argmax(iou.mean(0)[order])])


def fit_presence(logits: Float[np.ndarray, " n"], threshold: float) -> float:
    """The bias with which `MISSED_SHARE` of the presence logits of targets that are there fall
    below the threshold; 0 where there are few."""
    if len(logits) < MIN_VALUES:
        return 0.0
    return float(threshold - np.quantile(logits, MISSED_SHARE))


def calibrated_iou(
    predicted: Float[np.ndarray, " n"], scale: float, shift: float
) -> Float[np.ndarray, " n"]:
    """Predicted IoUs with the scale and shift of their logits, as the model computes them."""
    return expit(scale * logit(np.clip(predicted, 0.001, 0.999)) + shift)


def fit_unsure(
    predicted: Float[np.ndarray, " n"], true: Float[np.ndarray, " n"], default: float
) -> float:
    """The predicted IoU below which answers are called unsure, so that of the others at least
    `RIGHT_SHARE` are right.

    The smallest such value; 1, so that all answers are unsure, if there is none; `default` where
    there are few answers.
    """
    if len(true) < MIN_VALUES:
        return default
    order = np.argsort(-predicted, kind="stable")
    is_right = true[order] > RIGHT_FROM
    share = np.cumsum(is_right) / np.arange(1, len(true) + 1)
    enough = np.flatnonzero(share[MIN_SURE - 1 :] >= RIGHT_SHARE)
    if not len(enough):
        return 1.0
    return float(predicted[order[enough[-1] + MIN_SURE - 1]])
