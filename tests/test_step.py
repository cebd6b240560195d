"""What saves memory and must not change the step: batches in parts, and blocks computed anew."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import TINY

from r2sm_jax.config import Config, LoopConfig, OptimizerConfig, VisionConfig
from r2sm_jax.data.batches import Batch
from r2sm_jax.models.image_encoder import VisionEncoder
from r2sm_jax.models.r2sm import R2SM
from r2sm_jax.training.losses import segmenter_loss
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.step import init_state, jit_train_step

# Two blocks, so that there are masks after the first one to supervise. Parts keep the gradients of
# all weights, and the head `attention` has more than the rest.
CONFIG = replace(TINY, head="layers", decoder=replace(TINY.decoder, depth=2))
B, K, M, MASK = 8, 3, 4, 16


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Images that differ in how many queries, instances, pixels and known amodal masks they
    have."""
    rng = np.random.default_rng(0)
    share = np.linspace(0, 1, B)  # of each image that counts

    def some(*shape: int) -> np.ndarray:
        return rng.random((B, *shape)) < share.reshape(B, *[1] * len(shape))

    modal = rng.random((B, M, MASK // 4, MASK // 4)) < 0.4
    modal = modal.repeat(4, 2).repeat(4, 3) & some(M)[..., None, None]
    masks = np.stack([modal, modal | np.roll(modal, 2, axis=-1)], axis=2)
    query_instances = some(K, M) & (rng.random((B, K, M)) < 0.5)
    slot_targets = np.where(query_instances[..., :2], np.arange(2), -1).astype(np.int32)
    return Batch(
        image=rng.integers(0, 256, (B, 32, 32, 3), dtype=np.uint8),
        image_mask=np.ones((B, 32, 32), bool),
        masks=masks.astype(np.uint8) * 255,
        is_known=np.stack([np.ones((B, M), bool), some(M)], axis=-1),
        labels={"category": rng.integers(-1, 5, (B, M)).astype(np.int32)},
        boxes=rng.random((B, M, 4)).astype(np.float32),
        pixel_weight=some(MASK, MASK).astype(np.uint8) * 255,
        query_instances=query_instances,
        slot_targets=slot_targets,
        is_amodal=rng.random((B, K)) < 0.5,
        query_mask=some(K),
        text=rng.normal(size=(B, K, 6, 2, 32)).astype(np.float16),
        text_mask=np.ones((B, K, 6), bool),
        type_text=rng.normal(size=(B, 2, 6, 2, 32)).astype(np.float16),
        type_text_mask=np.ones((B, 2, 6), bool),
        type_is_amodal=rng.random((B, 2)) < 0.5,
        type_valid=some(2),
    )


@pytest.mark.slow
def test_parts_of_a_batch_give_the_step_of_the_whole_in_less_memory(batch):
    """One step of plain gradient descent at rate 1. test_unchanged.py has one with the default
    optimizer."""
    names = {"category": np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)}
    graphdef, params, constants = nnx.split(R2SM(CONFIG, rngs=nnx.Rngs(0)), nnx.Param, ...)
    plain = optax.sgd(1.0)  # the update is the gradient: nothing hides a difference
    results = []
    for accumulate in (1, 4):
        state = init_state(jax.tree.map(jnp.copy, params), plain)
        loop = LoopConfig(accumulate=accumulate, matmul_precision="float32")
        loss = segmenter_loss(Config(model=CONFIG), names)
        step = jit_train_step(graphdef, loss, plain, loop)
        compiled = step.lower(state, constants, batch).compile()
        after, logs = compiled(state, constants, batch)
        gradients = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, after.params)
        num_bytes = compiled.memory_analysis().temp_size_in_bytes
        results.append((logs, jax.tree.leaves(gradients), num_bytes))

    (logs, gradients, num_bytes), (logs_of_parts, gradients_of_parts, num_bytes_of_parts) = results
    assert logs.keys() == logs_of_parts.keys() and len(logs) > 12
    for name, value in logs.items():
        assert value > 0, name  # every loss takes part
        np.testing.assert_allclose(logs_of_parts[name], value, rtol=2e-5, err_msg=name)
    for ours, theirs in zip(gradients_of_parts, gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5 * np.abs(theirs).max() + 1e-7)
    assert num_bytes_of_parts < 0.5 * num_bytes


def test_no_precision_setting_of_jax_changes_the_step(batch):
    """The setting is what the environment variable JAX_DEFAULT_MATMUL_PRECISION sets."""
    names = {"category": np.zeros((5, 32), np.float32)}
    graphdef, params, constants = nnx.split(R2SM(CONFIG, rngs=nnx.Rngs(0)), nnx.Param, ...)
    optimizer = make_optimizer(OptimizerConfig(), 10)
    loss = segmenter_loss(Config(model=CONFIG), names)

    def lower() -> str:
        step = jit_train_step(graphdef, loss, optimizer, LoopConfig(matmul_precision="float32"))
        return step.lower(init_state(params, optimizer), constants, batch).as_text()

    expected = lower()
    with jax.default_matmul_precision("bfloat16"):
        assert lower() == expected


def test_remat_changes_memory_and_nothing_else():
    config = VisionConfig(
        image_size=64,
        patch_size=8,
        encoder="sam",
        dim=32,
        depth=3,
        heads=2,
        mlp_dim=64,
        out_dim=24,
        window_size=3,
        global_blocks=(1,),
        relative_positions=True,
    )
    image = jax.random.normal(jax.random.key(0), (2, 64, 64, 3))

    def gradients(remat: bool) -> tuple[Any, int]:
        encoder = VisionEncoder(
            replace(config, remat=remat), dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)
        )
        graphdef, params = nnx.split(encoder)

        def loss(params: Any) -> Any:
            return jnp.square(nnx.merge(graphdef, params)(image).tokens).mean()

        # Without the option XLA's CPU back end undoes remat.
        options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
        compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile(compiler_options=options)
        return compiled(params), compiled.memory_analysis().temp_size_in_bytes

    (plain, memory), (remat, less) = gradients(False), gradients(True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, remat)
    assert less < 0.8 * memory
