"""Samples -> training batches."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grain
import numpy as np
from absl import flags
from jaxtyping import Bool, Float32, Int32, Shaped, UInt8

from r2sm_jax.config import LEARNED_HEADS, Config
from r2sm_jax.data.dataset import FreshSource, Source
from r2sm_jax.data.prepare import (
    NAMES_A_SIDE,
    Prepared,
    Tokenize,
    drop_tokens,
    jitter_colours,
    mirror,
    prepare,
    random_crop,
)
from r2sm_jax.language.tokenizer import NO_TOKEN

BUFFERED_BATCHES = 2
"""Batches that each worker process has ready."""
MAX_KEPT_BYTES = 4 << 30
"""So many bytes of prepared samples stay in memory, of all workers together. Samples beyond that
are prepared anew at each visit."""
NUM_TYPE_SENTENCES = 9
"""Sentences an image from which a mask-type head that reads words alone learns (the axis f)."""
NUM_TEXT_ONLY = 6
"""How many of the `NUM_TYPE_SENTENCES` have no image, where there are such sentences."""


class Batch(NamedTuple):
    """Examples as arrays, of numpy until they lie on the devices. A single example has no axis b.

    b = images, S = image size, h w = mask size, m = instances, k = queries, s = slots, t = tokens
    of a query, l = layers of the language model, e = their channels, f = `NUM_TYPE_SENTENCES`, u =
    tokens of such a sentence. The axes m, k and f are padded; `query_mask` and `type_valid` say
    what is real.
    """

    image: UInt8[Any, "*b S S 3"]
    """Letterboxed."""
    image_mask: Bool[Any, "*b S S"]
    """True on the image, False on its padding."""
    masks: UInt8[Any, "*b m 2 h w"]
    """Modal and amodal: the share of each mask cell that the mask covers, 0..255."""
    is_known: Bool[Any, "*b m 2"]
    """Whether the mask is annotated: always True for modal. Where amodal is not, `masks` holds the
    visible part in its place."""
    labels: dict[str, Int32[Any, "*b m"]]
    """For each attribute the index into its vocabulary; -1 = unknown."""
    boxes: Float32[Any, "*b m 4"]
    """Amodal box x0 y0 x1 y1 in units of the padded side."""
    pixel_weight: UInt8[Any, "*b h w"]
    """The share of each cell that counts, 0..255: no padding, no ignored region."""
    query_instances: Bool[Any, "*b k m"]
    """The instances that a query means."""
    slot_targets: Int32[Any, "*b k s"]
    """The first s = `decoder.slots` of these instances, by index; -1 = none."""
    is_amodal: Bool[Any, "*b k"]
    """Whether the query asks for the amodal mask."""
    query_mask: Bool[Any, "*b k"]
    """True for a query that is trained on; False for padding and for what `assemble` leaves out."""
    text: Int32[Any, "*b k t"] | Shaped[Any, "*b k t l e"]
    """Token ids, `NO_TOKEN` on padding. On the way to the devices
    `fill_in_states` (training/segmenter.py) puts the states of the language model in their place,
    float16 [b k t l e]."""
    text_mask: Bool[Any, "*b k t"]
    """True for a token, False for padding."""

    # For a mask-type head that reads words alone: what it learns from. None for every other head.
    type_text: Int32[Any, "*b f u"] | Shaped[Any, "*b f u l e"] | None = None
    """As `text`, of some queries of the image and of sentences without an image."""
    type_text_mask: Bool[Any, "*b f u"] | None = None
    """True for a token that the head sees: no padding, and not hidden by `--data.token-drop`."""
    type_is_amodal: Bool[Any, "*b f"] | None = None
    type_valid: Bool[Any, "*b f"] | None = None
    """True for a sentence, False for padding."""


@dataclass
class Examples:
    """Makes the example of a sample at each visit. Worker processes get copies of it.

    The order of the random draws is a contract, so that a run can be repeated and resumed: crop,
    queries, mirroring, colours. Those for the mask-type head follow: its queries, its sentences
    without an image, its hidden tokens.
    """

    source: Source
    config: Config
    tokenizer: Tokenize
    text_length: int
    """Tokens that queries are padded to. Queries of more are left out."""
    text_only: Sequence[tuple[list[int], bool]] = ()
    """Sentences without an image: their token ids, and whether they ask for the amodal mask."""
    type_text_length: int = 0
    """Tokens that the sentences of the mask-type head are padded to; 0 = `text_length`."""
    max_kept_bytes: int = MAX_KEPT_BYTES
    """Size of the prepared samples that stay in memory, of all workers together."""
    _kept: dict[int, Prepared] = field(default_factory=dict, init=False)
    _kept_bytes: int = field(default=0, init=False)

    def __call__(self, place: tuple[int, int], rng: np.random.Generator) -> Batch:
        """Makes the example of sample `place[0]` at its visit `place[1]`, which a fresh source
        makes anew."""
        index, visit = place
        prepared = self._kept.get(index)
        if prepared is None:
            prepared = self._prepare(index, visit, rng)
        return self.assemble(prepared, rng)

    def _prepare(self, index: int, visit: int, rng: np.random.Generator) -> Prepared:
        """Prepares a sample, and keeps it if it is the same at each visit and there is room."""
        data = self.config.data
        if data.fresh:
            assert isinstance(self.source, FreshSource)
            sample = self.source.at_visit(index, visit)
        else:
            sample = self.source[index]
        if data.crop < 1:  # drawn before everything else
            sample = random_crop(sample, data.crop, rng)
        prepared = prepare(
            sample,
            image_size=self.config.model.vision.image_size,
            mask_size=self.config.model.mask_size,
            vocabulary=self.source.vocabulary,
            tokenizer=self.tokenizer,
        )

        if data.crop == 1 and not data.fresh:
            arrays = [*prepared, *prepared.labels.values()]
            num_bytes = sum(x.nbytes for x in arrays if isinstance(x, np.ndarray))
            if self._kept_bytes + num_bytes <= self.max_kept_bytes // max(1, data.workers):
                self._kept_bytes += num_bytes
                self._kept[index] = prepared
        return prepared

    def assemble(self, prepared: Prepared, rng: np.random.Generator) -> Batch:
        """Draws queries of a sample, mirrors, changes colours, and pads to fixed shapes."""
        data = self.config.data
        usable = [k for k, ids in enumerate(prepared.token_ids) if len(ids) <= self.text_length]
        # Without a usable query the permutation is an empty array of floats, which is no index.
        rows = np.sort(rng.permutation(usable)[: data.queries].astype(int))
        is_mirrored = data.mirror and not self.source.mirrors_itself and rng.random() < 0.5
        if is_mirrored:
            prepared = mirror(prepared)
        image = prepared.image
        if data.colour_jitter:
            image = jitter_colours(image, data.colour_jitter, rng)

        # Instances that a query means come first, the others as far as there is room. The sort is
        # stable and False goes before True, so that both keep their order.
        is_target = prepared.query_instances[rows].any(0)
        columns = np.argsort(~is_target, kind="stable")[: data.instances]

        def select(values: np.ndarray, fill: float = 0) -> np.ndarray:
            return pad(values[columns], data.instances, fill=fill)

        # A query does not count if it means more instances than there is room for, or names a side
        # of an image that is mirrored.
        all_instances = prepared.query_instances[rows]
        query_instances = all_instances[:, columns]
        query_mask = query_instances.sum(1) == all_instances.sum(1)
        if is_mirrored:
            names_a_side = [bool(NAMES_A_SIDE.search(prepared.texts[row])) for row in rows]
            query_mask &= ~np.array(names_a_side, bool)

        # The instances of a query in order, then -1. Of more instances than slots the first ones:
        # the fused mask still means all.
        num_slots = self.config.model.decoder.slots
        order = np.argsort(~query_instances, kind="stable")[:, :num_slots]
        is_instance = np.take_along_axis(query_instances, order, axis=1)
        slot_targets = np.where(is_instance, order, -1).astype(np.int32)

        token_ids = [prepared.token_ids[row] for row in rows]
        text, text_mask = pad_tokens(token_ids, data.queries, self.text_length)
        example = Batch(
            image=image,
            image_mask=prepared.image_mask,
            masks=select(prepared.masks),
            # Padding has empty masks and the label -1, so no loss reads its `is_known`.
            is_known=select(prepared.is_known, fill=True),
            labels={name: select(numbers, fill=-1) for name, numbers in prepared.labels.items()},
            boxes=select(prepared.boxes),
            pixel_weight=prepared.pixel_weight,
            query_instances=pad(query_instances, data.queries, data.instances),
            slot_targets=pad(slot_targets, data.queries, num_slots, fill=-1),
            is_amodal=pad(prepared.is_amodal[rows], data.queries),
            query_mask=pad(query_mask, data.queries),
            text=text,
            text_mask=text_mask,
        )
        if self.config.model.head not in LEARNED_HEADS:
            return example
        type_rows = rng.permutation(usable).astype(int)
        return self._add_type_sentences(example, prepared, type_rows, rng)

    def _add_type_sentences(
        self, example: Batch, prepared: Prepared, rows: np.ndarray, rng: np.random.Generator
    ) -> Batch:
        """Adds what the mask-type head learns from: queries `rows`, and some of `text_only`."""
        num_text_only = NUM_TEXT_ONLY if self.text_only else 0
        sentences = []
        for row in rows[: NUM_TYPE_SENTENCES - num_text_only]:
            sentences.append((prepared.token_ids[row], bool(prepared.is_amodal[row])))
        if num_text_only:
            for number in rng.integers(len(self.text_only), size=num_text_only):
                sentences.append(self.text_only[int(number)])

        token_ids = [ids for ids, _ in sentences]
        is_amodal = np.array([is_amodal for _, is_amodal in sentences], bool)
        length = self.type_text_length or self.text_length
        text, mask = pad_tokens(token_ids, NUM_TYPE_SENTENCES, length)
        return example._replace(
            type_text=text,
            type_text_mask=drop_tokens(mask, self.config.data.token_drop, rng),
            type_is_amodal=pad(is_amodal, NUM_TYPE_SENTENCES),
            type_valid=np.arange(NUM_TYPE_SENTENCES) < len(sentences),
        )


def pad_tokens(
    token_ids: Sequence[list[int]], count: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of sentences, padded to `count` and cut to `length`, and which are real,
    `[count length]`."""
    padded = np.full((count, length), NO_TOKEN, np.int32)
    for row, ids in enumerate(token_ids):
        padded[row, : len(ids)] = ids[:length]
    mask = padded != NO_TOKEN
    # A sentence without tokens keeps its first place, as in `pad_ids`: attention needs one.
    mask[:, 0] = True
    return padded, mask


def pad(values: np.ndarray, *sizes: int, fill: float = 0) -> np.ndarray:
    """The values with their first axes filled up to `sizes`."""
    widths = [(0, 0)] * values.ndim
    for axis, size in enumerate(sizes):
        widths[axis] = (0, size - values.shape[axis])
    return np.pad(values, widths, constant_values=fill)


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
