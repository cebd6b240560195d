"""Samples, which every data source yields, and the dataset file that holds them.

A `Sample` is an image with its instances and queries. Masks have the image's own resolution. For
every instance `modal ⊆ amodal`.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from r2sm_jax.data import contradictions, masks
from r2sm_jax.data.contradictions import NUM_COMPARED_ON_READING, compare_records
from r2sm_jax.data.images import (
    check_files,
    find_image,
    fingerprint,
    image_folders,
    locate_image,
    open_annotated,
)
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.validation import (
    COMPLETED_BY,
    MASK_FIELDS,
    Annotation,
    File,
    ImageRecord,
    QueryRecord,
    parse,
)
from r2sm_jax.errors import InputError, atomic_write, read_bytes
from r2sm_jax.query import Query

NO_NAME = "object"
"""The class of objects without one, which no query names."""
NUM_READ = 64
"""So many samples tell how long the sentences of all are, and whether the data are the same as
before."""
M = TypeVar("M")
N = TypeVar("N")


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
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of its annotation, which `write` keeps, such as COCOA's `isStuff`. Under
    "attributes" are those that are no words."""

    @property
    def complete(self) -> M:
        """The amodal mask, or the modal one where the complete shape is not known."""
        return self.modal if self.amodal is None else self.amodal

    def map_masks(self, change: Callable[[M], N]) -> "Instance[N]":
        """Applies a function to both masks, such as one that makes arrays of RLEs.

        A complete mask that is the visible one itself is so afterwards, too.
        """
        modal = change(self.modal)
        amodal = modal
        if self.amodal is None:
            amodal = None
        elif self.amodal is not self.modal:
            amodal = change(self.amodal)
        return Instance(
            self.id, self.category, modal, amodal, self.attributes, self.ignore, self.fields
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
    """The annotations of one image as RLEs, without its pixels. Scoring needs no more."""

    image_id: int
    file_name: str
    size: tuple[int, int]
    """Height and width in pixels."""
    instances: tuple[Instance[Any], ...]
    queries: tuple[Query, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the image, which `write` keeps, such as `license`."""


def truth_of_sample(sample: Sample) -> ImageTruth:
    """The annotations of a sample whose masks are arrays."""
    height, width = sample.image.shape[:2]
    instances = tuple(instance.map_masks(masks.encode) for instance in sample.instances)
    return ImageTruth(sample.image_id, sample.file_name, (height, width), instances, sample.queries)


class Source(ABC):
    """One split of a data set: samples by index.

    Attributes:
        sha256: Hash of the file that the samples come from; empty where there is no such file.
        is_procedural: Whether samples are made on request, as many as are asked for.
        mirrors_itself: Whether training samples are mirrored before their queries are written.
    """

    sha256: str = ""
    is_procedural: bool = False
    mirrors_itself: bool = False

    @property
    @abstractmethod
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        """For each attribute (category, colour, ...) the words that an instance can have."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @property
    def has_images(self) -> bool:
        """Whether pictures can be shown. A dataset file can be scored without its images."""
        return True

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of a sample, without its image where that is quicker."""
        return self[index].queries

    def truth_at(self, index: int) -> ImageTruth:
        """The annotations of a sample, without its image where that is possible."""
        return truth_of_sample(self[index])

    def subset(self, indices: Iterable[int]) -> "Source":
        """Returns the same source with just these samples, in this order."""
        return SourceSubset(self, tuple(indices))

    def fingerprints(self) -> list[str]:
        """Returns the fingerprint of each sample's picture file, "" for a made picture.

        The list may be longer than the source: after the samples come files of which only parts are
        in pictures.
        """
        return [""] * len(self)


@runtime_checkable
class FreshSource(Protocol):
    """A source that can make other samples at each visit."""

    def at_visit(self, index: int, visit: int) -> Sample: ...


class SourceSubset(Source):
    """Some samples of another source, in the order of `indices`."""

    def __init__(self, source: Source, indices: tuple[int, ...]):
        self.source = source
        self.indices = indices
        self.is_procedural = source.is_procedural
        self.mirrors_itself = source.mirrors_itself

    @property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        return self.source.vocabulary

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[self.indices[index]]

    def fingerprints(self) -> list[str]:
        known = self.source.fingerprints()
        return [known[index] for index in self.indices]


def read_some(source: Source) -> list[Sample]:
    """Reads `NUM_READ` samples at equal distances; all would take minutes."""
    indices = np.unique(np.linspace(0, len(source) - 1, NUM_READ).astype(int))
    return [source[index] for index in indices.tolist()]


def hash_data(source: Source, samples: Sequence[Sample]) -> str:
    """Hashes the file of a source, if there is one, and some of its samples."""
    total = hashlib.sha256(f"{source.sha256} {len(source)}".encode())
    for sample in samples:
        total.update(sample.image.tobytes())
        for instance in sample.instances:
            total.update(np.packbits([instance.modal, instance.complete]).tobytes())
            total.update(repr(replace(instance, modal=None, amodal=None)).encode())
        total.update(repr(sample.queries).encode())
    return total.hexdigest()


class Dataset(Source):
    """The samples of a dataset file. `dataset[i]` opens image i and decodes its masks.

    Attributes:
        path: The file.
        sha256: Its hash; empty for records in memory.
        file: Its checked records (`parse`).
        images: The records of the images of this split.
    """

    def __init__(
        self,
        path: Path,
        file: File,
        images_dir: str | PathLike[str] | None = None,
        sha256: str = "",
    ) -> None:
        """Images are looked for as in `image_folders`."""
        self.path = path
        self.sha256 = sha256
        self.file = file
        self.images: Sequence[ImageRecord] = file.images
        self._images_dir = images_dir
        self._image_dirs = image_folders(path, images_dir)
        self._annotations: dict[int, list[Annotation]] = defaultdict(list)
        self._queries: dict[int, list[QueryRecord]] = defaultdict(list)
        for annotation in file.annotations:
            self._annotations[annotation.image_id].append(annotation)
        for query in file.queries:
            self._queries[query.image_id].append(query)
        categories = sorted(file.categories, key=lambda category: category.id)
        self._names = {category.id: category.name for category in categories}

    def __reduce__(self) -> Any:
        """Worker processes read the file again."""
        return _reopen, (self.path, self._images_dir, self.image_ids)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        """The sample at `index`. Raises InputError for a missing or damaged image or mask."""
        truth = self.truth_at(index)
        instances = tuple(instance.map_masks(masks.expand) for instance in truth.instances)
        image = self.image_at(index)
        return Sample(truth.image_id, truth.file_name, image, instances, truth.queries)

    @cached_property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        """The values of every attribute, and the category names in the order of their ids."""
        words: dict[str, set[str]] = defaultdict(set)
        for annotation in self.file.annotations:
            for name, word in annotation.words.items():
                words[name].add(word)
        of_attributes = {name: tuple(sorted(words[name])) for name in sorted(words)}
        return {"category": tuple(self._names.values()), **of_attributes}

    @property
    def image_ids(self) -> tuple[int, ...]:
        return tuple(image.id for image in self.images)

    @property
    def has_images(self) -> bool:
        """Whether the file of any image is there."""
        return any(find_image(self._image_dirs, image.file_name) for image in self.images)

    def size_at(self, index: int) -> tuple[int, int]:
        """Height and width of image `index`, as the file states them."""
        return self.images[index].height, self.images[index].width

    def image_path(self, index: int) -> Path:
        """The file of image `index`. Raises InputError where it is in none of the folders."""
        return locate_image(self._image_dirs, self.images[index].file_name, self.path)

    def image_at(self, index: int) -> np.ndarray:
        """Opens image `index`, RGB `uint8 [H W 3]`.

        Raises InputError for one that is missing, damaged, or not of the size in the file.
        """
        return open_annotated(self.image_path(index), self.size_at(index), str(self.path))

    def check_whole(self) -> None:
        """Raises InputError if files of images or masks cannot be used."""
        sizes = {image.file_name: (image.height, image.width) for image in self.images}
        check_files(self._image_dirs, sizes, self.path)
        for index in range(len(self)):
            self.truth_at(index)

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of sample `index`; no image is opened."""
        return tuple(map(make_query, self._queries.get(self.images[index].id, ())))

    def truth_at(self, index: int) -> ImageTruth:
        """The annotations of image `index`; no image is opened.

        Raises InputError for a damaged mask.
        """
        image = self.images[index]
        annotations = self._annotations.get(image.id, ())
        instances = tuple(self._read_instance(index, annotation) for annotation in annotations)
        size = self.size_at(index)
        return ImageTruth(image.id, image.file_name, size, instances, self.queries_at(index))

    def subset(self, indices: Iterable[int]) -> "Dataset":
        """Returns the same dataset with just these images, in this order."""
        # Not by `copy.copy`, which would read the file again (`__reduce__`).
        part = object.__new__(type(self))
        vars(part).update(vars(self))
        part.images = [self.images[index] for index in indices]
        return part

    def fingerprints(self) -> list[str]:
        """Returns the fingerprint of each image's file; "" for one that is missing."""
        paths = [find_image(self._image_dirs, image.file_name) for image in self.images]
        return [fingerprint(path) if path else "" for path in paths]

    def _read_instance(self, index: int, annotation: Annotation) -> Instance[RLE]:
        """The instance of an annotation of image `index`. Raises InputError for a damaged mask."""
        try:
            rles = annotation.rles(self.size_at(index))
        except ValueError as error:
            raise InputError(f"{self.path}: annotation {annotation.id}: {error}") from error
        category = self._names[annotation.category_id]
        # Nothing else of an annotation is read in training.
        fields = {"isStuff": annotation.isStuff} if annotation.isStuff else {}
        return make_instance(annotation, rles, category, annotation.is_ignored(), fields)


def make_instance(
    annotation: Annotation,
    rles: tuple[RLE | None, RLE | None],
    category: str,
    ignore: bool,
    fields: Mapping[str, Any],
) -> Instance[RLE]:
    """The instance of an annotation with its complete and its visible mask, one of which may be
    unknown.

    Where the visible mask reaches outside the complete one, as annotators' fringes do, the amodal
    mask is the union of both.
    """
    amodal, modal = rles
    if amodal is not None and modal is not None:
        amodal = masks.merge([amodal, modal], *modal["size"])
    # An object without a visible mask of its own is fully visible. It has either mask.
    modal = modal or amodal
    assert modal is not None
    # `to_records` stores the visible mask of an ignored region as `segmentation`, without
    # `occlude_rate`: the complete one is not known.
    if ignore and rles[1] is None and annotation.occlude_rate is None:
        amodal = None
    return Instance(annotation.id, category, modal, amodal, annotation.words, ignore, fields)


def make_query(record: QueryRecord) -> Query:
    """The query of a record. Its answer becomes a part of its kind."""
    kind = dict(record.kind or {})
    if record.answer is not None:
        kind["answer"] = record.answer
    targets = tuple(record.instance_ids)
    return Query(record.id, record.text, record.mask_type, targets, kind)


def read_json(
    path: str | PathLike[str],
    images_dir: str | PathLike[str] | None = None,
    *,
    need_images: bool = True,
) -> Dataset:
    """Reads one dataset file: COCO with `visible_mask` and `queries` (docs/data.md).

    Images are looked for in `images_dir`, or else beside the file and in `images/` beside it. They
    are opened, and masks decoded, only when a sample is asked for. Raises InputError, naming file
    and record, for anything that is not right; for a missing first image only if images are needed.
    """
    path = Path(path)
    # Changes when the file does. What is wrong with a path is said when it is read.
    stamp = (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None
    dataset = _parse_once(path, images_dir, stamp)
    if need_images and len(dataset):
        # A wrong folder is reported now, not when training reaches the first image.
        dataset.image_path(0)
    return dataset


@lru_cache(maxsize=1)
def _parse_once(
    path: Path, images_dir: str | PathLike[str] | None, stamp: tuple[int, int] | None
) -> Dataset:
    """The splits of one file share its records: those of COCO's size take seconds and gigabytes."""
    content = read_bytes(path)
    file = parse(path, content)
    contradictions.refuse_systematic(path, compare_records(file, NUM_COMPARED_ON_READING))
    return Dataset(path, file, images_dir, hashlib.sha256(content).hexdigest())


def _reopen(
    path: Path, images_dir: str | PathLike[str] | None, image_ids: Sequence[int]
) -> Dataset:
    """Opens these images of a dataset file, in this order."""
    dataset = read_json(path, images_dir, need_images=False)
    places = {image_id: index for index, image_id in enumerate(dataset.image_ids)}
    return dataset.subset(places[image_id] for image_id in image_ids)


def write(
    path: Path,
    truths: Iterable[ImageTruth],
    info: Mapping[str, Any] | None = None,
    categories: Mapping[str, Mapping[str, Any]] | None = None,
    overwrite: bool = False,
    other: Mapping[str, Any] | None = None,
    polygons: bool = False,
) -> dict[str, Any]:
    """Writes a dataset file, all or nothing, and returns its records, as `to_records`.

    `other` is what it holds beside them, such as `licenses`. `polygons`: masks are
    polygons. Raises InputError as `write_records`.
    """
    records = {**(other or {}), **to_records(truths, info, categories)}
    if polygons:
        sizes = {image["id"]: (image["height"], image["width"]) for image in records["images"]}
        for record in records["annotations"]:
            draw_polygons(record, sizes[record["image_id"]])
    write_records(path, records, overwrite)
    return records


def write_records(path: Path, records: Mapping[str, Any], overwrite: bool = False) -> None:
    """Writes the records of a dataset file, all or nothing.

    Raises InputError for records that `read_json` would refuse, a folder that cannot be written to,
    and a file that exists, unless `overwrite`.
    """
    content = encode_records(path, records)
    with atomic_write(path, overwrite) as part:
        part.write_bytes(content)


def encode_records(path: Path, records: Mapping[str, Any]) -> bytes:
    """The content of a dataset file. Raises InputError for records that `read_json` would
    refuse."""
    try:
        content = json.dumps(records, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise InputError(f"{path}: a text in it holds half of a character; {error}") from error
    parse(path, content)
    return content


def with_distinct_ids(truths: Iterable[ImageTruth]) -> list[ImageTruth]:
    """Images whose annotations have ids that are all different and above 0; COCO tools take id 0
    for no match.

    Ids stay if they are so. Else annotations are numbered from 1, and an annotation's own id is its
    field `source_id`.
    """
    truths = list(truths)
    ids = [instance.id for truth in truths for instance in truth.instances]
    if len(set(ids)) == len(ids) and min(ids, default=1) > 0:
        return truths
    numbers = count(1)
    return [_renumber(truth, numbers) for truth in truths]


def _renumber(truth: ImageTruth, numbers: Iterator[int]) -> ImageTruth:
    """An image whose annotations have the next of the numbers as ids."""
    new_ids = {instance.id: next(numbers) for instance in truth.instances}
    instances = []
    for instance in truth.instances:
        fields = dict(instance.fields)
        if new_ids[instance.id] != instance.id:
            fields["source_id"] = instance.id
        if "occluded_by" in fields:
            fields["occluded_by"] = _occluders(fields["occluded_by"], new_ids)
        instances.append(replace(instance, id=new_ids[instance.id], fields=fields))
    queries = []
    for query in truth.queries:
        targets = tuple(new_ids[target] for target in query.instance_ids)
        queries.append(replace(query, instance_ids=targets))
    return replace(truth, instances=tuple(instances), queries=tuple(queries))


def _occluders(stated: Any, new_ids: Mapping[int, int]) -> Any:
    """The ids of objects that hide another one, without those that are not in the image any more.
    What another program means by the field stays as it is."""
    if not isinstance(stated, list) or not all(isinstance(number, int) for number in stated):
        return stated
    return [new_ids[number] for number in stated if number in new_ids]


def number_classes(
    truths: Iterable[ImageTruth], known: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """The records of all classes by name: those that are known, and after them new ones."""
    classes = dict(known)
    last = max((record["id"] for record in classes.values()), default=0)
    for truth in truths:
        for instance in truth.instances:
            name = _class_name(instance)
            if name not in classes:
                last += 1
                classes[name] = {"id": last, "name": name}
    return classes


def _class_name(instance: Instance) -> str:
    return " ".join(instance.category.split()) or NO_NAME


def to_records(
    truths: Iterable[ImageTruth],
    info: Mapping[str, Any] | None = None,
    categories: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The records of a dataset file about these images, whose masks are compressed RLEs.

    Ids of images are kept, those of annotations as `with_distinct_ids` says, and those of queries
    if no two of them are the same; else queries are numbered from 1. `categories` has records of
    classes by name; others are numbered after them.
    """
    truths = with_distinct_ids(truths)
    images, annotations, queries = [], [], []
    classes = number_classes(truths, categories or {})
    query_ids = [query.id for truth in truths for query in truth.queries]
    if len(set(query_ids)) < len(query_ids) or min(query_ids, default=1) < 1:
        query_ids = range(1, len(query_ids) + 1)
    numbers = iter(query_ids)
    for truth in truths:
        height, width = truth.size
        of_image = {"image_id": truth.image_id}
        names = {"id": truth.image_id, "file_name": truth.file_name}
        images.append({**truth.fields, **names, "height": height, "width": width})
        ids = {instance.id: instance.id for instance in truth.instances}
        for instance in truth.instances:
            category_id = classes[_class_name(instance)]["id"]
            record = dict(instance.fields)
            record |= {"id": instance.id, **of_image, "category_id": category_id}
            record |= masks.mask_fields(instance.modal, instance.amodal)
            if COMPLETED_BY in record:
                # So that what shows stays known when the complete mask is corrected.
                record.setdefault("visible_mask", instance.modal)
            if instance.ignore:
                record |= {"ignore": True, "iscrowd": 1}
                # COCO's own evaluation leaves crowds out, and needs their masks for that.
                if instance.amodal is None:
                    record["segmentation"] = record.pop("visible_mask")
            if "occluded_by" in record:
                record["occluded_by"] = _occluders(record["occluded_by"], ids)
            attributes = {**record.get("attributes", {}), **instance.attributes}
            if attributes:
                record["attributes"] = attributes
            annotations.append(record)
        for query in truth.queries:
            queries.append(query_record(truth.image_id, replace(query, id=next(numbers))))
    return {
        "images": images,
        "annotations": annotations,
        "categories": list(classes.values()),
        "queries": queries,
        "info": dict(info or {}),
    }


def completed_by(model: str, amodal: RLE) -> dict[str, str]:
    """Says that a model drew a complete mask, by its hash."""
    return {"model": model, "segmentation": masks.digest(amodal)}


def draw_polygons(record: dict[str, Any], size: tuple[int, int]) -> None:
    """Turns the masks of an annotation into polygons, but for those of crowds, which COCO stores as
    RLEs."""
    if record["iscrowd"]:
        return
    stated = record.get(COMPLETED_BY)
    drawn = {name: masks.as_polygons(record[name]) for name in MASK_FIELDS if record.get(name)}
    amodal = record["segmentation"]
    if isinstance(stated, dict) and amodal and stated["segmentation"] == masks.digest(amodal):
        # It is the machine's, and so are the polygons.
        amodal, modal = (masks.compressed(drawn[name], *size) for name in MASK_FIELDS)
        both = masks.merge([amodal, modal], *size)
        record[COMPLETED_BY] = completed_by(stated["model"], both)
    record |= drawn


def query_record(image_id: int, query: Query) -> dict[str, Any]:
    """The record of a query in a dataset file."""
    kind = dict(query.kind)
    answer = kind.pop("answer", None)
    record: dict[str, Any] = {"id": query.id, "image_id": image_id}
    record["text"] = " ".join(query.text.split())
    record["mask_type"] = query.mask_type
    record["instance_ids"] = list(query.instance_ids)
    if kind:
        record["kind"] = kind
    if answer is not None:
        record["answer"] = answer
    return record
