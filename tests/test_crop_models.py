"""Completer and outliner: geometry of crops, what an answer keeps, examples, losses, learning."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from listed_source import ListedSource

from r2sm_jax.config import CompleterConfig, Config, LoopConfig, OutlinerConfig
from r2sm_jax.data.crops import (
    BOX_EXTENT,
    WHOLE_EXTENT,
    CropWindow,
    cut_crop,
    draw_prompt,
    others_of,
    window_of_box,
    windows_of_clicks,
)
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import prompt_figures
from r2sm_jax.evaluation.crop_selection import fit_outliner
from r2sm_jax.inference.crop_models import (
    MaskCompleter,
    MaskOutliner,
    Outline,
    OutlinerCalibration,
    choose_outline,
    different_outlines,
)
from r2sm_jax.models.crop_unet import CropOutput, make_completer, make_outliner
from r2sm_jax.query import Click, Prompt
from r2sm_jax.training import crop_models
from r2sm_jax.training.crop_models import (
    EXAMPLES_PER_IMAGE,
    completer_loss,
    completion_loss,
    cut_examples,
    cut_prompt_examples,
    disturb,
    draw_examples,
    draw_prompt as random_prompt,
    example_batches,
    known_masks,
    move_outline,
    negative_clicks,
    outline_loss,
    outliner_loss,
    positive_clicks,
    train_step,
)
from r2sm_jax.training.step import init_state

COMPLETER = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
OUTLINER = OutlinerConfig(
    size=32, dims=(8, 16), depth=1, heads=2, efficientnet="", block_dims=(8, 16, 8)
)


def rectangle(height, width, x0, y0, x1, y1):
    mask = np.zeros((height, width), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def disc(height, width, x, y, radius):
    rows, columns = np.mgrid[:height, :width]
    return (rows + 0.5 - y) ** 2 + (columns + 0.5 - x) ** 2 <= radius**2


def disc_picture(rng) -> Sample:
    """A bright disc on a dark ground."""
    mask = disc(48, 64, rng.uniform(16, 48), rng.uniform(14, 34), rng.uniform(6, 13))
    image = rng.integers(0, 60, (48, 64, 3)).astype(np.uint8)
    image[mask] += 150
    return Sample(1, "a.png", image, (Instance(1, "ball", mask, mask),), ())


@pytest.fixture(scope="module")
def completer():
    return MaskCompleter(COMPLETER, nnx.state(make_completer(COMPLETER, rngs=nnx.Rngs(0))))


@pytest.fixture(scope="module")
def outliner():
    model = make_outliner(OUTLINER, rngs=nnx.Rngs(0))
    # Without training logits are about -2, and masks would be empty.
    model.mask.bias[...] = model.mask.bias[...] + 2
    return MaskOutliner(OUTLINER, nnx.state(model))


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


# Windows and crops


def test_a_window_leaves_room_around_the_mask_and_reaches_over_the_border():
    window = CropWindow.around(rectangle(60, 80, 0, 10, 20, 20))
    assert (window.side, window.x, window.y) == (44, -12, -7)
    crop = window.cut(np.full((60, 80), 255, np.uint8), 44)
    assert crop[:, :12].max() == 0 and crop[:7].max() == 0 and crop[7:, 12:].min() == 255


def test_a_crop_pasted_back_is_the_image_there_and_the_outside_elsewhere(image):
    window = CropWindow(20, 10, 32)
    crop = window.cut(image[..., 0], 32).astype(np.float32)
    pasted = window.paste(crop, 60, 80, -1.0)
    np.testing.assert_array_equal(pasted[10:42, 20:52], image[10:42, 20:52, 0])
    assert (pasted[:10] == -1).all() and (pasted[:, 52:] == -1).all()


def test_a_window_far_beyond_a_panorama_reads_what_the_image_covers_alone(image):
    window = CropWindow(-9, -2000, 4096)
    crop = window.cut(image, 16)
    assert crop[8, 0].any() and not crop[:7].any() and not crop[:, 2:].any()
    assert window.paste(np.zeros((16, 16)), 60, 80, -1.0).max() == 0


def test_the_crop_of_a_box_shows_it_whole_in_the_middle():
    box = (10.0, 20.0, 50.0, 40.0)
    window = window_of_box(box)
    assert window.side == round(BOX_EXTENT * 40)
    assert abs(window.x + window.side / 2 - 30) <= 1 and abs(window.y + window.side / 2 - 30) <= 1
    plane = draw_prompt(window, 64, Prompt(box))[..., 0]
    scale = 64 / window.side
    assert plane.sum() / 255 == pytest.approx(40 * 20 * scale**2, rel=0.01)
    assert plane[32, 32] == 255 and plane[0].max() == 0


def test_windows_of_clicks_hold_all_positive_clicks_and_become_smaller():
    # Most clicks lie on one side: their mean is far from the last one.
    clicks = [Click(30, 40), *6 * [Click(70, 60)], Click(5, 5, is_positive=False)]
    windows = windows_of_clicks(clicks, 100, 200)
    assert windows[0].side == int(WHOLE_EXTENT * 200)
    sides = [window.side for window in windows]
    assert sides == sorted(sides, reverse=True) and len(sides) > 1
    for window in windows:
        for click in clicks[:-1]:
            assert window.x <= click.x <= window.x + window.side
            assert window.y <= click.y <= window.y + window.side


def test_a_click_is_a_spot_in_the_plane_of_its_kind():
    window = CropWindow(0, 0, 100)
    planes = draw_prompt(window, 40, Prompt(None, (Click(25, 50), Click(75, 50, False))))
    assert not planes[..., 0].any()
    for channel, column in ((1, 10), (2, 30)):
        row, peak = np.unravel_index(planes[..., channel].argmax(), (40, 40))
        assert abs(row - 19.5) <= 0.5 and abs(peak - column + 0.5) <= 0.5


# Answers


def test_an_answer_contains_the_given_mask_alike_alone_and_among_others(completer, image):
    visible = [rectangle(60, 80, 5 + 3 * k, 5, 25 + 3 * k, 30) for k in range(10)]
    together = completer(image, visible, neighbours=[None] * 10)
    for given, complete in zip(visible, together, strict=True):
        assert complete.shape == given.shape and (complete | given == complete).all()
        np.testing.assert_array_equal(complete, completer(image, [given])[0])
    expected = completer(image, visible[:3], neighbours=others_of(visible[:3]))
    np.testing.assert_array_equal(completer(image, visible[:3]), expected)


def test_a_completer_also_says_how_good_the_mask_is_and_whether_anything_is_hidden(completer):
    crops = np.random.default_rng(0).integers(0, 255, (3, 32, 32, 7), np.uint8)
    output = completer.read(crops)
    assert output.mask_logits.shape == (3, 32, 32) and output.hidden_logit.shape == (3,)
    assert (output.iou > 0).all() and (output.iou < 1).all()


@pytest.mark.parametrize(
    ("mask", "named"),
    [(np.zeros((60, 80), bool), "mask 1 is empty"), (np.ones((6, 8), bool), "6 x 8")],
)
def test_an_empty_mask_and_one_of_another_size_are_refused(completer, image, mask, named):
    with pytest.raises(InputError, match=named):
        completer(image, [mask])


def test_an_outline_has_the_size_of_the_image_and_a_predicted_iou(outliner):
    image = np.random.default_rng(0).integers(0, 255, (37, 90, 3), np.uint8)
    box, click = Prompt((5, 5, 40, 30)), Prompt(None, (Click(60, 20),))
    both = outliner(image, [box, click])
    for answer in both:
        assert answer.mask.shape == (37, 90) and answer.mask.dtype == bool
        assert 0 <= answer.iou <= 1
    (alone,) = outliner(image, [click])
    np.testing.assert_array_equal(alone.mask, both[1].mask)


def test_the_mask_that_several_windows_agree_on_is_chosen():
    """A part has the highest predicted IoU, the background of the largest window the lowest."""
    whole, part = rectangle(40, 50, 10, 10, 40, 30), rectangle(40, 50, 20, 15, 25, 20)
    nearly_whole = rectangle(40, 50, 10, 12, 40, 30)
    masks = (np.ones_like(whole), whole, nearly_whole, part)
    outlines = [Outline(mask, iou) for mask, iou in zip(masks, (0.2, 0.6, 0.6, 0.7), strict=True)]
    windows = [CropWindow(0, 0, side) for side in (50, 40, 30, 20)]
    assert choose_outline(outlines, windows) == 1

    # What else is meant, perhaps: the likeliest first, and what is nearly the answer left out.
    first, *others = outlines[1], *outlines
    assert different_outlines(first, others) == (outlines[3], outlines[0])

    # Where no window finds anything, the largest one answers.
    nothing = [Outline(np.zeros_like(whole), 0.1), Outline(np.zeros_like(whole), 0.1)]
    assert choose_outline(nothing, windows[:2]) == 0


# Examples


def test_examples_are_of_objects_whose_complete_mask_is_known(image, monkeypatch):
    whole, front = rectangle(60, 80, 10, 10, 50, 40), rectangle(60, 80, 30, 5, 60, 35)
    instances = (
        Instance(1, "cup", whole & ~front, whole),
        Instance(2, "box", front, None),
        Instance(3, "cat", whole, whole, ignore=True),
    )
    sample = Sample(1, "a.png", image, instances, ())
    monkeypatch.setattr(crop_models, "jitter_window", lambda window, rng: window)
    monkeypatch.setattr(crop_models, "STUFF_CHANCE", 0)
    monkeypatch.setattr(crop_models, "REST_SHARE", 0)
    rng = np.random.default_rng(0)
    (example,) = cut_examples(sample, 88, rng)  # a window of 88 pixels is not scaled
    window = CropWindow.around(whole & ~front)
    assert window.side == 88
    masks = (whole & ~front, front, whole)
    np.testing.assert_array_equal(example, cut_crop(image, window, 88, masks))


def test_examples_of_stuff_are_regions_behind_all_objects(image, monkeypatch):
    monkeypatch.setattr(crop_models, "STUFF_CHANCE", 1)
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
    monkeypatch.setattr(crop_models, "STUFF_CHANCE", 0)
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


@pytest.mark.parametrize("seed", range(5))
def test_clicks_lie_on_the_object_and_beside_it(seed):
    rng = np.random.default_rng(seed)
    mask = disc(40, 60, 20, 25, 9) & ~disc(40, 60, 24, 25, 6)
    for click in positive_clicks(mask, 3, rng):
        assert click.is_positive and mask[int(click.y), int(click.x)]
    for click in negative_clicks(mask, 3, rng):
        assert not click.is_positive and not mask[int(click.y), int(click.x)]


def test_prompts_of_all_kinds_are_drawn_and_examples_show_what_they_mean():
    rng = np.random.default_rng(0)
    prompts = [random_prompt(disc(40, 60, 30, 20, 10), rng) for _ in range(200)]
    assert any(len(prompt.clicks) > 1 for prompt in prompts)
    assert any(not click.is_positive for prompt in prompts for click in prompt.clicks)
    # A prompt without a box has a positive click, or nothing would say what is meant.
    for prompt in prompts:
        assert prompt.box or any(click.is_positive for click in prompt.clicks)
    kinds = set()
    for _ in range(40):
        for example in cut_prompt_examples(disc_picture(rng), 32, rng):
            assert example.shape == (32, 32, 8) and example[..., 7].any()
            kinds.add((bool(example[..., 4].any()), bool(example[..., 5].any())))
            bright = example[..., 0][example[..., 7] == 255]
            assert not bright.size or bright.min() >= 100
    assert kinds == {(True, False), (True, True), (False, True)}


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
    monkeypatch.setattr(crop_models, "POOL_SIZE", 64)
    source = ListedSource([picture(number, objects=3) for number in range(1, 61)])

    def batches(seed: int):
        return example_batches(source, Config(train=LoopConfig(batch_size=2, seed=seed)), cut_small)

    def take(iterator, count: int) -> list[list[int]]:
        """The picture of each example."""
        return [next(iterator)[..., 0].max((1, 2)).tolist() for _ in range(count)]

    numbers = take(batches(0), 40)
    assert {len(batch) for batch in numbers} == {2 * EXAMPLES_PER_IMAGE}
    assert take(batches(1), 5) != numbers[:5]
    assert {number for batch in numbers for number in batch} == set(range(1, 61))
    first, second = batches(0), batches(0)
    take(first, 7)
    second.set_state(first.get_state())
    assert take(second, 20) == numbers[7:27]


# Losses and learning


def test_the_loss_of_completion_by_hand():
    given, complete = np.zeros((2, 1, 4, 4), np.float32)
    given[0, :2] = complete[0, :3] = 1
    right = np.where(complete > 0, 30.0, -30.0)
    # The token is right, too: the IoU is 1, and a third is hidden.
    token = jnp.ones(1), jnp.full(1, 30.0)
    masks = jnp.asarray(given), jnp.asarray(complete)
    is_hidden = jnp.ones(1, bool)
    loss, _ = completion_loss(CropOutput(jnp.asarray(right), *token), *masks, is_hidden)
    assert float(loss) == pytest.approx(0, abs=1e-5)
    # Nothing is added: 8 of 12 pixels are right, 4 cost 30 each, over 12 + 32 pixels.
    nothing = np.full((1, 4, 4), -30.0)
    _, parts = completion_loss(CropOutput(jnp.asarray(nothing), *token), *masks, ~is_hidden)
    assert float(parts["soft_iou"]) == pytest.approx(8 / 12, abs=1e-5)
    assert float(parts["dice"]) == pytest.approx(16 / 20, abs=1e-5)
    assert float(parts["entropy"]) == pytest.approx((4 * 30 + 0.1 * 8 * 30) / 44, abs=1e-3)
    # What was given stands in the answer, whatever the logits there say.
    assert float(parts["iou_error"]) == pytest.approx((4 / 12) ** 2, abs=1e-5)
    assert float(parts["hidden_entropy"]) == pytest.approx(30, abs=1e-3)


def test_the_loss_of_outlines_falls_with_a_better_mask_and_a_better_predicted_iou():
    target = jnp.asarray(disc(16, 16, 8, 8, 5), jnp.float32)[None]
    good, bad = 8 * (target - 0.5), 8 * (jnp.roll(target, 6, axis=2) - 0.5)
    loss_of_good, parts = outline_loss(good, jnp.ones(1), target)
    assert parts["iou"] == 1 and loss_of_good < outline_loss(bad, jnp.ones(1), target)[0]
    assert loss_of_good < outline_loss(good, jnp.zeros(1), target)[0]
    # An example without an object counts nothing.
    padded = [jnp.concatenate([x, jnp.zeros_like(x)]) for x in (good, jnp.ones(1), target)]
    assert outline_loss(*padded)[0] == pytest.approx(float(loss_of_good), rel=1e-5)


def trained(model, loss, batches, rate: float = 3e-3):
    """The weights after a step on each batch, with the frozen ones, and the losses."""
    graphdef, params, constants = nnx.split(model, nnx.Param, ...)
    optimizer, config = optax.adam(rate), LoopConfig(matmul_precision="float32")
    step = partial(train_step, graphdef=graphdef, loss=loss, optimizer=optimizer, config=config)
    step = jax.jit(step)
    state, losses = init_state(params, optimizer, averaged=True), []
    for batch in batches:
        state, values = step(state, constants, batch)
        losses.append(float(values["loss"]))
    return nnx.merge_state(state.params, constants), losses


def test_the_completer_learns_what_a_square_hides():
    planes = np.zeros((8, 32, 32, 7), np.uint8)
    planes[..., :3] = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3))
    planes[..., 3] = 255
    planes[:, 10:22, 8:24, 6] = 255
    planes[:, 8:18, 16:28, 5] = 255
    planes[..., 4] = planes[..., 6] - np.minimum(planes[..., 6], planes[..., 5])
    model = make_completer(COMPLETER, rngs=nnx.Rngs(0))
    _, losses = trained(model, completer_loss, 30 * [planes])
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])


def test_the_outliner_learns_and_leaves_the_backbone_alone():
    rng = np.random.default_rng(0)
    model = make_outliner(OUTLINER, rngs=nnx.Rngs(0))
    _, params, constants = nnx.split(model, nnx.Param, ...)
    assert set(constants) == {"efficientnet"} and "efficientnet" not in params
    batches = [
        np.stack([next(cut_prompt_examples(disc_picture(rng), 32, rng)) for _ in range(16)])
        for _ in range(150)
    ]
    weights, _ = trained(model, outliner_loss, batches)
    samples = [disc_picture(rng) for _ in range(8)]
    fitted, figures = fit_outliner(MaskOutliner(OUTLINER, weights), samples)
    assert figures["box"]["objects"] == 8
    # Eight objects are too few to fit anything.
    assert fitted.calibration == OutlinerCalibration()
    assert prompt_figures(fitted, samples)["click"] == figures["click"]
    assert figures["box"]["iou"] > figures["filled box"]["iou"] + 0.05
    assert figures["click"]["iou"] > 0.6
