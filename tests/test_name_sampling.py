"""Names that take part in a step: those in the batch always, and memory that does not grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from r2sm_jax.models.r2sm import DenseOutput
from r2sm_jax.training import name_sampling
from r2sm_jax.training.losses import dense_losses
from r2sm_jax.training.name_sampling import sample_names
from r2sm_jax.training.supervision import PixelTargets

RNG = np.random.default_rng(0)


def make_names(count, width=4):
    return {"category": jnp.asarray(RNG.normal(size=(count, width)), jnp.float32)}


def make_targets(labels, size=2):
    """Images whose left half is their first instance, behind which the second one is hidden."""
    batch = len(labels)
    left = jnp.zeros((batch, size, size)).at[:, :, : size // 2].set(1.0)
    first = jnp.broadcast_to(labels[:, :1, None], left.shape)
    return PixelTargets(
        labels={"category": jnp.maximum(first, 0)},
        label_weights={"category": left * (first >= 0) / left.sum()},
        box=jnp.zeros((*left.shape, 4)),
        box_weight=left,
        hidden=jnp.stack([jnp.zeros_like(left), left], 1),
        hidden_labels=labels,
        hidden_weight=jnp.ones_like(left) / left.size,
    )


def test_few_names_all_take_part():
    names = make_names(500)
    labels = {"category": jnp.array([[3, -1]])}
    sample = sample_names(names, labels, jax.random.key(0))
    assert sample.names["category"] is names["category"] and sample.weights == {}
    assert sample.labels["category"] is labels["category"]


def test_names_of_the_batch_take_part_and_stand_for_themselves():
    names = make_names(800)
    label = jnp.array([[3, 799], [-1, 3]])
    sample = sample_names(names, {"category": label}, jax.random.key(0))
    chosen = sample.names["category"]
    assert len(chosen) == 500 and len(np.unique(np.asarray(chosen), axis=0)) == 500
    places = np.asarray(sample.labels["category"])
    assert places[1, 0] == -1 and places[0, 0] == places[1, 1]
    for place, number in ((places[0, 0], 3), (places[0, 1], 799)):
        np.testing.assert_array_equal(chosen[place], names["category"][number])
        assert sample.weights["category"][place] == 1
    assert sample.weights["category"].sum() == pytest.approx(800, rel=1e-5)

    same = sample_names(names, {"category": label}, jax.random.key(0))
    other = sample_names(names, {"category": label}, jax.random.key(1))
    np.testing.assert_array_equal(same.names["category"], chosen)
    assert (other.names["category"] != chosen).any()


def test_more_names_in_a_batch_than_fit_lose_their_labels(monkeypatch):
    monkeypatch.setattr(name_sampling, "MAX_NAMES", 4)
    labels = {"category": jnp.arange(6)[None]}
    sample = sample_names(make_names(9), labels, jax.random.key(0))
    places = np.asarray(sample.labels["category"][0])
    assert sorted(places.tolist()) == [-1, -1, 0, 1, 2, 3]
    assert (sample.weights["category"] == 1).all()


def test_losses_are_those_of_all_names_on_average(monkeypatch):
    names = make_names(60)
    labels = jnp.array([[5, 7], [9, -1]])
    dense = DenseOutput(
        jnp.asarray(RNG.normal(size=(2, 2, 2, 4)), jnp.float32),
        jnp.asarray(RNG.normal(size=(2, 2, 2, 4)), jnp.float32),
        jnp.zeros((2, 2, 2, 4)),
    )
    whole = dense_losses(dense, names, make_targets(labels))
    monkeypatch.setattr(name_sampling, "MAX_NAMES", 30)

    @jax.jit
    def sampled(key):
        sample = sample_names(names, {"category": labels}, key)
        targets = make_targets(sample.labels["category"])
        return dense_losses(dense, sample.names, targets, sample.weights)

    values = jax.vmap(sampled)(jax.random.split(jax.random.key(0), 400))
    assert values["dense_hidden"].mean() == pytest.approx(float(whole["dense_hidden"]), rel=5e-3)
    # The logarithm of a mean is above the mean of logarithms, a little.
    assert values["dense_category"].mean() == pytest.approx(
        float(whole["dense_category"]), rel=0.02
    )


def test_memory_does_not_grow_with_the_names():
    labels = jnp.zeros((2, 2), jnp.int32)

    def memory(num_names):
        names = make_names(num_names, 8)

        def loss(pixels):
            sample = sample_names(names, {"category": labels}, jax.random.key(0))
            dense = DenseOutput(pixels, pixels, jnp.zeros((2, 16, 16, 4)))
            targets = make_targets(sample.labels["category"], 16)
            losses = dense_losses(dense, sample.names, targets, sample.weights)
            return sum(losses.values())

        shape = jax.ShapeDtypeStruct((2, 16, 16, 8), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(10_000) < 2 * memory(500)
