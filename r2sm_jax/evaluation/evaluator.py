"""Evaluates a segmenter: its masks on every split, and its decisions about sentences without
images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from scipy.special import expit

from r2sm_jax.config import LEARNED_HEADS
from r2sm_jax.data.dataset import Sample, Source, truth_of_sample
from r2sm_jax.evaluation.completion import (
    PROMPTED_IMAGES,
    REFERENCE_METHODS,
    methods_of,
    prompt_figures,
    score_completion,
)
from r2sm_jax.evaluation.predictions import Entry, to_answer
from r2sm_jax.evaluation.report import decision_figures, make_report
from r2sm_jax.evaluation.scorer import (
    EvalResults,
    Evaluated,
    QueryResult,
    QueryTruth,
    score,
    truths_of_image,
)
from r2sm_jax.inference.load import Run
from r2sm_jax.inference.model_folder import read_trained_on
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import Photo, Predictor
from r2sm_jax.inference.prompts import Request
from r2sm_jax.progress import show_progress
from r2sm_jax.query import REFERENCES, Sentence
from r2sm_jax.synthetic.queries.sentences import intent_sentences

T = TypeVar("T")


def evaluate(
    run: Run, sources: Mapping[str, Source], spec: str, trained_on: str
) -> tuple[dict[str, Any], Evaluated]:
    """Evaluates a run on every split. Returns the report, and the results that it was made from.

    Args:
        sources: the splits.
        spec: the data source that they are of.
        trained_on: that of training; `spec` itself where it is the same.
    """
    predictor = run.predictor
    loop = run.config.train
    evaluated = {name: evaluate_source(predictor, source, name) for name, source in sources.items()}
    known = read_trained_on(run.folder)
    if known is not None:
        for results in evaluated.values():
            pictures = enumerate(results.source.fingerprints()[: len(results.source)])
            results.seen = {index for index, picture in pictures if picture in known}
    sentences = {}
    if spec == "scenes":
        sentences["val_r2sm"] = evaluate_sentences(predictor, intent_sentences("val_r2sm"))
    report = make_report(
        evaluated,
        sentences,
        threshold=predictor.mask_threshold,
        head=predictor.config.head,
        weights_sha256=predictor.weights_sha256,
        language_model_sha256=predictor.text_encoder.sha256,
        matmul_precision=loop.matmul_precision,
        accumulate=loop.accumulate,
        devices=loop.devices,
        source=spec,
        step=run.step,
        selected_on=loop.select_on,
        trained_on=trained_on,
    )
    for name, source in sources.items():
        split = report["splits"][name]
        completer, outliner = predictor.parts
        if completer is not None:
            methods = REFERENCE_METHODS | methods_of(completer)
            samples = read_samples(source, f"completing objects of {name}")
            split["completion"] = score_completion(methods, samples)
        if outliner is not None:
            samples = read_samples(source, f"boxes and clicks of {name}", PROMPTED_IMAGES)

            def find(image: np.ndarray, texts: Sequence[str]) -> list[np.ndarray]:
                return [p.modal for p in predictor.predict(texts, mask_type="modal", image=image)]

            split["prompts"] = prompt_figures(outliner, samples, find)
    return report, evaluated


def read_samples(source: Source, what: str, count: int | None = None) -> Iterator[Sample]:
    """Yields at most `count` samples of a split, evenly chosen, and shows their progress."""
    step = 1 if count is None else max(1, -(-len(source) // count))
    indices = range(0, len(source), step)
    with show_progress(what, len(indices)) as advance:
        for index in indices:
            yield source[index]
            advance(1)


def evaluate_sentences(predictor: Predictor, sentences: Sequence[Sentence]) -> dict[str, Any]:
    """Computes the figures of the decisions about sentences without an image; None where the head
    needs one."""
    head = predictor.config.head
    texts = [sentence.text for sentence in sentences]
    probability = np.full(len(texts), np.nan)
    said = [""] * len(texts)
    if head in REFERENCES:
        said = [REFERENCES[head](sentence.text, sentence.mask_type) for sentence in sentences]
    elif head in LEARNED_HEADS:
        probability = expit(predictor.amodal_logits(texts)).astype(float)
        said = np.where(probability > 0.5, "amodal", "modal")
    mask_types = [sentence.mask_type for sentence in sentences]
    figures = decision_figures(texts, mask_types, said, probability)
    return figures | {"queries": sum(map(bool, said))}


def evaluate_source(predictor: Predictor, source: Source, name: str = "a split") -> EvalResults:
    """Predicts and scores every query of a source whose requested mask is annotated.

    The decision of the model selects the mask. Masks are compared at the images' own resolution.
    `name` is that of the split, for the progress that is shown.
    """
    results = EvalResults(source)
    answers = answer_all(predictor, source, score_prediction, name, with_absent_slots=True)
    for truth, result in answers:
        if result is None:
            results.left_out[truth.left_out] += 1
        else:
            results.results.append(result)
    return results


def score_prediction(prediction: Prediction, truth: QueryTruth) -> QueryResult:
    """Scores what the segmenter predicts for a query, as the entries that it writes of it."""
    query_id = {"query_id": truth.query.id}
    entries = msgspec.convert([query_id | e for e in prediction.to_coco()], list[Entry])
    return score(to_answer(entries, truth), truth)


def answer_all(
    predictor: Predictor,
    source: Source,
    use: Callable[[Prediction, QueryTruth], T],
    name: str,
    **options: bool,
) -> Iterator[tuple[QueryTruth, T | None]]:
    """Yields the truth of each query, and what `use` makes of the prediction and it; None where the
    query is left out.

    Args:
        predictor: the segmenter.
        source: the images and their queries.
        use: is called in threads, for one query after the other.
        name: of the split, for the progress that is shown.
        options: of `by_words`.
    """
    indices = [index for index in range(len(source)) if source.queries_at(index)]
    # The oracle head is told the requested type.
    is_oracle = predictor.config.head == "oracle"

    truths: dict[int, list[QueryTruth]] = {}
    """By the index of the image, while it is looked at."""

    def read(index: int) -> tuple[Photo, list[Request]]:
        sample = source[index]
        truths[index] = truths_of_image(truth_of_sample(sample), index)
        requests = []
        for truth in truths[index]:
            if not truth.left_out:
                mask_type = truth.query.mask_type if is_oracle else "auto"
                requests.append(Request(truth.query.text, mask_type))
        return predictor.frame(sample.image), requests

    def use_all(index: int, predictions: Iterator[Prediction]) -> list[tuple[QueryTruth, T | None]]:
        used = []
        for truth in truths.pop(index):
            used.append((truth, None if truth.left_out else use(next(predictions), truth)))
        return used

    with show_progress(f"evaluating images of {name}", len(indices)) as advance:
        for of_image in predictor.stream(indices, read, use_all, **options):
            yield from of_image
            advance(1)
