"""A folder of cut-outs: PNG or WebP files, each a single object on a transparent background.

An `index.json` may describe them: a list of `{"file", "label", "tags", "group", "uses"}`, or an
object from file names to such records or to labels. All fields but the file name may be missing,
others are ignored. With an index only its files are used; without one, file names give the labels.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from r2sm_jax.data.images import decode, find_images, leads_outside
from r2sm_jax.data.validation import is_text
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.synthetic.pictures import ImageCache, count_pixels, crop_to_object, filled_share
from r2sm_jax.synthetic.queries.nouns import clean_name
from r2sm_jax.synthetic.scenes.layout import Item
from r2sm_jax.synthetic.scenes.paint import alpha_mask

MIN_FILLED_SHARE = 0.03  # of the square around an object
INDEX = "index.json"
NAMELESS = "object"
"""The label of a cut-out whose file name has no word."""
MAX_CACHE_BYTES = 64_000_000  # of decoded cut-outs, for each source


@dataclass(frozen=True)
class CutoutFile:
    """One file and what it shows.

    `name` is its path in the folder; `words` are those of its label and tags.
    """

    path: Path
    name: str
    item: Item
    words: frozenset[str]

    def is_confusable_with(self, other: "CutoutFile") -> bool:
        """Whether one label might mean the other object: "cow" and "cow face", "dog" and poodle."""
        label = self.item.category
        other_label = other.item.category
        if label == other_label:
            return False
        return other.words.issuperset(label.split()) or self.words.issuperset(other_label.split())


class CutoutFolder:
    """The usable cut-outs of a folder, by name, and their pictures.

    Attributes:
        cutouts: The cut-outs; files that are none are left out with a warning.
        max_side: Pictures are read with a longer side of at most this.
    """

    def __init__(self, folder: Path, max_side: int):
        """Raises InputError for a folder without any, a damaged image, and a wrong index."""
        self.path = folder
        self.max_side = max_side
        self._cache = ImageCache[Image.Image | None](MAX_CACHE_BYTES, count_pixels)

        all_files = [_describe_file(folder, record) for record in _find_records(folder)]
        all_files.sort(key=lambda cutout: cutout.name)
        self.cutouts = [cutout for cutout in all_files if self._read(cutout) is not None]

        left_out = [cutout.name for cutout in all_files if cutout not in self.cutouts]
        examples = ", ".join(left_out[:3])
        remedy = f"(nearly) fully opaque or transparent ({examples}, ..); remove their backgrounds"
        if not self.cutouts:
            raise InputError(
                f"{folder}: none of its {len(all_files)} images is a cut-out, all are {remedy}"
            )
        for sentence in _describe_unused(folder, all_files):
            warnings.warn(f"{folder}: {sentence}", stacklevel=3)
        if left_out:
            warnings.warn(
                f"{folder}: left out {len(left_out)} of {len(all_files)} images, "
                f"which are {remedy}",
                stacklevel=3,
            )

    def picture(self, cutout: CutoutFile) -> Image.Image:
        """The picture of a cut-out, mode RGBA.

        Raises InputError for one that is unusable by now.
        """
        picture = self._read(cutout)
        if picture is None:
            raise InputError(
                f"{cutout.path}: the image has changed and is no cut-out any more; "
                "start again without it"
            )
        return picture

    def _read(self, cutout: CutoutFile) -> Image.Image | None:
        return self._cache.get(cutout.name, lambda: read_picture(cutout.path, self.max_side))


def _describe_unused(folder: Path, cutouts: Sequence[CutoutFile]) -> Iterator[str]:
    """What of a folder is not used: files that are no cut-outs, or names without a word."""
    used = {cutout.path for cutout in cutouts}
    skipped = []
    for path in sorted(folder.rglob("*")):
        is_text_file = path.suffix.lower() in ("", ".txt", ".md", ".json")
        if path.is_file() and path not in used and not is_text_file and path.name[0] != ".":
            skipped.append(path.relative_to(folder).as_posix())
    if skipped:
        examples = ", ".join(skipped[:3]) + (", .." if len(skipped) > 3 else "")
        where = "listed in index.json" if (folder / INDEX).is_file() else "a PNG or WebP file in it"
        yield f"left out {len(skipped)} files, each of which is not {where} ({examples})"
    if all(cutout.item.category == NAMELESS for cutout in cutouts):
        yield (
            f"no file name has a word, so that every object is called {NAMELESS!r}; give names or "
            "labels in index.json"
        )


def read_picture(path: Path, max_side: int) -> Image.Image | None:
    """The object in a file, cropped, mode RGBA; None for a file that is no cut-out.

    Raises InputError for a file that cannot be read.
    """
    picture = decode(path)
    if not picture.has_transparency_data:
        return None
    picture = picture.convert("RGBA")
    if alpha_mask(picture).all():
        return None
    picture = crop_to_object(picture)
    picture.thumbnail((max_side, max_side))
    return picture if filled_share(picture) >= MIN_FILLED_SHARE else None


def label_of(name: str) -> str:
    """The words of a file name: "Red-Mug_02.png" → "red mug"; "object" where there are none."""
    stem = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", PurePosixPath(name).stem)
    words = [word.rstrip("0123456789").lower() for word in re.findall(r"[^\W_]+", stem)]
    return " ".join(word for word in words if word.isalpha()) or NAMELESS


def _find_records(folder: Path) -> list[dict[str, Any]]:
    index = folder / INDEX
    if index.is_file():
        return read_index(index)
    paths = find_images(folder, (".png", ".webp"), "RGBA cut-outs")
    return [{"file": path.name} for path in paths]


def _describe_file(folder: Path, record: Mapping[str, Any]) -> CutoutFile:
    name = PurePosixPath(record["file"]).as_posix()
    label = _clean(record.get("label") or label_of(name)).replace("’", "'")
    tags = tuple(_clean(tag) for tag in record.get("tags") or ())
    uses = tuple(_clean(use) for use in record.get("uses") or ())
    attributes = {"group": record["group"]} if record.get("group") else {}
    words = frozenset(" ".join((label, *tags)).split())
    return CutoutFile(folder / name, name, Item(label, attributes, uses=uses, ideas=tags), words)


def _clean(text: str) -> str:
    """The text in lower case, with single blanks."""
    return " ".join(text.lower().split())


def read_index(index: Path) -> list[dict[str, Any]]:
    """The records of an index, checked. Raises InputError."""
    records = load_json(index, "a list of cut-outs, or remove it")
    if isinstance(records, dict):
        records = [_record_of_file(name, value) for name, value in records.items()]

    is_list = isinstance(records, list) and len(records) > 0
    if not is_list or not all(isinstance(record, dict) for record in records):
        raise InputError(
            f"{index}: there is no list of cut-outs; "
            'give [{"file": .., "label": ..}, ..] or remove it'
        )
    for number, record in enumerate(records, start=1):
        _check_record(f"{index}: record {number}", record)

    counts = Counter(PurePosixPath(record["file"]) for record in records)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise InputError(f"{index}: {name} is listed {count} times; keep one of its records")
    return records


def _record_of_file(name: str, value: Any) -> dict[str, Any]:
    record = value if isinstance(value, dict) else {"label": value}
    return {**record, "file": name}


def _check_record(where: str, record: Mapping[str, Any]) -> None:
    """Raises InputError for the first field that is wrong."""

    def refuse(field: str, remedy: str) -> None:
        raise InputError(f"{where}: its {field} is {record.get(field)!r}; give {remedy}")

    file, label, group = record.get("file"), record.get("label"), record.get("group")
    if not is_text(file) or leads_outside(file):
        refuse("file", "the path of a file in the folder")
    if label and not (is_text(label) and clean_name(label)):
        refuse("label", "a text with a word in it")
    if group and not is_text(group):
        refuse("group", "a text")
    for field in ("tags", "uses"):
        texts = record.get(field)
        if texts and not (isinstance(texts, list) and all(map(is_text, texts))):
            refuse(field, "a list of texts")
