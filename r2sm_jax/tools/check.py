"""All problems of a dataset file at once, a repaired copy, and leaks between two files.

Repair follows few rules. What can be corrected without guessing is corrected: a visible mask outside the complete one,
an image size that all masks agree with, an id of 0, a missing list of queries. Any other bad record is left out, with
what refers to it. The text, mask type and instances of a query are never changed.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import (
    LISTS,
    MASKS,
    Dataset,
    Problem,
    find_image,
    find_problems,
    image_folders,
    is_id,
    read_json,
)
from r2sm_jax.data.images import open_image
from r2sm_jax.errors import InputError, load_json, refuse_overwrite
from r2sm_jax.tools.convert import mask_fields, write_json

Records = dict[str, Any]


def check(
    file: Positional[Path],
    /,
    images: Path | None = None,
    fix: Path | None = None,
    against: Path | None = None,
    against_images: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Reports all problems of a dataset file; exit code 2 if there are any.

    Args:
        file: The dataset file.
        images: Folder of its images, where they do not lie beside it.
        fix: Write a repaired copy: what can be is mended, other bad records are left out; each step is listed.
        against: Another dataset file, such as the training split: images that are in both are reported too.
        against_images: Folder of that file's images.
        overwrite: Replace the repaired copy if it exists.
    """
    if fix is not None:
        refuse_overwrite(fix, overwrite)
    records, problems = check_file(file, images)
    for problem in problems:
        print(problem, file=sys.stderr)
    if fix is not None:
        steps = repair(file, records, problems, images)
        for step in steps:
            print(f"repaired {step}", file=sys.stderr)
        write_json(fix, records, overwrite)
        print(f"wrote {fix}: {counts_of(records)}, {len(steps)} repairs")
    elif problems:
        raise InputError(f"{file}: {len(problems)} problems; --fix OUT writes a repaired copy")
    other = read_json(against, against_images, need_images=False) if against else None
    leaks = find_leaks(Dataset(file, records, images), other) if other else []
    for leak in leaks:
        print(f"{file} and {against}: {leak}", file=sys.stderr)
    if leaks:
        raise InputError(
            f"{file}: {len(leaks)} images shared with {against}; take them out of one of the two"
        )
    if fix is None:
        print(f"{file}: nothing wrong with {counts_of(records)}")


def progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The same items, with a progress bar where stderr is a terminal."""
    return track(
        items, what, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


def counts_of(records: Records) -> str:
    """How long the lists of a dataset file are, in words."""
    return ", ".join(f"{len(records[key])} {key}" for key in LISTS)


def check_file(path: Path, images_dir: Path | None = None) -> tuple[Records, list[Problem]]:
    """The records of a dataset file and all of its problems, in the order of the file.

    One mask and one image are decoded at a time, so memory does not grow with the file. Raises InputError for a file
    that is not there or not JSON.
    """
    records = load_json(path, "a dataset file")
    return records, list(_all_problems(records, image_folders(path, images_dir)))


def repair(
    path: Path, records: Records, problems: list[Problem], images_dir: Path | None = None
) -> list[str]:
    """Mends `records` in place until no problem is left, and returns a sentence for each step.

    Raises InputError for a file that cannot be repaired.
    """
    done: list[str] = []
    while problems:
        for problem in problems:
            if problem.index < 0 and problem.mend is None:
                raise InputError(f"{path}: {problem}; this cannot be repaired")
        mends = [(problem, problem.mend) for problem in problems if problem.mend is not None]
        done += [f"{problem.where or path}: {problem.what}: {mend()}" for problem, mend in mends]
        if not mends:  # records are left out last, since a mend can make other records valid
            left_out = {(problem.records, problem.index) for problem in problems}
            done += [f"{problem.where}: {problem.what}: left out" for problem in problems]
            for key in LISTS:
                records[key] = [
                    record
                    for index, record in enumerate(records[key])
                    if (key, index) not in left_out
                ]
        problems = list(_all_problems(records, image_folders(path, images_dir)))
    if done and not records["images"]:
        raise InputError(
            f"{path}: no image would be left ({done[0]}); give the folder of the images with --images DIR"
        )
    return done


def find_leaks(dataset: Dataset, other: Dataset) -> list[str]:
    """Images of a dataset that are in the other, too, by id and name or by their pixels; a sentence for each.

    Raises InputError for an image that cannot be read.
    """
    others = _fingerprints(other)
    known = {(number, name) for number, name, _ in others}
    by_pixels = {digest: name for _, name, digest in others}
    leaks = []
    for number, name, digest in _fingerprints(dataset):
        if (number, name) in known:
            leaks.append(f"image id {number} is in both ({name})")
        elif digest in by_pixels:
            leaks.append(f"{name} and {by_pixels[digest]} have the same pixels")
    return leaks


def _fingerprints(dataset: Dataset) -> list[tuple[int, str, str]]:
    """Id, file name and hash of the pixels of every image of a dataset."""
    found = []
    for index, record in enumerate(dataset.images):
        image = open_image(dataset.image_path(index))
        digest = hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()
        found.append((record["id"], record["file_name"], digest))
    return found


def _all_problems(records: Any, folders: tuple[Path, ...]) -> Iterator[Problem]:
    """First the problems that `find_problems` sees, then those of images and masks of the other records."""
    listed = list(find_problems(records))
    yield from listed
    if not isinstance(records, dict) or not all(
        isinstance(records.get(key), list) for key in LISTS
    ):
        return
    broken = {(problem.records, problem.index) for problem in listed}
    by_image: dict[int, list[Records]] = {}
    for annotation in records["annotations"]:
        if isinstance(annotation, dict) and is_id(annotation.get("image_id")):
            by_image.setdefault(annotation["image_id"], []).append(annotation)
    sizes: dict[int, tuple[int, int]] = {}
    for index, image in enumerate(progress(records["images"], "images")):
        if ("images", index) not in broken:
            sizes[image["id"]] = image["height"], image["width"]
            yield from _image_problems(index, image, folders, by_image.get(image["id"], []))
    for index, annotation in enumerate(progress(records["annotations"], "annotations")):
        if ("annotations", index) not in broken and annotation["image_id"] in sizes:
            yield from _annotation_problems(
                index, annotation, sizes[annotation["image_id"]], records
            )


def _image_problems(
    index: int, image: Records, folders: tuple[Path, ...], annotations: list[Records]
) -> Iterator[Problem]:
    problem, name = partial(Problem, "images", index, f"image {image['id']}"), image["file_name"]
    path = find_image(folders, name)
    if path is None:
        yield problem(
            f"{name} is not in {' or '.join(map(str, folders))}",
            "give the images' folder with --images DIR",
        )
        return
    try:
        height, width = open_image(path).shape[:2]
    except InputError as error:
        yield problem(f"{name} cannot be read ({error})", "put the image there again")
        return

    def resize() -> str:
        image["height"], image["width"] = height, width
        return "the size was taken from the image"

    if (height, width) != (image["height"], image["width"]):
        stated = [a[key] for a in annotations for key in MASKS if a.get(key) is not None]
        agreed = stated and all(
            isinstance(mask, dict) and mask.get("size") == [height, width] for mask in stated
        )
        what = f"{name} is {height} x {width}, not {image['height']} x {image['width']}"
        yield problem(what, "give the image that was annotated", resize if agreed else None)


def _annotation_problems(
    index: int, annotation: Records, size: tuple[int, int], records: Records
) -> Iterator[Problem]:
    problem = partial(Problem, "annotations", index, f"annotation {annotation['id']}")

    def renumber() -> str:
        ids = [a.get("id") for a in records["annotations"] if isinstance(a, dict)]
        annotation["id"] = new = max(filter(is_id, ids)) + 1
        for query in records["queries"]:
            if isinstance(query, dict) and isinstance(query.get("instance_ids"), list):
                query["instance_ids"] = [
                    new if number == 0 else number for number in query["instance_ids"]
                ]
        return f"it is {new} now"

    if annotation["id"] == 0:
        yield problem("its id is 0, which COCO tools take for no match", "number from 1", renumber)
    decoded: dict[str, np.ndarray] = {}
    for key in MASKS:
        if annotation.get(key) is None:
            continue
        try:
            decoded[key] = masks.from_segmentation(annotation[key], *size)
        except ValueError as error:
            yield problem(f"its {key} cannot be used ({error})", "write the mask again")
            return
        # An empty visible mask is no error where the complete shape is known.
        if not decoded[key].any() and (key == "segmentation" or "segmentation" not in decoded):
            yield problem(f"its {key} is empty", "draw it or remove the record")
            return
    if len(decoded) == len(MASKS):
        amodal, modal = (decoded[key] for key in MASKS)
        if outside := masks.area(modal & ~amodal):

            def unite() -> str:
                annotation.update(
                    mask_fields(modal, amodal) | {"iscrowd": annotation.get("iscrowd", 0)}
                )
                return "they were added to the complete mask"

            what = f"{outside} pixels of visible_mask lie outside segmentation"
            yield problem(what, "make it a part of it", unite)
