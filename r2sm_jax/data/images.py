"""Finds image files and opens them, whatever way they are stored."""

import base64
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from os import PathLike
from os.path import isfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from urllib.parse import unquote

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from r2sm_jax.errors import InputError, describe_content, refuse_dangling

MAX_MEGAPIXELS = 50
"""Larger images are refused. That is judged from the header, before they are decoded."""
# Pillow also warns of them. It is silenced once, since warnings.catch_warnings changes the filters
# of all threads.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
BAND_ROWS = 512
"""So many rows of an image become an array at a time."""
ORIENTATION = 0x0112
"""The EXIF tag that says how an image is turned."""
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by the value of the tag. The table is that of Pillow's
`exif_transpose`, which cannot be used: it refuses images of which other tags are damaged."""
JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".jp2")
TURNED = (
    "its EXIF orientation turns it, and the annotations are of the pixels as they are stored; turn "
    "the pixels and remove the tag, or annotate the upright image"
)
"""Remedy for an image whose height and width are those of its annotations before it is turned."""
IMAGE_SUFFIXES = (*JPEG_SUFFIXES, ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff")
"""Files of a folder with other names are no images."""

ImageFile = str | PathLike[str] | bytes
"""The path of an image file, or its content."""
ImageLike = ImageFile | Image.Image | np.ndarray
"""An image file, a Pillow image, or an RGB array `uint8 [H W 3]`."""


def open_image(image: ImageLike, name: str = "the image") -> UInt8[np.ndarray, "H W 3"]:
    """Opens any image that Pillow can decode as RGB `uint8 [H W 3]`; an array stays as it is.

    EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled to 8 bits,
    and of an animation the first frame is taken. Raises InputError if the file is missing, damaged,
    empty, no image, or larger than `MAX_MEGAPIXELS` (judged from the header, before decoding), or
    an array has another shape or type. The message names the path, or `name` where there is none.
    """
    if isinstance(image, str | bytes | PathLike | Image.Image):
        # Without copies of the whole, which take as long as a tenth of a photo's decoding, and of a
        # large one half a gigabyte.
        with _opened(image, name) as opened:
            return _to_array(_to_rgb(_upright(opened)))
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InputError(
            f"an image array must be uint8 [H W 3], not {array.dtype} {list(array.shape)}"
        )
    _check_size(name, array.shape[1], array.shape[0])
    return array


def open_annotated(path: Path, size: tuple[int, int], source: str) -> UInt8[np.ndarray, "H W 3"]:
    """Opens an image of a data set, which `source` says has this height and width.

    Raises InputError if it has not, and as `open_image`.
    """
    image = open_image(path)
    height, width = image.shape[:2]
    if (height, width) != size:
        sizes = f"{height} pixels high and {width} wide, but {source} says {size[0]} and {size[1]}"
        raise InputError(f"{path}: the image is {sizes}; {remedy_for_size(path, size)}")
    return image


def decode(image: ImageFile | Image.Image, name: str = "the image") -> Image.Image:
    """Opens the first frame of an image, upright, in the mode that it is stored in.

    Raises InputError like `open_image`.
    """
    with _opened(image, name) as opened:
        upright = _upright(opened)
        return opened.copy() if upright is opened else upright


def _upright(image: Image.Image) -> Image.Image:
    """The image as its EXIF orientation says; itself if that does not turn it."""
    turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def brightness(image: Image.Image) -> np.ndarray:
    """How bright each pixel of a drawn mask is `[H W]`: its brightest channel.

    It is 0 where the mask is transparent. A few kinds of files need more:

    - All colours are black: the transparency counts, if the mask is drawn in it.
    - A palette of greys: the darkest grey of several counts as 0.
    - A palette with colours, or all black: the pixels are labels. Label k counts as 256 + k, the
      background as 0. That is what is black or transparent, or else label 0.
    """
    if len(image.getbands()) == 1 and image.mode != "P":
        return np.asarray(image)
    rgba = np.asarray(image.convert("RGBA"))
    colour = rgba[..., :3]
    alpha = rgba[..., 3]
    values = colour.max(-1) * (alpha > 0)
    if image.mode != "P":
        # All black, but not transparent everywhere alike: the mask is in the transparency.
        is_drawn_in_alpha = not values.any() and np.ptp(alpha) > 0
        return alpha if is_drawn_in_alpha else values

    is_grey = (np.ptp(colour, axis=-1) == 0).all()
    if is_grey and any(image.getpalette() or ()):
        # Greys that begin above 0 are shifted; one grey alone says nothing of a background.
        return values - values.min() if np.ptp(values) else values

    # The numbers that stand for colours are labels of objects. Where some pixels are black or
    # transparent and others are not, those are the background; else it is label 0.
    labels = np.asarray(image, np.int32)
    has_background = 0 < np.count_nonzero(values) < values.size
    is_object = values > 0 if has_background else labels > 0
    # 256 is added so that no label is taken for white, which is 255 (`masks.from_pixels`).
    return np.where(is_object, labels + 256, 0)


def image_size(path: str | PathLike[str]) -> tuple[int, int]:
    """Height and width of what `open_image` would return, read from the header alone.

    Raises InputError like `open_image`.
    """
    with _opened(path) as image:
        width, height = image.size
        is_sideways = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
        return (width, height) if is_sideways else (height, width)


def frames(image: ImageFile, name: str = "the image") -> int:
    """The number of frames of an animation, or of pages of a document; 1 for a plain image.

    `open_image` takes the first. Raises InputError like `open_image`.
    """
    with _opened(image, name) as opened:
        if opened.format == "MPO":  # cameras put previews into MPO
            return 1
        try:
            return getattr(opened, "n_frames", 1)
        except Exception:  # a later frame is damaged, and only the first is used
            return 1


def is_turned_unseen(path: Path) -> bool:
    """Whether EXIF turns or mirrors an image without a change of its size.

    Then its size does not tell whether annotations are of the upright image. Raises InputError like
    `image_size`.
    """
    with _opened(path) as image:
        orientation = image.getexif().get(ORIENTATION, 1)
        return orientation in (2, 3, 4) or (orientation in UPRIGHT and image.width == image.height)


def remedy_for_size(path: Path, size: tuple[int, int]) -> str:
    """The remedy for an image whose height and width are not `size`, as its annotations say."""
    height, width = image_size(path)
    if size != (width, height):
        return "give the image that was annotated"
    with _opened(path) as image:
        if (image.height, image.width) == size:
            return TURNED
    return "height and width seem to be exchanged; exchange them"


def near_name(folders: Iterable[Path], file_name: str) -> str:
    """The name in one of the folders that a missing image may be meant to have.

    It is the same without its folders, with another ending, or in a folder below. "" if there is
    none, or several.
    """
    stem = PureWindowsPath(_plain_name(file_name)).stem
    for folder in folders:
        try:
            names = _names_by_stem(folder, folder.stat().st_mtime_ns).get(_name_key(stem), [])
        except OSError:
            continue
        if len(names) == 1:
            return names[0]
        below = _folders_in(folder, folder.stat().st_mtime_ns)
        found = [path / file_name for path in below if isfile(path / file_name)]
        if len(found) == 1:
            return found[0].relative_to(folder).as_posix()
    return ""


@lru_cache(maxsize=64)
def _folders_in(folder: Path, modified: int) -> list[Path]:
    """The folders in a folder, for the cache as in `_names_by_key`."""
    return [path for path in sorted(folder.iterdir()) if path.is_dir()]


def leads_outside(name: str) -> bool:
    """Whether a file name, on any system, points out of the folder that it is meant to lie in."""
    posix = PurePosixPath(name)
    windows = PureWindowsPath(name)
    is_outside = posix.is_absolute() or ".." in posix.parts or ".." in windows.parts
    return bool(is_outside or windows.drive or windows.root or "\0" in name)


def image_folders(path: Path, images_dir: str | PathLike[str] | None) -> tuple[Path, ...]:
    """The folders in which to look for the images of a dataset file.

    Raises InputError if `images_dir` does not exist.
    """
    if images_dir is None:
        return path.parent, path.parent / "images"
    folder = Path(images_dir)
    if not folder.is_dir():
        raise InputError(
            f"{images_dir}: there is no such image folder; give the one with the images of {path}"
        )
    return (folder,)


def find_image(folders: Iterable[Path], file_name: str) -> Path | None:
    """The first file of that name in the folders; None if there is none.

    A file also has that name if it differs in what tools and systems change on the way: backslashes
    for slashes, percent-encoding, the Unicode form of accents, and upper and lower case. The exact
    name goes first, and of several similar names none is taken.
    """
    folders = list(folders)
    for folder in folders:
        if isfile(folder / file_name):
            return folder / file_name

    if leads_outside(_plain_name(file_name)):
        return None
    for folder in folders:
        path = _find_similar(folder, file_name)
        if path is not None:
            return path
    return None


def _find_similar(folder: Path, file_name: str) -> Path | None:
    """The one file in the folder whose name is `file_name` but for its spelling."""
    *parents, name = _plain_name(file_name).split("/")
    path = folder
    for part in [*parents, name]:
        try:
            names = _names_by_key(path, path.stat().st_mtime_ns).get(_name_key(part), [])
        except (OSError, ValueError):
            return None
        if len(names) != 1:
            return None
        path = path / names[0]
    return path if isfile(path) else None


def _plain_name(file_name: str) -> str:
    """A name with slashes and without percent-encoding."""
    return unquote(file_name).replace("\\", "/")


def same_file_key(file_name: str) -> str:
    """A key that is the same for all spellings of one path.

    Upper and lower case stay apart: "A.png" and "a.png" can be two files.
    """
    return unicodedata.normalize("NFC", str(PurePosixPath(_plain_name(file_name))))


def _name_key(name: str) -> str:
    """A key that is the same for names that differ only in spelling, case included."""
    # A byte order mark is no blank for `strip`.
    return unicodedata.normalize("NFC", unquote(name)).casefold().strip("\ufeff \t\r\n")


@lru_cache(maxsize=64)
def _names_by_key(folder: Path, modified: int) -> dict[str, list[str]]:
    """The names in a folder by their key.

    Without the cache, every missing image of a large file would list the folder again. `modified`
    makes it forget a folder that has changed.
    """
    names: dict[str, list[str]] = {}
    for path in folder.iterdir():
        names.setdefault(_name_key(path.name), []).append(path.name)
    return names


@lru_cache(maxsize=64)
def _names_by_stem(folder: Path, modified: int) -> dict[str, list[str]]:
    """The names of images in a folder by the key of their stem."""
    names: dict[str, list[str]] = {}
    for key, similar in _names_by_key(folder, modified).items():
        path = PurePosixPath(key)
        if path.suffix in IMAGE_SUFFIXES:
            names.setdefault(path.stem, []).extend(similar)
    return names


def find_images(folder: Path, suffixes: tuple[str, ...], what: str) -> list[Path]:
    """The image files of a folder, by name, without hidden ones, such as the `._a.jpg` of macOS.

    `what` they are is for messages. Raises InputError if there is no folder, or no image in it.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; give one with {what}")
    paths = []
    for path in sorted(folder.iterdir()):
        is_image = path.suffix.lower() in suffixes and path.is_file()
        if is_image and not path.name.startswith("."):
            paths.append(path)
    if not paths:
        raise InputError(
            f"{folder}: there is no {' or '.join(suffixes)} file in the folder; put {what} there"
        )
    return paths


def data_url(image: UInt8[np.ndarray, "H W 3"], form: str, quality: int) -> str:
    """A URL that holds an image itself, in a lossy format of Pillow, such as "JPEG"."""
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, form, quality=quality)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextmanager
def _opened(image: ImageFile | Image.Image, name: str = "the image") -> Iterator[Image.Image]:
    """Opens an image and reads its header.

    Errors of Pillow become InputError. That includes errors in the caller's `with` block: Pillow
    decodes pixels only when they are asked for, which is there.
    """
    name = str(image) if isinstance(image, str | PathLike) else name
    try:
        if isinstance(image, Image.Image):
            # The caller's own image stays open.
            context = nullcontext(image)
        else:
            context = closing(Image.open(BytesIO(image) if isinstance(image, bytes) else image))
        with context as opened:
            _check_size(name, *opened.size)
            yield opened
    except InputError:
        raise
    except FileNotFoundError as error:
        refuse_dangling(Path(name))
        raise InputError(f"{name}: there is no such image; check the path") from error
    except IsADirectoryError as error:
        raise InputError(f"{name}: this is a folder; give the path of an image") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(
            f"{name}: the image has more than {MAX_MEGAPIXELS} megapixels; scale it down first"
        ) from error
    except UnidentifiedImageError as error:
        content = image if isinstance(image, bytes) else _first_bytes(image)
        if described := describe_content(content):
            raise InputError(f"{name}: this is not an image, it is {described}") from error
        raise InputError(
            f"{name}: this is not an image; give a JPEG, PNG or WebP file that is not empty"
        ) from error
    except Exception as error:  # damaged data make Pillow raise nearly every exception
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        what = f"the image is damaged or cut short, or cannot be read ({reason})"
        raise InputError(f"{name}: {what}; download or export it again") from error


def _first_bytes(image: ImageFile | Image.Image) -> bytes:
    """The beginning of an image file."""
    if not isinstance(image, str | PathLike):
        return b"?"
    with open(image, "rb") as file:
        return file.read(64)


def _check_size(name: str, width: int, height: int) -> None:
    """Raises InputError for an image without pixels, or with too many."""
    if not 0 < width * height <= MAX_MEGAPIXELS * 1_000_000:
        fault = f"has no pixels or more than {MAX_MEGAPIXELS} megapixels"
        raise InputError(
            f"{name}: the image of {width} x {height} {fault}; scale it or give another"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB: greys of more than 8 bits are scaled, transparency is white.

    An image that is RGB is returned itself.
    """
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
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_array(image: Image.Image) -> UInt8[np.ndarray, "H W 3"]:
    """The pixels of an RGB image, in an array of their own."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    # Pillow gives pixels as bytes, so that a large image in one piece would be in memory twice.
    for top in range(0, image.height, BAND_ROWS):
        bottom = min(top + BAND_ROWS, image.height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
    return pixels
