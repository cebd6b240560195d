"""Scores of completion alone: the true visible mask is given, the complete mask is wanted.

Two rules that learn nothing stand beside every figure: the convex hull of the visible mask, and
that hull inside the visible masks of the other objects.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageDraw
from scipy.spatial import ConvexHull, QhullError

from r2sm_jax.data import masks
from r2sm_jax.data.crops import MIN_COMPLETED_PIXELS, MIN_HIDDEN_SHARE, others_of
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.masks import Mask
from r2sm_jax.inference.crop_models import MaskCompleter

Completions = Callable[[np.ndarray, Sequence[Mask], Sequence[Mask | None]], Sequence[Mask]]
"""Complete masks from an image, visible masks and the union of all other masks for each."""


@dataclass(frozen=True)
class ObjectScore:
    """How well one object was completed."""

    amodal_iou: float
    """Of the whole answer with the whole truth."""
    occluded_iou: float
    """Of what was added with what is hidden."""
    hidden_share: float
    """Share of the object that is hidden, from 0 to 1."""


def score_object(visible: Mask, truth: Mask, answer: Mask) -> ObjectScore:
    """The score of one object. The answer counts together with the visible mask that was given."""
    answer = answer | visible
    added, hidden = answer & ~visible, truth & ~visible
    return ObjectScore(
        amodal_iou=masks.area(answer & truth) / max(1, masks.area(answer | truth)),
        occluded_iou=masks.area(added & hidden) / max(1, masks.area(added | hidden)),
        hidden_share=masks.occlude_rate(visible, truth),
    )


def scored_instances(sample: Sample) -> list[Instance]:
    """The objects of a sample whose complete mask is known and large enough to judge."""
    return [
        instance
        for instance in sample.instances
        if instance.amodal is not None
        and not instance.ignore
        and masks.area(instance.modal) >= MIN_COMPLETED_PIXELS
    ]


class Method(NamedTuple):
    """A way to complete visible masks."""

    complete: Completions
    with_neighbours: bool
    """Whether it is told the masks of all other objects of the image."""


def score_completion(
    methods: Mapping[str, Method], samples: Iterable[Sample]
) -> dict[str, dict[str, Any]]:
    """The figures of `summarize` for each method, over all scored objects of some samples.

    The samples are read once, one at a time: they may be more than memory holds.
    """
    scores: dict[str, list[ObjectScore]] = {name: [] for name in methods}
    for sample in samples:
        instances = scored_instances(sample)
        if not instances:
            continue
        visible = [instance.modal for instance in instances]
        # Of all annotated objects, also of those that are not scored.
        everything = [instance.modal for instance in sample.instances]
        union_of_others = dict(zip(map(id, everything), others_of(everything), strict=True))
        neighbours = [union_of_others[id(mask)] for mask in visible]
        no_neighbours = [None] * len(visible)

        for name, method in methods.items():
            others = neighbours if method.with_neighbours else no_neighbours
            answers = method.complete(sample.image, visible, others)
            for instance, answer in zip(instances, answers, strict=True):
                truth = instance.complete | instance.modal
                scores[name].append(score_object(instance.modal, truth, answer))
    return {name: summarize(of_method) for name, of_method in scores.items()}


def summarize(scores: Sequence[ObjectScore]) -> dict[str, Any]:
    """Means over the hidden objects, and over those that nothing hides."""
    hidden = [score for score in scores if score.hidden_share >= MIN_HIDDEN_SHARE]
    rest = [score for score in scores if score.hidden_share < MIN_HIDDEN_SHARE]

    def mean(values: list[float]) -> float | None:
        return float(np.mean(values)) if values else None

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


def methods_of(completer: MaskCompleter) -> dict[str, Method]:
    """A completer that is told all other masks of an image, and one that gets a mask alone."""

    def complete(
        image: np.ndarray, visible: Sequence[Mask], neighbours: Sequence[Mask | None]
    ) -> list[Mask]:
        return completer(image, visible, neighbours=neighbours)

    return {"with neighbours": Method(complete, True), "alone": Method(complete, False)}


def visible_as_it_is(
    image: np.ndarray, visible: Sequence[Mask], neighbours: Sequence[Mask | None]
) -> list[Mask]:
    """The reference that adds nothing."""
    return list(visible)


def hulls(
    image: np.ndarray, visible: Sequence[Mask], neighbours: Sequence[Mask | None]
) -> list[Mask]:
    """The reference of convex hulls."""
    return [convex_hull(mask) for mask in visible]


def hulls_inside_neighbours(
    image: np.ndarray, visible: Sequence[Mask], neighbours: Sequence[Mask | None]
) -> list[Mask]:
    """The reference of convex hulls, of which only what other objects cover is added."""
    answers = []
    for mask, others in zip(visible, neighbours, strict=True):
        others = np.zeros_like(mask) if others is None else others
        answers.append(mask | (convex_hull(mask) & others))
    return answers


REFERENCE_METHODS = {
    "visible mask": Method(visible_as_it_is, True),
    "hull": Method(hulls, True),
    "hull in neighbours": Method(hulls_inside_neighbours, True),
}
"""Methods that learn nothing."""


def convex_hull(mask: Bool[np.ndarray, "H W"]) -> Mask:
    """The pixels of the convex hull of a mask's pixels; a mask on one line is its own hull."""
    points = np.argwhere(mask)[:, ::-1]
    try:
        corners = points[ConvexHull(points).vertices]
    except (QhullError, ValueError):
        return mask
    picture = Image.new("1", (mask.shape[1], mask.shape[0]))
    ImageDraw.Draw(picture).polygon([tuple(map(int, corner)) for corner in corners], fill=1)
    return np.asarray(picture) | mask
