"""Errors that the user can mend, and the reading and writing of files that raises them.

A command ends with exit code 2 and one line for such an error, without a traceback (cli.py).
"""

import codecs
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class InputError(Exception):
    """Bad input, described in one sentence that names the file, field or flag and the remedy."""

    def __init__(self, message: str):
        # One line for each error, also where a file name holds a line break.
        super().__init__(" ".join(message.splitlines()))


def refuse_overwrite(path: Path, overwrite: bool) -> None:
    """Raises InputError if a file exists and must not be replaced, and for a folder."""
    if path.is_dir():
        raise InputError(f"{path}: it is a folder; give the name of a file")
    if path.exists() and not overwrite:
        raise InputError(f"{path}: the file exists already; give another name or --overwrite")


@contextmanager
def atomic_write(path: Path, overwrite: bool = True) -> Iterator[Path]:
    """Writes a file as a whole or not at all: `with atomic_write(path) as part: part.write_text()`.

    The block writes to `part`, which replaces `path` when the block ends without an error. The
    folder is made where it is missing. `part` ends in ".part", so pass Pillow the image format.

    Raises InputError as `refuse_overwrite`, or if the path or a text cannot be written.
    """
    refuse_overwrite(path, overwrite)
    # In the same folder: a file is replaced in one step only within its file system.
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{path}: cannot be written, since a text in it holds half of a character; {error}"
        ) from error
    except OSError as error:
        # A disk that is full has room again without the half that was written.
        with suppress(OSError):
            part.unlink(missing_ok=True)
        reason = error.strerror or error
        raise InputError(
            f"{path}: cannot write there ({reason}); free disk space or give another path"
        ) from error


def write_json(path: Path, values: Any, *, indent: int | None = 1) -> None:
    """Writes a JSON file as a whole. Raises InputError as `atomic_write`."""
    with atomic_write(path) as part:
        part.write_text(json.dumps(values, indent=indent) + "\n", "utf-8")


def read_bytes(path: Path) -> bytes:
    """Reads a file, without the mark that some editors put before text. Raises InputError if it
    cannot be read."""
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; check the path") from error


@contextmanager
def paused_collection() -> Iterator[None]:
    """Does not look for cycles of objects inside: JSON has none, and to look through millions of
    its values again and again takes longer than to parse them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_json(content: bytes, where: str, what: str) -> Any:
    """Parses JSON in UTF-8.

    Args:
        content: the JSON.
        where: the file or entry, for messages.
        what: the expected content, for messages.

    Raises InputError if it is not JSON, or an object has a key twice, with different values: Python
    would take the last one.
    """

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            for key, value in pairs:
                if values[key] != value:
                    raise InputError(f"{where}: an object has the key {key!r} twice; keep one")
        return values

    try:
        with paused_collection():
            return json.loads(content, object_pairs_hook=to_dict)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if reason.startswith("Extra data"):
            reason = f"there is more after the first value, as in JSON Lines; {reason}"
        raise InputError(f"{where}: this is not JSON ({reason}); give {what}") from error


def load_json(path: Path, what: str) -> Any:
    """Reads a JSON file. Raises InputError as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path), str(path), what)
