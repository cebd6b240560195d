"""The web page: its functions, and the page over HTTP. A stub stands for the model.

tests/test_page_in_browser.py tries the whole page in a browser.
"""

import json
import socket
import sys
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from PIL import Image
from stub_predictor import StubOutliner, StubPredictor

from r2sm_jax import demo
from r2sm_jax.config import CompleterConfig
from r2sm_jax.data import masks
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.inference.page_session import PREVIEW_SIDE, Session, draw_layer, shrink
from r2sm_jax.inference.prediction import FILES
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.synthetic.sources import load_json_split

gr = pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
from r2sm_jax.inference import page_actions, web_page  # noqa: E402
from r2sm_jax.inference.page_actions import PageActions  # noqa: E402

QUERY = "the complete shape of the red mug"
MODAL = "only the visible part of the red mug"
SIZE = HEIGHT, WIDTH = 1200, 600


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def page(tmp_path) -> PageActions:
    return PageActions(StubPredictor(), tmp_path)


@pytest.fixture
def completing(page) -> PageActions:
    """A page whose model has an untrained completer, with a threshold at which it adds pixels."""
    config = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
    _, weights = nnx.split(make_completer(config, rngs=nnx.Rngs(0)))
    page.predictor.completer = MaskCompleter(config, weights, threshold=-2.0)
    return page


@pytest.fixture
def opened(page, photo) -> Session:
    """A visitor who has chosen a photo."""
    return page.open_photo(Session(), str(photo))["session"]


def rectangle(x0: int, y0: int, x1: int, y1: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    mask = np.zeros(size, bool)
    mask[y0:y1, x0:x1] = True
    return mask


def layers(mask: np.ndarray) -> dict:
    """What gradio's editor sends when this is painted, at the size of the preview."""
    return {"background": None, "layers": [draw_layer(mask, (1, 2, 3))], "composite": None}


def at(x: int, y: int) -> gr.SelectData:
    """A click in pixels of the preview."""
    return gr.SelectData(None, {"index": [x, y], "value": None})


# Asking.


def test_a_sentence_gets_a_decision_and_an_overlay(page, opened):
    updates = page.segment(opened, QUERY, None)
    assert "<strong>amodal</strong>" in updates["decision"]
    assert "probability of amodal 0.8" in updates["decision"]
    assert updates["mask_type"]["value"] == "amodal"
    picture = updates["stage"]["value"]
    assert picture.shape == (PREVIEW_SIDE, PREVIEW_SIDE // 2, 3)
    assert not np.array_equal(picture, opened.photo.preview)

    # A visitor may know better, and the outline follows.
    corrected = page.choose_type(updates["session"], "modal")
    assert "<strong>modal</strong>" in corrected["decision"]
    assert corrected["session"].answer.mask_type == "modal"
    assert not np.array_equal(corrected["stage"]["value"], picture)


def test_the_masks_of_an_answer_are_a_zip(page, opened):
    answered = page.segment(opened, QUERY, None)["session"]
    archive = page.save_masks(answered)["masks"]["value"]
    with zipfile.ZipFile(archive) as files:
        assert sorted(files.namelist()) == sorted(FILES)
        record = json.loads(files.read("prediction.json"))
    assert record["query"] == QUERY and record["size"] == list(SIZE)
    np.testing.assert_array_equal(
        masks.decode(record["amodal"]), masks.decode(answered.answer.complete)
    )


def test_a_sentence_that_comes_before_its_photo_is_answered(page, photo):
    waiting = page.segment(Session(), QUERY, None)["session"]
    assert waiting.answer is None
    opened = page.open_photo(waiting, str(photo))["session"]
    answered = page.answer_waiting(opened, QUERY)["session"]
    assert answered.answer.text == QUERY

    # It is answered once: the next photo waits for a sentence.
    again = page.open_photo(answered, str(photo))["session"]
    assert again.answer is None and page.answer_waiting(again, QUERY) == {}


def test_the_decision_escapes_words_and_says_what_is_not_there(page, opened):
    long = "the red mug " * 8 + "<b>unread</b> words"
    updates = page.segment(opened, long, None)
    assert "not read" in updates["decision"] and "&lt;b&gt;" in updates["decision"]
    assert "<b>unread" not in updates["decision"]
    nothing = masks.encode(np.zeros(SIZE, bool))
    absent = replace(updates["session"].answer, visible=nothing, complete=nothing)
    unsure = replace(updates["session"].answer, score=0.2)
    unsure_session = replace(updates["session"], answer=unsure)
    assert "unsure" in page.render(unsure_session)["decision"]
    assert "unsure" not in updates["decision"]
    absent_session = replace(updates["session"], answer=absent)
    assert "nothing of the kind" in page.render(absent_session)["decision"]


@pytest.mark.parametrize(
    ("query", "word"),
    [(" ", "query is empty"), (None, "query is empty"), ("mug " * 40_000, "too long")],
)
def test_a_sentence_that_cannot_be_used_is_refused_on_the_page(query, word, page, opened):
    with pytest.raises(gr.Error, match=word):
        page.segment(opened, query, None)
    assert page.segment(opened, QUERY, None)["session"].answer  # the page goes on


@pytest.mark.parametrize("content", [None, b"no image"])
def test_a_photo_that_cannot_be_used_is_refused_on_the_page(content, page, tmp_path):
    path = tmp_path / "bad.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(gr.Error) as error:
        page.open_photo(Session(), str(path))
    assert str(tmp_path) not in str(error.value)


def test_a_photo_without_its_upload_can_still_be_asked_about(page, photo, tmp_path):
    upload = tmp_path / "upload.png"
    upload.write_bytes(photo.read_bytes())
    opened = page.open_photo(Session(), str(upload))["session"]
    upload.unlink()  # as gradio does after an hour
    assert page.segment(opened, QUERY, None)["session"].answer


def test_a_full_disk_is_said_on_the_page(page, opened, photo, tmp_path):
    answered = page.segment(opened, QUERY, None)["session"]
    page.folder = tmp_path / "file"
    page.folder.write_text("no folder")
    kept = page.add(answered, "mug", None)["session"]
    for action in (
        lambda: page.save_masks(answered),
        lambda: page.save(kept),
        lambda: page.open_photo(Session(), str(photo)),
    ):
        with pytest.raises(gr.Error) as error:
            action()
        assert str(tmp_path) not in str(error.value)


# Clicks.


def test_a_click_takes_the_instance_under_it_and_completes_it(completing, opened):
    # The stub finds one square in the upper left; see `StubPredictor`.
    words_alone = completing.segment(opened, QUERY, None)["session"].answer
    clicked = completing.click(opened, QUERY, None, at(40, 80))["session"]
    assert clicked.answer.visible == words_alone.visible
    (complete,) = completing.predictor.complete(
        [masks.decode(words_alone.visible)], image=completing.encode(opened.photo.path)
    )
    assert clicked.answer.complete == masks.encode(complete)
    assert clicked.answer.complete != words_alone.complete

    with pytest.raises(gr.Error, match="the click is on nothing"):
        completing.click(opened, QUERY, None, at(470, 950))


def test_without_a_completer_a_click_takes_the_masks_that_were_found(page, opened):
    answer = page.click(opened, QUERY, None, at(40, 80))["session"].answer
    assert answer.complete == page.segment(opened, QUERY, None)["session"].answer.complete
    assert answer.num_instances == 1 and 0 < answer.score <= 1


def test_a_click_before_the_sentence_is_kept_and_shown_until_it_is_cleared(page, opened):
    updates = page.click(opened, " ", None, at(40, 80))
    assert updates["session"].answer is None and updates["clear"]["visible"]
    assert not updates["click_kind"]["visible"]  # this model reads no clicks
    assert not np.array_equal(updates["stage"]["value"], opened.photo.preview)
    with pytest.raises(gr.Error, match="the click is on nothing"):
        far = page.click(opened, "", None, at(470, 950))["session"]
        page.segment(far, QUERY, None)
    cleared = page.clear_clicks(far)
    assert np.array_equal(cleared["stage"]["value"], opened.photo.preview)
    assert page.segment(cleared["session"], QUERY, None)["session"].answer


@pytest.fixture
def prompted(page, monkeypatch) -> PageActions:
    """A page whose model reads boxes and clicks, and calls of whose `predict` are in `calls`."""
    predict = page.predictor.predict
    monkeypatch.setattr(type(page.predictor), "has_prompts", True)
    page.calls = []

    def recorded(queries, *, boxes=None, points=None, **options):
        page.calls.append((queries, boxes, points))
        return predict([query or "mug" for query in queries], **options)

    monkeypatch.setattr(page.predictor, "predict", recorded)
    return page


def test_clicks_go_to_a_model_that_reads_them_with_or_without_words(prompted, opened):
    scale = HEIGHT / PREVIEW_SIDE
    first = prompted.click(opened, "", "on", at(40, 80))["session"]
    second = prompted.click(first, QUERY, "beside", at(100, 80))["session"]
    (_, _, points), (queries, boxes, both) = prompted.calls
    assert points == [[(40.5 * scale, 80.5 * scale, True)]]
    assert queries == [QUERY] and boxes == [None]
    assert both == [[*points[0], (100.5 * scale, 80.5 * scale, False)]]
    assert second.answer.text == QUERY

    # Another sentence is about the same clicks, until they are cleared.
    prompted.segment(second, MODAL, None)
    prompted.segment(prompted.clear_clicks(second)["session"], MODAL, None)
    assert [call[2] for call in prompted.calls[2:]] == [both, None]


def test_a_click_beside_the_object_waits_for_one_on_it(prompted, opened):
    beside = prompted.click(opened, QUERY, "beside", at(100, 80))
    assert prompted.calls == [] and beside["session"].answer is None
    assert not np.array_equal(beside["stage"]["value"], opened.photo.preview)  # it is shown
    answered = prompted.click(beside["session"], QUERY, "on", at(40, 80))["session"]
    assert answered.answer and len(prompted.calls[0][2][0]) == 2


def test_two_corners_are_a_box(prompted, opened):
    scale = HEIGHT / PREVIEW_SIDE
    corner = prompted.click(opened, QUERY, "corner", at(100, 80))
    assert prompted.calls == [] and corner["session"].answer is None
    boxed = prompted.click(corner["session"], QUERY, "corner", at(40, 200))["session"]
    box = (40.5 * scale, 80.5 * scale, 100.5 * scale, 200.5 * scale)
    assert prompted.calls == [([QUERY], [box], [None])]
    # A third one begins another box.
    third = prompted.click(boxed, QUERY, "corner", at(300, 300))["session"]
    assert third.box is None and len(prompted.calls) == 1
    # The picture shows the box.
    pictures = [prompted.render(session)["stage"]["value"] for session in (boxed, third)]
    assert not np.array_equal(*pictures)


def test_what_is_outlined_is_completed_and_not_called_given(completing, opened):
    completing.predictor.outliner = StubOutliner()
    clicked = completing.click(opened, MODAL, "on", at(100, 200))
    answer = clicked["session"].answer
    scale = HEIGHT / PREVIEW_SIDE
    x, y = round(100.5 * scale), round(200.5 * scale)
    outlined = rectangle(x - 20, y - 20, x + 20, y + 20)
    np.testing.assert_array_equal(masks.decode(answer.visible), outlined)
    assert answer.score == StubOutliner.predicted_iou and "predicted IoU 0.6" in clicked["decision"]

    # No IoU of the completed mask is predicted.
    whole = completing.segment(clicked["session"], QUERY, None)
    (complete,) = completing.predictor.complete(
        [outlined], image=completing.encode(opened.photo.path)
    )
    assert whole["session"].answer.complete == masks.encode(complete)
    assert whole["session"].answer.score is None and "given" not in whole["decision"]


def test_an_answer_without_a_sentence_is_no_annotation(prompted, opened):
    answered = prompted.click(opened, "", "on", at(40, 80))["session"]
    session = replace(answered, answer=replace(answered.answer, text=""))
    with pytest.raises(gr.Error, match="no sentence"):
        prompted.add(session, "mug", None)


# Brushes.


def test_a_brushed_mask_is_completed(completing, opened):
    begun = completing.brush_visible(opened)
    assert begun["canvas"]["visible"] and not begun["stage"]["visible"]
    assert begun["canvas"]["value"]["layers"][0].any() == False  # noqa: E712
    with pytest.raises(gr.Error, match="nothing is brushed"):
        completing.segment(begun["session"], MODAL, None)

    height, width = opened.photo.preview.shape[:2]
    painted = rectangle(100, 200, 300, 400, (height, width))
    updates = completing.segment(begun["session"], MODAL, layers(painted))
    answer = updates["session"].answer
    np.testing.assert_array_equal(shrink(masks.decode(answer.visible), opened.photo), painted)
    assert answer.hidden().any() and answer.mask_type == "modal" and answer.score is None
    assert updates["stage"]["visible"] and not updates["canvas"]["visible"]

    # The next brush begins with it. Without a stroke it is the same to the pixel.
    again = completing.brush_visible(updates["session"])["session"]
    assert completing.segment(again, QUERY, None)["session"].answer.visible == answer.visible


def test_objects_that_are_annotated_already_are_neighbours(completing, opened, tmp_path):
    mug = rectangle(100, 200, 300, 400)
    book = rectangle(100, 400, 300, 600)
    answers = []
    session = opened
    for mask in (mug, book):
        file = tmp_path / "mask.png"
        Image.fromarray(mask).save(file)
        session = completing.brush_file(session, str(file))["session"]
        session = completing.segment(session, QUERY, None)["session"]
        answers.append(session.answer)
        session = completing.add(session, "", None)["session"]

    image = completing.encode(opened.photo.path)
    (alone,) = completing.predictor.complete([mug], image=image)
    _, beside = completing.predictor.complete([mug, book], image=image)
    assert [answer.complete for answer in answers] == [masks.encode(alone), masks.encode(beside)]
    assert masks.encode(beside) != masks.encode(
        completing.predictor.complete([book], image=image)[0]
    )
    assert replace(session, annotations=()).neighbours_of(mug) is None


def test_an_uploaded_mask_is_completed_as_it_is(completing, opened, tmp_path):
    mask = rectangle(101, 203, 305, 407)
    file = tmp_path / "mask.png"
    Image.fromarray(mask).save(file)
    begun = completing.brush_file(opened, str(file))["session"]
    untouched = layers(shrink(mask, opened.photo))
    answer = completing.segment(begun, QUERY, untouched)["session"].answer
    np.testing.assert_array_equal(masks.decode(answer.visible), mask)

    Image.fromarray(mask[:100]).save(file)
    with pytest.raises(gr.Error, match="size") as error:
        completing.brush_file(opened, str(file))
    assert str(tmp_path) not in str(error.value)


def test_a_model_without_a_completer_offers_no_brush_for_the_visible_part(page, completing, opened):
    assert page.render(opened)["brush_visible"]["visible"]
    page.predictor.completer = None
    updates = page.render(opened)
    assert not updates["brush_visible"]["visible"] and not updates["brush_file"]["visible"]
    # The hidden part of what the model finds can be corrected all the same.
    assert page.segment(opened, QUERY, None)["brush_hidden"]["visible"]


def test_the_hidden_part_changes_where_it_is_brushed_and_nowhere_else(page, opened):
    answered = page.segment(opened, QUERY, None)["session"]
    before = answered.answer
    begun = page.brush_hidden(answered)
    layer = begun["canvas"]["value"]["layers"][0]
    assert np.array_equal(layer[..., 3] > 0, shrink(before.hidden(), opened.photo))
    assert page.finish_brush(begun["session"], None)["session"].answer == before
    assert page.finish_brush(begun["session"], {"layers": [layer]})["session"].answer == before

    # A stroke beside the object, and one over its visible part, which stays.
    layer[900:940, 400:440, 3] = 140
    layer[:20, :20, 3] = 140
    finished = page.finish_brush(begun["session"], {"layers": [layer]})["session"]
    after = finished.answer
    added = masks.decode(after.complete) & ~masks.decode(before.complete)
    np.testing.assert_array_equal(added, rectangle(500, 1125, 550, 1175))
    assert after.visible == before.visible and after.score is None
    assert not finished.is_brushing

    # Another sentence about the same object does not undo it.
    assert page.segment(finished, MODAL, None)["session"].answer.complete == after.complete

    # The eraser takes the hidden part away, and never the visible one.
    begun = page.brush_hidden(finished)["session"]
    erased = page.finish_brush(begun, layers(np.zeros(layer.shape[:2], bool)))["session"].answer
    assert erased.complete == erased.visible == before.visible

    assert page.cancel_brush(begun)["session"].answer == after


def test_a_layer_of_another_resolution_is_read(page, opened):
    session = page.brush_hidden(page.segment(opened, QUERY, None)["session"])["session"]
    height, width = opened.photo.preview.shape[:2]
    large = draw_layer(rectangle(0, 0, 2 * width, 2 * height, (2 * height, 2 * width)), (1, 2, 3))
    answer = page.finish_brush(session, {"layers": [large]})["session"].answer
    assert masks.decode(answer.complete).all()


# Annotations.


def test_annotations_are_saved_as_a_data_set(page, opened, photo, tmp_path):
    answered = page.segment(opened, QUERY, None)["session"]
    # The brush is still open: what was painted is taken over.
    begun = page.brush_hidden(answered)
    layer = begun["canvas"]["value"]["layers"][0]
    layer[900:940, 400:440, 3] = 140
    added = page.add(begun["session"], " mug ", {"layers": [layer]})
    assert added["category"] == "" and len(added["kept"]["choices"]) == 1
    second = page.segment(added["session"], MODAL, None)["session"]
    third = page.segment(page.add(second, "", None)["session"], "a cup", None)["session"]
    kept = page.remove(page.add(third, "", None)["session"], 2)
    assert len(kept["kept"]["choices"]) == 2

    saved = page.save(kept["session"])
    assert "json:my/annotations.json" in saved["saved"]
    with zipfile.ZipFile(saved["dataset"]["value"]) as files:
        files.extractall(tmp_path / "my")
    (sample,) = load_json_split(tmp_path / "my" / "annotations.json", "all")
    assert [query.text for query in sample.queries] == [QUERY, MODAL]
    assert sample.file_name == photo.name
    (instance,) = sample.instances  # both sentences are about it
    # What was brushed for the first sentence holds for the second one, too.
    stroke = rectangle(500, 1125, 550, 1175)
    expected = masks.decode(answered.answer.complete) | stroke
    np.testing.assert_array_equal(instance.amodal, expected)


def test_there_is_nothing_to_add_without_an_answer(page, opened):
    with pytest.raises(gr.Error, match="no answer"):
        page.add(opened, "mug", None)
    with pytest.raises(gr.Error, match="no annotations"):
        page.save(opened)
    answered = page.segment(opened, QUERY, None)["session"]
    with pytest.raises(gr.Error, match="class"):
        page.add(answered, "\ud800", None)


def test_annotations_of_an_earlier_photo_stay(page, opened, photo, tmp_path):
    kept = page.add(page.segment(opened, QUERY, None)["session"], "", None)["session"]
    other = tmp_path / "other.png"
    Image.fromarray(255 - np.asarray(Image.open(photo))).save(other)
    session = page.open_photo(page.close_photo(kept)["session"], str(other))["session"]
    assert session.answer is None and session.annotations == kept.annotations
    both = page.add(page.segment(session, QUERY, None)["session"], "", None)["session"]
    with zipfile.ZipFile(page.save(both)["dataset"]["value"]) as files:
        assert {"images/photo.png", "images/other.png"} < set(files.namelist())

    page_actions.delete_photos(both)
    assert not both.folder.exists()


def test_requests_without_values_change_nothing(page, opened):
    assert page.open_photo(opened, None)["session"] == opened
    for action in (page.brush_visible, page.brush_hidden, page.empty_canvas):
        assert action(Session())["session"] == Session()
    assert page.choose_type(opened, "modal")["session"] == opened
    assert page.save_masks(opened) == {}


def test_old_downloads_are_removed(page, opened, monkeypatch):
    answered = page.segment(opened, QUERY, None)["session"]
    first = Path(page.save_masks(answered)["masks"]["value"])
    later = time.time() + page_actions.KEEP_SECONDS + 10
    monkeypatch.setattr(page_actions.time, "time", lambda: later)
    assert Path(page.save_masks(answered)["masks"]["value"]).exists() and not first.exists()


# Over HTTP.


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The page's address; uploads are limited to 1 MB."""
    folder = tmp_path_factory.mktemp("served")
    patch = pytest.MonkeyPatch()
    patch.setenv("GRADIO_TEMP_DIR", str(folder))
    page = web_page.launch(StubPredictor(), folder, host="127.0.0.1", port=0, max_upload_mb=1)
    yield f"http://127.0.0.1:{page.server_port}"
    page.close()
    patch.undo()


def request(url: str, data: bytes | None = None, headers: dict | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers or {}), timeout=30
        ) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")


def upload(server: str, content: bytes) -> tuple[int, str]:
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    return request(f"{server}/gradio_api/upload", head + content + b"\r\n--x--\r\n", headers)


def test_the_page_is_served_and_offers_no_api(server):
    status, text = request(server)
    assert status == 200 and web_page.TITLE in text
    assert "fonts.googleapis" not in text
    info = json.loads(request(f"{server}/gradio_api/info")[1])
    assert info["named_endpoints"] == {} and info["unnamed_endpoints"] == {}


def test_only_uploads_are_served_and_large_ones_are_refused(server, tmp_path):
    status, answer = upload(server, b"mine")
    (path,) = json.loads(answer)
    assert status == 200 and request(f"{server}/gradio_api/file={path}") == (200, "mine")
    for file in (Path(__file__), tmp_path, "/etc/passwd", "pyproject.toml"):
        assert request(f"{server}/gradio_api/file={file}")[0] in (403, 404)
    assert upload(server, b"x" * (1 << 21))[0] == 413


# Refusals of the command.


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--max-upload-mb", "0"], "--max-upload-mb"),
        (["--port", "70000"], "--port"),
        ([], "no such run folder"),
    ],
)
def test_refusals(arguments, word, tmp_path, refused, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    arguments = ["--port", "0", *arguments]  # the default may be in use
    assert word in refused(demo.main, tmp_path / "nowhere", *arguments)


def test_a_port_in_use_is_refused_before_the_model_is_loaded(refused, monkeypatch):
    monkeypatch.setattr(demo, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"--port {port}" in refused(demo.main, "RUN", "--port", port)
    assert "--host" in refused(demo.main, "RUN", "--host", "no.such.host.invalid")


def test_a_head_that_reads_no_sentence_is_refused(tmp_path, refused, monkeypatch):
    stub = StubPredictor()
    stub.config = replace(stub.config, head="oracle")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    run = type("Run", (), {"predictor": stub})()
    monkeypatch.setattr(demo, "load", lambda name, checkpoint: run)
    assert "oracle" in refused(demo.main, "RUN", "--port", "0")


def test_without_gradio_the_remedy_is_named(tmp_path, refused, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "r2sm_jax.inference.web_page", None)
    assert "r2sm_jax[demo]" in refused(demo.main, tmp_path, "--port", "0")
