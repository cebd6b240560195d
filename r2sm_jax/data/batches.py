"""Samples -> training batches.

A batch is a dict of numpy arrays (b = batch, S = image size, s = mask size, m = instances,
k = queries, q = slots, t = tokens, l = layers of the language model, e = their channels):

    image            uint8 [b S S 3]     letterboxed
    image_mask       bool  [b S S]       image, not padding
    masks            uint8 [b m 2 s s]   modal and amodal: coverage of every mask cell, 0..255
    is_known         bool  [b m 2]       the mask is annotated; each modal one is. An amodal one
                                         that is not holds the visible part
    labels           int   [b m] each    index into the vocabulary of an attribute; -1 = unknown
    boxes            f32   [b m 4]       amodal box x0 y0 x1 y1 in units of the padded side
    pixel_weight     uint8 [b s s]       share of the cell that counts, 0..255: no padding, nothing
                                         ignored
    query_instances  bool  [b k m]       the instances that a query means
    slot_targets     int   [b k q]       the first q of them; -1 = none
    is_amodal        bool  [b k]         the query asks for the complete shape
    query_mask       bool  [b k]         a query, not padding
    text_ids         int   [b k t]       token ids, `NO_TOKEN` in place of padding. On the devices
                                         `text` takes their place, float16 [b k t l e]: the states
                                         of the frozen language model (text_states.py)
    text_mask        bool  [b k t]       a token, not padding
    index            int   [b]           position in the source

and, for a mask-type head that reads words alone, the f = `NUM_TYPE_SENTENCES` sentences an image
that it learns from:

    type_text_ids    int   [b f t]       token ids of some queries and of sentences without an
                                         image; `type_text` on the devices
    type_text_mask   bool  [b f t]       their tokens, some hidden
    type_is_amodal   bool  [b f]
    type_valid       bool  [b f]         a sentence, not padding
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grain
import numpy as np
from absl import flags

from r2sm_jax.data.dataset import FreshSource, Source
from r2sm_jax.data.prepare import (
    NAMES_A_SIDE,
    Prepared,
    drop_tokens,
    jitter_colours,
    mirror,
    prepare,
    random_crop,
)
from r2sm_jax.language.tokenizer import NO_TOKEN
from r2sm_jax.query import Sentence

Batch = dict[str, Any]
BUFFERED_BATCHES = 2
"""Batches that each worker process has ready."""
MAX_KEPT_BYTES = 4 << 30
"""Prepared samples stay in memory up to this size, the workers' together; the others are prepared
at each visit."""
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

    tokenizer: Callable[[Sequence[str]], list[list[int]]]
    """Sentences -> token ids."""
    tokens: int
    """Tokens that the queries are padded to. Queries of more are left out."""
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

    def __call__(self, index: int, prepared: Prepared, rng: np.random.Generator) -> Batch:
        """One example of sample `index`."""
        token_ids = self.tokenizer(prepared["texts"]) if prepared["texts"] else []
        usable = [i for i, ids in enumerate(token_ids) if len(ids) <= self.tokens]
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
        return example

    def _instance_arrays(self, prepared: Prepared, columns: np.ndarray) -> Batch:
        """The masks and names of the instances `columns`, padded to `instances`."""

        def select(values: np.ndarray, fill: float = 0) -> np.ndarray:
            return pad(values[columns], self.instances, fill=fill)

        labels = prepared["labels"].items()
        return {
            "masks": select(prepared["masks"]),
            # Padding has no cells, so no loss reads this of it. True: its annotation lacks nothing.
            "is_known": select(prepared["is_known"], fill=True),
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
        text_ids, text_mask = self._pad_tokens(texts + padding, self.tokens)
        return {
            "query_instances": pad(query_instances, self.queries, self.instances),
            "slot_targets": pad(slot_targets, self.queries, self.slots, fill=-1),
            "is_amodal": pad(prepared["is_amodal"][rows], self.queries),
            "query_mask": pad(query_mask, self.queries),
            "text_ids": text_ids,
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
        length = self.type_tokens or self.tokens
        token_ids, mask = self._pad_tokens(texts + [""] * num_padding, length)
        return {
            "type_text_ids": token_ids,
            "type_text_mask": drop_tokens(mask, self.token_drop, rng),
            "type_is_amodal": np.array(is_amodal + [False] * num_padding, bool),
            "type_valid": np.arange(NUM_TYPE_SENTENCES) < len(texts),
        }

    def _pad_tokens(self, texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of sentences, padded and cut to `length`, and which are real, `[k t]`."""
        token_ids = np.full((len(texts), length), NO_TOKEN, np.int32)
        for row, ids in enumerate(self.tokenizer(texts)):
            token_ids[row, : len(ids)] = ids[:length]
        mask = token_ids != NO_TOKEN
        # A sentence without tokens keeps its first place, as in `pad_ids`: attention needs one.
        mask[:, 0] = True
        return token_ids, mask


def pad(values: np.ndarray, *sizes: int, fill: float = 0) -> np.ndarray:
    """The values with their first axes filled up to `sizes`."""
    widths = [(0, 0)] * values.ndim
    for axis, size in enumerate(sizes):
        widths[axis] = (0, size - values.shape[axis])
    return np.pad(values, widths, constant_values=fill)


@dataclass
class Examples:
    """The examples of a source, each at its visits. Worker processes get copies of it."""

    source: Source
    build: ExampleBuilder
    """Makes the arrays of a prepared sample."""
    image_size: int
    """Pixels of a side of the letterboxed image."""
    mask_size: int
    """Cells of a side of the masks."""
    crop: float = 1.0
    """The smallest share of a side that a random crop keeps; 1 = no crops."""
    fresh: bool = False
    """Whether a sample is made anew at each visit. Its source must do so."""
    max_kept_bytes: int = MAX_KEPT_BYTES
    """Size of the prepared samples that stay in memory."""
    _kept: dict[int, Prepared] = field(default_factory=dict, init=False)
    _kept_bytes: int = field(default=0, init=False)

    def __call__(self, place: int | tuple[int, int], rng: np.random.Generator) -> Batch:
        """The example of a sample, by its index; of a fresh one by its index and its visit."""
        index, visit = (place, 0) if isinstance(place, int) else place
        if index in self._kept:
            return self.build(index, self._kept[index], rng)

        if self.fresh:
            assert isinstance(self.source, FreshSource)
            sample = self.source.at_visit(index, visit)
        else:
            sample = self.source[index]
        if self.crop < 1:  # drawn before everything else
            sample = random_crop(sample, self.crop, rng)
        prepared = prepare(
            sample,
            image_size=self.image_size,
            mask_size=self.mask_size,
            vocabulary=self.source.vocabulary,
        )
        if self.crop == 1 and not self.fresh:
            self._keep(index, prepared)
        return self.build(index, prepared, rng)

    def _keep(self, index: int, prepared: Prepared) -> None:
        """Keeps a sample that does not change between visits, if there is room for it."""
        arrays = [*prepared.values(), *prepared["labels"].values()]
        num_bytes = sum(x.nbytes for x in arrays if isinstance(x, np.ndarray))
        if self._kept_bytes + num_bytes <= self.max_kept_bytes:
            self._kept_bytes += num_bytes
            self._kept[index] = prepared


def training_batches(
    examples: Examples,
    *,
    batch_size: int,
    seed: int,
    start: int = 0,
    shard: tuple[int, int] = (0, 1),
    workers: int = 0,
) -> grain.DatasetIterator[Batch]:
    """Returns an endless iterator of reshuffled batches.

    Batch `i` is the same wherever the iterator starts, so a run resumes exactly with the number of
    its step.

    Args:
        examples: Makes the rows.
        batch_size: Rows of a batch, over all processes that train together.
        seed: Of the order and of all random changes.
        start: Number of the first batch.
        shard: (i, n): this is process i of n. Each of them gives every n-th row of a batch. The
            rows do not depend on n.
        workers: Number of processes that prepare batches; 0 = threads of this one. The batches do
            not depend on it.
    """
    num_samples = len(examples.source)
    places = grain.MapDataset.range(num_samples).seed(seed).shuffle().repeat()
    if examples.fresh:
        # The position tells the visit, so that a resumed run makes the same pictures.
        places = places.map_with_index(lambda position, index: (index, position // num_samples))
    process, num_processes = shard
    rows = places.random_map(examples)[process::num_processes]
    batches = rows.batch(batch_size // num_processes)[start:]
    if not workers:
        threads = min(16, os.cpu_count() or 1)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        return iter(batches.to_iter_dataset(options))

    # grain reads flags of absl, which only a program of absl parses.
    flags.FLAGS.mark_as_parsed()
    # A worker makes one batch after the other: the cores are busy with other workers.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    processes = grain.MultiprocessingOptions(
        num_workers=workers, per_worker_buffer_size=BUFFERED_BATCHES
    )
    in_workers = batches.to_iter_dataset(options).mp_prefetch(
        processes, worker_init_fn=_end_with_parent
    )
    return iter(in_workers)


def _end_with_parent(worker: int, num_workers: int) -> None:
    """Sets up a worker process: it ends with the main process, even one that is killed."""
    # Ctrl-C reaches workers too, but the main process saves first and then ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
