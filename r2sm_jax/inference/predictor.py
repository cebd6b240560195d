"""A trained segmenter behind two calls: `set_image` once, `predict` for any number of queries.

    what is given   read_requests (prompts.py)                           one Request a query
    photo           open_image -> Letterbox.image -> R2SM.encode_image   ImageFeatures
    sentence        TextStates: the frozen language model                token states [t l e]
    both            R2SM.decode                                          R2SMOutput
    logits          to_prediction (postprocess.py)                       Prediction

Where the caller says where the object is, the sentence only decides which of its masks is meant:

    box, clicks     MaskOutliner                                         visible mask
    visible mask    MaskCompleter                                        complete mask
"""

import copy
import hashlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, UInt8

from r2sm_jax.config import UNSURE_BELOW, MatmulPrecision, ModelConfig
from r2sm_jax.data import masks
from r2sm_jax.data.images import ImageLike, open_image
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import (
    Completion,
    MaskCompleter,
    MaskOutliner,
    Outline,
    no_part,
)
from r2sm_jax.inference.decision import TruncatedQuery, check_abstain
from r2sm_jax.inference.postprocess import name_hiders, to_prediction
from r2sm_jax.inference.prediction import Candidate, Prediction
from r2sm_jax.inference.prompts import Request, read_mask, read_others, read_requests
from r2sm_jax.models.matmul import JAX_PRECISION, set_matmul_precision
from r2sm_jax.models.r2sm import NOT_CALIBRATED, R2SM, Calibration, ImageFeatures, R2SMOutput
from r2sm_jax.query import Click, Prompt

T = TypeVar("T")
R = TypeVar("R")

QUERY_BUCKETS = (1, 4, 8)
"""The queries about an image are padded to one of these numbers, so that few shapes are compiled.
More than the last number are decoded one part after the other."""
BATCH_IMAGES = 8
"""Images in a batch; the last batch is padded."""
NUM_THREADS = min(8, os.cpu_count() or 1)
"""Each may hold a large image, or the masks of one, for a moment."""


class FramedImage(NamedTuple):
    """An image as the model sees it. It is small, whatever the image's size."""

    letterbox: Letterbox
    pixels: UInt8[np.ndarray, "S S 3"]


class EncodedImage(NamedTuple):
    """The features of one image, computed by `Predictor.encode`. Threads may share it."""

    letterbox: Letterbox
    features: ImageFeatures
    pixels: UInt8[np.ndarray, "H W 3"]
    """The image itself, which completer and outliner look at."""


class Asked(NamedTuple):
    """An image and what is asked about it, for `Predictor.stream`."""

    image: FramedImage
    requests: Sequence[Request]
    about: Any = None
    """Whatever the caller wants to know of it later."""


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
    completer: MaskCompleter | None = None
    outliner: MaskOutliner | None = None

    def __post_init__(self) -> None:
        self._image: EncodedImage | None = None
        self._process_id = os.getpid()
        self._encode_image = self._compiled(R2SM.encode_image)
        self._decode = self._compiled(R2SM.decode)
        self._amodal_logit = self._compiled(_calibrated_amodal_logit)

    def _compiled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        graphdef, precision = self.graphdef, self.matmul_precision

        def call(weights: nnx.State, *inputs: Any) -> Any:
            # Set inside, where JAX traces: the program has this precision, whatever the caller's
            # own setting of JAX is.
            with jax.default_matmul_precision(JAX_PRECISION[precision]):
                model = nnx.merge(graphdef, weights)
                set_matmul_precision(model, precision)
                return method(model, *inputs)

        return jax.jit(call)

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
        """Sets the image for the next calls of `predict`. Raises InputError as `encode`."""
        self._image = self.encode(image)

    def encode(self, image: ImageLike) -> EncodedImage:
        """Computes the features of an image for `predict`.

        Args:
            image: a file, its bytes, a Pillow image, or an RGB array `uint8 [H W 3]`.

        Raises InputError if it cannot be read as an image, or is too large (see `open_image`).
        """
        pixels = open_image(image)
        frame = self.frame(pixels)
        return EncodedImage(frame.letterbox, self._features([frame]), pixels)

    def predict(
        self,
        queries: str | Iterable[str | None] | None = None,
        mask_type: str = "auto",
        image: EncodedImage | ImageLike | None = None,
        abstain: float = 0.0,
        masks: Iterable[Any] | None = None,
        boxes: Iterable[Any] | None = None,
        points: Iterable[Any] | None = None,
        others: Iterable[Any] | None = None,
    ) -> list[Prediction]:
        """Returns one prediction for each query about one image.

        A query is a sentence, or a mask, a box or clicks, or both. Without a sentence nothing asks
        for the complete shape, so that the mask type is modal unless it is forced.

        Where a visible mask is given, or outlined in a box or around clicks, the sentence only
        decides whether that mask or the complete one is meant, and it takes the place of what the
        model found by words (`Prediction.with_masks`). Each is completed by itself, whatever else
        is asked in the same call: what lies beside it is said by `others`.

        Args:
            queries: sentences; a single one may be given as a string. None, or an empty one, where
                a mask, a box or clicks stand in its place, or for all of them.
            mask_type: modal or amodal forces the mask type; auto lets the query decide.
            image: default: the one of `set_image`.
            abstain: a probability that is nearer than this to 0.5 makes a prediction undecided.
            masks: for each query the visible mask of its object, in a layout of
                `prompts.read_mask`, or None.
            boxes: for each query a box x0 y0 x1 y1 around what shows of its object, in pixels, or
                None.
            points: for each query a list of clicks (x, y) or (x, y, is_positive), in pixels, or
                None. A click that is not positive lies beside the object.
            others: visible masks of the objects of the image, which say where something can be
                hidden; for each query the mask itself does not count, so that the `masks` of all
                queries may be given. None: they are not known.

        Raises InputError if there is no image, as `read_requests`, if the run has an oracle head
        and no mask type is forced, and if the model lacks the completer or the outliner that is
        needed.
        """
        image = self._encoded(image)
        size = image.pixels.shape[:2]
        requests = read_requests(queries, size, mask_type, masks, boxes, points)
        neighbours = None if others is None else read_others(others, size)
        check_abstain(abstain)
        if self.outliner is None and any(request.prompt for request in requests):
            raise no_part("outliner", "this model")

        texts = [request.text for request in requests]
        (outputs,) = self._decode_queries(image.features, [texts])
        predictions = []
        for request, output in zip(requests, outputs, strict=True):
            predictions.append(
                self._to_prediction(request, output, image.letterbox, abstain=abstain)
            )
        self._warn_of_truncated(predictions)
        return name_hiders(self._with_places(predictions, requests, image, neighbours))

    def complete(
        self,
        masks: Iterable[Any],
        neighbours: Iterable[Any] | None = None,
        image: EncodedImage | ImageLike | None = None,
    ) -> list[Mask]:
        """Returns the complete masks `[H W]` of some objects of an image.

        Args:
            masks: what shows of each object, in a layout of `prompts.read_mask`; an array `[m H W]`
                will do.
            neighbours: for each object the union of the visible masks of all others, or None where
                it is not known. Default: the union of the other `masks`.
            image: default: the one of `set_image`.

        Raises InputError if there is no image, a mask cannot be used, or the model has no
        completer.
        """
        if self.completer is None:
            raise no_part("completer", "this model")
        pixels = self._encoded(image).pixels
        size = pixels.shape[:2]
        visible_masks = []
        for number, mask in enumerate(masks, start=1):
            visible_masks.append(read_mask(mask, size, f"mask {number}"))
        if neighbours is None:
            return self.completer(pixels, visible_masks)
        others: list[Mask | None] = []
        for number, (mask, _) in enumerate(zip(neighbours, visible_masks, strict=True), start=1):
            if mask is not None:
                mask = read_mask(mask, size, f"neighbours of mask {number}", may_be_empty=True)
            others.append(mask)
        return self.completer(pixels, visible_masks, neighbours=others)

    def _encoded(self, image: EncodedImage | ImageLike | None) -> EncodedImage:
        """Returns the image of a call, or else that of `set_image`."""
        if image is None:
            image = self._image
        if image is None:
            raise InputError("no image to look at; call set_image first")
        return image if isinstance(image, EncodedImage) else self.encode(image)

    def _with_places(
        self,
        predictions: Sequence[Prediction],
        requests: Sequence[Request],
        image: EncodedImage,
        neighbours: Mask | None,
    ) -> list[Prediction]:
        """Returns the predictions; those of queries with a mask, a box or clicks are about it."""
        visible_masks: dict[int, Mask] = {}
        outlines: dict[int, Outline] = {}
        for index, request in enumerate(requests):
            if request.mask is not None:
                visible_masks[index] = request.mask
            elif request.prompt is not None:
                assert self.outliner is not None  # `predict` has refused it
                (outlines[index],) = self.outliner(image.pixels, [request.prompt])
                visible_masks[index] = outlines[index].mask

        # There is nothing to complete where the outliner found nothing.
        found = [index for index, mask in visible_masks.items() if mask.any()]
        completions: dict[int, Completion] = {}
        if self.completer is not None:
            completed = self.completer.complete(
                image.pixels,
                [visible_masks[index] for index in found],
                neighbours=[neighbours] * len(found),
            )
            completions = dict(zip(found, completed, strict=True))

        answers = list(predictions)
        for index, visible in visible_masks.items():
            is_amodal = answers[index].mask_type == "amodal"
            outline = outlines.get(index)
            if self.completer is None and (outline is None or is_amodal):
                raise no_part("completer", "this model")
            answers[index] = answers[index].with_masks(
                visible,
                completions[index].mask if index in completions else None,
                is_given=outline is None,
                candidates=candidates_of(outline),
                **judge(outline, completions.get(index), is_amodal=is_amodal)._asdict(),
            )
        return answers

    # Many images.

    def predict_batches(
        self,
        images: Iterable[ImageLike],
        queries: Iterable[Sequence[str]],
        mask_type: str = "auto",
    ) -> Iterator[list[Prediction]]:
        """Yields the predictions for the sentences `queries[i]` about `images[i]`, 8 images at a
        time. Raises InputError as `encode` and `predict`."""

        def read(item: tuple[ImageLike, Sequence[str]]) -> Asked:
            image = self.frame(item[0])
            size = image.letterbox.height, image.letterbox.width
            return Asked(image, read_requests(item[1], size, mask_type))

        items = zip(images, queries, strict=True)
        for predictions in self.stream(items, read, lambda _, predictions: list(predictions)):
            self._warn_of_truncated(predictions)
            yield name_hiders(predictions)

    def stream(
        self,
        items: Iterable[T],
        read: Callable[[T], Asked],
        finish: Callable[[Asked, Iterator[Prediction]], R],
        **options: bool,
    ) -> Iterator[R]:
        """Yields for each item, in order, what `finish` makes of the predictions about its image.

        While the model computes 8 images, threads read the next ones and finish the last ones.
        Predictions are made as `finish` asks for them, one after the other, since the masks of a
        large image are large.

        Args:
            items: anything that `read` takes.
            read: gives the image of an item and what is asked about it.
            finish: takes what `read` gave, and its predictions.
            options: of `to_prediction`.
        """

        def answer(asked: Iterable[Asked]) -> Iterator[tuple[Asked, list[R2SMOutput]]]:
            asked = iter(asked)
            while batch := list(islice(asked, BATCH_IMAGES)):
                sentences = [[request.text for request in one.requests] for one in batch]
                outputs = self.predict_logits([one.image for one in batch], sentences)
                yield from zip(batch, outputs, strict=True)

        def finish_one(answered: tuple[Asked, list[R2SMOutput]]) -> R:
            asked, outputs = answered
            letterbox = asked.image.letterbox
            pairs = zip(asked.requests, outputs, strict=True)
            return finish(asked, (self._to_prediction(*p, letterbox, **options) for p in pairs))

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            answered = answer(_map_ahead(pool, read, items))
            yield from _map_ahead(pool, finish_one, answered)

    def frame(self, image: ImageLike) -> FramedImage:
        """Fits an image into the model's frame, for `predict_logits`. Raises InputError as
        `encode`."""
        array = open_image(image)
        letterbox = Letterbox(array.shape[0], array.shape[1], self.config.vision.image_size)
        return FramedImage(letterbox, letterbox.image(array))

    def predict_logits(
        self, images: Sequence[FramedImage], queries: Sequence[Sequence[str]]
    ) -> list[list[R2SMOutput]]:
        """Returns the model's outputs for `queries[i]` about `images[i]`, up to 8 images.

        They are numpy arrays without the axes b and k. Mask logits are in the letterbox frame, at
        the model's own resolution.
        """
        # Every batch has the same number of images, so that encoding compiles once.
        features = self._features(_pad(images, BATCH_IMAGES, images[0]))
        return self._decode_queries(features, queries)

    # The rest.

    def amodal_logits(self, sentences: Sequence[str]) -> Float[np.ndarray, " k"]:
        """Returns calibrated logits of a learned head: above 0, a sentence asks for amodal."""
        states, mask = self.text_encoder(list(sentences))
        return np.asarray(self._amodal_logit(self.weights, states, mask, self.calibration))

    def warm_up(self) -> None:
        """Compiles everything that `predict` needs, before a server opens."""
        self.text_encoder.warm_up()
        size = self.config.vision.image_size
        # The frame has a fixed size, so any image compiles the programs of all images.
        image = self.encode(np.zeros((size, size, 3), np.uint8))
        for num_queries in QUERY_BUCKETS:
            self.predict(["anything"] * num_queries, "modal", image)
        if self.completer is not None:
            self.complete([np.ones((size, size), bool)], image=image)
        if self.outliner is not None:
            # A box takes one crop, a click several.
            box = Prompt(box=(0.0, 0.0, float(size), float(size)))
            self.outliner(image.pixels, [box, Prompt(clicks=(Click(size / 2, size / 2),))])

    def _features(self, frames: Sequence[FramedImage]) -> ImageFeatures:
        self._check_process()
        pixels = np.stack([frame.pixels for frame in frames])
        valid = np.stack([frame.letterbox.valid() for frame in frames])
        return self._encode_image(self.weights, pixels, valid)

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

    def _to_prediction(
        self, request: Request, output: R2SMOutput, letterbox: Letterbox, **options: Any
    ) -> Prediction:
        unread = self.text_encoder.cut_off(request.text)
        return to_prediction(
            request, output, letterbox, self.config, self.calibration, unread=unread, **options
        )

    def _warn_of_truncated(self, predictions: Sequence[Prediction]) -> None:
        for prediction in predictions:
            if prediction.unread:
                warnings.warn(
                    f"the query is longer than {self.text_encoder.max_tokens} tokens; this was not "
                    f"read: {prediction.unread[:200]!r}",
                    TruncatedQuery,
                    stacklevel=3,
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


class Scores(NamedTuple):
    """What is said about a mask that was outlined or given, and perhaps completed."""

    score: float | None
    """Predicted IoU."""
    unsure_below: float
    hidden_probability: float | None
    confidence: float
    """Ranks the mask."""


def judge(outline: Outline | None, completion: Completion | None, *, is_amodal: bool) -> Scores:
    """Returns the scores of the mask that is asked for. `outline`: None for a given mask."""
    score = None if outline is None else outline.iou
    limit = UNSURE_BELOW if outline is None else outline.unsure_below
    # What is given is right, and ranks first.
    confidence = 1.0 if score is None else score
    if completion is None:
        return Scores(score, limit, None, confidence)
    if is_amodal and score is None:
        score, limit = completion.iou, completion.unsure_below
    elif is_amodal and score is not None:
        # The completer is calibrated on true visible masks, and this one may be wrong, too.
        score = score * completion.iou
    confidence = confidence if score is None else score
    return Scores(score, limit, completion.hidden_probability, confidence)


def candidates_of(outline: Outline | None) -> tuple[Candidate, ...]:
    """Returns what else the clicks of an outline may mean."""
    others = () if outline is None else outline.candidates
    return tuple(Candidate(masks.encode(one.mask), one.iou) for one in others)


def _calibrated_amodal_logit(
    model: R2SM, text: jax.Array, mask: jax.Array, calibration: Calibration
) -> Float[jax.Array, " k"]:
    """Computes the logits of the mask-type head, without an image."""
    return model.amodal_logit(text[None], mask[None])[0] / calibration.type_temperature


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
