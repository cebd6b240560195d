"""Predicts many images into a folder, and goes on where an earlier call was stopped.

answers.jsonl      the answers so far, a line for each image (journal.py)
predictions.json   all answers, in the format that `evaluate --predictions` scores
overlays/          pictures of the answers, on request

Several processes divide the images. In each, a few threads read the next images and make the
answers of the last ones while the model computes.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from r2sm_jax.data.images import frames, open_annotated, open_image
from r2sm_jax.errors import InputError, atomic_write, refuse_overwrite
from r2sm_jax.inference.journal import (
    answers_something_else,
    find_journals,
    header_line,
    journal_path,
    read_journals,
)
from r2sm_jax.inference.output_names import numbered, slug
from r2sm_jax.inference.predictor import BATCH_ROWS, FramedImage, Predictor
from r2sm_jax.inference.reading import NUM_THREADS, read_ahead
from r2sm_jax.inference.tasks import Task, Tasks
from r2sm_jax.models.r2sm import R2SMOutput
from r2sm_jax.progress import show_progress
from r2sm_jax.training.sharding import allgather, run_on_main

PREDICTIONS = "predictions.json"
OVERLAYS = "overlays"


class BatchResult(NamedTuple):
    """Counts of the images of one call, and those that failed."""

    num_predicted: int
    num_earlier: int
    """Number of images that an earlier call had predicted."""
    failed: dict[str, str]
    """Name of an image that cannot be read -> the reason."""
    folder: Path
    """Where the answers lie."""


def predict_images(
    predictor: Predictor,
    tasks: Tasks,
    out: Path,
    *,
    mask_type: str = "auto",
    overwrite: bool = False,
    overlays: bool = False,
    may_number: bool = False,
) -> BatchResult:
    """Predicts the images that have no answers in `out` yet and writes `out/predictions.json`.

    Args:
        overwrite: start anew.
        overlays: also draw every answer; images without their pictures are predicted again.
        may_number: where `out` holds the answers of something else, use `out-2`, `out-3`, ...

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
    if predictor.names:
        names = json.dumps(predictor.names.to_json(), sort_keys=True)
        header["names"] = hashlib.sha256(names.encode()).hexdigest()
    try:
        if may_number and not overwrite:
            folders = numbered(out)
            out = run_on_main(lambda: next(path for path in folders if _is_free(path, header)))
        earlier = run_on_main(lambda: _start(out, header, overwrite))
        if overlays:
            earlier -= run_on_main(lambda: _without_pictures(out, tasks))
        waiting = [task for task in tasks.images if task.name not in earlier]
        # Interleaved, so that a folder sorted by size gives all processes as much to do.
        mine = waiting[jax.process_index() :: jax.process_count()]

        failed: dict[str, str] = {}
        predicted = _predict_tasks(predictor, mine, out, header, mask_type, overlays)
        for of_process in allgather(predicted):
            failed |= of_process
        if len(failed) == len(tasks.images):
            reason = next(iter(failed.values()))
            raise InputError(f"no image could be read; {reason}")

        answered = [task for task in tasks.images if task.name not in failed]
        run_on_main(lambda: _write_predictions(out, answered, header))
    except OSError as error:
        raise InputError(
            f"{out}: cannot write there ({error.strerror}); pass another --out"
        ) from None
    num_earlier = len(tasks.images) - len(waiting)
    return BatchResult(len(waiting) - len(failed), num_earlier, failed, out)


def _is_free(out: Path, header: Mapping[str, str]) -> bool:
    """Whether a folder holds no answers yet, or those that this call continues."""
    if not find_journals(out):
        return not (out / PREDICTIONS).exists()
    return not answers_something_else(out, header)


def overlay_paths(task: Task, out: Path) -> list[Path]:
    """Where the pictures of the answers about one image lie: overlays/IMAGE_SENTENCE.png."""
    paths: list[Path] = []
    for query in task.queries:
        path = out / OVERLAYS / f"{task.name}_{slug(query.text)}.png"
        # Sentences may begin alike.
        if path in paths:
            path = path.with_name(f"{path.stem}-{query.id}.png")
        paths.append(path)
    return paths


def _without_pictures(out: Path, tasks: Tasks) -> set[str]:
    """Names of the images of which a picture is missing."""
    names = set()
    for task in tasks.images:
        if not all(path.exists() for path in overlay_paths(task, out)):
            names.add(task.name)
    return names


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


def _start(out: Path, header: Mapping[str, str], overwrite: bool) -> set[str]:
    """Makes the folder and returns the names of the images that have answers in it."""
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for path in find_journals(out):
            path.unlink()
    # With a journal, the file of predictions is that of an earlier call, which this one continues.
    if not find_journals(out):
        refuse_overwrite(out / PREDICTIONS, overwrite)
    return set(read_journals(out, header))


def _predict_tasks(
    predictor: Predictor,
    tasks: Sequence[Task],
    out: Path,
    header: Mapping[str, str],
    mask_type: str,
    overlays: bool,
) -> dict[str, str]:
    """Appends the answers about images to this process's journal, after drawing them if asked.

    Returns the images that cannot be read, with the reasons.
    """
    # All sentences at once: the language model is fastest in large batches.
    predictor.text_encoder.encode(query.text for task in tasks for query in task.queries)

    parts = [tasks[start : start + BATCH_ROWS] for start in range(0, len(tasks), BATCH_ROWS)]
    failed: dict[str, str] = {}
    with (
        show_progress("answering about images", len(tasks)) as advance,
        journal_path(out).open("ab") as journal,
        ThreadPoolExecutor(NUM_THREADS) as pool,
    ):
        if journal.tell() == 0:
            journal.write(header_line(header))

        # While the model computes one part, threads read the next one and answer the last one.
        answering: list[Future[bytes]] = []
        all_reading = read_ahead(pool, partial(_read, predictor), parts)
        try:
            for part, reading in zip(parts, all_reading, strict=True):
                readable = []
                images = []
                for task, future in zip(part, reading, strict=True):
                    # One damaged file in a folder of thousands must not end the call.
                    try:
                        images.append(future.result())
                    except InputError as error:
                        failed[task.name] = str(error)
                        continue
                    readable.append(task)

                queries = [[query.text for query in task.queries] for task in readable]
                outputs = predictor.predict_logits(images, queries)

                # They leave the list first, so that no line is written twice where writing fails.
                finished = answering
                answering = []
                _store(journal, finished)
                for task, image, of_image in zip(readable, images, outputs, strict=True):
                    arguments = (predictor, task, image, of_image, mask_type)
                    answering.append(pool.submit(_answer, *arguments, out if overlays else None))
                advance(len(part))
        finally:
            # What is computed is kept, also where the call ends early.
            _store(journal, answering)
    return failed


def _read(predictor: Predictor, task: Task) -> FramedImage:
    """Opens the image of a task. Only what the model sees of it stays in memory."""
    return predictor.frame(read_image(task.path, task.size))


def _answer(
    predictor: Predictor,
    task: Task,
    image: FramedImage,
    outputs: Sequence[R2SMOutput],
    mask_type: str,
    out: Path | None,
) -> bytes:
    """The journal's line of an image.

    Args:
        image: what the model saw.
        outputs: the model's, one for each query.
        out: the folder whose overlays are drawn as well; None: none are.
    """
    answers = []
    pictures = [] if out is None else overlay_paths(task, out)
    has_names = any(predictor.names.find(query.text) for query in task.queries)
    pixels = open_image(task.path) if pictures or has_names else None
    encoded = predictor.encode(pixels) if has_names and pixels is not None else None
    # One query after the other, since the masks of a large image are large.
    for number, (query, output) in enumerate(zip(task.queries, outputs, strict=True)):
        (prediction,) = predictor.to_predictions(
            [query.text], [output], image.letterbox, [mask_type]
        )
        if encoded is not None:
            (prediction,) = predictor.with_taught_names([prediction], encoded)
        if pictures and pixels is not None:
            with atomic_write(pictures[number]) as part:
                Image.fromarray(prediction.captioned_overlay(pixels)).save(part, format="PNG")
        answers.append(prediction.to_coco())
    return json.dumps({"image": task.name, "answers": answers}).encode() + b"\n"


def _store(journal: IO[bytes], answers: Sequence[Future[bytes]]) -> None:
    """Writes answers into the journal once they are made, so that they are not lost."""
    for answer in answers:
        journal.write(answer.result())
    journal.flush()
    os.fsync(journal.fileno())


def _write_predictions(out: Path, tasks: Sequence[Task], header: Mapping[str, str]) -> None:
    """Writes the answers of the journals into one file, in the order of the tasks."""
    lines = read_journals(out, header)
    separator = ""
    with atomic_write(out / PREDICTIONS) as part, part.open("w", encoding="utf-8") as file:
        # Entry by entry, so that the parsed answers of one image only are in memory.
        file.write("[")
        for task in tasks:
            answers = json.loads(lines[task.name])["answers"]
            for query, entries in zip(task.queries, answers, strict=True):
                about = {"query_id": query.id, "image": task.name, "query": query.text}
                for entry in entries:
                    file.write(f"{separator}\n{json.dumps(about | entry)}")
                    separator = ","
        file.write("\n]\n")
