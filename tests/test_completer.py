"""Training of the completer: its examples, their batches and variation, losses, learning."""

import json
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from listed_source import ListedSource
from tiny_crops import COMPLETER as SIZES, rectangle, trained

from r2sm_jax.config import Config, LoopConfig
from r2sm_jax.data.crops import CropWindow, cut_crop
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.models.crop_unet import CropOutput, make_completer
from r2sm_jax.training import completer, crops
from r2sm_jax.training.completer import (
    COMPLETER,
    LOSS_WEIGHTS,
    CompletionTargets,
    completion_losses,
    cut_examples,
    disturb,
    known_masks,
    move_outline,
)
from r2sm_jax.training.crops import EXAMPLES_PER_IMAGE, draw_examples, example_batches
from r2sm_jax.training.step import sum_over_parts, total_loss


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


def test_examples_are_of_objects_whose_complete_mask_is_known(image, monkeypatch):
    whole, front = rectangle(60, 80, 10, 10, 50, 40), rectangle(60, 80, 30, 5, 60, 35)
    instances = (
        Instance(1, "cup", whole & ~front, whole),
        Instance(2, "box", front, None),
        Instance(3, "cat", whole, whole, ignore=True),
    )
    sample = Sample(1, "a.png", image, instances, ())
    monkeypatch.setattr(completer, "jitter_window", lambda window, rng: window)
    monkeypatch.setattr(completer, "STUFF_CHANCE", 0)
    monkeypatch.setattr(completer, "REST_SHARE", 0)
    rng = np.random.default_rng(0)
    (example,) = cut_examples(sample, 88, rng)  # a window of 88 pixels is not scaled
    window = CropWindow.around(whole & ~front)
    assert window.side == 88
    masks = (whole & ~front, front, whole)
    np.testing.assert_array_equal(example, cut_crop(image, window, 88, masks))


def test_examples_of_stuff_are_regions_behind_all_objects(image, monkeypatch):
    monkeypatch.setattr(completer, "STUFF_CHANCE", 1)
    rng = np.random.default_rng(0)
    front = rectangle(60, 80, 30, 15, 60, 45)
    sample = Sample(1, "a.png", image, (Instance(1, "box", front, front),), ())
    regions = []
    for _ in range(60):
        _, *stuff = known_masks(sample, front, rng)
        regions += stuff
    assert len(regions) > 40
    for shown, region in regions:
        np.testing.assert_array_equal(shown, region & ~front)
        assert shown.sum() >= 0.3 * region.sum()
    assert np.mean([(region & front).any() for _, region in regions]) > 0.5


def test_the_rest_of_a_picture_or_a_part_of_it_is_a_neighbour_in_half_of_the_examples(
    image, monkeypatch
):
    monkeypatch.setattr(completer, "STUFF_CHANCE", 0)
    whole = rectangle(60, 80, 30, 20, 50, 40)
    sample = Sample(1, "a.png", image, (Instance(1, "cup", whole, whole),), ())
    rng = np.random.default_rng(0)
    shares = []
    while len(shares) < 200:
        for example in cut_examples(sample, 32, rng):
            inside, visible, others = (example[..., k] == 255 for k in (3, 4, 5))
            shares.append(others.sum() / (inside & ~visible).sum())
    assert 0.15 < np.mean(np.array(shares) > 0.9) < 0.45
    assert 0.4 < np.mean(np.array(shares) == 0) < 0.65


def test_noise_moves_the_outline_and_keeps_most_of_the_mask():
    mask = np.zeros((16, 64, 64), np.float32)
    mask[:, 16:48, 20:44] = 1
    moved = np.asarray(move_outline(jnp.asarray(mask), jax.random.key(0)))
    ious = (np.minimum(mask, moved).sum((1, 2))) / np.maximum(mask, moved).sum((1, 2))
    assert 0.4 < ious.min() < ious.max() and ious.std() > 0.01
    assert set(np.unique(moved)) <= {0.0, 1.0}
    disturbed = np.asarray(disturb(jnp.asarray(mask), jnp.zeros_like(mask), jax.random.key(1)))
    assert (disturbed.sum((1, 2)) > 0.3 * mask.sum((1, 2))).all()


def picture(number: int, objects: int) -> Sample:
    """A picture of the colour `number` with some objects of which half is hidden."""
    whole, hidden = rectangle(40, 40, 10, 10, 30, 30), rectangle(40, 40, 0, 10, 40, 20)
    instances = [Instance(i, "cup", whole & ~hidden, whole) for i in range(1, objects + 1)]
    return Sample(number, "a.png", np.full((40, 40, 3), number, np.uint8), tuple(instances), ())


cut_small = partial(cut_examples, size=16)


def test_a_picture_gives_some_examples_and_none_if_it_has_no_complete_mask():
    hidden = picture(1, objects=6)
    unknown = replace(picture(2, objects=1).instances[0], amodal=None)
    samples = [hidden, replace(hidden, instances=(unknown,))]
    draw = partial(draw_examples, source=ListedSource(samples), cut=cut_small)
    of_first, of_second = (draw((i, 0), np.random.default_rng(0)) for i in (0, 1))
    assert [example.shape for example in of_first] == EXAMPLES_PER_IMAGE * [(16, 16, 7)]
    assert all(example[..., 6].max() == 255 for example in of_first) and of_second == []
    with pytest.raises(InputError, match="no training picture has an object"):
        example_batches(ListedSource(samples[1:]), Config(), cut_small)


def test_batches_mix_pictures_by_the_seed_and_continue_from_their_state(monkeypatch):
    monkeypatch.setattr(crops, "POOL_SIZE", 64)
    source = ListedSource([picture(number, objects=3) for number in range(1, 61)])

    def batches(seed: int):
        return example_batches(source, Config(train=LoopConfig(batch_size=2, seed=seed)), cut_small)

    def take(read, count: int, position: Any = None) -> tuple[list[list[int]], Any]:
        """The picture of each example of some batches, and the position after them."""
        taken = list(islice(read(position), count))
        return [batch[..., 0].max((1, 2)).tolist() for batch, _ in taken], taken[-1][1]

    numbers, _ = take(batches(0), 40)
    assert {len(batch) for batch in numbers} == {2 * EXAMPLES_PER_IMAGE}
    assert take(batches(1), 5)[0] != numbers[:5]
    assert {number for batch in numbers for number in batch} == set(range(1, 61))
    _, position = take(batches(0), 7)
    assert take(batches(0), 20, json.loads(json.dumps(position)))[0] == numbers[7:27]


# Losses and learning


def test_the_losses_of_completion_by_hand():
    given, complete = np.zeros((2, 1, 4, 4), np.float32)
    given[0, :2] = complete[0, :3] = 1
    # The token is right, too: the IoU is 1, and a third is hidden.
    token = jnp.ones(1), jnp.full(1, 30.0)
    targets = CompletionTargets(
        np.zeros((1, 4, 4, 7)), given, complete, np.ones(1, bool), np.ones(1)
    )
    targets = jax.tree.map(jnp.asarray, targets)
    right = jnp.where(targets.complete > 0, 30.0, -30.0)
    losses = completion_losses(CropOutput(right, *token), targets)
    assert float(total_loss(losses, LOSS_WEIGHTS)) == pytest.approx(0, abs=1e-5)
    # Nothing is added: 8 of 12 pixels are right, 4 cost 30 each, over 12 + 32 pixels.
    nothing = jnp.full((1, 4, 4), -30.0)
    not_hidden = targets._replace(is_hidden=~targets.is_hidden)
    losses = completion_losses(CropOutput(nothing, *token), not_hidden)
    assert float(losses["soft_iou_error"]) == pytest.approx(4 / 12, abs=1e-5)
    assert float(losses["dice_error"]) == pytest.approx(4 / 20, abs=1e-5)
    assert float(losses["entropy"]) == pytest.approx((4 * 30 + 0.1 * 8 * 30) / 44, abs=1e-3)
    # What was given stands in the answer, whatever the logits there say.
    assert float(losses["iou_error"]) == pytest.approx((4 / 12) ** 2, abs=1e-5)
    assert float(losses["hidden_entropy"]) == pytest.approx(30, abs=1e-3)


def test_the_completer_learns_what_a_square_hides():
    planes = np.zeros((8, 32, 32, 7), np.uint8)
    planes[..., :3] = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3))
    planes[..., 3] = 255
    planes[:, 10:22, 8:24, 6] = 255
    planes[:, 8:18, 16:28, 5] = 255
    planes[..., 4] = planes[..., 6] - np.minimum(planes[..., 6], planes[..., 5])
    model = make_completer(SIZES, rngs=nnx.Rngs(0))
    _, losses = trained(model, COMPLETER.loss, 30 * [planes])
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])


def test_parts_of_a_batch_give_the_losses_of_the_whole():
    """Of the first half two of four examples have no object."""
    rng = np.random.default_rng(0)
    planes = rng.integers(0, 255, (8, 32, 32, 7)).astype(np.uint8)
    planes[..., 6] = 255 * (rng.random((8, 32, 32)) < 0.4)
    planes[:4:2, ..., 6] = 0
    planes[..., 4] = planes[..., 6] * (rng.random((8, 32, 32)) < 0.7)
    model = make_completer(SIZES, rngs=nnx.Rngs(0))
    targets = COMPLETER.loss.inputs_and_targets(jnp.asarray(planes), jax.random.key(0))
    whole, parts = (
        sum_over_parts(lambda part: COMPLETER.loss.losses(model, part), targets, count)
        for count in (1, 4)
    )
    for name, loss in whole.items():
        assert loss > 0 and parts[name] == pytest.approx(float(loss), rel=1e-5), name
