"""How layers multiply matrices: in float32, TensorFloat-32, or bfloat16 with float32 sums.

CPUs with AMX or AVX512-BF16 multiply bfloat16 numbers in half to a sixth of the time (docs/log.md).
No setting of JAX makes XLA do so on CPUs, so dense layers get a product of our own there.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.config import MatmulPrecision

CPUINFO = Path("/proc/cpuinfo")
"""Exists on Linux; says what the processor can do."""
JAX_PRECISION = {"float32": "float32", "tensorfloat32": "tensorfloat32", "bfloat16": "default"}
"""What `jax.default_matmul_precision` takes for each of our names. It has an effect on accelerators
only. Our `bfloat16` is JAX's `default` there: TensorFloat-32 on GPUs, bfloat16 on TPUs."""


def choose_matmul_precision() -> MatmulPrecision:
    """Chooses by hardware what `auto` stands for, unmeasured, so that equal hosts do the same."""
    if jax.default_backend() != "cpu":
        return "tensorfloat32"
    flags = CPUINFO.read_text("utf-8").split() if CPUINFO.exists() else []
    return "bfloat16" if {"amx_bf16", "avx512_bf16"} & set(flags) else "float32"


def set_matmul_precision(model: nnx.Module, precision: MatmulPrecision) -> None:
    """Sets how the dense layers of a merged model multiply, in place.

    Only bfloat16 on a CPU needs it. All else follows `jax.default_matmul_precision`, so callers
    trace the model within that, with `JAX_PRECISION`.
    """
    if precision != "bfloat16" or jax.default_backend() != "cpu":
        return
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Linear) and layer.dtype != jnp.bfloat16:
            layer.dot_general = lambda x, kernel, *_, **__: multiply(x, kernel)


@lru_cache(64)
def compiled(
    graphdef: nnx.GraphDef, method: Callable[..., Any], precision: MatmulPrecision, *static: Any
) -> Callable[..., Any]:
    """Compiles a method of a module, as a function of the weights and of its inputs. `static`: the
    inputs that follow them. Modules of the same structure share a program."""

    @jax.jit
    def call(weights: nnx.State, *inputs: Any) -> Any:
        # Set inside, where JAX traces: the program has this precision, whatever the caller's own
        # setting of JAX is.
        with jax.default_matmul_precision(JAX_PRECISION[precision]):
            module = nnx.merge(graphdef, weights)
            set_matmul_precision(module, precision)
            return method(module, *inputs, *static)

    return call


@jax.custom_vjp
def multiply(x: Float[Array, "n c"], kernel: Float[Array, "c d"]) -> Float[Array, "n d"]:
    """Multiplies matrices rounded to bfloat16, as the two products of its gradient do."""
    x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return multiply(x, kernel), (x, kernel)


def _backward(operands: tuple[Any, Any], gradient: Array) -> tuple[Array, Array]:
    x, kernel = operands
    return multiply(gradient, kernel.T), multiply(x.T, gradient)


multiply.defvjp(_forward, _backward)
