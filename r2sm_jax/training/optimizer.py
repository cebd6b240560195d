"""The optimizer: AdamW, or Muon for matrices with AdamW for the rest; warm-up, decay to zero,
clipping."""

from collections.abc import Hashable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from r2sm_jax.config import MatmulPrecision, OptimizerConfig
from r2sm_jax.models.matmul import multiply_batched, transpose_batched

NOT_MATRICES = (
    *("positions", "output_tokens", "rel_pos_h", "rel_pos_w", "embedding"),
    *("class_token", "registers", "iou_token", "mask_tokens", "type_token", "no_mask"),
)
"""Parameters that have the shape of a matrix and are tables."""
NOT_MUON = ("name_projection",)
"""Modules that learn quickly anyway: orthogonal updates would only cost time."""


def schedule(peak: float, warmup: int, steps: int, decay: str = "linear") -> optax.Schedule:
    """Linear warm-up, then linearly or along a cosine to zero at the last step."""
    # A short run would otherwise end before its warm-up.
    warmup = min(warmup, max(1, steps // 5))
    rise = optax.linear_schedule(0.0, peak, warmup)
    num_steps_left = max(steps - warmup, 1)
    fall = optax.cosine_decay_schedule(peak, num_steps_left)
    if decay == "linear":
        fall = optax.linear_schedule(peak, 0.0, num_steps_left)
    return optax.join_schedules([rise, fall], [warmup])


def make_optimizer(
    config: OptimizerConfig, steps: int, matmul_precision: MatmulPrecision = "float32"
) -> optax.GradientTransformation:
    """The gradient transformation for a run of `steps` steps. Only matrices are decayed. Muon
    multiplies as `matmul_precision` says."""
    clip = optax.clip_by_global_norm(config.clip or jnp.inf)
    adam_rate = schedule(config.learning_rate, config.warmup_steps, steps, config.decay)
    adamw = optax.adamw(adam_rate, b2=0.98, weight_decay=config.weight_decay, mask=_is_decayed)
    if config.name == "adamw":
        return optax.chain(clip, stacked(adamw, config.pretrained_rate))
    muon_rate = schedule(config.muon_learning_rate, config.warmup_steps, steps, config.decay)
    muon = optax.chain(
        scale_by_muon(config.momentum, matmul_precision),
        optax.add_decayed_weights(config.muon_weight_decay),
        optax.scale_by_learning_rate(muon_rate),
    )
    optimizers: dict[Hashable, optax.GradientTransformation] = {"muon": muon, "adamw": adamw}
    partitioned = optax.partition(optimizers, _optimizer_of_groups)
    return optax.chain(clip, stacked(partitioned, config.pretrained_rate))


def stacked(
    inner: optax.GradientTransformation, pretrained_rate: float
) -> optax.GradientTransformation:
    """Treats parameters of one kind and shape as one array [n ...]: a few large operations replace
    many small ones.

    `inner` sees a dict from `_group` to these arrays. A published EfficientNet gets
    `pretrained_rate` of its updates, since large steps would destroy what it knows.
    """

    def stack(tree: Any) -> dict[str, jax.Array]:
        groups: dict[str, list[jax.Array]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            groups.setdefault(_group(path, leaf), []).append(leaf)
        return {group: jnp.stack(leaves) for group, leaves in groups.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        stacked_params = None if params is None else stack(params)
        stacked_updates, state = inner.update(stack(updates), state, stacked_params)

        rows = {}
        for group, array in cast(dict[str, jax.Array], stacked_updates).items():
            if group.startswith("efficientnet"):
                array = pretrained_rate * array
            rows[group] = iter(array)

        # The tree is walked in the order in which `stack` walked it, so rows come back in order.
        def unstack(path: tuple, leaf: jax.Array) -> jax.Array:
            return next(rows[_group(path, leaf)])

        return jax.tree_util.tree_map_with_path(unstack, updates), state

    return optax.GradientTransformation(lambda params: inner.init(stack(params)), update)


def _group(path: tuple, leaf: jax.Array) -> str:
    """What the optimizer does with a parameter, and its shape: "muon 128x128"."""
    names = {str(getattr(p, "key", getattr(p, "name", p))) for p in path}
    is_matrix = leaf.ndim >= 2 and not names & set(NOT_MATRICES) and min(leaf.shape[-2:]) > 1
    if "efficientnet" in names:
        kind = "efficientnet"
    elif not is_matrix:
        kind = "vector"
    elif names & set(NOT_MUON):
        kind = "matrix"
    else:
        kind = "muon"
    return f"{kind} {'x'.join(map(str, leaf.shape))}"


def _optimizer_of_groups(groups: dict[str, Any]) -> dict[str, str]:
    """Which optimizer updates each group."""
    return {group: "muon" if group.startswith("muon") else "adamw" for group in groups}


def _is_decayed(groups: dict[str, Any]) -> dict[str, bool]:
    """Whether each group has weight decay."""
    return {group: not group.startswith(("vector", "efficientnet")) for group in groups}


# Muon. optax has it too (`optax.contrib.scale_by_muon`), but multiplies in float32 only: the
# optimizer then takes 66 ms of a default step, and 24 ms with bfloat16 products (docs/log.md).

POLAR_STEPS = ((8.2206, -23.3464, 16.634), (3.9642, -2.8378, 0.5158), (3.5055, -2.6266, 0.5257))
"""Coefficients of x, x³, x⁵ in three steps. Each step is the best one for the interval that the
step before leaves (Polar Express, arXiv 2505.16932, section 3): singular values between 0.003 and 1
end between 0.33 and 1.65. The first two are for x / 1.02: without that, rounding to bfloat16 could
lead out of the interval, where values grow."""
EPSILON = 1e-8


def scale_by_muon(
    momentum: float, matmul_precision: MatmulPrecision = "float32"
) -> optax.GradientTransformation:
    """Nesterov momentum of stacked matrices [n ... d], made orthogonal; all axes between are a
    matrix's input."""

    def orthogonalise(updates: Any, params: Any) -> Any:
        def update(x: Array) -> Array:
            matrices = x.reshape(len(x), -1, x.shape[-1])
            return orthogonal(matrices, matmul_precision).reshape(x.shape)

        return jax.tree.map(update, updates)

    return optax.chain(optax.trace(momentum, nesterov=True), optax.stateless(orthogonalise))


def orthogonal(
    x: Float32[Array, "n c d"], matmul_precision: MatmulPrecision = "float32"
) -> Float32[Array, "n c d"]:
    """Nearly orthogonal matrices: their singular values are near 1.

    The shorter axis is first scaled by row sums of x xᵀ, so that no singular value exceeds 1 (AOL,
    arXiv 2208.03160), as in optax/contrib/_muon.py.
    """
    # x xᵀ of the shorter axis: the smaller of the two products.
    tall = x.shape[1] > x.shape[2]
    identity = jnp.eye(min(x.shape[1:]))
    multiply = partial(multiply_batched, precision=matmul_precision)
    for number, (first, third, fifth) in enumerate(POLAR_STEPS):
        transposed = transpose_batched(x, matmul_precision)
        squared = multiply(transposed, x) if tall else multiply(x, transposed)
        if number == 0:
            scale = jax.lax.rsqrt(jnp.maximum(jnp.abs(squared).sum(1, keepdims=True), EPSILON))
            squared = squared * scale * scale.swapaxes(1, 2)
            x = x * (scale if tall else scale.swapaxes(1, 2))
        factor = first * identity + third * squared + fifth * multiply(squared, squared)
        x = multiply(x, factor) if tall else multiply(factor, x)
    return x
