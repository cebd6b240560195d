"""Arrays on disk that take long to compute: prepared images, image features and token states.

This run and later ones find them there (`--data.cache-dir`).
"""

import hashlib
import json
import math
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import __version__ as PIL_VERSION
from rich.filesize import decimal
from safetensors.numpy import save

from r2sm_jax.errors import InputError, atomic_write

Arrays = tuple[np.ndarray, ...]
DTYPES = {
    "F16": np.float16,
    "F32": np.float32,
    "U8": np.uint8,
    "I32": np.int32,
    "BOOL": np.bool_,
}
"""Types of the arrays, by the names that safetensors gives them."""
MAX_OPEN_FILES = 16
FILE_BYTES = 64 << 20
"""About the size of a file. As much is held in memory before it is written."""
MIN_REPORTED_BYTES = 1 << 20
"""Less than this is written without a message."""
SPARE_BYTES = 256 << 20
"""Disk space that is left for checkpoints and logs."""


def digest(*parts: Any) -> str:
    """A hash of arrays, and of other values by their `str`."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            # Arrays of other shapes or types can have the same bytes.
            total.update(f"{part.dtype} {part.shape} ".encode())
            total.update(part.tobytes())
        else:
            # Without the end mark "ab", "c" would be "a", "bc".
            total.update(f"{part}\0".encode())
    return total.hexdigest()


def stamp(path: Path) -> list[int] | None:
    """Size and time of the last change of a file; None if there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def fingerprint(files: Iterable[Path], *options: Any) -> str:
    """A hash of all that samples depend on: options, the code of this package, and files.

    A file counts by its size and the time of its last change.
    """
    package = Path(__file__).parents[1]
    code = sorted(p for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc")
    stamps = [(str(path.resolve()), stamp(path)) for path in (*code, *files)]
    return digest(*options, stamps, np.__version__, PIL_VERSION)


# Windows cannot read at a place of an open file, so threads take turns there.
_seeking = threading.Lock()


def seek_and_read(file: int, count: int, start: int) -> bytes:
    """Reads `count` bytes from `start`, for systems without `os.pread`."""
    with _seeking:
        os.lseek(file, start, os.SEEK_SET)
        return os.read(file, count)


pread: Callable[[int, int, int], bytes] = getattr(os, "pread", seek_and_read)


class OpenFile:
    """A file that stays open as long as this object lives. Threads may read it."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        # Python warns of files that are left to it to close.
        weakref.finalize(self, file.close)

    def read(self, num_bytes: int, start: int) -> bytes:
        """Reads `num_bytes` from `start`."""
        return pread(self._file.fileno(), num_bytes, start)


class FileOnDemand:
    """A file that is opened when it is read. Only the `MAX_OPEN_FILES` that were read last stay
    open, since a system permits a process about a thousand."""

    def __init__(self, path: Path):
        self._path = path

    def read(self, num_bytes: int, start: int) -> bytes:
        """Reads `num_bytes` from `start`. Raises InputError if the file is gone."""
        try:
            file = _open_file(self._path)
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot read the file any more ({error.strerror}); start again, and "
                "what is missing is computed again"
            ) from None
        return file.read(num_bytes, start)


@lru_cache(MAX_OPEN_FILES)
def _open_file(path: Path) -> OpenFile:
    """Opens a file. One that is forgotten is closed when nobody reads it any more."""
    return OpenFile(path.open("rb"))


class StoredArray(NamedTuple):
    """An array in a file.

    It is read and not mapped, so that it does not count as memory of the process.
    """

    file: OpenFile | FileOnDemand
    start: int
    """Position of its first byte."""
    shape: tuple[int, ...]
    dtype: type[np.generic]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def read(self) -> np.ndarray:
        """The array."""
        content = self.file.read(self.num_bytes, self.start)
        return np.frombuffer(content, self.dtype).reshape(self.shape)


class FeatureCache:
    """Arrays by key in the files of a folder. Threads may read it.

        FOLDER/<model>/<name>.safetensors    arrays of `DTYPES`, named <key>/<number>

    `model` is a hash of all that the arrays depend on except their key. Files are only added, each
    as a whole. So a run that is killed leaves whole files, and several runs may share a folder.
    """

    def __init__(self, folder: Path, model: str):
        """Finds what the folder holds for `model`.

        Raises InputError if the folder cannot be made or read, or holds a damaged file.
        """
        self.folder = folder / model[:32]
        self._flag = f"--data.cache-dir {folder}"
        self._arrays: dict[str, list[StoredArray]] = {}
        self._files: set[Path] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self._flag}: {error.strerror}; give a folder that can be written to"
            ) from None
        self.refresh()

    def refresh(self) -> None:
        """Finds the files that other processes have added. Raises InputError if one is damaged."""
        files = set(self.folder.glob("*.safetensors"))
        for path in sorted(files - self._files):
            self._find_arrays(path)

    def __contains__(self, key: str) -> bool:
        return key in self._arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, key: str) -> Arrays:
        return tuple(array.read() for array in self._arrays[key])

    def stored(self, key: str) -> StoredArray:
        """The only array of `key`, not read yet."""
        (array,) = self._arrays[key]
        return array

    def make_room(self, what: str, count: int, num_bytes: int) -> None:
        """Says how much will be written, unless that is little, before anything is.

        Raises InputError as `check_room`.
        """
        if num_bytes >= MIN_REPORTED_BYTES:
            print(f"keeping {count:,} {what}, {decimal(num_bytes)}, in {self.folder}", flush=True)
        self.check_room(what, count, num_bytes)

    def check_room(self, what: str, count: int, num_bytes: int) -> None:
        """Raises InputError if the disk does not have that much to spare."""
        free = shutil.disk_usage(self.folder).free
        if count and num_bytes + SPARE_BYTES > free:
            raise InputError(
                f"{self._flag}: {count:,} {what} take {decimal(num_bytes)} and the disk has "
                f"{decimal(free)} left; free some, give another folder, or train without the cache"
            )

    def add(self, items: Iterable[tuple[str, Arrays]]) -> None:
        """Writes arrays by key, as they come. Raises InputError if the disk is full."""
        waiting: dict[str, np.ndarray] = {}
        num_bytes = 0
        for key, arrays in items:
            for number, array in enumerate(arrays):
                waiting[f"{key}/{number:02}"] = np.ascontiguousarray(array)
                num_bytes += array.nbytes
            if num_bytes >= FILE_BYTES:
                self._write(waiting)
                waiting = {}
                num_bytes = 0
        if waiting:
            self._write(waiting)

    def _write(self, arrays: dict[str, np.ndarray]) -> None:
        """Writes a file."""
        # Random names, so that processes that share the folder never write the same file.
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        with atomic_write(path) as part:
            part.write_bytes(save(arrays))
        self._find_arrays(path)

    def _find_arrays(self, path: Path) -> None:
        """Reads which arrays a file has."""
        try:
            with path.open("rb") as file:
                arrays = read_header(file, path.stat().st_size, FileOnDemand(path))
        except OSError as error:
            raise InputError(
                f"{path}: cannot read the file ({error.strerror}); permit reading it, or more open "
                "files (ulimit -n)"
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InputError(
                f"{path} is damaged; delete it, and its features are computed again"
            ) from None

        self._files.add(path)
        by_key: dict[str, list[StoredArray]] = {}
        for name in sorted(arrays):
            key = name.partition("/")[0]
            by_key.setdefault(key, []).append(arrays[name])
        self._arrays |= by_key


def read_header(
    file: IO[bytes], size: int, stored_in: OpenFile | FileOnDemand
) -> dict[str, StoredArray]:
    """The arrays of a safetensors file of `size` bytes, by name, which are read from `stored_in`.

    The format: 8 bytes with the length of a JSON header, the header, then the arrays. Raises
    ValueError, LookupError, TypeError or AttributeError if the file is damaged.
    """
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(length, size)))
    arrays = {}
    end = 8 + length
    for name, about in header.items():
        start = 8 + length + about["data_offsets"][0]
        array = StoredArray(stored_in, start, tuple(about["shape"]), DTYPES[about["dtype"]])
        arrays[name] = array
        end = max(end, array.start + array.num_bytes)
    if end != size:
        raise ValueError("the file is cut short")
    return arrays


def to_float16(array: np.ndarray) -> np.ndarray:
    """Features as the cache stores them. Raises InputError if one is beyond float16."""
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(array, np.float16)
    if not np.isfinite(stored).all():
        raise InputError(
            "--data.cache-dir stores float16, and a feature of this model is beyond its range; "
            "train "
            "without it"
        )
    return stored
