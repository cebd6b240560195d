"""What all commands have in common: their list, their help, and how fast a slip is told."""

import importlib
import importlib.util
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from r2sm_jax import __main__ as package
from r2sm_jax.config import Config
from r2sm_jax.flags import COMMANDS as FLAGS, AblateConfig
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.train import main as train

ROOT = Path(__file__).parents[1]
WITHOUT_JAX = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
finally:
    print("jax" in sys.modules)
"""


def run_module(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs a module as `python -m` does; its last line of output tells whether JAX was loaded."""
    program = WITHOUT_JAX.replace("MODULE", repr(module))
    command = [sys.executable, "-c", program, module, *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("name", package.COMMANDS)
def test_a_slip_in_a_flag_is_told_before_jax_is_loaded(name):
    needed = {"data": ["check", "a.json"], "predict": ["run", "a.jpg"], "export": ["r", "--out=x"]}
    end = run_module(f"r2sm_jax.{name}", *needed.get(name, []), "--typo")
    assert end.returncode == 2 and "--typo" in end.stderr and "Traceback" not in end.stderr
    assert end.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("module", "line", "named"),
    [
        ("ablate", "--heads linear lienar", "lienar"),
        ("predict", "run a.jpg --box 1 2 3", "--box"),
        ("predict", "run a.jpg --point -1 x", "--point"),
        ("data.__main__", "convert coco a.json --out b --bogus", "--bogus"),
        ("data.__main__", "convert coco a.json --out b --out c", "--out"),
        ("data.__main__", "cnovert", "cnovert"),
        ("train", "--train.steps=1.5", "--train.steps"),
        ("train", "--model.head atention", "--model.head"),
        ("train", "--train.steps 5 6", "6"),
    ],
)
def test_a_slip_is_named(module, line, named, command):
    end = command(importlib.import_module(f"r2sm_jax.{module}").main, *line.split())
    assert end.code == 2 and named in end.err and "Traceback" not in end.err


def test_help_loads_no_jax_either():
    end = run_module("r2sm_jax.predict", "--help")
    assert end.returncode == 0 and "--mask-type" in end.stdout
    assert end.stdout.splitlines()[-1] == "False"
    end = run_module("r2sm_jax.data", "convert", "--help")
    assert end.returncode == 0 and "cocoa-cls" in end.stdout and not end.stderr


@pytest.mark.parametrize("module", ["train", "data"])
def test_help_that_head_cuts_off_ends_without_a_word(module):
    command = [sys.executable, "-m", f"r2sm_jax.{module}", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as `head` does when it has seen enough
    assert process.stderr.read() == b"" and process.wait() == 0


def test_help_ends_in_a_narrow_terminal_and_without_an_output():
    command = [sys.executable, "-m", "r2sm_jax.decide", "--help"]
    narrow = subprocess.run(
        command, env=os.environ | {"COLUMNS": "5"}, capture_output=True, text=True, timeout=60
    )
    assert narrow.returncode == 0 and "--file" in narrow.stdout
    closed = subprocess.run(["sh", "-c", '"$0" "$@" >&-', *command], stderr=subprocess.PIPE)
    assert closed.returncode == 0 and closed.stderr == b""


def test_the_console_command_runs_what_python_m_runs():
    alone = run_module("r2sm_jax.predict", "--typo")
    through = run_module("r2sm_jax", "predict", "--typo")
    assert (alone.returncode, alone.stderr) == (through.returncode, through.stderr)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["r2sm"].partition(":")
    assert getattr(importlib.import_module(module), function) is package.run


def test_the_list_names_every_command(command, refused):
    end = command(package.main)
    assert end.code == 0
    listed = {line.split()[0] for line in end.out.splitlines() if line.startswith("  ")}
    assert listed == set(package.COMMANDS) >= {*FLAGS.values(), "train", "data"}
    for name in listed:
        assert importlib.util.find_spec(f"r2sm_jax.{name}") is not None
    assert "perdict" in refused(package.main, "perdict")


def test_the_default_heads_of_the_ablation_are_all_that_learn_from_words():
    assert AblateConfig().heads == tuple(LEARNED)


def test_numbers_in_every_spelling_are_taken(command, monkeypatch):
    configs = []
    monkeypatch.setattr("r2sm_jax.train.train", configs.append)
    flags = "--train.steps=70", "--train.ema", "1e-3", "--optimizer.learning_rate", ".5"
    assert command(train, *flags).code == 0
    (config,) = configs
    expected = replace(Config().train, steps=70, ema=1e-3)
    assert config.train == expected and config.optimizer.learning_rate == 0.5
