"""Text files of queries, one a line."""

import re
from collections.abc import Iterator
from pathlib import Path

from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import check_query

NOT_TEXT = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
"""Control characters that are no white space. UTF-16 that is read as UTF-8 has many of them."""


def read_query_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a text file that are not blank, each with the file and its number.

    Raises InputError, which names the line, if the file or a line is no text.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot read the query file ({error}); give UTF-8 text, or a .json"
        ) from None

    # Not splitlines(): editors put U+2028 and vertical tabs inside a sentence.
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}: line {number}"
        line = line.replace("\ufeff", "")  # the mark of a file that was appended
        if not line.strip():
            continue
        if NOT_TEXT.search(line):
            raise InputError(f"{where} holds control characters; save the file as text in UTF-8")
        if line.lstrip().startswith(("{", "[")):
            raise InputError(f"{where} looks like JSON; write the query alone, or give a data set")
        yield where, line


def read_sentence(where: str, text: str) -> str:
    """The sentence of a line, with single blanks. Raises InputError if it has no words."""
    text = " ".join(text.split())
    try:
        check_query(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return text
