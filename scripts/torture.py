"""Spoils files and kills runs, and counts what breaks: `python scripts/torture.py [--flags]`.

Spoilt annotation files and predictions go through the commands in this process. Small runs are
killed at random moments and resumed: their losses must be those of a run that was let alone.
A failure is anything but a result or an `InputError`: its file is kept, and the exit code is 1.
"""

import io
import json
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from r2sm_jax import evaluate
from r2sm_jax.cli import cli_main, parse_flags
from r2sm_jax.data import masks
from r2sm_jax.errors import InputError
from r2sm_jax.tools import data

HEIGHT, WIDTH = 20, 30
OUTCOMES = ("ok", "refused")
STRANGE_VALUES: list[Any] = [
    *(None, True, -1, 0, 7, 2**63, 1.5, float("nan"), "", "\0", "\ud800", "../../x", "x" * 10_000),
    *([], {}, [[]], [[1e300] * 6], {"size": [2**31, 2**31], "counts": "0"}),
    {"size": [HEIGHT, WIDTH], "counts": [-5, 605]},
]
SMALL_RUN = """
    --train.steps 40 --train.batch-size 4 --train.log-every 1 --train.checkpoint-every 3
    --train.evaluate-every 40 --train.evaluate-samples 2 --train.report-samples 2
    --data.scenes 32 --data.queries 2 --data.text-only-queries 64 --model.vision.image-size 32
"""


@dataclass(frozen=True)
class TortureConfig:
    """Numbers of files to spoil and of runs to kill."""

    files: int = 5000
    kills: int = 20
    seed: int = 0
    out: Path = Path("torture")
    """Folder for all that is written; it must not exist."""


def outcome_of(action: Callable[[], Any]) -> str:
    """Returns "ok", "refused", or the traceback of anything else."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            action()
    except InputError:
        return "refused"
    except SystemExit as exited:
        return "refused" if exited.code == 2 else f"exit code {exited.code}"
    except Exception:  # what this script looks for: anything but a refusal
        return traceback.format_exc()
    return "ok"


def spoil_tree(rng: random.Random, tree: Any) -> Any:
    """Returns a copy of a JSON tree with one value replaced or left out."""
    tree = json.loads(json.dumps(tree))
    container, key = rng.choice(list_values(tree))
    if rng.random() < 0.2:
        del container[key]
    else:
        container[key] = rng.choice(STRANGE_VALUES)
    return tree


def list_values(tree: Any) -> list[tuple[Any, Any]]:
    """Lists container and key of every value in a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    values = []
    for key, value in items:
        values.append((tree, key))
        if isinstance(value, dict | list):
            values += list_values(value)
    return values


def correct_files(folder: Path) -> dict[str, tuple[Any, Callable[[], None], str]]:
    """Returns name -> (JSON tree, command, its arguments), where FILE stands for the file."""
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[6:18, 8:24] = True
    amodal = masks.encode(mask)
    mask[6:12, 8:12] = False
    visible = masks.encode(mask)

    of_mug = {"image_id": 7, "category_id": 1, "iscrowd": 0}
    one = of_mug | {"id": 31, "segmentation": [[8, 6, 24, 6, 24, 18, 8, 18]]}
    two = of_mug | {"id": 32, "segmentation": amodal, "visible_mask": visible}
    image = {"id": 7, "file_name": "a.jpg", "height": HEIGHT, "width": WIDTH}
    coco = {"images": [image], "categories": [{"id": 1, "name": "mug"}], "annotations": [one, two]}
    query = {"id": 1, "image_id": 7, "text": "the mug", "mask_type": "modal", "instance_ids": [32]}
    dataset = coco | {"queries": [query, query | {"id": 2, "mask_type": "amodal"}]}
    prediction = {"query_id": 1, "segmentation": visible, "score": 0.5, "mask_type": "modal"}

    folder.mkdir(parents=True)
    Image.new("RGB", (WIDTH, HEIGHT)).save(folder / "a.jpg")
    (folder / "data.json").write_text(json.dumps(dataset), "utf-8")
    write = f"--images {folder} --out {folder}/converted.json --overwrite"
    score = f"--predictions FILE --data json:{folder}/data.json"
    return {
        "cocoa-cls": (coco, data.main, f"convert cocoa-cls FILE {write}"),
        "check": (dataset, data.main, f"check FILE --images {folder}"),
        "stats": (dataset, data.main, "stats FILE"),
        "predictions": ([prediction, prediction | {"query_id": 2}], evaluate.main, score),
    }


def spoil_files(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Gives each reader its correct file, then spoilt ones in turn. Yields reader and outcome."""
    files = correct_files(folder)
    for number in range(-len(files), count):
        name = list(files)[number % len(files)]
        tree, main, arguments = files[name]
        if number >= 0:
            tree = spoil_tree(rng, tree)
        path = folder / f"{number}.json"
        path.write_text(json.dumps(tree), "utf-8")
        sys.argv = ["torture", *arguments.replace("FILE", str(path)).split()]
        outcome = outcome_of(main)
        if number < 0 and outcome != "ok":
            raise InputError(f"the correct file of {name} was not read: {outcome}")
        if outcome in OUTCOMES:
            path.unlink()
        yield name, outcome


def train(folder: Path, kill_after: float | None = None) -> bool:
    """Trains or resumes in a new process. Returns whether it ended before it was killed."""
    command = [sys.executable, "-m", "r2sm_jax.train", *SMALL_RUN.split(), "--run", str(folder)]
    if (folder / "config.json").exists():
        command.append("--resume")
    with (folder.parent / "output.txt").open("ab") as output:
        try:
            ended = subprocess.run(command, stdout=output, stderr=output, timeout=kill_after)
        except subprocess.TimeoutExpired:  # it was killed
            return False
    if ended.returncode:
        raise InputError(f"{folder}: training failed ({ended.returncode}); see {output.name}")
    return True


def losses_of(folder: Path) -> dict[int, float]:
    """Reads the loss of every step. The last agree to the bit only if all weights before did."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return {r["step"]: r["train/loss"] for r in records if "train/loss" in r}


def kill_runs(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Kills and resumes runs until `count` were killed. Yields whether the losses stayed."""
    folder.mkdir()
    alone = folder / "alone"
    start = time.monotonic()
    train(alone)
    seconds = time.monotonic() - start

    num_killed = 0
    while num_killed < count:
        run = folder / f"killed{num_killed}"
        while not train(run, kill_after=rng.uniform(0, seconds)):
            num_killed += 1
        is_same = losses_of(run) == losses_of(alone)
        yield "kill", "ok" if is_same else f"{run}: other losses than {alone}"


def main() -> None:
    """Command line."""
    config = parse_flags(TortureConfig, sys.argv[1:], prog="python scripts/torture.py")
    config.out.mkdir(parents=True)
    rng = random.Random(config.seed)
    spoilt = spoil_files(rng, config.files, config.out / "files")
    killed = kill_runs(rng, config.kills, config.out / "runs")

    counts: Counter[tuple[str, str]] = Counter()
    for kind, outcome in chain(spoilt, killed):
        if outcome not in OUTCOMES:
            print(f"{kind}: {outcome}", file=sys.stderr)
            outcome = "FAILED"
        counts[kind, outcome] += 1
    for (kind, outcome), number in sorted(counts.items()):
        print(f"{number:6} {kind}: {outcome}")
    sys.exit(any(outcome == "FAILED" for _, outcome in counts))


if __name__ == "__main__":
    cli_main(main)
