from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from r2sm_jax.models.r2sm import DecoderConfig, ModelConfig, TextConfig
from r2sm_jax.models.vision import VisionConfig
from r2sm_jax.training.losses import LossConfig, SharedMeans, masked_mean
from r2sm_jax.training.state import init_state, make_train_step, split_model

CONFIG = ModelConfig(
    VisionConfig(image_size=32, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=64, out_dim=24),
    TextConfig(layers=(1,), max_tokens=6, dim=20),
    DecoderConfig(dim=32, depth=2, heads=2, mlp_dim=64, slots=2, fine_dim=16, mask_dim=8),
)
B, K, M, MASK = 8, 3, 4, 16


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """Images that differ in how many queries, instances, pixels and known amodal masks they have."""
    rng = np.random.default_rng(0)
    share = np.linspace(0, 1, B)  # of each image that counts

    def some(*shape: int) -> np.ndarray:
        return rng.random((B, *shape)) < share.reshape(B, *[1] * len(shape))

    modal = rng.random((B, M, MASK // 4, MASK // 4)) < 0.4
    modal = modal.repeat(4, 2).repeat(4, 3) & some(M)[..., None, None]
    amodal = modal | np.roll(modal, 2, axis=-1)
    members = some(K, M) & (rng.random((B, K, M)) < 0.5)
    slots = np.where(members[..., :2], np.arange(2), -1).astype(np.int32)
    return {
        "image": rng.integers(0, 256, (B, 32, 32, 3), dtype=np.uint8),
        "valid": np.ones((B, 32, 32), bool),
        "modal": modal.astype(np.uint8) * 255,
        "amodal": amodal.astype(np.uint8) * 255,
        "amodal_known": some(M),
        "labels": {"category": rng.integers(-1, 5, (B, M)).astype(np.int32)},
        "boxes": rng.random((B, M, 4)).astype(np.float32),
        "loss_valid": some(MASK, MASK).astype(np.uint8) * 255,
        "members": members,
        "slots": slots,
        "wants_amodal": rng.random((B, K)) < 0.5,
        "query_valid": some(K),
        "text": rng.normal(size=(B, K, 6, 1, 20)).astype(np.float16),
        "text_mask": np.ones((B, K, 6), bool),
        "type_mask": np.ones((B, K, 6), bool),
        "index": np.arange(B, dtype=np.int32),
    }


@pytest.fixture(scope="module")
def step(batch):
    """(accumulate, supervise) -> parameters' gradients and logs of one step."""
    names = {"category": jnp.asarray(np.random.default_rng(1).normal(size=(5, 20)), jnp.float32)}
    graphdef, params, constants = split_model(CONFIG, 0)
    plain = optax.sgd(1.0)  # the update is the gradient: nothing hides a difference

    def run(accumulate: int, config: LossConfig):
        state = init_state(jax.tree.map(jnp.copy, params), plain)
        after, logs = make_train_step(graphdef, plain, config, accumulate)(state, constants, batch, names)
        return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, after.params), logs

    return run


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(masks="sam", supervise="requested")])
def test_parts_of_a_batch_give_the_step_of_the_whole(step, config):
    whole_gradients, whole_logs = step(1, config)
    for accumulate in (2, 8):
        gradients, logs = step(accumulate, config)
        assert logs.keys() == whole_logs.keys()
        for name, value in logs.items():
            np.testing.assert_allclose(value, whole_logs[name], rtol=2e-5, atol=1e-6, err_msg=name)
        for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(whole_gradients), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5 * np.abs(theirs).max() + 1e-7)


def test_the_mean_of_the_parts_means_would_be_another_step(batch):
    """The batch tells exact accumulation from the usual one, which weighs every part alike."""
    values = jnp.arange(8.0)
    valid = jnp.array(batch["query_valid"][:, 0])
    parts = [(values[i::2], valid[i::2]) for i in range(2)]
    usual = np.mean([masked_mean(*part) for part in parts])
    counters = [SharedMeans() for _ in parts]
    for counter, part in zip(counters, parts, strict=True):
        counter(*part)
    totals = [sum(counts) for counts in zip(*(c.counts for c in counters), strict=True)]
    exact = sum(SharedMeans(totals)(*part) for part in parts)
    np.testing.assert_allclose(exact, masked_mean(values, valid), rtol=1e-6)
    assert abs(usual - exact) > 0.01


def test_parts_take_less_memory(batch):
    graphdef, params, constants = split_model(CONFIG, 0)
    plain = optax.sgd(1.0)
    state = jax.eval_shape(lambda p: init_state(p, plain), params)
    names = {"category": jnp.zeros((5, 20))}

    def temporaries(accumulate: int) -> int:
        step = make_train_step(graphdef, plain, LossConfig(), accumulate)
        return step.lower(state, constants, batch, names).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8) < 0.5 * temporaries(1)
