"""A new picture at every visit, worker processes, and averaged weights."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from made_pictures import digest, write_photos

import r2sm_jax.train as train_module
from r2sm_jax.config import DataConfig
from r2sm_jax.errors import InputError
from r2sm_jax.sources import open_split
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.training.step import update_average

SIZE = 48


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos", 30)


# New pictures.


def test_a_visit_makes_the_pictures_of_a_larger_source(file):
    few = ComposeSource(file, "train", None, size=SIZE)
    count = len(few)
    assert count == len(few.photo_order)
    more = ComposeSource(file, "train", 3 * count, size=SIZE)
    for index, visit in ((0, 0), (3, 1), (count - 1, 2)):
        assert digest(few.at_visit(index, visit)) == digest(more[visit * count + index])
    assert digest(few.at_visit(3, 0)) == digest(few[3]) != digest(few.at_visit(3, 1))

    scenes = open_split(DataConfig(), "train", count=4, size=SIZE)
    assert digest(scenes.at_visit(1, 2)) == digest(
        open_split(DataConfig(), "train", count=12, size=SIZE)[9]
    )


def test_images_of_a_file_are_not_fresh(tiny_config):
    data = replace(tiny_config.data, source="json:none.json", fresh=True)
    with pytest.raises(InputError, match=r"--data\.fresh: the images"):
        train_module.open_training(replace(tiny_config, data=data))


def test_the_average_follows_the_weights():
    params = nnx.State({"w": jnp.array([4.0])})
    average = nnx.State({"w": jnp.array([0.0])})
    # In the first step 1/10 of the old average stays, after 1000 steps 0.9 of it.
    assert update_average(average, params, jnp.array(0), 0.9)["w"][0] == pytest.approx(3.6)
    assert update_average(average, params, jnp.array(1000), 0.9)["w"][0] == pytest.approx(0.4)
