"""Dense layers, attention by hand, and products with bfloat16 operands: their gradients, the layers
that use them, what chooses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from r2sm_jax.models import matmul
from r2sm_jax.models.layers import MLP, Linear, attend
from r2sm_jax.models.matmul import choose_matmul_precision, multiply, set_matmul_precision


def integers(*shape: int, seed: int = 0) -> jax.Array:
    """Numbers that bfloat16 holds exactly."""
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape), jnp.float32)


def test_products_and_gradients_are_exact_where_the_operands_are():
    x, kernel, gradient = integers(64, 32), integers(32, 48, seed=1), integers(64, 48, seed=2)
    out, backward = jax.vjp(multiply, x, kernel)
    x_gradient, kernel_gradient = backward(gradient)
    np.testing.assert_array_equal(out, x @ kernel)
    np.testing.assert_array_equal(x_gradient, gradient @ kernel.T)
    np.testing.assert_array_equal(kernel_gradient, x.T @ gradient)


def test_operands_are_rounded_and_sums_are_not():
    x = jnp.full((1, 300), 1 + 2**-10)  # 1 in bfloat16
    assert multiply(x, jnp.ones((300, 1))).item() == 300  # which bfloat16 itself does not hold


def test_a_layer_multiplies_as_it_is_set():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 6)), jnp.float32)
    layer = Linear(6, 5, rngs=nnx.Rngs(0))
    exact = layer(x)
    set_matmul_precision(layer, "float32")
    np.testing.assert_array_equal(layer(x), exact)
    set_matmul_precision(layer, "bfloat16")
    rounded = jax.jit(lambda x: layer(x))(x)
    assert rounded.dtype == jnp.float32 and rounded.shape == exact.shape
    assert 0 < float(jnp.abs(rounded - exact).max()) < 0.03


def test_auto_goes_by_the_flags_of_the_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(matmul, "CPUINFO", tmp_path / "cpuinfo")
    assert choose_matmul_precision() == "float32"  # there is no such file outside Linux
    for flags, precision in (("fpu avx512f", "float32"), ("amx_bf16 fpu", "bfloat16")):
        matmul.CPUINFO.write_text(f"processor : 0\nflags : {flags}\ncpu MHz : 1\n")
        assert choose_matmul_precision() == precision
    monkeypatch.setattr(matmul.jax, "default_backend", lambda: "gpu")
    assert choose_matmul_precision() == "tensorfloat32"


# Layers; test_gpu.py has the fused attention of GPUs.


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
