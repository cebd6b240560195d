import importlib.util
from pathlib import Path

import pytest

from r2sm_jax.cli import parse_config

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_a_script_finds_what_it_imports(name):
    """Some run too long, or need a machine that tests do not have, to be run here."""
    if name.startswith("torch_"):
        pytest.importorskip("torch")
    load(name)


def test_the_benchmark_measures_every_stage(tiny_flags, monkeypatch):
    benchmark = load("benchmark")
    monkeypatch.setattr(benchmark, "SCENES", 8)
    figures = dict(benchmark.measure(parse_config(tiny_flags)))
    assert len(figures) == 5
    assert all(float(figure.split()[0].replace(",", "")) > 0 for figure in figures.values()), (
        figures
    )


def test_the_data_benchmark_makes_its_own_photos(monkeypatch, capsys):
    benchmark = load("benchmark_data")
    monkeypatch.setattr(
        "sys.argv", ["benchmark_data.py", "--count", "3", "--image-size", "64", "--batch-size", "2"]
    )
    benchmark.main()
    printed = capsys.readouterr().out
    assert "images, 64 px" in printed and "images/s" in printed and "letterbox and pool" in printed


def test_the_serving_benchmark_measures_every_stage(tiny_run):
    benchmark = load("benchmark_serving")
    figures = dict(benchmark.measure(benchmark.ServingConfig(str(tiny_run), images=8)))
    assert len(figures) == 15 and figures.pop("compiled since it was warm").startswith("0 programs")
    assert all(float(figure.split()[0].replace(",", "")) > 0 for figure in figures.values()), (
        figures
    )
