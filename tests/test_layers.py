"""Dense layers, attention by hand, and the fused attention of GPUs as far as a CPU can show it;
test_gpu.py has the rest."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from r2sm_jax.models import layers
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


@pytest.mark.parametrize("queries", [(2, 3), (1, 3), (3,)])
def test_the_fused_attention_of_gpus_is_the_same_function(queries):
    """Here in XLA's own operations: heads, shared keys, a mask and a bias arrive where they
    should."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    query, key, value = random(*queries, 2, 4, 8), random(2, 1, 2, 6, 8), random(2, 1, 2, 6, 8)
    mask, bias = (
        jnp.asarray(rng.random((2, 3, 1, 1, 6)) < 0.7).at[..., 0].set(True),
        random(2, 1, 2, 4, 6),
    )
    for shown, added in itertools.product((None, mask), (None, bias)):
        expected = layers._attend(query, key, value, shown, added)
        actual = layers._flash(query, key, value, shown, added, implementation="xla")
        np.testing.assert_allclose(actual, jnp.broadcast_to(expected, actual.shape), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "channels", "lengths", "has_bias", "fits"),
    [
        ("bfloat16", 64, (5, 7), False, True),
        ("bfloat16", 64, (5, 8), True, False),  # odd, with a bias
        ("bfloat16", 64, (6, 8), True, True),
        ("bfloat16", 60, (6, 8), False, False),
        ("bfloat16", 136, (6, 8), False, False),
        ("float32", 64, (6, 8), False, False),
    ],
)
def test_where_the_fused_attention_of_gpus_applies(dtype, channels, lengths, has_bias, fits):
    query, key = (jnp.zeros((2, n, channels), dtype) for n in lengths)
    assert layers.fits_flash(query, key, has_bias) == fits
