"""The optimizer: AdamW, or Muon for matrices with AdamW for the rest; warm-up, decay to zero,
clipping."""

from collections.abc import Hashable
from functools import lru_cache, partial
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
    warmup = min(warmup, max(1, steps // 5))
    left = max(steps - warmup, 1)
    falling = (
        optax.linear_schedule(peak, 0.0, left)
        if decay == "linear"
        else optax.cosine_decay_schedule(peak, left)
    )
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), falling], [warmup])


@lru_cache(maxsize=8)
def make_optimizer(
    config: OptimizerConfig, steps: int, matmul_precision: MatmulPrecision = "float32"
) -> optax.GradientTransformation:
    """The gradient transformation for a run of `steps` steps, the same object for equal arguments.
    Only matrices are decayed. Muon multiplies as `matmul_precision` says."""
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
    both: dict[Hashable, optax.GradientTransformation] = {"muon": muon, "adamw": adamw}
    by_kind = stacked(optax.partition(both, _labels), config.pretrained_rate)
    return optax.chain(clip, by_kind)


def stacked(
    inner: optax.GradientTransformation, pretrained_rate: float
) -> optax.GradientTransformation:
    """Treats parameters of one kind and shape as one array [n ...]: a few large operations replace
    many small ones.

    `inner` sees a dict from `_group` to these arrays. A published EfficientNet gets
    `pretrained_rate` of its updates.
    """

    def stack(tree: Any) -> dict[str, jax.Array]:
        groups: dict[str, list[jax.Array]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            groups.setdefault(_group(path, leaf), []).append(leaf)
        return {group: jnp.stack(leaves) for group, leaves in groups.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = inner.update(stack(updates), state, None if params is None else stack(params))
        arrays = cast(dict[str, jax.Array], new)
        rows = {
            g: iter(pretrained_rate * x if g.startswith("efficientnet") else x)
            for g, x in arrays.items()
        }
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: next(rows[_group(path, leaf)]), updates
        ), state

    return optax.GradientTransformation(lambda params: inner.init(stack(params)), update)


def _group(path: tuple, leaf: jax.Array) -> str:
    """What the optimizer does with a parameter, and its shape: "muon 128x128"."""
    names = {str(getattr(p, "key", getattr(p, "name", p))) for p in path}
    matrix = leaf.ndim >= 2 and not names & set(NOT_MATRICES) and min(leaf.shape[-2:]) > 1
    kind = "vector" if not matrix else "matrix" if names & set(NOT_MUON) else "muon"
    kind = "efficientnet" if "efficientnet" in names else kind
    return f"{kind} {'x'.join(map(str, leaf.shape))}"


def _labels(groups: dict[str, Any]) -> dict[str, str]:
    return {group: "muon" if group.startswith("muon") else "adamw" for group in groups}


def _is_decayed(groups: dict[str, Any]) -> dict[str, bool]:
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
