"""How good a completer or an outliner of a training step is on `dev`, and its calibration, which is
fitted to its answers there, for each kind of answers alone.

The completer gets the threshold of its logits as well, and the probability of a hidden part below
which it keeps a given mask. Objects that nothing hides count as well as hidden ones: what is added
to them is wrong.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Bool, Float
from scipy.optimize import minimize
from scipy.special import expit

from r2sm_jax.config import Config
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import (
    REFERENCE_METHODS,
    FiguresByName,
    ObjectScore,
    OutlineScore,
    completion_figures,
    iou,
    mean,
    mean_iou,
    objects_to_complete,
    print_figures,
    prompts_of,
    score_completion,
    score_object,
    score_outlines,
    scored_objects,
    visible_union,
)
from r2sm_jax.evaluation.fit_calibration import MIN_VALUES, fit_kind
from r2sm_jax.evaluation.selection import Evaluation
from r2sm_jax.inference.crop_models import (
    MaskCompleter,
    MaskOutliner,
    added_share,
    part_json,
)
from r2sm_jax.inference.parts import Parts
from r2sm_jax.models.calibration import NOT_CALIBRATED, Calibration

THRESHOLDS = (-0.5, 0.0, 0.5, 1.0, 1.5)
"""Logits of the completer among which the one with the highest IoU on `dev` is chosen."""
KEPT_BELOW = np.arange(0, 20) / 20
"""Probabilities of a hidden part among which the one below which masks are kept is chosen so."""


def fit_hidden(
    logits: Float[np.ndarray, " n"],
    added: Float[np.ndarray, " n"],
    is_hidden: Bool[np.ndarray, " n"],
) -> Calibration:
    """Finds how the logit that a part is hidden and the share that the completer adds tell together
    whether one is, with the smallest cross entropy.

    The completer's token does not see holes, which the mask fills; the mask alone adds a little to
    whole objects.
    """
    signs = np.where(is_hidden, 1.0, -1.0)

    def make(values: np.ndarray) -> Calibration:
        scale, shift, added_scale = values.tolist()
        return Calibration(hidden_scale=scale, hidden_shift=shift, added_scale=added_scale)

    def cross_entropy(values: np.ndarray) -> float:
        return float(np.logaddexp(0, -signs * make(values).hidden_logit(logits, added)).mean())

    return make(minimize(cross_entropy, (1.0, 0.0, 0.0)).x)


# Completer


def completer_evaluation(config: Config, dev: Source) -> Callable[..., Evaluation]:
    """Makes what scores a completer beside rules that learn nothing, and fits its threshold and
    calibration. Raises InputError if nothing is hidden in the split."""
    samples = [dev[index] for index in range(len(dev))]
    references = score_completion(REFERENCE_METHODS, samples)
    if not references["visible mask"]["hidden"]["objects"]:
        raise InputError(
            f"{config.data.source}: the split {config.train.select_on} has no hidden object whose "
            "complete shape is known; give compose:FILE, which hides objects, or data with amodal "
            "masks"
        )
    sizes = config.model.completer
    untrained = MaskCompleter(sizes, nnx.State({}))

    def evaluate(weights: nnx.State, step: int, folder: Path) -> Evaluation:
        completer, figures = fit_completer(untrained.updated(weights=weights), samples)
        all_figures = references | figures
        print_figures(all_figures)
        return mean_iou(figures), all_figures, {"completer": part_json(completer)}

    return evaluate


class MeasuredObject(NamedTuple):
    """What is known of one object that a completer completed."""

    kept: ObjectScore
    """Of the visible mask itself."""
    completed: Sequence[ObjectScore]
    """At each of `THRESHOLDS`."""
    added: Sequence[float]
    """What is added there, as a share of the visible area."""
    predicted_iou: float
    hidden_logit: float


def measure_objects(
    completer: MaskCompleter, samples: Iterable[Sample], *, with_neighbours: bool
) -> list[MeasuredObject]:
    """Completes all objects of some samples at all thresholds."""
    measured = []
    for sample in samples:
        objects = objects_to_complete(sample)
        others = visible_union(sample) if with_neighbours else None
        if not objects or (with_neighbours and others is None):
            continue
        drawings = completer.draw(sample.image, [one.visible for one in objects], others)
        for (mask, truth), drawing in zip(objects, drawings, strict=True):
            answers = [mask | (drawing.logits > threshold) for threshold in THRESHOLDS]
            measured.append(
                MeasuredObject(
                    kept=score_object(mask, truth, mask),
                    completed=[score_object(mask, truth, answer) for answer in answers],
                    added=[added_share(mask, answer) for answer in answers],
                    predicted_iou=drawing.iou,
                    hidden_logit=drawing.hidden_logit,
                )
            )
    return measured


def fit_completer(completer: MaskCompleter, samples: Sequence[Sample]) -> tuple[Any, FiguresByName]:
    """Fits threshold and calibration of a completer to the images of `dev`. Returns the completer
    with them, and its figures."""
    measured = {
        "with neighbours": measure_objects(completer, samples, with_neighbours=True),
        "alone": measure_objects(completer, samples, with_neighbours=False),
    }
    candidates = []
    for index, threshold in enumerate(THRESHOLDS):
        fits = {name: fit_completions(objects, index) for name, objects in measured.items()}
        figures = {name: completion_figures(scores) for name, (_, scores) in fits.items()}
        calibration = {"alone": fits["alone"][0], "neighbours": fits["with neighbours"][0]}
        candidates.append((threshold, calibration, figures))
    threshold, calibration, figures = max(candidates, key=lambda candidate: mean_iou(candidate[2]))
    return completer.updated(threshold=threshold, calibration=calibration), figures


def fit_completions(
    objects: Sequence[MeasuredObject], index: int
) -> tuple[Calibration, list[ObjectScore]]:
    """Fits the calibration of one kind of completions, at threshold `index`. Returns the scores of
    its answers, too. Nothing is fitted to few objects."""
    scores = [one.completed[index] for one in objects]
    if len(objects) < MIN_VALUES:
        return NOT_CALIBRATED, scores

    is_hidden = np.array([one.kept.is_hidden for one in objects])
    logits = np.array([one.hidden_logit for one in objects])
    added = np.array([one.added[index] for one in objects])
    kind = fit_hidden(logits, added, is_hidden)
    probability = expit(kind.hidden_logit(logits, added))

    def answers_at(kept_below: float) -> list[ObjectScore]:
        pairs = zip(objects, scores, probability < kept_below, strict=True)
        return [one.kept if keeps else score for one, score, keeps in pairs]

    # The IoU of the hidden part counts, too: that of the whole hardly falls where a small hidden
    # part is lost.
    def mean_figure(kept_below: float) -> float:
        figures = completion_figures(answers_at(kept_below))
        hidden, rest = figures["hidden"], figures["not_hidden"]
        values = hidden["amodal_iou"], hidden["occluded_iou"], rest["amodal_iou"]
        return float(np.mean([value for value in values if value is not None]))

    kept_below = float(max(KEPT_BELOW, key=mean_figure))
    answers = answers_at(kept_below)
    predicted = np.array([one.predicted_iou for one in objects])
    true = np.array([answer.amodal_iou for answer in answers])
    kind = fit_kind(predicted, true, fitted=kind._replace(kept_below=kept_below))
    judged = []
    for answer, said, hidden in zip(answers, kind.iou(predicted), probability, strict=True):
        judged.append(answer._replace(predicted_iou=float(said), hidden_probability=float(hidden)))
    return kind, judged


# Outliner


def outliner_evaluation(config: Config, dev: Source) -> Callable[..., Evaluation]:
    """Makes what scores an outliner and fits its calibration. Raises InputError if no object is
    large enough."""
    samples = [dev[index] for index in range(len(dev))]
    if not any(scored_objects(sample) for sample in samples):
        raise InputError(
            f"{config.data.source}: the split {config.train.select_on} has no object of 64 or more "
            "visible pixels; give more images"
        )
    sizes = config.model.outliner
    untrained = MaskOutliner(sizes, nnx.State({}))

    def evaluate(weights: nnx.State, step: int, folder: Path) -> Evaluation:
        outliner, figures = fit_outliner(untrained.updated(weights=weights), samples)
        shown = [f"{name} {values['iou']:.3f}" for name, values in figures.items()]
        print(f"modal IoU of {figures['box']['objects']} objects: {', '.join(shown)}", flush=True)
        score = figures["box"]["iou"] + figures["click"]["iou"]
        return score, figures, {"outliner": part_json(outliner)}

    return evaluate


def fit_outliner(
    outliner: MaskOutliner, samples: Sequence[Sample], completer: MaskCompleter | None = None
) -> tuple[Any, FiguresByName]:
    """Fits the calibration of an outliner to the images of `dev`. Returns the outliner with it, and
    its figures by kind of prompt; `filled box` is the box itself, the reference that learns
    nothing.

    `completer`: that of the same model, for the complete masks of outlines.
    """
    outliner = outliner.updated(calibration={})
    scores: dict[str, list[OutlineScore]] = {"box": [], "click": []}
    filled_boxes = []
    for sample in samples:
        for instance in scored_objects(sample):
            x0, y0, x1, y1 = masks.box(instance.modal)
            filled_boxes.append(masks.area(instance.modal) / ((x1 - x0) * (y1 - y0)))
        for kind, of_kind in score_outlines(outliner, sample).items():
            scores[kind] += of_kind
    fits = {}
    figures: FiguresByName = {
        "filled box": {"objects": len(filled_boxes), "iou": mean(filled_boxes)}
    }
    for kind, of_kind in scores.items():
        true, predicted, agreement = np.array(of_kind, float).reshape(-1, 3).T
        fits[kind] = fit_kind(predicted, true, agreement if kind == "click" else None)
        error = np.abs(fits[kind].iou(predicted, agreement) - true)
        figures[kind] = {"objects": len(true), "iou": mean(true), "iou_error": mean(error)}
    outliner = outliner.updated(calibration=fits)
    if completer is not None:
        fits = fits | fit_completed(Parts(completer, outliner), samples)
    return outliner.updated(calibration=fits), figures


def fit_completed(parts: Parts, samples: Iterable[Sample]) -> dict[str, Calibration]:
    """Fits the kinds `completed_box` and `completed_click`: the product of the calibrated IoUs of
    outline and completion, against the true IoU of the complete mask. Few answers give no kind."""
    ious: dict[str, list[tuple[float, float]]] = {"box": [], "click": []}
    for sample in samples:
        known = [instance for instance in scored_objects(sample) if instance.amodal is not None]
        for kind, prompts in prompts_of(known).items():
            all_drawn = parts.draw(sample.image, prompts, all_visible=None)
            for instance, (drawn,) in zip(known, all_drawn, strict=True):
                if drawn.completion is not None:
                    true = iou(drawn.complete, instance.complete | instance.modal)
                    ious[kind].append((drawn.completion.iou, true))
    return {
        f"completed_{kind}": fit_kind(*np.array(of_kind).T)
        for kind, of_kind in ious.items()
        if len(of_kind) >= MIN_VALUES
    }
