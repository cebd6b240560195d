"""The temperature of the mask-type probability, and the scales of predicted IoUs and presence."""

import numpy as np
import pytest

from r2sm_jax.evaluation.decisions import mask_type_scores
from r2sm_jax.models.r2sm import Calibration
from r2sm_jax.train import calibrate_type
from r2sm_jax.training.calibration import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    MIN_VALUES,
    MISSED_SHARE,
    fit_iou,
    fit_presence,
    fit_temperature,
)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_labels_were_drawn_with_is_found(temperature):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, 20_000)
    amodal = rng.random(len(logits)) < 1 / (1 + np.exp(-logits / temperature))
    actual = fit_temperature(logits, amodal)
    assert actual == pytest.approx(temperature, rel=0.05)
    probability = 1 / (1 + np.exp(-logits / actual))
    assert mask_type_scores(probability, amodal)["ece"] < 0.02


def test_a_perfect_head_gets_the_smallest_temperature_and_a_wrong_one_the_largest():
    logits, amodal = np.array([-3.0, 2.0, 5.0]), np.array([False, True, True])
    assert fit_temperature(logits, amodal) == pytest.approx(MIN_TEMPERATURE, rel=0.01)
    assert fit_temperature(logits, ~amodal) == pytest.approx(MAX_TEMPERATURE, rel=0.01)


def test_the_scale_and_shift_that_predicted_ious_are_wrong_by_are_found():
    rng = np.random.default_rng(0)
    true = rng.uniform(0.05, 0.95, 500)
    logits = np.log(true / (1 - true))
    scale, shift = fit_iou(1 / (1 + np.exp(-(logits + 1.2) / 0.7)), true)
    assert (scale, shift) == (pytest.approx(0.7, abs=0.02), pytest.approx(-1.2, abs=0.02))
    assert fit_iou(true[: MIN_VALUES - 1], true[: MIN_VALUES - 1]) == (1, 0)


def test_so_many_of_what_is_there_are_missed_as_is_allowed():
    logits = np.random.default_rng(0).normal(4, 3, 2000)
    missed = logits + fit_presence(logits, -1.0) < -1
    assert missed.mean() == pytest.approx(MISSED_SHARE, abs=0.001)
    assert fit_presence(logits[: MIN_VALUES - 1], -1.0) == 0


def test_calibration_changes_scores_and_empties_masks_and_compiles_nothing(predictor):
    image = np.full((40, 50, 3), 90, np.uint8)

    def predict(**changes):
        calibrated = predictor.updated(calibration=Calibration(**changes))
        return calibrated.predict(["the mug"], image=image)[0]

    before = predict()
    num_programs = predictor._decode._cache_size()
    shifted = predict(iou_shift=2.0)
    absent = predict(presence_bias=-100.0)
    assert predictor._decode._cache_size() == num_programs

    raw = np.log(before.score / (1 - before.score))
    assert shifted.score == pytest.approx(1 / (1 + np.exp(-raw - 2)), rel=1e-4)
    np.testing.assert_array_equal(shifted.mask, before.mask)
    assert absent.presence < 1e-3 and "nothing of the kind" in absent.summary()
    assert not (absent.modal.any() or absent.amodal.any() or absent.instances)


def test_only_the_temperature_changes_and_probabilities_follow_it(predictor):
    sentences = ["the whole mug", "the mug"]
    before = Calibration(type_temperature=7.0, iou_scale=0.5, iou_shift=0.1, presence_bias=0.2)
    fitted = calibrate_type(predictor, before)
    temperature = fitted.type_temperature
    assert fitted == before._replace(type_temperature=temperature)
    assert MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE and temperature != 1

    raw = predictor.updated(calibration=Calibration()).amodal_logits(sentences)
    logits = predictor.updated(calibration=fitted).amodal_logits(sentences)
    np.testing.assert_allclose(logits, raw / temperature, rtol=1e-5)
    assert calibrate_type(predictor, fitted) == fitted
