"""Dense layers, attention by hand, and the fused attention of GPUs as far as a CPU can show it;
test_gpu.py has the rest."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from r2sm_jax.models.layers import MLP, Linear, attend


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_dense_layers_take_any_leading_axes(dtype, tolerance):
    dtype = jnp.dtype(dtype)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 6)), jnp.float32)
    layer = Linear(6, 5, dtype=dtype, rngs=nnx.Rngs(0))
    out = layer(x)
    assert out.dtype == dtype
    expected = x @ layer.kernel[...] + layer.bias[...]
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=tolerance)
    assert MLP((6, 7, 2), dtype=dtype, rngs=nnx.Rngs(0))(x).shape == (2, 3, 4, 2)


def test_attention_by_hand_and_masked_keys_do_not_matter():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(n, 8)), jnp.float32) for n in (3, 5, 5))
    mask = jnp.array([True, True, True, False, False])
    out = attend(q, k, v, heads=2, mask=mask)
    for head in (slice(0, 4), slice(4, 8)):
        scores = np.exp(np.asarray(q[:, head] @ k[:3, head].T) / 2)
        expected = scores / scores.sum(1, keepdims=True) @ np.asarray(v[:3, head])
        np.testing.assert_allclose(out[:, head], expected, atol=1e-5)
    np.testing.assert_array_equal(
        out, attend(q, k.at[3:].set(99), v.at[3:].set(-99), heads=2, mask=mask)
    )


def test_bfloat16_attention_keeps_its_scores_in_float32():
    """Large scores, as those of published ViTs, rounded to bfloat16 would give an error of 0.010.
    What is left is the rounding of weights and outputs."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(48, 4 * 64)) for _ in range(3))
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in (16 * query, key, value))
    exact = attend(*(x.astype(jnp.float32) for x in (query, key, value)), heads=4)
    out = attend(query, key, value, heads=4)
    assert out.dtype == jnp.bfloat16
    error = np.asarray(out.astype(jnp.float32) - exact)
    assert np.sqrt((error**2).mean()) < 0.004 * float(exact.std())
