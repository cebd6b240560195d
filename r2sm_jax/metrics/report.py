"""Per-query results -> the figures of a report. Each is defined in docs/metrics.md."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

import r2sm_jax
from r2sm_jax.data.samples import Source
from r2sm_jax.metrics.bootstrap import Ratio, interval
from r2sm_jax.metrics.gallery import choose, panels
from r2sm_jax.metrics.html import html
from r2sm_jax.metrics.instances import AREAS, InstanceScores, muse
from r2sm_jax.metrics.iou import VARIANTS, IoU, Overlap
from r2sm_jax.metrics.mask_type import decision_scores, mask_type_scores
from r2sm_jax.metrics.pages import markdown
from r2sm_jax.metrics.published import benchmark_of
from r2sm_jax.metrics.queries_table import write_queries
from r2sm_jax.metrics.scoring import Drawn, QueryResult, Scored
from r2sm_jax.query import MaskType
from r2sm_jax.sources import is_procedural

TYPES: tuple[MaskType, ...] = ("modal", "amodal")
RATES = (0.0, 0.15, 0.25, 0.40)
"""Edges of the occlusion bins, each in the lower one; the last reaches to 1."""
RATE_NAMES = ("none", "0-0.15", "0.15-0.25", "0.25-0.40", "0.40-1")


def collect(results: Sequence[QueryResult], pick: Callable[[QueryResult], Overlap | None]) -> IoU:
    """The overlaps that `pick` finds in the queries, without those where it finds none."""
    return IoU([counts for result in results if (counts := pick(result)) is not None])


answer = attrgetter("answered")
"""What was answered against what was asked for."""
boundary = attrgetter("boundary")
complete = attrgetter("complete")


def ratios(results: Sequence[QueryResult]) -> dict[str, Ratio]:
    """gIoU, cIoU and occluded IoU as ratios of sums over queries."""
    chosen, hidden = collect(results, answer), [result.occluded for result in results]
    counts = chosen.array.astype(float)
    there = np.array([h is not None for h in hidden], float)
    occluded = np.zeros(len(hidden))
    occluded[there > 0] = IoU([h for h in hidden if h is not None]).per_query
    found = {
        "giou": (chosen.per_query, np.ones(len(results))),
        "ciou": (counts[:, 0], counts[:, 1]),
        "occluded_iou": (occluded, there),
    }
    outlines = collect(results, boundary)
    if len(outlines) == len(results):
        found["boundary_iou"] = outlines.per_query, np.ones(len(results))
    return found


def _figures(results: Sequence[QueryResult], instances: InstanceScores | None) -> dict[str, Any]:
    chosen, occluded = collect(results, answer), collect(results, lambda r: r.occluded)
    hidden, whole = occluded.scores(), collect(results, complete).scores()
    images = np.array([result.image_id for result in results], np.int64)
    figures: dict[str, Any] = {
        **chosen.scores(),
        "occluded_iou": hidden["giou"],
        "occluded_ciou": hidden["ciou"],
        "complete_iou": whole["giou"],
        "complete_ciou": whole["ciou"],
        "boundary_iou": collect(results, boundary).scores()["giou"],
        "wrong_type_gap": wrong_type_gap(results),
        "queries": len(chosen),
        "occluded_queries": len(occluded),
        "interval": {name: _listed(interval(images, ratio)) for name, ratio in ratios(results).items()},
    }
    if instances is not None:
        figures |= instances.figures([result.query_id for result in results])
    return figures


def _listed(bounds: tuple[float, float] | None) -> list[float] | None:
    return None if bounds is None else list(bounds)


def wrong_type_gap(results: Sequence[QueryResult]) -> float | None:
    """Mean IoU of the answer with the requested mask less that with the other one, over the queries where they
    differ: what knowing the type was worth."""
    differ = [r for r in results if r.truth.amodal is not None and r.truth.amodal != r.truth.modal]
    if not differ:
        return None
    other = collect(differ, lambda r: r.overlap(r.chosen, "modal" if r.mask_type == "amodal" else "amodal"))
    return float((collect(differ, answer).per_query - other.per_query).mean())


def with_decision(decide: Callable[[QueryResult], MaskType]) -> Callable[[QueryResult], Overlap | None]:
    """The answer that another decision would have given."""

    def pick(result: QueryResult) -> Overlap | None:
        drawn = result.amodal if decide(result) == "amodal" else result.modal
        return None if drawn is None else result.overlap(drawn)

    return pick


def _truth_as_answer(mask_type: MaskType) -> Callable[[QueryResult], Overlap | None]:
    """The true mask of one type as the answer to everything: what a split allows without understanding the type."""

    def pick(result: QueryResult) -> Overlap | None:
        modal, amodal = result.truth
        if amodal is None:
            return None
        perfect = Drawn(modal, modal, modal) if mask_type == "modal" else Drawn(amodal, modal, amodal)
        return result.overlap(perfect)

    return pick


REFERENCES: dict[str, Callable[[QueryResult], Overlap | None]] = {
    "always_modal": with_decision(lambda r: "modal"),
    "always_amodal": with_decision(lambda r: "amodal"),
    "keyword": with_decision(lambda r: r.keyword),
    "oracle_type": with_decision(lambda r: r.mask_type),
    "true_modal_for_all": _truth_as_answer("modal"),
    "true_amodal_for_all": _truth_as_answer("amodal"),
}
"""The same masks with another decision, and the true masks of one type for all."""


def _breakdowns(results: Sequence[QueryResult]) -> dict[str, dict[str, Any]]:
    """gIoU, cIoU, occluded IoU and number of queries by task, difficulty, number of instances, occlusion and size."""

    def size(result: QueryResult) -> str:
        wanted = answer(result).truth
        return next(name for name, (_, high) in AREAS.items() if name != "all" and wanted <= high)

    def occlusion(result: QueryResult) -> str | None:
        return None if result.rate is None else RATE_NAMES[bisect_left(RATES, result.rate)]

    groups: dict[str, Callable[[QueryResult], str | None]] = {
        "task": lambda r: r.kind.get("task"),
        "difficulty": lambda r: None if r.kind.get("hard") is None else "hard" if r.kind["hard"] else "easy",
        "instances": lambda r: None if r.kind.get("multi") is None else "several" if r.kind["multi"] else "one",
        "occlusion": occlusion,
        "size": size,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        by_value: dict[str, list[QueryResult]] = {}
        for result in results:
            if (value := group(result)) is not None:
                by_value.setdefault(value, []).append(result)
        order = list(RATE_NAMES if name == "occlusion" else AREAS if name == "size" else sorted(by_value))
        found[name] = {
            value: {
                **collect(by_value[value], answer).scores(),
                "occluded_iou": collect(by_value[value], lambda r: r.occluded).scores()["giou"],
                "queries": len(by_value[value]),
            }
            for value in order
            if value in by_value
        }
    return found


def split_figures(results: Sequence[QueryResult], instances: InstanceScores | None = None) -> dict[str, Any]:
    """All figures of one split: All / Modal / Amodal queries, mask type, references, variants and breakdowns."""
    by_type = {t: [r for r in results if r.mask_type == t] for t in TYPES}
    chosen = collect(results, answer)
    variants: dict[str, Any] = {name: variant(chosen.array) for name, variant in VARIANTS.items()}
    if instances is not None:
        variants["muse"] = muse([instances.units[result.query_id] for result in results])
    return {
        "all": _figures(results, instances),
        "modal": _figures(by_type["modal"], instances),
        "amodal": _figures(by_type["amodal"], instances),
        "mask_type": _decisions(results),
        "references": {name: collect(results, pick).scores() for name, pick in REFERENCES.items()},
        "variants": variants,
        "breakdowns": _breakdowns(results),
    }


def _decisions(results: Sequence[QueryResult]) -> dict[str, Any]:
    """How well the type was decided; calibration where every decision has a probability."""
    decided = [r for r in results if r.said is not None]
    wants = np.array([r.mask_type == "amodal" for r in decided], bool)
    said = np.array([r.said == "amodal" for r in decided], bool)
    if all(r.probability is not None for r in decided):
        scores = mask_type_scores(np.array([r.probability for r in decided], float), wants)
    else:
        scores = decision_scores(said, wants)
    images = np.array([r.image_id for r in decided], np.int64)
    bounds = interval(images, ((said == wants).astype(float), np.ones(len(decided))))
    return scores | {"interval": {"accuracy": _listed(bounds)}}


def make_report(evaluated: Mapping[str, tuple[Source, Scored]], **meta: Any) -> dict[str, Any]:
    """The figures of every split, and in `meta` what was evaluated and how: at least the data's SPEC as `source`."""
    sizes = {name: len(source) for name, (source, _) in evaluated.items()}
    known = {}
    for name, (source, scored) in evaluated.items():
        counts = {t: sum(r.mask_type == t for r in scored.results) for t in TYPES}
        benchmark = None if is_procedural(meta["source"]) else benchmark_of(images=len(source), **counts)
        known |= {name: benchmark} if benchmark else {}
    return {
        "splits": {name: split_figures(scored.results, scored.instances) for name, (_, scored) in evaluated.items()},
        "meta": meta
        | {
            "variant": "lisa",
            "resolution": "original",
            "images": sizes,
            "benchmark": known,
            "data_sha256": {name: scored.data_sha256 for name, (_, scored) in evaluated.items()},
            "version": r2sm_jax.__version__,
        },
    }


def write_report(report: dict[str, Any], evaluated: Mapping[str, tuple[Source, Scored]], folder: Path) -> None:
    """`report.json`, `report.md`, `report.html` with pictures, and `queries.csv` with a line for every query."""
    galleries = {
        name: {title: panels(source, scored, chosen) for title, chosen in choose(scored).items()}
        for name, (source, scored) in evaluated.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(report))
    (folder / "report.html").write_text(html(report, galleries))
    write_queries(folder / "queries.csv", {name: scored.results for name, (_, scored) in evaluated.items()})
