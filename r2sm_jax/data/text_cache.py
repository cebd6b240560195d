"""Token states by sentence: in memory while they are few, else in files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from jaxtyping import Float16

from r2sm_jax.data.cache import FeatureCache, StoredArray, digest, to_float16

MAX_MEMORY_BYTES = 128 << 20
"""How many states stay in memory. The 93,000 sentences of a default run have 3 GB of states."""


class TextStateCache:
    """Token states by sentence: in memory as long as they are few, else in files.

    With a folder all states are in its files, where later runs find them by their token ids.
    Without one, the files are temporary.
    """

    def __init__(self, folder: Path | None, model: str):
        """Opens the states that the folder holds for `model`, a hash of model and layers."""
        self._files = None if folder is None else FeatureCache(folder, model)
        self._states: dict[str, np.ndarray | StoredArray] = {}
        self._memory_left = MAX_MEMORY_BYTES

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
        self,
        states: Iterable[tuple[str, np.ndarray]],
        token_ids: Mapping[str, list[int]],
        num_bytes: int,
    ) -> None:
        """Adds the states of new sentences as they are computed, `num_bytes` in all.

        `token_ids` are those of all new sentences. Raises InputError if the folder of the cache has
        no room for the states.
        """
        if self._files is not None:
            self._files.make_room("sentences", len(token_ids), num_bytes)
            self._write(self._files, states, token_ids)
        elif num_bytes <= self._memory_left:
            self._states |= dict(states)
            self._memory_left -= num_bytes
        else:
            # Open files stay readable when their folder is gone, so that a process that is killed
            # leaves nothing behind. Windows keeps the folder.
            with TemporaryDirectory(prefix="r2sm_jax_", ignore_cleanup_errors=True) as folder:
                self._write(FeatureCache(Path(folder), "states"), states, token_ids)

    def add_request(self, states: Mapping[str, np.ndarray]) -> None:
        """Adds the states of a request. They stay in memory until `forget`."""
        self._states |= states

    def forget(self, sentence: str) -> None:
        """Drops a sentence from memory."""
        self._states.pop(sentence, None)

    def _write(
        self,
        files: FeatureCache,
        states: Iterable[tuple[str, np.ndarray]],
        token_ids: Mapping[str, list[int]],
    ) -> None:
        """Writes states to files, and refers to them there."""
        files.add(
            (key_of_ids(token_ids[sentence]), (to_float16(array),)) for sentence, array in states
        )
        for sentence, ids in token_ids.items():
            self._states[sentence] = files.stored(key_of_ids(ids))


def key_of_ids(ids: list[int]) -> str:
    """The key of a sentence in files: a hash of its token ids."""
    return digest(np.asarray(ids, np.int32))
