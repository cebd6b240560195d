"""Names of colours by pixels."""

import numpy as np
import pytest

from r2sm_jax.synthetic.colour_names import name_colour

FULL = np.ones((40, 20), bool)


def paint(*colours: tuple[int, int, int]) -> np.ndarray:
    """A picture in rows of equal height."""
    return np.repeat(np.array(colours, np.uint8), 40 // len(colours), axis=0)[:, None].repeat(20, 1)


@pytest.mark.parametrize(
    ("rgb", "colour"),
    [
        ((200, 20, 20), "red"),
        ((240, 140, 20), "orange"),
        ((235, 215, 40), "yellow"),
        ((40, 160, 50), "green"),
        ((30, 60, 200), "blue"),
        ((110, 70, 30), "brown"),
        ((15, 15, 15), "black"),
        ((245, 245, 245), "white"),
        ((128, 128, 128), "grey"),
        ((130, 165, 160), None),  # people call it green or grey
    ],
)
def test_a_colour_that_covers_a_thing_is_its_name(rgb, colour):
    assert name_colour(paint(rgb), FULL, "mug") == colour


def test_what_has_two_colours_or_few_pixels_has_no_name():
    red, blue = (200, 20, 20), (30, 60, 200)
    assert name_colour(paint(red, blue), FULL, "mug") is None
    few = np.zeros_like(FULL)
    few[:5, :20] = True
    assert name_colour(paint(red), few, "mug") is None


def test_a_person_has_the_colour_of_the_chest_and_none_where_the_chest_is_unknown():
    image = paint((60, 40, 30), (200, 20, 20), (30, 60, 200), (30, 60, 200))
    assert name_colour(image, FULL, "young woman") == "red"
    assert name_colour(image[:20], FULL[:20], "young woman") is None
