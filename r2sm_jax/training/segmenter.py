"""Training of the segmenter: what it reads, and the task."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from r2sm_jax.config import Config, MatmulPrecision
from r2sm_jax.data.batches import Batch, Examples, training_batches
from r2sm_jax.data.dataset import Source, hash_data, read_some
from r2sm_jax.errors import InputError
from r2sm_jax.language.states import TextStates
from r2sm_jax.models.classifier import make_constants
from r2sm_jax.models.matching import put_weights
from r2sm_jax.models.pretrained import load_pretrained
from r2sm_jax.models.r2sm import R2SM, build_model
from r2sm_jax.query import Sentence
from r2sm_jax.training.head import train_target_head
from r2sm_jax.training.loop import Evaluate, Task
from r2sm_jax.training.losses import segmenter_loss
from r2sm_jax.training.processes import shard_locally

NUM_SENTENCES = 600
"""From about so many queries `make_constants` takes the mean of all sentences."""
FITTING_QUANTILE = 0.99
"""The longest 1 % of the sentences are not trained on. The rest is padded to its longest sentence,
and attention takes time for padding too."""


class TrainingData(NamedTuple):
    """What training reads."""

    examples: Examples
    texts: TextStates
    name_embeddings: dict[str, np.ndarray]
    """Attribute -> embeddings of the names of its values."""
    sentences: list[str]
    """Some of the queries."""
    sha256: str
    target_sentences: Sequence[Sentence]
    """Sentences that the target head learns from."""
    has_absent_targets: bool
    """Whether some queries are for something that is not in the picture."""


def prepare_data(
    config: Config,
    source: Source,
    text_only: Sequence[Sentence],
    target_sentences: Sequence[Sentence] = (),
) -> TrainingData:
    """Opens the language model, fixes how many tokens sentences are padded to, and makes
    `Examples`. Images are prepared and sentences encoded later, as batches need them.

    Args:
        config: a resolved configuration.
        source: the training split.
        text_only: sentences without an image, for a head that reads words.
        target_sentences: those that the target head learns from.

    Raises InputError if the language model cannot be read or does not fit the configuration.
    """
    text = config.model.text
    texts = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)
    if text.dim != texts.sizes.dim:
        raise InputError(
            f"--model.text.dim {text.dim}: {text.name} has token states of width "
            f"{texts.sizes.dim}; give that"
        )
    texts.weights = shard_locally(config.distributed.fsdp, texts.weights)

    samples = read_some(source)
    if source.is_procedural:
        # The others are not made yet. Their sentences are like those of these.
        queries = [query for sample in samples for query in sample.queries]
    else:
        queries = [query for index in range(len(source)) for query in source.queries_at(index)]

    sentences = sorted({query.text for query in queries})
    sentences = sentences[:: max(1, len(sentences) // NUM_SENTENCES)]

    # How many tokens sentences are padded to.
    lengths = texts.tokenizer.count([query.text for query in queries])
    text_only_ids = texts.tokenizer([one.text for one in text_only]) if text_only else []
    length = longest_fitting(lengths)
    type_length = max(length, longest_fitting([len(ids) for ids in text_only_ids]))
    share = np.mean([one > length for one in lengths])
    print(f"queries of more than {length} tokens are left out of training ({share:.1%})")

    is_amodal = [one.mask_type == "amodal" for one in text_only]
    examples = Examples(
        source,
        config,
        texts.tokenizer,
        text_length=length,
        text_only=[
            one for one in zip(text_only_ids, is_amodal, strict=True) if len(one[0]) <= type_length
        ],
        type_text_length=type_length,
    )
    return TrainingData(
        examples=examples,
        texts=texts,
        name_embeddings={
            attribute: texts.embeddings(words) for attribute, words in source.vocabulary.items()
        },
        sentences=sentences,
        sha256=hash_data(source, samples),
        target_sentences=target_sentences,
        has_absent_targets=any(not query.instance_ids for query in queries),
    )


def longest_fitting(lengths: Sequence[int]) -> int:
    """Returns the number of tokens that `FITTING_QUANTILE` of the sentences do not exceed."""
    return int(np.quantile(lengths, FITTING_QUANTILE, method="higher")) if lengths else 1


def segmenter_task(
    config: Config, data: TrainingData, evaluate: Evaluate, *, published: bool
) -> Task:
    """Makes the task of a resolved configuration, which has all sizes.

    `published`: whether the model gets its published weights and what is computed from the data
    before the first step (`start_from_published`); else all is random, for the weights of a run to
    take its place. Raises InputError if published weights cannot be read or do not fit.
    """
    model = build_model(config.model, rngs=nnx.Rngs(config.train.seed))
    print_parameters(model, data.texts)
    if published:
        start_from_published(model, data, config.train.seed)

    def read_batches(position: int | None) -> Iterator[tuple[Batch, int]]:
        start = position or 0
        batches = training_batches(
            data.examples,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            start=start,
            shard=(jax.process_index(), jax.process_count()),
            workers=config.data.workers,
        )
        for number, batch in enumerate(batches, start + 1):
            yield fill_in_states(batch, data.texts, config.train.matmul_precision), number

    return Task(model, segmenter_loss(config, data.name_embeddings), read_batches, evaluate)


def fill_in_states(
    batch: Batch, texts: TextStates, precision: MatmulPrecision = "float32"
) -> Batch:
    """Replaces the token ids of a batch by states of the language model."""
    if batch.type_text is None:
        (text,) = texts.of_ids(batch.text, precision=precision)
        return batch._replace(text=text)
    text, type_text = texts.of_ids(batch.text, batch.type_text, precision=precision)
    return batch._replace(text=text, type_text=type_text)


def start_from_published(model: R2SM, data: TrainingData, seed: int) -> None:
    """Puts published weights into a model and prints where they went; computes the vectors of a
    classifier, and trains the head of targets."""
    _, params, constants = nnx.split(model, nnx.Param, ...)
    params, constants, matches = load_pretrained(model.config, params, constants)
    for name, found in matches.items():
        print(f"{name}: {found}", flush=True)
    if model.config.classifier:
        constants = put_weights(constants, make_constants(data.texts, data.sentences))
    if model.config.target:
        constants = put_weights(
            constants, train_target_head(data.texts, data.target_sentences, seed)
        )
    nnx.update(model, params, constants)


def print_parameters(model: R2SM, texts: TextStates) -> None:
    """Prints how many parameters each module has, and which are frozen."""
    _, params, constants = nnx.split(model, nnx.Param, ...)
    parts: dict[str, Any] = {str(name): part for name, part in params.items()}
    parts["trainable"] = params
    parts["frozen: vision"] = constants.get("vision", {})
    parts["frozen: classifier"] = constants.get("classifier", {})
    parts["frozen: target head"] = constants.get("target_head", {})
    parts[f"frozen: {texts.folder.name}"] = texts.weights
    print("parameters")
    for name, part in parts.items():
        if count := sum(leaf.size for leaf in jax.tree.leaves(part)):
            print(f"  {name:<30}{count:>14,}", flush=True)
