"""The schedule, AdamW and Muon: which parameters they move, and by how much."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers
from tiny_models import TINY

from r2sm_jax.config import OptimizerConfig
from r2sm_jax.models.layers import Buffer
from r2sm_jax.models.r2sm import abstract_model
from r2sm_jax.training.optimizer import (
    NOT_MUON,
    POLAR_STEPS,
    make_optimizer,
    orthogonal,
    scale_by_muon,
    schedule,
)
from r2sm_jax.training.step import init_state

CONFIG = replace(TINY, vision=replace(TINY.vision, relative_positions=True))
BOTH = pytest.mark.parametrize("name", ["adamw", "muon"])


def names(tree) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize(("decay", "quarter"), [("linear", 1.5), ("cosine", 1 + np.cos(np.pi / 4))])
def test_the_rate_rises_linearly_and_falls_to_nought_at_the_last_step(decay, quarter):
    rate = schedule(2.0, warmup=10, steps=100, decay=decay)
    assert (rate(32) + rate(33)) / 2 == pytest.approx(quarter, abs=1e-3)
    assert rate(0) == 0 and rate(5) == pytest.approx(1) and rate(10) == pytest.approx(2)
    assert rate(55) == pytest.approx(1, abs=1e-6) and rate(100) == pytest.approx(0, abs=1e-6)
    falling = [float(rate(step)) for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_short_runs_have_a_schedule_too(steps):
    rate = schedule(1.0, warmup=100, steps=steps)
    values = [float(rate(step)) for step in range(steps)]
    assert np.isfinite(values).all() and (steps == 1 or max(values) > 0.5)


@pytest.fixture(scope="module")
def params() -> nnx.State:
    """Parameters of the tiny model's shapes."""
    abstract = nnx.split(abstract_model(CONFIG), nnx.Param, ...)[1]
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), abstract)


def test_constants_are_no_parameters():
    _, params, constants = nnx.split(abstract_model(CONFIG), nnx.Param, ...)
    assert {type(leaf) for _, leaf in nnx.to_flat_state(params)} == {nnx.Param}
    assert {type(leaf) for _, leaf in nnx.to_flat_state(constants)} == {Buffer}


@BOTH
def test_only_parameters_have_optimizer_state(name, params):
    """Adam keeps two moments of a parameter, Muon one momentum of a matrix."""
    optimizer = make_optimizer(OptimizerConfig(name=name), 10)
    state = names(jax.eval_shape(lambda p: init_state(p, optimizer), params).opt_state)
    moments = (".mu[", ".nu[", ".trace[")
    size = sum(x.size for key, x in state.items() if any(moment in key for moment in moments))
    expected = 0
    for key, value in names(params).items():
        expected += value.size if is_by_muon(name, key, value) else 2 * value.size
    assert size == expected


def is_matrix(key: str, value: jax.Array) -> bool:
    return "kernel" in key and value.ndim >= 2 and value.shape[-1] > 1


def is_by_muon(name: str, key: str, value: jax.Array) -> bool:
    is_excluded = any(module in key for module in NOT_MUON)
    return name == "muon" and is_matrix(key, value) and not is_excluded


@BOTH
def test_parameters_of_one_shape_are_served_as_each_would_be_alone(name):
    rng = np.random.default_rng(0)
    shapes = {"a": (6, 4), "b": (6, 4), "c": (4, 6), "d": (3, 3, 2, 4), "e": (3, 3, 2, 4)}

    def draw(scale: float) -> dict[str, dict[str, jax.Array]]:
        parts = {"kernel": lambda s: s, "bias": lambda s: s[-1:]}
        return {
            n: {
                p: jnp.asarray(scale * rng.normal(size=shape(s)), jnp.float32)
                for p, shape in parts.items()
            }
            for n, s in shapes.items()
        }

    params, grads = draw(1.0), draw(0.01)
    optimizer = make_optimizer(OptimizerConfig(name=name, warmup_steps=1, clip=1e9), 100)

    def second_update(params, grads):
        _, state = optimizer.update(grads, optimizer.init(params), params)
        return optimizer.update(jax.tree.map(jnp.sin, grads), state, params)[0]

    together = second_update(params, grads)
    for module in shapes:
        alone = names(second_update({module: params[module]}, {module: grads[module]}))
        for key, update in names({module: together[module]}).items():
            assert float(jnp.abs(update).max()) > 0
            np.testing.assert_allclose(update, alone[key], rtol=1e-4, atol=1e-7)


@BOTH
def test_only_matrices_are_decayed(name, params):
    rates = {"learning_rate": 0.01, "muon_learning_rate": 0.02}
    config = OptimizerConfig(
        name=name, warmup_steps=1, weight_decay=0.1, muon_weight_decay=0.2, **rates
    )
    optimizer = make_optimizer(config, 100)
    still, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
    update = jax.jit(optimizer.update)
    _, state = update(still, state, params)  # the first step has rate 0
    params, updates = names(params), names(update(still, state, params)[0])
    decayed = {key for key, update in updates.items() if np.abs(update).max() > 0}
    for key, value in params.items():
        expected = is_matrix(key, value)
        assert (key in decayed) == expected, key
        if expected:
            step = 0.02 * 0.2 if is_by_muon(name, key, value) else 0.01 * 0.1
            np.testing.assert_allclose(updates[key], -step * value, rtol=1e-3)
    for table in ("positions", "output_tokens", "rel_pos_h", "rel_pos_w"):
        assert any(table in key for key in params) and not any(table in key for key in decayed)


def test_muon_lifts_every_direction_of_a_gradient():
    """Singular values that differ a hundredfold end where `POLAR_STEPS` says."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 8)))[0] for n in (16, 8))
    gradient = jnp.asarray(left * np.geomspace(0.01, 1, 8) @ right.T, jnp.float32)
    params = nnx.State({"kernel": nnx.Param(jnp.zeros((16, 8)))})
    config = OptimizerConfig(name="muon", warmup_steps=1, muon_learning_rate=1.0)
    optimizer = make_optimizer(config, 10**6)
    grads = jax.tree.map(lambda _: gradient, params)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    updates, _ = optimizer.update(grads, state, params)
    values = np.linalg.svd(np.asarray(jax.tree.leaves(updates)[0]), compute_uv=False)
    assert values.min() > 0.35 and values.max() < 1.65


def small_params(seed: int = 0) -> nnx.State:
    rng = np.random.default_rng(seed)
    return nnx.State(
        {
            n: nnx.Param(jnp.asarray(rng.normal(size=s), jnp.float32))
            for n, s in (("kernel", (4, 3)), ("bias", (3,)))
        }
    )


@BOTH
def test_the_gradient_is_clipped_to_its_global_norm(name):
    params = small_params()
    optimizer = make_optimizer(OptimizerConfig(name=name, warmup_steps=1, clip=1e-3), 100)
    _, state = optimizer.update(small_params(1), optimizer.init(params), params)

    def update(scale: float) -> dict[str, jax.Array]:
        grads = jax.tree.map(lambda g: g * scale, small_params(1))
        return names(optimizer.update(grads, state, params)[0])

    expected, clipped = update(1.0), update(1e6)
    for key, value in clipped.items():
        # Muon's polynomials cancel large terms: rounding is relative to the largest entry, not to
        # each.
        largest = float(jnp.abs(expected[key]).max())
        np.testing.assert_allclose(value, expected[key], rtol=0, atol=1e-4 * largest)


def test_a_norm_of_0_clips_nothing():
    params, configs = (
        small_params(),
        [OptimizerConfig(name="adamw", warmup_steps=1, clip=c) for c in (0, 1e9)],
    )
    optimizers = [make_optimizer(config, 100) for config in configs]
    (_, none), (_, huge) = (o.update(small_params(1), o.init(params), params) for o in optimizers)
    jax.tree.map(np.testing.assert_array_equal, none, huge)


@BOTH
def test_updates_lower_a_loss(name):
    params = small_params()
    optimizer = make_optimizer(OptimizerConfig(name=name, warmup_steps=1), 50)

    def loss(params):
        return sum(jnp.mean((leaf - 1) ** 2) for leaf in jax.tree.leaves(params))

    state, before = optimizer.init(params), loss(params)
    for _ in range(10):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    assert loss(params) < before


# The orthogonal updates of Muon.

SHAPES = {
    "wide": (2, 12, 30),
    "tall": (2, 30, 12),
    "square": (3, 16, 16),
    "kernel": (2, 3, 3, 4, 8),
    "flat": (1, 1, 9),
}


def matrices(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(0.01 * rng.normal(size=shape), jnp.float32)
        for name, shape in SHAPES.items()
    }


def optax_muon(momentum: float) -> optax.GradientTransformation:
    def inputs_and_outputs(tree):
        return jax.tree.map(
            lambda p: MuonDimensionNumbers(tuple(range(1, p.ndim - 1)), p.ndim - 1), tree
        )

    return optax.contrib.scale_by_muon(
        ns_coeffs=POLAR_STEPS,
        ns_steps=len(POLAR_STEPS),
        preconditioning="aol",
        beta=momentum,
        weight_dimension_numbers=inputs_and_outputs,
    )


@pytest.mark.parametrize(("momentum", "steps"), [(0.0, 1), (0.9, 120)])
def test_updates_are_those_of_optax(momentum, steps):
    """Momentum differs in the first steps alone, where optax corrects both its parts for their
    bias."""
    ours, theirs = scale_by_muon(momentum), optax_muon(momentum)
    state, their_state = ours.init(matrices()), theirs.init(matrices())
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(steps):
        got, state = update(matrices(step), state)
        expected, their_state = their_update(matrices(step), their_state)
    for name in SHAPES:
        np.testing.assert_allclose(got[name], expected[name], atol=2e-4, err_msg=name)


@pytest.mark.parametrize("name", SHAPES)
def test_singular_values_end_near_one_in_bfloat16_too(name):
    x = matrices()[name].reshape(SHAPES[name][0], -1, SHAPES[name][-1])
    exact = np.asarray(orthogonal(x))
    rounded = np.asarray(orthogonal(x, "bfloat16"))
    values = np.linalg.svd(exact, compute_uv=False)
    assert values.min() > 0.3 and values.max() < 1.7
    assert np.linalg.svd(rounded, compute_uv=False).max() < 1.9
    cosine = (exact * rounded).sum() / np.linalg.norm(exact) / np.linalg.norm(rounded)
    assert 0.98 < cosine < 1 - 1e-7


def test_nothing_comes_of_nothing():
    assert not np.asarray(orthogonal(jnp.zeros((2, 3, 5)))).any()
