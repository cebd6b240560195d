"""Losses: pure functions of what the model gives and of the truth.

Everything is float32. A mask is reduced to one number first, then masks are averaged: a large mask weighs as much as a
small one. So each loss has one value for each entry (mask, query or pixel), and `entry_weights` says from the truth
alone what each entry weighs in the mean of the batch. So a batch can be computed in parts, which are added up.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange, reduce
from jaxtyping import Array, Bool, Float, Int

from r2sm_jax.config import NO_HEAD, LossConfig, MaskPair
from r2sm_jax.models.mask_decoder import Kernels, MaskTokens, PixelFeatures, draw_pair
from r2sm_jax.models.r2sm import DenseOutput

FUSED, SLOTS = slice(0, 1), slice(1, None)
"""Positions among the mask decoder's tokens."""
CELLS = 2
"""Slots, early masks and dense outputs are compared with the truth at a resolution this many times lower."""
Pair = Sequence[Float[Array, "*n h w"]]
"""Modal and amodal masks."""


class Targets(NamedTuple):
    """Truth of a batch, at mask resolution. A coverage is the share of a cell that a mask fills, 0..1."""

    modal: Float[Array, "b m h w"]
    amodal: Float[Array, "b m h w"]
    has_amodal: Bool[Array, "b m"]
    query_instances: Bool[Array, "b k m"]
    """Which instances a query means."""
    slot_targets: Int[Array, "b k q"]
    """Index of the instance of each of the query's first q instances; -1 = none."""
    is_amodal: Bool[Array, "b k"]
    query_mask: Bool[Array, "b k"]
    pixel_weight: Float[Array, "b h w"]
    """Share of the cell that is image, neither letterbox padding nor an ignored region."""
    labels: dict[str, Int[Array, "b m"]]
    """For each attribute (category, colour, ...): index into its names; -1 = unknown."""
    boxes: Float[Array, "b m 4"]
    """Amodal box x0 y0 x1 y1 in units of the padded image side."""
    type_is_amodal: Bool[Array, "b f"]
    """Whether a sentence that the mask-type head learns from asks for the amodal mask."""
    type_valid: Bool[Array, "b f"]


class Outputs(NamedTuple):
    """What the model gives for a training batch."""

    masks: MaskTokens
    pixels: PixelFeatures
    type_readings: Float[Array, "r b f"]
    """Logits that the amodal mask is meant, by each of r readers."""
    instances: Kernels
    """Kernels [b 1 m] made of every instance's own pixels."""
    dense: DenseOutput
    names: dict[str, Float[Array, "_v e"]]
    """Projected text embeddings of each attribute's names."""


def compute_losses(
    outputs: Outputs, targets: Targets, config: LossConfig, *, head: str, threshold: float
) -> dict[str, Float[Array, "..."]]:
    """The value of every entry of every loss. `threshold` is the logit above which a pixel is mask."""
    masks, pixels = outputs.masks, outputs.masks.canvas(outputs.pixels.fine)
    return {
        **query_losses(masks, pixels, targets, config, head=head, threshold=threshold),
        **slot_losses(masks, pixels, targets, config, head=head, threshold=threshold),
        **instance_losses(outputs.instances, outputs.pixels.fine, targets, config),
        **dense_losses(outputs.dense, outputs.names, targets),
        "type": type_loss(outputs.type_readings, targets.type_is_amodal, config),
    }


def entry_weights(
    targets: Targets, config: LossConfig, head: str
) -> dict[str, Float[Array, "..."]]:
    """The weight of each entry of `compute_losses`: 1 / (number of valid entries of its loss), or 0 if it is not valid.

    `head` "none" has one mask for either type. With it, or with `supervise` "requested", a mask of the type that no
    query asks for weighs nothing in any loss: also not what pixels say of objects behind them, which needs both masks.
    """
    valid, wants = targets.query_mask, targets.is_amodal
    known = ~(targets.query_instances & ~targets.has_amodal[:, None]).any(-1)
    modal, amodal = _trained(valid, known, wants, config, head)
    in_slot = _has_instance(targets)
    known_in_slot = _pick(targets.has_amodal, jnp.maximum(targets.slot_targets, 0))
    slot_modal, slot_amodal = _trained(in_slot, known_in_slot, wants[..., None], config, head)
    as_modal, as_amodal = _asked(targets, config, head)
    instance = targets.modal.any((-2, -1))
    inside = pool_masks(targets.pixel_weight[:, None])[:, 0] > 0.5
    coarse = pool_masks(targets.modal)
    index = coarse.argmax(1)
    on_object = (coarse.max(1) > 0.5) & inside & _pick(as_modal, index)
    counted = {
        "modal": modal,
        "amodal": amodal,
        "early_modal": modal,
        "early_amodal": amodal,
        "iou": jnp.stack([modal, amodal], -1),
        "presence": valid,
        "type": targets.type_valid,
        "slots_modal": slot_modal,
        "slots_amodal": slot_amodal,
        "slot_iou": jnp.stack([slot_modal, slot_amodal], -1),
        "slot_presence": jnp.broadcast_to(valid[..., None], in_slot.shape),
        "instance_modal": instance & as_modal,
        "instance_amodal": instance & as_amodal & targets.has_amodal,
        "dense_box": on_object & _pick(as_amodal & targets.has_amodal, index),
    }
    counted |= {
        f"dense_{group}": on_object & (_pick(x, index) >= 0) for group, x in targets.labels.items()
    }
    counted |= (
        {"dense_hidden": inside & (not _learns_one_type(config, head))}
        if "category" in targets.labels
        else {}
    )
    return {
        name: entries / jnp.maximum(entries.sum(dtype=jnp.float32), 1)
        for name, entries in counted.items()
    }


def _learns_one_type(config: LossConfig, head: str) -> bool:
    """Whether a query teaches only the type of mask that it asks for."""
    return head == NO_HEAD or config.supervise == "requested"


def _trained(
    valid: Bool[Array, "*n"],
    known: Bool[Array, "*n"],
    is_amodal: Bool[Array, "*#n"],
    config: LossConfig,
    head: str,
) -> tuple[Bool[Array, "*n"], Bool[Array, "*n"]]:
    """Which modal and which amodal masks are trained. `known`: the complete shape is annotated."""
    if head == NO_HEAD:
        return valid & (~is_amodal | known), jnp.zeros_like(valid)
    if config.supervise == "requested":
        return valid & ~is_amodal, valid & is_amodal & known
    return valid, valid & known


def _asked(
    targets: Targets, config: LossConfig, head: str
) -> tuple[Bool[Array, "b m"], Bool[Array, "b m"]]:
    """The instances of which modal and of which amodal masks may be trained: all, or those that queries ask for."""
    if not _learns_one_type(config, head):
        everything = jnp.ones_like(targets.has_amodal)
        return everything, everything
    meant, wants = (
        targets.query_instances & targets.query_mask[..., None],
        targets.is_amodal[..., None],
    )
    return (meant & ~wants).any(1), (meant & wants).any(1)


def instance_regions(targets: Targets, config: LossConfig, head: str) -> Float[Array, "b m h w"]:
    """The pixels from which each instance's own kernel is made: its modal mask, or the one type that was asked for."""
    return jnp.where(
        _asked(targets, config, head)[0][..., None, None], targets.modal, targets.amodal
    )


def mean_losses(values: dict[str, Array], weights: dict[str, Array]) -> dict[str, Float[Array, ""]]:
    """The weighted sum of each loss, by its name in the log: its mean in a batch, or what a part adds to the mean."""
    means = jax.tree.map(lambda x, weight: (x * weight).sum(), values, weights)
    for name in ("early", "slots", "instance"):
        means[name] = means.pop(f"{name}_modal") + means.pop(f"{name}_amodal")
    return means


def total_loss(means: dict[str, Float[Array, ""]], config: LossConfig) -> Float[Array, ""]:
    """The weighted sum that is differentiated."""
    total = means["modal"] + means["amodal"] + config.type * means["type"]
    total += config.early * means["early"]
    total += (
        config.presence * (means["presence"] + means["slot_presence"])
        + config.slots * means["slots"]
    )
    total += config.iou * (means["iou"] + means["slot_iou"]) + config.instance * means["instance"]
    return total + config.dense * sum(
        mean for name, mean in means.items() if name.startswith("dense_")
    )


# Single masks.


def dice_loss(
    logits: Float[Array, "*n h w"], target: Float[Array, "*n h w"], valid: Float[Array, "*#n h w"]
) -> Float[Array, "*n"]:
    """1 - dice of each mask, smoothed by one cell as in SAM 2 (training/loss_fns.py); 0 for empty targets."""
    probability = jax.nn.sigmoid(logits) * valid
    target = target * valid
    overlap = (probability * target).sum((-2, -1))
    total = probability.sum((-2, -1)) + target.sum((-2, -1))
    return jnp.where(target.sum((-2, -1)) > 0, 1 - (2 * overlap + 1) / (total + 1), 0)


def pixel_mean(
    values: Float[Array, "*n h w"], valid: Float[Array, "*#n h w"]
) -> Float[Array, "*n"]:
    """Mean over the valid cells of each mask."""
    return (values * valid).sum((-2, -1)) / jnp.maximum(valid.sum((-2, -1)), 1)


def mask_loss(
    logits: Float[Array, "*n h w"],
    target: Float[Array, "*n h w"],
    valid: Float[Array, "*#n h w"],
    pair: MaskPair,
) -> Float[Array, "*n"]:
    """The named pair of losses of each mask: Mask2Former (paper, section 4.1), LISA (model/LISA.py) or SAM (paper,
    appendix A)."""
    dice = dice_loss(logits, target, valid)
    if pair == "sam":
        focal = optax.losses.sigmoid_focal_loss(logits, target, alpha=0.25, gamma=2.0)
        return 20 * pixel_mean(focal, valid) + dice
    cross_entropy = pixel_mean(optax.sigmoid_binary_cross_entropy(logits, target), valid)
    return 5 * cross_entropy + 5 * dice if pair == "mask2former" else 2 * cross_entropy + 0.5 * dice


def soft_iou(
    logits: Float[Array, "*n h w"],
    target: Float[Array, "*n h w"],
    valid: Float[Array, "*#n h w"],
    threshold: float,
) -> Float[Array, "*n"]:
    """IoU of the thresholded mask with the thresholded target on valid cells; 1 for two empty masks."""
    inside = valid > 0.5
    predicted, wanted = (logits > threshold) & inside, (target > 0.5) & inside
    union = (predicted | wanted).sum((-2, -1))
    return jnp.where(union > 0, (predicted & wanted).sum((-2, -1)) / jnp.maximum(union, 1), 1.0)


def iou_error(
    predicted: Float[Array, "*n 2"],
    drawn: Pair,
    truth: Pair,
    valid: Float[Array, "*#n h w"],
    threshold: float,
) -> Float[Array, "*n 2"]:
    """Squared error of the predicted IoUs of a modal and an amodal mask with the truth."""
    iou = [
        soft_iou(logits, target, valid, threshold)
        for logits, target in zip(drawn, truth, strict=True)
    ]
    return (predicted - jax.lax.stop_gradient(jnp.stack(iou, axis=-1))) ** 2


def pair_losses(
    prefix: str, drawn: Pair, truth: Pair, valid: Float[Array, "*#n h w"], config: LossConfig
) -> dict[str, Float[Array, "*n"]]:
    """`mask_loss` of modal and amodal masks, as "<prefix>modal" and "<prefix>amodal"."""
    losses = [
        mask_loss(logits, target, valid, config.masks)
        for logits, target in zip(drawn, truth, strict=True)
    ]
    return {f"{prefix}modal": losses[0], f"{prefix}amodal": losses[1]}


def pool_pixels(pixels: Float[Array, "*b h w c"]) -> Float[Array, "*b _h _w c"]:
    """Pixel features at a resolution `CELLS` times lower. A mask drawn on them is the pooled mask, except that the
    squares among a pixel's `places` are not pooled: at 48 pixels an error of 0.0009 times their weights."""
    return reduce(pixels, "... (h y) (w x) c -> ... h w c", "mean", y=CELLS, x=CELLS)


def pool_masks(coverage: Float[Array, "b m h w"]) -> Float[Array, "b m _h _w"]:
    """Coverage at a resolution `CELLS` times lower."""
    return reduce(coverage, "b m (h y) (w x) -> b m h w", "mean", y=CELLS, x=CELLS)


# Queries: one fused mask for everything that a query means.


def query_targets(targets: Targets) -> list[Float[Array, "b k h w"]]:
    """Union of the instances that each query means: modal and amodal."""
    query_instances, coverages = (
        targets.query_instances.astype(jnp.float32),
        (targets.modal, targets.amodal),
    )
    return [
        jnp.minimum(jnp.einsum("bkm,bmhw->bkhw", query_instances, coverage), 1)
        for coverage in coverages
    ]


def query_losses(
    masks: MaskTokens,
    pixels: Float[Array, "b *_k h w c"],
    targets: Targets,
    config: LossConfig,
    *,
    head: str,
    threshold: float,
) -> dict[str, Array]:
    """Losses of the fused masks and their scores, and of the masks of earlier decoder blocks at lower resolution."""
    drawn, answered = (
        [x[:, :, 0] for x in draw_pair(k.of(FUSED), pixels)]
        for k in (masks.kernels, masks.answered)
    )
    modal, amodal = query_targets(targets)
    if head == NO_HEAD:
        modal = jnp.where(targets.is_amodal[..., None, None], amodal, modal)
    area, has_target = (
        targets.pixel_weight[:, None],
        targets.query_instances.any(-1).astype(jnp.float32),
    )
    values = {
        **pair_losses("", drawn, (modal, amodal), area, config),
        "presence": optax.sigmoid_binary_cross_entropy(masks.presence[:, :, 0], has_target),
        "iou": iou_error(masks.iou[:, :, 0], answered, (modal, amodal), area, threshold),
        "early_modal": jnp.zeros(has_target.shape),
        "early_amodal": jnp.zeros(has_target.shape),
    }
    coarse, coarse_area = pool_pixels(pixels), pool_masks(area)
    coarse_truth = pool_masks(modal), pool_masks(amodal)
    for kernels in masks.early:
        drawn = [x[:, :, 0] for x in draw_pair(kernels.of(FUSED), coarse)]
        for name, loss in pair_losses("early_", drawn, coarse_truth, coarse_area, config).items():
            values[name] += loss / len(masks.early)
    return values


def type_loss(
    readings: Float[Array, "r b k"], is_amodal: Bool[Array, "b k"], config: LossConfig
) -> Float[Array, "b k"]:
    """Cross entropy of the mask type with smoothed labels; each of the r readers learns for itself."""
    target = is_amodal * (1 - 2 * config.type_smoothing) + config.type_smoothing
    return optax.sigmoid_binary_cross_entropy(readings, target[None]).mean(0)


# Slots: one mask for each instance that a query means.

_pick = jax.vmap(lambda table, index: table[index])
_pick_each = jax.vmap(_pick)


def _has_instance(targets: Targets) -> Bool[Array, "b k q"]:
    return (targets.slot_targets >= 0) & targets.query_mask[..., None]


def slot_losses(
    masks: MaskTokens,
    pixels: Float[Array, "b *_k h w c"],
    targets: Targets,
    config: LossConfig,
    *,
    head: str,
    threshold: float,
) -> dict[str, Array]:
    """Instance masks, at lower resolution: every target is matched to a slot, and the other slots learn absence.
    Amodal masks are matched, or masks of the one type that a query teaches."""
    exists, coarse = _has_instance(targets), pool_pixels(pixels)
    drawn, answered = (
        draw_pair(kernels.of(SLOTS), coarse) for kernels in (masks.kernels, masks.answered)
    )
    instance = jnp.maximum(targets.slot_targets, 0)
    truth = _pick(pool_masks(targets.modal), instance), _pick(pool_masks(targets.amodal), instance)
    (_, matched), (_, wanted) = drawn, truth
    if _learns_one_type(config, head):
        asks_amodal = targets.is_amodal[..., None, None, None]
        wanted = jnp.where(asks_amodal, truth[1], truth[0])
        matched = drawn[0] if head == NO_HEAD else jnp.where(asks_amodal, drawn[1], drawn[0])
        truth = (wanted, wanted) if head == NO_HEAD else truth
    area = pool_masks(targets.pixel_weight[:, None])[:, None]
    presence = masks.presence[:, :, 1:]
    slot = match_slots(jax.nn.sigmoid(matched) * area, wanted * area, presence, exists)
    drawn, answered = ([_pick_each(x, slot) for x in pair] for pair in (drawn, answered))
    has_target = (jax.nn.one_hot(slot, slot.shape[-1]) * exists[..., None]).sum(-2)
    return {
        **pair_losses("slots_", drawn, truth, area, config),
        "slot_presence": optax.sigmoid_binary_cross_entropy(presence, has_target),
        "slot_iou": iou_error(
            _pick_each(masks.iou[:, :, 1:], slot), answered, truth, area, threshold
        ),
    }


def match_slots(
    probability: Float[Array, "b k q h w"],
    target: Float[Array, "b k q h w"],
    presence: Float[Array, "b k q"],
    exists: Bool[Array, "b k q"],
) -> Int[Array, "b k q"]:
    """The slot of every target, by the Hungarian algorithm on the dice loss of masks of one type.

    A slot that says it is present costs less. Otherwise slots that draw the same mask would be matched by chance, and
    none would learn that it is the one.
    """
    overlap = jnp.einsum("bkqhw,bkrhw->bkqr", probability, target)
    sizes = probability.sum((-2, -1))[..., :, None] + target.sum((-2, -1))[..., None, :]
    claim = 0.5 * jax.nn.sigmoid(presence[..., None])
    cost = jnp.where(exists[..., None, :], 1 - (2 * overlap + 1) / (sizes + 1) - claim, 0)

    def match(cost: Float[Array, "q r"]) -> Int[Array, " r"]:
        rows, columns = optax.assignment.hungarian_algorithm(cost)
        return jnp.zeros(cost.shape[1], jnp.int32).at[columns].set(rows.astype(jnp.int32))

    return jax.vmap(match)(rearrange(jax.lax.stop_gradient(cost), "b k q r -> (b k) q r")).reshape(
        exists.shape
    )


# Instances and pixels, whatever the queries ask for.


def instance_losses(
    kernels: Kernels, pixels: Float[Array, "b h w c"], targets: Targets, config: LossConfig
) -> dict[str, Array]:
    """Masks of every instance from kernels [b 1 m] that were made from its own pixels."""
    drawn = [x[:, 0] for x in draw_pair(kernels, pixels)]
    return pair_losses(
        "instance_", drawn, (targets.modal, targets.amodal), targets.pixel_weight[:, None], config
    )


def dense_losses(
    dense: DenseOutput, names: dict[str, Float[Array, "_v e"]], targets: Targets
) -> dict[str, Array]:
    """What every pixel says about the object that it lies on: its names, the categories hidden here, its amodal box.

    A pixel is compared with `names`, the projected text embeddings, by a scaled dot product. So no vocabulary is part
    of the weights.
    """
    modal, amodal = pool_masks(targets.modal), pool_masks(targets.amodal)
    index = modal.argmax(1)
    values = {}
    for group, embeddings in names.items():
        label = jnp.maximum(_pick(targets.labels[group], index), 0)
        logits = (
            jnp.einsum("bhwe,ve->bhwv", dense.visible, embeddings) * embeddings.shape[-1] ** -0.5
        )
        values[f"dense_{group}"] = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    if "category" in names:
        embeddings = names["category"]
        one_hot = (
            jax.nn.one_hot(targets.labels["category"], len(embeddings))
            * targets.has_amodal[..., None]
        )
        hidden = (
            jnp.einsum("bmhw,bmv->bhwv", (amodal - modal > 0.5).astype(jnp.float32), one_hot) > 0
        )
        logits = (
            jnp.einsum("bhwe,ve->bhwv", dense.hidden, embeddings) * embeddings.shape[-1] ** -0.5 - 4
        )
        values["dense_hidden"] = optax.sigmoid_binary_cross_entropy(
            logits, hidden.astype(jnp.float32)
        ).sum(-1)
    size = dense.box.shape[1]
    centre = (jnp.arange(size) + 0.5) / size
    here = jnp.stack(jnp.meshgrid(centre, centre, indexing="xy"), -1)
    distances = _pick(targets.boxes, index) - jnp.concatenate([here, here], -1)
    values["dense_box"] = 4 * jnp.abs(dense.box - distances).mean(-1)
    return values
