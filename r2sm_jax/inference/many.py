"""Answers queries about many images: one file of answers for each image, and one of all.

    answers.json         what all answers are of: the model and the mask type
    answers/IMAGE.json   the answers about one image; one that is newer than its photo is done
    overlays/            pictures of the answers, on request
    predictions.json     all answers, in the format that `evaluate --predictions` scores
    --coco FILE          all objects of the answers, as COCO instances

Answers of another model or to other queries are refused.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from r2sm_jax.data.dataset import ImageTruth, Instance, read_json, write
from r2sm_jax.data.images import (
    IMAGE_SUFFIXES,
    find_images,
    frames,
    leads_outside,
    open_annotated,
    open_image,
)
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError, atomic_write, load_json, refuse_overwrite, write_json
from r2sm_jax.finders import Finder, from_transformers
from r2sm_jax.inference.decision import warn_of_unread
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import Photo, Predictor
from r2sm_jax.inference.prompts import Request, read_requests
from r2sm_jax.inference.query_lines import read_query_lines, read_sentence
from r2sm_jax.progress import show_progress

PREDICTIONS = "predictions.json"
MAX_LETTERS = 40
"""Of a sentence, in a file name. File systems allow 255 bytes, and a letter may take four."""


class ImageQueries(NamedTuple):
    """One image and all queries about it."""

    path: Path
    name: str
    """The image's name in the predictions: its path below the folder of the images."""
    queries: tuple[tuple[int, str], ...]
    """Each with its id in the data set, or else its number."""
    size: tuple[int, int] | None = None
    """Height and width that the data set states."""
    image_id: int | None = None
    """That of the data set."""


def is_many(image: str) -> bool:
    """Whether IMAGE is a folder or a data set."""
    return Path(image).is_dir() or is_dataset(image)


def is_dataset(path: str) -> bool:
    """Whether a path names a data set and no image or text."""
    return Path(path).suffix.lower() == ".json"


def find_tasks(image: str, texts: Sequence[str], queries: str | None) -> list[ImageQueries]:
    """Returns the tasks that a command line names.

    Args:
        image: an image, a folder of images, or a data set with queries of its own.
        texts: queries about every image, or
        queries: a file of queries: a data set, whose images lie in the folder `image`, or text with
            lines QUERY (about every image) or IMAGE, a tab, QUERY.

    Raises InputError if there are no images or no queries, a file cannot be read, or it names
    images that do not exist.
    """
    if texts and (queries is not None or is_dataset(image)):
        raise InputError(f"{queries or image}: it asks queries of its own; leave out {texts[0]!r}")
    if is_dataset(image):
        tasks = _tasks_of_dataset(Path(image), None)
    elif queries is not None and is_dataset(queries):
        tasks = _tasks_of_dataset(Path(queries), image)
    else:
        lines = (
            [("", None, text) for text in texts] if queries is None else _read_lines(Path(queries))
        )
        tasks = _tasks_of_lines(Path(image), lines)
    if not tasks:
        raise InputError(
            f"{queries or image}: there are no queries in it; write one a line, or a data set's "
            "with python -m r2sm_jax.data queries"
        )
    return tasks


def _tasks_of_dataset(path: Path, images: str | None) -> list[ImageQueries]:
    """Returns the queries of a data set about its images.

    `images`: their folder; None: they lie where a `json:` source has them.
    """
    dataset = read_json(path, images)
    tasks = []
    for index in range(len(dataset)):
        queries = tuple((query.id, query.text) for query in dataset.queries_at(index))
        if queries:
            name = dataset.images[index].file_name
            size = dataset.size_at(index)
            image_id = dataset.image_ids[index]
            tasks.append(ImageQueries(dataset.image_path(index), name, queries, size, image_id))
    return tasks


def _tasks_of_lines(
    image: Path, lines: Iterable[tuple[str, str | None, str]]
) -> list[ImageQueries]:
    """Returns the queries about an image, or about the images of a folder.

    `lines`: where each is, the image that it names, if any, and its query.
    """
    is_folder = image.is_dir()
    root = image if is_folder else image.parent
    paths = find_images(image, IMAGE_SUFFIXES, "images") if is_folder else [image]
    texts: dict[Path, list[str]] = {path: [] for path in paths}
    names = {path.name for path in paths}
    for where, name, text in lines:
        if name is None:
            first, *others = re.split("[,;]", text, maxsplit=1)
            if is_folder and others and first.strip() in names:
                raise InputError(f"{where}: {first} is an image; write IMAGE, a tab, QUERY")
            for path in paths:
                texts[path].append(text)
        elif leads_outside(name) or not (root / name).is_file():
            raise InputError(f"{where}: there is no image {name} in {root}; give its name there")
        else:
            texts.setdefault(root / name, []).append(text)

    tasks = []
    number = 0
    for path, of_image in texts.items():
        numbered = tuple(enumerate(of_image, start=number + 1))
        number += len(numbered)
        # If every line names an image, the other images of the folder are left out.
        if numbered:
            tasks.append(ImageQueries(path, path.relative_to(root).as_posix(), numbered))
    return tasks


def _read_lines(file: Path) -> Iterator[tuple[str, str | None, str]]:
    """Reads a text file with lines QUERY or IMAGE, a tab, QUERY, for `_tasks_of_lines`."""
    if file.suffix.lower() in (".csv", ".jsonl"):
        raise InputError(f"{file}: give lines QUERY, or IMAGE, a tab, QUERY, or a data set (.json)")
    for where, line in read_query_lines(file):
        name, tab, text = line.rpartition("\t")
        name = name.strip() if tab else None
        if name is not None and (not name or "\t" in name):
            raise InputError(f"{where}: write QUERY, or IMAGE, a tab, QUERY")
        yield where, name, read_sentence(where, text)


class Answers:
    """The files of answers in a folder."""

    def __init__(self, folder: Path, of: Mapping[str, str], *, overlays: bool, overwrite: bool):
        """Opens a folder.

        Args:
            folder: may be new.
            of: what the answers are of.
            overlays: whether each answer is drawn as well.
            overwrite: answers of something else may be replaced.

        Raises InputError if they may not.
        """
        self.folder, self.overlays = folder, overlays
        known = folder / "answers.json"
        if not known.exists() or load_json(known, "what answers of predict are of") != of:
            if (folder / "answers").is_dir() and not overwrite:
                raise InputError(
                    f"{folder}: its answers are of another model or mask type; pass another --out, "
                    "or --overwrite"
                )
            write_json(known, of)
        # What is older is of something else that is being replaced.
        self._begun = known.stat().st_mtime_ns

    def path(self, task: ImageQueries) -> Path:
        """Returns where the answers about an image lie."""
        return self.folder / "answers" / f"{task.name}.json"

    def pictures(self, task: ImageQueries) -> list[Path]:
        """Returns where the pictures of the answers about an image lie."""
        paths: list[Path] = []
        for number, text in task.queries if self.overlays else ():
            path = self.folder / "overlays" / f"{task.name}_{slug(text)}.png"
            # Sentences may begin alike.
            if path in paths:
                path = path.with_name(f"{path.stem}-{number}.png")
            paths.append(path)
        return paths

    def has(self, task: ImageQueries) -> bool:
        """Whether there are answers about an image that are newer than it, with their pictures.

        Raises InputError for answers to other queries, which only --overwrite replaces.
        """
        path = self.path(task)
        written = path.stat().st_mtime_ns if path.exists() else 0
        if written < self._begun or written <= task.path.stat().st_mtime_ns:
            return False
        stored = load_json(path, "an answer of predict")
        if stored["queries"] != [text for _, text in task.queries]:
            raise InputError(
                f"{path}: this is an answer to other queries; pass another --out, or --overwrite"
            )
        return all(picture.exists() for picture in self.pictures(task))

    def write(self, task: ImageQueries, predictions: Iterable[Prediction]) -> None:
        """Writes the predictions for all queries about an image, and draws them."""
        pictures = self.pictures(task)
        pixels = open_image(task.path) if pictures else None
        size = None
        entries: list[list[dict[str, Any]]] = []
        objects: list[Instance[RLE]] = []
        for index, prediction in enumerate(predictions):
            if pixels is not None:
                with atomic_write(pictures[index]) as part:
                    prediction.show(pixels).save(part, format="PNG")
            warn_of_unread(prediction.unread)
            entries.append(prediction.to_coco())
            objects += prediction.to_instances()
            size = prediction.mask.shape
        stored = {
            "queries": [text for _, text in task.queries],
            "entries": entries,
            "size": size,
            "objects": [asdict(one) for one in objects],
        }
        write_json(self.path(task), stored, indent=None)

    def write_all(self, path: Path, tasks: Sequence[ImageQueries]) -> None:
        """Writes the entries of all tasks into one file."""
        separator = "\n"
        with atomic_write(path) as part, part.open("w", encoding="utf-8") as file:
            file.write("[")
            for task in tasks:
                of_queries = load_json(self.path(task), "an answer of predict")["entries"]
                for (number, text), entries in zip(task.queries, of_queries, strict=True):
                    about = {"query_id": number, "image": task.name, "query": text}
                    for entry in entries:
                        file.write(separator + json.dumps(about | entry))
                        separator = ",\n"
            file.write("\n]\n")

    def write_coco(
        self,
        path: Path,
        tasks: Sequence[ImageQueries],
        overwrite: bool,
        whole: Sequence[ImageQueries],
        shard: tuple[int, int],
    ) -> None:
        """Writes the objects of all answers as a dataset file, which is a COCO instances file.

        Their categories are the queries. `tasks` are of the I-th of N shards of the `whole`: a
        class has one id in the files of all shards, and nothing else has an id of another file.
        Raises InputError as `dataset.write`.
        """
        truths = []
        ids = count(*shard)
        numbers = {task: number for number, task in enumerate(whole, start=1)}
        for task in tasks:
            answer = load_json(self.path(task), "an answer of predict")
            instances = [Instance(**{**one, "id": next(ids)}) for one in answer["objects"]]
            image_id = numbers[task] if task.image_id is None else task.image_id
            size = (answer["size"][0], answer["size"][1])
            truths.append(ImageTruth(image_id, task.name, size, tuple(instances), ()))
        texts = dict.fromkeys(text for task in whole for _, text in task.queries)
        categories = {text: {"id": n, "name": text} for n, text in enumerate(texts, start=1)}
        write(path, truths, {"description": "answers of r2sm_jax"}, categories, overwrite)


class Result(NamedTuple):
    """Counts of the images of one call, and those that cannot be read."""

    num_answered: int
    num_earlier: int
    """Number of images that an earlier call had answered."""
    failed: dict[str, str]
    """Name of an image -> the reason."""


def predict_images(
    predictor: Predictor,
    tasks: Sequence[ImageQueries],
    out: Path,
    file: str = PREDICTIONS,
    *,
    mask_type: str = "auto",
    overwrite: bool = False,
    overlays: bool = False,
    coco: Path | None = None,
    shard: tuple[int, int] = (1, 1),
    finder: str | None = None,
) -> Result:
    """Answers what has no answer in `out` yet, and writes all answers into `out/file`.

    Args:
        coco: a file for the objects of all answers.
        shard: I and N: of the tasks every N-th is answered, from the I-th on.
        overwrite: answer everything anew.
        overlays: also draw every answer; images without their pictures are answered again.
        finder: finds what the words name, as `from_transformers` takes it.

    Raises InputError as `from_transformers`, if `out` holds the answers of something else or cannot
    be written, or no image can be read.
    """
    of = {
        "weights": predictor.weights_sha256,
        "language_model": predictor.text_encoder.sha256,
        "matmul_precision": predictor.matmul_precision,
        "mask_type": mask_type,
    }
    if finder is not None:
        of["finder"] = finder
    whole = tasks
    first, step = shard
    tasks = whole[first - 1 :: step]
    # Without answers, a file of that name is somebody else's.
    refuse_overwrite(out / file, overwrite or (out / "answers").is_dir())
    answers = Answers(out, of, overlays=overlays, overwrite=overwrite)
    waiting = [task for task in tasks if overwrite or not answers.has(task)]
    failed: dict[str, str] = {}

    with show_progress("answering about images", len(waiting)) as advance:

        def open_task(task: ImageQueries) -> UInt8[np.ndarray, "H W 3"] | None:
            try:
                return read_image(task.path, task.size)
            except InputError as error:
                # One damaged file in a folder of thousands must not end the call.
                failed[task.name] = str(error)
                advance(1)
                return None

        def read(task: ImageQueries) -> tuple[Photo, list[Request]] | None:
            image = open_task(task)
            if image is None:
                return None
            photo = predictor.frame(image)
            return photo, read_requests([text for _, text in task.queries], photo.size, mask_type)

        def find(finder: Finder) -> Iterator[None]:
            for task in waiting:
                image = open_task(task)
                if image is not None:
                    texts = [text for _, text in task.queries]
                    found = predictor.predict(
                        texts, mask_type=mask_type, image=image, finder=finder
                    )
                    yield answers.write(task, found)

        if finder is not None:
            written = find(from_transformers(finder))
        else:
            # All slots: average precision of the file ranks them as that of an evaluation does.
            written = predictor.stream(waiting, read, answers.write, with_absent_slots=True)
        for _ in written:
            advance(1)
    if failed and len(failed) == len(tasks):
        raise InputError(f"no image could be read; {next(iter(failed.values()))}")
    answered = [task for task in tasks if task.name not in failed]
    answers.write_all(out / file, answered)
    if coco is not None:
        answers.write_coco(coco, answered, overwrite, whole, shard)
    return Result(len(waiting) - len(failed), len(tasks) - len(waiting), failed)


def read_image(path: Path, size: tuple[int, int] | None = None) -> UInt8[np.ndarray, "H W 3"]:
    """Opens an image `uint8 [H W 3]`, and warns if it has several frames.

    Args:
        size: height and width that it must have.
    """
    image = open_image(path) if size is None else open_annotated(path, size, "the data set")
    if (count := frames(path)) > 1:
        print(
            f"warning: {path}: it has {count} frames; the first one is looked at", file=sys.stderr
        )
    return image


def other_files(image: str) -> list[str]:
    """Returns the names of what is in a folder beside its images, without hidden files."""
    if not Path(image).is_dir():
        return []
    names = []
    for path in sorted(Path(image).iterdir()):
        is_image = path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES
        if not is_image and not path.name.startswith("."):
            names.append(f"{path.name}/" if path.is_dir() else path.name)
    return names


def slug(sentence: str) -> str:
    """Returns the beginning of a sentence as part of a file name: "the-red-mug"."""
    words = "".join(c if c.isalnum() else " " for c in sentence.lower()).split()
    return "-".join(words)[:MAX_LETTERS].rstrip("-") or "query"
