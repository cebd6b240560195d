"""What a frozen model makes of its inputs, on disk: array_record files that every later run reads instead of computing.

    FOLDER/<model>/<name>.array_record    one record an input: its arrays, float16, as .npy after .npy
    FOLDER/<model>/<name>.json            {"keys": [...]}: the hash of each record's input, in order

`model` is a hash of all that the arrays depend on but the input. Files are only ever added, each with its list of keys
last, so a run that is killed while it writes leaves what was finished, and several runs may share a folder.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.errors import InputError

Arrays = tuple[np.ndarray, ...]
FILE_BYTES = 256 << 20
"""Features are written to files of about this size."""
SAID_BYTES = 1 << 20
"""Less than this is written without a word."""
SPARE_BYTES = 256 << 20
"""Disk space that is left alone: checkpoints and logs want some too."""
OPTIONS = "group_size:1,uncompressed"


def digest(*parts: Any) -> str:
    """A hash of arrays and of things that `str` tells apart."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype} {part.shape} ".encode())
            part = np.ascontiguousarray(part).data
        found.update(part if isinstance(part, memoryview) else f"{part}\0".encode())
    return found.hexdigest()


class FeatureCache:
    """`key in cache`, `cache[key]`, `cache.add(...)`. Threads may read it."""

    def __init__(self, folder: Path, model: str):
        """Finds what the folder holds for `model`.

        Raises:
            InputError: the folder cannot be made or read, or holds a damaged file.
        """
        try:
            from grain.sources import ArrayRecordDataSource
        except ImportError:  # array_record has no wheel for Windows
            raise InputError(
                f"--data.cache-features {folder}: array_record is not available on this platform"
            ) from None
        self.folder, self._source = folder / model[:32], ArrayRecordDataSource
        self._find()

    def _find(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lists = sorted(self.folder.glob("*.json"))
            keys = [key for file in lists for key in json.loads(file.read_text())["keys"]]
        except OSError as error:
            raise InputError(
                f"--data.cache-features {self.folder.parent}: {error.strerror}; give a folder that can be written to"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise self._damaged() from None
        self._rows = {key: row for row, key in enumerate(keys)}
        records = [str(file.with_suffix(".array_record")) for file in lists]
        try:
            self._records: Any = self._source(records) if records else []
        except Exception:  # array_record has no errors of its own: a damaged file raises whatever its C++ part does
            raise self._damaged() from None
        if len(self._records) != len(keys):
            raise self._damaged()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> Arrays:
        try:
            return _unpack(io.BytesIO(self._records[self._rows[key]]))
        except (ValueError, RuntimeError, OSError):
            raise self._damaged() from None

    def _damaged(self) -> InputError:
        return InputError(f"{self.folder} is damaged; delete it, and its features are computed again")

    def make_room(self, what: str, count: int, size: int) -> None:
        """Says what will be written, if it is worth a line, before anything is.

        Raises:
            InputError: the disk has less than that to spare.
        """
        if not count:
            return
        free = shutil.disk_usage(self.folder).free
        if size >= SAID_BYTES:
            print(f"caching the features of {count:,} {what}, {said(size)}, in {self.folder}", flush=True)
        if size + SPARE_BYTES > free:
            raise InputError(
                f"--data.cache-features {self.folder.parent}: the features of {count:,} {what} take {said(size)} and "
                f"the disk has {said(free)} left; free some, give another folder, or train without the cache"
            )

    def add(self, items: Iterable[tuple[str, Arrays]]) -> None:
        """Writes arrays by key, as they come.

        Raises:
            InputError: an array does not fit into float16, or the disk is full.
        """
        from array_record.python.array_record_module import ArrayRecordWriter

        keys: list[str] = []
        written, writer, part = 0, None, Path()
        try:
            for key, arrays in items:
                if writer is None:
                    handle, name = tempfile.mkstemp(suffix=".part", dir=self.folder)
                    os.close(handle)
                    part, writer = Path(name), ArrayRecordWriter(name, OPTIONS)
                record = _pack(arrays)
                writer.write(record)
                keys.append(key)
                written += len(record)
                if written >= FILE_BYTES:
                    self._finish(writer, part, keys)
                    keys, written, writer = [], 0, None
            if writer is not None:
                self._finish(writer, part, keys)
                writer = None
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"--data.cache-features {self.folder.parent}: features cannot be written "
                f"({getattr(error, 'strerror', None) or error}); free disk space or train without the cache"
            ) from None
        finally:
            if writer is not None:
                part.unlink(missing_ok=True)
        self._find()

    def _finish(self, writer: Any, part: Path, keys: list[str]) -> None:
        writer.close()
        name = digest(*keys)[:32]
        os.replace(part, self.folder / f"{name}.array_record")
        part.write_text(json.dumps({"keys": keys}))
        os.replace(part, self.folder / f"{name}.json")


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


def _unpack(record: io.BytesIO) -> Arrays:
    size, found = record.getbuffer().nbytes, []
    while record.tell() < size:
        found.append(np.load(record))
    return tuple(found)


def said(size: int) -> str:
    """A number of bytes, as people say it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size, 1e5) / 1e6:.1f} MB"
