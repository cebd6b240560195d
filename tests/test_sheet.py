"""Pictures of samples and predictions: what is painted, and what their captions say."""

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.sheet import Panel, grid, paint, save_sheet
from r2sm_jax.query import Query
from r2sm_jax.tools.show import sample_row

IMAGE = np.random.default_rng(0).integers(90, 160, (48, 64, 3), dtype=np.uint8)
NOTHING = np.zeros((48, 64), bool)
VISIBLE, OCCLUDED = NOTHING.copy(), NOTHING.copy()
VISIBLE[8:40, 8:28] = True
OCCLUDED[8:40, 28:52] = True
COMPLETE = VISIBLE | OCCLUDED


def sample(queries: int = 6) -> Sample:
    instances = (Instance(1, "mug", VISIBLE, COMPLETE), Instance(2, "box", OCCLUDED, None))
    questions = [
        Query(n, f"query {n}", "amodal" if n == 4 else "modal", ((1,), (2,), (1, 2), ())[n % 4])
        for n in range(queries)
    ]
    return Sample(1, "photo.png", IMAGE, instances, tuple(questions))


def test_overlay_tints_the_two_parts_differently_and_nothing_without_a_mask():
    before = IMAGE.copy()
    drawn = paint(IMAGE, VISIBLE, COMPLETE).astype(int)
    np.testing.assert_array_equal(paint(IMAGE, NOTHING, NOTHING), IMAGE)
    np.testing.assert_array_equal(IMAGE, before)
    visible, occluded = drawn[14:34, 13:23], drawn[14:34, 33:47]
    assert (visible[..., 2] - visible[..., 0]).mean() > 40  # blue
    assert (occluded[..., 0] - occluded[..., 2]).mean() > 40  # orange
    assert occluded.std() > visible.std()  # hatched


def test_the_outline_goes_around_the_mask_that_is_asked_for():
    image = np.full((48, 64, 3), 100, np.uint8)
    modal, amodal = (paint(image, VISIBLE, COMPLETE, kind) for kind in ("modal", "amodal"))
    far_side = np.s_[12:36, 52]  # just right of the occluded part
    assert amodal[far_side].mean() > modal[far_side].mean() + 50


def test_a_sample_row_shows_both_types_and_says_what_is_meant():
    row = sample_row(sample(), queries=3, seed=1)
    assert len(row) == 4 and "2 instances" in row[0].text
    assert {panel.text.splitlines()[1].split(":")[0] for panel in row[1:]} == {"modal", "amodal"}
    texts = {panel.text.split("\n")[0]: panel.text for panel in sample_row(sample(), queries=6)}
    assert texts["query 0"].endswith("modal: mug, 55% hidden")
    assert "box" in texts["query 1"] and "amodal mask unknown" in texts["query 1"]
    assert "no target" in texts["query 3"]
    assert len(sample_row(sample(queries=0))) == 1


@pytest.mark.parametrize("size", [(48, 64), (96, 96), (200, 60), (3, 200)])
def test_sheets_of_any_image_shape(size, tmp_path):
    picture = np.full((*size, 3), 120, np.uint8)
    panel = Panel(picture, "a query that is long " * 12 + "W" * 300)
    page = grid([[panel, Panel(picture, "")], [panel]], title="a title " * 40)
    assert page.dtype == np.uint8 and page.ndim == 3
    save_sheet(tmp_path / "sheet.png", [[panel]])
    with Image.open(tmp_path / "sheet.png") as saved:
        assert saved.format == "PNG"


def test_tiny_masks_stay_visible():
    visible = NOTHING.copy()
    visible[20, 30] = True
    with_mask, without = (
        paint(IMAGE, mask, mask, "modal", ratio=8).astype(int) for mask in (visible, NOTHING)
    )
    assert (np.abs(with_mask - without).max(-1) > 60).sum() > 50
