"""The journal of a prediction of many images, from which a stopped call goes on.

The first line of `answers.jsonl` says what the answers are of. Each other line holds the answers
about one image: {"image": name, "answers": [[entry, ...], ...]}, with one list for each query.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import jax

from r2sm_jax.errors import InputError

JOURNAL = "answers.jsonl"


def journal_path(folder: Path) -> Path:
    """The journal of this process. Several processes write one each: answers-N.jsonl."""
    if jax.process_count() == 1:
        return folder / JOURNAL
    return folder / f"answers-{jax.process_index()}.jsonl"


def find_journals(folder: Path) -> list[Path]:
    """The journals of earlier calls, which may have had any number of processes."""
    names = re.compile(r"answers(-\d+)?\.jsonl")
    return sorted(path for path in folder.glob("answers*.jsonl") if names.fullmatch(path.name))


def header_line(header: Mapping[str, str]) -> bytes:
    """The first line of a journal."""
    return json.dumps(header).encode() + b"\n"


def read_journals(folder: Path, header: Mapping[str, str]) -> dict[str, bytes]:
    """Returns the line of each image by its name. Raises InputError as `read_journal`."""
    lines: dict[str, bytes] = {}
    for path in find_journals(folder):
        lines |= read_journal(path, header)
    return lines


def read_journal(path: Path, header: Mapping[str, str]) -> dict[str, bytes]:
    """Returns the lines of one journal by the name of the image.

    A last line that was cut short, when a process was killed, is removed from the file.
    Raises InputError if the file is damaged or no journal, or has answers of something else.
    """
    damaged = InputError(f"{path}: it is damaged; pass --overwrite to start anew")
    content = path.read_bytes()
    *complete, unfinished = content.split(b"\n")
    lines: dict[str, bytes] = {}
    try:
        if complete:
            _check_header(path, json.loads(complete[0]), header)
        elif not header_line(header).startswith(unfinished):
            # Only a header of ours may be removed; anything else is somebody's file.
            raise damaged
        for line in complete[1:]:
            lines[json.loads(line)["image"]] = line
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged from None

    if unfinished:
        os.truncate(path, len(content) - len(unfinished))
    return lines


def answers_something_else(folder: Path, header: Mapping[str, str]) -> bool:
    """Whether a folder has a journal that a call with this header cannot continue."""
    for path in find_journals(folder):
        first_line = path.read_bytes().split(b"\n", 1)[0]
        # It may have been cut short.
        if not header_line(header).startswith(first_line):
            return True
    return False


def _check_header(path: Path, stored: Mapping[str, str], header: Mapping[str, str]) -> None:
    # A key may be in one of the two only: answers with taught names have one for them.
    changed = [key for key in {**stored, **header} if stored.get(key) != header.get(key)]
    if changed:
        names = ", ".join(changed).replace("_", " ")
        raise InputError(
            f"{path}: these answers are of other {names}; pass another --out, or --overwrite to "
            "start anew"
        )
