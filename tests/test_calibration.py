"""The temperature of the mask-type probability, the mask threshold, and the scales of predicted
IoUs and presence."""

import numpy as np
import pytest
from listed_source import ListedSource

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.evaluation.decisions import mask_type_scores
from r2sm_jax.evaluation.fit_calibration import (
    MASK_SHIFTS,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    MIN_VALUES,
    MISSED_SHARE,
    Measured,
    best_shift,
    calibrate,
    fit_kind,
    fit_masks,
    fit_presence,
    fit_temperature,
    fit_unsure,
)
from r2sm_jax.evaluation.iou import overlap, overlaps_at_shifts
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.prompts import Request
from r2sm_jax.models.calibration import Calibration
from r2sm_jax.query import Query
from r2sm_jax.synthetic.queries.sentences import intent_sentences


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
    kind = fit_kind(1 / (1 + np.exp(-(logits + 1.2) / 0.7)), true)
    assert kind.iou_scale == pytest.approx(0.7, abs=0.02)
    assert kind.iou_shift == pytest.approx(-1.2, abs=0.02)


def test_so_many_of_what_is_there_are_missed_as_is_allowed():
    logits = np.random.default_rng(0).normal(4, 3, 2000)
    missed = logits + fit_presence(logits, -1.0) < -1
    assert missed.mean() == pytest.approx(MISSED_SHARE, abs=0.001)
    assert fit_presence(logits[: MIN_VALUES - 1], -1.0) == 0


def test_overlaps_at_shifts_are_those_of_masks_at_each_threshold():
    logits = np.array([[-2, -0.5, 0.25, 0.75], [3, 0.5, 0, -1]], np.float32)
    truth = np.array([[False, False, True, True], [True, False, False, True]])
    ignore = np.array([[False, False, False, True], [False, False, False, False]])
    shifts = np.array([-0.75, 0.0, 0.5, 4.0])
    # A pixel whose logit is the shift itself is not mask.
    expected = [[2, 6, 5, 3], [2, 4, 3, 3], [1, 3, 1, 3], [0, 3, 0, 3]]
    assert overlaps_at_shifts(logits, truth, shifts, ignore).tolist() == expected

    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (9, 7)).astype(np.float32)
    truth, ignore = rng.random((2, 9, 7)) < 0.4
    at_shifts = overlaps_at_shifts(logits, truth, MASK_SHIFTS, ignore)
    for shift, counts in zip(MASK_SHIFTS, at_shifts, strict=True):
        assert tuple(counts) == overlap(logits > shift, truth, ignore)


def test_the_shift_with_the_highest_mean_iou_is_best_and_the_smallest_of_equal_ones():
    iou = np.full((MIN_VALUES, len(MASK_SHIFTS)), 0.5)
    assert MASK_SHIFTS[best_shift(iou)] == 0
    iou[:, (MASK_SHIFTS > 0.25) & (MASK_SHIFTS < 0.75)] = 0.6
    assert MASK_SHIFTS[best_shift(iou)] == pytest.approx(0.3)
    assert MASK_SHIFTS[best_shift(iou[1:])] == 0


def test_of_the_answers_that_are_not_unsure_four_of_five_are_right():
    predicted = np.linspace(0, 1, 101)
    # The best fifty are right, the others wrong: 50 of 62 are more than four of five.
    true = np.where(predicted > 0.505, 0.9, 0.1)
    below = fit_unsure(predicted, true)
    sure = predicted >= below
    assert np.mean(true[sure] > 0.5) >= 0.8
    assert sure.sum() == 62

    assert fit_unsure(predicted, np.full(101, 0.4)) == 1.0
    assert fit_unsure(predicted, np.full(101, 0.6)) == 0.0
    assert fit_unsure(predicted[1:50], true[1:50]) == 0.3


class HaloPredictor(Predictor):
    """Finds the left half of every image, and is a little less sure of a halo around it."""

    def __init__(self, predictor: Predictor):
        vars(self).update(vars(predictor))

    def predict_logits(self, *inputs, **options):
        outputs = super().predict_logits(*inputs, **options)
        for of_image in outputs:
            for number, output in enumerate(of_image):
                logits = np.full_like(output.masks, -5)
                side = logits.shape[-1]
                logits[..., : side * 3 // 4] = 0.35
                logits[..., : side // 2] = 0.47
                of_image[number] = output._replace(masks=logits)
        return outputs


def test_the_mask_threshold_is_fitted_and_predicted_ious_follow_it(predictor):
    size = predictor.config.vision.image_size
    left = np.zeros((size, size), bool)
    left[:, : size // 2] = True
    image = np.zeros((size, size, 3), np.uint8)
    samples = []
    for n in range(MIN_VALUES // 2):
        queries = (
            Query(2 * n, "the mug", "modal", (1,)),
            Query(2 * n + 1, "the whole mug", "amodal", (1,)),
        )
        instance = Instance(1, "mug", left, left)
        samples.append(Sample(n, f"{n}.png", image, (instance,), queries))

    halo = HaloPredictor(predictor)
    sentences = intent_sentences("calibration")
    fitted = calibrate(halo, ListedSource(samples), sentences, "dev", fit_absence=False)
    assert fitted.mask_shift == pytest.approx(0.4)
    # Without the halo masks are right, and the predicted IoUs say so.
    calibrated = halo.updated(calibration=fitted)
    ((prediction,),) = calibrated.predict_batches([image], [["the mug"]])
    assert prediction.score > 0.9
    texts = [sentence.text for sentence in sentences]
    raw = halo.updated(calibration=Calibration()).amodal_logits(texts)
    temperature = fitted.type_temperature
    np.testing.assert_allclose(calibrated.amodal_logits(texts), raw / temperature, rtol=1e-5)

    of_few = calibrate(halo, ListedSource(samples[1:]), sentences, "dev", fit_absence=False)
    assert of_few.mask_shift == 0 and of_few.unsure_below == 0.3


def test_masks_are_judged_as_empty_as_the_fitted_presence_makes_them():
    """A bias that lets most targets pass brings back masks which are empty without it."""
    right, wrong = np.full(len(MASK_SHIFTS), 0.8), np.zeros(len(MASK_SHIFTS))
    answers = [Measured(presence, 0.8, True, right) for presence in np.linspace(-5, -3, 100)]
    answers += [Measured(-9.0, 0.2, False, wrong) for _ in range(100)]
    fitted = fit_masks(answers, -1.0, fit_absence=True)
    assert fitted.presence_bias == pytest.approx(4 - 2 * MISSED_SHARE, abs=0.01)
    assert fitted.unsure_below < 1  # 96 answers are right, and nothing else is answered
    assert fit_masks(answers, -1.0, fit_absence=False).unsure_below == 0.3  # nothing is answered


def test_a_shift_of_the_threshold_changes_masks_alone_and_compiles_nothing(predictor):
    image = np.arange(40 * 50 * 3, dtype=np.uint8).reshape(40, 50, 3)

    def predict(shift):
        shifted = predictor.updated(calibration=Calibration(mask_shift=shift, presence_bias=100.0))
        asked = shifted.frame(image), [Request("the mug", "amodal")]
        (found,) = shifted.stream([asked], lambda a: a, lambda _, p: list(p), with_logits=True)
        return found[0]

    before = predict(0.0)
    num_programs = predictor._decode._cache_size()
    # So that some pixels of the mask go and others stay.
    shift = float(np.median(before.mask_logits))
    after = predict(shift)
    assert predictor._decode._cache_size() == num_programs
    assert 0 < after.mask.sum() < after.mask.size
    np.testing.assert_allclose(after.mask_logits, before.mask_logits - shift, atol=1e-5)
    np.testing.assert_array_equal(after.mask, after.mask_logits > 0)
    assert (after.amodal | ~after.modal).all()
    assert after.score == before.score and after.presence == before.presence
