"""What readers of annotation files find: records that cannot be used, and what else is odd.

A reader is a generator that wraps each record in `Collector.record`. A KeyError, ValueError or
InputError there leaves the record out, and lists it with its file and id. The caller decides how
many are too many: `data check` refuses any, others more than a share; a strict collector raises the
first.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from r2sm_jax.errors import InputError

MAX_LISTED = 20
"""How many bad records are listed."""


class Finding(NamedTuple):
    """Something that was found."""

    where: str
    """The file and the record."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class Collector:
    """Counts the records that a reader goes through, and collects what is found."""

    is_strict: bool = False
    """Whether the first bad record is an InputError, in place of being counted."""
    num_records: int = 0
    bad: list[Finding] = field(default_factory=list)
    """Records that cannot be used, and why."""
    notes: list[Finding] = field(default_factory=list)
    """What the user should know."""
    categories: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The records of classes by name."""
    other: dict[str, Any] = field(default_factory=dict)
    """What a file holds beside its lists, such as `licenses`."""

    @contextmanager
    def record(self, where: str) -> Iterator[None]:
        """Counts a record, and leaves it out if it cannot be used."""
        self.num_records += 1
        try:
            yield
        except (InputError, KeyError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            found = Finding(where, reason)
            if self.is_strict:
                raise InputError(str(found)) from error
            self.bad.append(found)

    def note(self, where: str, sentence: str) -> None:
        """Adds something that the user should know about a record."""
        self.notes.append(Finding(where, sentence))

    def add_category(self, name: str, record: Mapping[str, Any]) -> None:
        """Adds the record of a class. Its id stays if no other class of the files has it."""
        ids = {known["id"] for known in self.categories.values()}
        if name not in self.categories:
            number = record["id"] if record["id"] not in ids else max(ids) + 1
            self.categories[name] = {**record, "id": number, "name": name}

    def check(self, max_bad: float, limit: str = "--max-bad") -> None:
        """Raises InputError if more than this share of the records is bad.

        `limit`: what the message says before the number, such as a flag.
        """
        check_share(max_bad, limit)
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
        places: dict[str, list[str]] = {}
        for where, sentence in self.notes:
            places.setdefault(sentence, []).append(where)
        for sentence, of_sentence in places.items():
            more = f" (and {len(of_sentence) - 1} more)" if len(of_sentence) > 1 else ""
            print(f"note: {of_sentence[0]}: {sentence}{more}", file=sys.stderr)


def check_share(max_bad: float, limit: str = "--max-bad") -> None:
    """Raises InputError for what is no share of records that may be bad."""
    if not 0 <= max_bad <= 1:
        raise InputError(f"{limit} {max_bad}: this is not a share; give 0 to 1")
