"""From image files to the square frame that the model sees, and from its masks back to the image."""

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from scipy.sparse import csr_array

from r2sm_jax.errors import InputError

MAX_MEGAPIXELS = 50
PAD_COLOUR = (124, 116, 104)
"""Fills the letterbox's border: ImageNet's mean colour, which normalisation turns into (nearly) zero."""

ImageLike = str | PathLike[str] | bytes | Image.Image | np.ndarray
"""A file, the content of one, a Pillow image, or an RGB array `uint8 [H W 3]`."""


def open_image(path: str | PathLike[str], content: bytes | None = None) -> UInt8[np.ndarray, "H W 3"]:
    """Reads any image that Pillow can decode, as RGB `uint8 [H W 3]`: the file at `path`, or `content` of that name.

    EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled to 8 bits, and of an
    animation the first frame is taken. Raises InputError for a file that is missing, unreadable, no image,
    truncated, zero-sized, or larger than `MAX_MEGAPIXELS` (judged from the header, before decoding).
    """
    return np.array(_to_rgb(decode(path, content)))


def decode(path: str | PathLike[str], content: bytes | None = None) -> Image.Image:
    """The first frame of an image file, upright, in the mode that it is stored in. Raises InputError like
    `open_image`."""
    with _opened(path, content) as image:
        return _upright(path, image)


def as_rgb(image: ImageLike) -> UInt8[np.ndarray, "H W 3"]:
    """Any form of an image as RGB `uint8 [H W 3]`, see `open_image`.

    Raises:
        InputError: as `open_image`, or an array has another shape or type.
    """
    if isinstance(image, bytes):
        return open_image("the image", image)
    if isinstance(image, str | PathLike):
        return open_image(image)
    if isinstance(image, Image.Image):
        _check_size("the image", *image.size)
        return np.array(_to_rgb(_upright("the image", image)))
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InputError(f"an image array must be uint8 [H W 3], not {array.dtype} {list(array.shape)}")
    _check_size("the image", array.shape[1], array.shape[0])
    return array


def image_size(path: str | PathLike[str]) -> tuple[int, int]:
    """Height and width of what `open_image` would return, read from the header alone. Raises InputError like it."""
    with _opened(path) as image:
        try:
            sideways = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        except Exception:  # damaged EXIF; decoding will tell
            sideways = False
        width, height = image.size
        return (width, height) if sideways else (height, width)


def frames(path: str | PathLike[str], content: bytes | None = None) -> int:
    """Frames of an animation or pages of a document, of which `open_image` takes the first; 1 for a plain image.
    Raises InputError like it."""
    with _opened(path, content) as image:
        try:
            return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # cameras put previews into MPO
        except Exception:  # damaged; decoding will tell
            return 1


def find_images(folder: Path, suffixes: tuple[str, ...], what: str) -> list[Path]:
    """The image files of a folder, by name. Raises InputError where there is no folder or no image."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; give one with {what}")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes and path.is_file())
    if not found:
        raise InputError(f"{folder}: there is no {' or '.join(suffixes)} file in the folder; put {what} there")
    return found


@dataclass(frozen=True)
class Letterbox:
    """Fits an image `[height width]` into a square frame of `size`: the longer side is scaled to it, the
    aspect kept, the rest padded at the right and at the bottom.

    Images, masks and logits share one geometry: pixel centres at half-integers (`align_corners=False`),
    scaled by `resized / original` along each axis, top left corners on each other.
    """

    height: int
    width: int
    size: int

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.size) < 1:
            raise ValueError(f"a letterbox needs positive sides, not {self.height} x {self.width} in {self.size}")

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width of the image inside the frame."""
        scale = self.size / max(self.height, self.width)
        return max(1, int(self.height * scale + 0.5)), max(1, int(self.width * scale + 0.5))

    def image(self, image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "S S 3"]:
        """The image in its frame; antialiased where it shrinks, `PAD_COLOUR` around it."""
        self._check(image.shape[:2])
        height, width = self.resized
        frame = np.empty((self.size, self.size, 3), np.uint8)
        frame[:] = PAD_COLOUR
        resized = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
        frame[:height, :width] = np.asarray(resized)
        return frame

    def coverage(self, mask: Bool[np.ndarray, "H W"], cells: int) -> UInt8[np.ndarray, "s s"]:
        """How much of each cell of the frame, cut into `cells` x `cells`, the mask covers: 0..255.

        The exact area of the overlap, so area and outline stay true and sit on the image's at any scale. It is
        monotone: modal ⊆ amodal before means modal <= amodal after. More than 127 is at least half of the cell.
        """
        self._check(mask.shape)
        covered = np.zeros((cells, cells), np.uint8)
        columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
        if len(rows):  # most masks are small, so only their boxes are multiplied
            y, x = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
            down, across = (
                _overlaps(side, side * self.size / resized, cells)
                for side, resized in zip((self.height, self.width), self.resized, strict=True)
            )
            i, j = _touched(down, y), _touched(across, x)
            shares = down[i, y] @ mask[y, x].astype(np.float64) @ across[j, x].T
            # A little more than half, so that rounding errors do not decide on exact halves.
            covered[i, j] = 255 * shares + 0.500001
        return covered

    def valid(self) -> Bool[np.ndarray, "S S"]:
        """Which pixels of the frame are image and not padding."""
        height, width = self.resized
        frame = np.zeros((self.size, self.size), bool)
        frame[:height, :width] = True
        return frame

    def undo(self, logits: Float[np.ndarray, "... s s"]) -> Float[np.ndarray, "... H W"]:
        """Logits at any square resolution of the frame (stride 4, say), back at the image's own resolution.

        In this order: bilinear to the whole frame, crop to the resized image, bilinear to the original size,
        without antialiasing: what SAM does. All three are linear and work on rows and columns apart, so they
        are folded into one small sparse matrix for each axis; a 96 x 96 mask becomes 480 x 640 in about a
        millisecond. Dense ones would go to BLAS, whose threads wait for each other twenty times as long where
        other programs use the cores.
        """
        logits = np.asarray(logits, np.float32)
        side = logits.shape[-1]
        if logits.ndim < 2 or logits.shape[-2] != side or self.size % side:
            raise ValueError(f"logits {logits.shape} are not a square that divides the frame of {self.size}")
        rows = _undo_axis(side, self.size, self.resized[0], self.height)
        columns = _undo_axis(side, self.size, self.resized[1], self.width)
        drawn = np.empty((*logits.shape[:-2], self.height, self.width), np.float32)
        for place in np.ndindex(logits.shape[:-2]):
            drawn[place] = rows @ np.ascontiguousarray((columns @ np.ascontiguousarray(logits[place].T)).T)
        return drawn

    def _check(self, shape: tuple[int, ...]) -> None:
        if shape != (self.height, self.width):
            raise ValueError(f"this letterbox is for {self.height} x {self.width}, not for {shape}")


@lru_cache(maxsize=256)
def _overlaps(pixels: int, frame: float, cells: int) -> Float[np.ndarray, "cells pixels"]:
    """The share of each cell that each pixel takes along one axis; the `cells` fill `frame` >= `pixels`."""
    edges, pixel = np.linspace(0, frame, cells + 1), np.arange(pixels)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return overlap.clip(0) * cells / frame


def _touched(overlaps: Float[np.ndarray, "cells pixels"], pixels: slice) -> slice:
    """The cells that a run of pixels reaches."""
    cells = np.flatnonzero(overlaps[:, [pixels.start, pixels.stop - 1]].any(1))
    return slice(int(cells[0]), int(cells[-1]) + 1)


@lru_cache(maxsize=256)
def _undo_axis(side: int, frame: int, resized: int, original: int) -> Any:
    up = csr_array(_bilinear(side, frame)[:resized])
    whole: Any = csr_array(_bilinear(resized, original)) @ up
    return whole.astype(np.float32)


def _bilinear(source: int, target: int) -> Float[np.ndarray, "target source"]:
    """The matrix that resizes one axis bilinearly with half-pixel centres, edges repeated, no
    antialiasing."""
    centres = np.clip((np.arange(target) + 0.5) * (source / target) - 0.5, 0, source - 1)
    left = np.minimum(centres.astype(int), max(source - 2, 0))
    weight = centres - left
    matrix = np.zeros((target, source))
    matrix[np.arange(target), left] = 1 - weight
    matrix[np.arange(target), np.minimum(left + 1, source - 1)] += weight
    return matrix


@contextmanager
def _opened(path: str | PathLike[str], content: bytes | None = None) -> Iterator[Image.Image]:
    """An image of which only the header was read. Raises InputError, see `open_image`."""
    try:
        if (Path(path).stat().st_size if content is None else len(content)) == 0:
            raise InputError(f"{path}: the image file is empty (0 bytes); download or export it again")
        with warnings.catch_warnings(
            action="ignore"
        ):  # Pillow's warning about large images; `_check_size` refuses them
            image = Image.open(path if content is None else BytesIO(content))
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no such image; check the path") from error
    except Image.DecompressionBombError as error:
        raise InputError(
            f"{path}: the image is far more than {MAX_MEGAPIXELS} megapixels; scale it down first"
        ) from error
    except UnidentifiedImageError as error:
        raise InputError(f"{path}: this is not an image; give a JPEG, PNG or WebP file") from error
    except (OSError, ValueError, SyntaxError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot read the image ({reason}); give a readable image file") from error
    with closing(image):
        _check_size(path, *image.size)
        yield image


def _check_size(path: str | PathLike[str], width: int, height: int) -> None:
    if min(width, height) < 1:
        raise InputError(f"{path}: the image has no pixels ({width} x {height}); give one with content")
    if width * height > MAX_MEGAPIXELS * 1_000_000:
        raise InputError(
            f"{path}: the image is {width} x {height}, more than {MAX_MEGAPIXELS} megapixels; scale it down first"
        )


def _upright(path: str | PathLike[str], image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:  # Pillow's decoders raise nearly every built-in exception on damaged data
        reason = str(error) or type(error).__name__
        raise InputError(
            f"{path}: the image is damaged or cut short ({reason}); download or export it again"
        ) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey; Pillow would clip it at 255
        return Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        pixels = np.nan_to_num(np.asarray(image))
        pixels = pixels * 255 if pixels.max() <= 1 else pixels
        return Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
