"""References for runs on photographs that need no training: gIoU and occluded IoU of boxes.

    python scripts/photo_references.py compose:instances.json --images photos

- `true box`: the box around the mask that is asked for, filled. No detector of boxes can do better.
- `one box`: the same box for every query: the best one, on `dev`, of those in the middle that have the photo's shape.
- `everything`: the whole photo.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Sample, Source
from r2sm_jax.errors import exit_cleanly
from r2sm_jax.flags import parse_flags
from r2sm_jax.sources import open_source

SIDES = np.linspace(0.3, 1, 15)
"""Of the one box, in sides of the photo."""
Guess = Callable[[np.ndarray], np.ndarray]
"""The requested mask `[H W]` -> the answer."""


@dataclass(frozen=True)
class ReferenceConfig:
    """References for runs on photographs, without training."""

    data: Annotated[str, tyro.conf.Positional]
    """compose:FILE or another data source with the splits dev and val."""
    images: str | None = None
    """Folder of the photos."""
    samples: int = 120
    """Composed pictures of each split."""
    size: int = 320
    """Their longer side."""


def requested(sample: Sample) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The mask `[H W]` that each query asks for, if it is known, and the hidden part of it."""
    by_id = {instance.id: instance for instance in sample.instances}
    shape = sample.image.shape[:2]
    for query in sample.queries:
        meant = [by_id[i] for i in query.instance_ids]
        if query.mask_type == "modal" or all(i.amodal is not None for i in meant):
            modal, whole = masks.union((i.modal for i in meant), shape), masks.union((i.complete for i in meant), shape)
            yield (modal, np.zeros_like(modal)) if query.mask_type == "modal" else (whole, whole & ~modal)


def true_box(truth: np.ndarray) -> np.ndarray:
    """The box around a mask."""
    x0, y0, x1, y1 = masks.box(truth)
    box = np.zeros_like(truth)
    box[y0:y1, x0:x1] = True
    return box


def middle_box(side: float) -> Guess:
    """A box in the middle of the photo."""

    def guess(truth: np.ndarray) -> np.ndarray:
        height, width = truth.shape
        y, x = round(height * (1 - side) / 2), round(width * (1 - side) / 2)
        box = np.zeros_like(truth)
        box[y : height - y, x : width - x] = True
        return box

    return guess


def score(source: Source, guesses: dict[str, Guess]) -> dict[str, tuple[float, float]]:
    """gIoU and occluded IoU of each guess."""
    whole, hidden = ({name: list[float]() for name in guesses} for _ in range(2))
    for sample in map(source.__getitem__, range(len(source))):
        for truth, occluded in requested(sample):
            visible = truth & ~occluded
            for name, guess in guesses.items():
                answer = guess(truth)
                whole[name].append((answer & truth).sum() / max(1, (answer | truth).sum()))
                if occluded.any():
                    behind = answer & ~visible
                    hidden[name].append((behind & occluded).sum() / (behind | occluded).sum())
    return {name: (float(np.mean(whole[name])), float(np.mean(hidden[name] or [0]))) for name in guesses}


def main() -> None:
    """Command line."""
    args = parse_flags(ReferenceConfig, sys.argv[1:], prog="python scripts/photo_references.py")
    options = {"count": args.samples, "size": args.size, "images_dir": args.images}
    boxes = {f"one box, {side:.2f} of each side": middle_box(side) for side in SIDES}
    on_dev = score(open_source(args.data, "dev", **options), boxes)
    best = max(on_dev, key=lambda name: on_dev[name][0])
    guesses = {"true box": true_box, best: boxes[best], "everything": middle_box(1.0)}
    for name, (giou, occluded) in score(open_source(args.data, "val", **options), guesses).items():
        print(f"{name:<32} gIoU {giou:.3f}  occluded IoU {occluded:.3f}")


if __name__ == "__main__":
    exit_cleanly(main)
