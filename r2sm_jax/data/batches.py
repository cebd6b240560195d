"""Samples -> training batches. `prepare` is done once per sample, `Assemble` at every visit.

A batch is a dict of numpy arrays (s = mask size, S = image size, m = instances, k = queries, q = slots):

    image         uint8 [b S S 3]     letterboxed
    valid         bool  [b S S]       image, not padding
    modal, amodal uint8 [b m s s]     coverage of every mask cell, 0..255
    amodal_known  bool  [b m]
    labels        int   [b m] each    index into the source's vocabulary of an attribute; -1 = unknown
    boxes         f32   [b m 4]       amodal box x0 y0 x1 y1 in units of the padded side
    loss_valid    uint8 [b s s]       share of the cell that counts, 0..255: no padding, no ignored region
    members       bool  [b k m]       the instances that a query means
    slots         int   [b k q]       the first q of them; -1 = none
    wants_amodal  bool  [b k]
    query_valid   bool  [b k]         False on padding
    text          f16   [b k t l e]   frozen token states
    text_mask     bool  [b k t]
    index         int   [b]           position in the source

and, for a mask-type head that reads words alone, the f = `TYPE_SENTENCES` sentences an image that it learns from:

    type_text     f16   [b f t l e]   states of some of the queries and of sentences about anything
                                      (data/free_sentences.py)
    type_mask     bool  [b f t]       their tokens, some dropped
    type_amodal   bool  [b f]
    type_valid    bool  [b f]         False on padding
"""

import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grain
import numpy as np
from jaxtyping import Bool

from r2sm_jax.data import masks
from r2sm_jax.data.augment import jitter_colours, random_crop
from r2sm_jax.data.images import Letterbox
from r2sm_jax.data.samples import Instance, Sample, Source
from r2sm_jax.query import Sentence

Batch = dict[str, Any]
TYPE_SENTENCES = 4
"""One of them is about anything, where there are such sentences."""
SIDED = re.compile(r"\b(left|right)", re.IGNORECASE)


@dataclass(frozen=True)
class Prepared:
    """One sample at training resolution. Arrays are as in a batch, without its axis; queries are all kept."""

    image: np.ndarray
    valid: np.ndarray
    modal: np.ndarray
    amodal: np.ndarray
    amodal_known: np.ndarray
    labels: dict[str, np.ndarray]
    boxes: np.ndarray
    loss_valid: np.ndarray
    members: np.ndarray
    wants_amodal: np.ndarray
    texts: tuple[str, ...] = field(default=())


def prepare(sample: Sample, *, image_size: int, mask_size: int, vocabulary: dict[str, tuple[str, ...]]) -> Prepared:
    """Letterboxes a sample and pools its masks to the resolution that is supervised."""
    height, width = sample.image.shape[:2]
    box = Letterbox(height, width, image_size)
    instances = [i for i in sample.instances if not i.ignore]
    position = {instance.id: n for n, instance in enumerate(instances)}
    counts = np.ones((height, width), bool)
    for ignored in (i for i in sample.instances if i.ignore):
        counts &= ~_complete(ignored)
    side = max(height, width)
    queries = [q for q in sample.queries if all(i in position for i in q.instance_ids)]
    members = np.zeros((len(queries), len(instances)), bool)
    for row, query in enumerate(queries):
        members[row, [position[i] for i in query.instance_ids]] = True

    def coverage(wanted: Sequence[np.ndarray]) -> np.ndarray:
        cells = np.zeros((len(wanted), mask_size, mask_size), np.uint8)
        for row, mask in enumerate(wanted):
            cells[row] = box.coverage(mask, mask_size)
        return cells

    def names(instance, group: str) -> str | None:
        return instance.category if group == "category" else instance.attributes.get(group)

    return Prepared(
        image=box.image(sample.image),
        valid=box.valid(),
        modal=coverage([i.modal for i in instances]),
        amodal=coverage([_complete(i) for i in instances]),
        amodal_known=np.array([i.amodal is not None for i in instances], bool),
        labels={
            group: np.array([words.index(n) if (n := names(i, group)) in words else -1 for i in instances], np.int32)
            for group, words in vocabulary.items()
        },
        boxes=np.array([masks.box(_complete(i)) for i in instances], np.float32).reshape(-1, 4) / side,
        loss_valid=coverage([counts])[0],
        members=members,
        wants_amodal=np.array([q.mask_type == "amodal" for q in queries], bool),
        texts=tuple(q.text for q in queries),
    )


def _complete(instance: Instance) -> np.ndarray:
    """The complete mask, or what is known of it."""
    return instance.modal if instance.amodal is None else instance.amodal


KEPT_BYTES = 4 << 30
"""Prepared samples are kept in memory up to this size in all, and prepared anew at each visit beyond it."""


class PreparedSource:
    """Samples at training resolution: remembered if `remember_all` was called, else prepared when asked."""

    def __init__(self, source: Source, image_size: int, mask_size: int, *, crop: float = 1.0):
        """`crop`: the smallest share of a side that a random crop keeps (augment.py); 1 = none."""
        self.source, self.crop = source, crop
        self._prepare = partial(prepare, image_size=image_size, mask_size=mask_size, vocabulary=source.vocabulary)
        self._kept: list[Prepared] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prepared:
        return self._kept[index] if self._kept is not None else self._prepare(self.source[index])

    def visit(self, index: int, rng: np.random.Generator) -> Prepared:
        """Sample `index` as training sees it this time."""
        return self[index] if self.crop == 1 else self.of(self.source[index], rng)

    def of(self, sample: Sample, rng: np.random.Generator) -> Prepared:
        """A sample, cropped at random where crops are asked for, at training resolution."""
        return self._prepare(sample if self.crop == 1 else random_crop(sample, self.crop, rng))

    def texts(self, index: int) -> tuple[str, ...]:
        """The sentences of all queries of sample `index`."""
        if self._kept is not None:
            return self._kept[index].texts
        return tuple(query.text for query in self.source.queries_at(index))

    def can_remember(self) -> bool:
        """Whether samples are the same at each visit and fit into `KEPT_BYTES`, judged by the first."""
        return self.crop == 1 and len(self) * sum(x.nbytes for x in _arrays(self[0])) <= KEPT_BYTES

    def remember_all(self) -> None:
        """Prepares every sample now, on all cores."""
        workers = os.cpu_count() or 1
        if len(self) < 256 or workers == 1:
            self._kept = [self[i] for i in range(len(self))]
            return
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            self._kept = list(pool.imap(self.__getitem__, range(len(self)), chunksize=32))


def _arrays(prepared: Prepared) -> list[np.ndarray]:
    return [value for value in vars(prepared).values() if isinstance(value, np.ndarray)]


@dataclass(frozen=True)
class Assemble:
    """Chooses queries, mirrors, pads and looks up text states: `Prepared` -> the arrays of one example."""

    text_states: Callable[[list[str], int], tuple[np.ndarray, np.ndarray]]
    tokens: int
    queries: int
    instances: int
    slots: int
    mirror: bool
    token_drop: float = 0.0
    colour_jitter: float = 0.0
    free: Sequence[Sentence] = ()
    from_words: bool = False
    """Whether there is a mask-type head that learns from words alone."""
    too_long: frozenset[str] = frozenset()
    """Queries of more than `tokens` tokens, which are left out."""
    frozen: Callable[[int], Batch] | None = None
    """Features of the image that training does not change, by its position in the source."""

    def __call__(self, index: int, p: Prepared, rng: np.random.Generator) -> Batch:
        fitting = [i for i, text in enumerate(p.texts) if text not in self.too_long]
        chosen = np.sort(rng.permutation(fitting)[: self.queries].astype(int))
        k, count = self.queries, len(p.boxes)
        order = np.argsort(~p.members[chosen].any(0), kind="stable")[: self.instances]
        m = len(order)
        flip = self.mirror and rng.random() < 0.5
        turn = (lambda x: x[..., ::-1]) if flip else (lambda x: x)

        def padded(values: np.ndarray, shape: tuple[int, ...], fill: float = 0) -> np.ndarray:
            out = np.full(shape, fill, values.dtype)
            out[tuple(slice(0, n) for n in values.shape)] = values
            return out

        size = p.modal.shape[-1]
        members = padded(p.members[chosen][:, order], (k, self.instances))
        texts = [p.texts[i] for i in chosen]
        text, text_mask = self.text_states(texts + [""] * (k - len(texts)), self.tokens)
        query_valid = np.zeros(k, bool)
        complete = p.members[chosen].sum(1) == members[: len(chosen)].sum(1)
        query_valid[: len(chosen)] = complete & ~np.array([flip and bool(SIDED.search(t)) for t in texts], bool)
        slots = np.full((k, self.slots), -1, np.int32)
        for row in range(k):
            first = np.flatnonzero(members[row])[: self.slots]
            slots[row, : len(first)] = first
        boxes = p.boxes[order] if count else p.boxes
        if flip:
            boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], axis=1)
        image = p.image[:, ::-1] if flip else p.image
        example = {
            "image": jitter_colours(image, self.colour_jitter, rng) if self.colour_jitter else image,
            "valid": turn(p.valid),
            "modal": padded(turn(p.modal[order]), (self.instances, size, size)),
            "amodal": padded(turn(p.amodal[order]), (self.instances, size, size)),
            "amodal_known": padded(p.amodal_known[order], (self.instances,), True),
            "labels": {g: padded(v[order], (self.instances,), -1) for g, v in p.labels.items()},
            "boxes": padded(boxes[:m], (self.instances, 4)),
            "loss_valid": turn(p.loss_valid),
            "members": members,
            "slots": slots,
            "wants_amodal": padded(p.wants_amodal[chosen], (k,)),
            "query_valid": query_valid,
            "text": text,
            "text_mask": text_mask,
            "index": np.int32(index),
        }
        if self.from_words:
            example |= self._type_sentences(p, rng.permutation(fitting).astype(int), rng)
        return example | self.frozen(index) if self.frozen else example

    def _type_sentences(self, p: Prepared, queries: np.ndarray, rng: np.random.Generator) -> Batch:
        queries = queries[: TYPE_SENTENCES - bool(self.free)]
        chosen = [(p.texts[i], bool(p.wants_amodal[i])) for i in queries]
        if self.free:
            sentence = self.free[int(rng.integers(len(self.free)))]
            chosen.append((sentence.text, sentence.mask_type == "amodal"))
        count = len(chosen)
        texts, amodal = zip(*chosen, *[("", False)] * (TYPE_SENTENCES - count), strict=True)
        states, mask = self.text_states(list(texts), self.tokens)
        return {
            "type_text": states,
            "type_mask": drop_tokens(mask, self.token_drop, rng),
            "type_amodal": np.array(amodal),
            "type_valid": np.arange(TYPE_SENTENCES) < count,
        }


def drop_tokens(
    text_mask: Bool[np.ndarray, "k t"], share: float, rng: np.random.Generator
) -> Bool[np.ndarray, "k t"]:  # fmt: skip
    """Hides random tokens, never the first, so that no single word can carry the decision."""
    kept = text_mask & (rng.random(text_mask.shape) >= share)
    kept[:, 0] = text_mask[:, 0]
    return kept


def training_batches(
    source: PreparedSource, assemble: Assemble, *, batch_size: int, seed: int, shard: tuple[int, int] = (0, 1)
) -> grain.DatasetIterator:
    """An endless, reshuffled, resumable iterator of batches.

    `shard` (i, n): the i-th of n processes, each of which reads its own part of every epoch, `batch_size` at a time.
    """

    def visit(index: int, rng: np.random.Generator) -> Batch:
        return assemble(index, source.visit(index, rng), rng)

    order = grain.MapDataset.range(len(source)).seed(seed).shuffle()[shard[0] :: shard[1]]
    dataset = order.repeat().random_map(visit).batch(batch_size)
    threads = min(16, os.cpu_count() or 1)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=16)))
