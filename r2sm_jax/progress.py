"""Says on stderr what takes long and how far it is.

In a terminal this is a bar, which is gone at the end; in a file it is a line every ten seconds.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

SILENT_SECONDS = 3.0
"""What takes less is not mentioned."""
LINE_SECONDS = 10.0
"""Time between lines in a file."""
BAR_SECONDS = 0.25
"""Time between two states of the bar."""

_is_hidden = threading.Event()


@contextmanager
def hide_progress() -> Iterator[None]:
    """Shows no phase of the block: of several processes of one command, the first one speaks."""
    _is_hidden.set()
    try:
        yield
    finally:
        _is_hidden.clear()


class Phase:
    """How far a phase of the work is."""

    def __init__(self, what: str, total: int | None, usual: str):
        self.what = what
        self.total = total
        self.usual = usual
        self.done = 0
        self.start = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Counts `count` more units as done."""
        self.done += count

    def describe(self) -> str:
        """How far the phase is and about how long it still takes, as far as that can be told."""
        seconds = time.monotonic() - self.start
        if self.total is None:
            usual = f"{self.usual}, " if self.usual else ""
            return f"{usual}{duration(seconds)} so far"
        progress = f"{self.done:,} of {self.total:,}"
        if not 0 < self.done < self.total:
            return progress
        left = seconds * (self.total - self.done) / self.done
        return f"{progress}, about {duration(left)} left"


@contextmanager
def show_progress(
    what: str, total: int | None = None, *, usual: str = ""
) -> Iterator[Callable[[int], None]]:
    """Shows what the block does, if it takes more than `SILENT_SECONDS`.

        with show_progress("drawing scenes", total=len(scenes)) as advance:
            for scene in scenes:
                draw(scene)
                advance(1)

    Args:
        what: what the block does.
        total: number of units that it does; None if it cannot be counted.
        usual: about how long it takes, where it cannot be counted.
    """
    phase = Phase(what, total, usual)
    is_over = threading.Event()
    # A thread, since the block may be one long call.
    thread = threading.Thread(target=_report, args=(phase, is_over), daemon=True)
    thread.start()
    try:
        yield phase.advance
    finally:
        is_over.set()
        thread.join()


def _report(phase: Phase, is_over: threading.Event) -> None:
    """Shows a phase until it is over."""
    if is_over.wait(SILENT_SECONDS) or _is_hidden.is_set():
        return
    if sys.stderr.isatty():
        _show_bar(phase, is_over)
        return
    while True:
        print(f"{phase.what}: {phase.describe()}", file=sys.stderr, flush=True)
        if is_over.wait(LINE_SECONDS):
            return


def _show_bar(phase: Phase, is_over: threading.Event) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
    )
    # What others print stays on its own stream: stdout may be a file.
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(phase.what, total=phase.total, state=phase.describe())
        while not is_over.wait(BAR_SECONDS):
            bar.update(task, completed=phase.done, state=phase.describe())


def duration(seconds: float) -> str:
    """A time to read, such as `45 s` or `3 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
