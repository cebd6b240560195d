"""Reads folders of masks, one picture an object."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.contradictions import MaskComparison, refuse_systematic
from r2sm_jax.data.dataset import NO_NAME, ImageTruth, Instance
from r2sm_jax.data.images import image_size, images_below
from r2sm_jax.data.mask_reader import read_mask
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError

ROLES = {"occlusion", "whole", "amodal", "full", "visible", "modal", "object", "mask"}
"""Words at the end of a file name that say what the file is."""


def read_mask_folders(
    images_dir: Path, visible_dir: Path, whole_dir: Path | None, collector: Collector
) -> Iterator[ImageTruth]:
    """Reads folders of masks, one picture an object: IMAGE.png, IMAGE_2_red cup.png or
    IMAGE/red cup.png, where IMAGE is the image's name and words after it are the class.

    Both masks of an object have the same name, but for words such as "whole" and "mask" at its end;
    without `whole_dir` only the visible ones are known. Images and objects are numbered from 1 in
    the order of their names. Raises InputError for a folder that is not there, and if most masks
    are exchanged, empty or inverted.
    """
    images = list_files(images_dir)
    mask_files = [list_files(visible_dir)]
    if whole_dir is not None:
        mask_files.append(list_files(whole_dir))
    comparison = MaskComparison()
    found: dict[str, list[Instance[RLE]]] = defaultdict(list)
    for number, key in enumerate(sorted(set().union(*mask_files)), start=1):
        with collector.record(f"{visible_dir}: {key}"):
            image_key, *others = find_image_keys(key, images)
            if others:
                fits = f"it may be of {others[0]}, too; it is taken for one of {image_key}"
                collector.note(f"{visible_dir}: {key}", fits)
            size = image_size(images[image_key])
            drawn = [read_mask(f[key], size, str(f[key]), may_be_empty=True) for f in mask_files]
            modal, *amodal = map(masks.encode, drawn)
            whole = amodal[0] if amodal else None
            if not any(masks.areas([modal, whole or modal])):
                raise ValueError("its mask has no pixel")
            comparison.add(key, modal, whole)
            words = key.removeprefix(image_key).split("_")
            category = " ".join(word for word in words if word and not word.isdecimal())
            found[image_key].append(Instance(number, category or NO_NAME, modal, whole))
    refuse_systematic(visible_dir, comparison.contradictions())
    unused = images.keys() - found.keys()
    if unused:
        collector.note(str(images_dir), f"{len(unused)} images have no masks and are left out")
    for number, (image_key, instances) in enumerate(sorted(found.items()), start=1):
        file = images[image_key]
        name = file.relative_to(images_dir).as_posix()
        yield ImageTruth(number, name, image_size(file), tuple(instances), ())


def find_image_keys(key: str, images: Mapping[str, Path]) -> list[str]:
    """The names of images that consist of the first words of `key`, the longest first. Raises
    ValueError if there is none."""
    words = key.split("_")
    names = ["_".join(words[:length]) for length in range(len(words), 0, -1)]
    found = [name for name in names if name in images]
    if not found:
        raise ValueError("no image has its name, or begins it")
    return found


def list_files(folder: Path) -> dict[str, Path]:
    """The image files in a folder and below, by their path without the words at its end that say
    the role.

    Raises InputError for a folder that is not there or has no images, and for two files of one
    name.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name it with a flag")
    files: dict[str, Path] = {}
    for path in images_below(folder):
        words = "_".join(path.relative_to(folder).with_suffix("").parts).split("_")
        while len(words) > 1 and words[-1].lower() in ROLES:
            words.pop()
        key = unicodedata.normalize("NFC", "_".join(words))
        if key in files:
            raise InputError(f"{path}: it has the same name as {files[key]}; rename one of them")
        files[key] = path
    if not files:
        raise InputError(f"{folder}: there are no images in it; save the masks as PNG files")
    return files
