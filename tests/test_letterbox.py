"""Letterboxed images and masks: what is drawn in a square comes back in place."""

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from PIL import Image

from r2sm_jax.data.letterbox import PAD_COLOUR, Letterbox

RNG = np.random.default_rng(0)


def ellipse(height: int, width: int, cy: float, cx: float, ry: float, rx: float) -> np.ndarray:
    rows, columns = np.ogrid[:height, :width]
    return ((rows + 0.5 - cy) / ry) ** 2 + ((columns + 0.5 - cx) / rx) ** 2 <= 1


def framed(box: Letterbox, mask: np.ndarray) -> np.ndarray:
    """The mask at the resolution of the frame."""
    return box.coverage(mask, box.size) > 127


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return (a & b).sum() / max(1, (a | b).sum())


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(60, 260),
    width=st.integers(60, 260),
    size=st.sampled_from([96, 128, 256]),
    y=st.floats(0.3, 0.7),
    x=st.floats(0.3, 0.7),
)
@example(height=240, width=100, size=96, y=0.5, x=0.7)
@example(height=100, width=240, size=96, y=0.7, x=0.5)
def test_a_mask_survives_letterbox_and_undo(height, width, size, y, x):
    box = Letterbox(height, width, size)
    mask = ellipse(height, width, y * height, x * width, 0.28 * height, 0.28 * width)
    logits = framed(box, mask).astype(np.float32) * 20 - 10
    restored = box.undo(logits)
    assert restored.shape == mask.shape and restored.dtype == np.float32
    # A short side squeezed to a few dozen pixels cannot hold an ellipse to 5 %.
    assert iou(restored > 0, mask) > (0.95 if min(box.resized) >= 64 else 0.9)


@pytest.mark.parametrize("shape", [(300, 120), (120, 300)])
def test_an_object_at_the_padded_side_comes_back_in_place(shape):
    height, width = shape
    box = Letterbox(height, width, 96)
    mask = np.zeros(shape, bool)
    mask[-60:, -60:] = True
    logits = framed(box, mask).astype(np.float32) * 20 - 10
    restored = box.undo(logits) > 0
    assert iou(restored, mask) > 0.95
    # The wrong order (stretch the whole frame over the image) would put it elsewhere.
    stretched = (
        np.asarray(Image.fromarray(logits).resize((width, height), Image.Resampling.BILINEAR)) > 0
    )
    assert iou(stretched, mask) < 0.6


def test_undo_is_the_same_as_torch():
    torch = pytest.importorskip("torch", reason="torch (extra 'parity') is not installed")
    resize = torch.nn.functional.interpolate
    for height, width, size, side in (
        (48, 64, 96, 24),
        (480, 641, 96, 96),
        (37, 21, 64, 16),
        (8, 300, 64, 32),
    ):
        box = Letterbox(height, width, size)
        logits = RNG.normal(size=(2, 3, side, side)).astype(np.float32)
        whole = resize(torch.tensor(logits), (size, size), mode="bilinear", align_corners=False)
        cropped = whole[..., : box.resized[0], : box.resized[1]]
        expected = resize(cropped, (height, width), mode="bilinear", align_corners=False).numpy()
        np.testing.assert_allclose(box.undo(logits), expected, atol=5e-5)


def test_image_mask_and_valid_share_one_frame():
    image = np.zeros((60, 100, 3), np.uint8)
    mask = np.zeros((60, 100), bool)
    mask[20:44, 60:100] = True
    image[mask] = 255
    box = Letterbox(60, 100, 50)
    frame, valid = box.image(image), box.valid()
    assert box.resized == (30, 50) and valid[:30].all() and not valid[30:].any()
    assert (frame[~valid] == PAD_COLOUR).all()
    np.testing.assert_array_equal(framed(box, mask) & valid, (frame[..., 0] > 127) & valid)
    assert not framed(box, np.ones((60, 100), bool))[~valid].any()


@settings(max_examples=20, deadline=None)
@given(st.integers(5, 90), st.integers(5, 90), st.integers(0, 9))
def test_modal_stays_within_amodal(height, width, seed):
    rng = np.random.default_rng(seed)
    amodal = rng.random((height, width)) < 0.6
    modal = amodal & (rng.random((height, width)) < 0.7)
    box = Letterbox(height, width, 32)
    assert (box.coverage(modal, 8) <= box.coverage(amodal, 8)).all()


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(480, 640, 96), (96, 96, 96), (97, 31, 64), (640, 427, 512), (40, 30, 64)],
)
def test_coverage_keeps_area_and_place(height, width, size):
    box = Letterbox(height, width, size)
    mask = ellipse(height, width, 0.4 * height, 0.6 * width, 0.3 * height, 0.25 * width)
    covered = box.coverage(mask, size // 2) / 255
    cells = [2 * side / resized for side, resized in zip((height, width), box.resized, strict=True)]
    assert covered.sum() * cells[0] * cells[1] == pytest.approx(mask.sum(), rel=0.005)
    for axis, expected in enumerate(np.nonzero(mask)):
        places = (np.arange(size // 2) + 0.5) * cells[axis]
        actual = (covered.sum(1 - axis) * places).sum() / covered.sum()
        assert actual == pytest.approx(expected.mean() + 0.5, abs=0.02 * cells[axis])
    assert (box.coverage(np.ones((height, width), bool), size)[box.valid()] > 127).all()


def test_cells_that_divide_evenly_hold_exact_shares():
    mask = np.zeros((4, 4), bool)
    mask[0, :3] = True
    assert Letterbox(4, 4, 4).coverage(mask, 2).tolist() == [[128, 64], [0, 0]]


def test_identity_when_the_image_fills_the_frame():
    image = RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8)
    mask = RNG.random((64, 64)) < 0.5
    logits = RNG.normal(size=(3, 64, 64)).astype(np.float32)
    box = Letterbox(64, 64, 64)
    np.testing.assert_array_equal(box.image(image), image)
    np.testing.assert_array_equal(framed(box, mask), mask)
    np.testing.assert_array_equal(box.undo(logits), logits)
    assert box.valid().all()


def test_extreme_shapes_and_misuse():
    box = Letterbox(1, 1000, 96)
    assert box.resized == (1, 96)
    assert box.undo(np.zeros((24, 24))).shape == (1, 1000)
    with pytest.raises(ValueError, match="divides"):
        box.undo(np.zeros((25, 25)))
    with pytest.raises(ValueError, match="1 x 1000"):
        box.coverage(np.zeros((1000, 1), bool), 96)
    with pytest.raises(ValueError, match="positive"):
        Letterbox(0, 10, 96)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 700),
    st.integers(1, 90),
    st.booleans(),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.integers(0, 99),
)
@example(600, 700, False, 0.02, 0)
def test_a_mask_is_where_the_enlarged_logits_are_positive(long, short, is_wide, share, seed):
    height, width = (short, long) if is_wide else (long, short)
    box = Letterbox(height, width, 48)
    rng = np.random.default_rng(seed)
    # Blocks of positive logits among negative ones, some of them in the padding.
    logits = np.where(np.kron(rng.random((4, 4)) < share, np.ones((6, 6))), 1, -1)
    logits = logits * rng.random((24, 24))
    np.testing.assert_array_equal(box.undo_mask(logits), box.undo(logits) > 0)
