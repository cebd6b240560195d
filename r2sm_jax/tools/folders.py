"""Reads folders of masks: pix2gestalt's, and one PNG for each mask of each object.

The layout is that of cvlab-columbia/pix2gestalt ldm/data/simple.py: `occlusion/7_occlusion.png`,
`whole_mask/7_whole_mask.png` and `visible_object_mask/7_visible_mask.png`. For several objects of an image, masks are
named NAME_1.png, NAME_2_red cup.png or NAME/red cup.png, where NAME is the image's; words after it are the class. Both
masks of an object have the same name, but for words such as "whole" and "mask" at its end.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tyro.conf import OmitArgPrefixes

from r2sm_jax.data.images import brightness, decode
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.tools.convert import Conversion, Files
from r2sm_jax.tools.entries import Entry, Size

ROLES = {"occlusion", "whole", "amodal", "full", "visible", "modal", "object", "mask"}
"""Words at the end of a file name that say what the file is."""
IMAGES = {".png", ".jpg", ".jpeg", ".webp"}


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class FolderNames:
    """Names of the folders below a source."""

    pictures: tuple[str, ...] = ("occlusion", "images")
    """Folder of the images, where --images does not name it; the first that exists."""
    whole: str = "whole_mask"
    """Folder of the complete masks."""
    visible: str = "visible_object_mask"
    """Folder of the visible masks."""


def read_mask_folders(files: Files, names: FolderNames = FolderNames()) -> Conversion:
    """Reads folders that hold images, complete masks and visible masks in three folders.

    An object without one of its two masks is a bad record. Raises InputError for a folder that does not exist.
    """
    found = Conversion(files.images, files.max_bad)
    for source in files.sources:
        folder = files.images or next(
            (source / name for name in names.pictures if (source / name).is_dir()), None
        )
        if folder is None:
            raise InputError(
                f"{source}: there is no folder {' or '.join(names.pictures)}; name one with --images DIR"
            )
        found.images_dir = folder
        images = _files(folder)
        whole, visible = _files(source / names.whole), _files(source / names.visible)
        numbers: dict[str, int] = {}
        for key in sorted(whole | visible):
            entry = Entry(whole.get(key) or visible[key], "", {})
            with found.record():
                words = key.split("_")
                # The longest name of an image with which the mask's begins.
                names_of = ("_".join(words[:length]) for length in range(len(words), 0, -1))
                name = next((name for name in names_of if name in images), None)
                if name is None:
                    raise entry.error(
                        f"there is no image for it in {folder}", "give its name to an image"
                    )
                if name not in numbers:
                    numbers[name] = found.add_image(
                        entry, [images[name].relative_to(folder).as_posix()]
                    )
                for masks, where in ((whole, names.whole), (visible, names.visible)):
                    if key not in masks:
                        raise entry.error(
                            f"the object has no mask in {where}", "give it both masks"
                        )
                label = " ".join(
                    word for word in key[len(name) :].split("_") if word and not word.isdecimal()
                )
                size = found.size(numbers[name])
                amodal, modal = (_read(entry, masks[key], size) for masks in (whole, visible))
                if not amodal.any():
                    raise entry.error("its mask has no pixel", "correct it")
                found.add_annotation(numbers[name], label, modal, amodal)
    return found.finish()


def _files(folder: Path) -> dict[str, Path]:
    """The image files in a folder and below by their name without what says the role; folders are part of it."""
    if not folder.is_dir():
        raise InputError(
            f"{folder}: there is no such folder; give the folder above it, and its name with a flag"
        )
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in IMAGES:
            words = "_".join(path.relative_to(folder).with_suffix("").parts).split("_")
            while len(words) > 1 and words[-1].lower() in ROLES:
                words.pop()
            if (key := "_".join(words)) in found:
                raise InputError(
                    f"{path}: it has the same name as {found[key]}; rename one of them"
                )
            found[key] = path
    return found


def _read(entry: Entry, path: Path, size: Size) -> Mask:
    """The mask `[H W]` of a file: what is brighter than half of white, or of its only value besides 0."""
    try:
        image = decode(path)
    except InputError as error:
        raise entry.error(f"{path} cannot be read ({error})", "give the mask again") from error
    values = brightness(image)
    if values.shape != size:
        what = f"{path.name} is {values.shape[0]} x {values.shape[1]}, but its image is {size[0]} x {size[1]}"
        raise entry.error(what, "give masks of the image's size")
    most = int(values.max())
    if len(np.unique(values)) > 2 and most != 255:
        raise entry.error(
            f"{path.name} holds several values up to {most}", "give each object a mask of its own"
        )
    return values > most // 2
