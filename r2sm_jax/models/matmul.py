"""What is specific to one kind of processor: how training multiplies, and how a command on Linux
keeps its memory.

Some CPUs multiply bfloat16 numbers and add the results in float32 faster than they multiply float32
numbers: those with matrix units (AMX) in down to a sixth of the time, those with AVX512-BF16 in
half of it (docs/log.md). `products("bfloat16")` turns this on for dense layers, 3x3 convolutions
and Muon. All else stays float32. No setting of JAX and no environment variable changes it.
"""

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.backend import get_backend
from jaxtyping import Array, BFloat16, Float, Float32

from r2sm_jax.config import MatmulPrecision

CPUINFO = Path("/proc/cpuinfo")
"""Exists on Linux; says what the processor can do."""
FASTER = {"amx_bf16", "avx512_bf16"}
"""Flags of CPUs that multiply bfloat16 numbers faster. They are not measured, so that equal hosts
choose the same."""
PRECISIONS = {"float32": "float32", "tensorfloat32": "tensorfloat32", "bfloat16": "default"}
"""JAX's precision for all other products; on a CPU each of them is float32. They differ, so that
JAX traces a function anew where it was traced under another kind of products before."""

_bfloat16: ContextVar[bool] = ContextVar("bfloat16", default=False)


def choose_matmul_precision() -> MatmulPrecision:
    """The products that `auto` stands for on this machine: tensorfloat32 on an accelerator; on a
    CPU bfloat16 if it is one of `FASTER`, else float32."""
    if jax.default_backend() != "cpu":
        return "tensorfloat32"
    flags = CPUINFO.read_text("utf-8").split() if CPUINFO.exists() else []
    return "bfloat16" if FASTER & set(flags) else "float32"


def on_cuda() -> bool:
    """Whether JAX computes on NVIDIA's GPUs unless told otherwise."""
    return jax.default_backend() == "gpu" and "cuda" in get_backend().platform_version


@contextmanager
def products(kind: MatmulPrecision) -> Iterator[None]:
    """Whatever is traced within multiplies as `kind` says, whatever JAX's own default precision is.

    A compiled function does not see this setting change. So enter it inside the function that is
    compiled. On accelerators `bfloat16` stands for JAX's default precision: tensorfloat32 on GPUs,
    bfloat16 on TPUs.
    """
    token = _bfloat16.set(kind == "bfloat16" and jax.default_backend() == "cpu")
    try:
        with jax.default_matmul_precision(PRECISIONS[kind]):
            yield
    finally:
        _bfloat16.reset(token)


def are_bfloat16() -> bool:
    """Whether `products("bfloat16")` is in force."""
    return _bfloat16.get()


@jax.custom_vjp
def multiply(x: Float32[Array, "n c"], kernel: Float32[Array, "c d"]) -> Float32[Array, "n d"]:
    """`x @ kernel` with operands rounded to bfloat16. Both gradients are such products too."""
    return _rounded(_product, x, kernel)[0]


def _multiply_backward(
    operands: tuple[Array, Array], gradient: Float32[Array, "n d"]
) -> tuple[Array, Array]:
    x, kernel = operands
    gradient = gradient.astype(jnp.bfloat16)
    if x.shape[1] <= gradient.shape[1]:  # transpose the narrower one
        kernel_gradient = _product(_transpose(x), gradient)
    else:
        kernel_gradient = _product(_transpose(gradient), x).T
    return _product(gradient, _transpose(kernel)), kernel_gradient


multiply.defvjp(lambda x, kernel: _rounded(_product, x, kernel), _multiply_backward)


def multiply_batched(x: Float[Array, "n c d"], y: Float[Array, "n d e"]) -> Float32[Array, "n c e"]:
    """`x @ y` with the products in force. It has no gradient."""
    return _product(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)) if are_bfloat16() else x @ y


def transpose_batched(x: Float32[Array, "n c d"]) -> Float[Array, "n d c"]:
    """Each matrix transposed, as an operand of `multiply_batched`."""
    return _transpose(x.astype(jnp.bfloat16)) if are_bfloat16() else x.swapaxes(1, 2)


@jax.custom_vjp
def convolve(
    x: Float32[Array, "b h w c"], kernel: Float32[Array, "3 3 c d"]
) -> Float32[Array, "b h w d"]:
    """A convolution over 3x3 pixels, padded by 1, as nine bfloat16 products, one for each place in
    the kernel."""
    return _rounded(_sum_of_products, x, kernel)[0]


def _convolve_backward(
    operands: tuple[Array, Array], gradient: Float32[Array, "b h w d"]
) -> tuple[Array, Array]:
    x, kernel = operands
    gradient = gradient.astype(jnp.bfloat16)
    transposed = _transpose(gradient.reshape(-1, gradient.shape[-1]))
    kernel_gradient = jnp.stack([_product(transposed, pixels).T for pixels in _shifted(x)]).reshape(
        kernel.shape
    )
    return _sum_of_products(gradient, kernel[::-1, ::-1].swapaxes(2, 3)), kernel_gradient


convolve.defvjp(lambda x, kernel: _rounded(_sum_of_products, x, kernel), _convolve_backward)


def _sum_of_products(
    x: BFloat16[Array, "b h w c"], kernel: BFloat16[Array, "3 3 c d"]
) -> Float32[Array, "b h w d"]:
    matrices = kernel.reshape(9, *kernel.shape[2:])
    total = sum(
        _product(pixels, matrix) for pixels, matrix in zip(_shifted(x), matrices, strict=True)
    )
    return jnp.reshape(total, (*x.shape[:3], kernel.shape[3]))


def _shifted(x: BFloat16[Array, "b h w c"]) -> list[BFloat16[Array, "n c"]]:
    """All pixels, shifted to each of the nine places in a kernel."""
    _, height, width, c = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return [
        padded[:, y : y + height, x : x + width].reshape(-1, c) for y in range(3) for x in range(3)
    ]


def _rounded(
    operation: Callable[..., Array], x: Array, kernel: Array
) -> tuple[Array, tuple[Array, Array]]:
    """The result of an operation on operands rounded to bfloat16, and these, which its gradient
    needs."""
    operands = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return operation(*operands), operands


def _product(
    a: BFloat16[Array, "*n c d"], b: BFloat16[Array, "*n d e"]
) -> Float32[Array, "*n c e"]:
    """The barriers stop XLA from merging a transposition into the product. Such a product reads its
    operands one number at a time or, in jaxlib 0.10, does not run at all."""
    a, b = jax.lax.optimization_barrier((a, b))
    return jax.lax.optimization_barrier(jnp.matmul(a, b, preferred_element_type=jnp.float32))


def _transpose(x: Array) -> Array:
    """A transposed copy, not another view of the same memory."""
    return with_layout_constraint(x.swapaxes(-1, -2), Layout(tuple(range(x.ndim))))


def trim_memory() -> None:
    """Gives free memory back to the system, which glibc keeps by default: after encoding sentences,
    and after the first training step, whose compilation leaves most."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
