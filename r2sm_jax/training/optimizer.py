"""The optimizer: AdamW, or Muon for matrices with AdamW for the rest; warm-up, decay to zero, clipping."""

from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from r2sm_jax.config import OptimizerConfig
from r2sm_jax.training.muon import scale_by_muon

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
    adamw = optax.adamw(adam_rate, b2=0.98, weight_decay=config.weight_decay, mask=_is_decayed)
    if config.name == "adamw":
        return optax.chain(optax.clip_by_global_norm(config.clip), stacked(adamw))
    muon_rate = schedule(config.muon_learning_rate, config.warmup_steps, steps, config.decay)
    muon = optax.chain(
        scale_by_muon(config.momentum),
        optax.add_decayed_weights(config.muon_weight_decay),
        optax.scale_by_learning_rate(muon_rate),
    )
    both: dict[Hashable, optax.GradientTransformation] = {"muon": muon, "adamw": adamw}
    return optax.chain(optax.clip_by_global_norm(config.clip), stacked(optax.partition(both, _labels)))


def stacked(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Serves parameters of one kind and shape as one array [n ...]: few large operations in place of many small ones.

    `inner` sees a dict from `_group` to these arrays.
    """

    def stack(tree: Any) -> dict[str, jax.Array]:
        groups: dict[str, list[jax.Array]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            groups.setdefault(_group(path, leaf), []).append(leaf)
        return {group: jnp.stack(leaves) for group, leaves in groups.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = inner.update(stack(updates), state, None if params is None else stack(params))
        rows = {group: iter(array) for group, array in cast(dict[str, jax.Array], new).items()}
        return jax.tree_util.tree_map_with_path(lambda path, leaf: next(rows[_group(path, leaf)]), updates), state

    return optax.GradientTransformation(lambda params: inner.init(stack(params)), update)


def _group(path: tuple, leaf: jax.Array) -> str:
    """What the optimizer does with a parameter, and its shape: "muon 128x128"."""
    names = {str(getattr(p, "key", getattr(p, "name", p))) for p in path}
    matrix = leaf.ndim >= 2 and not names & set(NOT_MATRICES) and min(leaf.shape[-2:]) > 1
    kind = "vector" if not matrix else "matrix" if names & set(NOT_MUON) else "muon"
    return f"{kind} {'x'.join(map(str, leaf.shape))}"


def _labels(groups: dict[str, Any]) -> dict[str, str]:
    """Which optimizer serves each group."""
    return {group: "muon" if group.startswith("muon") else "adamw" for group in groups}


def _is_decayed(groups: dict[str, Any]) -> dict[str, bool]:
    """AdamW decays matrices only."""
    return {group: not group.startswith("vector") for group in groups}
