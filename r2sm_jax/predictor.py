"""A trained segmenter behind two calls: `set_image` once, `predict` for any number of queries."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, UInt8

from r2sm_jax.data.schema import MaskType
from r2sm_jax.data.transforms import Letterbox, open_image
from r2sm_jax.errors import InputError
from r2sm_jax.models import heads
from r2sm_jax.models.r2sm import R2SM, ModelConfig
from r2sm_jax.models.text_states import TextStates

QUERY_BUCKETS = (1, 4, 8)
"""Queries are padded to one of these, so that nothing recompiles; more than the last are done in turns."""
PRESENT = 0.5
"""Instances with a lower presence probability are not reported."""


class Answers(NamedTuple):
    """Raw answers on numpy: k queries about each of b images, masks as logits at mask resolution."""

    probability: Float[np.ndarray, "b k"]
    modal: Float[np.ndarray, "b k h w"]
    amodal: Float[np.ndarray, "b k h w"]
    iou: Float[np.ndarray, "b k 2"]
    slot_modal: Float[np.ndarray, "b k q h w"]
    slot_amodal: Float[np.ndarray, "b k q h w"]
    slot_presence: Float[np.ndarray, "b k q"]
    slot_iou: Float[np.ndarray, "b k q 2"]


@dataclass(frozen=True)
class InstanceMask:
    """One of the instances that a query means. `mask` is of the type that was decided."""

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

    @property
    def occluded(self) -> Bool[np.ndarray, "H W"]:
        """The hidden part."""
        return self.amodal & ~self.modal

    @property
    def mask(self) -> Bool[np.ndarray, "H W"]:
        """The mask that was asked for."""
        return self.amodal if self.mask_type == "amodal" else self.modal


def check_query(query: str) -> None:
    """Raises InputError for a query without words."""
    if not query.strip():
        raise InputError("the query is empty; say what to segment, such as 'the red mug'")


class Predictor:
    """Holds the weights and one encoded image."""

    def __init__(self, config: ModelConfig, graphdef: nnx.GraphDef, weights: nnx.State, texts: TextStates):
        self.config, self.texts, self.weights = config, texts, weights

        @jax.jit
        def answer(weights, image, valid, text, text_mask):
            model: R2SM = nnx.merge(graphdef, weights)
            out = model(image, valid, text, text_mask)
            amodal, slots = (
                (out.modal, out.slot_modal) if config.head == heads.NO_HEAD else (out.amodal, out.slot_amodal)
            )
            probability, presence = jax.nn.sigmoid(out.type_logit), jax.nn.sigmoid(out.slot_presence)
            return probability, out.modal, amodal, out.iou, out.slot_modal, slots, presence, out.slot_iou

        self._answer = answer
        self._image: tuple[np.ndarray, Letterbox] | None = None

    @property
    def weights_sha256(self) -> str:
        """Of all weights but the language model's."""
        digest = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.weights):
            array = np.ascontiguousarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
        return digest.hexdigest()

    def probabilities(
        self, learned: Float[np.ndarray, "*n"], texts: Sequence[str], truth: Sequence[MaskType | None]
    ) -> Float[np.ndarray, "*n"]:
        """Probability of amodal by the run's head; references read the sentence (or the truth) instead."""
        reference = heads.REFERENCES.get(self.config.head)
        if reference is None:
            return learned
        return np.array([reference(t, w) == "amodal" for t, w in zip(texts, truth, strict=True)], float)

    def answer(
        self, image: UInt8[np.ndarray, "b S S 3"], valid: Bool[np.ndarray, "b S S"], texts: Sequence[Sequence[str]]
    ) -> Answers:
        """Answers the same number of queries about each of several letterboxed images."""
        text, mask = self.texts([query for row in texts for query in row])
        text, mask = (x.reshape(len(texts), -1, *x.shape[1:]) for x in (text, mask))
        return Answers(*map(np.asarray, self._answer(self.weights, image, valid, text, mask)))

    def set_image(self, image: str | Path | np.ndarray) -> None:
        """Takes the image that the next queries are about: a file or an RGB array `uint8 [H W 3]`.

        Raises:
            InputError: the file is not a readable image.
        """
        array = open_image(image) if isinstance(image, str | Path) else np.asarray(image)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise InputError(f"an image array must be uint8 [H W 3], not {array.dtype} {list(array.shape)}")
        self._image = array, Letterbox(array.shape[0], array.shape[1], self.config.vision.image_size)

    def predict(
        self, queries: Sequence[str], mask_type: Literal["auto", "modal", "amodal"] = "auto"
    ) -> list[Prediction]:
        """One prediction a query; `mask_type` forces the decision.

        Raises:
            InputError: no image was set, a query is empty, or the run has an oracle head and no type is forced.
        """
        if self._image is None:
            raise InputError("no image to look at; call set_image first")
        for query in queries:
            check_query(query)
        if mask_type == "auto" and self.config.head == "oracle":
            raise InputError("this run's head is the oracle, which needs the truth; pass --mask-type modal or amodal")
        image, box = self._image
        frame, valid = box.image(image)[None], box.valid()[None]
        found: list[Prediction] = []
        for start in range(0, len(queries), QUERY_BUCKETS[-1]):
            part = list(queries[start : start + QUERY_BUCKETS[-1]])
            size = next(b for b in QUERY_BUCKETS if b >= len(part))
            answers = self.answer(frame, valid, [part + [part[0]] * (size - len(part))])
            probability = self.probabilities(answers.probability[0, : len(part)], part, [None] * len(part))
            found += [
                self._prediction(part[i], float(probability[i]), answers, i, box, mask_type) for i in range(len(part))
            ]
        return found

    def _prediction(
        self, query: str, probability: float, answers: Answers, i: int, box: Letterbox, forced: str
    ) -> Prediction:
        mask_type: MaskType = "amodal" if (probability > 0.5 if forced == "auto" else forced == "amodal") else "modal"
        modal, amodal = box.undo(answers.modal[0, i]) > 0, box.undo(answers.amodal[0, i]) > 0
        instances = []
        for q in np.argsort(-answers.slot_presence[0, i]):
            score = float(answers.slot_presence[0, i, q])
            masks = box.undo(answers.slot_modal[0, i, q]) > 0, box.undo(answers.slot_amodal[0, i, q]) > 0
            masks = masks[0], masks[0] | masks[1]
            chosen = masks[mask_type == "amodal"]
            if score >= PRESENT and chosen.any():
                instances.append(InstanceMask(score, chosen, *masks))
        score = float(answers.iou[0, i, int(mask_type == "amodal")])
        return Prediction(query, mask_type, probability, score, modal, amodal | modal, tuple(instances))
