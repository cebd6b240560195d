"""Half a character: JSON holds it as \\ud800; a shell passes bytes that are not UTF-8 so."""

import pytest

from r2sm_jax.data.images import find_image
from r2sm_jax.data.validation import is_text
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.inference.predictor import check_query


def test_half_a_character_is_not_written(tmp_path):
    refused = pytest.raises(InputError, match=r"a\.json: .*half of a character")
    with refused, atomic_write(tmp_path / "a.json") as part:
        part.write_text("mug \ud800", encoding="utf-8")


def test_half_a_character_is_no_query():
    with pytest.raises(InputError, match="half of a character"):
        check_query("the caf\udce9")
    assert is_text("the café")
    assert not is_text("the caf\udce9")


def test_a_name_that_no_file_can_have_finds_none(tmp_path):
    assert find_image([tmp_path], "x" * 10_000) is None
