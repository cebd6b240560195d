"""What is asked about many images, and the answers as they come: a line for each image, in one file for each process.

The first line of a file says what its answers depend on. Several processes divide the images by a hash of their names.
"""

import glob
import hashlib
import json
import os
import re
import zlib
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jax

from r2sm_jax.data.cache import stamp
from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.images import find_images
from r2sm_jax.errors import InputError
from r2sm_jax.inference.predictor import check_query

JOURNAL = "answers.jsonl"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class Question(NamedTuple):
    """A query, with its id in the data set, or else its number."""

    text: str
    id: int


class Task(NamedTuple):
    """One image and all queries about it. `name` is what the answers call it."""

    path: Path
    name: str
    queries: tuple[Question, ...]
    size: tuple[int, int] | None = None
    """Height and width that the data set states."""


class Tasks(NamedTuple):
    """All images with their queries, a hash of the queries, and the folder of the images. The last two must be the same
    when a call is resumed."""

    images: list[Task]
    sha256: str
    root: Path


def is_pattern(image: str) -> bool:
    """Whether IMAGE means files that match, such as 'photos/*.jpg'. A file of that very name is no pattern."""
    return glob.has_magic(image) and not Path(image).exists()


def find_tasks(image: str, query: str | None, queries: str | None) -> Tasks:
    """The tasks that a command line names: images from a file, a folder or a pattern, and one query or a file of them.
    Raises InputError if there are no images or no queries, the query file cannot be read, or it names images that do
    not exist."""
    if query is not None and queries is not None:
        raise InputError(
            "--queries: there is a query on the command line as well; leave one of them out"
        )
    if queries is None:
        check_query(query or "")
        asked, content = [("", query or "")], (query or "").encode()
    elif Path(queries).suffix.lower() == ".json":
        return _from_dataset(Path(queries), image)
    else:
        asked, content = _read_lines(Path(queries))
    for_all = [text for name, text in asked if not name]
    found = _images(image) if for_all or not Path(image).is_dir() else []
    root = Path(image) if Path(image).is_dir() else Path(image).parent
    if is_pattern(image):
        root = Path(*takewhile(lambda part: not glob.has_magic(part), Path(image).parts))
    by_image = {file: list(for_all) for file in found}
    for name, text in asked:
        if name:
            file = root / name
            if not file.is_file() or not (file in by_image or Path(image).is_dir()):
                problem = f"it asks about {name}, which is not among the images of {image}"
                raise InputError(f"{queries}: {problem}; give names as below {root}")
            by_image.setdefault(file, []).append(text)
    number = count(1)
    tasks = [
        Task(
            file,
            file.relative_to(root).as_posix(),
            tuple(Question(text, next(number)) for text in texts),
        )
        for file, texts in by_image.items()
        if texts
    ]
    return Tasks(tasks, hashlib.sha256(content).hexdigest(), root.resolve())


def _images(image: str) -> list[Path]:
    if is_pattern(image):
        found = sorted(
            Path(name) for name in glob.glob(image, recursive=True) if Path(name).is_file()
        )
        if not found:
            raise InputError(
                f"{image}: no file matches this pattern; check it, and put it in quotes"
            )
        return found
    if Path(image).is_dir():
        return find_images(Path(image), SUFFIXES, "images")
    if not Path(image).is_file():
        raise InputError(f"{image}: there is no such image; check the path")
    return [Path(image)]


def _from_dataset(path: Path, image: str) -> Tasks:
    """The queries of a data set about its images, which lie in the folder `image`."""
    if not Path(image).is_dir():
        raise InputError(
            f"{image}: with a data set as --queries, give the folder of its images here"
        )
    dataset = read_json(path, image)
    tasks = []
    for index in range(len(dataset)):
        if queries := tuple(Question(query.text, query.id) for query in dataset.queries_at(index)):
            name = dataset.images[index]["file_name"]
            tasks.append(Task(dataset.image_path(index), name, queries, dataset.size_at(index)))
    if not tasks:
        raise InputError(
            f"{path}: the data set has no queries; write some with python -m r2sm_jax.data queries"
        )
    return Tasks(tasks, dataset.sha256, Path(image).resolve())


def _read_lines(path: Path) -> tuple[list[tuple[str, str]], bytes]:
    """The image, "" for all of them, and the query of each line of a text file; and the content of the file."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot read the query file ({error}); give UTF-8 text, or a .json"
        ) from None
    asked: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            *image, query = (part.strip() for part in line.split("\t", maxsplit=1))
            if "" in (*image, query):
                raise InputError(
                    f"{path}: line {number} lacks the image before its tab or the query after; mend it"
                )
            asked.append(("".join(image), query))
    if not asked:
        raise InputError(
            f"{path}: the query file is empty; write one query a line, or IMAGE, a tab and a query"
        )
    return asked, content


class Place(NamedTuple):
    """Where the answers about an image stand."""

    stamp: Any
    """Size and time of change of the image that was answered."""
    journal: Path
    offset: int

    def read(self) -> list[list[dict[str, Any]]]:
        """The entries of each query about the image."""
        with self.journal.open("rb") as lines:
            lines.seek(self.offset)
            return json.loads(lines.readline())["answers"]


def journals(out: Path) -> list[Path]:
    """The files of all processes, in their order."""
    count = jax.process_count()
    return [
        out / (JOURNAL if count == 1 else f"answers-{process}.jsonl") for process in range(count)
    ]


def earlier_journals(out: Path) -> list[Path]:
    """The files of earlier calls with any number of processes."""
    return sorted(
        path
        for path in out.glob("answers*.jsonl")
        if re.fullmatch(r"answers(-\d+)?\.jsonl", path.name)
    )


def is_mine(name: str) -> bool:
    """Whether this process answers what is asked about the image that the answers call so."""
    return zlib.crc32(os.fsencode(name)) % jax.process_count() == jax.process_index()


def read_journals(out: Path, header: dict[str, str]) -> dict[str, Place]:
    """Where the answers about every image stand, also those of an earlier call with another number of processes; those
    about the image as it is now where there are several. Starts the files that are missing. No process may write
    meanwhile. Raises InputError as `read_journal`."""
    found: dict[str, Place] = {}
    for journal in sorted({*earlier_journals(out), *journals(out)}):
        for image, place in read_journal(journal, header).items():
            if image not in found or found[image].stamp != stamp(Path(image)):
                found[image] = place
    return found


def read_journal(journal: Path, header: dict[str, str]) -> dict[str, Place]:
    """The last entry of every image in one file. Starts the file where there is none. Drops a line that was cut short,
    but only from a file of ours. Raises InputError if the file is damaged, or its answers are of something else."""
    found: dict[str, Place] = {}
    end, start = 0, json.dumps(header).encode() + b"\n"
    with journal.open("ab+") as lines:
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") and (end or start.startswith(line)):
                break
            try:
                entry = json.loads(line)
                changed = (
                    []
                    if end
                    else [key for key in header | entry if entry.get(key) != header.get(key)]
                )
                if end:
                    found[entry["image"]] = Place(entry["stamp"], journal, end)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(
                    f"{journal}: line {number} is damaged; pass --overwrite to start anew"
                ) from None
            if changed:
                what = f"these answers are of other {', '.join(changed).replace('_', ' ')}"
                raise InputError(
                    f"{journal}: {what}; pass another --out, or --overwrite to start anew"
                )
            end += len(line)
        lines.truncate(end)
        if not end:
            lines.write(start)
    return found
