"""SAM's decoder: the same masks and IoUs as torch `transformers`, and text in place of points and
boxes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY, fake_inputs

from r2sm_jax.config import DecoderConfig, ModelConfig, TextConfig, VisionConfig
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.models.keys import SAM
from r2sm_jax.models.mask_decoder import predict_mask_logits
from r2sm_jax.models.matching import match_weights
from r2sm_jax.models.pretrained import fill_sizes, load_pretrained
from r2sm_jax.models.r2sm import R2SM, R2SMOutput

CONFIG = replace(TINY, decoder=DecoderConfig("sam", dim=32, depth=2, heads=2, slots=2))


def test_answers_depend_on_their_own_query_and_its_real_tokens_only():
    graphdef, state = nnx.split(R2SM(CONFIG, rngs=nnx.Rngs(0)))
    answer = jax.jit(lambda s, i: nnx.merge(graphdef, s)(**i))
    inputs = fake_inputs(CONFIG, 2, 3)
    other = {name: value.copy() for name, value in inputs.items()}
    other["text"][:, 1:] = fake_inputs(CONFIG, 2, 3, seed=9)["text"][:, 1:]
    other["text"][:, 0] = np.where(
        inputs["text_mask"][:, 0, :, None, None], inputs["text"][:, 0], np.float16(77)
    )
    one, two = answer(state, inputs), answer(state, other)
    for name, a, b in zip(R2SMOutput._fields, one, two, strict=True):
        np.testing.assert_allclose(a[:, 0], b[:, 0], atol=2e-5, rtol=1e-4, err_msg=name)
    assert np.abs(np.asarray(one.modal[:, 1] - two.modal[:, 1])).max() > 1e-3
    assert (one.amodal >= one.modal).all() and ((one.iou >= 0) & (one.iou <= 1)).all()


torch = pytest.importorskip("torch")
import published_models as published  # noqa: E402


@pytest.fixture(scope="module")
def sam(tmp_path_factory):
    """A published SAM, ours with its weights and as many slots as it has spare masks, and the
    report."""
    folder = tmp_path_factory.mktemp("sam")
    theirs = published.write(published.sam_config(), folder)
    return theirs, *load(folder, slots=3)


def load(folder, slots: int):
    vision = VisionConfig(
        image_size=published.SAM_IMAGE, patch_size=16, encoder="sam", sam=str(folder)
    )
    config = ModelConfig(
        vision,
        TextConfig(layers=(1, 2), max_tokens=6, dim=20),
        DecoderConfig("sam", slots=slots),
    )
    config = fill_sizes(config)
    graphdef, params, constants = nnx.split(R2SM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params, constants, matches = load_pretrained(config, params, constants)
    return nnx.merge(graphdef, params, constants), matches[str(folder)]


def prompts(theirs, kind: str, batch: int):
    """Makes sparse prompts [b k t d] of points and boxes by SAM's own prompt encoder, or random
    ones, and the dense prompt."""
    rng = np.random.default_rng(0)
    points = torch.tensor(rng.uniform(0, published.SAM_IMAGE, (batch, 3, 2, 2)).astype(np.float32))
    labels = torch.tensor(rng.integers(0, 2, (batch, 3, 2)))
    corners = np.sort(rng.uniform(0, published.SAM_IMAGE, (batch, 3, 2, 2)), axis=2)
    boxes = torch.tensor(corners.astype(np.float32)).reshape(batch, 3, 4)
    sparse, dense = theirs.prompt_encoder(points, labels, boxes, None)
    if kind == "random":
        sparse = torch.tensor(rng.normal(size=(batch, 4, 7, 16)).astype(np.float32))
    return sparse, dense


@nnx.jit
def decode(model, image, sparse):
    out = model.decoder.decode_prompts(image, sparse, jnp.ones(sparse.shape[:3], bool))
    return predict_mask_logits(out.kernels, out.pixel_features)[:, :, :, 0], out.iou


def reference(theirs, image, sparse, dense):
    """SAM's four masks and their IoUs: the single one, then the other three."""
    positions = theirs.get_image_wide_positional_embeddings().repeat(len(image), 1, 1, 1)
    inputs = published.nchw(image), positions, sparse, dense
    masks, iou = theirs.mask_decoder(*inputs, multimask_output=False)
    more_masks, more_iou = theirs.mask_decoder(*inputs, multimask_output=True)
    masks, iou = torch.cat([masks, more_masks], 2), torch.cat([iou, more_iou], 2)
    return masks.detach().numpy(), iou.detach().numpy()


@pytest.mark.parametrize("kind", ["both", "random"])
def test_masks_and_ious_are_those_of_sam(sam, kind):
    theirs, model, _ = sam
    image = np.random.default_rng(1).normal(size=(2, 5, 5, 16)).astype(np.float32)
    sparse, dense = prompts(theirs, kind, batch=2)
    masks, iou = decode(model, image, sparse.detach().numpy())
    expected, expected_iou = reference(theirs, image, sparse, dense)
    assert published.difference(masks, expected) < 1e-4
    assert published.difference(iou[..., 0], expected_iou) < 1e-4
    assert published.mask_iou(masks, expected) >= 0.999
    np.testing.assert_array_equal(iou[..., 0], iou[..., 1])  # amodal masks start as modal ones


def test_from_pixels_to_masks(sam):
    theirs, model, _ = sam
    x = np.random.default_rng(2).normal(size=(2, 80, 80, 3)).astype(np.float32)
    sparse, dense = prompts(theirs, "both", batch=2)
    tokens = published.nhwc(theirs.vision_encoder(published.nchw(x))[0])
    our_tokens = nnx.jit(lambda m, x: m(x).tokens)(model.vision, x)
    masks, _ = decode(model, our_tokens, sparse.detach().numpy())
    assert published.difference(masks, reference(theirs, tokens, sparse, dense)[0]) < 1e-4


@pytest.mark.parametrize("size", [(480, 640), (640, 480), (77, 31), (1024, 1024), (3, 200)])
def test_masks_come_back_to_the_image_as_in_sam(size):
    from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

    logits = np.random.default_rng(0).normal(size=(2, 3, 1, 64, 64)).astype(np.float32)
    box = Letterbox(*size, 256)
    undo = SamImageProcessorPil().post_process_masks
    pad = {"height": 256, "width": 256}
    theirs = undo(torch.tensor(logits), [size] * 2, [box.resized] * 2, binarize=False, pad_size=pad)
    ours = box.undo(logits)
    assert published.difference(ours, torch.stack(theirs)) < 1e-4
    assert published.mask_iou(ours, torch.stack(theirs)) >= 0.999


def test_what_became_of_every_key(sam):
    theirs, _, report = sam
    # Boxes, clicks and masks as prompts.
    unused_parts = ("mask_embed", "point_embed", "not_a_point_embed")
    keys = theirs.state_dict().keys() - {"prompt_encoder.shared_embedding.positional_embedding"}
    unused = {k for k in keys if k.startswith(tuple(f"prompt_encoder.{p}" for p in unused_parts))}
    assert set(report.unused) == unused and set(report.loaded.values()) == keys - unused
    assert len(report.copied) == 4 * 6
    assert all(path.startswith("decoder.occluded.") for path in report.copied)
    new = {".".join(path.split(".")[:2]) for path in report.initialised}
    assert new == {"decoder.text", "decoder.text_norm", "decoder.presence"}
    assert len(report.lines()) == sum(map(len, report[1:]))


def test_slots_start_as_sams_masks_in_turn(sam, tmp_path):
    theirs, _, _ = sam
    theirs.save_pretrained(tmp_path)
    model, report = load(tmp_path, slots=5)
    tokens = theirs.mask_decoder.mask_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(model.decoder.mask_tokens[...], tokens[[0, 1, 2, 3, 1, 2]])
    kernel = theirs.mask_decoder.output_hypernetworks_mlps[2].proj_out.weight.detach().numpy().T
    for mlp in (model.decoder.modal[2], model.decoder.modal[5], model.decoder.occluded[5]):
        np.testing.assert_array_equal(mlp.layers[2].kernel[...], kernel)
    path = "decoder.modal.{}.layers.2.kernel"
    assert report.copied[path.format(5)] == report.loaded[path.format(2)]

    model, report = load(tmp_path, slots=1)
    assert len(model.decoder.modal) == 2 and model.decoder.mask_tokens.shape == (2, 16)
    assert "mask_decoder.output_hypernetworks_mlps.3.proj_in.bias" in report.unused


# Dimension, blocks, heads and blocks with global attention.
FULL = {
    "base": (768, 12, 12, [2, 5, 8, 11]),
    "huge": (1280, 32, 16, [7, 15, 23, 31]),
}


@pytest.mark.parametrize("size", FULL)
def test_every_key_of_the_published_sizes_has_its_place(size, tmp_path):
    """Keys and shapes only: torch makes them without memory, and all values are one zero."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "global_attn_indexes")
    vision = dict(zip(names, FULL[size], strict=True))
    config = published.transformers.SamConfig(vision_config=vision)
    with torch.device("meta"):
        theirs = published.transformers.SamModel(config).state_dict()
    tensors = {
        key: np.broadcast_to(np.float32(0), tuple(value.shape)) for key, value in theirs.items()
    }
    config.save_pretrained(tmp_path)
    vision = VisionConfig(image_size=1024, patch_size=16, encoder="sam", sam=str(tmp_path))
    ours = ModelConfig(vision, decoder=DecoderConfig("sam"))
    ours = fill_sizes(ours)
    state = nnx.state(nnx.eval_shape(lambda: R2SM(ours, rngs=nnx.Rngs(0))))
    report = match_weights(tensors, state, SAM, tmp_path)
    assert set(report.loaded.values()) | set(report.unused) == set(tensors)
    assert len(report.copied) == 6 * (5 + 1) and len(report.initialised) == 8
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    assert all(shapes[path] == value.shape for path, value in report.values.items())
    if size == "base":
        assert (len(report.loaded), len(report.unused)) == (299, 16)
