"""Average precision and recall of instance masks, with each query as its own unit (R2SM, section
6.3).

It is COCO's evaluation (pycocotools/cocoeval.py) with `image_id := query_id` and one category:
detections of all queries are ranked by their scores together, but are matched within their query.
For a detector (detectors.py) a class of an image stands in the place of a query, and figures are
means over classes.
"""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scipy.optimize import linear_sum_assignment

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE
from r2sm_jax.evaluation.decisions import matthews_correlation
from r2sm_jax.evaluation.iou import Scores

MAX_DETECTIONS = 100
"""Detections of a query that count."""
OCCLUDED_FROM = (0.15, 0.25, 0.40)
"""Hidden shares from which VRSP and AISFormer count an object as occluded. Their tables call them
APs, APm and APl."""

F1_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""IoUs from which a detection counts as right in cgF1."""


class QueryDetections(NamedTuple):
    """The detections of one query, best first, and their overlaps with its true instances."""

    scores: Float[np.ndarray, " d"]
    is_present: Bool[np.ndarray, " d"]
    """Whether the system answers with the detection. Others count for average precision only."""
    areas: Float[np.ndarray, " d"]
    truth_areas: Float[np.ndarray, " g"]
    is_crowd: Bool[np.ndarray, " g"]
    """Regions to ignore, among the true instances."""
    iou: Float[np.ndarray, "d g"]
    occlude_rates: Float[np.ndarray, " d"]
    """Share of each detection that is hidden; NaN where the system does not tell."""
    true_occlude_rates: Float[np.ndarray, " g"]
    """NaN where the complete shape is not annotated, and for regions to ignore."""
    category: int = 1


def rank_detections(
    detections: Sequence[RLE],
    scores: Sequence[float],
    is_present: Sequence[bool],
    truth: Sequence[RLE],
    crowd: Sequence[RLE] = (),
    *,
    occlude_rates: Sequence[float | None] | None = None,
    true_occlude_rates: Sequence[float | None] | None = None,
) -> QueryDetections:
    """Ranks detections by score and computes their IoUs with instances and regions to ignore.

    All masks are compressed RLEs. An empty mask detects nothing, and a true one is nothing to
    detect. Rates are None where they are not known.
    """
    if occlude_rates is None:
        occlude_rates = [None] * len(detections)
    if true_occlude_rates is None:
        true_occlude_rates = [None] * len(truth)
    shown = np.flatnonzero(masks.areas(list(truth))).tolist()
    truth = [truth[i] for i in shown]
    true_occlude_rates = [true_occlude_rates[i] for i in shown]
    all_scores = np.asarray(scores, float)
    has_pixels = np.array(masks.areas(list(detections)), float) > 0
    # A stable sort, as in COCOeval: equal scores keep their order.
    order = [i for i in np.argsort(-all_scores, kind="stable") if has_pixels[i]]
    order = order[:MAX_DETECTIONS]
    ranked = [detections[i] for i in order]
    truth_and_crowd = [*truth, *crowd]
    is_crowd = [False] * len(truth) + [True] * len(crowd)
    return QueryDetections(
        scores=all_scores[order],
        is_present=np.array(is_present, bool)[order],
        areas=np.array(masks.areas(ranked), float),
        truth_areas=np.array(masks.areas(truth_and_crowd), float),
        is_crowd=np.array(is_crowd, bool),
        iou=masks.ious(ranked, truth_and_crowd, is_crowd),
        # numpy reads None as NaN.
        occlude_rates=np.array(occlude_rates, float)[order],
        true_occlude_rates=np.array([*true_occlude_rates, *[None] * len(crowd)], float),
    )


def instance_figures(queries: Sequence[QueryDetections]) -> dict[str, float | None]:
    """Computes AP and AR over queries, which must be in the order of their ids.

    Returns `ap`, `ap50`, `ap75`, `ap_small`, `ap_medium`, `ap_large`, `ar` (at 100 detections),
    `ar1`, `ar10`, and `detections`, the mean number of them a query. None where no instance counts.
    """
    accumulated = _accumulate(queries)
    # Axes: t IoU thresholds, r recalls, k categories, a area ranges (all, small, medium, large), m
    # 1, 10 or 100 detections.
    precision = accumulated["precision"]  # [t r k a m]
    recall = accumulated["recall"]  # [t k a m]
    num_detections = [len(query.scores) for query in queries]
    return {
        "ap": _mean_of_defined(precision[..., 0, 2]),
        "ap50": _mean_of_defined(precision[0, ..., 0, 2]),
        "ap75": _mean_of_defined(precision[5, ..., 0, 2]),
        "ap_small": _mean_of_defined(precision[..., 1, 2]),
        "ap_medium": _mean_of_defined(precision[..., 2, 2]),
        "ap_large": _mean_of_defined(precision[..., 3, 2]),
        "ar": _mean_of_defined(recall[..., 0, 2]),
        "ar1": _mean_of_defined(recall[..., 0, 0]),
        "ar10": _mean_of_defined(recall[..., 0, 1]),
        "detections": float(np.mean(num_detections)) if num_detections else None,
    }


def occlusion_figures(queries: Sequence[QueryDetections]) -> dict[str, float | None]:
    """AP and AR of what is hidden by at least 15, 25 and 40 %, over queries in the order of their
    ids.

    As in VRSP and AISFormer (detectron2/data/amodal_datasets/pycocotools): COCO's ranges of area
    are used for the visible share, of the truth as of the detections; 0 to 0.85 is what is hidden
    by 15 % or more. So a detection without a match counts as wrong only if its own `occlude_rate`
    is that high. Objects whose complete shape is not annotated are ignored. AP is None for a system
    that does not tell how much of its detections is hidden.
    """
    by_share = []
    for query in queries:
        true_shares = np.nan_to_num(1 - query.true_occlude_rates, nan=np.inf)
        by_share.append(query._replace(areas=1 - query.occlude_rates, truth_areas=true_shares))
    is_told = not any(np.isnan(query.areas).any() for query in by_share)

    evaluated = _accumulate(by_share, [[0, 1 - rate] for rate in OCCLUDED_FROM])
    figures = {}
    for i, rate in enumerate(OCCLUDED_FROM):
        name = f"occluded_{round(100 * rate)}"
        figures[f"ap_{name}"] = (
            _mean_of_defined(evaluated["precision"][..., i, 2]) if is_told else None
        )
        figures[f"ar_{name}"] = _mean_of_defined(evaluated["recall"][..., i, 2])
    return figures


class _Evaluation(COCOeval):
    """COCO's evaluation of queries in the place of images, whose IoUs are computed already."""

    def __init__(self, queries: Sequence[QueryDetections]):
        truth = _to_coco(queries, "truth_areas", "iscrowd", "is_crowd")
        detections = _to_coco(queries, "areas", "score", "scores")
        # With boxes it does not ask for masks.
        super().__init__(truth, detections, "bbox")
        self.queries = queries

    def computeIoU(self, imgId: Any, catId: Any) -> Any:
        """Returns the IoUs `[d g]` of one query."""
        query = self.queries[imgId]
        return query.iou if catId == query.category else []


def _to_coco(queries: Sequence[QueryDetections], areas: str, name: str, values: str) -> Any:
    """Makes an annotation file of the objects of all queries, with their areas and a field `name`.

    `areas` and `values`: the fields of a query that hold both.
    """
    content: Any = COCO()
    annotations = []
    for image_id, query in enumerate(queries):
        both = getattr(query, areas).tolist(), getattr(query, values).tolist()
        for area, value in zip(*both, strict=True):
            # Ids start at 1, since COCOeval takes 0 for no match.
            one = {"id": len(annotations) + 1, "image_id": image_id, "category_id": query.category}
            annotations.append(one | {"area": area, name: value})
    content.dataset = {
        "images": [{"id": image_id} for image_id in range(len(queries))],
        "annotations": annotations,
        "categories": [{"id": number} for number in sorted({q.category for q in queries})],
    }
    content.createIndex()
    return content


def _accumulate(
    queries: Sequence[QueryDetections], area_ranges: list[list[float]] | None = None
) -> dict[str, Any]:
    """Runs COCO's evaluation. Undefined values are -1.

    `area_ranges` are COCO's unless others are given; both ends belong to a range.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation: Any = _Evaluation(queries)
        if area_ranges is not None:
            evaluation.params.areaRng = area_ranges
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation.eval


def _mean_of_defined(values: Float[np.ndarray, "*n"]) -> float | None:
    """Mean of the values that are defined."""
    defined = values[values > -1]
    return float(defined.mean()) if defined.size else None


def drop_ignored(
    query: QueryDetections,
) -> tuple[Float[np.ndarray, "d g"], Float[np.ndarray, " d"], Float[np.ndarray, " g"]]:
    """Returns the IoUs, areas and true areas of the detections that are present.

    Ignored regions are no instances; a detection that has no instance and lies in one of them by
    more than half is left out.
    """
    all_iou = query.iou[query.is_present]
    iou = all_iou[:, ~query.is_crowd]
    in_crowd = all_iou[:, query.is_crowd].max(1, initial=0) > 0.5
    rows, columns = linear_sum_assignment(-iou)
    in_crowd[rows[iou[rows, columns] > 0]] = False
    areas = query.areas[query.is_present][~in_crowd]
    return iou[~in_crowd], areas, query.truth_areas[~query.is_crowd]


def positive_micro_f1(queries: Sequence[QueryDetections]) -> float | None:
    """F1 of the instances of queries that have a target, as the mean over the IoU thresholds.

    Detections and instances are paired for the greatest sum of IoUs. As in SAM 3's
    sam3/eval/cgf1_eval.py, queries without a target count in the correlation only.
    """
    num_truths = 0
    num_detections = 0
    num_right = np.zeros(len(F1_THRESHOLDS), np.int64)
    for query in queries:
        iou, _, truth_areas = drop_ignored(query)
        if not len(truth_areas):
            continue
        num_truths += len(truth_areas)
        num_detections += len(iou)
        paired_iou = iou[linear_sum_assignment(-iou)]
        # An IoU at the threshold is right; 1e-9 undoes the rounding of linspace.
        num_right += (paired_iou[:, None] >= F1_THRESHOLDS - 1e-9).sum(0)
    if not num_truths:
        return None
    return float(np.mean(2 * num_right / (num_truths + num_detections)))


def presence_correlation(queries: Sequence[QueryDetections]) -> float | None:
    """SAM 3's IL_MCC: the Matthews correlation of "there is a target" over queries."""
    counts = np.zeros(4, np.int64)
    for query in queries:
        iou, _, truth_areas = drop_ignored(query)
        counts[2 * (len(truth_areas) > 0) + (len(iou) > 0)] += 1
    tn, fp, fn, tp = counts.tolist()
    return matthews_correlation(tp, fp, fn, tn)


def cgf1_figures(queries: Sequence[QueryDetections], type_mcc: float | None) -> Scores:
    """cgF1 = F1 of the instances times the correlation of presence, and its typed form with the
    correlation of the mask type in place of presence. None where a factor is undefined."""
    f1 = positive_micro_f1(queries)
    presence_mcc = presence_correlation(queries)
    return {
        "positive_micro_f1": f1,
        "presence_mcc": presence_mcc,
        "cgf1": None if f1 is None or presence_mcc is None else f1 * presence_mcc,
        "typed_cgf1": None if f1 is None or type_mcc is None else f1 * type_mcc,
    }
