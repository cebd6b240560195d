"""Errors that the user can mend, and the reading and writing of files that raises them.

A command ends with exit code 2 and one line for such an error, without a traceback (cli.py).
"""

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
    """Raises InputError if a file must not be written at `path`.

    That is where it is a folder, its parent is a file, or it exists and `overwrite` is False.
    """
    if path.is_dir():
        raise InputError(f"{path}: this is a folder; give the name of a file")
    if path.parent.exists() and not path.parent.is_dir():
        raise InputError(f"{path.parent}: this is a file; give the name of a folder")
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


def refuse_dangling(path: Path) -> None:
    """Raises InputError for a link whose target is gone."""
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{path}: this link points at {path.readlink()}, which is not there any more; give "
            "another path, or point the link at what there is"
        )


def read_bytes(path: Path) -> bytes:
    """Reads a file. Raises InputError if it cannot be read."""
    refuse_dangling(path)
    try:
        return path.read_bytes()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        problem = "there is no such file" if missing else f"cannot read the file ({error.strerror})"
        raise InputError(f"{path}: {problem}; check the path") from error


GIT_LFS = "version https://git-lfs"
FIRST_BYTES = {
    GIT_LFS.encode(): "a pointer of Git LFS; get the file itself with git lfs pull",
    b"\x1f\x8b": "compressed with gzip; unpack it with gunzip",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xfd7zXZ": "compressed with xz; unpack it with unxz",
    b"BZh": "compressed with bzip2; unpack it with bunzip2",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it with unzstd",
    bytes(4): "zero bytes, as a broken copy has; copy it again",
    b"\x80": "a pickle; write its content as JSON",
    b"<": "a web page or XML; download the file itself",
}
"""First bytes of files that are often given in place of JSON or an image -> what they are, and the
remedy."""


def describe_content(content: bytes) -> str:
    """Says what an unreadable file is, and the remedy; "" if its first bytes do not tell."""
    content = content.lstrip()
    if not content:
        return "empty; download or write it again"
    return next((what for first, what in FIRST_BYTES.items() if content.startswith(first)), "")


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
    """Parses JSON in UTF-8, or else in Windows-1252, which older tools on Windows write.

    Args:
        where: the file or entry, for messages.
        what: the expected content, for messages.

    Raises InputError if it is not JSON, or an object has a key twice, with different values.
    """

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            _refuse_repeated_key(pairs, where)
        return values

    try:
        with paused_collection():
            try:
                return json.loads(content, object_pairs_hook=to_dict)
            except UnicodeDecodeError:
                return json.loads(content.decode("cp1252"), object_pairs_hook=to_dict)
    except (ValueError, RecursionError) as error:
        if described := describe_content(content):
            raise InputError(f"{where}: this is not JSON, it is {described}") from error
        text = content.strip()
        if text[:1] in (b"{", b"[") and text[-1:] not in (b"}", b"]"):
            raise InputError(
                f"{where}: this is not JSON, it ends in the middle ({error}); download or write it "
                "again"
            ) from error
        if str(error).startswith("Extra data"):
            raise InputError(
                f"{where}: this is more than one JSON value, perhaps one object a line ({error}); "
                f"write them as one list (data convert also reads lines, from .jsonl); give {what}"
            ) from error
        raise InputError(f"{where}: this is not JSON ({error}); give {what}") from error


def _refuse_repeated_key(pairs: list[tuple[str, Any]], where: str) -> None:
    """Raises InputError for the first key of an object that comes again with another value."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        # Python would take the last value, and the others would be lost.
        if key in values and values[key] != value:
            of_record = f" with id {values['id']}" if isinstance(values.get("id"), int) else ""
            raise InputError(
                f"{where}: the key {key!r} is there twice in one object{of_record}, with different "
                "values; keep one of them"
            )
        values[key] = value


def load_json(path: Path, what: str) -> Any:
    """Reads a JSON file. Raises InputError as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path), str(path), what)
