"""Crops and colours that are drawn at each visit of a training image."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_batches import sample

from r2sm_jax.data.dataset import Instance
from r2sm_jax.data.prepare import MIN_SHARE_IN_CROP, jitter_colours, random_crop


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 1.0))
def test_a_crop_cuts_image_and_masks_alike(seed, smallest):
    one = sample()
    numbered = replace(
        one, image=np.arange(one.image.size, dtype=np.uint32).reshape(one.image.shape)
    )
    crop = random_crop(numbered, smallest, np.random.default_rng(seed))
    height, width = crop.image.shape[:2]
    assert height >= round(smallest * one.image.shape[0]) and width >= round(
        smallest * one.image.shape[1]
    )
    y, x = divmod(int(crop.image[0, 0, 0]) // 3, one.image.shape[1])
    assert (crop.image == numbered.image[y : y + height, x : x + width]).all()
    before = {instance.id: instance for instance in one.instances}
    for instance in crop.instances:
        for key in ("modal", "amodal"):
            assert (
                getattr(instance, key)
                == getattr(before[instance.id], key)[y : y + height, x : x + width]
            ).all()
        assert instance.amodal.any() and not (instance.modal & ~instance.amodal).any()
    left = {
        instance.id: instance.amodal.sum() / before[instance.id].amodal.sum()
        for instance in crop.instances
    }
    for query in one.queries:
        whole = all(left.get(number, 0) >= MIN_SHARE_IN_CROP for number in query.instance_ids)
        assert (query in crop.queries) == whole


@pytest.mark.parametrize(
    ("text", "category", "stays"),
    [
        ("the second mug from the left", "mug", False),
        ("the Topmost mug", "mug", False),
        ("the 2nd mug", "mug", False),
        ("the mug closest to us", "mug", False),
        ("the second mug from the left", "plate", True),
        ("the bright mug", "mug", True),
    ],
)
def test_a_position_among_instances_is_not_learnt_once_one_is_cropped(text, category, stays):
    one = sample()
    masks = np.zeros((2, 8, 20), bool)
    masks[0, 2:6, 0:2] = True
    masks[1, 2:6, 8:12] = True
    instances = (
        Instance(1, category, masks[0], masks[0]),
        Instance(2, "mug", masks[1], masks[1]),
    )
    query = replace(one.queries[0], text=text, instance_ids=(2,))
    image = np.zeros((8, 20, 3), np.uint8)
    row = replace(one, image=image, instances=instances, queries=(query,))

    outcomes = []
    for seed in range(100):
        crop = random_crop(row, 0.5, np.random.default_rng(seed))
        ids = {instance.id for instance in crop.instances}
        mug = next((instance for instance in crop.instances if instance.id == 2), None)
        if 1 not in ids and mug is not None and mug.amodal.sum() == 16:
            outcomes.append(bool(crop.queries))
    assert len(outcomes) > 5 and set(outcomes) == {stays}


def test_colours_change_and_hues_stay():
    image = np.zeros((4, 4, 3), np.uint8)
    image[:2], image[2:] = (200, 40, 40), (40, 60, 180)
    changed = [jitter_colours(image, 0.4, np.random.default_rng(seed)) for seed in range(20)]
    assert len({c.tobytes() for c in changed}) > 10
    assert all(c[0, 0].argmax() == 0 and c[3, 3].argmax() == 2 for c in changed)
    assert (jitter_colours(image, 0.0, np.random.default_rng(0)) == image).all()
