"""Masks as run lengths, polygons and boxes, compared with pycocotools."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from pycocotools import mask as coco

from r2sm_jax.data import masks
from r2sm_jax.data.mask_reader import from_pixels, levels, read_mask
from r2sm_jax.errors import InputError

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


@settings(max_examples=30, deadline=None)
@given(any_mask)
def test_uncompressed_counts_decode_to_the_same_mask(mask):
    flat = mask.T.reshape(-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat]))).tolist()
    runs = np.diff([0, *edges, len(flat)]).tolist()
    np.testing.assert_array_equal(masks.decode({"size": list(mask.shape), "counts": runs}), mask)


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


# Segmentations in all layouts.

SQUARE = [2.0, 3.0, 12.0, 3.0, 12.0, 9.0, 2.0, 9.0]
POINTS = [[2, 3], [12, 3], [12.0, 9], [2, 9]]
OTHER = [15, 1, 19, 1, 19, 5]


def drawn(*polygons: list[float]) -> np.ndarray:
    """The mask that pycocotools draws."""
    rles = coco.frPyObjects(list(polygons), 12, 20)
    return coco.decode(coco.merge(rles)).astype(bool)


FILLED = drawn(SQUARE)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SQUARE, FILLED),
        ([SQUARE], FILLED),
        (POINTS, FILLED),
        ([POINTS], FILLED),
        (masks.encode(FILLED), FILLED),
        ([SQUARE, OTHER], drawn(SQUARE, OTHER)),
        ([masks.encode(FILLED), masks.encode(drawn(OTHER))], drawn(SQUARE, OTHER)),
        ([POINTS, [[1, 1], [2, 2]], []], FILLED),  # short rings are left out
        # Far outside of the image: clipping corner by corner would change the shape.
        ([-900.0, -900, 10, -900, 10, 10], drawn([-900.0, -900, 10, -900, 10, 10])),
    ],
)
def test_layouts_of_a_segmentation(value, expected):
    np.testing.assert_array_equal(masks.from_segmentation(value, 12, 20), expected)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (GOOD, "14 x 24 is not its image's 12 x 20"),
        ("nothing", "neither"),
        (None, "neither"),
        ([], "empty"),
        ([[1, 2, 3, 4]], "three points"),
        ([1, 2, 3, 4, 5], "polygon"),
        ([[1, 2], 3], "polygon"),
        ([[[1, 2, 3]] * 4], "polygon"),
        ([[0, 0, 1, 0, float("nan"), 1]], "numbers"),
        ([[0, 0, "a", 0, 1, 1]], "polygon"),
        ([None], "polygon"),
        ([[0, 0, 1e12, 0, 1e12, 1e12]], "not all numbers up to 100000"),
        ([[0.1, 0.2, 0.9, 0.2, 0.9, 0.8]], "shares of the image's size"),
    ],
)
def test_what_is_no_segmentation(value, reason):
    with pytest.raises(ValueError, match=reason):
        masks.from_segmentation(value, 12, 20)


def test_fields_of_an_annotation():
    """The visible fringe outside of the complete mask is added to it."""
    complete, visible = np.zeros((6, 8), bool), np.zeros((6, 8), bool)
    complete[1:5, 1:5] = True
    visible[1:5, 3:6] = True
    fields = masks.mask_fields(masks.encode(visible), masks.encode(complete))
    assert fields["bbox"] == [1, 1, 5, 4] and fields["area"] == 20
    assert fields["occlude_rate"] == 0.4
    np.testing.assert_array_equal(masks.decode(fields["segmentation"]), complete | visible)
    np.testing.assert_array_equal(masks.decode(fields["invisible_mask"]), complete & ~visible)
    alone = masks.mask_fields(masks.encode(visible), None)
    assert alone["segmentation"] is None and alone["visible_mask"] == masks.encode(visible)


# Masks that are drawn.


def pixels(*values: float) -> np.ndarray:
    """Columns of these values, as many of each."""
    return np.tile(np.repeat(np.array(values), 4), (3, 1))


@pytest.mark.parametrize(
    ("values", "mask_values"),
    [
        (pixels(0, 1), pixels(0, 1)),
        (pixels(0, 100, 255, 255), pixels(0, 0, 1, 1)),
        (pixels(5, 250), pixels(0, 1)),
        (pixels(0, 65_535, 300), pixels(0, 1, 0)),
        (pixels(0, 2, 98) / 100, pixels(0, 0, 1)),
        (pixels(255, 255), pixels(1, 1)),
        (pixels(0, 0, 9, 60, 130, 200, 230, 238, *[243] * 5), pixels(*[0] * 4, *[1] * 9)),
    ],
)
def test_pixels_of_a_mask(values, mask_values):
    assert (from_pixels(values) == mask_values).all()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (pixels(0, 1, 2), "holds 3 values"),
        (pixels(0, 1, 15, 20, 255), "labels up to 20 and a border of 255"),
        (pixels(0, 60, 100, 150, 255), "neither black nor white"),
        (pixels(20, 20), "it is 20 everywhere"),
        (pixels(0, 100, 200), "holds 3 values"),
        (pixels(*range(0, 250, 25)), "neither black nor white"),
        (pixels(230, 255), "never fall to 0, the lowest is 230"),
        (pixels(-3, 4) / 1.0, "no probabilities"),
        (pixels(0, 1) * np.nan, "no probabilities"),
    ],
)
def test_pixels_that_are_no_mask(values, reason):
    with pytest.raises(ValueError, match=reason):
        from_pixels(values)


LABELS = np.array([[0, 1], [2, 0]], np.uint8)


@pytest.mark.parametrize(
    ("palette", "shown"),
    [
        # A drawn mask, whatever its palette's order.
        ((255, 255, 255, 0, 0, 0, 60, 60, 60), [[255, 0], [60, 255]]),
        ((255, 0, 0, 0, 0, 0, 0, 0, 9), [[256, 0], [258, 256]]),
        # Labels in colours, as PASCAL VOC has them.
        ((0, 0, 0, 128, 0, 0, 0, 128, 0), [[0, 257], [258, 0]]),
        ((70, 0, 90, 250, 230, 30, 0, 90, 0), [[0, 257], [258, 0]]),
        ((0,) * 9, [[0, 257], [258, 0]]),
        ((1, 1, 1, 254, 254, 254, 254, 254, 254), [[0, 253], [253, 0]]),
    ],
)
def test_palettes_count_by_colour_and_labels_in_colours_stay_apart(palette, shown):
    image = Image.fromarray(LABELS).convert("P")
    image.putpalette(palette)
    assert levels(image).tolist() == shown


@pytest.mark.parametrize("colour", [0, 100, 255])
def test_the_transparency_is_the_mask_where_it_varies(colour, tmp_path):
    drawn = np.full((4, 6, 4), colour, np.uint8)
    drawn[..., 3] = 0
    drawn[1:3, 2:5, 3] = 255
    Image.fromarray(drawn).save(tmp_path / "m.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "m.png", (4, 6), "m"), drawn[..., 3] > 0)


def test_files_of_masks(tmp_path):
    photo = np.random.default_rng(0).integers(0, 200, (4, 6, 3), np.uint8)
    photo[0, 0] = 255
    Image.fromarray(photo).save(tmp_path / "photo.png")
    (tmp_path / "m.json").write_text(json.dumps({"segmentation": [[1, 1, 4, 1, 4, 3, 1, 3]]}))
    assert masks.area(read_mask(tmp_path / "m.json", (4, 6), "m")) == 6
    for name, size, reason in (
        ("photo.png", (4, 6), "neither black nor white"),
        ("photo.png", (6, 4), "4, 6., its image.s .6, 4.; it seems to be turned"),
        ("lost.png", (4, 6), "No such file"),
    ):
        with pytest.raises(InputError, match=f"{name}.*{reason}"):
            read_mask(tmp_path / name, size, name)


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
