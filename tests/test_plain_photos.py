"""scripts/plain_photos.py: figures of photos as they are."""

import numpy as np
import plain_photos
import pytest
from made_pictures import write_photos
from stub_predictor import StubOutliner, StubPredictor

from r2sm_jax.config import DataConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.parts import Parts


def test_nothing_is_laid_over_the_photos_and_every_kind_of_question_is_scored(tmp_path):
    data = DataConfig(f"compose:{write_photos(tmp_path / 'photos')}")
    photos = plain_photos.open_photos(data, size=96, count=3)
    assert len(photos) == 3
    for index in range(3):
        for instance in photos[index].instances:
            np.testing.assert_array_equal(instance.complete, instance.modal)

    predictor = StubPredictor()
    predictor.parts = Parts(None, StubOutliner())
    figures = plain_photos.figures_of(predictor, photos)
    assert figures["sentences"]["queries"] > 0
    assert figures["box"]["objects"] == figures["click"]["objects"] > 0
    # An ellipse fills pi / 4 of its box; a part of one that the border cuts fills more.
    assert np.pi / 4 - 0.05 < figures["the filled box"] < 1


def test_a_class_is_asked_for_by_its_name_and_means_all_of_its_objects(tmp_path):
    data = DataConfig(f"compose:{write_photos(tmp_path / 'photos')}")
    photos = plain_photos.open_photos(data, size=96, count=1)
    asked = []

    class Knowing(StubPredictor):
        def predict(self, queries, **options):
            asked.extend(queries)
            return super().predict(queries, **options)

    figures = plain_photos.class_figures(Knowing(), [photos[0]])
    assert figures["names"] == len(asked) > 0 and figures["interval"] is None
    assert asked == [
        f"the {name}"
        for name in dict.fromkeys(i.category for i in photos[0].instances if not i.ignore)
    ]


def test_other_sources_are_refused():
    with pytest.raises(InputError, match="compose:FILE"):
        plain_photos.open_photos(DataConfig("scenes"), size=96, count=3)
