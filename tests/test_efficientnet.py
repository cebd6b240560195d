"""EfficientNet-Lite: its folding and layers by hand, and runs with it; test_parity.py has the published
weights."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tiny_efficientnet import DIMS, tiny_tensors

from r2sm_jax.config import VisionConfig
from r2sm_jax.inference.load import load_run
from r2sm_jax.models.efficientnet import depthwise_conv
from r2sm_jax.models.image_encoder import VisionEncoder, freeze_published
from r2sm_jax.models.keys import (
    fold_batch_norms,
)
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


@pytest.mark.parametrize("stride", [32, 8, 2, 0])
def test_blocks_up_to_a_stride_are_frozen_and_the_rest_has_parameters(stride):
    config = replace(VISION, efficientnet_frozen_to=stride)
    encoder = VisionEncoder(config, dtype=FLOAT32, rngs=nnx.Rngs(0))
    freeze_published(encoder)
    trained = nnx.state(encoder, nnx.Param).get("efficientnet", {})
    ends = encoder.efficientnet.ends
    first = {32: len(DIMS), 8: ends[2], 2: ends[0], 0: 0}[stride]
    assert ("first" in trained) == (stride == 0)
    assert sorted(trained.get("blocks", {})) == list(range(first, len(DIMS)))


def test_features_in_the_encoder_and_pixels_as_published():
    encoder = VisionEncoder(VISION, dtype=FLOAT32, rngs=nnx.Rngs(0))
    image = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64, 3)), jnp.float32)
    out = run(encoder, image)
    assert out.tokens.shape == (2, 4, 4, 8) and encoder.skip_dims == (6, 8)
    assert [x.shape[1:] for x in out.skips] == [(16, 16, 6), (8, 8, 8)]
    pixels = np.array([127, 255, -1], np.float32).reshape(3, 1, 1, 1) / 255
    image = jnp.asarray((pixels - np.array(IMAGENET[0])) / np.array(IMAGENET[1]), jnp.float32)
    red = normalise(image, "efficientnet_lite")[:, 0, 0, 0]
    np.testing.assert_allclose(red, [0, 1, -1], atol=1e-6)


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
    leaves = nnx.to_flat_state(load_run(run_folder).predictor.weights)
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
        (["--model.classifier"], "--model.vision.encoder efficientnet"),
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
