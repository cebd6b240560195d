"""`data check`: every problem of a dataset file at once, and what is odd about it."""

import hashlib
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tyro.conf import Positional

from r2sm_jax.config import Crowds
from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.contradictions import (
    compare_records,
    find_pictures_in_both,
    refuse_systematic,
)
from r2sm_jax.data.dataset import Dataset, read_json
from r2sm_jax.data.images import image_folders, locate_image, open_annotated
from r2sm_jax.data.readers.coco import read_coco
from r2sm_jax.data.readers.listing import COCOOptions, read_keys
from r2sm_jax.data.split_summary import review, summarize
from r2sm_jax.data.validation import parse, problems
from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.progress import show_progress

TRAINED = {"train", "dev"}
"""Splits that share no picture with any other."""


def check(
    file: Positional[Path],
    /,
    images: Path | None = None,
    against: Path | None = None,
    against_images: Path | None = None,
    crowds: Crowds = "ignore",
) -> None:
    """Reports all problems of a dataset file, a COCO file or COCO results; exit code 2 if any.

    Args:
        file: The dataset file. It may have no queries yet.
        images: Folder of its images, if they are not beside it.
        against: Another file, such as the training split: images in both are reported too.
        against_images: Folder of that file's images.
        crowds: What `iscrowd` 1 marks in a COCO file: a region to ignore, or an object, as in files
            of CVAT.
    """
    keys = read_keys(file)
    if not keys or ("queries" not in keys and keys & {"annotations", "regions"}):
        line = check_masks(file, images, crowds, are_results=not keys)
    elif crowds != "ignore":
        raise InputError(f"--crowds is for COCO files without queries; {file} is none")
    else:
        line = check_dataset(file, images)
    if against is not None:
        refuse(file, find_leaks((file, images), (against, against_images)))
    print(line)


def check_dataset(file: Path, images: Path | None) -> str:
    """Reports what is wrong with a dataset file. Returns what it holds. Raises InputError if
    anything is wrong, or it teaches nothing."""
    content = read_bytes(file)
    refuse(file, problems(content))
    for contradiction in refuse_systematic(file, compare_records(parse(file, content))):
        warn(file, str(contradiction))
    dataset = read_json(file, images, need_images=False)
    refuse(file, find_unusable(dataset))

    summary = summarize(dataset.truth_at(index) for index in range(len(dataset)))
    if summary.num_ignored:
        ignored = f"{summary.num_ignored} of {summary.num_objects} annotations"
        warn(file, f"{ignored} are ignored (iscrowd or ignore)")
    odd = summary.repetitions(), find_shared(dataset), summary.doubles(), summary.warnings()
    for sentence in chain(*odd):
        warn(file, sentence)
    reason = summary.reason_for_nothing()
    only_lacks_queries = not summary.num_queries and summary.num_objects > summary.num_ignored
    if reason and not only_lacks_queries:
        raise InputError(f"{file}: nothing can be trained or scored, since {reason}")
    line = (
        f"{file}: nothing wrong with {len(dataset)} images, {summary.num_objects} annotations, "
        f"{summary.num_queries} queries"
    )
    if only_lacks_queries:
        line += (
            "\nto train or to score, it needs queries: "
            f"python -m r2sm_jax.data queries template {file} --out OUT"
        )
    return line


def check_masks(file: Path, images: Path | None, crowds: Crowds, are_results: bool) -> str:
    """Reports what is wrong with a COCO file or with COCO results, as every command reads it.
    Returns what it holds. Raises InputError for what is wrong."""
    collector = Collector()
    options = COCOOptions(crowds_are_objects=crowds == "objects", boxes=are_results)
    truths = list(read_coco(file, images, options, collector))
    summary = review(file, truths, collector)
    refuse(file, map(str, collector.bad))
    collector.print()
    if summary.num_ignored == summary.num_objects:
        raise InputError(f"{file}: {summary.reason_for_nothing()}")
    what = (
        "a COCO file without queries: train on it as compose:FILE, if some of its objects are "
        "complete, or write some with data convert"
    )
    if are_results:
        what = "COCO results: data complete makes a dataset file of them"
    return (
        f"{file}: nothing wrong with {len(truths)} images, {summary.num_objects} annotations, "
        f"{summary.num_ignored} of them ignored; {what}"
    )


def refuse(file: Path, sentences: Iterator[str]) -> None:
    """Prints all problems. Raises InputError if there are any."""
    found = list(sentences)
    for sentence in found:
        print(sentence, file=sys.stderr)
    if found:
        raise InputError(f"{file}: {len(found)} problems; correct the records that are listed")


def warn(file: Path, sentence: str) -> None:
    """Prints a warning about a file."""
    print(f"warning: {file}: {sentence}", file=sys.stderr)


def find_unusable(dataset: Dataset) -> Iterator[str]:
    """Yields the images that cannot be opened and the masks that cannot be read or are empty.

    One image is in memory at a time.
    """
    with show_progress("checking images and masks", len(dataset)) as advance:
        for index in range(len(dataset)):
            advance(1)
            try:
                dataset.image_at(index)
                truth = dataset.truth_at(index)
            except InputError as error:
                yield str(error)
                continue
            for instance in truth.instances:
                if instance.id == 0:
                    yield "annotation 0: its id is 0, which COCO tools read as no match"
                # An object of which nothing shows may have an empty visible mask.
                if not masks.areas([instance.complete])[0]:
                    yield f"annotation {instance.id}: its mask is empty; draw it or remove it"


def find_shared(dataset: Dataset) -> Iterator[str]:
    """Yields the pictures of a split that other splits of its folder have, too."""
    names = [image.file_name for image in dataset.images]
    for other in sorted(dataset.path.parent.glob("*.json")):
        # A folder may hold files that are no splits.
        are_splits = is_split(other.stem) and is_split(dataset.path.stem)
        if other != dataset.path and are_splits and {dataset.path.stem, other.stem} & TRAINED:
            others = read_json(other, need_images=False).images
            shared = find_pictures_in_both(names, [image.file_name for image in others])
            if shared:
                yield f"{shared} ({dataset.path.name} and {other.name})"


def is_split(name: str) -> bool:
    """Whether a file of this name, without its ending, is a split of its folder."""
    return name in TRAINED or name.startswith(("val", "test"))


def find_leaks(one: tuple[Path, Path | None], other: tuple[Path, Path | None]) -> Iterator[str]:
    """Yields the images of a file whose pixels are in the other one, too, each given with the
    folder of its images.

    Raises InputError for an image that cannot be read.
    """
    names = dict(hash_images(*other))
    for pixels, name in hash_images(*one):
        if pixels in names:
            both = f"{name} is in {other[0]} as well ({names[pixels]})"
            yield f"{both}; remove it from one of the two"


def hash_images(file: Path, images: Path | None) -> Iterator[tuple[str, str]]:
    """Yields a hash of the pixels of each image of a COCO file or a dataset file, and its name."""
    folders = image_folders(file, images)
    for truth in read_coco(file, images):
        path = locate_image(folders, truth.file_name, file)
        image = open_annotated(path, truth.size, str(file))
        yield (
            hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest(),
            truth.file_name,
        )
