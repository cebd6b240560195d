"""Several processes: tests without others, and with real ones, which train tiny models on the
CPU."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import arrays, logged, with_flags
from test_loop import at_step
from test_run_folder import LOGGED

from r2sm_jax.config import ProcessConfig
from r2sm_jax.errors import InputError
from r2sm_jax.train import main
from r2sm_jax.training import processes
from r2sm_jax.training.processes import describe_devices, running, shardings

pytestmark = pytest.mark.slow


def assert_losses_equal(run: Path, expected: Path, steps: list[int]) -> None:
    actual, wanted = logged(run), logged(expected)
    assert list(actual) == steps
    for step in steps:
        for name in LOGGED:
            value = pytest.approx(wanted[step][name], abs=1e-5, rel=1e-5)
            assert actual[step][name] == value, (step, name)


def test_processes_of_a_launcher_do_not_start_without_one_another(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with (
        pytest.raises(InputError, match=r"started 2 .*SLURM_NTASKS.*add --distributed\.detect"),
        running(ProcessConfig()),
    ):
        pass


def test_large_weights_are_divided_along_the_largest_axis_that_can_be():
    mesh = jax.sharding.AbstractMesh((1, 4), processes.AXES)
    shapes = {
        "large": (1030, 2048),
        "even": (4096, 1024),
        "odd": (1031, 1033),
        "small": (512, 512),
        "vector": (1 << 22,),
    }
    actual = shardings(
        mesh, {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    )
    specs = {name: tuple(sharding.spec) for name, sharding in actual.items()}
    assert specs == {
        "large": (None, "fsdp"),
        "even": ("fsdp",),
        "odd": (),
        "small": (),
        "vector": ("fsdp",),
    }


# Two and four real processes.

SIGNAL_AT_STEP = """
import os
import jax
from r2sm_jax.training.run_folder import Logs
add = Logs.add
def add_and_signal(self, now, values, **options):
    if now == {step} and jax.process_index() == {process}:
        os.kill(os.getpid(), {number})
    return add(self, now, values, **options)
Logs.add = add_and_signal
"""
DIVIDE_SMALL_WEIGHTS = """
from r2sm_jax.training import processes
processes.LARGE_BYTES = 1000
"""
PATIENCE = 400
"""Seconds after which a process counts as hanging; on a busy machine each takes a minute."""


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    out: str
    err: str


def signal_at(process: int, step: int, number: int) -> str:
    """Code that sends one of the processes a signal when it logs a step."""
    return SIGNAL_AT_STEP.format(process=process, step=step, number=number)


def run_processes(count: int, module: str, *flags: object, code: str = "") -> list[Ended]:
    """Runs a command in `count` processes, each of which first runs some code, and waits for
    all."""
    lines = [
        f"from {module} import main",
        "from r2sm_jax.cli import cli_main",
        code,
        "cli_main(main)",
    ]
    start = "\n".join(lines)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    others = ("SLURM", "OMPI", "JAX_PROCESS", "JAX_NUM_PROCESSES", "JAX_COORDINATOR")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    started = []
    for process in range(count):
        own = (
            f"localhost:{port}",
            "--distributed.processes",
            count,
            "--distributed.process",
            process,
        )
        words = [sys.executable, "-c", start, *flags, "--distributed.coordinator", *own]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(list(map(str, words)), env=environment, **pipes))
    try:
        ended = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        Ended(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)
    ]


def test_one_process_stops_and_two_go_on(tiny_run, tiny_flags, tmp_path, command, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: signal.raise_signal(signal.SIGTERM))
        assert command(main, *tiny_flags, "--run", run).code == 0
    ended = run_processes(2, "r2sm_jax.train", "--resume", "--run", run)
    assert [end.code for end in ended] == [0, 0], ended
    assert "resumed at step" in ended[0].out and (run / "report.json").exists()
    assert_losses_equal(run, tiny_run, [1, 2, 3, 4])


def test_a_dead_process_ends_the_others(tiny_flags, tmp_path):
    flags = with_flags(tiny_flags, "--run", tmp_path / "run", "--train.evaluate-every", 100)
    first, second = run_processes(2, "r2sm_jax.train", *flags, code=signal_at(1, 2, signal.SIGKILL))
    assert second.code == -signal.SIGKILL, first.err + second.err
    assert first.code not in (0, None)


@pytest.mark.usefixtures("steps_alone")
def test_four_processes_with_divided_weights_train_as_one_and_one_goes_on(
    tiny_flags, tmp_path, command
):
    """The second process alone gets the signal, in step 1; all learn of it two steps later. One
    process then reads the checkpoint, whose arrays they wrote in parts."""
    run = tmp_path / "run"
    flags = with_flags(
        tiny_flags,
        "--run",
        run,
        "--train.checkpoint-every",
        100,
        "--train.evaluate-every",
        100,
    )
    code = DIVIDE_SMALL_WEIGHTS + signal_at(1, 1, signal.SIGTERM)
    first, *others = run_processes(4, "r2sm_jax.train", *flags, "--distributed.fsdp", 2, code=code)
    assert [first.code, *(end.code for end in others)] == [0] * 4, [first, *others]
    assert "continue with " in first.out
    assert not any("step" in end.out + end.err for end in others)
    # In four parts, as the processes have them: on some CPUs one process that adds them in another
    # order is itself 3e-4 off in the gradient norm of step 3.
    whole = tmp_path / "whole"
    assert command(main, *with_flags(tiny_flags, "--run", whole, "--train.accumulate", 4)).code == 0
    assert_losses_equal(run, whole, [1, 2, 3])
    one, four = arrays(whole, 3), arrays(run, 3)
    assert one.keys() == four.keys()
    for name, array in four.items():
        np.testing.assert_allclose(array, one[name], rtol=1e-3, atol=1e-4, err_msg=name)
    end = command(main, "--resume", "--run", run, "--distributed.fsdp", 1)
    assert end.code == 0 and "resumed at step 3" in end.out, end.err
    assert_losses_equal(run, whole, [1, 2, 3, 4])


def test_a_run_names_its_devices_and_a_gpu_that_it_does_not_use(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "NVIDIA_DRIVER", tmp_path / "driver")
    assert describe_devices() == f"devices: {jax.device_count()} x cpu"
    (tmp_path / "driver").write_text("")
    assert "warning: JAX does not use the GPU" in describe_devices()

    def fail() -> None:
        raise AssertionError("no CUDA")

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(InputError, match="JAX_PLATFORMS"):
        describe_devices()
