"""Layers that the models share: dense layers, MLP, attention, constants among the weights."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float
from scipy.special import ndtr, ndtri

M = TypeVar("M", bound=nnx.Module)

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": lambda x: nnx.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: nnx.gelu(x, approximate=True),
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": nnx.relu,
    "silu": nnx.silu,
}
"""By the names that a published `config.json` uses; `gelu_tanh` is ours. `gelu` is the exact one.
"""
STD_OF_TRUNCATED_NORMAL = 0.87962566103423978
"""Standard deviation of a standard normal distribution that is cut at 2."""


class Buffer(nnx.Variable):
    """A constant that belongs to the weights: saved and exported, never trained."""


def freeze(module: nnx.Module) -> None:
    """Turns the parameters of a built module into constants, in place: no gradient, no optimizer
    state, no decay."""
    for _, part in list(nnx.iter_graph(module)):
        if isinstance(part, nnx.Module):
            for name, value in list(vars(part).items()):
                if isinstance(value, nnx.Param):
                    setattr(part, name, Buffer(value[...]))


class SameKey(nnx.Rngs):
    """Gives every weight the same key, and counts nothing."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


def build_abstract(build: Callable[..., M]) -> M:
    """Calls `build(rngs=...)`, and returns its module with shapes in place of arrays.

    No weight is computed, so all may have one key. With `nnx.Rngs` this takes three times as long:
    flax asks its count for a sharding, and under tracing the answer is an error whose text, which
    nobody reads, is the whole program so far.
    """
    return nnx.eval_shape(lambda: build(rngs=SameKey(0)))


def truncated_normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Random initial weights in float32: a normal distribution, cut at two standard deviations.

    numpy draws them, from a generator that `key` seeds. JAX compiles a program for each shape,
    which for the default model takes as long as a third of the training step. `std` is the standard
    deviation before values are cut.
    """
    if isinstance(key, Tracer):
        # A model of shapes alone is built.
        return jnp.zeros(shape)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    lowest, highest = ndtr(-2.0), ndtr(2.0)
    values = std * ndtri(rng.uniform(lowest, highest, shape))
    return jnp.asarray(values, jnp.float32)


def lecun_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Initial weights of a kernel `[... in out]`, of variance one over the number of inputs."""
    std = math.prod(shape[:-1]) ** -0.5 / STD_OF_TRUNCATED_NORMAL
    return truncated_normal(key, shape, std).astype(dtype)


class Linear(nnx.Linear):
    """`nnx.Linear` that flattens the leading axes first.

    XLA's CPU backend computes weight gradients with several leading axes up to 2.6 times slower
    than with one (a 128-512-128 MLP on [16 8 24 128] took 19.2 ms against 7.4 ms). Elsewhere it
    makes no difference.
    """

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, kernel_init=lecun_normal, **options)

    def __call__(self, inputs: Float[Array, "... in"]) -> Float[Array, "... out"]:
        out = super().__call__(inputs.reshape(-1, inputs.shape[-1]))
        return out.reshape(*inputs.shape[:-1], out.shape[-1])


class Conv(nnx.Conv):
    """`nnx.Conv` with the initial weights of `lecun_normal`."""

    def __init__(self, *sizes: Any, **options: Any):
        super().__init__(*sizes, kernel_init=lecun_normal, **options)


def resize(x: Float[Array, "b h w d"], size: int) -> Float[Array, "b _h _w d"]:
    """Bilinear to `size` each way, antialiased where it shrinks; unchanged if it has that size."""
    if x.shape[1:3] == (size, size):
        return x
    return jax.image.resize(x, (x.shape[0], size, size, x.shape[3]), "bilinear")


class ConvBlock(nnx.Module):
    """A pre-norm residual 3x3 convolution."""

    def __init__(self, dim: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.conv = Conv(dim, dim, (3, 3), padding=1, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        return x + self.conv(nnx.relu(self.norm(x)))


class MLP(nnx.Module):
    """Dense layers with an activation between them."""

    def __init__(
        self,
        dims: tuple[int, ...],
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        activation: str = "gelu_tanh",
    ):
        self.activation = activation
        self.layers = nnx.List([Linear(i, o, dtype=dtype, rngs=rngs) for i, o in pairwise(dims)])

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        for layer in self.layers[:-1]:
            x = ACTIVATIONS[self.activation](layer(x))
        return self.layers[-1](x)


class Attention(nnx.Module):
    """Multi-head attention with separate projections of queries, keys and values."""

    def __init__(
        self, dim: int, heads: int, *, inner: int | None = None, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        """`inner`: channels of all heads together; `dim` unless given."""
        inner = inner or dim
        self.heads = heads
        self.query = Linear(dim, inner, dtype=dtype, rngs=rngs)
        self.key = Linear(dim, inner, dtype=dtype, rngs=rngs)
        self.value = Linear(dim, inner, dtype=dtype, rngs=rngs)
        self.out = Linear(inner, dim, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "... q d"],
        key: Float[Array, "... s d"],
        value: Float[Array, "... s d"],
        mask: Bool[Array, "... s"] | None = None,
        bias: Float[Array, "*_leading q s"] | None = None,
    ) -> Float[Array, "... q d"]:
        query, key, value = self.query(x), self.key(key), self.value(value)
        return self.out(attend(query, key, value, heads=self.heads, mask=mask, bias=bias))


def attend(
    query: Float[Array, "... q d"],
    key: Float[Array, "... s _d"],
    value: Float[Array, "... s _d"],
    *,
    heads: int,
    mask: Bool[Array, "... s"] | None = None,
    bias: Float[Array, "*_leading q s"] | None = None,
) -> Float[Array, "... q d"]:
    """Computes multi-head scaled dot-product attention.

    Keys and values may have fewer heads, each of which several query heads share. `mask` is False
    on keys that are hidden; a row that sees no key attends to all evenly. `bias` is added to the
    scores [b h q s]. Scores and softmax are float32, also of bfloat16 layers:
    published ViTs have scores of 20 and more, where bfloat16 has steps of an eighth.
    """
    shape = query.shape
    head_dim = shape[-1] // heads
    query, key, value = (
        x.reshape(-1, x.shape[-2], x.shape[-1] // head_dim, head_dim) for x in (query, key, value)
    )
    if mask is not None:
        mask = mask.reshape(-1, 1, 1, mask.shape[-1])
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    return jax.nn.dot_product_attention(query, key, value, bias, mask).reshape(shape)
