"""Threads that read the next images, and work on the answers of the last ones, while the model
computes."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = min(8, os.cpu_count() or 1)
"""Each may hold a large image, or the masks of one, for a moment."""


def read_ahead(
    pool: Executor, read: Callable[[T], R], parts: Sequence[Sequence[T]]
) -> Iterator[list[Future[R]]]:
    """Yields what `read` makes of the items of each part. Then `pool` has started on the next part
    as well, and on no further one."""
    following = [pool.submit(read, item) for item in parts[0]] if parts else []
    for number in range(1, len(parts) + 1):
        current = following
        if number < len(parts):
            following = [pool.submit(read, item) for item in parts[number]]
        yield current
