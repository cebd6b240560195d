"""Numbers that are fitted when the weights stand still, so that what the model says of its answers
is honest.

The temperature of the mask type is fitted on sentences that nothing is trained on; how good a mask
is, and whether anything is there, on the split that selects checkpoints. Nothing here changes a
mask, except that some become empty.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, logit

TEMPERATURES = 0.2, 5.0
"""Smallest and largest temperature of the mask type."""
FEWEST = 50
"""Answers from which something is fitted."""
MISSED = 0.04
"""Share of the things that are there that the model may answer with nothing."""


def fit_temperature(logits: Float[np.ndarray, " n"], amodal: Bool[np.ndarray, " n"]) -> float:
    """The temperature T at which sigmoid(logits / T) has the smallest cross entropy.

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2.
    """
    signed = np.where(amodal, logits, -logits)

    def cross_entropy(log_temperature: float) -> float:
        return float(np.logaddexp(0, -signed / np.exp(log_temperature)).mean())

    found: Any = minimize_scalar(
        cross_entropy, bounds=tuple(np.log(TEMPERATURES)), method="bounded"
    )
    return float(np.exp(found.x))


def fit_iou(
    predicted: Float[np.ndarray, " n"], true: Float[np.ndarray, " n"]
) -> tuple[float, float]:
    """The scale and shift of the logits of predicted IoUs with which they are nearest to the true
    ones, by the mean absolute error; (1, 0) where there are few."""
    if len(true) < FEWEST:
        return 1.0, 0.0
    logits = logit(np.clip(predicted, 0.001, 0.999))

    def error(fit: np.ndarray) -> float:
        return float(np.abs(expit(abs(fit[0]) * logits + fit[1]) - true).mean())

    found: Any = minimize(error, (1.0, 0.0), method="Nelder-Mead")
    return abs(float(found.x[0])), float(found.x[1])


def fit_presence(logits: Float[np.ndarray, " n"], threshold: float) -> float:
    """What to add to the logits of things that are there, so that `MISSED` of them are below the
    threshold; 0 where there are few."""
    return float(threshold - np.quantile(logits, MISSED)) if len(logits) >= FEWEST else 0.0
