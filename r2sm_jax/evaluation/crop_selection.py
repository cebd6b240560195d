"""How good a completer or an outliner of a training step is on `dev`, and its calibration, which is
fitted to its answers there, for each kind of answers alone.

The completer gets the threshold of its logits as well, and the probability of a hidden part below
which it keeps a given mask. Objects that nothing hides count as well as hidden ones: what is added
to them is wrong.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Bool, Float
from scipy.optimize import minimize

from r2sm_jax.config import Config
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.calibration import MIN_VALUES, fit_kind
from r2sm_jax.evaluation.completion import (
    REFERENCE_METHODS,
    FiguresByName,
    ObjectScore,
    OutlineScore,
    mean,
    mean_iou,
    objects_to_complete,
    print_figures,
    score_completion,
    score_object,
    score_outlines,
    scored_objects,
    summarize,
    visible_union,
)
from r2sm_jax.evaluation.selection import Evaluate, Evaluation
from r2sm_jax.inference.crop_models import (
    CompleterCalibration,
    KindCalibration,
    MaskCompleter,
    MaskOutliner,
    OutlinerCalibration,
    part_json,
)

THRESHOLDS = (-0.5, 0.0, 0.5, 1.0, 1.5)
"""Logits of the completer among which the one with the highest IoU on `dev` is chosen."""
KEPT_BELOW = np.arange(0, 20) / 20
"""Probabilities of a hidden part among which the one below which masks are kept is chosen so."""


def fit_hidden(
    logits: Float[np.ndarray, " n"], is_hidden: Bool[np.ndarray, " n"]
) -> tuple[float, float]:
    """Finds the scale and shift of the logits that a part is hidden with the smallest cross
    entropy; (1, 0) where there are few."""
    if len(logits) < MIN_VALUES:
        return 1.0, 0.0
    signs = np.where(is_hidden, 1.0, -1.0)

    def cross_entropy(scale_and_shift: np.ndarray) -> float:
        scale, shift = scale_and_shift
        return float(np.logaddexp(0, -signs * (scale * logits + shift)).mean())

    scale, shift = minimize(cross_entropy, (1.0, 0.0)).x
    return float(scale), float(shift)


# Completer


def completer_evaluation(config: Config, dev: Source) -> Evaluate:
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
            completed = [score_object(mask, truth, answer) for answer in answers]
            kept = score_object(mask, truth, mask)
            measured.append(MeasuredObject(kept, completed, drawing.iou, drawing.hidden_logit))
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
        figures = {name: summarize(scores) for name, (_, scores) in fits.items()}
        calibration = CompleterCalibration(
            alone=fits["alone"][0], neighbours=fits["with neighbours"][0]
        )
        candidates.append((threshold, calibration, figures))
    threshold, calibration, figures = max(candidates, key=lambda candidate: mean_iou(candidate[2]))
    return completer.updated(threshold=threshold, calibration=calibration), figures


def fit_completions(
    objects: Sequence[MeasuredObject], index: int
) -> tuple[KindCalibration, list[ObjectScore]]:
    """Fits the calibration of one kind of completions, at threshold `index`. Returns the scores of
    its answers, too. Nothing is fitted to few objects."""
    scores = [one.completed[index] for one in objects]
    if len(objects) < MIN_VALUES:
        return KindCalibration(), scores

    is_hidden = np.array([one.kept.is_hidden for one in objects])
    logits = np.array([one.hidden_logit for one in objects])
    scale, shift = fit_hidden(logits, is_hidden)
    probability = KindCalibration(hidden_scale=scale, hidden_shift=shift).hidden_probability(logits)

    def answers_at(kept_below: float) -> list[ObjectScore]:
        pairs = zip(objects, scores, probability < kept_below, strict=True)
        return [one.kept if keeps else score for one, score, keeps in pairs]

    # The IoU of the hidden part counts, too: that of the whole hardly falls where a small hidden
    # part is lost.
    def mean_figure(kept_below: float) -> float:
        figures = summarize(answers_at(kept_below))
        hidden, rest = figures["hidden"], figures["not_hidden"]
        values = hidden["amodal_iou"], hidden["occluded_iou"], rest["amodal_iou"]
        return float(np.mean([value for value in values if value is not None]))

    kept_below = float(max(KEPT_BELOW, key=mean_figure))
    answers = answers_at(kept_below)
    predicted = np.array([one.predicted_iou for one in objects])
    fitted = fit_kind(predicted, np.array([answer.amodal_iou for answer in answers]))
    kind = replace(fitted, hidden_scale=scale, hidden_shift=shift, kept_below=kept_below)
    judged = []
    for answer, iou, hidden in zip(answers, kind.iou(predicted), probability, strict=True):
        judged.append(answer._replace(predicted_iou=float(iou), hidden_probability=float(hidden)))
    return kind, judged


# Outliner


def outliner_evaluation(config: Config, dev: Source) -> Evaluate:
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


def fit_outliner(outliner: MaskOutliner, samples: Iterable[Sample]) -> tuple[Any, FiguresByName]:
    """Fits the calibration of an outliner to the images of `dev`. Returns the outliner with it, and
    its figures by kind of prompt; `filled box` is the box itself, the reference that learns
    nothing."""
    uncalibrated = outliner.updated(calibration=OutlinerCalibration())
    scores: dict[str, list[OutlineScore]] = {"box": [], "click": []}
    filled_boxes = []
    for sample in samples:
        for instance in scored_objects(sample):
            x0, y0, x1, y1 = masks.box(instance.modal)
            filled_boxes.append(masks.area(instance.modal) / ((x1 - x0) * (y1 - y0)))
        for kind, of_kind in score_outlines(uncalibrated, sample).items():
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
    return outliner.updated(calibration=OutlinerCalibration(**fits)), figures
