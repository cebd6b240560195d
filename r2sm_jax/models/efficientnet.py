"""EfficientNet-Lite: a small convolutional image encoder, trained on ImageNet, whose features need
no GPU.

The layout follows `EfficientNet-PyTorch` and tensorflow/tpu (models/official/efficientnet, lite):
inverted residual blocks (arXiv 1801.04381) without squeeze and excitation, ReLU6, TensorFlow's
padding. keys.py folds the batch norms of published weights into the convolutions before them, so
there are none here.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.models.layers import Conv, Linear, freeze

STRIDES = (2, 4, 8, 16, 32)
STAGES = ((3, 1, 1), (3, 2, 6), (5, 2, 6), (3, 2, 6), (5, 1, 6), (5, 2, 6), (3, 1, 6))
"""Kernel size, stride of the first block, and expansion of the channels inside each block. All
sizes of the model have these stages; what differs is the number of blocks and of channels."""
FIRST_DIM = 32
"""Channels of the first convolution, at stride 2."""

Levels = tuple[Float[Array, "b _h _w _c"], ...]
"""Features at several strides, from fine to coarse."""


class InvertedResidual(nnx.Module):
    """Dense layer that widens, depthwise convolution, dense layer that narrows."""

    def __init__(
        self,
        dim: int,
        out_dim: int,
        *,
        kernel_size: int,
        stride: int,
        expansion: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        inner_dim = expansion * dim
        self.expand = Linear(dim, inner_dim, dtype=dtype, rngs=rngs) if expansion > 1 else None
        self.depthwise = Conv(
            inner_dim,
            inner_dim,
            (kernel_size, kernel_size),
            strides=stride,
            padding="SAME",
            feature_group_count=inner_dim,
            conv_general_dilated=depthwise_conv,
            dtype=dtype,
            rngs=rngs,
        )
        self.project = Linear(inner_dim, out_dim, dtype=dtype, rngs=rngs)
        self.is_residual = stride == 1 and dim == out_dim

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b _h _w _d"]:
        hidden = x
        if self.expand is not None:
            hidden = jax.nn.relu6(self.expand(hidden))
        hidden = jax.nn.relu6(self.depthwise(hidden))
        out = self.project(hidden)
        return x + out if self.is_residual else out


class EfficientNetLite(nnx.Module):
    """Image -> the last features at each of the `STRIDES`."""

    def __init__(self, block_dims: tuple[int, ...], *, dtype: jnp.dtype, rngs: nnx.Rngs):
        """`block_dims`: channels after each block; equal ones in a row are a stage.

        The last stages may be left out, where features up to a smaller stride are enough.
        """
        self.first = Conv(3, FIRST_DIM, (3, 3), 2, padding="SAME", dtype=dtype, rngs=rngs)
        blocks = []
        ends = []
        dim = FIRST_DIM
        stage_dims = [list(dims) for _, dims in groupby(block_dims)]
        stages = STAGES[: len(stage_dims)]
        for dims, (kernel_size, stage_stride, expansion) in zip(stage_dims, stages, strict=True):
            # Such a stage halves the resolution, so the blocks before it are the last of a stride.
            if stage_stride == 2:
                ends.append(len(blocks))
            for number, out_dim in enumerate(dims):
                block = InvertedResidual(
                    dim,
                    out_dim,
                    kernel_size=kernel_size,
                    stride=stage_stride if number == 0 else 1,
                    expansion=expansion,
                    dtype=dtype,
                    rngs=rngs,
                )
                blocks.append(block)
                dim = out_dim
        self.blocks = nnx.List(blocks)
        # For each of the STRIDES: the number of blocks up to its last features, and the channels
        # of these features.
        self.ends = (*ends, len(blocks))
        self.dims = tuple(block_dims[end - 1] for end in self.ends)

    def freeze_to(self, stride: int) -> None:
        """Makes constants of what computes the features up to this stride."""
        end = self.ends[STRIDES.index(stride)]
        freeze(self.first)
        for block in self.blocks[:end]:
            freeze(block)

    def __call__(self, image: Float[Array, "b H W 3"]) -> Levels:
        """Computes the features at all strides of an image (pixels - 127) / 128."""
        features = []
        x = jax.nn.relu6(self.first(image))
        # `number` counts the blocks so far, as `ends` does.
        for number, block in enumerate(self.blocks, start=1):
            x = block(x)
            if number in self.ends:
                features.append(x)
        return tuple(features)


# A fast depthwise convolution, behind the `conv_general_dilated=` hook of `nnx.Conv`


def depthwise_conv(
    x: Float[Array, "b h w c"],
    kernel: Float[Array, "k k 1 c"],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> Float[Array, "b _h _w c"]:
    """Computes `jax.lax.conv_general_dilated` of each channel for itself, in float32.

    XLA's grouped convolution is slow on CPUs, and JAX's gradient of it on CUDA as well (jax issue
    13800). Here the shifted image is multiplied by one weight of the kernel after the other, and
    XLA adds these products up in one pass. Forward and backward of 8 images of 28 x 28 pixels with
    720 channels and 5 x 5 kernels took 0.5 s on two busy cores, and 8.2 s as a grouped convolution.

    Padding is "SAME" whatever is asked for; `options` say that channels are groups.
    """
    out = convolve_channels(x.astype(jnp.float32), kernel.astype(jnp.float32), window_strides[0])
    return jnp.asarray(out).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_channels(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], stride: int
) -> Float[Array, "b _h _w c"]:
    """Adds up shifted products. Its gradient by the kernel is our own."""
    return _sum_of_products(x, kernel, stride)


def _sum_of_products(x: Array, kernel: Array, stride: int) -> Array:
    padded = _pad(x, len(kernel), stride)
    rows = padded.shape[1] - len(kernel) + 1
    columns = padded.shape[2] - len(kernel) + 1
    total = jnp.zeros(())
    for i, j in np.ndindex(kernel.shape[:2]):
        shifted = padded[:, i : i + rows : stride, j : j + columns : stride]
        total = total + shifted * kernel[i, j, 0]
    return jnp.asarray(total)


def _pad(x: Array, size: int, stride: int) -> Array:
    pads = jax.lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), "SAME")
    return jnp.pad(x, ((0, 0), *pads, (0, 0)))


def _forward(x: Array, kernel: Array, stride: int) -> tuple[Array, tuple[Array, Array]]:
    return _sum_of_products(x, kernel, stride), (x, kernel)


def _backward(stride: int, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = operands
    _, image_gradient = jax.vjp(lambda x: _sum_of_products(x, kernel, stride), x)

    # The gradient of the kernel is added up row by row: at once, XLA writes all products of the
    # image to memory.
    size = len(kernel)
    padded = _pad(x, size, stride)
    last = (gradient.shape[2] - 1) * stride + 1

    def add_row(total: Array, row: Array) -> tuple[Array, None]:
        row_gradient = jax.lax.dynamic_index_in_dim(gradient, row, 1, keepdims=False)
        lines = jax.lax.dynamic_slice_in_dim(padded, row * stride, size, 1)
        sums = []
        for i, j in np.ndindex(size, size):
            pixels = lines[:, i, j : j + last : stride]
            sums.append((pixels * row_gradient).sum((0, 1)))
        return total + jnp.stack(sums).reshape(kernel.shape), None

    rows = jnp.arange(gradient.shape[1])
    kernel_gradient, _ = jax.lax.scan(add_row, jnp.zeros_like(kernel), rows)
    return *image_gradient(gradient), kernel_gradient


convolve_channels.defvjp(_forward, _backward)
