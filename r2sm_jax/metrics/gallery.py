"""Queries drawn with their truth and their answer: the best, the middling and the worst of a split, or some of them."""

from collections.abc import Iterable, Sequence

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Source
from r2sm_jax.data.sheet import GROUND, Panel, prediction_row
from r2sm_jax.errors import InputError
from r2sm_jax.metrics.scoring import QueryResult, Scored
from r2sm_jax.metrics.truth import QueryTruth, truths_at

EACH = 4


def choose(scored: Scored, each: int = EACH) -> dict[str, list[QueryResult]]:
    """The queries of the highest, the middle and the lowest IoU, each group of different images, and none twice."""
    iou = [r.answered.intersection / r.answered.union if r.answered.union else 1.0 for r in scored.results]
    order = [scored.results[i] for i in np.argsort(iou, kind="stable")]
    middle = len(order) // 2
    from_middle = [order[i] for i in sorted(range(len(order)), key=lambda i: abs(i - middle))]
    taken: set[int] = set()

    def first(candidates: Sequence[QueryResult]) -> list[QueryResult]:
        images: dict[int, QueryResult] = {}
        for result in candidates:
            if len(images) < each and result.query_id not in taken:
                images.setdefault(scored.drawings[result.query_id].index, result)
        taken.update(result.query_id for result in images.values())
        return list(images.values())

    worst, best = first(order), first(order[::-1])
    return {"Best": best, "Median": first(from_middle), "Worst": worst}


def first_of_images(scored: Scored, count: int) -> list[QueryResult]:
    """One query of each of the first images, a later one from image to image, so that all kinds are seen."""
    by_image: dict[int, list[QueryResult]] = {}
    for result in scored.results:
        by_image.setdefault(scored.drawings[result.query_id].index, []).append(result)
    return [queries[i % len(queries)] for i, queries in zip(range(count), by_image.values(), strict=False)]


def panels(source: Source, scored: Scored, results: Iterable[QueryResult]) -> list[list[Panel]]:
    """Image, truth and answer of each query. An image that is not there is left blank."""
    return [_row(source, scored, result) for result in results]


def _row(source: Source, scored: Scored, result: QueryResult) -> list[Panel]:
    drawing = scored.drawings[result.query_id]
    truth = next(t for t in truths_at(source, drawing.index) if t.query.id == result.query_id)
    modal, amodal, visible, whole = map(masks.decode, (truth.modal, truth.amodal, drawing.visible, drawing.whole))
    return prediction_row(
        _image(source, truth), truth.query.text, result.mask_type, (modal, amodal & ~modal),
        result.said, result.probability, (visible, whole & ~visible),
    )  # fmt: skip


def _image(source: Source, truth: QueryTruth) -> np.ndarray:
    try:
        return source[truth.index].image
    except InputError:
        return np.full((truth.height, truth.width, 3), GROUND, np.uint8)
