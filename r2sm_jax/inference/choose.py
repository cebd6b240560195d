"""Reads what a finder found, and chooses what of it a sentence means.

A finder knows names. Which of several mugs "the left mug, behind the jug" is, three things say:

    presence    how sure the finder is of the object
    overlap     how likely the decoder, which has read the whole sentence, finds its pixels
    place       where it lies among those found, if the sentence has a word for that

They are added up, and the object with the largest sum is chosen. Where the decoder finds several
objects, so do all whose sum is not far below. Measured in docs/log.md.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from scipy.special import expit

from r2sm_jax.data import masks
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.mask_reader import read_mask
from r2sm_jax.data.masks import RLE, Mask
from r2sm_jax.errors import InputError
from r2sm_jax.finders import Finder
from r2sm_jax.inference.crop_models import SAME_FROM, Outline
from r2sm_jax.inference.parts import Parts
from r2sm_jax.inference.prompts import read_prompt
from r2sm_jax.models.r2sm import R2SMOutput
from r2sm_jax.query import MODAL, Prompt

PLACE_WORDS = (
    (r"left(?:most)?", "x", -1),
    (r"right(?:most)?(?! (?:there|here|now))", "x", 1),
    (r"top(?:most)?|highest|upper(?:most)?", "y", -1),
    (r"bottom(?:most)?|lowest|lower(?:most)?", "y", 1),
    (r"bigg(?:er|est)|larg(?:er|est)", "area", 1),
    (r"small(?:er|est)", "area", -1),
)
"""Words that say which of several; which column of `place_evidence` they are about, and whether
they mean its largest or its smallest value."""
SEVERAL_FROM = 1.2
"""The number of objects that the decoder expects from which on a sentence means several."""
NOT_FAR_BELOW = 0.5
"""Where several are meant, the share of the largest sum that the others must have."""


def find_objects(
    finder: Finder, image: UInt8[np.ndarray, "H W 3"], names: list[str], parts: Parts
) -> dict[str, tuple[Outline, ...]]:
    """Returns what shows of the objects that a finder finds, by name, the surest first.

    A mask is taken as it is, a box is outlined. Of several answers about one object the surest is
    kept. Raises InputError for answers that are not those of a `Finder`, and for boxes if the model
    has no outliner.
    """
    answers = finder(image, names) if names else []
    if len(answers) != len(names):
        raise InputError(
            f"the finder gave {len(answers)} answers for {len(names)} names; give one dict a name"
        )
    found = {}
    for name, answer in zip(names, answers, strict=True):
        outlines: list[Outline] = []
        rles: list[RLE] = []
        for score, place in _read_answer(answer, image.shape[:2], name):
            # A finder says where it is sure enough, so what it says is rather there than not.
            outline = parts.outline(image, place)._replace(presence=(1 + score) / 2)
            rle = masks.encode(outline.mask)
            ious = masks.ious([rle], rles, [False] * len(rles))
            if outline.mask.any() and ious.max(initial=0) < SAME_FROM:
                outlines.append(outline)
                rles.append(rle)
        found[name] = tuple(outlines)
    return found


def _read_answer(
    answer: Any, size: tuple[int, int], name: str
) -> list[tuple[float, Mask | Prompt]]:
    """Returns the scores and places that a finder gives for a name, the surest first; without those
    that lie outside of the image. Raises InputError for anything else."""
    where = f"{name!r} of the finder"
    places: list[Mask | Prompt]
    try:
        scores = np.asarray(answer["scores"], float)
        if "masks" in answer:
            places = [read_mask(one, size, where, may_be_empty=True) for one in answer["masks"]]
        else:
            height, width = size
            boxes = np.asarray(answer["boxes"], float).reshape(-1, 4)
            boxes = boxes.clip(0, [width, height, width, height])
            is_inside = (boxes[:, :2] < boxes[:, 2:]).all(1)
            scores = scores[is_inside]
            places = [read_prompt(box, [], size, where) for box in boxes[is_inside]]
        return sorted(zip(scores.tolist(), places, strict=True), key=lambda one: -one[0])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"what the finder says of {name!r} cannot be used ({error}); give scores, and as many "
            "boxes x0 y0 x1 y1 or masks, as arrays or as tensors on the CPU"
        ) from None


def choose(
    found: Sequence[Outline], text: str, output: R2SMOutput, letterbox: Letterbox
) -> tuple[Outline, ...]:
    """Returns the objects that a sentence means, of those that a finder found.

    Args:
        text: the sentence.
        output: what the decoder says to it, as numpy arrays without the axes b and k.
        letterbox: that of the image.
    """
    if not found:
        return ()
    values = np.array([outline.presence for outline in found])
    values += overlap_evidence(found, output, letterbox) + place_evidence(found, text)
    best = int(values.argmax())
    if expit(output.presence[1:]).sum() < SEVERAL_FROM:
        return (found[best],)
    limit = NOT_FAR_BELOW * values[best]
    return tuple(one for one, value in zip(found, values, strict=True) if value >= limit)


def overlap_evidence(
    found: Sequence[Outline], output: R2SMOutput, letterbox: Letterbox
) -> Float[np.ndarray, " m"]:
    """Computes the mean probability of the decoder's own visible mask on each object."""
    probability = expit(output.masks[0, MODAL].astype(np.float32))
    overlaps = []
    for outline in found:
        covered = letterbox.coverage(outline.mask, len(probability)).astype(np.float32)
        overlaps.append((covered * probability).sum() / max(1.0, covered.sum()))
    return np.array(overlaps)


def place_evidence(found: Sequence[Outline], text: str) -> Float[np.ndarray, " m"]:
    """Computes how far each object lies where the sentence says: from 0 to 1 for each of
    `PLACE_WORDS` in it."""
    boxes = np.array([masks.box(outline.mask) for outline in found])
    columns = {
        "x": boxes[:, 0] + boxes[:, 2],
        "y": boxes[:, 1] + boxes[:, 3],
        "area": np.array([masks.area(outline.mask) for outline in found]),
    }
    evidence = np.zeros(len(found))
    for words, column, sign in PLACE_WORDS:
        values = sign * columns[column]
        if re.search(rf"\b(?:{words})\b", text, re.IGNORECASE) and np.ptp(values):
            evidence += (values - values.min()) / np.ptp(values)
    return evidence
