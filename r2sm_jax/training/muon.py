"""Muon's orthogonal updates, as `optax.contrib.scale_by_muon` makes them, with the products of cpu.py.

Ours only because optax multiplies in float32 alone: of a default step the optimizer takes 66 ms so, 24 with bfloat16
products (docs/experiments.md).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from r2sm_jax.cpu import multiply_batched, transpose_batched

POLAR_STEPS = ((8.2206, -23.3464, 16.634), (3.9642, -2.8378, 0.5158), (3.5055, -2.6266, 0.5257))
"""Coefficients of x, x³, x⁵ in three steps, each the best for the interval that the one before leaves (Polar Express,
arXiv 2505.16932, section 3): singular values between 0.003 and 1 end between 0.33 and 1.65. The first two are for
x / 1.02, or rounding to bfloat16 could lead out of the interval, where they grow."""
EPSILON = 1e-8


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Nesterov momentum of stacked matrices [n ... d], made orthogonal; all axes between are a matrix's input."""

    def orthogonalise(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda x: orthogonal(x.reshape(len(x), -1, x.shape[-1])).reshape(x.shape), updates)

    return optax.chain(optax.trace(momentum, nesterov=True), optax.stateless(orthogonalise))


def orthogonal(x: Float32[Array, "n c d"]) -> Float32[Array, "n c d"]:
    """Nearly orthogonal matrices: their singular values are near 1.

    So that none exceeds 1 at first, the shorter axis is scaled by row sums of x xᵀ (AOL, arXiv 2208.03160), as in
    optax/contrib/_muon.py.
    """
    tall = x.shape[1] > x.shape[2]
    identity = jnp.eye(min(x.shape[1:]))
    for number, (first, third, fifth) in enumerate(POLAR_STEPS):
        squared = multiply_batched(transpose_batched(x), x) if tall else multiply_batched(x, transpose_batched(x))
        if number == 0:
            scale = jax.lax.rsqrt(jnp.maximum(jnp.abs(squared).sum(1, keepdims=True), EPSILON))
            squared = squared * scale * scale.swapaxes(1, 2)
            x = x * (scale if tall else scale.swapaxes(1, 2))
        factor = first * identity + third * squared + fifth * multiply_batched(squared, squared)
        x = multiply_batched(x, factor) if tall else multiply_batched(factor, x)
    return x
