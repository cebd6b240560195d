"""The schedule, AdamW and Muon: which parameters they move, and by how much."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY

from r2sm_jax.config import OptimizerConfig, VisionConfig
from r2sm_jax.models.r2sm import abstract_model
from r2sm_jax.training.optimizer import NOT_MUON, make_optimizer, schedule

CONFIG = replace(TINY, vision=replace(TINY.vision, relative_positions=True))
FIRST_STEP = OptimizerConfig(
    learning_rate=0.01, muon_learning_rate=0.02, muon_weight_decay=0.2, warmup_steps=1, clip=0
)


def names(tree) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize(("decay", "quarter"), [("linear", 1.5), ("cosine", 1 + np.cos(np.pi / 4))])
def test_the_rate_rises_linearly_and_falls_to_nought_after_the_last_step(decay, quarter):
    rate = schedule(2.0, warmup=10, steps=109, decay=decay)
    actual = [rate(step) for step in (0, 4, 9, 34, 59, 109)]
    np.testing.assert_allclose(actual, [0.2, 1, 2, quarter, 1, 0], atol=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_every_step_of_a_short_run_has_a_rate(steps):
    rate = schedule(1.0, warmup=100, steps=steps)
    values = [float(rate(step)) for step in range(steps)]
    assert min(values) > 0 and max(values) == 1


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameters_alone_have_state_and_matrices_alone_are_decayed(name):
    """Adam keeps two moments of a parameter, Muon one momentum of a matrix."""
    abstract = nnx.split(abstract_model(CONFIG), nnx.Param, ...)[1]
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), abstract)
    optimizer = make_optimizer(replace(FIRST_STEP, name=name), 100)
    state = optimizer.init(params)
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), state, params)

    size, tables = 0, set()
    updates = names(updates)
    for key, value in names(params).items():
        is_matrix = "kernel" in key and value.ndim >= 2 and value.shape[-1] > 1
        is_by_muon = name == "muon" and is_matrix and not any(part in key for part in NOT_MUON)
        size += value.size if is_by_muon else 2 * value.size
        step = 0.02 * 0.2 if is_by_muon else 0.01 * 0.1 if is_matrix else 0.0
        np.testing.assert_allclose(updates[key], -step * value, rtol=1e-3, err_msg=key)
        if not is_matrix and value.ndim >= 2:
            tables.add(key)
    assert len(tables) >= 4  # positions, output tokens, relative positions
    moments = {key: x for key, x in names(state).items() if ".mu[" in key or ".nu[" in key}
    assert sum(x.size for x in moments.values()) == size


@pytest.mark.parametrize("encoder", ["sam", "vit", "efficientnet"])
def test_published_weights_learn_slowly_and_are_not_decayed(encoder):
    """AdamW's first update has the size of its rate, whatever the gradient."""
    kernel = {"kernel": jnp.ones((4, 4))}
    published = "blocks" if encoder == "sam" else encoder
    params = {"vision": {published: kernel}, "decoder": {"new": kernel}}
    vision = VisionConfig(sam="folder" if encoder == "sam" else None)
    optimizer = make_optimizer(FIRST_STEP, 100, vision)
    gradient = jax.tree.map(lambda x: jnp.arange(1.0, 17).reshape(4, 4), params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["vision"][published]["kernel"], -0.001, rtol=1e-4)
    assert float(jnp.abs(updates["decoder"]["new"]["kernel"]).max()) > 0.002


def test_muon_lifts_every_direction_of_a_gradient():
    """Singular values that differ a hundredfold end where `POLAR_STEPS` says."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 8)))[0] for n in (16, 8))
    gradient = jnp.asarray(left * np.geomspace(0.01, 1, 8) @ right.T, jnp.float32)
    params = {"kernel": jnp.zeros((4, 4, 8))}
    optimizer = make_optimizer(replace(FIRST_STEP, muon_learning_rate=1.0), 10**6)
    grads = {"kernel": gradient.reshape(4, 4, 8)}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    values = np.linalg.svd(np.asarray(updates["kernel"]).reshape(16, 8), compute_uv=False)
    assert values.min() > 0.35 and values.max() < 1.65


@pytest.mark.parametrize("clip", [1e-3, 0.0])
def test_the_gradient_is_clipped_to_its_global_norm_unless_that_is_0(clip):
    params, grads = {"bias": jnp.zeros(3)}, {"bias": jnp.array([1.0, -2.0, 3.0])}
    optimizer = make_optimizer(replace(FIRST_STEP, clip=clip), 100)
    # The moments of a second step tell gradients of another size apart.
    _, state = optimizer.update(grads, optimizer.init(params), params)
    same, _ = optimizer.update(grads, state, params)
    larger, _ = optimizer.update({"bias": 1000 * grads["bias"]}, state, params)
    assert np.allclose(same["bias"], larger["bias"], rtol=1e-2) == (clip > 0)
