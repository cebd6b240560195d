"""Arrays by name, of which only so many bytes are in memory; the others are in a temporary file.

Training needs the states of hundreds of thousands of sentences, a few hundred of them at a step. The file is read, not
mapped, so that it does not count as memory of the process; where the machine has memory to spare, it still holds it.
"""

import os
import tempfile
from collections.abc import Iterator, MutableMapping

import numpy as np

from r2sm_jax.errors import InputError


class KeptArrays(MutableMapping[str, np.ndarray]):
    """A mapping from names to arrays. Threads may read it while one of them writes."""

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
