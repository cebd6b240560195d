"""What all readers share: the rule for bad records, and the records of a dataset file while they are made.

A reader is a function `read(files, ...) -> Conversion` in coco.py, folders.py or referring.py; data.py makes a command
of it. One rule holds for all of them: a record that cannot be used is left out, counted and listed by reason
(`Conversion.record`). If more than `--max-bad` of the records are bad, or the files do not fit the format, the reader
raises InputError.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import commonpath
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tyro.conf import OmitArgPrefixes, Positional

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import check_records, find_image, leads_outside
from r2sm_jax.data.images import image_size
from r2sm_jax.errors import InputError, load_json, parse_json, read_bytes, writing
from r2sm_jax.tools.entries import Entry, Note, RecordError, Size, by_reason, read_mask, read_pickle


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class Files:
    """What to read and to write."""

    out: Path
    """The dataset file to write, such as cocoa/train.json."""
    images: Path | None = None
    """Folder of the images; by default where the format has them, if they are needed."""
    overwrite: bool = False
    """Replace the dataset file if it exists."""
    max_bad: float = 0.01
    """Share of the records that may be bad, 0 to 1. Bad ones are left out; where there are more, nothing is written."""
    sources: Positional[tuple[Path, ...]] = ()
    """Annotation files; for formats with one file an image also folders of them."""


def names_of_image(path: Path) -> list[str]:
    """The names that the image of an annotation file X.json may have, X.jpg first."""
    return [path.stem + suffix for suffix in (".jpg", ".jpeg", ".png")]


def mask_fields(modal: np.ndarray, amodal: np.ndarray | None) -> dict[str, Any]:
    """The fields of an annotation that its masks `[H W]` determine; `amodal` None: the complete shape is not known."""
    whole = modal if amodal is None else modal | amodal
    fields: dict[str, Any] = {
        "bbox": masks.coco_box(whole),
        "area": masks.area(whole),
        "iscrowd": 0,
    }
    fields["segmentation"] = None if amodal is None else masks.encode(whole)
    hidden = whole & ~modal
    if amodal is None or hidden.any():
        fields["visible_mask"] = masks.encode(modal)
    if amodal is not None:
        fields["occlude_rate"] = masks.area(hidden) / max(1, masks.area(whole))
        fields |= {"invisible_mask": masks.encode(hidden)} if hidden.any() else {}
    return fields


def write_json(path: Path, records: Mapping[str, Any], overwrite: bool = False) -> None:
    """Writes the records of a dataset file, all or nothing.

    Raises InputError for records that `read_json` would refuse, a folder that cannot be written to, and a
    file that is there already, unless `overwrite`.
    """
    check_records(path, records)
    with writing(path, overwrite) as part:
        part.write_text(json.dumps(records, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass
class Conversion:
    """The records of a dataset file while a reader makes them.

    Annotations and queries are numbered from 1. An image keeps the id that its source gives it, or is numbered from 1.
    """

    images_dir: Path | None = None
    """Where to look for images; None: beside the annotation file, where an image is needed."""
    max_bad: float = 0.01
    """Share of the records that may be bad, as in `Files`."""
    images: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The records of images by id."""
    annotations: list[dict[str, Any]] = field(default_factory=list)
    categories: dict[str, int] = field(default_factory=dict)
    queries: list[dict[str, Any]] = field(default_factory=list)
    image_paths: dict[int, Path] = field(default_factory=dict)
    """The file of each image that was looked for, by image id."""
    notes: list[Note] = field(default_factory=list)
    """What the user should know about records that were used."""
    good: int = 0
    """How many records could be used."""
    bad: list[Note] = field(default_factory=list)
    """What is wrong with each record that could not."""
    known: dict[Hashable, int] = field(default_factory=dict)
    """The ids of images (by path) and objects (by a key of the reader) that several entries share."""
    over: dict[str, Any] | None = None
    """The records of a dataset file whose queries are replaced by those of the conversion."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad <= 1:
            raise InputError(f"--max-bad {self.max_bad}: this is not a share; give 0 to 1")

    def note(self, entry: Entry, sentence: str) -> None:
        """Tells the user something about an entry, such as that a part of it was left out."""
        self.notes.append(Note(str(entry), sentence))

    @contextmanager
    def record(self) -> Iterator[None]:
        """Counts what the block reads as one record. Where the block raises RecordError, the record is left out with
        all that was added for it, and counts as bad."""
        grown = (
            self.images,
            self.annotations,
            self.categories,
            self.queries,
            self.image_paths,
            self.notes,
            self.known,
        )
        before = [len(part) for part in grown]
        try:
            yield
            self.good += 1
        except RecordError as error:
            self.bad.append(error.note)
            for part, length in zip(grown, before, strict=True):
                while len(part) > length:
                    part.popitem() if isinstance(part, dict) else part.pop()

    def finish(self) -> "Conversion":
        """The conversion itself, when all is read. Raises InputError where more than `max_bad` of the records are
        bad."""
        count, total = len(self.bad), self.good + len(self.bad)
        if count > self.max_bad * total:
            same = by_reason(self.bad)[0]
            others = f", {count - len(same)} for other reasons" if count > len(same) else ""
            raise InputError(
                f"{same[0]} ({len(same)} of {total} records are bad for this reason{others}; "
                f"--max-bad {self.max_bad:g} allows {int(self.max_bad * total)})"
            )
        return self

    def read_folders(self, sources: Sequence[Path], what: str) -> Iterator[Entry]:
        """The content of JSON files, and of the *.json files in folders; `what` describes the format.

        A file of a folder that is not JSON is a bad record. Raises InputError for one that is given by name, and for
        a path that does not exist.
        """
        for source in sources:
            if not source.exists():
                raise InputError(f"{source}: there is no such file or folder; check the path")
            if not source.is_dir():
                yield Entry(source, "", load_json(source, what))
            for path in sorted(source.glob("*.json")) if source.is_dir() else ():
                yield from self._try(Entry(path, "", None), partial(load_json, path, what))

    def read_lists(self, sources: Sequence[Path], what: str) -> Iterator[Entry]:
        """The entries of lists in JSON files, pickles of plain data (.p), or files with a JSON object a line (.jsonl).

        `what` describes the format. A line that is not JSON is a bad record. Raises InputError for any other file.
        """
        for path in sources:
            if path.suffix != ".jsonl":
                listed = read_pickle(path) if path.suffix == ".p" else load_json(path, what)
                if not isinstance(listed, list):
                    raise InputError(f"{path}: this is not a list; give {what}")
                yield from (Entry(path, f"[{index}]", value) for index, value in enumerate(listed))
                continue
            for number, line in enumerate(read_bytes(path).splitlines(), start=1):
                place = Entry(path, f"line {number}", None)
                if line.strip():
                    yield from self._try(place, partial(parse_json, line, str(place), what))

    def _try(self, place: Entry, read: Callable[[], Any]) -> list[Entry]:
        """The entry with the value that `read` gives; none, and a bad record, where that is not JSON."""
        try:
            return [replace(place, value=read())]
        except InputError as error:
            self.bad.append(Note(str(place), str(error).removeprefix(f"{place}: ")))
            return []

    def by_id(self, file: Entry, key: str, name: str) -> dict[int, Entry]:
        """The objects of a list by their id. One without an id, or with that of another, is a bad record. Raises
        InputError where there is no list."""
        found: dict[int, Entry] = {}
        for entry in file.entries(key, name):
            try:
                if found.setdefault(entry.need("id", int), entry) is not entry:
                    raise entry.error("its id occurs twice", "give each its own; the first is used")
            except RecordError as error:
                self.bad.append(error.note)
        return found

    def size(self, image_id: int) -> Size:
        """Height and width of an image that was added."""
        return self.images[image_id]["height"], self.images[image_id]["width"]

    def add_image(
        self,
        entry: Entry,
        names: Sequence[str],
        image_id: int | None = None,
        size: Size | None = None,
    ) -> int:
        """Adds the image of an entry and returns its id.

        `names` are file names that the image may have, the most likely one first; for names of COCO 2014 those of 2017
        are tried too. Without `size` the file must exist: its header gives the size. Without `image_id` the image gets
        the next number, and a file that has one already is not added again. Raises RecordError where the file is
        missing, damaged, outside the folder or of another size.
        """
        folder = self.images_dir or (entry.path.parent if size is None else None)
        if outside := [name for name in names if leads_outside(name)]:
            raise entry.error(
                f"the file name {outside[0]!r} leads out of the image folder", "give one inside it"
            )
        number = len(self.images) + 1 if image_id is None else image_id
        record = {"id": number, "file_name": names[0]}
        if folder is not None:
            tried = [*names, *(re.sub(r"COCO_(train|val|test)2014_", "", name) for name in names)]
            path = next((folder / name for name in tried if find_image([folder], name)), None)
            if path is None:
                raise entry.error(
                    f"{' or '.join(names)} is not in {folder}", "give the folder with --images DIR"
                )
            if image_id is None and path in self.known:
                return self.known[path]
            try:
                stated, size = size, image_size(path)
            except InputError as error:
                raise entry.error(
                    f"its image cannot be read ({error})", "give the image again"
                ) from error
            if stated not in (None, size):
                what = f"its image is {size[0]} x {size[1]}, but the size in the file is {stated[0]} x {stated[1]}"
                raise entry.error(what, "give the image that was annotated")
            record["file_name"] = path.relative_to(folder).as_posix()
            self.image_paths[number], self.known[path] = path, number
        assert size is not None  # without a size a file was looked for
        self.images[number] = record | {"height": size[0], "width": size[1]}
        return number

    def add_annotation(
        self,
        image_id: int,
        name: str,
        modal: np.ndarray,
        amodal: np.ndarray | None = None,
        **extra: Any,
    ) -> int:
        """Adds an object of class `name` with its masks `[H W]` and returns its id.

        `amodal` None: only the visible mask is known. `extra` are further fields of the record.
        """
        category = self.categories.setdefault(
            " ".join(name.split()) or "object", len(self.categories) + 1
        )
        number = len(self.annotations) + 1
        record = {"id": number, "image_id": image_id, "category_id": category}
        self.annotations.append(record | mask_fields(modal, amodal) | extra)
        return number

    def add_object(
        self,
        image_id: int,
        name: str,
        entry: Entry,
        *,
        modal: str,
        amodal: str | None = None,
        key: Hashable,
    ) -> int:
        """Adds the object whose masks are the fields `modal` and `amodal` of an entry, and returns its id.

        `key` identifies the object: it is added only once. Raises InputError for a mask that cannot be used.
        """
        if (image_id, key) not in self.known:
            fields = [field for field in (modal, amodal) if field is not None]
            drawn = [self.mask(entry, field, self.size(image_id)) for field in fields]
            if not any(mask.any() for mask in drawn):
                raise entry.error(f"its {modal} has no pixel in the image", "correct it")
            self.known[image_id, key] = self.add_annotation(image_id, name, *drawn)
        return self.known[image_id, key]

    def mask(self, entry: Entry, key: str, size: Size) -> np.ndarray:
        """The mask `[H W]` in a field of an entry, in any form that `read_mask` knows. Rings of fewer than three points
        are left out with a note, unless there are no others. Raises RecordError."""
        try:
            mask, short = read_mask(entry.get(key), size)
        except ValueError as error:
            remedy = "give the annotation and the image that belong together"
            raise entry.error(f"its {key} cannot be used ({error})", remedy) from error
        if short:
            self.note(entry, f"{short} rings of fewer than three points in its {key} were left out")
        return mask

    def add_query(
        self,
        image_id: int,
        text: str,
        mask_type: str,
        instance_ids: Sequence[int],
        answer: Any = None,
        **kind: Any,
    ) -> None:
        """Adds a query. White space in its text is normalised; an `answer` that is not a string is left out."""
        targets = list(dict.fromkeys(instance_ids))
        record: dict[str, Any] = {
            "id": len(self.queries) + 1,
            "image_id": image_id,
            "text": " ".join(text.split()),
        }
        record |= {
            "mask_type": mask_type,
            "instance_ids": targets,
            "kind": {**kind, "multi": len(targets) > 1},
        }
        self.queries.append(record | ({"answer": answer} if isinstance(answer, str) else {}))

    def name_images(self, out: Path) -> str:
        """Sets the `file_name` of each image whose file is known, relative to the folder of the dataset file `out`.

        Where an image does not lie below it, names are relative to the nearest folder above all images; then returns
        the flag that the user must pass with the dataset.
        """
        paths = {image_id: path.resolve() for image_id, path in self.image_paths.items()}
        folder = out.resolve().parent
        below = all(path.is_relative_to(folder) for path in paths.values())
        if not below:
            try:
                folder = Path(commonpath([path.parent for path in paths.values()]))
            except ValueError:
                raise InputError(
                    f"{out}: its images are on several drives; put them on one"
                ) from None
        for image_id, path in paths.items():
            self.images[image_id]["file_name"] = path.relative_to(folder).as_posix()
        return "" if below else f"--data.images {folder}"

    def records(self, description: str) -> dict[str, Any]:
        """The records of the dataset file. Raises InputError where there is no image."""
        if self.over is not None:
            return self.over | {"queries": self.queries}
        if not self.images:
            raise InputError(
                f"{description}: there are no annotated images; give annotation files of this format"
            )
        categories = [{"id": number, "name": name} for name, number in self.categories.items()]
        lists = {
            "images": list(self.images.values()),
            "annotations": self.annotations,
            "categories": categories,
        }
        return lists | {"queries": self.queries, "info": {"description": description}}
