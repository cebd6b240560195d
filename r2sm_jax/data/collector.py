"""Counts the records of annotation files, those that cannot be used, and masks that are exchanged.

A reader is a generator that wraps each record in `Collector.record`. What a record lacks raises
`KeyError` or `ValueError` there, and the record is left out and listed with its file and id.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError

MAX_LISTED = 20
"""How many bad records, or places of one note, are listed."""
MAX_VISIBLE_RATIO = 1.1
"""A visible mask may be this many times larger than its complete mask: annotators' fringes reach a
few pixels beyond it. More than that means that the two may have been exchanged."""
RATE_TOLERANCE = 0.02
"""Stated and measured occlusion rates may differ by this much."""


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

    @contextmanager
    def record(self, where: str) -> Iterator[None]:
        """Counts a record, and leaves it out if it cannot be used."""
        self.num_records += 1
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

    def check(self, max_bad: float) -> None:
        """Raises InputError if more than this share of the records is bad."""
        allowed = int(max_bad * self.num_records)
        if len(self.bad) > allowed:
            raise InputError(
                f"{self.bad[0]} ({len(self.bad)} of {self.num_records} records are bad; "
                f"--max-bad {max_bad:g} allows {allowed})"
            )

    def print(self) -> None:
        """Prints the bad records and the notes to stderr."""
        if self.bad:
            what = f"{len(self.bad)} of {self.num_records} records cannot be used and are left out"
            print(f"note: {what}", *self.bad[:MAX_LISTED], sep="\n  ", file=sys.stderr)
        for sentence, places in self.notes.items():
            more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
            print(f"note: {places[0]}: {sentence}{more}", file=sys.stderr)


@dataclass
class MaskComparison:
    """Compares the masks of all objects of a source, which may have been exchanged or inverted."""

    num_objects: int = 0
    num_different: int = 0
    """Objects whose two masks differ. Those that are fully visible tell nothing."""
    num_larger: int = 0
    """Objects whose visible mask is clearly the larger one."""
    num_inverted: int = 0
    """Objects that have all corners of the image and most of its pixels."""
    num_unseen: int = 0
    """Objects of which nothing is visible."""
    num_complements: int = 0
    """Objects whose stated `occlude_rate` is their visible share, so that the visible mask is
    likely that of the hidden part."""

    def add(self, modal: RLE, amodal: RLE | None, stated_rate: Any = None) -> None:
        """Compares the masks of one object, and its `occlude_rate` if one is stated."""
        height, width = modal["size"]
        whole = modal if amodal is None else amodal
        visible_area, area = masks.areas([modal, whole])
        self.num_objects += 1
        self.num_different += visible_area != area
        self.num_larger += visible_area > MAX_VISIBLE_RATIO * area
        self.num_unseen += not visible_area
        if area > height * width / 2:
            corners = masks.expand(whole)[[0, 0, -1, -1], [0, -1, 0, -1]]
            self.num_inverted += bool(corners.all())
        if isinstance(stated_rate, int | float) and area:
            shown = masks.areas([masks.intersect(modal, whole)])[0] / area
            is_hidden_share = abs(stated_rate - (1 - shown)) <= RATE_TOLERANCE
            is_visible_share = abs(stated_rate - shown) <= RATE_TOLERANCE
            # Near one half it is both, which tells nothing.
            self.num_complements += is_visible_share and not is_hidden_share

    def check(self, source: Path | str, remedy: str) -> None:
        """Raises InputError if most objects, and more than one, have the wrong masks.

        One object alone may be an annotator's slip, also where it is all that was compared.
        `remedy` is for masks that are exchanged.
        """
        half = max(1, self.num_objects / 2)
        half_of_different = max(1, self.num_different / 2)
        problem = ""
        if self.num_larger > half_of_different:
            problem = f"{self.num_larger} objects are larger than their complete masks; {remedy}"
        elif self.num_unseen > half:
            problem = f"{self.num_unseen} objects are empty; give the masks of what is seen"
        elif self.num_complements > half_of_different:
            problem = f"{self.num_complements} objects have the size of what occlude_rate hides"
        elif self.num_inverted > half:
            problem = f"{self.num_inverted} objects have all corners; are black and white inverted?"
        if problem:
            raise InputError(f"{source}: of {self.num_objects} the visible masks of {problem}")
