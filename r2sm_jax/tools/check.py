"""`data check`: every problem of a dataset file at once, and the images that two files share."""

import filecmp
import hashlib
import html
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import NO_NAME, Dataset, read_json, read_records
from r2sm_jax.data.images import (
    ORIENTATION,
    check_stated_size,
    find_image,
    image_folders,
    open_image,
)
from r2sm_jax.data.split_summary import CROWD_REMEDY, summarize
from r2sm_jax.data.validation import (
    LISTS,
    MASKS,
    Contradiction,
    Problem,
    check_records,
    find_contradictions,
    find_pictures_in_both,
    find_problems,
    is_ignored,
    parse_flag,
)
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.progress import show_progress

HTML_ENTITY = re.compile(r"&(?:[a-zA-Z]{2,8}\d{0,2}|#\d{1,7}|#[xX][0-9a-fA-F]{1,6});")


def check(
    file: Positional[Path],
    /,
    images: Path | None = None,
    against: Path | None = None,
    against_images: Path | None = None,
) -> None:
    """Reports all problems of a dataset file; exit code 2 if there are any.

    Args:
        file: The dataset file.
        images: Folder of its images, if they are not beside it.
        against: Another dataset file, such as the training split: images in both are reported too.
        against_images: Folder of that file's images.
    """
    records = load_json(file, "a dataset file")
    report_problems(file, records, images)
    dataset = Dataset(file, check_records(file, records), images)
    if against is not None:
        report_leaks(dataset, read_json(against, against_images, need_images=False))
    report_contradictions(file, records, images)
    report_turned_images(file, records, images)
    report_what_it_teaches(dataset, records)
    print(f"{file}: nothing wrong with {counts_of(records)}")


def report_problems(file: Path, records: Any, images: Path | None) -> None:
    """Prints the problems of single records. Raises InputError if there are any."""
    problems = list(find_all_problems(records, image_folders(file, images)))
    if not problems:
        return
    for problem in problems:
        print(problem, file=sys.stderr)
    # Many problems may have one cause, which the records can only tell where they are whole.
    if next(find_problems(records), None) is None:
        for contradiction in find_contradictions(records):
            print_warning(file, str(contradiction))
    raise InputError(f"{file}: {len(problems)} problems; correct the records that are listed")


def report_leaks(dataset: Dataset, other: Dataset) -> None:
    """Prints the images that two files share. Raises InputError if there are any."""
    leaks = find_leaks(dataset, other)
    for leak in leaks:
        print(f"{dataset.path} and {other.path}: {leak}", file=sys.stderr)
    if leaks:
        raise InputError(
            f"{dataset.path}: {len(leaks)} images shared with {other.path}; remove them from one "
            "of the two"
        )


def report_contradictions(file: Path, records: Mapping[str, Any], images: Path | None) -> None:
    """Warns of what records state twice and differently. Raises InputError if most of them do."""
    shared = find_pictures_in_other_splits(file, records, images)
    for contradiction in [*find_contradictions(records), *shared]:
        if contradiction.is_systematic:
            raise InputError(f"{file}: {contradiction}")
        print_warning(file, str(contradiction))


def report_turned_images(file: Path, records: Mapping[str, Any], images: Path | None) -> None:
    """Warns of images whose annotations may be of another orientation."""
    folders = image_folders(file, images)
    turned = []
    for image in records["images"]:
        path = find_image(folders, image["file_name"])
        if path is not None and _is_turned_unseen(path):
            turned.append(image["file_name"])
    if turned:
        print_warning(
            file,
            f"{len(turned)} of {len(records['images'])} images are turned or mirrored by their "
            f"EXIF orientation ({turned[0]}); their masks must be of the upright image",
        )


def report_what_it_teaches(dataset: Dataset, records: Mapping[str, Any]) -> None:
    """Warns of what is not learnt or scored. Raises InputError if that is everything."""
    summary = summarize(dataset.truth_at(index) for index in range(len(dataset)))
    warnings = [ignored_warning(records["annotations"])]
    warnings += find_repeated(records)
    warnings.append(entity_warning(records["queries"]))
    warnings += summary.query_warnings()
    warnings += [summary.shape_warning(), summary.mask_warning()]
    for warning in warnings:
        if warning:
            print_warning(dataset.path, warning)
    reason = summary.reason_for_nothing()
    if reason:
        raise InputError(f"{dataset.path}: nothing can be trained or scored, since {reason}")


def _is_turned_unseen(path: Path) -> bool:
    """Whether EXIF turns or mirrors an image without a change of its size, which then tells
    nothing."""
    with Image.open(path) as image:
        orientation = image.getexif().get(ORIENTATION, 1)
        return orientation in (2, 3, 4) or (orientation >= 5 and image.width == image.height)


def print_warning(file: Path, sentence: str) -> None:
    """Prints a warning about a file."""
    print(f"warning: {file}: {sentence}", file=sys.stderr)


def find_pictures_in_other_splits(
    file: Path, records: Mapping[str, Any], images: Path | None
) -> Iterator[Contradiction]:
    """Yields the pictures that a file shares with other splits of its folder.

    They have the same name, or are copies with other names.
    """
    folders = image_folders(file, images)
    names = [image["file_name"] for image in records["images"]]
    for other in sorted(file.parent.glob("*.json")):
        # A folder may hold files that are no splits.
        if other == file or not {file.stem, other.stem} & {"train", "dev"}:
            continue
        try:
            other_records = read_records(other)
        except InputError:
            continue
        other_names = [image["file_name"] for image in other_records["images"]]
        other_names += find_copies(names, other_names, folders)
        if shared := find_pictures_in_both(names, other_names):
            yield shared._replace(what=f"{shared.what} ({file.name} and {other.name})")


def find_copies(
    names: Sequence[str], other_names: Sequence[str], folders: Sequence[Path]
) -> list[str]:
    """Finds the names whose file has the same content as a file of `other_names`."""
    paths = {name: find_image(folders, name) for name in names}
    other_paths = [find_image(folders, name) for name in other_names]
    # Only files of the same size are read.
    by_size: dict[int, set[Path]] = {}
    for path in other_paths:
        if path is not None:
            by_size.setdefault(path.stat().st_size, set()).add(path)
    copies = []
    for name, path in paths.items():
        similar = by_size.get(path.stat().st_size, set()) if path is not None else set()
        if path is not None and any(filecmp.cmp(path, other, shallow=False) for other in similar):
            copies.append(name)
    return copies


def progress(items: Sequence[Any], description: str) -> Iterator[Any]:
    """Yields the items, and shows how many of them were used."""
    with show_progress(description, len(items)) as advance:
        for item in items:
            yield item
            advance(1)


def counts_of(records: Mapping[str, Any]) -> str:
    """The lengths of a dataset file's lists, in words."""
    return ", ".join(f"{len(records[key])} {key}" for key in LISTS)


def find_all_problems(records: Any, folders: tuple[Path, ...]) -> Iterator[Problem]:
    """All problems of a dataset file: those of `find_problems`, then those of images and masks.

    Decodes one image or one annotation at a time, so memory does not grow with the file.
    """
    structural = list(find_problems(records))
    yield from structural
    if any(problem.index < 0 for problem in structural):  # of the file itself or of a whole list
        return

    # Records with a problem of structure are not read any further.
    broken = {(problem.records, problem.index) for problem in structural}
    sizes: dict[int, tuple[int, int]] = {}
    for index, image in enumerate(progress(records["images"], "checking images")):
        if ("images", index) not in broken:
            sizes[image["id"]] = image["height"], image["width"]
            yield from _image_problems(index, image, folders)
    for index, annotation in enumerate(progress(records["annotations"], "checking annotations")):
        if ("annotations", index) not in broken and annotation["image_id"] in sizes:
            yield from _annotation_problems(index, annotation, sizes[annotation["image_id"]])


def _image_problems(
    index: int, image: Mapping[str, Any], folders: tuple[Path, ...]
) -> Iterator[Problem]:
    """Yields what is wrong with the file of an image."""
    problem = partial(Problem, "images", index, f"image {image['id']}")
    name = image["file_name"]
    path = find_image(folders, name)
    if path is None:
        searched = " or ".join(map(str, folders))
        remedy = "give the images' folder with --images DIR"
        yield problem(f"{name} is not in {searched}", remedy)
        return

    try:
        stated = image["height"], image["width"]
        check_stated_size(path, open_image(path).shape[:2], stated, "the file")
    except InputError as error:
        yield problem(f"{name} cannot be used ({error})", "put the image there again")


def _annotation_problems(
    index: int, annotation: Mapping[str, Any], size: tuple[int, int]
) -> Iterator[Problem]:
    """Yields what is wrong with the masks of an annotation; `size` is the image's."""
    problem = partial(Problem, "annotations", index, f"annotation {annotation['id']}")
    if annotation["id"] == 0:
        yield problem("its id is 0, which COCO tools read as no match", "number from 1")

    decoded: dict[str, np.ndarray] = {}
    for key in MASKS:
        if annotation.get(key) is None:
            continue
        try:
            decoded[key] = masks.from_segmentation(annotation[key], *size)
        except ValueError as error:
            yield problem(f"its {key} cannot be used ({error})", "write the mask again")
            return
        # An empty visible mask is no error if the complete shape is known: the object is hidden.
        may_be_empty = key == "visible_mask" and "segmentation" in decoded
        if not decoded[key].any() and not may_be_empty:
            yield problem(f"its {key} is empty", "draw it or remove the record")
            return

    if len(decoded) == len(MASKS):
        num_outside = masks.area(decoded["visible_mask"] & ~decoded["segmentation"])
        if num_outside:
            what = f"{num_outside} pixels of visible_mask lie outside segmentation"
            yield problem(what, "make it a part of it")


def ignored_warning(annotations: Sequence[Mapping[str, Any]]) -> str:
    """How many annotations are ignored and what marks them; "" if none is."""
    num_crowds = sum(bool(parse_flag(a.get("iscrowd"))) for a in annotations)
    num_ignored = sum(map(is_ignored, annotations))
    if not num_ignored:
        return ""
    causes = f"{num_crowds} by iscrowd, {num_ignored - num_crowds} by ignore"
    sentence = f"{num_ignored} of {len(annotations)} annotations are ignored ({causes})"
    return f"{sentence}; {CROWD_REMEDY}" if num_crowds >= len(annotations) / 2 else sentence


def entity_warning(queries: Sequence[Mapping[str, Any]]) -> str:
    """How many queries hold HTML entities, such as "&amp;"; "" if none does."""
    with_entities = []
    for query in queries:
        found = HTML_ENTITY.findall(query["text"])
        # "this&that;" only looks like one.
        if any(html.unescape(entity) != entity for entity in found):
            with_entities.append(query)
    if not with_entities:
        return ""
    first = with_entities[0]
    return (
        f"{len(with_entities)} of {len(queries)} queries hold HTML entities, which are read letter "
        f"by letter (query {first['id']}: {first['text']!r}); write the characters that they stand "
        f"for, such as {html.unescape(first['text'])!r}"
    )


def find_repeated(records: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each kind of record that a file holds twice."""
    annotations = records["annotations"]
    masks_of_images: set[tuple[Any, ...]] = set()
    for a in annotations:
        shapes = repr((a.get("segmentation"), a.get("visible_mask")))
        masks_of_images.add((a["image_id"], a["category_id"], shapes))
    num_repeated = len(annotations) - len(masks_of_images)
    if num_repeated:
        yield (
            f"{num_repeated} of {len(annotations)} annotations have the mask and the category of "
            "another one of their image; remove those that are there twice"
        )

    # One sentence about an image should have one meaning.
    meanings: dict[tuple[Any, str], Counter[Any]] = {}
    for query in records["queries"]:
        sentence = query["image_id"], " ".join(query["text"].lower().split())
        meaning = query["mask_type"], frozenset(query["instance_ids"])
        meanings.setdefault(sentence, Counter())[meaning] += 1
    num_queries = len(records["queries"])
    num_repeated = sum(counts.total() - len(counts) for counts in meanings.values())
    if num_repeated:
        yield f"{num_repeated} of {num_queries} queries repeat another one of their image"
    ambiguous = [sentence for sentence, counts in meanings.items() if len(counts) > 1]
    if ambiguous:
        image_id, text = ambiguous[0]
        yield (
            f"{len(ambiguous)} sentences have queries about one image that ask for different mask "
            f"types or objects (image {image_id}: {text!r})"
        )

    names: dict[str, list[str]] = {}
    for category in records["categories"]:
        if category["name"] == NO_NAME:
            continue  # classes without a name, which can be many
        key = " ".join(category["name"].lower().split())
        names.setdefault(key, []).append(category["name"])
    similar = next((same for same in names.values() if len(same) > 1), None)
    if similar is not None:
        yield f"categories differ in case or blanks only ({', '.join(map(repr, similar))})"


def find_leaks(dataset: Dataset, other: Dataset) -> list[str]:
    """The images of a dataset that are in the other one too, one sentence each.

    Two images are the same if id and file name are, or if their pixels are. Raises InputError for
    an image that cannot be read.
    """
    other_images = list(_hash_images(other))
    other_names = {(image_id, name) for image_id, name, _ in other_images}
    name_by_hash = {digest: name for _, name, digest in other_images}

    leaks = []
    for image_id, name, digest in _hash_images(dataset):
        if (image_id, name) in other_names:
            leaks.append(f"image id {image_id} is in both ({name})")
        elif digest in name_by_hash:
            leaks.append(f"{name} and {name_by_hash[digest]} have the same pixels")
    return leaks


def _hash_images(dataset: Dataset) -> Iterator[tuple[int, str, str]]:
    """Id, file name and a hash of the pixels of every image."""
    for index, record in enumerate(dataset.images):
        image = open_image(dataset.image_path(index))
        digest = hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()
        yield record.id, record.file_name, digest
