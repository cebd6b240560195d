"""Photographs over which objects of other photographs are laid, so that the hidden part of what they cover is known.

Complete objects (photos.py) have amodal masks and are hidden on purpose; of all others only the modal mask is known.
The objects laid over a photo are of other photos of the same split, about as large as they are there. In training
some can be of a folder of cut-outs (cutouts.py), for names that the photos do not have.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.batches import jitter_colours
from r2sm_jax.data.dataset import Instance
from r2sm_jax.errors import InputError
from r2sm_jax.query import Query
from r2sm_jax.synthetic.cutouts import (
    Cutout as FolderCutout,
    blend,
    read_cutouts,
    read_picture,
    remember,
    rescale,
)
from r2sm_jax.synthetic.photos import ZOOM, Cutout, Photo, Photos, Seen, zoom
from r2sm_jax.synthetic.queries.nouns import display_name, lexicon
from r2sm_jax.synthetic.queries.write import (
    ABSENT_SPLIT,
    SPLIT_STRIDE,
    SPLITS,
    write_absent_queries,
    write_queries,
)
from r2sm_jax.synthetic.random_choice import pick
from r2sm_jax.synthetic.scenes.layout import Item, Layout, Placed, Rules, whole_mask
from r2sm_jax.synthetic.scenes.paint import Sprite, opaque
from r2sm_jax.synthetic.scenes.source import (
    ProceduralSource,
    Scene,
    choose,
    describe_objects,
    unaskable,
)

LEAST, MOST = 0.05, 0.7  # hidden share of an object that is hidden on purpose
PLAIN = 0.2  # share of the pictures that stay photographs
COUNT_SHARES = np.cumsum((0.45, 0.35, 0.2))  # of pictures with 1, 2, 3 objects laid over them
TRAIN_COUNT_SHARES = np.cumsum((0.2, 0.25, 0.25, 0.2, 0.1))  # the same in training
ATTEMPTS = 8  # to lay one of them
ASKED = 0.004  # least share of the picture that is seen of an object that a query means
JITTER = 0.3  # largest relative change of brightness, contrast and saturation in training
SMALLEST = 0.0015  # share of the picture from which an object is hidden on purpose
TINY = 0.0006  # share of the picture below which what is visible of an object is ignored, as beyond `MOST`
FEWEST = 10  # complete objects that a training split needs
KEPT_BYTES = 256_000_000  # memory of a process for photos, and again for cut-outs
STRETCH = 1.35  # by which a cut-out is scaled at most, up or down
EXTRA = 0.3  # share of the objects laid over a photo that are of the folder of cut-outs, where one is given
TONE = 0.35  # how far the colours of a cut-out move to those of the photo that it is laid over


class ComposeSource(ProceduralSource):
    """Composed photographs: any sample is rebuilt from (seed, split, index) and the content of file and photos.

    Photo `index` modulo their number lies below. Train, dev and the other splits share neither photos nor cut-outs. In
    training half of the pictures are mirrored, and half show a part of the photo only.
    """

    splits = (*ProceduralSource.splits, ABSENT_SPLIT)

    def __init__(
        self,
        path: str | PathLike[str],
        split: str,
        count: int,
        *,
        images: str | PathLike[str] | None = None,
        cutouts: str | PathLike[str] | None = None,
        **options: int,
    ):
        """`count` pictures whose longer side is `size`; photos are in the folder `images` or beside the file. `cutouts`
        is a folder of more objects for training.

        Raises InputError for an unknown split, a file without masks, photos that are missing, and fewer than ten
        cut-outs to train on.
        """
        super().__init__(split, count, **options)
        self.photos = Photos(path, images)
        self.below = self.photos.split(split)
        self.classes = tuple(map(display_name, self.photos.dataset.vocabulary["category"]))
        self.extra: list[FolderCutout] = []
        if cutouts is not None and split == "train":
            self.extra = _other_things(read_cutouts(Path(cutouts), self.size), self.classes)
        self.vocabulary = {
            "category": tuple(
                dict.fromkeys([*self.classes, *(c.item.category for c in self.extra)])
            )
        }
        photos, extra = (
            map(self.photos.dataset.image_path, self.below),
            (cutout.path for cutout in self.extra),
        )
        self.files = (self.photos.path, *photos, *extra)
        own = sorted(self.photos.cutouts(self.below), key=lambda cutout: cutout.side)
        complete = [cutout for cutout in own if cutout.complete]
        needed = FEWEST if split == "train" else 1
        if len(complete) < needed:
            raise InputError(
                f"{path}: the split {split!r} has {len(complete)} complete objects to lay over photos (not small, "
                f"with a gap to the border and to other masks), {needed} are needed; add photos with masks"
            )
        self.cutouts = own if split == "train" else complete
        self._sides = np.array([cutout.side for cutout in self.cutouts])
        often = Counter(cutout.category for cutout in self.cutouts)
        self._weights = np.cumsum(
            [0.0, *(often[cutout.category] ** -0.5 for cutout in self.cutouts)]
        )
        self._rules = Rules(
            hidden=(LEAST + 0.01, MOST - 0.01),
            tolerance=0.03,
            directions=6,
            whole=True,
            smallest_area=round(0.5 * SMALLEST * self.size**2),
            smallest_share=1 - MOST,
            least_hidden=LEAST,
            loss_of_free=0.3,
        )

    def scene(self, number: int) -> Scene:
        """Raises InputError for a photo that cannot be read (any more)."""
        rng = np.random.default_rng((self.seed, number))
        k = self.below[number % SPLIT_STRIDE % len(self.below)]
        training = self.split == "train"
        photo = remember(
            self.photos.read, round(ZOOM * self.size) if training else self.size, KEPT_BYTES
        )(k)
        photo = zoom(rng, photo, self.size) if training else photo
        layout = Layout((photo.image.height, photo.image.width), self._rules)
        for seen in photo.objects:
            if seen.complete and masks.area(seen.sprite.mask) >= SMALLEST * self.size**2:
                layout.put(_put_back(seen))
        start = len(layout.placed)
        if rng.random() >= PLAIN:
            shares = TRAIN_COUNT_SHARES if training else COUNT_SHARES
            for _ in range(1 + choose(rng, shares) + (start == 0)):
                for _ in range(ATTEMPTS):
                    if self._lay(rng, layout, photo, k):
                        break
        over = [
            Seen(
                placed.item.category,
                placed.in_place(),
                complete=placed.item.wanted != "free",
                ignored=False,
            )
            for placed in layout.placed[start:]
        ]
        canvas = photo.image.copy()
        blend(rng, canvas, [seen.sprite for seen in over])
        image, found = np.array(canvas), self._find(over, photo.objects, layout.shape)
        if training:
            image = jitter_colours(image, JITTER, rng)
            if rng.random() < 0.5:
                image, found = (
                    image[:, ::-1],
                    [i.convert(lambda mask: mask[:, ::-1]) for i in found],
                )
        # Numbered from left to right; those with nothing visible are left out.
        ranked = sorted(
            (i for i in found if i.modal.any()), key=lambda i: sum(masks.box(i.modal)[::2])
        )
        instances = tuple(
            replace(instance, id=rank) for rank, instance in enumerate(ranked, start=1)
        )
        return Scene(np.ascontiguousarray(image), instances, tuple(describe_objects(instances)))

    def write(self, scene: Scene, rng: np.random.Generator, first_id: int) -> tuple[Query, ...]:
        """As of all scenes; in training one of eight, and in the split `val_absent` every one, is for something that is
        not in the picture."""
        everything, split = self.split == ABSENT_SPLIT, SPLITS[self.split]
        count = self.queries if everything else self.queries // 8 if self.split == "train" else 0
        there = {display_name(instance.category) for instance in scene.instances}
        absent = write_absent_queries(
            scene.facts,
            [name for name in self.classes if name not in there],
            rng=rng,
            count=count,
            split=split,
            first_id=first_id,
        )
        if everything:
            return absent
        small = [i.id for i in scene.instances if masks.area(i.modal) < ASKED * self.size**2]
        of_scene = write_queries(
            scene.facts,
            rng=rng,
            count=self.queries - len(absent),
            split=split,
            first_id=first_id + len(absent),
            forbidden=unaskable(scene.instances, small),
        )
        return absent + of_scene

    def _lay(self, rng: np.random.Generator, layout: Layout, photo: Photo, k: int) -> bool:
        """Lays a cut-out over an object that may be hidden, or beside all if there is none. False: it does not fit."""
        below = layout.choose_below(rng)
        share = rng.uniform(*self._rules.hidden)
        extent = self.size * rng.uniform(0.15, 0.45)
        if below is not None:
            extent = (
                layout.placed[below].sprite.extent * rng.uniform(0.75, 1.3) * (0.8 + 0.4 * share)
            )
        if self.extra and rng.random() < EXTRA:
            other, tone = pick(rng, self.extra), photo.tone
            item, picture = (
                Item(other.item.category, {}),
                remember(read_picture, self.size)(other.path),
            )
        else:
            cutout = self._choose(rng, extent / self.size)
            if cutout.photo == k:
                return False
            picture, tone = remember(self.photos.cut, round(STRETCH * self.size), KEPT_BYTES)(
                cutout
            )
            natural = cutout.side * self.size
            extent = float(np.clip(extent, natural / STRETCH, natural * STRETCH))
            # What is not complete is not hidden on purpose.
            item = Item(cutout.category, {}, "any" if cutout.complete else "free")
        picture = rescale(picture, extent / max(picture.size))
        gains = np.clip((photo.tone + 8) / (tone + 8), 0.5, 2) ** TONE
        table = np.outer(gains, np.arange(256)).clip(0, 255).round().astype(int).ravel().tolist()
        picture = picture.point(table + list(range(256)))
        if rng.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        extent = float(max(picture.size))
        sprite = Sprite(
            picture, opaque(picture), -(picture.width // 2), -(picture.height // 2), extent
        )
        fits = np.all(np.less(sprite.mask.shape, layout.shape))
        if not fits or masks.area(sprite.mask) < self._rules.smallest_area:
            return False
        place = (
            layout.find_free(rng, sprite)
            if below is None
            else layout.find_over(rng, sprite, below, share)
        )
        if place is not None:
            layout.put(Placed(item, sprite, *place, on_top=below is not None))
        return place is not None

    def _choose(self, rng: np.random.Generator, side: float) -> Cutout:
        """A cut-out of about this longer side, if there is one; frequent classes less often than they occur."""
        low, high = np.searchsorted(self._sides, (side / 1.3, side * 1.3))
        low = max(0, min(low, len(self.cutouts) - FEWEST))
        high = min(max(high, low + FEWEST), len(self.cutouts))
        drawn = rng.uniform(self._weights[low], self._weights[high])
        return self.cutouts[min(int(np.searchsorted(self._weights, drawn, "right")) - 1, high - 1)]

    def _find(
        self, over: Sequence[Seen], below: Sequence[Seen], shape: tuple[int, int]
    ) -> list[Instance]:
        """The objects of the picture: those laid over the photo, the rearmost first, and its own."""
        covered, found = np.zeros(shape, bool), []
        for number, seen in enumerate((*reversed(over), *below)):
            whole = whole_mask(seen.sprite, shape)
            modal = whole & ~covered
            tiny = masks.area(modal) < max(TINY * self.size**2, (1 - MOST) * masks.area(whole))
            amodal = whole if seen.complete else None
            found.append(Instance(0, seen.category, modal, amodal, {}, seen.ignored or tiny))
            if number < len(over):
                covered |= whole
        return found


def _other_things(cutouts: Sequence[FolderCutout], classes: Sequence[str]) -> list[FolderCutout]:
    """The cut-outs that are of one of the classes by label, or that no noun of another class could mean."""
    known = lexicon().classes
    nouns = [
        noun for name in classes for noun in (name, *(known[name].nouns if name in known else ()))
    ]
    words = {frozenset(noun.split()) for noun in nouns}
    return [
        c
        for c in cutouts
        if c.item.category in classes or not any(noun <= c.words for noun in words)
    ]


def _put_back(seen: Seen) -> Placed:
    """An object of a photo in its place, as something that may be hidden."""
    sprite = seen.sprite
    x, y = sprite.x + sprite.mask.shape[1] // 2, sprite.y + sprite.mask.shape[0] // 2
    moved = replace(sprite, x=sprite.x - x, y=sprite.y - y)
    return Placed(Item(seen.category, {}, "hidden"), moved, x, y)
