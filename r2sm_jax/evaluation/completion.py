"""Scores of single objects: the complete mask from the true visible one, and the visible mask from
a box or a click.

Systems come in as functions. Beside every figure of completion stand two rules that learn nothing:
the convex hull of the visible mask, and that hull inside the visible masks of the other objects.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageDraw
from scipy import ndimage
from scipy.spatial import ConvexHull, QhullError

from r2sm_jax.data import masks
from r2sm_jax.data.crops import MIN_COMPLETED_PIXELS, MIN_HIDDEN_SHARE, others_of
from r2sm_jax.data.dataset import Instance, Sample, Source
from r2sm_jax.data.masks import Mask
from r2sm_jax.progress import show_progress
from r2sm_jax.query import Click, Prompt

MIN_PROMPTED_PIXELS = 64
"""Objects of which less shows are not asked for by a box or a click."""
PROMPTED_OBJECTS = 8
"""Most objects that are asked for in one image, evenly chosen."""
PROMPTED_IMAGES = 25
"""Most images of a split in which objects are, evenly chosen: a click takes a fifth of a second."""


def iou(answer: Mask, truth: Mask) -> float:
    """Computes the IoU of two masks, 0 for two empty ones."""
    return masks.area(answer & truth) / max(1, masks.area(answer | truth))


def mean(values: Sequence[float]) -> float | None:
    """Computes the mean of some values; None without any."""
    return float(np.mean(values)) if values else None


# Completion

THRESHOLDS = (-0.5, 0.0, 0.5, 1.0, 1.5)
"""Logits among which the one with the highest IoU on `dev` is chosen."""
Completions = Callable[[np.ndarray, Sequence[Mask], Sequence[Mask | None]], Sequence[Mask]]
"""Complete masks from an image, visible masks and the union of all other masks for each."""


class Method(NamedTuple):
    """A way to complete visible masks."""

    complete: Completions
    with_neighbours: bool
    """Whether it is told the masks of all other objects of the image."""


class ObjectScore(NamedTuple):
    """How well one object was completed."""

    amodal_iou: float
    """Of the whole answer with the whole truth."""
    occluded_iou: float
    """Of what was added with what is hidden."""
    hidden_share: float
    """Share of the object that is hidden, from 0 to 1."""


def score_object(visible: Mask, truth: Mask, answer: Mask) -> ObjectScore:
    """Scores one object. The answer counts together with the visible mask that was given."""
    answer = answer | visible
    return ObjectScore(
        amodal_iou=iou(answer, truth),
        occluded_iou=iou(answer & ~visible, truth & ~visible),
        hidden_share=masks.occlude_rate(visible, truth),
    )


def score_completion(
    methods: Mapping[str, Method], samples: Iterable[Sample]
) -> dict[str, dict[str, Any]]:
    """Computes the figures of `summarize` for each method, over all objects of some samples whose
    complete mask is known and of which enough shows.

    The samples are read once, one at a time: they may be more than memory holds.
    """
    scores: dict[str, list[ObjectScore]] = {name: [] for name in methods}
    for sample in samples:
        # Neighbours are all annotated objects, also those that are not scored.
        union_of_others = others_of([instance.modal for instance in sample.instances])
        objects = []
        for instance, others in zip(sample.instances, union_of_others, strict=True):
            is_scored = instance.amodal is not None and not instance.ignore
            if is_scored and masks.area(instance.modal) >= MIN_COMPLETED_PIXELS:
                objects.append((instance.modal, instance.complete | instance.modal, others))
        if not objects:
            continue
        visible, truths, neighbours = zip(*objects, strict=True)
        for name, method in methods.items():
            others = neighbours if method.with_neighbours else [None] * len(objects)
            answers = method.complete(sample.image, visible, others)
            scores[name] += map(score_object, visible, truths, answers)
    return {name: summarize(of_method) for name, of_method in scores.items()}


def summarize(scores: Sequence[ObjectScore]) -> dict[str, Any]:
    """Computes means over the hidden objects, and over those that nothing hides."""
    hidden = [score for score in scores if score.hidden_share >= MIN_HIDDEN_SHARE]
    rest = [score for score in scores if score.hidden_share < MIN_HIDDEN_SHARE]
    return {
        "hidden": {
            "objects": len(hidden),
            "amodal_iou": mean([score.amodal_iou for score in hidden]),
            "occluded_iou": mean([score.occluded_iou for score in hidden]),
            "hidden_share": mean([score.hidden_share for score in hidden]),
        },
        "not_hidden": {
            "objects": len(rest),
            "amodal_iou": mean([score.amodal_iou for score in rest]),
        },
    }


def methods_of(completer: Callable[..., Sequence[Mask]]) -> dict[str, Method]:
    """Makes methods of a completer: it is told all other masks of an image, or gets a mask
    alone."""

    def complete(
        image: np.ndarray, visible: Sequence[Mask], neighbours: Sequence[Mask | None]
    ) -> Sequence[Mask]:
        return completer(image, visible, neighbours=neighbours)

    return {"with neighbours": Method(complete, True), "alone": Method(complete, False)}


def hulls_inside_neighbours(
    image: np.ndarray, visible: Sequence[Mask], neighbours: Sequence[Mask | None]
) -> list[Mask]:
    """Adds to each mask what its convex hull shares with the other objects."""
    answers = []
    for mask, others in zip(visible, neighbours, strict=True):
        answers.append(mask if others is None else mask | (convex_hull(mask) & others))
    return answers


REFERENCE_METHODS = {
    "visible mask": Method(lambda image, visible, neighbours: visible, True),
    "hull": Method(lambda image, visible, neighbours: [*map(convex_hull, visible)], True),
    "hull in neighbours": Method(hulls_inside_neighbours, True),
}
"""Methods that learn nothing."""


def convex_hull(mask: Bool[np.ndarray, "H W"]) -> Mask:
    """Fills the convex hull of a mask's pixels; a mask on one line is its own hull."""
    points = np.argwhere(mask)[:, ::-1]
    try:
        corners = points[ConvexHull(points).vertices]
    except (QhullError, ValueError):
        return mask
    picture = Image.new("1", (mask.shape[1], mask.shape[0]))
    ImageDraw.Draw(picture).polygon([tuple(map(int, corner)) for corner in corners], fill=1)
    return np.asarray(picture) | mask


# Boxes and clicks, made of the true visible masks: their box, and their innermost pixel

Answer = Callable[..., Sequence[Mask]]
"""Visible masks from sentences, or None, and `boxes` or `points` for each."""


def choose_images(source: Source) -> Iterator[Sample]:
    """Yields the images of a split that `prompt_figures` scores."""
    step = -(-len(source) // PROMPTED_IMAGES)
    indices = range(0, len(source), max(1, step))
    with show_progress("evaluating boxes and clicks, images", len(indices)) as advance:
        for index in indices:
            yield source[index]
            advance(1)


def prompt_figures(
    look: Callable[[np.ndarray], Answer], samples: Iterable[Sample]
) -> dict[str, dict[str, Any]]:
    """Computes the mean IoU of the visible mask by kind of prompt, and the number of objects.

    `click and sentence` are objects that a query means alone, with that query's words; beside it
    stands the same with the sentence alone. Others have no words.

    Args:
        look: gives for an image the function that answers about it.
        samples: images with their truth.
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
        answer = look(sample.image)
        visible = [instance.modal for instance in instances]
        clicks = [[innermost_pixel(mask)] for mask in visible]
        no_words = [None] * len(visible)
        scores["box"] += map(iou, answer(no_words, boxes=[*map(masks.box, visible)]), visible)
        of_clicks = list(map(iou, answer(no_words, points=clicks), visible))
        scores["click"] += of_clicks

        # The first sentence about each object alone.
        words: dict[int, str] = {}
        for query in sample.queries:
            if len(query.instance_ids) == 1:
                words.setdefault(query.instance_ids[0], query.text)
        named = [number for number, one in enumerate(instances) if one.id in words]
        if not named:
            continue
        texts = [words[instances[number].id] for number in named]
        truths = [visible[number] for number in named]
        points = [clicks[number] for number in named]
        scores["click, of objects with a sentence"] += [of_clicks[number] for number in named]
        scores["click and sentence"] += map(iou, answer(texts, points=points), truths)
        scores["sentence"] += map(iou, answer(texts), truths)
    return _means(scores)


def outliner_figures(
    outliner: Callable[..., Sequence[Any]], samples: Iterable[Sample]
) -> dict[str, dict[str, Any]]:
    """Computes the mean IoU of an outliner alone with the true visible masks, and the number of
    objects.

    `filled box` is the box itself, the reference that learns nothing.
    """
    scores: dict[str, list[float]] = {"filled box": [], "box": [], "click": []}
    for sample in samples:
        visible = [instance.modal for instance in scored_objects(sample)]
        boxes = [masks.box(mask) for mask in visible]
        clicks = [(Click(*innermost_pixel(mask)),) for mask in visible]
        filled = map(partial(fill_box, sample.image.shape[:2]), boxes)
        of_box = outliner(sample.image, [Prompt(box) for box in boxes])
        of_click = outliner(sample.image, [Prompt(None, click) for click in clicks])
        scores["filled box"] += map(iou, filled, visible)
        scores["box"] += map(iou, [outline.mask for outline in of_box], visible)
        scores["click"] += map(iou, [outline.mask for outline in of_click], visible)
    return _means(scores)


def _means(scores: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    return {name: {"objects": len(values), "iou": mean(values)} for name, values in scores.items()}


def scored_objects(sample: Sample) -> list[Instance]:
    """Selects the objects of a sample that are large enough, at most `PROMPTED_OBJECTS` of them."""
    instances = [
        instance
        for instance in sample.instances
        if not instance.ignore and masks.area(instance.modal) >= MIN_PROMPTED_PIXELS
    ]
    step = -(-len(instances) // PROMPTED_OBJECTS)
    return instances[:: max(1, step)]


def fill_box(shape: tuple[int, ...], box: tuple[int, int, int, int]) -> Mask:
    """Makes the mask of a box x0 y0 x1 y1."""
    x0, y0, x1, y1 = box
    mask = np.zeros(shape, bool)
    mask[y0:y1, x0:x1] = True
    return mask


def innermost_pixel(mask: Mask) -> tuple[float, float]:
    """Finds x y of the middle of the pixel of a mask that is farthest from its outline and from
    the border of the image."""
    distance = np.asarray(ndimage.distance_transform_edt(np.pad(mask, 1)))[1:-1, 1:-1]
    row, column = np.unravel_index(distance.argmax(), mask.shape)
    return float(column) + 0.5, float(row) + 0.5


def choose_threshold(
    completer_at: Callable[[float], Callable[..., Sequence[Mask]]], samples: Sequence[Sample]
) -> tuple[float, dict[str, Any]]:
    """Chooses the threshold of a completer that is best on `dev`; returns its figures, too.

    Args:
        completer_at: gives the completer with a threshold.
        samples: the images of `dev`.
    """
    candidates = []
    for threshold in THRESHOLDS:
        methods = methods_of(completer_at(threshold))
        candidates.append((threshold, score_completion(methods, samples)))
    # Objects that nothing hides count as well: what is added to them is wrong.
    return max(candidates, key=lambda candidate: mean_iou(candidate[1]))


def mean_iou(figures: dict[str, Any]) -> float:
    """Computes the mean IoU of hidden and other objects, with and without neighbours."""
    values = []
    for of_kind in figures.values():
        for group in ("hidden", "not_hidden"):
            iou = of_kind[group]["amodal_iou"]
            if iou is not None:
                values.append(iou)
    return float(np.mean(values))


def print_figures(figures: dict[str, Any]) -> None:
    """Prints one line for each way to complete."""
    for name, values in figures.items():
        hidden, rest = values["hidden"], values["not_hidden"]
        kept = f"{rest['amodal_iou']:.3f}" if rest["objects"] else "-"
        print(
            f"{name:20} amodal IoU {hidden['amodal_iou']:.3f}, occluded IoU "
            f"{hidden['occluded_iou']:.3f} ({hidden['objects']} hidden); not hidden {kept} "
            f"({rest['objects']})",
            flush=True,
        )
