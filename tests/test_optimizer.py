"""The schedule, AdamW and Muon: which parameters they move, and by how much."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import TINY

from r2sm_jax.config import OptimizerConfig, VisionConfig
from r2sm_jax.models.r2sm import abstract_model
from r2sm_jax.training.optimizer import NOT_MUON, make_optimizer, schedule
from r2sm_jax.training.step import init_state

CONFIG = replace(TINY, vision=replace(TINY.vision, relative_positions=True))
BOTH = pytest.mark.parametrize("name", ["adamw", "muon"])


def names(tree) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize(("decay", "quarter"), [("linear", 1.5), ("cosine", 1 + np.cos(np.pi / 4))])
def test_the_rate_rises_linearly_and_falls_to_nought_after_the_last_step(decay, quarter):
    rate = schedule(2.0, warmup=10, steps=109, decay=decay)
    assert rate(0) == pytest.approx(0.2) and rate(4) == pytest.approx(1) and rate(9) == 2
    assert rate(34) == pytest.approx(quarter, abs=1e-3)
    assert rate(59) == pytest.approx(1, abs=1e-6) and rate(109) == pytest.approx(0, abs=1e-6)
    falling = [float(rate(step)) for step in range(9, 110)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_every_step_of_a_short_run_has_a_rate(steps):
    rate = schedule(1.0, warmup=100, steps=steps)
    values = [float(rate(step)) for step in range(steps)]
    assert min(values) > 0 and max(values) == 1


@pytest.fixture(scope="module")
def params() -> nnx.State:
    """Parameters of the tiny model's shapes."""
    abstract = nnx.split(abstract_model(CONFIG), nnx.Param, ...)[1]
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), abstract)


def is_matrix(key: str, value: jax.Array) -> bool:
    return "kernel" in key and value.ndim >= 2 and value.shape[-1] > 1


def is_by_muon(name: str, key: str, value: jax.Array) -> bool:
    is_excluded = any(module in key for module in NOT_MUON)
    return name == "muon" and is_matrix(key, value) and not is_excluded


@BOTH
def test_only_parameters_have_optimizer_state(name, params):
    """Adam keeps two moments of a parameter, Muon one momentum of a matrix."""
    optimizer = make_optimizer(OptimizerConfig(name=name), 10)
    state = names(jax.eval_shape(lambda p: init_state(p, optimizer), params).opt_state)
    size = sum(x.size for key, x in state.items() if ".mu[" in key or ".nu[" in key)
    expected = 0
    for key, value in names(params).items():
        expected += value.size if is_by_muon(name, key, value) else 2 * value.size
    assert size == expected


@BOTH
def test_only_matrices_are_decayed(name, params):
    rates = {"learning_rate": 0.01, "muon_learning_rate": 0.02}
    config = OptimizerConfig(
        name=name, warmup_steps=1, weight_decay=0.1, muon_weight_decay=0.2, **rates
    )
    optimizer = make_optimizer(config, 100)
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(still, optimizer.init(params), params)
    params, updates = names(params), names(updates)
    decayed = {key for key, update in updates.items() if np.abs(update).max() > 0}
    for key, value in params.items():
        expected = is_matrix(key, value)
        assert (key in decayed) == expected, key
        if expected:
            step = 0.02 * 0.2 if is_by_muon(name, key, value) else 0.01 * 0.1
            np.testing.assert_allclose(updates[key], -step * value, rtol=1e-3)
    for table in ("positions", "output_tokens", "rel_pos_h", "rel_pos_w"):
        assert any(table in key for key in params) and not any(table in key for key in decayed)


@pytest.mark.parametrize("encoder", ["sam", "vit", "efficientnet"])
def test_published_weights_learn_slowly_and_are_not_decayed(encoder):
    """AdamW's first update has the size of its rate, whatever the gradient."""
    vision = VisionConfig(encoder="sam", sam="sam") if encoder == "sam" else VisionConfig()
    part = {"kernel": jnp.ones((4, 4))}
    params = {"vision": {"blocks" if encoder == "sam" else encoder: part, "new": part}}
    if encoder == "sam":
        params = {"vision": {"blocks": part}, "decoder": {"new": part}}
    config = OptimizerConfig(learning_rate=0.01, pretrained_rate=0.1, warmup_steps=1, clip=0)
    optimizer = make_optimizer(config, 100, vision)
    gradient = jax.tree.map(lambda x: jnp.arange(1.0, 17).reshape(4, 4), params)
    updates = names(optimizer.update(gradient, optimizer.init(params), params)[0])
    for key, update in updates.items():
        if "new" in key:
            assert float(jnp.abs(update).max()) > 0.002
        else:
            np.testing.assert_allclose(update, -0.001, rtol=1e-4)


def test_muon_lifts_every_direction_of_a_gradient():
    """Singular values that differ a hundredfold end where `POLAR_STEPS` says."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 8)))[0] for n in (16, 8))
    gradient = jnp.asarray(left * np.geomspace(0.01, 1, 8) @ right.T, jnp.float32)
    params = {"kernel": jnp.zeros((4, 4, 8))}
    config = OptimizerConfig(name="muon", warmup_steps=1, muon_learning_rate=1.0, clip=0)
    optimizer = make_optimizer(config, 10**6)
    grads = {"kernel": gradient.reshape(4, 4, 8)}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    values = np.linalg.svd(np.asarray(updates["kernel"]).reshape(16, 8), compute_uv=False)
    assert values.min() > 0.35 and values.max() < 1.65


@BOTH
@pytest.mark.parametrize("clip", [1e-3, 0.0])
def test_the_gradient_is_clipped_to_its_global_norm_unless_that_is_0(name, clip):
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    optimizer = make_optimizer(OptimizerConfig(name=name, warmup_steps=1, clip=clip), 100)
    # Clipping changes the second moments of a later step, where gradients differ in size.
    _, state = optimizer.update(grads, optimizer.init(params), params)

    def update(scale: float) -> jax.Array:
        larger = jax.tree.map(lambda g: g * scale, grads)
        return optimizer.update(larger, state, params)[0]["bias"]

    assert np.allclose(update(1.0), update(1e3), rtol=1e-2) == (clip > 0)


@BOTH
def test_updates_lower_a_loss(name):
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.normal(size=(4, 3))), "bias": jnp.zeros(3)}
    optimizer = make_optimizer(OptimizerConfig(name=name, warmup_steps=1), 50)

    def loss(params):
        return sum(jnp.mean((leaf - 1) ** 2) for leaf in jax.tree.leaves(params))

    state, before = optimizer.init(params), loss(params)
    for _ in range(10):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    assert loss(params) < before
