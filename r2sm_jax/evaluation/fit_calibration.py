"""Post-hoc calibration of the mask type, the mask threshold, the predicted IoU, the presence of a
target, and of which answers are called unsure.

The weights do not change. The temperature of the mask type is fitted on sentences that nothing is
trained on; all else on the split that selects checkpoints. Masks whose presence falls below its
threshold become empty. crop_selection.py fits the kinds of answers of completer and outliner with
`fit_kind`, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize, minimize_scalar
from scipy.special import logit

from r2sm_jax.config import LEARNED_HEADS, UNSURE_BELOW
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.evaluation.evaluator import answer_all
from r2sm_jax.evaluation.iou import lisa_iou, overlaps_at_shifts
from r2sm_jax.evaluation.scorer import QueryTruth
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.models.calibration import NOT_CALIBRATED, Calibration
from r2sm_jax.query import Sentence

MIN_TEMPERATURE = 0.2
MAX_TEMPERATURE = 5.0
MIN_VALUES = 50
"""With fewer queries nothing is fitted, since it would follow their noise."""
MASK_SHIFTS = np.arange(-18, 17) / 10
"""Shifts of the mask threshold that are tried: with the default of `ModelConfig.mask_threshold`,
logits from -2.4 to 1. One of them is exactly 0."""
MISSED_SHARE = 0.05
"""The share of targets that are there for which the model may answer that nothing is."""
RIGHT_FROM = 0.5
"""The IoU above which an answer is called right."""
RIGHT_SHARE = 0.8
"""The share of right answers among those that are not called unsure."""
MIN_SURE = 10
"""So many answers are not called unsure, else all are: the share among fewer says little."""
ALWAYS_PRESENT = 20.0
"""A bias of the presence logit with which no mask is empty for want of presence."""


def calibrate(
    predictor: Predictor,
    source: Source,
    sentences: Sequence[Sentence],
    split: str,
    *,
    fit_absence: bool,
) -> Calibration:
    """Fits the calibration to the answers of a predictor, whose own calibration does not count.

    The head answers validation queries in training wordings almost without error. A temperature
    fitted on those would make it overconfident on everything else.

    Args:
        predictor: the segmenter.
        source: the split that selects checkpoints.
        sentences: for the temperature of the mask type, as new to the head as what users write.
        split: the name of `source`, for the progress that is shown.
        fit_absence: fit the presence too, where training data have queries without a target.
    """
    temperature = 1.0
    if predictor.config.head in LEARNED_HEADS:
        is_amodal = np.array([sentence.mask_type == "amodal" for sentence in sentences], bool)
        uncalibrated = predictor.updated(calibration=NOT_CALIBRATED)
        logits = uncalibrated.amodal_logits([sentence.text for sentence in sentences])
        temperature = fit_temperature(logits, is_amodal)
    present = predictor.updated(calibration=Calibration(presence_bias=ALWAYS_PRESENT))
    measured = answer_all(present, source, measure, split, with_logits=True)
    answers = [answer for _, answer in measured if answer is not None]
    threshold = predictor.config.presence_threshold
    fitted = fit_masks(answers, threshold, fit_absence=fit_absence)
    return fitted._replace(type_temperature=temperature)


class Measured(NamedTuple):
    """What is known of the answer to one query, if its mask is not empty for want of presence."""

    presence: float
    """Logit that the image has what the query means, without a bias."""
    predicted_iou: float
    has_target: bool
    iou: Float[np.ndarray, " s"]
    """The true IoU at each of `MASK_SHIFTS`."""


def measure(prediction: Prediction, truth: QueryTruth) -> Measured:
    """Compares a prediction that was made with the bias `ALWAYS_PRESENT` with the truth."""
    assert prediction.mask_logits is not None and prediction.score is not None
    requested = masks.expand(truth.requested)
    ignored = None if truth.ignored is None else masks.expand(truth.ignored)
    overlaps = overlaps_at_shifts(prediction.mask_logits, requested, MASK_SHIFTS, ignored)
    return Measured(
        presence=float(logit(prediction.presence)) - ALWAYS_PRESENT,
        predicted_iou=prediction.score,
        has_target=bool(overlaps[0, 3]),
        iou=lisa_iou(overlaps),
    )


def fit_masks(answers: Sequence[Measured], threshold: float, *, fit_absence: bool) -> Calibration:
    """Fits all but the temperature. Masks are empty where presence is not above its threshold."""
    presence = np.array([answer.presence for answer in answers], float)
    predicted = np.array([answer.predicted_iou for answer in answers], float)
    has_target = np.array([answer.has_target for answer in answers], bool)
    iou = np.array([answer.iou for answer in answers], float).reshape(-1, len(MASK_SHIFTS))

    # First, since it decides which masks are empty.
    presence_bias = fit_presence(presence[has_target], threshold) if fit_absence else 0.0
    is_answered = presence + presence_bias > threshold
    # An empty mask is right where there is no target.
    iou[~is_answered] = ~has_target[~is_answered, None]

    index = best_shift(iou)
    words = Calibration(presence_bias=presence_bias, mask_shift=float(MASK_SHIFTS[index]))
    words = fit_kind(predicted[has_target], iou[has_target, index], fitted=words)
    # Also answers about things that are not there: they are wrong.
    calibrated = words.iou(predicted[is_answered])
    return words._replace(unsure_below=fit_unsure(calibrated, iou[is_answered, index]))


def fit_temperature(logits: Float[np.ndarray, " n"], amodal: Bool[np.ndarray, " n"]) -> float:
    """Finds the temperature T at which sigmoid(logits / T) has the smallest cross entropy.

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2.
    """
    signed = np.where(amodal, logits, -logits)

    def cross_entropy(log_temperature: float) -> float:
        return float(np.logaddexp(0, -signed / np.exp(log_temperature)).mean())

    bounds = np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE)
    optimum = minimize_scalar(cross_entropy, bounds=bounds, method="bounded")
    return float(np.exp(optimum.x))


def fit_kind(
    predicted: Float[np.ndarray, " n"],
    true: Float[np.ndarray, " n"],
    agreement: Float[np.ndarray, " n"] | None = None,
    fitted: Calibration = NOT_CALIBRATED,
) -> Calibration:
    """Finds the scale and shift of the logits of predicted IoUs with which they are nearest to the
    true ones, by the mean absolute error, and which answers are called unsure then.

    Args:
        predicted: IoUs of the answers of one kind.
        true: their IoUs with the truth.
        agreement: that of the crops around clicks, whose logits get a scale as well.
        fitted: the calibration so far, returned as it is where there are few answers.
    """
    if len(true) < MIN_VALUES:
        return fitted
    said = [predicted]
    start, first_steps = [1.0, 0.0], [0.5, 0.5]  # of scale and shift
    if agreement is not None:
        said.append(agreement)
        start.append(0.1)
        first_steps.append(0.9)

    # Scales are positive, so that the order of the predicted IoUs stays.
    def make(values: np.ndarray) -> Calibration:
        scale, shift, *scales = values.tolist()
        return fitted._replace(
            iou_scale=abs(scale),
            iou_shift=shift,
            agreement_scale=abs(scales[0]) if scales else 0.0,
        )

    def error(values: np.ndarray) -> float:
        return float(np.abs(make(values).iou(*said) - true).mean())

    # The mean absolute error has kinks, which Nelder-Mead does not mind. Its own first simplex
    # would be 0.00025 wide along the shift, which starts at 0, and may stay there.
    simplex = np.vstack([start, start + np.diag(first_steps)])
    options = {"initial_simplex": simplex, "maxiter": 2000}
    kind = make(minimize(error, start, method="Nelder-Mead", options=options).x)
    return kind._replace(unsure_below=fit_unsure(kind.iou(*said), true))


def best_shift(iou: Float[np.ndarray, "n s"]) -> int:
    """Returns the index of the shift of `MASK_SHIFTS` with the highest mean IoU over n queries.

    Where several have it, that of the smallest shift; that of 0 where there are few queries.
    """
    order = np.argsort(np.abs(MASK_SHIFTS), kind="stable")
    if len(iou) < MIN_VALUES:
        return int(order[0])
    return int(order[np.argmax(iou.mean(0)[order])])


def fit_presence(logits: Float[np.ndarray, " n"], threshold: float) -> float:
    """Finds the bias with which `MISSED_SHARE` of the presence logits of targets that are there
    fall below the threshold; 0 where there are few."""
    if len(logits) < MIN_VALUES:
        return 0.0
    return float(threshold - np.quantile(logits, MISSED_SHARE))


def fit_unsure(predicted: Float[np.ndarray, " n"], true: Float[np.ndarray, " n"]) -> float:
    """Finds the predicted IoU below which answers are called unsure, so that of the others at least
    `RIGHT_SHARE` are right.

    The smallest such value; 1, so that all answers are unsure, if there is none; `UNSURE_BELOW`
    where there are few answers.
    """
    if len(true) < MIN_VALUES:
        return UNSURE_BELOW
    order = np.argsort(-predicted, kind="stable")
    is_right = true[order] > RIGHT_FROM
    share = np.cumsum(is_right) / np.arange(1, len(true) + 1)
    enough = np.flatnonzero(share[MIN_SURE - 1 :] >= RIGHT_SHARE)
    if not len(enough):
        return 1.0
    return float(predicted[order[enough[-1] + MIN_SURE - 1]])
