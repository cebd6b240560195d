"""Given masks: their layouts, cleaning, `Predictor.complete`, and predictions about them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx
from PIL import Image
from stub_predictor import StubPredictor

from r2sm_jax import predict
from r2sm_jax.config import CompleterConfig
from r2sm_jax.data import masks
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.inference.given_masks import clean, read_mask_file, to_mask
from r2sm_jax.models.crop_unet import make_completer

SIZE = HEIGHT, WIDTH = 60, 80
MODAL = "only the visible part of the red mug"
AMODAL = "the complete shape of the red mug"


def rectangle(x0, y0, x1, y1) -> np.ndarray:
    mask = np.zeros(SIZE, bool)
    mask[y0:y1, x0:x1] = True
    return mask


MUG, BOX = rectangle(10, 10, 30, 40), rectangle(30, 20, 60, 50)


@pytest.fixture(scope="module")
def completer() -> MaskCompleter:
    """Untrained, with a threshold at which it adds some pixels."""
    config = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
    _, weights = nnx.split(make_completer(config, rngs=nnx.Rngs(0)))
    return MaskCompleter(config, weights, threshold=-2.0)


@pytest.fixture
def predictor(completer) -> StubPredictor:
    stub = StubPredictor()
    stub.completer = completer
    stub.set_image(np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8))
    return stub


def uncompressed(mask: np.ndarray) -> dict:
    """The RLE of SAM's `mask_to_rle_pytorch`: counts as a list, the size as a list."""
    flat = mask.ravel(order="F").astype(int)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [1 - flat[-1]]])))
    counts = np.diff(np.concatenate([[0], edges])).tolist()
    return {"size": list(mask.shape), "counts": counts}


@pytest.mark.parametrize(
    "value",
    [
        MUG,
        MUG.astype(np.uint8),
        255 * MUG.astype(np.uint8),
        MUG.astype(np.float32),
        MUG[None, None],
        masks.encode(MUG),
        uncompressed(MUG),
        {"segmentation": masks.encode(MUG), "score": 0.9},
        [10, 10, 30, 10, 30, 40, 10, 40],
        [[10, 10, 30, 10, 30, 40, 10, 40]],
        [np.array([[10, 10], [30, 10], [30, 40], [10, 40]], np.float32)],
        [[[10, 10], [30, 10], [30, 40], [10, 40]]],
    ],
)
def test_a_mask_is_read_in_every_layout(value):
    np.testing.assert_array_equal(to_mask(value, SIZE), MUG)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (MUG[:30], "30 x 80, its image's 60 x 80"),
        (np.stack([MUG, BOX]), r"no array \[H W\]"),
        (10 * MUG - 5.0, "no probabilities"),
        ("cat.png", "no array"),
        ({"size": [60, 80]}, "counts"),
        ([], "empty"),
        (MUG.T, "it seems to be turned"),
        ([[0.1, 0.1, 0.5, 0.1, 0.5, 0.5]], "shares of the image's size"),
        ([[500, 500, 600, 500, 600, 600]], "of another scale"),
    ],
)
def test_what_is_no_mask_of_the_image_is_refused(value, named):
    with pytest.raises(ValueError, match=named):
        to_mask(value, SIZE)


def test_a_mask_file_is_a_picture_or_json(tmp_path):
    Image.fromarray(MUG).save(tmp_path / "mug.png")
    (tmp_path / "mug.json").write_text(json.dumps({"segmentation": masks.encode(MUG)}))
    for name in ("mug.png", "mug.json"):
        np.testing.assert_array_equal(read_mask_file(tmp_path / name, SIZE), MUG)


def test_cleaning_drops_specks_and_holes():
    spoilt = MUG.copy()
    spoilt[20:22, 15:17] = False  # 4 of 600 pixels: a hole
    spoilt[50:52, 70:72] = True  # a speck
    np.testing.assert_array_equal(clean(spoilt), MUG)
    spoilt[20:24, 15:19] = False  # 16 pixels are a hole that is meant
    assert not clean(spoilt)[20:24, 15:19].any()
    dust = rectangle(0, 0, 1, 1) | rectangle(5, 5, 7, 7)
    np.testing.assert_array_equal(clean(dust), dust)


def test_complete_is_the_completer_on_the_image_that_was_set(predictor, completer):
    pixels = predictor._image.pixels
    expected = completer(pixels, [MUG, BOX])
    for given in ([MUG, BOX], np.stack([MUG, BOX]), [masks.encode(MUG), masks.encode(BOX)]):
        np.testing.assert_array_equal(predictor.complete(given), expected)
    np.testing.assert_array_equal(predictor.complete([MUG, BOX], image=pixels), expected)
    assert masks.area(expected[0] & ~MUG) > 0


def test_neighbours_can_be_given(predictor, completer):
    pixels = predictor._image.pixels
    (alone,) = predictor.complete([MUG])
    (beside,) = predictor.complete([MUG], neighbours=[masks.encode(BOX)])
    np.testing.assert_array_equal(alone, completer(pixels, [MUG])[0])
    np.testing.assert_array_equal(beside, completer(pixels, [MUG, BOX])[0])
    assert not np.array_equal(alone, beside)
    (nothing_beside,) = predictor.complete([MUG], neighbours=[np.zeros(SIZE, bool)])
    assert nothing_beside.shape == SIZE


def test_the_sentence_decides_which_mask_of_a_given_one_is_meant(predictor, completer):
    modal, amodal, other, found = predictor.predict(
        [MODAL, AMODAL, MODAL, MODAL], masks=[MUG, MUG, BOX, None]
    )
    complete, _ = completer(predictor._image.pixels, [MUG, BOX])
    assert (modal.mask_type, amodal.mask_type) == ("modal", "amodal")
    np.testing.assert_array_equal(modal.mask, MUG)
    np.testing.assert_array_equal(amodal.mask, complete)
    for prediction in (modal, amodal):
        np.testing.assert_array_equal(prediction.modal, MUG)
        np.testing.assert_array_equal(prediction.amodal, complete)
        np.testing.assert_array_equal(prediction.occluded, complete & ~MUG)
        (instance,) = prediction.instances
        np.testing.assert_array_equal(instance.mask, prediction.mask)
        assert prediction.score is None and prediction.presence == 1
        assert "given mask" in prediction.summary()
        assert json.loads(json.dumps(prediction.to_json()))["score"] is None
        assert [entry["score"] for entry in prediction.to_coco()] == [1, 1]
    np.testing.assert_array_equal(other.mask, BOX)
    assert found.score is not None
    (plain,) = predictor.predict([MODAL])
    np.testing.assert_array_equal(found.mask, plain.mask)


def test_the_type_of_a_given_mask_can_be_forced(predictor):
    (modal,) = predictor.predict([AMODAL], "modal", masks=[MUG])
    (amodal,) = predictor.predict([MODAL], "amodal", masks=[MUG])
    np.testing.assert_array_equal(modal.mask, MUG)
    assert masks.area(amodal.mask) > masks.area(MUG)


@pytest.mark.parametrize(
    ("queries", "given", "named"),
    [
        ([MODAL], [MUG, BOX], "2 masks, but 1 queries"),
        ([MODAL, AMODAL], [MUG, np.zeros(SIZE, bool)], "mask of query 2 .* is empty"),
        ([MODAL], [MUG[:30]], "mask of query 1 .* 30 x 80"),
        ([MODAL], MUG, "one mask alone"),
    ],
)
def test_bad_masks_for_queries_are_refused(predictor, queries, given, named):
    with pytest.raises(InputError, match=named):
        predictor.predict(queries, masks=given)


def test_bad_masks_to_complete_are_refused(predictor):
    with pytest.raises(InputError, match=r"mask 2 .* is empty"):
        predictor.complete([MUG, np.zeros(SIZE, bool)])
    for one in (MUG, masks.encode(MUG)):
        with pytest.raises(InputError, match="one mask alone"):
            predictor.complete(one)
    with pytest.raises(InputError, match="masks is None"):
        predictor.complete(None)
    assert predictor.complete([]) == []
    with pytest.raises(InputError, match="2 neighbours, but 1 masks"):
        predictor.complete([MUG], neighbours=[BOX, BOX])
    with pytest.raises(InputError, match=r"neighbours of mask 1 .* 30 x 80"):
        predictor.complete([MUG], neighbours=[BOX[:30]])
    with pytest.raises(InputError, match="set_image"):
        StubPredictor().complete([MUG])


def test_a_model_without_a_completer_says_so(predictor):
    predictor.completer = None
    with pytest.raises(InputError, match="has no completer"):
        predictor.complete([MUG])
    with pytest.raises(InputError, match="has no completer"):
        predictor.predict([MODAL], masks=[MUG])
    (plain,) = predictor.predict([MODAL], masks=[None])
    assert plain.score is not None


# Masks of other systems, as docs/complete.md takes them over.


def page_programs() -> list[str]:
    page = (Path(__file__).parents[1] / "docs" / "complete.md").read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)


class Tensor(np.ndarray):
    """An array with the method of a tensor that the page calls."""

    def cpu(self):
        return np.asarray(self)


def test_the_programs_of_the_documentation_run(predictor, completer):
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

    load, sam3, sam2, ultralytics, detectron2, supervision, sentence = page_programs()
    assert "r2sm_jax.load" in load
    systems = [
        (sam3, {"processor": sam, "outputs": None, "height": HEIGHT, "width": WIDTH}),
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
        (supervision, {"detections": SimpleNamespace(mask=stack)}),
    ]
    expected = completer(predictor._image.pixels, [MUG, BOX])
    for program, names in systems:
        names["predictor"] = predictor
        exec(program, names)
        complete = names["complete"] if "complete" in names else names["detections"].mask
        np.testing.assert_array_equal(complete, expected)
    exec(sentence, {"predictor": predictor, "found": {"masks": stack}})


def test_tensors_of_torch_are_masks(predictor, completer):
    torch = pytest.importorskip("torch")
    stack = torch.from_numpy(np.stack([MUG, BOX]))
    expected = completer(predictor._image.pixels, [MUG, BOX])
    for tensor in (stack, stack.long(), stack.float(), stack[:, None]):
        np.testing.assert_array_equal(predictor.complete(tensor), expected)


# The command.


@pytest.fixture
def files(tmp_path, predictor, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(predict, "load_predictor", lambda args: predictor)
    Image.fromarray(predictor._image.pixels).save("photo.png")
    Image.fromarray(MUG).save("mug.png")
    Image.fromarray(MUG | rectangle(70, 50, 72, 52)).save("specks.png")
    Image.fromarray(np.zeros(SIZE, bool)).save("empty.png")
    Image.fromarray(MUG[:30]).save("small.png")
    return tmp_path


def test_predict_completes_a_given_mask(files, command, completer, predictor):
    end = command(predict.main, "RUN", "photo.png", AMODAL, "--mask", "mug.png", "--json")
    assert end.code == 0, end.err
    answer = json.loads(end.out)
    (complete,) = completer(predictor._image.pixels, [MUG])
    np.testing.assert_array_equal(masks.decode(answer["modal"]), MUG)
    np.testing.assert_array_equal(masks.decode(answer["mask"]), complete)

    flags = "--mask", "specks.png", "--clean", "--mask-type", "modal", "--out", "out"
    end = command(predict.main, "RUN", "photo.png", AMODAL, *flags)
    assert end.code == 0, end.err
    np.testing.assert_array_equal(np.asarray(Image.open("out/mask.png")) > 0, MUG)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--mask", "empty.png"], "empty.png"),
        (["--mask", "small.png"], "small.png.*30 x 80"),
        (["--mask", "missing.png"], "missing.png"),
        (["--mask", "mug.png", "--mask", "specks.png"], "--mask is given 2 times"),
    ],
)
def test_predict_refuses_bad_masks(files, refused, flags, named):
    assert re.search(named, refused(predict.main, "RUN", "photo.png", AMODAL, *flags))
