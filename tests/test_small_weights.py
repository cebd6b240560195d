"""How compact exports store weights: differences in 8 bits, float16, or nothing."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from r2sm_jax.errors import InputError
from r2sm_jax.inference.small_weights import MAX_ERROR, UNIT, from_stored, to_stored

KERNEL = np.random.default_rng(0).normal(size=(3, 3, 4, 8)).astype(np.float32)
SMALL = 0.01 * np.random.default_rng(1).normal(size=KERNEL.shape).astype(np.float32)


@given(st.floats(0, 0.2), st.integers(0, 99))
def test_no_weight_is_further_from_the_true_one_than_promised(size, seed):
    change = size * np.random.default_rng(seed).normal(size=KERNEL.shape)
    trained = (KERNEL + change).astype(np.float32)
    stored = to_stored({"kernel": trained}, {"kernel": KERNEL})
    restored = from_stored(stored, {"kernel": KERNEL})
    assert restored.keys() == {"kernel"} and restored["kernel"].dtype == np.float32
    error = np.abs(restored["kernel"] - trained).max()
    assert error <= 1.01 * MAX_ERROR * np.abs(trained).max()


def test_a_small_difference_has_eight_bits_and_a_unit_for_each_output_channel():
    trained = KERNEL + SMALL
    trained[..., 2] = KERNEL[..., 2]  # a channel that did not change
    stored = to_stored({"kernel": trained}, {"kernel": KERNEL})
    assert stored["kernel"].dtype == np.int8 and stored["kernel" + UNIT].shape == (8,)
    restored = np.asarray(from_stored(stored, {"kernel": KERNEL})["kernel"])
    np.testing.assert_array_equal(restored[..., 2], KERNEL[..., 2])
    steps = np.abs(restored - trained) / stored["kernel" + UNIT]
    assert steps.max() <= 0.501  # rounded to the nearest


def test_what_is_published_is_left_out_and_all_else_has_float16():
    weights = {
        "frozen": KERNEL,
        "own": KERNEL + 1,
        "far": 3 * KERNEL,
        "bias": KERNEL[0, 0, 0] + 0.01,
    }
    published = {"frozen": KERNEL, "far": KERNEL, "bias": KERNEL[0, 0, 0]}
    stored = to_stored(weights, published)
    assert stored.keys() == {"own", "far", "bias"}
    assert all(value.dtype == np.float16 for value in stored.values())
    restored = from_stored(stored, published)
    assert restored.keys() == weights.keys()
    np.testing.assert_array_equal(restored["frozen"], KERNEL)
    for name in stored:
        np.testing.assert_array_equal(restored[name], stored[name].astype(np.float32))


@pytest.mark.parametrize("published", [{}, {"kernel": KERNEL[..., :4]}])
def test_a_difference_from_another_encoder_is_refused(published):
    stored = to_stored({"kernel": KERNEL + SMALL}, {"kernel": KERNEL})
    with pytest.raises(InputError, match=r"kernel is stored as the difference.*get the encoder"):
        from_stored(stored, published)
