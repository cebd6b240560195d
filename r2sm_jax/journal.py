"""The answers about many images as they come: a line for each image, in one file for each process.

The first line of a file says what its answers depend on. Several processes divide the images by a hash of their names.
"""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax

from r2sm_jax.errors import InputError
from r2sm_jax.feature_cache import stamp

JOURNAL = "answers.jsonl"


class Place(NamedTuple):
    """Where the answers about an image stand."""

    stamp: Any
    """Size and time of change of the image that was answered."""
    journal: Path
    offset: int

    def read(self) -> list[list[dict[str, Any]]]:
        """The entries of each query about the image."""
        with self.journal.open("rb") as lines:
            lines.seek(self.offset)
            return json.loads(lines.readline())["answers"]


def journals(out: Path) -> list[Path]:
    """The files of all processes, in their order."""
    count = jax.process_count()
    return [out / (JOURNAL if count == 1 else f"answers-{process}.jsonl") for process in range(count)]


def is_mine(image: Path) -> bool:
    """Whether this process answers what is asked about an image."""
    return zlib.crc32(image.name.encode()) % jax.process_count() == jax.process_index()


def read_journals(out: Path, header: dict[str, str]) -> dict[str, Place]:
    """Where the answers about every image stand, also those of an earlier call with another number of processes; those
    about the image as it is now where there are several. Starts the files that are missing. No process may write
    meanwhile. Raises InputError as `read_journal`."""
    found: dict[str, Place] = {}
    for journal in sorted({*out.glob("answers*.jsonl"), *journals(out)}):
        for image, place in read_journal(journal, header).items():
            if image not in found or found[image].stamp != stamp(Path(image)):
                found[image] = place
    return found


def read_journal(journal: Path, header: dict[str, str]) -> dict[str, Place]:
    """The last entry of every image in one file. Starts the file where there is none. Drops a line that was cut short,
    but only from a file of ours. Raises InputError if the file is damaged, or its answers are of something else."""
    found: dict[str, Place] = {}
    end, start = 0, json.dumps(header).encode() + b"\n"
    with journal.open("ab+") as lines:
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") and (end or start.startswith(line)):
                break
            try:
                entry = json.loads(line)
                changed = [] if end else [key for key in header if entry.get(key) != header[key]]
                if end:
                    found[entry["image"]] = Place(entry["stamp"], journal, end)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"{journal}: line {number} is damaged; pass --overwrite to start anew") from None
            if changed:
                what = f"these answers are of other {', '.join(changed).replace('_', ' ')}"
                raise InputError(f"{journal}: {what}; pass another --out, or --overwrite to start anew")
            end += len(line)
        lines.truncate(end)
        if not end:
            lines.write(start)
    return found
