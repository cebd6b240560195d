"""Shows on stderr how far something is that takes long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def show_progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Shows a bar while the block runs, in a terminal; it is gone at the end.

        with show_progress("drawing scenes", total=len(scenes)) as advance:
            for scene in scenes:
                draw(scene)
                advance(1)

    Args:
        what: what the block does.
        total: number of units that it does; None if it cannot be counted.
    """
    console = Console(stderr=True)
    # What others print stays on its own stream: stdout may be a file.
    with Progress(
        console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
