"""DINOv2, CLIP and SigLIP image encoders: the same tokens as torch `transformers`, small and with
random weights."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY

from r2sm_jax.config import VisionConfig
from r2sm_jax.models.image_encoder import VisionEncoder
from r2sm_jax.models.layers import resize
from r2sm_jax.models.plain_vit import IMAGENET, NORMALISATION

pytest.importorskip("torch")
import published_models as published

SMALL = replace(
    TINY.vision,
    encoder="vit",
    vit="x",
    dim=16,
    depth=1,
    heads=2,
    mlp_dim=24,
    vit_family="dinov2",
    vit_patch_size=6,
    vit_registers=2,
)


@nnx.jit
def run(module, x):
    return module(x)


def trained_parts(module) -> set[str]:
    return {str(path[0]) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def test_the_encoder_is_frozen_and_its_grid_is_resized():
    encoder = published.build_encoder(replace(SMALL, vit_grid=3))
    assert encoder.vit is not None and encoder.vit.positions.shape == (10, 16)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, 32, 3)), jnp.float32)
    out = run(encoder, x)
    assert out.tokens.shape == (2, 4, 4, 32) and out.skips == (None, None)
    assert np.abs(np.asarray(out.tokens - run(encoder, x + 0.1).tokens)).max() > 1e-3
    np.testing.assert_allclose(resize(jnp.ones((1, 3, 3, 2)), 5), np.ones((1, 5, 5, 2)), rtol=1e-6)

    new = {"join", "neck2", "neck_norm1", "neck_norm2"}
    assert trained_parts(encoder) == new
    assert trained_parts(published.build_encoder(replace(SMALL, vit_frozen=False))) == new | {"vit"}


FAMILIES = (
    "dinov2",
    "dinov2_with_registers",
    "clip_vision_model",
    "siglip_vision_model",
    "clip",
    "siglip",
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return published.write(published.plain_config(request.param), folder), folder


def load(folder, size: int) -> VisionEncoder:
    config = VisionConfig(
        image_size=size, patch_size=12, encoder="vit", out_dim=16, vit=str(folder)
    )
    encoder, report = published.load_encoder(config)
    assert set(report.initialised) == {"vision.join.kernel"}
    return encoder


@pytest.mark.parametrize("size", [48, 36, 84])
def test_tokens_are_those_of_transformers(family, size):
    """48 pixels is the published size; at 36 and 84 positions are interpolated."""
    model, folder = family
    kind = model.config.model_type
    ours = load(folder, size).vit
    assert ours is not None
    x = np.random.default_rng(size).normal(size=(2, size, size, 3)).astype(np.float32)
    mean, std = NORMALISATION[ours.config.vit_family]
    theirs_in = published.nchw(((x * IMAGENET[1] + IMAGENET[0] - mean) / std).astype(np.float32))
    tower = model.vision_model if kind in ("clip", "siglip") else model
    options = {} if kind.startswith("dinov2") else {"interpolate_pos_encoding": True}
    tokens = tower(theirs_in, **options).last_hidden_state[:, -((size // 12) ** 2) :]
    expected = tokens.detach().numpy()
    assert published.difference(np.asarray(run(ours, x)).reshape(expected.shape), expected) < 1e-4


def test_pixels_are_normalised_as_the_published_preprocessors_do():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    for name, processor in (
        ("clip", CLIPImageProcessorPil()),
        ("siglip", SiglipImageProcessorPil()),
    ):
        np.testing.assert_allclose(
            (processor.image_mean, processor.image_std), NORMALISATION[name], rtol=1e-6
        )
