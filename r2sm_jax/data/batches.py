"""Samples -> training batches. `prepare` runs once for each sample, `Assemble` at every visit.

A batch is a dict of numpy arrays (s = mask size, S = image size, m = instances, k = queries, q = slots):

    image         uint8 [b S S 3]     letterboxed
    image_mask    bool  [b S S]       image, not padding
    modal, amodal uint8 [b m s s]     coverage of every mask cell, 0..255
    has_amodal  bool  [b m]
    labels        int   [b m] each    index into the source's vocabulary of an attribute; -1 = unknown
    boxes         f32   [b m 4]       amodal box x0 y0 x1 y1 in units of the padded side
    pixel_weight    uint8 [b s s]       share of the cell that counts, 0..255: no padding, no ignored region
    query_instances       bool  [b k m]       the instances that a query means
    slot_targets  int   [b k q]       the first q of them; -1 = none
    is_amodal  bool  [b k]
    query_mask   bool  [b k]         False on padding
    text          f16   [b k t l e]   frozen token states
    text_mask     bool  [b k t]
    index         int   [b]           position in the source

and, for a mask-type head that reads words alone, the f = `TYPE_SENTENCES` sentences an image that it learns from:

    type_text     f16   [b f t l e]   states of some of the queries and of sentences without an image
    type_text_mask     bool  [b f t]       their tokens, some dropped
    type_is_amodal   bool  [b f]
    type_valid    bool  [b f]         False on padding
"""

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Bool, UInt8
from PIL import Image, ImageEnhance

from r2sm_jax.data import masks
from r2sm_jax.data.cache import FeatureCache, digest
from r2sm_jax.data.dataset import Instance, Sample, Source
from r2sm_jax.data.images import Letterbox
from r2sm_jax.query import Sentence
from r2sm_jax.training.sharding import allgather

Batch = dict[str, Any]
Prepared = dict[str, Any]
"""One sample at training resolution: arrays as in a batch, without its axis, of all instances and queries, and `texts`,
the queries' sentences."""
TYPE_SENTENCES = 9
TEXT_ONLY_QUERIES = 6
"""So many of them are sentences without an image, where there are such sentences."""
KEPT_WHOLE = 0.9
"""A query stays if this share of the complete mask of each instance that it means lies in the crop."""
SIDED = re.compile(r"\b(left|right)", re.IGNORECASE)
HASHED = 64
FEW = 256  # fewer samples are prepared sooner than other processes start
KEPT_BYTES, KEPT_ON_DISK = 4 << 30, 16 << 30
"""Prepared samples are kept in memory or on disk up to this size in all, and prepared anew at each visit beyond it."""


def prepare(
    sample: Sample, *, image_size: int, mask_size: int, vocabulary: dict[str, tuple[str, ...]]
) -> Prepared:
    """Letterboxes a sample and pools its masks to the resolution that is supervised.

    Queries that mean an ignored instance are left out.
    """
    height, width = sample.image.shape[:2]
    frame = Letterbox(height, width, image_size)
    instances = [i for i in sample.instances if not i.ignore]
    ignored = masks.union((i.complete for i in sample.instances if i.ignore), (height, width))
    ids = [i.id for i in instances]
    queries = [q for q in sample.queries if set(q.instance_ids) <= set(ids)]

    def coverage(drawn: Sequence[np.ndarray]) -> UInt8[np.ndarray, "_m s s"]:
        cells = [frame.coverage(mask, mask_size) for mask in drawn]
        return np.array(cells, np.uint8).reshape(-1, mask_size, mask_size)

    labels: dict[str, np.ndarray] = {}
    for group, words in vocabulary.items():
        names = [i.category if group == "category" else i.attributes.get(group) for i in instances]
        labels[group] = np.array(
            [words.index(name) if name in words else -1 for name in names], np.int32
        )
    boxes = np.array([masks.box(i.complete) for i in instances], np.float32).reshape(-1, 4)
    return {
        "image": frame.image(sample.image),
        "image_mask": frame.valid(),
        "modal": coverage([i.modal for i in instances]),
        "amodal": coverage([i.complete for i in instances]),
        "has_amodal": np.array([i.amodal is not None for i in instances], bool),
        "labels": labels,
        "boxes": boxes / max(height, width),
        "pixel_weight": coverage([~ignored])[0],
        "query_instances": np.array(
            [i in q.instance_ids for q in queries for i in ids], bool
        ).reshape(len(queries), len(ids)),
        "is_amodal": np.array([q.mask_type == "amodal" for q in queries], bool),
        "texts": tuple(q.text for q in queries),
    }


def random_crop(sample: Sample, smallest: float, rng: np.random.Generator) -> Sample:
    """A random window of the sample, each side at least `smallest` of the image's, with masks cut like the image.

    Instances without a pixel in the window are left out, and so are queries that mean an instance of which less than
    `KEPT_WHOLE` remains.
    """
    height, width = sample.image.shape[:2]
    window = _interval(height, smallest, rng), _interval(width, smallest, rng)
    kept: list[Instance] = []
    whole: set[int] = set()
    for instance in sample.instances:
        inside = np.count_nonzero(instance.complete[window])
        if inside:
            amodal = None if instance.amodal is None else instance.amodal[window]
            kept.append(replace(instance, modal=instance.modal[window], amodal=amodal))
        if inside >= KEPT_WHOLE * np.count_nonzero(instance.complete):
            whole.add(instance.id)
    queries = tuple(query for query in sample.queries if whole.issuperset(query.instance_ids))
    return replace(sample, image=sample.image[window], instances=tuple(kept), queries=queries)


def _interval(side: int, smallest: float, rng: np.random.Generator) -> slice:
    length = max(1, round(side * rng.uniform(smallest, 1)))
    start = int(rng.integers(side - length + 1))
    return slice(start, start + length)


def jitter_colours(
    image: UInt8[np.ndarray, "H W 3"], strength: float, rng: np.random.Generator
) -> UInt8[np.ndarray, "H W 3"]:
    """Brightness, contrast and saturation, each times a factor in 1 ± `strength`. Hues stay: queries name colours."""
    jittered = Image.fromarray(np.ascontiguousarray(image))
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        jittered = change(jittered).enhance(rng.uniform(1 - strength, 1 + strength))
    return np.asarray(jittered)


def mirror(p: Prepared) -> Prepared:
    """The sample with left and right exchanged. Sentences stay as they are."""
    turned = {
        name: p[name][..., ::-1] for name in ("image_mask", "modal", "amodal", "pixel_weight")
    }
    x0, y0, x1, y1 = p["boxes"].T
    return (
        p
        | turned
        | {"image": p["image"][:, ::-1], "boxes": np.stack([1 - x1, y0, 1 - x0, y1], axis=1)}
    )


def to_arrays(p: Prepared) -> Prepared:
    """A prepared sample as arrays alone, always of the same names."""
    return flatten_dict(
        p | {"texts": np.frombuffer(json.dumps(p["texts"]).encode(), np.uint8)}, sep="/"
    )


@dataclass(frozen=True)
class KeptSamples:
    """Prepared samples that are read at each visit; `names` are those of `to_arrays`."""

    cache: FeatureCache
    names: tuple[str, ...]

    def __getitem__(self, index: int) -> Prepared:
        p = unflatten_dict(dict(zip(self.names, self.cache[str(index)], strict=True)), sep="/")
        return p | {"texts": tuple(json.loads(p["texts"].tobytes()))}


class PreparedSource:
    """Samples at training resolution, kept after `remember`, else prepared at each visit."""

    def __init__(self, source: Source, image_size: int, mask_size: int, *, crop: float = 1.0):
        """`crop`: the smallest share of a side that a random crop keeps; 1 = no crops."""
        self.source, self.crop, self.sizes = source, crop, (image_size, mask_size)
        self.prepare = partial(
            prepare, image_size=image_size, mask_size=mask_size, vocabulary=source.vocabulary
        )
        self._kept: list[Prepared] | KeptSamples | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prepared:
        """Sample `index`, not cropped."""
        return self._kept[index] if self._kept is not None else self.prepare(self.source[index])

    def visit(self, index: int, rng: np.random.Generator) -> Prepared:
        """Sample `index` as training sees it this time: with a random crop where crops are wanted."""
        return (
            self[index]
            if self.crop == 1
            else self.prepare(random_crop(self.source[index], self.crop, rng))
        )

    def texts(self, index: int) -> tuple[str, ...]:
        """The sentences of all queries of sample `index`."""
        if self._kept is not None:
            return self._kept[index]["texts"]
        return tuple(query.text for query in self.source.queries_at(index))

    def sha256(self, sentences: Sequence[str]) -> str:
        """Hash of the data: the file that they come from, if it is one, all `sentences` of training, and `HASHED` whole
        samples at equal distances; all of them would take minutes."""
        found = sha256(self.source.sha256.encode())
        found.update("\0".join([str(len(self)), *sentences]).encode())
        for index in np.unique(np.linspace(0, len(self) - 1, HASHED).astype(int)).tolist():
            sample = self.source[index]
            found.update(sample.image.tobytes())
            for i in sample.instances:
                about = i.id, i.category, i.amodal is None, i.ignore, sorted(i.attributes.items())
                found.update(repr(about).encode() + np.packbits([i.modal, i.complete]).tobytes())
            found.update(
                repr([(q.id, q.text, q.mask_type, q.instance_ids) for q in sample.queries]).encode()
            )
        return found.hexdigest()

    def remember(self, folder: str | None = None) -> bool:
        """Prepares every sample now, on all cores, and keeps them. Returns whether it did so.

        It does not where crops differ from visit to visit, or the samples are too large together, judged by one. In
        `folder`, those of a source that has a fingerprint are kept on disk, also for later runs, and each process
        prepares a share of them.
        """
        if self.crop < 1 or not len(self):
            return False
        one = to_arrays(self[0])
        size = sum(value.nbytes for value in one.values())
        fingerprint = None if folder is None else self.source.fingerprint()
        if folder is None or fingerprint is None:
            if fits := len(self) * size <= KEPT_BYTES:
                self._kept = list(self._prepare(range(len(self))))
            return fits
        if len(self) * size > KEPT_ON_DISK:
            return False
        cache = FeatureCache(Path(folder), digest("prepared", fingerprint, *self.sizes))
        # Those that the first process misses: another, which looks later, may find some that were written meanwhile.
        missing = allgather([index for index in range(len(self)) if str(index) not in cache])[0]
        mine = missing[jax.process_index() :: jax.process_count()]
        cache.make_room("prepared images", len(mine), len(mine) * size)
        samples = map(to_arrays, self._prepare(mine))
        cache.add(
            (str(index), tuple(sample.values()))
            for index, sample in zip(mine, samples, strict=True)
        )
        allgather(None)
        cache.refresh()
        self._kept = KeptSamples(cache, tuple(one))
        return True

    def _prepare(self, indices: Sequence[int]) -> Iterator[Prepared]:
        if len(indices) < FEW:
            yield from map(self.__getitem__, indices)
            return
        with multiprocessing.get_context("spawn").Pool(
            initializer=_serve, initargs=(self,)
        ) as pool:
            yield from pool.imap(_prepare_served, indices, chunksize=32)


_served: list[
    PreparedSource
] = []  # in a worker process; sent to it once, since each copy keeps photos of its own


def _serve(source: PreparedSource) -> None:
    _served[:] = [source]


def _prepare_served(index: int) -> Prepared:
    return _served[0][index]


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
    """Sentences without an image."""
    type_tokens: int = 0
    """Tokens that the sentences of the mask-type head are padded to: those of `free` may be longer than queries."""
    from_words: bool = False
    """Whether there is a mask-type head that learns from words alone."""
    too_long: frozenset[str] = frozenset()
    """Queries of more than `tokens` tokens, which are left out."""
    frozen: Callable[[int], Batch] | None = None
    """Features of the image that training does not change, by its position in the source."""

    def __call__(self, index: int, p: Prepared, rng: np.random.Generator) -> Batch:
        """One example. A query is not valid if it means more than fits into `instances`, or names a side that mirroring
        has exchanged."""
        fitting = [i for i, text in enumerate(p["texts"]) if text not in self.too_long]
        chosen = np.sort(rng.permutation(fitting)[: self.queries].astype(int))
        targets_first = np.argsort(~p["query_instances"][chosen].any(0), kind="stable")[
            : self.instances
        ]
        mirrored = self.mirror and rng.random() < 0.5
        if mirrored:
            p = mirror(p)
        texts = [p["texts"][i] for i in chosen]
        query_instances = p["query_instances"][chosen][:, targets_first]
        usable = query_instances.sum(1) == p["query_instances"][chosen].sum(1)
        if mirrored:
            usable &= np.array([not SIDED.search(text) for text in texts], bool)
        text, text_mask = self.text_states(texts + [""] * (self.queries - len(texts)), self.tokens)
        meant = np.argsort(~query_instances, kind="stable")[
            :, : self.slots
        ]  # the query_instances come first
        slot_targets = np.where(np.take_along_axis(query_instances, meant, axis=1), meant, -1)

        def of_instances(values: np.ndarray, fill: float = 0) -> np.ndarray:
            return _pad(values[targets_first], self.instances, fill=fill)

        example = {
            "image": jitter_colours(p["image"], self.colour_jitter, rng)
            if self.colour_jitter
            else p["image"],
            "image_mask": p["image_mask"],
            "modal": of_instances(p["modal"]),
            "amodal": of_instances(p["amodal"]),
            "has_amodal": of_instances(p["has_amodal"], fill=True),
            "labels": {
                group: of_instances(numbers, fill=-1) for group, numbers in p["labels"].items()
            },
            "boxes": of_instances(p["boxes"]),
            "pixel_weight": p["pixel_weight"],
            "query_instances": _pad(query_instances, self.queries, self.instances),
            "slot_targets": _pad(slot_targets.astype(np.int32), self.queries, self.slots, fill=-1),
            "is_amodal": _pad(p["is_amodal"][chosen], self.queries),
            "query_mask": _pad(usable, self.queries),
            "text": text,
            "text_mask": text_mask,
            "index": np.int32(index),
        }
        if self.from_words:
            example |= self._type_sentences(p, rng.permutation(fitting).astype(int), rng)
        return example | self.frozen(index) if self.frozen else example

    def _type_sentences(self, p: Prepared, queries: np.ndarray, rng: np.random.Generator) -> Batch:
        free = TEXT_ONLY_QUERIES if self.free else 0
        queries = queries[: TYPE_SENTENCES - free]
        chosen = [(p["texts"][i], bool(p["is_amodal"][i])) for i in queries]
        if free:
            drawn = [self.free[int(i)] for i in rng.integers(len(self.free), size=free)]
            chosen += [(sentence.text, sentence.mask_type == "amodal") for sentence in drawn]
        count = len(chosen)
        texts, amodal = zip(*chosen, *[("", False)] * (TYPE_SENTENCES - count), strict=True)
        states, mask = self.text_states(list(texts), self.type_tokens or self.tokens)
        return {
            "type_text": states,
            "type_text_mask": drop_tokens(mask, self.token_drop, rng),
            "type_is_amodal": np.array(amodal),
            "type_valid": np.arange(TYPE_SENTENCES) < count,
        }


def _pad(values: np.ndarray, *sizes: int, fill: float = 0) -> np.ndarray:
    """The values with their first axes filled up to `sizes`."""
    missing = [(0, size - length) for size, length in zip(sizes, values.shape, strict=False)]
    return np.pad(values, missing + [(0, 0)] * (values.ndim - len(sizes)), constant_values=fill)


def drop_tokens(
    text_mask: Bool[np.ndarray, "k t"], share: float, rng: np.random.Generator
) -> Bool[np.ndarray, "k t"]:
    """Hides random tokens, never the first, so that no single word can decide the mask type."""
    kept = text_mask & (rng.random(text_mask.shape) >= share)
    kept[:, 0] = text_mask[:, 0]
    return kept


def training_batches(
    source: PreparedSource,
    assemble: Assemble,
    *,
    batch_size: int,
    seed: int,
    shard: tuple[int, int] = (0, 1),
) -> grain.DatasetIterator:
    """An endless, reshuffled, resumable iterator of batches.

    `shard` (i, n): the i-th of n processes, each of which reads and gives every n-th row of a batch of `batch_size`
    rows. What the rows hold, and the position that is saved, do not depend on n.
    """

    def visit(index: int, rng: np.random.Generator) -> Batch:
        return assemble(index, source.visit(index, rng), rng)

    visits = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat().random_map(visit)
    dataset = visits[shard[0] :: shard[1]].batch(batch_size // shard[1])
    threads = min(16, os.cpu_count() or 1)
    return iter(
        dataset.to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        )
    )
