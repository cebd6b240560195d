import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from r2sm_jax.cpu import products
from r2sm_jax.training.optimizer import POLAR_STEPS, orthogonal, scale_by_muon

SHAPES = {"wide": (2, 12, 30), "tall": (2, 30, 12), "square": (3, 16, 16), "kernel": (2, 3, 3, 4, 8), "flat": (1, 1, 9)}


def matrices(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(0.01 * rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def optax_muon(momentum: float) -> optax.GradientTransformation:
    def inputs_and_outputs(tree):
        return jax.tree.map(lambda p: MuonDimensionNumbers(tuple(range(1, p.ndim - 1)), p.ndim - 1), tree)

    return optax.contrib.scale_by_muon(
        ns_coeffs=POLAR_STEPS,
        ns_steps=len(POLAR_STEPS),
        preconditioning="aol",
        beta=momentum,
        weight_dimension_numbers=inputs_and_outputs,
    )


@pytest.mark.parametrize(("momentum", "steps"), [(0.0, 1), (0.9, 120)])
def test_updates_are_those_of_optax(momentum, steps):
    """Momentum differs in the first steps alone, where optax corrects both its parts for their bias."""
    ours, theirs = scale_by_muon(momentum), optax_muon(momentum)
    state, their_state = ours.init(matrices()), theirs.init(matrices())
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(steps):
        got, state = update(matrices(step), state)
        wanted, their_state = their_update(matrices(step), their_state)
    for name in SHAPES:
        np.testing.assert_allclose(got[name], wanted[name], atol=2e-4, err_msg=name)


@pytest.mark.parametrize("name", SHAPES)
def test_singular_values_end_near_one_in_bfloat16_too(name):
    x = matrices()[name].reshape(SHAPES[name][0], -1, SHAPES[name][-1])
    exact = np.asarray(orthogonal(x))
    with products("bfloat16"):
        rounded = np.asarray(orthogonal(x))
    values = np.linalg.svd(exact, compute_uv=False)
    assert values.min() > 0.3 and values.max() < 1.7
    assert np.linalg.svd(rounded, compute_uv=False).max() < 1.9
    cosine = (exact * rounded).sum() / np.linalg.norm(exact) / np.linalg.norm(rounded)
    assert 0.98 < cosine < 1 - 1e-7


def test_nothing_comes_of_nothing():
    assert not np.asarray(orthogonal(jnp.zeros((2, 3, 5)))).any()
