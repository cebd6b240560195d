# ruff: noqa: E402
"""Settings of all tests, and the fixtures that they share. Nothing is downloaded.

- `command` and `refused` run a command in this process, as a shell would.
- `tiny_config`, and `tiny_flags` on a command line, are a run that trains a step in milliseconds.
- `tiny_run` is that run, trained once a session; `predictor` answers with its weights.
- `bert_folder` and `llama_folder` are its language models, `published_folders` image encoders.
"""

import ctypes
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# Read before jax is imported, and by every subprocess.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "r2sm_jax_tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Tests compile more than they compute. XLA refuses flags that it does not know: this one is known
# from jaxlib 0.8 on.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"  # a third of the time
os.environ.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)

from jaxtyping import install_import_hook

# Shapes, dtypes and types are checked at every call, but for drawing scenes, whose speed is tested;
# an int is a float, as type checkers have it.
CHECKED = [
    "models",
    "training",
    "evaluation",
    "inference",
    "config",
    "train",
    "evaluate",
    "predict",
    "data.batches",
    "data.dataset",
    "data.images",
    "data.masks",
    "data.sheet",
    "sources",
    "language.states",
    "language.tokenizer",
]
install_import_hook(
    [f"r2sm_jax.{name}" for name in CHECKED],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

import jax
import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings
from tiny_models import TINY, write_bert, write_llama

from r2sm_jax.cli import cli_main, to_json
from r2sm_jax.config import (
    Config,
    DataConfig,
    DecoderConfig,
    LoopConfig,
    OptimizerConfig,
    VisionConfig,
)

# The same examples at every run; `pytest --hypothesis-profile default` draws new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_configure(config) -> None:
    config.addinivalue_line(
        "filterwarnings", "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning"
    )


@pytest.fixture(scope="module", autouse=True)
def free_memory():
    """Frees compiled programs once a worker holds 2.5 GB. Until then, later test modules use them
    again."""
    yield
    linux = sys.platform == "linux"
    if not linux or 4096 * int(Path("/proc/self/statm").read_text().split()[1]) > 2.5e9:
        jax.clear_caches()
        gc.collect()
        if linux:
            ctypes.CDLL(None).malloc_trim(0)  # glibc would keep what is free


def pytest_runtest_setup() -> None:
    """Trainings whose steps compute the same share the compiled one: most of the time of a tiny
    training goes by before its first step."""
    train, loop = (sys.modules.get(f"r2sm_jax.{name}") for name in ("train", "training.loop"))
    if train is None or loop is None or hasattr(train, "compiled_steps"):
        return
    make_task, jit_train_step = train.make_task, loop.jit_train_step
    steps = train.compiled_steps = {}
    key = ""

    def make_and_remember(config: Config, *sources, published: bool):
        nonlocal key
        rare = dict.fromkeys(("log_every", "evaluate_every", "checkpoint_every"), 1)
        rare |= {"evaluate_samples": 1, "report_samples": 1, "select_on": "dev"}
        key = repr(
            replace(config, run=None, init=None, resume=False, train=replace(config.train, **rare))
        )
        return make_task(config, *sources, published=published)

    def jit_once(*parts):
        if key not in steps:
            steps[key] = jit_train_step(*parts)
        return steps[key]

    train.make_task, loop.jit_train_step = make_and_remember, jit_once


# Commands.


class Exit(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command's `main` in this process, as its `__main__` would."""

    def run(main, *arguments: object) -> Exit:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli_main(main)
        captured = capsys.readouterr()
        return Exit(int(exited.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def refused(command):
    """Runs a command that must end with exit code 2 and one sentence. Returns that sentence."""

    def run(main, *arguments: object) -> str:
        end = command(main, *arguments)
        errors = [line for line in end.err.splitlines() if line.startswith("error: ")]
        assert end.code == 2 and len(errors) == 1 and "Traceback" not in end.err, end
        return errors[0]

    return run


# Two objects of a photo, for tests of prompts.

SIZE = 60, 80


def rectangle(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    """A mask of that photo."""
    mask = np.zeros(SIZE, bool)
    mask[y0:y1, x0:x1] = True
    return mask


MUG, BOX = rectangle(10, 10, 30, 40), rectangle(30, 20, 60, 50)


# Folders that all tests read and none writes in. A test that changes something copies them.


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """The temporary folder that all workers of this call of pytest have in common."""
    folder = tmp_path_factory.getbasetemp()
    # Each worker of pytest-xdist has a folder of its own in that of the call.
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Makes a folder in the first worker that needs it. The others wait for it and use it."""
    done = folder.with_suffix(".done")
    with FileLock(folder.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def bert_folder(shared_folder) -> Path:
    """A tiny random BERT with its own word-piece tokenizer."""
    return make_once(shared_folder / "tiny-bert", write_bert)


@pytest.fixture
def bert_copy(tmp_path, bert_folder) -> Path:
    """A copy of the tiny BERT that a test may break."""
    return Path(shutil.copytree(bert_folder, tmp_path / "bert"))


@pytest.fixture(scope="session")
def llama_folder(shared_folder, bert_folder) -> Path:
    """A tiny random decoder-only model."""
    return make_once(shared_folder / "llama", lambda folder: write_llama(folder, bert_folder))


@pytest.fixture(scope="session")
def published_folders(shared_folder) -> dict[str, Path]:
    """Small published image encoders with random weights: `sam` and `dinov2`."""
    pytest.importorskip("torch")
    import published_models as published

    folders = {}
    for name in ("sam", "dinov2"):
        config = published.image_config(name)
        folders[name] = make_once(
            shared_folder / name, lambda folder, config=config: published.write(config, folder)
        )
    return folders


# The tiny run.


@pytest.fixture(scope="session")
def tiny_config(bert_folder) -> Config:
    """A run that trains a step in milliseconds."""
    loop = LoopConfig(
        steps=4,
        batch_size=8,
        log_every=1,
        evaluate_every=2,
        checkpoint_every=1,
        evaluate_samples=2,
        report_samples=1,
        matmul_precision="float32",
    )
    return Config(
        model=replace(TINY, text=replace(TINY.text, name=str(bert_folder))),
        data=DataConfig(scenes=8, queries=2, instances=4, text_only_queries=64),
        optimizer=OptimizerConfig(name="adamw"),
        train=loop,
    )


def to_flags(values: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The words of a command line for the fields that are not the default."""
    for name, value in values.items():
        flag = prefix + name.replace("_", "-")
        if isinstance(value, dict):
            yield from to_flags(value, defaults[name], f"{flag}.")
        elif value != defaults[name]:
            yield f"--{flag}"
            yield from map(str, value if isinstance(value, list | tuple) else [value])


@pytest.fixture(scope="session")
def tiny_flags(tiny_config) -> list[str]:
    """The tiny run as flags of the command."""
    return list(to_flags(to_json(tiny_config), to_json(Config())))


@pytest.fixture(scope="session")
def published_flags(tiny_config) -> list[str]:
    """Those of a tiny run that leaves the sizes to published weights."""
    vision = VisionConfig(image_size=64, patch_size=16)
    decoder = DecoderConfig(slots=2, fine_dim=16)
    model = replace(tiny_config.model, vision=vision, decoder=decoder)
    return list(to_flags(to_json(replace(tiny_config, model=model)), to_json(Config())))


@pytest.fixture(scope="session")
def tiny_run(tiny_config, shared_folder) -> Path:
    """A run folder after four steps."""
    from r2sm_jax.train import train  # not at the top: most test files run without it

    return make_once(
        shared_folder / "tiny-run", lambda folder: train(replace(tiny_config, run=str(folder)))
    )


@pytest.fixture(scope="session")
def predictor(tiny_run):
    """The predictor of the tiny run, opened once a worker. A test that changes it uses
    `monkeypatch`."""
    from r2sm_jax.inference.load import load_run

    return load_run(tiny_run).predictor


@pytest.fixture
def steps_alone(monkeypatch):
    """Trainings are not evaluated, which takes more than half of a tiny one: for tests that read
    steps or weights."""
    from r2sm_jax import train

    def score(weights, step, folder):
        return step, {}, {}

    monkeypatch.setattr(train, "segmenter_evaluation", lambda *_, **__: score)
    monkeypatch.setattr(train, "report_on_best", lambda *_: None)
