import numpy as np
import pytest

from r2sm_jax.evaluation.iou import interval

RNG = np.random.default_rng(0)
IMAGES = np.repeat(np.arange(400), 5)
ONES = np.ones(len(IMAGES))


def test_independent_queries_have_the_interval_of_the_mean():
    values = RNG.random(len(IMAGES))
    low, high = interval(IMAGES, (values, ONES)) or (0, 0)
    error = 1.96 * values.std() / np.sqrt(len(values))
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.1 * error)
    assert (high - low) / 2 == pytest.approx(error, rel=0.15)


def test_queries_of_one_image_that_go_together_make_it_wider():
    values = np.repeat(RNG.random(400), 5)
    low, high = interval(IMAGES, (values, ONES)) or (0, 0)
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / np.sqrt(400), rel=0.15)


def test_differences_on_the_same_images_are_paired():
    values = np.repeat(RNG.random(400), 5)
    low, high = interval(IMAGES, (values + 0.01, ONES), minus=(values, ONES)) or (0, 0)
    assert low == pytest.approx(0.01) and high == pytest.approx(0.01)


def test_where_there_is_no_interval():
    assert interval(np.zeros(0, np.int64), (np.zeros(0), np.zeros(0))) is None
    assert interval(np.ones(8, np.int64), (np.ones(8), np.ones(8))) is None
    only_one_counts = (IMAGES == 3).astype(float)
    assert interval(IMAGES, (only_one_counts, only_one_counts)) is None
