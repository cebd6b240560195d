"""Scores of single objects: the complete mask from the true visible one, and the visible mask from
a box or a click.

Beside every figure of completion stand two rules that learn nothing: the convex hull of the visible
mask, and that hull inside the visible masks of the other objects.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage
from scipy.spatial import ConvexHull, QhullError

from r2sm_jax.data import masks
from r2sm_jax.data.crops import MIN_COMPLETED_PIXELS, MIN_HIDDEN_SHARE
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.masks import Mask
from r2sm_jax.evaluation.decisions import area_under_curve
from r2sm_jax.evaluation.iou import mean
from r2sm_jax.evaluation.tables import COMPLETION, make_table
from r2sm_jax.inference.crop_models import Completion, MaskCompleter, Outline
from r2sm_jax.query import Click, Prompt

MIN_PROMPTED_PIXELS = 64
"""Objects of which less shows are not asked for by a box or a click."""
PROMPTED_OBJECTS = 8
"""Most objects that are asked for in one image, evenly chosen."""
PROMPTED_IMAGES = 25
"""Most images of a split in which objects are, evenly chosen: a click takes a fifth of a second."""
MUCH_ADDED = 0.1
"""`ObjectScore.answer_added` from which on `hidden_probability` should be above 0.5."""
FiguresByName = dict[str, dict[str, Any]]
"""The figures of each method or kind of prompt."""
Method = Callable[[np.ndarray, Sequence[Mask], Mask | None], Sequence[Mask] | Sequence[Completion]]
"""Complete masks from an image, visible masks, and the union of what shows of all objects of the
image, if there are several."""


def iou(answer: Mask, truth: Mask) -> float:
    """Computes the IoU of two masks, 0 for two empty ones."""
    return masks.area(answer & truth) / max(1, masks.area(answer | truth))


# Completion


class ObjectScore(NamedTuple):
    """How well one object was completed."""

    amodal_iou: float
    """Of the whole answer with the whole truth."""
    occluded_iou: float
    """Of what was added with what is hidden."""
    hidden_share: float
    """Share of the object that is hidden, from 0 to 1."""
    predicted_iou: float | None = None
    """Of the whole answer; None from a method that predicts none."""
    hidden_probability: float | None = None
    """As predicted; None as well."""
    answer_added: float = 0.0
    """Share of the answer that was added to the visible mask, from 0 to 1."""

    @property
    def is_hidden(self) -> bool:
        """Whether enough of the object is hidden."""
        return self.hidden_share >= MIN_HIDDEN_SHARE


def score_object(visible: Mask, truth: Mask, answer: Mask | Completion) -> ObjectScore:
    """Scores one object. The answer counts together with the visible mask that was given."""
    if isinstance(answer, Completion):
        scores, mask = (answer.iou, answer.hidden_probability), answer.mask
    else:
        scores, mask = (), answer
    mask = mask | visible
    hidden_share = masks.occlude_rate(visible, truth)
    occluded_iou = iou(mask & ~visible, truth & ~visible)
    answer_added = masks.occlude_rate(visible, mask)
    return ObjectScore(
        iou(mask, truth), occluded_iou, hidden_share, *scores, answer_added=answer_added
    )


class ObjectMasks(NamedTuple):
    """An object whose complete mask is known, each mask `[H W]`."""

    visible: Mask
    truth: Mask
    """The complete one."""


def objects_to_complete(sample: Sample) -> list[ObjectMasks]:
    """Selects the objects of a sample whose complete mask is known and of which enough shows."""
    objects = []
    for instance in sample.instances:
        is_known = instance.amodal is not None and not instance.ignore
        if is_known and masks.area(instance.modal) >= MIN_COMPLETED_PIXELS:
            objects.append(ObjectMasks(instance.modal, instance.complete | instance.modal))
    return objects


def visible_union(sample: Sample) -> Mask | None:
    """Returns the union of what shows of all annotated objects, also of those that are not scored;
    None where there is only one."""
    if len(sample.instances) < 2:
        return None
    visible = [instance.modal for instance in sample.instances]
    return masks.union(visible, sample.image.shape[:2])


def score_completion(methods: Mapping[str, Method], samples: Iterable[Sample]) -> FiguresByName:
    """Computes `completion_figures` for each method, over all objects of some samples that can be
    completed.

    The samples are read once, one at a time: they may be more than memory holds.
    """
    scores: dict[str, list[ObjectScore]] = {name: [] for name in methods}
    for sample in samples:
        if objects := objects_to_complete(sample):
            visible, truths = zip(*objects, strict=True)
            others = visible_union(sample)
            for name, complete in methods.items():
                answers = complete(sample.image, visible, others)
                scores[name] += map(score_object, visible, truths, answers)
    return {name: completion_figures(of_method) for name, of_method in scores.items()}


def completion_figures(scores: Sequence[ObjectScore]) -> dict[str, Any]:
    """Computes means over the hidden objects, and over those that nothing hides; of all of them the
    mean error of the predicted IoU, the AUC of the probability that a part is hidden, and how often
    that is above 0.5 where much was added, and elsewhere."""
    hidden = [score for score in scores if score.is_hidden]
    rest = [score for score in scores if not score.is_hidden]
    figures: dict[str, Any] = {
        "hidden": {
            "objects": len(hidden),
            "amodal_iou": mean(score.amodal_iou for score in hidden),
            "occluded_iou": mean(score.occluded_iou for score in hidden),
            "hidden_share": mean(score.hidden_share for score in hidden),
        },
        "not_hidden": {
            "objects": len(rest),
            "amodal_iou": mean(score.amodal_iou for score in rest),
        },
    }
    errors = []
    for score in scores:
        if score.predicted_iou is not None:
            errors.append(abs(score.predicted_iou - score.amodal_iou))
    figures["iou_error"] = mean(errors)
    of_hidden, of_rest = (
        np.array([score.hidden_probability for score in group], float) for group in (hidden, rest)
    )
    figures["hidden_auc"] = None
    if errors and hidden and rest:
        figures["hidden_auc"] = area_under_curve(of_hidden, of_rest)
    says_hidden: dict[bool, list[bool]] = {True: [], False: []}
    for score in scores:
        if score.hidden_probability is not None:
            says_hidden[score.answer_added >= MUCH_ADDED].append(score.hidden_probability > 0.5)
    figures["says_hidden"] = {
        "much_added": mean(says_hidden[True]),
        "little_added": mean(says_hidden[False]),
    }
    return figures


def methods_of(completer: MaskCompleter) -> dict[str, Method]:
    """Makes methods of a completer: it is told all other masks of an image, or gets a mask
    alone."""
    return {
        "with neighbours": lambda image, visible, others: list(
            completer.complete(image, visible, others)
        ),
        "alone": lambda image, visible, others: list(completer.complete(image, visible)),
    }


def hulls_inside_others(
    image: np.ndarray, visible: Sequence[Mask], others: Mask | None
) -> list[Mask]:
    """Adds to each mask what its convex hull shares with the other objects."""
    if others is None:
        return list(visible)
    return [mask | (convex_hull(mask) & others) for mask in visible]


REFERENCE_METHODS: dict[str, Method] = {
    "visible mask": lambda image, visible, others: visible,
    "hull": lambda image, visible, others: [convex_hull(mask) for mask in visible],
    "hull in neighbours": hulls_inside_others,
}
"""Methods that learn nothing."""


def convex_hull(mask: Mask) -> Mask:
    """Fills the convex hull of a mask's pixels; a mask on one line is its own hull."""
    points = np.argwhere(mask)[:, ::-1]
    try:
        corners = points[ConvexHull(points).vertices]
    except (QhullError, ValueError):
        return mask
    picture = Image.new("1", (mask.shape[1], mask.shape[0]))
    ImageDraw.Draw(picture).polygon(corners.ravel().tolist(), fill=1)
    return np.asarray(picture) | mask


def mean_iou(figures: FiguresByName) -> float:
    """Computes the mean IoU of hidden and other objects, with and without neighbours."""
    groups = [of_method[key] for of_method in figures.values() for key in ("hidden", "not_hidden")]
    return float(np.mean([group["amodal_iou"] for group in groups if group["objects"]]))


def print_figures(figures: FiguresByName) -> None:
    """Prints one line for each way to complete."""
    table = make_table("Completion", figures.items(), COMPLETION)
    print("\n".join(table.markdown()), flush=True)


# Boxes and clicks, made of the true visible masks: their box, and their innermost pixel

Outliner = Callable[[np.ndarray, Sequence[Prompt]], Sequence[Outline]]
"""The answer to each box or click in an image."""
FindMasks = Callable[[np.ndarray, Sequence[str]], Sequence[Mask]]
"""Visible masks of sentences about an image."""


class OutlineScore(NamedTuple):
    """How well the visible mask of one object was drawn."""

    iou: float
    predicted_iou: float
    agreement: float
    """As in `Outline`."""


def score_outlines(outliner: Outliner, sample: Sample) -> dict[str, list[OutlineScore]]:
    """Scores the boxes and the clicks of the `scored_objects` of a sample."""
    instances = scored_objects(sample)
    scores = {}
    for kind, prompts in prompts_of(instances).items():
        outlines = outliner(sample.image, prompts)
        scores[kind] = [
            OutlineScore(iou(one.mask, instance.modal), one.iou, one.agreement)
            for one, instance in zip(outlines, instances, strict=True)
        ]
    return scores


def prompts_of(instances: Sequence[Instance]) -> dict[str, list[Prompt]]:
    """Makes a box and a click for each instance."""
    visible = [instance.modal for instance in instances]
    return {
        "box": [Prompt(masks.box(mask)) for mask in visible],
        "click": [Prompt(None, (Click(*innermost_pixel(mask)),)) for mask in visible],
    }


def prompt_figures(
    outliner: Outliner, samples: Iterable[Sample], find: FindMasks | None = None
) -> FiguresByName:
    """Computes the mean IoU of visible masks by kind of prompt, and the number of objects; of boxes
    and clicks also the mean error of the predicted IoU.

    With `find` sentences are scored, too, those that mean one object alone, and beside them the
    click on the same objects.
    """
    scores: dict[str, list[OutlineScore]] = {"box": [], "click": []}
    ious: dict[str, list[float]] = {}
    if find is not None:
        ious = {"click, of objects with a sentence": [], "sentence": []}
    for sample in samples:
        instances = scored_objects(sample)
        outlines = score_outlines(outliner, sample)
        for kind, of_kind in outlines.items():
            scores[kind] += of_kind

        # The first sentence about each object alone.
        words: dict[int, str] = {}
        for query in sample.queries:
            if len(query.instance_ids) == 1:
                words.setdefault(query.instance_ids[0], query.text)
        named = [number for number, one in enumerate(instances) if one.id in words]
        if find is not None and named:
            found = find(sample.image, [words[instances[number].id] for number in named])
            for number, mask in zip(named, found, strict=True):
                ious["click, of objects with a sentence"].append(outlines["click"][number].iou)
                ious["sentence"].append(iou(mask, instances[number].modal))
    figures: FiguresByName = {}
    for kind, of_kind in scores.items():
        error = mean(abs(score.predicted_iou - score.iou) for score in of_kind)
        of_iou = mean(score.iou for score in of_kind)
        figures[kind] = {"objects": len(of_kind), "iou": of_iou, "iou_error": error}
    for kind, values in ious.items():
        figures[kind] = {"objects": len(values), "iou": mean(values)}
    return figures


def scored_objects(sample: Sample) -> list[Instance]:
    """Selects the objects of a sample that are large enough, at most `PROMPTED_OBJECTS` of them."""
    instances = [
        instance
        for instance in sample.instances
        if not instance.ignore and masks.area(instance.modal) >= MIN_PROMPTED_PIXELS
    ]
    step = -(-len(instances) // PROMPTED_OBJECTS)
    return instances[:: max(1, step)]


def innermost_pixel(mask: Mask) -> tuple[float, float]:
    """Finds x y of the middle of the pixel of a mask that is farthest from its outline and from
    the border of the image."""
    distance = np.asarray(ndimage.distance_transform_edt(np.pad(mask, 1)))[1:-1, 1:-1]
    row, column = np.unravel_index(distance.argmax(), mask.shape)
    return float(column) + 0.5, float(row) + 0.5
