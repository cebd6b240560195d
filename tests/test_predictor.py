"""The predictor: the same predictions alone, in batches and in threads; what it compiles; what it
refuses."""

import io
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOX, MUG, SIZE, rectangle
from flax import nnx
from PIL import Image
from stub_predictor import StubCompleter, StubOutliner, StubPredictor, masks_of

import r2sm_jax
from r2sm_jax.config import CompleterConfig, DataConfig
from r2sm_jax.data import masks
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import Completion, MaskCompleter, Outline
from r2sm_jax.inference.decision import TruncatedQuery, decide
from r2sm_jax.inference.parts import Parts, judge
from r2sm_jax.inference.postprocess import name_hiders
from r2sm_jax.inference.prediction import MASKS, Prediction
from r2sm_jax.inference.predictor import Photo
from r2sm_jax.inference.prompts import Request
from r2sm_jax.models.calibration import Calibration
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.sources import open_split

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
    source = open_split(DataConfig(), "val", count=9, size=64)
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
    batch = list(predictor.predict_batches(images, queries))
    assert [len(of_image) for of_image in batch] == [len(of_image) for of_image in queries]
    for image, sentences, of_image in zip(images, queries, batch, strict=True):
        predictor.set_image(image)
        for one, other in zip(predictor.predict(sentences), of_image, strict=True):
            assert_close(one, other)


def test_a_stream_reads_one_batch_ahead_and_keeps_the_order():
    predictor, opened = StubPredictor(), []

    def read(number: int) -> tuple[Photo, list[Request]] | None:
        opened.append(number)
        if number == 29:
            return None
        image = predictor.frame(np.zeros((20 + number, 30, 3), np.uint8))
        return image, [Request("the mug", "amodal")] * (number % 3)

    def use(number, predictions):
        found = list(predictions)
        assert all(p.mask_type == "amodal" and p.absent_slots for p in found)
        return number, [p.modal.shape for p in found]

    results = predictor.stream(range(30), read, use, with_absent_slots=True)
    assert next(results) == (0, []) and len(opened) <= 24
    expected = [(i, [(20 + i, 30)] * (i % 3)) for i in range(1, 29)]
    assert list(results) == expected
    assert list(predictor.stream([], read, use)) == []


def test_threads_may_share_a_predictor(predictor, images):
    encoded = [predictor.encode(image) for image in images]
    queries = [[f"the mug {i} of {n}" for n in range(3)] for i in range(len(images))]
    alone = []
    for sentences, image in zip(queries, encoded, strict=True):
        alone.append(predictor.predict(sentences, image=image))
    predictor.text_encoder._states.clear()  # so that threads encode sentences, too

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
        (predictions,) = predictor.predict_batches(images[:1], [QUERIES])
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
    frame = predictor.frame(images[0])
    (exact,) = predictor.predict_logits([frame], [QUERIES])
    (other,) = rounded.predict_logits([frame], [QUERIES])
    for a, b in zip(exact, other, strict=True):
        assert 0 < abs(a.masks - b.masks).max() < 0.05 * abs(a.masks).max()


def test_a_forked_child_is_refused(images, monkeypatch):
    """JAX would wait for ever there."""
    predictor = StubPredictor()
    encoded = predictor.encode(images[0])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (
        lambda: predictor.encode(images[0]),
        lambda: predictor.predict(QUERIES, image=encoded),
        lambda: predictor.predict(boxes=[(1, 1, 9, 9)], image=images[0]),
        lambda: next(predictor.predict_batches(images[:1], [QUERIES])),
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


def test_features_of_another_model_are_refused(predictor, images):
    encoded = predictor.encode(images[0])
    other = predictor.updated(weights=jax.tree.map(lambda x: 2 * x, predictor.weights))
    with pytest.raises(InputError, match="encoded by another model"):
        other.predict(["the mug"], image=encoded)
    # Weights that are equal and another calibration have the same features.
    same = predictor.updated(weights=jax.tree.map(lambda x: x.copy(), predictor.weights))
    assert_equal(*(p.predict(["the mug"], image=encoded)[0] for p in (predictor, same)))


@pytest.mark.filterwarnings("ignore::r2sm_jax.inference.decision.TruncatedQuery")
def test_nothing_is_compiled_once_it_is_warm(predictor, images, compilations):
    predictor.warm_up()
    del compilations[:]
    for i, image in enumerate(images):
        predictor.set_image(image)
        predictor.predict([f"{'red ' * (3 * i)}mug number {i}, {n}" for n in range(1 + 2 * i)])
    assert compilations == []
    jax.jit(lambda x: x + 1)(np.zeros(17))  # compilations are counted at all
    assert len(compilations) == 1


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
    x0, y0, x1, y1 = prediction.box(name)
    assert mask[y0:y1, x0:x1].sum() == mask.sum() and mask[y0].any() and mask[:, x1 - 1].any()


def test_an_overlay_shows_what_is_seen_and_what_is_hidden():
    prediction = make_prediction()
    grey = np.full((60, 80, 3), 128, np.uint8)
    picture = prediction.overlay(Image.fromarray(grey))
    assert picture.shape == grey.shape and picture.dtype == np.uint8
    assert picture[30, 30, 2] > picture[30, 30, 0]  # visible: blue
    assert picture[30, 52, 0] > picture[30, 52, 2]  # hidden: orange
    assert prediction.overlay(grey, max_pixels=60 * 80 // 2).shape == (42, 57, 3)
    np.testing.assert_array_equal(np.asarray(prediction.show(grey)), picture)


def test_another_image_is_refused(tmp_path):
    prediction, turned = make_prediction(), np.zeros((80, 60, 3), np.uint8)
    for call in (
        lambda: prediction.show(turned),
        lambda: prediction.overlay(turned),
        lambda: prediction.write(tmp_path / "new", turned),
    ):
        with pytest.raises(InputError, match="this image is 80 x 60, the masks are 60 x 80"):
            call()
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="does not hold its image"):
        prediction.show()


def test_a_prediction_keeps_its_image_and_prints_as_one_line(prompted, tmp_path):
    (prediction,) = prompted.predict(["the red mug"])
    assert prediction.show().size == SIZE[::-1]
    prediction.write(str(tmp_path))
    assert (tmp_path / "overlay.png").exists()
    assert repr(prediction) == prediction.summary() and "\n" not in repr(prediction)


def test_a_long_query_is_truncated_with_a_warning(predictor, images):
    predictor.set_image(images[0])
    long = "the red mug " * 3333 + "hidden parts included"
    with pytest.warns(TruncatedQuery, match="not read: 'red mug"):
        (prediction,) = predictor.predict([long])
    with pytest.warns(TruncatedQuery, match="not read: 'red mug"):
        list(predictor.predict_batches(images[:1], [[long]]))
    assert prediction.query == long and prediction.unread.endswith("hidden parts included")
    assert predictor.predict(["the red mug"])[0].unread == ""


# Where the caller says where the object is.


MODAL = "only the visible part of the red mug"
AMODAL = "the complete shape of the red mug"


@pytest.fixture(scope="module")
def completer() -> MaskCompleter:
    """Untrained, with a threshold at which it adds some pixels."""
    config = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
    _, weights = nnx.split(make_completer(config, rngs=nnx.Rngs(0)))
    return MaskCompleter(config, weights, threshold=-2.0)


@pytest.fixture
def prompted(completer) -> StubPredictor:
    """With a completer and an outliner, and an image that is set."""
    stub = StubPredictor()
    stub.parts = Parts(completer, StubOutliner())
    stub.set_image(np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8))
    return stub


def test_complete_is_the_completer_on_the_image_that_was_set(prompted, completer):
    pixels = prompted._image.pixels
    expected = masks_of(completer, pixels, [MUG, BOX], MUG | BOX)
    for given in ([MUG, BOX], np.stack([MUG, BOX]), [masks.encode(MUG), masks.encode(BOX)]):
        np.testing.assert_array_equal(prompted.complete(given), expected)
    np.testing.assert_array_equal(prompted.complete([MUG, BOX], image=pixels), expected)
    assert masks.area(expected[0] & ~MUG) > 0

    (alone,) = prompted.complete([MUG])
    (beside,) = prompted.complete([MUG], others=[masks.encode(BOX)])
    np.testing.assert_array_equal(alone, masks_of(completer, pixels, [MUG])[0])
    np.testing.assert_array_equal(beside, expected[0])
    assert not np.array_equal(alone, beside)
    (nothing_beside,) = prompted.complete([MUG], others=[])
    assert nothing_beside.shape == SIZE and prompted.complete([]) == []


def test_only_words_without_a_place_look_at_the_image(prompted, monkeypatch):
    prompted.predict(boxes=[(10, 10, 30, 40)])
    prompted.predict([MODAL, AMODAL], masks=[MUG, BOX])
    prompted.complete([MUG])
    assert prompted.num_images == 0
    # Nor does anything read words where there are none.
    monkeypatch.setattr(type(prompted.text_encoder), "__call__", None)
    prompted.predict(boxes=[(10, 10, 30, 40)], points=[[(20, 20)]])
    monkeypatch.undo()
    prompted.predict([MODAL, AMODAL], masks=[MUG, None])
    assert prompted.num_images == 1


def test_the_head_that_looks_at_the_image_decides_so_at_a_place_too(prompted):
    prompted.config = replace(prompted.config, head="decoder")
    modal, amodal, wordless = prompted.predict([MODAL, AMODAL, None], masks=[MUG, MUG, BOX])
    assert (modal.mask_type, amodal.mask_type, wordless.mask_type) == ("modal", "amodal", "modal")
    assert prompted.num_images == 1 and amodal.amodal_probability > 0.5
    np.testing.assert_array_equal(amodal.modal, MUG)


def test_the_sentence_decides_which_mask_of_a_given_one_is_meant(prompted, completer):
    modal, amodal, other, found = prompted.predict(
        [MODAL, AMODAL, MODAL, MODAL], masks=[MUG, MUG, BOX, None]
    )
    # What else is asked about in the same call is no neighbour.
    (complete,) = masks_of(completer, prompted._image.pixels, [MUG])
    assert (modal.mask_type, amodal.mask_type) == ("modal", "amodal")
    for prediction, mask in ((modal, MUG), (amodal, complete)):
        np.testing.assert_array_equal(prediction.mask, mask)
        np.testing.assert_array_equal(prediction.modal, MUG)
        np.testing.assert_array_equal(prediction.amodal, complete)
        (instance,) = prediction.instances
        np.testing.assert_array_equal(instance.mask, mask)
        assert prediction.presence == 1 and "given mask" in prediction.summary()
        confidence = 1 if prediction.score is None else prediction.score
        assert [entry["score"] for entry in prediction.to_coco()] == [prediction.score, confidence]
    assert modal.score is None and 0 < amodal.score < 1
    np.testing.assert_array_equal(other.mask, BOX)
    (plain,) = prompted.predict([MODAL])
    assert_equal(found, plain)
    (forced,) = prompted.predict([MODAL], mask_type="amodal", masks=[MUG])
    assert forced.mask_type == "amodal"


def test_the_others_are_what_shows_of_all_objects(prompted, completer):
    expected = masks_of(completer, prompted._image.pixels, [MUG, BOX], MUG | BOX)
    for others in ([MUG, BOX], [masks.encode(MUG | BOX)]):
        answers = prompted.predict([AMODAL, AMODAL], masks=[MUG, BOX], others=others)
        for answer, complete in zip(answers, expected, strict=True):
            np.testing.assert_array_equal(answer.mask, complete)
    stub = StubCompleter()
    prompted.parts = prompted.parts._replace(completer=stub)
    prompted.predict(boxes=[(10, 10, 30, 40)], others=[])
    assert not stub.all_visible.any()
    prompted.predict(boxes=[(10, 10, 30, 40)], others=MUG)  # a single one
    np.testing.assert_array_equal(stub.all_visible, MUG)
    with pytest.raises(InputError, match="others: mask 2"):
        prompted.predict([AMODAL], masks=[MUG], others=[BOX, BOX[:30]])


def test_a_score_is_of_the_mask_that_is_asked_for_and_unsure_by_the_limit_of_its_kind(prompted):
    stub = StubCompleter()
    prompted.parts = prompted.parts._replace(completer=stub)
    box = [(10, 10, 30, 40)]
    (modal,), (amodal,) = (prompted.predict([text], masks=[MUG]) for text in (MODAL, AMODAL))
    assert (modal.score, amodal.score) == (None, 0.9) and not amodal.is_unsure
    (outlined,), (both,) = (prompted.predict([text], boxes=box) for text in (MODAL, AMODAL))
    # A completed outline may be wrong in both.
    assert (outlined.score, both.score) == (0.625, 0.625 * 0.9)
    for answer in (modal, amodal, outlined, both):
        assert answer.hidden_probability == 0.25
        assert answer.to_json()["hidden_probability"] == 0.25
        assert answer.to_coco()[0]["hidden_probability"] == 0.25
        assert "probability of a hidden part 0.25" in answer.summary()
    assert "predicted IoU 0.90" in amodal.summary()
    (found,) = prompted.predict([AMODAL])
    assert found.hidden_probability is None and "hidden part" not in found.summary()
    stub.iou = 0.69
    assert prompted.predict([AMODAL], masks=[MUG])[0].is_unsure
    assert not prompted.predict([MODAL], masks=[MUG])[0].is_unsure


def test_a_completed_outline_has_a_limit_of_its_own():
    """The product of both IoUs is no IoU of an outline: unsure is what is unsure in one of both,
    unless a limit is fitted to the product."""
    nothing = np.zeros(SIZE, bool)

    def is_unsure(outline_iou, completion_iou, calibration=None):
        outline = Outline(MUG, outline_iou, unsure_below=0.6, completed_calibration=calibration)
        judged = judge(outline, Completion(nothing, completion_iou, 0.5, unsure_below=0.8))
        return judged.iou < judged.unsure_below

    assert not is_unsure(0.65, 0.85)  # their product, .55, is below both limits
    assert is_unsure(0.55, 0.99) and is_unsure(0.99, 0.75)
    fitted = Calibration(iou_shift=1.0, unsure_below=0.7)
    assert not is_unsure(0.65, 0.85, fitted) and is_unsure(0.65, 0.6, fitted)


def test_the_outliner_draws_what_boxes_and_clicks_mean(prompted, completer):
    answers = prompted.predict(
        [AMODAL, None, MODAL, AMODAL],
        boxes=[(10, 10, 30, 40), (30, 20, 60, 50), None, None],
        points=[None, None, [(40, 30)], None],
    )
    pixels = prompted._image.pixels
    complete = [masks_of(completer, pixels, [a.modal])[0] for a in answers[:3]]
    for answer, visible, whole in zip(answers, (MUG, BOX), complete, strict=False):
        np.testing.assert_array_equal(answer.modal, visible)
        np.testing.assert_array_equal(answer.amodal, whole)
    assert [answer.mask_type for answer in answers] == ["amodal", "modal", "modal", "amodal"]
    assert [answer.score for answer in answers[1:]] == [0.625, 0.625, 0.75]
    assert [answer.to_coco()[0]["score"] for answer in answers[1:]] == [0.625, 0.625, 0.75]
    assert 0 < answers[0].score < 0.625  # completed: wrong in both, perhaps
    # Words decide the type, whatever the place; without words there is no probability.
    assert answers[0].amodal_probability == answers[3].amodal_probability
    assert answers[1].amodal_probability is None and '"' not in answers[1].summary()
    wordless = prompted.predict(boxes=[(10, 10, 30, 40), (30, 20, 60, 50)])
    assert [p.mask_type for p in wordless] == ["modal", "modal"]
    np.testing.assert_array_equal(wordless[1].mask, BOX)
    (forced,) = prompted.predict([None], mask_type="amodal", boxes=[(1, 1, 9, 9)])
    assert forced.mask_type == "amodal"


def test_a_model_says_what_it_lacks(prompted):
    prompted.parts = Parts(outliner=StubOutliner())
    (visible,) = prompted.predict([MODAL], boxes=[(10, 10, 30, 40)])
    np.testing.assert_array_equal(visible.mask, MUG)
    assert not visible.has_both_masks and "hidden" not in visible.summary()
    for call in (
        lambda: prompted.complete([MUG]),
        lambda: prompted.predict([MODAL], masks=[MUG]),
        lambda: prompted.predict([AMODAL], boxes=[(10, 10, 30, 40)]),
    ):
        with pytest.raises(InputError, match="has no completer"):
            call()
    prompted.parts = Parts()
    with pytest.raises(InputError, match="has no outliner"):
        prompted.predict(boxes=[(10, 10, 30, 40)])


def test_a_model_without_a_decision_has_one_mask(prompted):
    prompted.config = replace(prompted.config, head="none")
    (answer,) = prompted.predict([AMODAL], mask_type="amodal")
    assert not answer.has_both_masks and "hidden" not in answer.summary()
    assert answer.to_instances()[0].amodal is None


def test_what_hides_an_object_is_named():
    """By another query of the same call, whose visible mask covers half of the hidden part."""
    whole, bit = rectangle(10, 10, 30, 40), rectangle(10, 30, 30, 33)
    front = BOX | rectangle(10, 30, 30, 40)
    box, mug, few = (
        Prediction("the box", "modal", 0.1, 0.8, front, front),
        Prediction("the mug", "amodal", 0.9, 0.8, rectangle(10, 10, 30, 30), whole),
        Prediction("a bit", "modal", 0.1, 0.8, bit, bit),
    )
    assert [p.hidden_by for p in name_hiders([box, mug, few])] == ["", "the box", ""]
    assert name_hiders([mug, few])[0].hidden_by == ""
    assert name_hiders([replace(box, score=0.1), mug])[1].hidden_by == ""
    assert '33% hidden by "the box"' in name_hiders([box, mug])[1].summary()


@pytest.mark.parametrize(
    ("changes", "is_unsure"),
    [({}, False), ({"score": 0.2}, True), ({"presence": 0.4}, True), ({"score": None}, False)],
)
def test_unsure_answers_are_called_so_everywhere(changes, is_unsure):
    prediction = replace(make_prediction(), **changes)
    (fused,) = prediction.to_coco()
    assert prediction.is_unsure == is_unsure == (", unsure" in prediction.summary())
    assert prediction.to_json().get("unsure", False) == fused.get("unsure", False) == is_unsure
    assert prediction.to_json()["presence"] == fused["presence"] == prediction.presence


# Masks of other systems, as docs/from_your_tool.md takes them over.


def page_programs(name: str) -> list[str]:
    page = (Path(__file__).parents[1] / "docs" / name).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)


class Tensor(np.ndarray):
    """An array with the method of a tensor that the page calls."""

    def cpu(self):
        return np.asarray(self)


def test_the_programs_of_the_documentation_run(prompted, completer):
    """With objects that have the layout of each system's own."""
    stack = np.stack([MUG, BOX])
    outlines = []
    for x0, y0, x1, y1 in ((10, 10, 30, 40), (30, 20, 60, 50)):
        corners = [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]
        outlines.append(np.array(corners, np.float32))
    instances = SimpleNamespace(pred_masks=stack)
    sam = SimpleNamespace(
        post_process_instance_segmentation=lambda *_, **__: [{"masks": stack.astype(np.int64)}],
        post_process_masks=lambda *_: [stack[:, None]],
    )
    yolo_masks = SimpleNamespace(data=stack.astype(np.float32).view(Tensor), xy=outlines)
    detectron = SimpleNamespace(to=lambda device: instances)

    sam3, sam2, ultralytics, detectron2, supervision = page_programs("from_your_tool.md")
    load, sentence = page_programs("complete.md")
    assert "r2sm_jax.load" in load
    systems = [
        (sam3, {"processor": sam, "outputs": None, "height": SIZE[0], "width": SIZE[1]}),
        (
            sam2,
            {
                "processor": sam,
                "outputs": SimpleNamespace(pred_masks=stack.view(Tensor)),
                "inputs": {"original_sizes": [SIZE]},
            },
        ),
        (ultralytics, {"model": lambda *_, **__: [SimpleNamespace(masks=yolo_masks)]}),
        (detectron2, {"model": lambda image: {"instances": detectron}, "image": None}),
        (supervision, {"detections": SimpleNamespace(mask=stack), "np": np}),
    ]
    expected = masks_of(completer, prompted._image.pixels, [MUG, BOX], MUG | BOX)
    for program, names in systems:
        names["predictor"] = prompted
        exec(program, names)
        complete = names["complete"] if "complete" in names else names["detections"].mask
        np.testing.assert_array_equal(complete, expected)
    exec(sentence, {"predictor": prompted, "masks": stack})


# Images and queries.


def test_an_image_may_be_a_file_its_bytes_pillow_or_an_array(images, tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(images[1]).save(path)
    predictor = StubPredictor()
    expected = predictor.predict(QUERIES[:2], image=images[1])
    for form in (path, str(path), path.read_bytes(), Image.open(path)):
        predictor.set_image(form)
        for one, other in zip(expected, predictor.predict(QUERIES[:2]), strict=True):
            assert_equal(one, other)


def test_a_bad_image_is_refused_and_the_earlier_one_stays(images):
    predictor = StubPredictor()
    predictor.set_image(images[0])
    (before,) = predictor.predict(["the red mug"])
    with pytest.raises(InputError, match="cannot be read"):
        predictor.set_image(b"hello")
    assert_equal(before, predictor.predict(["the red mug"])[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p, image: StubPredictor().predict(["the mug"]), "set_image"),
        (lambda p, image: p.predict(["the mug"], mask_type="visible"), "'visible'"),
        (lambda p, image: p.predict(["the mug", " ."]), "query is empty"),
        (lambda p, image: p.predict(["the mug"], abstain=30), "^abstain 30"),
        (lambda p, image: list(p.predict_batches([image], [[""]])), "query is empty"),
        (lambda p, image: p.predict(["the mug"], masks=[MUG, BOX]), "2 masks, but 1 queries"),
        (lambda p, image: p.complete([MUG, MUG & BOX]), "mask 2 .* is empty"),
        (lambda p, image: p.complete([MUG], [BOX[:30]]), "others: mask 1"),
        (lambda p, image: p.predict(["the mug"], others=[MUG]), "give one of these as well"),
    ],
)
def test_bad_calls_are_refused(prompted, images, call, words):
    with pytest.raises(InputError, match=words):
        call(prompted, images[0])


def test_one_query_may_be_given_as_a_string_and_none_is_fine(images):
    predictor = StubPredictor()
    (one,) = predictor.predict("the red mug", image=images[0])
    ((same,),) = predictor.predict_batches(images[:1], [["the red mug"]])
    assert one.query == same.query == "the red mug"
    assert_equal(one, same)
    assert predictor.predict([], image=images[0]) == [] == list(predictor.predict_batches([], []))


@pytest.mark.parametrize(
    ("head", "mask_type", "logit", "expected"),
    [
        ("attention", "auto", 0.0, ("modal", 0.5, True)),
        ("attention", "auto", np.log(3), ("amodal", 0.75, False)),
        ("attention", "modal", np.log(3), ("modal", 0.75, False)),
        ("always_amodal", "auto", 0.0, ("amodal", 1.0, False)),
        ("always_amodal", "modal", 0.0, ("modal", 1.0, False)),
        ("oracle", "amodal", 0.0, ("amodal", 1.0, False)),
        ("none", "auto", 0.0, (None, None, False)),
        ("none", "amodal", 0.0, ("amodal", None, False)),
    ],
)
def test_decide(head, mask_type, logit, expected):
    """The head, rules, the oracle, the head `none`, and types that the caller forces."""
    decision = decide(head, "the mug", logit, mask_type, abstain=0.1)
    assert (decision.mask_type, decision.undecided) == (expected[0], expected[2])
    assert decision.amodal_probability == pytest.approx(expected[1])
