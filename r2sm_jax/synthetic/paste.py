"""What is laid over a photo, and where: cut-outs of other photos, each over a complete object.

Cut-outs are of other photos of the same split, about as large as they are there. In training some
can be of a folder of cut-outs (cutouts.py), for names that the photos do not have.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.synthetic.cutouts import CutoutFile, read_picture
from r2sm_jax.synthetic.photos import (
    Photo,
    PhotoCutout,
    PhotoFile,
    PhotoObject,
    Photos,
    read_cutout,
)
from r2sm_jax.synthetic.pictures import random_flip, rescale
from r2sm_jax.synthetic.queries.nouns import lexicon_entry
from r2sm_jax.synthetic.random_choice import choose, pick
from r2sm_jax.synthetic.scenes.layout import Item, Layout, LayoutRules, PlacedItem
from r2sm_jax.synthetic.scenes.paint import centred_sprite

MIN_OCCLUSION, MAX_OCCLUSION = 0.05, 0.7  # hidden share of an object that is hidden on purpose
MIN_AREA_TO_HIDE = 0.0015  # of such an object, in shares of the squared longer side of the picture
PLAIN_PHOTO_SHARE = 0.2  # of the pictures
COUNT_SHARES = np.cumsum((0.45, 0.35, 0.2))  # of pictures with 1, 2, 3 pasted objects
TRAIN_COUNT_SHARES = np.cumsum((0.2, 0.25, 0.25, 0.2, 0.1))
LIKE_PICTURE_SHARE = 0.4  # of training pictures, those where an object of the photo gets its like
LIKE_SHARE = 0.7  # of what is pasted there
MAX_ATTEMPTS = 8  # to paste one object

MIN_CUTOUTS = 10  # complete objects that a training split should have
MAX_STRETCH = 1.35  # by which a cut-out is scaled up or down, from its size in its photo
FOLDER_SHARE = 0.3  # of the pasted objects, from the folder of cut-outs where one is given
TONE_SHARE = 0.35  # how far the colours of a cut-out move to those of the photo below it


class Paster:
    """Lays objects over photos.

    Attributes:
        pools: What can be laid over the photos of each file.
        drawings: What can be laid over all photos, of a folder of cut-outs.
    """

    def __init__(
        self,
        photos: Photos,
        cutouts: Sequence[PhotoCutout],
        drawings: Sequence[CutoutFile],
        *,
        size: int,
        is_training: bool,
    ):
        """`cutouts` are of `photos`. The longer side of a picture is `size`."""
        self._photos = photos
        self._size = size
        self._is_training = is_training
        self._count_shares = TRAIN_COUNT_SHARES if is_training else COUNT_SHARES
        self.pools = {file: make_pool(file, cutouts) for file in photos.files}
        self.drawings = drawings
        self._cutout_side = round(MAX_STRETCH * size)
        self._rules = LayoutRules(
            hidden_range=(MIN_OCCLUSION + 0.01, MAX_OCCLUSION - 0.01),
            tolerance=0.03,
            num_directions=6,
            keep_inside=True,
            min_visible_pixels=round(0.5 * MIN_AREA_TO_HIDE * size**2),
            min_visible_share=1 - MAX_OCCLUSION,
            min_hidden_share=MIN_OCCLUSION,
            max_loss_of_free=0.3,
        )

    def paste(self, rng: np.random.Generator, photo: Photo, index: int) -> list[PhotoObject]:
        """Random objects at positions over photo `index`, the rearmost first."""
        layout = Layout((photo.image.height, photo.image.width), self._rules)
        for photo_object in photo.objects:
            area = masks.area(photo_object.sprite.mask)
            if photo_object.is_whole and area >= MIN_AREA_TO_HIDE * self._size**2:
                layout.place_on_top(as_placed_item(photo_object))
        num_below = len(layout.placed)

        # A sentence must choose among several of a class, which few photos show.
        category = None
        categories = sorted({o.category for o in photo.objects if not o.ignored})
        if self._is_training and categories and rng.random() < LIKE_PICTURE_SHARE:
            category = pick(rng, categories)

        if category is not None or rng.random() >= PLAIN_PHOTO_SHARE:
            # Where nothing in the photo can be hidden, one pasted object can still hide another.
            count = 1 + choose(rng, self._count_shares) + (num_below == 0)
            for _ in range(count):
                for _ in range(MAX_ATTEMPTS):
                    if self._paste_object(rng, layout, photo, index, category):
                        break

        return [
            PhotoObject(
                placed.item.category,
                placed.sprite_in_picture(),
                is_whole=placed.item.occlusion != "free",
                ignored=False,
            )
            for placed in layout.placed[num_below:]
        ]

    def _paste_object(
        self,
        rng: np.random.Generator,
        layout: Layout,
        photo: Photo,
        index: int,
        category: str | None,
    ) -> bool:
        """Places a cut-out over an object that may be hidden, or beside all if there is none;
        mostly of `category` if that is given.

        Returns whether it fits.
        """
        target = layout.choose_object_to_hide(rng)
        share = rng.uniform(*self._rules.hidden_range)
        extent = self._size * rng.uniform(0.15, 0.45)
        if target is not None:
            extent = layout.placed[target].sprite.extent * rng.uniform(0.75, 1.3)
            extent *= 0.8 + 0.4 * share

        pool = self.pools[self._photos.file_of(index)]
        if self.drawings and rng.random() < FOLDER_SHARE:
            file = pick(rng, self.drawings)
            item = Item(file.item.category, {})
            picture = read_picture(file.path, self._size)
            assert picture is not None  # others were left out when the folder was opened
            mean_colour = photo.mean_colour  # a drawing has no light of its own to adapt
        else:
            if not pool.cutouts:
                return False
            like = pool.by_category.get(category, ())
            if like and rng.random() < LIKE_SHARE:
                cutout = pick(rng, like)
                extent = cutout.side * self._size * rng.uniform(0.8, 1.25)
            else:
                cutout = pool.choose(rng, extent / self._size)
            if cutout.photo == index:
                return False
            picture, mean_colour = read_cutout(self._photos, cutout, self._cutout_side)
            natural_extent = cutout.side * self._size
            extent = np.clip(extent, natural_extent / MAX_STRETCH, natural_extent * MAX_STRETCH)
            # What may be incomplete is not hidden on purpose: its amodal mask is unknown.
            item = Item(cutout.category, {}, "any" if cutout.is_whole else "free")

        picture = rescale(picture, float(extent) / max(picture.size))
        picture = adapt_tone(picture, mean_colour, photo.mean_colour)
        picture = random_flip(rng, picture)
        sprite = centred_sprite(picture, float(max(picture.size)))
        height, width = layout.shape
        if picture.height >= height or picture.width >= width:
            return False
        if masks.area(sprite.mask) < self._rules.min_visible_pixels:
            return False

        if target is None:
            position = layout.find_free_position(rng, sprite)
        else:
            position = layout.find_position_over(rng, sprite, target, share)
        if position is None:
            return False
        layout.place_on_top(PlacedItem(item, sprite, *position, is_occluder=target is not None))
        return True


class CutoutPool:
    """Cut-outs to choose from by size. A class that is n times as frequent is chosen sqrt(n) times
    as often."""

    def __init__(self, cutouts: Sequence[PhotoCutout]):
        self.cutouts = sorted(cutouts, key=lambda cutout: cutout.side)
        self.by_category: dict[str | None, list[PhotoCutout]] = {}
        for cutout in self.cutouts:
            self.by_category.setdefault(cutout.category, []).append(cutout)
        self._sides = np.array([cutout.side for cutout in self.cutouts])
        frequency = Counter(cutout.category for cutout in self.cutouts)
        weights = [frequency[cutout.category] ** -0.5 for cutout in self.cutouts]
        self._cumulative_weights = np.cumsum([0.0, *weights])

    def choose(self, rng: np.random.Generator, side: float) -> PhotoCutout:
        """One of about this longer side, in longer sides of the photo."""
        low, high = np.searchsorted(self._sides, (side / 1.3, side * 1.3))
        low = max(0, min(low, len(self.cutouts) - MIN_CUTOUTS))
        high = min(max(high, low + MIN_CUTOUTS), len(self.cutouts))
        draw = rng.uniform(self._cumulative_weights[low], self._cumulative_weights[high])
        index = int(np.searchsorted(self._cumulative_weights, draw, "right")) - 1
        return self.cutouts[min(index, high - 1)]


def make_pool(file: PhotoFile, cutouts: Sequence[PhotoCutout]) -> CutoutPool:
    """What can be pasted over the photos of a file.

    A photo may show other things than its file marks, and a query about what is pasted must not
    mean one of these. So no name is pasted that a class of the file could be called by, as in
    a folder of cut-outs, and over a partly marked photo only classes of its file.
    """
    if file.is_partial:
        return CutoutPool([cutout for cutout in cutouts if cutout.category in file.classes])
    allowed = []
    for cutout in cutouts:
        words = frozenset(cutout.category.split())
        if is_unambiguous(cutout.category, words, file.classes):
            allowed.append(cutout)
    return CutoutPool(allowed)


@cache
def nouns_of(classes: tuple[str, ...]) -> list[frozenset[str]]:
    """The words of every noun that a class may be called by."""
    nouns = set(classes).union(*(lexicon_entry(name).nouns for name in classes))
    return [frozenset(noun.split()) for noun in nouns]


def is_unambiguous(name: str, words: frozenset[str], classes: tuple[str, ...]) -> bool:
    """Whether an object's name is one of the classes, or no noun of a class could mean it by its
    words."""
    return name in classes or not any(noun <= words for noun in nouns_of(classes))


def as_placed_item(photo_object: PhotoObject) -> PlacedItem:
    """An object of a photo at its position, as something that should be hidden."""
    sprite = photo_object.sprite
    height, width = sprite.mask.shape
    x, y = sprite.x + width // 2, sprite.y + height // 2
    centred = replace(sprite, x=sprite.x - x, y=sprite.y - y)
    return PlacedItem(Item(photo_object.category, {}, "hidden"), centred, x, y)


def adapt_tone(
    picture: Image.Image, mean_colour: np.ndarray, target_colour: np.ndarray
) -> Image.Image:
    """Moves the colours of an RGBA picture some way from one mean colour `[3]` to another."""
    gains = np.clip((target_colour + 8) / (mean_colour + 8), 0.5, 2) ** TONE_SHARE
    table = np.outer(gains, np.arange(256)).clip(0, 255).round().astype(int)
    return picture.point(table.ravel().tolist() + list(range(256)))
