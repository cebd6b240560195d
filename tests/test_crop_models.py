"""Completer and outliner: geometry of crops, what an answer keeps."""

import numpy as np
import pytest
from flax import nnx
from stub_predictor import masks_of
from tiny_crops import COMPLETER, OUTLINER, rectangle

from r2sm_jax.data.crops import (
    BOX_EXTENT,
    WHOLE_EXTENT,
    CropWindow,
    draw_prompt,
    window_of_box,
    windows_of_clicks,
)
from r2sm_jax.inference.crop_models import (
    MaskCompleter,
    MaskOutliner,
    Outline,
    choose_outline,
    different_outlines,
)
from r2sm_jax.models.crop_unet import make_completer, make_outliner
from r2sm_jax.query import Click, Prompt


@pytest.fixture(scope="module")
def completer():
    return MaskCompleter(COMPLETER, nnx.state(make_completer(COMPLETER, rngs=nnx.Rngs(0))))


@pytest.fixture(scope="module")
def outliner():
    model = make_outliner(OUTLINER, rngs=nnx.Rngs(0))
    # Without training logits are about -2, and masks would be empty.
    model.mask.bias[...] = model.mask.bias[...] + 2
    return MaskOutliner(OUTLINER, nnx.state(model))


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


# Windows and crops


def test_a_window_leaves_room_around_the_mask_and_reaches_over_the_border():
    window = CropWindow.around(rectangle(60, 80, 0, 10, 20, 20))
    assert (window.side, window.x, window.y) == (44, -12, -7)
    crop = window.cut(np.full((60, 80), 255, np.uint8), 44)
    assert crop[:, :12].max() == 0 and crop[:7].max() == 0 and crop[7:, 12:].min() == 255


def test_a_crop_pasted_back_is_the_image_there_and_the_outside_elsewhere(image):
    window = CropWindow(20, 10, 32)
    crop = window.cut(image[..., 0], 32).astype(np.float32)
    pasted = window.paste(crop, 60, 80, -1.0)
    np.testing.assert_array_equal(pasted[10:42, 20:52], image[10:42, 20:52, 0])
    assert (pasted[:10] == -1).all() and (pasted[:, 52:] == -1).all()


def test_a_window_far_beyond_a_panorama_reads_what_the_image_covers_alone(image):
    window = CropWindow(-9, -2000, 4096)
    crop = window.cut(image, 16)
    assert crop[8, 0].any() and not crop[:7].any() and not crop[:, 2:].any()
    assert window.paste(np.zeros((16, 16)), 60, 80, -1.0).max() == 0


def test_the_crop_of_a_box_shows_it_whole_in_the_middle():
    box = (10.0, 20.0, 50.0, 40.0)
    window = window_of_box(box)
    assert window.side == round(BOX_EXTENT * 40)
    assert abs(window.x + window.side / 2 - 30) <= 1 and abs(window.y + window.side / 2 - 30) <= 1
    plane = draw_prompt(window, 64, Prompt(box))[..., 0]
    scale = 64 / window.side
    assert plane.sum() / 255 == pytest.approx(40 * 20 * scale**2, rel=0.01)
    assert plane[32, 32] == 255 and plane[0].max() == 0


def test_windows_of_clicks_hold_all_positive_clicks_and_become_smaller():
    # Most clicks lie on one side: their mean is far from the last one.
    clicks = [Click(30, 40), *6 * [Click(70, 60)], Click(5, 5, is_positive=False)]
    windows = windows_of_clicks(clicks, 100, 200)
    assert windows[0].side == int(WHOLE_EXTENT * 200)
    sides = [window.side for window in windows]
    assert sides == sorted(sides, reverse=True) and len(sides) > 1
    for window in windows:
        for click in clicks[:-1]:
            assert window.x <= click.x <= window.x + window.side
            assert window.y <= click.y <= window.y + window.side


def test_a_click_is_a_spot_in_the_plane_of_its_kind():
    window = CropWindow(0, 0, 100)
    planes = draw_prompt(window, 40, Prompt(None, (Click(25, 50), Click(75, 50, False))))
    assert not planes[..., 0].any()
    for channel, column in ((1, 10), (2, 30)):
        row, peak = np.unravel_index(planes[..., channel].argmax(), (40, 40))
        assert abs(row - 19.5) <= 0.5 and abs(peak - column + 0.5) <= 0.5


# Answers


def test_an_answer_contains_the_given_mask_alike_alone_and_among_others(completer, image):
    visible = [rectangle(60, 80, 5 + 3 * k, 5, 25 + 3 * k, 30) for k in range(10)]
    answers = completer.complete(image, visible)
    for given, (complete, iou, hidden_probability, _) in zip(visible, answers, strict=True):
        assert complete.shape == given.shape and (complete | given == complete).all()
        assert 0 < iou < 1 and 0 < hidden_probability < 1
        (alone,) = masks_of(completer, image, [given])
        np.testing.assert_array_equal(complete, alone)


def test_an_object_is_no_neighbour_of_itself(completer, image):
    """One union of all objects gives what each one's own neighbours give."""
    visible = [rectangle(60, 80, 5 + 9 * k, 5, 25 + 9 * k, 30) for k in range(3)]
    completer = completer.updated(threshold=-2.0)
    union = visible[0] | visible[1] | visible[2]
    together = masks_of(completer, image, visible, union)
    for number, given in enumerate(visible):
        beside = np.zeros_like(given)
        for mask in visible[:number] + visible[number + 1 :]:
            beside |= mask
        (complete,) = masks_of(completer, image, [given], beside)
        np.testing.assert_array_equal(together[number], complete)
    (alone,) = masks_of(completer, image, visible[:1])
    assert (alone != together[0]).any()


def test_an_outline_has_the_size_of_the_image_and_a_predicted_iou(outliner):
    image = np.random.default_rng(0).integers(0, 255, (37, 90, 3), np.uint8)
    box, click = Prompt((5, 5, 40, 30)), Prompt(None, (Click(60, 20),))
    both = outliner(image, [box, click])
    for answer in both:
        assert answer.mask.shape == (37, 90) and answer.mask.dtype == bool
        assert 0 <= answer.iou <= 1
    (alone,) = outliner(image, [click])
    np.testing.assert_array_equal(alone.mask, both[1].mask)


def test_a_candidate_of_clicks_does_not_agree_with_itself(outliner, image, monkeypatch):
    """Each crop finds something else."""

    def read(self, image, windows, prompt):
        sides = [window.side // 4 for window in windows]
        return [Outline(rectangle(60, 80, x, 5, x + 1, 15), 0.5) for x in sides]

    monkeypatch.setattr(MaskOutliner, "_read", read)
    (answer,) = outliner(image, [Prompt(None, (Click(30, 20),))])
    assert answer.candidates and all(one.agreement == 0 for one in answer.candidates)


def test_the_mask_that_several_windows_agree_on_is_chosen():
    """A part has the highest predicted IoU, the background of the largest window the lowest."""
    whole, part = rectangle(40, 50, 10, 10, 40, 30), rectangle(40, 50, 20, 15, 25, 20)
    nearly_whole = rectangle(40, 50, 10, 12, 40, 30)
    masks = (np.ones_like(whole), whole, nearly_whole, part)
    outlines = [Outline(mask, iou) for mask, iou in zip(masks, (0.2, 0.6, 0.6, 0.7), strict=True)]
    windows = [CropWindow(0, 0, side) for side in (50, 40, 30, 20)]
    assert choose_outline(outlines, windows) == 1

    # What else is meant, perhaps: the likeliest first, and what is nearly the answer left out.
    first, *others = outlines[1], *outlines
    assert different_outlines(first, others) == (outlines[3], outlines[0])

    # Where no window finds anything, the largest one answers.
    nothing = [Outline(np.zeros_like(whole), 0.1), Outline(np.zeros_like(whole), 0.1)]
    assert choose_outline(nothing, windows[:2]) == 0
