"""Token states by sentence: in memory while they are few, else in files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO

import numpy as np
from jaxtyping import Float16

from r2sm_jax.data.cache import FILE_BYTES, FeatureCache, OpenFile, StoredArray, digest, to_float16
from r2sm_jax.errors import InputError

MAX_MEMORY_BYTES = 128 << 20
"""How many states stay in memory. The sentences of the hour's run have 5 GB of states."""


class TextStateCache:
    """Token states by sentence: in memory as long as they are few, else in files.

    With a folder all states get into its files, where later runs find them by their token ids.
    Without one, they get into one temporary file.

    Attributes:
        folder: The folder; None without one.
        model: A hash of what the states depend on beside the token ids.
    """

    def __init__(self, folder: Path | None, model: str):
        """Opens the states that the folder holds for `model`, a hash of model and layers."""
        self.folder = folder
        self.model = model
        self._files = None if folder is None else FeatureCache(folder, model)
        # A file without a name, so that a process that is killed leaves nothing behind.
        self._temporary: IO[bytes] | None = None
        self._stored_in: OpenFile | None = None
        self._states: dict[str, np.ndarray | StoredArray] = {}
        # The sentences whose states are in no file yet, with their token ids.
        self._unwritten: dict[str, list[int]] = {}
        self._num_unwritten_bytes = 0

    def __contains__(self, sentence: str) -> bool:
        return sentence in self._states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, sentence: str) -> Float16[np.ndarray, "t l e"]:
        states = self._states[sentence]
        return states.read() if isinstance(states, StoredArray) else states

    def num_tokens(self, sentence: str) -> int:
        """The number of tokens of a sentence, without reading its states."""
        return self._states[sentence].shape[0]

    def load(self, token_ids: Mapping[str, list[int]]) -> set[str]:
        """Looks for the states of new sentences in the folder; returns those that have some.

        `token_ids` are those of the new sentences.
        """
        loaded = set()
        if self._files is not None:
            for sentence, ids in token_ids.items():
                key = key_of_ids(ids)
                if key in self._files:
                    self._states[sentence] = self._files.stored(key)
                    loaded.add(sentence)
        return loaded

    def add(
        self, states: Iterable[tuple[str, np.ndarray]], token_ids: Mapping[str, list[int]]
    ) -> None:
        """Adds the states of new sentences as they are computed. Those that are too many for the
        memory are written to files.

        `token_ids` are those of the new sentences. Raises InputError as `write`.
        """
        max_bytes = MAX_MEMORY_BYTES if self._files is None else FILE_BYTES
        for sentence, array in states:
            self._states[sentence] = array
            self._unwritten[sentence] = token_ids[sentence]
            self._num_unwritten_bytes += array.nbytes
            if self._num_unwritten_bytes > max_bytes:
                self.write()

    def write(self) -> None:
        """Writes all states to files, and refers to them there.

        Raises InputError if the folder of the cache has no room for them.
        """
        if not self._unwritten:
            return
        if self._files is not None:
            self._files.check_room("sentences", len(self._unwritten), self._num_unwritten_bytes)
            self._write_to_folder(self._files)
        else:
            self._write_to_temporary_file()
        self._unwritten = {}
        self._num_unwritten_bytes = 0

    def save(self) -> None:
        """Writes what is not in the folder yet, if there is one."""
        if self._files is not None:
            self.write()

    def add_request(self, states: Mapping[str, np.ndarray]) -> None:
        """Adds the states of a request. They stay in memory until `forget`."""
        self._states |= states

    def forget(self, sentence: str) -> None:
        """Drops a sentence from memory."""
        self._states.pop(sentence, None)

    def _write_to_folder(self, files: FeatureCache) -> None:
        keys = {sentence: key_of_ids(ids) for sentence, ids in self._unwritten.items()}
        files.add((key, (to_float16(self[sentence]),)) for sentence, key in keys.items())
        for sentence, key in keys.items():
            self._states[sentence] = files.stored(key)

    def _write_to_temporary_file(self) -> None:
        try:
            if self._temporary is None or self._stored_in is None:
                self._temporary = TemporaryFile(prefix="r2sm_jax_")  # noqa: SIM115 (it stays open)
                self._stored_in = OpenFile(self._temporary)
            stored = {}
            for sentence in self._unwritten:
                array = to_float16(self[sentence])
                start = self._temporary.tell()
                self._temporary.write(array.tobytes())
                stored[sentence] = StoredArray(self._stored_in, start, array.shape, np.float16)
            self._temporary.flush()
        except OSError as error:
            raise InputError(
                f"{gettempdir()}: the states of sentences do not fit there ({error.strerror}); "
                "free disk space, or give a folder with --data.cache-dir"
            ) from error
        self._states |= stored


def key_of_ids(ids: list[int]) -> str:
    """The key of a sentence in files: a hash of its token ids."""
    return digest(np.asarray(ids, np.int32))
