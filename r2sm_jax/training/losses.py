"""Losses. Everything is float32, reduced per mask first and then over the valid masks, never over the flat batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange, reduce
from jaxtyping import Array, Bool, Float, Int

from r2sm_jax.config import LossConfig, MaskPair
from r2sm_jax.models.decoder import Kernels, MaskTokens, draw_pair
from r2sm_jax.models.r2sm import DenseOutput

FUSED, SLOTS = slice(0, 1), slice(1, None)
"""Positions among the mask decoder's tokens."""


class Targets(NamedTuple):
    """Truth of a batch, at mask resolution. Coverages are the share of a cell that a mask fills, 0..1."""

    modal: Float[Array, "b m h w"]
    amodal: Float[Array, "b m h w"]
    amodal_known: Bool[Array, "b m"]
    members: Bool[Array, "b k m"]
    """Which instances a query means."""
    slots: Int[Array, "b k q"]
    """Index of the instance of each of the query's first q instances; -1 = none."""
    wants_amodal: Bool[Array, "b k"]
    query_valid: Bool[Array, "b k"]
    valid: Float[Array, "b h w"]
    """Share of the cell that is image, neither letterbox padding nor an ignored region."""
    labels: dict[str, Int[Array, "b m"]]
    """For each attribute (category, colour, ...): index into its names; -1 = unknown."""
    boxes: Float[Array, "b m 4"]
    """Amodal box x0 y0 x1 y1 in units of the padded image side."""


def masked_mean(values: Float[Array, "*n"], valid: Float[Array, "*n"] | Bool[Array, "*n"]) -> Float[Array, ""]:
    """Mean over the valid entries; 0 where there is none."""
    return SharedMeans()(values, valid)


class SharedMeans:
    """`masked_mean` for a batch that is worked off in parts: the shares of its parts add up to its means.

    How many entries count depends on the truth alone. So a first pass over all parts reads `counts`, one for each call
    in their order, and a second divides by their `totals`.
    """

    def __init__(self, totals: list[Float[Array, ""]] | None = None):
        self.totals = totals
        self.counts: list[Float[Array, ""]] = []

    def __call__(self, values: Float[Array, "*n"], valid: Float[Array, "*n"] | Bool[Array, "*n"]) -> Float[Array, ""]:
        weights = valid.astype(values.dtype)
        self.counts.append(weights.sum())
        total = self.counts[-1] if self.totals is None else self.totals[len(self.counts) - 1]
        return (values * weights).sum() / jnp.maximum(total, 1)


Mean = Callable[[Array, Array], Array]


def dice_loss(
    logits: Float[Array, "*n h w"], target: Float[Array, "*n h w"], valid: Float[Array, "*#n h w"]
) -> Float[Array, "*n"]:
    """1 - dice of each mask, smoothed by one cell as SAM 2 does (training/loss_fns.py); 0 for empty targets."""
    probability = jax.nn.sigmoid(logits) * valid
    target = target * valid
    overlap = (probability * target).sum((-2, -1))
    total = probability.sum((-2, -1)) + target.sum((-2, -1))
    return jnp.where(target.sum((-2, -1)) > 0, 1 - (2 * overlap + 1) / (total + 1), 0)


def pixel_mean(values: Float[Array, "*n h w"], valid: Float[Array, "*#n h w"]) -> Float[Array, "*n"]:
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
    """IoU of the thresholded mask with the thresholded target, on valid cells; two empty masks agree (1)."""
    counts = valid > 0.5
    drawn, wanted = (logits > threshold) & counts, (target > 0.5) & counts
    union = (drawn | wanted).sum((-2, -1))
    return jnp.where(union > 0, (drawn & wanted).sum((-2, -1)) / jnp.maximum(union, 1), 1.0)


def query_targets(targets: Targets) -> tuple[Float[Array, "b k h w"], Float[Array, "b k h w"], Bool[Array, "b k"]]:
    """Union of the meant instances: modal, amodal, and whether the amodal one is known."""
    members = targets.members.astype(jnp.float32)
    modal = jnp.einsum("bkm,bmhw->bkhw", members, targets.modal)
    amodal = jnp.einsum("bkm,bmhw->bkhw", members, targets.amodal)
    known = ~(targets.members & ~targets.amodal_known[:, None]).any(-1)
    return jnp.minimum(modal, 1), jnp.minimum(amodal, 1), known


def query_losses(
    masks: MaskTokens, pixels: Float[Array, "b *_k h w c"], targets: Targets, config: LossConfig, *, head: str,
    threshold: float, mean: Mean = masked_mean,
) -> dict[str, Float[Array, ""]]:  # fmt: skip
    """Losses of the fused masks and their scores. `head` "none" has one mask for either type;
    `threshold` is the logit above which a pixel is mask."""
    modal, amodal = (x[:, :, 0] for x in draw_pair(masks.kernels.of(FUSED), pixels))
    modal_target, amodal_target, known = query_targets(targets)
    valid, area = targets.query_valid, targets.valid[:, None]
    wants = targets.wants_amodal
    if head == "none":
        modal_target = jnp.where(wants[..., None, None], amodal_target, modal_target)
        modal_valid, amodal_valid = valid & (~wants | known), jnp.zeros_like(valid)
    elif config.supervise == "requested":
        modal_valid, amodal_valid = valid & ~wants, valid & wants & known
    else:
        modal_valid, amodal_valid = valid, valid & known
    has_target = targets.members.any(-1).astype(jnp.float32)
    pairs = ((modal, modal_target), (amodal, amodal_target))
    iou = jnp.stack([soft_iou(drawn, target, area, threshold) for drawn, target in pairs], axis=-1)
    iou_error = (masks.iou[:, :, 0] - jax.lax.stop_gradient(iou)) ** 2
    early = jnp.zeros(())
    if masks.early:
        targets_coarse = pool_masks(modal_target), pool_masks(amodal_target)
        area_coarse, pixels_coarse = pool_masks(area), pool_pixels(pixels)
        for kernels in masks.early:
            pair = (x[:, :, 0] for x in draw_pair(kernels.of(FUSED), pixels_coarse))
            for logits, target, counts in zip(pair, targets_coarse, (modal_valid, amodal_valid), strict=True):
                early += mean(mask_loss(logits, target, area_coarse, config.masks), counts)
        early /= len(masks.early)
    return {
        "early": early,
        "modal": mean(mask_loss(modal, modal_target, area, config.masks), modal_valid),
        "amodal": mean(mask_loss(amodal, amodal_target, area, config.masks), amodal_valid),
        "presence": mean(optax.sigmoid_binary_cross_entropy(masks.presence[:, :, 0], has_target), valid),
        "iou": mean(iou_error, jnp.stack([modal_valid, amodal_valid], -1)),
    }


def type_loss(
    readings: Float[Array, "r b k"],
    wants_amodal: Bool[Array, "b k"],
    valid: Bool[Array, "b k"],
    config: LossConfig,
    *,
    mean: Mean = masked_mean,
) -> Float[Array, ""]:
    """Cross entropy of the mask type, with smoothed labels; every reader is judged alone."""
    target = wants_amodal * (1 - 2 * config.type_smoothing) + config.type_smoothing
    return mean(optax.sigmoid_binary_cross_entropy(readings, target[None]).mean(0), valid)


def pool_pixels(pixels: Float[Array, "*b h w c"]) -> Float[Array, "*b _h _w c"]:
    """Half the resolution. The logits of a mask drawn from pooled features are the pooled logits, but for what its
    kernel makes of the squares among a pixel's `places`: at 48 pixels 0.0009 times its weights there."""
    return reduce(pixels, "... (h y) (w x) c -> ... h w c", "mean", y=2, x=2)


def pool_masks(coverage: Float[Array, "b m h w"], cells: int = 2) -> Float[Array, "b m _h _w"]:
    """Coverage at a resolution `cells` times lower."""
    return reduce(coverage, "b m (h y) (w x) -> b m h w", "mean", y=cells, x=cells)


def slot_losses(
    masks: MaskTokens,
    pixels: Float[Array, "b *_k h w c"],
    targets: Targets,
    config: LossConfig,
    *,
    threshold: float,
    mean: Mean = masked_mean,
) -> dict[str, Float[Array, ""]]:
    """Instance masks: slots are matched to the query's instances (Hungarian), unmatched slots learn absence.

    Computed at half the mask resolution.
    """
    modal, amodal = draw_pair(masks.kernels.of(SLOTS), pool_pixels(pixels))
    chosen = jnp.maximum(targets.slots, 0)
    pick = jax.vmap(lambda table, index: table[index])
    modal_target, amodal_target = (pick(pool_masks(x), chosen) for x in (targets.modal, targets.amodal))
    exists = (targets.slots >= 0) & targets.query_valid[..., None]
    known = exists & pick(targets.amodal_known, chosen)
    area = pool_masks(targets.valid[:, None])[:, None]

    probability, counted = jax.nn.sigmoid(amodal) * area, amodal_target * area
    overlap = jnp.einsum("bkqhw,bkrhw->bkqr", probability, counted)
    sizes = probability.sum((-2, -1))[..., :, None] + counted.sum((-2, -1))[..., None, :]
    # Slots that draw alike would be matched by chance and none learn that it is the one.
    claim = 0.5 * jax.nn.sigmoid(masks.presence[:, :, 1:, None])
    cost = jnp.where(exists[..., None, :], 1 - (2 * overlap + 1) / (sizes + 1) - claim, 0)
    slot_of = jax.vmap(_match)(rearrange(jax.lax.stop_gradient(cost), "b k q r -> (b k) q r"))
    slot_of = slot_of.reshape(targets.slots.shape)  # slot that each target goes to

    take = jax.vmap(jax.vmap(lambda x, index: x[index]))
    matched_modal, matched_amodal = take(modal, slot_of), take(amodal, slot_of)
    losses = mask_loss(matched_modal, modal_target, area, config.masks)
    amodal_losses = mask_loss(matched_amodal, amodal_target, area, config.masks)
    pairs = ((matched_modal, modal_target), (matched_amodal, amodal_target))
    iou = jnp.stack([soft_iou(drawn, target, area, threshold) for drawn, target in pairs], axis=-1)
    iou_error = (take(masks.iou[:, :, 1:], slot_of) - jax.lax.stop_gradient(iou)) ** 2
    filled = take(jnp.zeros(exists.shape), slot_of)
    filled = jax.vmap(jax.vmap(lambda row, index, there: row.at[index].set(there)))(
        filled, slot_of, exists.astype(jnp.float32)
    )
    presence = optax.sigmoid_binary_cross_entropy(masks.presence[:, :, 1:], filled)
    return {
        "slots": mean(losses, exists) + mean(amodal_losses, known),
        "slot_presence": mean(presence, jnp.broadcast_to(targets.query_valid[..., None], filled.shape)),
        "slot_iou": mean(iou_error, jnp.stack([exists, known], -1)),
    }


def _match(cost: Float[Array, "q r"]) -> Int[Array, " r"]:
    """Slot of every target, by the Hungarian algorithm on a square cost."""
    rows, columns = optax.assignment.hungarian_algorithm(cost)
    return jnp.zeros(cost.shape[1], jnp.int32).at[columns].set(rows.astype(jnp.int32))


def dense_losses(
    dense: DenseOutput, names: dict[str, Float[Array, "_v e"]], targets: Targets, *, mean: Mean = masked_mean
) -> dict[str, Float[Array, ""]]:
    """What every pixel knows of the object that it lies on: names, hidden categories, amodal box.

    `names` are projected text embeddings of each attribute's values; a pixel is compared with them by a scaled
    dot product, so no vocabulary is built into the weights.
    """
    cells = targets.modal.shape[-1] // dense.visible.shape[1]
    modal, amodal = pool_masks(targets.modal, cells), pool_masks(targets.amodal, cells)
    counts = pool_masks(targets.valid[:, None], cells)[:, 0] > 0.5
    on_object = (modal.max(1) > 0.5) & counts
    index = modal.argmax(1)
    pick = jax.vmap(lambda table, i: table[i])
    losses = {}
    for group, embeddings in names.items():
        label = pick(targets.labels[group], index)
        logits = jnp.einsum("bhwe,ve->bhwv", dense.visible, embeddings) * embeddings.shape[-1] ** -0.5
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(label, 0))
        losses[f"dense_{group}"] = mean(loss, on_object & (label >= 0))
    if "category" in names:
        embeddings, label = names["category"], targets.labels["category"]
        one_hot = jax.nn.one_hot(label, embeddings.shape[0]) * targets.amodal_known[..., None]
        hidden = jnp.einsum("bmhw,bmv->bhwv", (amodal - modal > 0.5).astype(jnp.float32), one_hot) > 0
        logits = jnp.einsum("bhwe,ve->bhwv", dense.hidden, embeddings) * embeddings.shape[-1] ** -0.5 - 4
        loss = optax.sigmoid_binary_cross_entropy(logits, hidden.astype(jnp.float32)).sum(-1)
        losses["dense_hidden"] = mean(loss, counts)
    size = dense.box.shape[1]
    centre = (jnp.arange(size) + 0.5) / size
    here = jnp.stack(jnp.meshgrid(centre, centre, indexing="xy"), -1)
    distances = pick(targets.boxes, index) - jnp.concatenate([here, here], -1)
    box_known = on_object & pick(targets.amodal_known, index)
    losses["dense_box"] = 4 * mean(jnp.abs(dense.box - distances).mean(-1), box_known)
    return losses


def instance_losses(
    kernels: Kernels,
    pixels: Float[Array, "b h w c"],
    targets: Targets,
    config: LossConfig,
    *,
    mean: Mean = masked_mean,
) -> dict[str, Float[Array, ""]]:
    """Masks of every instance from kernels [b 1 m] that were made from its own pixels, whatever the queries ask."""
    modal, amodal = (x[:, 0] for x in draw_pair(kernels, pixels))
    exists, area = targets.modal.any((-2, -1)), targets.valid[:, None]
    losses = mean(mask_loss(modal, targets.modal, area, config.masks), exists)
    known = exists & targets.amodal_known
    return {"instance": losses + mean(mask_loss(amodal, targets.amodal, area, config.masks), known)}


def total_loss(parts: dict[str, Float[Array, ""]], config: LossConfig) -> Float[Array, ""]:
    """The weighted sum that is differentiated."""
    total = parts["modal"] + parts["amodal"] + config.type * parts["type"]
    total += config.early * parts["early"]
    total += config.presence * (parts["presence"] + parts["slot_presence"]) + config.slots * parts["slots"]
    total += config.iou * (parts["iou"] + parts["slot_iou"]) + config.instance * parts["instance"]
    return total + config.dense * sum(v for k, v in parts.items() if k.startswith("dense_"))
