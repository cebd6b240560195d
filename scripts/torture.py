"""Spoils files, requests and runs, and counts what breaks: `python scripts/torture.py [--small]`.

Annotation files of every reader and predictions go through the commands in this process, images through the reader of
images. Requests, bad ones among them, go to a served page, eight at once. Runs of the default configuration, made
small, are killed at random moments and resumed; they must end as a run that was let alone, bit by bit.

A failure is anything but a result or an `InputError`: another exception, too much time or memory, a dataset file that
our own reader refuses, an earlier file that a refused command changed, a question without an answer, other weights at
the end. Its files are kept in --out. Exit code 1 if there is any.
"""

import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from spoil import IMAGES, cases, image_bytes, spoil, spoil_bytes
from visitor import Visitor

from r2sm_jax.cli import parse_flags
from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.images import frames, image_size, open_image
from r2sm_jax.errors import InputError
from r2sm_jax.inference.run import abstract_state, read_config
from r2sm_jax.training.checkpoints import Checkpoints, flatten

SECONDS, GIGABYTES = 60, 4
SMALL_RUN = (
    "--train.steps 40 --train.batch-size 4 --train.log-every 1 --train.checkpoint-every 3 --train.evaluate-every 15 "
    "--train.evaluate-samples 2 --train.report-samples 2 --data.scenes 32 --data.queries 2 --data.text-only-queries 64 "
    "--model.vision.image-size 32 --model.vision.dim 48 --model.vision.depth 1 --model.vision.mlp-dim 96"
)
"""Makes a run of the default configuration small. Optimizer, halves, products and head stay."""
AT_ONCE = 8


@dataclass(frozen=True)
class TortureConfig:
    """Spoils files, requests and runs, and counts what breaks."""

    files: int = 10_000
    """Annotation files and predictions, over all readers."""
    images: int = 2_000
    requests: int = 1_000
    kills: int = 20
    small: bool = False
    """A hundredth of each."""
    seed: int = 0
    out: Path = Path("torture")
    """Folder for all that is written; it must not exist."""
    flags: str = ""
    """More flags of training, such as "--model.text.name FOLDER"."""


@dataclass
class Tally:
    """What happened, counted, and the failures in words. Spoilt files that failed go to `folder`."""

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, kind: str, outcome: str, content: bytes = b"") -> None:
        """Counts an outcome: one word, or else the story of a failure."""
        failed = " " in outcome
        self.counts[f"{kind}: {'FAILED' if failed else outcome}"] += 1
        if failed:
            self.failures.append(f"failure {len(self.failures)}, {kind}: {outcome}")
            (self.folder / f"failure{len(self.failures) - 1}").write_bytes(content)


def outcome_of(action: Callable[[], Any]) -> str:
    """ "read", "refused", or the traceback of anything else."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            action()
        return "read"
    except InputError:
        return "refused"
    except SystemExit as exited:
        outcomes: dict[Any, str] = {0: "read", None: "read", 2: "refused"}
        return outcomes.get(exited.code, f"exit code {exited.code}")
    except Exception:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _hung(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds of processor time")


# Files


def spoil_files(rng: random.Random, count: int, tally: Tally) -> None:
    """Each reader in turn gets a spoilt file."""
    os.environ.setdefault(
        "GLIBC_TUNABLES", ""
    )  # commands would restart the process for a better one
    files = tally.folder / "files"
    readers, converted = cases(files), files / "converted.json"
    for name, case in readers.items():  # unspoilt
        sys.argv = ["torture", *case.words]
        if (outcome := outcome_of(case.main)) != "read":
            raise InputError(f"the correct file of {name} was not read: {outcome}")
    for number in range(count):
        name, case = list(readers.items())[number % len(readers)]
        case.file.write_bytes(content := spoil(rng, case.content))
        before, sys.argv = converted.read_bytes(), ["torture", *case.words]
        outcome = outcome_of(case.main)
        if outcome == "refused" and converted.read_bytes() != before:
            outcome = "an earlier file was changed by a command that was refused"
        if outcome == "read" and "--overwrite" in case.words:
            again = outcome_of(
                lambda: [d.rles_at(i) for d in [read_json(converted, files)] for i in range(len(d))]
            )
            outcome = (
                outcome
                if again == "read"
                else f"our own reader does not read what was written: {again}"
            )
        tally.add(name, outcome, content)


def spoil_images(rng: random.Random, count: int, tally: Tally) -> None:
    """Images of all formats, spoilt, through everything that opens one."""
    file, correct = tally.folder / "image", [image_bytes(*form) for form in IMAGES]
    for number in range(count):
        content = spoil_bytes(rng, correct[number % len(correct)])
        file.write_bytes(content)
        for read in (open_image, image_size, frames):
            if (outcome := outcome_of(lambda read=read: read(file))) != "read":
                break
        tally.add(f"image {IMAGES[number % len(IMAGES)][0]}", outcome, content)


# Runs


def train(
    folder: Path, flags: str, *more: str, kill_after: float | None = None
) -> tuple[bool, float]:
    """Trains in a process of its own. Whether it ended by itself, and after how many seconds."""
    command = [
        sys.executable,
        "-m",
        "r2sm_jax.train",
        *SMALL_RUN.split(),
        *flags.split(),
        "--run",
        str(folder),
        *more,
    ]
    env = {
        name: value for name, value in os.environ.items() if value
    }  # without the empty GLIBC_TUNABLES
    env |= {
        "JAX_COMPILATION_CACHE_DIR": f"{folder.parent}/cache",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    started = time.monotonic()
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode not in (0, -signal.SIGKILL):
        end = (folder.parent / f"{folder.name}.log").read_text("utf-8", errors="replace")[-2000:]
        raise InputError(f"training ended with code {process.returncode}: {end}")
    return process.returncode == 0, time.monotonic() - started


def end_of(run: Path) -> dict[str, Any]:
    """Every array of the last checkpoint as bytes, and the losses of every step."""
    _, state, constants = abstract_state(read_config(run))
    checkpoints = Checkpoints(run)
    restored = flatten(checkpoints.restore(state, constants, step=checkpoints.steps[-1])[:2])
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    losses = {
        f"loss of step {line['step']}": line["train/loss"] for line in lines if "train/loss" in line
    }
    return {name: np.asarray(leaf).tobytes() for name, leaf in restored.items()} | losses


def kill_runs(rng: random.Random, count: int, tally: Tally, flags: str) -> Path:
    """Kills runs at random moments and resumes them, several times each. Returns the run that was let alone."""
    alone, killed, number = tally.folder / "runs" / "alone", 0, 0
    alone.parent.mkdir()
    train(alone, flags)
    _, seconds = train(alone.with_name("again"), flags)  # with compiled programs
    wanted = end_of(alone)
    while killed < count:
        number, ended = number + 1, False
        run = alone.with_name(f"killed{number}")
        while not ended:
            resume = ("--resume",) if (run / "config.json").exists() else ()
            moment = rng.uniform(0, seconds) if killed < count else None
            try:
                ended, _ = train(run, flags, *resume, kill_after=moment)
            except InputError as error:
                tally.add("kill", str(error))
                break
            killed += not ended
            tally.counts["kill: killed"] += not ended
        if ended:
            found = end_of(run)
            other = [
                name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
            ]
            tally.add(
                "kill",
                f"{len(other)} values differ at the end, {other[:3]}" if other else "identical",
            )
    return alone


# The page


def ask_page(rng: random.Random, count: int, tally: Tally, run: Path) -> None:
    """Visits a served page, `AT_ONCE` at once."""
    log = tally.folder / "page.log"
    command = [
        sys.executable,
        "-u",
        "-m",
        "r2sm_jax.demo",
        str(run),
        "--port",
        "0",
        "--max-upload-mb",
        "1",
    ]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        server = process.stdout.readline().decode().strip()
        visitors = [Visitor(server, random.Random(rng.random())) for _ in range(count)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for outcome in pool.map(lambda visitor: visitor.visit(), visitors):
                tally.add("page", outcome)
        status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
        peak = (
            next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            / 2**20
        )
        process.terminate()
    tally.add("page memory", "bounded" if peak < GIGABYTES else f"the page took {peak:.1f} GB")
    for story in log.read_text("utf-8", errors="replace").split("Traceback ")[1:]:
        tally.add("page log", story if "tools/demo" in story else "gradio")


def main() -> None:
    """Command line."""
    options = parse_flags(TortureConfig, sys.argv[1:], prog="python scripts/torture.py")
    share = 100 if options.small else 1
    wanted = (options.files, options.images, options.requests, options.kills)
    files, images, requests, kills = (max(1, number // share) for number in wanted)
    options.out.mkdir(parents=True)
    tally, rng = Tally(options.out), random.Random(options.seed)
    signal.signal(signal.SIGPROF, _hung)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spoil_files(rng, files, tally)
    spoil_images(rng, images, tally)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    tally.add(
        "memory of files and images", "bounded" if peak < GIGABYTES else f"they took {peak:.1f} GB"
    )
    run = kill_runs(rng, kills, tally, options.flags)
    ask_page(rng, requests, tally, run)
    for kind, number in sorted(tally.counts.items()):
        print(f"{number:6} {kind}")
    print(
        f"{files} files, {images} images, {requests} requests, {kills} kills: {len(tally.failures)} failures"
    )
    (options.out / "failures.txt").write_text("\n\n".join(tally.failures), "utf-8")
    print("\n\n".join(tally.failures[:20]), file=sys.stderr)
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
