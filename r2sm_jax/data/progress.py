"""Says how far a long piece of work has come, in terminals and log files alike."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
PROGRESS_SECONDS = 5.0


def announce(items: Sequence[T], what: str) -> Iterator[T]:
    """Passes the items on, and says on stderr every few seconds how many are done."""
    said = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - said >= PROGRESS_SECONDS:
            said = time.monotonic()
            print(f"{what}: {number:,} of {len(items):,}", file=sys.stderr)
