"""Scenes composed from a folder of cut-outs: RGBA images of single objects, laid over photos or drawn backdrops.

The folder holds PNG or WebP files and, if it likes, an `index.json`: a list of `{"file", "label", "tags",
"group", "uses"}` or an object from file names to such records or to plain labels. All but the file name may be
missing; other fields are not read. Tags and uses ("to light a room") make queries that do not name the object, where
every object of a picture has some. Without an index, labels are the words of the file names. Where there is an
index, only the files that it names are used.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from r2sm_jax.data.images import find_images, image_size, open_image
from r2sm_jax.data.records import bad_record, leads_outside
from r2sm_jax.data.samples import Sample
from r2sm_jax.errors import InputError
from r2sm_jax.queries.nouns import clean_name
from r2sm_jax.queries.write import QUERY_STRIDE, SPLIT_STRIDE, SPLITS, write_queries
from r2sm_jax.query import Query
from r2sm_jax.scenes.backdrop import Backdrop
from r2sm_jax.scenes.collage import LARGEST, Item, annotate, arrange, crop, fill, opaque, paint
from r2sm_jax.scenes.shapes import pick

HELD_OUT = 0.15  # share of the files that are for validation
SLIGHTEST = 0.03  # share of the square around an object that its mask has to fill
CACHE_BYTES = 64_000_000  # for decoded cut-outs in each process, and as much again for photos
FEWEST = 3
COUNT_SHARES = np.cumsum((0.12, 0.22, 0.26, 0.19, 0.13, 0.08))  # of 3, 4, .. 8 objects
COPIES_SHARE = 0.45  # scenes that are meant to show one class two or three times
LAYOUTS = 50  # attempts at one scene


@dataclass(frozen=True)
class Cutout:
    """One file and what it shows.

    `name` is the path inside the folder and `changed` the file's time stamp in nanoseconds. `label` is lower
    case; `words` are those of the label and of the tags: all that the object might be called. `tags` and `uses` are as
    the index has them, in lower case.
    """

    path: Path
    name: str
    changed: int
    label: str
    words: frozenset[str]
    group: str | None
    tags: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    def confusable(self, other: "Cutout") -> bool:
        """Whether one label might also mean the other object: "cow" beside "cow face", "dog" beside a poodle."""
        mine, theirs = set(self.label.split()), set(other.label.split())
        return self.label != other.label and (mine <= other.words or theirs <= self.words)


class CutoutSource:
    """Composed scenes: any sample is rebuilt from (seed, split, index) and the folder's content.

    The splits other than `train` show objects that `train` never does; so it is for photos, where there are
    two or more. `vocabulary` has the labels of this split's objects, and their groups where the index tells.
    Decoded images are kept at a reduced resolution, in about 2 x `CACHE_BYTES` of memory a process.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        split: str,
        count: int,
        *,
        seed: int = 0,
        size: int = 96,
        queries: int = 8,
        backgrounds: str | PathLike[str] | None = None,
    ):
        """Reads the folder and decodes each of its cut-outs once. `backgrounds` is a folder of photos.

        Raises:
            InputError: unknown split, or a folder, an index or an image that cannot be used.
        """
        if split not in SPLITS:
            raise InputError(f"--split {split!r}: cut-outs have the splits {', '.join(SPLITS)}")
        self.split, self.count, self.seed, self.size, self.queries = split, count, seed, size, queries
        self.folder = Path(folder)
        self._side = max(64, round(1.25 * LARGEST * size))
        cutouts = read_cutouts(self.folder, self._side)
        if len(cutouts) < 2:
            raise InputError(
                f"{folder}: {cutouts[0].name} is the only cut-out; add others, since training and validation share none"
            )
        held_out = hold_out([cutout.name for cutout in cutouts])
        self.cutouts = tuple(c for c in cutouts if (c.name in held_out) == (split != "train"))
        self.vocabulary: dict[str, tuple[str, ...]] = {"category": tuple(sorted({c.label for c in self.cutouts}))}
        if groups := {cutout.group for cutout in self.cutouts if cutout.group}:
            self.vocabulary["group"] = tuple(sorted(groups))
        self._alike: dict[str, list[Cutout]] = {}
        for cutout in self.cutouts:
            self._alike.setdefault(cutout.label, []).append(cutout)
        self.photos: tuple[Path, ...] = ()
        if backgrounds is not None:
            photos = find_images(Path(backgrounds), (".jpg", ".jpeg", ".png", ".webp"), "background photos")
            held_out = hold_out([photo.name for photo in photos])
            self.photos = tuple(p for p in photos if len(photos) == 1 or (p.name in held_out) == (split != "train"))

    def __len__(self) -> int:
        return self.count

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of scene `index`."""
        return self[index].queries

    def __getitem__(self, index: int) -> Sample:
        """Scene `index`. Raises InputError for a photo or cut-out that cannot be read (any more)."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        number = list(SPLITS).index(self.split) * SPLIT_STRIDE + index
        rng = np.random.default_rng((self.seed, number))
        for _ in range(LAYOUTS):
            placed = arrange(rng, self._choose(rng), self.size)
            if len(placed) >= FEWEST:
                break
        else:
            raise InputError(
                f"{self.folder}: {LAYOUTS} attempts gave no picture with {FEWEST} objects of the split {self.split!r} "
                f"at {self.size} pixels; add cut-outs or use larger pictures"
            )
        canvas = self._background(rng)
        paint(rng, canvas, placed)
        objects = annotate(placed, self.size)
        queries = write_queries(
            [thing for _, thing in objects],
            rng=np.random.default_rng((self.seed, number, 1)),
            count=self.queries,
            split=SPLITS[self.split],
            first_id=QUERY_STRIDE * number,
        )
        instances = tuple(instance for instance, _ in objects)
        return Sample(number, f"{self.split}_{index:06d}.png", np.array(canvas), instances, queries)

    def _choose(self, rng: np.random.Generator) -> list[Item]:
        """What is to be in a scene, the back first; of two labels none may mean the other's object."""
        count = FEWEST + int(np.searchsorted(COUNT_SHARES[:-1], rng.random(), "right"))
        chosen: list[Cutout] = []
        for k in rng.choice(len(self.cutouts), min(len(self.cutouts), 4 * count), replace=False).tolist():
            if len(chosen) < count and not any(self.cutouts[k].confusable(other) for other in chosen):
                chosen.append(self.cutouts[k])
        alike = self._alike[chosen[0].label]
        chosen += [pick(rng, alike) for _ in range(count - len(chosen))]
        roles = ["any"] * count
        if rng.random() < COPIES_SHARE:
            copies = 2 if count < 4 or rng.random() < 0.65 else 3
            others = sorted((1 + rng.permutation(count - 1)[: copies - 1]).tolist())
            for k in others:
                chosen[k] = pick(rng, alike)
            if rng.random() < 0.75:
                roles[0], roles[others[0]] = "hide", "free"
        return [self._item(cutout, role) for cutout, role in zip(chosen, roles, strict=True)]

    def _item(self, cutout: Cutout, role: str) -> Item:
        picture = _pictures(self._side)(cutout.path, cutout.changed)
        if picture is None:
            raise InputError(f"{cutout.path}: the image has changed and is no cut-out any more; start again without it")
        group = {"group": cutout.group} if cutout.group else {}
        return Item(cutout.label, group, picture, role, uses=cutout.uses, ideas=cutout.tags)

    def _background(self, rng: np.random.Generator) -> Image.Image:
        """A drawn backdrop, or a random square of a photo; mode RGB."""
        if not self.photos:
            return Backdrop.sample(rng).paint(self.size)
        photo = _photos(2 * self.size)(pick(rng, self.photos))
        side = min(photo.size) * rng.uniform(0.5, 1)
        x, y = rng.uniform(0, 1, 2) * (photo.width - side, photo.height - side)
        square = photo.resize((self.size, self.size), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side))
        return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else square


def hold_out(names: Sequence[str]) -> set[str]:
    """Which of some files are for validation: about `HELD_OUT`, at least one, never all of two or more.

    A hash of the name without its ending decides, so that adding files moves hardly any to the other side.
    """

    def place(name: str) -> float:
        stem = PurePosixPath(name).with_suffix("").as_posix()
        return int.from_bytes(hashlib.sha256(stem.encode()).digest()[:6]) / 2**48

    ordered = sorted(names, key=place)
    count = sum(place(name) < HELD_OUT for name in names)
    return set(ordered[: max(1, min(count, len(ordered) - 1))])


# ------------------------------------------------------------------------------------ reading the folder


def read_cutouts(folder: Path, side: int) -> list[Cutout]:
    """The usable cut-outs of a folder, by name; the others are left out with a warning.

    Raises InputError for a folder without any, a damaged image, and an index that is wrong.
    """
    index = folder / "index.json"
    if index.is_file():
        records = _read_index(index)
    else:
        records = [(path, {}) for path in find_images(folder, (".png", ".webp"), "RGBA cut-outs")]
    cutouts = [_cutout(folder, path, record) for path, record in records]
    usable = [c for c in cutouts if _is_cutout(c.path, c.changed, side)]
    left_out = sorted({c.name for c in cutouts} - {c.name for c in usable})
    if not usable:
        raise InputError(
            f"{folder}: none of its {len(cutouts)} images is a cut-out, all are fully opaque or fully transparent "
            f"({left_out[0]}, ..); remove their backgrounds and save them with an alpha channel"
        )
    if left_out:
        warnings.warn(
            f"{folder}: left out {len(left_out)} of {len(cutouts)} images, which are (nearly) fully opaque or "
            f"transparent ({', '.join(left_out[:3])}{', ..' if len(left_out) > 3 else ''}); remove their backgrounds",
            stacklevel=3,
        )
    return sorted(usable, key=lambda cutout: cutout.name)


def label_of(name: str) -> str:
    """The words of a file name: "Red-Mug_02.png" → "red mug"; "object" where there are none."""
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", PurePosixPath(name).stem))
    return " ".join(word for word in (w.rstrip("0123456789").lower() for w in words) if word.isalpha()) or "object"


def _cutout(folder: Path, path: Path, record: Mapping[str, Any]) -> Cutout:
    label = " ".join((record.get("label") or label_of(path.name)).replace("’", "'").lower().split())
    tags, uses = (tuple(" ".join(text.lower().split()) for text in record.get(key) or ()) for key in ("tags", "uses"))
    words = frozenset(word for phrase in (label, *tags) for word in phrase.split())
    name = path.relative_to(folder).as_posix()
    return Cutout(path, name, path.stat().st_mtime_ns, label, words, record.get("group"), tags, uses)


def _read_index(index: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """The files that an index names, and their records, checked."""
    try:
        content = json.loads(index.read_bytes())
    except OSError as error:
        raise InputError(f"{index}: cannot read the index ({error.strerror}); check its rights") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{index}: this is not JSON ({error}); correct it or remove it") from error
    if isinstance(content, dict):
        content = [_with_file(name, record) for name, record in content.items()]
    if not isinstance(content, list) or not content:
        raise InputError(f'{index}: there is no list of cut-outs; give [{{"file": .., "label": ..}}, ..] or remove it')
    found: dict[Path, Mapping[str, Any]] = {}
    for position, record in enumerate(content, start=1):
        if problem := _problem(index.parent, record):
            raise bad_record(index, f"record {position}", problem, "correct the record or remove it")
        path = index.parent / PurePosixPath(record["file"])
        if path in found:
            raise bad_record(index, f"record {position}", f"{record['file']} is listed before", "remove one of the two")
        found[path] = record
    return list(found.items())


def _with_file(name: str, record: Any) -> Any:
    if isinstance(record, str):
        return {"file": name, "label": record}
    return record | {"file": name} if isinstance(record, dict) else record


def _problem(folder: Path, record: Any) -> str:
    """What is wrong with a record of an index; empty where nothing is."""
    if not isinstance(record, dict) or not isinstance(record.get("file"), str):
        return "it is not an object that names a 'file'"
    name = record["file"]
    for key in ("label", "group"):
        if not isinstance(record.get(key) or "", str):
            return f"the {key} of {name} is not text"
    if record.get("label") and not clean_name(record["label"]):
        return f"the label of {name} has no word in it"
    for key in ("tags", "uses"):
        texts = record.get(key) or []
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            return f"the {key} of {name} are not a list of texts"
    if leads_outside(name):
        return f"the file name {name!r} leaves the folder"
    return "" if (folder / name).is_file() else f"the file {name!r} is not in the folder"


# ------------------------------------------------------------------------------------- decoded and kept


@cache
def _is_cutout(path: Path, changed: int, side: int) -> bool:
    """Whether a file can be used, found out once for all splits."""
    return _pictures(side)(path, changed) is not None


@cache
def _pictures(side: int) -> Callable[[Path, int], Image.Image | None]:
    """`read_picture` with a memory of about `CACHE_BYTES`."""
    return lru_cache(maxsize=max(16, CACHE_BYTES // (4 * side**2)))(partial(read_picture, side=side))


@cache
def _photos(shorter: int) -> Callable[[Path], Image.Image]:
    """`read_photo` with a memory of about `CACHE_BYTES`."""
    return lru_cache(maxsize=max(4, CACHE_BYTES // (6 * shorter**2)))(partial(read_photo, shorter=shorter))


def read_picture(path: Path, changed: int, side: int) -> Image.Image | None:
    """The object in a file, cropped, its longer side at most `side`, mode RGBA; None for what is no cut-out.

    `changed` only tells versions of the file apart. Raises InputError for a file that cannot be read.
    """
    image_size(path)
    try:
        with Image.open(path) as image:
            image.seek(0)
            image.load()
            if not image.has_transparency_data:
                return None
            picture = ImageOps.exif_transpose(image).convert("RGBA")
    except Exception as error:  # Pillow's decoders raise nearly every built-in exception on damaged data
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: the image is damaged or cut short ({reason}); export it again") from error
    if opaque(picture).all():
        return None
    picture = crop(picture)
    picture.thumbnail((side, side))
    return picture if fill(picture) >= SLIGHTEST else None


def read_photo(path: Path, shorter: int) -> Image.Image:
    """A photo, its shorter side at most `shorter`, mode RGB. Raises InputError for one that cannot be read."""
    photo = Image.fromarray(open_image(path))
    scale = shorter / min(photo.size)
    if scale >= 1:
        return photo
    width, height = (max(1, round(side * scale)) for side in photo.size)
    return photo.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
