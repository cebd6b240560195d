"""Random crops and colours. Both keep a sentence true: order and hues stay, and what is asked for stays whole.

Mirroring is done later, on what is prepared once (pipeline.py).
"""

from dataclasses import replace

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageEnhance

from r2sm_jax.data.samples import Instance, Sample

KEPT_WHOLE = 0.9
"""A query stays if this share of the complete mask of each instance that it means lies in the crop."""


def random_crop(sample: Sample, smallest: float, rng: np.random.Generator) -> Sample:
    """A window of the sample, each side at least `smallest` of the image's, image and masks cut alike.

    So modal ⊆ amodal stays. Instances without a pixel in the window go, and queries that mean an instance of which
    more than a tenth is cut off.
    """
    height, width = sample.image.shape[:2]
    rows, columns = _interval(height, smallest, rng), _interval(width, smallest, rng)
    kept: list[Instance] = []
    whole: set[int] = set()
    for instance in sample.instances:
        complete = instance.modal if instance.amodal is None else instance.amodal
        inside = np.count_nonzero(complete[rows, columns])
        if inside:
            amodal = None if instance.amodal is None else instance.amodal[rows, columns]
            kept.append(replace(instance, modal=instance.modal[rows, columns], amodal=amodal))
        if inside >= KEPT_WHOLE * np.count_nonzero(complete):
            whole.add(instance.id)
    queries = tuple(query for query in sample.queries if whole.issuperset(query.instance_ids))
    return replace(sample, image=sample.image[rows, columns], instances=tuple(kept), queries=queries)


def _interval(side: int, smallest: float, rng: np.random.Generator) -> slice:
    length = max(1, round(side * rng.uniform(smallest, 1)))
    start = int(rng.integers(side - length + 1))
    return slice(start, start + length)


def jitter_colours(
    image: UInt8[np.ndarray, "H W 3"], strength: float, rng: np.random.Generator
) -> UInt8[np.ndarray, "H W 3"]:
    """Brightness, contrast and saturation, each times a factor in 1 ± `strength`. Hues stay: queries name colours."""
    jittered = Image.fromarray(np.ascontiguousarray(image))
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        jittered = change(jittered).enhance(rng.uniform(1 - strength, 1 + strength))
    return np.asarray(jittered)
