"""What all commands have in common: their list, their help, and how fast a slip is told."""

import importlib
import importlib.util
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from r2sm_jax import __main__ as package, usage
from r2sm_jax.cli import cli_main
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
    args = ["check", "a.json", "--typo"] if name == "data" else ["--typo"]
    end = run_module(f"r2sm_jax.{name}", *args)
    assert end.returncode == 2 and "--typo" in end.stderr and "Traceback" not in end.stderr
    assert end.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("module", "args", "named"),
    [
        ("ablate", ["--heads", "linear", "lienar"], "--heads lienar"),
        ("ablate", ["--steps", "0"], "--steps 0"),
        ("predict", ["run", "a.jpg", "--box", "1", "2", "3"], "--box 1 2 3: give 4 numbers"),
        ("predict", ["run", "a.jpg", "--point", "-1", "x"], "--point -1 x: give 2"),
        ("data", ["convert", "coco", "a.json", "--bogus"], "--bogus"),
        ("data", ["convert", "cocoo", "a.json"], "cocoo"),
        ("data", ["queries", "requests", "a.json", "--out"], "--out"),
        ("data", ["cnovert"], "cnovert"),
    ],
)
def test_a_slip_is_one_sentence_and_told_before_jax_is_loaded(module, args, named):
    end = run_module(f"r2sm_jax.{module}", *args)
    assert end.returncode == 2 and end.stdout.splitlines()[-1] == "False"
    (line,) = end.stderr.splitlines()
    assert line.startswith("error: ") and named in line


def test_help_loads_no_jax_either():
    end = run_module("r2sm_jax.predict", "--help")
    assert end.returncode == 0 and "--mask-type" in end.stdout
    assert end.stdout.splitlines()[-1] == "False"
    end = run_module("r2sm_jax.data", "convert", "--help")
    assert end.returncode == 0 and "cocoa-cls" in end.stdout and not end.stderr


@pytest.mark.parametrize("module", ["train", "predict", "data"])
def test_help_that_head_cuts_off_ends_without_a_word(module):
    command = [sys.executable, "-m", f"r2sm_jax.{module}", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as `head` does when it has seen enough
    assert process.stderr.read() == b"" and process.wait() == 0


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
    assert "did you mean predict?" in refused(package.main, "perdict")


def test_the_default_heads_of_the_ablation_are_all_that_learn_from_words():
    assert AblateConfig().heads == tuple(LEARNED)


# The help of training


def test_the_usual_flags_exist_and_have_the_values_of_the_configuration(command, tmp_path):
    everything = command(train, "--help-all")
    assert everything.code == 0
    for flag, _ in usage.USUAL:
        assert f"--{flag.split()[0]} " in everything.out.replace(",", " "), flag
    assert len(usage.USUAL) < 25  # a help that is read

    path = tmp_path / "mine.py"
    path.write_text(
        "from r2sm_jax.config import Config, LoopConfig\n"
        "def get_config():\n    return Config(train=LoopConfig(steps=7531))\n"
    )
    end = command(train, path, "--help")
    assert end.code == 0 and "7531" in end.out and "7531" not in command(train, "--help").out
    assert max(map(len, end.out.splitlines())) <= usage.WIDTH
    assert "--model.vision.mlp-dim" in everything.out and "--model.vision.mlp-dim" not in end.out


def test_help_lists_the_configurations_that_there_are(command, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "wolves.py").write_text('"""Wolves in the snow. Not measured."""\n')
    (tmp_path / "configs" / "broken.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    text = command(train, "--help").out
    assert "Wolves in the snow" in text and "Not measured" not in text and "broken.py" in text
    monkeypatch.chdir("/")  # the clone's own
    assert "scenes_hour.py" in command(train, "--help").out


def test_an_unknown_configuration_gets_a_list_and_the_nearest(refused):
    message = refused(train, "configs/scenes_huor.py")
    assert "did you mean" in message and "scenes_hour.py?" in message
    assert all(path.name in message for path in (ROOT / "configs").glob("*.py"))


# Values and devices


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train.steps", "ten"], ["--train.steps", "ten", "whole number"]),
        (["--train.steps=1.5"], ["--train.steps", "1.5", "whole number"]),
        (["--optimizer.learning-rate", "fast"], ["--optimizer.learning-rate", "fast"]),
        (["--distributed.process", "one"], ["--distributed.process", "one"]),
        (["--train.steps"], ["--train.steps"]),
        (["--model.decoder.type", "foo"], ["--model.decoder.type", "foo", "shared"]),
        (["--data.scale-jitter", "a", "b"], ["--data.scale-jitter"]),
        (["--train.steps", "5", "6"], ["6"]),
        (["--device", "gpu"], ["--device", "JAX_PLATFORMS"]),
        (["--gpus=2"], ["--gpus", "JAX_PLATFORMS"]),
    ],
)
def test_a_bad_value_is_one_sentence(flags, words, refused):
    message = refused(train, *flags)
    assert all(word in message for word in words), message


def test_numbers_in_every_spelling_are_taken(command, monkeypatch):
    configs = []
    monkeypatch.setattr("r2sm_jax.train.train", configs.append)
    flags = "--train.steps=70", "--train.ema", "1e-3", "--optimizer.learning_rate", ".5"
    assert command(train, *flags).code == 0
    (config,) = configs
    expected = replace(Config().train, steps=70, ema=1e-3)
    assert config.train == expected and config.optimizer.learning_rate == 0.5


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend")])
def test_a_device_that_is_not_there_is_one_sentence(error, refused, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert "JAX_PLATFORMS=cuda" in refused(fail)
    # Without the variable, or with the device, it is a bug and keeps its traceback.
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(type(error)):
        cli_main(fail)
