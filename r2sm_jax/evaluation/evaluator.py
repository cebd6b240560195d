"""Evaluates a segmenter: its masks on every split, and its decisions about sentences without
images."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from scipy.special import expit

from r2sm_jax.config import LEARNED_HEADS, Config
from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.evaluation.completion import REFERENCE_METHODS, methods_of, score_completion
from r2sm_jax.evaluation.prompts import choose_images, prompt_figures
from r2sm_jax.evaluation.report import Evaluated, make_report, sentence_figures
from r2sm_jax.evaluation.scorer import evaluate_source
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.progress import show_progress
from r2sm_jax.query import REFERENCES, Sentence
from r2sm_jax.synthetic.queries.sentences import intent_sentences
from r2sm_jax.synthetic.sources import SourceSpec


def evaluate(
    predictor: Predictor,
    sources: Mapping[str, Source],
    *,
    spec: str,
    step: int,
    trained: Config,
    selected: bool = True,
) -> tuple[dict[str, Any], Evaluated]:
    """Evaluates a segmenter on every split. Returns the report, and the results that it was made
    from.

    Args:
        predictor: the segmenter.
        sources: the splits.
        spec: SPEC of the data.
        step: the step of the checkpoint.
        trained: how it was trained.
        selected: whether the checkpoint was selected by its figures.
    """
    evaluated = {}
    for name, source in sources.items():
        evaluated[name] = (source, evaluate_source(predictor, source, name=name))
    sentences = {}
    if spec == "scenes":
        sentences["val_r2sm"] = evaluate_sentences(predictor, intent_sentences("val_r2sm"))
    loop = trained.train
    is_same_data = SourceSpec.parse(spec).is_same_data(SourceSpec.parse(trained.data.source))
    report = make_report(
        evaluated,
        sentences,
        source=spec,
        step=step,
        threshold=predictor.mask_threshold,
        head=predictor.config.head,
        weights_sha256=predictor.weights_sha256,
        language_model_sha256=predictor.text_encoder.sha256,
        selected_on=loop.select_on if selected else None,
        trained_on=spec if is_same_data else trained.data.source,
        matmul_precision=loop.matmul_precision,
        accumulate=loop.accumulate,
        devices=loop.devices,
    )
    if predictor.completer is not None:
        methods = REFERENCE_METHODS | methods_of(predictor.completer)
        for name, source in sources.items():
            samples = read_all(source, f"completing objects of {name}, images")
            report["splits"][name]["completion"] = score_completion(methods, samples)
    if predictor.has_prompts:
        for name, source in sources.items():
            figures = prompt_figures(predictor, choose_images(source))
            report["splits"][name]["prompts"] = figures
    return report, evaluated


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
    if head in REFERENCES:
        decisions = [
            REFERENCES[head](sentence.text, sentence.mask_type) == "amodal"
            for sentence in sentences
        ]
        return sentence_figures(sentences, np.array(decisions, float), calibrated=False)
    if head not in LEARNED_HEADS:
        return sentence_figures((), np.zeros(0), calibrated=False)
    logits = predictor.amodal_logits([sentence.text for sentence in sentences])
    return sentence_figures(sentences, expit(logits), calibrated=True)


def print_markdown(text: str) -> None:
    """Prints Markdown. Tables are not cut where the output is no terminal."""
    width = None if sys.stdout.isatty() else 150
    Console(width=width).print(Markdown(text))
