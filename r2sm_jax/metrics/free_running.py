"""Our own segmenter on the queries of a source, free-running: the predicted mask type picks the mask.

At original resolution: masks are compared with the truth as it was annotated, not as the model saw it.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from r2sm_jax.config import NO_HEAD
from r2sm_jax.data import masks
from r2sm_jax.data.images import Letterbox
from r2sm_jax.data.masks import union
from r2sm_jax.data.samples import Instance, Sample, Source
from r2sm_jax.metrics.instances import InstanceScores
from r2sm_jax.metrics.scoring import Drawing, Scored, score_query
from r2sm_jax.predictor import Predictor
from r2sm_jax.query import Query, keyword_mask_type

ROWS = 8
"""Images a batch; fixed, like the queries a row, so that nothing is compiled twice."""
QUERIES = 8


class Row(NamedTuple):
    """Up to `QUERIES` queries of one sample."""

    index: int
    sample: Sample
    queries: Sequence[Query]


def rows_of(source: Source) -> Iterator[Row]:
    """Every query of a source once, without those whose requested mask is not annotated."""
    for index in range(len(source)):
        sample = source[index]
        unknown = {i.id for i in sample.instances if i.amodal is None}
        queries = [q for q in sample.queries if q.mask_type == "modal" or not unknown & set(q.instance_ids)]
        for start in range(0, len(queries), QUERIES):
            yield Row(index, sample, queries[start : start + QUERIES])


def truth_of(sample: Sample, query: Query) -> tuple[np.ndarray, np.ndarray]:
    """Modal and amodal mask of everything that a query means."""
    shape = sample.image.shape[:2]
    meant = [i for i in sample.instances if i.id in query.instance_ids]
    modal = union((i.modal for i in meant), shape)
    return modal, modal | union((_complete(i) for i in meant), shape)


def _complete(instance: Instance) -> np.ndarray:
    """The complete mask, or what is known of it."""
    return instance.modal if instance.amodal is None else instance.amodal


def score_source(predictor: Predictor, source: Source) -> Scored:
    """Answers and scores every query of a source."""
    predictor.texts.encode(q.text for index in range(len(source)) for q in source.queries_at(index))
    scored = Scored()
    rows = rows_of(source)
    while batch := list(islice(rows, ROWS)):
        _score(predictor, batch, scored)
    return scored


def _score(predictor: Predictor, rows: Sequence[Row], scored: Scored) -> None:
    size = predictor.config.vision.image_size
    shapes = [row.sample.image.shape for row in rows]
    boxes = [Letterbox(height, width, size) for height, width, _ in shapes]
    padding = ROWS - len(rows)
    frames = [box.image(row.sample.image) for box, row in zip(boxes, rows, strict=True)]
    valid = [box.valid() for box in boxes]
    texts = [[q.text for q in row.queries] + [""] * (QUERIES - len(row.queries)) for row in rows]
    texts += [[""] * QUERIES] * padding
    answers = predictor.answer(np.stack(frames + frames[:1] * padding), np.stack(valid + valid[:1] * padding), texts)
    for b, (row, box) in enumerate(zip(rows, boxes, strict=True)):
        sample, count = row.sample, len(row.queries)
        ignored = [_complete(i) for i in sample.instances if i.ignore]
        ignore = union(ignored, sample.image.shape[:2]) if ignored else None
        crowd = [] if ignore is None else [masks.encode(ignore)]
        encoded = {i.id: (masks.encode(i.modal), masks.encode(_complete(i))) for i in sample.instances}
        probabilities = predictor.probabilities(
            answers.probability[b, :count], texts[b][:count], [q.mask_type for q in row.queries]
        )
        modal, amodal = box.undo(answers.modal[b, :count]) > 0, box.undo(answers.amodal[b, :count]) > 0
        for k, query in enumerate(row.queries):
            truth, predicted = truth_of(sample, query), (modal[k], modal[k] | amodal[k])
            result = score_query(
                query_id=query.id,
                image_id=sample.image_id,
                mask_type=query.mask_type,
                probability=None if predictor.config.head == NO_HEAD else float(probabilities[k]),
                keyword=keyword_mask_type(query.text),
                predicted=predicted,
                truth=truth,
                ignore=ignore,
                known=all(i.amodal is not None for i in sample.instances if i.id in query.instance_ids),
                kind=query.kind,
            )
            drawing = Drawing(row.index, *map(masks.encode, predicted))
            meant = [encoded[i] for i in dict.fromkeys(query.instance_ids)]
            modal_rle, amodal_rle = (masks.merge([pair[t] for pair in meant], *truth[0].shape) for t in (0, 1))
            scored.add(result, drawing, query.text, (modal_rle, amodal_rle))
            slots = [
                x[b, k] for x in (answers.slot_modal, answers.slot_amodal, answers.slot_presence, answers.slot_iou)
            ]
            wanted = [pair[query.mask_type == "amodal"] for pair in meant]
            _add_instances(scored.instances, query.id, box, slots, result.said == "amodal", wanted, crowd)


def _add_instances(
    instances: InstanceScores, query_id: int, box: Letterbox, slots: Sequence[np.ndarray], amodal: bool,
    wanted: Sequence[masks.RLE], crowd: Sequence[masks.RLE],
) -> None:  # fmt: skip
    """The slots of one query as detections against the instances it means."""
    ranked = ranked_slots(box, slots, amodal)
    instances.add(
        query_id, [m for m, _ in ranked], [s for _, s in ranked], [*wanted, *crowd],
        [False] * len(wanted) + [True] * len(crowd),
    )  # fmt: skip


def ranked_slots(box: Letterbox, slots: Sequence[np.ndarray], amodal: bool) -> list[tuple[masks.RLE, float]]:
    """Masks of one query's slots, of the type that was decided, with presence times predicted IoU."""
    modal, whole, presence, iou = slots
    drawn = box.undo(modal) > 0
    drawn = drawn | (box.undo(whole) > 0) if amodal else drawn
    scores = presence * iou[:, int(amodal)]
    return [(masks.encode(mask), float(score)) for mask, score in zip(drawn, scores, strict=True) if mask.any()]
