"""Predicts many images into a folder, and goes on where an earlier call was stopped.

answers.jsonl      a header, then a line an image: {"image": name, "answers": [[entry, ...], ...]}
predictions.json   all entries, in the format that `evaluate --predictions` scores

Several processes divide the images. Process N of several appends to answers-N.jsonl.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from r2sm_jax.data.images import frames, open_annotated, open_image
from r2sm_jax.errors import InputError, refuse_overwrite, writing
from r2sm_jax.inference.predictor import BATCH_ROWS, Predictor, Request
from r2sm_jax.inference.tasks import Task, Tasks
from r2sm_jax.training.sharding import allgather, is_main_process, run_on_main

JOURNAL = "answers.jsonl"
PREDICTIONS = "predictions.json"


class Line(NamedTuple):
    """Where the answers about one image are stored."""

    journal: Path
    offset: int
    """Bytes before the line."""

    def read(self) -> list[list[dict[str, Any]]]:
        """Returns the entries of each query about the image."""
        with self.journal.open("rb") as file:
            file.seek(self.offset)
            return json.loads(file.readline())["answers"]


class BatchResult(NamedTuple):
    """What became of the images."""

    num_predicted: int
    num_earlier: int
    """Images that an earlier call had predicted."""
    failed: dict[str, str]
    """Name of an image that cannot be read -> the reason."""


def predict_images(
    predictor: Predictor,
    tasks: Tasks,
    out: Path,
    *,
    mask_type: str = "auto",
    overwrite: bool = False,
) -> BatchResult:
    """Predicts the images that have no answers in `out` yet and writes `out/predictions.json`.

    Raises InputError if `out` holds the answers of something else or cannot be written, or no image
    can be read.
    """
    predictor.check((), mask_type)
    header = {
        "weights": predictor.weights_sha256,
        "language_model": predictor.text_encoder.sha256,
        "matmul_precision": predictor.matmul_precision,
        "queries": tasks.sha256,
        "mask_type": mask_type,
        "images": str(tasks.root),
    }
    try:
        earlier = run_on_main(lambda: _start(out, header, overwrite))
        waiting = [task for task in tasks.images if task.name not in earlier]
        mine = waiting[jax.process_index() :: jax.process_count()]

        failed: dict[str, str] = {}
        for of_process in allgather(_predict_tasks(predictor, mine, out, header, mask_type)):
            failed |= of_process
        if len(failed) == len(tasks.images):
            reason = next(iter(failed.values()))
            raise InputError(f"no image could be read; {reason}")

        done = [task for task in tasks.images if task.name not in failed]
        run_on_main(lambda: _write_predictions(out, done, read_journals(out, header)))
    except OSError as error:
        raise InputError(
            f"{out}: cannot write there ({error.strerror}); pass another --out"
        ) from None
    num_earlier = len(tasks.images) - len(waiting)
    return BatchResult(len(waiting) - len(failed), num_earlier, failed)


def read_image(path: Path, size: tuple[int, int] | None = None) -> UInt8[np.ndarray, "H W 3"]:
    """Opens an image and warns if it has several frames.

    Args:
        size: height and width that it must have.
    """
    image = open_image(path) if size is None else open_annotated(path, size, "the data set")
    num_frames = frames(path)
    if num_frames > 1:
        print(
            f"warning: {path}: it has {num_frames} frames; the first one is looked at",
            file=sys.stderr,
        )
    return image


def find_journals(out: Path) -> list[Path]:
    """The journals of earlier calls, which may have had any number of processes."""
    names = re.compile(r"answers(-\d+)?\.jsonl")
    return sorted(path for path in out.glob("answers*.jsonl") if names.fullmatch(path.name))


def read_journals(out: Path, header: Mapping[str, str]) -> dict[str, Line]:
    """Returns the line of each image by its name. Raises InputError as `read_journal`."""
    lines: dict[str, Line] = {}
    for path in find_journals(out):
        lines |= read_journal(path, header)
    return lines


def read_journal(path: Path, header: Mapping[str, str]) -> dict[str, Line]:
    """Returns the lines of one journal by the name of the image.

    A last line that was cut short, when a process was killed, is dropped.
    Raises InputError if the file is damaged or no journal, or the answers are of something else.
    """
    damaged = InputError(f"{path}: it is damaged; pass --overwrite to start anew")
    lines: dict[str, Line] = {}
    with path.open("rb+") as file:
        first = file.readline()
        if not first.endswith(b"\n"):
            # Only a header of ours may be dropped; anything else is somebody's file.
            if not _header_line(header).startswith(first):
                raise damaged
            file.truncate(0)
            return {}
        _check_header(path, first, header, damaged)

        end = len(first)
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                lines[json.loads(line)["image"]] = Line(path, end)
            except (ValueError, KeyError, TypeError):
                raise damaged from None
            end += len(line)
        file.truncate(end)
    return lines


def _check_header(path: Path, line: bytes, header: Mapping[str, str], damaged: InputError) -> None:
    try:
        stored = json.loads(line)
    except ValueError:
        raise damaged from None
    if not isinstance(stored, dict):
        raise damaged
    changed = [key for key in header if stored.get(key) != header[key]]
    if changed:
        names = ", ".join(changed).replace("_", " ")
        raise InputError(
            f"{path}: these answers are of other {names}; pass another --out, or --overwrite to "
            "start anew"
        )


def _header_line(header: Mapping[str, str]) -> bytes:
    return json.dumps(header).encode() + b"\n"


def _start(out: Path, header: Mapping[str, str], overwrite: bool) -> dict[str, Line]:
    """Makes the folder and returns the answers that it holds."""
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for path in find_journals(out):
            path.unlink()
    if not find_journals(out):
        refuse_overwrite(out / PREDICTIONS, overwrite)
    return read_journals(out, header)


def _predict_tasks(
    predictor: Predictor,
    tasks: Sequence[Task],
    out: Path,
    header: Mapping[str, str],
    mask_type: str,
) -> dict[str, str]:
    """Appends the answers about images to this process's journal.

    Returns the images that cannot be read, with the reasons.
    """
    predictor.text_encoder.encode(query.text for task in tasks for query in task.queries)
    name = JOURNAL
    if jax.process_count() > 1:
        name = f"answers-{jax.process_index()}.jsonl"

    failed: dict[str, str] = {}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with (
        Progress(*columns, console=Console(stderr=True), disable=not is_main_process()) as progress,
        (out / name).open("ab") as journal,
    ):
        if journal.tell() == 0:
            journal.write(_header_line(header))
        bar = progress.add_task("images", total=len(tasks))

        # Parts of a batch each: no more is lost when the process is killed.
        for start in range(0, len(tasks), BATCH_ROWS):
            part = []
            requests = []
            for task in tasks[start : start + BATCH_ROWS]:
                try:
                    image = read_image(task.path, task.size)
                except InputError as error:
                    failed[task.name] = str(error)
                    continue
                part.append(task)
                requests.append(Request(image, [query.text for query in task.queries]))

            predictions = predictor.predict_batches(requests, mask_type, with_candidates=True)
            for task, of_image in zip(part, predictions, strict=True):
                answers = [prediction.to_coco() for prediction in of_image]
                line = json.dumps({"image": task.name, "answers": answers})
                journal.write(line.encode() + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
            progress.update(bar, advance=min(BATCH_ROWS, len(tasks) - start))
    return failed


def _write_predictions(out: Path, tasks: Sequence[Task], lines: Mapping[str, Line]) -> None:
    """Writes the entries of all tasks into one file, with one image in memory at a time."""
    separator = ""
    with writing(out / PREDICTIONS) as part, part.open("w", encoding="utf-8") as file:
        file.write("[")
        for task in tasks:
            answers = lines[task.name].read()
            for query, entries in zip(task.queries, answers, strict=True):
                about = {"query_id": query.id, "image": task.name, "query": query.text}
                for entry in entries:
                    file.write(f"{separator}\n{json.dumps(about | entry)}")
                    separator = ","
        file.write("\n]\n")
