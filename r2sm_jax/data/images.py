"""Finds image files and opens them, whatever way they are stored."""

import base64
import hashlib
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from os import PathLike
from os.path import isfile
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from r2sm_jax.errors import InputError
from r2sm_jax.progress import show_progress

MAX_MEGAPIXELS = 50
"""Larger images are refused. That is judged from the header, before they are decoded."""
# Pillow also warns of them. It is silenced once, since warnings.catch_warnings changes the filters
# of all threads.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
ORIENTATION = 0x0112
"""The EXIF tag that says how an image is turned; from 5 to 8 height and width are exchanged."""
JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".jp2")
IMAGE_SUFFIXES = (*JPEG_SUFFIXES, ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff")
"""Files of a folder with other names are no images."""
NUM_HASHED = 4096
"""Bytes of an image file that are hashed. Those in its middle differ from image to image, and those
of 118,000 images are read in seconds."""
ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}
"""Of JPEG and PNG: how a file begins, and what it has near its end."""
NUM_NAMED = 3
"""Files that cannot be used of which a message says why."""
NUM_KNOWN = 1 << 18
"""Files that are not looked at again, since another split of a run has them, too."""
UNICODE_FORMS = ("NFC", "NFD")
"""Composed and decomposed accents: macOS writes the second."""

ImageFile = str | PathLike[str] | bytes
"""The path of an image file, or its content."""
ImageLike = ImageFile | Image.Image | np.ndarray
"""An image file, a Pillow image, or an RGB array `uint8 [H W 3]`."""


def open_image(image: ImageLike, name: str = "the image") -> UInt8[np.ndarray, "H W 3"]:
    """Opens any image that Pillow can decode as RGB `uint8 [H W 3]`; an array is copied.

    EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled to 8 bits,
    and of an animation the first frame is taken. Raises InputError, naming the path or `name`, if
    the file is missing, damaged, no image or larger than `MAX_MEGAPIXELS`, or an array has another
    shape or type.
    """
    if isinstance(image, str | bytes | PathLike | Image.Image):
        return np.array(_to_rgb(decode(image, name)))
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InputError(
            f"an image array must be uint8 [H W 3], not {array.dtype} {list(array.shape)}"
        )
    _refuse_size(name, array.shape[1], array.shape[0])
    return array.copy()


def open_annotated(path: Path, size: tuple[int, int], source: str) -> UInt8[np.ndarray, "H W 3"]:
    """Opens an image of a data set, which `source` says has this height and width.

    Raises InputError if it has not, and as `open_image`.
    """
    image = open_image(path)
    check_stated_size(path, image.shape[:2], size, source)
    return image


def check_stated_size(
    path: Path, actual: tuple[int, ...], stated: tuple[int, int], source: str
) -> None:
    """Raises InputError if an image has another height and width than `source` states."""
    if actual == stated:
        return
    remedy = "give the image that was annotated"
    if actual == stated[::-1]:
        # Masks that were drawn on the pixels as they are stored lie wrong on the upright image.
        remedy = "height and width are exchanged, or the image is turned by its EXIF orientation"
    sizes = f"{actual[0]} pixels high and {actual[1]} wide, but {source} says"
    raise InputError(f"{path}: the image is {sizes} {stated[0]} and {stated[1]}; {remedy}")


def decode(image: ImageFile | Image.Image, name: str = "the image") -> Image.Image:
    """Opens the first frame of an image, upright, in the mode that it is stored in.

    Raises InputError like `open_image`.
    """
    with _opened(image, name) as opened:
        opened.load()
        return ImageOps.exif_transpose(opened)


def image_size(path: str | PathLike[str]) -> tuple[int, int]:
    """Height and width of what `open_image` would return, read from the header alone.

    Raises InputError like `open_image`.
    """
    with _opened(path) as image:
        width, height = image.size
        # Pillow gives the size of a TIFF file as it is upright.
        is_sideways = image.format != "TIFF" and image.getexif().get(ORIENTATION) in range(5, 9)
        return (width, height) if is_sideways else (height, width)


def frames(image: ImageFile) -> int:
    """The number of frames of an animation, or of pages of a document; 1 for a plain image.

    `open_image` takes the first. Raises InputError like `open_image`.
    """
    with _opened(image) as opened:
        # Cameras put previews into MPO.
        return 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)


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
    """The file of that name in the folders; None if there is none.

    Backslashes count as slashes, accents may be composed or not, and a name may hold the end of its
    folder already: `photos/a.jpg` is found in `photos`. Raises InputError if several files fit.
    """
    name = PurePosixPath(file_name.replace("\\", "/"))
    if leads_outside(str(name)):
        return None
    folders = list(folders)
    found = [_file_in(folder, name) for folder in folders]
    if not any(found):
        found = [_file_below(folder, name) for folder in folders]
    found = [path for path in found if path is not None]
    if len(found) > 1:
        files = " and ".join(map(str, found))
        raise InputError(f"{file_name}: it can be {files}; remove one, or name the folder")
    return found[0] if found else None


def locate_image(folders: Sequence[Path], file_name: str, source: Path) -> Path:
    """The file of an image that `source` lists. Raises InputError where no folder has it."""
    path = find_image(folders, file_name)
    if path is None:
        raise InputError(
            f"{source}: image {file_name} is not in {' or '.join(map(str, folders))}; give its "
            "folder with --images DIR, in training with --data.images DIR"
        )
    return path


def check_files(
    folders: Sequence[Path], sizes: Mapping[str, tuple[int, int]], source: Path
) -> None:
    """Looks at each image file that `source` lists with its height and width: it is there, whole,
    and of this size.

    Raises InputError, which names the first of those that are not.
    """
    faults = []
    with show_progress(f"looking at the images of {source.name}", len(sizes)) as advance:
        for name, size in sizes.items():
            advance(1)
            try:
                path = locate_image(folders, name, source)
                _check_whole(path, size, str(source), path.stat().st_mtime_ns)
            except InputError as error:
                faults.append(str(error))
    if faults:
        raise InputError(
            f"{source}: {len(faults)} of {len(sizes)} images cannot be used; put them right, or "
            f"take their records out: {'; '.join(faults[:NUM_NAMED])}"
        )


@lru_cache(maxsize=NUM_KNOWN)
def _check_whole(path: Path, size: tuple[int, int], source: str, changed: int) -> None:
    """Raises InputError for an image that is cut, or of another size. Unlike others, JPEG and PNG
    need no decoding for that. `changed`: when it was written."""
    check_stated_size(path, image_size(path), size, source)
    with path.open("rb", 0) as file:
        end = ENDS.get(file.read(2))
        file.seek(max(0, file.seek(0, 2) - NUM_HASHED))
        is_whole = end is not None and end in file.read()
    if not is_whole:
        open_image(path)


def _file_in(folder: Path, name: PurePosixPath) -> Path | None:
    """The file of that name in a folder, in either Unicode form."""
    spellings = [unicodedata.normalize(form, str(name)) for form in UNICODE_FORMS]
    for spelling in dict.fromkeys((str(name), *spellings)):
        if isfile(folder / spelling):
            return folder / spelling
    return None


def _file_below(folder: Path, name: PurePosixPath) -> Path | None:
    """The file of a name that begins with the last parts of its folder's path."""
    parts = folder.resolve().parts
    for length in range(1, len(name.parts)):
        if parts[-length:] == name.parts[:length]:
            path = _file_in(folder, PurePosixPath(*name.parts[length:]))
            if path is not None:
                return path
    return None


def images_below(folder: Path) -> list[Path]:
    """The image files in a folder and below, in order, without hidden ones.

    macOS writes a file `._NAME` beside `NAME` to disks of other systems.
    """
    files = [path for path in sorted(folder.rglob("*")) if not path.name.startswith(".")]
    return [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]


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


def fingerprint(image: Path | bytes) -> str:
    """Hashes the size of an image file, given by path or content, and what is in its middle.

    It is the same whatever the file is called. An image that was written anew is another file.
    """
    with BytesIO(image) if isinstance(image, bytes) else image.open("rb", 0) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - NUM_HASHED) // 2)
        middle = file.read(NUM_HASHED)
    return hashlib.sha256(b"%d %s" % (size, middle)).hexdigest()[:16]


def data_url(image: UInt8[np.ndarray, "H W 3"], form: str, quality: int) -> str:
    """A URL that holds an image itself, in a lossy format of Pillow, such as "JPEG"."""
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, form, quality=quality)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextmanager
def _opened(image: ImageFile | Image.Image, name: str = "the image") -> Iterator[Image.Image]:
    """Opens an image and reads its header.

    Errors of Pillow become InputError, those in the caller's `with` block too: Pillow decodes
    pixels only when they are asked for.
    """
    if isinstance(image, str | PathLike):
        name = str(image)
    try:
        if isinstance(image, Image.Image):
            context = nullcontext(image)  # the caller's own image stays open
        else:
            context = Image.open(BytesIO(image) if isinstance(image, bytes) else image)
        with context as opened:
            _refuse_size(name, *opened.size)
            yield opened
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{name}: the image has more than {MAX_MEGAPIXELS} megapixels") from error
    except Exception as error:  # damaged data make Pillow raise nearly every exception
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        # A path has lost one of the two slashes.
        if name.startswith(("http:/", "https:/")):
            reason = "web addresses are not opened; download it"
        raise InputError(f"{name}: the image cannot be read ({reason}); check the file") from error


def _refuse_size(name: str, width: int, height: int) -> None:
    """Raises InputError for an image without pixels, or with too many."""
    if not 0 < width * height <= MAX_MEGAPIXELS * 1_000_000:
        fault = f"has no pixels or more than {MAX_MEGAPIXELS} megapixels"
        raise InputError(
            f"{name}: the image of {width} x {height} {fault}; scale it or give another"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB: greys of more than 8 bits are scaled, transparency is white."""
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
