"""Answers about many images, resumable: `answers.jsonl` grows image by image, `predictions.json` is made from it.

The first line of `answers.jsonl` identifies the weights and the queries; every other line holds one image. A line that
was cut short when the process was killed is dropped. `predictions.json` is what `python -m r2sm_jax.evaluate
--predictions` scores (format `coco` of metrics/predictions.py), each entry with the image's name and the query beside.
"""

import glob
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from r2sm_jax.config import NO_HEAD
from r2sm_jax.data import masks
from r2sm_jax.data.images import find_images, frames, open_image
from r2sm_jax.data.samples import read_json
from r2sm_jax.errors import InputError, refuse_overwrite, writing
from r2sm_jax.metrics.predictions import entries_of
from r2sm_jax.metrics.score import Answer
from r2sm_jax.predictor import Predictor, QueryOutputs, check_query
from r2sm_jax.query import MaskType

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
JOURNAL, PRODUCT = "answers.jsonl", "predictions.json"
PART = 8
"""Images that are answered, and written, together; so many are lost at most when the process is killed."""
Stamp = list[int] | None
"""Size and time of change of an image file; None where there is no file."""


class Question(NamedTuple):
    """A query, with its id if it comes from a data set."""

    text: str
    id: int | None = None


class Task(NamedTuple):
    """One image and all queries about it."""

    path: Path
    queries: tuple[Question, ...]
    size: tuple[int, int] | None = None
    """Height and width that the data set states."""


class Tasks(NamedTuple):
    """All images with their queries, and a hash of the queries, which must be the same when a call is resumed."""

    images: list[Task]
    sha256: str


def is_pattern(image: str) -> bool:
    """Whether IMAGE means files that match, such as 'photos/*.jpg'. A file of that very name is no pattern."""
    return glob.has_magic(image) and not Path(image).exists()


def find_tasks(image: str, query: str | None, queries: str | None) -> Tasks:
    """The tasks that a command line names: images from a file, a folder or a pattern, and one query or a file of them.

    Raises:
        InputError: there are no images or no queries, the query file cannot be read, or it names images that do not
            exist.
    """
    if query is not None and queries is not None:
        raise InputError("--queries: there is a query on the command line as well; leave one of them out")
    if queries is not None:
        path = Path(queries)
        return _from_dataset(path, image) if path.suffix.lower() == ".json" else _from_text(path, image)
    check_query(query or "")
    tasks = [Task(path, (Question(query or ""),)) for path in _images(image)]
    return Tasks(tasks, hashlib.sha256((query or "").encode()).hexdigest())


def _images(image: str) -> list[Path]:
    if is_pattern(image):
        found = sorted(Path(name) for name in glob.glob(image, recursive=True) if Path(name).is_file())
        if not found:
            raise InputError(f"{image}: no file matches this pattern; check it, and put it in quotes")
        return found
    return find_images(Path(image), SUFFIXES, "images") if Path(image).is_dir() else [Path(image)]


def _from_dataset(path: Path, image: str) -> Tasks:
    """The queries of a data set about its images, which lie in the folder `image`."""
    if not Path(image).is_dir():
        raise InputError(f"{image}: with a data set as --queries, give the folder of its images here")
    dataset = read_json(path, image)
    tasks = []
    for index in range(len(dataset)):
        if queries := tuple(Question(query.text, query.id) for query in dataset.queries_at(index)):
            tasks.append(Task(dataset.image_path(index), queries, dataset.size_at(index)))
    if not tasks:
        raise InputError(f"{path}: the data set has no queries; write some with python -m r2sm_jax.data queries")
    return Tasks(tasks, dataset.sha256)


def _from_text(path: Path, image: str) -> Tasks:
    """A text file: each line is a query about every image, or an image, a tab and a query about it."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot read the query file ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: the query file is not UTF-8 text; save it as plain text, or give a .json") from None
    asked: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name, tab, query = line.partition("\t")
            if tab and not (name.strip() and query.strip()):
                raise InputError(f"{path}: line {number} lacks the image before its tab or the query after; mend it")
            asked.append((name.strip(), query.strip()) if tab else ("", line.strip()))
    if not asked:
        raise InputError(f"{path}: the query file is empty; write one query a line, or IMAGE, a tab and a query")
    for_all = [Question(query) for name, query in asked if not name]
    found = _images(image) if for_all or not Path(image).is_dir() else []
    by_name = {file.name: file for file in found}
    queries = {file: list(for_all) for file in found}
    for name, query in asked:
        if name:
            file = by_name.get(name, Path(image) / name)
            if not file.is_file():
                raise InputError(f"{path}: it asks about {name}, which is not among the images of {image}; check it")
            queries.setdefault(file, []).append(Question(query))
    tasks = [Task(file, tuple(of_image)) for file, of_image in queries.items() if of_image]
    return Tasks(tasks, hashlib.sha256(content).hexdigest())


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
    journal, product = out / JOURNAL, out / PRODUCT
    try:
        out.mkdir(parents=True, exist_ok=True)
        if overwrite:
            journal.unlink(missing_ok=True)
        if not journal.exists():
            refuse_overwrite(product, overwrite)
        done = _resume(journal, header)
        waiting = [task for task in tasks.images if done.get(str(task.path), ()) != _stamp(task.path)]
        failed = _answer(predictor, waiting, journal, mask_type, len(tasks.images))
        if len(failed) == len(tasks.images):
            raise InputError(f"no image could be read; {next(iter(failed.values()))}")
        _write_product(journal, tasks.images, failed, product)
    except OSError as error:
        raise InputError(f"{out}: cannot write there ({error.strerror}); pass another --out") from None
    return Outcome(len(waiting) - len(failed), len(tasks.images) - len(waiting), failed, product)


def _stamp(path: Path) -> Stamp:
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
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress, journal.open("a") as lines:
        bar = progress.add_task("images", total=total, completed=total - len(waiting))
        for start in range(0, len(waiting), PART):
            part = waiting[start : start + PART]
            stamps = {task: _stamp(task.path) for task in part}
            images: dict[Task, np.ndarray] = {}
            for task in part:
                try:
                    images[task] = _read(task)
                except InputError as error:
                    failed[str(task.path)] = str(error)
                    continue
                if (count := frames(task.path)) > 1:
                    warning = f"warning: {task.path}: it has {count} frames; the first one is looked at"
                    progress.console.print(warning, markup=False, highlight=False, soft_wrap=True)
            for task, answers in _answer_part(predictor, images, mask_type).items():
                line = {"image": str(task.path), "stamp": stamps[task], "answers": answers}
                lines.write(json.dumps(line) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
            progress.update(bar, advance=len(part))
    return failed


def _read(task: Task) -> UInt8[np.ndarray, "H W 3"]:
    image = open_image(task.path)
    if task.size is not None and image.shape[:2] != task.size:
        raise InputError(
            f"{task.path}: the image is {image.shape[0]} x {image.shape[1]} but the data set says {task.size[0]} x "
            f"{task.size[1]}; give the image that was annotated"
        )
    return image


def _answer_part(
    predictor: Predictor, images: Mapping[Task, np.ndarray], mask_type: str
) -> dict[Task, list[list[dict[str, Any]]]]:
    """The entries of each query of each image. Parts are batched apart, so that a resumed run gives the same bytes."""
    found: dict[Task, list[list[dict[str, Any]]]] = {task: [] for task in images}
    asked = ((image, [(task, query.text) for query in task.queries]) for task, image in images.items())
    for task, outputs in predictor.answer_all(asked):
        found[task].append(entries_of(to_answer(predictor, outputs, mask_type)))
    return found


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
        places, start = {}, len(lines.readline())
        for line in lines:
            places[json.loads(line)["image"]] = start  # the last line is valid, where an image was changed
            start += len(line)
        number, separator = 0, "["
        for task in tasks:
            if str(task.path) in failed:
                number += len(task.queries)
                continue
            lines.seek(places[str(task.path)])
            for query, entries in zip(task.queries, json.loads(lines.readline())["answers"], strict=True):
                number += 1
                about: dict[str, Any] = {"query_id": number if query.id is None else query.id}
                about |= {"image": task.path.name, "query": query.text}
                for entry in entries:
                    product.write(f"{separator}\n{json.dumps(about | entry)}")
                    separator = ","
        product.write("\n]\n")
