"""The model that the package brings along: small, complete and ready to predict."""

import re

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import r2sm_jax
from r2sm_jax.cli import from_json
from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.inference.load import UNIT
from r2sm_jax.inference.model_folder import CARD, RELEASED, WEIGHTS, read_stored, verify_files
from r2sm_jax.models.hub import find_model
from r2sm_jax.models.r2sm import abstract_model

FOLDER = RELEASED / "photos-small"
STORED = read_stored(FOLDER)


@pytest.fixture(scope="module")
def config() -> Config:
    return from_json(Config, STORED["config"], str(FOLDER))


def test_it_is_small_and_complete_and_has_a_card() -> None:
    verify_files(FOLDER)
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 22_000_000
    card = (FOLDER / CARD).read_text()
    for heading in ("## Figures", "## Training data", "## Limits", "## Licences"):
        assert heading in card
    assert "CC BY" in card and "MIT" in card


def test_its_weights_have_the_shapes_of_this_version(config) -> None:
    """All but those of the published encoder and its classifier, which are not in the file."""
    leaves = nnx.to_flat_state(nnx.state(abstract_model(config.model)))
    expected = {".".join(map(str, path)): leaf.shape for path, leaf in leaves}
    tensors = load_file(FOLDER / WEIGHTS)
    assert not any(name.startswith("outliner.efficientnet.") for name in tensors)
    others = re.compile(rf"(completer|outliner)\.|.*{UNIT}$")
    shapes = {name: x.shape for name, x in tensors.items() if not others.match(name)}
    assert shapes.items() <= expected.items()
    published = re.compile(r"efficientnet|classifier\.(hidden|out)\.")
    assert all(published.search(name) for name in expected.keys() - shapes.keys())


def test_it_predicts_by_name(config) -> None:
    try:
        for name in (config.model.text.name, config.model.vision.efficientnet):
            find_model(str(name), "photos-small")
    except InputError as error:
        pytest.skip(f"its published parts cannot be had here: {error}")
    predictor = r2sm_jax.load("photos-small")
    predictor.set_image(np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8))
    modal, amodal = predictor.predict(
        ["only the visible part of the cat", "the cat, including what the chair hides"]
    )
    assert (modal.mask_type, amodal.mask_type) == ("modal", "amodal")
    for prediction in (modal, amodal):
        assert prediction.mask.shape == (90, 120)
        assert not (prediction.modal & ~prediction.amodal).any()
        assert 0 <= prediction.score <= 1 and 0 <= prediction.presence <= 1
    (outlined,) = predictor.predict([None], boxes=[(20, 20, 80, 70)])
    assert outlined.mask.shape == (90, 120)
