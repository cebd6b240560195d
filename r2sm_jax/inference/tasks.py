"""Which queries are predicted about which images: from IMAGE, QUERY and --queries of `predict`."""

import glob
import hashlib
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.images import find_images
from r2sm_jax.errors import InputError
from r2sm_jax.inference.predictor import check_query

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


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

    # Queries about all images come before those about a single one.
    for_all = [line.text for line in lines if line.image is None]
    texts: dict[Path, list[str]] = {}
    if for_all or not Path(image).is_dir():
        texts = {path: list(for_all) for path in _list_images(image)}
    for line in lines:
        if line.image is None:
            continue
        path = root / line.image
        if not path.is_file() or not (path in texts or Path(image).is_dir()):
            raise InputError(
                f"{queries}: it asks about {line.image}, which is not among the images of {image}; "
                f"give names as below {root}"
            )
        texts.setdefault(path, []).append(line.text)

    tasks = []
    number = 0
    for path, texts_of_image in texts.items():
        numbered = []
        for text in texts_of_image:
            number += 1
            numbered.append(TaskQuery(text, number))
        if numbered:
            tasks.append(Task(path, path.relative_to(root).as_posix(), tuple(numbered)))
    return Tasks(tasks, sha256, root.resolve())


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


def _read_lines(path: Path) -> list[QueryLine]:
    """Reads a text file with lines QUERY, or IMAGE, a tab, QUERY."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot read the query file ({error}); give UTF-8 text, or a .json"
        ) from None

    queries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        image, tab, text = line.partition("\t")
        if not tab:
            image, text = "", line
        if not text.strip() or (tab and not image.strip()):
            raise InputError(
                f"{path}: line {number} lacks the image before its tab or the query after; mend it"
            )
        queries.append(QueryLine(image.strip() or None, text.strip()))
    if not queries:
        raise InputError(
            f"{path}: the query file is empty; write one query a line, or IMAGE, a tab and a query"
        )
    return queries
