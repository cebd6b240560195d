"""Average precision and recall of instance masks, with each query as its own unit (R2SM, section 6.3).

It is COCO's evaluation (pycocotools/cocoeval.py) with `image_id := query_id` and one category: detections of all
queries are ranked by their scores together, but are matched within their query.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from pycocotools.cocoeval import COCOeval
from scipy.optimize import linear_sum_assignment

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE

MOST = 100
"""Greatest number of detections of a query that count."""


class Unit(NamedTuple):
    """One query: its detections, best first, and their overlaps with its instances."""

    scores: Float[np.ndarray, " d"]
    areas: Float[np.ndarray, " d"]
    truth_areas: Float[np.ndarray, " g"]
    crowd: Bool[np.ndarray, " g"]
    iou: Float[np.ndarray, "d g"]


def unit(
    detections: Sequence[RLE],
    scores: Sequence[float],
    truth: Sequence[RLE],
    crowd: Sequence[RLE] = (),
) -> Unit:
    """One query: compressed RLEs of its detections with scores, of the instances that it means, and of regions to
    ignore (`crowd`). An empty mask detects nothing."""
    values = np.asarray(scores, float)
    drawn = np.array(masks.areas(list(detections)), float) > 0
    order = [i for i in np.argsort(-values, kind="stable") if drawn[i]][:MOST]
    found, wanted = [detections[i] for i in order], [*truth, *crowd]
    flags = [False] * len(truth) + [True] * len(crowd)
    return Unit(
        values[order],
        np.array(masks.areas(found), float),
        np.array(masks.areas(wanted), float),
        np.array(flags, bool),
        masks.ious(found, wanted, flags),
    )


def instance_figures(by_id: Mapping[int, Unit]) -> dict[str, float | None]:
    """`ap`, `ap50`, `ap75`, `ap_small`, `ap_medium`, `ap_large`, `ar` (at 100 detections), `ar1`, `ar10` and
    `detections`, the mean number of them a query, of queries by their ids. None where no instance counts."""
    units = [by_id[number] for number in sorted(by_id)]
    found = _evaluate(units)
    precision, recall = found["precision"][:, :, 0], found["recall"][:, 0]  # [t r a m], [t a m]
    return {
        "ap": _mean(precision[:, :, 0, 2]),
        "ap50": _mean(precision[0, :, 0, 2]),
        "ap75": _mean(precision[5, :, 0, 2]),
        "ap_small": _mean(precision[:, :, 1, 2]),
        "ap_medium": _mean(precision[:, :, 2, 2]),
        "ap_large": _mean(precision[:, :, 3, 2]),
        "ar": _mean(recall[:, 0, 2]),
        "ar1": _mean(recall[:, 0, 0]),
        "ar10": _mean(recall[:, 0, 1]),
        "detections": float(np.mean([len(one.scores) for one in units])) if units else None,
    }


def _evaluate(units: Sequence[Unit]) -> dict[str, Any]:
    """What `COCOeval` accumulates: precision and recall, -1 where no instance counts."""
    evaluation: Any = COCOeval()
    places = list(range(len(units)))
    evaluation.params.imgIds, evaluation.params.catIds = places, [1]
    evaluation._paramsEval = evaluation.params
    for place, unit in enumerate(units):  # ids start at 1, since it takes 0 for no match
        evaluation._dts[place, 1] = [
            {"id": i, "score": score, "area": area}
            for i, (score, area) in enumerate(
                zip(unit.scores.tolist(), unit.areas.tolist(), strict=True), 1
            )
        ]
        evaluation._gts[place, 1] = [
            {"id": i, "area": area, "iscrowd": crowd, "ignore": crowd}
            for i, (area, crowd) in enumerate(
                zip(unit.truth_areas.tolist(), unit.crowd.tolist(), strict=True), 1
            )
        ]
        evaluation.ious[place, 1] = unit.iou
    areas = evaluation.params.areaRng
    evaluation.evalImgs = [
        evaluation.evaluateImg(place, 1, area, MOST) for area in areas for place in places
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.accumulate()
    return evaluation.eval


def _mean(values: Float[np.ndarray, "*n"]) -> float | None:
    known = values[values > -1]
    return float(known.mean()) if known.size else None


def muse(units: Sequence[Unit]) -> dict[str, float | None]:
    """PixelLM's instance-aware gIoU and cIoU (its `ar_validate`, for MUSE).

    Detections and instances of a query are paired for the greatest sum of IoUs; the rest is paired with empty masks. A
    query's IoU is the mean over its pairs, and 1 without pairs. Ignored regions are no instances; a detection that has
    no instance and lies in one of them by more than half is left out.
    """
    means, intersections, unions = [], 0.0, 0.0
    for unit in units:
        every, truth_areas = unit.iou[:, ~unit.crowd], unit.truth_areas[~unit.crowd]
        rows, columns = linear_sum_assignment(-every)
        counts = unit.iou[:, unit.crowd].max(1, initial=0) <= 0.5
        counts[rows[every[rows, columns] > 0]] = True
        overlaps, areas = every[counts], unit.areas[counts]
        rows, columns = linear_sum_assignment(-overlaps)
        iou, sizes = overlaps[rows, columns], areas[rows] + truth_areas[columns]
        pairs = max(overlaps.shape)
        means.append(iou.sum() / pairs if pairs else 1.0)
        shared = np.round(iou * sizes / (1 + iou)).sum()
        intersections += shared
        unions += areas.sum() + truth_areas.sum() - shared
    return {
        "giou": float(np.mean(means)) if means else None,
        "ciou": intersections / unions if unions else None,
    }
