"""The scripts: that they start, what the benchmarks measure, and what `torture.py` counts."""

import importlib.util
import random
from pathlib import Path

import pytest

from r2sm_jax.errors import InputError

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark():
    return load("benchmark")


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_a_script_finds_what_it_imports(name):
    load(name)


def check_figures(figures: dict[str, str], *names: str) -> None:
    for name in names:
        assert any(name in figure for figure in figures), figures
    assert all(float(value.split()[0].replace(",", "")) > 0 for value in figures.values()), figures


@pytest.mark.slow
def test_benchmark_training(benchmark, tiny_flags, monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_SCENES", 8)
    check_figures(dict(benchmark.measure_training(tiny_flags)), "scenes", "training step")


def test_benchmark_data(benchmark, tiny_flags):
    check_figures(dict(benchmark.measure_data(tiny_flags)), "decode", "assemble", "batches")


def test_benchmark_evaluation(benchmark):
    check_figures(dict(benchmark.measure_evaluation(["--queries", "23"])), "23 queries scored")


@pytest.mark.slow
def test_benchmark_serving(benchmark, tiny_run):
    figures = dict(benchmark.measure_serving([str(tiny_run), "--images", "8"]))
    check_figures(figures, "known sentence", "8 queries each")


def test_benchmark_refuses_an_unknown_name(benchmark, refused):
    assert "'speed'" in refused(benchmark.main, "speed")


# torture.py


@pytest.fixture(scope="module")
def torture():
    return load("torture")


def raises(error: BaseException):
    """A function that raises it."""

    def action():
        raise error

    return action


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (lambda: None, "ok"),
        (raises(InputError("a.json: bad")), "refused"),
        (raises(SystemExit(2)), "refused"),
        (raises(SystemExit(1)), "exit code 1"),
        (raises(KeyError("size")), "KeyError: 'size'"),
    ],
)
def test_outcomes(torture, action, outcome):
    assert outcome in torture.outcome_of(action)


def test_spoilt_trees_differ_and_repeat_for_a_seed(torture):
    tree = {"images": [{"id": 1, "size": [2, 3]}], "queries": []}
    first = [repr(torture.spoil_tree(random.Random(seed), tree)) for seed in range(40)]
    again = [repr(torture.spoil_tree(random.Random(seed), tree)) for seed in range(40)]
    assert first == again and len(set(first)) > 30


def test_spoilt_files_are_read_or_refused(torture, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [])
    outcomes = list(torture.spoil_files(random.Random(0), 40, tmp_path / "files"))
    assert len({name for name, _ in outcomes}) == 4
    assert {outcome for _, outcome in outcomes} == {"ok", "refused"}


def test_a_resumed_run_with_other_losses_is_a_failure(torture, tmp_path, monkeypatch):
    """The first killed run loses a step, the second one does not."""
    ended = iter([True, False, True, False, True])
    monkeypatch.setattr(torture, "train", lambda folder, kill_after=None: next(ended))
    monkeypatch.setattr(torture, "losses_of", lambda run: {1: float(run.name == "killed0")})
    outcomes = list(torture.kill_runs(random.Random(0), 2, tmp_path / "runs"))
    assert [outcome == "ok" for _, outcome in outcomes] == [False, True]
