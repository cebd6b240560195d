"""Options of the decoder: similarity of pixels with words, several scales, uncertain cells."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY, fake_inputs

from r2sm_jax.config import (
    NUM_COORDINATES,
    Config,
    LossConfig,
    check_config,
)
from r2sm_jax.errors import InputError
from r2sm_jax.models.mask_decoder import (
    MaskKernels,
    predict_mask_logits,
    resize_maps,
    similarity_evidence,
)
from r2sm_jax.models.r2sm import R2SM
from r2sm_jax.training.losses import mask_loss, uncertain_mean

DECODER = TINY.decoder
SIMILARITY = replace(TINY, decoder=replace(DECODER, similarity=True))
BOTH = replace(TINY, decoder=replace(DECODER, similarity=True, multi_scale=True))


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_a_kernel_weighs_the_similarity_of_its_own_query():
    kernels, biases = normal(2, 3, 4, 2, 5 + NUM_COORDINATES + 1), normal(2, 3, 4, 2)
    pixels, similarity = normal(2, 6, 6, 5), normal(2, 3, 6, 6)
    without = predict_mask_logits(MaskKernels(kernels[..., :-1], biases), pixels)
    logits = predict_mask_logits(MaskKernels(kernels, biases), pixels, similarity)
    added = jnp.einsum("bkqt,bkyx->bkqtyx", kernels[..., -1], similarity)
    np.testing.assert_allclose(logits, without + added, atol=1e-5)


def test_maps_are_pooled_by_means_and_enlarged_bilinearly():
    maps = normal(2, 4, 4)
    assert resize_maps(maps, 4) is maps
    constant = jnp.full((1, 4, 4), 3.0)
    for size in (2, 8):
        np.testing.assert_allclose(resize_maps(constant, size), 3.0, rtol=1e-6)
    # A ramp stays a ramp: cell centres of the larger map lie a quarter of a cell apart.
    ramp = jnp.broadcast_to(jnp.arange(4.0), (1, 4, 4))
    np.testing.assert_allclose(resize_maps(ramp, 8)[0, 0, 1:-1], np.arange(0.25, 3, 0.5), atol=1e-6)


def test_evidence_is_the_best_pixel_and_its_margin():
    similarity = jnp.zeros((1, 1, 2, 2)).at[0, 0, 1, 0].set(40.0)
    np.testing.assert_allclose(similarity_evidence(similarity), [[[10.0, 7.5]]])


@pytest.mark.parametrize("config", [SIMILARITY, BOTH])
def test_shapes_and_gradients(config):
    """Every new parameter gets a gradient from masks and presence alone."""
    inputs = jax.tree.map(jnp.asarray, fake_inputs(config, 2, 3))
    graphdef, params, constants = nnx.split(R2SM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def score(params):
        model = nnx.merge(graphdef, params, constants)
        features = model.encode_image(inputs["image"], inputs["image_mask"])
        decoded = model.decode_kernels(features, inputs["text"], inputs["text_mask"])
        assert decoded.similarity.shape == (2, 3, 8, 8)
        logits = predict_mask_logits(
            decoded.refined_kernels, decoded.pixel_features, decoded.similarity
        )
        assert logits.shape == (2, 3, 3, 2, 16, 16)
        return (logits**2).mean() + (decoded.presence**2).mean()

    gradient = jax.jit(jax.grad(score))(params)
    new = [gradient.decoder.similarity]
    if config is BOTH:
        new += [gradient.decoder.coarse_keys]
        new += [gradient.pixel_decoder.coarse_conv, gradient.pixel_decoder.fine_conv]
    for leaf in jax.tree.leaves(new):
        assert np.isfinite(leaf).all()
    # A shift of all scores of words or of all keys changes no softmax, so biases may have none.
    kernels = [leaf for leaf in jax.tree.leaves(new) if leaf.ndim > 1]
    assert kernels and all(np.abs(leaf).max() > 0 for leaf in kernels)


def test_similarity_does_not_read_padding_of_the_words():
    inputs = jax.tree.map(jnp.asarray, fake_inputs(SIMILARITY, 1, 2))
    text_mask = jnp.arange(24) < 6
    text_mask = jnp.broadcast_to(text_mask, (1, 2, 24))
    model = R2SM(SIMILARITY, rngs=nnx.Rngs(0))

    @nnx.jit
    def similarity(model, text):
        features = model.encode_image(inputs["image"], inputs["image_mask"])
        return model.decode_kernels(features, text, text_mask).similarity

    text = jnp.asarray(inputs["text"], jnp.float32)
    before = similarity(model, text)
    np.testing.assert_allclose(before, similarity(model, text.at[:, :, 6:].add(1)), atol=1e-6)
    assert np.abs(before - similarity(model, text.at[:, :, :6].add(1))).max() > 1e-3


def test_uncertain_mean_by_hand():
    """16 cells, so that the two nearest to 0 count; one of these has no weight."""
    logits = jnp.full((4, 4), 5.0).at[0, 0].set(0.0).at[3, 3].set(-0.1).at[1, 1].set(0.2)
    values = jnp.arange(16.0).reshape(4, 4)
    assert uncertain_mean(values, logits, jnp.ones((4, 4))) == pytest.approx((0 + 15) / 2)
    weight = jnp.ones((4, 4)).at[3, 3].set(0)
    assert uncertain_mean(values, logits, weight) == pytest.approx((0 + 5) / 2)
    assert uncertain_mean(values, logits, jnp.zeros((4, 4))) == 0


def test_uncertain_cells_take_their_share_of_the_cross_entropy():
    logits, target = normal(3, 8, 8), (normal(3, 8, 8, seed=1) > 0).astype(jnp.float32)
    weight = jnp.ones((1, 8, 8))
    plain, mixed, uncertain = (
        mask_loss(logits, target, weight, "mask2former", share) for share in (0.0, 0.75, 1.0)
    )
    np.testing.assert_array_equal(plain, mask_loss(logits, target, weight, "mask2former"))
    np.testing.assert_allclose(mixed, 0.25 * plain + 0.75 * uncertain, rtol=1e-5)


@pytest.mark.parametrize(
    "config, flag",
    [
        (
            Config(
                model=replace(SIMILARITY, decoder=replace(DECODER, type="sam", similarity=True))
            ),
            "--model.decoder.similarity",
        ),
        (
            Config(model=replace(TINY, decoder=replace(DECODER, type="sam", multi_scale=True))),
            "--model.decoder.multi-scale",
        ),
        (Config(loss=LossConfig(uncertain=1.5)), "--loss.uncertain"),
        (Config(loss=LossConfig(uncertain=0.5, masks="sam")), "--loss.uncertain"),
    ],
)
def test_what_does_not_fit_is_refused(config, flag):
    with pytest.raises(InputError, match=flag):
        check_config(config)
