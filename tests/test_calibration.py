"""The temperature of the mask-type probability, and which words drove a decision."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, strategies as st

from r2sm_jax.metrics.mask_type import calibration_error
from r2sm_jax.models.explain import word_shares, words_of
from r2sm_jax.models.text_states import TextStates
from r2sm_jax.training.calibration import RANGE, Calibration, fit_temperature
from r2sm_jax.training.state import split_model


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_labels_were_drawn_with_is_found(temperature):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, 20_000)
    amodal = rng.random(len(logits)) < 1 / (1 + np.exp(-logits / temperature))
    found = fit_temperature(logits, amodal)
    assert found == pytest.approx(temperature, rel=0.05)
    probability = 1 / (1 + np.exp(-logits / found))
    assert calibration_error(probability, amodal) < 0.02


def test_a_perfect_head_gets_the_smallest_temperature_and_a_wrong_one_the_largest():
    logits, amodal = np.array([-3.0, 2.0, 5.0]), np.array([False, True, True])
    assert fit_temperature(logits, amodal) == pytest.approx(RANGE[0], rel=0.01)
    assert fit_temperature(logits, ~amodal) == pytest.approx(RANGE[1], rel=0.01)


def test_only_the_temperature_changes_and_probabilities_follow_it(tiny_config):
    text = tiny_config.model.text
    texts = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)
    graphdef, params, constants = split_model(tiny_config.model, 0)
    fitted = Calibration(graphdef, texts)(params, constants)
    changed = [
        path
        for (path, one), (_, other) in zip(nnx.to_flat_state(constants), nnx.to_flat_state(fitted), strict=True)
        if not np.array_equal(one[...], other[...])
    ]
    assert changed == [("type_temperature",)]
    states, mask = map(jnp.asarray, texts(["the whole mug", "the mug"]))
    raw = nnx.merge(graphdef, params, fitted).type_logit(states[None], mask[None])
    temperature = float(fitted["type_temperature"][...])
    assert RANGE[0] <= temperature <= RANGE[1] and np.isfinite(raw).all()


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=7), st.integers(0, 2))
def test_shares_of_a_sum_are_its_terms_whatever_the_tokens(terms, extra):
    """Word i has i % 2 + 1 tokens; the logit is the sum of the terms of words that are seen, and a constant."""
    word_of = np.array([-1] * extra + [i for i in range(len(terms)) for _ in range(i % 2 + 1)])

    def logits(seen):
        return 0.5 + sum(term * seen[:, word_of == i].all(1) for i, term in enumerate(terms))

    assert word_shares(logits, word_of, len(terms)) == pytest.approx(np.array(terms), abs=1e-9)


def test_words_that_say_the_same_divide_the_share_and_shares_add_up():
    word_of = np.array([-1, 0, 1, 2])

    def logits(seen):
        return 2.0 * (seen[:, 1] | seen[:, 2]) - 1.0

    shares = word_shares(logits, word_of, 3)
    assert shares == pytest.approx([1.0, 1.0, 0.0])


def test_a_word_without_tokens_has_no_share_and_words_keep_their_places():
    assert word_shares(lambda seen: seen[:, 0] * 2.0, np.array([0]), 2) == pytest.approx([2.0, 0.0])
    assert words_of(" the  red mug.") == [("the", 1, 4), ("red", 6, 9), ("mug.", 10, 14)]
    assert words_of("  ") == []
