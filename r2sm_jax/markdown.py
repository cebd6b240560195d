"""Tables and text in Markdown, as they are printed and written."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markdown import Markdown


class Table(NamedTuple):
    """A table with a title. The first column holds names, the others figures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Returns the lines of the table in Markdown, without its title."""
        header, *rows = [f"| {' | '.join(row)} |" for row in [self.header, *self.rows]]
        num_figures = len(self.header) - 1
        alignment = "|---" + "|---:" * num_figures + "|"
        return [header, alignment, *rows]


def to_markdown(title: str, paragraphs: Sequence[str], tables: Sequence[Table]) -> str:
    """Writes paragraphs and tables as Markdown."""
    lines = [f"# {title}", ""]
    for paragraph in paragraphs:
        lines += [paragraph, ""]
    for table in tables:
        lines += [f"## {table.title}", "", *table.markdown(), ""]
    return "\n".join(lines)


def print_markdown(text: str) -> None:
    """Prints Markdown. Tables are not cut where the output is no terminal."""
    width = None if sys.stdout.isatty() else 150
    Console(width=width).print(Markdown(text))
