"""The image encoder: windows, relative positions, frozen weights, initial values."""

import hashlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY

from r2sm_jax.config import VisionConfig
from r2sm_jax.models.image_encoder import VisionEncoder, freeze_published

VISION = TINY.vision


def make_encoder(config: VisionConfig) -> VisionEncoder:
    return VisionEncoder(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))


@nnx.jit
def run(module, x):
    return module(x)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_windows_see_nothing_outside_and_need_not_divide_the_grid():
    block = make_encoder(replace(VISION, window_size=2)).blocks[0]
    x = normal(1, 4, 4, 32)
    difference = np.asarray(run(block, x) - run(block, x.at[0, 0, 0, 0].add(1.0)))
    is_changed = np.abs(difference).max(-1)[0] > 1e-6
    assert is_changed[:2, :2].all() and is_changed.sum() == 4

    two_blocks = replace(VISION, depth=2, window_size=2, global_blocks=(1,))
    config = replace(two_blocks, image_size=40, relative_positions=True)
    tokens = run(make_encoder(config), normal(2, 40, 40, 3)).tokens
    assert tokens.shape == (2, 5, 5, 32) and np.isfinite(tokens).all()


def test_relative_positions_start_without_effect_and_then_matter():
    plain = make_encoder(VISION).blocks[0].attention
    attention = make_encoder(replace(VISION, relative_positions=True)).blocks[0].attention
    x = normal(1, 4, 4, 32)
    without = run(plain, x)
    np.testing.assert_allclose(run(attention, x), without, atol=1e-6)
    # Strongly for or against the row above, which the first row does not have.
    attention.rel_pos_h[...] = jnp.zeros((7, 16)).at[3 + 1].set(50.0)
    moved = run(attention, x)
    assert np.abs(np.asarray(moved[:, 1:] - without[:, 1:])).max() > 1e-3
    np.testing.assert_allclose(moved[:, 0], without[:, 0], atol=1e-5)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_plain_vit_is_frozen_unless_it_is_not_and_its_grid_is_resized(is_frozen):
    vit = {"encoder": "vit", "vit": "x", "vit_family": "dinov2", "vit_patch_size": 6}
    config = replace(VISION, **vit, vit_grid=3, vit_registers=2, vit_frozen=is_frozen)
    encoder = make_encoder(config)
    freeze_published(encoder)
    assert encoder.vit.positions.shape == (10, 32)
    x = normal(2, 32, 32, 3)
    out = run(encoder, x)
    assert out.tokens.shape == (2, 4, 4, 32) and out.skips == (None, None)
    assert np.abs(np.asarray(out.tokens - run(encoder, x + 0.1).tokens)).max() > 1e-3
    trained = {path[0] for path, _ in nnx.to_flat_state(nnx.state(encoder, nnx.Param))}
    assert trained - {"vit"} == {"join", "neck2", "neck_norm1", "neck_norm2"}
    assert ("vit" in trained) != is_frozen


def test_the_default_encoder_is_unchanged():
    """Names, shapes and initial values of its parameters; each depends on all drawn before it."""
    state = nnx.to_flat_state(nnx.state(make_encoder(VisionConfig())))
    names = "".join(f"{'.'.join(map(str, path))}{leaf.shape}" for path, leaf in state)
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == "d9bdf13119fa278b"
    assert len(state) == 57 and all(type(leaf) is nnx.Param for _, leaf in state)
    parts = ("positions", "neck2")
    sums = {path[0]: float(jnp.abs(x[...]).sum()) for path, x in state if path[0] in parts}
    assert sums == pytest.approx({"positions": 398.51544, "neck2": 3564.6033}, rel=1e-5)
