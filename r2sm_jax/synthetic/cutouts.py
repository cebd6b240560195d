"""Cut-outs, and scenes composed of them over photos or drawn backdrops.

A folder of cut-outs has PNG or WebP files, each a single object on a transparent background. An
`index.json` may describe them: a list of `{"file", "label", "tags", "group", "uses", "photo"}`, of
which all but the file may be missing. With an index only its files are used; without one, file
names give the labels. Tags and uses ("to light a room") give queries that do not name the object,
where every object of a picture has some. Cut-outs of one photo are of one split.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
from PIL import Image

from r2sm_jax.data.images import (
    check_files,
    decode,
    find_images,
    fingerprint,
    image_size,
    open_image,
)
from r2sm_jax.data.splits import divide, original_name
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.pictures import (
    crop_to_object,
    filled_share,
    paste_sprites,
    random_flip,
    rescale,
)
from r2sm_jax.synthetic.procedural import ProceduralSource
from r2sm_jax.synthetic.random_choice import choose, pick
from r2sm_jax.synthetic.scenes.backdrop import draw_backdrop
from r2sm_jax.synthetic.scenes.layout import Item, Layout, LayoutRules, PlacedItem
from r2sm_jax.synthetic.scenes.paint import Sprite, alpha_mask, centred_sprite
from r2sm_jax.synthetic.scenes.scene import Scene, make_scene
from r2sm_jax.synthetic.scenes.source import (
    COUNT_SHARES,
    HIDDEN_AND_FREE_SHARE,
    MIN_OBJECTS,
    choose_copies,
)

INDEX = "index.json"
NAMELESS = "object"
"""The label of a cut-out whose file name has no word."""
MIN_FILLED_SHARE = 0.03  # of the square around an object
NUM_PICTURES_IN_MEMORY = 256
NUM_PHOTOS_IN_MEMORY = 64

MIN_OCCLUSION, MAX_OCCLUSION = 0.05, 0.8  # hidden share of an object that is hidden at all
MIN_EXTENT, MAX_EXTENT = 0.26, 0.6  # longer side of an object, in sides of the picture
MAX_TILT = 25.0  # degrees
NO_COPIES_SHARE = 0.55  # of the scenes in which all objects are of different classes
HELD_OUT = {"val": 0.15, "dev": 0.25}  # upper ends of the hashes of file names in these splits
MAX_LAYOUTS = 50  # attempts at one scene
PHOTO_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class CutoutRecord(msgspec.Struct):
    """One entry of an index.json."""

    file: str
    label: str | None = None
    tags: list[str] = []
    group: str | None = None
    uses: list[str] = []
    photo: str | None = None


@dataclass(frozen=True)
class CutoutFile:
    """One file and what it shows.

    `photo` is that which it was cut out of, or the file itself.
    """

    path: Path
    photo: str
    item: Item

    @property
    def words(self) -> frozenset[str]:
        """The words of its label and tags."""
        return frozenset(" ".join((self.item.category, *self.item.ideas)).split())

    def is_confusable_with(self, other: "CutoutFile") -> bool:
        """Whether one label might mean the other object: "cow" and "cow face", "dog" and poodle."""
        label, other_label = self.item.category, other.item.category
        if label == other_label:
            return False
        return other.words.issuperset(label.split()) or self.words.issuperset(other_label.split())


def read_folder(folder: Path, max_side: int) -> list[CutoutFile]:
    """Reads which cut-outs a folder has, by name. Images that are none are left out with a warning.

    Args:
        max_side: the side up to which `read_picture` is going to read them.

    Raises InputError for a folder without any, a damaged image, and a wrong index.
    """
    records = sorted(read_records(folder), key=lambda record: record.file)
    cutouts = [_describe(folder, record) for record in records]
    kept = [cutout for cutout in cutouts if read_picture(cutout.path, max_side)]
    if not kept:
        raise InputError(
            f"{folder}: it has no cut-out, all images are (nearly) fully opaque or transparent"
        )
    if len(kept) < len(cutouts):
        warnings.warn(
            f"{folder}: left out {len(cutouts) - len(kept)} of {len(cutouts)} images, which are "
            "(nearly) fully opaque or transparent",
            stacklevel=3,
        )
    return kept


@lru_cache(maxsize=NUM_PICTURES_IN_MEMORY)
def read_picture(path: Path, max_side: int) -> Image.Image | None:
    """Reads the object of a file, cropped, mode RGBA; None for a file that is no cut-out.

    Raises InputError for a file that cannot be read.
    """
    picture = decode(path).convert("RGBA")
    if alpha_mask(picture).all():
        return None
    picture = crop_to_object(picture)
    picture.thumbnail((max_side, max_side))
    return picture if filled_share(picture) >= MIN_FILLED_SHARE else None


def read_records(folder: Path) -> list[CutoutRecord]:
    """Reads the index of a folder, or else its file names. Raises InputError for a wrong index."""
    index = folder / INDEX
    if not index.is_file():
        paths = find_images(folder, (".png", ".webp"), "RGBA cut-outs")
        return [CutoutRecord(path.name) for path in paths]
    try:
        records = msgspec.json.decode(index.read_bytes(), type=list[CutoutRecord])
    except msgspec.DecodeError as error:
        raise InputError(
            f'{index}: {error}; give a list of cut-outs, [{{"file": .., "label": ..}}, ..]'
        ) from error
    names = [record.file for record in records]
    if not names or len(set(names)) < len(names):
        raise InputError(f"{index}: list each cut-out once, and at least one")
    return records


def _describe(folder: Path, record: CutoutRecord) -> CutoutFile:
    label = _clean(record.label or label_of(record.file)).replace("’", "'")
    attributes = {"group": record.group} if record.group else {}
    uses, tags = tuple(map(_clean, record.uses)), tuple(map(_clean, record.tags))
    item = Item(label, attributes, uses=uses, ideas=tags)
    photo = original_name(record.photo or record.file)
    return CutoutFile(folder / record.file, photo, item)


def _clean(text: str) -> str:
    """The text in lower case, with single blanks."""
    return " ".join(text.lower().split())


def label_of(name: str) -> str:
    """The words of a file name: "Red-Mug_02.png" → "red mug"; "object" where there are none."""
    stem = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", PurePosixPath(name).stem)
    words = [word.rstrip("0123456789").lower() for word in re.findall(r"[^\W_]+", stem)]
    return " ".join(word for word in words if word.isalpha()) or NAMELESS


class CutoutSource(ProceduralSource):
    """Scenes of cut-outs, rebuilt from (seed, split, index) and the content of the folder.

    Train, dev and the other splits share neither objects nor photos, if there are three or more.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        split: str,
        count: int,
        *,
        backgrounds: str | PathLike[str] | None = None,
        **options: int,
    ):
        """`count` scenes, over photos of the folder `backgrounds` if given.

        `options` are those of `ProceduralSource`.

        Raises InputError for an unknown split, and for a folder, an index or an image that cannot
        be used.
        """
        super().__init__(split, count, **options)
        part = split if split in ("train", "dev") else "val"

        self._max_side = max(64, round(1.25 * MAX_EXTENT * self.size))
        cutouts = read_folder(Path(folder), self._max_side)
        origins = {cutout.photo for cutout in cutouts}
        if len(origins) < 2:
            raise InputError(
                f"{folder}: all cut-outs are of {origins.pop()}; add others, since training and "
                "validation share none"
            )
        origins_of_split = divide(origins, HELD_OUT, key=_stem)[part]
        self.cutouts = [cutout for cutout in cutouts if cutout.photo in origins_of_split]

        self.photos: list[Path] = []
        if backgrounds is not None:
            paths = find_images(Path(backgrounds), PHOTO_SUFFIXES, "background photos")
            sizes = {path.name: image_size(path) for path in paths}
            check_files([Path(backgrounds)], sizes, Path(backgrounds))
            names_of_split = divide([path.name for path in paths], HELD_OUT, key=_stem)[part]
            self.photos = [path for path in paths if path.name in names_of_split]

    @cached_property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        """The labels of this split's objects, and their groups if the index has some."""
        words = {"category": tuple(sorted({c.item.category for c in self.cutouts}))}
        groups = {c.item.attributes["group"] for c in self.cutouts if c.item.attributes}
        return words | {"group": tuple(sorted(groups))} if groups else words

    def make_scene(self, number: int) -> Scene:
        """Raises InputError for a photo or cut-out that cannot be read (any more)."""
        rng = np.random.default_rng((self.seed, number))
        placed = self._place_cutouts(rng)
        canvas = self._make_background(rng)
        sprites = [p.sprite_in_picture() for p in placed]
        paste_sprites(rng, canvas, sprites)
        return make_scene(canvas, placed, sprites)

    def fingerprints(self) -> list[str]:
        """Returns those of the photos behind the cut-outs, after the made pictures."""
        return [""] * self.count + [fingerprint(path) for path in self.photos]

    def _place_cutouts(self, rng: np.random.Generator) -> list[PlacedItem]:
        for _ in range(MAX_LAYOUTS):
            placed = place_cutouts(rng, self._choose_items(rng), self.size)
            if len(placed) >= MIN_OBJECTS:
                return placed
        raise InputError(
            f"{self.cutouts[0].path.parent}: {MAX_LAYOUTS} attempts gave no picture with "
            f"{MIN_OBJECTS} objects of the split {self.split!r} at {self.size} pixels; add "
            "cut-outs or use larger pictures"
        )

    def _choose_items(self, rng: np.random.Generator) -> list[tuple[Item, Image.Image]]:
        """Objects with their pictures, the rearmost first. No label could mean another's object."""
        count = MIN_OBJECTS + choose(rng, COUNT_SHARES)
        num_candidates = min(len(self.cutouts), 4 * count)
        candidates = rng.choice(len(self.cutouts), num_candidates, replace=False)
        cutouts: list[CutoutFile] = []
        for k in candidates.tolist():
            cutout = self.cutouts[k]
            if len(cutouts) < count and not any(map(cutout.is_confusable_with, cutouts)):
                cutouts.append(cutout)

        # Where too few fit together, and for copies: more of the class of the first.
        same_class = [c for c in self.cutouts if c.item.category == cutouts[0].item.category]
        while len(cutouts) < count:
            cutouts.append(pick(rng, same_class))
        copies = choose_copies(rng, count, NO_COPIES_SHARE)
        for k in copies[1:]:
            cutouts[k] = pick(rng, same_class)

        items = [cutout.item for cutout in cutouts]
        if copies and rng.random() < HIDDEN_AND_FREE_SHARE:
            items[copies[0]] = replace(items[copies[0]], occlusion="hidden")
            items[copies[1]] = replace(items[copies[1]], occlusion="free")
        pictures = [read_picture(cutout.path, self._max_side) for cutout in cutouts]
        # Files that are no cut-outs were left out when the folder was opened.
        return [(i, picture) for i, picture in zip(items, pictures, strict=True) if picture]

    def _make_background(self, rng: np.random.Generator) -> Image.Image:
        """A drawn backdrop, or a random square of a photo; mode RGB."""
        if not self.photos:
            return draw_backdrop(rng, self.size)

        path = pick(rng, self.photos)
        photo = read_photo(path, 2 * self.size)
        side = min(photo.size) * rng.uniform(0.5, 1)
        x, y = rng.uniform(0, 1, 2) * (photo.width - side, photo.height - side)
        square = photo.resize(
            (self.size, self.size), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side)
        )
        return random_flip(rng, square)


def _stem(name: str) -> str:
    return PurePosixPath(name).with_suffix("").as_posix()


def place_cutouts(
    rng: np.random.Generator, items: Sequence[tuple[Item, Image.Image]], size: int
) -> list[PlacedItem]:
    """Places items with their RGBA pictures, the rearmost first, as far as they fit."""
    rules = LayoutRules(
        hidden_range=(MIN_OCCLUSION + 0.01, MAX_OCCLUSION),
        tolerance=0.04,
        num_directions=6,
        keep_inside=True,
        min_visible_pixels=0.004 * size**2,
        min_visible_share=1 - MAX_OCCLUSION,
        min_hidden_share=MIN_OCCLUSION,
    )
    layout = Layout((size, size), rules)
    extent = size * (rng.uniform(0.44, 0.52) - 0.019 * max(0, len(items) - 4))
    for item, picture in items:
        layout.try_to_place(
            rng,
            item,
            extent,
            lambda extent, picture=picture: make_sprite(rng, picture, extent, size),
        )
    return layout.placed


def make_sprite(rng: np.random.Generator, picture: Image.Image, extent: float, size: int) -> Sprite:
    """The picture turned, perhaps mirrored, and scaled to about `extent`; slender ones longer."""
    slenderness = (0.45 / max(filled_share(picture), 1e-3)) ** 0.25
    side = extent * float(np.clip(slenderness, 0.85, 1.35))
    side = float(np.clip(side, MIN_EXTENT * size, MAX_EXTENT * size))

    picture = random_flip(rng, picture)
    degrees = rng.uniform(-MAX_TILT, MAX_TILT)
    picture = crop_to_object(picture.rotate(degrees, Image.Resampling.BICUBIC, expand=True))
    picture = rescale(picture, side / max(picture.size))
    return centred_sprite(picture, extent)


@lru_cache(maxsize=NUM_PHOTOS_IN_MEMORY)
def read_photo(path: Path, max_side: int) -> Image.Image:
    """Reads a photo, its shorter side at most `max_side`, mode RGB.

    Raises InputError for one that cannot be read.
    """
    photo = Image.fromarray(open_image(path))
    return rescale(photo, min(1.0, max_side / min(photo.size)), reducing_gap=3.0)
