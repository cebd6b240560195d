import importlib.util
from pathlib import Path

from r2sm_jax.config import parse_config

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_measures_every_stage(tiny_flags, monkeypatch):
    benchmark = load("benchmark")
    monkeypatch.setattr(benchmark, "SCENES", 8)
    figures = dict(benchmark.measure(parse_config(tiny_flags)))
    assert len(figures) == 5
    assert all(float(figure.split()[0].replace(",", "")) > 0 for figure in figures.values()), figures
