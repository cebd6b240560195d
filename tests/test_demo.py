"""The web page: its functions, and the page over HTTP. A stub stands for the model."""

import json
import sys
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from stub_predictor import StubPredictor

from r2sm_jax import demo
from r2sm_jax.inference.prediction import FILES

gr = pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
from r2sm_jax.inference import web_page  # noqa: E402

QUERY = "the complete shape of the red mug"


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 255, (1200, 600, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def page(tmp_path) -> web_page.Page:
    return web_page.Page(StubPredictor(), tmp_path)


def test_a_sentence_gets_a_decision_an_overlay_and_a_zip(page, photo):
    answer, decision, view, overlay, archive = page.segment(str(photo), QUERY)
    assert "<strong>amodal</strong>" in decision and "probability of amodal 0.8" in decision
    assert view["value"] == "amodal" and view["visible"]
    assert overlay.shape == (web_page.PREVIEW_SIDE, web_page.PREVIEW_SIDE // 2, 3)
    with zipfile.ZipFile(archive) as files:
        assert sorted(files.namelist()) == sorted(FILES)
        record = json.loads(files.read("prediction.json"))
    assert record["query"] == QUERY and record["size"] == [1200, 600]

    views = {view: page.show(answer, view) for view in web_page.VIEWS}
    assert np.array_equal(views["amodal"], overlay)
    assert len({picture.tobytes() for picture in views.values()}) == 3


def test_views_are_painted_in_blue_and_orange():
    grey = np.full((60, 80, 3), 128, np.uint8)
    modal = np.zeros((60, 80), bool)
    modal[:, :40] = True
    amodal = modal.copy()
    amodal[:, 40:60] = True
    answer = web_page.Answer(grey, modal, amodal)

    def colour(view: str, x: int) -> int:
        """Above 0: blue; below: orange; 0: grey."""
        pixel = answer.draw(view)[30, x].astype(int)
        return pixel[2] - pixel[0]

    assert colour("modal", 20) > 10 and colour("modal", 55) == 0
    assert colour("amodal", 20) > 10 and colour("amodal", 50) < -10
    assert colour("occluded", 20) == 0 and colour("occluded", 50) < -10


def test_the_decision_escapes_words_and_names_what_is_missing(page, photo):
    long = "the red mug " * 8 + "<b>unread</b> words"
    decision = page.segment(str(photo), long)[1]
    assert "not read" in decision and "&lt;b&gt;" in decision and "<b>" not in decision
    (prediction,) = page.predictor.predict([QUERY], image=photo)
    nothing = np.zeros_like(prediction.modal)
    absent = replace(prediction, modal=nothing, amodal=nothing)
    assert "nothing of the kind" in web_page.describe(absent)


@pytest.mark.parametrize(
    ("file", "query", "word"),
    [
        (None, QUERY, "no image"),
        ("gone.png", QUERY, "gone"),
        ("bad.png", QUERY, "not an image"),
        ("photo", " ", "query is empty"),
        ("photo", None, "query is empty"),
        ("photo", "mug " * 40_000, "too long"),
    ],
)
def test_what_cannot_be_used_is_said_on_the_page(file, query, word, page, photo, tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    path = str(photo) if file == "photo" else file and str(tmp_path / file)
    with pytest.raises(gr.Error, match=word) as error:
        page.segment(path, query)
    assert str(tmp_path) not in str(error.value)
    assert page.segment(str(photo), QUERY)  # the page goes on


def test_a_full_disk_is_said_on_the_page(page, photo, tmp_path):
    page.folder = tmp_path / "file"
    page.folder.write_text("no folder")
    with pytest.raises(gr.Error, match="cannot be stored") as error:
        page.segment(str(photo), QUERY)
    assert str(tmp_path) not in str(error.value)


def test_requests_without_values_change_nothing(page, photo):
    answer = page.segment(str(photo), QUERY)[0]
    assert page.show(None, "modal") == page.show(answer, None) == gr.skip()


def test_old_answers_are_removed(page, photo, tmp_path, monkeypatch):
    first = Path(page.segment(str(photo), QUERY)[-1])
    later = time.time() + web_page.KEEP_SECONDS + 10
    monkeypatch.setattr(web_page.time, "time", lambda: later)
    assert Path(page.segment(str(photo), QUERY)[-1]).exists() and not first.exists()


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
    assert word in refused(demo.main, tmp_path / "nowhere", *arguments)


def test_a_head_that_reads_no_sentence_is_refused(tmp_path, refused, monkeypatch):
    stub = StubPredictor()
    stub.config = replace(stub.config, head="oracle")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    run = type("Run", (), {"predictor": stub})()
    monkeypatch.setattr(demo, "load", lambda name, checkpoint: run)
    assert "oracle" in refused(demo.main, "RUN")


def test_without_gradio_the_remedy_is_named(tmp_path, refused, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "r2sm_jax.inference.web_page", None)
    assert "r2sm_jax[demo]" in refused(demo.main, tmp_path)
