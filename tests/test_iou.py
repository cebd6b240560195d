"""Intervals by bootstrap, and overlaps of outlines. test_metrics.py has the other IoUs."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.ndimage import binary_erosion

from r2sm_jax.data import masks
from r2sm_jax.evaluation.iou import boundary, boundary_overlap, boundary_width, interval, overlap

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


# Outlines.


def blobs(seed: int, height: int, width: int) -> np.ndarray:
    """Two masks that touch edges, have holes and differ a little."""
    rng = np.random.default_rng(seed)
    rough = rng.random((2, -(-height // 5), -(-width // 5))) < rng.choice([0.02, 0.6])
    return rough.repeat(5, 1).repeat(5, 2)[:, :height, :width] & (
        rng.random((2, height, width)) < 0.97
    )


def by_definition(mask: np.ndarray, width: int) -> np.ndarray:
    """What `width` erosions by a 3 x 3 square take away, the image lying in emptiness."""
    inner = binary_erosion(np.pad(mask, 1), np.ones((3, 3)), iterations=width)[1:-1, 1:-1]
    return mask & ~inner


@given(
    seed=st.integers(0, 10**6),
    height=st.integers(1, 70),
    width=st.integers(1, 90),
    ignores=st.booleans(),
)
def test_counts_are_those_of_the_definition(seed, height, width, ignores):
    drawn, truth = blobs(seed, height, width)
    reach = boundary_width(height, width)
    ignore = np.random.default_rng(seed).random((height, width)) < 0.1 if ignores else None
    np.testing.assert_array_equal(boundary(truth, reach), by_definition(truth, reach))
    expected = overlap(by_definition(drawn, reach), by_definition(truth, reach), ignore)
    assert boundary_overlap(masks.encode(drawn), masks.encode(truth), ignore) == expected


@pytest.mark.parametrize(("size", "width"), [((4, 4), 1), ((480, 640), 16), ((1440, 1920), 48)])
def test_the_width_is_a_fiftieth_of_the_diagonal(size, width):
    assert boundary_width(*size) == width


def test_an_outline_that_is_off_counts_for_more_than_its_pixels():
    truth = np.zeros((100, 100), bool)
    truth[10:90, 10:90] = True
    drawn = np.roll(truth, 2, axis=1)
    drawn_rle, rle = masks.encode(drawn), masks.encode(truth)
    outlines, whole = boundary_overlap(drawn_rle, rle), overlap(drawn, truth)
    assert outlines.intersection / outlines.union < 0.6 < 0.9 < whole.intersection / whole.union
    empty = masks.encode(np.zeros_like(truth))
    assert (
        boundary_overlap(empty, empty) == (0, 0, 0, 0)
        and boundary_overlap(rle, empty).intersection == 0
    )
