"""Counts the records of annotation files, and those that cannot be used.

A reader is a generator that wraps each record in `Collector.record`. What a record lacks raises
`KeyError` or `ValueError` there, and the record is left out and listed with its file and id.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from r2sm_jax.errors import InputError

MAX_LISTED = 20
"""How many bad records, or places of one note, are listed."""


@dataclass
class Collector:
    """Counts the records that a reader goes through."""

    is_strict: bool = False
    """Whether the first bad record is an InputError, in place of being counted."""
    num_records: int = 0
    bad: list[str] = field(default_factory=list)
    """For each bad record its file, id and reason."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """What the user should know, each with the places that it holds for."""
    category_ids: dict[str, int] = field(default_factory=dict)
    """The ids that a COCO file gives its classes, by name."""

    @contextmanager
    def record(self, where: str, is_new: bool = True) -> Iterator[None]:
        """Counts a record, unless it was counted before, and leaves it out if it cannot be used."""
        self.num_records += is_new
        try:
            yield
        except (AttributeError, InputError, KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            sentence = f"{where}: {reason}"
            if self.is_strict:
                raise InputError(sentence) from error
            self.bad.append(sentence)

    def note(self, where: str, sentence: str) -> None:
        """Adds something that the user should know about a record."""
        self.notes.setdefault(sentence, []).append(where)

    def check(self, max_bad: float, limit: str = "--max-bad") -> None:
        """Raises InputError if more than this share of the records is bad. `limit`: its name."""
        allowed = int(max_bad * self.num_records)
        if len(self.bad) > allowed:
            raise InputError(
                f"{self.bad[0]} ({len(self.bad)} of {self.num_records} records are bad; "
                f"{limit} {max_bad:g} allows {allowed})"
            )

    def print(self) -> None:
        """Prints the bad records and the notes to stderr."""
        if self.bad:
            what = f"{len(self.bad)} of {self.num_records} records cannot be used and are left out"
            print(f"note: {what}", *self.bad[:MAX_LISTED], sep="\n  ", file=sys.stderr)
        for sentence, places in self.notes.items():
            more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
            print(f"note: {places[0]}: {sentence}{more}", file=sys.stderr)
