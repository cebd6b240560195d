"""gIoU and cIoU in every definition that the field reports under these names, from the same counts of pixels.

Counts are integers, so that batches, devices and processes can be merged in any order without a difference. What
each variant does with empty masks is in docs/metrics.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

EPSILON = 1e-5


class Overlap(NamedTuple):
    """Pixels of a predicted and a true mask."""

    intersection: int
    union: int
    predicted: int
    truth: int


def overlap(
    predicted: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"], ignore: Bool[np.ndarray, "H W"] | None = None
) -> Overlap:
    """The counts of one query; ignored pixels count nowhere."""
    if ignore is not None:
        predicted, truth = predicted & ~ignore, truth & ~ignore
    both, drawn, wanted = (int(np.count_nonzero(x)) for x in (predicted & truth, predicted, truth))
    return Overlap(both, drawn + wanted - both, drawn, wanted)


def count_pixels(predicted: Any, truth: Any, valid: Any) -> Any:
    """The same counts for many masks at once, int32 [n 4], of arrays `[n H W]` of numpy or of JAX (also inside `jit`).

    `valid` is False where a pixel counts nowhere.
    """
    predicted, truth = predicted & valid, truth & valid
    counts = [x.sum((-2, -1), dtype="int32") for x in (predicted & truth, predicted | truth, predicted, truth)]
    # Either library stacks by its own arrays' method alone.
    return sum(count[:, None] * np.eye(4, dtype="int32")[i] for i, count in enumerate(counts))


Scores = dict[str, float | None]


@dataclass
class IoU:
    """Collects the counts of queries; collections merge in any order."""

    counts: list[Overlap] = field(default_factory=list)

    def add(self, counts: Overlap) -> None:
        """One query."""
        self.counts.append(counts)

    def merge(self, other: "IoU") -> None:
        """Takes over another collection."""
        self.counts += other.counts

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def array(self) -> Int[np.ndarray, "n 4"]:
        """The counts, a row a query."""
        return np.array(self.counts, np.int64).reshape(-1, 4)

    @property
    def per_query(self) -> Float[np.ndarray, " n"]:
        """IoU of every query by the variant `lisa`."""
        return lisa_iou(self.array)

    def scores(self) -> Scores:
        """`giou`, the mean IoU over queries, and `ciou`, all intersections over all unions, by the variant `lisa`. None
        without queries."""
        return lisa(self.array)


def _mean(values: Shaped[np.ndarray, " n"]) -> float | None:
    return float(values.mean()) if len(values) else None


def lisa_iou(counts: Shaped[np.ndarray, "n _c"]) -> Float[np.ndarray, " n"]:
    """IoU of every query from columns that begin with intersection and union; an empty truth with an empty prediction
    has 1."""
    intersection, union = counts[:, 0], counts[:, 1]
    return np.where(union == 0, 1.0, intersection / (union + EPSILON))


def lisa(counts: Int[np.ndarray, "n 4"]) -> Scores:
    """LISA's `validate()` (train_ds.py); GLaMM, PixelLM, PSALM, Sa2VA and X-SAM do the same. False positives on an
    empty truth score 0 and add to the union."""
    if not len(counts):
        return {"giou": None, "ciou": None}
    return {"giou": _mean(lisa_iou(counts)), "ciou": float(counts[:, 0].sum() / (counts[:, 1].sum() + 1e-10))}


def gres(counts: Int[np.ndarray, "n 4"]) -> Scores:
    """ReLA's evaluation of gRefCOCO (refer_evaluation.py), with an empty prediction as its no-target decision.

    Beside gIoU and cIoU the share of targets found with an IoU of at least .7, .8 and .9, and the accuracies of the
    decision where there is a target and where there is none.
    """
    intersection, union, predicted, truth = counts.T
    none, says_none = truth == 0, predicted == 0
    iou = np.where(says_none, none, intersection / np.maximum(union, 1))
    counted = ~(says_none & none)
    there = iou[~none]
    return {
        "giou": _mean(iou),
        "ciou": float(intersection.sum() / union[counted].sum()) if union[counted].sum() else None,
        **{f"pr@{t}": _mean(there >= t) for t in (0.7, 0.8, 0.9)},
        "target_accuracy": _mean(~says_none[~none]),
        "no_target_accuracy": _mean(says_none[none]),
    }


def segzero(counts: Int[np.ndarray, "n 4"]) -> Scores:
    """Seg-Zero's calculate_iou.py: an empty union scores 0, even where empty was right. There is no cIoU."""
    return {"giou": _mean(counts[:, 0] / np.maximum(counts[:, 1], 1))}


def mmr(counts: Int[np.ndarray, "n 4"]) -> Scores:
    """MMR's evaluation: as `lisa`, but queries without any output are left out, which flatters."""
    return lisa(counts[counts[:, 2] > 0])


VARIANTS: dict[str, Callable[[Int[np.ndarray, "n 4"]], Scores]] = {
    "lisa": lisa, "gres": gres, "segzero": segzero, "mmr": mmr,
}  # fmt: skip
"""Definitions by name. PixelLM's `muse` needs a query's instances, see instances.py."""
