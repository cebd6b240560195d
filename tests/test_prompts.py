"""Boxes and clicks: what training draws, what a caller may give, what the model makes of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from tiny_models import TINY, fake_inputs

from r2sm_jax.data.draw_prompts import draw_prompts
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.prompts import innermost_pixel
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.prompts import read_box, read_prompts, to_arrays
from r2sm_jax.models.prompts import Prompts, box_focus, sample_pixels
from r2sm_jax.models.r2sm import R2SM
from r2sm_jax.query import MAX_CLICKS, NUM_PROMPT_TOKENS, Click, PointKind, Prompt
from r2sm_jax.training.step import predict_for_training

PROMPTED = replace(TINY, decoder=replace(TINY.decoder, prompts=True))
SIZE = (60, 80)
"""Height and width of the image that callers prompt."""


def example(size: int = 16) -> dict[str, np.ndarray]:
    """An example with two instances, and four queries: for the first, the second, both, neither."""
    modal = np.zeros((2, size, size), np.uint8)
    modal[0, 2:6, 3:9] = 255
    modal[1, 10:15, 1:4] = 255
    means = np.array([[1, 0], [0, 1], [1, 1], [0, 0]], bool)
    return {
        "modal": modal,
        "query_instances": means,
        "query_mask": np.ones(4, bool),
        "text_mask": np.ones((4, 5), bool),
    }


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_drawn_prompts_point_at_the_object_of_their_query(seed):
    before = example()
    drawn = draw_prompts(before, np.random.default_rng(seed), may_hide_words=True)
    points, kinds = drawn["prompt_points"], drawn["prompt_kinds"]
    assert points.shape == (4, NUM_PROMPT_TOKENS, 2) and kinds.shape == (4, NUM_PROMPT_TOKENS)
    assert points.min() >= 0 and points.max() <= 1

    has_prompt = (kinds != PointKind.PADDING).any(1)
    # Only a query for one object gets a prompt, and no other loses its words.
    assert not has_prompt[2:].any()
    assert drawn["text_mask"][~has_prompt].all()
    for k in np.flatnonzero(has_prompt):
        mask = before["modal"][k] > 127
        has_box = PointKind.TOP_LEFT in kinds[k]
        assert has_box == (PointKind.BOTTOM_RIGHT in kinds[k])
        assert has_box != (PointKind.NO_BOX in kinds[k])
        for (x, y), kind in zip(points[k], kinds[k], strict=True):
            row, column = int(min(y * 16, 15)), int(min(x * 16, 15))
            if kind == PointKind.POSITIVE:
                assert mask[row, column]
            if kind == PointKind.NEGATIVE:
                assert not mask[row, column]


def test_drawn_prompts_are_of_all_kinds_and_keep_words_if_told_to():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        drawn = draw_prompts(example(), rng, may_hide_words=False)
        assert drawn["text_mask"].all()
        kinds = drawn["prompt_kinds"][0]
        seen.add((PointKind.TOP_LEFT in kinds, PointKind.POSITIVE in kinds))
    assert seen == {(False, False), (True, False), (False, True), (True, True)}


def test_the_focus_of_a_box_is_inside_it():
    points = np.zeros((1, 2, NUM_PROMPT_TOKENS, 2), np.float32)
    kinds = np.full((1, 2, NUM_PROMPT_TOKENS), PointKind.PADDING)
    points[0, 0, :2] = [[0.25, 0.5], [0.75, 1.0]]
    kinds[0, 0, :2] = [PointKind.TOP_LEFT, PointKind.BOTTOM_RIGHT]
    points[0, 1, :2] = [[0.25, 0.5], [0, 0]]
    kinds[0, 1, :2] = [PointKind.POSITIVE, PointKind.NO_BOX]
    focus = box_focus(Prompts(points, kinds), 4)
    expected = [[-1, -1, -1, -1], [-1, -1, -1, -1], [-1, 1, 1, -1], [-1, 1, 1, -1]]
    np.testing.assert_array_equal(focus[0, 0], expected)
    np.testing.assert_array_equal(focus[0, 1], 0)


def test_pixels_are_sampled_at_the_points():
    features = jnp.arange(16.0).reshape(1, 4, 4, 1)
    points = jnp.array([[[[0.3, 0.6], [1.0, 1.0], [0.0, 0.99]]]])
    np.testing.assert_array_equal(sample_pixels(features, points)[0, 0, :, 0], [9, 15, 12])


@pytest.fixture(scope="module")
def model():
    return nnx.split(R2SM(PROMPTED, rngs=nnx.Rngs(0)))


def decode(model, prompts: Prompts | None, text_mask: np.ndarray | None = None):
    graphdef, state = model
    inputs = fake_inputs(PROMPTED, 1, 2)
    if text_mask is not None:
        inputs["text_mask"] = text_mask

    @jax.jit
    def answer(state, inputs, prompts):
        model = nnx.merge(graphdef, state)
        features = model.encode_image(inputs["image"], inputs["image_mask"])
        return model.decode(features, inputs["text"], inputs["text_mask"], prompts=prompts)

    return answer(state, inputs, prompts and Prompts(*map(jnp.asarray, prompts)))


def test_padding_changes_nothing_and_a_prompt_changes_its_query_alone(model):
    points = np.zeros((1, 2, NUM_PROMPT_TOKENS, 2), np.float32)
    kinds = np.full((1, 2, NUM_PROMPT_TOKENS), PointKind.PADDING, np.int32)
    without = decode(model, None)
    padded = decode(model, Prompts(points, kinds))
    np.testing.assert_allclose(padded.modal, without.modal, atol=1e-4)

    points[0, 0, :2] = [[0.1, 0.1], [0.6, 0.5]]
    kinds[0, 0, :2] = [PointKind.TOP_LEFT, PointKind.BOTTOM_RIGHT]
    boxed = decode(model, Prompts(points, kinds))
    assert np.abs(np.asarray(boxed.modal - without.modal))[0, 0].max() > 1e-3
    np.testing.assert_allclose(boxed.modal[0, 1], without.modal[0, 1], atol=1e-4)
    hidden = np.zeros((1, 2, PROMPTED.text.max_tokens), bool)
    wordless = decode(model, Prompts(points, kinds), hidden)
    assert np.isfinite(wordless.modal).all()
    assert np.abs(np.asarray(wordless.modal - boxed.modal))[0, 0].max() > 1e-4


def test_boxes_and_clicks_of_a_caller_in_the_frame():
    letterbox = Letterbox(60, 80, 32)  # 24 x 32 in the frame
    prompts = read_prompts(
        [None, (10, 20, 90, 40), None],
        [[(40, 30), (80, 60, False)], None, None],
        3,
        SIZE,
    )
    assert prompts[0] == Prompt(None, (Click(40, 30), Click(80, 60, False)))
    # What lies outside of the image is cut off.
    assert prompts[1] == Prompt((10, 20, 80, 40))
    assert prompts[2] is None
    points, kinds = to_arrays(prompts, letterbox)
    np.testing.assert_allclose(points[0, :2], [[0.5, 0.375], [1, 0.75]], atol=1e-6)
    np.testing.assert_allclose(points[1, :2], [[0.125, 0.25], [1, 0.5]], atol=1e-6)
    padding = [PointKind.PADDING] * NUM_PROMPT_TOKENS
    first = [PointKind.POSITIVE, PointKind.NEGATIVE, PointKind.NO_BOX]
    assert kinds[0].tolist() == first + padding[3:]
    assert kinds[1].tolist() == [PointKind.TOP_LEFT, PointKind.BOTTOM_RIGHT, *padding[2:]]
    assert kinds[2].tolist() == padding


@pytest.mark.parametrize(
    ("boxes", "points"),
    [
        ([(0, 0, 5, 5)], None),  # one for two queries
        ([(5, 5, 5, 9), None], None),  # no area
        ([(9, 9, 2, 2), None], None),  # turned
        ([(90, 0, 95, 5), None], None),  # outside
        ([(0, 0, 5), None], None),
        ([(0, 0, float("nan"), 5), None], None),
        (["0 0 5 5", None], None),
        (None, [[(81, 5)], None]),  # outside
        (None, [[(-1, 5)], None]),
        (None, [[(1,)], None]),
        (None, [[(1, 1)] * (MAX_CLICKS + 1), None]),
        (None, [[(1, 1, False)], None]),  # nothing says what is meant
    ],
)
def test_boxes_and_clicks_that_cannot_be_used_are_refused(boxes, points):
    with pytest.raises(InputError):
        read_prompts(boxes, points, 2, SIZE)


def test_a_click_beside_the_object_helps_a_box():
    (prompt,) = read_prompts([(0, 0, 5, 5)], [[(9, 9, False)]], 1, SIZE)
    assert prompt == Prompt((0, 0, 5, 5), (Click(9, 9, False),))


def test_a_width_and_a_height_in_place_of_a_corner_are_named():
    with pytest.raises(InputError, match="corners"):
        read_box([50, 40, 20, 10], SIZE, "the box")


def test_the_innermost_pixel_of_a_ring_lies_on_it():
    mask = np.zeros((40, 40), bool)
    mask[5:35, 5:35] = True
    mask[12:34, 12:34] = False
    x, y = innermost_pixel(mask)
    assert mask[int(y), int(x)]


@pytest.fixture(scope="module")
def prompted(predictor):
    """The tiny run's language model and heads with a new segmenter that reads prompts."""
    model = nnx.split(R2SM(replace(PROMPTED, text=predictor.config.text), rngs=nnx.Rngs(0)))
    config = replace(PROMPTED, text=predictor.config.text)
    return Predictor(config, *model, predictor.text_encoder)


def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)


def test_queries_with_and_without_words_boxes_and_clicks(prompted):
    queries = ["the red mug", None, "", "the red mug"]
    boxes = [None, (5, 5, 40, 30), None, (5, 5, 40, 30)]
    points = [None, None, [(20, 20)], None]
    answers = prompted.predict(queries, image=image(), boxes=boxes, points=points)
    alone = prompted.predict(["the red mug"], image=image())
    np.testing.assert_allclose(answers[0].amodal_probability, alone[0].amodal_probability, 1e-4)
    assert [answer.mask_type for answer in answers[1:3]] == ["modal", "modal"]
    assert answers[1].amodal_probability is None
    # Words decide the type, whatever the place.
    assert answers[3].amodal_probability == pytest.approx(alone[0].amodal_probability, abs=1e-4)
    assert answers[3].mask_type == alone[0].mask_type
    forced = prompted.predict([None], "amodal", image(), boxes=[(5, 5, 40, 30)])
    assert forced[0].mask_type == "amodal"
    assert "probability of amodal" not in forced[0].summary()


def test_ten_queries_keep_their_own_boxes(prompted):
    boxes = [(i, i, i + 20, i + 20) for i in range(10)]
    together = prompted.predict([None] * 10, image=image(), boxes=boxes)
    last = prompted.predict([None], image=image(), boxes=[boxes[9]])
    assert together[9].score == pytest.approx(last[0].score, abs=1e-4)


def test_a_query_needs_words_or_a_place(prompted, predictor):
    with pytest.raises(InputError, match="empty"):
        prompted.predict([None], image=image())
    mask = np.ones(SIZE, bool)
    with pytest.raises(InputError, match="one of them"):
        prompted.predict([None], image=image(), masks=[mask], boxes=[(0, 0, 9, 9)])
    with pytest.raises(InputError, match=r"decoder\.prompts"):
        predictor.predict(["the red mug"], image=image(), boxes=[(0, 0, 9, 9)])


def test_a_step_with_prompts_trains_their_encoder():
    graphdef, params = nnx.split(R2SM(PROMPTED, rngs=nnx.Rngs(0)))
    inputs = fake_inputs(PROMPTED, 1, 2)
    points = np.full((1, 2, NUM_PROMPT_TOKENS, 2), 0.4, np.float32)
    kinds = np.tile(np.arange(NUM_PROMPT_TOKENS) % PointKind.PADDING, (1, 2, 1)).astype(np.int32)
    batch = inputs | {"prompt_points": points, "prompt_kinds": kinds}
    batch["type_text"] = inputs["text"][:, :1]
    batch["type_text_mask"] = inputs["text_mask"][:, :1]
    regions = jnp.ones((1, 1, PROMPTED.mask_size, PROMPTED.mask_size))

    def loss(params):
        arrays = jax.tree.map(jnp.asarray, batch)
        out = predict_for_training(nnx.merge(graphdef, params), arrays, {}, {}, regions)
        return (out.decoder.kernels.weights**2).sum()

    gradient = jax.jit(jax.grad(loss))(params)["decoder"]["prompts"]
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all() and np.abs(np.asarray(leaf)).max() > 0
