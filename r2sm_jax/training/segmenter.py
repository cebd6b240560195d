"""Training of the segmenter: what it reads, and the task."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from r2sm_jax.config import LEARNED_HEADS, Config
from r2sm_jax.data.batches import (
    MAX_KEPT_BYTES,
    Batch,
    ExampleBuilder,
    Examples,
    training_batches,
)
from r2sm_jax.data.dataset import Source, hash_data, read_some
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.models.classifier import make_constants
from r2sm_jax.models.matching import put_weights
from r2sm_jax.models.pretrained import load_pretrained
from r2sm_jax.query import Sentence
from r2sm_jax.training.loop import Evaluate
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.processes import place, shard_batch, shard_locally
from r2sm_jax.training.step import TrainState, Values, init_state, jit_train_step, split_model

DEVICE_BATCHES = 2
"""How many batches wait on the devices: while these compute a step, the next one has arrived."""
NUM_SENTENCES = 600
"""About so many queries say what all have in common."""
FITTING_QUANTILE = 0.99
"""The longest 1 % of the sentences are not trained on. The rest is padded to its longest sentence,
and attention takes time for padding too."""


class TrainingData(NamedTuple):
    """What training reads."""

    examples: Examples
    texts: TextStates
    names: dict[str, np.ndarray]
    """Embeddings of each attribute's values."""
    sentences: list[str]
    """Some of the queries."""
    sha256: str
    has_absent_targets: bool
    """Whether some queries are for something that is not in the picture."""


def prepare_data(config: Config, source: Source, text_only: Sequence[Sentence]) -> TrainingData:
    """Opens the language model. Images are prepared and sentences encoded later, as batches need
    them.

    Args:
        config: a resolved configuration.
        source: the training split.
        text_only: sentences without an image, for a head that reads words.

    Raises InputError if the language model cannot be read or does not fit the configuration.
    """
    data, text = config.data, config.model.text
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
    text_only_lengths = texts.tokenizer.count([sentence.text for sentence in text_only])
    tokens = longest_fitting(lengths)
    type_tokens = max(tokens, longest_fitting(text_only_lengths))
    share = np.mean([length > tokens for length in lengths])
    print(f"queries of more than {tokens} tokens are left out of training ({share:.1%})")

    fitting = zip(text_only, text_only_lengths, strict=True)
    build = ExampleBuilder(
        tokenizer=texts.tokenizer,
        tokens=tokens,
        queries=data.queries,
        instances=data.instances,
        slots=config.model.decoder.slots,
        mirror=data.mirror,
        token_drop=data.token_drop,
        colour_jitter=data.colour_jitter,
        has_text_head=config.model.head in LEARNED_HEADS,
        text_only=[sentence for sentence, length in fitting if length <= type_tokens],
        type_tokens=type_tokens,
    )
    examples = Examples(
        source,
        build,
        image_size=config.model.vision.image_size,
        mask_size=config.model.mask_size,
        crop=data.crop,
        fresh=data.fresh,
        max_kept_bytes=MAX_KEPT_BYTES // max(1, data.workers),
    )
    return TrainingData(
        examples=examples,
        texts=texts,
        names={group: texts.embeddings(words) for group, words in source.vocabulary.items()},
        sentences=sentences,
        sha256=hash_data(source, samples),
        has_absent_targets=any(not query.instance_ids for query in queries),
    )


def longest_fitting(lengths: Sequence[int]) -> int:
    """Returns the number of tokens that `FITTING_QUANTILE` of the sentences do not exceed."""
    return int(np.quantile(lengths, FITTING_QUANTILE, method="higher")) if lengths else 1


class SegmenterTask:
    """Trains a segmenter (training/loop.py).

    Attributes:
        constants: The weights that training leaves as they are.
        graphdef: The model's structure.
    """

    part = "segmenter"

    def __init__(self, config: Config, data: TrainingData, mesh: Mesh, evaluate: Evaluate):
        """Builds the model of a resolved configuration, which has all sizes, with random
        weights."""
        self.evaluate = evaluate
        self._config, self._data, self._mesh = config, data, mesh
        self.graphdef, params, constants = split_model(config.model, config.train.seed)
        print_parameters(params, constants, data.texts)
        self._params, self.constants = params, constants
        self._names = place(mesh, data.names)

    def set_weights(self, weights: nnx.State) -> None:
        """Starts from these weights."""
        self._params, self.constants = nnx.split_state(weights, nnx.Param, ...)

    def load_pretrained(self) -> None:
        """Starts from published weights, where the model has some, and prints where they went;
        computes the vectors of a classifier. Raises InputError if weights cannot be read or do not
        fit."""
        self._params, self.constants, matches = load_pretrained(
            self._config.model, self._params, self.constants
        )
        for name, found in matches.items():
            print(f"{name}: {found}", flush=True)
        if self._config.model.classifier:
            vectors = make_constants(self._data.texts, self._data.sentences)
            self.constants = put_weights(self.constants, vectors)

    def start(self) -> tuple[TrainState, "DeviceBatches"]:
        """Returns the state before the first step, and all batches. Puts all weights on the
        devices."""
        config = self._config
        optimizer = make_optimizer(config.optimizer, config.train.steps, config.model.vision)
        state = init_state(self._params, optimizer, averaged=config.train.ema > 0)
        state, self.constants = place(self._mesh, (state, self.constants))
        del self._params  # so that no device holds a second copy
        self._step = jit_train_step(self.graphdef, optimizer, config, state)
        return state, DeviceBatches(self._read_batches, self._put)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Values]:
        """Trains on one batch."""
        return self._step(state, self.constants, batch, self._names)

    def _read_batches(self, start: int) -> Iterator[Batch]:
        """Reads this process's rows of every batch from number `start` on."""
        return training_batches(
            self._data.examples,
            batch_size=self._config.train.batch_size,
            seed=self._config.train.seed,
            start=start,
            shard=(jax.process_index(), jax.process_count()),
            workers=self._config.data.workers,
        )

    def _put(self, batch: Batch) -> Batch:
        """Encodes the sentences of a batch, and puts it on the devices."""
        filled = self._data.texts.fill(batch, self._config.train.matmul_precision)
        return shard_batch(self._mesh, filled)


class DeviceBatches:
    """Puts batches on the devices before they are needed. Its state is the number of those taken.

    No thread puts them there: processes that share devices must give them their programs in the
    same order.
    """

    def __init__(
        self, read: Callable[[int], Iterator[Batch]], put: Callable[[Batch], Batch]
    ) -> None:
        """`read`: gives the batches from a number on; `put`: brings one to the devices."""
        self._read, self._put = read, put
        self.set_state(0)

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._read(self._num_taken)
        while len(self._waiting) < DEVICE_BATCHES:
            self._waiting.append(self._put(next(self._batches)))
        self._num_taken += 1
        return self._waiting.popleft()

    def get_state(self) -> int:
        """Returns the number of batches that were taken."""
        return self._num_taken

    def set_state(self, state: int) -> None:
        """Continues after so many batches."""
        self._num_taken = state
        self._batches: Iterator[Batch] | None = None
        self._waiting: deque[Batch] = deque()


def print_parameters(params: nnx.State, constants: nnx.State, texts: TextStates) -> None:
    """Prints how many parameters each module has, and which are frozen."""
    parts: dict[str, Any] = {str(name): part for name, part in params.items()}
    parts["trainable"] = params
    parts["frozen: vision"] = constants.get("vision", {})
    parts["frozen: classifier"] = constants.get("classifier", {})
    parts[f"frozen: {texts.folder.name}"] = texts.weights
    print("parameters")
    for name, part in parts.items():
        if count := sum(leaf.size for leaf in jax.tree.leaves(part)):
            print(f"  {name:<30}{count:>14,}", flush=True)
