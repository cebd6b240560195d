"""Answers about many images, resumable: `answers.jsonl` grows image by image, `predictions.json` is made from it.

The first line of `answers.jsonl` identifies the weights and the queries; every other line holds one image. A line that
was cut short when the process was killed is dropped. `predictions.json` is what `python -m r2sm_jax.evaluate
--predictions` scores (format `coco` of metrics/predictions.py), each entry with the image's name and the query beside.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from r2sm_jax.config import NO_HEAD
from r2sm_jax.data import masks
from r2sm_jax.data.images import frames, open_image
from r2sm_jax.errors import InputError, refuse_overwrite, writing
from r2sm_jax.metrics.predictions import entries_of
from r2sm_jax.metrics.score import Answer
from r2sm_jax.predict_tasks import Task, Tasks
from r2sm_jax.predictor import Predictor, QueryOutputs
from r2sm_jax.query import MaskType

JOURNAL, PRODUCT = "answers.jsonl", "predictions.json"
PART = 8
"""Images that are answered, and written, together; so many are lost at most when the process is killed."""
Stamp = list[int] | None
"""Size and time of change of an image file."""


class Outcome(NamedTuple):
    """What became of the images."""

    answered: int
    earlier: int
    """Answered by an earlier call, which this one resumed."""
    failed: dict[str, str]
    """One sentence for each image that could not be read, by path."""
    file: Path


def predict_many(
    predictor: Predictor, tasks: Tasks, out: Path, *, mask_type: str = "auto", overwrite: bool = False
) -> Outcome:
    """Answers what has no answer in `out` yet and writes all answers to `out/predictions.json`.

    Raises:
        InputError: `out` holds something else or cannot be written, or no image at all can be read.
    """
    predictor.check((), mask_type)
    header = {"weights": predictor.weights_sha256, "language_model": predictor.texts.sha256,
              "queries": tasks.sha256, "mask_type": mask_type}  # fmt: skip
    journal = out / JOURNAL
    try:
        out.mkdir(parents=True, exist_ok=True)
        if overwrite:
            journal.unlink(missing_ok=True)
        if not journal.exists():
            refuse_overwrite(out / PRODUCT, overwrite)
        done = _resume(journal, header)
        waiting = [task for task in tasks.images if done.get(str(task.path)) != _stamp(task.path)]
        failed = _answer(predictor, waiting, journal, mask_type, len(tasks.images))
        if len(failed) == len(tasks.images):
            raise InputError(f"no image could be read; {next(iter(failed.values()))}")
        _write_product(journal, tasks.images, failed, out / PRODUCT)
    except OSError as error:
        raise InputError(f"{out}: cannot write there ({error.strerror}); pass another --out") from None
    answered = len(waiting) - len(failed)
    return Outcome(answered, len(tasks.images) - len(waiting), failed, out / PRODUCT)


def _stamp(path: Path) -> Stamp:
    """Identifies a version of a file; None where there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def _resume(journal: Path, header: dict[str, str]) -> dict[str, Stamp]:
    """The stamps of the images that are answered already; starts the journal where there is none."""
    done: dict[str, Stamp] = {}
    whole = 0
    with journal.open("ab+") as lines:
        lines.seek(0)
        for number, line in enumerate(lines):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                done |= {entry["image"]: entry["stamp"]} if number else {}
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{journal}: line {number + 1} is damaged; pass --overwrite to start anew") from None
            if not number and (changed := [key for key in header if entry.get(key) != header[key]]):
                what = ", ".join(changed).replace("_", " ")
                raise InputError(
                    f"{journal}: these answers are of other {what}; pass another --out, or --overwrite to start anew"
                )
            whole += len(line)
        lines.truncate(whole)
        if not whole:
            lines.write(json.dumps(header).encode() + b"\n")
    return done


def _answer(predictor: Predictor, waiting: Sequence[Task], journal: Path, mask_type: str, total: int) -> dict[str, str]:
    """Answers the images that wait and appends them to the journal; returns a sentence for each that failed."""
    predictor.texts.encode(dict.fromkeys(query.text for task in waiting for query in task.queries))
    failed: dict[str, str] = {}
    columns = TextColumn("images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress, journal.open("a") as lines:
        bar = progress.add_task("", total=total, completed=total - len(waiting))
        for start in range(0, len(waiting), PART):
            part = waiting[start : start + PART]
            stamps = {task: _stamp(task.path) for task in part}
            images: dict[Task, np.ndarray] = {}
            for task in part:
                try:
                    images[task] = _read(task)
                except InputError as error:
                    failed[str(task.path)] = str(error)
                    _print(progress, f"skipped: {error}")
                    continue
                if (count := frames(task.path)) > 1:
                    _print(progress, f"warning: {task.path}: it has {count} frames; the first one is looked at")
            for task, answers in _answer_part(predictor, images, mask_type).items():
                line = {"image": str(task.path), "stamp": stamps[task], "answers": answers}
                lines.write(json.dumps(line) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
            progress.update(bar, advance=len(part))
    return failed


def _answer_part(
    predictor: Predictor, images: Mapping[Task, np.ndarray], mask_type: str
) -> dict[Task, list[list[dict[str, Any]]]]:
    """The entries of each query of each image. Parts are batched apart, so that a resumed run gives the same bytes."""
    found: dict[Task, list[list[dict[str, Any]]]] = {task: [] for task in images}
    asked = ((image, [(task, query.text) for query in task.queries]) for task, image in images.items())
    for task, outputs in predictor.answer_all(asked):
        found[task].append(entries_of(to_answer(predictor, outputs, mask_type)))
    return found


def _print(progress: Progress, text: str) -> None:
    progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _read(task: Task) -> UInt8[np.ndarray, "H W 3"]:
    image = open_image(task.path)
    if task.size is not None and image.shape[:2] != task.size:
        raise InputError(
            f"{task.path}: the image is {image.shape[0]} x {image.shape[1]} but the data set says {task.size[0]} x "
            f"{task.size[1]}; give the image that was annotated"
        )
    return image


def to_answer(
    predictor: Predictor, given: QueryOutputs, mask_type: str = "auto", *, requested: MaskType | None = None,
    both: bool = False,
) -> Answer:  # fmt: skip
    """The answer to one query as the scorer takes it, with all instances that have a mask of the chosen type.

    `requested` is the true mask type, which the oracle head reads. `both`: with the mask of the other type, too.
    """
    probability, decision = predictor.decide(given, mask_type, requested)
    out, amodal = given.outputs, decision == "amodal"
    modal = given.enlarge(out.modal)
    whole = given.enlarge(out.modal, out.amodal) if amodal or both else modal
    slots = given.enlarge(out.slot_modal, out.slot_amodal if amodal else None)
    scores = out.slot_presence * out.slot_iou[:, int(amodal)]
    found = [(masks.encode(mask), float(score)) for mask, score in zip(slots, scores, strict=True) if mask.any()]
    decides = predictor.config.head != NO_HEAD
    return Answer(
        fused=masks.encode(whole if amodal else modal),
        instances=[mask for mask, _ in found],
        scores=[score for _, score in found],
        mask_type=decision if decides else None,
        probability=probability if decides else None,
        score=float(out.iou[int(amodal)]),
        other=masks.encode(modal if amodal else whole) if both else None,
    )


def _write_product(journal: Path, tasks: Sequence[Task], failed: Mapping[str, str], file: Path) -> None:
    """Writes the predictions for all tasks but those that failed, one image in memory at a time."""
    with journal.open("rb") as lines, writing(file) as part, part.open("w") as product:
        places = {}
        start = len(lines.readline())
        for line in lines:
            places[json.loads(line)["image"]] = start  # the last line is valid, where an image was changed
            start += len(line)
        number, separator = 0, "["
        for task in tasks:
            name = str(task.path)
            if name not in places or name in failed:
                number += len(task.queries)
                continue
            lines.seek(places[name])
            for query, entries in zip(task.queries, json.loads(lines.readline())["answers"], strict=True):
                number += 1
                about: dict[str, Any] = {"query_id": number if query.id is None else query.id}
                about |= {"image": task.path.name, "query": query.text}
                for entry in entries:
                    product.write(f"{separator}\n{json.dumps(about | entry)}")
                    separator = ","
        product.write("\n]\n")
