"""`python -m r2sm_jax.predict RUN|EXPORT IMAGE "QUERY"`: the mask type that a sentence asks for, and the mask.

One query about one image gives `FILES`. With several images or queries, answers go into `answers.jsonl` after every
eight images (journal.py), so that a killed command can be resumed. At the end `predictions.json` is made from it.
"""

import json
import os
import sys
import warnings
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from r2sm_jax.cli import parse_flags
from r2sm_jax.config import ProcessConfig
from r2sm_jax.data.cache import stamp
from r2sm_jax.data.images import frames, open_annotated, open_image
from r2sm_jax.errors import InputError, cli_main, refuse_overwrite, writing
from r2sm_jax.inference.journal import (
    Place,
    Task,
    Tasks,
    earlier_journals,
    find_tasks,
    is_mine,
    is_pattern,
    journals,
    read_journals,
)
from r2sm_jax.inference.prediction import FILES
from r2sm_jax.inference.predictor import Predictor, Request, TruncatedQuery, check_query
from r2sm_jax.inference.run import enable_compilation_cache, open_run
from r2sm_jax.training.sharding import gather, is_first, of_first, running

PRODUCT = "predictions.json"
PART = 8  # images that are answered, and written, together; so many are lost at most when the process is killed


@dataclass(frozen=True)
class PredictConfig:
    """Segments what a sentence means in one image, or in many."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest, export, photos-small, or hf:owner/name of an export on the Hugging Face hub."""
    image: Annotated[str, tyro.conf.Positional]
    """Image file (JPEG, PNG, WebP, BMP, GIF, TIFF), folder of images, or pattern in quotes, such as 'photos/*.jpg'."""
    query: Annotated[str | None, tyro.conf.Positional] = None
    """What to segment, such as "the complete shape of the red mug"; none with --queries."""
    queries: str | None = None
    """File of queries: a data set (.json), or text with lines QUERY (every image) or IMAGE, a tab, QUERY (that one)."""
    mask_type: Literal["auto", "modal", "amodal"] = "auto"
    """auto: the sentence decides."""
    abstain: float = 0.0
    """If the probability is nearer to 0.5 than this (0 to 0.5), an answer is undecided: both masks count as answers."""
    out: str | None = None
    """Folder for what is written; default: predictions/IMAGE (or the folder's name), or none with --json."""
    json: bool = False
    """Print one JSON object, and nothing else, on stdout."""
    overwrite: bool = False
    """Replace the files of an earlier prediction; several images: start anew instead of resuming."""
    matmul_precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: round what dense layers and convolutions multiply; faster on CPUs with AMX or AVX512-BF16."""
    checkpoint: str = "best"
    """best (highest gIoU on the split --train.select-on), latest, or the number of a step."""
    distributed: ProcessConfig = field(default_factory=ProcessConfig)


def main() -> None:
    """Command line."""
    if len(list(takewhile(lambda word: not word.startswith("--"), sys.argv[1:]))) > 3:
        raise InputError(
            "too many arguments; put quotes around the sentence, or around a pattern like 'photos/*.jpg'"
        )
    args = parse_flags(PredictConfig, sys.argv[1:], prog="python -m r2sm_jax.predict")
    enable_compilation_cache()
    if not args.image:
        raise InputError(
            "IMAGE is empty; give an image file, a folder of images, or a pattern in quotes"
        )
    if args.query is None and args.queries is None:
        raise InputError(
            "there is no query; say what to segment, such as 'the red mug', or give --queries FILE"
        )
    if args.queries is not None or Path(args.image).is_dir() or is_pattern(args.image):
        with running(args.distributed):
            _predict_many(args)
    elif args.distributed != ProcessConfig():
        raise InputError(
            "--distributed: several processes divide a folder of images; leave it out for one image"
        )
    else:
        _predict_one(args, args.query or "")


# One query about one image.


def _predict_one(args: PredictConfig, query: str) -> None:
    check_query(query)  # cheap checks come first, loading the model last
    if not 0 <= args.abstain <= 0.5:
        raise InputError(
            f"--abstain {args.abstain}: a margin of probability lies between 0 and 0.5"
        )
    out = (
        Path(args.out)
        if args.out
        else None
        if args.json
        else Path("predictions") / Path(args.image).stem
    )
    if out is not None:
        for name in FILES:
            refuse_overwrite(out / name, args.overwrite)
    image = _read(Path(args.image))
    predictor = open_run(
        Path(args.run), checkpoint=args.checkpoint, matmul_precision=args.matmul_precision
    ).predictor
    predictor.set_image(image)
    with warnings.catch_warnings(record=True, action="always", category=TruncatedQuery) as cut:
        (prediction,) = predictor.predict([query], args.mask_type, abstain=args.abstain)
    for warning in cut:
        print(f"warning: {warning.message}", file=sys.stderr)
    if out:
        prediction.write(out, image)
    if args.json:
        print(json.dumps(prediction.to_json()))
    else:
        print(f"{prediction.summary()}\nwrote {out}")


def _read(path: Path, size: tuple[int, int] | None = None) -> UInt8[np.ndarray, "H W 3"]:
    """The image, with a warning where it has several frames. `size`: height and width that it must have."""
    image = open_image(path) if size is None else open_annotated(path, size, "the data set")
    if (found := frames(path)) > 1:
        print(
            f"warning: {path}: it has {found} frames; the first one is looked at", file=sys.stderr
        )
    return image


# Several queries, or several images.


class Outcome(NamedTuple):
    """How many images this call answered, and the earlier ones that it resumed; and why others could not be read."""

    answered: int
    earlier: int
    failed: dict[str, str]


def _predict_many(args: PredictConfig) -> None:
    if args.json or args.abstain:
        raise InputError("--json and --abstain are for one query about one image; leave them out")
    tasks = find_tasks(args.image, args.query, args.queries)
    name = (
        tasks.root.name
        if Path(args.image).is_dir() or is_pattern(args.image)
        else Path(args.image).stem
    )
    out = Path(args.out) if args.out else Path("predictions") / (name or "images")
    refuse_overwrite(out / PRODUCT, overwrite=True)  # finds that the folder cannot be one
    predictor = open_run(
        Path(args.run), checkpoint=args.checkpoint, matmul_precision=args.matmul_precision
    ).predictor
    outcome = predict_many(
        predictor, tasks, out, mask_type=args.mask_type, overwrite=args.overwrite
    )
    if cut := predictor.text_encoder.truncated:
        limit = f"longer than {predictor.text_encoder.max_tokens} tokens"
        print(
            f"warning: {len(cut)} queries are {limit}, and their ends were not read",
            file=sys.stderr,
        )
    for sentence in outcome.failed.values():
        print(f"not answered: {sentence}", file=sys.stderr)
    print(
        f"{outcome.answered} images answered, {outcome.earlier} answered earlier, {len(outcome.failed)} not readable\n"
        f"wrote {out / PRODUCT}"
    )


def predict_many(
    predictor: Predictor,
    tasks: Tasks,
    out: Path,
    *,
    mask_type: str = "auto",
    overwrite: bool = False,
) -> Outcome:
    """Answers what has no answer in `out` yet and writes all answers to `out/predictions.json`. Raises InputError if
    `out` holds something else or cannot be written, or no image at all can be read."""
    predictor.check((), mask_type)
    header = {
        "weights": predictor.weights_sha256,
        "language_model": predictor.text_encoder.sha256,
        "queries": tasks.sha256,
        "mask_type": mask_type,
        "images": str(tasks.root),
    }
    header |= (
        {}
        if predictor.matmul_precision == "float32"
        else {"matmul_precision": predictor.matmul_precision}
    )
    product = out / PRODUCT

    def start() -> dict[str, Place]:
        out.mkdir(parents=True, exist_ok=True)
        earlier = earlier_journals(out)
        if overwrite:
            for journal in earlier:
                journal.unlink()
        if overwrite or not earlier:
            refuse_overwrite(product, overwrite)
        return read_journals(out, header)

    try:
        known = of_first(start)
        waiting = [
            t
            for t in tasks.images
            if str(t.path) not in known or known[str(t.path)].stamp != stamp(t.path)
        ]
        mine = [task for task in waiting if is_mine(task.name)]
        total = len(tasks.images) - len(waiting) + len(mine)
        failed = dict(
            ChainMap(
                *gather(
                    _answer(predictor, mine, journals(out)[jax.process_index()], mask_type, total)
                )
            )
        )
        if len(failed) == len(tasks.images):
            raise InputError(f"no image could be read; {next(iter(failed.values()))}")
        of_first(lambda: _write_product(read_journals(out, header), tasks.images, failed, product))
    except OSError as error:
        raise InputError(
            f"{out}: cannot write there ({error.strerror}); pass another --out"
        ) from None
    return Outcome(len(waiting) - len(failed), len(tasks.images) - len(waiting), failed)


def _answer(
    predictor: Predictor, waiting: Sequence[Task], journal: Path, mask_type: str, total: int
) -> dict[str, str]:
    """Answers the images that wait and appends them to the journal; returns a sentence for each that failed."""
    predictor.text_encoder.encode(
        dict.fromkeys(query.text for task in waiting for query in task.queries)
    )
    failed: dict[str, str] = {}
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    with (
        Progress(*columns, console=Console(stderr=True), disable=not is_first()) as progress,
        journal.open("a", encoding="utf-8") as lines,
    ):
        bar = progress.add_task("images", total=total, completed=total - len(waiting))
        for start in range(0, len(waiting), PART):
            part = waiting[start : start + PART]
            stamps = {task: stamp(task.path) for task in part}
            images: dict[Task, np.ndarray] = {}
            for task in part:
                try:
                    images[task] = _read(task.path, task.size)
                except InputError as error:
                    failed[str(task.path)] = str(error)
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
    requests = [
        Request(image, [query.text for query in task.queries]) for task, image in images.items()
    ]
    predictions = predictor.predict_batches(requests, mask_type, with_candidates=True)
    found: dict[Task, list[list[dict[str, Any]]]] = {}
    for task, of_image in zip(images, predictions, strict=True):
        found[task] = [prediction.to_coco() for prediction in of_image]
    return found


def _write_product(
    known: Mapping[str, Place], tasks: Sequence[Task], failed: Mapping[str, str], file: Path
) -> None:
    """Writes the predictions for all tasks but those that failed, one image in memory at a time."""
    separator = ""
    with writing(file) as part, part.open("w", encoding="utf-8") as product:
        product.write("[")
        for task in tasks:
            if str(task.path) in failed:
                continue
            for query, entries in zip(task.queries, known[str(task.path)].read(), strict=True):
                about = {"query_id": query.id, "image": task.name, "query": query.text}
                for entry in entries:
                    product.write(f"{separator}\n{json.dumps(about | entry)}")
                    separator = ","
        product.write("\n]\n")


if __name__ == "__main__":
    cli_main(main)
