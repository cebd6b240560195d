"""Batches that wait on the devices for the step that reads them."""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int

from r2sm_jax.data.batches import Batch

DEVICE_BATCHES = 2
"""How many wait. While the devices compute a step, the next batch has then arrived, and a late one
after it delays nothing."""


class _Waiting(NamedTuple):
    """A batch on the devices."""

    index: Int[np.ndarray, " b"]
    """`index` of the batch, still on the host."""
    batch: Batch
    state: dict[str, Any]
    """State of the batches of the host after this one."""


class DeviceBatches(grain.DatasetIterator[tuple[Int[np.ndarray, " b"], Batch]]):
    """Batches on the devices, each with the positions of its images in the source.

    Its state is that of the host's batches after the one that was taken last, so a resumed run goes
    on with the first that waits.

    `fill` is not left to a thread: processes that share devices must give them their programs in
    the same order.
    """

    def __init__(self, batches: grain.DatasetIterator[Batch], put: Callable[[Batch], Batch]):
        """`put` brings a batch of the host to the devices."""
        super().__init__(batches)
        self._batches = batches
        self._put = put
        self._state: dict[str, Any] = batches.get_state()
        self._waiting: deque[_Waiting] = deque()

    def fill(self) -> None:
        """Puts batches on the devices until `DEVICE_BATCHES` wait. The time for it is when the
        devices have just been given a step."""
        while len(self._waiting) < DEVICE_BATCHES:
            self._put_next()

    def __next__(self) -> tuple[Int[np.ndarray, " b"], Batch]:
        if not self._waiting:
            self._put_next()
        index, batch, self._state = self._waiting.popleft()
        return index, batch

    def _put_next(self) -> None:
        batch = next(self._batches)
        state = copy.deepcopy(self._batches.get_state())
        self._waiting.append(_Waiting(batch["index"], self._put(batch), state))

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._waiting.clear()
        self._batches.set_state(state)
        self._state = state
