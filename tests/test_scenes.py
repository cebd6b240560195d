"""Drawn scenes: reproducible, exact masks, and the mixture of free and hidden objects. Layouts and
drawings."""

import numpy as np
import pytest
from made_pictures import check_hiding, check_instances, digest

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.procedural import MIN_SIZE
from r2sm_jax.synthetic.scenes.drawings import CATEGORIES, draw_category
from r2sm_jax.synthetic.scenes.paint import COLOURS, PATTERNS, ROLES
from r2sm_jax.synthetic.scenes.scene import Scene
from r2sm_jax.synthetic.scenes.source import SceneSource, draw_scene

NUM_SCENES = 150


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(7, index) for index in range(NUM_SCENES)]


def as_sample(scene: Scene) -> Sample:
    return Sample(0, "", scene.image, scene.instances, ())


def look(instance: Instance) -> tuple[str, str, str]:
    return instance.category, instance.attributes["colour"], instance.attributes["pattern"]


def test_same_arguments_give_the_same_bytes_and_others_do_not(scenes):
    for index in (40, 3, 17, 3):
        assert digest(as_sample(draw_scene(7, index))) == digest(as_sample(scenes[index]))
    images = {scene.image.tobytes() for scene in scenes}
    images |= {draw_scene(8, index).image.tobytes() for index in range(5)}
    assert len(images) == NUM_SCENES + 5


def test_masks_and_facts_are_exact(scenes):
    for scene in scenes:
        assert scene.image.shape == (96, 96, 3) and scene.image.dtype == np.uint8
        assert 3 <= len(scene.instances) <= 8
        check_instances(as_sample(scene))
        check_hiding(scene.instances, scene.facts)
        for i, facts in zip(scene.instances, scene.facts, strict=True):
            assert facts.id == i.id
            assert facts.occlusion == pytest.approx(1 - i.modal.sum() / i.amodal.sum())


def test_objects_stay_recognisable_and_different(scenes):
    for scene in scenes:
        assert min(i.modal.sum() for i in scene.instances) >= 30
        assert max(facts.occlusion for facts in scene.facts) <= 0.85
        assert len(set(map(look, scene.instances))) == len(scene.instances)


def test_everything_appears(scenes):
    looks = [look(i) for scene in scenes for i in scene.instances]
    categories, colours, patterns = (set(words) for words in zip(*looks, strict=True))
    assert len(CATEGORIES) == 24
    assert (categories, colours, patterns) == (set(CATEGORIES), set(COLOURS), set(PATTERNS))


def test_the_layout_does_not_depend_on_the_size():
    ious = []
    for index in range(12):
        small, large = draw_scene(7, index), draw_scene(7, index, size=192)
        for a, b in zip(small.instances, large.instances, strict=True):
            assert look(a) == look(b)
            reduced = b.amodal.reshape(96, 2, 96, 2).mean((1, 3)) >= 0.5
            ious.append((a.amodal & reduced).sum() / (a.amodal | reduced).sum())
    assert np.mean(ious) > 0.85 and min(ious) > 0.7


def test_pictures_have_a_smallest_size():
    assert len(SceneSource("train", 40, size=MIN_SIZE)[39].instances) >= 3
    with pytest.raises(InputError, match="15 pixels"):
        SceneSource("train", 1, size=MIN_SIZE - 1)


@pytest.mark.parametrize("category", CATEGORIES)
def test_drawings_fill_the_unit_square_with_known_roles(category):
    for seed in range(5):
        parts = draw_category(category, np.random.default_rng(seed))
        assert {role for role, _ in parts} <= set(ROLES)
        points = np.concatenate([shape for role, shape in parts if role != "hole"])
        assert points.shape[1] == 2 and 0.9 < np.abs(points).max() < 1.35
