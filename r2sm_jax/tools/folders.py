"""Reads folders of masks: pix2gestalt's, and one PNG for each mask of each object.

The layout is that of cvlab-columbia/pix2gestalt ldm/data/simple.py: `occlusion/7_occlusion.png`,
`whole_mask/7_whole_mask.png` and `visible_object_mask/7_visible_mask.png`. For several objects of
an image, masks are named NAME_1.png, NAME_2_red cup.png or NAME/red cup.png, where NAME is the
image's; words after it are the class. Both masks of an object have the same name, but for words
such as "whole" and "mask" at its end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tyro.conf import OmitArgPrefixes

from r2sm_jax.data.images import brightness, decode
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.tools.entries import Entry, RecordError, Size
from r2sm_jax.tools.records import Item, ObjectRecord, Record, make_image, mask_fields

ROLES = {"occlusion", "whole", "amodal", "full", "visible", "modal", "object", "mask"}
"""Words at the end of a file name that say what the file is."""
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class FolderNames:
    """Names of the folders below a source."""

    pictures: tuple[str, ...] = ("occlusion", "images")
    """Folder of the images, if --images does not name it; the first that exists."""
    whole: str = "whole_mask"
    """Folder of the complete masks."""
    visible: str = "visible_object_mask"
    """Folder of the visible masks."""


def read_mask_folders(
    sources: Sequence[Path], names: FolderNames = FolderNames(), images_dir: Path | None = None
) -> Iterator[Item]:
    """Reads folders that hold images, complete masks and visible masks in three folders.

    An object without one of its two masks is a bad record. Raises InputError for a folder that does
    not exist.
    """
    for source in sources:
        folder = images_dir
        if folder is None:
            candidates = [source / name for name in names.pictures]
            folder = next((path for path in candidates if path.is_dir()), None)
        if folder is None:
            problem = f"there is no folder {' or '.join(names.pictures)}"
            raise InputError(f"{source}: {problem}; name one with --images DIR")
        images = _list_files(folder)
        mask_files = {
            names.whole: _list_files(source / names.whole),
            names.visible: _list_files(source / names.visible),
        }
        keys = sorted(mask_files[names.whole] | mask_files[names.visible])
        for key in keys:
            files = {name: of_key[key] for name, of_key in mask_files.items() if key in of_key}
            try:
                yield _read_object(key, files, names, images, folder)
            except RecordError as error:
                yield error.bad_record


def _read_object(
    key: str,
    files: Mapping[str, Path],
    names: FolderNames,
    images: Mapping[str, Path],
    images_dir: Path,
) -> Record:
    """The object of this key with its image; `files` are its masks by folder, `images` files by
    key."""
    entry = Entry(next(iter(files.values())), "", {})
    image_key = _longest_prefix(key, images)
    if image_key is None:
        problem = f"there is no image for it in {images_dir}"
        raise entry.error(problem, "give its name to an image")
    image_name = images[image_key].relative_to(images_dir).as_posix()
    image = make_image(entry, [image_name], images_dir)

    for folder in (names.whole, names.visible):
        if folder not in files:
            raise entry.error(f"the object has no mask in {folder}", "give it both masks")
    amodal = _read_mask_file(entry, files[names.whole], image.size)
    modal = _read_mask_file(entry, files[names.visible], image.size)
    if not amodal.any():
        raise entry.error("its mask has no pixel", "correct it")

    words = key[len(image_key) :].split("_")
    category = " ".join(word for word in words if word and not word.isdecimal())
    return Record(image, [ObjectRecord(category, mask_fields(modal, amodal))])


def _longest_prefix(key: str, images: Mapping[str, Path]) -> str | None:
    """The longest name of an image that consists of the first words of `key`."""
    words = key.split("_")
    for length in range(len(words), 0, -1):
        name = "_".join(words[:length])
        if name in images:
            return name
    return None


def _list_files(folder: Path) -> dict[str, Path]:
    """The image files in a folder and below by their key: path without the words that say the
    role."""
    if not folder.is_dir():
        remedy = "give the folder above it, and its name with a flag"
        raise InputError(f"{folder}: there is no such folder; {remedy}")
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            continue
        words = "_".join(path.relative_to(folder).with_suffix("").parts).split("_")
        while len(words) > 1 and words[-1].lower() in ROLES:
            words.pop()
        key = "_".join(words)
        if key in files:
            raise InputError(f"{path}: it has the same name as {files[key]}; rename one of them")
        files[key] = path
    return files


def _read_mask_file(entry: Entry, path: Path, size: Size) -> Mask:
    """The mask `[H W]` of a file: what is brighter than half of white, or of its only value besides
    0."""
    try:
        values = brightness(decode(path))
    except InputError as error:
        raise entry.error(f"{path} cannot be read ({error})", "give the mask again") from error
    if values.shape != size:
        problem = (
            f"{path.name} is {values.shape[0]} x {values.shape[1]}, "
            f"but its image is {size[0]} x {size[1]}"
        )
        raise entry.error(problem, "give masks of the image's size")
    maximum = int(values.max())
    if len(np.unique(values)) > 2 and maximum != 255:
        problem = f"{path.name} holds several values up to {maximum}"
        raise entry.error(problem, "give each object a mask of its own")
    return values > maximum // 2
