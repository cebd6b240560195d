"""The segmenter: how kernels are refined, what follows from logits, and what holds for any
weights."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, logit
from tiny_models import TINY, fake_inputs

from r2sm_jax.config import DecoderConfig, ModelConfig
from r2sm_jax.models.mask_decoder import MaskKernels, predict_masks
from r2sm_jax.models.r2sm import ABSENT_LOGIT, R2SM, ImageFeatures, R2SMOutput, input_spec
from r2sm_jax.query import MODAL

DECODER = TINY.decoder
NEVER_ABSENT = replace(TINY, presence_threshold=-np.inf)
INPUTS = fake_inputs(TINY, 2, 3)
"""Two images with three queries each; all tests use these shapes, which are compiled once."""


@cache
def make(config: ModelConfig):
    """A model, and a compiled function of its weights and inputs: the answer, and the masks and
    IoUs that the decoder gives before anything is refined or decided."""
    model = R2SM(config, rngs=nnx.Rngs(0))
    graphdef = nnx.graphdef(model)

    @jax.jit
    def run(state, inputs):
        model = nnx.merge(graphdef, state)
        features = model.encode_image(inputs["image"], inputs["image_mask"])
        decoded = model.decode_kernels(features, inputs["text"], inputs["text_mask"])
        masks = predict_masks(decoded.kernels, features.fine)
        return model(**inputs), masks, decoded.iou

    return model, run


def run_model(config: ModelConfig, inputs: dict, noise: float = 0, seed: int = 0):
    """What the function of `make` gives, with noise on all weights if asked for."""
    model, run = make(config)
    rng = np.random.default_rng(seed)

    def add_noise(x):
        return x + noise * rng.normal(size=x.shape).astype(np.float32)

    return run(jax.tree.map(add_noise, nnx.state(model)), inputs)


def answer(config: ModelConfig, inputs: dict, noise: float = 0, seed: int = 0) -> R2SMOutput:
    return run_model(config, inputs, noise, seed)[0]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def assert_equal(
    one: R2SMOutput, other: R2SMOutput, rows=slice(None), queries=slice(None), tolerance=2e-5
) -> None:
    """The same answers for some of the images and queries."""
    for name, a, b in zip(one._fields, one, other, strict=True):
        np.testing.assert_allclose(
            a[rows, queries], b[rows, queries], atol=tolerance, rtol=1e-4, err_msg=name
        )


# Kernels are refined.


def test_instance_kernels_depend_on_their_own_pixels():
    model, _ = make(TINY)
    pixels = normal(1, 4, 4, DECODER.mask_dim)
    # The left half, and an instance that is not there.
    regions = jnp.zeros((1, 2, 4, 4)).at[:, 0, :, :2].set(1)

    def kernels_of(pixels):
        return model.instance_kernels(ImageFeatures(pixels, pixels, pixels), regions).weights

    kernels = kernels_of(pixels)
    assert kernels.shape == (1, 1, 2, 2, DECODER.region_dim) and np.isfinite(kernels).all()
    np.testing.assert_array_equal(kernels, kernels_of(pixels.at[:, :, 2:].add(1)))
    changed = kernels_of(pixels.at[:, :, :2].add(1))
    assert not np.allclose(kernels[:, :, 0], changed[:, :, 0])


@pytest.mark.parametrize(
    "present, shares", [((1, -1), (0.5, 0.5)), ((1, 1), (0, 0.5)), ((-1, -1), (0, 0.5))]
)
def test_refined_kernels_by_hand(present, shares):
    """Slots take the mean of both kernels, the fused mask only where one slot has a target."""
    model, _ = make(TINY)
    pixels = normal(1, 4, 4, DECODER.mask_dim)
    features = ImageFeatures(pixels, pixels, pixels)
    first = MaskKernels(normal(1, 1, 3, 2, DECODER.region_dim), jnp.zeros((1, 1, 3, 2)))
    refined = model.refine_kernels(first, jnp.array([[[-1.0, *present]]]), features)
    modal = predict_masks(first, pixels)[:, 0, :, MODAL]
    regions = jax.nn.sigmoid(modal) ** DECODER.refine_exponent
    second = model.instance_kernels(features, regions)
    for token, share in enumerate((shares[0], shares[1], shares[1])):
        for ours, one, other in zip(refined, first, second, strict=True):
            expected = (1 - share) * one[:, :, token] + share * other[:, :, token]
            np.testing.assert_allclose(ours[:, :, token], expected, atol=1e-5)


def test_long_tails_of_a_mask_hardly_change_its_refined_kernels():
    """The instance MLP is trained on true masks. 1,008 background pixels of 0.02 weigh more than an
    object of 16 pixels, but 0.02 squared does not."""
    on_object = np.zeros((1, 32, 32, 1), bool)
    on_object[:, :4, :4] = True
    pixels = jnp.asarray(np.where(on_object, 1.0, -1.0) * np.ones(DECODER.mask_dim), jnp.float32)
    features = ImageFeatures(pixels, pixels, pixels)
    # A kernel whose logits are 4 on the object and -4, so probability 0.018, elsewhere.
    weights = jnp.zeros((1, 1, 2, 2, DECODER.region_dim)).at[..., 0].set(4.0)
    kernels = MaskKernels(weights, jnp.zeros((1, 1, 2, 2)))
    errors = []
    for exponent in (1.0, 2.0):
        decoder = replace(DECODER, refine_exponent=exponent)
        model = R2SM(replace(TINY, decoder=decoder), rngs=nnx.Rngs(0))
        exact = model.instance_kernels(features, jnp.asarray(on_object[None, :, :, :, 0], float))
        refined = model.refine_kernels(kernels, jnp.ones((1, 1, 2)), features)
        from_mask = 2 * refined.weights[0, 0, 1] - weights[0, 0, 1]
        errors.append(float(jnp.abs(from_mask - exact.weights[0, 0, 0]).max()))
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize(
    ("changes", "is_refined"),
    [({}, True), ({"decoder": replace(DECODER, refine=False)}, False), ({"head": "none"}, False)],
    ids=["default", "no refine", "no head"],
)
def test_kernels_are_refined_unless_the_configuration_says_otherwise(changes, is_refined):
    config = replace(TINY, **changes)
    out, masks, _ = run_model(config, INPUTS)
    unrefined = masks[:, :, 1:] - config.mask_threshold
    slots = out.masks[:, :, 1:, MODAL]
    assert np.allclose(slots, unrefined[:, :, :, MODAL], atol=1e-4) != is_refined


# From kernels to answers.


def test_masks_are_cut_at_the_threshold():
    high = answer(TINY, INPUTS)
    low = answer(replace(TINY, mask_threshold=TINY.mask_threshold - 1), INPUTS)
    np.testing.assert_allclose(low.masks, high.masks + 1, atol=1e-5)


def test_fused_masks_of_absent_targets_are_empty_and_nothing_else_changes():
    complete = answer(NEVER_ABSENT, INPUTS, noise=0.1)
    presence = np.asarray(complete.presence[:, :, 0])
    threshold = float(np.sort(presence.ravel())[2:4].mean())
    cut = answer(replace(TINY, presence_threshold=threshold), INPUTS, noise=0.1)
    is_absent = presence <= threshold
    assert is_absent.sum() == 3
    for name, one, other in zip(complete._fields, complete, cut, strict=True):
        expected = np.array(one)
        if name == "masks":
            fused = expected[:, :, 0]
            fused[is_absent] = np.minimum(fused[is_absent], ABSENT_LOGIT)
        np.testing.assert_allclose(other, expected, atol=1e-5, err_msg=name)


def test_the_iou_is_the_mean_logit_of_the_prediction_and_the_stability():
    """A mask is stable where the thresholds 1 and -1 give nearly the same."""
    out, _, predicted = run_model(NEVER_ABSENT, INPUTS, noise=0.2)
    larger = np.maximum((out.masks > -1).sum((-2, -1)), 1)
    stability = (out.masks > 1).sum((-2, -1)) / larger
    assert np.ptp(stability) > 0.1
    mean = np.mean([logit(np.clip(x, 0.001, 0.999)) for x in (predicted, stability)], axis=0)
    np.testing.assert_allclose(out.iou, expit(mean), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("encoder", "patch", "side"), [("conv", 8, 16), ("sam", 8, 16), ("conv", 16, 8)]
)
def test_the_output_has_the_documented_shapes_in_float32(dtype, encoder, patch, side):
    vision = replace(TINY.vision, encoder=encoder, patch_size=patch)
    config = replace(TINY, dtype=dtype, vision=vision)
    model = nnx.eval_shape(lambda: R2SM(config, rngs=nnx.Rngs(0)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    out = nnx.eval_shape(lambda m, i: m(**i), model, input_spec(config, 2, 5))
    b, k, m = 2, 5, 1 + DECODER.slots
    assert config.mask_size == side
    assert {name: x.shape for name, x in out._asdict().items()} == {
        "amodal_logit": (b, k),
        "masks": (b, k, m, 2, side, side),
        "presence": (b, k, m),
        "iou": (b, k, m, 2),
    }
    assert {x.dtype for x in out} == {jnp.dtype("float32")}


# Promises.


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_modal_lies_within_amodal_for_random_weights(seed):
    out = answer(TINY, fake_inputs(TINY, 2, 3, seed), noise=0.5, seed=seed)
    modal, amodal = jnp.moveaxis(out.masks, 3, 0)
    assert (amodal >= modal).all() and (amodal > modal).any()
    assert ((out.iou >= 0) & (out.iou <= 1)).all()


def test_an_answer_depends_on_its_own_image_and_query_alone():
    others = fake_inputs(TINY, 2, 3, seed=9)
    expected = answer(TINY, INPUTS)
    images = {name: np.concatenate([x[:1], others[name][1:]]) for name, x in INPUTS.items()}
    assert_equal(expected, answer(TINY, images), rows=slice(0, 1))
    queries = dict(INPUTS)
    for name in ("text", "text_mask"):
        queries[name] = np.concatenate([INPUTS[name][:, :1], others[name][:, 1:]], axis=1)
    assert_equal(expected, answer(TINY, queries), queries=slice(0, 1))


def test_padding_of_text_and_image_does_not_matter():
    inputs = INPUTS | {"image_mask": INPUTS["image_mask"].copy()}
    inputs["image_mask"][:, 20:] = False
    expected = answer(TINY, inputs)
    text = np.where(inputs["text_mask"][..., None, None], inputs["text"], np.float16(77))
    assert_equal(expected, answer(TINY, inputs | {"text": text}))
    black = np.where(inputs["image_mask"][..., None], inputs["image"], np.uint8(0))
    assert_equal(expected, answer(TINY, inputs | {"image": black}), tolerance=0)


def test_bfloat16_answers_are_near_those_of_float32():
    near = answer(replace(NEVER_ABSENT, dtype="bfloat16"), INPUTS).masks
    exact = answer(NEVER_ABSENT, INPUTS).masks
    assert np.abs(np.asarray(near - exact)).mean() < 0.1 * np.asarray(exact).std() + 0.02


# SAM's mask decoder with words in place of points and boxes; test_parity.py has its numbers.


@nnx.jit
def run(model, inputs):
    return model(**inputs)


def test_answers_depend_on_their_own_query_and_its_real_tokens_only():
    config = replace(TINY, decoder=DecoderConfig("sam", dim=32, depth=2, heads=2, slots=2))
    model, inputs = R2SM(config, rngs=nnx.Rngs(0)), fake_inputs(config, 2, 3)
    # The first query keeps its words and has other padding; the others have other words.
    text = fake_inputs(config, 2, 3, seed=9)["text"]
    is_real = inputs["text_mask"][:, 0, :, None, None]
    text[:, 0] = np.where(is_real, inputs["text"][:, 0], np.float16(77))
    one, two = run(model, inputs), run(model, inputs | {"text": text})
    for name, a, b in zip(one._fields, one, two, strict=True):
        np.testing.assert_allclose(a[:, 0], b[:, 0], atol=2e-5, rtol=1e-4, err_msg=name)
    assert np.abs(np.asarray(one.masks[:, 1] - two.masks[:, 1])).max() > 1e-3
    modal, amodal = np.moveaxis(np.asarray(one.masks), 3, 0)
    assert (amodal >= modal).all() and ((one.iou >= 0) & (one.iou <= 1)).all()
