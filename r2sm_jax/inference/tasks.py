"""Which queries are predicted about which images: from IMAGE, QUERY and --queries of `predict`."""

import difflib
import glob
import hashlib
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.images import IMAGE_SUFFIXES, find_image, find_images, leads_outside
from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import check_query
from r2sm_jax.inference.query_lines import read_query_lines, read_sentence


class TaskQuery(NamedTuple):
    """A query, with its id in the data set, or else its number."""

    text: str
    id: int


class Task(NamedTuple):
    """One image and all queries about it."""

    path: Path
    name: str
    """The image's name in the predictions: its path below the folder of the images."""
    queries: tuple[TaskQuery, ...]
    size: tuple[int, int] | None = None
    """Height and width that the data set states."""


class Tasks(NamedTuple):
    """All images with their queries."""

    images: list[Task]
    sha256: str
    """Hash of the queries."""
    root: Path
    """The folder of the images."""
    skipped: tuple[str, ...] = ()
    """Names of what is in the folder and is no image that can be read."""


class QueryLine(NamedTuple):
    """One line of a text file of queries."""

    image: str | None
    """Name of the image that it is about; None: about all."""
    text: str


def is_pattern(image: str) -> bool:
    """Whether IMAGE is a pattern such as 'photos/*.jpg'. A file of that very name is no pattern."""
    return glob.has_magic(image) and not Path(image).exists()


def is_many(image: str) -> bool:
    """Whether IMAGE is a folder or a pattern."""
    return Path(image).is_dir() or is_pattern(image)


def find_tasks(image: str, query: str | None, queries: str | None) -> Tasks:
    """Returns the tasks that a command line names.

    Args:
        image: an image, a folder or a pattern.
        query: one query about every image, or
        queries: a file of queries: a data set (.json), or text.

    Raises InputError if there are no images or no queries, the file cannot be read, or it names
    images that do not exist.
    """
    if query is not None and queries is not None:
        raise InputError(
            "--queries: there is a query on the command line as well; leave one of them out"
        )
    if queries is not None and Path(queries).suffix.lower() == ".json":
        return _tasks_of_dataset(Path(queries), image)

    if queries is None:
        text = query or ""
        check_query(text)
        lines = [QueryLine(None, text)]
        sha256 = hashlib.sha256(text.encode()).hexdigest()
    else:
        lines = _read_lines(Path(queries))
        sha256 = hashlib.sha256(Path(queries).read_bytes()).hexdigest()

    root = _root_of(image)
    tasks = []
    number = 0
    for path, texts in _texts_by_image(lines, image, root, queries).items():
        numbered = []
        for text in texts:
            number += 1
            numbered.append(TaskQuery(text, number))
        tasks.append(Task(path, path.relative_to(root).as_posix(), tuple(numbered)))
    return Tasks(tasks, sha256, root.resolve(), _list_skipped(image))


def _texts_by_image(
    lines: Sequence[QueryLine], image: str, root: Path, queries: str | None
) -> dict[Path, list[str]]:
    """The queries about each image: first those about all images, then its own.

    If every line names an image, the other images of the folder are left out.
    """
    for_all = [line.text for line in lines if line.image is None]
    paths = _list_images(image) if for_all or not Path(image).is_dir() else []
    texts = {path: list(for_all) for path in paths}
    for line in lines:
        if line.image is None:
            continue
        path = None if leads_outside(line.image) else find_image([root], line.image)
        if path is None or not (path in texts or Path(image).is_dir()):
            names = [path.relative_to(root).as_posix() for path in texts or _list_images(image)]
            near = difflib.get_close_matches(line.image, names, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"give names as below {root}"
            raise InputError(
                f"{queries}: it asks about {line.image}, which is not among the images of {image}; "
                f"{remedy}"
            )
        texts.setdefault(path, []).append(line.text)
    return {path: of_image for path, of_image in texts.items() if of_image}


def _tasks_of_dataset(path: Path, image: str) -> Tasks:
    """The queries of a data set about its images, which lie in the folder `image`."""
    if not Path(image).is_dir():
        raise InputError(
            f"{image}: with a data set as --queries, give the folder of its images here"
        )
    dataset = read_json(path, image)
    tasks = []
    for index in range(len(dataset)):
        queries = tuple(TaskQuery(query.text, query.id) for query in dataset.queries_at(index))
        if queries:
            name = dataset.images[index]["file_name"]
            size = dataset.size_at(index)
            tasks.append(Task(dataset.image_path(index), name, queries, size))
    if not tasks:
        raise InputError(
            f"{path}: the data set has no queries; write some with python -m r2sm_jax.data queries"
        )
    return Tasks(tasks, dataset.sha256, Path(image).resolve())


def _root_of(image: str) -> Path:
    """The folder below which images have their names."""
    path = Path(image)
    if path.is_dir():
        return path
    if is_pattern(image):
        # The folders that the pattern spells out: `photos` of 'photos/**/*.jpg'.
        return Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
    return path.parent


def _list_images(image: str) -> list[Path]:
    if Path(image).is_dir():
        return find_images(Path(image), IMAGE_SUFFIXES, "images")
    if not is_pattern(image):
        if not Path(image).is_file():
            raise InputError(f"{image}: there is no such image; check the path")
        return [Path(image)]

    paths = [Path(name) for name in sorted(glob.glob(image, recursive=True))]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise InputError(f"{image}: no file matches this pattern; check it, and put it in quotes")
    return paths


def _list_skipped(image: str) -> tuple[str, ...]:
    """What is in a folder and not among its images. Hidden files are not meant to be images."""
    folder = Path(image)
    if not folder.is_dir():
        return ()
    skipped = []
    for path in sorted(folder.iterdir()):
        is_image = path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES
        if not is_image and not path.name.startswith("."):
            skipped.append(f"{path.name}/" if path.is_dir() else path.name)
    return tuple(skipped)


def _read_lines(path: Path) -> list[QueryLine]:
    """Reads a text file with lines QUERY, or IMAGE, a tab, QUERY.

    Raises InputError, which names the line, if one is something else.
    """
    if path.suffix.lower() == ".csv":
        raise InputError(f"{path}: give lines QUERY, or IMAGE, a tab, QUERY; not commas")
    queries = [_parse_line(where, line) for where, line in read_query_lines(path)]
    if not queries:
        raise InputError(
            f"{path}: the query file is empty; write one query a line, or IMAGE, a tab and a query"
        )
    return queries


def _parse_line(where: str, line: str) -> QueryLine:
    *images, text = line.split("\t")
    if len(images) > 1:
        raise InputError(f"{where} has {len(images)} tabs; write QUERY, or IMAGE, a tab, QUERY")
    if images and not (images[0].strip() and text.strip()):
        raise InputError(f"{where} lacks the image before its tab or the query after; mend it")

    text = read_sentence(where, text)
    return QueryLine(images[0].strip() if images else None, text)
