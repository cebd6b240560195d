"""EfficientNet-Lite: a small convolutional image encoder, trained on ImageNet, whose features need no GPU.

The layout and the published weights follow `EfficientNet-PyTorch` and tensorflow/tpu (models/official/efficientnet,
lite): inverted residual blocks (arXiv 1801.04381) without squeeze and excitation, ReLU6, TensorFlow's padding. Each
batch norm is folded into the convolution before it, so training changes kernels and biases only.
"""

from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.models.layers import Linear, freeze

STRIDES = (2, 4, 8, 16, 32)
STAGES = ((3, 1, 1), (3, 2, 6), (5, 2, 6), (3, 2, 6), (5, 1, 6), (5, 2, 6), (3, 1, 6))
"""Kernel size, stride of the first block, and expansion of the channels inside each block. All sizes of the model have
these stages; what differs is the number of blocks and of channels."""
FIRST_DIM = 32
"""Channels of the first convolution, at stride 2."""
Levels = tuple[Float[Array, "b _h _w _c"], ...]
"""Features at several strides, from fine to coarse."""


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_channels(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], stride: int
) -> Float[Array, "b _h _w c"]:
    """A convolution of each channel for itself, as products of the shifted image with one row of the kernel each. XLA
    computes the sum in one pass on CPUs, several times faster than its grouped convolution (docs/weights_vision.md)."""
    return _correlate(jnp.pad(x, _padding(x, kernel, stride)), kernel, stride)


def _padding(x: Array, kernel: Array, stride: int) -> tuple[tuple[int, int], ...]:
    """Of each axis of the image."""
    return (
        (0, 0),
        *jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (stride, stride), "SAME"),
        (0, 0),
    )


def _correlate(padded: Array, kernel: Array, stride: int) -> Array:
    rows, columns = (n - len(kernel) + 1 for n in padded.shape[1:3])
    places = np.ndindex(kernel.shape[:2])
    products = (
        padded[:, i : i + rows : stride, j : j + columns : stride] * kernel[i, j, 0]
        for i, j in places
    )
    return sum(products, jnp.zeros(()))


def _gradients(stride: int, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """That of the kernel is added up row by row: at once, XLA writes all products of the image to memory."""
    x, kernel = operands
    size, (_, rows, columns, c), padding = len(kernel), gradient.shape, _padding(x, kernel, stride)
    sides = zip(x.shape[1:3], (rows, columns), padding[1:3], strict=True)
    around = [
        (size - 1 - low, n + low - (m - 1) * stride - 1, stride - 1) for n, m, (low, _) in sides
    ]
    spread = jax.lax.pad(gradient, 0.0, [(0, 0, 0), *around, (0, 0, 0)])
    padded, last = jnp.pad(x, padding), (columns - 1) * stride + 1

    def add(total: Array, row: Array) -> tuple[Array, None]:
        part = jax.lax.dynamic_index_in_dim(gradient, row, 1, keepdims=False)
        lines = jax.lax.dynamic_slice_in_dim(padded, row * stride, size, 1)
        places = np.ndindex(size, size)
        return total + jnp.stack(
            [(lines[:, i, j : j + last : stride] * part).sum((0, 1)) for i, j in places]
        ), None

    total = jax.lax.scan(add, jnp.zeros((size * size, c)), jnp.arange(rows))[0]
    return _correlate(spread, kernel[::-1, ::-1], 1), total.reshape(kernel.shape)


convolve_channels.defvjp(
    lambda x, kernel, stride: (convolve_channels(x, kernel, stride), (x, kernel)), _gradients
)


class Depthwise(nnx.Conv):
    """A convolution of each channel for itself: `convolve_channels` on CPUs, XLA's grouped convolution elsewhere."""

    def __init__(self, dim: int, size: int, stride: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(
            dim,
            dim,
            (size, size),
            stride,
            padding="SAME",
            feature_group_count=dim,
            dtype=dtype,
            rngs=rngs,
        )
        self.stride = stride

    def __call__(self, inputs: Float[Array, "b h w c"]) -> Float[Array, "b _h _w c"]:
        return jax.lax.platform_dependent(inputs, cpu=self.shifted, default=super().__call__)

    def shifted(self, x: Float[Array, "b h w c"]) -> Float[Array, "b _h _w c"]:
        """The same, computed in float32."""
        x, kernel = x.astype(jnp.float32), self.kernel[...].astype(jnp.float32)
        total = jnp.asarray(convolve_channels(x, kernel, self.stride))
        return (total if self.bias is None else total + self.bias[...]).astype(self.dtype)


class InvertedResidual(nnx.Module):
    """Dense layer that widens, depthwise convolution, dense layer that narrows."""

    def __init__(
        self,
        dim: int,
        out_dim: int,
        size: int,
        stride: int,
        widen: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.expand = Linear(dim, widen * dim, dtype=dtype, rngs=rngs) if widen > 1 else None
        self.depthwise = Depthwise(widen * dim, size, stride, dtype=dtype, rngs=rngs)
        self.project = Linear(widen * dim, out_dim, dtype=dtype, rngs=rngs)
        self.is_residual = stride == 1 and dim == out_dim

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b _h _w _d"]:
        wide = x if self.expand is None else jax.nn.relu6(self.expand(x))
        out = self.project(jax.nn.relu6(self.depthwise(wide)))
        return x + out if self.is_residual else out


class EfficientNetLite(nnx.Module):
    """Image -> the last features at each of the `STRIDES`."""

    def __init__(self, block_dims: tuple[int, ...], *, dtype: jnp.dtype, rngs: nnx.Rngs):
        """`block_dims`: channels after each block; equal ones in a row are a stage."""
        self.first = nnx.Conv(3, FIRST_DIM, (3, 3), 2, padding="SAME", dtype=dtype, rngs=rngs)
        blocks, ends, dim = [], [], FIRST_DIM
        stages = [list(dims) for _, dims in groupby(block_dims)]
        for dims, (size, stride, widen) in zip(stages, STAGES, strict=True):
            if stride == 2:
                ends.append(len(blocks))
            for number, out_dim in enumerate(dims):
                strides = 1 if number else stride
                blocks.append(
                    InvertedResidual(dim, out_dim, size, strides, widen, dtype=dtype, rngs=rngs)
                )
                dim = out_dim
        self.blocks = nnx.List(blocks)
        self.ends = (*ends, len(blocks))
        self.dims = tuple(block_dims[end - 1] for end in self.ends)

    def freeze_to(self, stride: int) -> None:
        """Makes constants of what computes the features up to this stride."""
        end = self.ends[STRIDES.index(stride)]
        for part in (self.first, *self.blocks[:end]):
            freeze(part)

    def __call__(self, image: Float[Array, "b H W 3"], known: Levels = ()) -> Levels:
        """`image`: (pixels - 127) / 128. `known`: features at the first strides, of which only the last are read."""
        features = list(known)
        start = self.ends[len(known) - 1] if known else 0
        x = known[-1] if known else jax.nn.relu6(self.first(image))
        for number, block in enumerate(self.blocks[start:], start + 1):
            x = block(x)
            if number in self.ends:
                features.append(x)
        return tuple(features)
