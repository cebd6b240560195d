"""Prepared samples -> training batches.

A batch is a dict of numpy arrays (b = batch, S = image size, s = mask size, m = instances,
k = queries, q = slots, t = tokens, l = layers of the language model, e = their channels):

    image            uint8 [b S S 3]     letterboxed
    image_mask       bool  [b S S]       image, not padding
    modal, amodal    uint8 [b m s s]     coverage of every mask cell, 0..255
    has_amodal       bool  [b m]         the complete shape is annotated
    labels           int   [b m] each    index into the vocabulary of an attribute; -1 = unknown
    boxes            f32   [b m 4]       amodal box x0 y0 x1 y1 in units of the padded side
    pixel_weight     uint8 [b s s]       share of the cell that counts, 0..255: no padding, nothing
                                         ignored
    query_instances  bool  [b k m]       the instances that a query means
    slot_targets     int   [b k q]       the first q of them; -1 = none
    is_amodal        bool  [b k]         the query asks for the complete shape
    query_mask       bool  [b k]         a query, not padding
    text             f16   [b k t l e]   frozen token states, which replace token ids, int32
                                         [b k t]: some batches ahead (encoded_batches.py), or just
                                         before the step (`DataConfig.keeps_nothing`)
    text_mask        bool  [b k t]       a token, not padding
    index            int   [b]           position in the source

and, for a mask-type head that reads words alone, the f = `NUM_TYPE_SENTENCES` sentences an image
that it learns from:

    type_text        f16   [b f t l e]   states of some queries and of sentences without an image;
                                         token ids int32 [b f t] before, as `text`
    type_text_mask   bool  [b f t]       their tokens, some hidden
    type_is_amodal   bool  [b f]
    type_valid       bool  [b f]         a sentence, not padding
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grain
import numpy as np
from absl import flags

from r2sm_jax.data.augment import (
    NAMES_A_SIDE,
    drop_tokens,
    jitter_colours,
    mirror,
    random_crop,
)
from r2sm_jax.data.prepare import Prepared, PreparedSource
from r2sm_jax.data.tokenizer import NO_TOKEN, QueryTokenizer
from r2sm_jax.errors import InputError
from r2sm_jax.query import Sentence

Batch = dict[str, Any]
BUFFERED_BATCHES = 2
"""Batches that each worker process has ready."""
NUM_TYPE_SENTENCES = 9
NUM_TEXT_ONLY = 6
"""How many of the `NUM_TYPE_SENTENCES` have no image, where there are such sentences."""


@dataclass(frozen=True)
class ExampleBuilder:
    """A prepared sample -> the arrays of one example of a batch.

    The order of its random draws is a contract, so that a run can be repeated and resumed: queries,
    mirroring, colours. Those for the mask-type head follow: its queries, its sentences without an
    image, its hidden tokens.
    """

    text_states: Callable[[list[str], int], tuple[np.ndarray, np.ndarray]]
    """Sentences and a number of tokens -> states or token ids, and which tokens are real."""
    tokens: int
    """Tokens that the queries are padded to."""
    queries: int
    """Number of queries of an example."""
    instances: int
    """Number of instances of an example; those that its queries mean come first."""
    slots: int
    """Number of instances of a query that are targets of their own, one slot each."""
    mirror: bool
    token_drop: float = 0.0
    colour_jitter: float = 0.0
    text_only: Sequence[Sentence] = ()
    """Sentences without an image."""
    type_tokens: int = 0
    """Tokens that the sentences of the mask-type head are padded to; 0 = `tokens`."""
    has_text_head: bool = False
    """Whether a mask-type head learns from words alone."""
    count_tokens: Callable[[Sequence[str]], list[int]] | None = None
    """The numbers of tokens of queries; those of more than `tokens` are left out."""
    cached_features: Callable[[int], Batch] | None = None
    """Image features that training does not change, by position in the source."""

    def __call__(self, index: int, prepared: Prepared, rng: np.random.Generator) -> Batch:
        """One example of sample `index`."""
        usable = self._find_usable(prepared["texts"])
        # Without a usable query the permutation is an empty array of floats, which is no index.
        rows = np.sort(rng.permutation(usable)[: self.queries].astype(int))
        is_mirrored = self.mirror and rng.random() < 0.5
        if is_mirrored:
            prepared = mirror(prepared)
        image = prepared["image"]
        if self.colour_jitter:
            image = jitter_colours(image, self.colour_jitter, rng)

        # Instances that a query means come first, the others as far as there is room. The sort is
        # stable and False goes before True, so that both keep their order.
        is_target = prepared["query_instances"][rows].any(0)
        columns = np.argsort(~is_target, kind="stable")[: self.instances]

        example = {"image": image, "image_mask": prepared["image_mask"], "index": np.int32(index)}
        example |= self._instance_arrays(prepared, columns)
        example |= self._query_arrays(prepared, rows, columns, is_mirrored)
        if self.has_text_head:
            type_rows = rng.permutation(usable).astype(int)
            example |= self._type_sentences(prepared, type_rows, rng)
        if self.cached_features is not None:
            example |= self.cached_features(index)
        return example

    def _find_usable(self, texts: Sequence[str]) -> list[int]:
        """The positions of the sentences that are not too long."""
        if self.count_tokens is None:
            return list(range(len(texts)))
        return [i for i, count in enumerate(self.count_tokens(texts)) if count <= self.tokens]

    def _instance_arrays(self, prepared: Prepared, columns: np.ndarray) -> Batch:
        """The masks and names of the instances `columns`, padded to `instances`."""

        def select(values: np.ndarray, fill: float = 0) -> np.ndarray:
            return pad(values[columns], self.instances, fill=fill)

        labels = prepared["labels"].items()
        return {
            "modal": select(prepared["modal"]),
            "amodal": select(prepared["amodal"]),
            # Padding has no cells, so no loss reads this of it. True: its annotation lacks nothing.
            "has_amodal": select(prepared["has_amodal"], fill=True),
            "labels": {attribute: select(numbers, fill=-1) for attribute, numbers in labels},
            "boxes": select(prepared["boxes"]),
            "pixel_weight": prepared["pixel_weight"],
        }

    def _query_arrays(
        self, prepared: Prepared, rows: np.ndarray, columns: np.ndarray, is_mirrored: bool
    ) -> Batch:
        """The queries `rows`, padded to `queries`.

        A query is masked if it means more instances than there is room for, or names a side of an
        image that is mirrored.
        """
        texts = [prepared["texts"][i] for i in rows]
        all_instances = prepared["query_instances"][rows]
        query_instances = all_instances[:, columns]
        is_complete = query_instances.sum(1) == all_instances.sum(1)
        names_a_side = np.array([bool(NAMES_A_SIDE.search(text)) for text in texts], bool)
        query_mask = is_complete & ~names_a_side if is_mirrored else is_complete

        # The instances of a query in order, then -1. Of more instances than slots the first ones:
        # the fused mask still means all.
        order = np.argsort(~query_instances, kind="stable")[:, : self.slots]
        is_instance = np.take_along_axis(query_instances, order, axis=1)
        slot_targets = np.where(is_instance, order, -1).astype(np.int32)

        padding = [""] * (self.queries - len(texts))
        text, text_mask = self.text_states(texts + padding, self.tokens)
        return {
            "query_instances": pad(query_instances, self.queries, self.instances),
            "slot_targets": pad(slot_targets, self.queries, self.slots, fill=-1),
            "is_amodal": pad(prepared["is_amodal"][rows], self.queries),
            "query_mask": pad(query_mask, self.queries),
            "text": text,
            "text_mask": text_mask,
        }

    def _type_sentences(
        self, prepared: Prepared, rows: np.ndarray, rng: np.random.Generator
    ) -> Batch:
        """The sentences that the mask-type head learns from: queries `rows`, and some of
        `text_only`."""
        num_text_only = NUM_TEXT_ONLY if self.text_only else 0
        texts = []
        is_amodal = []
        for row in rows[: NUM_TYPE_SENTENCES - num_text_only]:
            texts.append(prepared["texts"][row])
            is_amodal.append(bool(prepared["is_amodal"][row]))
        if num_text_only:
            for number in rng.integers(len(self.text_only), size=num_text_only):
                sentence = self.text_only[int(number)]
                texts.append(sentence.text)
                is_amodal.append(sentence.mask_type == "amodal")

        num_padding = NUM_TYPE_SENTENCES - len(texts)
        states, mask = self.text_states(texts + [""] * num_padding, self.type_tokens or self.tokens)
        return {
            "type_text": states,
            "type_text_mask": drop_tokens(mask, self.token_drop, rng),
            "type_is_amodal": np.array(is_amodal + [False] * num_padding, bool),
            "type_valid": np.arange(NUM_TYPE_SENTENCES) < len(texts),
        }


def pad(values: np.ndarray, *sizes: int, fill: float = 0) -> np.ndarray:
    """The values with their first axes filled up to `sizes`."""
    widths = [(0, 0)] * values.ndim
    for axis, size in enumerate(sizes):
        widths[axis] = (0, size - values.shape[axis])
    return np.pad(values, widths, constant_values=fill)


@dataclass(frozen=True)
class TokenIds:
    """The `text_states` of an `ExampleBuilder` in training: token ids, which are replaced by states
    before a step reads them (encoded_batches.py; `make_text_encoder` in train.py)."""

    tokenizer: QueryTokenizer
    memory: dict[str, list[int]] | None = None
    """The ids of all sentences so far; None where sentences do not come again."""

    def __call__(self, texts: list[str], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids with `NO_TOKEN` in place of padding, and which of them are real, `[k t]`."""
        ids = np.full((len(texts), tokens), NO_TOKEN, np.int32)
        for row, of_text in enumerate(self._ids(texts)):
            ids[row, : len(of_text)] = of_text[:tokens]
        mask = ids != NO_TOKEN
        # A sentence without tokens keeps its first place, as in `pad_ids`: attention needs one.
        mask[:, 0] = True
        return ids, mask

    def count(self, texts: Sequence[str]) -> list[int]:
        """The numbers of tokens of sentences, up to the limit of the tokenizer."""
        return [len(of_text) for of_text in self._ids(texts)]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if self.memory is None:
            return self.tokenizer(texts) if texts else []
        new = [text for text in dict.fromkeys(texts) if text not in self.memory]
        if new:
            self.memory.update(zip(new, self.tokenizer(new), strict=True))
        return [self.memory[text] for text in texts]


@dataclass(frozen=True)
class Visit:
    """A sample at one of its visits."""

    index: int
    number: int


def number_visit(position: int, index: int, *, num_samples: int) -> Visit:
    """The visit at a position of an endless order in which `num_samples` samples come in turn."""
    return Visit(index, position // num_samples)


@dataclass(frozen=True)
class VisitBuilder:
    """A sample at a visit -> the arrays of one example. Worker processes get copies of it."""

    source: PreparedSource
    build_example: ExampleBuilder

    def __call__(self, visit: Visit | int, rng: np.random.Generator) -> Batch:
        """The example of a visit. `training_batches` numbers visits only for a source whose samples
        are new at each visit; others give the index of the sample alone."""
        if not isinstance(visit, Visit):
            visit = Visit(visit, 0)
        source = self.source
        if not source.is_augmented and not source.fresh:
            return self.build_example(visit.index, source[visit.index], rng)

        # The crop is drawn before everything else.
        sample = source.sample_at(visit.index, visit.number)
        if source.crop < 1:
            sample = random_crop(sample, source.crop, rng)
        return self.build_example(visit.index, source.prepare(sample), rng)


def training_batches(
    source: PreparedSource,
    build_example: ExampleBuilder,
    *,
    batch_size: int,
    seed: int,
    shard: tuple[int, int] = (0, 1),
    workers: int = 0,
) -> grain.DatasetIterator:
    """An endless, reshuffled, resumable iterator of batches.

    Args:
        source: The samples.
        build_example: Makes the rows.
        batch_size: Rows of a batch, over all processes that train together.
        seed: Of the order and of all random changes.
        shard: (i, n): this is process i of n. Each of them gives every n-th row of a batch. The
            rows, and the position that is saved, do not depend on n.
        workers: Number of processes that prepare batches; 0 = threads of this one. The batches do
            not depend on it.
    """
    num_samples = len(source)
    examples = grain.MapDataset.range(num_samples).seed(seed).shuffle().repeat()
    if source.fresh:
        # The position tells the visit, so that a resumed run makes the same pictures.
        examples = examples.map_with_index(partial(number_visit, num_samples=num_samples))
    examples = examples.random_map(VisitBuilder(source, build_example))
    process, num_processes = shard
    batches = examples[process::num_processes].batch(batch_size // num_processes)
    if workers:
        image_size, mask_size = source.sizes
        # A byte for each of three colours and the image mask, and for both masks of every instance.
        bytes_of_image = 4 * image_size**2
        bytes_of_masks = 2 * build_example.instances * mask_size**2
        bytes_of_row = bytes_of_image + bytes_of_masks
        return WorkerBatches(batches, workers, bytes_of_row * batch_size // num_processes)

    threads = min(16, os.cpu_count() or 1)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    return iter(batches.to_iter_dataset(options))


class WorkerBatches(grain.DatasetIterator):
    """Batches that worker processes make ahead, in the order in which one process would.

    Its state is the number of batches so far, as grain's is without workers, so that a resumed run
    may have another number of them. Workers start at the first batch.
    """

    def __init__(self, batches: grain.MapDataset[Batch], workers: int, num_bytes: int):
        """`num_bytes`: about the size of a batch."""
        super().__init__()
        self._batches = batches
        self._workers = workers
        self._num_bytes = num_bytes
        self._position = 0
        self._iterator: grain.DatasetIterator | None = None

    def __next__(self) -> Batch:
        """The next batch. Raises InputError as a worker does, and where one was killed."""
        if self._iterator is None:
            self._iterator = self._start()
        try:
            batch = next(self._iterator)
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise InputError(
                f"--data.workers {self._workers}: a worker process was killed, perhaps since the "
                "memory was full; give fewer workers or smaller images, then --resume"
            ) from error
        self._position += 1
        return batch

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        self.close()
        self._position = state["next_index"]

    def close(self) -> None:
        """Ends the workers."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _start(self) -> grain.DatasetIterator:
        # grain reads flags of absl, which only a program of absl parses.
        flags.FLAGS.mark_as_parsed()
        # A worker makes one batch after the other: the cores are busy with other workers.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        batches = self._batches[self._position :].to_iter_dataset(options)
        if not self._has_shared_memory():
            # Arrays go through pipes, which takes this process a quarter of its time.
            options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            batches = grain.experimental.WithOptionsIterDataset(batches, options)
        batches = batches.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=self._workers, per_worker_buffer_size=BUFFERED_BATCHES
            ),
            worker_init_fn=_leave_signals,
        )
        return iter(batches)

    def _has_shared_memory(self) -> bool:
        """Whether all batches of all workers fit there; containers often have 64 MB."""
        try:
            free = shutil.disk_usage("/dev/shm").free
        except OSError:
            return True  # not Linux, where the system decides
        return free > 2 * self._num_bytes * self._workers * (BUFFERED_BATCHES + 2)


def _leave_signals(worker: int, num_workers: int) -> None:
    """Ctrl-C reaches workers too, but the main process saves first and then ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
