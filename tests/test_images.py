"""Images of users: what is read as which pixels, which file a name means, and what is refused."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from r2sm_jax.data.images import find_image, image_size, open_image
from r2sm_jax.errors import InputError

RNG = np.random.default_rng(0)
PHOTO = np.asarray(Image.fromarray(RNG.integers(0, 255, (5, 7, 3), np.uint8)).resize((70, 50)))
GREY = PHOTO[..., 0]
PALETTE = Image.fromarray(PHOTO).quantize(16)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_formats_are_read_as_rgb(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(PHOTO).save(path, quality=95)
    image = open_image(path)
    assert image.dtype == np.uint8 and image.shape == (50, 70, 3) and image.flags.writeable
    assert abs(image.astype(int) - PHOTO).mean() < 8
    assert image_size(path) == (50, 70)


@pytest.mark.parametrize("orientation", [*range(10), 42])
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "avif", "tif", "mpo"])
def test_an_image_is_turned_upright(tmp_path, suffix, orientation):
    """Its size by the header is that of its pixels, whatever its format and orientation."""
    path = tmp_path / f"a.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(PHOTO).save(path, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(path)))
    np.testing.assert_array_equal(open_image(path), expected)
    assert image_size(path) == expected.shape[:2]
    is_sideways = orientation in range(5, 9)
    assert expected.shape[:2] == (PHOTO.shape[1::-1] if is_sideways else PHOTO.shape[:2])


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


def test_transparency_is_white():
    alpha = np.where(np.arange(70) < 35, 0, 255)
    cutout = np.dstack([PHOTO, np.broadcast_to(alpha, (50, 70))]).astype(np.uint8)
    image = open_image(Image.fromarray(cutout))
    assert (image[:, :35] == 255).all()
    np.testing.assert_array_equal(image[:, 35:], PHOTO[:, 35:])


def test_an_array_is_copied():
    image = open_image(PHOTO)
    assert (image == PHOTO).all() and not np.shares_memory(image, PHOTO)


# Which file a name means.


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a.jpg", "a.jpg"),
        ("below/b.jpg", "below/b.jpg"),
        ("below\\b.jpg", "below/b.jpg"),
        ("photos/a.jpg", "a.jpg"),  # the name holds the folder already
        ("data/photos/below/b.jpg", "below/b.jpg"),
        ("caf\u00e9.jpg", "cafe\u0301.jpg"),  # composed, and as macOS writes it
        ("A.jpg", None),
        ("../photos/a.jpg", None),
    ],
)
def test_find_image(name, file, tmp_path):
    folder = tmp_path / "data" / "photos"
    (folder / "below").mkdir(parents=True)
    for existing in ("a.jpg", "below/b.jpg", "cafe\u0301.jpg"):
        (folder / existing).touch()
    assert find_image([folder], name) == (None if file is None else folder / file)


def test_a_name_that_several_files_have_is_refused(tmp_path):
    (tmp_path / "images").mkdir()
    for folder in (tmp_path, tmp_path / "images"):
        (folder / "a.jpg").touch()
    with pytest.raises(InputError, match=r"a.jpg: it can be .*a.jpg and .*images/a.jpg"):
        find_image([tmp_path, tmp_path / "images"], "a.jpg")


# What is refused.


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels: nothing may decode it."""
    content = b"\x89PNG\r\n\x1a\n"
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for body in (b"IHDR" + size, b"IDATx"):
        checksum = struct.pack(">I", zlib.crc32(body))
        content += struct.pack(">I", len(body) - 4) + body + checksum
    return content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "cannot be read"),
        (b"not an image", "cannot identify"),
        # More pixels than our limit, than Pillow warns of, and than it opens.
        *((png_header(side, side), "50 megapixels") for side in (7100, 12_000, 40_000)),
    ],
)
@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_read_says_why(tmp_path, content, reason):
    path = tmp_path / "a.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"a.png.*{reason}"):
        open_image(path)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tif"])
def test_truncated_images(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(RNG.integers(0, 255, (50, 70, 3), np.uint8)).save(path)
    content = path.read_bytes()
    for share in (0.1, 0.5, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(InputError, match="cannot be read"):
            open_image(path)


def test_a_web_address_is_named_as_one():
    with pytest.raises(InputError, match="web addresses are not opened"):
        open_image("https:/x.org/a.jpg")
