"""gIoU and cIoU as LISA's `validate()` defines them (train_ds.py), and the occluded-region IoU.

Counts are integers, so that batches, devices and processes can be merged in any order without a difference.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool

EPSILON = 1e-5


def overlap(
    predicted: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"], ignore: Bool[np.ndarray, "H W"] | None = None
) -> tuple[int, int]:
    """Pixels in the intersection and in the union; ignored pixels count in neither."""
    if ignore is not None:
        predicted, truth = predicted & ~ignore, truth & ~ignore
    return int(np.count_nonzero(predicted & truth)), int(np.count_nonzero(predicted | truth))


@dataclass
class IoU:
    """Collects (intersection, union) of queries. An empty truth with an empty prediction scores 1 in gIoU and adds
    nothing to cIoU; false positives on an empty truth score 0 and add to the union."""

    intersections: list[int] = field(default_factory=list)
    unions: list[int] = field(default_factory=list)

    def add(self, intersection: int, union: int) -> None:
        """One query."""
        self.intersections.append(intersection)
        self.unions.append(union)

    def merge(self, other: "IoU") -> None:
        """Takes over another collection."""
        self.intersections += other.intersections
        self.unions += other.unions

    def __len__(self) -> int:
        return len(self.unions)

    @property
    def per_query(self) -> np.ndarray:
        """IoU of every query, float64 [n]."""
        i, u = np.array(self.intersections, float), np.array(self.unions, float)
        return np.where(u == 0, 1.0, i / (u + EPSILON))

    @property
    def giou(self) -> float | None:
        """Mean IoU over queries (the field's gIoU); None without queries."""
        return float(self.per_query.mean()) if len(self) else None

    @property
    def ciou(self) -> float | None:
        """Cumulative IoU: all intersections over all unions; None without queries."""
        return float(sum(self.intersections) / (sum(self.unions) + 1e-10)) if len(self) else None
