"""Pictures of samples and predictions: what is painted, and what their captions say."""

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.sheet import Panel, add_head, draw_sheet, overlay, prediction_row, save_sheet
from r2sm_jax.query import Query
from r2sm_jax.tools.show import sample_row

RNG = np.random.default_rng(0)


def picture(height: int = 48, width: int = 64) -> np.ndarray:
    return RNG.integers(90, 160, (height, width, 3), dtype=np.uint8)


def parts(height: int = 48, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    visible, occluded = np.zeros((height, width), bool), np.zeros((height, width), bool)
    visible[8:40, 8:28] = True
    occluded[8:40, 28:52] = True
    return visible, occluded


def sample(height: int = 48, width: int = 64, queries: int = 6) -> Sample:
    visible, occluded = parts(height, width)
    instances = (
        Instance(1, "mug", visible, visible | occluded),
        Instance(2, "box", occluded, None),
    )
    questions = [
        Query(n, f"query {n}", "amodal" if n == 4 else "modal", ((1,), (2,), (1, 2), ())[n % 4])
        for n in range(queries)
    ]
    return Sample(1, "photo.png", picture(height, width), instances, tuple(questions))


def test_overlay_tints_the_two_parts_differently():
    visible, occluded = parts()
    image = picture()
    before = image.copy()
    drawn = overlay(image, visible, occluded).astype(int)
    np.testing.assert_array_equal(image, before)
    assert drawn.shape == image.shape
    inside = np.s_[14:34, 13:23], np.s_[14:34, 33:47]
    assert (drawn[inside[0]][..., 2] - drawn[inside[0]][..., 0]).mean() > 40  # blue
    assert (drawn[inside[1]][..., 0] - drawn[inside[1]][..., 2]).mean() > 40  # orange
    assert drawn[inside[1]].std() > drawn[inside[0]].std()  # hatched


def test_the_outline_goes_around_the_mask_that_is_asked_for():
    visible, occluded = parts()
    image = np.full((48, 64, 3), 100, np.uint8)
    modal, amodal = (overlay(image, visible, occluded, kind) for kind in ("modal", "amodal"))
    far_side = np.s_[12:36, 52]  # just right of the occluded part
    assert amodal[far_side].mean() > modal[far_side].mean() + 50


def test_no_mask_leaves_the_image_alone():
    image, nothing = picture(), np.zeros((48, 64), bool)
    np.testing.assert_array_equal(overlay(image, nothing, nothing), image)


def test_a_sample_row_shows_both_types_and_says_what_is_meant():
    row = sample_row(sample(), queries=3, seed=1)
    assert (
        len(row) == 4 and row[0].mask_type is None and "2 instances, 1 occluded" in row[0].caption
    )
    assert {panel.mask_type for panel in row[1:]} == {"modal", "amodal"}
    captions = {panel.text: panel.caption for panel in sample_row(sample(), queries=6)}
    assert captions["query 0"] == "mug · 55 % occluded"
    assert captions["query 1"] == "box · amodal mask unknown"
    assert captions["query 2"] == "2 instances · box, mug · amodal mask unknown"
    assert captions["query 3"] == "no target"
    assert len(sample_row(sample(queries=0))) == 1


def test_objects_that_hide_each_other_are_not_called_fully_visible():
    visible, occluded = parts()
    both = (Instance(1, "cup", visible, visible | occluded), Instance(2, "cup", occluded, occluded))
    two = Sample(1, "a.png", picture(), both, (Query(1, "both", "amodal", (1, 2)),))
    assert sample_row(two)[1].caption == "2 instances · cup · up to 55 % occluded"


def test_prediction_rows_state_type_probability_and_iou():
    visible, occluded = parts()
    wrong = prediction_row(
        picture(), "the mug", "modal", (visible, occluded), "amodal", 0.83, (visible, occluded)
    )
    assert len(wrong) == 3 and wrong[0].text == "the mug"
    assert wrong[2].caption == "amodal with probability 0.83 (wrong) · IoU 0.45"
    right = prediction_row(
        picture(), "the mug", "modal", (visible, occluded), "modal", 0.2, (visible, occluded)
    )
    assert right[2].caption == "modal with probability 0.80 (right) · IoU 1.00"


@pytest.mark.parametrize("size", [(48, 64), (96, 96), (200, 60), (3, 200)])
def test_sheets_of_any_image_shape(size, tmp_path):
    visible, occluded = np.zeros(size, bool), np.zeros(size, bool)
    visible[: size[0] // 2] = True
    panel = Panel(
        picture(*size), "a query that is long " * 12 + "W" * 300, "c", visible, occluded, "amodal"
    )
    page = draw_sheet([[panel, Panel(picture(*size))], [panel]], title="a title " * 40)
    assert page.dtype == np.uint8 and page.ndim == 3
    assert (page[:4] == 255).all() and (page[:, -4:] == 255).all()  # nothing runs over the margin
    save_sheet(tmp_path / "sheet.png", [[panel]])
    with Image.open(tmp_path / "sheet.png") as saved:
        assert saved.format == "PNG"


def test_tiny_masks_stay_visible():
    visible = np.zeros((48, 64), bool)
    visible[20, 30] = True
    nothing = np.zeros_like(visible)
    image = np.full((48, 64, 3), 120, np.uint8)
    with_mask = draw_sheet([[Panel(image, "", "", visible, nothing, "modal")]])
    without = draw_sheet([[Panel(image, "", "", nothing, nothing, "modal")]])
    assert (np.abs(with_mask.astype(int) - without).max(-1) > 60).sum() > 50


@pytest.mark.parametrize("size", [(48, 64), (300, 900), (20, 2000)])
def test_a_head_leaves_the_picture_as_it_is(size):
    image = picture(*size)
    texts = "the mug", "a query that is long " * 40
    pages = [add_head(image, text, "modal", "predicted IoU 0.25 (unsure)") for text in texts]
    for page in pages:
        np.testing.assert_array_equal(page[-size[0] :, : size[1]], image)
    heads = [page[: -size[0]] for page in pages]
    assert heads[0].shape[0] < heads[1].shape[0] < 0.3 * heads[1].shape[1]
    # The legend has the colours of the two parts.
    for colour in ((31, 111, 214), (240, 132, 22)):
        assert (heads[0] == colour).all(-1).sum() > 50
