"""The records that every data source yields, one `Sample` per image, and the dataset file that holds them.

Masks have the image's own resolution. For every instance `modal ⊆ amodal`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.records import MASKS, read_records
from r2sm_jax.errors import InputError
from r2sm_jax.query import Query

M = TypeVar("M")
N = TypeVar("N")
Key = TypeVar("Key", int, str)


@dataclass(frozen=True)
class Instance(Generic[M]):
    """One annotated object of an image. Its masks are arrays `bool [H W]`, or compressed RLEs (`Instance[RLE]`).

    `amodal` is None where only the visible mask is known. `attributes` are words that dense supervision
    and statistics may use, such as `{"colour": "red", "pattern": "striped"}`. An `ignore` instance marks a
    region left out of loss and metrics.
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
        return Instance(self.id, self.category, form(self.modal), amodal, self.attributes, self.ignore)


@dataclass(frozen=True)
class Sample:
    """One image `uint8 [H W 3]` with its instances and its queries."""

    image_id: int
    file_name: str
    image: np.ndarray
    instances: tuple[Instance, ...]
    queries: tuple[Query, ...]


@runtime_checkable
class Source(Protocol):
    """A data set: samples by index, and the names that its instances can bear, by attribute."""

    vocabulary: dict[str, tuple[str, ...]]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of a sample, without its image where that is quicker."""
        ...


class Dataset:
    """A dataset file, read: `len(dataset)` samples, `dataset[i]` opens image i and decodes its masks.

    `path` and `sha256` name the file that it came from, `images` are its records of images. `vocabulary` holds the
    values of every attribute, and the category names in the order of their ids. `records` must be checked
    (data/records.py).
    """

    def __init__(self, path: Path, sha256: str, records: Mapping[str, Any], image_dirs: tuple[Path, ...]) -> None:
        self.path, self.sha256 = path, sha256
        self._names = category_names(records)
        words: dict[str, set[str]] = {}
        for annotation in records["annotations"]:
            for name, word in (annotation.get("attributes") or {}).items():
                words.setdefault(name, set()).add(word)
        self.vocabulary: dict[str, tuple[str, ...]] = {"category": tuple(self._names.values())}
        self.vocabulary |= {name: tuple(sorted(words[name])) for name in sorted(words)}
        self.images: Sequence[Mapping[str, Any]] = records["images"]
        self._image_dirs = image_dirs
        self._annotations = group_by_image(records, "annotations")
        self._queries = group_by_image(records, "queries")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        """The sample at `index`. Raises InputError for a missing or damaged image or mask."""
        record, path, (height, width) = self.images[index], self.image_path(index), self.size_at(index)
        image = open_image(path)
        if image.shape[:2] != (height, width):
            raise InputError(
                f"{path}: the image is {image.shape[0]} x {image.shape[1]} but {self.path} says {height} x {width}; "
                "give the image that was annotated"
            )
        instances = tuple(instance.convert(masks.expand) for instance in self.rles_at(index))
        return Sample(record["id"], record["file_name"], image, instances, self.queries_at(index))

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of sample `index`; no image is opened."""
        return tuple(
            Query(q["id"], q["text"], q["mask_type"], tuple(q["instance_ids"]), _kind(q))
            for q in self._queries[self.images[index]["id"]]
        )

    def rles_at(self, index: int) -> tuple[Instance, ...]:
        """The instances of image `index` with RLEs; no image is opened. Raises InputError for a damaged mask."""
        image = self.images[index]
        return tuple(read_instance(self.path, image, a, self._names) for a in self._annotations[image["id"]])

    def size_at(self, index: int) -> tuple[int, int]:
        """Height and width of image `index`, as the file states them."""
        record = self.images[index]
        return record["height"], record["width"]

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @property
    def image_ids(self) -> tuple[int, ...]:
        return tuple(image["id"] for image in self.images)

    def image_path(self, index: int) -> Path:
        """The file of image `index`. Raises InputError where it is in none of the folders."""
        name = self.images[index]["file_name"]
        if (path := find_image(self._image_dirs, name)) is None:
            places = " or ".join(map(str, self._image_dirs))
            remedy = "give its folder with --images DIR, in training with --data.images DIR"
            raise InputError(f"{self.path}: image {name} is not in {places}; {remedy}")
        return path

    def subset(self, indices: Sequence[int]) -> "Dataset":
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


def _kind(query: Mapping[str, Any]) -> dict[str, Any]:
    kind = dict(query.get("kind") or {})
    return kind if query.get("answer") is None else kind | {"answer": query["answer"]}


def read_instance(
    path: Path, image: Mapping[str, Any], annotation: Mapping[str, Any], names: Mapping[int, str]
) -> Instance:
    """The instance, with RLEs, that a checked annotation of an image describes; `path` is the file that they are from.

    Where `visible_mask` reaches outside `segmentation`, as annotators' fringes do, the amodal mask is the union of
    both. Raises InputError for a mask that cannot be read.
    """
    size, found = (image["height"], image["width"]), dict[str, RLE]()
    for key in MASKS:
        if annotation.get(key) is not None:
            try:
                found[key] = masks.compressed(annotation[key], *size)
            except ValueError as error:
                raise InputError(
                    f"{path}: annotation {annotation['id']}: its {key} cannot be read ({error}); write the mask again"
                ) from error
    modal = found[MASKS[-1]] if MASKS[-1] in found else found[MASKS[0]]
    amodal = masks.merge(list(found.values()), *size) if MASKS[0] in found else None
    attributes, ignore = annotation.get("attributes") or {}, bool(annotation.get("ignore", False))
    return Instance(annotation["id"], names[annotation["category_id"]], modal, amodal, attributes, ignore)


def read_json(path: str | PathLike[str], images_dir: str | PathLike[str] | None = None) -> Dataset:
    """Reads one dataset file (the format is in the documentation: COCO with `visible_mask` and `queries`).

    Images are looked for in `images_dir`, or else beside the file and in `images/` beside it. They are
    opened, and masks decoded, only when a sample is asked for. Raises InputError, naming file, record and remedy,
    for anything that is not right.
    """
    path = Path(path)
    records = read_records(path)
    dataset = Dataset(path, hashlib.sha256(path.read_bytes()).hexdigest(), records, image_folders(path, images_dir))
    if len(dataset):
        dataset.image_path(0)  # finds a wrong folder now, not only when training reaches the first image
    return dataset


def image_folders(path: Path, images_dir: str | PathLike[str] | None) -> tuple[Path, ...]:
    """The folders in which to look for the images of a dataset file. Raises InputError for one that does not exist."""
    if images_dir is None:
        return path.parent, path.parent / "images"
    folder = Path(images_dir)
    if not folder.is_dir():
        raise InputError(f"{images_dir}: there is no such image folder; give the one with the images of {path}")
    return (folder,)


def find_image(folders: Iterable[Path], file_name: str) -> Path | None:
    """The first file of that name in the folders; None where there is none."""
    return next((folder / file_name for folder in folders if (folder / file_name).is_file()), None)


def load_json_split(path: str | PathLike[str], split: str, images_dir: str | PathLike[str] | None = None) -> Dataset:
    """The `split` of a folder (its `<split>.json`) or of a single file (see `images_of_split`).

    Raises InputError for a split that does not exist.
    """
    path = Path(path)
    if path.is_dir():
        if (path / f"{split}.json").is_file():
            return read_json(path / f"{split}.json", images_dir)
        there = ", ".join(sorted(file.stem for file in path.glob("*.json"))) or "no JSON file at all"
        raise InputError(f"{path}: there is no {split}.json; the folder has {there}; choose one of these splits")
    dataset = read_json(path, images_dir)
    chosen = images_of_split(path, dataset.image_ids, split)
    return dataset.subset([i for i, image_id in enumerate(dataset.image_ids) if image_id in chosen])


def images_of_split(path: Path, image_ids: Sequence[int], split: str) -> set[int]:
    """The ids of the images of a single file's split: "train", "val" or "all".

    "val" holds out about a tenth of the images, chosen by a hash of the image id alone, so that adding images moves
    none from one side to the other; with fewer than ten images it is exactly one. No image is in both "train" and
    "val", except that a file with a single image gives that image for both. Raises InputError for any other split.
    """
    if split not in ("train", "val", "all"):
        raise InputError(
            f"{path}: a single file has the splits train, val and all, not {split!r}; choose one of these, "
            f"or give a folder with a {split}.json"
        )
    if split == "all" or len(image_ids) < 2:
        return set(image_ids)
    held_out = hold_out(image_ids, 0.1 if len(image_ids) >= 10 else 0.0)
    return held_out if split == "val" else set(image_ids) - held_out


def hold_out(names: Iterable[Key], share: float, key: Callable[[Key], str] = str) -> set[Key]:
    """About this share of some names or numbers, at least one, never all of two or more.

    A hash of `key` alone decides, so that adding others moves hardly any to the other side.
    """
    places = {name: _hash_share(key(name)) for name in names}
    count = sum(place < share for place in places.values())
    return set(sorted(places, key=places.__getitem__)[: max(1, min(count, len(places) - 1))])


def _hash_share(text: str) -> float:
    """A fixed number in [0, 1) for a text; those of many texts are evenly spread."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
