import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import r2sm_jax
from r2sm_jax.data import masks, text_states
from r2sm_jax.data.sources import open_source
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export_folder import flat_weights, model_with_weights
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import Predictor, TruncatedQuery

QUERIES = [
    "the red mug",
    "the whole mug",
    "a book",
    "the complete shape of the red mug",
    "every cat and the plant",
]


@pytest.fixture(scope="module")
def predictor(tiny_run):
    return r2sm_jax.load(tiny_run)


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    """Scenes of nine odd sizes."""
    source = open_source("scenes", "val", count=9, size=64)
    return [source[i].image[: 64 - 3 * i, : 40 + 2 * i] for i in range(9)]


@pytest.fixture
def compiled():
    """Counts the programs that are compiled from now on."""
    found: list[float] = []

    def listen(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def same(one: Prediction, other: Prediction) -> None:
    """Other buckets round otherwise, so pixels on an edge may differ."""
    assert one.query == other.query and one.modal.shape == other.modal.shape
    assert one.amodal_probability == pytest.approx(other.amodal_probability, abs=2e-3)
    assert np.mean(one.modal != other.modal) < 0.01 and np.mean(one.amodal != other.amodal) < 0.01


def test_bfloat16_products_answer_alike_and_only_where_they_are_asked_for(
    predictor, tiny_run, images
):
    rounded = r2sm_jax.load(tiny_run, matmul_precision="bfloat16")
    (exact,) = predictor.predict_logits(images[:1], [QUERIES])
    (other,) = rounded.predict_logits(images[:1], [QUERIES])
    pairs = [(a.modal, b.modal) for a, b in zip(exact, other, strict=True)]
    sizes = [(abs(a - b).max(), abs(a).max()) for a, b in pairs]
    assert all(0 < difference < 0.05 * size for difference, size in sizes), sizes


def test_an_image_may_be_a_file_its_bytes_pillow_or_an_array(predictor, images, tmp_path):
    Image.fromarray(images[1]).save(tmp_path / "a.png")
    forms = [
        images[1],
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        (tmp_path / "a.png").read_bytes(),
    ]
    forms += [
        Image.fromarray(images[1]),
        Image.open(tmp_path / "a.png"),
        Image.fromarray(images[1]).convert("RGBA"),
    ]
    answers = []
    for form in forms:
        predictor.set_image(form)
        answers.append(predictor.predict(QUERIES[:2]))
    for other in answers[1:]:
        for a, b in zip(answers[0], other, strict=True):
            assert a.amodal_probability == b.amodal_probability and np.array_equal(
                a.amodal, b.amodal
            )


def test_the_image_is_encoded_once_whatever_is_asked(predictor, images, monkeypatch):
    calls, encode = [], predictor._encode_image
    monkeypatch.setattr(
        predictor, "_encode_image", lambda *inputs: calls.append(1) or encode(*inputs)
    )
    predictor.set_image(images[0])
    for count in (1, 2, 5):
        assert len(predictor.predict(QUERIES[:count])) == count
    assert len(predictor.predict([f"mug {i}" for i in range(19)])) == 19
    assert len(calls) == 1


@pytest.mark.filterwarnings(
    "ignore::r2sm_jax.inference.predictor.TruncatedQuery"
)  # the longest of the queries are cut
def test_nothing_is_compiled_once_it_is_warm(predictor, images, compiled):
    predictor.warm_up()
    del compiled[:]
    for i, image in enumerate(images):
        predictor.set_image(image)
        predictor.predict([f"{'red ' * (3 * i)}mug number {i}, {n}" for n in range(1 + 2 * i)])
    assert compiled == []
    programs = jax.jit(lambda x: x + len(compiled))  # that compilations are counted at all
    programs(np.zeros(17))
    assert len(compiled) == 1


def test_images_together_get_the_same_answers_as_one_by_one(predictor, images):
    queries = [
        [f"the mug {i} {n}" for n in range(11 if i == 2 else i % 3)] for i in range(len(images))
    ]
    together = predictor.predict_batch(images, queries)
    assert [[p.query for p in answers] for answers in together] == queries
    for image, asked, answers in zip(images, queries, together, strict=True):
        predictor.set_image(image)
        for one, other in zip(predictor.predict(asked), answers, strict=True):
            same(one, other)
    with pytest.raises(InputError, match="9 images, but 1 lists of queries"):
        predictor.predict_batch(images, [["a mug"]])


def test_threads_may_share_a_predictor(predictor, images):
    encoded = [predictor.encode(image) for image in images]
    queries = [[f"the mug {i} of {n}" for n in range(3)] for i in range(len(images))]
    alone = [
        predictor.predict(asked, image=image) for asked, image in zip(queries, encoded, strict=True)
    ]
    predictor.text_encoder._states.clear()  # so that threads encode sentences, too
    predictor.text_encoder._requested.clear()
    predictor.text_encoder.truncated.clear()
    with ThreadPoolExecutor(8) as pool:
        shared = list(
            pool.map(
                lambda i: predictor.predict(queries[i], image=encoded[i]), [*range(len(images))] * 4
            )
        )
    for i, answers in enumerate(shared):
        for one, other in zip(alone[i % len(images)], answers, strict=True):
            assert (
                np.array_equal(one.amodal, other.amodal)
                and one.amodal_probability == other.amodal_probability
            )


def test_sentences_do_not_fill_the_memory_of_a_server(predictor, images, monkeypatch):
    monkeypatch.setattr(text_states, "REQUEST_KEPT", 4)
    predictor.text_encoder.encode(["a sentence of training"])
    known, cut = (
        len(predictor.text_encoder._states) - len(predictor.text_encoder._requested),
        set(predictor.text_encoder.truncated),
    )
    predictor.set_image(images[0])
    for i in range(5):
        predictor.predict([f"mug {i} and {n} and {'very ' * 30}red" for n in range(3)])
    assert (
        len(predictor.text_encoder._requested) == 4
        and len(predictor.text_encoder.truncated - cut) <= 4
    )
    assert len(predictor.text_encoder._states) == known + 4
    assert len(predictor.text_encoder.states_of("a sentence of training")) > 2


@pytest.mark.parametrize("above", [False, True])
def test_below_the_threshold_of_presence_the_answer_is_empty(above, predictor, images):
    (before,) = predictor.predict(QUERIES[:1], image=predictor.encode(images[0]))
    logit = np.log(before.presence / (1 - before.presence))
    config = replace(predictor.config, presence_threshold=float(logit + (-0.1 if above else 0.1)))
    model = model_with_weights(config, flat_weights(predictor.weights), Path("weights"))
    other = Predictor(config, *nnx.split(model), predictor.text_encoder, predictor.calibration)
    (found,) = other.predict(QUERIES[:1], image=other.encode(images[0]))
    assert found.presence == pytest.approx(before.presence, abs=1e-5) and 0 < found.presence < 1
    assert found.to_json()["presence"] == found.presence
    if above:
        same(before, found)
        assert len(found.instances) == len(before.instances)
    else:
        assert not (found.modal.any() or found.amodal.any() or found.instances)
        unlikely = replace(found, presence=0.2).summary()
        assert (
            unlikely
            == f"{QUERIES[0]}\nnothing of the kind is seen in the image (probability 0.200)"
        )


def blot() -> Prediction:
    """A visible disc, its hidden part, and a far crumb."""
    y, x = np.mgrid[:60, :80]
    amodal = (y - 30) ** 2 + (x - 40) ** 2 < 20**2
    modal = (amodal & (x < 45)) | ((y > 55) & (x > 76))
    return Prediction("a disc", "amodal", 0.9, 0.8, modal, amodal | modal, ())


def test_masks_leave_as_rle_png_and_polygons():
    prediction = blot()
    for name in ("mask", "modal", "amodal", "occluded"):
        mask = getattr(prediction, name)
        assert np.array_equal(masks.decode(json.loads(json.dumps(prediction.rle(name)))), mask)
        picture = Image.open(io.BytesIO(prediction.png(name)))
        assert picture.mode == "L" and np.array_equal(np.asarray(picture) == 255, mask)
        drawn = masks.from_segmentation(prediction.polygons(name), *mask.shape)
        assert (drawn & mask).sum() / (drawn | mask).sum() > 0.97, name
    assert [len(prediction.polygons(name)) for name in ("mask", "modal", "occluded")] == [2, 2, 1]
    empty = np.zeros((4, 5), bool)
    assert Prediction("", "modal", 0.0, 0.0, empty, empty, ()).polygons() == []
    with pytest.raises(
        InputError, match="there is no mask 'visible'; use mask, modal, amodal or occluded"
    ):
        prediction.rle("visible")


def test_an_overlay_is_of_the_image_that_was_asked_about():
    prediction = blot()
    grey = np.full((60, 80, 3), 128, np.uint8)
    over = prediction.overlay(Image.fromarray(grey))
    assert over.shape == grey.shape and over.dtype == np.uint8
    assert (
        over[30, 30, 2] > over[30, 30, 0] and over[30, 52, 0] > over[30, 52, 2]
    )  # blue: visible, orange: occluded
    with pytest.raises(InputError, match="the image is 60 x 80, the masks are 80 x 60 pixels"):
        prediction.overlay(grey.transpose(1, 0, 2))


def test_of_an_animation_the_first_frame_is_taken(predictor, images, tmp_path):
    frames = [Image.fromarray(image) for image in (images[0], images[0][::-1])]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    found = []
    for image in (
        images[0],
        tmp_path / "a.webp",
        (tmp_path / "a.webp").read_bytes(),
        Image.open(tmp_path / "a.webp"),
    ):
        predictor.set_image(image)
        found += predictor.predict(["the red mug"])
    assert all(np.array_equal(found[0].amodal, other.amodal) for other in found[1:])


def huge() -> Image.Image:
    return Image.new("1", (10_000, 6_000))


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"", "empty"),
        (b"hello", "not an image"),
        (huge(), "more than 50 megapixels"),
        (np.broadcast_to(np.uint8(0), (6000, 10_000, 3)), "more than 50 megapixels"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (np.zeros((4, 4, 3), np.float32), r"uint8 \[H W 3\]"),
        (Path("nowhere.png"), "nowhere.png: there is no such image"),
    ],
)
def test_what_is_no_image_is_one_sentence(image, reason, predictor, images):
    predictor.set_image(images[0])
    (before,) = predictor.predict(["the red mug"])
    with pytest.raises(InputError, match=reason):
        predictor.set_image(image)
    (after,) = predictor.predict(["the red mug"])  # the earlier image stays
    assert np.array_equal(before.mask, after.mask)


def test_a_damaged_pillow_image_is_one_sentence(predictor, images):
    file = io.BytesIO()
    Image.fromarray(images[0]).save(file, "PNG")
    with pytest.raises(InputError, match="damaged or cut short"):
        predictor.set_image(Image.open(io.BytesIO(file.getvalue()[:-200])))


def test_no_global_precision_changes_an_answer(tiny_run, images):
    def answers() -> tuple[list[Prediction], list]:
        predictor = r2sm_jax.load(tiny_run)
        (found,) = predictor.predict_batch(images[:1], [QUERIES])
        predictor.set_image(images[0])
        return found + predictor.predict(QUERIES), list(predictor.amodal_logits(QUERIES))

    wanted, shares = answers()
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    try:
        found, shares_again = answers()
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert shares_again == shares
    for one, other in zip(wanted, found, strict=True):
        assert (one.amodal_probability, one.score) == (other.amodal_probability, other.score)
        assert np.array_equal(one.modal, other.modal) and np.array_equal(one.amodal, other.amodal)


def test_bad_questions_are_one_sentence(predictor, images):
    predictor.set_image(images[0])
    with pytest.raises(
        InputError, match="mask type 'visible' is unknown; say auto, modal or amodal"
    ):
        predictor.predict(["the mug"], "visible")
    with pytest.raises(InputError, match="the query is empty"):
        predictor.predict(["the mug", " "])
    with pytest.raises(InputError, match="the query is empty"):
        predictor.predict_batch([images[0]], [[""]])
    assert predictor.predict([]) == [] and predictor.predict_batch([], []) == []
    assert [p.query for p in predictor.predict("the mug")] == ["the mug"]


def test_ten_thousand_words_are_cut_with_a_warning(predictor, images):
    predictor.set_image(images[0])
    words = "the red mug " * 3333 + "hidden parts included"
    with pytest.warns(
        TruncatedQuery, match=r"longer than 24 tokens; this was not read: 'red mug the .* \.\.\.$"
    ):
        (prediction,) = predictor.predict([words])
    assert prediction.query == words and prediction.unread.endswith("hidden parts included")
    assert predictor.predict(["the red mug"])[0].unread == ""


def test_a_sentence_and_an_image_may_be_given_as_they_are(predictor, images):
    array = images[0]
    (one,) = predictor.predict(["the red mug"], image=array)
    ((same,),) = predictor.predict_batch([array], ["the red mug"])
    assert one.query == same.query == "the red mug" and np.array_equal(one.mask, same.mask)
    for query in (".", "\u200b", " "):
        with pytest.raises(InputError, match="has no words"):
            predictor.predict([query], image=array)
