"""A fast depthwise convolution for CPUs, behind flax's `conv_general_dilated=` hook of `nnx.Conv`.

XLA's grouped convolution is slow on CPUs. Here the shifted image is multiplied by one row of the
kernel after the other, and XLA adds these products up in one pass. Forward and backward of 8 images
of 28 x 28 pixels with 720 channels and 5 x 5 kernels took 0.5 s on two busy cores, 1.5 s with JAX's
own gradient of the same sum, and 8.2 s as a grouped convolution.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def depthwise_conv(
    x: Float[Array, "b h w c"],
    kernel: Float[Array, "k k 1 c"],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> Float[Array, "b _h _w c"]:
    """`jax.lax.conv_general_dilated` of each channel for itself, padded as "SAME": the same number,
    computed in float32 on CPUs. `options` go to the grouped convolution elsewhere."""
    (stride, _) = window_strides

    def on_cpu(x: Array, kernel: Array) -> Array:
        out = convolve_channels(x.astype(jnp.float32), kernel.astype(jnp.float32), stride)
        return jnp.asarray(out).astype(x.dtype)

    def elsewhere(x: Array, kernel: Array) -> Array:
        return jax.lax.conv_general_dilated(x, kernel, window_strides, padding, **options)

    return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, default=elsewhere)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_channels(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], stride: int
) -> Float[Array, "b _h _w c"]:
    """A depthwise convolution as a sum of shifted products."""
    return _sum_of_products(jnp.pad(x, _same_padding(x, kernel, stride)), kernel, stride)


def _same_padding(x: Array, kernel: Array, stride: int) -> tuple[tuple[int, int], ...]:
    """Pixels before and after each axis of the image."""
    strides = (stride, stride)
    pads = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, "SAME")
    return ((0, 0), *pads, (0, 0))


def _sum_of_products(padded: Array, kernel: Array, stride: int) -> Array:
    rows = padded.shape[1] - len(kernel) + 1
    columns = padded.shape[2] - len(kernel) + 1
    total = jnp.zeros(())
    for i, j in np.ndindex(kernel.shape[:2]):
        shifted = padded[:, i : i + rows : stride, j : j + columns : stride]
        total = total + shifted * kernel[i, j, 0]
    return total


def _forward(x: Array, kernel: Array, stride: int) -> tuple[Array, tuple[Array, Array]]:
    return convolve_channels(x, kernel, stride), (x, kernel)


def _backward(stride: int, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = operands
    padding = _same_padding(x, kernel, stride)
    kernel_gradient = _kernel_gradient(jnp.pad(x, padding), gradient, len(kernel), stride)
    image_gradient = _image_gradient(x.shape, kernel, gradient, padding, stride)
    return image_gradient, kernel_gradient


def _image_gradient(
    shape: tuple[int, ...],
    kernel: Array,
    gradient: Array,
    padding: tuple[tuple[int, int], ...],
    stride: int,
) -> Array:
    """The convolution of the gradient, spread by the stride, with the flipped kernel."""
    size = len(kernel)
    pads = [(0, 0, 0)]
    for axis in (1, 2):
        before = size - 1 - padding[axis][0]
        after = shape[axis] + padding[axis][0] - (gradient.shape[axis] - 1) * stride - 1
        pads.append((before, after, stride - 1))
    pads.append((0, 0, 0))
    spread = jax.lax.pad(gradient, 0.0, pads)
    return _sum_of_products(spread, kernel[::-1, ::-1], 1)


def _kernel_gradient(padded: Array, gradient: Array, size: int, stride: int) -> Array:
    """Added up row by row: at once, XLA writes all products of the image to memory."""
    _, rows, columns, channels = gradient.shape
    last = (columns - 1) * stride + 1

    def add_row(total: Array, row: Array) -> tuple[Array, None]:
        row_gradient = jax.lax.dynamic_index_in_dim(gradient, row, 1, keepdims=False)
        lines = jax.lax.dynamic_slice_in_dim(padded, row * stride, size, 1)
        sums = []
        for i, j in np.ndindex(size, size):
            pixels = lines[:, i, j : j + last : stride]
            sums.append((pixels * row_gradient).sum((0, 1)))
        return total + jnp.stack(sums), None

    total, _ = jax.lax.scan(add_row, jnp.zeros((size * size, channels)), jnp.arange(rows))
    return total.reshape(size, size, 1, channels)


convolve_channels.defvjp(_forward, _backward)
