"""Arrays of which only some are in memory: a mapping like any other, whatever fits into memory."""

import errno

import numpy as np
import pytest
from hypothesis import given, strategies as st

from r2sm_jax.errors import InputError
from r2sm_jax.models.feature_cache import KeptArrays

STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5), st.booleans()), max_size=30)


@given(memory=st.sampled_from([0, 40, 10_000]), steps=STEPS)
def test_it_is_a_mapping(memory: int, steps: list[tuple[str, int, bool]]) -> None:
    """As a dict, with any part of it in memory; arrays of no rows and repeated names included."""
    kept, expected = KeptArrays(memory), dict[str, np.ndarray]()
    for number, (name, rows, removed) in enumerate(steps):
        if removed and name in expected:
            del kept[name], expected[name]
        else:
            kept[name] = expected[name] = np.full((rows, 2, 3), number, np.float16)
    assert sorted(kept) == sorted(expected) and len(kept) == len(expected)
    for name, array in expected.items():
        assert name in kept and kept.rows(name) == len(array)
        np.testing.assert_array_equal(kept[name], array)
        assert kept[name].dtype == np.float16


def test_memory_is_bounded() -> None:
    kept = KeptArrays(1000)
    for number in range(50):
        kept[str(number)] = np.full(100, number, np.float16)
    assert sum(array.nbytes for array in kept._held.values()) == 1000
    assert [int(kept[str(number)][-1]) for number in range(50)] == list(range(50))


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(InputError, match=r"No space left on device.*TMPDIR"):
        KeptArrays(0)["a"] = np.zeros(3)
