"""The answer to one query at the image's own resolution, and the words of the query that drove its mask type."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import ImageLike, open_image
from r2sm_jax.errors import InputError, writing
from r2sm_jax.query import MaskType

MASKS = ("mask", "modal", "amodal", "occluded")
"""Names of a prediction's masks; `mask` is the one that was asked for."""
FILES = (*(f"{name}.png" for name in MASKS), "overlay.png", "prediction.json")
SENTENCES = 192
"""Sentences asked about a query, roughly: the more words, the fewer orders, but at least one and its reverse."""
BATCH = 64
"""Sentences encoded at once; the last batch is padded."""


class WordShare(NamedTuple):
    """A word as it was written, and the logits that it adds: above 0 for amodal, below for modal."""

    word: str
    share: float


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
    presence: float = 1.0
    """Probability that the image has what the query means. Below the run's threshold the masks are empty."""
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
        Raises InputError if this is not the image that was asked about, since its size differs."""
        from r2sm_jax.data.sheet import overlay  # matplotlib's fonts, which an answer does not need

        array = open_image(image)
        if array.shape[:2] != self.modal.shape:
            sizes = (
                " x ".join(map(str, array.shape[1::-1])),
                " x ".join(map(str, self.modal.shape[::-1])),
            )
            raise InputError(
                f"the image is {sizes[0]}, the masks are {sizes[1]} pixels; give the image asked about"
            )
        return overlay(array, self.modal, self.occluded, self.mask_type)

    def _named(self, name: str) -> Bool[np.ndarray, "H W"]:
        if name not in MASKS:
            raise InputError(
                f"there is no mask {name!r}; say {', '.join(MASKS[:-1])} or {MASKS[-1]}"
            )
        return getattr(self, name)

    def to_json(self, words: Sequence[WordShare] = ()) -> dict[str, Any]:
        """The answer, and what `Predictor.explain` gave, as JSON values; masks are as `rle` gives them."""
        return {
            "query": self.query,
            "mask_type": self.mask_type,
            "amodal_probability": self.amodal_probability,
            **({"undecided": True} if self.undecided else {}),
            **(
                {"words": [{"word": word, "share": round(share, 4)} for word, share in words]}
                if words
                else {}
            ),
            "score": self.score,
            "presence": self.presence,
            **{name: self.rle(name) for name in MASKS},
            "instances": [
                {"score": i.score, **{name: masks.encode(getattr(i, name)) for name in MASKS[:3]}}
                for i in self.instances
            ],
            "size": list(self.mask.shape),
        }

    def write(self, folder: Path, image: np.ndarray, words: Sequence[WordShare] = ()) -> None:
        """Writes `FILES` into `folder`; masks are 0 or 255 at the image's own resolution. `words` go below the overlay.
        Raises InputError if the folder cannot be written, or as `overlay`."""
        from r2sm_jax.data.sheet import with_words

        overlay = self.overlay(image)
        with writing(folder / "prediction.json") as part:
            for name in MASKS:
                (folder / f"{name}.png").write_bytes(self.png(name))
            Image.fromarray(with_words(overlay, words) if words else overlay).save(
                folder / "overlay.png"
            )
            part.write_text(json.dumps(self.to_json(words)) + "\n", "utf-8")

    def summary(self, words: Sequence[WordShare] = ()) -> str:
        """The answer in two lines; a third one lists the words of most influence, with their logits for amodal."""
        count = len(self.instances)
        strongest = sorted(words, key=lambda word: -abs(word.share))[:5]
        influence = (
            "\nwords: " + ", ".join(f"{word} {share:+.1f}" for word, share in strongest)
            if words
            else ""
        )
        if self.presence < 0.5 and not (self.amodal.any() or self.instances):
            return f"{self.query}\nnothing of the kind is seen in the image (probability {self.presence:.3f})"
        return (
            f"{self.query}\n{'undecided, rather ' * self.undecided}{self.mask_type} "
            f"(probability of amodal {self.amodal_probability:.3f}), {self.mask.mean():.1%} of the image, "
            f"{count} instance{'' if count == 1 else 's'}, predicted IoU {self.score:.2f}{influence}"
        )


def explain_words(
    query: str,
    word_of_tokens: Callable[[str, list[list[int]]], np.ndarray],
    logits: Callable[[list[str]], Float[np.ndarray, " n"]],
) -> list[WordShare]:
    """The share of every word of a query, its Shapley value (1953), in the logit of amodal.

    That is the mean change of the logit when the word is added, over random orders of the words and their reverses
    (sampled as in Castro et al. 2009, "Polynomial calculation of the Shapley value based on sampling"). Shares add up
    to what all words together change; words of the same meaning divide it. Every sentence goes through the language
    model anew: the states of the other tokens would still carry a word that is only hidden from the head.

    Args:
        word_of_tokens: the word of each token that is read, from the query and the places of its words. Words beyond
            the language model's limit have no share.
        logits: the calibrated logits of amodal of `BATCH` sentences.
    """
    found = list(re.finditer(r"\S+", query))  # punctuation stays with its word
    words = [match.group() for match in found]
    read = int(word_of_tokens(query, [list(match.span()) for match in found]).max(initial=-1)) + 1
    rng = np.random.default_rng(0)
    orders = [rng.permutation(read) for _ in range(max(1, SENTENCES // (2 * (read + 1))))]
    orders += [order[::-1] for order in orders]
    present = [np.argsort(order) < count for order in orders for count in range(read + 1)]
    sentences = [" ".join(compress(words, row)) for row in present]
    unique = list(dict.fromkeys(sentences))
    unique += [""] * (-len(unique) % BATCH)
    known: dict[str, float] = {}
    for start in range(0, len(unique), BATCH):
        batch = unique[start : start + BATCH]
        known |= zip(batch, logits(batch).tolist(), strict=True)
    values = np.array([known[sentence] for sentence in sentences]).reshape(len(orders), read + 1)
    shares = np.zeros(len(words))
    for order, steps in zip(orders, np.diff(values, axis=1), strict=True):
        shares[order] += steps / len(orders)
    return [WordShare(word, float(share)) for word, share in zip(words, shares, strict=True)]
