"""Batches whose sentences are encoded ahead of their use.

An example has the token ids of its sentences (`TokenIds` in batches.py). Here they are replaced by
the states of the frozen language model. A thread does so some batches before training needs them,
and each sentence is encoded once.
"""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Float16, Int

from r2sm_jax.config import MatmulPrecision
from r2sm_jax.data.batches import Batch
from r2sm_jax.data.text_cache import TextStateCache, key_of_ids
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.data.tokenizer import NO_TOKEN

GROUP = 4
"""Batches whose new sentences are encoded together, so that few of the rows that the language model
computes are padding."""
AHEAD = 3
"""Batches that are ready. One of the default has 18 MB of states."""
TEXT_FIELDS = ("text", "type_text")


class BatchEncoder:
    """Replaces the token ids of batches by the states of the language model."""

    def __init__(self, texts: TextStates, precision: MatmulPrecision):
        """`precision` says how dense layers multiply."""
        self._encoder = texts.encoder
        self._precision: MatmulPrecision = precision
        # Not the cache of `texts`, which has what evaluations encode in another precision: what a
        # step reads must not depend on what was evaluated before.
        self._cache = TextStateCache(texts.cache.folder, texts.cache.model)

    def encode(self, batches: Sequence[Batch]) -> None:
        """Computes the states of the sentences that no earlier batch had.

        Raises InputError if the folder of the cache has no room for them.
        """
        token_ids: dict[str, list[int]] = {}
        for batch in batches:
            for row in self._rows(batch):
                ids = real_tokens(row)
                token_ids[key_of_ids(ids)] = ids
        new = {key: ids for key, ids in token_ids.items() if key not in self._cache}
        loaded = self._cache.load(new)
        missing = {key: ids for key, ids in new.items() if key not in loaded}
        states = self._encoder.encode_by_length(missing, precision=self._precision)
        self._cache.add(states, missing)

    def fill(self, batch: Batch) -> Batch:
        """The batch with states in place of token ids, whose sentences are encoded."""
        return batch | {name: self._states(batch[name]) for name in self._fields(batch)}

    def save(self) -> None:
        """Writes the states that are not in the folder of the cache yet, if there is one."""
        self._cache.save()

    def _fields(self, batch: Batch) -> list[str]:
        return [name for name in TEXT_FIELDS if name in batch]

    def _rows(self, batch: Batch) -> Iterator[Int[np.ndarray, " t"]]:
        for name in self._fields(batch):
            ids = batch[name]
            yield from ids.reshape(-1, ids.shape[-1])

    def _states(self, ids: Int[np.ndarray, "b k t"]) -> Float16[np.ndarray, "b k t l e"]:
        rows = ids.reshape(-1, ids.shape[-1])
        shape = (*rows.shape, len(self._encoder.layers), self._encoder.sizes.dim)
        states = np.zeros(shape, np.float16)
        for number, row in enumerate(rows):
            of_row = self._cache[key_of_ids(real_tokens(row))]
            states[number, : len(of_row)] = of_row
        return states.reshape(*ids.shape, *shape[2:])


def real_tokens(row: Int[np.ndarray, " t"]) -> list[int]:
    """The token ids of a row without its padding."""
    return row[row != NO_TOKEN].tolist()


class EncodedBatches(grain.DatasetIterator[Batch]):
    """Batches with states in place of token ids. Its state is that of the iterator of token ids."""

    def __init__(self, batches: grain.DatasetIterator[Batch], encoder: BatchEncoder):
        super().__init__(batches)
        self._batches = batches
        self._encoder = encoder
        self._state: dict[str, Any] = batches.get_state()
        # Batches whose sentences are encoded, each with the state after it.
        self._waiting: deque[tuple[Batch, dict[str, Any]]] = deque()

    def __next__(self) -> Batch:
        if not self._waiting:
            for _ in range(GROUP):
                batch = next(self._batches)
                self._waiting.append((batch, copy.deepcopy(self._batches.get_state())))
            self._encoder.encode([batch for batch, _ in self._waiting])
        batch, self._state = self._waiting.popleft()
        return self._encoder.fill(batch)

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._waiting.clear()
        self._batches.set_state(state)
        self._state = state

    def close(self) -> None:
        """Ends the iterator of token ids, and saves the states."""
        self._batches.close()
        self._encoder.save()


def encode_ahead(
    batches: grain.DatasetIterator[Batch], encoder: BatchEncoder, *, in_thread: bool
) -> grain.DatasetIterator[Batch]:
    """Batches with states in place of token ids.

    With `in_thread` some batches are made ahead by a thread, else each when it is asked for.
    """
    encoded = EncodedBatches(batches, encoder)
    if not in_thread:
        return encoded
    return grain.experimental.ThreadPrefetchDatasetIterator(encoded, AHEAD)
