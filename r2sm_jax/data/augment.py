"""Random changes of training samples: crops, colours, mirroring, tokens that are hidden."""

import re
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image, ImageEnhance

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.prepare import Prepared

MIN_SHARE_IN_CROP = 0.9
"""A query stays if this share of the complete mask of each of its instances lies in the crop."""
NAMES_A_SIDE = re.compile(r"\b(left|right)", re.IGNORECASE)
"""Sentences that are wrong about a mirrored image."""


def random_crop(sample: Sample, min_share: float, rng: np.random.Generator) -> Sample:
    """A random window of a sample, each side at least `min_share` of the image's side.

    Instances without a pixel in the window are left out. So are queries that mean an instance of
    which less than `MIN_SHARE_IN_CROP` remains.
    """
    height, width = sample.image.shape[:2]
    rows = random_interval(height, min_share, rng)
    columns = random_interval(width, min_share, rng)
    window = (rows, columns)

    instances: list[Instance] = []
    complete_ids: set[int] = set()
    for instance in sample.instances:
        area = np.count_nonzero(instance.complete)
        area_inside = np.count_nonzero(instance.complete[window])
        if area_inside:
            amodal = None if instance.amodal is None else instance.amodal[window]
            instances.append(replace(instance, modal=instance.modal[window], amodal=amodal))
        if area_inside >= MIN_SHARE_IN_CROP * area:
            complete_ids.add(instance.id)

    queries = [q for q in sample.queries if complete_ids.issuperset(q.instance_ids)]
    return replace(
        sample, image=sample.image[window], instances=tuple(instances), queries=tuple(queries)
    )


def random_interval(side: int, min_share: float, rng: np.random.Generator) -> slice:
    """A random part of 0..side, of at least `min_share` of its length."""
    length = max(1, round(side * rng.uniform(min_share, 1)))
    start = int(rng.integers(side - length + 1))
    return slice(start, start + length)


def jitter_colours(
    image: UInt8[np.ndarray, "H W 3"], strength: float, rng: np.random.Generator
) -> UInt8[np.ndarray, "H W 3"]:
    """Brightness, contrast and saturation, each times a random factor in 1 ± `strength`.

    Hues stay, since queries name colours.
    """
    jittered = Image.fromarray(np.ascontiguousarray(image))
    for enhancer in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        factor = rng.uniform(1 - strength, 1 + strength)
        jittered = enhancer(jittered).enhance(factor)
    return np.asarray(jittered)


def mirror(prepared: Prepared) -> Prepared:
    """A prepared sample with left and right exchanged. Its sentences stay as they are."""
    x0, y0, x1, y1 = prepared["boxes"].T
    mirrored = {
        "image": prepared["image"][:, ::-1],
        "boxes": np.stack([1 - x1, y0, 1 - x0, y1], axis=1),
    }
    for name in ("image_mask", "modal", "amodal", "pixel_weight"):
        mirrored[name] = prepared[name][..., ::-1]
    return prepared | mirrored


def drop_tokens(
    text_mask: Bool[np.ndarray, "k t"], share: float, rng: np.random.Generator
) -> Bool[np.ndarray, "k t"]:
    """Hides random tokens, so that no single word can decide the mask type.

    The first token stays: a sentence needs one.
    """
    visible = text_mask & (rng.random(text_mask.shape) >= share)
    visible[:, 0] = text_mask[:, 0]
    return visible
