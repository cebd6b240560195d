"""Photographs with objects of others pasted over them, so that hidden parts are known.

Complete objects (photos.py) have amodal masks and are hidden on purpose; of all others only the
modal mask is known. The pasted objects are of other photos of the same split, about as large as
they are there. In training some can be of a folder of cut-outs (cutout_folder.py), for names that
the photos do not have.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.augment import jitter_colours
from r2sm_jax.data.dataset import Instance
from r2sm_jax.errors import InputError
from r2sm_jax.query import Query
from r2sm_jax.synthetic.cutout_folder import CutoutFile, CutoutFolder
from r2sm_jax.synthetic.photos import (
    MAX_ZOOM,
    Photo,
    PhotoCutout,
    PhotoFile,
    PhotoObject,
    Photos,
    random_zoom,
)
from r2sm_jax.synthetic.pictures import (
    ImageCache,
    count_pixels,
    paste_sprites,
    random_flip,
    rescale,
)
from r2sm_jax.synthetic.procedural import ProceduralSource
from r2sm_jax.synthetic.queries.nouns import display_name, lexicon
from r2sm_jax.synthetic.queries.write import (
    ABSENT_SPLIT,
    SPLIT_STRIDE,
    SPLITS,
    write_absent_queries,
    write_queries,
)
from r2sm_jax.synthetic.random_choice import choose, pick
from r2sm_jax.synthetic.related import RelatedNames
from r2sm_jax.synthetic.scenes.layout import (
    Item,
    Layout,
    LayoutRules,
    PlacedItem,
    mask_in_picture,
)
from r2sm_jax.synthetic.scenes.paint import centred_sprite
from r2sm_jax.synthetic.scenes.scene import Scene, describe_objects, forbidden_targets

MIN_OCCLUSION, MAX_OCCLUSION = 0.05, 0.7  # hidden share of an object that is hidden on purpose
PLAIN_PHOTO_SHARE = 0.2  # of the pictures
COUNT_SHARES = np.cumsum((0.45, 0.35, 0.2))  # of pictures with 1, 2, 3 pasted objects
TRAIN_COUNT_SHARES = np.cumsum((0.2, 0.25, 0.25, 0.2, 0.1))
MAX_ATTEMPTS = 8  # to paste one object

# Areas, in shares of the squared longer side of the picture.
MIN_TARGET_AREA = 0.004  # visible, of an object that a query refers to
MIN_AREA_TO_HIDE = 0.0015  # of an object that is hidden on purpose
MIN_VISIBLE_AREA = 0.0006  # below it an object is ignored, as beyond `MAX_OCCLUSION`

COLOUR_JITTER = 0.3  # largest relative change of brightness, contrast and saturation in training
MIN_CUTOUTS = 10  # complete objects that a training split needs
MAX_CACHE_BYTES = 256_000_000  # for photos, and again for cut-outs
MAX_STRETCH = 1.35  # by which a cut-out is scaled up or down, from its size in its photo
FOLDER_SHARE = 0.3  # of the pasted objects, from the folder of cut-outs where one is given
TONE_SHARE = 0.35  # how far the colours of a cut-out move to those of the photo below it
NUM_QUERIES_PER_ABSENT = 8  # in training, one query of so many has no target
MAX_ABSENT_RATIO = 3  # up to so many times as many with `hard_absent`


class CutoutPool:
    """Cut-outs to choose from by size. A class that is n times as frequent is chosen sqrt(n) times
    as often."""

    def __init__(self, cutouts: Sequence[PhotoCutout]):
        self.cutouts = sorted(cutouts, key=lambda cutout: cutout.side)
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


class ComposeSource(ProceduralSource):
    """Composed photographs, rebuilt from (seed, split, index) and the content of files and photos.

    The photo below is number `index` modulo their number. A training split with more photos than
    pictures draws its photos by seed, from the whole file. Train, dev and the other splits share
    neither photos nor cut-outs. In training half of the pictures are mirrored, and half show only a
    part of the photo.
    """

    splits = (*ProceduralSource.splits, ABSENT_SPLIT)

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        split: str,
        count: int | None,
        *,
        images: str | PathLike[str] | None = None,
        cutouts: str | PathLike[str] | None = None,
        hard_absent: bool = False,
        **options: int,
    ):
        """`count` pictures, or one for each photo, of the photos of one or more files.

        Their longer side is `size`.

        Photos are in the folder `images` or beside their file. `cutouts` is a folder of more
        objects for training. With `hard_absent` training asks for more things that are not there,
        and for such as could be.

        Raises InputError for an unknown split, a file without masks, photos that are missing, and
        too few cut-outs.
        """
        super().__init__(split, 0, **options)
        self.is_training = split == "train"
        self.photos = Photos(paths, images)
        self.photo_indices = self._choose_photos(count)
        self.count = len(self.photo_indices) if count is None else count
        photo_classes = [name for file in self.photos.files for name in file.classes]

        self.cutouts = self._find_cutouts()
        self._pools = {file: self.make_pool(file) for file in self.photos.files}
        self.related = find_related(self.photos) if hard_absent and self.is_training else None

        self.folder_cutouts: list[CutoutFile] = []
        if cutouts is not None and self.is_training:
            self._folder = CutoutFolder(Path(cutouts), self.size)
            nouns = nouns_of(photo_classes)
            self.folder_cutouts = [
                cutout
                for cutout in self._folder.cutouts
                if is_unambiguous(cutout.item.category, cutout.words, photo_classes, nouns)
            ]

        folder_classes = [cutout.item.category for cutout in self.folder_cutouts]
        classes = dict.fromkeys([*photo_classes, *folder_classes])
        self.vocabulary = {"category": tuple(classes)}
        self.files = (
            *self.photos.paths,
            *map(self.photos.path_of, self.photo_indices),
            *(cutout.path for cutout in self.folder_cutouts),
        )

        self._photo_side = round(MAX_ZOOM * self.size) if self.is_training else self.size
        self._cutout_side = round(MAX_STRETCH * self.size)
        self._photo_cache = ImageCache[Photo](MAX_CACHE_BYTES, pixels_of_photo)
        self._cutout_cache = ImageCache[tuple[Image.Image, np.ndarray]](
            MAX_CACHE_BYTES, pixels_of_cutout
        )
        self._rules = LayoutRules(
            hidden_range=(MIN_OCCLUSION + 0.01, MAX_OCCLUSION - 0.01),
            tolerance=0.03,
            num_directions=6,
            keep_inside=True,
            min_visible_pixels=round(0.5 * MIN_AREA_TO_HIDE * self.size**2),
            min_visible_share=1 - MAX_OCCLUSION,
            min_hidden_share=MIN_OCCLUSION,
            max_loss_of_free=0.3,
        )

    def fingerprint(self) -> str:
        """Changes with all that the samples depend on, except their number."""
        fingerprint = super().fingerprint()
        return fingerprint if self.related is None else f"{fingerprint} hard absent"

    def _choose_photos(self, count: int | None) -> list[int]:
        """The photos of the split: in the order of the files, or at random if not all are used."""
        photos = self.photos.photos_of_split(self.split)
        if self.split == ABSENT_SPLIT:
            photos = [photo for photo in photos if not self.photos.file_of(photo).is_partial]
            if not photos:
                raise InputError(
                    f"{self.photos.name}: no photo has all of its objects marked (info.partial), "
                    f"so that there are no queries for the split {self.split!r}; choose another"
                )
        # Held-out splits keep their order, so that more pictures begin with the same ones.
        if not self.is_training or count is None or count >= len(photos):
            return photos

        warnings.warn(
            f"{self.photos.name}: {count:,} of the {len(photos):,} photos of the split "
            f"{self.split!r} are used, chosen by seed; compose more pictures to use all "
            "(--data.scenes)",
            stacklevel=3,
        )
        # The order of `files` follows this one, so that the fingerprint tells the two orders apart.
        return np.random.default_rng(self.seed).permutation(photos).tolist()

    def _find_cutouts(self) -> list[PhotoCutout]:
        """What can be pasted. In training that includes objects that may not be complete."""
        cutouts = self.photos.find_cutouts(self.photo_indices)
        complete = [cutout for cutout in cutouts if cutout.complete]
        min_cutouts = MIN_CUTOUTS if self.is_training else 1
        if len(complete) < min_cutouts:
            raise InputError(
                f"{self.photos.name}: the split {self.split!r} has {len(complete)} complete "
                "objects to lay over photos (not small, with a gap to the border and to other "
                f"masks), {min_cutouts} are needed; add photos with masks"
            )
        return cutouts if self.is_training else complete

    def make_pool(self, file: PhotoFile) -> CutoutPool:
        """What can be pasted over the photos of a file.

        A photo may show other things than its file marks, and a query about what is pasted must not
        mean one of these. So no name is pasted that a class of the file could be called by, as in
        a folder of cut-outs, and over a partly marked photo only classes of its file.
        """
        nouns = nouns_of(file.classes)
        cutouts = []
        for cutout in self.cutouts:
            words = frozenset(cutout.category.split())
            if cutout.category in file.classes or (
                not file.is_partial and is_unambiguous(cutout.category, words, file.classes, nouns)
            ):
                cutouts.append(cutout)
        return CutoutPool(cutouts)

    def make_scene(self, number: int) -> Scene:
        """Raises InputError for a photo that cannot be read (any more)."""
        rng = np.random.default_rng((self.seed, number))
        index = self.photo_indices[number % SPLIT_STRIDE % len(self.photo_indices)]
        file = self.photos.file_of(index)
        photo = self._photo_cache.get(
            index, lambda: self.photos.read_photo(index, self._photo_side)
        )
        if self.is_training:
            photo = random_zoom(rng, photo, self.size)

        pasted = self._paste_objects(rng, photo, index)
        canvas = photo.image.copy()
        paste_sprites(rng, canvas, [photo_object.sprite for photo_object in pasted])
        image = np.array(canvas)
        instances = self._make_instances(pasted, photo.objects, image.shape[:2])

        if self.is_training:
            image = jitter_colours(image, COLOUR_JITTER, rng)
            if rng.random() < 0.5:
                image = image[:, ::-1]
                instances = [i.convert(lambda mask: mask[:, ::-1]) for i in instances]

        # Ids run from left to right; what is not visible at all is left out.
        visible = [instance for instance in instances if instance.modal.any()]
        visible.sort(key=_horizontal_position)
        numbered = [replace(instance, id=rank) for rank, instance in enumerate(visible, start=1)]
        facts = tuple(describe_objects(numbered))
        marked_classes = () if file.is_partial else file.classes
        return Scene(np.ascontiguousarray(image), tuple(numbered), facts, marked_classes)

    def write_queries(
        self, scene: Scene, rng: np.random.Generator, first_id: int
    ) -> tuple[Query, ...]:
        """As for all scenes, and some without a target: 1 of 8 in training, with `hard_absent` 1 to
        3; all in `val_absent`."""
        num_absent = 0
        if self.split == ABSENT_SPLIT:
            num_absent = self.queries
        elif self.is_training:
            num_absent = self.queries // NUM_QUERIES_PER_ABSENT

        present = {display_name(instance.category) for instance in scene.instances}
        absent = [name for name in scene.marked_classes if name not in present]
        weights = None
        if self.related is not None:
            num_absent *= int(rng.integers(1, 1 + MAX_ABSENT_RATIO))
            weights = self.related.weights(absent, present)
        absent_queries = write_absent_queries(
            scene.facts,
            absent,
            weights=weights,
            rng=rng,
            count=num_absent,
            split=SPLITS[self.split],
            first_id=first_id,
        )
        if self.split == ABSENT_SPLIT:
            return absent_queries

        min_area = MIN_TARGET_AREA * self.size**2
        small = [i.id for i in scene.instances if masks.area(i.modal) < min_area]
        queries = write_queries(
            scene.facts,
            rng=rng,
            count=self.queries - len(absent_queries),
            split=SPLITS[self.split],
            first_id=first_id + len(absent_queries),
            forbidden=forbidden_targets(scene.instances, small),
        )
        return absent_queries + queries

    def _paste_objects(
        self, rng: np.random.Generator, photo: Photo, index: int
    ) -> list[PhotoObject]:
        """Random objects at positions over photo `index`, the rearmost first."""
        layout = Layout((photo.image.height, photo.image.width), self._rules)
        for photo_object in photo.objects:
            area = masks.area(photo_object.sprite.mask)
            if photo_object.complete and area >= MIN_AREA_TO_HIDE * self.size**2:
                layout.place_on_top(as_placed_item(photo_object))
        num_below = len(layout.placed)

        if rng.random() >= PLAIN_PHOTO_SHARE:
            count = 1 + choose(rng, TRAIN_COUNT_SHARES if self.is_training else COUNT_SHARES)
            # Where nothing in the photo can be hidden, one pasted object can still hide another.
            if num_below == 0:
                count += 1
            for _ in range(count):
                for _ in range(MAX_ATTEMPTS):
                    if self._paste_object(rng, layout, photo, index):
                        break

        return [
            PhotoObject(
                placed.item.category,
                placed.sprite_in_picture(),
                complete=placed.item.occlusion != "free",
                ignored=False,
            )
            for placed in layout.placed[num_below:]
        ]

    def _paste_object(
        self, rng: np.random.Generator, layout: Layout, photo: Photo, index: int
    ) -> bool:
        """Places a cut-out over an object that may be hidden, or beside all if there is none.

        Returns whether it fits.
        """
        target = layout.choose_object_to_hide(rng)
        share = rng.uniform(*self._rules.hidden_range)
        extent = self.size * rng.uniform(0.15, 0.45)
        if target is not None:
            extent = layout.placed[target].sprite.extent * rng.uniform(0.75, 1.3)
            extent *= 0.8 + 0.4 * share

        if self.folder_cutouts and rng.random() < FOLDER_SHARE:
            file = pick(rng, self.folder_cutouts)
            item = Item(file.item.category, {})
            picture = self._folder.picture(file)
            mean_colour = photo.mean_colour  # a drawing has no light of its own to adapt
        else:
            pool = self._pools[self.photos.file_of(index)]
            if not pool.cutouts:
                return False
            cutout = pool.choose(rng, extent / self.size)
            if cutout.photo == index:
                return False
            picture, mean_colour = self._cutout_cache.get(
                cutout, lambda: self.photos.read_cutout(cutout, self._cutout_side)
            )
            natural_extent = cutout.side * self.size
            extent = np.clip(extent, natural_extent / MAX_STRETCH, natural_extent * MAX_STRETCH)
            # What may be incomplete is not hidden on purpose: its amodal mask is unknown.
            item = Item(cutout.category, {}, "any" if cutout.complete else "free")

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

    def _make_instances(
        self, pasted: Sequence[PhotoObject], below: Sequence[PhotoObject], shape: tuple[int, ...]
    ) -> list[Instance]:
        """The objects of the picture: the pasted ones, the front one first, then the photo's."""
        height, width = shape
        covered = np.zeros((height, width), bool)
        instances = []
        for number, photo_object in enumerate((*reversed(pasted), *below)):
            mask = mask_in_picture(photo_object.sprite, (height, width))
            modal = mask & ~covered
            min_visible = max(
                MIN_VISIBLE_AREA * self.size**2, (1 - MAX_OCCLUSION) * masks.area(mask)
            )
            ignore = photo_object.ignored or masks.area(modal) < min_visible
            amodal = mask if photo_object.complete else None
            instances.append(Instance(0, photo_object.category, modal, amodal, {}, ignore))
            if number < len(pasted):  # masks of the photo are visible parts: they hide nothing
                covered |= mask
        return instances


def find_related(photos: Photos) -> RelatedNames:
    """What occurs together in the training photos of the files that mark all of their classes."""
    classes = []
    kinds: dict[str, str] = {}
    for file in photos.files:
        if not file.is_partial:
            classes += [file.classes_at(index) for index in file.photos_of_split("train")]
            kinds |= file.kinds
    return RelatedNames(classes, kinds)


def _horizontal_position(instance: Instance) -> int:
    x0, _, x1, _ = masks.box(instance.modal)
    return x0 + x1


def pixels_of_photo(photo: Photo) -> int:
    """The size of a photo in a cache."""
    return count_pixels(photo.image)


def pixels_of_cutout(cutout: tuple[Image.Image, np.ndarray]) -> int:
    """The size of a picture of a cut-out, with its mean colour, in a cache."""
    return count_pixels(cutout[0])


def nouns_of(classes: Sequence[str]) -> list[frozenset[str]]:
    """The words of every noun that a class may be called by."""
    known_classes = lexicon().classes
    nouns = set(classes)
    for name in classes:
        if name in known_classes:
            nouns.update(known_classes[name].nouns)
    return [frozenset(noun.split()) for noun in nouns]


def is_unambiguous(
    name: str, words: frozenset[str], classes: Sequence[str], nouns: Sequence[frozenset[str]]
) -> bool:
    """Whether an object's name is one of the classes, or no noun of a class could mean it by its
    words."""
    return name in classes or not any(noun <= words for noun in nouns)


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
