"""The answer to one query at the image's own resolution, and the words of the query that drove its mask type.

The share of a word is a Shapley value (1953) of the mask-type head's logit: the mean change of the logit when the word
is added, over random orders of the words and their reverses (sampled as in Castro et al. 2009, "Polynomial calculation
of the Shapley value based on sampling"). Every sentence goes through the language model anew: the states of the other
tokens would still carry a word that is only hidden from the head. Shares add up to what all words together change;
words of the same meaning divide it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import ImageLike, open_image
from r2sm_jax.errors import InputError
from r2sm_jax.query import MaskType

MASKS = ("mask", "modal", "amodal", "occluded")
"""Names of a prediction's masks; `mask` is the one that was asked for."""
SENTENCES = 192
"""Sentences asked about a query, roughly: the more words, the fewer orders, but at least one and its reverse."""
BATCH = 64
"""Sentences encoded at once; the last batch is padded."""


@dataclass(frozen=True)
class InstanceMask:
    """One of the instances that a query means. `mask` is of the predicted type."""

    score: float
    mask: Bool[np.ndarray, "H W"]
    modal: Bool[np.ndarray, "H W"]
    amodal: Bool[np.ndarray, "H W"]


@dataclass(frozen=True)
class Prediction:
    """The answer to one query, at the image's own resolution. `amodal = modal ∪ occluded`."""

    query: str
    mask_type: MaskType
    amodal_probability: float
    score: float
    """Predicted IoU of `mask`."""
    modal: Bool[np.ndarray, "H W"]
    amodal: Bool[np.ndarray, "H W"]
    instances: tuple[InstanceMask, ...]
    undecided: bool = False
    """The probability lies within the margin of `predict --abstain`: both `modal` and `amodal` may be the answer."""
    unread: str = ""
    """The end of the query, where it is longer than the language model's limit: it had no influence on the answer."""

    @cached_property
    def occluded(self) -> Bool[np.ndarray, "H W"]:
        """The hidden part."""
        return self.amodal & ~self.modal

    @property
    def mask(self) -> Bool[np.ndarray, "H W"]:
        """The mask that was asked for."""
        return self.amodal if self.mask_type == "amodal" else self.modal

    def rle(self, name: str = "mask") -> dict[str, Any]:
        """COCO's run-length encoding of one of the masks, ready for JSON: `{"size": [H, W], "counts": "..."}`."""
        return masks.encode(self._named(name))

    def polygons(self, name: str = "mask") -> list[list[float]]:
        """Outlines of the parts of one of the masks, largest first, as COCO has them: `[x1, y1, x2, y2, ...]` in
        pixels, true to half a pixel. A polygon cannot have holes; `rle` is exact."""
        return masks.polygons(self._named(name))

    def png(self, name: str = "mask") -> bytes:
        """A PNG file of one of the masks: 0 or 255, one channel."""
        file = BytesIO()
        Image.fromarray(np.where(self._named(name), 255, 0).astype(np.uint8)).save(file, "PNG")
        return file.getvalue()

    def overlay(self, image: ImageLike) -> UInt8[np.ndarray, "H W 3"]:
        """The image with the visible part blue, the occluded part orange, and the mask that was asked for outlined.

        Raises:
            InputError: this is not the image that was asked about, since its size differs.
        """
        from r2sm_jax.data.sheet import overlay  # matplotlib's fonts, which an answer does not need

        array = open_image(image)
        if array.shape[:2] != self.modal.shape:
            sizes = " x ".join(map(str, array.shape[1::-1])), " x ".join(map(str, self.modal.shape[::-1]))
            raise InputError(f"the image is {sizes[0]}, the masks are {sizes[1]} pixels; give the image asked about")
        return overlay(array, self.modal, self.occluded, self.mask_type)

    def _named(self, name: str) -> Bool[np.ndarray, "H W"]:
        if name not in MASKS:
            raise InputError(f"there is no mask {name!r}; say {', '.join(MASKS[:-1])} or {MASKS[-1]}")
        return getattr(self, name)


class WordShare(NamedTuple):
    """A word as it was written, and the logits that it adds: above 0 for amodal, below for modal."""

    word: str
    share: float


def explain_words(
    query: str,
    word_of_tokens: Callable[[str, list[list[int]]], np.ndarray],
    logits: Callable[[list[str]], Float[np.ndarray, " n"]],
) -> list[WordShare]:
    """The share of every word of a query; 0 for words beyond the language model's limit.

    Args:
        word_of_tokens: the word of each token that is read, from the query and the places of its words.
        logits: the calibrated logits of amodal of `BATCH` sentences.
    """
    words = words_of(query)
    read = int(word_of_tokens(query, [span for _, *span in words]).max(initial=-1)) + 1

    def logits_of(present: np.ndarray) -> np.ndarray:
        names = [word for word, *_ in words[:read]]
        sentences = [" ".join(compress(names, row)) for row in present]
        unique = list(dict.fromkeys(sentences))
        asked = [*unique, *[""] * (-len(unique) % BATCH)]
        values = [value for i in range(0, len(asked), BATCH) for value in logits(asked[i : i + BATCH]).tolist()]
        found = dict(zip(asked, values, strict=True))
        return np.array([found[sentence] for sentence in sentences])

    shares = [*word_shares(logits_of, read), *[0.0] * (len(words) - read)]
    return [WordShare(word, float(share)) for (word, *_), share in zip(words, shares, strict=True)]


def words_of(query: str) -> list[tuple[str, int, int]]:
    """Words with the places of their first and behind their last character; punctuation stays with its word."""
    return [(match.group(), *match.span()) for match in re.finditer(r"\S+", query)]


def word_shares(
    logits: Callable[[Bool[np.ndarray, "n w"]], Float[np.ndarray, " n"]], words: int
) -> Float[np.ndarray, " w"]:
    """Share of each of `words` words; `logits` takes sets of words that are present."""
    rng = np.random.default_rng(0)
    orders = [rng.permutation(words) for _ in range(max(1, SENTENCES // (2 * (words + 1))))]
    orders += [order[::-1] for order in orders]
    present = np.stack([np.argsort(order) < count for order in orders for count in range(words + 1)])
    steps = np.diff(logits(present).reshape(len(orders), words + 1), axis=1)
    shares = np.zeros(words)
    for order, step in zip(orders, steps, strict=True):
        shares[order] += step
    return shares / len(orders)
