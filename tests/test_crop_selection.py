"""Calibration of completer and outliner: what is fitted, and that answers follow it."""

from typing import Any

import numpy as np
import pytest
from scipy.special import expit, logit

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.evaluation.calibration import fit_kind
from r2sm_jax.evaluation.completion import ObjectScore
from r2sm_jax.evaluation.crop_selection import (
    MeasuredObject,
    fit_completer,
    fit_completions,
    fit_hidden,
)
from r2sm_jax.inference.crop_models import (
    OUTSIDE_LOGIT,
    CompleterCalibration,
    Drawing,
    KindCalibration,
    MaskCompleter,
)


def test_a_predicted_iou_that_is_too_high_is_brought_down_and_low_ones_are_unsure():
    rng = np.random.default_rng(0)
    predicted = rng.uniform(0.5, 0.95, 400)
    true = expit(2 * logit(predicted) - 2) + rng.normal(0, 0.02, 400)
    kind = fit_kind(predicted, true)
    assert np.abs(kind.iou(predicted) - true).mean() < 0.03
    sure = true[kind.iou(predicted) >= kind.unsure_below]
    assert 0.8 <= np.mean(sure > 0.5) < 1
    assert fit_kind(predicted[:20], true[:20]) == KindCalibration()  # too few


def test_where_the_predicted_iou_says_nothing_the_agreement_of_crops_counts():
    rng = np.random.default_rng(0)
    predicted, agreement = rng.uniform(0.7, 0.9, 300), rng.uniform(0.1, 0.9, 300)
    kind = fit_kind(predicted, agreement, agreement)
    assert np.abs(kind.iou(predicted, agreement) - agreement).mean() < 0.03
    assert np.abs(fit_kind(predicted, agreement).iou(predicted) - agreement).mean() > 0.15


def test_the_probability_of_a_hidden_part_is_calibrated():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, 4000)
    is_hidden = rng.random(4000) < expit(0.5 * logits + 1)
    scale, shift = fit_hidden(logits, is_hidden)
    assert scale == pytest.approx(0.5, abs=0.05) and shift == pytest.approx(1, abs=0.15)


def measured(hidden_share: float, kept: float, completed: float, logit: float) -> MeasuredObject:
    scores = [ObjectScore(iou, 0.0, hidden_share) for iou in (kept, completed)]
    return MeasuredObject(scores[0], [scores[1]], completed, logit)


def test_what_is_unlikely_to_be_hidden_is_kept_where_that_is_better():
    hidden = [measured(0.3, 0.7, 0.9, 2 + k / 50) for k in range(50)]
    others = [measured(0.0, 1.0, 0.8, -2 - k / 50) for k in range(50)]
    kind, scores = fit_completions(hidden + others, 0)
    assert 0 < kind.kept_below < 1
    assert [score.amodal_iou for score in scores] == 50 * [0.9] + 50 * [1.0]
    # Nothing is kept where completing is always better.
    kind, _ = fit_completions(hidden + [measured(0.0, 0.8, 0.9, -2) for _ in range(50)], 0)
    assert kind.kept_below == 0


class Halves(MaskCompleter):
    """Completes the upper half of a square with a logit of 1, and nothing else."""

    def __init__(self, iou: float, hidden_logit: float):
        self.threshold, self.calibration = 0.0, CompleterCalibration()
        self.says = iou, hidden_logit

    def draw(self, image: np.ndarray, visible_masks: Any, others: Any):
        for mask in visible_masks:
            logits = np.full(mask.shape, OUTSIDE_LOGIT, np.float32)
            logits[10:30, 10:30] = 1.0
            yield Drawing(logits, *self.says)


def square_picture() -> Sample:
    whole = np.zeros((40, 40), bool)
    whole[10:30, 10:30] = True
    front = whole.copy()
    front[20:] = False
    instances = Instance(1, "cup", whole & ~front, whole), Instance(2, "cat", front, None)
    return Sample(1, "a.png", np.zeros((40, 40, 3), np.uint8), instances, ())


def test_a_completer_gets_the_threshold_with_the_best_masks_and_its_scores():
    samples = 30 * [square_picture()]
    fitted, figures = fit_completer(Halves(0.6, 1.0), samples)
    assert fitted.threshold < 1 and figures["alone"]["hidden"]["amodal_iou"] == 1
    # 30 objects are too few to fit scores.
    assert fitted.calibration == CompleterCalibration()
    fitted, _ = fit_completer(Halves(0.6, 1.0), 2 * samples)
    sample = samples[0]
    (answer,) = fitted.complete(sample.image, [sample.instances[0].modal])
    assert answer.iou == pytest.approx(1, abs=0.01) and answer.hidden_probability > 0.9
