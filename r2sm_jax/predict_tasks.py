"""The questions of `predict`: images from a file, a folder or a pattern, queries from the command line or a file."""

import glob
import hashlib
from pathlib import Path
from typing import NamedTuple

from r2sm_jax.data.images import find_images
from r2sm_jax.data.samples import read_json
from r2sm_jax.errors import InputError
from r2sm_jax.predictor import check_query

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MAX_QUERY_FILE_MB = 100


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
    """The tasks that a command line names.

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
    content, lines = _read_lines(path)
    for_all = [Question(query) for name, query in lines if not name]
    folder = Path(image) if Path(image).is_dir() else None
    found = _images(image) if for_all or folder is None else []
    by_name = {file.name: file for file in found}
    queries = {file: list(for_all) for file in found}
    for name, query in lines:
        if name:
            file = by_name.get(name) or (folder / name if folder is not None else None)
            if file is None or not file.is_file():
                raise InputError(f"{path}: it asks about {name}, which is not among the images of {image}; check it")
            queries.setdefault(file, []).append(Question(query))
    tasks = [Task(file, tuple(of_image)) for file, of_image in queries.items() if of_image]
    return Tasks(tasks, hashlib.sha256(content).hexdigest())


def _read_lines(path: Path) -> tuple[bytes, list[tuple[str, str]]]:
    """The content of a query file, and its lines as image (empty: every image) and query."""
    try:
        if path.stat().st_size > MAX_QUERY_FILE_MB * 1_000_000:
            raise InputError(f"{path}: the query file is larger than {MAX_QUERY_FILE_MB} MB; split it")
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot read the query file ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: the query file is not UTF-8 text; save it as plain text, or give a .json") from None
    found: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, tab, query = line.partition("\t")
        if tab and not (name.strip() and query.strip()):
            raise InputError(f"{path}: line {number} has a tab but not an image before and a query after it; mend it")
        found.append((name.strip(), query.strip()) if tab else ("", line.strip()))
    if not found:
        raise InputError(f"{path}: the query file is empty; write one query a line, or IMAGE, a tab and a query")
    return content, found
