"""Masks in the layouts of annotation files, and polygons drawn by OpenCV."""

import pytest
from annotation_files import mask

from r2sm_jax.data import masks
from r2sm_jax.tools.entries import draw_polygon, read_mask

SIZE = 20, 30
SQUARE = [2, 3, 12, 3, 12, 9, 2, 9]
POINTS = [[2, 3], [12, 3], [12, 9], [2, 9]]


@pytest.mark.parametrize(
    "value",
    [
        SQUARE,
        [SQUARE],
        POINTS,
        [POINTS],
        masks.encode(mask(2, 3, 12, 9)),
        [masks.encode(mask(2, 3, 12, 9))],
    ],
)
def test_layouts_of_one_mask(value):
    result, num_short = read_mask(value, SIZE)
    assert (result == mask(2, 3, 12, 9)).all() and num_short == 0


def test_unions_and_short_rings():
    two = [masks.encode(mask(0, 0, 4, 4)), masks.encode(mask(2, 2, 8, 8))]
    assert (read_mask(two, SIZE)[0] == mask(0, 0, 4, 4) | mask(2, 2, 8, 8)).all()
    result, num_short = read_mask([POINTS, [[1, 1], [2, 2]], []], SIZE)
    assert (result == mask(2, 3, 12, 9)).all() and num_short == 2
    assert read_mask([SQUARE, [1.0, 2.0, 3.0, 4.0]], SIZE)[1] == 1


@pytest.mark.parametrize(
    "value", [[], [[1, 1, 2, 2]], [[[1, 2, 3]] * 4], [[1, 2], 3], "x", None, [[0, 0, "a", 1, 2, 3]]]
)
def test_what_is_no_mask(value):
    with pytest.raises(ValueError):
        read_mask(value, SIZE)


def test_the_outline_belongs_to_a_polygon_and_points_are_cut_to_whole_pixels():
    assert (
        draw_polygon([[2.9, 3.9], [12.9, 3.1], [12.2, 9.8], [2.1, 9.7]], SIZE) == mask(2, 3, 13, 10)
    ).all()
    assert (draw_polygon([[-0.9, 5.5]], SIZE) == mask(0, 5, 1, 6)).all()
    assert (draw_polygon([[4, 5], [9, 5]], SIZE) == mask(4, 5, 10, 6)).all()
    assert draw_polygon([[-9, -9], [60, -9], [60, 60], [-9, 60]], SIZE).all()
    assert not draw_polygon([[40, 40], [2_000_000_000, 40], [40, 90]], SIZE).any()


@pytest.mark.parametrize(
    "points", [[], [1, 2], [[1]], [[1, 2, 3]], [[1, float("nan")]], [[1, 1e300]], [["a", 1]], [{}]]
)
def test_what_are_no_points(points):
    with pytest.raises(ValueError, match="not a list of points"):
        draw_polygon(points, SIZE)
