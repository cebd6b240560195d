"""The losses, the optimizer and the training step of scripts/torch_peer.py, in PyTorch.

Formulas, names and order are those of r2sm_jax/training, for the configuration that `unsupported` allows.
"""

import math
from collections.abc import Callable, Iterable
from itertools import permutations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_layers import add_places, pool
from torch_peer import Outputs, Peer, draw_pair

if TYPE_CHECKING:
    from r2sm_jax.config import Config, LossConfig, OptimizerConfig
else:
    Config = LossConfig = OptimizerConfig = SimpleNamespace

Batch = dict[str, Any]
FUSED, SLOTS = slice(0, 1), slice(1, None)
CELLS = 2
NOT_MATRICES, NOT_MUON = {"positions", "output_tokens"}, {"dense_names"}
POLAR_STEPS = ((8.2206, -23.3464, 16.634), (3.9642, -2.8378, 0.5158), (3.5055, -2.6266, 0.5257))
"""As in r2sm_jax/training/optimizer.py."""


def unsupported(config: Config) -> str | None:
    """What of a training configuration this file does not have; None where it has everything."""
    missing = {
        "--loss.masks": config.loss.masks != "mask2former",
        "--loss.supervise": config.loss.supervise != "both",
        "--optimizer.name": config.optimizer.name != "muon",
        "--data.cache-features": config.data.cache_features is not None,
        "more than 6 slots": config.model.decoder.slots > 6,
    }
    return next((flag for flag, found in missing.items() if found), None)


# Losses of single masks


def dice_loss(logits: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """1 - dice of each mask, smoothed by one cell; 0 for empty targets."""
    probability, target = logits.sigmoid() * valid, target * valid
    overlap, size = (probability * target).sum((-2, -1)), target.sum((-2, -1))
    return torch.where(size > 0, 1 - (2 * overlap + 1) / (probability.sum((-2, -1)) + size + 1), 0)


def mask_loss(logits: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """5 BCE + 5 dice of each mask."""
    entropy = (F.binary_cross_entropy_with_logits(logits, target, reduction="none") * valid).sum((-2, -1))
    return 5 * entropy / valid.sum((-2, -1)).clamp(min=1) + 5 * dice_loss(logits, target, valid)


@torch.no_grad()
def soft_iou(logits: Tensor, target: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """IoU of the thresholded mask with the thresholded target; 1 for two empty masks."""
    inside = valid > 0.5
    predicted, wanted = (logits > threshold) & inside, (target > 0.5) & inside
    union = (predicted | wanted).sum((-2, -1))
    return torch.where(union > 0, (predicted & wanted).sum((-2, -1)) / union.clamp(min=1), 1.0)


def iou_error(predicted: Tensor, drawn: Iterable[Tensor], truth: Iterable[Tensor], valid: Tensor, threshold: float):
    """Squared error of the predicted IoUs [... 2] of a modal and an amodal mask."""
    iou = [soft_iou(logits, target, valid, threshold) for logits, target in zip(drawn, truth, strict=True)]
    return (predicted - torch.stack(iou, dim=-1)) ** 2


def pool_masks(coverage: Tensor) -> Tensor:
    """Coverage [b m h w] at half the resolution."""
    return F.avg_pool2d(coverage, CELLS)


def pick(table: Tensor, index: Tensor) -> Tensor:
    """Rows of table [b m ...] by index [b ...]."""
    rows = torch.arange(len(table)).view(-1, *[1] * (index.ndim - 1))
    return table[rows, index]


# Losses of a batch


class Targets(NamedTuple):
    """The truth of a batch, as `Targets` of r2sm_jax."""

    modal: Tensor
    amodal: Tensor
    valid: Tensor
    coarse: tuple[Tensor, Tensor]
    """Modal and amodal masks at half the resolution."""
    coarse_valid: Tensor
    fused: tuple[Tensor, Tensor]
    """Union of the instances that each query means."""


def make_targets(batch: Batch) -> Targets:
    """Coverages in float32."""
    modal, amodal, valid = (batch[name].float() / 255 for name in ("modal", "amodal", "loss_valid"))
    members, h = batch["members"].float(), modal.shape[-1]
    fused = [(members @ x.flatten(2)).clamp(max=1).unflatten(2, (-1, h)) for x in (modal, amodal)]
    coarse = pool_masks(modal), pool_masks(amodal)
    return Targets(modal, amodal, valid, coarse, pool_masks(valid[:, None])[:, 0], (fused[0], fused[1]))


def entry_weights(batch: Batch, targets: Targets) -> dict[str, Tensor]:
    """The weight of every entry of every loss in the mean of the batch."""
    valid, known_amodal, slots = batch["query_valid"], batch["amodal_known"], batch["slots"]
    known = valid & ~(batch["members"] & ~known_amodal[:, None]).any(-1)
    in_slot = (slots >= 0) & valid[..., None]
    slot_amodal = in_slot & pick(known_amodal, slots.clamp(min=0).long())
    instance, inside = (targets.modal > 0).flatten(2).any(-1), targets.coarse_valid > 0.5
    most, index = targets.coarse[0].max(1)
    on_object = (most > 0.5) & inside
    counted = {
        "modal": valid, "amodal": known, "early_modal": valid, "early_amodal": known,
        "iou": torch.stack([valid, known], -1), "presence": valid, "type": batch["type_valid"],
        "slots_modal": in_slot, "slots_amodal": slot_amodal, "slot_iou": torch.stack([in_slot, slot_amodal], -1),
        "slot_presence": valid[..., None].expand(in_slot.shape),
        "instance_modal": instance, "instance_amodal": instance & known_amodal,
        "dense_box": on_object & pick(known_amodal, index),
    }  # fmt: skip
    counted |= {f"dense_{group}": on_object & (pick(x, index) >= 0) for group, x in batch["labels"].items()}
    counted |= {"dense_hidden": inside} if "category" in batch["labels"] else {}
    return {name: entries / entries.sum().clamp(min=1) for name, entries in counted.items()}


def query_losses(outputs: Outputs, coarse: Tensor, batch: Batch, targets: Targets, threshold: float):
    """Losses of the fused masks and their scores, and of the masks of earlier blocks at half the resolution."""
    masks, area = outputs.masks, targets.valid[:, None]
    drawn = [x[:, :, 0] for x in draw_pair(masks.kernels.of(FUSED), outputs.canvas)]
    with torch.no_grad():
        answered = [x[:, :, 0] for x in draw_pair(outputs.second.of(FUSED), outputs.canvas)]
    has_target = batch["members"].any(-1).float()
    values = {
        name: mask_loss(x, truth, area)
        for name, x, truth in zip(("modal", "amodal"), drawn, targets.fused, strict=True)
    }
    values["presence"] = F.binary_cross_entropy_with_logits(masks.presence[:, :, 0], has_target, reduction="none")
    values["iou"] = iou_error(masks.iou[:, :, 0], answered, targets.fused, area, threshold)
    truth, area = [pool_masks(x) for x in targets.fused], targets.coarse_valid[:, None]
    values["early_modal"] = values["early_amodal"] = torch.zeros_like(has_target)
    for kernels in masks.early:
        for name, x, wanted in zip(("modal", "amodal"), draw_pair(kernels.of(FUSED), coarse), truth, strict=True):
            loss = mask_loss(x[:, :, 0], wanted, area)
            values[f"early_{name}"] = values[f"early_{name}"] + loss / len(masks.early)
    return values


@torch.no_grad()
def match_slots(logits: Tensor, target: Tensor, area: Tensor, presence: Tensor, exists: Tensor) -> Tensor:
    """The slot [b k r] of every target, by the dice loss and the presence of amodal masks. All assignments of so few
    slots are tried."""
    probability, target = (logits.sigmoid() * area).flatten(3), (target * area).flatten(3)
    sizes = probability.sum(-1)[..., :, None] + target.sum(-1)[..., None, :]
    cost = 1 - (2 * (probability @ target.mT) + 1) / (sizes + 1) - 0.5 * presence[..., None].sigmoid()
    cost = torch.where(exists[..., None, :], cost, 0)
    count = cost.shape[-1]
    ways = torch.tensor(list(permutations(range(count))))
    return ways[cost[..., ways, torch.arange(count)].sum(-1).argmin(-1)]


def slot_losses(outputs: Outputs, coarse: Tensor, batch: Batch, targets: Targets, threshold: float):
    """Instance masks at half the resolution: every target is matched to a slot, the other slots learn absence."""
    masks, presence = outputs.masks, outputs.masks.presence[:, :, 1:]
    exists = (batch["slots"] >= 0) & batch["query_valid"][..., None]
    instance = batch["slots"].clamp(min=0).long()
    truth = [pick(x, instance) for x in targets.coarse]
    area = targets.coarse_valid[:, None, None]
    drawn = draw_pair(masks.kernels.of(SLOTS), coarse)
    slot = match_slots(drawn[1], truth[1], area, presence, exists)
    rows = (torch.arange(slot.shape[0] * slot.shape[1])[:, None] * slot.shape[2] + slot.flatten(0, 1)).flatten()

    def matched(x: Tensor) -> Tensor:
        return x.flatten(0, 2).index_select(0, rows).view(x.shape)

    drawn = [matched(x) for x in drawn]
    with torch.no_grad():
        answered = [matched(x) for x in draw_pair(outputs.second.of(SLOTS), coarse)]
    has_target = (F.one_hot(slot, slot.shape[-1]) * exists[..., None]).sum(-2).float()
    return {
        "slots_modal": mask_loss(drawn[0], truth[0], area),
        "slots_amodal": mask_loss(drawn[1], truth[1], area),
        "slot_presence": F.binary_cross_entropy_with_logits(presence, has_target, reduction="none"),
        "slot_iou": iou_error(matched(masks.iou[:, :, 1:]), answered, truth, area, threshold),
    }


def dense_losses(outputs: Outputs, batch: Batch, targets: Targets) -> dict[str, Tensor]:
    """What every pixel says: names of its object, categories hidden here, its amodal box."""
    modal, amodal = targets.coarse
    e, index = outputs.names["category"].shape[-1], modal.argmax(1)
    visible, hidden, box = outputs.dense.split([e, e, 4], dim=-1)
    values = {}
    for group, embeddings in outputs.names.items():
        label = pick(batch["labels"][group], index).clamp(min=0).long()
        logits = visible @ embeddings.T * e**-0.5
        entropy = F.cross_entropy(logits.flatten(0, 2), label.flatten(), reduction="none")
        values[f"dense_{group}"] = entropy.view(label.shape)
    embeddings, category = outputs.names["category"], batch["labels"]["category"].long()
    known = (batch["amodal_known"] & (category >= 0)).float()[..., None]
    one_hot = F.one_hot(category.clamp(min=0), len(embeddings)) * known
    there = (amodal - modal > 0.5).float().flatten(2).mT @ one_hot > 0
    logits = hidden @ embeddings.T * e**-0.5 - 4
    truth = there.view(logits.shape).float()
    values["dense_hidden"] = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum(-1)
    centre = (torch.arange(box.shape[1]) + 0.5) / box.shape[1]
    here = torch.stack(torch.meshgrid(centre, centre, indexing="xy"), -1)
    distances = pick(batch["boxes"], index) - torch.cat([here, here], -1)
    values["dense_box"] = 4 * (box - distances).abs().mean(-1)
    return values


def compute_losses(model: Peer, batch: Batch, names: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The mean of every loss and "loss", their weighted sum, which is differentiated."""
    targets, weigh, threshold = make_targets(batch), config.loss, config.model.mask_threshold
    outputs = model(batch, names, targets.modal)
    with torch.autocast("cpu", enabled=False):
        coarse = add_places(pool(outputs.canvas[..., :-4], CELLS))
        target = batch["type_amodal"] * (1 - 2 * weigh.type_smoothing) + weigh.type_smoothing
        readings = outputs.type_readings
        entropy = F.binary_cross_entropy_with_logits(readings, target.expand(readings.shape), reduction="none")
        drawn = [x[:, 0] for x in draw_pair(outputs.instances, outputs.canvas)]
        values = {
            **query_losses(outputs, coarse, batch, targets, threshold),
            **slot_losses(outputs, coarse, batch, targets, threshold),
            "instance_modal": mask_loss(drawn[0], targets.modal, targets.valid[:, None]),
            "instance_amodal": mask_loss(drawn[1], targets.amodal, targets.valid[:, None]),
            **dense_losses(outputs, batch, targets),
            "type": entropy.mean(0),
        }
        weights = entry_weights(batch, targets)
        means = {name: (value * weights[name]).sum() for name, value in values.items()}
        for name in ("early", "slots", "instance"):
            means[name] = means.pop(f"{name}_modal") + means.pop(f"{name}_amodal")
        total = means["modal"] + means["amodal"] + weigh.type * means["type"] + weigh.early * means["early"]
        total = total + weigh.presence * (means["presence"] + means["slot_presence"]) + weigh.slots * means["slots"]
        total = total + weigh.iou * (means["iou"] + means["slot_iou"]) + weigh.instance * means["instance"]
        dense = torch.stack([mean for name, mean in means.items() if name.startswith("dense_")]).sum()
        return means | {"loss": total + weigh.dense * dense}


# The optimizer


def orthogonal(x: Tensor) -> Tensor:
    """Nearly orthogonal matrices [n out in], as `orthogonal` of r2sm_jax/training/optimizer.py."""
    tall = x.shape[1] < x.shape[2]
    identity = torch.eye(min(x.shape[1:]), dtype=x.dtype)
    for number, (first, third, fifth) in enumerate(POLAR_STEPS):
        squared = x @ x.mT if tall else x.mT @ x
        if number == 0:
            scale = squared.abs().sum(1, keepdim=True).clamp(min=1e-8).rsqrt()
            squared = squared * scale * scale.mT
            x = x * (scale.mT if tall else scale)
        factor = torch.baddbmm(first * identity + third * squared, squared, squared, alpha=fifth)
        x = factor @ x if tall else x @ factor
    return x


class Muon(torch.optim.Optimizer):
    """Muon of r2sm_jax: as torch.optim.Muon, but with its coefficients, and all matrices of one shape at once."""

    def __init__(self, params: Any, *, lr: float, momentum: float, weight_decay: float, dtype: torch.dtype):
        """`dtype`: of the products."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  (ours takes no closure)
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                grads: Any = [p.grad for p in params]
                traces = [self.state[p].setdefault("trace", torch.zeros_like(p)) for p in params]
                torch._foreach_mul_(traces, group["momentum"])
                torch._foreach_add_(traces, grads)
                nesterov = torch._foreach_add(grads, traces, alpha=group["momentum"])
                stacked = torch.stack([x.flatten(1) for x in nesterov]).to(group["dtype"])
                updates = orthogonal(stacked).float().view(-1, *shape)
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(updates), alpha=-group["lr"])


def schedule(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """The share of the peak rate at each step."""
    warmup = min(config.warmup_steps, max(1, steps // 5))
    left = max(steps - warmup, 1)

    def share(step: int) -> float:
        if step < warmup:
            return step / warmup
        done = min((step - warmup) / left, 1.0)
        return 1 - done if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    return share


class Trainer:
    """A model, its optimizer and the compiled or eager training step."""

    def __init__(self, model: Peer, config: Config, *, dtype: torch.dtype = torch.float32, compiled: bool = False):
        """`dtype`: bfloat16 = autocast, and Muon's products in bfloat16."""
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  (torch's stubs lack it)
        self.model, self.config, self.dtype = model, config, dtype
        self.losses = torch.compile(compute_losses, fullgraph=True) if compiled else compute_losses
        kinds: dict[str, list[nn.Parameter]] = {"muon": [], "matrix": [], "vector": []}
        for name, p in model.named_parameters():
            parts = set(name.split("."))
            matrix = p.ndim >= 2 and not parts & NOT_MATRICES and min(p.shape[:2]) > 1
            kinds["vector" if not matrix else "matrix" if parts & NOT_MUON else "muon"].append(p)
        tune, steps = config.optimizer, config.train.steps
        decayed = {"params": kinds["matrix"], "weight_decay": tune.weight_decay}
        groups = [decayed, {"params": kinds["vector"], "weight_decay": 0.0}]
        options = {"momentum": tune.momentum, "weight_decay": tune.muon_weight_decay, "dtype": dtype}
        self.optimizers = [
            torch.optim.AdamW(groups, lr=tune.learning_rate, betas=(0.9, 0.98), fused=True),
            Muon(kinds["muon"], lr=tune.muon_learning_rate, **options),
        ]
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(x, schedule(tune, steps)) for x in self.optimizers]

    def step(self, batch: Batch, names: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step; returns all losses."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            means = self.losses(self.model, batch, names, self.config)
        means["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return {name: mean.detach() for name, mean in means.items()}
