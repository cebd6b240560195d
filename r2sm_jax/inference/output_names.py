"""Names of what a prediction writes: a folder of its own for each sentence, so that nothing is
overwritten."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

from r2sm_jax.errors import InputError

MAX_LETTERS = 40
"""Of a sentence, in a file name. File systems allow 255 bytes, and a letter may take four."""


def slug(sentence: str) -> str:
    """The beginning of a sentence as part of a file name: "the-red-mug"."""
    words = "".join(c if c.isalnum() else " " for c in sentence.lower()).split()
    return "-".join(words)[:MAX_LETTERS].rstrip("-") or "query"


def numbered(path: Path) -> Iterator[Path]:
    """The path, then the same with -2, -3, ... at its end, without an end."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def claim_folder(folders: Iterable[Path], names: Sequence[str]) -> Path:
    """Returns the first of these folders in which no file of one of the names is, and makes it.

    The first of the files is made as well, empty, so that two commands at a time never get the same
    folder.

    Raises InputError if a folder cannot be made.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not any((folder / name).exists() for name in names):
                (folder / names[0]).touch(exist_ok=False)
                return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(
                f"{folder}: cannot write there ({error.strerror}); pass another --out"
            ) from error
    raise ValueError("all of the folders are taken; pass one more")
