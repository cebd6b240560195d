"""Everything that is wrong with a dataset file at once, a repaired copy, and leaks between two files.

Repair follows few rules: what can be set right without guessing is (a visible mask outside the complete one, an image
size that all masks agree with, an id of 0, a missing list of queries), and any other bad record is left out, with what
refers to it. The text, mask type and instances of a query are never changed.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.images import image_size, open_image
from r2sm_jax.data.progress import announce
from r2sm_jax.data.records import LISTS, MASKS, Problem, find_problems, is_id, read_records
from r2sm_jax.data.samples import find_image, image_folders
from r2sm_jax.errors import InputError, load_json

Records = dict[str, Any]


def check_file(path: Path, images_dir: Path | None = None) -> tuple[Records, list[Problem]]:
    """The records of a dataset file and all of its problems, in the order of the file.

    One mask is decoded at a time, and one image, so memory does not grow with the file. Raises InputError for
    a file that is not there or no JSON.
    """
    records = load_json(path, "a dataset file")
    return records, list(_all_problems(path, records, image_folders(path, images_dir)))


def repair(path: Path, records: Records, problems: list[Problem], images_dir: Path | None = None) -> list[str]:
    """Mends `records` in place until no problem is left, and says what was done, step by step.

    Raises InputError for a file that nothing can be made of.
    """
    done: list[str] = []
    while problems:
        lost = [p for p in problems if p.index < 0 and p.mend is None]
        if lost:
            raise InputError(f"{path}: {lost[0]}; this cannot be repaired")
        mendable = [p for p in problems if p.mend is not None]
        for problem in mendable:
            assert problem.mend is not None
            done.append(f"{problem.where or path}: {problem.what}: {problem.mend()}")
        if not mendable:  # what is mended may set other records right
            leave_out: dict[str, set[int]] = {}
            for problem in problems:
                leave_out.setdefault(problem.records, set()).add(problem.index)
                done.append(f"{problem.where}: {problem.what}: left out")
            for key, indices in leave_out.items():
                records[key] = [record for index, record in enumerate(records[key]) if index not in indices]
        problems = list(_all_problems(path, records, image_folders(path, images_dir)))
    return done


def find_leaks(path: Path, other: Path, images_dir: Path | None, other_dir: Path | None) -> list[str]:
    """Images that two dataset files share, by id or by the hash of their pixels, one sentence each.

    Raises InputError for an image that cannot be read.
    """
    shared: list[str] = []
    ids: list[dict[int, str]] = []
    hashes: list[dict[str, str]] = []
    for file, folder in ((path, images_dir), (other, other_dir)):
        records = read_records(file)
        folders = image_folders(file, folder)
        ids.append({image["id"]: image["file_name"] for image in records["images"]})
        hashes.append({_pixel_hash(folders, name): name for name in ids[-1].values()})
    for number in sorted(ids[0].keys() & ids[1].keys()):
        shared.append(f"image id {number} is in both ({ids[0][number]} and {ids[1][number]})")
    for digest, name in hashes[0].items():
        if digest in hashes[1]:
            shared.append(f"{name} and {hashes[1][digest]} have the same pixels")
    return shared


def _all_problems(path: Path, records: Any, folders: tuple[Path, ...]) -> Iterator[Problem]:
    broken: set[tuple[str, int]] = set()
    for problem in find_problems(records):
        broken.add((problem.records, problem.index))
        yield problem
    if not isinstance(records, dict) or not all(isinstance(records.get(key), list) for key in LISTS):
        return
    by_image: dict[Any, list[Records]] = {}
    for annotation in records["annotations"]:
        if isinstance(annotation, dict) and is_id(annotation.get("image_id")):
            by_image.setdefault(annotation["image_id"], []).append(annotation)
    sizes: dict[int, tuple[int, int]] = {}
    for index, image in enumerate(announce(records["images"], f"{path}: images")):
        if ("images", index) not in broken:
            sizes[image["id"]] = (image["height"], image["width"])
            for what, remedy, mend in _image_problems(image, folders, by_image.get(image["id"], [])):
                yield Problem("images", index, f"image {image['id']}", what, remedy, mend)
    for index, annotation in enumerate(announce(records["annotations"], f"{path}: annotations")):
        where = f"annotation {annotation['id']}" if isinstance(annotation, dict) and "id" in annotation else ""
        if ("annotations", index) not in broken and annotation["image_id"] in sizes:
            if annotation["id"] == 0:
                yield _zero_id(records, annotation, index)
            for what, remedy, mend in _mask_problems(annotation, *sizes[annotation["image_id"]]):
                yield Problem("annotations", index, where, what, remedy, mend)


def _image_problems(image: Records, folders: tuple[Path, ...], annotations: list[Records]) -> Iterator[tuple]:
    name = image["file_name"]
    path = find_image(folders, name)
    if path is None:
        yield f"{name} is not in {' or '.join(map(str, folders))}", "give the images' folder with --images DIR", None
        return
    try:
        open_image(path)
        actual = image_size(path)
    except InputError as error:
        yield f"{name} cannot be read ({error})", "put the image there again", None
        return
    if actual != (image["height"], image["width"]):
        what = f"{name} is {actual[0]} x {actual[1]}, not {image['height']} x {image['width']}"
        sizes = [_stated_size(a[key]) for a in annotations for key in MASKS if a.get(key) is not None]

        def resize() -> str:
            image["height"], image["width"] = actual
            return "the size was taken from the image"

        yield what, "give the image that was annotated", resize if set(sizes) == {actual} else None


def _stated_size(mask: Any) -> tuple[int, int] | None:
    try:
        return masks.rle_size(mask)
    except ValueError:
        return None


def _mask_problems(annotation: Records, height: int, width: int) -> Iterator[tuple]:
    decoded: dict[str, np.ndarray] = {}
    for key in MASKS:
        if annotation.get(key) is None:
            continue
        try:
            decoded[key] = masks.from_segmentation(annotation[key], height, width)
        except ValueError as error:
            yield f"its {key} cannot be used ({error})", "write the mask again", None
            return
        # Nothing visible is no error where the complete shape is known.
        if not decoded[key].any() and (key == "segmentation" or "segmentation" not in decoded):
            yield f"its {key} is empty", "draw it or remove the record", None
            return
    if len(decoded) == len(MASKS):
        amodal, modal = (decoded[key] for key in MASKS)
        outside = masks.area(modal & ~amodal)
        if outside:

            def unite() -> str:
                whole = amodal | modal
                annotation["segmentation"] = masks.encode(whole)
                annotation["area"], annotation["bbox"] = masks.area(whole), masks.coco_box(whole)
                annotation["invisible_mask"] = masks.encode(whole & ~modal)
                annotation["occlude_rate"] = 1 - masks.area(modal) / masks.area(whole)
                return "they were added to the complete mask"

            yield f"{outside} pixels of visible_mask lie outside segmentation", "make it a part of it", unite


def _zero_id(records: Records, annotation: Records, index: int) -> Problem:
    def renumber() -> str:
        annotation["id"] = new = max(a["id"] for a in records["annotations"]) + 1
        for query in records["queries"]:
            if isinstance(query, dict) and isinstance(query.get("instance_ids"), list):
                query["instance_ids"] = [new if number == 0 else number for number in query["instance_ids"]]
        return f"it is {new} now"

    what = "its id is 0, which COCO tools take for no match"
    return Problem("annotations", index, "annotation 0", what, "number from 1", renumber)


def _pixel_hash(folders: tuple[Path, ...], name: str) -> str:
    path = find_image(folders, name)
    if path is None:
        raise InputError(f"image {name} is not in {' or '.join(map(str, folders))}; give its folder")
    image = open_image(path)
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()


def summary(records: Mapping[str, Any]) -> str:
    """How much there is in a dataset file."""
    return ", ".join(f"{len(records[key])} {key}" for key in LISTS)
