"""Pictures of samples and predictions: what is painted, and what their captions say."""

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.sheet import Panel, grid, paint, save_sheet
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
    drawn = paint(image, visible, visible | occluded).astype(int)
    np.testing.assert_array_equal(image, before)
    assert drawn.shape == image.shape
    inside = np.s_[14:34, 13:23], np.s_[14:34, 33:47]
    assert (drawn[inside[0]][..., 2] - drawn[inside[0]][..., 0]).mean() > 40  # blue
    assert (drawn[inside[1]][..., 0] - drawn[inside[1]][..., 2]).mean() > 40  # orange
    assert drawn[inside[1]].std() > drawn[inside[0]].std()  # hatched


def test_the_outline_goes_around_the_mask_that_is_asked_for():
    visible, occluded = parts()
    image = np.full((48, 64, 3), 100, np.uint8)
    modal, amodal = (
        paint(image, visible, visible | occluded, kind) for kind in ("modal", "amodal")
    )
    far_side = np.s_[12:36, 52]  # just right of the occluded part
    assert amodal[far_side].mean() > modal[far_side].mean() + 50


def test_no_mask_leaves_the_image_alone():
    image, nothing = picture(), np.zeros((48, 64), bool)
    np.testing.assert_array_equal(paint(image, nothing, nothing), image)


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
    panel = Panel(picture(*size), "a query that is long " * 12 + "W" * 300)
    page = grid([[panel, Panel(picture(*size), "")], [panel]], title="a title " * 40)
    assert page.dtype == np.uint8 and page.ndim == 3
    save_sheet(tmp_path / "sheet.png", [[panel]])
    with Image.open(tmp_path / "sheet.png") as saved:
        assert saved.format == "PNG"


def test_tiny_masks_stay_visible():
    visible = np.zeros((48, 64), bool)
    visible[20, 30] = True
    nothing = np.zeros_like(visible)
    image = np.full((48, 64, 3), 120, np.uint8)
    with_mask = paint(image, visible, visible, "modal", ratio=8)
    without = paint(image, nothing, nothing, "modal", ratio=8)
    assert (np.abs(with_mask.astype(int) - without).max(-1) > 60).sum() > 50
