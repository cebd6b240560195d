"""The procedural pictures: reproducible, exact masks, and the mixture of free and occluded objects."""

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data.dataset import Instance
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.procedural import MIN_SIZE
from r2sm_jax.synthetic.scenes.drawings import CATEGORIES, draw_category
from r2sm_jax.synthetic.scenes.layout import Item, Layout, LayoutRules, PlacedItem
from r2sm_jax.synthetic.scenes.paint import COLOURS, PATTERNS, ROLES, Sprite
from r2sm_jax.synthetic.scenes.scene import Scene
from r2sm_jax.synthetic.scenes.source import (
    SceneSource,
    draw_scene,
)

SCENES = 150


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(7, index) for index in range(SCENES)]


def look(instance: Instance) -> tuple[str, str, str]:
    """Category, colour and pattern."""
    return instance.category, instance.attributes["colour"], instance.attributes["pattern"]


def check_hiding(scene: Scene) -> None:
    """What is hidden of an object is covered by others, and just those that cover enough of it are said to hide it."""
    instances = {i.id: i for i in scene.instances}
    assert np.array_equal(
        np.any([i.modal for i in scene.instances], axis=0),
        np.any([i.amodal for i in scene.instances], axis=0),
    )
    for facts in scene.facts:
        me = instances[facts.id]
        least = max(4, 0.01 * me.amodal.sum())
        assert list(facts.hidden_by) == sorted(facts.hidden_by)
        for number, other in instances.items():
            shared = me.amodal & other.amodal
            if number in facts.hidden_by:
                assert shared.sum() >= least and not (shared & me.modal).any()
            elif number != facts.id and shared.sum() >= least:  # then it is the other way round
                assert not (shared & other.modal).any()


def digest(scene: Scene) -> str:
    total = hashlib.sha256(scene.image.tobytes())
    for i in scene.instances:
        total.update(repr((i.id, look(i))).encode() + i.modal.tobytes() + i.amodal.tobytes())
    total.update(repr(scene.facts).encode())
    return total.hexdigest()


def test_vocabulary() -> None:
    assert len(CATEGORIES) == 24
    assert list(COLOURS) == [
        "red",
        "orange",
        "yellow",
        "green",
        "blue",
        "purple",
        "pink",
        "brown",
        "white",
    ]
    assert PATTERNS == ("plain", "striped", "dotted", "checked")


def test_same_arguments_give_same_bytes_in_any_order(scenes: list[Scene]) -> None:
    for index in (40, 3, 17, 3):
        assert digest(draw_scene(7, index)) == digest(scenes[index])


def test_same_bytes_in_another_process(scenes: list[Scene]) -> None:
    code = "from tests.test_scenes import digest, draw_scene; print(digest(draw_scene(7, 5)))"
    root = Path(__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == digest(scenes[5])


def test_seeds_and_indices_differ(scenes: list[Scene]) -> None:
    images = {scene.image.tobytes() for scene in scenes} | {
        draw_scene(8, k).image.tobytes() for k in range(5)
    }
    assert len(images) == SCENES + 5


def test_masks_are_exact(scenes: list[Scene]) -> None:
    for scene in scenes:
        assert scene.image.shape == (96, 96, 3) and scene.image.dtype == np.uint8
        assert np.sum([i.modal for i in scene.instances], axis=0).max() == 1
        for i in scene.instances:
            assert i.modal.dtype == i.amodal.dtype == bool and i.modal.shape == (96, 96)
            assert not (i.modal & ~i.amodal).any()


def test_facts_agree_with_the_masks(scenes: list[Scene]) -> None:
    for scene in scenes:
        assert 3 <= len(scene.instances) <= 8
        numbers = list(range(1, len(scene.instances) + 1))
        assert [i.id for i in scene.instances] == [facts.id for facts in scene.facts] == numbers
        for i, facts in zip(scene.instances, scene.facts, strict=True):
            assert facts.occlusion == pytest.approx(1 - i.modal.sum() / i.amodal.sum())
        check_hiding(scene)


def test_no_object_is_lost(scenes: list[Scene]) -> None:
    assert min(i.modal.sum() for scene in scenes for i in scene.instances) >= 30
    assert max(facts.occlusion for scene in scenes for facts in scene.facts) <= 0.85
    for scene in scenes:
        assert len(set(map(look, scene.instances))) == len(scene.instances)


def test_everything_appears(scenes: list[Scene]) -> None:
    objects = [i for scene in scenes for i in scene.instances]
    categories, colours, patterns = (set(words) for words in zip(*map(look, objects), strict=True))
    assert (categories, colours, patterns) == (set(CATEGORIES), set(COLOURS), set(PATTERNS))


def test_occlusion_is_spread(scenes: list[Scene]) -> None:
    rates = np.array([facts.occlusion for scene in scenes for facts in scene.facts])
    assert 0.35 < (rates > 0.05).mean() < 0.65
    counts = np.histogram(rates, (0.05, 0.2, 0.4, 0.6, 0.8))[0]
    assert counts.min() > 0.1 * counts.sum()


def test_copies_are_both_free_and_occluded(scenes: list[Scene]) -> None:
    with_copies = both = 0
    for scene in scenes:
        counts = Counter(facts.category for facts in scene.facts)
        groups = [
            [o.occlusion for o in scene.facts if o.category == c]
            for c, n in counts.items()
            if n > 1
        ]
        with_copies += bool(groups)
        both += any(min(group) < 0.05 < max(group) for group in groups)
    assert with_copies > 0.4 * SCENES
    assert both > 0.5 * with_copies


def test_the_named_colour_dominates(scenes: list[Scene]) -> None:
    names, paints = list(COLOURS), np.array(list(COLOURS.values()), float)
    right = []
    for scene in scenes[:60]:
        for o in scene.instances:
            _, colour, pattern = look(o)
            if pattern == "plain":
                pixels = scene.image[o.modal].astype(float)
                nearest = np.linalg.norm(pixels[:, None] - paints, axis=2).argmin(1)
                right.append(names[np.bincount(nearest).argmax()] == colour)
    assert np.mean(right) > 0.85


def test_layout_does_not_depend_on_size() -> None:
    ious = []
    for index in range(12):
        small, large = draw_scene(7, index), draw_scene(7, index, size=192)
        assert large.image.shape == (192, 192, 3)
        for a, b in zip(small.instances, large.instances, strict=True):
            assert look(a) == look(b)
            reduced = b.amodal.reshape(96, 2, 96, 2).mean((1, 3)) >= 0.5
            ious.append((a.amodal & reduced).sum() / (a.amodal | reduced).sum())
    assert np.mean(ious) > 0.85 and min(ious) > 0.7


def test_pictures_have_a_smallest_size() -> None:
    assert len(SceneSource("train", 40, size=MIN_SIZE)[39].instances) >= 3
    for size in (1, 8, MIN_SIZE - 1):
        with pytest.raises(InputError, match=rf"{size} pixels are too small .*give 16 or more"):
            SceneSource("train", 1, size=size)


@pytest.mark.parametrize("category", CATEGORIES)
def test_drawings_fill_the_unit_square_with_known_roles(category: str) -> None:
    for seed in range(5):
        parts = draw_category(category, np.random.default_rng(seed))
        assert {role for role, _ in parts} <= set(ROLES)
        assert all(shape.ndim == 2 and shape.shape[1] == 2 for _, shape in parts)
        points = np.concatenate([shape for role, shape in parts if role != "hole"])
        assert 0.9 < np.abs(points).max() < 1.35


def test_a_layout_hides_a_region_that_was_there_before() -> None:
    """As a photo has them: not square, with regions that no sprite was made for."""

    def square(side: int) -> Sprite:
        mask = np.ones((side, side), bool)
        return Sprite(
            Image.fromarray(mask.astype(np.uint8)).convert("RGBA"),
            mask,
            -side // 2,
            -side // 2,
            side,
        )

    rules = LayoutRules(
        (0.05, 0.7),
        0.05,
        num_directions=6,
        keep_inside=True,
        min_visible_pixels=20,
        min_visible_share=0.3,
    )
    for seed in range(10):
        rng = np.random.default_rng(seed)
        layout = Layout((60, 120), rules)
        layout.place_on_top(PlacedItem(Item("sofa", {}, "hidden"), square(30), 40, 30))
        layout.place_on_top(PlacedItem(Item("lamp", {}, "free"), square(20), 80, 30))
        share = rng.uniform(*rules.hidden_range)
        place = layout.find_position_over(rng, square(24), 0, share)
        assert place is not None
        layout.place_on_top(PlacedItem(Item("box", {}), square(24), *place))
        assert (
            abs(layout.hidden_share(0) - share) < 0.12
            and layout.hidden_share(0) <= 0.7
            and layout.hidden_share(1) == 0
        )
