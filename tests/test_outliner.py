"""The outliner: crops of prompts, examples, learning, its files, and its place in a predictor."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from r2sm_jax import predict, train
from r2sm_jax.config import OutlinerConfig
from r2sm_jax.data import masks
from r2sm_jax.data.crops import (
    BOX_EXTENT,
    WHOLE_EXTENT,
    CropWindow,
    cut_prompt_crop,
    draw_prompt,
    window_at,
    window_of_box,
    windows_of_clicks,
)
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.evaluation.completion import iou, outliner_figures
from r2sm_jax.inference.crop_models import (
    MaskOutliner,
    Outline,
    choose_outline,
    load_outliner,
    save_outliner,
)
from r2sm_jax.inference.export_folder import RELEASED, check_export
from r2sm_jax.inference.exporter import add_parts
from r2sm_jax.inference.run import load_export
from r2sm_jax.models.crop_unet import make_outliner
from r2sm_jax.models.efficientnet import EfficientNetLite
from r2sm_jax.query import Click, Prompt
from r2sm_jax.training.crop_models import (
    cut_prompt_examples,
    draw_prompt as random_prompt,
    negative_clicks,
    outline_loss,
    outliner_loss,
    positive_clicks,
)
from r2sm_jax.training.parts import make_step

TINY = OutlinerConfig(
    size=32, dims=(8, 16), depth=1, heads=2, efficientnet="", block_dims=(8, 16, 8)
)
FLAGS = """
    --train.part outliner --train.steps 2 --train.batch-size 2 --train.log-every 1
    --train.evaluate-every 2 --train.evaluate-samples 4 --data.scenes 8 --data.queries 1
    --model.vision.image-size 64 --model.outliner.size 32 --model.outliner.dims 8 16
    --model.outliner.depth 1 --model.outliner.heads 2 --model.outliner.block-dims 8 16 8
""".split()


def make_weights(seed: int = 0) -> nnx.State:
    return nnx.state(make_outliner(TINY, rngs=nnx.Rngs(seed)))


@pytest.fixture(scope="module")
def outliner():
    weights = make_weights()
    # Without training logits are about -2, and masks would be empty.
    leaves = []
    for path, leaf in nnx.to_flat_state(weights):
        if path == ("mask", "bias"):
            leaf = leaf.replace(leaf[...] + 2)
        leaves.append((path, leaf))
    return MaskOutliner(TINY, nnx.from_flat_state(leaves))


def disc(height, width, x, y, radius):
    rows, columns = np.mgrid[:height, :width]
    return (rows + 0.5 - y) ** 2 + (columns + 0.5 - x) ** 2 <= radius**2


def picture(rng) -> Sample:
    """A bright disc on a dark ground."""
    mask = disc(48, 64, rng.uniform(16, 48), rng.uniform(14, 34), rng.uniform(6, 13))
    image = rng.integers(0, 60, (48, 64, 3)).astype(np.uint8)
    image[mask] += 150
    return Sample(1, "a.png", image, (Instance(1, "ball", mask, mask),), ())


def test_the_crop_of_a_box_shows_it_whole_in_the_middle():
    box = (10.0, 20.0, 50.0, 40.0)
    window = window_of_box(box)
    assert window.side == round(BOX_EXTENT * 40)
    assert abs(window.x + window.side / 2 - 30) <= 1 and abs(window.y + window.side / 2 - 30) <= 1
    plane = draw_prompt(window, 64, Prompt(box))[..., 0]
    scale = 64 / window.side
    assert plane.sum() / 255 == pytest.approx(40 * 20 * scale**2, rel=0.01)
    rows, columns = np.nonzero(plane)
    assert columns.mean() > rows.mean() - 2  # both near the middle
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


def test_a_window_that_fits_lies_within_the_image():
    window = window_at(2, 99, 40, 100, 200)
    assert (window.x, window.y) == (0, 60)
    wide = window_at(2, 99, 150, 100, 200)
    assert wide.x == 0 and wide.y == -25


def test_a_click_is_a_spot_in_the_plane_of_its_kind():
    window = window_at(50, 50, 100, 100, 100)
    clicks = (Click(25, 50), Click(75, 50, is_positive=False))
    planes = draw_prompt(window, 40, Prompt(None, clicks))
    assert not planes[..., 0].any()
    for channel, column in ((1, 10), (2, 30)):
        row, peak = np.unravel_index(planes[..., channel].argmax(), (40, 40))
        assert abs(row - 19.5) <= 0.5 and abs(peak - column + 0.5) <= 0.5


def test_an_answer_has_the_size_of_the_image_and_a_predicted_iou(outliner):
    image = np.random.default_rng(0).integers(0, 255, (37, 90, 3), np.uint8)
    box = Prompt((5, 5, 40, 30))
    click = Prompt(None, (Click(60, 20),))
    both = outliner(image, [box, click])
    for answer in both:
        assert answer.mask.shape == (37, 90) and answer.mask.dtype == bool
        assert 0 <= answer.iou <= 1
    # A prompt is answered alike alone and beside others.
    (alone,) = outliner(image, [click])
    np.testing.assert_array_equal(alone.mask, both[1].mask)


def test_the_mask_that_several_windows_agree_on_is_chosen():
    """A part has the highest predicted IoU, the background of the largest window the lowest."""
    whole = np.zeros((40, 50), bool)
    whole[10:30, 10:40] = True
    nearly_whole = whole.copy()
    nearly_whole[10:12] = False
    part = np.zeros_like(whole)
    part[15:20, 20:25] = True
    outlines = [
        Outline(np.ones_like(whole), 0.2),
        Outline(whole, 0.6),
        Outline(nearly_whole, 0.6),
        Outline(part, 0.7),
    ]
    windows = [CropWindow(0, 0, side) for side in (50, 40, 30, 20)]
    assert choose_outline(outlines, windows) is outlines[1]

    # Where no window finds anything, the largest one answers.
    nothing = [Outline(np.zeros_like(whole), 0.1), Outline(np.zeros_like(whole), 0.1)]
    assert choose_outline(nothing, windows[:2]) is nothing[0]


def test_first_blocks_give_the_features_of_the_whole_backbone():
    config = OutlinerConfig()
    dims = (*config.block_dims, *5 * (208,), 352)  # Lite2
    whole = EfficientNetLite(dims, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    part = EfficientNetLite(config.block_dims, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(1))
    published = nnx.to_flat_state(nnx.state(whole))
    by_path = dict(published)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(part))]
    nnx.update(part, nnx.from_flat_state([(path, by_path[path]) for path in paths]))
    image = jax.random.normal(jax.random.key(0), (1, 64, 64, 3))
    assert len(part(image)) == 4
    for ours, theirs in zip(part(image), whole(image), strict=False):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("seed", range(5))
def test_clicks_lie_on_the_object_and_beside_it(seed):
    rng = np.random.default_rng(seed)
    mask = disc(40, 60, 20, 25, 9) & ~disc(40, 60, 24, 25, 6)
    for click in positive_clicks(mask, 3, rng):
        assert click.is_positive and mask[int(click.y), int(click.x)]
    for click in negative_clicks(mask, 3, rng):
        assert not click.is_positive and not mask[int(click.y), int(click.x)]


def test_examples_show_the_object_that_their_prompt_means():
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(40):
        sample = picture(rng)
        for example in cut_prompt_examples(sample, 32, rng):
            assert example.shape == (32, 32, 8) and example[..., 7].any()
            kinds.add((bool(example[..., 4].any()), bool(example[..., 5].any())))
            bright = example[..., 0][example[..., 7] == 255]
            assert not bright.size or bright.min() >= 100
    assert kinds == {(True, False), (True, True), (False, True)}


def test_the_loss_falls_with_a_better_mask_and_a_better_predicted_iou():
    target = jnp.asarray(disc(16, 16, 8, 8, 5), jnp.float32)[None]
    good, bad = 8 * (target - 0.5), 8 * (jnp.roll(target, 6, axis=2) - 0.5)
    loss_of_good, parts = outline_loss(good, jnp.ones(1), target)
    assert parts["iou"] == 1 and loss_of_good < outline_loss(bad, jnp.ones(1), target)[0]
    assert loss_of_good < outline_loss(good, jnp.zeros(1), target)[0]
    # An example without an object counts nothing.
    padded = [jnp.concatenate([x, jnp.zeros_like(x)]) for x in (good, jnp.ones(1), target)]
    assert outline_loss(*padded)[0] == pytest.approx(float(loss_of_good), rel=1e-5)


def test_it_learns_to_outline_and_leaves_the_backbone_alone():
    rng = np.random.default_rng(0)
    model = make_outliner(TINY, rngs=nnx.Rngs(0))
    graphdef, weights, frozen = nnx.split(model, nnx.Param, ...)
    assert all(path[0] == "efficientnet" for path, _ in nnx.to_flat_state(frozen))
    assert "efficientnet" not in weights
    optimizer = optax.adam(3e-3)
    step = jax.jit(make_step(outliner_loss(graphdef), optimizer, 0.9))
    state = (weights, weights, optimizer.init(weights))
    for number in range(150):
        examples = [next(cut_prompt_examples(picture(rng), 32, rng)) for _ in range(16)]
        state, _ = step(state, frozen, np.stack(examples), jax.random.key(number))
    trained = MaskOutliner(TINY, nnx.merge_state(state[1], frozen))

    figures = outliner_figures(trained, [picture(rng) for _ in range(8)])
    assert figures["box"]["objects"] == 8
    assert figures["box"]["iou"] > figures["filled box"]["iou"] + 0.05
    assert figures["click"]["iou"] > 0.6


def test_random_prompts_are_of_all_kinds():
    rng = np.random.default_rng(0)
    prompts = [random_prompt(disc(40, 60, 30, 20, 10), rng) for _ in range(200)]
    assert all(prompt.box or prompt.clicks for prompt in prompts)
    assert any(prompt.box and prompt.clicks for prompt in prompts)
    assert any(len(prompt.clicks) > 1 for prompt in prompts)
    assert any(not click.is_positive for prompt in prompts for click in prompt.clicks)
    # A prompt without a box has a positive click, or nothing would say what is meant.
    for prompt in prompts:
        assert prompt.box or any(click.is_positive for click in prompt.clicks)


@pytest.fixture(scope="module")
def folder(outliner, tmp_path_factory):
    """The run folder of an outliner."""
    folder = tmp_path_factory.mktemp("outliner")
    save_outliner(folder, outliner)
    return folder


@pytest.fixture(scope="module")
def with_outliner(outliner, tmp_path_factory):
    """The released model with this outliner."""
    out = tmp_path_factory.mktemp("exports") / "outlining"
    add_parts(RELEASED / "photos-small", out, outliner=outliner)
    return out


def test_an_outliner_is_stored_and_loaded(folder, outliner):
    image = picture(np.random.default_rng(0)).image
    prompt = Prompt((10, 10, 40, 40))
    (before,) = outliner(image, [prompt])
    (after,) = load_outliner(folder)(image, [prompt])
    np.testing.assert_array_equal(before.mask, after.mask)


def test_an_export_with_an_outliner_answers_boxes_and_clicks(with_outliner):
    check_export(with_outliner)
    predictor = load_export(with_outliner).predictor
    assert predictor.has_prompts and predictor.completer is not None
    image = picture(np.random.default_rng(0)).image
    prompt = Prompt((10, 10, 40, 40))
    queries = [None, "the ball, including what is hidden"]
    modal, amodal = predictor.predict(queries, image=image, boxes=[prompt.box] * 2)
    assert predictor.outliner is not None
    (outline,) = predictor.outliner(image, [prompt])
    assert outline.mask.any()
    assert modal.mask_type == "modal" and amodal.mask_type == "amodal"
    assert modal.score == pytest.approx(outline.iou) and amodal.score is None
    for prediction in (modal, amodal):
        np.testing.assert_array_equal(prediction.modal, outline.mask)
        np.testing.assert_array_equal(prediction.modal | prediction.amodal, prediction.amodal)

    (clicked,) = predictor.predict([None], image=image, points=[[(20, 20)]])
    assert clicked.modal.shape == image.shape[:2]


def test_the_outliner_beside_a_given_mask(with_outliner):
    """One query has a mask, the other a box; each is answered by its own."""
    predictor = load_export(with_outliner).predictor
    image = picture(np.random.default_rng(0)).image
    given = np.zeros(image.shape[:2], bool)
    given[30:40, 30:60] = True
    first, second = predictor.predict(
        [None, None], image=image, masks=[given, None], boxes=[None, (5, 5, 25, 25)]
    )
    np.testing.assert_array_equal(first.modal, given)
    assert first.score is None and second.score is not None
    assert not np.array_equal(second.modal, given)


def test_a_run_writes_an_outliner_and_its_figures(tmp_path, command, refused):
    flags = [*FLAGS, "--model.outliner.efficientnet", "", "--data.source", "scenes"]
    done = command(train.main, *flags, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    assert load_outliner(tmp_path / "run").config.size == 32
    assert "box" in done.out and "click" in done.out
    sentence = refused(predict.main, tmp_path / "run", "photo.png", "the cup")
    assert "outliner" in sentence or "photo.png" in sentence


def test_a_run_starts_from_the_weights_of_an_outliner(tmp_path, command, folder):
    flags = [*FLAGS, "--model.outliner.efficientnet", "", "--data.source", "scenes"]
    flags += ["--optimizer.learning-rate", "0", "--init", folder, "--run", tmp_path / "run"]
    done = command(train.main, *flags)
    assert done.code == 0, done.err
    before, after = (
        load_file(path / "outliner.safetensors") for path in (folder, tmp_path / "run")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-6)


def test_iou_of_masks():
    one, other = disc(20, 20, 10, 10, 5), disc(20, 20, 12, 10, 5)
    assert iou(one, one) == 1 and 0 < iou(one, other) < 1
    assert iou(np.zeros((4, 4), bool), np.zeros((4, 4), bool)) == 0
    assert masks.area(one) > 0


def test_a_crop_has_the_channels_of_the_model():
    image = np.zeros((30, 30, 3), np.uint8)
    crop = cut_prompt_crop(image, window_of_box((5, 5, 20, 20)), 16, Prompt((5, 5, 20, 20)))
    assert crop.shape == (16, 16, 7)
    assert crop[..., 3].min() == 255  # all inside of the image
