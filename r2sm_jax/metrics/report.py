"""Per-query results -> the figures of a report, as JSON and as Markdown."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.data.schema import MaskType
from r2sm_jax.metrics.iou import IoU, overlap
from r2sm_jax.metrics.mask_type import mask_type_scores

Overlap = tuple[int, int]
MIN_OCCLUDED = 1
"""Pixels that a target must hide to count in the occluded-region IoU."""


@dataclass(frozen=True)
class QueryResult:
    """What the metrics need to know of one query; overlaps are (intersection, union) with the requested truth."""

    query_id: int
    image_id: int
    mask_type: MaskType
    probability: float | None
    """Of amodal; None where the model makes no decision."""
    chosen: Overlap
    modal: Overlap
    amodal: Overlap
    """As if the predicted amodal mask had been chosen."""
    keyword: Overlap
    occluded: Overlap | None
    """Chosen mask and truth, both without the visible truth; None unless an amodal query's target is occluded."""


def score_query(
    *, query_id: int, image_id: int, mask_type: MaskType, probability: float | None, keyword: MaskType,
    predicted: tuple[np.ndarray, np.ndarray], truth: tuple[np.ndarray, np.ndarray], ignore: np.ndarray | None,
) -> QueryResult:  # fmt: skip
    """Compares one prediction with its truth; pairs are (modal, amodal) boolean masks [H W]."""
    requested = truth[mask_type == "amodal"]
    modal, amodal = (overlap(mask, requested, ignore) for mask in predicted)
    says_amodal = probability is not None and probability > 0.5
    occluded = None
    hidden = truth[1] & ~truth[0]
    if mask_type == "amodal" and np.count_nonzero(hidden) >= MIN_OCCLUDED:
        occluded = overlap(predicted[says_amodal] & ~truth[0], hidden, ignore)
    return QueryResult(
        query_id, image_id, mask_type, probability,
        chosen=amodal if says_amodal else modal, modal=modal, amodal=amodal,
        keyword=amodal if keyword == "amodal" else modal, occluded=occluded,
    )  # fmt: skip


def _iou(results: Sequence[QueryResult], pick: Callable[[QueryResult], Overlap | None]) -> IoU:
    total = IoU()
    for result in results:
        if (pair := pick(result)) is not None:
            total.add(*pair)
    return total


def _figures(results: Sequence[QueryResult]) -> dict[str, Any]:
    chosen, occluded = _iou(results, lambda r: r.chosen), _iou(results, lambda r: r.occluded)
    return {
        "giou": chosen.giou, "ciou": chosen.ciou, "occluded_iou": occluded.giou, "queries": len(chosen),
        "occluded_queries": len(occluded),
    }  # fmt: skip


def split_figures(results: Sequence[QueryResult]) -> dict[str, Any]:
    """All figures of one split: All / Modal / Amodal queries, mask type, and references beside them."""
    by_type = {t: [r for r in results if r.mask_type == t] for t in ("modal", "amodal")}
    decided = [r for r in results if r.probability is not None]
    references: dict[str, Callable[[QueryResult], Overlap]] = {
        "always_modal": lambda r: r.modal,
        "always_amodal": lambda r: r.amodal,
        "keyword": lambda r: r.keyword,
        "oracle_type": lambda r: r.amodal if r.mask_type == "amodal" else r.modal,
    }
    return {
        "all": _figures(results),
        "modal": _figures(by_type["modal"]),
        "amodal": _figures(by_type["amodal"]),
        "mask_type": mask_type_scores(
            np.array([r.probability for r in decided], float),
            np.array([r.mask_type == "amodal" for r in decided], bool),
        ),
        "references": {
            name: {"giou": total.giou, "ciou": total.ciou}
            for name, pick in references.items()
            for total in [_iou(results, pick)]
        },
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a page: one table of figures, one of references."""
    meta = report["meta"]
    lines = [
        "# R2SM evaluation", "",
        f"`{meta['source']}`, checkpoint at step {meta['step']}, variant `{meta['variant']}`, "
        f"at {meta['resolution']} resolution, mask threshold {meta['threshold']}. All figures are percent.", "",
        "| split | queries | gIoU all | modal | amodal | cIoU all | modal | amodal | occluded IoU "
        "| type accuracy | F1 | MCC | ECE |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, s in report["splits"].items():
        row = [s[k]["giou"] for k in ("all", "modal", "amodal")] + [s[k]["ciou"] for k in ("all", "modal", "amodal")]
        row += [s["all"]["occluded_iou"]] + [s["mask_type"][k] for k in ("accuracy", "f1", "mcc", "ece")]
        lines.append(f"| {name} | {s['all']['queries']} | " + " | ".join(map(percent, row)) + " |")
    lines += ["", "The same masks with another decision (gIoU / cIoU, all queries):", ""]
    names = list(next(iter(report["splits"].values()))["references"])
    lines += ["| split | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name, s in report["splits"].items():
        cells = [f"{percent(r['giou'])} / {percent(r['ciou'])}" for r in s["references"].values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def percent(value: float | None) -> str:
    """A fraction as percent with two decimals; a dash where it is undefined."""
    return "–" if value is None else f"{100 * value:.2f}"


def write_report(report: dict[str, Any], folder: Path) -> None:
    """`report.json` and `report.md` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(report))
