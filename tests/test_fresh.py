"""A new picture at every visit, worker processes, and averaged weights."""

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from made_pictures import digest, write_photos

import r2sm_jax.train as train_module
from r2sm_jax.config import DataConfig
from r2sm_jax.errors import InputError
from r2sm_jax.sources import open_split
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.synthetic.scenes.scene import describe_objects
from r2sm_jax.training.step import update_average

SIZE = 48


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos", 30)


# New pictures.


def test_a_visit_makes_the_pictures_of_a_larger_source(file):
    few = ComposeSource(file, "train", None, size=SIZE)
    count = len(few)
    assert count == len(few.photo_indices)
    more = ComposeSource(file, "train", 3 * count, size=SIZE)
    for index, visit in ((0, 0), (3, 1), (count - 1, 2)):
        assert digest(few.at_visit(index, visit, False)) == digest(more[visit * count + index])
    assert digest(few.at_visit(3, 0, False)) == digest(few[3]) != digest(few.at_visit(3, 1, False))

    scenes = open_split(DataConfig(), "train", count=4, size=SIZE)
    assert digest(scenes.at_visit(1, 2, False)) == digest(
        open_split(DataConfig(), "train", count=12, size=SIZE)[9]
    )


def test_queries_of_a_mirrored_picture_are_true_of_it(file):
    """Left is what is left in the picture, and facts are those of its masks."""
    scenes = open_split(DataConfig(), count=60, size=SIZE)
    sides = []
    for index in range(60):
        sample, mirrored = (scenes.at_visit(index, 0, is_mirrored) for is_mirrored in (False, True))
        assert (mirrored.image == sample.image[:, ::-1]).all()
        assert [i.id for i in mirrored.instances] == [i.id for i in sample.instances]
        for one, other in zip(mirrored.instances, reversed(sample.instances), strict=True):
            assert (one.complete == other.complete[:, ::-1]).all()
        centres = {i.id: np.nonzero(i.complete)[1].mean() for i in mirrored.instances}
        category = {i.id: i.category for i in mirrored.instances}
        for query in mirrored.queries:
            side = re.search(r"\b(left|right)most|on the (left|right)\b", query.text)
            if side and len(query.instance_ids) == 1:
                (target,) = query.instance_ids
                others = [centres[i] for i in centres if category[i] == category[target]]
                end = min(others) if "left" in side[0] else max(others)
                sides.append(centres[target] == end)
    assert len(sides) > 5 and all(sides)

    source = ComposeSource(file, "train", 10, size=SIZE)
    for number in range(10):
        mirrored = source.make_scene(number).mirrored()
        assert repr([*mirrored.facts]) == repr(describe_objects(mirrored.instances))


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
