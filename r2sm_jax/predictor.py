"""A trained segmenter behind two calls: `set_image` once, `predict` for any number of queries."""

import hashlib
import warnings
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, UInt8

from r2sm_jax.config import ModelConfig
from r2sm_jax.data.images import ImageLike, Letterbox, as_rgb
from r2sm_jax.errors import InputError
from r2sm_jax.explain import WordShare, word_shares, words_of
from r2sm_jax.models import heads
from r2sm_jax.models.decoder import PixelFeatures
from r2sm_jax.models.r2sm import R2SM
from r2sm_jax.models.text_states import REQUEST_ROWS, TextStates
from r2sm_jax.prediction import InstanceMask, Prediction
from r2sm_jax.query import MaskType

T = TypeVar("T")
CHOICES = ("auto", "modal", "amodal")
"""What `mask_type` may be; auto: the query decides."""
QUERY_BUCKETS = (1, 4, 8)
"""Queries are padded to one of these, so that nothing recompiles; more than the last are done in turns."""
IMAGE_BUCKETS = (1, 8)
"""The same for images in `predict_batch`."""
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


class EncodedImage(NamedTuple):
    """An image that a predictor has looked at. Nothing changes it: any number of threads may ask about it."""

    box: Letterbox
    tokens: Float[jax.Array, "1 h w d"]
    pixels: PixelFeatures


class CutQuery(UserWarning):
    """A query is longer than the language model's limit; its end was not read."""


def check_query(query: str) -> None:
    """Raises InputError for a query without words."""
    if not query.strip():
        raise InputError("the query is empty; say what to segment, such as 'the red mug'")


class Predictor:
    """Answers queries about images. An image is encoded once, whatever is asked about it.

    Any number of threads may share a predictor; but `set_image` sets one image for all of them, so that servers
    `encode` theirs and pass it to `predict`.
    """

    def __init__(self, config: ModelConfig, graphdef: nnx.GraphDef, weights: nnx.State, texts: TextStates):
        self.config, self.texts, self.weights = config, texts, weights
        structure = jax.tree.structure(weights)

        def merged(leaves: Sequence[jax.Array]) -> R2SM:
            return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

        @jax.jit
        def encode(leaves, image, valid):
            return merged(leaves).encode_image(image, valid)

        @jax.jit
        def decode(leaves, tokens, pixels, text, text_mask):
            out = merged(leaves).answer(tokens, pixels, text, text_mask)
            masks, slots = (out.modal, out.amodal, out.iou), (out.slot_modal, out.slot_amodal)
            return jax.nn.sigmoid(out.type_logit), *masks, *slots, jax.nn.sigmoid(out.slot_presence), out.slot_iou

        @jax.jit
        def type_logits(leaves, text, mask):
            model = merged(leaves)
            return model.type_logit(text[None], mask[None])[0] / model.type_temperature[...]

        self._encode, self._decode, self._type_logits = encode, decode, type_logits
        self._image: EncodedImage | None = None

    @property
    def weights(self) -> nnx.State:
        """All weights but the language model's."""
        return self._weights

    @weights.setter
    def weights(self, weights: nnx.State) -> None:
        self._weights, self._leaves = weights, jax.device_put(jax.tree.leaves(weights), jax.local_devices()[0])

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
        tokens, pixels = self._encode(self._leaves, image, valid)
        return self._decoded(tokens, pixels, text, mask)

    def set_image(self, image: ImageLike) -> None:
        """Takes the image that the next queries are about: a file, its bytes, a Pillow image or an RGB array
        `uint8 [H W 3]`.

        Raises:
            InputError: it is not an image that can be read, or too large; see `open_image`.
        """
        self._image = self.encode(image)

    def encode(self, image: ImageLike) -> EncodedImage:
        """Looks at an image, for `predict(..., image=...)`.

        Raises:
            InputError: as `set_image`.
        """
        array = as_rgb(image)
        box = self._box(array)
        tokens, pixels = self._encode(self._leaves, box.image(array)[None], box.valid()[None])
        return EncodedImage(box, tokens, pixels)

    def predict(
        self,
        queries: Sequence[str],
        mask_type: str = "auto",
        image: EncodedImage | None = None,
        abstain: float = 0.0,
    ) -> list[Prediction]:
        """One prediction a query, about the image that was set or that is given; `mask_type` forces the decision, and
        where the probability is nearer than `abstain` to one half, the prediction says that it is undecided.

        Raises:
            InputError: there is no image, a query is empty, the mask type is unknown, or the run has an oracle head
                and no type is forced.
        """
        queries = [queries] if isinstance(queries, str) else list(queries)
        image = image or self._image
        if image is None:
            raise InputError("no image to look at; call set_image first")
        self._check(queries, mask_type)
        found: list[Prediction] = []
        for start in range(0, len(queries), QUERY_BUCKETS[-1]):
            part = queries[start : start + QUERY_BUCKETS[-1]]
            text, mask = self.texts.for_request(_padded(part, _bucket(len(part), QUERY_BUCKETS)))
            answers = self._decoded(image.tokens, image.pixels, text, mask)
            found += self._predictions(part, answers, 0, image.box, mask_type, abstain)
        return found

    def explain(self, query: str) -> list[WordShare]:
        """Which words of a query drove the decision: the calibrated logits that each of them adds for the complete
        shape, see models/explain.py.

        Raises:
            InputError: the query is empty, or the run's head does not decide from the words alone.
        """
        check_query(query)
        if self.config.head not in heads.LEARNED:
            raise InputError(
                f"this run's head, {self.config.head}, does not decide from the words alone: no explanation"
            )
        words = words_of(query)
        word_of = self.texts.word_of_tokens(query, [span for _, *span in words])
        read = [word for word, *_ in words[: int(word_of.max(initial=-1)) + 1]]  # what was cut off drove nothing

        def logits(there: np.ndarray) -> np.ndarray:
            sentences = [" ".join(compress(read, row)) for row in there]
            different = list(dict.fromkeys(sentences))
            found: dict[str, float] = {}
            for start in range(0, len(different), REQUEST_ROWS[-1]):
                part = different[start : start + REQUEST_ROWS[-1]]
                answers = self._type_logits(self._leaves, *self.texts.for_request(_padded(part, REQUEST_ROWS[-1])))
                found |= dict(zip(part, np.asarray(answers).tolist(), strict=False))
            return np.array([found[sentence] for sentence in sentences])

        shares = [*word_shares(logits, len(read)), *[0.0] * (len(words) - len(read))]
        return [WordShare(word, float(share)) for (word, *_), share in zip(words, shares, strict=True)]

    def warm_up(self) -> None:
        """Compiles all that `predict` needs, so that no answer takes longer than others: before a server opens."""
        self.texts.warm_up()
        size, text = self.config.vision.image_size, self.config.text
        image = self.encode(np.zeros((size, size, 3), np.uint8))
        for count in QUERY_BUCKETS:
            states = np.zeros((count, text.max_tokens, len(text.layers), text.dim), np.float16)
            self._decoded(image.tokens, image.pixels, states, np.ones(states.shape[:2], bool))

    def predict_batch(
        self, images: Sequence[ImageLike], queries: Sequence[Sequence[str]], mask_type: str = "auto"
    ) -> list[list[Prediction]]:
        """The predictions for the queries `queries[i]` about `images[i]`; several images are computed at once.

        Raises:
            InputError: as `set_image` and `predict`, or there are not as many lists of queries as images.
        """
        if len(images) != len(queries):
            counts = f"{len(images)} images, but {len(queries)} lists of queries"
            raise InputError(f"{counts}; give one list for each image")
        for asked in queries:
            self._check(asked, mask_type)
        size = QUERY_BUCKETS[-1]
        rows = [(i, asked[at : at + size]) for i, asked in enumerate(queries) for at in range(0, len(asked), size)]
        found: list[list[Prediction]] = [[] for _ in images]
        for start in range(0, len(rows), IMAGE_BUCKETS[-1]):
            part = rows[start : start + IMAGE_BUCKETS[-1]]
            arrays = {i: as_rgb(images[i]) for i, _ in part}
            boxes = {i: self._box(array) for i, array in arrays.items()}
            each = _bucket(max(len(asked) for _, asked in part), QUERY_BUCKETS)
            padded = _padded(part, _bucket(len(part), IMAGE_BUCKETS))
            frames = {i: box.image(arrays[i]) for i, box in boxes.items()}
            frame, valid = (np.stack(x) for x in zip(*((frames[i], boxes[i].valid()) for i, _ in padded), strict=True))
            text, mask = self.texts.for_request([query for _, asked in padded for query in _padded(asked, each)])
            tokens, pixels = self._encode(self._leaves, frame, valid)
            answers = self._decoded(tokens, pixels, text, mask)
            for row, (i, asked) in enumerate(part):
                found[i] += self._predictions(asked, answers, row, boxes[i], mask_type)
        return found

    def _box(self, array: np.ndarray) -> Letterbox:
        return Letterbox(array.shape[0], array.shape[1], self.config.vision.image_size)

    def _check(self, queries: Sequence[str], mask_type: str) -> None:
        for query in queries:
            check_query(query)
        if mask_type not in CHOICES:
            raise InputError(f"mask type {mask_type!r} is unknown; say auto, modal or amodal")
        if mask_type == "auto" and self.config.head == "oracle":
            raise InputError("this run's head is the oracle, which needs the truth; pass --mask-type modal or amodal")

    def _decoded(self, tokens: jax.Array, pixels: PixelFeatures, text: np.ndarray, mask: np.ndarray) -> Answers:
        """`text` and `mask` are of the queries about the first image, then the second, ..."""
        text, mask = (x.reshape(len(tokens), -1, *x.shape[1:]) for x in (text, mask))
        return Answers(*map(np.asarray, self._decode(self._leaves, tokens, pixels, text, mask)))

    def _predictions(
        self, queries: Sequence[str], answers: Answers, row: int, box: Letterbox, mask_type: str, abstain: float = 0.0
    ) -> list[Prediction]:
        learned = answers.probability[row, : len(queries)]
        probability = self.probabilities(learned, queries, [None] * len(queries))
        one = Answers(*(x[row] for x in answers))
        return [
            self._prediction(q, float(probability[i]), one, i, box, mask_type, abstain) for i, q in enumerate(queries)
        ]

    def _prediction(
        self, query: str, probability: float, answers: Answers, i: int, box: Letterbox, forced: str, abstain: float
    ) -> Prediction:
        """The answer to query `i` of one image: `answers` are without their axis b."""
        mask_type: MaskType = "amodal" if (probability > 0.5 if forced == "auto" else forced == "amodal") else "modal"
        modal, amodal = box.undo(answers.modal[i]) > 0, box.undo(answers.amodal[i]) > 0
        instances = []
        for q in np.argsort(-answers.slot_presence[i]):
            score = float(answers.slot_presence[i, q])
            if score < PRESENT:
                break
            masks = box.undo(answers.slot_modal[i, q]) > 0, box.undo(answers.slot_amodal[i, q]) > 0
            masks = masks[0], masks[0] | masks[1]
            chosen = masks[mask_type == "amodal"]
            if chosen.any():
                instances.append(InstanceMask(score, chosen, *masks))
        score = float(answers.iou[i, int(mask_type == "amodal")])
        unread = self.texts.cut_off(query) if query in self.texts.truncated else ""
        if unread:
            said = f"{unread[:60]!r}{' ...' if len(unread) > 60 else ''}"
            limit = f"the query is longer than {self.texts.max_tokens} tokens"
            warnings.warn(f"{limit}; this was not read: {said}", CutQuery, stacklevel=2)
        undecided = forced == "auto" and abs(probability - 0.5) < abstain
        return Prediction(
            query, mask_type, probability, score, modal, amodal | modal, tuple(instances), undecided, unread
        )


def _bucket(count: int, buckets: Sequence[int]) -> int:
    return next(b for b in buckets if b >= count)


def _padded(items: Sequence[T], count: int) -> list[T]:
    return [*items, *[items[0]] * (count - len(items))]
