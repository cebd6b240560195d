"""Masks as run lengths, polygons and boxes, compared with pycocotools."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from pycocotools import mask as coco

from r2sm_jax.data import masks

any_mask = arrays.arrays(bool, st.tuples(st.integers(1, 40), st.integers(1, 40)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pycocotools
@settings(max_examples=60, deadline=None)
@given(any_mask)
def test_rle_round_trip_is_exact_and_goes_through_json(mask):
    rle = json.loads(json.dumps(masks.encode(mask)))
    decoded = masks.decode(rle)
    assert decoded.dtype == bool and decoded.flags.c_contiguous
    np.testing.assert_array_equal(decoded, mask)
    np.testing.assert_array_equal(
        coco.decode([{**rle, "counts": rle["counts"].encode()}])[..., 0], mask
    )


@settings(max_examples=100, deadline=None)
@given(any_mask, st.tuples(*4 * [st.integers(0, 2)]))
def test_counts_are_those_of_pycocotools(mask, margins):
    """Wherever the mask lies: at a border of the image, or away from it."""
    top, bottom, left, right = margins
    framed = np.pad(mask, ((top, bottom), (left, right)))
    for pixels in (framed, np.ones_like(framed), np.zeros_like(framed)):
        expected = coco.encode(np.asfortranarray(pixels, dtype=np.uint8))
        assert masks.encode(pixels)["counts"] == expected["counts"].decode()


@settings(max_examples=30, deadline=None)
@given(any_mask)
def test_uncompressed_counts_decode_to_the_same_mask(mask):
    flat = mask.T.reshape(-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat]))).tolist()
    runs = np.diff([0, *edges, len(flat)]).tolist()
    np.testing.assert_array_equal(masks.decode({"size": list(mask.shape), "counts": runs}), mask)


def test_large_masks_survive():
    mask = np.random.default_rng(0).random((300, 500)) < 0.02
    mask[40:200, 100:450] = True
    np.testing.assert_array_equal(masks.decode(masks.encode(mask)), mask)


def test_counts_may_be_bytes():
    mask = np.eye(9, dtype=bool)
    np.testing.assert_array_equal(
        masks.decode(coco.encode(np.asfortranarray(mask, dtype=np.uint8))), mask
    )


GOOD = masks.encode(np.pad(np.ones((6, 16), bool), 4))


@pytest.mark.parametrize(
    "rle",
    [
        {
            **GOOD,
            "counts": GOOD["counts"][:-3],
        },  # pycocotools returns uninitialised memory for this one
        {**GOOD, "counts": ""},
        {**GOOD, "counts": GOOD["counts"] + "9"},
        {**GOOD, "counts": "\xff\xfe"},
        {**GOOD, "counts": "ooooooooooooooo5"},
        {**GOOD, "counts": 7},
        {**GOOD, "counts": [300, 1.5]},
        {**GOOD, "counts": [-1, 337]},
        {**GOOD, "counts": [2**62, 2**62, 2**62, 2**62, 336]},
        {"size": GOOD["size"]},
        {**GOOD, "size": [14, 25]},
        {**GOOD, "size": [14, -24]},
        {**GOOD, "size": "14x24"},
        {"counts": "04"},
    ],
)
def test_a_damaged_rle_is_refused(rle):
    with pytest.raises(ValueError, match="RLE"):
        masks.decode(rle)


def test_polygons_match_pycocotools_nested_and_flat():
    square = [2.0, 3.0, 12.0, 3.0, 12.0, 9.0, 2.0, 9.0]
    other = [15, 1, 19, 1, 19, 5]
    expected = coco.decode([coco.merge(coco.frPyObjects([square, other], 12, 20))])[..., 0].astype(
        bool
    )
    np.testing.assert_array_equal(masks.from_segmentation([square, other], 12, 20), expected)
    np.testing.assert_array_equal(
        masks.from_segmentation(square, 12, 20), masks.from_segmentation([square], 12, 20)
    )
    assert masks.box(masks.from_segmentation(square, 12, 20)) == (2, 3, 12, 9)


@pytest.mark.parametrize(
    "polygons",
    [
        [],
        [[1, 2, 3, 4]],
        [1, 2, 3, 4, 5],
        [[0, 0, 1, 0, float("nan"), 1]],
        [[0, 0, "a", 0, 1, 1]],
        [None],
    ],
)
def test_a_polygon_that_is_none_is_refused(polygons):
    with pytest.raises(ValueError, match="polygon"):
        masks.from_segmentation(polygons, 10, 10)


def test_far_off_polygon_points_cost_nothing():
    mask = masks.from_segmentation([[0, 0, 1e12, 0, 1e12, 1e12, 0, 1e12]], 8, 9)
    assert mask.all()


def test_segmentation_of_another_size_or_kind_is_refused():
    with pytest.raises(ValueError, match="14 x 24 is not its image's 10 x 10"):
        masks.from_segmentation(GOOD, 10, 10)
    with pytest.raises(ValueError, match="neither"):
        masks.from_segmentation("nothing", 10, 10)


def test_areas_of_any_number_of_masks():
    squares = []
    for side in range(5):
        mask = np.zeros((5, 5), bool)
        mask[:side, :side] = True
        squares.append(masks.encode(mask))
    assert masks.areas([]) == []
    assert masks.areas(squares * 200) == [0, 1, 4, 9, 16] * 200


def test_box_area_and_union():
    mask = np.zeros((8, 10), bool)
    assert masks.box(mask) == (0, 0, 0, 0) and masks.area(mask) == 0
    mask[2:5, 7:] = True
    assert masks.box(mask) == (7, 2, 10, 5)
    assert masks.coco_box(mask) == [7, 2, 3, 3]
    assert masks.area(mask) == 9
    assert masks.area(masks.union([mask, mask.copy(), np.eye(8, 10, dtype=bool)], (8, 10))) == 17
    assert not masks.union([], (8, 10)).any()
