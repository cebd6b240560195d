"""Compares mask-type heads on sentences alone: every head, several seeds, one table and one
figure."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import expit

from r2sm_jax.config import OptimizerConfig
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import atomic_write
from r2sm_jax.evaluation.calibration import fit_temperature
from r2sm_jax.evaluation.decisions import mask_type_scores
from r2sm_jax.query import Sentence, keyword_mask_type
from r2sm_jax.synthetic.queries.sentences import intent_sentences, write_text_only_queries
from r2sm_jax.synthetic.sources import open_source
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.text_only import pad_sentences, train_head

TEST_SETS = ("val_r2sm", "val", "val_phrasing", "val_hard", "written")
"""`val_r2sm` and `written` are lists written by others (docs/intent.md), the rest are queries
about scenes."""


@dataclass(frozen=True)
class AblationSizes:
    """How much a head is trained and tested on."""

    num_steps: int
    num_scenes: int
    """Training scenes whose queries are learned from."""
    num_text_only: int
    """Sentences without a scene that are learned from as well."""
    num_test_scenes: int
    """Scenes of each validation split."""


@dataclass
class HeadScores:
    """One row of the table: a head on every test set, one number a seed."""

    head: str
    num_parameters: int
    accuracy: dict[str, list[float]] = field(default_factory=dict)
    """Test set -> share of right decisions."""
    ece: dict[str, list[float]] = field(default_factory=dict)
    """Test set -> calibration error; missing where a rule gives no probability."""
    seconds: list[float] = field(default_factory=list)

    def add(
        self,
        test_set: str,
        probability: Float[np.ndarray, " n"],
        is_amodal: Bool[np.ndarray, " n"],
        *,
        calibrated: bool = True,
    ) -> None:
        """Scores the answers of one seed to one test set."""
        scores = mask_type_scores(probability, is_amodal, calibrated=calibrated)
        self.accuracy.setdefault(test_set, []).append(scores["accuracy"])
        if calibrated:
            self.ece.setdefault(test_set, []).append(scores["ece"])


def run_ablation(
    heads: Sequence[str], texts: TextStates, sizes: AblationSizes, *, num_seeds: int
) -> list[HeadScores]:
    """Trains every head with every seed on the same sentences and tests it. References come
    first."""
    train_sentences = scene_sentences("train", sizes.num_scenes)
    train_sentences += write_text_only_queries(sizes.num_text_only, seed=0)
    tests = load_test_sets(sizes.num_test_scenes)
    calibration = intent_sentences("calibration")

    start = time.monotonic()
    train_groups = pad_sentences(texts, texts_of(train_sentences))
    test_groups = {name: pad_sentences(texts, texts_of(tests[name])) for name in tests}
    calibration_groups = pad_sentences(texts, texts_of(calibration))
    took = time.monotonic() - start
    print(f"{len(train_sentences):,} training sentences and the tests encoded, {took:.0f} s")

    labels = is_amodal(train_sentences)
    test_labels = {name: is_amodal(tests[name]) for name in tests}
    optimizer = make_optimizer(OptimizerConfig(), sizes.num_steps)
    results = [score_keyword_rule(tests), score_bag_of_words(train_sentences, tests)]
    for name in heads:
        result = HeadScores(name, num_parameters=0)
        for seed in range(num_seeds):
            start = time.monotonic()
            head = train_head(
                name, train_groups, labels, optimizer, num_steps=sizes.num_steps, seed=seed
            )
            result.seconds.append(time.monotonic() - start)
            result.num_parameters = head.num_parameters

            # As in training, the temperature is fitted on sentences that nothing learns from.
            logits = head.amodal_logits(calibration_groups)
            temperature = fit_temperature(logits, is_amodal(calibration))
            for test_set, groups in test_groups.items():
                probability = expit(head.amodal_logits(groups) / temperature)
                result.add(test_set, probability, test_labels[test_set])
            print(f"{name}, seed {seed}: {result.seconds[-1]:.0f} s", flush=True)
        results.append(result)
    return results


def scene_sentences(split: str, num_scenes: int) -> list[Sentence]:
    """The different queries about the first drawn scenes of a split, as sentences without an
    image."""
    source = open_source("scenes", split, count=num_scenes)
    sentences: dict[str, Sentence] = {}
    for i in range(num_scenes):
        for query in source.queries_at(i):
            family = f"{query.mask_type}: {query.kind['wording']}"
            sentences[query.text] = Sentence(query.text, query.mask_type, family)
    return list(sentences.values())


def load_test_sets(num_scenes: int) -> dict[str, list[Sentence]]:
    """The sentences of every test set."""
    tests = {
        name: scene_sentences(name, num_scenes) for name in ("val", "val_phrasing", "val_hard")
    }
    tests["val_r2sm"] = list(intent_sentences("val_r2sm"))
    tests["written"] = list(intent_sentences("test"))
    return {name: tests[name] for name in TEST_SETS}


def texts_of(sentences: Sequence[Sentence]) -> list[str]:
    """The words of sentences."""
    return [sentence.text for sentence in sentences]


def is_amodal(sentences: Sequence[Sentence]) -> Bool[np.ndarray, " n"]:
    """Whether each sentence asks for the amodal mask."""
    return np.array([sentence.mask_type == "amodal" for sentence in sentences], bool)


# References


def score_keyword_rule(tests: dict[str, list[Sentence]]) -> HeadScores:
    """The keyword rule, which learns nothing."""
    result = HeadScores("keyword rule", num_parameters=0)
    for name, sentences in tests.items():
        decisions = [keyword_mask_type(sentence.text) == "amodal" for sentence in sentences]
        result.add(name, np.array(decisions, float), is_amodal(sentences), calibrated=False)
    return result


def score_bag_of_words(
    train_sentences: Sequence[Sentence], tests: dict[str, list[Sentence]]
) -> HeadScores:
    """Logistic regression on the words and pairs of words: what a head is worth beyond them."""
    start = time.monotonic()
    vocabulary: dict[str, int] = {}
    for sentence in train_sentences:
        for term in word_terms(sentence.text):
            vocabulary.setdefault(term, len(vocabulary))
    features = count_terms(train_sentences, vocabulary)
    weights = fit_logistic_regression(features, is_amodal(train_sentences), len(vocabulary))

    result = HeadScores("bag of words", num_parameters=len(weights))
    result.seconds.append(time.monotonic() - start)
    for name, sentences in tests.items():
        logits = count_terms(sentences, vocabulary) @ weights[:-1] + weights[-1]
        result.add(name, expit(logits), is_amodal(sentences))
    return result


def word_terms(text: str) -> set[str]:
    """The words of a text and the pairs of neighbouring words."""
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    return {*words, *pairs}


def count_terms(sentences: Sequence[Sentence], vocabulary: dict[str, int]) -> sparse.csr_array:
    """Which terms of the vocabulary a sentence has: a sparse matrix [n terms] of ones."""
    rows: list[int] = []
    columns: list[int] = []
    for row, sentence in enumerate(sentences):
        present = [vocabulary[term] for term in word_terms(sentence.text) if term in vocabulary]
        columns += present
        rows += [row] * len(present)
    ones = np.ones(len(rows))
    return sparse.csr_array((ones, (rows, columns)), shape=(len(sentences), len(vocabulary)))


def fit_logistic_regression(
    features: sparse.csr_array, labels: Bool[np.ndarray, " n"], num_terms: int
) -> Float[np.ndarray, " d"]:
    """Weights, and the bias as the last number. The penalty is scikit-learn's default, C = 1."""
    signs = np.where(labels, 1.0, -1.0)

    def loss_and_gradient(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (features @ weights[:-1] + weights[-1])
        slopes = -signs * expit(-margins)
        loss = np.logaddexp(0, -margins).sum() + 0.5 * np.square(weights[:-1]).sum()
        gradient = np.append(features.T @ slopes + weights[:-1], slopes.sum())
        return float(loss), gradient

    start = np.zeros(num_terms + 1)
    result: Any = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B")
    return result.x


# The table and the figure


def percent_over_seeds(values: Sequence[float]) -> str:
    """Mean and standard deviation in percent with one decimal; the deviation needs two seeds."""
    mean = f"{100 * np.mean(values):.1f}"
    if len(values) < 2:
        return mean
    return f"{mean}±{100 * np.std(values, ddof=1):.1f}"


def table_rows(results: Sequence[HeadScores]) -> list[list[str]]:
    """The header and a row for every head, as text."""
    header = ["head"]
    header += [name.removeprefix("val_") for name in TEST_SETS]
    header += ["ECE r2sm", "parameters", "s"]
    rows = [header]
    for result in results:
        row = [result.head]
        row += [percent_over_seeds(result.accuracy[name]) for name in TEST_SETS]
        row.append(percent_over_seeds(result.ece["val_r2sm"]) if result.ece else "")
        row.append(f"{result.num_parameters:,}" if result.num_parameters else "")
        row.append(f"{np.mean(result.seconds):.0f}" if result.seconds else "")
        rows.append(row)
    return rows


def print_table(results: Sequence[HeadScores]) -> None:
    """Prints the table in the 80 columns of a terminal, without the seconds."""
    header, *rows = table_rows(results)
    table = Table(
        title="mask type right, percent, mean±deviation over seeds",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column(header[0], no_wrap=True)
    for name in header[1:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row[:-1])
    Console(width=80).print(table)


def make_figure(results: Sequence[HeadScores]) -> Figure:
    """Bars of accuracy by test set, with deviations over seeds."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    positions = np.arange(len(TEST_SETS))
    width = 0.8 / len(results)
    for i, result in enumerate(results):
        values = [result.accuracy[name] for name in TEST_SETS]
        means = [np.mean(value) for value in values]
        deviations = [np.std(value, ddof=1) if len(value) > 1 else 0 for value in values]
        offset = (i - (len(results) - 1) / 2) * width
        axes.bar(positions + offset, means, 0.92 * width, yerr=deviations, label=result.head)
    axes.set(xticks=positions, ylim=(0, 1.02), ylabel="mask type right")
    axes.set_xticklabels([name.removeprefix("val_") for name in TEST_SETS])
    figure.legend(ncols=len(results), fontsize=8, loc="outside upper center")
    return figure


def write_ablation(results: Sequence[HeadScores], folder: Path) -> None:
    """Writes `heads.json` (every seed), `heads.md` and `heads.png`. Raises InputError if it
    cannot."""
    header, *rows = table_rows(results)
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    with atomic_write(folder / "heads.json") as part:
        scores = [vars(result) for result in results]
        part.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (folder / "heads.md").write_text(text + "\n", encoding="utf-8")
    make_figure(results).savefig(folder / "heads.png", dpi=150)
