"""Matrix products with bfloat16 operands and float32 sums, for processors with matrix units (AMX).

Dense layers, 3x3 convolutions and Muon have them. Such a product takes down to a sixth of the time in float32
(docs/experiments.md). All else stays float32: what comes in and goes out, parameters, softmax, norms.
`jax.default_matmul_precision` is the switch, which on CPU XLA itself does not look at.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, BFloat16, Float, Float32

from r2sm_jax.config import Products

CPUINFO = Path("/proc/cpuinfo")
"""Linux's; elsewhere a processor is taken to have no matrix units."""


def products(kind: Products) -> AbstractContextManager:
    """Dense layers that are traced within multiply so; `auto` is bfloat16 where the CPU has matrix units for it.

    `float32` leaves everything to JAX, which takes less than float32 on some accelerators.
    """
    if kind == "auto":
        kind = "bfloat16" if jax.default_backend() == "cpu" and _has_matrix_units() else "float32"
    return jax.default_matmul_precision(kind) if kind == "bfloat16" else nullcontext()


def are_bfloat16() -> bool:
    """Whether `products("bfloat16")` is in force."""
    # JAX adds its options to `config` when it is imported, which type checkers do not see.
    return jax.config.jax_default_matmul_precision == "bfloat16"  # pyright: ignore[reportAttributeAccessIssue]


def _has_matrix_units() -> bool:
    return CPUINFO.exists() and "amx_bf16" in CPUINFO.read_text()


@jax.custom_vjp
def multiply(x: Float32[Array, "n c"], kernel: Float32[Array, "c d"]) -> Float32[Array, "n d"]:
    """`x @ kernel`, and so are both gradients, each operand rounded to bfloat16."""
    return _multiply(x, kernel)[0]


def _multiply(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    kept = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return _product(*kept), kept


def _multiply_back(kept: tuple[Array, Array], gradient: Float32[Array, "n d"]) -> tuple[Array, Array]:
    x, kernel = kept
    gradient = gradient.astype(jnp.bfloat16)
    if x.shape[1] <= gradient.shape[1]:
        back = _product(_transposed(x), gradient)
    else:  # the narrower one is laid out anew
        back = _product(_transposed(gradient), x).T
    return _product(gradient, _transposed(kernel)), back


multiply.defvjp(_multiply, _multiply_back)


def multiply_each(x: Float[Array, "n c d"], y: Float[Array, "n d e"]) -> Float32[Array, "n c e"]:
    """`x @ y` as `products` has it; not to be differentiated."""
    if not are_bfloat16():
        return x @ y
    return _product(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))


def transpose_each(x: Float32[Array, "n c d"]) -> Float[Array, "n d c"]:
    """Each matrix transposed, as an operand of `multiply_each`."""
    return _transposed(x.astype(jnp.bfloat16)) if are_bfloat16() else x.swapaxes(1, 2)


@jax.custom_vjp
def convolve(x: Float32[Array, "b h w c"], kernel: Float32[Array, "3 3 c d"]) -> Float32[Array, "b h w d"]:
    """A convolution over 3x3 pixels, padded by 1, as nine such products, one for each place of the kernel."""
    return _convolve(x, kernel)[0]


def _convolve(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    kept = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return _sum_of_products(*kept), kept


def _convolve_back(kept: tuple[Array, Array], gradient: Float32[Array, "b h w d"]) -> tuple[Array, Array]:
    x, kernel = kept
    gradient = gradient.astype(jnp.bfloat16)
    transposed = _transposed(gradient.reshape(-1, gradient.shape[-1]))
    back = jnp.stack([_product(transposed, seen).T for seen in _seen(x)]).reshape(kernel.shape)
    return _sum_of_products(gradient, kernel[::-1, ::-1].swapaxes(2, 3)), back


convolve.defvjp(_convolve, _convolve_back)


def _sum_of_products(x: BFloat16[Array, "b h w c"], kernel: BFloat16[Array, "3 3 c d"]) -> Float32[Array, "b h w d"]:
    places = kernel.reshape(9, *kernel.shape[2:])
    total = sum(_product(seen, place) for seen, place in zip(_seen(x), places, strict=True))
    return jnp.reshape(total, (*x.shape[:3], kernel.shape[3]))


def _seen(x: BFloat16[Array, "b h w c"]) -> list[BFloat16[Array, "n c"]]:
    """What each of the nine places of a kernel sees of all pixels."""
    _, height, width, c = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return [padded[:, y : y + height, x : x + width].reshape(-1, c) for y in range(3) for x in range(3)]


def _product(a: BFloat16[Array, "*n c d"], b: BFloat16[Array, "*n d e"]) -> Float32[Array, "*n c e"]:
    """The barriers keep XLA from working transpositions into a product, which then either gathers its operands one
    number at a time or, in jaxlib 0.10, does not run at all."""
    a, b = jax.lax.optimization_barrier((a, b))
    return jax.lax.optimization_barrier(jnp.matmul(a, b, preferred_element_type=jnp.float32))


def _transposed(x: Array) -> Array:
    """Laid out anew, not the same memory looked at in another way."""
    return with_layout_constraint(x.swapaxes(-1, -2), Layout(tuple(range(x.ndim))))
