"""A trained segmenter behind two calls: `set_image` once, `predict` for any number of queries.

    what is given     read_requests (prompts.py)                         one Request a query
    sentences         TextStates: the frozen language model              token states [t l e]

The words decide which mask is meant:

    token states      R2SM.amodal_logit, or R2SM.decode                  Decision

Without a place they find the object, too:

    photo             open_image -> Letterbox.image -> R2SM.encode_image   ImageFeatures
    both              R2SM.decode                                        R2SMOutput
    masks, scores     by_words (postprocess.py)                          Prediction

Where the caller, or a finder of others, says where the object is, it is drawn there:

    found objects     find_objects, choose (choose.py)                   Outline
    mask, box, clicks Parts.draw (parts.py): outliner, then completer    Drawn
    masks, scores     at_place (postprocess.py)                          Prediction
"""

import copy
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, UInt8

from r2sm_jax.config import DECODER_HEAD, LEARNED_HEADS, MatmulPrecision, ModelConfig
from r2sm_jax.data.images import ImageLike, open_image
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.inference.choose import Finder, choose, find_objects
from r2sm_jax.inference.decision import Decision, check_abstain, decide, warn_of_unread
from r2sm_jax.inference.parts import Parts
from r2sm_jax.inference.postprocess import at_place, by_words, name_hiders
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.prompts import Request, read_others, read_requests, read_visible
from r2sm_jax.language.states import TextStates
from r2sm_jax.models.calibration import NOT_CALIBRATED, Calibration
from r2sm_jax.models.matmul import compiled
from r2sm_jax.models.r2sm import R2SM, ImageFeatures, R2SMOutput

T = TypeVar("T")
R = TypeVar("R")

QUERY_BUCKETS = (1, 4, 8)
"""The queries about an image are padded to one of these numbers, so that few shapes are compiled.
More than the last number are decoded one part after the other."""
BATCH_IMAGES = 8
"""Images in a batch; the last batch is padded."""
NUM_THREADS = min(8, os.cpu_count() or 1)
"""Each may hold a large image, or the masks of one, for a moment."""
NO_PIXELS = np.zeros((0, 0, 3), np.uint8)
"""In place of an image that would take much memory."""


@dataclass(eq=False)
class Photo:
    """An image as the model sees it, and what was computed of it. Threads may share it."""

    letterbox: Letterbox
    frame: UInt8[np.ndarray, "S S 3"]
    """The image in the frame of the letterbox."""
    pixels: UInt8[np.ndarray, "H W 3"]
    """The image itself, which completer and outliner look at; `NO_PIXELS` in a stream of many."""
    encoded: tuple[nnx.State, ImageFeatures] | None = None
    """The features and the weights that computed them; None until words need them."""

    @classmethod
    def of(cls, pixels: UInt8[np.ndarray, "H W 3"], side: int) -> "Photo":
        """Fits an image into a frame with sides of `side`."""
        letterbox = Letterbox(pixels.shape[0], pixels.shape[1], side)
        return cls(letterbox, letterbox.image(pixels), pixels)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image."""
        return self.letterbox.height, self.letterbox.width


@dataclass(eq=False, repr=False)
class Predictor:
    """Segments images by queries.

    `set_image` and `encode` compute the features of an image once, and `predict` decodes queries
    with them. `predict_batches` and `stream` compute several images at once.

    Threads may share a predictor. But `set_image` sets one image for all of them, so a server
    should `encode` each image and pass it to `predict`.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    """The model without its weights, as `nnx.split` gives it."""
    weights: nnx.State
    """All weights of the segmenter except the language model's, on one device."""
    text_encoder: TextStates
    calibration: Calibration = NOT_CALIBRATED
    matmul_precision: MatmulPrecision = "float32"
    parts: Parts = field(default_factory=Parts)
    """What draws at places."""

    def __post_init__(self) -> None:
        self._image: Photo | None = None
        self._process_id = os.getpid()
        methods = R2SM.encode_image, R2SM.decode, _calibrated_amodal_logit, _target_logits
        self._encode_image, self._decode, self._amodal_logit, self._target_logits = (
            compiled(self.graphdef, method, self.matmul_precision) for method in methods
        )

    def updated(self, **values: Any) -> "Predictor":
        """Returns a predictor with other `weights` or another `calibration`.

        It shares the compiled functions of this one, so nothing is compiled anew.
        """
        other = copy.copy(self)
        vars(other).update(values, _image=None)
        return other

    @property
    def mask_threshold(self) -> float:
        """Logit of the decoder above which a pixel is mask."""
        return self.config.mask_threshold + float(self.calibration.mask_shift)

    @property
    def weights_sha256(self) -> str:
        """Hash of all weights of the segmenter except the language model's."""
        return hash_weights(self.weights)

    # One image.

    def set_image(self, image: ImageLike) -> None:
        """Sets the image for the next calls of `predict` and `complete`. Its features are computed
        when words first need them.

        Raises InputError if it cannot be read as an image, or is too large (see `open_image`).
        """
        self._image = self._open(image)

    def encode(self, image: ImageLike) -> Photo:
        """Opens an image and computes its features, for `predict`.

        Args:
            image: a file, its bytes, a Pillow image, or an RGB array `uint8 [H W 3]`.

        Raises InputError as `set_image`.
        """
        photo = self._open(image)
        self._features_of(photo)
        return photo

    def predict(
        self,
        queries: str | Iterable[str | None] | None = None,
        *,
        mask_type: str = "auto",
        image: Photo | ImageLike | None = None,
        abstain: float = 0.0,
        masks: Any = None,
        boxes: Any = None,
        points: Any = None,
        others: Any = None,
        finder: Finder | None = None,
    ) -> list[Prediction]:
        """Returns one prediction for each query about one image.

        A query is a sentence, a place (a mask, a box or clicks), or a sentence and a place. The
        words decide which mask is meant. A place says of which object; without one the words find
        it. Without words nothing asks for the complete shape, so that the mask type is modal unless
        it is forced.

        Args:
            queries: sentences; a single one may be given as a string. None or "" for a query that
                has a mask, a box or clicks and no sentence; None if this holds for all queries.
            mask_type: modal or amodal forces the mask type; auto lets the query decide.
            image: default: the one of `set_image`.
            abstain: a probability that is nearer than this to 0.5 makes a prediction undecided.
            masks: for each query what shows of its object, as `read_mask` reads it, or None. It
                becomes the visible mask of the answer unchanged.
            boxes: for each query a box x0 y0 x1 y1 around what shows of its object, in pixels, or
                None.
            points: for each query a list of clicks (x, y) or (x, y, is_positive), in pixels, or
                None. A click that is not positive lies beside the object.
            others: what shows of all objects of the image, the queries' own or not: masks that say
                where something can be hidden. None: they are not known.
            finder: finds the things that the queries without a mask, box or clicks name
                (finders.py); each sentence chooses of them. They are neighbours of each other.

        What is given for a single query may stand without a list around it.

        Raises InputError if there is no image, or it is one that another model encoded; as
        `read_requests` and `find_objects`; if `others` are given and neither a place nor a finder;
        if the run has an oracle head and no mask type is forced; and if the model lacks the
        completer or the outliner that is needed.
        """
        photo = self._photo(image)
        requests = read_requests(queries, photo.size, mask_type, masks, boxes, points)
        check_abstain(abstain)
        has_place = any(request.place is not None for request in requests)
        if others is not None and not has_place and finder is None:
            raise InputError(
                "others= says what lies beside a mask, a box or clicks; give one of these as well"
            )
        all_visible = read_others(others, photo.size)

        outputs = self._look(photo, requests)
        decisions = self._decide(requests, outputs, abstain)
        if finder is not None:
            requests, all_visible = self._find(
                finder, photo, requests, decisions, outputs, all_visible
            )
        places = []
        for request, decision in zip(requests, decisions, strict=True):
            if request.place is not None:
                self.parts.check(request.place, decision.mask_type)
                places.append(request.place)
        drawn = self.parts.draw(photo.pixels, places, all_visible)
        predictions = []
        for request, decision, output in zip(requests, decisions, outputs, strict=True):
            if request.place is not None:
                unread = self.text_encoder.cut_off(request.text)
                prediction = at_place(request, decision, next(drawn), photo.size, unread=unread)
            else:
                assert output is not None
                prediction = self._by_words(request, decision, output, photo.letterbox)
            warn_of_unread(prediction.unread)
            predictions.append(replace(prediction, photo=photo.pixels))
        return name_hiders(predictions)

    def complete(
        self, masks: Any, others: Any = None, image: Photo | ImageLike | None = None
    ) -> list[Bool[np.ndarray, "H W"]]:
        """Returns the complete masks `[H W]` of some objects of an image.

        Args:
            masks: what shows of each object, as `read_mask` reads it; an array `[m H W]` will do.
            others: what shows of all objects of the image, these or not. Default: the `masks`;
                where there is only one, what lies beside it is not known.
            image: default: the one of `set_image`.

        Raises InputError if there is no image, a mask cannot be used, or the model has no
        completer.
        """
        completer = self.parts.need("completer")
        photo = self._photo(image)
        visible = read_visible(masks, photo.size)
        if others is None and len(visible) > 1:
            others = visible
        completions = completer.complete(photo.pixels, visible, read_others(others, photo.size))
        return [completion.mask for completion in completions]

    def _photo(self, image: Photo | ImageLike | None) -> Photo:
        """Returns the image of a call, or else that of `set_image`."""
        self._check_process()
        if image is None:
            image = self._image
        if image is None:
            raise InputError("no image to look at; call set_image first")
        return image if isinstance(image, Photo) else self._open(image)

    def _open(self, image: ImageLike) -> Photo:
        """Opens an image for `predict`, which looks at its pixels, too."""
        return Photo.of(open_image(image), self.config.vision.image_size)

    def _features_of(self, photo: Photo) -> ImageFeatures:
        """Returns the features of a photo, which are computed once.

        Raises InputError if another model has computed them.
        """
        if photo.encoded is None:
            photo.encoded = self.weights, self._features([photo])
        weights, features = photo.encoded
        if weights is not self.weights and hash_weights(weights) != self.weights_sha256:
            raise InputError("this image was encoded by another model; encode it with this one")
        return features

    def _look(self, photo: Photo, requests: Sequence[Request]) -> list[R2SMOutput | None]:
        """Runs `R2SM.decode` for requests without a place, and for all with words if the mask-type
        head reads the image. Returns None for the others."""
        reads_image = self.config.head == DECODER_HEAD
        is_seen = [one.place is None or (reads_image and one.text != "") for one in requests]
        texts = [request.text for request in compress(requests, is_seen)]
        if not texts:
            return [None] * len(requests)
        (outputs,) = self._decode_queries(self._features_of(photo), [texts])
        found = iter(outputs)
        return [next(found) if seen else None for seen in is_seen]

    def _decide(
        self,
        requests: Sequence[Request],
        outputs: Sequence[R2SMOutput | None],
        abstain: float,
    ) -> list[Decision]:
        """Decides which mask each request asks for: by the logit in its output where it was
        decoded, else by the mask-type head on its words alone."""
        pairs = list(zip(requests, outputs, strict=True))
        texts = [request.text for request, output in pairs if output is None and request.text]
        # Where no head learns, nothing reads the logit.
        logits: dict[str, float] = dict.fromkeys(texts, 0.0)
        if texts and self.config.head in LEARNED_HEADS:
            logits = dict(zip(texts, map(float, self.amodal_logits(texts)), strict=True))
        target_words = iter(self.targets([request.text for request in requests if request.text]))
        decisions = []
        for request, output in pairs:
            logit = logits.get(request.text, 0.0) if output is None else output.amodal_logit
            decision = decide(
                self.config.head,
                request.text,
                float(logit),
                request.mask_type,
                abstain=abstain,
            )
            if request.text:
                decision = decision._replace(target=next(target_words))
            decisions.append(decision)
        return decisions

    def _find(
        self,
        finder: Finder,
        photo: Photo,
        requests: Sequence[Request],
        decisions: Sequence[Decision],
        outputs: Sequence[R2SMOutput | None],
        all_visible: Bool[np.ndarray, "H W"] | None,
    ) -> tuple[list[Request], Bool[np.ndarray, "H W"] | None]:
        """Gives each request without a place those objects of a finder that its words choose.

        Returns also the union of what shows of all objects: `all_visible`, and all that was found.
        """
        pairs = zip(requests, decisions, strict=True)
        names = [decision.target or request.text for request, decision in pairs]
        asked = compress(names, (request.place is None for request in requests))
        found = find_objects(finder, photo.pixels, list(dict.fromkeys(asked)), self.parts)
        placed = []
        for request, name, output in zip(requests, names, outputs, strict=True):
            if request.place is None:
                assert output is not None
                chosen = choose(found[name], request.text, output, photo.letterbox)
                request = request._replace(place=chosen)
            placed.append(request)
        shown = [outline.mask for outlines in found.values() for outline in outlines]
        if all_visible is not None:
            shown.append(all_visible)
        # A single object has no known neighbours: `all_visible` stays None, so that the kind of its
        # completion is `alone`.
        return placed, np.logical_or.reduce(shown) if len(shown) > 1 else all_visible

    # Many images.

    def predict_batches(
        self,
        images: Iterable[ImageLike],
        queries: Iterable[Sequence[str]],
        mask_type: str = "auto",
    ) -> Iterator[list[Prediction]]:
        """Yields the predictions for the sentences `queries[i]` about `images[i]`, 8 images at a
        time. Raises InputError as `set_image` and `predict`."""

        def read(item: tuple[ImageLike, Sequence[str]]) -> tuple[Photo, list[Request]]:
            photo = self.frame(item[0])
            return photo, read_requests(item[1], photo.size, mask_type)

        def collect(item: Any, predictions: Iterator[Prediction]) -> list[Prediction]:
            found = list(predictions)
            for prediction in found:
                warn_of_unread(prediction.unread)
            return name_hiders(found)

        yield from self.stream(zip(images, queries, strict=True), read, collect)

    def stream(
        self,
        items: Iterable[T],
        read: Callable[[T], tuple[Photo, Sequence[Request]] | None],
        use: Callable[[T, Iterator[Prediction]], R],
        **options: bool,
    ) -> Iterator[R]:
        """Yields for each item, in order, what `use` makes of the predictions about its image.

        While the model computes 8 images, threads read the next ones and use the last predictions.
        These are made as `use` asks for them, one after the other, since the masks of a large image
        are large.

        Args:
            items: anything that `read` takes.
            read: gives the image of an item and the sentences about it; None leaves the item out.
            use: takes an item and the predictions about its image.
            options: of `by_words`.
        """

        def read_one(item: T) -> tuple[T, tuple[Photo, Sequence[Request]] | None]:
            return item, read(item)

        def use_one(answered: tuple[T, Photo, Sequence[Request], list[R2SMOutput]]) -> R:
            item, photo, requests, outputs = answered
            decisions = self._decide(requests, outputs, 0.0)
            answers = zip(requests, decisions, outputs, strict=True)
            return use(item, (self._by_words(*one, photo.letterbox, **options) for one in answers))

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            ready = _map_ahead(pool, read_one, items)
            asked = ((item, *question) for item, question in ready if question is not None)
            yield from _map_ahead(pool, use_one, self._decode_all(asked))

    def _decode_all(
        self, asked: Iterator[tuple[T, Photo, Sequence[Request]]]
    ) -> Iterator[tuple[T, Photo, Sequence[Request], list[R2SMOutput]]]:
        """Decodes what is asked about images, 8 of them at a time."""
        while batch := list(islice(asked, BATCH_IMAGES)):
            sentences = [[request.text for request in requests] for _, _, requests in batch]
            outputs = self.predict_logits([photo for _, photo, _ in batch], sentences)
            for one, of_image in zip(batch, outputs, strict=True):
                yield *one, of_image

    def frame(self, image: ImageLike) -> Photo:
        """Fits an image into the model's frame, for `predict_logits`; its pixels are not kept.
        Raises InputError as `set_image`."""
        return replace(self._open(image), pixels=NO_PIXELS)

    def predict_logits(
        self, photos: Sequence[Photo], queries: Sequence[Sequence[str]]
    ) -> list[list[R2SMOutput]]:
        """Returns the model's outputs for `queries[i]` about `photos[i]`, up to 8 photos.

        They are numpy arrays without the axes b and k. Mask logits are in the letterbox frame, at
        the model's own resolution.
        """
        # Every batch has the same number of images, so that encoding compiles once.
        features = self._features(_pad(photos, BATCH_IMAGES, photos[0]))
        return self._decode_queries(features, queries)

    # The rest.

    def amodal_logits(self, sentences: Sequence[str]) -> Float[np.ndarray, " k"]:
        """Returns calibrated logits of a learned head: above 0, a sentence asks for amodal."""
        return np.array(self._read_words(self._amodal_logit, sentences), np.float32)

    def targets(self, sentences: Sequence[str]) -> list[str | None]:
        """Returns the words of each sentence that name what is meant; None where none do, or the
        model cannot tell."""
        if not self.config.target:
            return [None] * len(sentences)
        logits = self._read_words(self._target_logits, sentences)
        return list(map(self.text_encoder.tokenizer.target, sentences, logits))

    def _read_words(self, compute: Callable[..., Any], sentences: Sequence[str]) -> list[Any]:
        """Returns what a head computes of each sentence."""
        states, mask = self.text_encoder(list(sentences), self.text_encoder.max_tokens)
        values: list[Any] = []
        for start in range(0, len(sentences), QUERY_BUCKETS[-1]):
            part, is_real = (array[start : start + QUERY_BUCKETS[-1]] for array in (states, mask))
            count = next(count for count in QUERY_BUCKETS if count >= len(part))
            padded = (
                np.pad(array, [(0, count - len(part)), *[(0, 0)] * (array.ndim - 1)])
                for array in (part, is_real)
            )
            of_part = compute(self.weights, *padded, self.calibration)
            values += list(np.asarray(of_part)[: len(part)])
        return values

    def warm_up(self) -> None:
        """Compiles everything that `predict` needs, before a server opens."""
        self.text_encoder.warm_up()
        size = self.config.vision.image_size
        # The frame has a fixed size, so any image compiles the programs of all images.
        image = self.encode(np.zeros((size, size, 3), np.uint8))
        for num_queries in QUERY_BUCKETS:
            texts = ["anything"] * num_queries
            self.predict(texts, mask_type="modal", image=image)
            if self.config.head in LEARNED_HEADS:
                self.amodal_logits(texts)
        self.parts.warm_up(size)

    def _features(self, photos: Sequence[Photo]) -> ImageFeatures:
        self._check_process()
        frames = np.stack([photo.frame for photo in photos])
        valid = np.stack([photo.letterbox.valid() for photo in photos])
        return self._encode_image(self.weights, frames, valid)

    def _decode_queries(
        self, features: ImageFeatures, queries: Sequence[Sequence[str]]
    ) -> list[list[R2SMOutput]]:
        """Decodes `queries[i]` about image i.

        `features` are of at least as many images as have queries; the rest is padding.
        """
        self._check_process()
        num_images = len(features.tokens)
        outputs: list[list[R2SMOutput]] = [[] for _ in queries]
        longest = max(map(len, queries), default=0)
        for start in range(0, longest, QUERY_BUCKETS[-1]):
            parts = [of_image[start : start + QUERY_BUCKETS[-1]] for of_image in queries]
            num_queries = next(size for size in QUERY_BUCKETS if size >= max(map(len, parts)))
            padding = next(text for part in parts for text in part)
            texts = []
            for part in _pad(parts, num_images, ()):
                texts += _pad(part, num_queries, padding)
            states, mask = self.text_encoder(texts, self.text_encoder.max_tokens)
            states = states.reshape(num_images, num_queries, *states.shape[1:])
            mask = mask.reshape(num_images, num_queries, -1)
            decoded = self._decode(self.weights, features, states, mask, self.calibration)
            decoded = jax.device_get(decoded)
            for b, part in enumerate(parts):
                # Every field of the output has the axes [b k ...].
                outputs[b] += [R2SMOutput(*(x[b, k] for x in decoded)) for k in range(len(part))]
        return outputs

    def _by_words(
        self,
        request: Request,
        decision: Decision,
        output: R2SMOutput,
        letterbox: Letterbox,
        **options: bool,
    ) -> Prediction:
        """Makes the prediction of what words found. `options`: of `by_words`."""
        return by_words(
            request.text,
            decision,
            output,
            letterbox,
            self.config.presence_threshold,
            self.calibration,
            unread=self.text_encoder.cut_off(request.text),
            **options,
        )

    def _check_process(self) -> None:
        # The threads of JAX do not survive a fork: the first computation would wait for ever.
        if os.getpid() != self._process_id:
            raise InputError(
                "this predictor was loaded before the process was forked, and would wait for ever; "
                'start processes with multiprocessing.get_context("spawn") and load it in each'
            )


def hash_weights(weights: nnx.State) -> str:
    """Returns the sha256 of the names, types, shapes and values of weights."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _calibrated_amodal_logit(
    model: R2SM, text: jax.Array, mask: jax.Array, calibration: Calibration
) -> Float[jax.Array, " k"]:
    """Computes the logits of the mask-type head, without an image."""
    return model.amodal_logit(text[None], mask[None])[0] / calibration.type_temperature


def _target_logits(
    model: R2SM, text: jax.Array, mask: jax.Array, calibration: Calibration
) -> Float[jax.Array, "k t"]:
    """Computes for each token the logit that its word names what is meant."""
    assert model.target_head is not None
    return model.target_head(text[None].astype(jnp.float32), mask[None])[0]


def _pad(items: Sequence[T], length: int, item: T) -> list[T]:
    """Returns `length` items: those of a sequence, then always the same one."""
    return [*items, *[item] * (length - len(items))]


def _map_ahead(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T]
) -> Iterator[R]:
    """Yields what a function makes of items, in order; threads are a batch ahead."""
    pending: deque[Future[R]] = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) > BATCH_IMAGES:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
