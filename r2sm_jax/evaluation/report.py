"""Per-query results -> the figures of a report. Each is defined in docs/metrics.md."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

import r2sm_jax
from r2sm_jax.data.dataset import Source
from r2sm_jax.errors import writing
from r2sm_jax.evaluation.compare import NAME, write_queries
from r2sm_jax.evaluation.instances import Unit, instance_figures, muse
from r2sm_jax.evaluation.iou import VARIANTS, Overlap, interval, lisa, lisa_iou, ratios
from r2sm_jax.evaluation.scorer import QueryResult, Scored
from r2sm_jax.evaluation.tables import benchmark_of, choose, html, markdown, panels
from r2sm_jax.query import MASK_TYPES as TYPES, MaskType, Sentence, keyword_mask_type

Pick = Callable[[QueryResult], Overlap | None]
"""One overlap of a query; None where the query has none."""
RATES = {"none": 0.0, "0-0.15": 0.15, "0.15-0.25": 0.25, "0.25-0.40": 0.40, "0.40-1": 1.0}
"""Upper edges of the occlusion bins, which belong to their bins."""
SIZES = {"small": 32**2, "medium": 96**2, "large": 1e10}
HARD: dict[Any, str] = {True: "hard", False: "easy"}
MULTI: dict[Any, str] = {True: "several", False: "one"}
BINS = 10


def collect(results: Sequence[QueryResult], pick: Pick) -> Int[np.ndarray, "n 4"]:
    """The overlaps that `pick` finds in the queries, a row each."""
    found = [counts for result in results if (counts := pick(result)) is not None]
    return np.array(found, np.int64).reshape(-1, 4)


answered, occluded, complete, boundary = map(
    attrgetter, ("answered", "occluded", "complete", "boundary")
)


def split_figures(
    results: Sequence[QueryResult], instances: Mapping[int, Unit] | None = None
) -> dict[str, Any]:
    """All figures of one split: All / Modal / Amodal queries, mask type, references, variants and breakdowns."""
    groups = {"all": list(results), **{t: [r for r in results if r.mask_type == t] for t in TYPES}}
    counts = collect(results, answered)
    variants: dict[str, Any] = {name: variant(counts) for name, variant in VARIANTS.items()}
    if instances is not None:
        variants["muse"] = muse([instances[result.query_id] for result in results])
    return {
        **{name: _figures(group, instances) for name, group in groups.items()},
        "mask_type": _decisions(results),
        "predicted_iou": _predicted_iou(results),
        "references": {name: lisa(collect(results, pick)) for name, pick in REFERENCES.items()},
        "variants": variants,
        "breakdowns": _breakdowns(results),
    }


def _figures(
    results: Sequence[QueryResult], instances: Mapping[int, Unit] | None
) -> dict[str, Any]:
    images = np.array([result.image_id for result in results], np.int64)
    counts, hidden, outline = (collect(results, pick) for pick in (answered, occluded, boundary))
    hidden_scores, whole_scores = lisa(hidden), lisa(collect(results, complete))
    hidden_of_all = np.array([r.occluded or [np.nan] * 4 for r in results], float).reshape(-1, 4)
    return {
        **lisa(counts),
        "occluded_iou": hidden_scores["giou"],
        "occluded_ciou": hidden_scores["ciou"],
        "complete_iou": whole_scores["giou"],
        "complete_ciou": whole_scores["ciou"],
        "boundary_iou": lisa(outline)["giou"],
        "wrong_type_gap": wrong_type_gap(results),
        "queries": len(results),
        "occluded_queries": len(hidden),
        "interval": {
            name: interval(images, r) for name, r in ratios(counts, hidden_of_all, outline).items()
        },
        **(
            instance_figures({r.query_id: instances[r.query_id] for r in results})
            if instances is not None
            else {}
        ),
    }


def wrong_type_gap(results: Sequence[QueryResult]) -> float | None:
    """Mean IoU of the answer with the requested mask less that with the other one, over the queries where they
    differ: what it was worth to know the type."""
    differ = [
        r
        for r in results
        if r.chosen.amodal is not None and r.chosen.amodal.truth != r.chosen.modal.truth
    ]
    if not differ:
        return None
    other = collect(
        differ, lambda r: r.chosen.modal if r.mask_type == "amodal" else r.chosen.amodal
    )
    return float((lisa_iou(collect(differ, answered)) - lisa_iou(other)).mean())


# References: the same masks with another decision, and the true masks of one type for all.


def with_decision(decide: Callable[[QueryResult], MaskType]) -> Pick:
    """The answer that another decision would have given."""

    def pick(result: QueryResult) -> Overlap | None:
        predicted = result.amodal if decide(result) == "amodal" else result.modal
        return None if predicted is None else getattr(predicted, result.mask_type)

    return pick


def _true_mask(mask_type: MaskType, result: QueryResult) -> Overlap | None:
    """The true mask of one type as the answer to everything: what a split allows without understanding the type."""
    modal, amodal = result.chosen
    if amodal is None:
        return None
    drawn, wanted = modal.truth if mask_type == "modal" else amodal.truth, result.answered.truth
    return Overlap(min(drawn, wanted), max(drawn, wanted), drawn, wanted)  # one lies in the other


REFERENCES: dict[str, Pick] = {
    "always_modal": with_decision(lambda r: "modal"),
    "always_amodal": with_decision(lambda r: "amodal"),
    "keyword": with_decision(lambda r: r.keyword),
    "oracle_type": with_decision(lambda r: r.mask_type),
    "true_modal_for_all": partial(_true_mask, "modal"),
    "true_amodal_for_all": partial(_true_mask, "amodal"),
}


# Breakdowns by kind of query.


def _groups(result: QueryResult) -> dict[str, str | None]:
    """The group of a query in each breakdown; None where it belongs to none."""
    kind, rate = result.kind, result.occlusion_rate
    return {
        "task": kind.get("task"),
        "difficulty": HARD.get(kind.get("hard")),
        "instances": MULTI.get(kind.get("multi")),
        "occlusion": None
        if rate is None
        else next(name for name, high in RATES.items() if rate <= high),
        "size": next(
            (name for name, high in SIZES.items() if 0 < result.answered.truth <= high), None
        ),
    }


def _breakdowns(results: Sequence[QueryResult]) -> dict[str, Any]:
    """gIoU, cIoU, occluded IoU and number of queries of each group."""
    order, found = [*RATES, *SIZES], {}
    for result in results:
        for name, group in _groups(result).items():
            groups = found.setdefault(name, {})
            if group is not None:
                groups.setdefault(group, []).append(result)
    return {
        name: {
            group: {
                **lisa(collect(groups[group], answered)),
                "occluded_iou": lisa(collect(groups[group], occluded))["giou"],
                "queries": len(groups[group]),
            }
            for group in sorted(
                groups, key=lambda group: (order.index(group) if group in order else 0, group)
            )
        }
        for name, groups in found.items()
    }


# Decisions about the mask type.


def _decisions(results: Sequence[QueryResult]) -> dict[str, Any]:
    """Quality of the decisions about the type, and calibration where every decision has a probability."""
    decided = [r for r in results if r.decision is not None]
    requested = np.array([r.mask_type == "amodal" for r in decided], bool)
    predicted = np.array([r.decision == "amodal" for r in decided], bool)
    known = all(r.probability is not None for r in decided)
    probability = np.array([r.probability for r in decided] if known else predicted, float)
    scores = mask_type_scores(probability, requested, predicted, calibrated=known)
    right, images = (
        (predicted == requested).astype(float),
        np.array([r.image_id for r in decided], np.int64),
    )
    bounds = interval(images, (right, np.ones(len(right))))
    keyword = [r.keyword == r.mask_type for r in decided]
    return scores | {
        "keyword": float(np.mean(keyword)) if keyword else None,
        "interval": {"accuracy": bounds},
    }


def _predicted_iou(results: Sequence[QueryResult]) -> dict[str, Any]:
    """How honest the predicted IoU is, over the queries that have a target: its mean absolute error, and its mean
    beside that of the true IoU in each of `BINS` bins."""
    told = [r for r in results if r.predicted_iou is not None and r.answered.truth]
    if not told:
        return {"error": None, "curve": []}
    predicted, iou = (
        np.array([r.predicted_iou for r in told], float),
        lisa_iou(collect(told, answered)),
    )
    return {
        "error": float(np.abs(predicted - iou).mean()),
        "curve": _curve(predicted * BINS, predicted, iou),
    }


def sentence_figures(
    sentences: Sequence[Sentence], probability: Float[np.ndarray, " n"], *, calibrated: bool
) -> dict[str, Any]:
    """The figures of decisions by the probability of amodal, about sentences without an image. The interval is over
    sentences."""
    requested = np.array([sentence.mask_type == "amodal" for sentence in sentences], bool)
    right, ones = ((probability > 0.5) == requested).astype(float), np.ones(len(sentences))
    keyword = [keyword_mask_type(sentence.text) == sentence.mask_type for sentence in sentences]
    return mask_type_scores(probability, requested, calibrated=calibrated) | {
        "keyword": float(np.mean(keyword)) if keyword else None,
        "interval": {"accuracy": interval(np.arange(len(sentences)), (right, ones))},
        "queries": len(sentences),
    }


def mask_type_scores(
    probability: Float[np.ndarray, " n"],
    requested: Bool[np.ndarray, " n"],
    predicted: Bool[np.ndarray, " n"] | None = None,
    *,
    calibrated: bool = True,
) -> dict[str, Any]:
    """Accuracy (of all, of modal and of amodal queries), F1, Matthews correlation and confusion counts of decisions for
    amodal, the positive class (`predicted`; by default probabilities above 0.5), and calibration of its probabilities.

    Figures are None where they are undefined, calibration where the probabilities are mere decisions (not
    `calibrated`), and everything without queries.
    """
    if not len(probability):
        return dict.fromkeys(("accuracy", *TYPES, "f1", "mcc", "ece", "confusion", "reliability"))
    predicted = probability > 0.5 if predicted is None else predicted
    tn, fp, fn, tp = np.bincount(2 * requested + predicted, minlength=4).tolist()
    bins = reliability(probability, requested) if calibrated else None
    denominator = float(np.sqrt(float(tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    return {
        "accuracy": (tp + tn) / len(predicted),
        "modal": tn / (tn + fp) if tn + fp else None,
        "amodal": tp / (tp + fn) if tp + fn else None,
        "f1": 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else None,
        "mcc": (tp * tn - fp * fn) / denominator if denominator else None,
        "ece": bins
        and sum(abs(b["confidence"] - b["accuracy"]) * b["queries"] / len(predicted) for b in bins),
        "confusion": {
            "amodal_as_amodal": tp,
            "amodal_as_modal": fn,
            "modal_as_amodal": fp,
            "modal_as_modal": tn,
        },
        "reliability": bins,
    }


def reliability(
    probability: Float[np.ndarray, " n"], requested: Bool[np.ndarray, " n"]
) -> list[dict[str, float]]:
    """For each of the `BINS` bins of confidence that has queries: their number, mean confidence and accuracy. The mean
    gap of the two, weighted by the number, is the calibration error (ECE; Guo et al. 2017, arXiv 1706.04599)."""
    confidence, right = np.maximum(probability, 1 - probability), (probability > 0.5) == requested
    return _curve((confidence - 0.5) * 2 * BINS, confidence, right)


def _curve(
    places: np.ndarray, confidence: np.ndarray, accuracy: np.ndarray
) -> list[dict[str, float]]:
    """Number and means of the queries in each of `BINS` bins that has any; a place of 1.5 is in the second bin."""
    bins = np.minimum(places.astype(int), BINS - 1)
    return [
        {
            "queries": int(m.sum()),
            "confidence": float(confidence[m].mean()),
            "accuracy": float(accuracy[m].mean()),
        }
        for m in (bins == b for b in np.unique(bins))
    ]


def make_report(
    evaluated: Mapping[str, tuple[Source, Scored]],
    sentences: Mapping[str, dict[str, Any]] | None = None,
    **meta: Any,
) -> dict[str, Any]:
    """The figures of every split, those of `sentences` without images (`sentence_figures`), and in `meta` what was
    evaluated and how: at least the data's SPEC as `source`."""
    benchmarks: dict[str, str] = {}
    for name, (source, scored) in evaluated.items():
        counts = {t: sum(r.mask_type == t for r in scored.results) for t in TYPES}
        benchmark = benchmark_of(images=len(source), **counts)
        if benchmark and not source.is_procedural:
            benchmarks[name] = benchmark
    return {
        "splits": {
            name: split_figures(scored.results, scored.instances)
            for name, (_, scored) in evaluated.items()
        },
        "sentences": dict(sentences or {}),
        "meta": {
            **meta,
            "variant": "lisa",
            "resolution": "original",
            "images": {name: len(source) for name, (source, _) in evaluated.items()},
            "benchmark": benchmarks,
            "data_sha256": {name: scored.data_sha256 for name, (_, scored) in evaluated.items()},
            "version": r2sm_jax.__version__,
        },
    }


def write_report(
    report: dict[str, Any], evaluated: Mapping[str, tuple[Source, Scored]], folder: Path
) -> None:
    """`report.json`, `report.md`, `report.html` with pictures where there are images, and `queries.csv` with a line for
    every query. Raises InputError if the folder cannot be written."""
    galleries = {
        name: {
            title: panels(source, scored, chosen)
            for title, chosen in choose(scored.results).items()
        }
        for name, (source, scored) in evaluated.items()
        if source.has_images
    }
    with writing(folder / "report.json") as part:
        part.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        (folder / "report.md").write_text(markdown(report), "utf-8")
        (folder / "report.html").write_text(html(report, galleries), "utf-8")
        write_queries(
            folder / NAME, {name: scored.results for name, (_, scored) in evaluated.items()}
        )
