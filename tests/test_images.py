"""Images of users: what is read as which pixels, and what is refused."""

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from r2sm_jax.data.images import brightness, image_size, open_image
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export_folder import find_folder
from r2sm_jax.training.run_folder import read_config

RNG = np.random.default_rng(0)
NOISE = Image.fromarray(RNG.integers(0, 255, (5, 7, 3), dtype=np.uint8))
PHOTO = np.asarray(NOISE.resize((70, 50)))


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_formats_are_read_as_rgb(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(PHOTO).save(path, quality=95)
    image = open_image(path)
    assert image.dtype == np.uint8 and image.shape == (50, 70, 3) and image.flags.writeable
    assert abs(image.astype(int) - PHOTO).mean() < 8
    assert image_size(path) == (50, 70)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright_whatever_its_other_tags_say(tmp_path, orientation):
    image = Image.fromarray(RNG.integers(0, 256, (6, 9, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a.png")))
    np.testing.assert_array_equal(open_image(tmp_path / "a.png"), expected)
    assert image_size(tmp_path / "a.png") == expected.shape[:2]
    broken = tmp_path / "broken.jpg"  # its unit of resolution is text, not a number
    tags = struct.pack("<HHHIHHHHI4sI", 2, 0x0112, 3, 1, orientation, 0, 0x0128, 2, 4, b"in\0\0", 0)
    image.save(broken, exif=b"Exif\0\0II*\0\x08\0\0\0" + tags)
    assert open_image(broken).shape == expected.shape


GREY = PHOTO[..., 0]
PALETTE = Image.fromarray(PHOTO).quantize(16)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(GREY), GREY),
        (PALETTE, np.asarray(PALETTE.convert("RGB"))),
        (Image.fromarray(GREY > 128), (GREY > 128) * np.uint8(255)),
        (Image.fromarray(GREY.astype(np.uint16) * 257), GREY),
        (Image.fromarray(np.int32([[0, 255]])), [[0, 255]]),
        (Image.fromarray(np.int32([[0, 65535]])), [[0, 255]]),
        (Image.fromarray(np.float32([[0, 65535]])), [[0, 255]]),
    ],
    ids=["grey", "palette", "1 bit", "16 bit", "32 bit", "32 bit, scaled", "float"],
)
def test_pixels_of_any_type_become_eight_bits(tmp_path, image, expected):
    path = tmp_path / "a.tiff"
    image.save(path)
    expected = np.asarray(expected)
    if expected.ndim == 2:
        expected = np.stack([expected] * 3, axis=-1)
    np.testing.assert_array_equal(open_image(path), expected)


def test_cmyk_and_transparency(tmp_path):
    Image.fromarray(PHOTO).convert("CMYK").save(tmp_path / "print.jpg")
    assert open_image(tmp_path / "print.jpg").shape == (50, 70, 3)
    alpha = np.zeros((50, 70), np.uint8)
    alpha[:, 35:] = 255
    Image.fromarray(np.dstack([PHOTO, alpha])).save(tmp_path / "cutout.png")
    image = open_image(tmp_path / "cutout.png")
    assert (image[:, :35] == 255).all()  # laid over white
    np.testing.assert_array_equal(image[:, 35:], PHOTO[:, 35:])


# What is refused.


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels: nothing may decode it."""
    content = b"\x89PNG\r\n\x1a\n"
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for body in (b"IHDR" + size, b"IDATx"):
        checksum = struct.pack(">I", zlib.crc32(body))
        content += struct.pack(">I", len(body) - 4) + body + checksum
    return content


def refuse(path: Path) -> str:
    """The sentence that names the file and the remedy."""
    with pytest.raises(InputError) as refused:
        open_image(path)
    message = str(refused.value)
    assert str(path) in message and "\n" not in message and ";" in message
    return message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such image"),
        ("folder", "this is a folder"),
        (b"", "empty"),
        (b"not an image", "not an image"),
        (png_header(0, 12), ""),
        # More pixels than our limit, than Pillow warns of, and than it opens.
        *((png_header(side, side), "50 megapixels") for side in (7100, 12_000, 40_000)),
    ],
)
@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_read_says_why(tmp_path, monkeypatch, content, reason):
    path = tmp_path / "a.png"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    # Changing the filters of warnings for a moment would change those of other threads.
    monkeypatch.setattr(warnings, "catch_warnings", None)
    assert reason in refuse(path)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tif"])
def test_truncated_images(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(RNG.integers(0, 255, (50, 70, 3), dtype=np.uint8)).save(path)
    content = path.read_bytes()
    for share in (0.1, 0.5, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        refuse(path)


# Masks in palettes.


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
    assert "git lfs pull" in refuse(path)


def test_a_link_whose_target_is_gone_is_named(tmp_path):
    (tmp_path / "photo.jpg").symlink_to("gone.jpg")
    assert "points at gone.jpg" in refuse(tmp_path / "photo.jpg")
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
