"""Random crops and colours of training images. Both keep a query true: places, hues and its whole target stay.

Mirroring works on prepared samples, see data/batches.py.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageEnhance

from r2sm_jax.data.samples import Instance, Sample

KEPT_WHOLE = 0.9
"""A query stays if this share of the complete mask of each instance that it means lies in the crop."""


def random_crop(sample: Sample, smallest: float, rng: np.random.Generator) -> Sample:
    """A random window of the sample, each side at least `smallest` of the image's, with masks cut like the image.

    Instances without a pixel in the window are left out, and so are queries that mean an instance of which less than
    `KEPT_WHOLE` remains.
    """
    height, width = sample.image.shape[:2]
    window = _interval(height, smallest, rng), _interval(width, smallest, rng)
    kept: list[Instance] = []
    whole: set[int] = set()
    for instance in sample.instances:
        inside = np.count_nonzero(instance.complete[window])
        if inside:
            amodal = None if instance.amodal is None else instance.amodal[window]
            kept.append(replace(instance, modal=instance.modal[window], amodal=amodal))
        if inside >= KEPT_WHOLE * np.count_nonzero(instance.complete):
            whole.add(instance.id)
    queries = tuple(query for query in sample.queries if whole.issuperset(query.instance_ids))
    return replace(sample, image=sample.image[window], instances=tuple(kept), queries=queries)


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
