"""Scores what a detector found, without sentences: COCO results (`image_id`, `category_id`,
`segmentation`, `score`) against the visible and the complete masks of a data set.

It is COCO's evaluation over classes (instances.py): a class of an image is a unit.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import msgspec

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.dataset import ImageTruth, number_classes
from r2sm_jax.data.readers.coco import read_coco
from r2sm_jax.errors import InputError, read_bytes
from r2sm_jax.evaluation.instances import (
    QueryDetections,
    instance_figures,
    occlusion_figures,
    rank_detections,
)
from r2sm_jax.evaluation.predictions import Share, read_entries
from r2sm_jax.evaluation.scorer import true_occlude_rate
from r2sm_jax.query import MASK_TYPES, MaskType


class Found(msgspec.Struct):
    """An object that a detector found."""

    image_id: int | str
    """The image's id, or the name of its file without the ending."""
    category_id: int
    segmentation: Any
    """A COCO RLE or polygons."""
    score: float
    visible_mask: Any = None
    """What shows of it, where `segmentation` is the whole of it."""
    occlude_rate: Share | None = None
    """Share of it that is hidden; `visible_mask` says it, too."""


FoundInImage = Mapping[str, Sequence[Found]]
"""What was found in an image, by class."""


def holds_detections(path: Path) -> bool:
    """Whether a file of predictions is about images, and not about queries."""
    content = read_bytes(path) if path.is_file() else b""
    return b'"image_id"' in content and b'"query_id"' not in content


def score_detections(path: Path, data: Path) -> dict[MaskType, dict[str, float | None]]:
    """The figures of a detector's masks as visible and as complete ones, these if they are known.

    Args:
        path: COCO results.
        data: a dataset file, or a COCO file.

    Raises InputError for a file that cannot be read, and for a result of another image or class.
    """
    collector = Collector(is_strict=True)
    truths = sorted(read_coco(data, collector=collector), key=lambda truth: truth.image_id)
    classes = number_classes(truths, collector.categories)
    found = _read_found(path, truths, {record["id"]: name for name, record in classes.items()})
    figures: dict[MaskType, dict[str, float | None]] = {}
    for mask_type in MASK_TYPES:
        units = []
        for truth in truths:
            of_image = found.get(truth.image_id, {})
            for name in sorted({*of_image, *(i.category for i in truth.instances)}):
                unit = _rank(truth, of_image, name, mask_type)
                units.append(unit._replace(category=classes[name]["id"]))
        # Where only visible masks are known, all objects are left out of the complete ones.
        if objects := sum(int((~unit.is_crowd).sum()) for unit in units):
            both = {**instance_figures(units), **occlusion_figures(units)}
            figures[mask_type] = {"objects": objects, **both}
    return figures


def _rank(
    truth: ImageTruth, found: FoundInImage, name: str, mask_type: MaskType
) -> QueryDetections:
    """What was found of a class in an image, beside what is there."""
    is_amodal = mask_type == "amodal"
    counted, ignored = [], []
    for instance in truth.instances:
        if instance.category == name:
            is_unknown = is_amodal and instance.amodal is None
            (ignored if instance.ignore or is_unknown else counted).append(instance)
    detected = found.get(name, ())
    return rank_detections(
        [one.segmentation if is_amodal else one.visible_mask for one in detected],
        [one.score for one in detected],
        [True] * len(detected),
        [instance.complete if is_amodal else instance.modal for instance in counted],
        [instance.complete for instance in ignored],
        occlude_rates=[one.occlude_rate for one in detected],
        true_occlude_rates=[true_occlude_rate(instance) for instance in counted],
    )


def _read_found(
    path: Path, truths: Sequence[ImageTruth], classes: Mapping[int, str]
) -> Mapping[int, FoundInImage]:
    """What was found in each image that the file names."""
    stems = [PurePath(truth.file_name).stem for truth in truths]
    counts = Counter(stems)
    images: dict[int | str, ImageTruth] = {
        stem: truth for stem, truth in zip(stems, truths, strict=True) if counts[stem] == 1
    }
    images |= {truth.image_id: truth for truth in truths}
    found: dict[int, dict[str, list[Found]]] = defaultdict(lambda: defaultdict(list))
    for number, one in enumerate(read_entries(path, Found)):
        where = f"{path}: entry {number}"
        for value, known, what in (
            (one.image_id, images, "image"),
            (one.category_id, classes, "category"),
        ):
            if value not in known:
                some = ", ".join(map(str, list(known)[:3]))
                raise InputError(f"{where}: {value!r} is not one {what} of the data: {some}, ...")
        truth = images[one.image_id]
        try:
            one.segmentation = masks.compressed(one.segmentation, *truth.size)
            if one.visible_mask is None:
                one.visible_mask = one.segmentation
            else:
                one.visible_mask = masks.compressed(one.visible_mask, *truth.size)
                visible, whole = masks.areas([one.visible_mask, one.segmentation])
                one.occlude_rate = 1 - visible / max(1, whole)
        except ValueError as error:
            raise InputError(f"{where}: {error}; see docs/metrics.md") from error
        found[truth.image_id][classes[one.category_id]].append(one)
    return found
