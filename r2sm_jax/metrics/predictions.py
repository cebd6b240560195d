"""Anyone's masks: prediction files and folders -> what was answered to each query.

Formats, by name:

    coco    JSON list of COCO results with `query_id` in place of `image_id`: `{"query_id", "segmentation": RLE,
            "score", "mask_type"?, "amodal_probability"?, "fused"?}`. Several entries of a query are instances; the
            answer is their union, or the entry marked `fused`
    png     folder of `<query id>.png`; what is not 0 is mask
    logits  folder of `<query id>.npy`, float `[H W]` or `[n H W]`; above 0 is mask, several are instances
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.records import is_id
from r2sm_jax.data.samples import Source
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.metrics import scoring
from r2sm_jax.metrics.boundary import boundary_overlap_rles
from r2sm_jax.metrics.instances import InstanceScores
from r2sm_jax.metrics.scoring import Drawing, QueryResult, Scored, Truth
from r2sm_jax.metrics.truth import QueryTruth, truths
from r2sm_jax.query import MaskType, keyword_mask_type

Sizes = Mapping[int, tuple[int, int]]
"""Height and width of the image of each query."""


@dataclass
class Answer:
    """What some system says to one query."""

    fused: RLE | None = None
    instances: list[RLE] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    mask_type: MaskType | None = None
    probability: float | None = None

    def mask(self, height: int, width: int) -> RLE:
        """The one mask of the answer."""
        return self.fused if self.fused is not None else masks.merge(self.instances, height, width)


def read_predictions(path: Path, sizes: Sizes, form: str = "auto") -> dict[int, Answer]:
    """Reads predictions for the queries of `sizes`; those without any are not in the result.

    Raises:
        InputError: a query that does not exist or is answered twice, a mask of the wrong size, an unreadable file;
            the message names the entry or the file.
    """
    if form == "auto":
        form = "coco" if not path.is_dir() else "png" if any(path.glob("*.png")) else "logits"
    if form not in FORMATS:
        raise InputError(f"--format {form!r} is unknown; use {', '.join(FORMATS)}")
    if not path.exists():
        raise InputError(f"{path}: there are no predictions here; check the path")
    if (form == "coco") == path.is_dir():
        what = "a file, but this is a folder" if form == "coco" else "a folder, but this is a file"
        raise InputError(f"{path}: predictions of the format {form} are {what}; choose another --format")
    return FORMATS[form](path, sizes)


def _size_of(where: str, sizes: Sizes, number: Any) -> tuple[int, int]:
    if not is_id(number):
        raise InputError(f"{where}: query_id {number!r} is not a whole number; give the id of a query of the data")
    if number not in sizes:
        raise InputError(f"{where}: the data have no query {number}; score the data and split that were predicted")
    return sizes[number]


def _read_coco(path: Path, sizes: Sizes) -> dict[int, Answer]:
    entries = load_json(path, "a list of predictions")
    if not isinstance(entries, list):
        raise InputError(f"{path}: this is no list of predictions; give [{{'query_id', 'segmentation', 'score'}}, ..]")
    found: dict[int, Answer] = {}
    for place, entry in enumerate(entries):
        where = f"{path}: entry {place}"
        if not isinstance(entry, dict):
            raise InputError(f"{where}: it is a {type(entry).__name__}, not an object; give query_id and segmentation")
        size = _size_of(where, sizes, entry.get("query_id"))
        answer = found.setdefault(entry["query_id"], Answer())
        try:
            mask = masks.compressed(entry.get("segmentation"), *size)
        except ValueError as error:
            raise InputError(f"{where}: its mask cannot be used ({error}); give an RLE of the image's size") from error
        score = entry.get("score", 1.0)
        if isinstance(score, bool) or not isinstance(score, int | float) or not np.isfinite(score):
            raise InputError(f"{where}: score {score!r} is not a number; give one")
        if entry.get("fused"):
            if answer.fused is not None:
                raise InputError(f"{where}: query {entry['query_id']} has a fused mask already; give one")
            answer.fused = mask
        else:
            answer.instances.append(mask)
            answer.scores.append(float(score))
        _take_decision(where, answer, entry)
    return found


def _take_decision(where: str, answer: Answer, entry: Mapping[str, Any]) -> None:
    said, probability = entry.get("mask_type"), entry.get("amodal_probability")
    if said not in ("modal", "amodal", None):
        raise InputError(f"{where}: mask_type {said!r} is unknown; give modal or amodal, or leave it out")
    if probability is not None and not (isinstance(probability, int | float) and 0 <= probability <= 1):
        raise InputError(f"{where}: amodal_probability {probability!r} is not in 0..1; give a probability")
    if answer.mask_type is not None and said not in (answer.mask_type, None):
        raise InputError(f"{where}: query {entry['query_id']} is called modal and amodal; give one mask_type a query")
    answer.mask_type = said or answer.mask_type
    answer.probability = answer.probability if probability is None else float(probability)


def _files(path: Path, suffix: str, sizes: Sizes) -> Iterator[tuple[Path, int, tuple[int, int]]]:
    files = sorted(path.glob(f"*{suffix}"))
    if not files:
        raise InputError(f"{path}: there is no {suffix} file in this folder; name them after their query ids")
    for file in files:
        if not re.fullmatch(r"\d+", file.stem):
            raise InputError(f"{file}: its name is not a query id; name it <query id>{suffix}")
        yield file, int(file.stem), _size_of(str(file), sizes, int(file.stem))


def _add(found: dict[int, Answer], file: Path, number: int, drawn: np.ndarray, size: tuple[int, int]) -> None:
    """Takes boolean masks [n H W] as the instances of a query."""
    if drawn.shape[1:] != size:
        raise InputError(
            f"{file}: the mask is {drawn.shape[1]} x {drawn.shape[2]}, but the image of query {number} is "
            f"{size[0]} x {size[1]}; write it at the image's size"
        )
    if number in found:
        raise InputError(f"{file}: query {number} is answered by another file already; keep one")
    found[number] = Answer(instances=[masks.encode(mask) for mask in drawn], scores=[1.0] * len(drawn))


def _read_png(path: Path, sizes: Sizes) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    for file, number, size in _files(path, ".png", sizes):
        try:
            with Image.open(file) as image:
                if image.size != size[::-1]:
                    drawn = np.zeros((1, image.height, image.width), bool)
                else:
                    values = np.asarray(image.convert("L") if image.mode in ("RGB", "LA", "RGBA") else image)
                    drawn = values[None] > 0
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError(f"{file}: this is not a PNG that can be read; write it again") from error
        _add(found, file, number, drawn, size)
    return found


def _read_logits(path: Path, sizes: Sizes) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    for file, number, size in _files(path, ".npy", sizes):
        try:
            logits = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{file}: this is not a plain .npy array; write it with numpy.save") from error
        if logits.ndim not in (2, 3) or logits.dtype.kind not in "fiub":
            raise InputError(f"{file}: {logits.dtype} {list(logits.shape)} are no logits; give float [H W] or [n H W]")
        drawn = logits if logits.ndim == 3 else logits[None]
        if drawn.shape[1:] == size:
            drawn = np.asarray(drawn) > 0
        _add(found, file, number, drawn, size)
    return found


FORMATS: dict[str, Callable[[Path, Sizes], dict[int, Answer]]] = {
    "coco": _read_coco, "png": _read_png, "logits": _read_logits,
}  # fmt: skip


def score_predictions(path: Path, source: Source, form: str = "auto") -> Scored:
    """Scores predictions for all queries of a source. Raises InputError like `read_predictions`."""
    wanted = list(truths(source))
    answers = read_predictions(path, {t.query.id: (t.height, t.width) for t in wanted}, form)
    scored = Scored()
    for _, of_image in groupby(wanted, key=attrgetter("index")):
        _score_image(list(of_image), answers, scored)
    return scored


def _score_image(wanted: Sequence[QueryTruth], answers: Mapping[int, Answer], scored: Scored) -> None:
    """The queries about one image."""
    ignore = None if wanted[0].ignored is None else masks.expand(wanted[0].ignored)
    for truth in wanted:
        query, answer = truth.query, answers.get(truth.query.id)
        if answer is None:
            scored.missing.append(query.id)
            answer = Answer()
        _add_instances(truth, answer, scored.instances)
        drawn = answer.mask(truth.height, truth.width)
        scored.add(
            _result(truth, answer, drawn, ignore), Drawing(truth.index, drawn, drawn), query.text,
            (truth.modal, truth.amodal),
        )  # fmt: skip


def _add_instances(truth: QueryTruth, answer: Answer, instances: InstanceScores) -> None:
    meant = [i.modal if truth.query.mask_type == "modal" or i.amodal is None else i.amodal for i in truth.instances]
    crowd = [] if truth.ignored is None else [truth.ignored]
    # A system that gives one mask alone has one detection.
    found = answer.instances or ([answer.fused] if answer.fused is not None else [])
    scores = answer.scores if answer.instances else [1.0] * len(found)
    instances.add(truth.query.id, found, scores, [*meant, *crowd], [False] * len(meant) + [True] * len(crowd))


def _result(truth: QueryTruth, answer: Answer, drawn: RLE, ignore: np.ndarray | None) -> QueryResult:
    query, modal, amodal = truth.query, truth.modal, truth.amodal
    if ignore is not None:
        pair = masks.expand(modal), masks.expand(amodal)
        chosen = scoring.draw_counts(masks.expand(drawn), pair, ignore)
        counts = scoring.truth_counts(pair, ignore, truth.known)
    else:
        chosen = scoring.rle_counts(drawn, modal, amodal)
        sizes = masks.areas([modal, amodal])
        counts = Truth(sizes[0], sizes[1] if truth.known else None)
    said = answer.mask_type
    if said is None and answer.probability is not None:
        said = "amodal" if answer.probability > 0.5 else "modal"
    wanted = amodal if query.mask_type == "amodal" else modal
    return QueryResult(
        query.id, truth.image_id, query.mask_type, counts, chosen, said, answer.probability,
        boundary=boundary_overlap_rles(drawn, wanted, ignore),
        keyword=keyword_mask_type(query.text), kind=query.kind,
    )  # fmt: skip
