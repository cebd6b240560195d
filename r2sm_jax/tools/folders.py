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

import tyro
from tyro.conf import OmitArgPrefixes

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import mask_fields
from r2sm_jax.data.images import IMAGE_SUFFIXES
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.tools.entries import Entry, Note, RecordError, Size
from r2sm_jax.tools.records import (
    Item,
    MaskComparison,
    ObjectRecord,
    Record,
    make_image,
)

ROLES = {"occlusion", "whole", "amodal", "full", "visible", "modal", "object", "mask"}
"""Words at the end of a file name that say what the file is."""


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
    not exist, and if the visible masks are the larger ones.
    """
    comparison = MaskComparison()
    for source in sources:
        folder = images_dir
        if folder is None:
            candidates = [source / name for name in names.pictures]
            folder = next((path for path in candidates if path.is_dir()), None)
        if folder is None:
            problem = f"there is no folder {' or '.join(names.pictures)}"
            raise InputError(f"{source}: {problem}; name one with --images DIR")

        images, notes = list_files(folder)
        yield from notes
        files: dict[str, dict[str, Path]] = {}
        for name in (names.whole, names.visible):
            files[name], notes = list_files(source / name)
            yield from notes
        used_images = set()
        for key in sorted(set().union(*files.values())):
            mask_files = {name: of_key[key] for name, of_key in files.items() if key in of_key}
            entry = Entry(next(iter(mask_files.values())), "", {})
            try:
                image_key = find_image_key(entry, key, images, folder)
                used_images.add(image_key)
                image_name = images[image_key].relative_to(folder).as_posix()
                image = make_image(entry, [image_name], folder)
                category = category_of(key.removeprefix(image_key))
                record = _read_object(entry, mask_files, names, image.size, category, comparison)
            except RecordError as error:
                yield error.bad_record
                continue
            yield Record(image, [record])
        num_unused = len(images.keys() - used_images)
        if num_unused:
            yield Note(str(folder), f"{num_unused} images have no masks and were left out")

    remedy = "if the folders are exchanged, name them with --whole and --visible"
    comparison.check(", ".join(map(str, sources)), remedy)


def _read_object(
    entry: Entry,
    files: Mapping[str, Path],
    names: FolderNames,
    size: Size,
    category: str,
    comparison: MaskComparison,
) -> ObjectRecord:
    """The object with these masks, by the name of their folder."""
    for folder in (names.whole, names.visible):
        if folder not in files:
            raise entry.error(f"the object has no mask in {folder}", "give it both masks")
    amodal = read_mask_file(entry, files[names.whole], size)
    modal = read_mask_file(entry, files[names.visible], size)
    if not amodal.any():
        raise entry.error("its mask has no pixel", "correct it")
    comparison.add(modal, amodal)
    notes = []
    if not modal.any():
        notes.append(entry.note("nothing of it is visible"))
    num_outside = masks.area(modal & ~amodal)
    if num_outside:
        what = f"{num_outside} visible pixels outside the complete mask were added to it"
        notes.append(entry.note(what))
    return ObjectRecord(category, mask_fields(modal, amodal), notes=tuple(notes))


def category_of(rest: str) -> str:
    """The class name in what follows an image's name: "_2_red_cup" is a "red cup"."""
    return " ".join(word for word in rest.split("_") if word and not word.isdecimal())


def find_image_key(entry: Entry, key: str, images: Mapping[str, Path], folder: Path) -> str:
    """The longest name of an image that consists of the first words of `key`."""
    words = key.split("_")
    for length in range(len(words), 0, -1):
        name = "_".join(words[:length])
        if name in images:
            return name
    raise entry.error(f"there is no image for it in {folder}", "give its name to an image")


def list_files(folder: Path) -> tuple[dict[str, Path], list[Note]]:
    """The image files in a folder and below, by key, and a note about files that are no images.

    The key is the path without the words at its end that say the role.
    """
    if not folder.is_dir():
        remedy = "give the folder above it, and its name with a flag"
        raise InputError(f"{folder}: there is no such folder; {remedy}")
    files: dict[str, Path] = {}
    skipped: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        # macOS writes a file ._NAME beside NAME to disks of other systems.
        if path.suffix.lower() not in IMAGE_SUFFIXES or path.name.startswith("."):
            skipped.append(path.name)
            continue
        words = "_".join(path.relative_to(folder).with_suffix("").parts).split("_")
        while len(words) > 1 and words[-1].lower() in ROLES:
            words.pop()
        key = "_".join(words)
        if key in files:
            raise InputError(f"{path}: it has the same name as {files[key]}; rename one of them")
        files[key] = path

    notes = []
    if skipped and not files:
        raise InputError(
            f"{folder}: there are no images; {skipped[0]} is none of "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}; save the masks as PNG files"
        )
    if skipped:
        examples = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        notes.append(Note(str(folder), f"{len(skipped)} files are no images ({examples})"))
    return files, notes


def read_mask_file(entry: Entry, path: Path, size: Size) -> Mask:
    """The mask `[H W]` of a file. Raises RecordError for one that is not a mask of this size."""
    try:
        return masks.read_file(path, size)
    except InputError as error:
        raise entry.error(str(error), "give the mask again") from error
