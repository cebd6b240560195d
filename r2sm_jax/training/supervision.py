"""What a batch supervises: the truth of every output, and how much each entry weighs in its loss.

Everything is made once a step, from the whole batch. The weight of an entry (a mask, a query, a
pixel of a dense loss) is 1 / (number of entries that count in the batch), or 0 for an entry that
does not count. So a loss is the sum of value times weight, and a batch can be computed in parts:
the sums of its parts add up to the mean of the batch. Only `pixel_weight` is of another kind: it
is the share 0..1 of a mask cell that counts within the loss of one mask.

Which of the two masks of a query is supervised is decided here, as data:

- `--loss.supervise both`: the modal mask, and the amodal mask where it is annotated.
- `--loss.supervise requested`: only the mask that the query asks for.
- the head `none` predicts one mask for every query, in the place of the modal one. There it learns
the requested mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import reduce
from jaxtyping import Array, Bool, Float, Int, Shaped

from r2sm_jax.config import NO_HEAD, LossConfig
from r2sm_jax.data.batches import Batch
from r2sm_jax.query import AMODAL, MODAL

POOL = 2
"""Slots, auxiliary masks and dense outputs are supervised at a resolution this many times lower
than masks: nearly as good, and a quarter of the pixels. Dense outputs are made of the coarse pixel
features, which have just this grid: half of the tokens' stride, where masks have a quarter."""


class MaskTargets(NamedTuple):
    """Truth of pairs of a modal and an amodal mask, as coverage (the share of a cell that a mask
    fills, 0..1)."""

    masks: Float[Array, "*n 2 h w"]
    weight: Float[Array, "*n 2"]
    iou_weight: Float[Array, "*n 2"]
    """The weight of the predicted IoU's loss: one mean over modal and amodal masks together, where
    `weight` has a mean for each."""


class PixelTargets(NamedTuple):
    """What the dense losses teach at low resolution about the object that is visible at a pixel."""

    labels: dict[str, Int[Array, "b h w"]]
    """For each attribute (category, colour, ...): an index into the attribute's names."""
    label_weights: dict[str, Float[Array, "b h w"]]
    box: Float[Array, "b h w 4"]
    """Amodal box x0 y0 x1 y1 of the object in units of the padded image side."""
    box_weight: Float[Array, "b h w"]
    hidden: Float[Array, "b m h w"]
    """1 where an instance is hidden behind something."""
    hidden_labels: Int[Array, "b m"]
    """Its category; -1 = unknown."""
    hidden_unknown: Bool[Array, "b m"]
    """Whether its complete shape is not annotated, so that it may be hidden anywhere."""
    hidden_weight: Float[Array, "b h w"]


class Targets(NamedTuple):
    """Truth and weights of a batch: b images, k queries, m instances, s slots, f sentences, h x w
    mask cells."""

    pixel_weight: Float[Array, "b h w"]
    """Share of the cell that is image, neither letterbox padding nor an ignored region."""

    queries: MaskTargets
    """[b k]: the union of the instances of each query."""
    is_present: Float[Array, "b k"]
    """1 if the query has a target."""
    presence_weight: Float[Array, "b k"]

    slots: MaskTargets
    """[b k s] at low resolution: the instances of each query, one by one, in the order of the
    batch. Which slot learns which of them is up to `match_slots` (losses.py)."""
    slot_exists: Bool[Array, "b k s"]
    """Whether there is such an instance; the axis s is padded."""
    slot_presence_weight: Float[Array, "b k 1"]
    match_amodal: Bool[Array, "b k"]
    """Slots are matched with instances by their amodal masks where this is True, by their modal
    masks where it is False."""

    instances: MaskTargets
    """[b m]: every visible instance. Where a query teaches only the mask that it asks for
    (`--loss.supervise requested`, or the head `none`), an instance counts only for the types that
    queries for it ask for."""
    instance_regions: Float[Array, "b m h w"]
    """The pixels whose mean feature gives each instance's own kernel."""
    pixels: PixelTargets

    type_is_amodal: Bool[Array, "b f"]
    """Whether a sentence that the mask-type head learns from asks for the amodal mask."""
    type_weight: Float[Array, "b f"]


def make_targets(batch: Batch, config: LossConfig, *, head: str) -> Targets:
    """The targets of a whole batch (data/batches.py lists its arrays). `head` is the name of the
    mask-type head."""
    masks = to_coverage(batch.masks)
    pooled = pool_masks(masks)
    pixel_weight = to_coverage(batch.pixel_weight)
    is_known = batch.is_known
    is_amodal = batch.is_amodal
    query_mask = batch.query_mask
    query_instances = batch.query_instances

    # Which masks of a pair a query teaches.
    is_requested = jnp.stack([~is_amodal, is_amodal], axis=-1)  # [b k 2]
    teaches_one = head == NO_HEAD or config.supervise == "requested"
    teaches = is_requested if teaches_one else jnp.ones_like(is_requested)
    # Slots are matched with instances once for both masks: by the amodal ones if these are taught,
    # else by the modal ones. An amodal mask that is not annotated holds the visible part.
    match_amodal = teaches[..., AMODAL] & (head != NO_HEAD)
    teaches &= query_mask[..., None]

    # The complete shape of a union is known if that of each of its instances is annotated.
    all_known = (is_known[:, None] | ~query_instances[..., None]).all(2)  # [b k 2]
    queries = make_mask_targets(
        unite(query_instances, masks), teaches & all_known, is_amodal, head=head
    )

    slot_exists = (batch.slot_targets >= 0) & query_mask[..., None]
    slot_instance = jnp.maximum(batch.slot_targets, 0)
    slot_learns = slot_exists[..., None] & teaches[:, :, None] & take(is_known, slot_instance)
    slots = make_mask_targets(
        take(pooled, slot_instance), slot_learns, is_amodal[..., None], head=head
    )

    # With `supervise both`, every instance and its pixels are taught both types. Where a query
    # teaches one type only, they are taught the types that the queries for this instance ask for.
    instance_learns = is_known  # [b m 2]
    if teaches_one:
        instance_learns = is_known & (query_instances[..., None] & teaches[:, :, None]).any(1)
    is_visible = masks[:, :, MODAL].any((-2, -1))[..., None]

    # The feature of an instance is the mean of its visible pixels where it is taught its modal
    # mask. If it is taught its amodal mask alone, it is the mean of all of its pixels. If it is
    # taught nothing it has no loss, and its region does not matter.
    learns_modal = instance_learns[..., MODAL, None, None]
    instance_regions = jnp.where(learns_modal, masks[:, :, MODAL], masks[:, :, AMODAL])

    # Every slot of a query counts, with or without an instance. The sum over the axis s is taken in
    # the loss, hence 1 / s here.
    num_slots = max(slot_exists.shape[-1], 1)
    slot_presence_weight = mean_weight(query_mask)[..., None] / num_slots  # [b k 1]

    return Targets(
        pixel_weight=pixel_weight,
        queries=queries,
        is_present=query_instances.any(-1).astype(jnp.float32),
        presence_weight=mean_weight(query_mask),
        slots=slots,
        slot_exists=slot_exists,
        slot_presence_weight=slot_presence_weight,
        match_amodal=match_amodal,
        instances=weigh_masks(masks, is_visible & instance_learns),
        instance_regions=instance_regions,
        pixels=make_pixel_targets(batch, pooled, instance_learns, teaches_hidden=not teaches_one),
        # For a head that does not read words alone the f sentences are the k queries.
        type_is_amodal=is_amodal if batch.type_is_amodal is None else batch.type_is_amodal,
        type_weight=mean_weight(query_mask if batch.type_valid is None else batch.type_valid),
    )


def make_pixel_targets(
    batch: Batch,
    masks: Float[Array, "b m 2 h w"],
    learns: Bool[Array, "b m 2"],
    *,
    teaches_hidden: bool,
) -> PixelTargets:
    """Targets of the dense losses from masks at their resolution. A pixel belongs to the instance
    that covers more than half of it, if there is one."""
    modal, amodal = masks[:, :, MODAL], masks[:, :, AMODAL]
    is_image = pool_masks(to_coverage(batch.pixel_weight)) > 0.5
    has_amodal = batch.is_known[..., AMODAL]

    instance = modal.argmax(1)  # [b h w], an index into the axis m
    is_object = (modal.max(1) > 0.5) & is_image
    is_taught = is_object[..., None] & take(learns, instance)  # [b h w 2]
    labels = {name: take(label, instance) for name, label in batch.labels.items()}
    is_hidden = (amodal - modal > 0.5) & has_amodal[..., None, None]  # [b m h w]

    return PixelTargets(
        labels={name: jnp.maximum(label, 0) for name, label in labels.items()},
        label_weights={
            name: mean_weight(is_taught[..., MODAL] & (label >= 0))
            for name, label in labels.items()
        },
        box=take(batch.boxes, instance),
        box_weight=mean_weight(is_taught.all(-1)),
        hidden=is_hidden.astype(jnp.float32),
        hidden_labels=batch.labels.get("category", jnp.full(has_amodal.shape, -1)),
        hidden_unknown=~has_amodal,
        # What is hidden is the difference of both masks, so it is not taught where a query teaches
        # only one of them.
        hidden_weight=mean_weight(is_image & teaches_hidden),
    )


def make_mask_targets(
    masks: Float[Array, "*n 2 h w"],
    learns: Bool[Array, "*n 2"],
    is_amodal: Bool[Array, "*#n"],
    *,
    head: str,
) -> MaskTargets:
    """Targets of the pairs of masks that queries mean. `learns`: which of them count."""
    if head == NO_HEAD:
        # Only the first mask of a pair is learnt: the requested one.
        masks = jnp.where(is_amodal[..., None, None, None], masks[..., ::-1, :, :], masks)
        learns = jnp.where(is_amodal[..., None], learns[..., ::-1], learns)
    return weigh_masks(masks, learns)


def weigh_masks(masks: Float[Array, "*n 2 h w"], learns: Bool[Array, "*n 2"]) -> MaskTargets:
    """Targets with equal weights for all modal masks that count, and for all amodal ones."""
    weigh_each = jax.vmap(mean_weight, in_axes=-1, out_axes=-1)
    return MaskTargets(masks, weight=weigh_each(learns), iou_weight=mean_weight(learns))


def mean_weight(counts: Bool[Array, "*n"]) -> Float[Array, "*n"]:
    """Weights with which a sum is the mean over the entries that count; all 0 if there is none."""
    return counts / jnp.maximum(counts.sum(dtype=jnp.float32), 1)


def to_coverage(array: Array) -> Float[Array, "..."]:
    """0..255 -> 0..1."""
    return array.astype(jnp.float32) / 255


def unite(
    query_instances: Bool[Array, "b k m"], coverage: Float[Array, "b m 2 h w"]
) -> Float[Array, "b k 2 h w"]:
    """The unions of the instances of each query."""
    total = jnp.einsum("bkm,bmphw->bkphw", query_instances.astype(jnp.float32), coverage)
    return jnp.minimum(total, 1)


def pool_masks(coverage: Float[Array, "*b h w"]) -> Float[Array, "*b _h _w"]:
    """Coverage at a resolution `POOL` times lower."""
    return reduce(coverage, "... (h y) (w x) -> ... h w", "mean", y=POOL, x=POOL)


def take(table: Shaped[Array, "b _m *row"], index: Int[Array, "b *n"]) -> Array:
    """For each image of a batch, the rows of its table at these indices: `[b n row]`."""
    return jax.vmap(lambda rows, chosen: rows[chosen])(table, index)
