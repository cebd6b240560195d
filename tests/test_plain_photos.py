"""scripts/plain_photos.py: figures of photos as they are."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import plain_photos
import pytest
from made_pictures import write_photos
from stub_predictor import StubOutliner, StubPredictor
from tiny_crops import rectangle

from r2sm_jax.config import DataConfig
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.inference.parts import Parts

LEFT, RIGHT, TABLE, CROWD = (rectangle(60, 80, x, 0, x + 20, 40) for x in (0, 20, 40, 60))


@pytest.fixture
def sample() -> Sample:
    instances = (
        Instance(1, "mug_01", LEFT, None),
        Instance(2, "mug_02", RIGHT, None),
        Instance(3, "table", TABLE, None),
        Instance(4, "mug", CROWD, None, ignore=True),
    )
    return Sample(1, "a.png", np.zeros((60, 80, 3), np.uint8), instances, ())


def test_nothing_is_laid_over_the_photos_and_every_kind_of_question_is_scored(tmp_path):
    file = write_photos(tmp_path / "photos")
    photos = plain_photos.open_photos(DataConfig(f"compose:{file}"), size=96, count=3)
    assert len(photos) == 3
    num_objects = len(json.loads(file.read_text())["annotations"]) / 90
    for index in range(3):
        assert len(photos[index].instances) == num_objects

    predictor = StubPredictor()
    predictor.parts = Parts(None, StubOutliner())
    figures = plain_photos.figures_of(predictor, photos)
    assert figures["photos"] == 3 and figures["sentences"]["queries"] > 0
    assert figures["box"]["objects"] == figures["click"]["objects"] > 0


def test_the_name_of_a_class_means_all_of_its_objects_and_ignored_regions_do_not_count(sample):
    asked = []

    class Answering:
        def predict(self, texts, **options):
            asked.extend(texts)
            return [SimpleNamespace(mask=LEFT | CROWD), SimpleNamespace(mask=TABLE | LEFT)]

    figures = plain_photos.class_figures(Answering(), [sample, sample])
    assert asked[:2] == ["the mug", "the table"]
    # Half of both mugs, and a table that is as large as what is drawn beside it.
    assert figures == {"names": 4, "iou": 0.5, "interval": [0.5, 0.5]}


def test_a_filled_box_is_as_good_as_the_share_of_it_that_the_object_fills(sample):
    assert plain_photos.filled_box_iou([sample]) == 1
    corner = Instance(1, "mug", LEFT & ~rectangle(60, 80, 10, 0, 20, 20), None)
    assert plain_photos.filled_box_iou([replace(sample, instances=(corner,))]) == 0.75


def test_other_sources_are_refused():
    with pytest.raises(InputError, match="compose:FILE"):
        plain_photos.open_photos(DataConfig("scenes"), size=96, count=3)
