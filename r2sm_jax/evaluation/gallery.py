"""Selects examples of predictions and makes rows of pictures, for reports and sheets of samples."""

from collections.abc import Iterable, Sequence

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.sheet import GROUND, Panel, prediction_row
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.scorer import QueryResult


def select_examples(results: Sequence[QueryResult], count: int = 4) -> dict[str, list[QueryResult]]:
    """Selects the queries of the highest, the middle and the lowest IoU.

    Up to `count` of each, of different images. No query is selected twice.
    """
    iou = []
    for result in results:
        # An empty answer to a query without a target is right.
        intersection, union = result.overlap[:2]
        iou.append(intersection / union if union else 1.0)
    worst_first = np.argsort(iou, kind="stable").tolist()
    middle = len(worst_first) // 2
    ranks_from_middle = sorted(range(len(worst_first)), key=lambda rank: abs(rank - middle))
    orders = {
        "Worst": worst_first,
        "Best": worst_first[::-1],
        "Median": [worst_first[rank] for rank in ranks_from_middle],
    }
    # In the order of choice: where there are few queries, the worst are shown.
    examples: dict[str, list[QueryResult]] = {}
    used: set[int] = set()
    for title, order in orders.items():
        unused = [results[i] for i in order if results[i].query.id not in used]
        examples[title] = [of_image[0] for of_image in group_by_image(unused)[:count]]
        used |= {result.query.id for result in examples[title]}
    return {title: examples[title] for title in ("Best", "Median", "Worst")}


def sample_queries(results: Sequence[QueryResult], count: int) -> list[QueryResult]:
    """Selects one query of each of the first `count` images.

    It is the first query of the first image, the second of the second, and so on, so that different
    kinds of queries are seen.
    """
    by_image = group_by_image(results)[:count]
    return [queries[i % len(queries)] for i, queries in enumerate(by_image)]


def group_by_image(results: Iterable[QueryResult]) -> list[list[QueryResult]]:
    """Groups results by image, in the order in which images first come."""
    groups: dict[int, list[QueryResult]] = {}
    for result in results:
        groups.setdefault(result.truth.image_id, []).append(result)
    return list(groups.values())


def example_rows(source: Source, results: Iterable[QueryResult]) -> list[list[Panel]]:
    """Makes a row of image, truth and prediction for each query.

    Only the image is read from the source, since results hold the masks. An image that is missing
    is left blank.
    """
    rows = []
    for result in results:
        modal = masks.decode(result.truth.masks.modal)
        amodal = masks.decode(result.truth.masks.amodal)
        predicted_modal = masks.decode(result.predicted_masks.modal)
        predicted_amodal = masks.decode(result.predicted_masks.amodal)
        try:
            image = source[result.truth.index].image
        except InputError:
            image = np.full((*modal.shape, 3), GROUND, np.uint8)
        row = prediction_row(
            image,
            result.query.text,
            result.mask_type,
            (modal, amodal & ~modal),
            result.predicted_type,
            result.amodal_probability,
            (predicted_modal, predicted_amodal & ~predicted_modal),
        )
        rows.append(row)
    return rows
