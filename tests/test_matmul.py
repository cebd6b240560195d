"""Products with bfloat16 operands: their gradients, the layers that use them, and what chooses
them."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from r2sm_jax.models import matmul
from r2sm_jax.models.layers import Linear
from r2sm_jax.models.matmul import choose_matmul_precision, multiply, set_matmul_precision


def integers(*shape: int, seed: int = 0) -> jax.Array:
    """Numbers that bfloat16 holds exactly."""
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape), jnp.float32)


@pytest.mark.parametrize("shape", [(12, 5, 7), (12, 7, 5), (1, 1, 1), (64, 32, 48)])
def test_products_and_gradients_are_exact_where_the_operands_are(shape):
    n, c, d = shape
    x, kernel, gradient = integers(n, c), integers(c, d, seed=1), integers(n, d, seed=2)
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


def test_layers_of_a_lower_precision_stay_as_they_are():
    x = integers(3, 6)
    layer = Linear(6, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    before = layer(x)
    set_matmul_precision(layer, "bfloat16")
    assert before.dtype == jnp.bfloat16
    np.testing.assert_array_equal(layer(x), before)


def test_auto_goes_by_the_flags_of_the_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(matmul, "CPUINFO", tmp_path / "cpuinfo")
    assert choose_matmul_precision() == "float32"  # there is no such file outside Linux
    for flags, precision in (
        ("fpu avx512f", "float32"),
        ("fpu avx512_bf16", "bfloat16"),
        ("amx_bf16 fpu", "bfloat16"),
    ):
        matmul.CPUINFO.write_text(f"processor : 0\nflags : {flags}\ncpu MHz : 1\n\nprocessor : 1\n")
        assert choose_matmul_precision() == precision


def test_accelerators_keep_their_own_products(monkeypatch):
    layer = Linear(6, 5, rngs=nnx.Rngs(0))
    monkeypatch.setattr(matmul.jax, "default_backend", lambda: "gpu")
    set_matmul_precision(layer, "bfloat16")
    assert cast(object, layer.dot_general) is jax.lax.dot_general
    assert choose_matmul_precision() == "tensorfloat32"
