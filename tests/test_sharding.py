"""Several processes: tests without others, and with two and four real ones, which train tiny models
on the CPU."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_batches import examples
from test_train import LOGGED, arrays, at_step, losses

from r2sm_jax import evaluate
from r2sm_jax.cli import parse_config
from r2sm_jax.config import Config, ProcessConfig
from r2sm_jax.data.batches import training_batches
from r2sm_jax.errors import InputError
from r2sm_jax.train import main
from r2sm_jax.training import sharding as distributed
from r2sm_jax.training.run_folder import read_config, resolve_auto
from r2sm_jax.training.sharding import allgather, make_mesh, place, running, shardings

pytestmark = pytest.mark.slow


def assert_losses_equal(run: Path, expected: Path, steps: list[int]) -> None:
    actual, expected = losses(run), losses(expected)
    assert list(actual) == steps
    for step in steps:
        for name in LOGGED:
            assert actual[step][name] == pytest.approx(expected[step][name], abs=1e-5, rel=1e-5), (
                step,
                name,
            )


# Settings.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"coordinator": "localhost:1", "process": 0}, r"give --distributed\.processes as well"),
        ({"processes": 2}, r"give --distributed\.coordinator, --distributed\.process as well"),
        (
            {"coordinator": "localhost", "processes": 2, "process": 0},
            r"--distributed\.coordinator localhost: give HOST:PORT",
        ),
        (
            {"coordinator": "localhost:1", "processes": 2, "process": 2},
            r"--distributed\.process 2 of 2 .* from 0 to 1",
        ),
    ],
)
def test_incomplete_or_impossible_settings_are_one_sentence(flags, message, monkeypatch):
    monkeypatch.setattr(distributed, "_initialize", lambda *_: pytest.fail("it connects"))
    with pytest.raises(InputError, match=message), running(ProcessConfig(**flags)):
        pass


def test_settings_can_come_from_the_environment(monkeypatch):
    given = {}
    monkeypatch.setattr(distributed, "_initialize", lambda config, values: given.update(values))
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:12")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    with running(ProcessConfig(process=1)):
        assert given == {"coordinator": "host:12", "processes": 3, "process": 1}
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(InputError, match="JAX_PROCESS_ID is 'one'"), running(ProcessConfig()):
        pass


def test_processes_of_a_launcher_do_not_start_without_one_another(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with (
        pytest.raises(InputError, match=r"started 2 .*SLURM_NTASKS.*add --distributed\.detect"),
        running(ProcessConfig()),
    ):
        pass


def test_how_processes_connect_is_not_part_of_a_run():
    config = parse_config(
        [
            "--distributed.coordinator",
            "h:1",
            "--distributed.process",
            "1",
            "--distributed.fsdp",
            "2",
        ]
    )
    resolved = resolve_auto(config).distributed
    assert (resolved.coordinator, resolved.process, resolved.fsdp) == (None, None, 2)
    assert resolve_auto(Config()).distributed == Config().distributed


# Data and arrays, without other processes.


@pytest.mark.parametrize("count", [2, 4])
def test_the_batches_of_all_processes_hold_the_rows_of_one(count):
    """With the same randomness in each row."""

    def rows(shard):
        iterator = training_batches(examples(6), batch_size=4, seed=0, shard=shard)
        actual = [jax.tree.leaves(next(iterator)) for _ in range(3)]
        return [
            list(zip(*[[row.tobytes() for row in x] for x in leaves], strict=True))
            for leaves in actual
        ]

    parts = [rows((process, count)) for process in range(count)]
    for step, expected in enumerate(rows((0, 1))):
        assert sorted(row for part in parts for row in part[step]) == sorted(expected)


def test_large_weights_are_divided_along_the_largest_axis_that_can_be():
    mesh = jax.sharding.AbstractMesh((1, 4), distributed.AXES)
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


def test_one_process_needs_no_others():
    mesh = make_mesh(resolve_auto(Config()).train)
    placed = place(mesh, {"a": np.arange(3)})
    assert (
        allgather("x") == ["x"]
        and placed["a"].tolist() == [0, 1, 2]
        and mesh.axis_names == ("data", "fsdp")
    )
    with pytest.raises(InputError, match=r"--distributed\.fsdp 3 does not divide the 1 devices"):
        make_mesh(resolve_auto(Config()).train, 3)


def test_values_of_different_sizes_are_exchanged_in_pieces(monkeypatch):
    """Two threads in the place of two processes."""
    monkeypatch.setattr(distributed, "PIECE_BYTES", 16)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    rows: list[np.ndarray] = [np.empty(0)] * 2
    wait = threading.Barrier(2, timeout=60).wait
    thread = threading.local()

    def exchange(row):
        rows[thread.index] = row
        wait()
        together = np.stack(rows)
        wait()
        assert together.nbytes <= 16  # so much lies on a device
        return together

    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", exchange)
    values = ["short", list(range(100))]

    def gather(index):
        thread.index = index
        return allgather(values[index])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(gather, range(2))) == [values, values]


# Two and four real processes.

SIGNAL_AT_STEP = """
import os
from r2sm_jax import train
add = train.Logs.add
def add_and_signal(self, now, values, **options):
    if now == {step} and train.jax.process_index() == {process}:
        os.kill(os.getpid(), {number})
    return add(self, now, values, **options)
train.Logs.add = add_and_signal
"""
DIVIDE_SMALL_WEIGHTS = """
from r2sm_jax.training import sharding as distributed
distributed.LARGE_BYTES = 1000
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
    assert read_config(run).train.devices == 1


def test_a_dead_process_ends_the_others_with_a_sentence(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--run", tmp_path / "run", "--train.evaluate-every", 100]
    first, second = run_processes(2, "r2sm_jax.train", *flags, code=signal_at(1, 2, signal.SIGKILL))
    assert second.code == -signal.SIGKILL
    assert first.code == 2 and first.err.count("error: ") == 1 and "Traceback" not in first.err
    assert (
        "process 0 of 2 lost another one, whose output says why" in first.err
        and "--resume" in first.err
    )


@pytest.mark.usefixtures("steps_alone")
def test_four_processes_with_divided_weights_train_as_one_and_one_goes_on(
    tiny_run, tiny_flags, tmp_path, command
):
    """The second process alone gets the signal, in step 1; all learn of it two steps later. One
    process then reads the checkpoint, whose arrays they wrote in parts."""
    run = tmp_path / "run"
    flags = [
        *tiny_flags,
        "--run",
        run,
        "--train.checkpoint-every",
        100,
        "--train.evaluate-every",
        100,
    ]
    code = DIVIDE_SMALL_WEIGHTS + signal_at(1, 1, signal.SIGTERM)
    first, *others = run_processes(4, "r2sm_jax.train", *flags, "--distributed.fsdp", 2, code=code)
    assert [first.code, *(end.code for end in others)] == [0] * 4, [first, *others]
    assert "stopped at step 3; continue with " in first.out
    assert not any("step" in end.out + end.err for end in others)
    assert_losses_equal(run, tiny_run, [1, 2, 3])
    one, four = arrays(tiny_run, 3), arrays(run, 3)
    assert one.keys() == four.keys()
    for name, array in four.items():
        np.testing.assert_allclose(array, one[name], rtol=1e-3, atol=1e-4, err_msg=name)
    end = command(main, "--resume", "--run", run, "--distributed.fsdp", 1)
    assert end.code == 0 and "resumed at step 3" in end.out, end.err
    assert_losses_equal(run, tiny_run, [1, 2, 3, 4])


def test_two_processes_evaluate_as_one(tiny_run, tmp_path, command):
    """Twelve images are two parts; the files of the report are the same byte for byte."""
    flags = [tiny_run, "--samples", 12, "--split", "val", "--out"]
    assert command(evaluate.main, *flags, tmp_path / "one").code == 0
    pieces = "from r2sm_jax.training import sharding; sharding.PIECE_BYTES = 5000"
    ended = run_processes(2, "r2sm_jax.evaluate", *flags, tmp_path / "two", code=pieces)
    assert [end.code for end in ended] == [0, 0], ended
    for name in ("report.json", "report.md", "queries.csv"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), (
            name
        )
