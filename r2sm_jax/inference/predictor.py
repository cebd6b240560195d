"""A trained segmenter behind two calls: `set_image` once, `predict` for any number of queries."""

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, UInt8
from scipy.special import expit

from r2sm_jax.config import MatmulPrecision, ModelConfig
from r2sm_jax.data.dataset import is_text
from r2sm_jax.data.images import ImageLike, Letterbox, open_image
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.inference.prediction import InstanceMask, Prediction, WordShare, explain_words
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.mask_decoder import PixelFeatures
from r2sm_jax.models.matmul import products
from r2sm_jax.models.r2sm import NOT_CALIBRATED, R2SM, Calibration, R2SMOutput
from r2sm_jax.query import MaskType
from r2sm_jax.training.sharding import whole

T = TypeVar("T")
CHOICES = ("auto", "modal", "amodal")
"""Values of `mask_type`; auto: the query decides."""
QUERY_BUCKETS = (1, 4, 8)
"""Queries about an image are padded to one of these numbers, so that nothing recompiles; more than the last are
answered in several rows."""
ROWS = 8
"""Rows of a batch of images; the last batch is padded."""
PRESENT = 0.5
"""A `Prediction` leaves out instances with a lower presence probability."""
TextEncoding = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]
"""Token states [k t l e] of sentences, and which tokens are real [k t]."""


class EncodedImage(NamedTuple):
    """The features of an image. Nothing changes them: any number of threads may ask about it."""

    box: Letterbox
    tokens: Float[jax.Array, "1 h w d"]
    pixels: PixelFeatures


class QueryOutputs(NamedTuple):
    """The model's outputs for one query, as numpy arrays without the axes b and k, and the letterbox that brings its
    masks back to the image's own resolution."""

    query: str
    box: Letterbox
    outputs: R2SMOutput

    def enlarge(self, modal: Any, amodal: Any = None) -> Bool[np.ndarray, "*n H W"]:
        """Masks at the image's own size, of logits [*n h w] in `outputs`: modal ones alone, or both: complete masks."""
        mask = self.box.undo(modal) > 0
        return mask if amodal is None else mask | (self.box.undo(amodal) > 0)


class CutQuery(UserWarning):
    """A query is longer than the language model's limit; its end was not read."""


def check_query(query: str) -> None:
    """Raises InputError for a query without words, and for one that no file in UTF-8 could hold."""
    if not isinstance(query, str) or not re.search(r"\w", query):
        raise InputError(
            "the query is empty or has no words; say what to segment, such as 'the red mug'"
        )
    if not is_text(query):
        raise InputError("the query holds half of a character; write it in UTF-8")


class Predictor:
    """Answers queries about images. An image of `set_image` or `encode` is encoded once; `answer_all` and
    `predict_batch` encode an image once for every 8 queries.

    Any number of threads may share a predictor; but `set_image` sets one image for all of them, so that servers
    `encode` theirs and pass it to `predict`.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphdef: nnx.GraphDef,
        weights: nnx.State,
        texts: TextStates,
        calibration: Calibration = NOT_CALIBRATED,
        kind: MatmulPrecision = "float32",
    ):
        """`kind`: how dense layers and convolutions multiply (cpu.py), but for the language model's."""
        self.config, self.texts, self.kind, self.weights = config, texts, kind, weights
        self.calibration = calibration
        functions = (R2SM.encode_image, R2SM.answer, _calibrated)
        structure = jax.tree.structure(weights)
        self._encode, self._answer, self._type_logits = (
            compiled(f, graphdef, structure, kind) for f in functions
        )
        self._image: EncodedImage | None = None

    @property
    def weights(self) -> nnx.State:
        """All weights but the language model's."""
        return self._weights

    @weights.setter
    def weights(self, weights: nnx.State) -> None:
        self._weights = jax.tree.map(whole, weights)
        self._leaves = jax.device_put(jax.tree.leaves(self._weights), jax.local_devices()[0])

    @property
    def _calibration(self) -> Calibration:
        """As arrays, so that no compiled function depends on the values."""
        return Calibration(*(np.float32(value) for value in self.calibration))

    @property
    def weights_sha256(self) -> str:
        """Hash of all weights but the language model's."""
        digest = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.weights):
            array = np.ascontiguousarray(leaf)
            digest.update(
                f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode()
                + array.tobytes()
            )
        return digest.hexdigest()

    def set_image(self, image: ImageLike) -> None:
        """Takes the image that the next queries are about: a file, its bytes, a Pillow image or an RGB array
        `uint8 [H W 3]`. Raises InputError if it is not an image that can be read, or too large; see `open_image`."""
        self._image = self.encode(image)

    def encode(self, image: ImageLike) -> EncodedImage:
        """The features of an image, for `predict(..., image=...)`. Raises InputError as `set_image`."""
        array = open_image(image)
        box = self._box(array)
        tokens, pixels = self._encode(self._leaves, box.image(array)[None], box.valid()[None])
        return EncodedImage(box, tokens, pixels)

    def predict(
        self,
        queries: Sequence[str],
        mask_type: str = "auto",
        image: EncodedImage | ImageLike | None = None,
        abstain: float = 0.0,
    ) -> list[Prediction]:
        """One prediction for each query, about the image that was set or that is given.

        `mask_type` forces the decision. A probability that is nearer than `abstain` to one half is undecided. Raises
        InputError if there is no image, a query is empty, the mask type is unknown, or the run has an oracle head and
        no type is forced.
        """
        queries = [queries] if isinstance(queries, str) else list(queries)
        self.check(queries, mask_type)
        image = self._image if image is None else image
        if image is None:
            raise InputError("no image to look at; call set_image first")
        image = image if isinstance(image, EncodedImage) else self.encode(image)
        found: list[Prediction] = []
        for part in _parts([(None, query) for query in queries], QUERY_BUCKETS[-1]):
            decoded = self._decode(
                image.tokens, image.pixels, [(image.box, part)], self.texts.for_request
            )
            found += [self.to_prediction(outputs, mask_type, abstain) for _, outputs in decoded]
        return found

    def explain(self, query: str) -> list[WordShare]:
        """Which words of a query drove the decision: the calibrated logits that each of them adds for the complete
        shape, see prediction.py. Raises InputError if the query is empty, or the run's head does not decide from the
        words alone."""
        check_query(query)
        if self.config.head not in heads.LEARNED:
            raise InputError(
                f"this run's head, {self.config.head}, does not decide from the words: no explanation"
            )

        def logits(sentences: list[str]) -> np.ndarray:
            return self.amodal_logits(*self.texts.for_request(sentences))

        return explain_words(query, self.texts.word_of_tokens, logits)

    def amodal_logits(
        self, states: Float[np.ndarray, "k t l e"], mask: Bool[np.ndarray, "k t"]
    ) -> Float[np.ndarray, " k"]:
        """The calibrated logits of a learned head that sentences ask for the complete shape."""
        return np.asarray(self._type_logits(self._leaves, states, mask, self._calibration))

    def warm_up(self) -> None:
        """Compiles all that `predict` needs, so that no answer takes longer than others: before a server opens."""
        self.texts.warm_up()
        size = self.config.vision.image_size
        image = self.encode(np.zeros((size, size, 3), np.uint8))
        for count in QUERY_BUCKETS:
            self.predict(["anything"] * count, "modal", image)

    def predict_batch(
        self, images: Sequence[ImageLike], queries: Sequence[Sequence[str]], mask_type: str = "auto"
    ) -> list[list[Prediction]]:
        """The predictions for the queries `queries[i]` about `images[i]`; several images are computed at once. Raises
        InputError as `set_image` and `predict`, or if there is not one list of queries for each image."""
        if len(images) != len(queries):
            raise InputError(
                f"{len(images)} images, but {len(queries)} lists of queries; give one list for each image"
            )
        queries = [[of_image] if isinstance(of_image, str) else of_image for of_image in queries]
        for of_image in queries:
            self.check(of_image, mask_type)
        found: list[list[Prediction]] = [[] for _ in images]
        asked = (
            (open_image(image), [(i, query) for query in queries[i]])
            for i, image in enumerate(images)
        )
        for i, outputs in self.answer_all(
            asked, self.texts.for_request, ROWS if len(images) > 1 else 1
        ):
            found[i].append(self.to_prediction(outputs, mask_type))
        return found

    def answer_all(
        self,
        asked: Iterable[tuple[UInt8[np.ndarray, "H W 3"], Sequence[tuple[T, str]]]],
        texts: TextEncoding | None = None,
        rows: int = ROWS,
    ) -> Iterator[tuple[T, QueryOutputs]]:
        """The one loop that letterboxes images, batches them and answers queries. Gives the outputs in order.

        Args:
            asked: images, each with its queries: any key of yours, which is returned with the outputs, and the text.
            texts: encodes the texts; default: `self.texts`, to which they should be added beforehand.
            rows: rows in every batch, each of up to 8 queries about one image; the last batch is padded.
        """
        waiting = (
            (box, box.image(image), part)
            for image, queries in asked
            for box in [self._box(image)]
            for part in _parts(queries, QUERY_BUCKETS[-1])
        )
        while batch := list(islice(waiting, rows)):
            padded = _padded(batch, rows)
            frames, valid = (
                np.stack([frame for _, frame, _ in padded]),
                np.stack([box.valid() for box, *_ in padded]),
            )
            tokens, pixels = self._encode(self._leaves, frames, valid)
            yield from self._decode(
                tokens, pixels, [(box, part) for box, _, part in batch], texts or self.texts
            )

    def _decode(
        self,
        tokens: jax.Array,
        pixels: PixelFeatures,
        rows: Sequence[tuple[Letterbox, Sequence[tuple[T, str]]]],
        texts: TextEncoding,
    ) -> Iterator[tuple[T, QueryOutputs]]:
        """The outputs for the queries of every row, about the image of that row; images beyond these are padding."""
        width = next(
            count for count in QUERY_BUCKETS if count >= max(len(part) for _, part in rows)
        )
        queries = _padded(
            [_padded([text for _, text in part], width) for _, part in rows], len(tokens)
        )
        states, mask = (
            x.reshape(len(tokens), width, *x.shape[1:]) for x in texts(list(chain(*queries)))
        )
        decoded = jax.device_get(
            self._answer(self._leaves, tokens, pixels, states, mask, self._calibration)
        )
        for b, (box, part) in enumerate(rows):
            for k, (key, text) in enumerate(part):
                yield key, QueryOutputs(text, box, R2SMOutput(*(x[b, k] for x in decoded)))

    def to_prediction(
        self, given: QueryOutputs, mask_type: str = "auto", abstain: float = 0.0
    ) -> Prediction:
        """The answer to one query as arrays, with the instances that are probably present, the surest first."""
        probability, decision = self.decide(given, mask_type)
        out, amodal = given.outputs, decision == "amodal"
        presence, instances = expit(out.slot_presence), []
        for q in np.argsort(-presence)[: int((presence >= PRESENT).sum())]:
            modal, whole = (
                given.enlarge(out.slot_modal[q]),
                given.enlarge(out.slot_modal[q], out.slot_amodal[q]),
            )
            if (chosen := whole if amodal else modal).any():
                instances.append(InstanceMask(float(presence[q]), chosen, modal, whole))
        return Prediction(
            query=given.query,
            mask_type=decision,
            amodal_probability=probability,
            score=float(out.iou[int(amodal)]),
            modal=given.enlarge(out.modal),
            amodal=given.enlarge(out.modal, out.amodal),
            instances=tuple(instances) if out.presence > self.config.presence_threshold else (),
            presence=float(expit(out.presence)),
            undecided=mask_type == "auto" and abs(probability - 0.5) < abstain,
            unread=self._unread(given.query),
        )

    def decide(
        self, given: QueryOutputs, mask_type: str = "auto", requested: MaskType | None = None
    ) -> tuple[float, MaskType]:
        """Probability of amodal, and the mask type that follows unless `mask_type` forces one. The oracle head reads
        the `requested` type."""
        reference = heads.REFERENCES.get(self.config.head)
        decided = (
            expit(given.outputs.amodal_logit)
            if reference is None
            else reference(given.query, requested) == "amodal"
        )
        amodal = decided > 0.5 if mask_type == "auto" else mask_type == "amodal"
        return float(decided), "amodal" if amodal else "modal"

    def _unread(self, query: str) -> str:
        """The end of a query that is longer than the language model's limit, with a warning."""
        unread = self.texts.cut_off(query) if query in self.texts.truncated else ""
        if unread:
            shown = f"{unread[:200]!r}{' ...' if len(unread) > 200 else ''}"
            limit = f"the query is longer than {self.texts.max_tokens} tokens"
            warnings.warn(f"{limit}; this was not read: {shown}", CutQuery, stacklevel=4)
        return unread

    def _box(self, array: np.ndarray) -> Letterbox:
        return Letterbox(array.shape[0], array.shape[1], self.config.vision.image_size)

    def check(self, queries: Sequence[str], mask_type: str) -> None:
        """Raises InputError for an empty query, an unknown mask type, or `auto` where the head needs the truth."""
        for query in queries:
            check_query(query)
        if mask_type not in CHOICES:
            raise InputError(f"mask type {mask_type!r} is unknown; say auto, modal or amodal")
        if mask_type == "auto" and self.config.head == "oracle":
            raise InputError(
                "this run's head is the oracle, which needs the truth; pass --mask-type modal or amodal"
            )


@lru_cache(maxsize=24)
def compiled(
    function: Callable[..., Any], graphdef: nnx.GraphDef, structure: Any, kind: MatmulPrecision
) -> Callable[..., Any]:
    """A function of a model that takes the leaves of the weights in the model's place. Predictors of equal models share
    it. Its products are of one `kind`, which is set inside: compiled functions do not see JAX's default change."""

    @jax.jit
    def call(leaves, *inputs):
        with products(kind):
            return function(nnx.merge(graphdef, jax.tree.unflatten(structure, leaves)), *inputs)

    return call


def _calibrated(
    model: R2SM, text: jax.Array, mask: jax.Array, calibration: Calibration
) -> jax.Array:
    return model.amodal_logit(text[None], mask[None])[0] / calibration.type_temperature


def _padded(items: Sequence[T], count: int) -> list[T]:
    return [*items, *[items[0]] * (count - len(items))]


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
