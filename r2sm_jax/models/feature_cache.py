"""What frozen models compute from their inputs: `FeatureCache` keeps it for later runs, `KeptArrays` for this one."""

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

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
    """`key in cache`, `cache[key]`, `cache.add(...)`. Threads may read it.

        FOLDER/<model>/<name>.safetensors    arrays in float16, named <hash of their input>/<number>

    `model` is a hash of all that the arrays depend on except the input. Files are only added, each as a whole. So a run
    that is killed leaves whole files, and several runs may share a folder.
    """

    def __init__(self, folder: Path, model: str):
        """Finds what the folder holds for `model`. Raises InputError if the folder cannot be made or read, or holds a
        damaged file."""
        self.folder = folder / model[:32]
        self._flag = f"--data.cache-features {folder}"
        self._places: dict[str, dict[str, Any]] = {}  # key -> name of each array -> file that has it
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
            file = safe_open(path, "numpy")
        except (SafetensorError, OSError):
            raise InputError(f"{path} is damaged; delete it, and its features are computed again") from None
        self._found.add(path)
        for name in sorted(file.keys()):
            self._places.setdefault(name.partition("/")[0], {})[name] = file

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> Arrays:
        return tuple(file.get_tensor(name) for name, file in self._places[key].items())

    def make_room(self, what: str, count: int, size: int) -> None:
        """Prints how many bytes will be written, unless they are few, before anything is. Raises InputError if the disk
        does not have that much to spare."""
        free = shutil.disk_usage(self.folder).free
        if size >= QUIET_BYTES:
            print(f"caching the features of {count:,} {what}, {decimal(size)}, in {self.folder}", flush=True)
        if count and size + SPARE_BYTES > free:
            raise InputError(
                f"{self._flag}: the features of {count:,} {what} take {decimal(size)} and the disk has "
                f"{decimal(free)} left; free some, give another folder, or train without the cache"
            )

    def add(self, items: Iterable[tuple[str, Arrays]]) -> None:
        """Writes arrays by key, as they come. Raises InputError if an array does not fit into float16, or the disk is
        full."""
        kept: dict[str, np.ndarray] = {}
        size = 0
        for key, arrays in items:
            kept |= {f"{key}/{number}": _to_float16(array) for number, array in enumerate(arrays)}
            size += sum(2 * array.size for array in arrays)
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


def _to_float16(array: np.ndarray) -> np.ndarray:
    kept = np.ascontiguousarray(array, np.float16)
    if not np.isfinite(kept).all():
        raise InputError(
            "--data.cache-features keeps float16, and a feature of this model is beyond its range; train without it"
        )
    return kept


class KeptArrays(MutableMapping[str, np.ndarray]):
    """Arrays by name, of which only so many bytes are in memory; the others are in a temporary file.

    Training needs the states of hundreds of thousands of sentences, a few hundred of them at a step. The file is read,
    not mapped, so that it does not count as memory of the process. Threads may read it while one of them writes.
    """

    def __init__(self, memory: int):
        """`memory`: bytes of arrays that stay in memory, those that come first."""
        self._left = memory
        self._held: dict[str, np.ndarray] = {}
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype]] = {}  # start in the file, shape, type
        self._end = 0

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._held:
            return self._held[name]
        start, shape, dtype = self._places[name]
        count = dtype.itemsize * int(np.prod(shape))
        return np.frombuffer(os.pread(self._file.fileno(), count, start), dtype).reshape(shape)

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        """Raises InputError if the disk is full."""
        if name in self:
            del self[name]
        if array.nbytes <= self._left:
            self._held[name] = array
            self._left -= array.nbytes
            return
        if not self._end:  # nothing was written yet
            self._file = tempfile.TemporaryFile(prefix="r2sm_jax_")  # noqa: SIM115, kept open
        try:
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"{tempfile.gettempdir()}: {error.strerror}, after {self._end:,} bytes of temporary arrays; free some "
                "space, or set TMPDIR to a folder that has more"
            ) from None
        self._places[name] = self._end, array.shape, array.dtype
        self._end += array.nbytes

    def __delitem__(self, name: str) -> None:
        """Frees memory; the file stays as long as it is."""
        if name in self._held:
            self._left += self._held.pop(name).nbytes
        else:
            del self._places[name]

    def __contains__(self, name: object) -> bool:
        return name in self._held or name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter([*self._held, *self._places])

    def __len__(self) -> int:
        return len(self._held) + len(self._places)

    def rows(self, name: str) -> int:
        """The length of an array, which is not read for that."""
        return len(self._held[name]) if name in self._held else self._places[name][1][0]
