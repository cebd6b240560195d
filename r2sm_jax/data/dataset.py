"""The records that every data source yields, one `Sample` per image, and the dataset file that
holds them.

Masks have the image's own resolution. For every instance `modal ⊆ amodal`.
"""

import hashlib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from os import PathLike
from os.path import isfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Generic, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.cache import fingerprint
from r2sm_jax.data.images import open_annotated
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError, load_json, parse_json, read_bytes
from r2sm_jax.query import Query

M = TypeVar("M")
N = TypeVar("N")
LISTS = {
    "images": "image",
    "annotations": "annotation",
    "categories": "category",
    "queries": "query",
}
"""The lists of a dataset file, and what one of their records is called."""
MASKS = ("segmentation", "visible_mask")

Record = Mapping[str, Any]
ById = Mapping[str, Mapping[int, Record]]
"""The records of each list by their id."""


@dataclass(frozen=True)
class Instance(Generic[M]):
    """One annotated object of an image. Its masks are arrays `bool [H W]`, or compressed RLEs
    (`Instance[RLE]`).

    `amodal` is None where only the visible mask is known. `attributes` are words that dense
    supervision and statistics may use, such as `{"colour": "red", "pattern": "striped"}`. An
    `ignore` instance marks a region left out of loss and metrics.
    """

    id: int
    category: str
    modal: M
    amodal: M | None
    attributes: Mapping[str, str] = field(default_factory=dict)
    ignore: bool = False

    @property
    def complete(self) -> M:
        """The amodal mask, or the modal one where the complete shape is not known."""
        return self.modal if self.amodal is None else self.amodal

    def convert(self, form: Callable[[M], N]) -> "Instance[N]":
        """The same with masks in another form."""
        amodal = None if self.amodal is None else form(self.amodal)
        return Instance(
            self.id, self.category, form(self.modal), amodal, self.attributes, self.ignore
        )


@dataclass(frozen=True)
class Sample:
    """One image `uint8 [H W 3]` with its instances and its queries."""

    image_id: int
    file_name: str
    image: np.ndarray
    instances: tuple[Instance, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class ImageTruth:
    """What is annotated about one image, as RLEs and without the pixels: what scoring needs."""

    image_id: int
    size: tuple[int, int]
    """Height and width in pixels."""
    instances: tuple[Instance[Any], ...]
    queries: tuple[Query, ...]


def truth_of_sample(sample: Sample) -> ImageTruth:
    """The annotations of a sample whose masks are arrays."""
    height, width = sample.image.shape[:2]
    instances = tuple(instance.convert(masks.encode) for instance in sample.instances)
    return ImageTruth(sample.image_id, (height, width), instances, sample.queries)


@runtime_checkable
class Source(Protocol):
    """One split of a data set: samples by index.

    Attributes:
        vocabulary: For each attribute (category, colour, ...) the words that an instance can have.
        sha256: Hash of the file that the samples come from; empty where there is no such file.
        has_images: Whether pictures can be shown. A dataset file can be scored without its images.
        is_procedural: Whether samples are made on request, as many as are asked for.
    """

    @property
    def vocabulary(self) -> dict[str, tuple[str, ...]]: ...

    @property
    def sha256(self) -> str: ...

    @property
    def has_images(self) -> bool: ...

    @property
    def is_procedural(self) -> bool: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of a sample, without its image where that is quicker."""
        ...

    def truth_at(self, index: int) -> ImageTruth:
        """The annotations of a sample, without its image where that is possible."""
        ...

    def subset(self, indices: Iterable[int]) -> "Source":
        """The same source with just these samples, in this order."""
        ...

    def fingerprint(self) -> str | None:
        """A hash that changes with all that the samples depend on; None where that is not known."""
        ...


@dataclass(frozen=True)
class SourceSubset:
    """Some samples of another source, in the order of `indices`."""

    source: Source
    indices: tuple[int, ...]

    @property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        return self.source.vocabulary

    @property
    def sha256(self) -> str:
        return self.source.sha256

    @property
    def has_images(self) -> bool:
        return self.source.has_images

    @property
    def is_procedural(self) -> bool:
        return self.source.is_procedural

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[self.indices[index]]

    def queries_at(self, index: int) -> tuple[Query, ...]:
        return self.source.queries_at(self.indices[index])

    def truth_at(self, index: int) -> ImageTruth:
        return self.source.truth_at(self.indices[index])

    def subset(self, indices: Iterable[int]) -> "SourceSubset":
        return SourceSubset(self.source, tuple(self.indices[index] for index in indices))

    def fingerprint(self) -> str | None:
        fingerprint = self.source.fingerprint()
        return None if fingerprint is None else f"{fingerprint} {self.indices}"


class Problem(NamedTuple):
    """One thing that is wrong with a dataset file.

    `records` is the list that the record is in, "" for the file itself, and `index` its place
    there, -1 for the list or the file. `where` names the record for the user, such as "annotation
    7".
    """

    records: str
    index: int
    where: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.what}; {self.remedy}"
            if self.where
            else f"{self.what}; {self.remedy}"
        )


def is_id(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number (True and False are not) of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a string that is not blank. Half a character, as JSON's "\\ud800", is not
    text."""
    return (
        isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)
    )


def parse_flag(value: Any) -> bool | None:
    """Yes or no in the spellings of annotation tools: true, 1, "1", "true"; None: neither."""
    if value is None:
        return False
    spelling = str(value).strip().lower()
    if spelling in ("1", "1.0", "true", "yes"):
        return True
    if spelling in ("0", "0.0", "false", "no", ""):
        return False
    return None


def is_ignored(annotation: Mapping[str, Any]) -> bool:
    """Whether an annotation is a region that loss, queries and metrics leave out: its `ignore` or
    its `iscrowd` says so."""
    return bool(parse_flag(annotation.get("ignore")) or parse_flag(annotation.get("iscrowd")))


def leads_outside(name: str) -> bool:
    """Whether a file name, on any system, points out of the folder that it is meant to lie in."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    outside = posix.is_absolute() or ".." in posix.parts or ".." in windows.parts
    return bool(outside or windows.drive or windows.root or "\0" in name)


def read_records(path: Path) -> dict[str, Any]:
    """The content of a dataset file, checked. Raises InputError as `check_records`, and where there
    is no such file."""
    records = load_json(path, "a dataset file")
    check_records(path, records)
    return records


def check_records(path: Path, records: Any) -> None:
    """Checks keys, types, ids and mask sizes of a whole dataset file. Decodes no mask and opens no
    image.

    Raises InputError for the first problem, with `path`, the record, the field and the remedy.
    """
    for problem in find_problems(records):
        raise InputError(f"{path}: {problem}")


def find_problems(records: Any) -> Iterator[Problem]:
    """All problems with keys, types, ids and mask sizes, record by record."""
    if not isinstance(records, dict):
        yield Problem(
            "",
            -1,
            "",
            f"this is JSON, but not one object with {', '.join(LISTS)}",
            "give a dataset file",
        )
        return
    missing = [key for key in LISTS if not isinstance(records.get(key), list)]
    for key in missing:
        yield Problem("", -1, "", f"the list {key!r} is missing", "add it, [] where there are none")
    if missing:
        return
    by_id: dict[str, dict[int, Record]] = {key: {} for key in LISTS}
    for key in LISTS:
        for index, record in enumerate(records[key]):
            if not isinstance(record, dict) or not is_id(record.get("id")):
                what = "it is not an object with a whole number as id"
                yield Problem(key, index, f"{key}[{index}]", what, "give it one")
            elif by_id[key].setdefault(record["id"], record) is not record:
                yield Problem(
                    key,
                    index,
                    f"{key} id {record['id']}",
                    "it occurs twice",
                    "give every record its own id",
                )
    for key, name in LISTS.items():
        for index, record in enumerate(records[key]):
            if isinstance(record, dict) and is_id(record.get("id")):
                for field, (valid, wanted) in _check_fields(key, record, by_id).items():
                    if not valid:
                        what = (
                            f"is {reprlib.repr(record[field])}" if field in record else "is missing"
                        )
                        yield Problem(
                            key,
                            index,
                            f"{name} {record['id']}",
                            f"{field} {what}",
                            f"give {wanted}",
                        )


def _check_fields(key: str, record: Record, by_id: ById) -> dict[str, tuple[bool, str]]:
    """Whether each field of a record of the list `key` is valid, and what it must hold, in words
    for the user."""

    def refers(field: str, to: str) -> bool:
        return is_id(record.get(field)) and record[field] in by_id[to]

    if key == "images":
        name, height, width = (record.get(field) for field in ("file_name", "height", "width"))
        fits = (
            is_id(width) and width > 0 and (not is_id(height) or height * width <= masks.MAX_PIXELS)
        )
        return {
            "file_name": (
                is_text(name) and not leads_outside(name),
                "a path inside the image folder",
            ),
            "height": (is_id(height) and height > 0, "the image's height in pixels"),
            "width": (fits, f"the image's width in pixels, of at most {masks.MAX_PIXELS} in all"),
        }
    if key == "categories":
        return {"name": (is_text(record.get("name")), "a name")}
    of_image = refers("image_id", "images")
    fields = {"image_id": (of_image, "the id of an image in this file")}
    if key == "annotations":
        image = by_id["images"][record["image_id"]] if of_image else None
        whole, visible, words = (record.get(field) for field in (*MASKS, "attributes"))
        stated = any(mask is not None for mask in (whole, visible))
        strings = isinstance(words or {}, dict) and all(
            isinstance(word, str) for word in (words or {}).values()
        )
        return fields | {
            "category_id": (
                refers("category_id", "categories"),
                "the id of a category in this file",
            ),
            "segmentation": (
                stated and _is_mask(whole, image),
                "an RLE of the image's size or a list of polygons, or null where there is a "
                "visible_mask",
            ),
            "visible_mask": (
                _is_mask(visible, image),
                "an RLE of the image's size, a list of polygons, or null",
            ),
            "attributes": (strings, "an object of strings, or leave it out"),
            "ignore": (parse_flag(record.get("ignore")) is not None, "true or false"),
            "iscrowd": (parse_flag(record.get("iscrowd")) is not None, "0 or 1"),
        }
    ids, text, mask_type = record.get("instance_ids"), record.get("text"), record.get("mask_type")
    targets = (
        [by_id["annotations"].get(i, {}) if is_id(i) else {} for i in ids]
        if isinstance(ids, list)
        else [{}]
    )
    same = all(
        "id" in target and target.get("image_id") == record.get("image_id") for target in targets
    )
    return fields | {
        "text": (is_text(text), "a sentence"),
        "mask_type": (mask_type in ("modal", "amodal"), '"modal" or "amodal"'),
        "instance_ids": (
            same,
            "the ids of annotations of the same image, [] where nothing is meant",
        ),
        "kind": (isinstance(record.get("kind") or {}, dict), "an object, or leave it out"),
    }


def _is_mask(mask: Any, image: Record | None) -> bool:
    if not isinstance(mask, dict):
        return mask is None or (isinstance(mask, list) and bool(mask))
    try:
        size = masks.rle_size(mask)
    except ValueError:
        return False
    return image is None or size == (image.get("height"), image.get("width"))


class Dataset:
    """A dataset file, read: `len(dataset)` samples, `dataset[i]` opens image i and decodes its
    masks.

    `path` and `sha256` name the file that it came from, `images` are its records of images.
    `vocabulary` holds the values of every attribute, and the category names in the order of their
    ids. `records` must be checked (`check_records`). Images are looked for as in `image_folders`.
    """

    is_procedural = False

    def __init__(
        self,
        path: Path,
        records: Mapping[str, Any],
        images_dir: str | PathLike[str] | None = None,
        sha256: str = "",
    ) -> None:
        self.path, self.sha256, self._image_dirs = path, sha256, image_folders(path, images_dir)
        self._names = category_names(records)
        words: dict[str, set[str]] = {}
        for annotation in records["annotations"]:
            for name, word in (annotation.get("attributes") or {}).items():
                words.setdefault(name, set()).add(word)
        sorted_words = {name: tuple(sorted(words[name])) for name in sorted(words)}
        self.vocabulary: dict[str, tuple[str, ...]] = {
            "category": tuple(self._names.values())
        } | sorted_words
        self.images: Sequence[Mapping[str, Any]] = records["images"]
        self._annotations = group_by_image(records, "annotations")
        self._queries = group_by_image(records, "queries")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        """The sample at `index`. Raises InputError for a missing or damaged image or mask."""
        record, image = self.images[index], self.image_at(index)
        instances = tuple(instance.convert(masks.expand) for instance in self.rles_at(index))
        return Sample(record["id"], record["file_name"], image, instances, self.queries_at(index))

    def image_at(self, index: int) -> np.ndarray:
        """Image `index`, RGB. Raises InputError for one that is missing, damaged, or not of the
        size in the file."""
        return open_annotated(self.image_path(index), self.size_at(index), str(self.path))

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of sample `index`; no image is opened."""
        found = []
        for q in self._queries[self.images[index]["id"]]:
            kind = dict(q.get("kind") or {}) | (
                {} if q.get("answer") is None else {"answer": q["answer"]}
            )
            found.append(Query(q["id"], q["text"], q["mask_type"], tuple(q["instance_ids"]), kind))
        return tuple(found)

    def rles_at(self, index: int) -> tuple[Instance, ...]:
        """The instances of image `index` with RLEs; no image is opened. Raises InputError for a
        damaged mask."""
        image = self.images[index]
        return tuple(
            read_instance(self.path, image, a, self._names) for a in self._annotations[image["id"]]
        )

    def truth_at(self, index: int) -> ImageTruth:
        """The annotations of image `index`; no image is opened. Raises InputError for a bad
        mask."""
        return ImageTruth(
            image_id=self.images[index]["id"],
            size=self.size_at(index),
            instances=self.rles_at(index),
            queries=self.queries_at(index),
        )

    def size_at(self, index: int) -> tuple[int, int]:
        """Height and width of image `index`, as the file states them."""
        record = self.images[index]
        return record["height"], record["width"]

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @property
    def image_ids(self) -> tuple[int, ...]:
        return tuple(image["id"] for image in self.images)

    def fingerprint(self) -> str:
        """Changes with all that the samples depend on."""
        return fingerprint(
            map(self.image_path, range(len(self))), self.path.resolve(), self.sha256, self.image_ids
        )

    def image_path(self, index: int) -> Path:
        """The file of image `index`. Raises InputError where it is in none of the folders."""
        name = self.images[index]["file_name"]
        if (path := find_image(self._image_dirs, name)) is None:
            places = " or ".join(map(str, self._image_dirs))
            remedy = "give its folder with --images DIR, in training with --data.images DIR"
            raise InputError(f"{self.path}: image {name} is not in {places}; {remedy}")
        return path

    @property
    def has_images(self) -> bool:
        """Whether the file of any image is there."""
        return any(find_image(self._image_dirs, image["file_name"]) for image in self.images)

    def subset(self, indices: Iterable[int]) -> "Dataset":
        """The same dataset with just these images, in this order."""
        part = copy(self)
        part.images = [self.images[index] for index in indices]
        return part


def group_by_image(records: Mapping[str, Any], key: str) -> dict[int, list[dict[str, Any]]]:
    """The "annotations" or "queries" of every image of a dataset file, by image id."""
    found: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in records["images"]}
    for record in records[key]:
        found[record["image_id"]].append(record)
    return found


def category_names(records: Mapping[str, Any]) -> dict[int, str]:
    """The category names of a dataset file by category id, in the order of the ids."""
    return {c["id"]: c["name"] for c in sorted(records["categories"], key=lambda c: c["id"])}


def read_instance(
    path: Path, image: Mapping[str, Any], annotation: Mapping[str, Any], names: Mapping[int, str]
) -> Instance:
    """The instance, with RLEs, that a checked annotation of an image describes; `path` is the file
    that they are from.

    Where `visible_mask` reaches outside `segmentation`, as annotators' fringes do, the amodal mask
    is the union of both. Raises InputError for a mask that cannot be read.
    """
    size, found = (image["height"], image["width"]), dict[str, RLE]()
    for key in MASKS:
        if annotation.get(key) is not None:
            try:
                found[key] = masks.compressed(annotation[key], *size)
            except ValueError as error:
                what = f"annotation {annotation['id']}: its {key} cannot be read ({error})"
                raise InputError(f"{path}: {what}; write the mask again") from error
    modal = found[MASKS[-1]] if MASKS[-1] in found else found[MASKS[0]]
    amodal = masks.merge(list(found.values()), *size) if MASKS[0] in found else None
    attributes, ignore = annotation.get("attributes") or {}, is_ignored(annotation)
    return Instance(
        annotation["id"], names[annotation["category_id"]], modal, amodal, attributes, ignore
    )


def read_json(
    path: str | PathLike[str],
    images_dir: str | PathLike[str] | None = None,
    *,
    need_images: bool = True,
) -> Dataset:
    """Reads one dataset file (the format is in the documentation: COCO with `visible_mask` and
    `queries`).

    Images are looked for in `images_dir`, or else beside the file and in `images/` beside it. They
    are opened, and masks decoded, only when a sample is asked for. Raises InputError, naming file,
    record and remedy, for anything that is not right; for a missing first image only if images are
    needed.
    """
    content = read_bytes(path := Path(path))
    check_records(path, records := parse_json(content, str(path), "a dataset file"))
    dataset = Dataset(path, records, images_dir, hashlib.sha256(content).hexdigest())
    if need_images and len(dataset):
        dataset.image_path(
            0
        )  # finds a wrong folder now, not only when training reaches the first image
    return dataset


def image_folders(path: Path, images_dir: str | PathLike[str] | None) -> tuple[Path, ...]:
    """The folders in which to look for the images of a dataset file. Raises InputError for one that
    does not exist."""
    if images_dir is None:
        return path.parent, path.parent / "images"
    folder = Path(images_dir)
    if not folder.is_dir():
        raise InputError(
            f"{images_dir}: there is no such image folder; give the one with the images of {path}"
        )
    return (folder,)


def find_image(folders: Iterable[Path], file_name: str) -> Path | None:
    """The first file of that name in the folders; None where there is none, or a file cannot have
    that name."""
    return next((folder / file_name for folder in folders if isfile(folder / file_name)), None)
