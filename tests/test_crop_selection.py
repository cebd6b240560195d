"""Calibration of completer and outliner: what is fitted, and that answers follow it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, logit
from stub_predictor import StubCompleter, StubOutliner

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.evaluation.completion import ObjectScore
from r2sm_jax.evaluation.crop_selection import (
    MeasuredObject,
    fit_completer,
    fit_completions,
    fit_hidden,
    fit_outliner,
)
from r2sm_jax.evaluation.fit_calibration import MIN_VALUES, fit_kind
from r2sm_jax.inference.crop_models import OUTSIDE_LOGIT, MaskCompleter, RawCompletion
from r2sm_jax.models.calibration import NOT_CALIBRATED, Calibration


def test_where_the_predicted_iou_says_nothing_the_agreement_of_crops_counts():
    rng = np.random.default_rng(0)
    predicted, agreement = rng.uniform(0.7, 0.9, 300), rng.uniform(0.1, 0.9, 300)
    kind = fit_kind(predicted, agreement, agreement)
    assert np.abs(kind.iou(predicted, agreement) - agreement).mean() < 0.03
    assert np.abs(fit_kind(predicted, agreement).iou(predicted) - agreement).mean() > 0.15


def test_one_formula_serves_arrays_of_numpy_and_of_jax():
    kind = Calibration(iou_scale=2.0, iou_shift=-1.0, agreement_scale=0.5)
    predicted, agreement = np.array([0.0, 0.3, 0.9, 1.0]), np.array([0.5, 0.1, 0.8, 1.0])
    expected = expit(
        2 * logit(predicted.clip(0.001, 0.999)) + 0.5 * logit(agreement.clip(0.001, 0.999)) - 1
    )
    np.testing.assert_allclose(kind.iou(predicted, agreement), expected, rtol=1e-9)
    of_jax = jax.jit(Calibration.iou)(kind, jnp.array(predicted), jnp.array(agreement))
    np.testing.assert_allclose(of_jax, expected, atol=1e-6)


def test_the_probability_of_a_hidden_part_is_calibrated():
    rng = np.random.default_rng(0)
    logits, added = rng.normal(0, 3, 4000), np.exp(rng.normal(-2, 1, 4000))
    is_hidden = rng.random(4000) < expit(0.5 * logits + np.log(added) + 3)
    kind = fit_hidden(logits, added, is_hidden)
    fitted = kind.hidden_scale, kind.added_scale, kind.hidden_shift
    assert fitted == pytest.approx((0.5, 1, 3), abs=0.25)
    # Without a fit the logit is that of the network, whatever is added.
    assert NOT_CALIBRATED.hidden_logit(1.5, 0.3) == 1.5


def test_what_adds_a_tenth_where_something_is_hidden_is_likely_to_be_hidden():
    """The token of the network says little of these objects, and the mask nearly all."""
    rng = np.random.default_rng(0)
    objects = []
    for is_hidden in 200 * (True, False):
        added = rng.uniform(0.05, 0.6) if is_hidden else rng.exponential(0.02)
        one = measured(0.3 * is_hidden, 0.9, 0.9, rng.normal(is_hidden - 1, 1), added)
        objects.append(one)
    kind, scores = fit_completions(objects, 0)
    told = [
        score.hidden_probability > 0.5
        for one, score in zip(objects, scores, strict=True)
        if score.is_hidden and one.added[0] >= 0.1
    ]
    assert len(told) > 150 and np.mean(told) >= 0.95
    # By the token alone most of them are said to be whole.
    alone = kind._replace(added_scale=0.0, hidden_shift=0.0, hidden_scale=1.0)
    assert (
        np.mean([alone.hidden_logit(one.hidden_logit, one.added[0]) > 0 for one in objects]) < 0.6
    )


def measured(
    hidden_share: float, kept: float, completed: float, logit: float, added: float = 0.1
) -> MeasuredObject:
    scores = [ObjectScore(iou, 0.0, hidden_share) for iou in (kept, completed)]
    return MeasuredObject(scores[0], [scores[1]], [added], completed, logit)


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
        self.threshold, self.calibration = 0.0, {}
        self.says = iou, hidden_logit

    def draw(self, image: np.ndarray, visible_masks: Any, all_visible: Any):
        for mask in visible_masks:
            logits = np.full(mask.shape, OUTSIDE_LOGIT, np.float32)
            logits[10:30, 10:30] = 1.0
            yield RawCompletion(logits, *self.says)


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
    assert set(fitted.calibration.values()) == {NOT_CALIBRATED}
    fitted, _ = fit_completer(Halves(0.6, 1.0), 2 * samples)
    sample = samples[0]
    (answer,) = fitted.complete(sample.image, [sample.instances[0].modal])
    assert answer.iou == pytest.approx(1, abs=0.01) and answer.hidden_probability > 0.9
    # What it draws tells, too: a kind that looks at the added share alone.
    told = fitted.updated(
        calibration={"alone": Calibration(hidden_scale=0.0, added_scale=4.0, hidden_shift=2.0)}
    )
    (answer,) = told.complete(sample.image, [sample.instances[0].modal])
    assert answer.hidden_probability == pytest.approx(expit(2 + 4 * np.log(1.0)))
    (whole,) = told.complete(sample.image, [sample.instances[0].amodal])
    assert whole.hidden_probability < 0.01


class Boxes(StubOutliner):
    """Fills boxes, and has a calibration."""

    def __init__(self):
        self.calibration = {}


def test_complete_masks_of_boxes_and_clicks_are_kinds_of_their_own():
    samples = MIN_VALUES * [square_picture()]
    outliner, figures = fit_outliner(Boxes(), samples, StubCompleter())
    assert set(outliner.calibration) == {"box", "click", "completed_box", "completed_click"}
    # The box of the upper half is right, and a half of the complete square.
    assert figures["box"]["iou"] == 1
    kind = outliner.calibration["completed_box"]
    assert kind.iou(Boxes.predicted_iou * StubCompleter.iou) == pytest.approx(0.5, abs=0.01)
    few, _ = fit_outliner(Boxes(), samples[1:], StubCompleter())
    assert set(few.calibration) == {"box", "click"}
