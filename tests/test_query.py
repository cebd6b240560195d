"""The keyword rule, which decides for modal or amodal by words alone."""

import pytest

from r2sm_jax.query import keyword_mask_type


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the red mug", "modal"),
        ("the mug behind the box", "modal"),
        ("what can be seen of the mug", "modal"),
        ("only the visible part of the cat", "modal"),
        ("the cat as the camera sees it", "modal"),
        ("the uncovered part of the hat", "modal"),
        ("Where is the fish?", "modal"),
        ("the modal mask of the fish", "modal"),
        ("the amodal mask of the fish", "amodal"),
        ("the complete mug", "amodal"),
        ("Segment the mug completely.", "amodal"),
        ("the WHOLE hat", "amodal"),
        ("the entire hat", "amodal"),
        ("the hat in its entirety", "amodal"),
        ("the full shape of the hat", "amodal"),
        ("the hat, hidden parts too", "amodal"),
        ("the hat and whatever hides behind the box", "amodal"),
        ("the hat, occlusion undone", "amodal"),
        ("the hat, including any part that might be obscured", "amodal"),
        ("the hat with blocked areas", "amodal"),
        ("the hat with what is covered", "amodal"),
        ("the hat with the concealed part", "amodal"),
        ("the hat, obstructed or not", "amodal"),
        ("even the parts we cannot see", "amodal"),
        ("also what can't be seen", "amodal"),
        ("including what is not visible", "amodal"),
        ("the hat where it is out of sight", "amodal"),
        # What the rule gets wrong is what the package is about.
        ("the entire row of bottles", "amodal"),
        ("without guessing the hidden part", "amodal"),
        ("the partially hidden cat", "amodal"),
        ("the cat, as if nothing stood in front of it", "modal"),
        ("its true silhouette", "modal"),
        ("Lift away the box: trace the cat.", "modal"),
    ],
)
def test_keyword_rule(text, expected):
    assert keyword_mask_type(text) == expected
