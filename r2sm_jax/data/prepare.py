"""Samples at the resolution of training, made once and then read at every visit."""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from r2sm_jax.data import masks
from r2sm_jax.data.cache import Arrays, FeatureCache, digest
from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.progress import show_progress

Prepared = dict[str, Any]
"""One sample: arrays as in a batch (batches.py) without its axis, of all instances and all queries,
and `texts`, the sentences of the queries."""
NUM_READ_SAMPLES = 64
"""So many tell how long the sentences of all are, and whether the data are the same as before."""
MIN_SAMPLES_FOR_POOL = 256
"""Fewer samples are prepared before other processes have started."""
MAX_MEMORY_BYTES = 4 << 30
MAX_DISK_BYTES = 16 << 30
"""Prepared samples are cached up to these sizes, and prepared anew at each visit beyond them."""


@runtime_checkable
class FreshSource(Protocol):
    """A source that can make other samples at each visit."""

    def at_visit(self, index: int, visit: int) -> Sample: ...


def prepare(
    sample: Sample,
    *,
    image_size: int,
    mask_size: int,
    vocabulary: dict[str, tuple[str, ...]],
) -> Prepared:
    """Letterboxes a sample and pools its masks to the resolution of the losses.

    Ignored instances, and queries that mean one, are left
    out.
    """
    height, width = sample.image.shape[:2]
    letterbox = Letterbox(height, width, image_size)
    instances = [instance for instance in sample.instances if not instance.ignore]
    ignored = [instance.complete for instance in sample.instances if instance.ignore]

    ids = [instance.id for instance in instances]
    queries = [query for query in sample.queries if set(query.instance_ids) <= set(ids)]
    query_instances = [[i in query.instance_ids for i in ids] for query in queries]

    # Most objects are fully visible: their complete mask is the visible one, and is pooled once.
    modal = np.zeros((len(instances), mask_size, mask_size), np.uint8)
    amodal = np.zeros_like(modal)
    for number, instance in enumerate(instances):
        modal[number] = letterbox.coverage(instance.modal, mask_size)
        if instance.complete is instance.modal:
            amodal[number] = modal[number]
        else:
            amodal[number] = letterbox.coverage(instance.complete, mask_size)

    labels: dict[str, np.ndarray] = {}
    for attribute, words in vocabulary.items():
        numbers = []
        for instance in instances:
            if attribute == "category":
                word = instance.category
            else:
                word = instance.attributes.get(attribute)
            numbers.append(words.index(word) if word in words else -1)
        labels[attribute] = np.array(numbers, np.int32)

    boxes = np.array([masks.box(instance.complete) for instance in instances], np.float32)
    return {
        "image": letterbox.image(sample.image),
        "image_mask": letterbox.valid(),
        "modal": modal,
        "amodal": amodal,
        "has_amodal": np.array([instance.amodal is not None for instance in instances], bool),
        "labels": labels,
        "boxes": boxes.reshape(-1, 4) / max(height, width),
        "pixel_weight": _pool_pixels(letterbox, mask_size, ignored),
        "query_instances": np.array(query_instances, bool).reshape(len(queries), len(ids)),
        "is_amodal": np.array([query.mask_type == "amodal" for query in queries], bool),
        "texts": tuple(query.text for query in queries),
    }


def _pool_pixels(
    letterbox: Letterbox, mask_size: int, ignored: Sequence[np.ndarray]
) -> UInt8[np.ndarray, "s s"]:
    """How much of each cell counts, 0..255: no padding, and none of the `ignored` masks."""
    if not ignored:
        return _pool_all_pixels(letterbox, mask_size)
    shape = (letterbox.height, letterbox.width)
    return letterbox.coverage(~masks.union(ignored, shape), mask_size)


@lru_cache(maxsize=64)
def _pool_all_pixels(letterbox: Letterbox, mask_size: int) -> UInt8[np.ndarray, "s s"]:
    """`_pool_pixels` of an image without ignored regions, which photos of one size share."""
    everything = np.ones((letterbox.height, letterbox.width), bool)
    cells = letterbox.coverage(everything, mask_size)
    cells.setflags(write=False)
    return cells


def to_arrays(prepared: Prepared) -> dict[str, Any]:
    """A prepared sample as arrays alone, always under the same names, for the cache."""
    # Here, so that what only makes pictures loads no JAX: the data tools, and worker processes.
    from flax.traverse_util import flatten_dict

    texts = np.frombuffer(json.dumps(prepared["texts"]).encode(), np.uint8)
    return flatten_dict(prepared | {"texts": texts}, sep="/")


def from_arrays(arrays: dict[str, np.ndarray]) -> Prepared:
    """The inverse of `to_arrays`."""
    from flax.traverse_util import unflatten_dict  # as in `to_arrays`

    prepared = unflatten_dict(arrays, sep="/")
    return prepared | {"texts": tuple(json.loads(prepared["texts"].tobytes()))}


@dataclass(frozen=True)
class CachedSamples:
    """Prepared samples in files; `names` are those of `to_arrays`."""

    cache: FeatureCache
    names: tuple[str, ...]

    def __getitem__(self, index: int) -> Prepared:
        return from_arrays(dict(zip(self.names, self.cache[str(index)], strict=True)))


class PreparedSource:
    """Samples at training resolution. They are prepared at each visit, or read from the cache once
    the method `cache` has filled it."""

    def __init__(
        self,
        source: Source,
        image_size: int,
        mask_size: int,
        *,
        crop: float = 1.0,
        fresh: bool = False,
    ):
        """The samples of `source` at these sizes.

        Args:
            source: Where the samples come from.
            image_size: Pixels of a side of the letterboxed image.
            mask_size: Cells of a side of the masks.
            crop: The smallest share of a side that a random crop keeps; 1 = no crops.
            fresh: Whether a sample is made anew at each visit. Its source must do so.
        """
        self.source = source
        self.crop = crop
        self.fresh = fresh
        self.sizes = (image_size, mask_size)
        self.prepare = partial(
            prepare, image_size=image_size, mask_size=mask_size, vocabulary=source.vocabulary
        )
        # Samples that the method `cache` has stored; or those that it keeps from their first visit
        # on.
        self._stored: CachedSamples | None = None
        self._kept: dict[int, Prepared] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prepared:
        """Sample `index`, not cropped."""
        if self._stored is not None:
            return self._stored[index]
        if self._kept is None:
            return self.prepare(self.source[index])
        # Two threads may prepare one sample, and then keep the same.
        if index not in self._kept:
            self._kept[index] = self.prepare(self.source[index])
        return self._kept[index]

    @property
    def is_augmented(self) -> bool:
        """Whether samples are cropped at random, and so cannot be kept."""
        return self.crop < 1

    def sample_at(self, index: int, visit: int) -> Sample:
        """The sample that a visit reads in place of sample `index`, in full size and not cropped.

        That is another one at each visit where the samples are fresh.
        """
        if self.fresh:
            assert isinstance(self.source, FreshSource)
            return self.source.at_visit(index, visit)
        return self.source[index]

    def read_some(self) -> list[Sample]:
        """`NUM_READ_SAMPLES` samples at equal distances; all would take minutes."""
        indices = np.unique(np.linspace(0, len(self) - 1, NUM_READ_SAMPLES).astype(int))
        return [self.source[index] for index in indices.tolist()]

    def sha256(self, sentences: Sequence[str], samples: Sequence[Sample]) -> str:
        """Hash of the data: their file, if there is one, `sentences`, and some `samples`."""
        total = sha256(self.source.sha256.encode())
        total.update("\0".join([str(len(self)), *sentences]).encode())
        for sample in samples:
            total.update(sample.image.tobytes())
            for instance in sample.instances:
                facts = (
                    instance.id,
                    instance.category,
                    instance.amodal is None,
                    instance.ignore,
                    sorted(instance.attributes.items()),
                )
                total.update(repr(facts).encode())
                total.update(np.packbits([instance.modal, instance.complete]).tobytes())
            queries = [(q.id, q.text, q.mask_type, q.instance_ids) for q in sample.queries]
            total.update(repr(queries).encode())
        return total.hexdigest()

    def cache(
        self,
        folder: str | None = None,
        *,
        process: tuple[int, int] = (0, 1),
        wait: Callable[[], None] = lambda: None,
    ) -> bool:
        """Keeps prepared samples for later visits. Returns whether it does so.

        It does not if samples differ from visit to visit, or if they are too large together, judged
        by the first one.

        Args:
            folder: Where the samples of a source that has a fingerprint are stored, also for later
                runs; all are prepared now, on all cores. Without it each is prepared at its first
                visit and stays in memory.
            process: The number of this process, and how many there are. Each prepares its share.
            wait: Returns when all processes have called it, so that all shares are written.
        """
        if self.is_augmented or self.fresh or not len(self):
            return False

        first = to_arrays(self[0])
        num_bytes = sum(array.nbytes for array in first.values())
        fingerprint = None if folder is None else self.source.fingerprint()
        if folder is None or fingerprint is None:
            if len(self) * num_bytes > MAX_MEMORY_BYTES:
                return False
            self._kept = {}
            return True

        if len(self) * num_bytes > MAX_DISK_BYTES:
            return False
        cache = FeatureCache(Path(folder), digest("prepared", fingerprint, *self.sizes))
        # Which process prepares a sample depends on its index alone, so that no sample is left out
        # however fast others are.
        number, num_processes = process
        own_indices = range(number, len(self), num_processes)
        missing = [index for index in own_indices if str(index) not in cache]
        cache.make_room("prepared images", len(missing), len(missing) * num_bytes)
        with show_progress("preparing images, once", len(missing)) as advance:
            cache.add(self._prepare_for_cache(missing, advance))
        wait()
        cache.refresh()
        self._stored = CachedSamples(cache, tuple(first))
        return True

    def _prepare_for_cache(
        self, indices: Sequence[int], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, Arrays]]:
        for index, sample in zip(indices, self._prepare_all(indices), strict=True):
            yield str(index), tuple(to_arrays(sample).values())
            advance(1)

    def _prepare_all(self, indices: Sequence[int]) -> Iterator[Prepared]:
        if len(indices) < MIN_SAMPLES_FOR_POOL:
            for index in indices:
                yield self[index]
            return

        # The source travels to each worker once, since a worker caches photos of its own.
        context = multiprocessing.get_context("spawn")
        with context.Pool(initializer=_set_worker_source, initargs=(self,)) as pool:
            yield from pool.imap(_prepare_in_worker, indices, chunksize=32)


_worker_source: list[PreparedSource] = []


def _set_worker_source(source: PreparedSource) -> None:
    _worker_source[:] = [source]


def _prepare_in_worker(index: int) -> Prepared:
    return _worker_source[0][index]
