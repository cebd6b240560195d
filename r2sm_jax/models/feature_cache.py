"""What a frozen model computes from its inputs, on disk: array_record files that later runs read instead of computing.

    FOLDER/<model>/<name>.array_record    one record an input: its arrays, float16, one .npy after another
    FOLDER/<model>/<name>.json            {"keys": [...]}: the hash of each record's input, in order

`model` is a hash of all that the arrays depend on except the input. Files are only added, and the list of keys comes
last. So a run that is killed while it writes leaves whole files, and several runs may share a folder.
"""

import hashlib
import io
import json
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from r2sm_jax.errors import InputError, writing

Arrays = tuple[np.ndarray, ...]
FILE_BYTES = 64 << 20
"""Size of a file, about; so much is held in memory before it is written."""
QUIET_BYTES = 1 << 20
"""Less than this is written without a message."""
SPARE_BYTES = 256 << 20
"""Disk space that is left for checkpoints and logs."""


def digest(*parts: Any) -> str:
    """A hash of arrays and of things that `str` tells apart."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype} {part.shape} ".encode() + part.tobytes())
        else:
            found.update(f"{part}\0".encode())
    return found.hexdigest()


class FeatureCache:
    """`key in cache`, `cache[key]`, `cache.add(...)`. Threads may read it."""

    def __init__(self, folder: Path, model: str):
        """Finds what the folder holds for `model`.

        Raises:
            InputError: the folder cannot be made or read, or holds a damaged file.
        """
        self.folder = folder / model[:32]
        self._flag = f"--data.cache-features {folder}"
        self._find()

    def _find(self) -> None:
        try:
            from grain.sources import ArrayRecordDataSource
        except ImportError:  # array_record has no wheel for Windows
            raise InputError(f"{self._flag}: array_record is not available on this platform") from None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self._flag}: {error.strerror}; give a folder that can be written to") from None
        try:
            lists = sorted(self.folder.glob("*.json"))
            keys = [key for file in lists for key in json.loads(file.read_text())["keys"]]
            records = [str(file.with_suffix(".array_record")) for file in lists]
            self._records: Any = ArrayRecordDataSource(records) if records else []
        except Exception:  # a damaged array_record file raises whatever its C++ part does
            raise self._damaged() from None
        if len(self._records) != len(keys):
            raise self._damaged()
        self._rows = {key: row for row, key in enumerate(keys)}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> Arrays:
        arrays = []
        try:
            record = io.BytesIO(self._records[self._rows[key]])
            while record.tell() < len(record.getbuffer()):
                arrays.append(np.load(record))
        except (ValueError, RuntimeError, OSError):
            raise self._damaged() from None
        return tuple(arrays)

    def _damaged(self) -> InputError:
        return InputError(f"{self.folder} is damaged; delete it, and its features are computed again")

    def make_room(self, what: str, count: int, size: int) -> None:
        """Prints how many bytes will be written, unless they are few, before anything is.

        Raises:
            InputError: the disk does not have that much to spare.
        """
        free = shutil.disk_usage(self.folder).free
        if size >= QUIET_BYTES:
            print(f"caching the features of {count:,} {what}, {decimal(size)}, in {self.folder}", flush=True)
        if count and size + SPARE_BYTES > free:
            raise InputError(
                f"{self._flag}: the features of {count:,} {what} take {decimal(size)} and the disk has "
                f"{decimal(free)} left; free some, give another folder, or train without the cache"
            )

    def add(self, items: Iterable[tuple[str, Arrays]]) -> None:
        """Writes arrays by key, as they come.

        Raises:
            InputError: an array does not fit into float16, or the disk is full.
        """
        records: dict[str, bytes] = {}
        size = 0
        for key, arrays in items:
            records[key] = _pack(arrays)
            size += len(records[key])
            if size >= FILE_BYTES:
                self._write(records)
                records, size = {}, 0
        if records:
            self._write(records)
        self._find()

    def _write(self, records: dict[str, bytes]) -> None:
        """One file of records, and then its list of keys."""
        from array_record.python.array_record_module import ArrayRecordWriter

        name = uuid.uuid4().hex
        with writing(self.folder / f"{name}.json") as keys, writing(self.folder / f"{name}.array_record") as file:
            keys.write_text(json.dumps({"keys": list(records)}))
            try:
                writer = ArrayRecordWriter(str(file), "group_size:1,uncompressed")
                for record in records.values():
                    writer.write(record)
                writer.close()
            except (RuntimeError, ValueError) as error:
                raise OSError(str(error)) from None


def _pack(arrays: Arrays) -> bytes:
    record = io.BytesIO()
    for array in arrays:
        kept = array.astype(np.float16)
        if not np.isfinite(kept).all():
            raise InputError(
                "--data.cache-features keeps float16, and a feature of this model is beyond its range; train without it"
            )
        np.save(record, kept)
    return record.getvalue()
