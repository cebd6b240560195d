"""What every reader fills: the records of a dataset file, where the images lie, and notes to the user."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.images import image_size
from r2sm_jax.data.records import bad_record, is_id, leads_outside
from r2sm_jax.errors import InputError

RATE_TOLERANCE = 0.02
"""Stored and recomputed occlusion may differ by this much before it is reported."""


@dataclass
class Conversion:
    """Records under construction. Ids are handed out from 1, images keep theirs where they have one."""

    images: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    categories: dict[str, int] = field(default_factory=dict)
    queries: list[dict[str, Any]] = field(default_factory=list)
    image_paths: dict[int, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_image(self, path: Path, image_id: int | None = None) -> tuple[int, int, int]:
        """Adds an image file; gives its id, height and width. Raises InputError for what is no image."""
        height, width = image_size(path)
        number = len(self.images) + 1 if image_id is None else image_id
        self.image_paths[number] = path
        self.images.append({"id": number, "file_name": path.name, "height": height, "width": width})
        return number, height, width

    def add_annotation(
        self,
        image_id: int,
        name: str,
        *,
        modal: np.ndarray,
        amodal: np.ndarray | None,
        **extra: Any,
    ) -> int:
        """Adds an object with its masks `[H W]`; gives its id. `amodal` None: only the visible mask is known."""
        category = " ".join(name.split()) or "object"
        whole = modal if amodal is None else amodal | modal
        record: dict[str, Any] = {"id": len(self.annotations) + 1, "image_id": image_id}
        record["category_id"] = self.categories.setdefault(category, len(self.categories) + 1)
        record |= {"bbox": masks.coco_box(whole), "area": masks.area(whole), "iscrowd": 0}
        record["segmentation"] = None if amodal is None else masks.encode(whole)
        if amodal is None or not np.array_equal(whole, modal):
            record["visible_mask"] = masks.encode(modal)
        if amodal is not None:
            record["occlude_rate"] = 1 - masks.area(modal) / max(1, masks.area(whole))
            if "visible_mask" in record:
                record["invisible_mask"] = masks.encode(whole & ~modal)
        self.annotations.append(record | extra)
        return record["id"]

    def add_query(
        self,
        image_id: int,
        text: str,
        mask_type: str,
        instance_ids: Sequence[int],
        *,
        kind: Mapping[str, Any],
        answer: str | None = None,
    ) -> None:
        """Adds a query; white space in its text is tidied."""
        record: dict[str, Any] = {"id": len(self.queries) + 1, "image_id": image_id}
        record |= {"text": " ".join(text.split()), "mask_type": mask_type, "instance_ids": list(instance_ids)}
        record["kind"] = {**kind, "multi": len(instance_ids) > 1}
        self.queries.append(record | ({} if answer is None else {"answer": answer}))

    def compare_rate(self, where: str, stored: Any) -> None:
        """Notes a stored occlusion rate that the masks of the annotation added last do not bear out."""
        rate = self.annotations[-1].get("occlude_rate")
        if isinstance(stored, int | float) and rate is not None and abs(stored - rate) > RATE_TOLERANCE:
            self.notes.append(f"{where}: occlude_rate {stored:.3f} is stored, but the masks give {rate:.3f} (used)")

    def compare_order(self, where: str, annotations: Sequence[Mapping[str, Any]], key: str) -> None:
        """Notes pairs of overlapping objects of an image of which the one with the larger `key`, said to lie behind,
        is the one that is seen."""
        drawn = [_amodal_and_modal(a) for a in annotations]
        wrong, overlapping = [], 0
        for i, one in enumerate(annotations):
            for j, other in enumerate(annotations[:i]):
                overlap = drawn[i][0] & drawn[j][0]
                seen_i, seen_j = (masks.area(overlap & drawn[n][1]) for n in (i, j))
                if seen_i != seen_j and one.get(key) != other.get(key):
                    overlapping += 1
                    if (seen_i > seen_j) != (one[key] < other[key]):
                        wrong.append(f"{other['id']}-{one['id']}")
        if wrong:
            shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
            self.notes.append(
                f"{where}: {len(wrong)} of {overlapping} overlapping pairs are seen in another order than {key} says "
                f"(annotations {shown}); masks are used"
            )

    def name_images(self, out: Path) -> str:
        """Sets the `file_name` of images whose path is known: relative to the folder of `out` if all lie below it,
        else bare.

        Returns what the user must pass along in the second case. Raises InputError for ambiguous bare names.
        """
        folder = out.resolve().parent
        paths = {image_id: path.resolve() for image_id, path in self.image_paths.items()}
        if not paths:
            return ""
        below = all(path.is_relative_to(folder) for path in paths.values())
        for image in self.images:
            if path := paths.get(image["id"]):
                image["file_name"] = path.relative_to(folder).as_posix() if below else path.name
        if below:
            return ""
        name, times = Counter(path.name for path in paths.values()).most_common(1)[0]
        if times > 1:
            raise InputError(
                f"{out}: the image name {name} occurs in several folders, none below {out.parent}; "
                "write the dataset file into a folder above them all"
            )
        folders = {path.parent for path in self.image_paths.values()}
        if len(folders) > 1:
            return "a folder that holds them all (--data.images DIR)"
        return f"--data.images {folders.pop()}"

    def records(self, description: str) -> dict[str, Any]:
        """The records of the dataset file."""
        categories = [{"id": number, "name": name} for name, number in self.categories.items()]
        lists = {"images": self.images, "annotations": self.annotations, "categories": categories}
        return lists | {"queries": self.queries, "info": {"description": description}}


def _amodal_and_modal(annotation: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    amodal = masks.decode(annotation["segmentation"])
    return amodal, masks.decode(annotation["visible_mask"]) if "visible_mask" in annotation else amodal


def need(path: Path, where: str, record: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    """`record[key]`, of the type `kind`. Raises InputError that names the record otherwise."""
    value = record.get(key) if isinstance(record, Mapping) else None
    if not isinstance(value, kind) or (kind is int and not is_id(value)):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise bad_record(
            path, where, f"its {key!r} is {found}, not a {names}", "check that the format is the right one"
        )
    return value


def need_name(path: Path, where: str, record: Any, key: str) -> str:
    """`record[key]`, a file name that stays in its folder. Raises InputError that names the record otherwise."""
    name = need(path, where, record, key, str)
    if not name or leads_outside(name):
        raise bad_record(path, where, f"{key} {name!r} leads out of the image folder", "give a path relative to it")
    return name


def need_size(path: Path, where: str, record: Any) -> tuple[int, int]:
    """Height and width of an image's record. Raises InputError that names the record where masks cannot have them."""
    size = need(path, where, record, "height", int), need(path, where, record, "width", int)
    try:
        masks.check_size(*size)
    except ValueError as error:
        raise bad_record(path, where, f"its size cannot be ({error})", "give the image's own") from error
    return size


def find_image(path: Path, where: str, folder: Path, name: str) -> Path:
    """The image file `name` in `folder`. Raises InputError that names the record where it is not there."""
    if not (folder / name).is_file():
        raise bad_record(path, where, f"{name} is not in {folder}", "give the images' folder with --images DIR")
    return folder / name


def draw(path: Path, where: str, segmentation: Any, height: int, width: int) -> np.ndarray:
    """The mask `[H W]` of a COCO `segmentation`. Raises InputError that names the record."""
    try:
        return masks.from_segmentation(segmentation, height, width)
    except ValueError as error:
        remedy = "give the annotation and the image that belong together"
        raise bad_record(path, where, f"its mask cannot be used ({error})", remedy) from error
