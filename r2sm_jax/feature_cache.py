"""Arrays on disk that take long to compute, for this run and later ones."""

import hashlib
import math
import os
import shutil
import uuid
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import __version__ as PIL_VERSION
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open
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
    code = sorted(p for p in Path(__file__).parent.rglob("*") if p.is_file() and p.suffix != ".pyc")
    return digest(
        *options, [(str(path.resolve()), stamp(path)) for path in (*code, *files)], np.__version__, PIL_VERSION
    )


class Place(NamedTuple):
    """An array in an open file. It is read, not mapped, so that it does not count as memory of the process."""

    file: IO[bytes]
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        count = self.dtype.itemsize * math.prod(self.shape)
        return np.frombuffer(os.pread(self.file.fileno(), count, self.start), self.dtype).reshape(self.shape)


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
        self._flag = f"--data.cache-features {folder}"
        self._places: dict[str, list[Place]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self._flag}: {error.strerror}; give a folder that can be written to") from None
        self._found: set[Path] = set()
        self.refresh()

    def refresh(self) -> None:
        """Finds what other processes have added. Raises InputError if a file is damaged."""
        for path in sorted({*self.folder.glob("*.safetensors")} - self._found):
            self._find(path)

    def _find(self, path: Path) -> None:
        try:
            with safe_open(path, "numpy") as arrays:
                slices = {name: arrays.get_slice(name) for name in arrays.offset_keys()}
                about = [(tuple(x.get_shape()), np.dtype(TYPES[x.get_dtype()])) for x in slices.values()]
            file = path.open("rb")
        except (SafetensorError, OSError, KeyError):
            raise InputError(f"{path} is damaged; delete it, and its features are computed again") from None
        self._found.add(path)
        sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in about]
        start = os.fstat(file.fileno()).st_size - sum(sizes)  # the file ends with the arrays
        found = {}
        for name, (shape, dtype), size in zip(slices, about, sizes, strict=True):
            found[name] = Place(file, start, shape, dtype)
            start += size
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
            kept |= {f"{key}/{number:02}": np.ascontiguousarray(array) for number, array in enumerate(arrays)}
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
            "--data.cache-features keeps float16, and a feature of this model is beyond its range; train without it"
        )
    return kept
