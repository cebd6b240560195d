"""What all readers share: entries of annotation files, which know their place, and the records made of them.

A reader is a function `read(files, ...) -> Conversion` in coco.py or referring.py; data.py makes a command of it. It
raises InputError for files that do not fit its format.
"""

import json
import pickle
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from os.path import commonpath
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import tyro
from tyro.conf import OmitArgPrefixes, Positional

from r2sm_jax.data import masks
from r2sm_jax.data.images import image_size
from r2sm_jax.data.samples import check_records, find_image, is_id, is_text, leads_outside
from r2sm_jax.errors import InputError, load_json, parse_json, read_bytes, writing

T = TypeVar("T")
Size = tuple[int, int]
"""Height and width in pixels."""
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}


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
    sources: Positional[tuple[Path, ...]] = ()
    """Annotation files; for formats with one file an image also folders of them."""


@dataclass(frozen=True)
class Entry:
    """A JSON value of an annotation file, normally an object. Its methods name its file and place in every error."""

    path: Path
    place: str
    """Such as "annotation 7" or "[3].answers[0]"; empty for the whole file."""
    value: Any

    def error(self, problem: str, remedy: str) -> InputError:
        """An error about this entry, to raise."""
        return InputError(f"{self}: {problem}; {remedy}")

    def __str__(self) -> str:
        return f"{self.path}: {self.place}" if self.place else str(self.path)

    def get(self, key: str) -> Any:
        """The value of a field; None where it is missing."""
        return self.value.get(key) if isinstance(self.value, Mapping) else None

    def need(self, key: str, *types: type) -> Any:
        """The value of a field of one of the `types`, of `JSON_TYPES`. Raises InputError for any other."""
        value = self.get(key)
        if not isinstance(value, types) or isinstance(value, bool):
            wanted = " or ".join(JSON_TYPES[kind] for kind in types)
            found = "missing" if value is None else JSON_TYPES.get(type(value), repr(value))
            raise self.error(f"its {key!r} is {found}, not {wanted}", "check that the format is the right one")
        return value

    def text(self, key: str) -> str:
        """A string that is not blank. Raises InputError for anything else."""
        if not is_text(text := self.need(key, str)):
            raise self.error(f"its {key!r} is empty", "write it")
        return text

    def refer(self, key: str, known: Mapping[int, T], number: Any = None) -> T:
        """What the id in a field, or `number`, stands for. Raises InputError for an id that is not `known`."""
        number = self.need(key, int) if number is None else number
        if not is_id(number) or number not in known:
            raise self.error(
                f"{key} {number!r} is not in the file", "correct the id, or give files that belong together"
            )
        return known[number]

    def entry(self, key: str) -> "Entry":
        """The object in a field. Raises InputError where there is none."""
        return Entry(self.path, f"{self.place}.{key}", self.need(key, dict))

    def entries(self, key: str, name: str | None = None) -> list["Entry"]:
        """The objects of a list. With `name`, an entry that has an id is called "NAME ID". Raises InputError where
        there is no list."""
        place = f"{self.place}.{key}" if self.place else key
        listed = [Entry(self.path, f"{place}[{index}]", value) for index, value in enumerate(self.need(key, list))]
        return [replace(e, place=f"{name} {e.get('id')}") if name and is_id(e.get("id")) else e for e in listed]

    def by_id(self, key: str, name: str) -> dict[int, "Entry"]:
        """The same by id. Raises InputError for an object without one."""
        return {entry.need("id", int): entry for entry in self.entries(key, name)}

    def size(self) -> Size:
        """Height and width of an image. Raises InputError where masks cannot have this size."""
        size = self.need("height", int), self.need("width", int)
        try:
            masks.check_size(*size)
        except ValueError as error:
            raise self.error(f"its size is not possible ({error})", "give the image's own size") from error
        return size

    def mask(self, key: str, size: Size) -> np.ndarray:
        """The mask `[H W]` in a field: an RLE, or polygons as lists of numbers or of points. Raises InputError."""
        value = self.get(key)
        if isinstance(value, list):
            value = [_numbers(polygon) if isinstance(polygon, list) else polygon for polygon in value]
        try:
            return masks.from_segmentation(value, *size)
        except ValueError as error:
            remedy = "give the annotation and the image that belong together"
            raise self.error(f"its {key} cannot be used ({error})", remedy) from error


def _numbers(polygon: list[Any]) -> list[Any]:
    return [x for point in polygon for x in (point if isinstance(point, list) else [point])]


def read_files(sources: Sequence[Path], what: str) -> Iterator[Entry]:
    """The content of the given JSON files, and of the *.json files in given folders; `what` describes the format.

    Raises InputError for a path that does not exist and a file that is not JSON.
    """
    for source in sources:
        if not source.exists():
            raise InputError(f"{source}: there is no such file or folder; check the path")
        for path in sorted(source.glob("*.json")) if source.is_dir() else [source]:
            yield Entry(path, "", load_json(path, what))


def read_list(sources: Sequence[Path], what: str) -> Iterator[Entry]:
    """The entries of lists in JSON files, pickles of plain data (.p), or files with one JSON object a line (.jsonl).

    `what` describes the format. Raises InputError for any other file.
    """
    for path in sources:
        if path.suffix == ".jsonl":
            for number, line in enumerate(read_bytes(path).splitlines(), start=1):
                if line.strip():
                    place = f"line {number}"
                    yield Entry(path, place, parse_json(line, f"{path}: {place}", what))
            continue
        listed = _read_pickle(path) if path.suffix == ".p" else load_json(path, what)
        if not isinstance(listed, list):
            raise InputError(f"{path}: this is not a list; give {what}")
        yield from (Entry(path, f"[{index}]", value) for index, value in enumerate(listed))


class _PlainData(pickle.Unpickler):
    """An unpickler that knows no classes: reading a pickle can run code, and here nothing can run."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _read_pickle(path: Path) -> Any:
    content = read_bytes(path)
    try:
        return _PlainData(BytesIO(content)).load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise InputError(
            f"{path}: the pickle holds more than plain data or is damaged ({error}); it is not read, since pickles "
            "can run code; write it again as JSON (a list of refs) with a .json name"
        ) from error


def mask_fields(modal: np.ndarray, amodal: np.ndarray | None) -> dict[str, Any]:
    """The fields of an annotation that its masks `[H W]` determine; `amodal` None: the complete shape is not known."""
    whole = modal if amodal is None else modal | amodal
    fields: dict[str, Any] = {"bbox": masks.coco_box(whole), "area": masks.area(whole), "iscrowd": 0}
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
    images: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The records of images by id."""
    annotations: list[dict[str, Any]] = field(default_factory=list)
    categories: dict[str, int] = field(default_factory=dict)
    queries: list[dict[str, Any]] = field(default_factory=list)
    image_paths: dict[int, Path] = field(default_factory=dict)
    """The file of each image that was looked for, by image id."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, a sentence each."""
    known: dict[Hashable, int] = field(default_factory=dict)
    """The ids of images (by path) and objects (by a key of the reader) that several entries share."""

    def note(self, entry: Entry, sentence: str) -> None:
        """Tells the user something about an entry, such as that it was left out."""
        self.notes.append(f"{entry}: {sentence}")

    def size(self, image_id: int) -> Size:
        """Height and width of an image that was added."""
        return self.images[image_id]["height"], self.images[image_id]["width"]

    def add_image(
        self, entry: Entry, file_name: str | None = None, image_id: int | None = None, size: Size | None = None
    ) -> int:
        """Adds the image of an entry and returns its id.

        Without `file_name` the image of an annotation file X.json is X.jpg, X.jpeg or X.png, or has the name at the
        end of the entry's `url`. Without `size` the file must exist: its header gives the size. Without `image_id` the
        image gets the next number, and a file that has one already is not added again. Raises InputError where the
        file is missing, damaged or outside the folder, and for an `image_id` that is taken.
        """
        names = [file_name] if file_name is not None else _names_of_image(entry)
        folder, path = self.images_dir or (entry.path.parent if size is None else None), None
        if leads_outside(names[0]):
            raise entry.error(f"the file name {names[0]!r} leads out of the image folder", "give a path relative to it")
        if folder is not None:
            path = next((folder / name for name in names if find_image([folder], name)), None)
            if path is None:
                raise entry.error(f"{' or '.join(names)} is not in {folder}", "give the folder with --images DIR")
        if image_id is None and path in self.known:
            return self.known[path]
        number = len(self.images) + 1 if image_id is None else image_id
        if number in self.images:
            raise entry.error(f"image {number} occurs twice", "give each split its own run")
        if path is not None:
            self.image_paths[number], self.known[path] = path, number
        height, width = size or image_size(self.image_paths[number])
        name = names[0] if folder is None or path is None else path.relative_to(folder).as_posix()
        self.images[number] = {"id": number, "file_name": name, "height": height, "width": width}
        return number

    def add_annotation(
        self, image_id: int, name: str, modal: np.ndarray, amodal: np.ndarray | None = None, **extra: Any
    ) -> int:
        """Adds an object of class `name` with its masks `[H W]` and returns its id.

        `amodal` None: only the visible mask is known. `extra` are further fields of the record.
        """
        category = self.categories.setdefault(" ".join(name.split()) or "object", len(self.categories) + 1)
        number = len(self.annotations) + 1
        record = {"id": number, "image_id": image_id, "category_id": category}
        self.annotations.append(record | mask_fields(modal, amodal) | extra)
        return number

    def add_object(
        self, image_id: int, name: str, entry: Entry, *, modal: str, amodal: str | None = None, key: Hashable
    ) -> int:
        """Adds the object whose masks are the fields `modal` and `amodal` of an entry, and returns its id.

        `key` identifies the object: it is added only once. Raises InputError for a mask that cannot be used.
        """
        if (image_id, key) not in self.known:
            drawn = (entry.mask(field, self.size(image_id)) for field in (modal, amodal) if field is not None)
            self.known[image_id, key] = self.add_annotation(image_id, name, *drawn)
        return self.known[image_id, key]

    def add_query(
        self, image_id: int, text: str, mask_type: str, instance_ids: Sequence[int], answer: Any = None, **kind: Any
    ) -> None:
        """Adds a query. White space in its text is normalised; an `answer` that is not a string is left out."""
        targets = list(dict.fromkeys(instance_ids))
        record: dict[str, Any] = {"id": len(self.queries) + 1, "image_id": image_id, "text": " ".join(text.split())}
        record |= {"mask_type": mask_type, "instance_ids": targets, "kind": {**kind, "multi": len(targets) > 1}}
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
            folder = Path(commonpath([path.parent for path in paths.values()]))
        for image_id, path in paths.items():
            self.images[image_id]["file_name"] = path.relative_to(folder).as_posix()
        return "" if below else f"--data.images {folder}"

    def records(self, description: str) -> dict[str, Any]:
        """The records of the dataset file. Raises InputError where there is no image."""
        if not self.images:
            raise InputError(f"{description}: there are no annotated images; give annotation files of this format")
        categories = [{"id": number, "name": name} for name, number in self.categories.items()]
        lists = {"images": list(self.images.values()), "annotations": self.annotations, "categories": categories}
        return lists | {"queries": self.queries, "info": {"description": description}}


def _names_of_image(entry: Entry) -> list[str]:
    names = [entry.path.stem + suffix for suffix in (".jpg", ".jpeg", ".png")]
    url = entry.get("url")
    return names + ([PurePosixPath(url).name] if is_text(url) else [])
