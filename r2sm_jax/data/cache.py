"""Arrays on disk that take long to compute, for this run and later ones."""

import hashlib
import json
import math
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import __version__ as PIL_VERSION
from rich.filesize import decimal
from safetensors.numpy import save

from r2sm_jax.errors import InputError, writing

Arrays = tuple[np.ndarray, ...]
TYPES = {"F16": np.float16, "F32": np.float32, "U8": np.uint8, "I32": np.int32, "BOOL": np.bool_}
"""Of the arrays, by the names that safetensors gives them."""
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


def stamp(path: Path) -> list[int] | None:
    """Size and time of change of a file; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def fingerprint(files: Iterable[Path], *options: Any) -> str:
    """Changes with all that samples depend on: options, the code of this package, and files, each of which is known by
    its size and time of change."""
    code = sorted(
        p for p in Path(__file__).parents[1].rglob("*") if p.is_file() and p.suffix != ".pyc"
    )
    return digest(
        *options,
        [(str(path.resolve()), stamp(path)) for path in (*code, *files)],
        np.__version__,
        PIL_VERSION,
    )


_seeking = threading.Lock()


def _pread(file: int, count: int, start: int) -> bytes:
    with _seeking:
        os.lseek(file, start, os.SEEK_SET)
        return os.read(file, count)


pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _pread)
"""Reads at a place of an open file; Windows has no such call."""


class Place(NamedTuple):
    """An array in an open file. It is read, not mapped, so that it does not count as memory of the process."""

    file: IO[bytes]
    start: int
    shape: tuple[int, ...]
    dtype: type[np.generic]

    @property
    def size(self) -> int:
        """Bytes."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def read(self) -> np.ndarray:
        return np.frombuffer(pread(self.file.fileno(), self.size, self.start), self.dtype).reshape(
            self.shape
        )


class FeatureCache:
    """`key in cache`, `cache[key]`, `cache.add(...)`. Threads may read it.

        FOLDER/<model>/<name>.safetensors    arrays of `TYPES`, named <hash of their input>/<number>

    `model` is a hash of all that the arrays depend on except the input. Files are only added, each as a whole. So a run
    that is killed leaves whole files, and several runs may share a folder.
    """

    def __init__(self, folder: Path, model: str):
        """Finds what the folder holds for `model`. Raises InputError if the folder cannot be made or read, or holds a
        damaged file."""
        self.folder = folder / model[:32]
        self._flag = f"--data.cache-dir {folder}"
        self._places: dict[str, list[Place]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self._flag}: {error.strerror}; give a folder that can be written to"
            ) from None
        self._found: set[Path] = set()
        self.refresh()

    def refresh(self) -> None:
        """Finds what other processes have added. Raises InputError if a file is damaged."""
        for path in sorted({*self.folder.glob("*.safetensors")} - self._found):
            self._find(path)

    def _find(self, path: Path) -> None:
        try:
            file, size = path.open("rb"), path.stat().st_size
            length = int.from_bytes(
                file.read(8), "little"
            )  # of the JSON that says which arrays come after it
            found, end = dict[str, Place](), 8 + length
            for name, about in json.loads(file.read(min(length, size))).items():
                place = Place(
                    file,
                    8 + length + about["data_offsets"][0],
                    tuple(about["shape"]),
                    TYPES[about["dtype"]],
                )
                found[name], end = place, max(end, place.start + place.size)
            if end != size:
                raise ValueError("it is cut short")
        except OSError as error:
            remedy = "permit reading it, or more open files (ulimit -n)"
            raise InputError(f"{path}: cannot read the file ({error.strerror}); {remedy}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InputError(
                f"{path} is damaged; delete it, and its features are computed again"
            ) from None
        self._found.add(path)
        by_key = groupby(sorted(found), key=lambda name: name.partition("/")[0])
        self._places |= {key: [found[name] for name in names] for key, names in by_key}

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> Arrays:
        return tuple(place.read() for place in self._places[key])

    def place(self, key: str) -> Place:
        """Where the only array of `key` is."""
        (place,) = self._places[key]
        return place

    def make_room(self, what: str, count: int, size: int) -> None:
        """Prints how many bytes will be written, unless they are few, before anything is. Raises InputError if the disk
        does not have that much to spare."""
        free = shutil.disk_usage(self.folder).free
        if size >= QUIET_BYTES:
            print(f"keeping {count:,} {what}, {decimal(size)}, in {self.folder}", flush=True)
        if count and size + SPARE_BYTES > free:
            raise InputError(
                f"{self._flag}: {count:,} {what} take {decimal(size)} and the disk has "
                f"{decimal(free)} left; free some, give another folder, or train without the cache"
            )

    def add(self, items: Iterable[tuple[str, Arrays]]) -> None:
        """Writes arrays by key, as they come. Raises InputError if the disk is full."""
        kept: dict[str, np.ndarray] = {}
        size = 0
        for key, arrays in items:
            kept |= {
                f"{key}/{number:02}": np.ascontiguousarray(array)
                for number, array in enumerate(arrays)
            }
            size += sum(array.nbytes for array in arrays)
            if size >= FILE_BYTES:
                self._write(kept)
                kept, size = {}, 0
        if kept:
            self._write(kept)

    def _write(self, arrays: dict[str, np.ndarray]) -> None:
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        with writing(path) as part:
            part.write_bytes(save(arrays))
        self._find(path)


def to_float16(array: np.ndarray) -> np.ndarray:
    """Features as they are kept. Raises InputError if one does not fit into float16."""
    kept = np.ascontiguousarray(array, np.float16)
    if not np.isfinite(kept).all():
        raise InputError(
            "--data.cache-dir keeps float16, and a feature of this model is beyond its range; train without it"
        )
    return kept
