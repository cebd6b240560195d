"""Average precision and recall of instance masks, with each query as its own unit (R2SM, section 6.3).

The figures of COCO's evaluation (pycocotools/cocoeval.py) with `image_id := query_id`, without categories: detections
of all queries are ranked by their scores together, but are matched within their query. Every step equals the
reference's, ties included; only the loops run over all queries of one shape at once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import linear_sum_assignment

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MOST = (1, 10, 100)
"""Greatest number of detections of a query, for the three recalls; precision uses the last."""
AREAS = {"all": (0, 1e10), "small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}
"""Areas in pixels of the mask that was asked for; both ends belong to the range, as in COCO."""
CHUNK = 4096


class Unit(NamedTuple):
    """One query: its detections, best first, and their overlaps with its instances."""

    scores: Float[np.ndarray, " d"]
    areas: Float[np.ndarray, " d"]
    truth_areas: Float[np.ndarray, " g"]
    crowd: Bool[np.ndarray, " g"]
    iou: Float[np.ndarray, "d g"]


class Matched(NamedTuple):
    """The matches of the detections of some queries, for every area range (a) and threshold (t)."""

    hit: Bool[np.ndarray, "n a t d"]
    ignored: Bool[np.ndarray, "n a t d"]
    wanted: Float[np.ndarray, "n a"]
    """Number of instances in the area range."""


@dataclass
class InstanceScores:
    """The queries whose instances are scored, by id."""

    units: dict[int, Unit] = field(default_factory=dict)

    def add(
        self,
        query_id: int,
        detections: Sequence[RLE],
        scores: Sequence[float],
        truth: Sequence[RLE],
        crowd: Sequence[RLE] = (),
    ) -> None:
        """One query: compressed RLEs of its detections with scores, of the instances that it means, and of regions to
        ignore (`crowd`). Raises ValueError for a query that was added before."""
        if query_id in self.units:
            raise ValueError(f"query {query_id} was added before")
        values = np.asarray(scores, float)
        order = np.argsort(-values, kind="stable")[: MOST[-1]]
        found, wanted = [detections[i] for i in order], [*truth, *crowd]
        flags = [False] * len(truth) + [True] * len(crowd)
        self.units[query_id] = Unit(
            values[order],
            np.array(masks.areas(found), float),
            np.array(masks.areas(wanted), float),
            np.array(flags, bool),
            masks.ious(found, wanted, flags),
        )

    def figures(self, queries: Collection[int] | None = None) -> dict[str, float | None]:
        """`ap`, `ap50`, `ap75`, `ap_small`, `ap_medium`, `ap_large`, `ar` (at 100 detections), `ar1`, `ar10` and
        `detections`, the mean number of them a query, of all queries or of some. None where no instance counts."""
        units = [self.units[number] for number in sorted(self.units if queries is None else queries)]
        matched = _match_all(units)
        precision, recall = _accumulate(units, matched, MOST[-1])
        at = {f"ar{most}": _mean(_accumulate(units, matched, most)[1][0]) for most in MOST[:-1]}
        return {
            "ap": _mean(precision[0]),
            "ap50": _mean(precision[0, 0]),
            "ap75": _mean(precision[0, 5]),
            **{f"ap_{name}": _mean(precision[a]) for a, name in enumerate(AREAS) if a},
            "ar": _mean(recall[0]),
            **at,
            "detections": float(np.mean([len(unit.scores) for unit in units])) if units else None,
        }


def muse(units: Sequence[Unit]) -> dict[str, float | None]:
    """PixelLM's instance-aware gIoU and cIoU (its `ar_validate`, for MUSE).

    Detections and instances of a query are paired for the greatest sum of IoUs; the rest is paired with empty masks. A
    query's IoU is the mean over its pairs, and 1 without pairs.
    """
    means, intersections, unions = [], 0.0, 0.0
    for unit in units:
        rows, columns = linear_sum_assignment(-unit.iou)
        iou, sizes = unit.iou[rows, columns], unit.areas[rows] + unit.truth_areas[columns]
        pairs = max(unit.iou.shape)
        means.append(iou.sum() / pairs if pairs else 1.0)
        shared = np.round(iou * sizes / (1 + iou)).sum()
        intersections += shared
        unions += unit.areas.sum() + unit.truth_areas.sum() - shared
    return {"giou": float(np.mean(means)) if means else None, "ciou": intersections / unions if unions else None}


def _mean(values: Float[np.ndarray, "*n"]) -> float | None:
    known = values[values > -1]
    return float(known.mean()) if known.size else None


def _match_all(units: Sequence[Unit]) -> list[Matched]:
    """The matches of every query, in order; queries of one shape are matched at once."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for place, unit in enumerate(units):
        by_shape.setdefault(unit.iou.shape, []).append(place)
    matched: dict[int, Matched] = {}
    for places in by_shape.values():
        for start in range(0, len(places), CHUNK):
            part = places[start : start + CHUNK]
            found = _match([units[place] for place in part])
            matched |= {place: Matched(*(x[n] for x in found)) for n, place in enumerate(part)}
    return [matched[place] for place in range(len(units))]


def _match(units: Sequence[Unit]) -> Matched:
    """Greedy matching: each detection, best first, takes the free instance of the greatest overlap, of equal ones the
    last; an ignored instance only where no other overlaps enough."""
    areas, wanted_areas, crowd, iou = (
        np.stack([getattr(unit, name) for unit in units]) for name in ("areas", "truth_areas", "crowd", "iou")
    )
    count, detections, instances = iou.shape
    low, high = np.array(list(AREAS.values())).T[:, None, :, None]  # [1 a 1]
    ignore = crowd[:, None] | (wanted_areas[:, None] < low) | (wanted_areas[:, None] > high)  # [n a g]
    outside = (areas[:, None] < low) | (areas[:, None] > high)  # [n a d]
    least = np.minimum(THRESHOLDS, 1 - 1e-10)[:, None]
    shape = (count, len(AREAS), len(THRESHOLDS))
    free = np.ones((*shape, instances), bool)
    hit, ignored = np.zeros((*shape, detections), bool), np.zeros((*shape, detections), bool)
    if not instances:
        return Matched(hit, ignored | outside[:, :, None], np.zeros(shape[:2]))
    for d in range(detections):
        overlap = np.broadcast_to(iou[:, None, None, d], free.shape)
        possible = (free | crowd[:, None, None]) & (overlap >= least)
        proper = possible & ~ignore[:, :, None]
        candidates = np.where(proper.any(-1, keepdims=True), proper, possible)
        ranked = np.where(candidates, overlap, -1)[..., ::-1]  # the last of equal ones comes first
        taken = candidates & (np.arange(instances) == instances - 1 - ranked.argmax(-1)[..., None])
        free &= ~taken
        hit[..., d] = found = taken.any(-1)
        ignored[..., d] = np.where(found, (taken & ignore[:, :, None]).any(-1), outside[:, :, None, d])
    return Matched(hit, ignored, (~ignore).sum(-1).astype(float))


def _accumulate(
    units: Sequence[Unit], matched: Sequence[Matched], most: int
) -> tuple[Float[np.ndarray, "a t 101"], Float[np.ndarray, "a t"]]:
    """Precision at `RECALLS` and greatest recall, for every area range and threshold; -1 where nothing is wanted."""
    precision = np.full((len(AREAS), len(THRESHOLDS), len(RECALLS)), -1.0)
    recall = np.full(precision.shape[:2], -1.0)
    if not units:
        return precision, recall
    order = np.argsort(-np.concatenate([unit.scores[:most] for unit in units]), kind="stable")
    hit = np.concatenate([m.hit[..., :most] for m in matched], axis=-1)[..., order]
    ignored = np.concatenate([m.ignored[..., :most] for m in matched], axis=-1)[..., order]
    right = np.cumsum(hit & ~ignored, axis=-1, dtype=float)
    wrong = np.cumsum(~hit & ~ignored, axis=-1, dtype=float)
    wanted = np.sum([m.wanted for m in matched], axis=0)
    for a, t in product(np.flatnonzero(wanted), range(len(THRESHOLDS))):
        recalls = right[a, t] / wanted[a]
        precisions = right[a, t] / (wrong[a, t] + right[a, t] + np.spacing(1))
        # The best precision at this recall or a greater one.
        precisions = np.maximum.accumulate(precisions[::-1])[::-1]
        precision[a, t] = np.append(precisions, 0.0)[np.searchsorted(recalls, RECALLS)]
        recall[a, t] = recalls[-1] if len(recalls) else 0
    return precision, recall
