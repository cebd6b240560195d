"""The model that the package brings along: small, whole, and ready to answer."""

import numpy as np
import pytest

import r2sm_jax
from r2sm_jax.errors import InputError
from r2sm_jax.exported import CARD, RELEASED, check_export

FOLDER = RELEASED / "photos-small"


def test_it_is_small_whole_and_has_a_card() -> None:
    check_export(FOLDER)
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 12_000_000
    card = (FOLDER / CARD).read_text()
    for heading in ("## Figures", "## Training data", "## Limits", "## Licences"):
        assert heading in card
    assert "CC BY" in card and "MIT" in card


def test_it_answers_by_name() -> None:
    try:
        predictor = r2sm_jax.load("photos-small")
    except InputError as error:
        pytest.skip(f"its published parts cannot be had here: {error}")
    image = np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8)
    predictor.set_image(image)
    visible, whole = predictor.predict(["only the visible part of the cat", "the cat, including what the chair hides"])
    assert (visible.mask_type, whole.mask_type) == ("modal", "amodal")
    for answer in (visible, whole):
        assert answer.mask.shape == (90, 120) and not (answer.modal & ~answer.amodal).any()
        assert 0 <= answer.score <= 1 and 0 <= answer.presence <= 1
