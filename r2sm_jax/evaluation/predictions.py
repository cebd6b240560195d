"""Prediction files and folders of any system, read as the `Prediction`s that the scorer takes.

Formats, by name:

    coco    JSON list of COCO results with `query_id` in place of `image_id`: `{"query_id",
            "segmentation": RLE, "score", "mask_type"?, "amodal_probability"?, "fused"?,
            "occlude_rate"?}`. Several entries of a query are instances; the answer is their union,
            or the entry marked `fused`
    png     folder of `<query id>.png`; what is brighter than half of white is mask
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.images import find_images
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.validation import is_id, parse_flag
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.evaluation.scorer import EvalResults, QueryTruth, query_truths, score
from r2sm_jax.inference.prediction import Candidate, Prediction
from r2sm_jax.query import MaskType

FORMATS = ("coco", "png")

Sizes = Mapping[int, tuple[int, int]]
"""Height and width of the image of each query, by the query's id."""


@dataclass
class PredictedMasks:
    """The entries of one query. Masks stay RLEs, so that those of all queries fit in memory."""

    fused: RLE | None = None
    """The mask of all instances together; None: the union of `instances`."""
    instances: list[Candidate] = field(default_factory=list)
    mask_type: MaskType | None = None
    amodal_probability: float | None = None
    score: float | None = None
    """Predicted IoU of the fused mask."""

    @property
    def predicted_type(self) -> MaskType | None:
        """The named mask type, or else the more probable one; None without either."""
        if self.mask_type is not None:
            return self.mask_type
        if self.amodal_probability is None:
            return None
        return "amodal" if self.amodal_probability > 0.5 else "modal"

    def to_prediction(self, truth: QueryTruth) -> Prediction:
        """Makes the record that the scorer takes."""
        rle = self.fused
        if rle is None:
            instance_masks = [instance.mask for instance in self.instances]
            rle = masks.merge(instance_masks, truth.height, truth.width)
        mask = masks.decode(rle)
        return Prediction(
            query=truth.query.text,
            mask_type=self.predicted_type,
            amodal_probability=self.amodal_probability,
            score=self.score,
            modal=mask,
            amodal=mask,
            candidates=tuple(self.instances),
            has_both_masks=False,
        )


def score_predictions(path: Path, source: Source, form: str = "auto") -> EvalResults:
    """Scores predictions for all queries of a source. Raises InputError like `read_predictions`."""
    truths = list(query_truths(source))
    sizes = {truth.query.id: (truth.height, truth.width) for truth in truths}
    predicted = read_predictions(path, sizes, form)
    results = EvalResults(oddities=[f"{path}: {oddity}" for oddity in find_oddities(predicted)])
    for truth in truths:
        if not truth.is_scored:
            results.count_left_out(truth)
            continue
        entries = predicted.get(truth.query.id)
        prediction = None if entries is None else entries.to_prediction(truth)
        results.add(score(prediction, truth))
    return results


def find_oddities(predicted: Mapping[int, PredictedMasks]) -> Iterator[str]:
    """Yields a sentence for each thing that the author of predictions may not have meant."""
    candidates = [c for p in predicted.values() for c in p.instances]
    num_distinct = 0
    for p in predicted.values():
        num_distinct += len({(c.mask["counts"], c.score) for c in p.instances})
    if num_distinct < len(candidates):
        yield (
            f"{len(candidates) - num_distinct} of {len(candidates)} entries repeat another one of "
            "their query, mask and score; a merge of several processes may have doubled them"
        )

    rles = [c.mask for c in candidates] + [p.fused for p in predicted.values() if p.fused]
    areas = masks.areas(rles)
    if not any(areas):
        yield "all masks are empty"
    num_inverted = 0
    for rle, area in zip(rles, areas, strict=True):
        height, width = rle["size"]
        # Only large masks are looked at, since that takes longer.
        if area > height * width / 2:
            num_inverted += bool(masks.expand(rle)[[0, 0, -1, -1], [0, -1, 0, -1]].all())
    if num_inverted > max(1, len(rles) / 2):
        yield (
            f"{num_inverted} of {len(rles)} masks cover all corners of the image and most of it; "
            "they may be inverted"
        )


def read_predictions(path: Path, sizes: Sizes, form: str = "auto") -> dict[int, PredictedMasks]:
    """Reads the predictions for the queries of `sizes`; those without any are not in the result.

    Raises InputError for a query that does not exist or is predicted twice, a mask of the wrong
    size, an unreadable file; the message names the entry or the file.
    """
    if form == "auto":
        form = "png" if path.is_dir() else "coco"
    if form not in FORMATS:
        raise InputError(f"--format {form!r} is unknown; use {' or '.join(FORMATS)}")
    if not path.exists():
        raise InputError(f"{path}: there are no predictions here; check the path")
    if form == "coco" and path.is_dir():
        raise InputError(f"{path}: coco predictions are a file; choose another --format")
    if form == "png" and not path.is_dir():
        raise InputError(f"{path}: png predictions are a folder; choose another --format")
    predicted = _read_coco(path, sizes) if form == "coco" else _read_pngs(path, sizes)
    if not predicted:
        raise InputError(f"{path}: there are no predictions in the file; give one for each query")
    return predicted


def _find_size(where: str, sizes: Sizes, query_id: Any) -> tuple[int, int]:
    if not is_id(query_id):
        raise InputError(
            f"{where}: query_id {query_id!r} is not a whole number; give the id of a query"
        )
    if query_id not in sizes:
        raise InputError(
            f"{where}: the data have no query {query_id}; score the data that were predicted"
        )
    return sizes[query_id]


def _read_coco(path: Path, sizes: Sizes) -> dict[int, PredictedMasks]:
    entries = load_json(path, "a list of predictions")
    if not isinstance(entries, list):
        raise InputError(
            f"{path}: this is no list of predictions; give [{{'query_id', 'segmentation'}}, ..]"
        )
    predicted: dict[int, PredictedMasks] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: entry {number}"
        if not isinstance(entry, dict):
            raise InputError(f"{where}: it is not an object; give query_id and segmentation")
        if "query_id" not in entry and "image_id" in entry:
            raise InputError(
                f"{where}: it has image_id in place of query_id; give the id of the query that it "
                "answers"
            )
        size = _find_size(where, sizes, entry.get("query_id"))
        of_query = predicted.setdefault(entry["query_id"], PredictedMasks())
        try:
            _add_entry(of_query, entry, size)
        except ValueError as error:
            raise InputError(f"{where}: {error}; see docs/metrics.md") from error

    num_scored = sum(isinstance(entry, dict) and "score" in entry for entry in entries)
    if 0 < num_scored < len(entries):
        raise InputError(
            f"{path}: {len(entries) - num_scored} of {len(entries)} entries have no score; give it "
            "for every entry or for none"
        )
    undecided = [number for number, p in predicted.items() if p.predicted_type is None]
    if 0 < len(undecided) < len(predicted):
        raise InputError(
            f"{path}: query {undecided[0]} has an answer without mask_type, others have one; "
            "give it for every answer or for none"
        )
    # A system that gives one mask for a query has one detection.
    if not any(p.instances for p in predicted.values()):
        for p in predicted.values():
            assert p.fused is not None
            p.instances.append(Candidate(p.fused, 1.0))
    return predicted


def _add_entry(predicted: PredictedMasks, entry: Mapping[str, Any], size: tuple[int, int]) -> None:
    """Adds an entry of a `coco` file to those of its query. Raises ValueError for a bad value."""
    query_id = entry["query_id"]
    mask = masks.compressed(entry.get("segmentation"), *size)
    score = entry.get("score", 1.0)
    mask_type = entry.get("mask_type")
    probability = entry.get("amodal_probability")
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) < 1e300:
        raise ValueError(f"score {score!r} is not a number")
    if mask_type not in ("modal", "amodal", None):
        raise ValueError(f"mask_type {mask_type!r} is neither modal nor amodal")
    if predicted.mask_type is not None and mask_type not in (predicted.mask_type, None):
        raise ValueError(f"query {query_id} is called modal and amodal")
    if probability is not None:
        if not isinstance(probability, int | float) or not 0 <= probability <= 1:
            raise ValueError(f"amodal_probability {probability!r} is not in 0..1")
        predicted.amodal_probability = float(probability)
    if mask_type is not None:
        predicted.mask_type = mask_type

    is_fused = parse_flag(entry.get("fused"))
    if is_fused is None:
        raise ValueError(f"fused {entry['fused']!r} is neither true nor false")
    if not is_fused:
        rate = entry.get("occlude_rate")
        if rate is not None and not (isinstance(rate, int | float) and 0 <= rate <= 1):
            raise ValueError(f"occlude_rate {rate!r} is not in 0..1")
        predicted.instances.append(Candidate(mask, float(score), occlude_rate=rate))
        return
    if predicted.fused is not None:
        raise ValueError(f"query {query_id} has a fused mask already")
    predicted.fused = mask
    if "score" in entry:
        predicted.score = float(score)


def _read_pngs(path: Path, sizes: Sizes) -> dict[int, PredictedMasks]:
    """Reads one file for each query, named after its id."""
    predicted: dict[int, PredictedMasks] = {}
    for file in find_images(path, (".png",), "masks that are named after their query ids"):
        if not re.fullmatch(r"\d+", file.stem):
            raise InputError(f"{file}: its name is not a query id; name it <query id>.png")
        query_id = int(file.stem)
        size = _find_size(str(file), sizes, query_id)
        if query_id in predicted:
            raise InputError(
                f"{file}: query {query_id} is answered by another file already; keep one"
            )
        rle = masks.encode(masks.read_file(file, size))
        predicted[query_id] = PredictedMasks(instances=[Candidate(rle, 1.0)])
    return predicted
