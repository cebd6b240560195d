"""Scores of boxes and clicks as prompts: the visible mask of one object is wanted.

The prompts are made of the true visible masks: their box, and their innermost pixel, the one that
is farthest from the outline.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import ndimage

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample, Source
from r2sm_jax.data.masks import Mask
from r2sm_jax.inference.crop_models import MaskOutliner
from r2sm_jax.inference.predictor import EncodedImage, Predictor
from r2sm_jax.progress import show_progress
from r2sm_jax.query import Click, Prompt

MIN_VISIBLE_PIXELS = 64
"""Objects of which less shows are not scored."""
PROMPTED_OBJECTS = 8
"""Most objects that are scored in one image, evenly chosen."""
PROMPTED_IMAGES = 25
"""Most images of a split that are scored, evenly chosen: a click takes a fifth of a second."""


def choose_images(source: Source) -> Iterator[Sample]:
    """The images of a split that `prompt_figures` scores."""
    step = -(-len(source) // PROMPTED_IMAGES)
    indices = range(0, len(source), max(1, step))
    with show_progress("evaluating boxes and clicks, images", len(indices)) as advance:
        for index in indices:
            yield source[index]
            advance(1)


def prompt_figures(predictor: Predictor, samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """The mean IoU of the visible mask by kind of prompt, and the number of objects.

    `click and sentence` are objects that a query means alone, with that query's words; beside it
    stands the same with the sentence alone. Others have no words.
    """
    scores: dict[str, list[float]] = {
        "box": [],
        "click": [],
        "click, of objects with a sentence": [],
        "click and sentence": [],
        "sentence": [],
    }
    for sample in samples:
        instances = scored_objects(sample)
        if not instances:
            continue
        image = predictor.encode(sample.image)
        visible = [instance.modal for instance in instances]
        boxes = [masks.box(mask) for mask in visible]
        clicks = [[innermost_pixel(mask)] for mask in visible]
        no_words = [None] * len(visible)
        scores["box"] += _ious(predictor, image, visible, no_words, boxes=boxes)
        only_click = _ious(predictor, image, visible, no_words, points=clicks)
        scores["click"] += only_click

        # The first sentence about each object alone.
        sentences = dict(reversed(list(_sentences(sample))))
        chosen = [i for i, instance in enumerate(instances) if instance.id in sentences]
        if not chosen:
            continue
        texts = [sentences[instances[i].id] for i in chosen]
        of_chosen = [visible[i] for i in chosen]
        points = [clicks[i] for i in chosen]
        scores["click, of objects with a sentence"] += [only_click[i] for i in chosen]
        scores["click and sentence"] += _ious(predictor, image, of_chosen, texts, points=points)
        scores["sentence"] += _ious(predictor, image, of_chosen, texts)
    return summary(scores)


def outliner_figures(
    outliner: MaskOutliner, samples: Iterable[Sample]
) -> dict[str, dict[str, Any]]:
    """The mean IoU of an outliner alone with the true visible masks, and the number of objects.

    `filled box` is the box itself, the reference that learns nothing.
    """
    scores: dict[str, list[float]] = {"filled box": [], "box": [], "click": []}
    for sample in samples:
        visible = [instance.modal for instance in scored_objects(sample)]
        boxes = [masks.box(mask) for mask in visible]
        clicks = [(Click(*innermost_pixel(mask)),) for mask in visible]
        of_box = outliner(sample.image, [Prompt(box) for box in boxes])
        of_click = outliner(sample.image, [Prompt(None, click) for click in clicks])
        for number, mask in enumerate(visible):
            scores["filled box"].append(iou(fill_box(boxes[number], mask.shape), mask))
            scores["box"].append(iou(of_box[number].mask, mask))
            scores["click"].append(iou(of_click[number].mask, mask))
    return summary(scores)


def scored_objects(sample: Sample) -> list[Instance]:
    """The objects of a sample that are large enough, at most `PROMPTED_OBJECTS` of them."""
    instances = [
        instance
        for instance in sample.instances
        if not instance.ignore and masks.area(instance.modal) >= MIN_VISIBLE_PIXELS
    ]
    step = -(-len(instances) // PROMPTED_OBJECTS)
    return instances[:: max(1, step)]


def summary(scores: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """The mean of each list of scores, and how many they are."""
    return {
        name: {"objects": len(values), "iou": float(np.mean(values)) if values else None}
        for name, values in scores.items()
    }


def fill_box(box: tuple[int, int, int, int], shape: tuple[int, ...]) -> Mask:
    """The mask of a box x0 y0 x1 y1."""
    x0, y0, x1, y1 = box
    mask = np.zeros(shape, bool)
    mask[y0:y1, x0:x1] = True
    return mask


def iou(answer: Mask, truth: Mask) -> float:
    """The IoU of two masks, 0 for two empty ones."""
    return masks.area(answer & truth) / max(1, masks.area(answer | truth))


def innermost_pixel(mask: Mask) -> tuple[float, float]:
    """x y of the middle of the pixel of a mask that is farthest from its outline and the border of
    the image."""
    distance = np.asarray(ndimage.distance_transform_edt(np.pad(mask, 1)))[1:-1, 1:-1]
    row, column = np.unravel_index(distance.argmax(), mask.shape)
    return float(column) + 0.5, float(row) + 0.5


def _sentences(sample: Sample) -> Iterator[tuple[int, str]]:
    """The id of the object and the words of each query that means one object."""
    for query in sample.queries:
        if len(query.instance_ids) == 1:
            yield query.instance_ids[0], query.text


def _ious(
    predictor: Predictor,
    image: EncodedImage,
    truths: Sequence[Mask],
    queries: Sequence[str | None],
    *,
    boxes: Sequence[Any] | None = None,
    points: Sequence[Any] | None = None,
) -> list[float]:
    """The IoU of the predicted visible mask of each query with the true one."""
    predictions = predictor.predict(queries, "modal", image, boxes=boxes, points=points)
    return [
        iou(prediction.modal, truth) for prediction, truth in zip(predictions, truths, strict=True)
    ]
