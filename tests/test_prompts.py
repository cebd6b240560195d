"""Boxes and clicks: what a caller may give, and what a predictor makes of them."""

import copy

import numpy as np
import pytest
from stub_predictor import StubOutliner

from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.prompts import innermost_pixel
from r2sm_jax.inference.prompts import read_box, read_prompts
from r2sm_jax.query import MAX_CLICKS, Click, Prompt

SIZE = (60, 80)
"""Height and width of the image that callers prompt."""


def test_boxes_and_clicks_of_a_caller():
    prompts = read_prompts(
        [None, (10, 20, 90, 40), None],
        [[(40, 30), (80, 60, False)], None, None],
        3,
        SIZE,
    )
    assert prompts[0] == Prompt(None, (Click(40, 30), Click(80, 60, False)))
    # What lies outside of the image is cut off.
    assert prompts[1] == Prompt((10, 20, 80, 40))
    assert prompts[2] is None


@pytest.mark.parametrize(
    ("boxes", "points"),
    [
        ([(0, 0, 5, 5)], None),  # one for two queries
        ([(5, 5, 5, 9), None], None),  # no area
        ([(9, 9, 2, 2), None], None),  # turned
        ([(90, 0, 95, 5), None], None),  # outside
        ([(0, 0, 5), None], None),
        ([(0, 0, float("nan"), 5), None], None),
        (["0 0 5 5", None], None),
        (None, [[(81, 5)], None]),  # outside
        (None, [[(-1, 5)], None]),
        (None, [[(1,)], None]),
        (None, [[(1, 1)] * (MAX_CLICKS + 1), None]),
        (None, [[(1, 1, False)], None]),  # nothing says what is meant
    ],
)
def test_boxes_and_clicks_that_cannot_be_used_are_refused(boxes, points):
    with pytest.raises(InputError):
        read_prompts(boxes, points, 2, SIZE)


def test_a_click_beside_the_object_helps_a_box():
    (prompt,) = read_prompts([(0, 0, 5, 5)], [[(9, 9, False)]], 1, SIZE)
    assert prompt == Prompt((0, 0, 5, 5), (Click(9, 9, False),))


def test_a_width_and_a_height_in_place_of_a_corner_are_named():
    with pytest.raises(InputError, match="corners"):
        read_box([50, 40, 20, 10], SIZE, "the box")


def test_the_innermost_pixel_of_a_ring_lies_on_it():
    mask = np.zeros((40, 40), bool)
    mask[5:35, 5:35] = True
    mask[12:34, 12:34] = False
    x, y = innermost_pixel(mask)
    assert mask[int(y), int(x)]


@pytest.fixture
def prompted(predictor):
    """The tiny run with an outliner and a completer that fill boxes."""
    prompted = copy.copy(predictor)
    prompted.outliner = StubOutliner()
    prompted.completer = lambda image, masks: masks
    return prompted


def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)


def test_queries_with_and_without_words_boxes_and_clicks(prompted):
    queries = ["the red mug", None, "", "the red mug"]
    boxes = [None, (5, 5, 40, 30), None, (5, 5, 40, 30)]
    points = [None, None, [(20, 20)], None]
    answers = prompted.predict(queries, image=image(), boxes=boxes, points=points)
    alone = prompted.predict(["the red mug"], image=image())
    np.testing.assert_allclose(answers[0].amodal_probability, alone[0].amodal_probability, 1e-4)
    assert [answer.mask_type for answer in answers[1:3]] == ["modal", "modal"]
    assert answers[1].amodal_probability is None
    # Words decide the type, whatever the place.
    assert answers[3].amodal_probability == pytest.approx(alone[0].amodal_probability, abs=1e-4)
    assert answers[3].mask_type == alone[0].mask_type
    np.testing.assert_array_equal(answers[3].modal, answers[1].modal)
    forced = prompted.predict([None], "amodal", image(), boxes=[(5, 5, 40, 30)])
    assert forced[0].mask_type == "amodal"
    assert "probability of amodal" not in forced[0].summary()


def test_a_query_needs_words_or_a_place(prompted, predictor):
    with pytest.raises(InputError, match="empty"):
        prompted.predict([None], image=image())
    mask = np.ones(SIZE, bool)
    with pytest.raises(InputError, match="one of them"):
        prompted.predict([None], image=image(), masks=[mask], boxes=[(0, 0, 9, 9)])
    with pytest.raises(InputError, match="no outliner"):
        predictor.predict(["the red mug"], image=image(), boxes=[(0, 0, 9, 9)])
