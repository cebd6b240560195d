"""Photos with masks: instances files, what can be cut out of their photos, and enlarged parts."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from hashlib import sha256
from itertools import permutations
from os import PathLike
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter, ImageStat

from r2sm_jax.config import Crowds
from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.dataset import NO_NAME, ImageTruth, Instance
from r2sm_jax.data.images import (
    check_files,
    fingerprint,
    image_folders,
    locate_image,
    open_annotated,
)
from r2sm_jax.data.readers.coco import COCOOptions, read_coco
from r2sm_jax.data.split_summary import review
from r2sm_jax.data.splits import original_name, split_by_hash
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.complete_objects import find_complete
from r2sm_jax.synthetic.pictures import crop_to_object, rescale
from r2sm_jax.synthetic.queries.nouns import display_name, says_name
from r2sm_jax.synthetic.scenes.layout import overlap_slices
from r2sm_jax.synthetic.scenes.paint import Sprite

# Of all photos, as bounds of a hash of the file name from 0 to 1: val is below `VAL_SHARE`, dev
# between the two.
DEV_AND_VAL_SHARE = 0.25
VAL_SHARE = 0.15
FEW_PHOTOS = 40
"""Of fewer photos a hash may leave dev or val none, or one, which has no other photo to take
objects from. So each gets at least two, or one of fewer than eight photos."""

LISTS_OF_LVIS = {"neg_category_ids", "not_exhaustive_category_ids"}
"""Fields of an image that say which classes are not on it, and which are marked in part. Nothing is
known of the others."""
NOTHING_ABSENT = (
    "each of its photos shows every class that can be absent: none of a partly marked file "
    "(info.partial, or LVIS), no group of classes, and none that no annotation uses"
)
MAX_BAD = 0.1  # share of the records of a file that may be bad, as for `data complete`
MAX_CUTOUTS = 20000  # of a split; photos are read until there are so many
MIN_CUTOUT_SIDE, MAX_CUTOUT_SIDE = 0.08, 0.6  # longer side, in the photo's
MIN_CUTOUT_AREA = 0.004  # share of the photo
MAX_ZOOM = 1.8  # by which a part of a photo is enlarged in training
# A photo has about a megabyte, a cut-out a tenth of it.
NUM_PHOTOS_IN_MEMORY = 128
NUM_CUTOUTS_IN_MEMORY = 1024
MASK_THRESHOLD = 128  # of 255 of a pixel that its mask covers


@dataclass(frozen=True)
class PhotoObject:
    """An object of a photo: its visible mask as a sprite at its position. `ignored`: a crowd."""

    category: str
    sprite: Sprite
    is_whole: bool
    ignored: bool


@dataclass(frozen=True)
class Photo:
    """A photo at the size of the picture (mode RGB), its objects, and its mean colour `[3]`."""

    image: Image.Image
    objects: tuple[PhotoObject, ...]
    mean_colour: np.ndarray


@dataclass(frozen=True)
class PhotoCutout:
    """An object that can be cut out: the indices of its photo and of its annotation there.

    `side` is its longer side in longer sides of the photo.
    """

    photo: int
    annotation: int
    category: str
    side: float
    is_whole: bool


@dataclass(frozen=True, eq=False)
class PhotoFile:
    """One instances file: its photos, and what it says about them."""

    path: Path
    folders: tuple[Path, ...]
    """Where its photos are looked for."""
    truths: tuple[ImageTruth, ...]
    """The annotations of each photo. Only visible masks are used."""
    classes: tuple[str, ...]
    """The names of its categories, as queries say them."""
    is_partial: bool
    """Whether its photos also show things of its classes that are not marked (`"info": {"partial":
    true}`, or LVIS's lists of the classes that were looked for on each image)."""
    marked_classes: tuple[str, ...]
    """The classes that are marked wherever they are, so that others are known to be absent."""


@cache
def read_file(
    path: Path, images: str | PathLike[str] | None, crowds: Crowds, changed: int
) -> PhotoFile:
    """Reads a COCO file of any dialect; records that cannot be used are left out and listed.

    The splits of a run share one copy of a file that was `changed` at a time. Raises InputError for
    another kind of file, and a missing folder.
    """
    folder = None if images is None else Path(images)
    collector = Collector()
    options = COCOOptions(crowds_are_objects=crowds == "objects")
    truths = tuple(read_coco(path, folder, options, collector, may_be_missing=True))
    collector.check(MAX_BAD, "a share of")
    summary = review(path, truths, collector)
    if summary.num_ignored == summary.num_objects:
        raise InputError(f"{path}: {summary.reason_for_nothing()}")
    if summary.num_ignored:
        collector.note(str(path), summary.ignored())
    collector.print()

    categories = sorted(collector.categories.values(), key=lambda category: category["id"])
    listed = [display_name(c["name"]) for c in categories if c["name"] != NO_NAME]
    # Original COCOA names its regions, and lists no categories.
    used = {display_name(i.category): None for truth in truths for i in truth.instances}
    classes = tuple(dict.fromkeys([*listed, *used]))
    is_partial = (collector.other.get("info") or {}).get("partial", False)
    if not isinstance(is_partial, bool):
        raise InputError(f"{path}: info.partial is {is_partial!r}; write true or false")
    is_partial |= any(truth.fields.keys() & LISTS_OF_LVIS for truth in truths)

    # A class that no annotation uses may be a group, such as Roboflow's "fruits" over "apple".
    groups = [c.get("supercategory") for c in categories if c.get("supercategory") != c["name"]]
    others = {display_name(str(group)) for group in groups}
    marked = [name for name in classes if name in used and name not in others]
    folders = image_folders(path, images)
    return PhotoFile(path, folders, truths, classes, is_partial, () if is_partial else (*marked,))


class Photos:
    """The photos of one or more instances files, numbered through, read as they are needed.

    Attributes:
        files: The files.
        name: What messages call them.
    """

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        images: str | PathLike[str] | None = None,
        crowds: Crowds = "ignore",
    ):
        """`images`: the folder of the photos of a single file, if they are not beside it. `crowds`
        says what `iscrowd` 1 marks.

        Raises InputError for another kind of file than COCO's, and a missing folder.
        """
        if isinstance(paths, str | PathLike):
            paths = [paths]
        if len(paths) > 1 and images is not None:
            raise InputError(
                f"--images {images}: of several files, each has its photos beside it or in "
                "images/ beside it; leave the folder out"
            )
        resolved = [Path(path).resolve() for path in paths]
        for path, real_path in zip(paths, resolved, strict=True):
            if resolved.count(real_path) > 1:
                raise InputError(f"{path}: this file is given twice; give it once")
        self.name = ",".join(map(str, paths))
        self.files: list[PhotoFile] = []
        for path in map(Path, paths):
            changed = path.stat().st_mtime_ns if path.is_file() else 0
            self.files.append(read_file(path, images, crowds, changed))
        # Photo -> its file and its index there.
        self._places = [(file, index) for file in self.files for index in range(len(file.truths))]
        self._complete: dict[int, list[bool]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def file_of(self, photo: int) -> PhotoFile:
        """The file that a photo is of."""
        return self._places[photo][0]

    def truth_of(self, photo: int) -> ImageTruth:
        """The annotations of a photo."""
        file, index = self._places[photo]
        return file.truths[index]

    def name_of(self, photo: int) -> str:
        """The `file_name` of a photo."""
        return self.truth_of(photo).file_name

    def path_of(self, photo: int) -> Path:
        """The image file of a photo. Raises InputError where it is missing."""
        file = self.file_of(photo)
        return locate_image(file.folders, self.name_of(photo), file.path)

    def fingerprint_of(self, photo: int) -> str:
        """What the image file of a photo is known by. Raises InputError where it is missing."""
        return fingerprint(self.path_of(photo))

    def names_of_splits(self) -> dict[str, set[str]]:
        """The names of the photos of train, dev and val, copies by that of their original.

        These share none, also where a name is in several files.
        """
        names = {original_name(self.name_of(photo)) for photo in range(len(self))}
        least_held_out, least_val = 1, 1
        if len(names) < FEW_PHOTOS:
            least_val = 1 if len(names) < 8 else 2
            least_held_out = 2 * least_val
        held_out = split_by_hash(names, DEV_AND_VAL_SHARE, least=least_held_out)
        val = split_by_hash(held_out, VAL_SHARE, least=least_val)
        return {"train": names - held_out, "dev": held_out - val, "val": val}

    def photos_of_split(self, split: str) -> list[int]:
        """The photos of a split, in the order of the files: those of val for val_hard and others.

        Raises InputError where photos of the split cannot be used, or it has none.
        """
        parts = self.names_of_splits()
        names = parts.get(split, parts["val"])
        photos = [
            photo for photo in range(len(self)) if original_name(self.name_of(photo)) in names
        ]
        if not photos:
            raise InputError(
                f"{self.name}: {len(self)} photos leave none for the split {split!r}; add photos, "
                "until there are at least four"
            )
        for file in self.files:
            truths = [self.truth_of(photo) for photo in photos if self.file_of(photo) is file]
            check_files(file.folders, {t.file_name: t.size for t in truths}, file.path)
        return photos

    def photos_without_a_class(self, split: str) -> list[int]:
        """The photos of a split on which some class of the `marked_classes` is absent."""
        photos = []
        for photo in self.photos_of_split(split):
            used = {display_name(instance.category) for instance in self.truth_of(photo).instances}
            if absent_names(self.file_of(photo).marked_classes, used):
                photos.append(photo)
        return photos

    @cached_property
    def shares_together(self) -> dict[tuple[str, str], float]:
        """For two classes, of the photos of the second those that show the first, too.

        Counted on photos where all objects are marked.
        """
        number, both = Counter[str](), Counter[tuple[str, str]]()
        for photo in range(len(self)):
            if self.file_of(photo).is_partial:
                continue
            names = {display_name(i.category) for i in self.truth_of(photo).instances}
            number.update(names)
            both.update(permutations(names, 2))
        return {(first, second): n / number[second] for (first, second), n in both.items()}

    def read_masks(self, photo: int) -> tuple[list[Instance[masks.Mask]], list[bool]]:
        """The instances of a photo with visible masks at its own size, and which look complete."""
        instances = [
            replace(instance, modal=masks.expand(instance.modal), amodal=None)
            for instance in self.truth_of(photo).instances
        ]
        if photo not in self._complete:
            self._complete[photo] = find_complete([instance.modal for instance in instances])
        return instances, self._complete[photo]

    def open_image(self, photo: int) -> Image.Image:
        """Opens a photo at its own size. Raises InputError as `open_annotated`."""
        size = self.truth_of(photo).size
        source = str(self.file_of(photo).path)
        return Image.fromarray(open_annotated(self.path_of(photo), size, source))

    def find_cutouts(self, photos: Sequence[int]) -> list[PhotoCutout]:
        """The objects of some photos that are large enough to be pasted, in the order of the files.

        Photos are read until there are `MAX_CUTOUTS` of them.
        """
        cutouts: list[PhotoCutout] = []
        # By a hash of the name: where not all photos are read, they are of all files.
        hashes = {photo: sha256(self.name_of(photo).encode()).digest() for photo in photos}
        for photo in sorted(photos, key=hashes.__getitem__):
            height, width = self.truth_of(photo).size
            instances, are_whole = self.read_masks(photo)
            for annotation, instance in enumerate(instances):
                x0, y0, x1, y1 = masks.box(instance.modal)
                side = max(x1 - x0, y1 - y0) / max(height, width)
                is_large = masks.area(instance.modal) >= MIN_CUTOUT_AREA * height * width
                if is_large and not instance.ignore and MIN_CUTOUT_SIDE <= side <= MAX_CUTOUT_SIDE:
                    category = display_name(instance.category)
                    cutout = PhotoCutout(photo, annotation, category, side, are_whole[annotation])
                    cutouts.append(cutout)
            if len(cutouts) >= MAX_CUTOUTS:
                break
        return sorted(cutouts, key=lambda cutout: (cutout.photo, cutout.annotation))


def absent_names(names: Iterable[str], present: Collection[str]) -> list[str]:
    """The names that mean nothing that is present: "cup" is not absent beside "Cups" or "coffee
    cup", nor "coffee cup" beside "cup"."""
    absent = []
    for name in names:
        if not any(says_name(name, other) or says_name(other, name) for other in present):
            absent.append(name)
    return absent


@lru_cache(maxsize=NUM_PHOTOS_IN_MEMORY)
def read_photo(photos: Photos, photo: int, side: int) -> Photo:
    """Reads a photo, its longer side `side`.

    Raises InputError for one that is damaged or not the annotated one.
    """
    image = photos.open_image(photo)
    image = rescale(image, side / max(image.size), reducing_gap=3.0)
    objects = []
    for instance, is_whole in zip(*photos.read_masks(photo), strict=True):
        sprite = cut_sprite(image, instance.modal, image.size)
        if sprite is not None:
            category = display_name(instance.category)
            is_whole = is_whole and not instance.ignore
            objects.append(PhotoObject(category, sprite, is_whole, instance.ignore))
    return Photo(image, tuple(objects), np.array(ImageStat.Stat(image).mean))


@lru_cache(maxsize=NUM_CUTOUTS_IN_MEMORY)
def read_cutout(
    photos: Photos, cutout: PhotoCutout, photo_side: int | None = None
) -> tuple[Image.Image, np.ndarray]:
    """Reads the RGBA picture of a cut-out with soft edges, and the mean colour `[3]` of its photo.

    `photo_side` is the longer side to which the photo would be scaled; by default it keeps its
    size.
    """
    image = photos.open_image(cutout.photo)
    mask = masks.expand(photos.truth_of(cutout.photo).instances[cutout.annotation].modal)
    radius = max(0.7, 0.0022 * max(mask.shape))

    # A blur changes nothing further away from the mask than `margin`.
    margin = math.ceil(3 * radius) + 3
    x0, y0, x1, y1 = masks.box(mask)
    box = (
        max(0, x0 - margin),
        max(0, y0 - margin),
        min(image.width, x1 + margin),
        min(image.height, y1 + margin),
    )
    mask = mask[box[1] : box[3], box[0] : box[2]]
    alpha = Image.fromarray(mask.astype(np.uint8) * 255)
    alpha = alpha.filter(ImageFilter.GaussianBlur(radius))

    # The outline moves inwards by about a pixel, since annotators' outlines include some of the
    # background.
    alpha = alpha.point([min(255, max(0, 2 * value - 160)) for value in range(256)])
    picture = image.crop(box)
    picture.putalpha(alpha)
    picture = crop_to_object(picture)
    if photo_side is not None:
        picture = rescale(picture, min(1.0, photo_side / max(image.size)), reducing_gap=3.0)
    return picture, np.array(ImageStat.Stat(image).mean)


def random_zoom(rng: np.random.Generator, photo: Photo, side: int) -> Photo:
    """The photo at another size; in half of the draws a part of it, enlarged by up to `MAX_ZOOM`.

    Objects that are cut off are not complete any more.
    """
    width, height = photo.image.size
    share = rng.uniform(1 / MAX_ZOOM, 1) if rng.random() < 0.5 else 1.0
    crop_width, crop_height = max(2, round(share * width)), max(2, round(share * height))
    left = int(rng.integers(width - crop_width + 1))
    top = int(rng.integers(height - crop_height + 1))

    image = photo.image.crop((left, top, left + crop_width, top + crop_height))
    image = rescale(image, side / max(crop_width, crop_height))
    scale_x, scale_y = image.width / crop_width, image.height / crop_height

    objects = []
    for photo_object in photo.objects:
        sprite = photo_object.sprite
        window, part = overlap_slices(sprite, (crop_height, crop_width), -left, -top)
        mask = sprite.mask[part]
        x, y = round(window[1].start * scale_x), round(window[0].start * scale_y)
        mask_width = min(image.width - x, round(mask.shape[1] * scale_x))
        mask_height = min(image.height - y, round(mask.shape[0] * scale_y))
        if not mask.any() or min(mask_width, mask_height) < 1:
            continue

        zoomed = cut_sprite(image, mask, (mask_width, mask_height), x, y)
        if zoomed is not None:
            is_whole = photo_object.is_whole and mask.shape == sprite.mask.shape
            objects.append(replace(photo_object, sprite=zoomed, is_whole=is_whole))
    return Photo(image, tuple(objects), photo.mean_colour)


def cut_sprite(
    image: Image.Image, mask: masks.Mask, size: tuple[int, int], x: int = 0, y: int = 0
) -> Sprite | None:
    """The part of an image under a mask scaled to `size` and put at (x, y), if any is left."""
    coverage = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BOX)
    scaled = np.asarray(coverage) >= MASK_THRESHOLD
    x0, y0, x1, y1 = masks.box(scaled)
    if x1 == 0:
        return None
    scaled = np.ascontiguousarray(scaled[y0:y1, x0:x1])
    picture = image.crop((x + x0, y + y0, x + x1, y + y1))
    return Sprite(picture, scaled, x + x0, y + y0, max(scaled.shape))
