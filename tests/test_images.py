import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from PIL import Image, ImageOps

from r2sm_jax.data.images import brightness, image_size, open_image
from r2sm_jax.data.letterbox import PAD_COLOUR, Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export_folder import find_folder
from r2sm_jax.training.run_folder import read_config

RNG = np.random.default_rng(0)
PHOTO = np.asarray(
    Image.fromarray(RNG.integers(0, 255, (5, 7, 3), dtype=np.uint8)).resize((70, 50))
)


def error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_image(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and ";" in message
    return message


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_formats_are_read_as_rgb(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(PHOTO).save(path, quality=95)
    image = open_image(path)
    assert image.dtype == np.uint8 and image.shape == (50, 70, 3) and image.flags.writeable
    assert abs(image.astype(int) - PHOTO).mean() < 8
    assert image_size(path) == (50, 70)


def test_exif_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PHOTO).save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(open_image(tmp_path / "turned.png"), np.rot90(PHOTO, -1))
    assert image_size(tmp_path / "turned.png") == (70, 50)


def test_grey_palette_and_bilevel(tmp_path):
    grey = PHOTO[..., 0]
    Image.fromarray(grey).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(open_image(tmp_path / "grey.png"), np.stack([grey] * 3, -1))
    palette = Image.fromarray(PHOTO).quantize(16)
    palette.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(
        open_image(tmp_path / "palette.png"), np.asarray(palette.convert("RGB"))
    )
    Image.fromarray(grey > 128).save(tmp_path / "bits.png")
    np.testing.assert_array_equal(
        open_image(tmp_path / "bits.png")[..., 0], (grey > 128) * np.uint8(255)
    )
    Image.fromarray(PHOTO).convert("CMYK").save(tmp_path / "print.jpg")
    assert open_image(tmp_path / "print.jpg").shape == (50, 70, 3)


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    Image.fromarray(PHOTO[..., 0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(open_image(tmp_path / "deep.png")[..., 0], PHOTO[..., 0])


def test_transparency_is_laid_over_white(tmp_path):
    alpha = np.zeros((50, 70), np.uint8)
    alpha[:, 35:] = 255
    Image.fromarray(np.dstack([PHOTO, alpha])).save(tmp_path / "cutout.png")
    image = open_image(tmp_path / "cutout.png")
    assert (image[:, :35] == 255).all()
    np.testing.assert_array_equal(image[:, 35:], PHOTO[:, 35:])


def test_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert (open_image(tmp_path / "moving.gif") == (255, 0, 0)).all()


def test_what_cannot_be_read_says_why(tmp_path):
    assert "no such image" in error(tmp_path / "missing.png")
    assert "this is a folder" in error(tmp_path)
    (tmp_path / "empty.jpg").touch()
    assert "empty" in error(tmp_path / "empty.jpg")
    (tmp_path / "text.jpg").write_text("not an image")
    assert "not an image" in error(tmp_path / "text.jpg")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tif"])
def test_truncated_images(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(RNG.integers(0, 255, (50, 70, 3), dtype=np.uint8)).save(path)
    content = path.read_bytes()
    for share in (0.1, 0.5, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        error(path)


def _png_header(path: Path, width: int, height: int) -> None:
    """A PNG that claims a size and has no pixels: nothing may decode it."""
    chunks = b"\x89PNG\r\n\x1a\n"
    for kind, body in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", b"x"),
    ):
        chunks += (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )
    path.write_bytes(chunks)


@pytest.mark.parametrize(
    "side", [7100, 12000, 40000]
)  # over our limit, over Pillow's warning, over its error
@pytest.mark.filterwarnings(
    "ignore::PIL.Image.DecompressionBombWarning"
)  # as this package does, before any test
def test_more_than_fifty_megapixels_is_refused_from_the_header(tmp_path, side):
    _png_header(tmp_path / "huge.png", side, side)
    assert "50 megapixels" in error(tmp_path / "huge.png")


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_pillows_warning_may_be_an_error(tmp_path):
    _png_header(tmp_path / "huge.png", 12000, 12000)
    assert "50 megapixels" in error(tmp_path / "huge.png")


def test_no_thread_changes_the_warning_filters_of_others_and_pillows_warning_is_off(tmp_path):
    """In a process of its own, since pytest changes the filters itself."""
    _png_header(tmp_path / "huge.png", 12000, 12000)
    code = (
        "import sys, warnings; from r2sm_jax.data.images import open_image; from r2sm_jax.errors import InputError\n"
        "warnings.catch_warnings = None\n"
        "try: open_image(sys.argv[1])\nexcept InputError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "huge.png"], capture_output=True, text=True
    )
    assert "50 megapixels" in done.stdout and done.stderr == ""


def test_an_image_without_pixels(tmp_path):
    _png_header(tmp_path / "flat.png", 0, 12)
    error(tmp_path / "flat.png")


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


def test_undo_at_low_resolution_keeps_the_centre():
    box = Letterbox(480, 640, 96)
    mask = ellipse(480, 640, 330, 420, 120, 180)
    frame = framed(box, mask).astype(np.float32) * 2 - 1
    quarter = frame.reshape(24, 4, 24, 4).mean((1, 3))
    restored = box.undo(quarter) > 0
    rows, columns = np.nonzero(restored)
    assert abs(rows.mean() - 329.5) < 1.5 and abs(columns.mean() - 419.5) < 1.5
    assert iou(restored, mask) > 0.93


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
    for axis, wanted in enumerate(np.nonzero(mask)):
        places = (np.arange(size // 2) + 0.5) * cells[axis]
        found = (covered.sum(1 - axis) * places).sum() / covered.sum()
        assert found == pytest.approx(wanted.mean() + 0.5, abs=0.02 * cells[axis])
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


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright_whatever_its_other_tags_say(tmp_path, orientation):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a.png")))
    np.testing.assert_array_equal(open_image(tmp_path / "a.png"), expected)
    broken = tmp_path / "broken.jpg"  # its unit of resolution is text, not a number
    tags = struct.pack("<HHHIHHHHI4sI", 2, 0x0112, 3, 1, orientation, 0, 0x0128, 2, 4, b"in\0\0", 0)
    image.save(broken, exif=b"Exif\0\0II*\0\x08\0\0\0" + tags)
    assert open_image(broken).shape == expected.shape


@pytest.mark.parametrize(
    ("values", "white"),
    [(np.int32([[0, 255]]), 255), (np.int32([[0, 65535]]), 255), (np.float32([[0, 65535]]), 255)],
)
def test_numbers_are_scaled_to_eight_bits(tmp_path, values, white):
    Image.fromarray(values).save(tmp_path / "a.tiff")
    assert open_image(tmp_path / "a.tiff")[0, :, 0].tolist() == [0, white]


LABELS = np.array([[0, 1], [2, 0]], np.uint8)


@pytest.mark.parametrize(
    ("palette", "shown"),
    [
        (
            (255, 255, 255, 0, 0, 0, 60, 60, 60),
            [[255, 0], [60, 255]],
        ),  # a drawn mask, whatever its palette's order
        ((255, 0, 0, 0, 0, 0, 0, 0, 9), [[256, 0], [258, 256]]),
        (
            (0, 0, 0, 128, 0, 0, 0, 128, 0),
            [[0, 257], [258, 0]],
        ),  # labels in colours, as PASCAL VOC has them
        ((70, 0, 90, 250, 230, 30, 0, 90, 0), [[0, 257], [258, 0]]),
        ((0,) * 9, [[0, 257], [258, 0]]),
        ((1, 1, 1, 254, 254, 254, 254, 254, 254), [[0, 253], [253, 0]]),
    ],
)
def test_palettes_count_by_colour_and_labels_in_colours_stay_apart(tmp_path, palette, shown):
    image = Image.new("P", (2, 2))
    image.putdata(LABELS.ravel().tolist())
    image.putpalette(palette)
    image.save(tmp_path / "m.png")
    assert brightness(Image.open(tmp_path / "m.png")).tolist() == shown


@pytest.mark.parametrize("palette", [(0, 0, 0, 255, 255, 255), (0,) * 6])
def test_a_mask_of_everything_is_no_empty_mask(palette):
    image = Image.new("P", (2, 2), 1)
    image.putpalette(palette)
    assert brightness(image).all()


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n")
    assert "git lfs pull" in error(path)


def test_a_link_whose_target_is_gone_is_named(tmp_path):
    (tmp_path / "photo.jpg").symlink_to("gone.jpg")
    assert "points at gone.jpg" in error(tmp_path / "photo.jpg")
    (tmp_path / "latest").symlink_to("gone")
    for read in (find_folder, read_config):
        with pytest.raises(InputError, match="points at gone"):
            read(tmp_path / "latest")


@pytest.mark.parametrize("colour", [0, 255])
def test_a_mask_that_is_drawn_in_the_transparency(colour):
    pixels = np.full((4, 6, 4), colour, np.uint8)
    pixels[..., 3] = 0
    pixels[1:3, 2:5, 3] = 255
    bright = brightness(Image.fromarray(pixels)) == 255
    np.testing.assert_array_equal(bright, pixels[..., 3] == 255)
    pixels[..., :3], pixels[..., 3] = 0, 255
    assert not brightness(Image.fromarray(pixels)).any()  # black and opaque: empty
