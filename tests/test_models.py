"""The segmenter: its parts by hand, the shapes of its output, and what holds for any weights."""

import hashlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_inputs import fake_inputs
from flax import nnx
from hypothesis import given, settings, strategies as st
from scipy.special import expit, logit

from r2sm_jax.config import NUM_COORDINATES, DecoderConfig, ModelConfig, TextConfig, VisionConfig
from r2sm_jax.models.image_encoder import VisionEncoder, VisionFeatures
from r2sm_jax.models.layers import MLP, Linear
from r2sm_jax.models.mask_decoder import (
    MaskKernels,
    PixelDecoder,
    coordinate_features,
    predict_mask_logits,
    predict_masks,
)
from r2sm_jax.models.r2sm import ABSENT_LOGIT, R2SM, ImageFeatures, R2SMOutput, input_spec

VISION = VisionConfig(image_size=32, patch_size=8, dim=32, depth=2, heads=2, mlp_dim=64, out_dim=24)
DECODER = DecoderConfig(dim=32, depth=1, heads=2, mlp_dim=64, slots=3, fine_dim=16, mask_dim=8)
CONFIG = ModelConfig(VISION, TextConfig(layers=(1, 2), max_tokens=10, dim=20), DECODER)
NEVER_ABSENT = replace(CONFIG, presence_threshold=-np.inf)
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def make(config: ModelConfig = CONFIG, seed: int = 0, noise: float = 0):
    """The model as a jitted function of its inputs, with noise on all weights if asked for."""
    graphdef, state = nnx.split(R2SM(config, rngs=nnx.Rngs(seed)))
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda x: x + noise * rng.normal(size=x.shape).astype(np.float32), state)
    answer = jax.jit(lambda state, inputs: nnx.merge(graphdef, state)(**inputs))
    return lambda **inputs: answer(state, inputs)


@pytest.fixture(scope="module")
def model():
    return make()


def normal(*shape: int, seed: int = 0, scale: float = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), jnp.float32)


def assert_equal(
    one: R2SMOutput, other: R2SMOutput, rows=slice(None), queries=slice(None), tolerance=2e-5
) -> None:
    """The same answers for some of the images and queries."""
    for name, a, b in zip(one._fields, one, other, strict=True):
        np.testing.assert_allclose(
            a[rows, queries], b[rows, queries], atol=tolerance, rtol=1e-4, err_msg=name
        )


# Kernels and masks by hand.


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


def test_instance_kernels_depend_on_their_own_pixels():
    model = R2SM(CONFIG, rngs=nnx.Rngs(0))
    pixels = normal(1, 4, 4, DECODER.mask_dim)
    # The left half, and an instance that is not there.
    regions = jnp.zeros((1, 2, 4, 4)).at[:, 0, :, :2].set(1)

    def kernels_of(pixels):
        return model.instance_kernels(ImageFeatures(pixels, pixels, pixels), regions).weights

    kernels = kernels_of(pixels)
    assert kernels.shape == (1, 1, 2, 2, DECODER.kernel_dim) and np.isfinite(kernels).all()
    np.testing.assert_array_equal(kernels, kernels_of(pixels.at[:, :, 2:].add(1)))
    changed = kernels_of(pixels.at[:, :, :2].add(1))
    assert not np.allclose(kernels[:, :, 0], changed[:, :, 0])


@pytest.mark.parametrize(
    "present, shares", [((1, -1), (0.5, 0.5)), ((1, 1), (0, 0.5)), ((-1, -1), (0, 0.5))]
)
def test_refined_kernels_by_hand(present, shares):
    """Slots take the mean of both kernels, the fused mask only where one slot has a target."""
    model = R2SM(CONFIG, rngs=nnx.Rngs(0))
    pixels = normal(1, 4, 4, DECODER.mask_dim)
    features = ImageFeatures(pixels, pixels, pixels)
    first = MaskKernels(normal(1, 1, 3, 2, DECODER.kernel_dim), jnp.zeros((1, 1, 3, 2)))
    refined = model.refine_kernels(first, jnp.array([[[-1.0, *present]]]), features)
    regions = jax.nn.sigmoid(predict_masks(first, pixels)[0])[:, 0] ** DECODER.refine_exponent
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
    weights = jnp.zeros((1, 1, 2, 2, DECODER.kernel_dim)).at[..., 0].set(4.0)
    kernels = MaskKernels(weights, jnp.zeros((1, 1, 2, 2)))
    errors = []
    for exponent in (1.0, 2.0):
        decoder = replace(DECODER, refine_exponent=exponent)
        model = R2SM(replace(CONFIG, decoder=decoder), rngs=nnx.Rngs(0))
        exact = model.instance_kernels(features, jnp.asarray(on_object[None, :, :, :, 0], float))
        refined = model.refine_kernels(kernels, jnp.ones((1, 1, 2)), features)
        from_mask = 2 * refined.weights[0, 0, 1] - weights[0, 0, 1]
        errors.append(float(jnp.abs(from_mask - exact.weights[0, 0, 0]).max()))
    assert errors[1] < 0.2 * errors[0]


def test_kernels_are_refined_unless_the_configuration_says_otherwise():
    inputs = jax.tree.map(jnp.asarray, fake_inputs(CONFIG, 1, 2))

    @nnx.jit
    def unrefined(model):
        features = model.encode_image(inputs["image"], inputs["image_mask"])
        decoded = model.decode_kernels(features, inputs["text"], inputs["text_mask"])
        return predict_masks(decoded.kernels, features.fine)[0][:, :, 1:] - CONFIG.mask_threshold

    slots = nnx.jit(lambda model: model(**inputs).slots.modal)
    for head, refine, same in (("attention", True, False), ("attention", False, True)):
        config = replace(CONFIG, head=head, decoder=replace(DECODER, refine=refine))
        model = R2SM(config, rngs=nnx.Rngs(0))
        assert np.allclose(slots(model), unrefined(model), atol=1e-4) == same
    no_type = R2SM(replace(CONFIG, head="none"), rngs=nnx.Rngs(0))
    assert np.allclose(slots(no_type), unrefined(no_type), atol=1e-4)


# From kernels to answers.


def test_masks_are_cut_at_the_threshold():
    inputs = fake_inputs(CONFIG, 1, 2)
    low = make(replace(CONFIG, mask_threshold=-1.0))(**inputs)
    high = make(replace(CONFIG, mask_threshold=0.0))(**inputs)
    np.testing.assert_allclose(low.modal, high.modal + 1, atol=1e-5)
    np.testing.assert_allclose(low.amodal, high.amodal + 1, atol=1e-5)


def test_fused_masks_of_absent_targets_are_empty_and_nothing_else_changes():
    inputs = fake_inputs(CONFIG, 2, 3)
    complete = make(NEVER_ABSENT, noise=0.1)(**inputs)
    threshold = float(np.sort(complete.fused.presence.ravel())[2:4].mean())
    cut = make(replace(CONFIG, presence_threshold=threshold), noise=0.1)(**inputs)
    is_absent = np.asarray(complete.fused.presence) <= threshold
    assert is_absent.sum() == 3
    for name, one, other in zip(complete._fields, complete, cut, strict=True):
        expected = np.array(one)
        if name in ("modal", "amodal"):
            fused = expected[:, :, 0]
            fused[is_absent] = np.minimum(fused[is_absent], ABSENT_LOGIT)
        np.testing.assert_allclose(other, expected, atol=1e-5, err_msg=name)


def test_the_iou_is_the_mean_logit_of_the_prediction_and_the_stability():
    """A mask is stable where the thresholds 1 and -1 give nearly the same."""
    inputs = jax.tree.map(jnp.asarray, fake_inputs(CONFIG, 1, 2))
    graphdef, state = nnx.split(R2SM(NEVER_ABSENT, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), state)
    model = nnx.merge(graphdef, state)
    features = model.encode_image(inputs["image"], inputs["image_mask"])
    decoded = model.decode_kernels(features, inputs["text"], inputs["text_mask"])
    out = model(**inputs)
    stability = []
    for mask in (out.modal, out.amodal):
        larger = np.maximum((mask > -1).sum((-2, -1)), 1)
        stability.append((mask > 1).sum((-2, -1)) / larger)
    stability = np.stack(stability, axis=-1)
    assert np.ptp(stability) > 0.1
    mean = np.mean([logit(np.clip(x, 0.001, 0.999)) for x in (decoded.iou, stability)], axis=0)
    np.testing.assert_allclose(out.iou, expit(mean), atol=1e-4)


# Shapes and dtypes.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("encoder", "patch", "side"), [("conv", 8, 16), ("sam", 8, 16), ("conv", 16, 8)]
)
def test_the_output_has_the_documented_shapes_in_float32(dtype, encoder, patch, side):
    config = replace(CONFIG, dtype=dtype, vision=replace(VISION, encoder=encoder, patch_size=patch))
    model = nnx.eval_shape(lambda: R2SM(config, rngs=nnx.Rngs(0)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    out = nnx.eval_shape(lambda m, i: m(**i), model, input_spec(config, 2, 5))
    b, k, m = 2, 5, 1 + DECODER.slots
    assert config.mask_size == side
    assert {name: x.shape for name, x in out._asdict().items()} == {
        "amodal_logit": (b, k),
        "modal": (b, k, m, side, side),
        "amodal": (b, k, m, side, side),
        "presence": (b, k, m),
        "iou": (b, k, m, 2),
    }
    assert {x.dtype for x in out} == {FLOAT32}


@pytest.mark.parametrize(("encoder", "patch"), [("conv", 8), ("conv", 16), ("sam", 8)])
def test_stems_give_tokens_and_the_two_strides_before_them(encoder, patch):
    """SAM's patch embedding has no skips."""
    config = replace(VISION, encoder=encoder, patch_size=patch)
    model = nnx.eval_shape(lambda: VisionEncoder(config, dtype=BFLOAT16, rngs=nnx.Rngs(0)))
    image = jax.ShapeDtypeStruct((2, 32, 32, 3), BFLOAT16)
    out = nnx.eval_shape(lambda m, x: m(x), model, image)
    grid = 32 // patch
    assert out.tokens.shape == (2, grid, grid, 24) and out.tokens.dtype == BFLOAT16
    if encoder == "sam":
        assert out.skips == (None, None) and model.skip_dims == (0, 0)
    else:
        assert [x.shape[1:] for x in out.skips] == [(n, n, 32) for n in (4 * grid, 2 * grid)]
        assert model.skip_dims == (32, 32)


@pytest.mark.parametrize("dims", [(0, 0), (5, 7), (0, 7)])
def test_the_pixel_decoder_quadruples_the_resolution(dims):
    decoder = nnx.eval_shape(lambda: PixelDecoder(CONFIG, dims, rngs=nnx.Rngs(0)))
    shapes = [(2, 16, 16, dims[0]), (2, 8, 8, dims[1])]
    skips = [jax.ShapeDtypeStruct(shape, FLOAT32) if shape[-1] else None for shape in shapes]
    features = VisionFeatures(jax.ShapeDtypeStruct((2, 4, 4, 24), FLOAT32), tuple(skips))
    out = nnx.eval_shape(lambda m, f: m(f), decoder, features)
    assert [x.shape for x in out] == [(2, 8, 8, 16), (2, 16, 16, DECODER.mask_dim)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(FLOAT32, 1e-5), (BFLOAT16, 0.05)])
def test_dense_layers_take_any_leading_axes(dtype, tolerance):
    x = normal(2, 3, 4, 6)
    layer = Linear(6, 5, dtype=dtype, rngs=nnx.Rngs(0))
    out = layer(x)
    assert out.dtype == dtype
    expected = x @ layer.kernel[...] + layer.bias[...]
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=tolerance)
    assert MLP((6, 7, 2), dtype=dtype, rngs=nnx.Rngs(0))(x).shape == (2, 3, 4, 2)


def test_fake_inputs_have_the_input_spec():
    spec, fake = input_spec(CONFIG, 3, 2), fake_inputs(CONFIG, 3, 2)
    assert fake.keys() == spec.keys() and fake["text_mask"].any(-1).all()
    assert all((fake[k].shape, fake[k].dtype) == (v.shape, v.dtype) for k, v in spec.items())


# The image encoder.


def test_windows_see_nothing_outside_and_need_not_divide_the_grid():
    config = replace(VISION, depth=1, window_size=2)
    block = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0)).blocks[0]
    x = normal(1, 4, 4, 32)
    changes = np.abs(np.asarray(block(x) - block(x.at[0, 0, 0, 0].add(1.0)))).max(-1)[0] > 1e-6
    assert changes[:2, :2].all() and changes.sum() == 4

    config = replace(
        VISION, image_size=40, window_size=2, global_blocks=(1,), relative_positions=True
    )
    tokens = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0))(normal(2, 40, 40, 3)).tokens
    assert tokens.shape == (2, 5, 5, 24) and np.isfinite(tokens).all()


def test_relative_positions_start_without_effect_and_then_matter():
    config = replace(VISION, depth=1, relative_positions=True)
    attention = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0)).blocks[0].attention
    config = replace(config, relative_positions=False)
    plain = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0)).blocks[0].attention
    x = normal(1, 4, 4, 32)
    np.testing.assert_allclose(attention(x), plain(x), atol=1e-6)
    # Strongly for or against the row above, which the first row does not have.
    attention.rel_pos_h[...] = jnp.zeros((7, 16)).at[3 + 1].set(50.0)
    moved = attention(x)
    assert np.abs(np.asarray(moved[:, 1:] - plain(x)[:, 1:])).max() > 1e-3
    np.testing.assert_allclose(moved[:, 0], plain(x)[:, 0], atol=1e-5)


def test_the_default_encoder_is_unchanged():
    """Names, shapes and initial values of its parameters; each depends on all drawn before it."""
    encoder = VisionEncoder(VisionConfig(), dtype=FLOAT32, rngs=nnx.Rngs(0))
    state = nnx.to_flat_state(nnx.state(encoder))
    names = "".join(f"{'.'.join(map(str, path))}{leaf.shape}" for path, leaf in state)
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == "d9bdf13119fa278b"
    assert len(state) == 57 and all(type(leaf) is nnx.Param for _, leaf in state)
    parts = ("positions", "neck2")
    sums = {path[0]: float(jnp.abs(x[...]).sum()) for path, x in state if path[0] in parts}
    assert sums == pytest.approx({"positions": 398.61572, "neck2": 3572.4138}, rel=1e-5)


# Promises.


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3))
def test_modal_lies_within_amodal_for_any_kernels_and_pixels(seed, scale):
    kernels = MaskKernels(normal(1, 2, 3, 2, 8, seed=seed, scale=scale), jnp.zeros((1, 2, 3, 2)))
    modal, amodal = predict_masks(kernels, normal(1, 4, 4, 4, seed=seed + 1, scale=scale))
    assert not ((modal > 0) & ~(amodal > 0)).any()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_modal_lies_within_amodal_for_random_weights(seed):
    out = make(seed=seed, noise=0.5)(**fake_inputs(CONFIG, 3, 2, seed))
    assert (out.amodal >= out.modal).all() and (out.amodal > out.modal).any()
    assert ((out.iou >= 0) & (out.iou <= 1)).all()


def test_an_answer_depends_on_its_own_image_and_query_alone(model):
    inputs, others = fake_inputs(CONFIG, 3, 2), fake_inputs(CONFIG, 3, 2, seed=9)
    answer = model(**inputs)
    images = {name: np.concatenate([x[:1], others[name][1:]]) for name, x in inputs.items()}
    assert_equal(answer, model(**images), rows=slice(0, 1))
    queries = dict(inputs)
    for name in ("text", "text_mask"):
        queries[name] = np.concatenate([inputs[name][:, :1], others[name][:, 1:]], axis=1)
    assert_equal(answer, model(**queries), queries=slice(0, 1))


def test_padding_of_text_and_image_does_not_matter(model):
    inputs = fake_inputs(CONFIG, 3, 2)
    inputs["image_mask"][:, 20:] = False
    answer = model(**inputs)
    text = np.where(inputs["text_mask"][..., None, None], inputs["text"], np.float16(77))
    assert_equal(answer, model(**inputs | {"text": text}))
    black = np.where(inputs["image_mask"][..., None], inputs["image"], np.uint8(0))
    assert_equal(answer, model(**inputs | {"image": black}), tolerance=0)


def test_bfloat16_answers_are_near_those_of_float32():
    inputs = fake_inputs(CONFIG, 3, 2)
    near = make(replace(NEVER_ABSENT, dtype="bfloat16"))(**inputs).modal
    exact = make(NEVER_ABSENT)(**inputs).modal
    assert np.abs(np.asarray(near - exact)).mean() < 0.1 * np.asarray(exact).std() + 0.02
