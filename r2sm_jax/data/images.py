"""From image files to the square frame that the model sees, and from its masks back to the
image."""

import base64
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from math import ceil
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, UnidentifiedImageError
from scipy.sparse import csr_array

from r2sm_jax.data.masks import box
from r2sm_jax.errors import InputError

MAX_MEGAPIXELS = 50
# Of larger images, which are refused. Set once, since warnings.catch_warnings changes the filters
# of all threads.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
ORIENTATION = 0x0112
"""EXIF's tag; its values from 2 on and what makes an image upright, as in Pillow's
`exif_transpose`, which refuses images with other tags that are wrong."""
UPRIGHT = dict(enumerate(map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), start=2))
PAD_COLOUR = (124, 116, 104)
"""Fills the letterbox's border: ImageNet's mean colour, which normalisation turns into (nearly)
zero."""

ImageFile = str | PathLike[str] | bytes
"""The path of an image file, or its content."""
ImageLike = ImageFile | Image.Image | np.ndarray
"""An image file, a Pillow image, or an RGB array `uint8 [H W 3]`."""


def open_image(image: ImageLike, name: str = "the image") -> UInt8[np.ndarray, "H W 3"]:
    """Any image that Pillow can decode as RGB `uint8 [H W 3]`; an array is returned as it is.

    EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled to 8 bits,
    and of an animation the first frame is taken. Raises InputError if the file is missing, damaged,
    empty, no image, or larger than `MAX_MEGAPIXELS` (judged from the header, before decoding), or
    an array has another shape or type. The message names the path, or `name` where there is none.
    """
    if isinstance(image, str | bytes | PathLike | Image.Image):
        return np.array(_to_rgb(decode(image, name)))
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InputError(
            f"an image array must be uint8 [H W 3], not {array.dtype} {list(array.shape)}"
        )
    _check_size(name, array.shape[1], array.shape[0])
    return array


def open_annotated(path: Path, size: tuple[int, int], source: str) -> UInt8[np.ndarray, "H W 3"]:
    """The image of a data set, which `source` says has this height and width. Raises InputError if
    it has not, and as `open_image`."""
    image = open_image(path)
    if (found := image.shape[:2]) != size:
        sizes = (
            f"{found[0]} pixels high and {found[1]} wide, but {source} says {size[0]} and {size[1]}"
        )
        raise InputError(f"{path}: the image is {sizes}; give the image that was annotated")
    return image


def decode(image: ImageFile | Image.Image, name: str = "the image") -> Image.Image:
    """The first frame of an image, upright, in the mode that it is stored in. Raises InputError
    like `open_image`."""
    with _opened(image, name) as opened:
        turn = UPRIGHT.get(opened.getexif().get(ORIENTATION, 1))
        return opened.copy() if turn is None else opened.transpose(turn)


def brightness(image: Image.Image) -> np.ndarray:
    """How bright each pixel of a drawn mask is `[H W]`: its brightest channel, 0 where it is
    transparent.

    Of several greys of a palette the darkest is 0. In a palette image with colours, or whose
    palette is all black, each label counts as a brightness above 255 of its own, and 0 is what is
    black or transparent, or else label 0.
    """
    if len(image.getbands()) == 1 and image.mode != "P":
        return np.asarray(image)
    rgba, labels = np.asarray(image.convert("RGBA")), np.asarray(image, np.int32)
    values = rgba[..., :3].max(-1) * (rgba[..., 3] > 0)
    if image.mode != "P":
        return values
    if (np.ptp(rgba[..., :3], axis=-1) == 0).all() and any(image.getpalette() or ()):
        return values - values.min() if np.ptp(values) else values
    return np.where(
        values if 0 < np.count_nonzero(values) < values.size else labels, labels + 256, 0
    )


def image_size(path: str | PathLike[str]) -> tuple[int, int]:
    """Height and width of what `open_image` would return, read from the header alone. Raises
    InputError like it."""
    with _opened(path) as image:
        width, height = image.size
        sideways = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
        return (width, height) if sideways else (height, width)


def frames(image: ImageFile, name: str = "the image") -> int:
    """Frames of an animation or pages of a document, of which `open_image` takes the first; 1 for a
    plain image. Raises InputError like it."""
    with _opened(image, name) as opened:
        try:
            return (
                1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
            )  # cameras put previews into MPO
        except Exception:  # a later frame is damaged, and only the first is used
            return 1


def find_images(folder: Path, suffixes: tuple[str, ...], what: str) -> list[Path]:
    """The image files of a folder, by name, without hidden ones, such as the `._a.jpg` of macOS.
    Raises InputError where there is no folder or no image."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; give one with {what}")
    found = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in suffixes and path.is_file() and not path.name.startswith(".")
    )
    if not found:
        raise InputError(
            f"{folder}: there is no {' or '.join(suffixes)} file in the folder; put {what} there"
        )
    return found


def data_url(image: UInt8[np.ndarray, "H W 3"], form: str, quality: int) -> str:
    """An image as an address that holds all of it, in a lossy format of Pillow, such as "JPEG"."""
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, form, quality=quality)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Letterbox:
    """Fits an image `[height width]` into a square frame of `size`: the longer side is scaled to
    it, the aspect kept, the rest padded at the right and at the bottom.

    Images, masks and logits share one geometry: pixel centres at half-integers
    (`align_corners=False`), scaled by `resized / original` along each axis, top left corners on
    each other.
    """

    height: int
    width: int
    size: int

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.size) < 1:
            raise ValueError(
                f"a letterbox needs positive sides, not {self.height} x {self.width} in {self.size}"
            )

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width of the image inside the frame."""
        scale = self.size / max(self.height, self.width)
        return max(1, int(self.height * scale + 0.5)), max(1, int(self.width * scale + 0.5))

    def image(self, image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "S S 3"]:
        """The image in its frame; antialiased where it shrinks, `PAD_COLOUR` around it."""
        self._check(image.shape[:2])
        height, width = self.resized
        frame = np.full((self.size, self.size, 3), PAD_COLOUR, np.uint8)
        resized = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
        frame[:height, :width] = np.asarray(resized)
        return frame

    def coverage(self, mask: Bool[np.ndarray, "H W"], cells: int) -> UInt8[np.ndarray, "s s"]:
        """How much of each cell of the frame, cut into `cells` x `cells`, the mask covers: 0..255.

        The exact area of the overlap, so area and outline stay true and sit on the image's at any
        scale. It is monotone: modal ⊆ amodal before means modal <= amodal after. More than 127 is
        at least half of the cell.
        """
        self._check(mask.shape)
        x0, y0, x1, y1 = box(mask)  # most masks are small, so only their boxes are multiplied
        rows, down = _overlaps_of(
            y0, y1, self.height, self.height * self.size / self.resized[0], cells
        )
        columns, across = _overlaps_of(
            x0, x1, self.width, self.width * self.size / self.resized[1], cells
        )
        covered = np.zeros((cells, cells), np.uint8)
        shares = (across @ (down @ mask[y0:y1, x0:x1].astype(np.float64)).T).T
        # A little more than half, so that rounding errors do not decide on exact halves.
        covered[rows, columns] = 255 * shares + 0.500001
        return covered

    def valid(self) -> Bool[np.ndarray, "S S"]:
        """Which pixels of the frame are image and not padding."""
        height, width = self.resized
        frame = np.zeros((self.size, self.size), bool)
        frame[:height, :width] = True
        return frame

    def undo(self, logits: Float[np.ndarray, "... s s"]) -> Float[np.ndarray, "... H W"]:
        """Logits at any square resolution of the frame (stride 4, say), back at the image's own
        resolution.

        In this order: bilinear to the whole frame, crop to the resized image, bilinear to the
        original size, without antialiasing: what SAM does. Raises ValueError for logits whose side
        does not divide the frame's.
        """
        logits = np.asarray(logits, np.float32)
        side = logits.shape[-1]
        if logits.ndim < 2 or logits.shape[-2] != side or self.size % side:
            raise ValueError(
                f"logits {logits.shape} are not a square that divides the frame of {self.size}"
            )
        rows = _undo_axis(side, self.size, self.resized[0], self.height)
        columns = _undo_axis(side, self.size, self.resized[1], self.width)
        drawn = np.empty((*logits.shape[:-2], self.height, self.width), np.float32)
        for place in np.ndindex(logits.shape[:-2]):
            drawn[place] = rows @ np.ascontiguousarray(
                (columns @ np.ascontiguousarray(logits[place].T)).T
            )
        return drawn

    def _check(self, shape: tuple[int, ...]) -> None:
        if shape != (self.height, self.width):
            raise ValueError(f"this letterbox is for {self.height} x {self.width}, not for {shape}")


@lru_cache(maxsize=2048)
def _overlaps_of(start: int, stop: int, side: int, frame: float, cells: int) -> tuple[slice, Any]:
    """The cells that the pixels from `start` to before `stop` reach, and the share of each that
    each pixel takes."""
    reached = slice(int(start * cells / frame), ceil(stop * cells / frame))
    return reached, _overlaps(side, frame, cells)[reached, start:stop]


@lru_cache(maxsize=256)
def _overlaps(pixels: int, frame: float, cells: int) -> Any:
    """The share of each cell that each pixel takes along one axis, sparse; the `cells` fill `frame`
    >= `pixels`."""
    edges, pixel = np.linspace(0, frame, cells + 1), np.arange(pixels)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return csr_array(overlap.clip(0) * cells / frame)


@lru_cache(maxsize=256)
def _undo_axis(side: int, frame: int, resized: int, original: int) -> Any:
    """The matrix of both resizes and the crop along one axis. It is sparse: threads of BLAS, which
    multiplies dense ones, wait long for each other where other programs use the cores."""
    up = csr_array(_bilinear(side, frame)[:resized])
    whole: Any = csr_array(_bilinear(resized, original)) @ up
    return whole.astype(np.float32)


def _bilinear(source: int, target: int) -> Float[np.ndarray, "target source"]:
    """The matrix that resizes one axis bilinearly with half-pixel centres, edges repeated, no
    antialiasing."""
    centres = (np.arange(target) + 0.5) * (source / target) - 0.5
    return np.stack([np.interp(centres, np.arange(source), row) for row in np.eye(source)], axis=1)


@contextmanager
def _opened(image: ImageFile | Image.Image, name: str = "the image") -> Iterator[Image.Image]:
    """An image of which only the header was read. Errors of Pillow, also in the block, become
    InputError."""
    name = str(image) if isinstance(image, str | PathLike) else name
    try:
        file = BytesIO(image) if isinstance(image, bytes) else image
        opened = file if isinstance(file, Image.Image) else Image.open(file)
        with nullcontext(opened) if opened is image else closing(opened):
            _check_size(name, *opened.size)
            yield opened
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{name}: there is no such image; check the path") from error
    except IsADirectoryError as error:
        raise InputError(f"{name}: this is a folder; give the path of an image") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(
            f"{name}: the image has more than {MAX_MEGAPIXELS} megapixels; scale it down first"
        ) from error
    except UnidentifiedImageError as error:
        raise InputError(
            f"{name}: this is not an image; give a JPEG, PNG or WebP file that is not empty"
        ) from error
    except (
        Exception
    ) as error:  # Pillow's decoders raise nearly every built-in exception on damaged data
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        what = f"the image is damaged or cut short, or cannot be read ({reason})"
        raise InputError(f"{name}: {what}; download or export it again") from error


def _check_size(name: str, width: int, height: int) -> None:
    if not 0 < width * height <= MAX_MEGAPIXELS * 1_000_000:
        fault = f"has no pixels or more than {MAX_MEGAPIXELS} megapixels"
        raise InputError(
            f"{name}: the image of {width} x {height} {fault}; scale it or give another"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):  # Pillow would clip at 255
        pixels = np.nan_to_num(np.asarray(image, np.float64))
        if image.mode == "F" and pixels.max() <= 1:
            pixels *= 255
        elif image.mode.startswith("I;16") or pixels.max() > 255:
            pixels /= 257
        return Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
