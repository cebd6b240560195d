"""Evaluates a segmenter: its masks on every split, and its decisions about sentences without
images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from scipy.special import expit

from r2sm_jax.config import LEARNED_HEADS, Config
from r2sm_jax.data.dataset import Sample, Source, truth_of_sample
from r2sm_jax.data.masks import Mask
from r2sm_jax.evaluation.completion import (
    REFERENCE_METHODS,
    Answer,
    choose_images,
    methods_of,
    prompt_figures,
    score_completion,
)
from r2sm_jax.evaluation.report import Evaluated, make_report, sentence_figures
from r2sm_jax.evaluation.scorer import EvalResults, QueryTruth, score, truths_of_image
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import Asked, Predictor
from r2sm_jax.inference.prompts import Request
from r2sm_jax.progress import show_progress
from r2sm_jax.query import REFERENCES, Sentence

T = TypeVar("T")


def evaluate(
    predictor: Predictor,
    sources: Mapping[str, Source],
    sentences: Mapping[str, Sequence[Sentence]],
    *,
    trained: Config,
    **meta: Any,
) -> tuple[dict[str, Any], Evaluated]:
    """Evaluates a segmenter on every split. Returns the report, and the results that it was made
    from.

    Args:
        predictor: the segmenter.
        sources: the splits.
        sentences: lists of sentences without images, by name.
        trained: how it was trained.
        meta: what the report says besides: `source`, `step`, `selected_on`, `trained_on`.
    """
    evaluated = {}
    for name, source in sources.items():
        evaluated[name] = (source, evaluate_source(predictor, source, name=name))
    loop = trained.train
    report = make_report(
        evaluated,
        {name: evaluate_sentences(predictor, rows) for name, rows in sentences.items()},
        threshold=predictor.mask_threshold,
        head=predictor.config.head,
        weights_sha256=predictor.weights_sha256,
        language_model_sha256=predictor.text_encoder.sha256,
        matmul_precision=loop.matmul_precision,
        accumulate=loop.accumulate,
        devices=loop.devices,
        **meta,
    )
    for name, source in sources.items():
        split = report["splits"][name]
        if predictor.completer is not None:
            methods = REFERENCE_METHODS | methods_of(predictor.completer)
            samples = read_all(source, f"completing objects of {name}")
            split["completion"] = score_completion(methods, samples)
        if predictor.outliner is not None:
            split["prompts"] = prompt_figures(partial(_look, predictor), choose_images(source))
    return report, evaluated


def _look(predictor: Predictor, image: np.ndarray) -> Answer:
    """Encodes an image once, for `prompt_figures`."""
    encoded = predictor.encode(image)

    def answer(queries: Sequence[str | None], **where: Any) -> list[Mask]:
        predictions = predictor.predict(queries, "modal", encoded, **where)
        return [prediction.modal for prediction in predictions]

    return answer


def read_all(source: Source, what: str) -> Iterator[Sample]:
    """The samples of a split, one at a time, with their progress."""
    with show_progress(what, len(source)) as advance:
        for index in range(len(source)):
            yield source[index]
            advance(1)


def evaluate_sentences(predictor: Predictor, sentences: Sequence[Sentence]) -> dict[str, Any]:
    """The figures of the decisions about sentences without an image; None where the head needs
    one."""
    head = predictor.config.head
    probabilities: list[float | None] = [None] * len(sentences)
    if head in REFERENCES:
        types = [REFERENCES[head](sentence.text, sentence.mask_type) for sentence in sentences]
        predicted = np.array([mask_type == "amodal" for mask_type in types], bool)
    elif head in LEARNED_HEADS:
        texts = [sentence.text for sentence in sentences]
        probability = expit(predictor.amodal_logits(texts)).astype(float)
        predicted = probability > 0.5
        probabilities = probability.tolist()
    else:
        return sentence_figures([], np.zeros(0, bool), []) | {"queries": 0}
    figures = sentence_figures(sentences, predicted, probabilities)
    return figures | {"queries": len(sentences)}


def evaluate_source(predictor: Predictor, source: Source, *, name: str = "a split") -> EvalResults:
    """Predicts and scores every query of a source whose requested mask is annotated.

    The decision of the model selects the mask. Masks are compared at the images' own resolution.

    Args:
        predictor: the segmenter.
        source: the images and their queries.
        name: of the split, for the progress that is shown.
    """
    results = EvalResults()
    answers = answer_all(predictor, source, score, name, with_candidates=True)
    for scored, left_out in answers:
        results.results += scored
        results.left_out.update(truth.left_out for truth in left_out)
    return results


def answer_all(
    predictor: Predictor,
    source: Source,
    use: Callable[[Prediction, QueryTruth], T],
    name: str,
    **options: bool,
) -> Iterator[tuple[list[T], list[QueryTruth]]]:
    """Yields for each image what `use` makes of the predictions and truths of its queries, and the
    truths of those that are not scored.

    Args:
        predictor: the segmenter.
        source: the images and their queries.
        use: is called in threads, for one query after the other.
        name: of the split, for the progress that is shown.
        options: of `to_prediction`.
    """
    indices = [index for index in range(len(source)) if source.queries_at(index)]
    # The oracle head is told the requested type.
    is_oracle = predictor.config.head == "oracle"

    def read(index: int) -> Asked:
        sample = source[index]
        truths = truths_of_image(truth_of_sample(sample), index)
        scored = [truth for truth in truths if not truth.left_out]
        requests = []
        for truth in scored:
            mask_type = truth.query.mask_type if is_oracle else "auto"
            requests.append(Request(truth.query.text, mask_type))
        left_out = [truth for truth in truths if truth.left_out]
        return Asked(predictor.frame(sample.image), requests, about=(scored, left_out))

    def finish(asked: Asked, predictions: Iterator[Prediction]) -> tuple[list[T], list[QueryTruth]]:
        scored, left_out = asked.about
        return list(map(use, predictions, scored)), left_out

    with show_progress(f"evaluating images of {name}", len(indices)) as advance:
        for finished in predictor.stream(indices, read, finish, **options):
            yield finished
            advance(1)
