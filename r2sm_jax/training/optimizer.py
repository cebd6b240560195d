"""The optimizer: AdamW, or Muon for matrices with AdamW for the rest; warm-up, decay to zero, clipping."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and schedule."""

    name: Literal["muon", "adamw"] = "muon"
    """`muon` orthogonalises the update of every matrix (optax.contrib.muon) in three steps, see `POLAR_STEPS`."""
    learning_rate: float = 1e-3
    """Peak rate of AdamW, which also serves vectors and embeddings under Muon."""
    muon_learning_rate: float = 0.03
    """Peak rate of Muon's matrices."""
    weight_decay: float = 0.1
    """Of AdamW's matrices."""
    muon_weight_decay: float = 0.01
    momentum: float = 0.9
    """Of Muon."""
    warmup_steps: int = 30
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of the rates' way from their peak to zero at the last step."""
    clip: float = 1.0
    """Largest global gradient norm."""


POLAR_STEPS = ((8.385, -24.7754, 18.3653), (4.0435, -3.0115, 0.5695), (3.5055, -2.6266, 0.5257))
"""Coefficients of x, x³, x⁵ in Muon's three steps, each the best for the interval that the one before leaves (Polar
Express, arXiv 2505.16932, section 3): singular values between 0.003 and 1 end between 0.35 and 1.65."""
NOT_MATRICES = (
    *("positions", "output_tokens", "rel_pos_h", "rel_pos_w", "embedding"),
    *("class_token", "registers", "iou_token", "mask_tokens", "type_token", "no_mask"),
)
"""Parameters that look like matrices and are tables."""
NOT_MUON = ("dense_names",)
"""Modules that learn quickly anyway; orthogonalising their updates would only cost time."""


def schedule(peak: float, warmup: int, steps: int, decay: str = "linear") -> optax.Schedule:
    """Linear warm-up, then linearly or along a cosine to zero at the last step."""
    warmup = min(warmup, max(1, steps // 5))
    left = max(steps - warmup, 1)
    falling = optax.linear_schedule(peak, 0.0, left) if decay == "linear" else optax.cosine_decay_schedule(peak, left)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), falling], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The gradient transformation for a run of `steps` steps. Only matrices are decayed."""
    adam_rate = schedule(config.learning_rate, config.warmup_steps, steps, config.decay)
    adamw = optax.adamw(adam_rate, b2=0.98, weight_decay=config.weight_decay, mask=_is_matrix)
    if config.name == "adamw":
        return optax.chain(optax.clip_by_global_norm(config.clip), adamw)
    muon_rate = schedule(config.muon_learning_rate, config.warmup_steps, steps, config.decay)
    muon = optax.chain(
        optax.contrib.scale_by_muon(
            ns_coeffs=POLAR_STEPS,
            ns_steps=len(POLAR_STEPS),
            preconditioning="aol",
            beta=config.momentum,
            weight_dimension_numbers=_dimensions,
        ),
        optax.add_decayed_weights(config.muon_weight_decay),
        optax.scale_by_learning_rate(muon_rate),
    )
    both: dict[Hashable, optax.GradientTransformation] = {"muon": muon, "adamw": adamw}
    return optax.chain(optax.clip_by_global_norm(config.clip), optax.partition(both, _labels))


def _is_matrix(params: nnx.State, except_in: tuple[str, ...] = NOT_MATRICES) -> nnx.State:
    """True at kernels of dense layers and convolutions whose path has none of the names `except_in`."""

    def is_matrix(path: tuple, leaf: jax.Array) -> bool:
        names = [str(getattr(p, "key", getattr(p, "name", p))) for p in path]
        return leaf.ndim >= 2 and not set(names) & set(except_in) and min(leaf.shape[-2:]) > 1

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _labels(params: nnx.State) -> nnx.State:
    """Which optimizer serves each parameter."""
    return jax.tree.map(lambda m: "muon" if m else "adamw", _is_matrix(params, NOT_MATRICES + NOT_MUON))


def _dimensions(params: Any) -> Any:
    """All axes but the last are a matrix's input."""
    return jax.tree.map(lambda p: MuonDimensionNumbers(tuple(range(p.ndim - 1)), p.ndim - 1), params)
