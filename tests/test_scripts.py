"""The scripts: that they start, what the benchmark measures, and what `torture.py` counts."""

import importlib
import random
from pathlib import Path

import benchmark
import pytest
import torture

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[1] / "scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_finds_what_it_imports(name):
    importlib.import_module(name)


def check_figures(figures: dict[str, str], *names: str) -> None:
    for name in names:
        assert any(name in figure for figure in figures), figures
    assert all(float(value.split()[0].replace(",", "")) > 0 for value in figures.values()), figures


@pytest.mark.slow
def test_benchmark_training(tiny_flags, monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_SCENES", 8)
    check_figures(dict(benchmark.measure_training(tiny_flags)), "scenes", "training step")


@pytest.mark.slow
def test_benchmark_serving(tiny_run):
    figures = dict(benchmark.measure_serving([str(tiny_run), "--images", "8"]))
    check_figures(figures, "known sentence", "8 queries each")


def test_benchmark_data_and_evaluation(tiny_flags):
    check_figures(dict(benchmark.measure_data(tiny_flags)), "decode", "assemble", "batches")
    check_figures(dict(benchmark.measure_evaluation(["--queries", "23"])), "23 queries scored")


@pytest.mark.slow
def test_benchmark_loading():
    flags = ["--samples", "8", "--sizes", "32", "--workers", "0", "1"]
    check_figures(dict(benchmark.measure_loading(flags)), "32 px, threads", "32 px, 1 worker")


@pytest.mark.slow
def test_benchmark_memory():
    flags = ["--images", "40", "--steps", "2", "--workers", "0"]
    check_figures(dict(benchmark.measure_memory(flags)), "memory then", "after 2 steps")


def test_benchmark_refuses_an_unknown_name(refused):
    assert "'speed'" in refused(benchmark.main, "speed")


def fail() -> None:
    raise KeyError("size")


def test_spoilt_files_are_read_or_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [])
    outcomes = list(torture.spoil_files(random.Random(0), 40, tmp_path / "files"))
    assert len({name for name, _ in outcomes}) == 4
    assert {outcome for _, outcome in outcomes} == {"ok", "refused"}
    assert "KeyError: 'size'" in torture.outcome_of(fail)  # neither of the two


def test_a_resumed_run_with_other_losses_is_a_failure(tmp_path, monkeypatch):
    """The first killed run loses a step, the second one does not."""
    ended = iter([True, False, True, False, True])
    monkeypatch.setattr(torture, "train", lambda folder, kill_after=None: next(ended))
    monkeypatch.setattr(torture, "losses_of", lambda run: {1: float(run.name == "killed0")})
    outcomes = list(torture.kill_runs(random.Random(0), 2, tmp_path / "runs"))
    assert [outcome == "ok" for _, outcome in outcomes] == [False, True]
