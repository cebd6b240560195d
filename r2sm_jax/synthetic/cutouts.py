"""Scenes composed of cut-outs: RGBA images of single objects, laid over photos or drawn backdrops.

A folder of cut-outs holds PNG or WebP files and, if wanted, an `index.json`: a list of `{"file", "label", "tags",
"group", "uses"}`, or an object from file names to such records or to labels. All but the file name may be missing, and
other fields are ignored. Tags and uses ("to light a room") make queries that do not name the object, where every object
of a picture has some. With an index, only the files that it names are used; without one, file names give the labels.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from r2sm_jax.data.dataset import is_text, leads_outside
from r2sm_jax.data.images import decode, find_images, open_image
from r2sm_jax.data.splits import divide
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.synthetic.queries.nouns import clean_name
from r2sm_jax.synthetic.random_choice import pick
from r2sm_jax.synthetic.scenes.layout import Item, Layout, Placed, Rules
from r2sm_jax.synthetic.scenes.paint import Sprite, cast_shadow, draw_backdrop, opaque
from r2sm_jax.synthetic.scenes.source import (
    COUNT_SHARES,
    FEWEST,
    ProceduralSource,
    Scene,
    annotate,
    choose,
    choose_copies,
)

LEAST, MOST = 0.05, 0.8  # hidden share of an object that is not free
SMALLEST, LARGEST = 0.26, 0.6  # longer side of an object, in sides of the picture
TILT = 25.0  # degrees
FAINT = 16  # alpha from which a pixel belongs to the picture of an object
SLIGHTEST = 0.03  # least share of the square around an object that its mask fills
HELD_OUT = {
    "val": 0.15,
    "dev": 0.25,
}  # shares of the files up to which a hash of the name puts them there
CACHE_BYTES = 64_000_000  # memory of a process for decoded cut-outs, and again for photos
LAYOUTS = 50  # attempts at one scene


@dataclass(frozen=True)
class Cutout:
    """One file and what it shows. `name` is its path in the folder; `words` are those of its label and tags."""

    path: Path
    name: str
    item: Item
    words: frozenset[str]

    def confusable(self, other: "Cutout") -> bool:
        """Whether one label might also mean the other object: "cow" beside "cow face", "dog" beside a poodle."""
        mine, theirs = self.item.category, other.item.category
        return mine != theirs and (
            other.words.issuperset(mine.split()) or self.words.issuperset(theirs.split())
        )


class CutoutSource(ProceduralSource):
    """Composed scenes: any sample is rebuilt from (seed, split, index) and the content of the folder.

    Train, dev and the other splits show neither the same objects nor the same photos, if there are three or more.
    `vocabulary` has the labels of this split's objects, and their groups if the index has some.
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
        """`count` scenes, over photos of the folder `backgrounds` if given. `options` are those of `ProceduralSource`.

        Raises InputError for an unknown split, and for a folder, an index or an image that cannot be used.
        """
        super().__init__(split, count, **options)
        self.folder = Path(folder)
        self._side = max(64, round(1.25 * LARGEST * self.size))
        cutouts = read_cutouts(self.folder, self._side)
        if len(cutouts) < 2:
            remedy = "add others, since training and validation share none"
            raise InputError(f"{folder}: {cutouts[0].name} is the only cut-out; {remedy}")
        part = split if split in ("train", "dev") else "val"
        chosen = divide([cutout.name for cutout in cutouts], HELD_OUT, key=_stem)[part]
        self.cutouts = tuple(cutout for cutout in cutouts if cutout.name in chosen)
        self.vocabulary = {"category": tuple(sorted({c.item.category for c in self.cutouts}))}
        if groups := {c.item.attributes["group"] for c in self.cutouts if c.item.attributes}:
            self.vocabulary["group"] = tuple(sorted(groups))
        self.photos: list[Path] = []
        if backgrounds is not None:
            photos = find_images(
                Path(backgrounds), (".jpg", ".jpeg", ".png", ".webp"), "background photos"
            )
            chosen = divide([photo.name for photo in photos], HELD_OUT, key=_stem)[part]
            self.photos = [photo for photo in photos if photo.name in chosen]
        self.files = (
            self.folder / "index.json",
            *(cutout.path for cutout in self.cutouts),
            *self.photos,
        )

    def scene(self, number: int) -> Scene:
        """Raises InputError for a photo or cut-out that cannot be read (any more)."""
        rng = np.random.default_rng((self.seed, number))
        for _ in range(LAYOUTS):
            placed = arrange_cutouts(rng, self._choose(rng), self.size)
            if len(placed) >= FEWEST:
                break
        else:
            raise InputError(
                f"{self.folder}: {LAYOUTS} attempts gave no picture with {FEWEST} objects of the split {self.split!r} "
                f"at {self.size} pixels; add cut-outs or use larger pictures"
            )
        canvas = self._background(rng)
        sprites = [p.in_place() for p in placed]
        blend(rng, canvas, sprites)
        return annotate(canvas, placed, sprites)

    def _choose(self, rng: np.random.Generator) -> list[tuple[Item, Image.Image]]:
        """Objects for a scene, the rearmost first; no label could mean the object of another label."""
        count = FEWEST + choose(rng, COUNT_SHARES)
        chosen: list[Cutout] = []
        for k in rng.choice(
            len(self.cutouts), min(len(self.cutouts), 4 * count), replace=False
        ).tolist():
            if len(chosen) < count and not any(
                self.cutouts[k].confusable(other) for other in chosen
            ):
                chosen.append(self.cutouts[k])
        alike = [c for c in self.cutouts if c.item.category == chosen[0].item.category]
        chosen += [pick(rng, alike) for _ in range(count - len(chosen))]
        copies = choose_copies(rng, count, none=0.55)
        for k in copies[1:]:
            chosen[k] = pick(rng, alike)
        items = [cutout.item for cutout in chosen]
        if copies and rng.random() < 0.75:
            for k, wanted in zip(copies, ("hidden", "free"), strict=False):
                items[k] = replace(items[k], wanted=wanted)
        return list(zip(items, map(self._picture, chosen), strict=True))

    def _picture(self, cutout: Cutout) -> Image.Image:
        picture = remember(read_picture, self._side)(cutout.path)
        if picture is None:
            raise InputError(
                f"{cutout.path}: the image has changed and is no cut-out any more; start again without it"
            )
        return picture

    def _background(self, rng: np.random.Generator) -> Image.Image:
        """A drawn backdrop, or a random square of a photo; mode RGB."""
        if not self.photos:
            return draw_backdrop(rng, self.size)
        photo = remember(read_photo, 2 * self.size)(pick(rng, self.photos))
        side = min(photo.size) * rng.uniform(0.5, 1)
        x, y = rng.uniform(0, 1, 2) * (photo.width - side, photo.height - side)
        square = photo.resize(
            (self.size, self.size), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side)
        )
        return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else square


def _stem(name: str) -> str:
    return PurePosixPath(name).with_suffix("").as_posix()


def arrange_cutouts(
    rng: np.random.Generator, items: Sequence[tuple[Item, Image.Image]], size: int
) -> list[Placed]:
    """Places items with their pictures (mode RGBA), the rearmost first; leaves out those that find no place."""
    rules = Rules(
        hidden=(LEAST + 0.01, MOST),
        tolerance=0.04,
        directions=6,
        whole=True,
        smallest_area=0.004 * size**2,
        smallest_share=1 - MOST,
        least_hidden=LEAST,
    )
    layout = Layout((size, size), rules)
    medium = size * (rng.uniform(0.44, 0.52) - 0.019 * max(0, len(items) - 4))
    for item, picture in items:
        layout.add(
            rng,
            item,
            medium,
            lambda extent, picture=picture: make_sprite(rng, picture, extent, size),
        )
    return layout.placed


def make_sprite(rng: np.random.Generator, picture: Image.Image, extent: float, size: int) -> Sprite:
    """The picture turned a little, perhaps mirrored, and scaled to about `extent`; slender ones become longer."""
    longer = extent * float(np.clip((0.45 / max(fill(picture), 1e-3)) ** 0.25, 0.85, 1.35))
    longer = float(np.clip(longer, SMALLEST * size, LARGEST * size))
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture = crop(picture.rotate(rng.uniform(-TILT, TILT), Image.Resampling.BICUBIC, expand=True))
    picture = rescale(picture, longer / max(picture.size))
    return Sprite(picture, opaque(picture), -(picture.width // 2), -(picture.height // 2), extent)


def rescale(picture: Image.Image, scale: float, reducing_gap: float | None = None) -> Image.Image:
    """A picture at another size, at least 1 pixel wide and high."""
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=reducing_gap)


def fill(picture: Image.Image) -> float:
    """The share of the square around a picture that its mask covers."""
    return np.count_nonzero(opaque(picture)) / max(picture.size) ** 2


def crop(picture: Image.Image) -> Image.Image:
    """The part of a picture (mode RGBA) that is not (nearly) transparent; all of it where everything is."""
    box = picture.getchannel("A").point([0] * FAINT + [255] * (256 - FAINT)).getbbox()
    return picture.crop(box) if box else picture


def blend(rng: np.random.Generator, canvas: Image.Image, sprites: Sequence[Sprite]) -> None:
    """Blends the sprites, the rearmost first, into the canvas (mode RGB), with soft shadows or without."""
    opacity = rng.uniform(0.15, 0.5) if rng.random() < 0.7 else 0.0
    depth = [int(opacity * k) for k in range(256)]
    blur = 0.018 * canvas.width
    shift, pad = (round(rng.uniform(-1, 1) * blur), round(blur)), int(3 * blur) + 1
    for sprite in sprites:
        if opacity:
            cast_shadow(canvas, sprite, blur=blur, pad=pad, shift=shift, depth=depth)
        canvas.paste(sprite.image, (sprite.x, sprite.y), sprite.image)


def read_cutouts(folder: Path, side: int) -> list[Cutout]:
    """The usable cut-outs of a folder, by name; the others are left out with a warning.

    Raises InputError for a folder without any, a damaged image, and an index that is wrong.
    """
    index = folder / "index.json"
    if index.is_file():
        records = read_index(index)
    else:
        records = [
            {"file": path.name} for path in find_images(folder, (".png", ".webp"), "RGBA cut-outs")
        ]
    found = sorted((_cutout(folder, record) for record in records), key=lambda cutout: cutout.name)
    cutouts = [cutout for cutout in found if remember(read_picture, side)(cutout.path) is not None]
    left_out = [cutout.name for cutout in found if cutout not in cutouts]
    remedy = f"(nearly) fully opaque or transparent ({', '.join(left_out[:3])}, ..); remove their backgrounds"
    if not cutouts:
        raise InputError(
            f"{folder}: none of its {len(found)} images is a cut-out, all are {remedy}"
        )
    if left_out:
        warnings.warn(
            f"{folder}: left out {len(left_out)} of {len(found)} images, which are {remedy}",
            stacklevel=3,
        )
    return cutouts


def label_of(name: str) -> str:
    """The words of a file name: "Red-Mug_02.png" → "red mug"; "object" where there are none."""
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", PurePosixPath(name).stem))
    return (
        " ".join(word for word in (w.rstrip("0123456789").lower() for w in words) if word.isalpha())
        or "object"
    )


def _cutout(folder: Path, record: Mapping[str, Any]) -> Cutout:
    name = PurePosixPath(record["file"]).as_posix()
    label = " ".join((record.get("label") or label_of(name)).replace("’", "'").lower().split())
    tags, uses = (
        tuple(" ".join(text.lower().split()) for text in record.get(key) or ())
        for key in ("tags", "uses")
    )
    attributes = {"group": record["group"]} if record.get("group") else {}
    words = frozenset(" ".join((label, *tags)).split())
    return Cutout(folder / name, name, Item(label, attributes, uses=uses, ideas=tags), words)


def read_index(index: Path) -> list[dict[str, Any]]:
    """The records of an index, checked. Raises InputError."""
    content = load_json(index, "a list of cut-outs, or remove it")
    if isinstance(content, dict):
        content = [
            (r if isinstance(r, dict) else {"label": r}) | {"file": name}
            for name, r in content.items()
        ]
    if (
        not isinstance(content, list)
        or not content
        or not all(isinstance(record, dict) for record in content)
    ):
        raise InputError(
            f'{index}: there is no list of cut-outs; give [{{"file": .., "label": ..}}, ..] or remove it'
        )
    for position, record in enumerate(content, start=1):
        for field, (wanted, valid) in FIELDS.items():
            if not valid(record.get(field)):
                raise InputError(
                    f"{index}: record {position}: its {field} is {record.get(field)!r}; give {wanted}"
                )
    ((name, count),) = Counter(PurePosixPath(record["file"]) for record in content).most_common(1)
    if count > 1:
        raise InputError(f"{index}: {name} is listed {count} times; keep one of its records")
    return content


def _are_texts(value: Any) -> bool:
    return not value or (isinstance(value, list) and all(map(is_text, value)))


FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "file": (
        "the path of a file in the folder",
        lambda name: is_text(name) and not leads_outside(name),
    ),
    "label": (
        "a text with a word in it",
        lambda label: not label or (is_text(label) and clean_name(label)),
    ),
    "group": ("a text", lambda group: not group or is_text(group)),
    "tags": ("a list of texts", _are_texts),
    "uses": ("a list of texts", _are_texts),
}


@lru_cache(maxsize=8)
def remember(read: Callable[..., Any], side: int, kept: int = CACHE_BYTES) -> Callable[..., Any]:
    """`read(.., side=side)` of an image of about that side, with a memory of `kept` bytes. The latest few are kept."""
    return lru_cache(maxsize=max(8, kept // (6 * side**2)))(partial(read, side=side))


def read_picture(path: Path, side: int) -> Image.Image | None:
    """The object in a file, cropped, its longer side at most `side`, mode RGBA; None for a file that is no cut-out.

    Raises InputError for a file that cannot be read.
    """
    picture = decode(path)
    if not picture.has_transparency_data:
        return None
    picture = picture.convert("RGBA")
    if opaque(picture).all():
        return None
    picture = crop(picture)
    picture.thumbnail((side, side))
    return picture if fill(picture) >= SLIGHTEST else None


def read_photo(path: Path, side: int) -> Image.Image:
    """A photo, its shorter side at most `side`, mode RGB. Raises InputError for one that cannot be read."""
    photo = Image.fromarray(open_image(path))
    return rescale(photo, min(1.0, side / min(photo.size)), reducing_gap=3.0)
