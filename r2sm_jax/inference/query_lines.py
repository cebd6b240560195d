"""Text files of queries, one a line."""

import re
from collections.abc import Iterator
from pathlib import Path

from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.inference.decision import check_query

NOT_TEXT = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]|^\s*[{\[]")
"""Control characters that are no white space, of which UTF-16 that is read as UTF-8 has many, and
the beginning of JSON."""


def read_query_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a text file that are not blank, each with the file and its number.

    Raises InputError if the file is not UTF-8, or a line, which it names, is no sentence.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: this is no text in UTF-8 ({error}); save it as such") from None

    # Not splitlines(): editors put U+2028 and vertical tabs inside a sentence.
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}: line {number}"
        line = line.replace("\ufeff", "")  # the mark of a file, also of one that was appended
        if NOT_TEXT.search(line):
            raise InputError(f"{where} is no sentence; give UTF-8 text with one a line")
        if line.strip():
            yield where, line


def read_sentence(where: str, text: str) -> str:
    """Returns the sentence of a line, with single blanks. Raises InputError if it has no words."""
    text = " ".join(text.split())
    try:
        check_query(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return text
