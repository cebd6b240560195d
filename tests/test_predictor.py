"""The predictor: the same predictions alone, in batches and in threads; what it compiles; what it
refuses."""

import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from stub_predictor import StubPredictor

import r2sm_jax
from r2sm_jax.data import masks, text_states
from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import TruncatedQuery, decide
from r2sm_jax.inference.prediction import MASKS, Prediction
from r2sm_jax.inference.predictor import Request
from r2sm_jax.synthetic.sources import open_source

QUERIES = [
    "the red mug",
    "the whole mug",
    "a book",
    "the complete shape of the red mug",
    "every cat and the plant",
]


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    """Scenes of nine odd sizes."""
    source = open_source("scenes", "val", count=9, size=64)
    return [source[i].image[: 64 - 3 * i, : 40 + 2 * i] for i in range(9)]


@pytest.fixture
def compilations():
    """Collects the seconds of the programs that are compiled from now on."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(listen)


def assert_close(one: Prediction, other: Prediction) -> None:
    """Other batch shapes round otherwise, so pixels on an edge may differ."""
    assert one.query == other.query and one.modal.shape == other.modal.shape
    assert one.amodal_probability == pytest.approx(other.amodal_probability, abs=2e-3)
    assert np.mean(one.modal != other.modal) < 0.01 and np.mean(one.amodal != other.amodal) < 0.01


def assert_equal(one: Prediction, other: Prediction) -> None:
    assert (one.amodal_probability, one.score) == (other.amodal_probability, other.score)
    assert np.array_equal(one.modal, other.modal) and np.array_equal(one.amodal, other.amodal)


# The same predictions, however they are computed.


def test_batches_predict_as_single_images(predictor, images):
    queries = []
    for i in range(len(images)):
        count = 11 if i == 2 else i % 3
        queries.append([f"the mug {i} {n}" for n in range(count)])
    batch = predictor.predict_batch(images, queries)
    assert [len(of_image) for of_image in batch] == [len(of_image) for of_image in queries]
    for image, sentences, of_image in zip(images, queries, batch, strict=True):
        predictor.set_image(image)
        for one, other in zip(predictor.predict(sentences), of_image, strict=True):
            assert_close(one, other)


def test_requests_are_read_a_batch_at_a_time_and_may_force_mask_types(images):
    predictor, opened = StubPredictor(), []

    def requests():
        for number, image in enumerate(images):
            opened.append(number)
            yield Request(image, ["the mug", "the whole mug"], ["amodal", "auto"])

    predictions = predictor.predict_batches(requests(), with_candidates=True, batch_rows=4)
    first = next(predictions)
    assert opened == [0, 1, 2, 3]
    assert [p.mask_type for p in first] == ["amodal", "amodal"] and first[0].candidates
    assert len(list(predictions)) == len(images) - 1


def test_threads_may_share_a_predictor(predictor, images):
    encoded = [predictor.encode(image) for image in images]
    queries = [[f"the mug {i} of {n}" for n in range(3)] for i in range(len(images))]
    alone = []
    for sentences, image in zip(queries, encoded, strict=True):
        alone.append(predictor.predict(sentences, image=image))
    predictor.text_encoder.cache._states.clear()  # so that threads encode sentences, too
    predictor.text_encoder._requested.clear()
    predictor.text_encoder.truncated.clear()

    def predict(i: int) -> list[Prediction]:
        return predictor.predict(queries[i], image=encoded[i])

    with ThreadPoolExecutor(8) as pool:
        shared = list(pool.map(predict, [*range(len(images))] * 4))
    for i, predictions in enumerate(shared):
        for one, other in zip(alone[i % len(images)], predictions, strict=True):
            assert_equal(one, other)


def test_no_global_precision_changes_a_prediction(tiny_run, images):
    def predict() -> tuple[list[Prediction], list[float]]:
        predictor = r2sm_jax.load(tiny_run)
        (predictions,) = predictor.predict_batch(images[:1], [QUERIES])
        predictor.set_image(images[0])
        return predictions + predictor.predict(QUERIES), predictor.amodal_logits(QUERIES).tolist()

    expected, expected_logits = predict()
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    try:
        predictions, logits = predict()
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert logits == expected_logits
    for one, other in zip(expected, predictions, strict=True):
        assert_equal(one, other)


def test_bfloat16_changes_masks_a_little_and_only_on_request(predictor, tiny_run, images):
    rounded = r2sm_jax.load(tiny_run, matmul_precision="bfloat16")
    (exact,) = predictor.predict_logits(images[:1], [QUERIES])
    (other,) = rounded.predict_logits(images[:1], [QUERIES])
    for a, b in zip(exact, other, strict=True):
        assert 0 < abs(a.modal - b.modal).max() < 0.05 * abs(a.modal).max()


def test_a_forked_child_is_refused(images, monkeypatch):
    """JAX would wait for ever there."""
    predictor = StubPredictor()
    encoded = predictor.encode(images[0])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (
        lambda: predictor.encode(images[0]),
        lambda: predictor.predict(QUERIES, image=encoded),
        lambda: predictor.predict_batch(images[:1], [QUERIES]),
        lambda: next(predictor.predict_batches([Request(images[0], QUERIES)])),
    ):
        with pytest.raises(InputError, match="fork"):
            call()


# What is computed and compiled.


def test_an_image_is_encoded_once_for_all_its_queries(images):
    predictor = StubPredictor()
    predictor.set_image(images[0])
    for count in (1, 2, 5, 19):
        assert len(predictor.predict([f"mug {i}" for i in range(count)])) == count
    assert predictor.num_images == 1


@pytest.mark.filterwarnings("ignore::r2sm_jax.inference.predictor.TruncatedQuery")
def test_nothing_is_compiled_once_it_is_warm(predictor, images, compilations):
    predictor.warm_up()
    del compilations[:]
    for i, image in enumerate(images):
        predictor.set_image(image)
        predictor.predict([f"{'red ' * (3 * i)}mug number {i}, {n}" for n in range(1 + 2 * i)])
    assert compilations == []
    jax.jit(lambda x: x + 1)(np.zeros(17))  # compilations are counted at all
    assert len(compilations) == 1


@pytest.mark.filterwarnings("ignore::r2sm_jax.inference.predictor.TruncatedQuery")
def test_sentences_do_not_fill_the_memory_of_a_server(predictor, images, monkeypatch):
    monkeypatch.setattr(text_states, "MAX_REQUEST_SENTENCES", 4)
    texts = predictor.text_encoder
    texts.encode(["a sentence of training"])
    num_others = len(texts.cache) - len(texts._requested)
    truncated = set(texts.truncated)
    predictor.set_image(images[0])
    for i in range(5):
        predictor.predict([f"mug {i} and {n} and {'very ' * 30}red" for n in range(3)])
    assert len(texts._requested) == 4 and len(texts.truncated - truncated) <= 4
    assert len(texts.cache) == num_others + 4
    assert len(texts.states_of("a sentence of training")) > 2


# Predictions.


def make_prediction() -> Prediction:
    """A visible disc, its hidden part, and a far crumb."""
    y, x = np.mgrid[:60, :80]
    disc = (y - 30) ** 2 + (x - 40) ** 2 < 20**2
    modal = (disc & (x < 45)) | ((y > 55) & (x > 76))
    return Prediction("a disc", "amodal", 0.9, 0.8, modal, disc | modal)


@pytest.mark.parametrize("name", MASKS)
def test_masks_leave_as_rle_png_and_polygons(name):
    prediction = make_prediction()
    mask = getattr(prediction, name)
    assert np.array_equal(masks.decode(json.loads(json.dumps(prediction.rle(name)))), mask)
    picture = Image.open(io.BytesIO(prediction.png(name)))
    assert picture.mode == "L" and np.array_equal(np.asarray(picture) == 255, mask)
    polygons = prediction.polygons(name)
    drawn = masks.from_segmentation(polygons, *mask.shape)
    assert (drawn & mask).sum() / (drawn | mask).sum() > 0.97
    assert len(polygons) == (1 if name == "occluded" else 2)
    with pytest.raises(InputError, match="no mask 'visible'"):
        prediction.rle("visible")


def test_an_overlay_needs_the_image_that_was_predicted():
    prediction = make_prediction()
    grey = np.full((60, 80, 3), 128, np.uint8)
    picture = prediction.overlay(Image.fromarray(grey))
    assert picture.shape == grey.shape and picture.dtype == np.uint8
    assert picture[30, 30, 2] > picture[30, 30, 0]  # visible: blue
    assert picture[30, 52, 0] > picture[30, 52, 2]  # hidden: orange
    with pytest.raises(InputError, match=r"60 x 80.*80 x 60"):
        prediction.overlay(grey.transpose(1, 0, 2))


def test_an_overlay_may_be_drawn_smaller():
    prediction = make_prediction()
    grey = np.full((60, 80, 3), 128, np.uint8)
    picture = prediction.overlay(grey, max_pixels=60 * 80 // 2)
    assert picture.shape == (30, 40, 3)
    assert picture[15, 15, 2] > picture[15, 15, 0] and picture[15, 26, 0] > picture[15, 26, 2]
    assert prediction.overlay(grey, max_pixels=60 * 80).shape == grey.shape


def test_a_long_query_is_truncated_with_a_warning(predictor, images):
    predictor.set_image(images[0])
    long = "the red mug " * 3333 + "hidden parts included"
    with pytest.warns(TruncatedQuery, match="longer than 24 tokens") as warnings:
        (prediction,) = predictor.predict([long])
    assert len(str(warnings[0].message)) < 400
    assert prediction.query == long and prediction.unread.endswith("hidden parts included")
    assert predictor.predict(["the red mug"])[0].unread == ""


# Images and queries.


def test_an_image_may_be_a_file_its_bytes_pillow_or_an_array(images, tmp_path):
    path = tmp_path / "a.png"
    frames = [Image.fromarray(image) for image in (images[1], images[1][::-1])]
    frames[0].save(path)
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    forms = [path, str(path), path.read_bytes(), Image.open(path), frames[0].convert("RGBA")]
    forms += [tmp_path / "a.webp", Image.open(tmp_path / "a.webp")]  # the first frame is used
    predictor = StubPredictor()
    expected = predictor.predict(QUERIES[:2], image=images[1])
    for form in forms:
        predictor.set_image(form)
        for one, other in zip(expected, predictor.predict(QUERIES[:2]), strict=True):
            assert_equal(one, other)


def cut_image() -> Image.Image:
    """A Pillow image whose file is cut short."""
    file = io.BytesIO()
    Image.fromarray(np.full((60, 80, 3), 128, np.uint8)).save(file, "BMP")
    return Image.open(io.BytesIO(file.getvalue()[:-200]))


@pytest.mark.parametrize(
    ("image", "word"),
    [
        (cut_image(), "damaged or cut short"),
        (b"", "empty"),
        (b"hello", "not an image"),
        (Image.new("1", (10_000, 6_000)), "megapixels"),
        (np.broadcast_to(np.uint8(0), (6000, 10_000, 3)), "megapixels"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (np.zeros((4, 4), np.uint8), "uint8"),
        (np.zeros((4, 4, 3), np.float32), "uint8"),
        (Path("nowhere.png"), "nowhere.png"),
    ],
)
def test_a_bad_image_is_refused_and_the_earlier_one_stays(image, word, images):
    predictor = StubPredictor()
    predictor.set_image(images[0])
    (before,) = predictor.predict(["the red mug"])
    with pytest.raises(InputError, match=word):
        predictor.set_image(image)
    assert_equal(before, predictor.predict(["the red mug"])[0])


def test_bad_queries_are_refused(images):
    predictor = StubPredictor()
    with pytest.raises(InputError, match="set_image"):
        predictor.predict(["the mug"])
    predictor.set_image(images[0])
    with pytest.raises(InputError, match="'visible'"):
        predictor.predict(["the mug"], "visible")
    for query, reason in {
        "": "query is empty",
        " .": "query is empty",
        "\u200b\u2060": "query is empty",  # characters that nobody sees
        "the caf\udce9": "half of a character",
    }.items():
        with pytest.raises(InputError, match=reason):
            predictor.predict(["the mug", query])
        with pytest.raises(InputError, match=reason):
            predictor.predict_batch([images[0]], [[query]])
    with pytest.raises(InputError, match="2 images, but 1 lists"):
        predictor.predict_batch(images[:2], [["a mug"]])


def test_one_query_may_be_given_as_a_string_and_none_is_fine(images):
    predictor = StubPredictor()
    (one,) = predictor.predict("the red mug", image=images[0])
    ((same,),) = predictor.predict_batch(images[:1], ["the red mug"])
    assert one.query == same.query == "the red mug"
    assert_equal(one, same)
    assert predictor.predict([], image=images[0]) == [] and predictor.predict_batch([], []) == []


@pytest.mark.parametrize(
    ("head", "mask_type", "logit", "expected"),
    [
        ("attention", "auto", 0.0, ("modal", 0.5, True)),
        ("attention", "auto", np.log(3), ("amodal", 0.75, False)),
        ("attention", "modal", np.log(3), ("modal", 0.75, False)),
        ("always_amodal", "auto", 0.0, ("amodal", 1.0, False)),
        ("always_amodal", "modal", 0.0, ("modal", 1.0, False)),
        ("oracle", "amodal", 0.0, ("amodal", 1.0, False)),
        ("none", "amodal", 0.0, (None, None, False)),
    ],
)
def test_decide(head, mask_type, logit, expected):
    """The head, rules, the oracle, the head `none`, and types that the caller forces."""
    mask_type, probability, undecided = decide(head, "the mug", logit, mask_type, abstain=0.1)
    assert (mask_type, undecided) == (expected[0], expected[2])
    assert probability == pytest.approx(expected[1])
