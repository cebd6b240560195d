"""`scripts/torture.py`: what it counts, and a small run of it, which must find nothing."""

import random
import sys
from pathlib import Path

import pytest
import spoil
import torture

from r2sm_jax.data.dataset import find_image, is_text
from r2sm_jax.errors import InputError, writing
from r2sm_jax.inference.predictor import check_query


@pytest.fixture
def tally(tmp_path) -> torture.Tally:
    return torture.Tally(tmp_path)


def fails(error: BaseException):
    """A function that raises it."""

    def action(*_):
        raise error

    return action


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (lambda: None, "read"),
        (fails(InputError("a.json: bad")), "refused"),
        (fails(SystemExit(2)), "refused"),
        (fails(SystemExit(1)), "exit code 1"),
        (fails(KeyError("size")), "KeyError: 'size'"),
        (fails(MemoryError()), "MemoryError"),
    ],
)
def test_anything_but_a_result_or_one_sentence_is_a_failure(action, outcome, tally):
    found = torture.outcome_of(action)
    assert outcome in found
    tally.add("cocoa", found, b"spoilt")
    failed = " " in found
    assert len(tally.failures) == failed and sum(tally.counts.values()) == 1
    assert [file.read_bytes() for file in tally.folder.iterdir()] == [b"spoilt"] * failed


def test_spoilt_files_differ_and_are_the_same_for_a_seed(tmp_path):
    case = spoil.cases(tmp_path / "cases")["kins"]
    made = [
        [spoil.spoil(random.Random(seed), case.content) for seed in range(40)] for _ in range(2)
    ]
    assert made[0] == made[1] and len(set(made[0])) > 30


def test_every_reader_gets_a_file_that_is_correct_and_spoilt_ones(tally, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    torture.spoil_files(random.Random(0), 40, tally)
    torture.spoil_images(random.Random(0), 44, tally)
    assert tally.failures == [] and sum(tally.counts.values()) == 84
    assert len({kind.split(":")[0] for kind in tally.counts}) == 20 + len(
        {form for form, _ in spoil.IMAGES}
    )


def test_an_end_that_differs_is_a_failure(tally, monkeypatch):
    """Runs that end after 10 seconds, of which the killed ones lose a step."""
    ends = {"alone": {"loss of step 1": 0.5}, "killed1": {"loss of step 1": 0.5}, "killed2": {}}
    started: list[tuple[str, bool]] = []

    def train(
        folder: Path, flags: str, *more: str, kill_after: float | None = None
    ) -> tuple[bool, float]:
        started.append((folder.name, bool(more)))
        folder.mkdir(exist_ok=True)
        (folder / "config.json").touch()
        return kill_after is None or (folder.name, True) in started, 10.0

    monkeypatch.setattr(torture, "train", train)
    monkeypatch.setattr(torture, "end_of", lambda run: ends[run.name])
    torture.kill_runs(random.Random(0), 2, tally, "")
    assert started[2:] == [
        ("killed1", False),
        ("killed1", True),
        ("killed2", False),
        ("killed2", True),
    ]
    assert tally.counts["kill: killed"] == 2 and tally.counts["kill: identical"] == 1
    assert len(tally.failures) == 1 and "loss of step 1" in tally.failures[0]


def test_half_a_character_is_one_sentence(tmp_path):
    """JSON can hold one, as \\ud800, and no file in UTF-8 can."""
    refused = pytest.raises(
        InputError,
        match=r"a\.json: cannot be written, since a text in it holds half of a character",
    )
    with refused, writing(tmp_path / "a.json") as part:
        part.write_text("mug \ud800", encoding="utf-8")


def test_half_a_character_is_no_query(tmp_path):
    """A shell passes bytes that are not UTF-8 so, and the page's visitors can send it; no tokenizer reads it."""
    with pytest.raises(InputError, match="the query holds half of a character"):
        check_query("the caf\udce9")
    assert is_text("the café") and not is_text("the caf\udce9")


def test_a_file_name_that_no_file_can_have_is_the_name_of_none(tmp_path):
    assert find_image([tmp_path], "x" * 10_000) is None


@pytest.mark.slow
def test_a_small_torture_finds_nothing(tiny_run, tmp_path, monkeypatch, capsys):
    """Without killing runs, which tests of train.py do."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
    monkeypatch.setattr(torture, "kill_runs", lambda rng, count, tally, flags: tiny_run)
    counts = ["--files", "2000", "--images", "1100", "--requests", "1200", "--kills", "100"]
    monkeypatch.setattr(
        sys, "argv", ["torture", "--small", *counts, "--out", str(tmp_path / "torture")]
    )
    with pytest.raises(SystemExit) as exited:
        torture.main()
    printed = capsys.readouterr()
    assert (
        exited.value.code == 0
        and "20 files, 11 images, 12 requests, 1 kills: 0 failures" in printed.out
    ), printed
