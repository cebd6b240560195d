"""SAM: the same tokens, masks and IoUs as torch `transformers`, small and with random weights, and
text in place of points and boxes."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tiny_models import TINY, fake_inputs

from r2sm_jax.config import DecoderConfig, ModelConfig, TextConfig, VisionConfig
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.models.keys import SAM, read_sam, spread_masks
from r2sm_jax.models.mask_decoder import predict_mask_logits
from r2sm_jax.models.matching import match_weights
from r2sm_jax.models.pretrained import fill_sizes, load_pretrained
from r2sm_jax.models.r2sm import R2SM, R2SMOutput
from r2sm_jax.query import MODAL

torch = pytest.importorskip("torch")
import published_models as published  # noqa: E402

EXACT = 1e-4


@pytest.fixture(scope="module")
def sam(tmp_path_factory):
    """A published SAM and its folder."""
    folder = tmp_path_factory.mktemp("sam")
    return published.write(published.sam_config(), folder), folder


def load(folder, slots: int, image_size: int = published.SAM_IMAGE):
    """Our model with SAM's weights, and the report."""
    vision = VisionConfig(image_size=image_size, patch_size=16, encoder="sam", sam=str(folder))
    text = TextConfig(layers=(1, 2), max_tokens=6, dim=20)
    config = fill_sizes(ModelConfig(vision, text, DecoderConfig("sam", slots=slots)))
    graphdef, params, constants = nnx.split(R2SM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params, constants, matches = load_pretrained(config, params, constants)
    return nnx.merge(graphdef, params, constants), matches[str(folder)]


@pytest.fixture(scope="module")
def ours(sam):
    """As many slots as SAM has spare masks."""
    return load(sam[1], slots=3)


# The image encoder


@nnx.jit
def encode(model, x):
    return model.vision(x).tokens


def images(size: int) -> np.ndarray:
    return np.random.default_rng(size).normal(size=(2, size, size, 3)).astype(np.float32)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_whole_encoder_of_sam(sam, ours, implementation):
    theirs, _ = sam
    theirs.set_attn_implementation(implementation)
    x = images(published.SAM_IMAGE)
    expected = published.nhwc(theirs.vision_encoder(published.nchw(x))[0])
    assert published.difference(encode(ours[0], x), expected) < EXACT


@pytest.mark.parametrize("size", [48, 112, 192])
def test_sam_at_another_size_interpolates_both_kinds_of_positions(sam, size):
    """`transformers` stretches relative positions on the fly; absolute ones it does not, so torch
    stretches them."""
    theirs, folder = sam
    other = published.MODELS["sam"](published.sam_config(size)).eval().vision_encoder
    weights = dict(theirs.vision_encoder.state_dict())
    side = size // 16
    grid = torch.nn.functional.interpolate(
        weights.pop("pos_embed").permute(0, 3, 1, 2), size=(side, side), mode="bicubic"
    )
    tables = {key: weights.pop(key) for key in list(weights) if "rel_pos" in key}
    other.load_state_dict(weights, strict=False)
    other.pos_embed.data = grid.permute(0, 2, 3, 1)
    for key, table in tables.items():
        _, number, _, name = key.split(".")
        getattr(other.layers[int(number)].attn, name).data = table
    x = images(size)
    model, _ = load(folder, slots=1, image_size=size)
    expected = published.nhwc(other(published.nchw(x))[0])
    assert published.difference(encode(model, x), expected) < EXACT


# The mask decoder


def prompts(theirs, kind: str):
    """Makes sparse prompts [b k t d] of points and boxes by SAM's own prompt encoder, or random
    ones, and the dense prompt."""
    rng = np.random.default_rng(0)
    points = torch.tensor(rng.uniform(0, published.SAM_IMAGE, (2, 3, 2, 2)).astype(np.float32))
    labels = torch.tensor(rng.integers(0, 2, (2, 3, 2)))
    corners = np.sort(rng.uniform(0, published.SAM_IMAGE, (2, 3, 2, 2)), axis=2)
    boxes = torch.tensor(corners.astype(np.float32)).reshape(2, 3, 4)
    sparse, dense = theirs.prompt_encoder(points, labels, boxes, None)
    if kind == "random":
        sparse = torch.tensor(rng.normal(size=(2, 4, 7, 16)).astype(np.float32))
    return sparse, dense


@nnx.jit
def decode(model, image, sparse):
    out = model.decoder.decode_prompts(image, sparse, jnp.ones(sparse.shape[:3], bool))
    return predict_mask_logits(out.kernels, out.pixel_features)[:, :, :, 0], out.iou


@pytest.mark.parametrize("kind", ["both", "random"])
def test_masks_and_ious_are_those_of_sam(sam, ours, kind):
    """Four masks: the single one, then the other three."""
    theirs, _ = sam
    image = np.random.default_rng(1).normal(size=(2, 5, 5, 16)).astype(np.float32)
    sparse, dense = prompts(theirs, kind)
    positions = theirs.get_image_wide_positional_embeddings().repeat(2, 1, 1, 1)
    inputs = published.nchw(image), positions, sparse, dense
    one = theirs.mask_decoder(*inputs, multimask_output=False)
    three = theirs.mask_decoder(*inputs, multimask_output=True)
    expected, expected_iou = (
        torch.cat(parts, 2).detach().numpy() for parts in zip(one, three, strict=True)
    )
    masks, iou = decode(ours[0], image, sparse.detach().numpy())
    assert published.difference(masks, expected) < EXACT
    assert published.difference(iou[..., 0], expected_iou) < EXACT
    assert published.mask_iou(masks, expected) >= 0.999
    np.testing.assert_array_equal(iou[..., 0], iou[..., 1])  # amodal masks start as modal ones


@pytest.mark.parametrize("size", [(480, 640), (640, 480), (77, 31), (1024, 1024), (3, 200)])
def test_masks_come_back_to_the_image_as_in_sam(size):
    from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

    logits = np.random.default_rng(0).normal(size=(2, 3, 1, 64, 64)).astype(np.float32)
    box = Letterbox(*size, 256)
    undo = SamImageProcessorPil().post_process_masks
    pad = {"height": 256, "width": 256}
    theirs = undo(torch.tensor(logits), [size] * 2, [box.resized] * 2, binarize=False, pad_size=pad)
    restored = box.undo(logits)
    assert published.difference(restored, torch.stack(theirs)) < EXACT
    assert published.mask_iou(restored, torch.stack(theirs)) >= 0.999


def test_answers_depend_on_their_own_query_and_its_real_tokens_only():
    config = replace(TINY, decoder=DecoderConfig("sam", dim=32, depth=2, heads=2, slots=2))
    graphdef, state = nnx.split(R2SM(config, rngs=nnx.Rngs(0)))
    answer = jax.jit(lambda s, i: nnx.merge(graphdef, s)(**i))
    inputs = fake_inputs(config, 2, 3)
    other = {name: value.copy() for name, value in inputs.items()}
    other["text"][:, 1:] = fake_inputs(config, 2, 3, seed=9)["text"][:, 1:]
    is_real = inputs["text_mask"][:, 0, :, None, None]
    other["text"][:, 0] = np.where(is_real, inputs["text"][:, 0], np.float16(77))
    one, two = answer(state, inputs), answer(state, other)
    for name, a, b in zip(R2SMOutput._fields, one, two, strict=True):
        np.testing.assert_allclose(a[:, 0], b[:, 0], atol=2e-5, rtol=1e-4, err_msg=name)
    modal, amodal = jnp.moveaxis(one.masks, 3, 0)
    assert np.abs(np.asarray(modal[:, 1] - two.masks[:, 1, :, MODAL])).max() > 1e-3
    assert (amodal >= modal).all() and ((one.iou >= 0) & (one.iou <= 1)).all()


# Keys


@pytest.mark.parametrize(("slots", "origins"), [(5, [0, 1, 2, 3, 1, 2]), (1, [0, 1])])
def test_slots_start_as_sams_masks_in_turn(sam, slots, origins):
    theirs, folder = sam
    model, _ = load(folder, slots)
    tokens = theirs.mask_decoder.mask_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(model.decoder.mask_tokens[...], tokens[origins])
    for token, origin in enumerate(origins):
        mlp = theirs.mask_decoder.output_hypernetworks_mlps[origin]
        kernel = mlp.proj_out.weight.detach().numpy().T
        for heads in (model.decoder.modal, model.decoder.occluded):
            np.testing.assert_array_equal(heads[token].layers[2].kernel[...], kernel)


def original_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under the names of segment-anything, written down from its modules."""
    rules = (
        (r"vision_encoder\.patch_embed\.projection", "image_encoder.patch_embed.proj"),
        (r"vision_encoder\.layers\.(\d+)\.layer_norm(\d)", r"image_encoder.blocks.\1.norm\2"),
        (r"vision_encoder\.layers", "image_encoder.blocks"),
        (r"vision_encoder\.neck\.conv1", "image_encoder.neck.0"),
        (r"vision_encoder\.neck\.layer_norm1", "image_encoder.neck.1"),
        (r"vision_encoder\.neck\.conv2", "image_encoder.neck.2"),
        (r"vision_encoder\.neck\.layer_norm2", "image_encoder.neck.3"),
        (r"vision_encoder\.", "image_encoder."),
        (
            r"shared_image_embedding\.positional_embedding",
            "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
        ),
        (r"prompt_encoder\.point_embed\.", "prompt_encoder.point_embeddings."),
        (r"prompt_encoder\.mask_embed\.", "prompt_encoder.mask_downscaling."),
        (r"(mask_decoder\.transformer.*)\.layer_norm_final_attn", r"\1.norm_final_attn"),
        (r"(mask_decoder\.transformer.*)\.layer_norm(\d)", r"\1.norm\2"),
        (r"mask_decoder\.upscale_conv1", "mask_decoder.output_upscaling.0"),
        (r"mask_decoder\.upscale_layer_norm", "mask_decoder.output_upscaling.1"),
        (r"mask_decoder\.upscale_conv2", "mask_decoder.output_upscaling.3"),
    )
    heads = {"proj_in": "layers.0", "layers.0": "layers.1", "proj_out": "layers.2"}
    renamed = {}
    for key, value in tensors.items():
        for pattern, replacement in rules:
            key, hits = re.subn("^" + pattern, replacement, key)
            if hits:
                break
        if "hypernetworks" in key or "iou_prediction" in key:
            key = re.sub(r"(proj_in|layers\.0|proj_out)", lambda m: heads[m[1]], key)
        renamed[key] = value
    return renamed


def test_the_original_names_give_the_same_weights(sam, tmp_path):
    _, folder = sam
    original = original_names(published.load(folder))
    assert not any(key.startswith("vision") for key in original)
    file = tmp_path / "sam_vit_tiny.safetensors"
    save_file(original, file)
    back, expected = read_sam(file, num_masks=4), read_sam(folder, num_masks=4)
    used = {key for key in expected if not re.match("prompt_encoder.(point|mask)_embed", key)}
    assert used <= back.keys() and all(np.array_equal(back[key], expected[key]) for key in used)


# Dimension, blocks, heads and blocks with global attention.
FULL = {
    "base": (768, 12, 12, [2, 5, 8, 11]),
    "huge": (1280, 32, 16, [7, 15, 23, 31]),
}


@pytest.mark.parametrize("size", FULL)
def test_every_key_of_the_published_sizes_has_its_place(size, tmp_path):
    """Keys and shapes only: torch makes them without memory, and all values are one zero."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "global_attn_indexes")
    config = published.transformers.SamConfig(
        vision_config=dict(zip(names, FULL[size], strict=True))
    )
    with torch.device("meta"):
        theirs = published.transformers.SamModel(config).state_dict()
    zero = np.float32(0)
    tensors = {key: np.broadcast_to(zero, tuple(value.shape)) for key, value in theirs.items()}
    config.save_pretrained(tmp_path)
    vision = VisionConfig(image_size=1024, patch_size=16, encoder="sam", sam=str(tmp_path))
    model = fill_sizes(ModelConfig(vision, decoder=DecoderConfig("sam", slots=3)))
    state = nnx.state(nnx.eval_shape(lambda: R2SM(model, rngs=nnx.Rngs(0))))
    spread = spread_masks(tensors, 4)
    report = match_weights(spread, state, SAM, tmp_path)
    # Boxes, clicks and masks as prompts, and a second copy of the frequencies.
    prompt = re.compile("prompt_encoder.(mask_embed|point_embed|not_a_point|shared_embedding)")
    assert set(report.unused) == {key for key in spread if prompt.match(key)}
    assert set(report.loaded.values()) == spread.keys() - set(report.unused)
    new = {".".join(path.split(".")[:2]) for path in report.initialised}
    assert new == {"decoder.text", "decoder.text_norm", "decoder.presence"}
