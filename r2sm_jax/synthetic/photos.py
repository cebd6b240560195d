"""Photos with masks: which of their objects are complete, what can be cut out of them, and parts of them enlarged.

A COCO instances file says what is visible in each photo. An object counts as complete if its mask is in one part and
touches neither the border nor another mask, except that of a larger object that is drawn right through it, as a table
may be through a cup: then nothing that is annotated can hide a part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, Instance, check_records
from r2sm_jax.data.splits import split_by_hash
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.synthetic.cutouts import crop, rescale
from r2sm_jax.synthetic.queries.nouns import display_name
from r2sm_jax.synthetic.scenes.paint import Sprite

HELD_OUT = {
    "dev": 0.25,
    "val": 0.15,
}  # shares of the photos up to which a hash of the file name puts them there
GAP = 0.004  # distance, in longer sides of the photo, up to which masks touch each other or the border
ONE_PART = (
    0.96  # share of a mask in its largest part; something lies in front of the middle of others
)
LARGER, THROUGH = (
    1.5,
    0.6,
)  # so much larger is a mask that is drawn through another one, and covers this share of it
MOST_CUTOUTS = 5000
CUTOUT_SIDES, CUTOUT_AREA = (
    (0.08, 0.6),
    0.004,
)  # longer side and least area of a cut-out, in its photo's
ZOOM = 1.8  # by which a part of a photo is enlarged at most in training


@dataclass(frozen=True)
class Seen:
    """An object of a photo: its visible mask as a sprite at its place in the picture; `ignored` crowds."""

    category: str
    sprite: Sprite
    complete: bool
    ignored: bool


@dataclass(frozen=True)
class Photo:
    """A photo at the size of the picture (mode RGB), its objects, and its mean colour `[3]`."""

    image: Image.Image
    objects: tuple[Seen, ...]
    tone: np.ndarray


@dataclass(frozen=True)
class Cutout:
    """An object: the numbers of its photo and of its annotation there; its longer side in the photo's."""

    photo: int
    number: int
    category: str
    side: float
    complete: bool


class Photos:
    """The photos of an instances file with their masks, read as they are needed."""

    def __init__(self, path: str | PathLike[str], images: str | PathLike[str] | None = None):
        """Raises InputError for a file that is not a COCO instances file, and for a folder that does not exist."""
        self.path = Path(path)
        records = load_json(self.path, "a COCO instances file")
        if isinstance(records, dict):
            records.setdefault("queries", [])
            for annotation in records.get("annotations") or []:
                if isinstance(annotation, dict) and annotation.get("iscrowd"):
                    annotation["ignore"] = True
        check_records(self.path, records)
        self.dataset = Dataset(self.path, records, images)
        self._complete: dict[int, list[bool]] = {}

    def split(self, split: str) -> list[int]:
        """The photos of a split, in the order of the file; those of train, dev and any other are all different.

        Raises InputError where a photo of the split is missing, or the split has none.
        """
        names = [record["file_name"] for record in self.dataset.images]
        dev = split_by_hash(names, HELD_OUT["dev"])
        val = split_by_hash(sorted(dev), HELD_OUT["val"])
        chosen = set(names) - dev if split == "train" else dev - val if split == "dev" else val
        found = [k for k, name in enumerate(names) if name in chosen]
        if not found:
            raise InputError(
                f"{self.path}: {len(names)} photos leave none for the split {split!r}; add photos"
            )
        for k in found:
            self.dataset.image_path(k)
        return found

    def masks(self, k: int) -> tuple[list[Instance[masks.Mask]], list[bool]]:
        """The instances of photo k with visible masks at its own size, and which are complete."""
        instances = [instance.convert(masks.expand) for instance in self.dataset.rles_at(k)]
        if k not in self._complete:
            complete = find_complete([instance.modal for instance in instances])
            self._complete[k] = [
                whole and not i.ignore for whole, i in zip(complete, instances, strict=True)
            ]
        return instances, self._complete[k]

    def cutouts(self, photos: list[int]) -> list[Cutout]:
        """The objects of some photos that are large enough to be laid over others, at most `MOST_CUTOUTS`."""
        found: list[Cutout] = []
        for k in photos:
            height, width = self.dataset.size_at(k)
            for number, (instance, complete) in enumerate(zip(*self.masks(k), strict=True)):
                x0, y0, x1, y1 = masks.box(instance.modal)
                side = max(x1 - x0, y1 - y0) / max(height, width)
                large = masks.area(instance.modal) >= CUTOUT_AREA * height * width
                if large and not instance.ignore and CUTOUT_SIDES[0] <= side <= CUTOUT_SIDES[1]:
                    found.append(Cutout(k, number, display_name(instance.category), side, complete))
            if len(found) >= MOST_CUTOUTS:
                break
        return found

    def read(self, k: int, side: int) -> Photo:
        """Photo k, its longer side `side`. Raises InputError for a photo that is damaged or not the annotated one."""
        image = Image.fromarray(self.dataset.image_at(k))
        small = rescale(image, side / max(image.size), reducing_gap=3.0)
        objects = []
        for instance, complete in zip(*self.masks(k), strict=True):
            if sprite := _sprite(small, instance.modal, small.size):
                objects.append(
                    Seen(display_name(instance.category), sprite, complete, instance.ignore)
                )
        return Photo(small, tuple(objects), np.asarray(small).mean((0, 1)))

    def cut(self, cutout: Cutout, side: int | None = None) -> tuple[Image.Image, np.ndarray]:
        """The picture of a cut-out (mode RGBA) with soft edges, and the mean colour `[3]` of its photo.

        `side` is the longer side to which its whole photo would be scaled; by default it keeps its size.
        """
        image = self.dataset.image_at(cutout.photo)
        mask = masks.expand(self.dataset.rles_at(cutout.photo)[cutout.number].modal)
        soft = ImageFilter.GaussianBlur(max(0.7, 0.0022 * max(mask.shape)))
        alpha = Image.fromarray(mask.astype(np.uint8) * 255).filter(soft)
        picture = Image.fromarray(image)
        # The outline moves inwards by about a pixel, since annotators' outlines take some of what lies behind.
        picture.putalpha(alpha.point([min(255, max(0, 2 * v - 160)) for v in range(256)]))
        picture = crop(picture)
        if side is not None:
            picture = rescale(picture, min(1.0, side / max(mask.shape)), reducing_gap=3.0)
        return picture, image.mean((0, 1))


def zoom(rng: np.random.Generator, photo: Photo, side: int) -> Photo:
    """A photo at another longer side; in half of the draws a random part of it, as small as 1 / `ZOOM` of its sides.
    Objects that are cut off are not complete any more."""
    width, height = photo.image.size
    share = rng.uniform(1 / ZOOM, 1) if rng.random() < 0.5 else 1.0
    w, h = max(2, round(share * width)), max(2, round(share * height))
    left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
    image = rescale(photo.image.crop((left, top, left + w, top + h)), side / max(w, h))
    scale_x, scale_y, objects = image.width / w, image.height / h, []
    for seen in photo.objects:
        y, x = seen.sprite.y - top, seen.sprite.x - left
        part = seen.sprite.mask[max(0, -y) : max(0, h - y), max(0, -x) : max(0, w - x)]
        x, y = round(max(0, x) * scale_x), round(max(0, y) * scale_y)
        wide = min(image.width - x, round(part.shape[1] * scale_x))
        high = min(image.height - y, round(part.shape[0] * scale_y))
        if (
            part.any()
            and min(wide, high) >= 1
            and (sprite := _sprite(image, part, (wide, high), x, y))
        ):
            complete = seen.complete and part.shape == seen.sprite.mask.shape
            objects.append(replace(seen, sprite=sprite, complete=complete))
    return Photo(image, tuple(objects), photo.tone)


def _sprite(
    image: Image.Image, mask: masks.Mask, size: tuple[int, int], x: int = 0, y: int = 0
) -> Sprite | None:
    """The part of an image under a mask that is scaled to `size` and put at (x, y); None if nothing is left of it."""
    coverage = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BOX)
    scaled = np.asarray(coverage) >= 128
    x0, y0, x1, y1 = masks.box(scaled)
    if not x1:
        return None
    scaled = np.ascontiguousarray(scaled[y0:y1, x0:x1])
    return Sprite(
        image.crop((x + x0, y + y0, x + x1, y + y1)), scaled, x + x0, y + y0, max(scaled.shape)
    )


def find_complete(seen: Sequence[masks.Mask]) -> list[bool]:
    """Which of the visible masks of a photo, all of its size, must be complete: see the top of this file."""
    areas = [masks.area(mask) for mask in seen]
    return [bool(areas[k]) and _is_complete(k, seen, areas) for k in range(len(seen))]


def _is_complete(k: int, seen: Sequence[masks.Mask], areas: Sequence[int]) -> bool:
    mask = seen[k]
    (height, width), (x0, y0, x1, y1) = mask.shape, masks.box(mask)
    gap = max(1, round(GAP * max(height, width)))
    if min(x0, y0) < gap or x1 > width - gap or y1 > height - gap:
        return False
    regions: Any = ndimage.label(
        mask[y0:y1, x0:x1]
    )  # labels and their number; scipy's stubs do not say so
    parts = np.bincount(regions[0].ravel())[1:]
    if parts.max() < ONE_PART * parts.sum():
        return False
    window = np.s_[y0 - gap : y1 + gap, x0 - gap : x1 + gap]
    inner, near = mask[window], None
    for j, other in enumerate(seen):
        there = other[window]
        if j == k or not there.any():
            continue
        if areas[j] >= LARGER * areas[k] and masks.area(there & inner) >= THROUGH * areas[k]:
            continue
        near = ndimage.binary_dilation(inner, iterations=gap) if near is None else near
        if (there & near).any():
            return False
    return True
