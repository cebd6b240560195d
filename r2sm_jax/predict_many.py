"""Answers about many images, resumable: `answers.jsonl` grows image by image, `predictions.json` is made from it.

`answers.jsonl` begins with a line that says by which weights and to which queries the answers are; every other line
holds one image. A line that was cut short when the process was killed is dropped. `predictions.json` is what
`python -m r2sm_jax.evaluate --predictions` scores (format `coco` of `metrics/predictions.py`), each entry with the
image's name and the query beside.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from r2sm_jax.config import NO_HEAD
from r2sm_jax.data import masks
from r2sm_jax.data.images import Letterbox, frames, open_image
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.metrics.free_running import ranked_slots
from r2sm_jax.predict_tasks import Task, Tasks
from r2sm_jax.predictor import QUERY_BUCKETS, Answers, Predictor

IMAGES = 8
"""Images that are answered, and written, together; so many are lost at most when the process is killed."""
JOURNAL, PRODUCT = "answers.jsonl", "predictions.json"


class Outcome(NamedTuple):
    """What became of the images."""

    answered: int
    earlier: int
    """Answered by an earlier call, which this one resumed."""
    failed: dict[str, str]
    """One sentence for each image that could not be read, by path."""
    file: Path


def predict_many(
    predictor: Predictor, tasks: Tasks, out: Path, *, mask_type: Literal["auto", "modal", "amodal"] = "auto",
    overwrite: bool = False,
) -> Outcome:  # fmt: skip
    """Answers what has no answer in `out` yet and writes all answers to `out/predictions.json`.

    Raises:
        InputError: `out` holds something else or cannot be written, or no image at all can be read.
    """
    if mask_type == "auto" and predictor.config.head == "oracle":
        raise InputError("this run's head is the oracle, which needs the truth; pass --mask-type modal or amodal")
    asked = {"weights": predictor.weights_sha256, "language_model": predictor.texts.sha256,
             "queries": tasks.sha256, "mask_type": mask_type}  # fmt: skip
    journal = out / JOURNAL
    try:
        out.mkdir(parents=True, exist_ok=True)
        if overwrite:
            journal.unlink(missing_ok=True)
        if not journal.exists():
            refuse_overwrite(out / PRODUCT, overwrite)
        done = _resume(journal, asked)
        waiting = [task for task in tasks.images if done.get(str(task.path)) != _stamp(task.path)]
        failed = _answer(predictor, waiting, journal, mask_type, len(tasks.images))
        if len(failed) == len(tasks.images):
            raise InputError(f"no image could be read; {next(iter(failed.values()))}")
        _write_product(journal, tasks.images, failed, out / PRODUCT)
    except OSError as error:
        raise InputError(f"{out}: cannot write there ({error.strerror}); pass another --out") from None
    answered = len(waiting) - len(failed)
    return Outcome(answered, len(tasks.images) - len(waiting), failed, out / PRODUCT)


def _stamp(path: Path) -> list[int] | None:
    """Tells a file that was changed since."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def _resume(journal: Path, asked: dict[str, str]) -> dict[str, list[int]]:
    """The images that are answered already, with their stamps; starts the journal where there is none."""
    if not journal.exists() or not journal.stat().st_size:
        journal.write_text(json.dumps(asked) + "\n")
        return {}
    done: dict[str, list[int]] = {}
    whole = 0
    with journal.open("rb") as lines:
        for number, line in enumerate(lines):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                done |= {entry["image"]: entry["stamp"]} if number else {}
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{journal}: line {number + 1} is damaged; pass --overwrite to start anew") from None
            if not number and (changed := [key for key in asked if entry.get(key) != asked[key]]):
                what = ", ".join(changed).replace("_", " ")
                raise InputError(
                    f"{journal}: these answers are of other {what}; pass another --out, or --overwrite to start anew"
                )
            whole += len(line)
    os.truncate(journal, whole)
    return done if whole else _resume(journal, asked)


def _answer(predictor: Predictor, waiting: Sequence[Task], journal: Path, mask_type: str, total: int) -> dict[str, str]:
    """Answers the images that wait and appends them to the journal; what could not be read is returned."""
    predictor.texts.encode(dict.fromkeys(query.text for task in waiting for query in task.queries))
    failed: dict[str, str] = {}
    columns = TextColumn("images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress, journal.open("a") as lines:
        bar = progress.add_task("", total=total, completed=total - len(waiting))
        for start in range(0, len(waiting), IMAGES):
            part = waiting[start : start + IMAGES]
            read: list[tuple[Task, np.ndarray, list[int] | None]] = []
            for task in part:
                try:
                    stamp = _stamp(task.path)
                    read.append((task, _read(task), stamp))
                except InputError as error:
                    failed[str(task.path)] = str(error)
                    _say(progress, f"skipped: {error}")
                    continue
                if (count := frames(task.path)) > 1:
                    _say(progress, f"warning: {task.path}: it has {count} frames; the first one is looked at")
            found = _answer_part(predictor, [(task, image) for task, image, _ in read], mask_type)
            for (task, _, stamp), answers in zip(read, found, strict=True):
                lines.write(json.dumps({"image": str(task.path), "stamp": stamp, "answers": answers}) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
            progress.update(bar, advance=len(part))
    return failed


def _say(progress: Progress, text: str) -> None:
    progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _read(task: Task) -> UInt8[np.ndarray, "H W 3"]:
    image = open_image(task.path)
    if task.size is not None and image.shape[:2] != task.size:
        raise InputError(
            f"{task.path}: the image is {image.shape[0]} x {image.shape[1]} but the data set says {task.size[0]} x "
            f"{task.size[1]}; give the image that was annotated"
        )
    return image


def _answer_part(
    predictor: Predictor, part: Sequence[tuple[Task, np.ndarray]], mask_type: str
) -> list[list[list[dict[str, Any]]]]:
    """The entries of each query of each image."""
    found: list[list[list[dict[str, Any]]]] = [[] for _ in part]
    size = predictor.config.vision.image_size
    boxes = [Letterbox(image.shape[0], image.shape[1], size) for _, image in part]
    most = QUERY_BUCKETS[-1]
    rows = [
        (number, [query.text for query in task.queries[start : start + most]])
        for number, (task, _) in enumerate(part)
        for start in range(0, len(task.queries), most)
    ]
    for start in range(0, len(rows), IMAGES):
        some = rows[start : start + IMAGES]
        width = next(b for b in QUERY_BUCKETS if b >= max(len(texts) for _, texts in some))
        padded = [*some, *[some[0]] * (IMAGES - len(some))]
        frames = {number: boxes[number].image(part[number][1]) for number, _ in some}
        answers = predictor.answer(
            np.stack([frames[number] for number, _ in padded]),
            np.stack([boxes[number].valid() for number, _ in padded]),
            [[*texts, *[texts[0]] * (width - len(texts))] for _, texts in padded],
        )
        for row, (number, texts) in enumerate(some):
            found[number] += _entries(predictor, answers, row, texts, boxes[number], mask_type)
    return found


def _entries(
    predictor: Predictor, answers: Answers, row: int, texts: Sequence[str], box: Letterbox, mask_type: str
) -> Iterator[list[dict[str, Any]]]:
    """For each query the mask that was asked for, then its instances."""
    learned = answers.probability[row, : len(texts)]
    probabilities = predictor.probabilities(learned, texts, [None] * len(texts))
    for k, probability in enumerate(probabilities.tolist()):
        amodal = probability > 0.5 if mask_type == "auto" else mask_type == "amodal"
        mask = box.undo(answers.modal[row, k]) > 0
        if amodal:
            mask |= box.undo(answers.amodal[row, k]) > 0
        said = {"mask_type": "amodal" if amodal else "modal", "amodal_probability": probability}
        slots = [x[row, k] for x in (answers.slot_modal, answers.slot_amodal, answers.slot_presence, answers.slot_iou)]
        yield [
            {"segmentation": masks.encode(mask), "score": float(answers.iou[row, k, int(amodal)]), "fused": True}
            | ({} if predictor.config.head == NO_HEAD else said),
            *({"segmentation": rle, "score": score} for rle, score in ranked_slots(box, slots, amodal)),
        ]


def _write_product(journal: Path, tasks: Sequence[Task], failed: Mapping[str, str], file: Path) -> None:
    """Makes the predictions of the journal's answers to `tasks`, without those that failed, all or nothing."""
    wanted = {str(task.path): task for task in tasks}
    place = {}
    with journal.open("rb") as lines:
        start = len(lines.readline())
        for line in lines:
            place[json.loads(line)["image"]] = start  # the last one is valid, where an image was changed
            start += len(line)
        part, number, comma = file.with_name(file.name + ".part"), 0, ""
        with part.open("w") as product:
            product.write("[")
            for name, task in wanted.items():
                if name not in place or name in failed:
                    number += len(task.queries)
                    continue
                lines.seek(place[name])
                for query, entries in zip(task.queries, json.loads(lines.readline())["answers"], strict=True):
                    number += 1
                    about = {"query_id": number if query.id is None else query.id}
                    about |= {"image": task.path.name, "query": query.text}
                    for entry in entries:
                        product.write(f"{comma}\n{json.dumps(about | entry)}")
                        comma = ","
            product.write("\n]\n")
        part.replace(file)
