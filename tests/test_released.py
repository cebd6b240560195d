"""The model that the package brings along: small, whole, and ready to answer."""

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import r2sm_jax
from r2sm_jax.cli import from_json
from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.inference.exported import CARD, RELEASED, WEIGHTS, check_export, read_config
from r2sm_jax.models.r2sm import abstract_model
from r2sm_jax.models.weights import find_model

FOLDER = RELEASED / "photos-small"


@pytest.fixture(scope="module")
def config() -> Config:
    return from_json(Config, read_config(FOLDER)["config"], str(FOLDER))


def test_it_is_small_whole_and_has_a_card() -> None:
    check_export(FOLDER)
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 12_000_000
    card = (FOLDER / CARD).read_text()
    for heading in ("## Figures", "## Training data", "## Limits", "## Licences"):
        assert heading in card
    assert "CC BY" in card and "MIT" in card


def test_its_weights_have_the_shapes_of_this_version(config) -> None:
    """All but the published encoder's, which are not in the file."""
    wanted = nnx.to_flat_state(nnx.state(abstract_model(config.model)))
    shapes = {".".join(map(str, path)): variable.shape for path, variable in wanted}
    found = {name: weights.shape for name, weights in load_file(FOLDER / WEIGHTS).items()}
    assert found == {name: shape for name, shape in shapes.items() if name in found}
    assert all("backbone" in name for name in shapes.keys() - found.keys())


def test_it_answers_by_name(config) -> None:
    try:
        for name in (config.model.text.name, config.model.vision.efficientnet):
            find_model(str(name), "photos-small")
    except InputError as error:
        pytest.skip(f"its published parts cannot be had here: {error}")
    predictor = r2sm_jax.load("photos-small")
    image = np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8)
    predictor.set_image(image)
    visible, whole = predictor.predict(
        ["only the visible part of the cat", "the cat, including what the chair hides"]
    )
    assert (visible.mask_type, whole.mask_type) == ("modal", "amodal")
    for answer in (visible, whole):
        assert answer.mask.shape == (90, 120) and not (answer.modal & ~answer.amodal).any()
        assert 0 <= answer.score <= 1 and 0 <= answer.presence <= 1
