"""How layers multiply matrices: in float32, TensorFloat-32, or bfloat16 with float32 sums.

Some CPUs multiply bfloat16 numbers and add the results in float32 faster than they multiply float32
numbers: those with matrix units (AMX) in down to a sixth of the time, those with AVX512-BF16 in
half of it (docs/log.md). No setting of JAX makes XLA do so on CPUs, so dense layers get a product
of our own there (`set_matmul_precision`), and Muon calls it too. Convolutions and attention stay
float32: rounded convolutions made no step faster.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, BFloat16, Float, Float32

from r2sm_jax.config import MatmulPrecision

CPUINFO = Path("/proc/cpuinfo")
"""Exists on Linux; says what the processor can do."""
FAST_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16"}
"""Flags of CPUs that multiply bfloat16 numbers faster. They are not measured, so that equal hosts
choose the same."""
JAX_PRECISION = {"float32": "float32", "tensorfloat32": "tensorfloat32", "bfloat16": "default"}
"""What `jax.default_matmul_precision` takes for each of our names. It has an effect on accelerators
only. Our `bfloat16` is JAX's `default` there: TensorFloat-32 on GPUs, bfloat16 on TPUs."""


def choose_matmul_precision() -> MatmulPrecision:
    """What `auto` stands for on this machine: tensorfloat32 on an accelerator, bfloat16 on a CPU
    that is fast at it, else float32."""
    if jax.default_backend() != "cpu":
        return "tensorfloat32"
    flags = CPUINFO.read_text("utf-8").split() if CPUINFO.exists() else []
    return "bfloat16" if FAST_BFLOAT16_FLAGS & set(flags) else "float32"


def set_matmul_precision(model: nnx.Module, precision: MatmulPrecision) -> None:
    """Sets how the dense layers of a merged model multiply, in place, through flax's `dot_general`.

    Only bfloat16 on a CPU needs it. All else follows `jax.default_matmul_precision`, so callers
    trace the model within that, with `JAX_PRECISION`.
    """
    if not rounds_on_cpu(precision):
        return
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Linear):
            layer.dot_general = bfloat16_dot_general


def rounds_on_cpu(precision: MatmulPrecision) -> bool:
    """Whether products are computed by the functions below."""
    return precision == "bfloat16" and jax.default_backend() == "cpu"


def bfloat16_dot_general(
    x: Float[Array, "n c"],
    kernel: Float[Array, "c d"],
    dimension_numbers: Any,
    precision: Any = None,
    **options: Any,
) -> Float[Array, "n d"]:
    """`jax.lax.dot_general` of two matrices. It rounds float32 operands; layers of a lower type
    multiply as ever."""
    if x.dtype == jnp.float32 and kernel.dtype == jnp.float32:
        return multiply(x, kernel)
    return jax.lax.dot_general(x, kernel, dimension_numbers, precision, **options)


@jax.custom_vjp
def multiply(x: Float32[Array, "n c"], kernel: Float32[Array, "c d"]) -> Float32[Array, "n d"]:
    """`x @ kernel` with operands rounded to bfloat16. Both gradients are such products too."""
    product, _ = _multiply_forward(x, kernel)
    return product


def _multiply_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    x = x.astype(jnp.bfloat16)
    kernel = kernel.astype(jnp.bfloat16)
    return _product(x, kernel), (x, kernel)


def _multiply_backward(
    operands: tuple[Array, Array], gradient: Float32[Array, "n d"]
) -> tuple[Array, Array]:
    x, kernel = operands
    gradient = gradient.astype(jnp.bfloat16)
    # A transposition copies the operand, so the narrower of the two is transposed.
    if x.shape[1] <= gradient.shape[1]:
        kernel_gradient = _product(_transpose(x), gradient)
    else:
        kernel_gradient = _product(_transpose(gradient), x).T
    return _product(gradient, _transpose(kernel)), kernel_gradient


multiply.defvjp(_multiply_forward, _multiply_backward)


def multiply_batched(
    x: Float[Array, "n c d"], y: Float[Array, "n d e"], precision: MatmulPrecision
) -> Float32[Array, "n c e"]:
    """`x @ y` of stacked matrices. It has no gradient."""
    if rounds_on_cpu(precision):
        return _product(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))
    return x @ y


def transpose_batched(
    x: Float32[Array, "n c d"], precision: MatmulPrecision
) -> Float[Array, "n d c"]:
    """Each matrix transposed, as an operand of `multiply_batched`."""
    if rounds_on_cpu(precision):
        return _transpose(x.astype(jnp.bfloat16))
    return x.swapaxes(1, 2)


def _product(
    a: BFloat16[Array, "*n c d"], b: BFloat16[Array, "*n d e"]
) -> Float32[Array, "*n c e"]:
    # The barriers stop XLA from merging a transposition into the product. Such a product reads its
    # operands one number at a time or, in jaxlib 0.10, does not run at all.
    a, b = jax.lax.optimization_barrier((a, b))
    return jax.lax.optimization_barrier(jnp.matmul(a, b, preferred_element_type=jnp.float32))


def _transpose(x: Array) -> Array:
    """A transposed copy, not another view of the same memory."""
    return with_layout_constraint(x.swapaxes(-1, -2), Layout(tuple(range(x.ndim))))
