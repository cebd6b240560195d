"""What is specific to one kind of processor: products with bfloat16 operands, and memory that
commands keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from r2sm_jax.models import matmul as module
from r2sm_jax.models.layers import Conv, Linear
from r2sm_jax.models.matmul import (
    are_bfloat16,
    choose_matmul_precision,
    convolve,
    multiply,
    products,
)


def rounded(*shape: int, seed: int = 0) -> jax.Array:
    """Numbers that bfloat16 holds exactly."""
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape), jnp.float32)


def xla_convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize("shape", [(12, 5, 7), (12, 7, 5), (1, 1, 1), (64, 32, 48)])
def test_a_product_and_its_gradients_are_exact_where_the_operands_are(shape):
    n, c, d = shape
    x, kernel, gradient = rounded(n, c), rounded(c, d, seed=1), rounded(n, d, seed=2)
    out, back = jax.vjp(multiply, x, kernel)
    np.testing.assert_array_equal(out, x @ kernel)
    for ours, true in zip(back(gradient), (gradient @ kernel.T, x.T @ gradient), strict=True):
        np.testing.assert_array_equal(ours, true)


@pytest.mark.parametrize("shape", [(2, 5, 4, 3, 6), (1, 1, 1, 2, 2), (2, 8, 8, 16, 8)])
def test_a_convolution_and_its_gradients_are_exact_where_the_operands_are(shape):
    b, h, w, c, d = shape
    x, kernel, gradient = (
        rounded(b, h, w, c),
        rounded(3, 3, c, d, seed=1),
        rounded(b, h, w, d, seed=2),
    )
    out, back = jax.vjp(convolve, x, kernel)
    true, true_back = jax.vjp(xla_convolve, x, kernel)
    np.testing.assert_array_equal(out, true)
    for ours, theirs in zip(back(gradient), true_back(gradient), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_operands_are_rounded_and_sums_are_not():
    x = jnp.full((1, 300), 1 + 2**-10)  # 1 in bfloat16
    assert multiply(x, jnp.ones((300, 1))).item() == 300  # which bfloat16 itself does not hold
    assert convolve(x[:, None, None, :], jnp.ones((3, 3, 300, 1))).item() == 300


LAYERS = [Linear(6, 5, rngs=nnx.Rngs(0)), Conv(6, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_multiply_as_the_context_says(layer):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 6)), jnp.float32)
    before = layer(x)
    with products("bfloat16"):
        assert are_bfloat16()
        within = jax.jit(lambda x: layer(x))(x)
    assert within.dtype == jnp.float32 and within.shape == before.shape
    difference = float(jnp.abs(within - before).max())
    assert 0 < difference < 0.03
    np.testing.assert_array_equal(layer(x), before)


def test_lower_precision_layers_stay_as_they_are():
    layer = Linear(6, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with products("bfloat16"):
        assert layer(jnp.ones((3, 6))).dtype == jnp.bfloat16


def test_auto_goes_by_the_flags_of_the_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")
    assert choose_matmul_precision() == "float32"  # there is no such file outside Linux
    for flags, kind in (
        ("fpu avx512f", "float32"),
        ("fpu avx512_bf16", "bfloat16"),
        ("amx_bf16 fpu", "bfloat16"),
    ):
        module.CPUINFO.write_text(f"processor : 0\nflags : {flags}\ncpu MHz : 1\n\nprocessor : 1\n")
        assert choose_matmul_precision() == kind
    monkeypatch.setattr(module.jax, "default_backend", lambda: "gpu")
    assert choose_matmul_precision() == "tensorfloat32"


def test_accelerators_get_none_of_the_products_of_cpus(monkeypatch):
    monkeypatch.setattr(module.jax, "default_backend", lambda: "gpu")
    with products("bfloat16"):
        assert not are_bfloat16()


@pytest.mark.parametrize("layer", LAYERS)
def test_no_setting_of_jax_changes_an_answer(layer):
    """The setting is what the environment variable JAX_DEFAULT_MATMUL_PRECISION sets."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 6)), jnp.float32)
    before = layer(x)
    with jax.default_matmul_precision("bfloat16"):
        assert not are_bfloat16()
        np.testing.assert_array_equal(jax.jit(lambda x: layer(x))(x), before)


# Memory that commands keep.
