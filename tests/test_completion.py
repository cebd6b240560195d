"""The completer: geometry of crops, what an answer keeps, examples and their noise, learning."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from r2sm_jax.cli import to_json
from r2sm_jax.config import CompleterConfig
from r2sm_jax.data.crops import CropWindow, cut_crop, others_of
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import (
    REFERENCE_METHODS,
    Method,
    convex_hull,
    hulls_inside_neighbours,
    methods_of,
    score_completion,
    score_object,
)
from r2sm_jax.evaluation.tables import COMPLETION, by_group, make_table
from r2sm_jax.inference.crop_models import (
    MaskCompleter,
    load_completer,
    restore_completer,
    save_completer,
)
from r2sm_jax.models.crop_unet import NUM_CHANNELS, CropUNet, make_completer
from r2sm_jax.training.crop_models import (
    completer_loss,
    completion_loss,
    cut_examples,
    disturb,
    move_outline,
    vary_completion,
)
from r2sm_jax.training.parts import make_step

TINY = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)


WITH_FEATURES = replace(TINY, efficientnet="efficientnet-lite2", block_dims=(4, 6, 8, 6, 8))
"""A tiny backbone; only a training run reads the weights of this name."""


def rectangle(height, width, x0, y0, x1, y1):
    mask = np.zeros((height, width), bool)
    mask[y0:y1, x0:x1] = True
    return mask


@pytest.fixture(scope="module")
def completer():
    _, weights = nnx.split(make_completer(TINY, rngs=nnx.Rngs(0)))
    return MaskCompleter(TINY, weights)


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


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


def test_an_answer_contains_the_given_mask_and_its_size_is_the_image(completer, image):
    visible = [rectangle(60, 80, 5, 5, 25, 30), rectangle(60, 80, 50, 40, 80, 60)]
    for given, complete in zip(visible, completer(image, visible), strict=True):
        assert complete.shape == given.shape and (complete | given == complete).all()


def test_a_mask_alone_and_among_others_of_unknown_surroundings_is_the_same(completer, image):
    visible = [rectangle(60, 80, 5 + 3 * k, 5, 25 + 3 * k, 30) for k in range(6)]
    together = completer(image, visible, neighbours=[None] * 6)
    for given, complete in zip(visible, together, strict=True):
        np.testing.assert_array_equal(complete, completer(image, [given])[0])


def test_neighbours_are_all_other_masks():
    one, two, three = (rectangle(4, 6, x, 0, x + 2, 4) for x in (0, 2, 4))
    np.testing.assert_array_equal(others_of([one, two, three])[1], one | three)
    assert others_of([one]) == [None]


@pytest.mark.parametrize(
    ("mask", "named"),
    [(np.zeros((60, 80), bool), "mask 1 is empty"), (np.ones((6, 8), bool), "6 x 8")],
)
def test_an_empty_mask_and_one_of_another_size_are_refused(completer, image, mask, named):
    with pytest.raises(InputError, match=named):
        completer(image, [mask])


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="the weights of the completer lack"):
        restore_completer({"config": to_json(TINY), "threshold": 0}, {}, "a.json")


def test_examples_are_of_objects_whose_complete_mask_is_known(image):
    whole = rectangle(60, 80, 10, 10, 50, 40)
    front = rectangle(60, 80, 30, 5, 60, 35)
    instances = (
        Instance(1, "cup", whole & ~front, whole),
        Instance(2, "box", front, None),
        Instance(3, "cat", whole, whole, ignore=True),
    )
    sample = Sample(1, "a.png", image, instances, ())
    (example,) = cut_examples(sample, 88)  # a window of 88 pixels is not scaled
    window = CropWindow.around(whole & ~front)
    assert window.side == 88
    masks = (whole & ~front, front | whole, whole)
    np.testing.assert_array_equal(example, cut_crop(image, window, 88, masks))


def test_noise_moves_the_outline_and_keeps_most_of_the_mask():
    mask = np.zeros((16, 64, 64), np.float32)
    mask[:, 16:48, 20:44] = 1
    moved = np.asarray(move_outline(jnp.asarray(mask), jax.random.key(0)))
    ious = (np.minimum(mask, moved).sum((1, 2))) / np.maximum(mask, moved).sum((1, 2))
    assert 0.4 < ious.min() < ious.max() and ious.std() > 0.01
    assert set(np.unique(moved)) <= {0.0, 1.0}
    disturbed = np.asarray(disturb(jnp.asarray(mask), jnp.zeros_like(mask), jax.random.key(1)))
    assert (disturbed.sum((1, 2)) > 0.3 * mask.sum((1, 2))).all()


def test_the_loss_by_hand():
    given, complete = np.zeros((2, 1, 4, 4), np.float32)
    given[0, :2] = complete[0, :3] = 1
    right = np.where(complete > 0, 30.0, -30.0)
    loss, parts = completion_loss(jnp.asarray(right), jnp.asarray(given), jnp.asarray(complete))
    assert float(loss) == pytest.approx(0, abs=1e-5)
    # Nothing is added: 8 of 12 pixels are right, 4 cost 30 each, over 12 + 32 pixels.
    nothing = np.full((1, 4, 4), -30.0)
    _, parts = completion_loss(jnp.asarray(nothing), jnp.asarray(given), jnp.asarray(complete))
    assert float(parts["soft_iou"]) == pytest.approx(8 / 12, abs=1e-5)
    assert float(parts["dice"]) == pytest.approx(16 / 20, abs=1e-5)
    assert float(parts["entropy"]) == pytest.approx((4 * 30 + 0.1 * 8 * 30) / 44, abs=1e-3)


def test_the_completer_learns_what_a_square_hides():
    rng = np.random.default_rng(0)
    planes = np.zeros((8, 32, 32, 7), np.uint8)
    planes[..., :3] = rng.integers(0, 255, (8, 32, 32, 3))
    planes[..., 3] = 255
    planes[:, 10:22, 8:24, 6] = 255
    planes[..., 4] = planes[..., 6]
    planes[:, 8:18, 16:28, 5] = 255
    planes[..., 4] -= np.minimum(planes[..., 4], planes[..., 5])
    graphdef, weights = nnx.split(make_completer(TINY, rngs=nnx.Rngs(0)))
    optimizer = optax.adam(3e-3)
    step = jax.jit(make_step(completer_loss(graphdef), optimizer, 0.9))
    state = (weights, weights, optimizer.init(weights))
    losses = []
    for number in range(30):
        state, values = step(state, nnx.State({}), jnp.asarray(planes), jax.random.key(number))
        losses.append(float(values["loss"]))
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])


def test_features_of_a_frozen_backbone_are_read_and_only_then():
    plain = make_completer(TINY, rngs=nnx.Rngs(0))
    model = make_completer(WITH_FEATURES, rngs=nnx.Rngs(0))
    names = {path[0] for path, _ in nnx.to_flat_state(nnx.state(plain))}
    more = {path[0] for path, _ in nnx.to_flat_state(nnx.state(model))} - names
    assert more == {"efficientnet", "feature_norms", "joins"}

    @nnx.jit
    def run(model: CropUNet, crops: jax.Array) -> jax.Array:
        return model(crops)[0]

    crops = jnp.asarray(np.random.default_rng(0).uniform(0, 255, (2, 32, 32, NUM_CHANNELS)))
    # The crop is enlarged for the backbone, whose last grid has 8 x 8 cells as the coarsest one.
    logits = run(model, crops)
    assert run(plain, crops).shape == logits.shape == (2, 32, 32)
    kernel = model.joins[0].kernel
    kernel[...] = jnp.zeros_like(kernel[...])
    assert not np.allclose(logits, run(model, crops))
    smaller_grid = make_completer(replace(WITH_FEATURES, dims=(8, 8, 16)), rngs=nnx.Rngs(0))
    assert run(smaller_grid, crops).shape == (2, 32, 32)


def test_a_frozen_backbone_stays_in_training_and_its_completer_is_stored(tmp_path, image):
    model = make_completer(WITH_FEATURES, rngs=nnx.Rngs(0))
    graphdef, weights, frozen = nnx.split(model, nnx.Param, ...)
    assert set(frozen) == {"efficientnet"} and "efficientnet" not in weights
    optimizer = optax.sgd(0.1)
    step = jax.jit(make_step(completer_loss(graphdef), optimizer, 0.9))
    planes = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 7), np.uint8)
    state = (weights, weights, optimizer.init(weights))
    state, _ = step(state, frozen, jnp.asarray(planes), jax.random.key(0))
    before, after = (tree["joins"][0]["kernel"][...] for tree in (weights, state[0]))
    assert not np.array_equal(before, after)

    trained = MaskCompleter(WITH_FEATURES, nnx.merge_state(state[1], frozen), threshold=-2.0)
    save_completer(tmp_path, trained)
    loaded = load_completer(tmp_path)
    assert loaded.config == WITH_FEATURES
    mask = rectangle(60, 80, 5, 5, 25, 30)
    np.testing.assert_array_equal(loaded(image, [mask]), trained(image, [mask]))


def test_augmented_inputs_have_the_channels_of_the_completer():
    planes = np.random.default_rng(0).integers(0, 255, (3, 32, 32, 7), np.uint8)
    crops, given, complete = vary_completion(jnp.asarray(planes), jax.random.key(0))
    assert crops.shape == (3, 32, 32, NUM_CHANNELS) and crops.max() > 200
    assert given.shape == complete.shape == (3, 32, 32)


def test_scores_of_completion_by_hand():
    visible, truth = rectangle(10, 10, 0, 0, 4, 10), rectangle(10, 10, 0, 0, 8, 10)
    answer = rectangle(10, 10, 0, 0, 6, 10)
    score = score_object(visible, truth, answer)
    assert (score.amodal_iou, score.occluded_iou, score.hidden_share) == (0.75, 0.5, 0.5)
    # The given mask counts, also where the answer leaves it out.
    assert score_object(visible, truth, truth & ~visible).amodal_iou == 1


def test_the_hull_of_a_cut_rectangle_is_the_rectangle_and_inside_neighbours_only_what_they_cover():
    whole = rectangle(40, 40, 5, 5, 30, 25)
    cut = whole & ~rectangle(40, 40, 10, 0, 20, 20)
    np.testing.assert_array_equal(convex_hull(cut), whole)
    neighbour = rectangle(40, 40, 10, 0, 15, 20)
    (answer,) = hulls_inside_neighbours(np.zeros((40, 40, 3), np.uint8), [cut], [neighbour])
    np.testing.assert_array_equal(answer, cut | (whole & neighbour))


def test_a_line_and_a_point_are_their_own_hulls():
    for mask in (rectangle(9, 9, 2, 3, 7, 4), rectangle(9, 9, 2, 3, 3, 4)):
        np.testing.assert_array_equal(convex_hull(mask), mask)


def test_completion_is_scored_over_hidden_and_other_objects_with_all_neighbours(image):
    whole, front = rectangle(60, 80, 10, 10, 50, 40), rectangle(60, 80, 30, 5, 60, 35)
    instances = (
        Instance(1, "cup", whole & ~front, whole),
        Instance(2, "box", front, front),
        Instance(3, "cat", rectangle(60, 80, 70, 50, 80, 60), None),
    )
    sample = Sample(1, "a.png", image, instances, ())
    seen = []

    def complete(image, visible, neighbours):
        seen.extend(neighbours)
        return hulls_inside_neighbours(image, visible, neighbours)

    methods = {"neighbours": Method(complete, True), "alone": Method(complete, False)}
    figures = score_completion(methods, [sample])["neighbours"]
    assert figures["hidden"]["objects"] == figures["not_hidden"]["objects"] == 1
    assert figures["not_hidden"]["amodal_iou"] == 1
    np.testing.assert_array_equal(seen[0], front | instances[2].modal)
    assert seen[2:] == [None, None]


def test_the_report_has_the_completer_beside_the_rules_that_learn_nothing(completer, image):
    whole, front = rectangle(60, 80, 10, 10, 50, 40), rectangle(60, 80, 30, 5, 60, 35)
    instances = (
        Instance(1, "cup", whole & ~front, whole),
        Instance(2, "box", front, front),
    )
    methods = REFERENCE_METHODS | methods_of(completer)
    figures = score_completion(methods, [Sample(1, "a.png", image, instances, ())])
    assert list(figures) == [
        "visible mask",
        "hull",
        "hull in neighbours",
        "with neighbours",
        "alone",
    ]
    splits = {"val": {"completion": figures}, "scenes": {}}
    table = make_table("Completion", by_group(splits, "completion"), COMPLETION)
    assert [row[0] for row in table.rows] == [f"val, {name}" for name in figures]
    assert all(row[1] == row[4] == "1" for row in table.rows)
    assert table.rows[0][3] == "0.00" and table.rows[0][5] == "100.00"
