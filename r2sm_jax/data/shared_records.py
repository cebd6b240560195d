"""Records of a dataset file on disk, for worker processes that would each need a copy of them."""

import os
import pickle
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from r2sm_jax.data.cache import pread


class SharedRecords:
    """The lists of records of a mapping from image ids, in a temporary file.

    Copies in other processes read the same file, which is deleted with the original. COCO's 860,000
    annotations take 3 GB of memory as objects of Python, and 16 MB here.
    """

    def __init__(self, groups: Mapping[int, list[Any]]):
        """Writes all lists. Raises OSError where the folder of temporary files has no room."""
        self._ids = np.array(sorted(groups), np.int64)
        self._ends = np.zeros(len(self._ids) + 1, np.int64)
        descriptor, self._path = tempfile.mkstemp(prefix="r2sm_jax_")
        weakref.finalize(self, _delete, self._path)
        with os.fdopen(descriptor, "wb") as file:
            for number, image_id in enumerate(self._ids.tolist(), start=1):
                file.write(pickle.dumps(groups[image_id], pickle.HIGHEST_PROTOCOL))
                self._ends[number] = file.tell()
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, image_id: int) -> list[Any]:
        """The records of an image. Raises KeyError for an unknown one."""
        number = int(np.searchsorted(self._ids, image_id))
        if number == len(self._ids) or self._ids[number] != image_id:
            raise KeyError(image_id)
        start, end = self._ends[number : number + 2].tolist()
        return pickle.loads(pread(self._file, end - start, start))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._open()


def _delete(path: str) -> None:
    """Deletes a file that other processes may still have open, which they then go on to read."""
    with suppress(OSError):  # Windows keeps a file that is open
        os.remove(path)
