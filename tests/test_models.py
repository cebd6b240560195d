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

from r2sm_jax.config import (
    NUM_COORDINATES,
    DecoderConfig,
    ModelConfig,
    TextConfig,
    VisionConfig,
)
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


def assert_equal(
    one: R2SMOutput, other: R2SMOutput, rows=slice(None), queries=slice(None), tolerance=2e-5
) -> None:
    """The same answers for some of the images and queries."""
    for name, a, b in zip(one._fields, one, other, strict=True):
        np.testing.assert_allclose(
            a[rows, queries], b[rows, queries], atol=tolerance, rtol=1e-4, err_msg=name
        )


def shapes(tree) -> list:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def test_instance_kernels_depend_on_the_visible_pixels_only():
    model = R2SM(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    fine = jnp.asarray(rng.normal(size=(1, 4, 4, DECODER.mask_dim)), jnp.float32)
    visible = (
        jnp.zeros((1, 2, 4, 4)).at[:, 0, :, :2].set(1)
    )  # the left half, and an instance that is not there
    kernels = model.instance_kernels(ImageFeatures(fine, fine, fine), visible)
    assert kernels.weights.shape == (1, 1, 2, 2, DECODER.kernel_dim) and kernels.biases.shape == (
        1,
        1,
        2,
        2,
    )
    other = model.instance_kernels(ImageFeatures(fine, fine, fine.at[:, :, 2:].add(1)), visible)
    np.testing.assert_array_equal(kernels.weights, other.weights)
    changed = model.instance_kernels(ImageFeatures(fine, fine, fine.at[:, :, :2].add(1)), visible)
    assert (
        not np.allclose(kernels.weights[:, :, 0], changed.weights[:, :, 0])
        and np.isfinite(changed.weights).all()
    )


@pytest.mark.parametrize(
    "present, shares", [((1, -1), (0.5, 0.5)), ((1, 1), (0, 0.5)), ((-1, -1), (0, 0.5))]
)
def test_a_second_look_averages_kernels_and_leaves_the_fused_one_of_several_instances(
    present, shares
):
    model = R2SM(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    pixels = jnp.asarray(rng.normal(size=(1, 4, 4, DECODER.mask_dim)), jnp.float32)
    first = MaskKernels(
        jnp.asarray(rng.normal(size=(1, 1, 3, 2, DECODER.kernel_dim)), jnp.float32),
        jnp.zeros((1, 1, 3, 2)),
    )
    presence = jnp.array([[[-1, *present]]], jnp.float32)
    features = ImageFeatures(pixels, pixels, pixels)
    out = model.refine_kernels(first, presence, features)
    visible = jax.nn.sigmoid(predict_masks(first, pixels)[0])[:, 0] ** DECODER.refine_exponent
    again = model.instance_kernels(features, visible)
    for token, share in enumerate((shares[0], shares[1], shares[1])):
        for mine, one, other in zip(out, first, again, strict=True):
            expected = (1 - share) * one[:, :, token] + share * other[:, :, token]
            np.testing.assert_allclose(mine[:, :, token], expected, atol=1e-5)


def test_long_tails_of_a_mask_hardly_change_its_refined_kernels():
    """The instance MLP is trained on true masks. 1,008 background pixels of 0.02 weigh more than an
    object of 16 pixels, but 0.02 squared does not."""
    on_object = np.zeros((1, 32, 32, 1), bool)
    on_object[:, :4, :4] = True
    pixels = jnp.asarray(np.where(on_object, 1.0, -1.0) * np.ones(DECODER.mask_dim), jnp.float32)
    # A kernel whose logits are 4 on the object and -4, so probability 0.018, elsewhere.
    weights = jnp.zeros((1, 1, 2, 2, DECODER.kernel_dim)).at[..., 0].set(4.0)
    kernels = MaskKernels(weights, jnp.zeros((1, 1, 2, 2)))
    features = ImageFeatures(pixels, pixels, pixels)
    errors = []
    for exponent in (1.0, 2.0):
        decoder = replace(DECODER, refine_exponent=exponent)
        model = R2SM(replace(CONFIG, decoder=decoder), rngs=nnx.Rngs(0))
        exact = model.instance_kernels(features, jnp.asarray(on_object[None, :, :, :, 0], float))
        refined = model.refine_kernels(kernels, jnp.ones((1, 1, 2)), features)
        from_mask = 2 * refined.weights[0, 0, 1] - weights[0, 0, 1]
        errors.append(float(jnp.abs(from_mask - exact.weights[0, 0, 0]).max()))
    assert errors[1] < 0.2 * errors[0]


def test_a_second_look_can_be_left_out_and_is_none_without_a_mask_type():
    inputs = jax.tree.map(jnp.asarray, fake_inputs(CONFIG, 1, 2))
    with_look, without, no_type = (
        R2SM(replace(CONFIG, head=head, decoder=replace(DECODER, refine=look)), rngs=nnx.Rngs(0))
        for head, look in (("attention", True), ("attention", False), ("none", True))
    )

    @nnx.jit
    def draw_first_look(model):
        features = model.encode_image(inputs["image"], inputs["image_mask"])
        decoded = model.decode_kernels(features, inputs["text"], inputs["text_mask"])
        return predict_masks(decoded.kernels, features.fine)[0] - CONFIG.mask_threshold

    drawn = draw_first_look(without)
    answer = nnx.jit(lambda model: model(**inputs).slots.modal)
    for model in (without, no_type):
        np.testing.assert_allclose(answer(model), drawn[:, :, 1:], atol=1e-5)
    assert not np.allclose(answer(with_look), drawn[:, :, 1:], atol=1e-3)


def test_a_kernel_can_confine_a_mask_to_a_place():
    x0, y0, steep = 0.25, -0.25, 40.0
    # steep * (0.1 - (x - x0)^2 - (y - y0)^2), by a kernel on the places alone, which are scaled by
    # 2
    weights = steep * jnp.array([2 * x0, 2 * y0, -1, -1]) / 2
    bias = steep * (0.1 - x0**2 - y0**2)
    weights = jnp.concatenate(
        [jnp.ones(3), weights]
    )  # nothing is to be seen on these three channels
    kernels = MaskKernels(jnp.broadcast_to(weights, (1, 1, 1, 2, 7)), jnp.full((1, 1, 1, 2), bias))
    mask = predict_mask_logits(kernels, jnp.zeros((1, 32, 32, 3)))[0, 0, 0, 0] > 0
    at = (np.arange(32) + 0.5) / 16 - 1
    np.testing.assert_array_equal(mask, (at[None] - x0) ** 2 + (at[:, None] - y0) ** 2 < 0.1)


def test_masks_are_cut_at_the_threshold():
    inputs = fake_inputs(CONFIG, 1, 2)
    low, high = (
        make(replace(CONFIG, mask_threshold=-1.0))(**inputs),
        make(replace(CONFIG, mask_threshold=0.0))(**inputs),
    )
    for name in ("modal", "amodal"):
        np.testing.assert_allclose(getattr(low, name), getattr(high, name) + 1, atol=1e-5)


def test_fused_masks_are_empty_where_nothing_is_present_and_nothing_else_changes():
    inputs = fake_inputs(CONFIG, 2, 3)
    whole = make(replace(CONFIG, presence_threshold=-np.inf), noise=0.1)(**inputs)
    cut = float(np.sort(whole.fused.presence.ravel())[2:4].mean())
    found = make(replace(CONFIG, presence_threshold=cut), noise=0.1)(**inputs)
    there = np.asarray(whole.fused.presence) > cut
    assert there.sum() == 3
    for name, one, other in zip(whole._fields, whole, found, strict=True):
        expected = np.array(one)
        if name in ("modal", "amodal"):
            fused = expected[:, :, 0]
            fused[~there] = np.minimum(fused[~there], ABSENT_LOGIT)
        np.testing.assert_allclose(other, expected, atol=1e-5, err_msg=name)


def test_the_predicted_iou_is_between_what_the_decoder_says_and_the_stability_of_the_mask():
    """The mean of their logits. A mask is stable where the thresholds 1 and -1 draw nearly the
    same."""
    inputs, config = (
        jax.tree.map(jnp.asarray, fake_inputs(CONFIG, 1, 2)),
        replace(CONFIG, presence_threshold=-np.inf),
    )
    graphdef, state = nnx.split(R2SM(config, rngs=nnx.Rngs(0)))
    noisy = jax.tree.map(
        lambda x: x + 0.2 * np.random.default_rng(1).normal(size=x.shape).astype(np.float32), state
    )
    model = nnx.merge(graphdef, noisy)
    image = model.encode_image(inputs["image"], inputs["image_mask"])
    decoded = model.decode_kernels(image, inputs["text"], inputs["text_mask"])
    out = model(**inputs)
    drawn = [out.modal, out.amodal]
    stable = np.stack(
        [(x > 1).sum((-2, -1)) / np.maximum((x > -1).sum((-2, -1)), 1) for x in drawn], axis=-1
    )
    assert np.ptp(stable) > 0.1
    mean = np.mean([logit(np.clip(x, 0.001, 0.999)) for x in (decoded.iou, stable)], axis=0)
    np.testing.assert_allclose(out.iou, expit(mean), atol=1e-4)


# Shapes and dtypes of every module.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoder", ["conv", "sam"])
def test_the_whole_model_gives_the_documented_shapes_in_float32(dtype, encoder):
    config = replace(CONFIG, dtype=dtype, vision=replace(VISION, encoder=encoder))
    model = nnx.eval_shape(lambda: R2SM(config, rngs=nnx.Rngs(0)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    out = nnx.eval_shape(lambda m, i: m(**i), model, input_spec(config, 2, 5))
    b, k, q, s = 2, 5, DECODER.slots, config.mask_size
    assert s == 16
    assert {name: x.shape for name, x in out._asdict().items()} == {
        "amodal_logit": (b, k),
        "modal": (b, k, 1 + q, s, s),
        "amodal": (b, k, 1 + q, s, s),
        "presence": (b, k, 1 + q),
        "iou": (b, k, 1 + q, 2),
    }
    assert {x.dtype for x in out} == {FLOAT32}


@pytest.mark.parametrize("patch", [8, 16])
def test_the_conv_stem_hands_over_the_two_strides_before_the_tokens(patch):
    config = replace(VISION, patch_size=patch)
    encoder = nnx.eval_shape(lambda: VisionEncoder(config, dtype=BFLOAT16, rngs=nnx.Rngs(0)))
    image = jax.ShapeDtypeStruct((2, 32, 32, 3), BFLOAT16)
    out = nnx.eval_shape(lambda m, x: m(x), encoder, image)
    assert out.tokens.shape == (2, 32 // patch, 32 // patch, 24) and out.tokens.dtype == BFLOAT16
    sizes = [128 // patch, 64 // patch]
    assert [s.shape[1:] for s in out.skips] == [
        (n, n, 32) for n in sizes
    ] and encoder.skip_dims == (32, 32)


def test_tokens_of_16_pixels_take_the_skips_of_stride_4_and_8():
    config = replace(CONFIG, vision=replace(VISION, patch_size=16))
    out = nnx.eval_shape(lambda i: R2SM(config, rngs=nnx.Rngs(0))(**i), input_spec(config, 1, 2))
    assert out.modal.shape == (1, 2, 1 + DECODER.slots, 8, 8)


def test_the_patch_stem_has_no_skips():
    encoder = nnx.eval_shape(
        lambda: VisionEncoder(replace(VISION, encoder="sam"), dtype=FLOAT32, rngs=nnx.Rngs(0))
    )
    out = nnx.eval_shape(lambda m, x: m(x), encoder, jax.ShapeDtypeStruct((1, 32, 32, 3), FLOAT32))
    assert (
        out.tokens.shape == (1, 4, 4, 24)
        and out.skips == (None, None)
        and encoder.skip_dims == (0, 0)
    )


@pytest.mark.parametrize("dims", [(0, 0), (5, 7), (0, 7)])
def test_the_pixel_decoder_quadruples_the_token_resolution(dims):
    decoder = nnx.eval_shape(lambda: PixelDecoder(CONFIG, dims, rngs=nnx.Rngs(0)))
    shapes = [(2, 16, 16, dims[0]), (2, 8, 8, dims[1])]
    skips = [jax.ShapeDtypeStruct(shape, FLOAT32) if shape[-1] else None for shape in shapes]
    features = VisionFeatures(jax.ShapeDtypeStruct((2, 4, 4, 24), FLOAT32), tuple(skips))
    out = nnx.eval_shape(lambda m, f: m(f), decoder, features)
    assert [x.shape for x in out] == [(2, 8, 8, 16), (2, 16, 16, DECODER.mask_dim)]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_linear_and_mlp_are_dense_layers_over_any_leading_axes(dtype):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 6)).astype(np.float32)
    layer = Linear(6, 5, dtype=dtype, rngs=nnx.Rngs(0))
    wanted = x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
    out = layer(jnp.asarray(x))
    assert out.dtype == dtype
    np.testing.assert_allclose(
        out.astype(jnp.float32), wanted, atol=1e-5 if dtype == FLOAT32 else 0.05
    )
    assert MLP((6, 7, 2), dtype=dtype, rngs=nnx.Rngs(0))(jnp.asarray(x)).shape == (2, 3, 4, 2)


def test_windows_that_do_not_divide_the_grid_are_padded():
    config = replace(
        VISION, image_size=40, window_size=2, global_blocks=(1,), relative_positions=True
    )  # 5 tokens
    encoder = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0))
    image = jnp.asarray(np.random.default_rng(0).normal(size=(2, 40, 40, 3)), jnp.float32)
    out = encoder(image).tokens
    assert out.shape == (2, 5, 5, 24) and np.isfinite(out).all()


def test_a_window_sees_nothing_outside_it():
    config = replace(VISION, image_size=32, depth=1, window_size=2)
    block = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0)).blocks[0]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 4, 32)), jnp.float32)
    difference = np.abs(np.asarray(block(x) - block(x.at[0, 0, 0, 0].add(1.0)))).max(-1)[0] > 1e-6
    assert difference[:2, :2].all() and difference.sum() == 4


def test_relative_positions_start_without_effect_and_then_matter():
    config = replace(VISION, depth=1, relative_positions=True)
    attention = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0)).blocks[0].attention
    plain = (
        VisionEncoder(replace(config, relative_positions=False), dtype=FLOAT32, rngs=nnx.Rngs(0))
        .blocks[0]
        .attention
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 4, 32)), jnp.float32)
    np.testing.assert_allclose(attention(x), plain(x), atol=1e-6)
    table = np.zeros((7, 16), np.float32)
    table[3 + 1] = 50.0  # strongly for or against the row above
    attention.rel_pos_h[...] = jnp.asarray(table)
    moved = attention(x)
    assert np.abs(np.asarray(moved[:, 1:] - plain(x)[:, 1:])).max() > 1e-3
    np.testing.assert_allclose(
        moved[:, 0], plain(x)[:, 0], atol=1e-5
    )  # the first row has none above it


def test_masks_are_dot_products_of_kernels_and_pixels_with_their_places():
    rng = np.random.default_rng(0)
    kernels, biases, pixels = (
        rng.normal(size=s).astype(np.float32)
        for s in ((2, 3, 4, 2, 5 + NUM_COORDINATES), (2, 3, 4, 2), (2, 6, 6, 5))
    )
    out = predict_mask_logits(
        MaskKernels(jnp.asarray(kernels), jnp.asarray(biases)), jnp.asarray(pixels)
    )
    placed = np.concatenate(
        [pixels, np.broadcast_to(coordinate_features(6), (2, 6, 6, NUM_COORDINATES))], axis=-1
    )
    wanted = np.einsum("bkqtc,byxc->bkqtyx", kernels, placed) + biases[..., None, None]
    np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_masks_of_queries_with_pixels_of_their_own_are_dot_products_alone():
    rng = np.random.default_rng(0)
    kernels, biases, pixels = (
        rng.normal(size=s).astype(np.float32)
        for s in ((2, 3, 4, 2, 5), (2, 3, 4, 2), (2, 3, 6, 6, 5))
    )
    out = predict_mask_logits(
        MaskKernels(jnp.asarray(kernels), jnp.asarray(biases)), jnp.asarray(pixels)
    )
    wanted = np.einsum("bkqtc,bkyxc->bkqtyx", kernels, pixels) + biases[..., None, None]
    np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_the_default_encoder_is_what_it_was_before_published_weights_could_be_loaded():
    """Names, shapes and the draw of each parameter, which depends on all that are drawn before
    it."""
    state = nnx.to_flat_state(
        nnx.state(VisionEncoder(VisionConfig(), dtype=FLOAT32, rngs=nnx.Rngs(0)))
    )
    names = "".join(f"{'.'.join(map(str, path))}{leaf.shape}" for path, leaf in state)
    assert (
        hashlib.sha256(names.encode()).hexdigest()[:16] == "d9bdf13119fa278b" and len(state) == 57
    )
    assert all(type(leaf) is nnx.Param for _, leaf in state)
    sums = {
        path[0]: float(jnp.abs(leaf[...]).sum())
        for path, leaf in state
        if path[0] in ("positions", "neck2")
    }
    assert sums == pytest.approx({"positions": 398.61572, "neck2": 3572.4138}, rel=1e-5)


# Promises.


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3))
def test_modal_lies_within_amodal_for_any_tokens_and_pixels(seed, scale):
    rng = np.random.default_rng(seed)
    kernels, biases, pixels = (
        jnp.asarray(rng.normal(scale=scale, size=s), jnp.float32)
        for s in ((1, 2, 3, 2, 8), (1, 2, 3, 2), (1, 4, 4, 4))
    )
    modal, amodal = predict_masks(MaskKernels(kernels, biases), pixels)
    assert not ((modal > 0) & ~(amodal > 0)).any()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_modal_lies_within_amodal_for_random_weights(seed):
    out = make(seed=seed, noise=0.5)(**fake_inputs(CONFIG, 3, 2, seed))
    assert (out.amodal >= out.modal).all() and (out.amodal > out.modal).any()
    assert ((out.iou >= 0) & (out.iou <= 1)).all()


def test_an_answer_does_not_depend_on_other_images(model):
    inputs = fake_inputs(CONFIG, 3, 2)
    others = {name: value.copy() for name, value in inputs.items()}
    for name, value in fake_inputs(CONFIG, 3, 2, seed=9).items():
        others[name][1:] = value[1:]
    assert_equal(model(**inputs), model(**others), rows=slice(0, 1))


def test_an_answer_does_not_depend_on_other_queries(model):
    inputs = fake_inputs(CONFIG, 3, 2)
    others = {name: value.copy() for name, value in inputs.items()}
    for name in ("text", "text_mask"):
        others[name][:, 1:] = fake_inputs(CONFIG, 3, 2, seed=9)[name][:, 1:]
    assert_equal(model(**inputs), model(**others), queries=slice(0, 1))


def test_padding_of_text_does_not_matter(model):
    inputs = fake_inputs(CONFIG, 3, 2)
    rubbish = np.where(inputs["text_mask"][..., None, None], inputs["text"], np.float16(77))
    assert_equal(model(**inputs), model(**inputs | {"text": rubbish}))


def test_content_of_letterbox_padding_does_not_matter(model):
    inputs = fake_inputs(CONFIG, 3, 2)
    inputs["image_mask"][:, 20:] = False
    black = np.where(inputs["image_mask"][..., None], inputs["image"], np.uint8(0))
    assert_equal(model(**inputs), model(**inputs | {"image": black}), tolerance=0)


def test_bfloat16_answers_are_near_those_of_float32():
    """But for the decision that nothing is present, which may change for a query at its
    threshold."""
    inputs, config = fake_inputs(CONFIG, 3, 2), replace(CONFIG, presence_threshold=-np.inf)
    near, exact = (
        make(replace(config, dtype=dtype))(**inputs) for dtype in ("bfloat16", "float32")
    )
    assert (
        np.abs(np.asarray(near.modal - exact.modal)).mean()
        < 0.1 * np.asarray(exact.modal).std() + 0.02
    )


def test_fake_inputs_have_the_input_spec():
    spec, fake = input_spec(CONFIG, 3, 2), fake_inputs(CONFIG, 3, 2)
    assert {k: (v.shape, v.dtype) for k, v in spec.items()} == {
        k: (v.shape, v.dtype) for k, v in fake.items()
    }
    assert fake["text_mask"].any(-1).all()
