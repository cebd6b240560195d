"""Which objects of a photo are complete, by the visible masks of all that is annotated.

A COCO instances file says what is visible in each photo. An object counts as complete if its mask
is in one part and touches neither the border nor another mask. The mask of a larger object that is
drawn right through it is allowed, as a table may be drawn through a cup: then nothing that is
annotated can hide a part of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import ndimage

from r2sm_jax.data import masks

TOUCH_DISTANCE = 0.004
"""In longer sides of the photo, up to which masks touch each other or the border."""
MIN_LARGEST_PART = 0.96
"""Share of a mask in its largest part; below it, something lies in front of its middle."""
MIN_AREA_RATIO = 1.5
"""Of a mask that is drawn through another one."""
MIN_THROUGH_SHARE = 0.6
"""Of the other mask that it covers."""


def find_complete(visible_masks: Sequence[masks.Mask]) -> list[bool]:
    """Which of the visible masks `[H W]` of a photo must be complete: see the top of this file."""
    areas = [masks.area(mask) for mask in visible_masks]
    return [
        area > 0 and _is_complete(index, visible_masks, areas) for index, area in enumerate(areas)
    ]


def _is_complete(index: int, visible_masks: Sequence[masks.Mask], areas: Sequence[int]) -> bool:
    mask = visible_masks[index]
    area = areas[index]
    height, width = mask.shape
    x0, y0, x1, y1 = masks.box(mask)
    gap = max(1, round(TOUCH_DISTANCE * max(height, width)))
    if min(x0, y0) < gap or x1 > width - gap or y1 > height - gap:
        return False

    labelled: Any = ndimage.label(mask[y0:y1, x0:x1])  # scipy's stubs do not know that it is a pair
    labels, _ = labelled
    part_areas = np.bincount(labels.ravel())[1:]
    if part_areas.max() < MIN_LARGEST_PART * part_areas.sum():
        return False

    window = np.s_[y0 - gap : y1 + gap, x0 - gap : x1 + gap]
    mask = mask[window]
    grown_mask = None  # made once, and only where another mask is near
    for other_index, other in enumerate(visible_masks):
        other = other[window]
        if other_index == index or not other.any():
            continue

        is_larger = areas[other_index] >= MIN_AREA_RATIO * area
        if is_larger and masks.area(other & mask) >= MIN_THROUGH_SHARE * area:
            continue  # drawn right through it
        if grown_mask is None:
            grown_mask = ndimage.binary_dilation(mask, iterations=gap)
        if (other & grown_mask).any():
            return False
    return True
