"""Photographs over which complete objects of other photographs are laid, so that the hidden part of what they cover is
known.

A COCO instances file says what is visible in each photo. An object counts as complete if its mask is in one part and
touches neither the border nor another mask, except that of a larger object that is drawn right through it, as a table
may be through a cup: then nothing that is annotated can hide a part of it. Complete objects have amodal masks and are
hidden on purpose; of all others only the modal mask is known. The objects laid over a photo are complete ones of other
photos of the same split, about as large as they are there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Dataset, Instance, check_records, hold_out, image_folders
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.queries.nouns import display_name
from r2sm_jax.queries.write import ABSENT_SPLIT, SPLIT_STRIDE, SPLITS, write_absent_queries, write_queries
from r2sm_jax.query import Query
from r2sm_jax.scenes.cutouts import blend, crop, remember, rescale
from r2sm_jax.scenes.layout import Item, Layout, Placed, Rules, overlap
from r2sm_jax.scenes.paint import Sprite, opaque
from r2sm_jax.scenes.scenes import ProceduralSource, Scene, choose, describe_objects, unaskable

HELD_OUT = {"dev": 0.25, "val": 0.15}  # shares of the photos up to which a hash of the file name puts them there
LEAST, MOST = 0.05, 0.7  # hidden share of an object that is hidden on purpose
PLAIN = 0.2  # share of the pictures that stay photographs
COUNT_SHARES = np.cumsum((0.45, 0.35, 0.2))  # of pictures with 1, 2, 3 objects laid over them
ATTEMPTS = 8  # to lay one of them
SMALLEST = 0.0015  # share of the picture from which an object is hidden on purpose
TINY = 0.0006  # share of the picture below which what is visible of an object is ignored, as beyond `MOST`
GAP = 0.004  # distance, in longer sides of the photo, up to which masks touch each other or the border
ONE_PART = 0.96  # share of a mask in its largest part; something lies in front of the middle of others
LARGER, THROUGH = 1.5, 0.6  # so much larger is a mask that is drawn through another one, and covers this share of it
FEWEST, MOST_CUTOUTS = 10, 5000
CUTOUT_SIDES, CUTOUT_AREA = (0.08, 0.6), 0.004  # longer side and least area of a cut-out, in its photo's
KEPT_BYTES = 256_000_000  # memory of a process for photos, and again for cut-outs
STRETCH = 1.35  # by which a cut-out is scaled at most, up or down
ZOOM = 1.8  # by which a part of a photo is enlarged at most in training
TONE = 0.35  # how far the colours of a cut-out move to those of the photo that it is laid over


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
    """A complete object: the numbers of its photo and of its annotation there; its longer side in the photo's."""

    photo: int
    number: int
    category: str
    side: float


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
        self.dataset = Dataset(self.path, "", records, image_folders(self.path, images))
        self._complete: dict[int, list[bool]] = {}

    def split(self, split: str) -> list[int]:
        """The photos of a split, in the order of the file; those of train, dev and any other are all different.

        Raises InputError where a photo of the split is missing, or the split has none.
        """
        names = [record["file_name"] for record in self.dataset.images]
        dev = hold_out(names, HELD_OUT["dev"])
        val = hold_out(sorted(dev), HELD_OUT["val"])
        chosen = set(names) - dev if split == "train" else dev - val if split == "dev" else val
        found = [k for k, name in enumerate(names) if name in chosen]
        if not found:
            raise InputError(f"{self.path}: {len(names)} photos leave none for the split {split!r}; add photos")
        for k in found:
            self.dataset.image_path(k)
        return found

    def masks(self, k: int) -> tuple[list[Instance[masks.Mask]], list[bool]]:
        """The instances of photo k with visible masks at its own size, and which are complete."""
        instances = [instance.convert(masks.expand) for instance in self.dataset.rles_at(k)]
        seen = [instance.modal for instance in instances]
        if k not in self._complete:
            self._complete[k] = [
                whole and not i.ignore for whole, i in zip(find_complete(seen), instances, strict=True)
            ]
        return instances, self._complete[k]

    def cutouts(self, photos: list[int]) -> list[Cutout]:
        """The complete objects of some photos that are large enough to be laid over others, at most `MOST_CUTOUTS`."""
        found: list[Cutout] = []
        for k in photos:
            height, width = self.dataset.size_at(k)
            for number, (instance, complete) in enumerate(zip(*self.masks(k), strict=True)):
                x0, y0, x1, y1 = masks.box(instance.modal)
                side = max(x1 - x0, y1 - y0) / max(height, width)
                large = masks.area(instance.modal) >= CUTOUT_AREA * height * width
                if complete and large and CUTOUT_SIDES[0] <= side <= CUTOUT_SIDES[1]:
                    found.append(Cutout(k, number, display_name(instance.category), side))
            if len(found) >= MOST_CUTOUTS:
                break
        return found

    def read(self, k: int, side: int) -> Photo:
        """Photo k, its longer side `side`. Raises InputError for a photo that is damaged or not the annotated one."""
        image = Image.fromarray(self.dataset.image_at(k))
        small = rescale(image, side / max(image.size), reducing_gap=3.0)
        objects = []
        for instance, complete in zip(*self.masks(k), strict=True):
            coverage = Image.fromarray(instance.modal.astype(np.uint8) * 255)
            mask = np.asarray(coverage.resize(small.size, Image.Resampling.BOX)) >= 128
            x0, y0, x1, y1 = masks.box(mask)
            if x1:
                cut = np.ascontiguousarray(mask[y0:y1, x0:x1])
                sprite = Sprite(small.crop((x0, y0, x1, y1)), cut, x0, y0, max(cut.shape))
                objects.append(Seen(display_name(instance.category), sprite, complete, instance.ignore))
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
        sprite = seen.sprite
        y, x = sprite.y - top, sprite.x - left
        inside = np.s_[max(0, -y) : max(0, h - y), max(0, -x) : max(0, w - x)]
        part = sprite.mask[inside]
        x0, y0 = round(max(0, x) * scale_x), round(max(0, y) * scale_y)
        size = (
            min(image.width - x0, round(part.shape[1] * scale_x)),
            min(image.height - y0, round(part.shape[0] * scale_y)),
        )
        if not part.any() or min(size) < 1:
            continue
        mask = np.asarray(Image.fromarray(part.astype(np.uint8) * 255).resize(size, Image.Resampling.BOX)) >= 128
        bx0, by0, bx1, by1 = masks.box(mask)
        if not bx1:
            continue
        cut = np.ascontiguousarray(mask[by0:by1, bx0:bx1])
        x0, y0 = x0 + bx0, y0 + by0
        moved = Sprite(image.crop((x0, y0, x0 + cut.shape[1], y0 + cut.shape[0])), cut, x0, y0, max(cut.shape))
        objects.append(Seen(seen.category, moved, seen.complete and part.shape == sprite.mask.shape, seen.ignored))
    return Photo(image, tuple(objects), photo.tone)


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
    regions: Any = ndimage.label(mask[y0:y1, x0:x1])  # labels and their number; scipy's stubs do not say so
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


class ComposeSource(ProceduralSource):
    """Composed photographs: any sample is rebuilt from (seed, split, index) and the content of file and photos.

    Photo `index` modulo their number lies below. Train, dev and the other splits share neither photos nor cut-outs. In
    training half of the pictures are mirrored, and half show a part of the photo only.
    """

    splits = tuple(SPLITS)

    def __init__(
        self,
        path: str | PathLike[str],
        split: str,
        count: int,
        *,
        images: str | PathLike[str] | None = None,
        **options: int,
    ):
        """`count` pictures whose longer side is `size`; photos are in the folder `images` or beside the file.

        Raises InputError for an unknown split, a file without masks, photos that are missing, and fewer than ten
        cut-outs to train on.
        """
        super().__init__(split, count, **options)
        self.photos = Photos(path, images)
        self.below = self.photos.split(split)
        self.vocabulary = {"category": tuple(map(display_name, self.photos.dataset.vocabulary["category"]))}
        self.cutouts = sorted(self.photos.cutouts(self.below), key=lambda cutout: cutout.side)
        needed = FEWEST if split == "train" else 1
        if len(self.cutouts) < needed:
            raise InputError(
                f"{path}: the split {split!r} has {len(self.cutouts)} complete objects to lay over photos (not small, "
                f"with a gap to the border and to other masks), {needed} are needed; add photos with masks"
            )
        self._sides = np.array([cutout.side for cutout in self.cutouts])
        often = Counter(cutout.category for cutout in self.cutouts)
        self._weights = np.cumsum([0.0, *(often[cutout.category] ** -0.5 for cutout in self.cutouts)])
        self._rules = Rules(
            hidden=(LEAST + 0.01, MOST - 0.01), tolerance=0.03, directions=6, whole=True,
            smallest_area=round(0.5 * SMALLEST * self.size**2), smallest_share=1 - MOST, least_hidden=LEAST,
            loss_of_free=0.3,
        )  # fmt: skip

    def scene(self, number: int) -> Scene:
        """Raises InputError for a photo that cannot be read (any more)."""
        rng = np.random.default_rng((self.seed, number))
        k = self.below[number % SPLIT_STRIDE % len(self.below)]
        if self.split == "train":
            photo = zoom(rng, remember(self.photos.read, round(ZOOM * self.size), KEPT_BYTES)(k), self.size)
        else:
            photo = remember(self.photos.read, self.size, KEPT_BYTES)(k)
        layout = Layout((photo.image.height, photo.image.width), self._rules)
        for seen in photo.objects:
            if seen.complete and masks.area(seen.sprite.mask) >= SMALLEST * self.size**2:
                layout.put(_put_back(seen))
        start = len(layout.placed)
        if rng.random() >= PLAIN:
            for _ in range(1 + choose(rng, COUNT_SHARES) + (start == 0)):
                for _ in range(ATTEMPTS):
                    if self._lay(rng, layout, photo, k):
                        break
        canvas, over = photo.image.copy(), [placed.in_place() for placed in layout.placed[start:]]
        blend(rng, canvas, over)
        names = [placed.item.category for placed in layout.placed[start:]]
        image, found = np.array(canvas), self._find(photo, over, names)
        if self.split == "train" and rng.random() < 0.5:
            image = image[:, ::-1]
            found = [
                replace(i, modal=i.modal[:, ::-1], amodal=None if i.amodal is None else i.amodal[:, ::-1])
                for i in found
            ]
        instances = _number(found)
        return Scene(np.ascontiguousarray(image), instances, tuple(describe_objects(instances)))

    def write(self, scene: Scene, rng: np.random.Generator, first_id: int) -> tuple[Query, ...]:
        """As of all scenes; in training one of eight, and in the split `val_absent` every one, is for something that is
        not in the picture."""
        everything, split = self.split == ABSENT_SPLIT, SPLITS[self.split]
        count = self.queries if everything else self.queries // 8 if self.split == "train" else 0
        there = {display_name(instance.category) for instance in scene.instances}
        absent = write_absent_queries(
            scene.facts, [name for name in self.vocabulary["category"] if name not in there],
            rng=rng, count=count, split=split, first_id=first_id,
        )  # fmt: skip
        if everything:
            return absent
        of_scene = write_queries(
            scene.facts, rng=rng, count=self.queries - len(absent), split=split, first_id=first_id + len(absent),
            forbidden=unaskable(scene.instances),
        )  # fmt: skip
        return absent + of_scene

    def _lay(self, rng: np.random.Generator, layout: Layout, photo: Photo, k: int) -> bool:
        """Lays a cut-out over an object that may be hidden, or beside all if there is none. False: it does not fit."""
        below = layout.choose_below(rng)
        share = rng.uniform(*self._rules.hidden)
        extent = self.size * rng.uniform(0.15, 0.45)
        if below is not None:
            extent = layout.placed[below].sprite.extent * rng.uniform(0.75, 1.3) * (0.8 + 0.4 * share)
        cutout = self._choose(rng, extent / self.size)
        if cutout.photo == k:
            return False
        picture, tone = remember(self.photos.cut, round(STRETCH * self.size), KEPT_BYTES)(cutout)
        natural = cutout.side * self.size
        picture = rescale(picture, float(np.clip(extent, natural / STRETCH, natural * STRETCH)) / max(picture.size))
        gains = np.clip((photo.tone + 8) / (tone + 8), 0.5, 2) ** TONE
        table = np.outer(gains, np.arange(256)).clip(0, 255).round().astype(int).ravel().tolist()
        picture = picture.point(table + list(range(256)))
        if rng.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        extent = float(max(picture.size))
        sprite = Sprite(picture, opaque(picture), -(picture.width // 2), -(picture.height // 2), extent)
        if masks.area(sprite.mask) < self._rules.smallest_area or not _smaller(sprite.mask.shape, layout.shape):
            return False
        free = below is None
        place = layout.find_free(rng, sprite) if free else layout.find_over(rng, sprite, below, share)
        if place is not None:
            layout.put(Placed(Item(cutout.category, {}), sprite, *place, on_top=not free))
        return place is not None

    def _choose(self, rng: np.random.Generator, side: float) -> Cutout:
        """A cut-out of about this longer side, if there is one; frequent classes less often than they occur."""
        low, high = np.searchsorted(self._sides, (side / 1.3, side * 1.3))
        low = max(0, min(low, len(self.cutouts) - FEWEST))
        high = min(max(high, low + FEWEST), len(self.cutouts))
        drawn = rng.uniform(self._weights[low], self._weights[high])
        return self.cutouts[min(int(np.searchsorted(self._weights, drawn, "right")) - 1, high - 1)]

    def _find(self, photo: Photo, over: list[Sprite], names: list[str]) -> list[Instance]:
        """The objects of the picture."""
        shape = photo.image.height, photo.image.width
        covered, found = np.zeros(shape, bool), list[Instance]()

        def add(sprite: Sprite, category: str, complete: bool, ignored: bool) -> np.ndarray:
            there, here = overlap(sprite, shape)
            whole = np.zeros(shape, bool)
            whole[there] = sprite.mask[here]
            modal = whole & ~covered
            tiny = masks.area(modal) < max(TINY * self.size**2, (1 - MOST) * masks.area(whole))
            found.append(Instance(0, category, modal, whole if complete else None, {}, ignored or tiny))
            return whole

        for sprite, name in zip(reversed(over), reversed(names), strict=True):
            covered |= add(sprite, name, complete=True, ignored=False)
        for seen in photo.objects:
            add(seen.sprite, seen.category, seen.complete, seen.ignored)
        return found


def _number(found: Sequence[Instance]) -> tuple[Instance, ...]:
    """The objects numbered from left to right; those with nothing visible are left out."""
    ranked = sorted((i for i in found if i.modal.any()), key=lambda i: sum(masks.box(i.modal)[::2]))
    return tuple(replace(instance, id=number) for number, instance in enumerate(ranked, start=1))


def _put_back(seen: Seen) -> Placed:
    """An object of a photo in its place, as something that may be hidden."""
    sprite = seen.sprite
    x, y = sprite.x + sprite.mask.shape[1] // 2, sprite.y + sprite.mask.shape[0] // 2
    moved = Sprite(sprite.image, sprite.mask, sprite.x - x, sprite.y - y, sprite.extent)
    return Placed(Item(seen.category, {}, "hidden"), moved, x, y)


def _smaller(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a < b for a, b in zip(shape, other, strict=True))
