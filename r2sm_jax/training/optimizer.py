"""The optimizer: AdamW, or Muon for matrices with AdamW for the rest; warm-up, decay to zero,
clipping."""

from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from r2sm_jax.config import OptimizerConfig, VisionConfig

NOT_MATRICES = {
    *("positions", "output_tokens", "rel_pos_h", "rel_pos_w", "embedding"),
    *("class_token", "registers", "iou_token", "mask_tokens", "type_token", "no_mask"),
}
"""Parameters that have the shape of a matrix and are tables."""
NOT_MUON = {"name_projection"}
"""Modules that learn quickly anyway: orthogonal updates would only cost time."""
POLAR_STEPS = ((8.2206, -23.3464, 16.634), (3.9642, -2.8378, 0.5158), (3.5055, -2.6266, 0.5257))
"""Coefficients of x, x³, x⁵ in three steps of Muon. Each step is the best one for the interval that
the step before leaves (Polar Express, arXiv 2505.16932, section 3): singular values between 0.003
and 1 end between 0.33 and 1.65."""


def schedule(peak: float, warmup: int, steps: int, decay: str = "linear") -> optax.Schedule:
    """Builds a linear warm-up to `peak`, then a fall to zero after the last step, linearly or along
    a cosine (`OptimizerConfig.decay`)."""
    # A short run would otherwise end before its warm-up.
    warmup = min(warmup, max(1, steps // 5))
    # The first step has a rate above 0, since a step at rate 0 would be lost.
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    num_steps_left = steps - warmup + 1
    fall = optax.cosine_decay_schedule(peak, num_steps_left)
    if decay == "linear":
        fall = optax.linear_schedule(peak, 0.0, num_steps_left)
    return optax.join_schedules([rise, fall], [warmup - 1])


def make_optimizer(
    config: OptimizerConfig, steps: int, vision: VisionConfig | None = None
) -> optax.GradientTransformation:
    """Builds the gradient transformation of a run of `steps` steps.

    The published weights of `vision` are updated by AdamW at a share of its rate and not decayed,
    since large steps would destroy what they know.
    """
    rates = partial(schedule, warmup=config.warmup_steps, steps=steps, decay=config.decay)
    rate = rates(config.learning_rate)
    adamw = partial(optax.adamw, b2=config.b2)
    matrices = adamw(rate, weight_decay=config.weight_decay)
    muon = optax.chain(
        scale_by_muon(
            POLAR_STEPS,
            beta=config.momentum,
            preconditioning="aol",
            weight_dimension_numbers=_inputs_and_outputs,
        ),
        optax.add_decayed_weights(config.muon_weight_decay),
        optax.scale_by_learning_rate(rates(config.muon_learning_rate)),
    )
    optimizers: dict[Hashable, optax.GradientTransformation] = {
        "published": adamw(rates(config.pretrained_rate * config.learning_rate), weight_decay=0.0),
        "vector": adamw(rate, weight_decay=config.vector_weight_decay),
        "matrix": matrices,
        "muon": muon if config.name == "muon" else matrices,
    }
    clip = optax.clip_by_global_norm(config.clip or float("inf"))
    kinds = partial(jax.tree_util.tree_map_with_path, partial(_kind, vision))
    return optax.chain(clip, optax.partition(optimizers, kinds))


def _kind(vision: VisionConfig | None, path: tuple, parameter: jax.Array) -> str:
    """Names what a parameter is to the optimizer."""
    names = [str(getattr(part, "key", getattr(part, "name", part))) for part in path]
    is_of_sam = names[0] == "vision" and vision is not None and vision.sam is not None
    if is_of_sam or {"efficientnet", "vit"} & set(names):
        return "published"
    is_matrix = parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1
    if not is_matrix or NOT_MATRICES & set(names):
        return "vector"
    return "matrix" if NOT_MUON & set(names) else "muon"


def _inputs_and_outputs(params: Any) -> Any:
    """Tells Muon that the last axis of a kernel is its output, and all others its input."""
    return jax.tree.map(
        lambda kernel: MuonDimensionNumbers(tuple(range(kernel.ndim - 1)), kernel.ndim - 1), params
    )
