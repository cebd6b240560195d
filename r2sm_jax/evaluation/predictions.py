"""Prediction files and folders of any system, read as the answers that the scorer takes.

Formats, by name:

    coco    JSON list of COCO results with `query_id` in place of `image_id`: `{"query_id", "segmentation": RLE,
            "score", "mask_type"?, "amodal_probability"?, "fused"?}`. Several entries of a query are instances; the
            answer is their union, or the entry marked `fused`
    png     folder of `<query id>.png`; what is not 0 is mask
    logits  folder of `<query id>.npy`, float `[H W]` or `[n H W]`; above 0 is mask, several are instances
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source, is_id
from r2sm_jax.data.images import brightness, find_images
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.evaluation.scorer import Scored, truths
from r2sm_jax.inference.prediction import Candidate, Prediction
from r2sm_jax.query import MaskType

Sizes = Mapping[int, tuple[int, int]]
"""Height and width of the image of each query."""
ReadMasks = Callable[[Path, tuple[int, int]], np.ndarray]
"""Reads the masks `[n H W]` in a file, which must have the given size. Raises ValueError and what libraries raise."""


@dataclass
class Entries:
    """What a file says about one query, with masks as RLEs, so that all of it fits in memory."""

    fused: RLE | None = None
    """None: the union of `instances`."""
    instances: list[RLE] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    mask_type: MaskType | None = None
    probability: float | None = None
    score: float | None = None

    @property
    def decision(self) -> MaskType | None:
        """The mask type, by the probability of amodal where none is named."""
        if self.mask_type is None and self.probability is not None:
            return "amodal" if self.probability > 0.5 else "modal"
        return self.mask_type

    def mask(self, height: int, width: int) -> RLE:
        """The one mask of the query."""
        return self.fused if self.fused is not None else masks.merge(self.instances, height, width)

    def to_prediction(self, query: str, height: int, width: int) -> Prediction:
        """The record that the scorer takes."""
        mask = masks.decode(self.mask(height, width))
        candidates = [Candidate(*pair) for pair in zip(self.instances, self.scores, strict=True)]
        return Prediction(
            query,
            self.decision,
            self.probability,
            self.score,
            mask,
            mask,
            candidates=tuple(candidates),
            has_both_masks=False,
        )


def score_predictions(path: Path, source: Source, form: str = "auto") -> Scored:
    """Scores predictions for all queries of a source. Raises InputError like `read_predictions`."""
    wanted = list(truths(source))
    answers = read_predictions(path, {t.query.id: (t.height, t.width) for t in wanted}, form)
    scored = Scored()
    for truth in wanted:
        if truth.scored:
            entries = answers.get(truth.query.id)
            size = truth.height, truth.width
            scored.add(truth, entries and entries.to_prediction(truth.query.text, *size))
    return scored


def read_predictions(path: Path, sizes: Sizes, form: str = "auto") -> dict[int, Entries]:
    """Reads predictions for the queries of `sizes`; those without any are not in the result. Raises InputError for a
    query that does not exist or is answered twice, a mask of the wrong size, an unreadable file; the message names the
    entry or the file."""
    if form == "auto":
        form = (
            "coco" if not path.is_dir() else "png" if any(path.glob("*.[pP][nN][gG]")) else "logits"
        )
    if form != "coco" and form not in FOLDERS:
        raise InputError(f"--format {form!r} is unknown; use coco, {' or '.join(FOLDERS)}")
    if not path.exists():
        raise InputError(f"{path}: there are no predictions here; check the path")
    if (form == "coco") == path.is_dir():
        what = "a file, but this is a folder" if form == "coco" else "a folder, but this is a file"
        raise InputError(
            f"{path}: predictions of the format {form} are {what}; choose another --format"
        )
    return _read_coco(path, sizes) if form == "coco" else _read_folder(path, sizes, *FOLDERS[form])


def _size_of(where: str, sizes: Sizes, number: Any) -> tuple[int, int]:
    if not is_id(number):
        raise InputError(
            f"{where}: query_id {number!r} is not a whole number; give the id of a query of the data"
        )
    if number not in sizes:
        raise InputError(
            f"{where}: the data have no query {number}; score the data and split that were predicted"
        )
    return sizes[number]


def _read_coco(path: Path, sizes: Sizes) -> dict[int, Entries]:
    entries = load_json(path, "a list of predictions")
    if not isinstance(entries, list):
        raise InputError(
            f"{path}: this is no list of predictions; give [{{'query_id', 'segmentation', 'score'}}, ..]"
        )
    found: dict[int, Entries] = {}
    for place, entry in enumerate(entries):
        where = f"{path}: entry {place}"
        if not isinstance(entry, dict):
            raise InputError(
                f"{where}: it is a {type(entry).__name__}, not an object; give query_id and segmentation"
            )
        size = _size_of(where, sizes, entry.get("query_id"))
        try:
            _add_entry(found.setdefault(entry["query_id"], Entries()), entry, size)
        except ValueError as error:
            raise InputError(f"{where}: {error}; see docs/metrics.md") from error
    undecided = [number for number, answer in found.items() if answer.decision is None]
    if 0 < len(undecided) < len(found):
        problem = f"query {undecided[0]} has an answer without mask_type, others have one"
        raise InputError(f"{path}: {problem}; give it for every answer or for none")
    if not any(answer.instances for answer in found.values()):
        for answer in found.values():  # a system that gives one mask for a query has one detection
            answer.instances, answer.scores = [answer.mask(0, 0)], [1.0]
    return found


def _add_entry(answer: Entries, entry: Mapping[str, Any], size: tuple[int, int]) -> None:
    """Adds an entry of a `coco` file to the answer to its query. Raises ValueError for a bad value."""
    mask, score = masks.compressed(entry.get("segmentation"), *size), entry.get("score", 1.0)
    mask_type, probability = entry.get("mask_type"), entry.get("amodal_probability")
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) < 1e300:
        raise ValueError(f"score {score!r} is not a number")
    if mask_type not in ("modal", "amodal", None):
        raise ValueError(f"mask_type {mask_type!r} is neither modal nor amodal")
    if probability is not None and not (
        isinstance(probability, int | float) and 0 <= probability <= 1
    ):
        raise ValueError(f"amodal_probability {probability!r} is not in 0..1")
    if answer.mask_type is not None and mask_type not in (answer.mask_type, None):
        raise ValueError(f"query {entry['query_id']} is called modal and amodal")
    if entry.get("fused") and answer.fused is not None:
        raise ValueError(f"query {entry['query_id']} has a fused mask already")
    if entry.get("fused"):
        answer.fused, answer.score = mask, float(score) if "score" in entry else None
    else:
        answer.instances.append(mask)
        answer.scores.append(float(score))
    answer.mask_type = mask_type or answer.mask_type
    answer.probability = answer.probability if probability is None else float(probability)


def _read_folder(path: Path, sizes: Sizes, suffix: str, read: ReadMasks) -> dict[int, Entries]:
    """One file for each query, named after its id."""
    found: dict[int, Entries] = {}
    for file in find_images(path, (suffix,), "masks that are named after their query ids"):
        if not re.fullmatch(r"\d+", file.stem):
            raise InputError(f"{file}: its name is not a query id; name it <query id>{suffix}")
        number = int(file.stem)
        size = _size_of(str(file), sizes, number)
        if number in found:
            raise InputError(
                f"{file}: query {number} is answered by another file already; keep one"
            )
        try:
            drawn = read(file, size)
        except Exception as error:  # damaged images and arrays raise nearly anything
            raise InputError(
                f"{file}: no masks can be read from it ({error}); see docs/metrics.md"
            ) from error
        found[number] = Entries(
            instances=[masks.encode(mask) for mask in drawn], scores=[1.0] * len(drawn)
        )
    return found


def _check_size(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    if shape != size:
        raise ValueError(
            f"the mask is {shape[0]} x {shape[1]}, but its image is {size[0]} x {size[1]}"
        )


def _read_png(file: Path, size: tuple[int, int]) -> np.ndarray:
    with Image.open(file) as image:
        _check_size((image.height, image.width), size)  # before it is decoded: it may be huge
        return brightness(image)[None] > 0


def _read_logits(file: Path, size: tuple[int, int]) -> np.ndarray:
    logits = np.load(file, mmap_mode="r", allow_pickle=False)
    if logits.ndim not in (2, 3) or logits.dtype.kind not in "fiub":
        raise ValueError(f"{logits.dtype} {list(logits.shape)} are no logits [H W] or [n H W]")
    _check_size(logits.shape[-2:], size)
    return np.asarray(logits if logits.ndim == 3 else logits[None]) > 0


FOLDERS: dict[str, tuple[str, ReadMasks]] = {
    "png": (".png", _read_png),
    "logits": (".npy", _read_logits),
}
"""Suffix and reader of the files in a folder, by format."""
