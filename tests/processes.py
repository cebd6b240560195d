"""Several real processes of one command on this machine, connected as on many."""

import os
import socket
import subprocess
import sys
from typing import NamedTuple

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
