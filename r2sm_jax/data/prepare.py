"""A sample -> arrays at the resolution of training, and random changes of both."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt8
from PIL import Image, ImageEnhance

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.query import AMODAL

Tokenize = Callable[[Sequence[str]], list[list[int]]]
"""Sentences -> token ids."""

MIN_SHARE_IN_CROP = 0.9
"""A query stays if this share of the complete mask of each of its instances lies in the crop."""
NAMES_A_SIDE = re.compile(r"\b(left|right)", re.IGNORECASE)
"""Sentences that are wrong about a mirrored image."""
NAMES_A_POSITION = re.compile(
    r"\b(?:(?:left|right|top|bottom|upper|lower|outer|inner|front|rear|back)(?:most)?|last|end"
    r"|mid|middle|center|centre|central|between|above|below|under|beside|next|adjacent"
    r"|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|\d+(?:st|nd|rd|th)"
    r"|near(?:er|est)?|clos(?:er|est)|far(?:ther|thest)?|further|furthest)\b",
    re.IGNORECASE,
)
"""Sentences that count along a row or compare positions, such as "the second mug from the top"."""


class Prepared(NamedTuple):
    """One sample at the resolution of training: the fields of `Batch` (batches.py), of all of its
    instances and queries, and the sentences of these."""

    image: UInt8[np.ndarray, "S S 3"]
    image_mask: Bool[np.ndarray, "S S"]
    masks: UInt8[np.ndarray, "m 2 s s"]
    is_known: Bool[np.ndarray, "m 2"]
    labels: dict[str, Int32[np.ndarray, " m"]]
    boxes: Float32[np.ndarray, "m 4"]
    pixel_weight: UInt8[np.ndarray, "s s"]
    query_instances: Bool[np.ndarray, "k m"]
    is_amodal: Bool[np.ndarray, " k"]
    texts: tuple[str, ...]
    token_ids: list[list[int]]


def prepare(
    sample: Sample,
    *,
    image_size: int,
    mask_size: int,
    vocabulary: Mapping[str, tuple[str, ...]],
    tokenizer: Tokenize,
) -> Prepared:
    """Letterboxes a sample and pools its masks to the resolution of the losses.

    Ignored instances, and queries that mean one, are left out.
    """
    height, width = sample.image.shape[:2]
    letterbox = Letterbox(height, width, image_size)
    instances = [instance for instance in sample.instances if not instance.ignore]
    ignored = [instance.complete for instance in sample.instances if instance.ignore]

    ids = [instance.id for instance in instances]
    queries = [query for query in sample.queries if set(query.instance_ids) <= set(ids)]
    query_instances = [[i in query.instance_ids for i in ids] for query in queries]

    # Most objects are fully visible: their complete mask is the visible one, and is pooled once.
    coverage = np.zeros((len(instances), 2, mask_size, mask_size), np.uint8)
    for pair, instance in zip(coverage, instances, strict=True):
        pair[:] = letterbox.coverage(instance.modal, mask_size)
        if instance.complete is not instance.modal:
            pair[AMODAL] = letterbox.coverage(instance.complete, mask_size)

    labels: dict[str, np.ndarray] = {}
    for attribute, words in vocabulary.items():
        numbers = []
        for instance in instances:
            if attribute == "category":
                word = instance.category
            else:
                word = instance.attributes.get(attribute)
            numbers.append(words.index(word) if word in words else -1)
        labels[attribute] = np.array(numbers, np.int32)

    is_known = [(True, instance.amodal is not None) for instance in instances]
    boxes = np.array([masks.box(instance.complete) for instance in instances], np.float32)
    texts = tuple(query.text for query in queries)
    return Prepared(
        image=letterbox.image(sample.image),
        image_mask=letterbox.valid(),
        masks=coverage,
        is_known=np.array(is_known, bool).reshape(-1, 2),
        labels=labels,
        boxes=boxes.reshape(-1, 4) / max(height, width),
        pixel_weight=_pixel_weight(letterbox, mask_size, ignored),
        query_instances=np.array(query_instances, bool).reshape(len(queries), len(ids)),
        is_amodal=np.array([query.mask_type == "amodal" for query in queries], bool),
        texts=texts,
        token_ids=tokenizer(texts) if texts else [],
    )


def _pixel_weight(
    letterbox: Letterbox, mask_size: int, ignored: Sequence[np.ndarray]
) -> UInt8[np.ndarray, "s s"]:
    """How much of each cell counts, 0..255: no padding, and none of the `ignored` masks."""
    if not ignored:
        return _pool_all_pixels(letterbox, mask_size)
    shape = (letterbox.height, letterbox.width)
    return letterbox.coverage(~masks.union(ignored, shape), mask_size)


@lru_cache(maxsize=64)
def _pool_all_pixels(letterbox: Letterbox, mask_size: int) -> UInt8[np.ndarray, "s s"]:
    """`_pixel_weight` of an image without ignored regions, which photos of one size share."""
    everything = np.ones((letterbox.height, letterbox.width), bool)
    cells = letterbox.coverage(everything, mask_size)
    cells.setflags(write=False)
    return cells


def random_crop(sample: Sample, min_share: float, rng: np.random.Generator) -> Sample:
    """A random window of a sample (`cut_out`), each side at least `min_share` of the image's."""
    height, width = sample.image.shape[:2]
    rows = random_interval(height, rng.uniform(min_share, 1), rng)
    columns = random_interval(width, rng.uniform(min_share, 1), rng)
    return cut_out(sample, (rows, columns))


def cut_out(sample: Sample, window: tuple[slice, slice]) -> Sample:
    """The part of a sample in a window of rows and columns.

    Instances without a pixel in the window are left out. An instance counts as cropped if less than
    `MIN_SHARE_IN_CROP` of it remains. Two kinds of queries are left out: those that mean a cropped
    instance, and those that name a position ("the second mug") in a category with a cropped
    instance.
    """
    instances: list[Instance] = []
    complete_ids: set[int] = set()
    for instance in sample.instances:
        area = np.count_nonzero(instance.complete)
        area_inside = np.count_nonzero(instance.complete[window])
        if area_inside:
            instances.append(instance.map_masks(lambda mask: mask[window]))
        if area_inside >= MIN_SHARE_IN_CROP * area:
            complete_ids.add(instance.id)

    categories = {instance.id: instance.category for instance in sample.instances}
    cropped_categories = {categories[i] for i in categories if i not in complete_ids}
    queries = []
    for query in sample.queries:
        # "The second mug from the left" means another mug once the first one is cropped away.
        is_recounted = any(categories.get(i) in cropped_categories for i in query.instance_ids)
        if is_recounted and NAMES_A_POSITION.search(query.text):
            continue
        if complete_ids.issuperset(query.instance_ids):
            queries.append(query)
    return replace(
        sample, image=sample.image[window], instances=tuple(instances), queries=tuple(queries)
    )


def random_interval(side: int, share: float, rng: np.random.Generator) -> slice:
    """A random part of 0..side, of this share of its length."""
    length = max(1, round(side * share))
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
    x0, y0, x1, y1 = prepared.boxes.T
    return prepared._replace(
        image=prepared.image[:, ::-1],
        image_mask=prepared.image_mask[..., ::-1],
        masks=prepared.masks[..., ::-1],
        boxes=np.stack([1 - x1, y0, 1 - x0, y1], axis=1),
        pixel_weight=prepared.pixel_weight[..., ::-1],
    )


def drop_tokens(
    text_mask: Bool[np.ndarray, "k t"], share: float, rng: np.random.Generator
) -> Bool[np.ndarray, "k t"]:
    """Hides random tokens, so that no single word can decide the mask type.

    The first token stays: a sentence needs one.
    """
    visible = text_mask & (rng.random(text_mask.shape) >= share)
    visible[:, 0] = text_mask[:, 0]
    return visible
