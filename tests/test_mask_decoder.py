"""Mask kernels: masks by hand, modal masks within amodal ones."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

from r2sm_jax.config import NUM_COORDINATES
from r2sm_jax.models.mask_decoder import (
    MaskKernels,
    coordinate_features,
    predict_mask_logits,
    predict_masks,
)
from r2sm_jax.query import AMODAL, MODAL


def normal(*shape: int, seed: int = 0, scale: float = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), jnp.float32)


def test_masks_are_dot_products_of_kernels_and_pixels():
    """Of an image's pixels with their coordinates, or of pixels that belong to a query."""
    biases = normal(2, 3, 4, 2)
    kernels, pixels = normal(2, 3, 4, 2, 5 + NUM_COORDINATES), normal(2, 6, 6, 5)
    coordinates = np.broadcast_to(coordinate_features(6), (2, 6, 6, NUM_COORDINATES))
    placed = np.concatenate([pixels, coordinates], axis=-1)
    expected = np.einsum("bkqtc,byxc->bkqtyx", kernels, placed) + biases[..., None, None]
    logits = predict_mask_logits(MaskKernels(kernels, biases), pixels)
    np.testing.assert_allclose(logits, expected, atol=1e-5)

    kernels, pixels = normal(2, 3, 4, 2, 5), normal(2, 3, 6, 6, 5)
    expected = np.einsum("bkqtc,bkyxc->bkqtyx", kernels, pixels) + biases[..., None, None]
    logits = predict_mask_logits(MaskKernels(kernels, biases), pixels)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_kernel_can_confine_a_mask_to_a_disc():
    x0, y0, steep = 0.25, -0.25, 40.0
    # steep * (0.1 - (x - x0)^2 - (y - y0)^2), by a kernel on the coordinates, which are scaled by 2
    on_coordinates = steep * jnp.array([2 * x0, 2 * y0, -1, -1]) / 2
    bias = steep * (0.1 - x0**2 - y0**2)
    weights = jnp.concatenate([jnp.ones(3), on_coordinates])  # the three pixel features are 0
    kernels = MaskKernels(jnp.broadcast_to(weights, (1, 1, 1, 2, 7)), jnp.full((1, 1, 1, 2), bias))
    mask = predict_mask_logits(kernels, jnp.zeros((1, 32, 32, 3)))[0, 0, 0, 0] > 0
    at = (np.arange(32) + 0.5) / 16 - 1
    np.testing.assert_array_equal(mask, (at[None] - x0) ** 2 + (at[:, None] - y0) ** 2 < 0.1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3))
def test_modal_lies_within_amodal_for_any_kernels_and_pixels(seed, scale):
    kernels = MaskKernels(normal(1, 2, 3, 2, 8, seed=seed, scale=scale), jnp.zeros((1, 2, 3, 2)))
    masks = predict_masks(kernels, normal(1, 4, 4, 4, seed=seed + 1, scale=scale))
    modal, amodal = masks[:, :, :, MODAL], masks[:, :, :, AMODAL]
    assert not ((modal > 0) & ~(amodal > 0)).any()
