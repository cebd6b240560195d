"""Dataset files of gigabytes: read once from front to end, and then record by record from disk.

As objects of Python, the records of a file take five times its size. Here they stay in the file,
and memory holds where each of them is: 25 bytes a record.
"""

import codecs
import hashlib
import json
import os
import re
import weakref
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from r2sm_jax.data.cache import pread
from r2sm_jax.data.validation import (
    LISTS,
    MASKS,
    compared_on_reading,
    has_faults,
    refuse_contradictions,
)
from r2sm_jax.errors import InputError, paused_collection

LARGE_BYTES = 64 << 20
"""Files from this size on are read like this. Smaller ones fit into memory."""
CHUNK_BYTES = 4 << 20
"""So much is read at a time."""
SPARE_CHARACTERS = 1 << 16
"""The next chunk is read when fewer characters are left, so that few records are parsed twice."""

_BLANKS = ("", " ", "\t", "\n", "\r")
_no_blank = re.compile(r"[^ \t\n\r]")
_comma = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")


class IndexedRecords:
    """The annotations or the queries of each image, in a file. Copies in other processes read the
    same file."""

    def __init__(
        self,
        path: Path,
        stamp: tuple[int, int],
        image_ids: Int[np.ndarray, " records"],
        starts: Int[np.ndarray, " records"],
        lengths: Int[np.ndarray, " records"],
        known_ids: Int[np.ndarray, " images"],
    ):
        """The records at these bytes.

        Args:
            path: The file.
            stamp: Time of its last change and its size, as of when it was read.
            image_ids: The image of each record.
            starts: Position of each record's first byte.
            lengths: Number of its bytes.
            known_ids: The ids of all images, in rising order.
        """
        # Stable, so that the records of an image keep the order of the file.
        order = np.argsort(image_ids, kind="stable")
        self._path = path
        self._stamp = stamp
        self._ids = known_ids
        self._starts = starts[order]
        self._lengths = lengths[order].astype(np.int32)
        sorted_ids = image_ids[order]
        self._firsts = np.append(np.searchsorted(sorted_ids, known_ids), len(order))
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, image_id: int) -> list[dict[str, Any]]:
        """The records of an image, in the order of the file.

        Raises KeyError for an unknown image, and InputError if the file has changed.
        """
        number = int(np.searchsorted(self._ids, image_id))
        if number == len(self._ids) or self._ids[number] != image_id:
            raise KeyError(image_id)
        self._check_unchanged()
        first, end = self._firsts[number : number + 2].tolist()
        spans = zip(
            self._starts[first:end].tolist(), self._lengths[first:end].tolist(), strict=True
        )
        return [json.loads(pread(self._file, length, start)) for start, length in spans]

    def _check_unchanged(self) -> None:
        status = os.fstat(self._file)
        if (status.st_mtime_ns, status.st_size) != self._stamp:
            raise InputError(
                f"{self._path}: the file has changed since it was opened; start again, or put the "
                "old one back and resume"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._open()


class LargeFile(NamedTuple):
    """What a dataset file holds."""

    images: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    annotations: IndexedRecords
    queries: IndexedRecords
    attributes: dict[str, set[str]]
    """For each attribute the words that annotations have."""
    sha256: str


def read_large_file(path: Path) -> LargeFile | None:
    """Reads and checks a dataset file as `check_records` and `check_contradictions` do.

    Returns None for a file with any problem, or of another form than one JSON object in UTF-8: the
    reader of smaller files then says what is wrong with it, or can read it. Raises InputError where
    most records contradict themselves.
    """
    try:
        file = path.open("rb")
    except OSError:
        return None
    with file, paused_collection():
        status = os.fstat(file.fileno())
        index = _Index()
        stream = _Stream(file)
        try:
            for key, record, start, length in stream.records():
                index.add(key, record, start, length)
        except (_UnusualError, ValueError, OSError, RecursionError):
            return None
        if not index.is_consistent():
            return None
        indexed = index.finish(path, (status.st_mtime_ns, status.st_size), stream.sha256())
    return indexed


class _UnusualError(Exception):
    """The file has a problem, or another form."""


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises _UnusualError if a key is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _UnusualError
    return values


class _Stream:
    """Parses a file chunk by chunk."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._hash = hashlib.sha256()
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._scan = json.JSONDecoder(object_pairs_hook=_to_dict).raw_decode
        # The characters that are read and not parsed yet begin at `_place`, which is byte
        # `_position` of the file.
        self._text = ""
        self._place = 0
        self._position = 0
        self._is_ascii = True
        self._has_ended = False

    def sha256(self) -> str:
        """Hash of the bytes that have been read."""
        return self._hash.hexdigest()

    def records(self) -> Iterator[tuple[str, Any, int, int]]:
        """The records of all lists of a dataset file: list, record, first byte and length.

        Raises _UnusualError or ValueError for a file of another form.
        """
        keys = set()
        self._take("{")
        while True:
            key, _, _ = self._value()
            if not isinstance(key, str) or key in keys:
                raise _UnusualError
            keys.add(key)
            self._take(":")
            if key in LISTS:
                yield from self._records_of_list(key)
            else:
                self._value()
            if self._next() != ",":
                break
            self._take(",")
        self._take("}")
        if self._next() or keys.isdisjoint(LISTS) or not keys.issuperset(LISTS):
            raise _UnusualError

    def _records_of_list(self, key: str) -> Iterator[tuple[str, Any, int, int]]:
        self._take("[")
        if self._next() == "]":
            self._take("]")
            return
        while True:
            yield key, *self._value()
            comma = _comma.match(self._text, self._place)
            if comma is not None:
                self._advance(comma.end())
                continue
            # The comma may be in the next chunk.
            if self._next() != ",":
                break
            self._take(",")
        self._take("]")

    def _next(self) -> str:
        """The next character that is not blank, which is not taken; "" at the end of the file."""
        while True:
            found = _no_blank.search(self._text, self._place)
            self._advance(len(self._text) if found is None else found.start())
            if found is not None:
                return found[0]
            if not self._read():
                return ""

    def _take(self, character: str) -> None:
        if self._next() != character:
            raise _UnusualError
        self._advance(self._place + 1)

    def _value(self) -> tuple[Any, int, int]:
        """The next value, the position of its first byte, and its length in bytes."""
        while len(self._text) - self._place < SPARE_CHARACTERS and self._read():
            pass
        if self._text[self._place : self._place + 1] in _BLANKS:
            self._next()
        while True:
            try:
                value, end = self._scan(self._text, self._place)
            except ValueError:
                end = len(self._text)
            else:
                # A number at the end may go on in the next chunk.
                if end < len(self._text) or self._has_ended:
                    break
            if not self._read():
                raise _UnusualError
        start = self._position
        self._advance(end)
        return value, start, self._position - start

    def _advance(self, place: int) -> None:
        if self._is_ascii:
            self._position += place - self._place
        else:
            self._position += len(self._text[self._place : place].encode())
        self._place = place

    def _read(self) -> bool:
        """Reads another chunk. Returns whether there was one."""
        if self._has_ended:
            return False
        chunk = self._file.read(CHUNK_BYTES)
        self._hash.update(chunk)
        self._has_ended = not chunk
        self._text = self._text[self._place :] + self._decode(chunk, final=self._has_ended)
        self._place = 0
        self._is_ascii = self._text.isascii()
        return not self._has_ended


class _Index:
    """Where the records are, and the numbers in them that must agree with other records.

    A list may come before those that its records refer to. So each record is checked alone, and the
    numbers of all when the whole file has been read.
    """

    def __init__(self) -> None:
        self.images: list[dict[str, Any]] = []
        self.categories: list[dict[str, Any]] = []
        self.attributes: dict[str, set[str]] = {}
        names = ("id", "image_id", "start", "length")
        self.annotations = {name: array("q") for name in (*names, "category_id")}
        self.queries = {name: array("q") for name in (*names, "num_instances")}
        # The masks that state a size: number of the annotation, height, width.
        self.sizes = {name: array("q") for name in ("annotation", "height", "width")}
        # The instances of all queries, one query after the other.
        self.instance_ids = array("q")

    def add(self, key: str, record: Any, start: int, length: int) -> None:
        """Adds a record of list `key`. Raises _UnusualError if it is wrong by itself."""
        if has_faults(key, record):
            raise _UnusualError
        if key == "images":
            self.images.append(record)
        elif key == "categories":
            self.categories.append(record)
        else:
            columns = self.annotations if key == "annotations" else self.queries
            columns["id"].append(record["id"])
            columns["image_id"].append(record["image_id"])
            columns["start"].append(start)
            columns["length"].append(length)
            if key == "annotations":
                self._add_annotation(record)
            else:
                columns["num_instances"].append(len(record["instance_ids"]))
                self.instance_ids.extend(record["instance_ids"])

    def _add_annotation(self, record: Mapping[str, Any]) -> None:
        self.annotations["category_id"].append(record["category_id"])
        for field in MASKS:
            mask = record.get(field)
            if isinstance(mask, dict):
                height, width = mask["size"]
                self.sizes["annotation"].append(len(self.annotations["id"]) - 1)
                self.sizes["height"].append(height)
                self.sizes["width"].append(width)
        for name, word in (record.get("attributes") or {}).items():
            self.attributes.setdefault(name, set()).add(word)

    def is_consistent(self) -> bool:
        """Whether no id is there twice, all that are referred to exist, masks have the sizes of
        their images, and queries mean annotations of their own images."""
        image_ids = np.array([image["id"] for image in self.images], np.int64)
        category_ids = np.array([category["id"] for category in self.categories], np.int64)
        annotation_ids = _numbers(self.annotations["id"])
        annotation_images = _numbers(self.annotations["image_id"])
        query_images = _numbers(self.queries["image_id"])
        lists_of_ids = (image_ids, category_ids, annotation_ids, _numbers(self.queries["id"]))
        if any(len(np.unique(ids)) < len(ids) for ids in lists_of_ids):
            return False

        references = (
            (annotation_images, image_ids),
            (query_images, image_ids),
            (_numbers(self.annotations["category_id"]), category_ids),
            (_numbers(self.instance_ids), annotation_ids),
        )
        if not all(np.isin(ids, targets).all() for ids, targets in references):
            return False

        image_sizes = np.array([(i["height"], i["width"]) for i in self.images], np.int64)
        images_of_masks = annotation_images[_numbers(self.sizes["annotation"])]
        expected = image_sizes.reshape(-1, 2)[_positions(images_of_masks, image_ids)]
        sizes = np.stack([_numbers(self.sizes["height"]), _numbers(self.sizes["width"])], 1)
        targets = _positions(_numbers(self.instance_ids), annotation_ids)
        owners = np.repeat(query_images, _numbers(self.queries["num_instances"]))
        return bool((sizes == expected).all() and (annotation_images[targets] == owners).all())

    def finish(self, path: Path, stamp: tuple[int, int], sha256: str) -> LargeFile:
        """Compares some annotations with their masks, and returns all that has been added.

        Raises InputError as `check_contradictions`.
        """
        self._compare_with_masks(path)
        known_ids = np.array(sorted(image["id"] for image in self.images), np.int64)
        groups = {}
        for key, columns in (("annotations", self.annotations), ("queries", self.queries)):
            groups[key] = IndexedRecords(
                path,
                stamp,
                _numbers(columns["image_id"]),
                _numbers(columns["start"]),
                _numbers(columns["length"]),
                known_ids,
            )
        return LargeFile(
            self.images,
            self.categories,
            groups["annotations"],
            groups["queries"],
            self.attributes,
            sha256,
        )

    def _compare_with_masks(self, path: Path) -> None:
        starts = self.annotations["start"]
        lengths = self.annotations["length"]
        compared = []
        with path.open("rb") as file:
            for number in compared_on_reading(len(starts)):
                file.seek(starts[number])
                compared.append(json.loads(file.read(lengths[number])))
        refuse_contradictions(path, {"images": self.images, "annotations": compared})


def _numbers(column: "array[int]") -> Int[np.ndarray, " n"]:
    """The numbers of a column, without a copy."""
    return np.frombuffer(column, np.int64) if column else np.zeros(0, np.int64)


def _positions(ids: Int[np.ndarray, " n"], targets: Int[np.ndarray, " t"]) -> Int[np.ndarray, " n"]:
    """Where in `targets` each of the ids is; all of them are there."""
    order = np.argsort(targets)
    return order[np.searchsorted(targets, ids, sorter=order)]
