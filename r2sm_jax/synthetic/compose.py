"""Photographs with objects of others pasted over them, so that hidden parts are known.

Complete objects (complete_objects.py) have amodal masks and are hidden on purpose (paste.py); of
all others only the modal mask is known. The photos and their masks are read by photos.py.
"""

import warnings
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance
from r2sm_jax.data.prepare import jitter_colours
from r2sm_jax.errors import InputError
from r2sm_jax.query import Query
from r2sm_jax.synthetic.colour_names import name_colour
from r2sm_jax.synthetic.cutouts import CutoutFile, read_folder
from r2sm_jax.synthetic.paste import MAX_OCCLUSION, MIN_CUTOUTS, Paster, is_unambiguous
from r2sm_jax.synthetic.photos import (
    MAX_ZOOM,
    NOTHING_ABSENT,
    PhotoCutout,
    PhotoObject,
    Photos,
    absent_names,
    random_zoom,
    read_photo,
)
from r2sm_jax.synthetic.pictures import paste_sprites
from r2sm_jax.synthetic.procedural import SPLIT_STRIDE, ProceduralSource
from r2sm_jax.synthetic.queries.write import (
    ABSENT_SPLIT,
    SPLITS,
    write_absent_queries,
    write_queries,
)
from r2sm_jax.synthetic.scenes.layout import mask_in_picture
from r2sm_jax.synthetic.scenes.scene import Scene, describe_objects, forbidden_targets

# Areas, in shares of the squared longer side of the picture.
MIN_TARGET_AREA = 0.004  # visible, of an object that a query refers to
MIN_VISIBLE_AREA = 0.0006  # below it an object is ignored, as beyond `MAX_OCCLUSION`

COLOUR_JITTER = 0.3  # largest relative change of brightness, contrast and saturation in training
NUM_QUERIES_PER_ABSENT = 4  # in training, one query of so many has no target
LIKELY_ABSENT_SHARE = 0.6  # of these, what often stands beside what is there
MAX_REPEATS = 4  # a photo comes 1 + objects // 3 times in a pass of training, at most so often


class ComposeSource(ProceduralSource):
    """Composed photographs, rebuilt from (seed, split, index) and the content of files and photos.

    The photo below is number `index` modulo their number. A training split with more photos than
    pictures draws its photos by seed, from the whole file; else photos of many objects come several
    times in a pass. Train, dev and the other splits share neither photos nor cut-outs. In training
    half of the pictures are mirrored, and half show only a part of the photo.
    """

    splits = (*ProceduralSource.splits, ABSENT_SPLIT)
    mirrors_itself = True

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        split: str,
        count: int | None,
        *,
        images: str | PathLike[str] | None = None,
        cutouts: str | PathLike[str] | None = None,
        crowds: Literal["ignore", "objects"] = "ignore",
        mirror: bool = True,
        max_pictures_a_photo: int | None = None,
        **options: int,
    ):
        """`count` pictures, or one for each photo, of the photos of one or more files; of few
        photos at most `max_pictures_a_photo`.

        Their longer side is `size`.

        Photos are in the folder `images` or beside their file. `cutouts` is a folder of more
        objects for training. `crowds` says what `iscrowd` 1 marks, `mirror` whether half of the
        training pictures are mirrored.

        Raises InputError for an unknown split, a file without masks, photos that are missing, and
        training photos without a complete object. Warns of few.
        """
        super().__init__(split, 0, **options)
        self.is_training = split == "train"
        self.mirror = mirror
        self.photos = Photos(paths, images, crowds)
        self.photo_indices = self._choose_photos(count)
        self.photo_order = self.photo_indices
        if self.is_training:
            repeated = [i for i in self.photo_indices for _ in range(self._count_repeats(i))]
            # A part of these would leave photos out.
            if count is None or count >= len(repeated):
                self.photo_order = repeated
        self.count = len(self.photo_order) if count is None else count
        if max_pictures_a_photo is not None:
            self.count = min(self.count, max_pictures_a_photo * len(self.photo_indices))
        self._photo_side = round(MAX_ZOOM * self.size) if self.is_training else self.size

        classes = tuple(name for file in self.photos.files for name in file.classes)
        drawings: list[CutoutFile] = []
        if cutouts is not None and self.is_training:
            names = self.photos.names_of_splits()
            drawings = [
                cutout
                for cutout in read_folder(Path(cutouts), self.size)
                if cutout.photo not in names["dev"] | names["val"]
                and is_unambiguous(cutout.item.category, cutout.words, classes)
            ]
        self.cutouts = self._find_cutouts(has_folder=bool(drawings))
        self.paster = Paster(
            self.photos, self.cutouts, drawings, size=self.size, is_training=self.is_training
        )

    @cached_property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        """The classes of the files, and the names of drawings."""
        names = [name for file in self.photos.files for name in file.classes]
        names += [cutout.item.category for cutout in self.paster.drawings]
        return {"category": tuple(dict.fromkeys(names))}

    def _choose_photos(self, count: int | None) -> list[int]:
        """The photos of the split: in the order of the files, or at random if not all are used."""
        photos = self.photos.photos_of_split(self.split)
        if self.split == ABSENT_SPLIT:
            photos = self.photos.photos_without_a_class(self.split)
            if not photos:
                raise InputError(
                    f"{self.photos.name}: there are no queries for the split {self.split!r}, since "
                    f"{NOTHING_ABSENT}; choose another"
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
        return np.random.default_rng(self.seed).permutation(photos).tolist()

    def _count_repeats(self, photo: int) -> int:
        """Photos of many objects have more to ask about, and have things among their like."""
        return min(1 + len(self.photos.truth_of(photo).instances) // 3, MAX_REPEATS)

    def _find_cutouts(self, has_folder: bool) -> list[PhotoCutout]:
        """What can be laid over photos: in training also objects that may not be complete, of the
        other splits only where there is nothing else.

        Raises InputError where nothing could be hidden, so that nothing would be learned of it.
        """
        cutouts = self.photos.find_cutouts(self.photo_indices)
        complete = [cutout for cutout in cutouts if cutout.is_whole]
        if self.is_training and not complete and not has_folder:
            raise InputError(
                f"{self.photos.name}: the split {self.split!r} has no complete object (not small, "
                f"with a gap to the border and to other masks), of {len(cutouts)} that are not "
                f"small; 1 is needed and {MIN_CUTOUTS} are better: add photos with masks, or give "
                "complete objects as --data.cutouts DIR"
            )

        wanted = MIN_CUTOUTS if self.is_training else 1
        if len(complete) < wanted:
            # The photos of val, val_phrasing, ... are the same: one warning.
            photos = self.split.split("_")[0]
            warnings.warn(
                f"{self.photos.name}: the split {photos!r} has {len(complete)} complete "
                f"objects, and {wanted} or more are better; objects that may be incomplete, "
                f"{len(cutouts) - len(complete)} of them, are laid over its "
                f"{len(self.photo_indices)} photos as well; add photos with masks",
                stacklevel=3,
            )
        return cutouts if self.is_training or not complete else complete

    def fingerprints(self) -> list[str]:
        """Returns that of the photo below each picture.

        Where there are more photos than pictures, those of the other photos follow: they lend
        objects.
        """
        of_photos = [self.photos.fingerprint_of(photo) for photo in self.photo_order]
        number = max(self.count, len(of_photos))
        return [of_photos[index % len(of_photos)] for index in range(number)]

    def make_scene(self, number: int) -> Scene:
        """Raises InputError for a photo that cannot be read (any more)."""
        rng = np.random.default_rng((self.seed, number))
        index = self.photo_order[number % SPLIT_STRIDE % len(self.photo_order)]
        file = self.photos.file_of(index)
        photo = read_photo(self.photos, index, self._photo_side)
        if self.is_training:
            photo = random_zoom(rng, photo, self.size)

        pasted = self.paster.paste(rng, photo, index)
        canvas = photo.image.copy()
        paste_sprites(rng, canvas, [photo_object.sprite for photo_object in pasted])
        image = np.array(canvas)
        instances = self._make_instances(pasted, photo.objects, image)

        if self.is_training:
            image = jitter_colours(image, COLOUR_JITTER, rng)
            if self.mirror and rng.random() < 0.5:
                image = image[:, ::-1]
                instances = [i.map_masks(lambda mask: mask[:, ::-1]) for i in instances]

        # Ids run from left to right; what is not visible at all is left out.
        visible = [instance for instance in instances if instance.modal.any()]
        visible.sort(key=lambda instance: sum(masks.box(instance.modal)[::2]))
        numbered = [replace(instance, id=rank) for rank, instance in enumerate(visible, start=1)]
        facts = tuple(describe_objects(numbered))
        return Scene(np.ascontiguousarray(image), tuple(numbered), facts, file.marked_classes)

    def write_queries(self, scene: Scene, rng: np.random.Generator) -> tuple[Query, ...]:
        """As for all scenes, and some without a target: 1 of 4 in training, all in `val_absent`."""
        num_absent = self.queries // NUM_QUERIES_PER_ABSENT if self.is_training else 0
        if self.split == ABSENT_SPLIT:
            num_absent = self.queries
        present = {instance.category for instance in scene.instances}
        absent = absent_names(scene.marked_classes, present)
        if self.is_training and absent and present:
            # Some names fit no wording, so there are twice as many as queries.
            absent = self._choose_absent(absent, present, 2 * num_absent, rng)
        absent_queries = write_absent_queries(
            scene.facts, absent, rng=rng, count=num_absent, split=SPLITS[self.split]
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
            forbidden=forbidden_targets(scene.instances, small),
            of_photo=True,
        )
        return absent_queries + queries

    def _choose_absent(
        self, absent: Sequence[str], present: Set[str], count: int, rng: np.random.Generator
    ) -> list[str]:
        """Up to `count` absent classes, more often such as stand beside what is there: a model that
        knows the kind of a photo must still look whether the thing is in it."""
        together = self.photos.shares_together
        likely = np.array([max(together.get((name, p), 0.0) for p in present) for name in absent])
        weights = np.full(len(absent), 1 / len(absent))
        if likely.any():
            weights *= 1 - LIKELY_ABSENT_SHARE
            weights += LIKELY_ABSENT_SHARE * likely / likely.sum()
        chosen = rng.choice(len(absent), min(count, len(absent)), replace=False, p=weights)
        return [absent[int(k)] for k in chosen]

    def _make_instances(
        self, pasted: Sequence[PhotoObject], below: Sequence[PhotoObject], image: np.ndarray
    ) -> list[Instance]:
        """The objects of the picture: the pasted ones, the front one first, then the photo's."""
        height, width = image.shape[:2]
        covered = np.zeros((height, width), bool)
        instances = []
        for number, photo_object in enumerate((*reversed(pasted), *below)):
            mask = mask_in_picture(photo_object.sprite, (height, width))
            modal = mask & ~covered
            min_visible = max(
                MIN_VISIBLE_AREA * self.size**2, (1 - MAX_OCCLUSION) * masks.area(mask)
            )
            ignore = photo_object.ignored or masks.area(modal) < min_visible
            amodal = mask if photo_object.is_whole else None
            colour = name_colour(image, modal, photo_object.category)
            attributes = {} if colour is None else {"colour": colour}
            instances.append(Instance(0, photo_object.category, modal, amodal, attributes, ignore))
            if number < len(pasted):  # masks of the photo are visible parts: they hide nothing
                covered |= mask
        return instances
