"""Records of annotation files, and the collector that makes a dataset file of them.

A reader (coco.py, folders.py, referring.py, r2sm.py) is a generator that yields, entry by entry, a
`Record` that can be used, a `BadRecord` that cannot, or a `Note`. It raises InputError if its files
do not fit the format. One rule holds for all: a bad record is left out, counted and listed by
reason; if there are more of them than `--max-bad` allows, nothing is written.
"""

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonpath
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import mask_fields
from r2sm_jax.data.images import (
    find_image,
    image_size,
    leads_outside,
)
from r2sm_jax.data.validation import AreaComparison, check_records
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.tools.entries import BadRecord, Entry, Note, Size, group_by_reason

RATE_TOLERANCE = 0.02
"""Stored and recomputed occlusion rates may differ by this much before the user is told."""


@dataclass(frozen=True)
class ImageRecord:
    """An image of the new dataset."""

    id: int | None
    """Its id in the file. None: the format has none; then the collector numbers the images, and
    records with the same `path` are about one image."""
    file_name: str
    size: Size
    path: Path | None = None
    """The image file, if the reader looked for it."""


@dataclass(frozen=True)
class ObjectRecord:
    """An object of an image."""

    category: str
    fields: Mapping[str, Any]
    """Its annotation but for the ids: `mask_fields` and what the reader copies."""
    key: Hashable = None
    """Identifies the object within its image, so that it is added once.

    An object without a key is never the same as another one."""
    notes: tuple[Note, ...] = ()
    """Notes for the user about this object."""
    ignored_by: str = ""
    """The flag that leaves it out of loss, queries and metrics, such as "iscrowd"; "" if none."""


@dataclass(frozen=True)
class QueryRecord:
    """A query about objects of an image."""

    text: str
    mask_type: str
    targets: Sequence[Hashable]
    """Keys of objects of the same image."""
    kind: Mapping[str, Any]
    answer: Any = None
    """Left out if it is not a string."""


@dataclass(frozen=True)
class Record:
    """The content of one entry of an annotation file. It is used as a whole or not at all."""

    image: ImageRecord
    objects: Sequence[ObjectRecord] = ()
    queries: Sequence[QueryRecord] = ()


Item = Record | BadRecord | Note
"""A reader yields items of these kinds."""


@dataclass
class Collector:
    """Numbers records and gathers them for a dataset file.

    Annotations, categories and queries are numbered from 1. An image has the id that its source
    gives it, or is numbered from 1.
    """

    dataset: Mapping[str, Any] | None = None
    """A dataset file that gets new queries in place of its own.

    Then the keys of objects are its annotation ids."""
    images: dict[int, dict[str, Any]] = field(default_factory=dict)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    categories: dict[str, int] = field(default_factory=dict)
    queries: list[dict[str, Any]] = field(default_factory=list)
    image_paths: dict[int, Path] = field(default_factory=dict)
    """The file of an image, if its reader looked for it, by image id."""
    notes: list[Note] = field(default_factory=list)
    bad_records: list[BadRecord] = field(default_factory=list)
    num_good: int = 0
    num_ignored: Counter[str] = field(default_factory=Counter)
    """How many objects are ignored, by what marks them."""
    _image_ids: dict[Path, int] = field(default_factory=dict)
    _annotation_ids: dict[tuple[int, Hashable], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dataset is not None:
            self.images = {image["id"]: image for image in self.dataset["images"]}
            for annotation in self.dataset["annotations"]:
                key = annotation["image_id"], annotation["id"]
                self._annotation_ids[key] = annotation["id"]

    @property
    def num_records(self) -> int:
        return self.num_good + len(self.bad_records)

    def add(self, item: Item) -> None:
        """Adds what a reader yields."""
        if isinstance(item, BadRecord):
            self.bad_records.append(item)
        elif isinstance(item, Note):
            self.notes.append(item)
        else:
            self.num_good += 1
            image_id = self._add_image(item.image)
            for record in item.objects:
                self._add_object(image_id, record)
            for query in item.queries:
                self._add_query(image_id, query)

    def _add_image(self, image: ImageRecord) -> int:
        """Adds an image unless it is there. Returns its id."""
        # Several files, or several questions of one file, can be about one image.
        if image.id is None and image.path in self._image_ids:
            return self._image_ids[image.path]
        image_id = len(self.images) + 1 if image.id is None else image.id
        if image_id not in self.images:
            height, width = image.size
            self.images[image_id] = {
                "id": image_id,
                "file_name": image.file_name,
                "height": height,
                "width": width,
            }
            if image.path is not None:
                self.image_paths[image_id] = image.path
                self._image_ids[image.path] = image_id
        return image_id

    def _add_object(self, image_id: int, record: ObjectRecord) -> None:
        """Adds an object unless one with its key is there."""
        if record.key is not None and (image_id, record.key) in self._annotation_ids:
            return
        number = len(self.annotations) + 1
        # COCOA's names are free text with stray blanks. An object without a name gets the class
        # "object", which no template query says (`NameWriter.nouns`).
        category = " ".join(record.category.split()) or "object"
        category_id = self.categories.setdefault(category, len(self.categories) + 1)
        ids = {"id": number, "image_id": image_id, "category_id": category_id}
        annotation = {**ids, **record.fields}
        if record.ignored_by:
            annotation["ignore"] = True
            self.num_ignored[record.ignored_by] += 1
        self.annotations.append(annotation)
        self.notes.extend(record.notes)
        if record.key is not None:
            self._annotation_ids[image_id, record.key] = number

    def _add_query(self, image_id: int, query: QueryRecord) -> None:
        """Adds a query whose targets have been added."""
        # A target that an answer names twice counts once.
        instance_ids = [self._annotation_ids[image_id, key] for key in dict.fromkeys(query.targets)]
        record = {
            "id": len(self.queries) + 1,
            "image_id": image_id,
            "text": " ".join(query.text.split()),
            "mask_type": query.mask_type,
            "instance_ids": instance_ids,
            "kind": {**query.kind, "multi": len(instance_ids) > 1},
        }
        if isinstance(query.answer, str):
            record["answer"] = query.answer
        self.queries.append(record)

    def check_share(self, max_bad: float) -> None:
        """Raises InputError if more than this share of the records is bad."""
        num_bad = len(self.bad_records)
        if num_bad <= max_bad * self.num_records:
            return
        most_frequent = group_by_reason(self.bad_records)[0]
        num_others = num_bad - len(most_frequent)
        others = f", {num_others} for other reasons" if num_others else ""
        raise InputError(
            f"{most_frequent[0]} ({len(most_frequent)} of {self.num_records} records are bad for "
            f"this reason{others}; --max-bad {max_bad:g} allows {int(max_bad * self.num_records)})"
        )

    def make_file_names_relative(self, out: Path) -> Path:
        """Makes the `file_name` of images relative to one folder, and returns that folder.

        This is done for images whose file is known. The folder is that of the dataset file `out`,
        in which a `Dataset` looks by default; if an image does not lie below it, it is the nearest
        folder above all images. Raises InputError if there is none.
        """
        paths = {image_id: path.resolve() for image_id, path in self.image_paths.items()}
        folder = out.resolve().parent
        if not all(path.is_relative_to(folder) for path in paths.values()):
            try:
                folder = Path(commonpath([path.parent for path in paths.values()]))
            except ValueError:  # drives of Windows have no folder above them
                remedy = "its images are on several drives; put them on one"
                raise InputError(f"{out}: {remedy}") from None
        for image_id, path in paths.items():
            self.images[image_id]["file_name"] = path.relative_to(folder).as_posix()
        return folder

    def to_records(self, description: str) -> dict[str, Any]:
        """The records of the dataset file. Raises InputError if there is no image."""
        if self.dataset is not None:
            return {**self.dataset, "queries": self.queries}
        if not self.images:
            remedy = "there are no annotated images; give annotation files of this format"
            raise InputError(f"{description}: {remedy}")
        return {
            "images": list(self.images.values()),
            "annotations": self.annotations,
            "categories": [{"id": i, "name": name} for name, i in self.categories.items()],
            "queries": self.queries,
            "info": {"description": description},
        }


def collect(
    items: Iterable[Item], max_bad: float = 1.0, dataset: Mapping[str, Any] | None = None
) -> Collector:
    """Collects all that a reader yields.

    Raises InputError if more than `max_bad` of the records are bad.
    """
    if not 0 <= max_bad <= 1:
        raise InputError(f"--max-bad {max_bad}: this is not a share; give 0 to 1")
    collector = Collector(dataset)
    for item in items:
        collector.add(item)
    collector.check_share(max_bad)
    return collector


@dataclass
class MaskComparison:
    """Compares the masks of all objects of a source, which may have been exchanged or inverted."""

    areas: AreaComparison = field(default_factory=AreaComparison)
    num_objects: int = 0
    num_inverted: int = 0
    """Objects that have all corners of the image and most of its pixels."""
    num_unseen: int = 0
    """Objects of which nothing is visible."""
    num_complements: int = 0
    """Objects whose stated `occlude_rate` is their visible share, so that the visible mask is
    likely that of the hidden part."""

    def add(self, modal: np.ndarray, amodal: np.ndarray, stated_rate: Any = None) -> None:
        """Compares the masks `[H W]` of one object, and its `occlude_rate` if one is stated."""
        self.areas.add(masks.area(modal), masks.area(amodal))
        self.num_objects += 1
        has_corners = amodal[[0, 0, -1, -1], [0, -1, 0, -1]].all()
        self.num_inverted += bool(has_corners) and amodal.mean() > 0.5
        self.num_unseen += not modal.any()
        if isinstance(stated_rate, int | float) and amodal.any():
            hidden_share = masks.occlude_rate(modal & amodal, amodal)
            visible_share = 1 - hidden_share
            is_hidden_share = abs(stated_rate - hidden_share) <= RATE_TOLERANCE
            is_visible_share = abs(stated_rate - visible_share) <= RATE_TOLERANCE
            # Near one half it is both, which tells nothing.
            self.num_complements += is_visible_share and not is_hidden_share

    def check(self, source: str, remedy: str) -> None:
        """Raises InputError if most objects, and more than one, have the wrong masks.

        One object alone may be an annotator's slip, also where it is all that was compared.
        `remedy` is for masks that are exchanged.
        """
        for contradiction in self.areas.contradictions(remedy):
            if contradiction.is_systematic and contradiction.count > 1:
                raise InputError(f"{source}: {contradiction}")
        if self.num_unseen > max(1, self.num_objects / 2):
            problem = f"the visible masks of {self.num_unseen} of {self.num_objects} objects"
            raise InputError(f"{source}: {problem} are empty; give the masks of what is seen")
        num_different = self.areas.num_different
        if self.num_complements > max(1, num_different / 2):
            problem = f"the visible masks of {self.num_complements} of {num_different} objects"
            raise InputError(
                f"{source}: {problem} have the size of what occlude_rate says is hidden; give the "
                "field of what is seen with --visible-field"
            )
        if self.num_inverted > max(1, self.num_objects / 2):
            problem = f"the masks of {self.num_inverted} of {self.num_objects} objects"
            raise InputError(
                f"{source}: {problem} are white in all corners of the image; if they are inverted, "
                "exchange black and white"
            )


# Parts of records


def names_of_image(path: Path) -> list[str]:
    """The names that the image of an annotation file X.json may have, X.jpg first."""
    return [path.stem + suffix for suffix in (".jpg", ".jpeg", ".png")]


def make_image(
    entry: Entry,
    names: Sequence[str],
    images_dir: Path | None,
    image_id: int | None = None,
    size: Size | None = None,
) -> ImageRecord:
    """The image of an entry.

    Args:
        entry: The entry that errors name.
        names: File names that the image may have, the most likely one first; for names of COCO 2014
            those of 2017 are tried too.
        images_dir: The folder to look in. None: the folder of the annotation file, if there is no
            `size`.
        image_id: Its id, if the format has one.
        size: What the annotation file says. Without it the file must exist, and its header is read.

    Raises RecordError if the file is missing, damaged, outside the folder or of another size.
    """
    for name in names:
        if leads_outside(name):
            problem = f"the file name {name!r} leads out of the image folder"
            example = PureWindowsPath(name).name
            raise entry.error(problem, f"give one inside it, such as {example!r}")
    if images_dir is None:
        if size is not None:
            return ImageRecord(image_id, names[0], size)
        images_dir = entry.path.parent

    # COCO renamed its photos in 2017, and COCOA's files name those of 2014.
    names_of_2017 = [re.sub(r"COCO_(train|val|test)2014_", "", name) for name in names]
    candidates = (find_image([images_dir], name) for name in [*names, *names_of_2017])
    path = next((path for path in candidates if path is not None), None)
    if path is None:
        problem = f"{' or '.join(names)} is not in {images_dir}"
        remedy = "give the folder with --images DIR"
        raise entry.error(problem, remedy)
    try:
        actual_size = image_size(path)
    except InputError as error:
        raise entry.error(f"its image cannot be read ({error})", "give the image again") from error
    if size is not None and size != actual_size:
        problem = (
            f"its image is {actual_size[0]} x {actual_size[1]}, "
            f"but the size in the file is {size[0]} x {size[1]}"
        )
        raise entry.error(problem, "give the image that was annotated")
    return ImageRecord(image_id, path.relative_to(images_dir).as_posix(), actual_size, path)


def make_visible_object(
    entry: Entry, field: str, size: Size, category: str, key: Hashable
) -> ObjectRecord:
    """An object of which only the visible mask is known, in a field of an entry.

    Raises RecordError for a mask that cannot be used or has no pixel.
    """
    mask, notes = entry.mask(field, size)
    if not mask.any():
        raise entry.error(f"its {field} has no pixel in the image", "correct it")
    # Its `iscrowd` does not count: RefCOCO refers to crowds too, and scores them.
    return ObjectRecord(category, mask_fields(mask, None), key, tuple(notes))


def write_json(path: Path, records: Mapping[str, Any], overwrite: bool = False) -> None:
    """Writes the records of a dataset file, all or nothing.

    Raises InputError for records that `read_json` would refuse, a folder that cannot be written to,
    and a file that exists, unless `overwrite`.
    """
    check_records(path, records)
    with atomic_write(path, overwrite) as part:
        part.write_text(json.dumps(records, ensure_ascii=False) + "\n", encoding="utf-8")
