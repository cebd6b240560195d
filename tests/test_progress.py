"""Progress: nothing of what is short, lines in a file, a bar in a terminal."""

import io
import sys
import time

import pytest

from r2sm_jax import progress
from r2sm_jax.progress import Phase, duration, hide_progress, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.01)


def work(stream: io.StringIO, lines: int, monkeypatch) -> str:
    """Does three of four units, and waits for so many lines before and after."""
    monkeypatch.setattr(sys, "stderr", stream)

    def wait(number: int) -> None:
        deadline = time.monotonic() + 60
        while stream.getvalue().count("drawing") < number and time.monotonic() < deadline:
            time.sleep(0.01)

    with show_progress("drawing", total=4) as advance:
        wait(lines)
        advance(3)
        wait(2 * lines)
    return stream.getvalue()


def test_a_short_phase_is_not_mentioned(monkeypatch):
    assert work(io.StringIO(), 0, monkeypatch) == ""


@pytest.mark.usefixtures("quick")
def test_a_file_gets_lines_that_count(monkeypatch):
    lines = work(io.StringIO(), 2, monkeypatch).splitlines()
    assert lines[0] == "drawing: 0 of 4"
    assert lines[-1].startswith("drawing: 3 of 4, about ")


@pytest.mark.usefixtures("quick")
def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = work(Terminal(), 2, monkeypatch)
    erase_line = "\x1b[2K"
    assert "3 of 4" in text and text.endswith(erase_line)


@pytest.mark.usefixtures("quick")
def test_a_phase_that_fails_ends_its_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ValueError, match="a fault"), show_progress("drawing"):
        raise ValueError("a fault")


def test_the_time_left_follows_from_the_work_that_is_done():
    phase = Phase("drawing", 100, "")
    phase.start -= 20
    phase.advance(25)
    assert phase.describe() == "25 of 100, about 60 s left"
    phase.advance(75)
    assert phase.describe() == "100 of 100"
    phase = Phase("compiling", None, "about a minute")
    assert phase.describe() == "about a minute, 0 s so far"
    assert [duration(89), duration(600)] == ["89 s", "10 min"]


@pytest.mark.usefixtures("quick")
def test_nothing_is_shown_where_progress_is_hidden(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with hide_progress(), show_progress("drawing"):
        time.sleep(0.1)
    assert stream.getvalue() == ""

    assert "drawing: 0 of 4" in work(stream, 1, monkeypatch)
