"""Errors that the user can mend: one sentence, exit code 2, no traceback."""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn


class InputError(Exception):
    """Bad input. The message names the file, field or flag and the remedy in one sentence, on one
    line whatever the names in it hold."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


def refuse(problems: Mapping[str, bool]) -> None:
    """Raises InputError for the first problem that was found."""
    if problem := next((problem for problem, found in problems.items() if found), None):
        raise InputError(problem)


def cli_main(main: Callable[[], None]) -> NoReturn:
    """Runs a command's `main`; an `InputError` becomes one line on stderr and exit code 2.

    A closed pipe (`... | head`) ends quietly and Ctrl-C exits with 130, as shells expect. What the
    terminal cannot show is escaped.
    """
    getattr(sys.stdout, "reconfigure", dict)(errors="backslashreplace")
    try:
        main()
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        _discard_output()
        sys.exit(0)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = str(error.filename)[:40]
            problem = f"{name}...: this is too long for the name of a file; check the arguments"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or "the output"
            problem = f"{where}: cannot be written ({error.strerror}); free disk space"
        else:
            raise
        _discard_output()
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _discard_output() -> None:
    """Lets Python's own flush at its end succeed, which would add lines to the message."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse_overwrite(path: Path, overwrite: bool) -> None:
    """Raises InputError where `path` is a folder or in a file, or exists and must not be
    overwritten."""
    if path.is_dir():
        raise InputError(f"{path}: this is a folder; give the name of a file")
    if path.parent.exists() and not path.parent.is_dir():
        raise InputError(f"{path.parent}: this is a file; give the name of a folder")
    if path.exists() and not overwrite:
        raise InputError(f"{path}: the file exists already; give another name or --overwrite")


@contextmanager
def writing(path: Path, overwrite: bool = True) -> Iterator[Path]:
    """Writes a file as a whole or not at all: `with writing(path) as part: part.write_text(...)`.

    The block writes to `part`, in the same folder, which is made where it is missing. At the end of
    the block `part` replaces `path`. `part` ends in ".part", so pass Pillow the image format.
    Raises InputError if the path or a text cannot be written, or `refuse_overwrite` refuses it.
    """
    refuse_overwrite(path, overwrite)
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
    """The content of a file. Raises InputError where it cannot be read."""
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
    b"\x80": "a pickle; write its content as JSON",
    b"<": "a web page or XML; download the file itself",
}
"""What files hold in place of what was meant, with the remedy, by their first bytes."""


def describe_content(content: bytes) -> str:
    """What a file is in truth, and the remedy; "" if its first bytes do not tell."""
    content = content.lstrip()
    if not content:
        return "empty; download or write it again"
    return next((what for first, what in FIRST_BYTES.items() if content.startswith(first)), "")


def parse_json(content: bytes, where: str, what: str) -> Any:
    """JSON in UTF-8 or else Windows-1252. Raises InputError; `where` names its place, `what` the
    format."""
    try:
        try:
            return json.loads(content)
        except UnicodeDecodeError:
            return json.loads(content.decode("cp1252"))
    except (ValueError, RecursionError) as error:
        if described := describe_content(content):
            raise InputError(f"{where}: this is not JSON, it is {described}") from error
        if str(error).startswith("Extra data"):
            raise InputError(
                f"{where}: this is more than one JSON value, perhaps one object a line ({error}); "
                f"write them as one list (data convert also reads lines, from .jsonl); give {what}"
            ) from error
        raise InputError(f"{where}: this is not JSON ({error}); give {what}") from error


def load_json(path: Path, what: str) -> Any:
    """The content of a JSON file. Raises InputError; `what` names the format."""
    return parse_json(read_bytes(path), str(path), what)
