"""Every configuration that the package brings along: it loads, fits together, and is what its page
says."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import SamConfig

from r2sm_jax.cli import load_config_file
from r2sm_jax.config import check_config
from r2sm_jax.models.pretrained import fill_sizes
from r2sm_jax.models.r2sm import abstract_model

CONFIGS = Path(__file__).parents[1] / "configs"
PAPERS = {"cocoa_cls": 2276, "d2sa": 2000, "muva": 3000}  # training images


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_a_configuration_loads_and_fits_together(path):
    model = check_config(load_config_file(path)).model
    if not model.vision.pretrained:
        assert abstract_model(model).config == model


@pytest.mark.parametrize("name", PAPERS)
def test_the_protocol_is_the_papers(name):
    """Ten epochs of the training images that are not held out, and an evaluation after each."""
    config = load_config_file(CONFIGS / f"r2sm_{name}.py")
    loop = config.train
    assert loop.steps * loop.batch_size / (0.9 * PAPERS[name]) == pytest.approx(10, rel=0.01)
    assert loop.steps / loop.evaluate_every == pytest.approx(10, abs=0.01)
    assert config.data.queries == 10 and loop.batch_size // loop.accumulate == 2


def test_sizes_of_published_sam_fill_the_configuration(tmp_path):
    """`transformers`' default is ViT-B; sizes that contradict it would be refused."""
    model = load_config_file(CONFIGS / "r2sm_cocoa_cls.py").model
    SamConfig().save_pretrained(tmp_path)
    vision = replace(model.vision, sam=str(tmp_path))
    model = replace(model, vision=vision, decoder=replace(model.decoder, type="sam"))
    filled = fill_sizes(model)
    vision, decoder = filled.vision, filled.decoder
    assert (vision.dim, vision.depth, vision.global_blocks) == (768, 12, (2, 5, 8, 11))
    assert (vision.out_dim, decoder.dim, decoder.depth, decoder.heads) == (256, 256, 2, 8)
    assert fill_sizes(model, known=filled) == filled
