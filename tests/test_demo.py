"""The web page: what its controls do, and the page over HTTP. A stub stands for the model."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from stub_predictor import StubCompleter, StubOutliner, StubPredictor

from r2sm_jax import demo
from r2sm_jax.data import masks
from r2sm_jax.demo import BESIDE, CORNER, ON, Page
from r2sm_jax.errors import InputError
from r2sm_jax.inference.parts import Parts

QUERY = "the complete shape of the red mug"
SIZE = HEIGHT, WIDTH = 3000, 1500


@pytest.fixture
def page(tmp_path) -> Page:
    predictor = StubPredictor()
    predictor.parts = Parts(outliner=StubOutliner())
    return Page(predictor, tmp_path)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


def masks_of(path: str) -> dict[str, np.ndarray]:
    values = json.loads(Path(path).read_text())
    return {name: masks.decode(values[name]) for name in ("mask", "modal", "amodal")}


def test_a_sentence_gets_masks_words_and_files(page, file):
    photo, picture = page.open_photo(file)
    assert picture is not None and picture.shape == (2000, 1000, 3)
    picture, words, png, path = page.answer(photo, QUERY, "auto", None)
    assert picture.shape == (2000, 1000, 3) and "amodal" in words and QUERY in words
    found = masks_of(path)
    np.testing.assert_array_equal(found["mask"], found["amodal"])
    np.testing.assert_array_equal(np.asarray(Image.open(png)) > 0, found["mask"])
    *_, forced = page.answer(photo, QUERY, "modal", None)
    np.testing.assert_array_equal(masks_of(forced)["mask"], found["modal"])


def test_clicks_and_corners_are_places_of_the_photo(page, file, monkeypatch):
    photo, _ = page.open_photo(file)
    asked = {}
    predict = page.predictor.predict

    def record(*arguments, **prompts):
        asked.update(prompts)
        return predict(*arguments, **prompts)

    monkeypatch.setattr(page.predictor, "predict", record)
    page.predictor.parts = page.predictor.parts._replace(completer=StubCompleter())
    for place, kind in [((100, 200), ON), ((10, 20), BESIDE)]:
        photo, _ = page.add_click(photo, kind, place)
    page.answer(photo, "", "auto", None)
    assert asked["points"] == [[(150, 300, True), (15, 30, False)]] and asked["boxes"] == [None]

    photo, _ = page.clear_clicks(photo)
    for place in [(1, 1), (900, 900), (400, 600), (200, 100)]:  # the third begins another box
        photo, picture = page.add_click(photo, CORNER, place)
    *_, path = page.answer(photo, "", "auto", None)
    assert asked["boxes"] == [(300, 150, 600, 900)] and asked["points"] == [[]]
    assert masks_of(path)["modal"].sum() == 300 * 750
    assert picture is not None and (picture[100, 200] == 255).all()


@pytest.mark.parametrize("is_inverted", [False, True])
def test_a_given_mask_is_kept_and_said_to_be_inverted_if_it_seems_so(
    is_inverted, page, file, tmp_path
):
    page.predictor.parts = page.predictor.parts._replace(completer=StubCompleter())
    given = np.full(SIZE, is_inverted)
    given[10:40, 20:60] = not is_inverted
    Image.fromarray(given).save(tmp_path / "mask.png")
    photo, _ = page.open_photo(file)
    _, words, _, path = page.answer(photo, QUERY, "amodal", str(tmp_path / "mask.png"))
    np.testing.assert_array_equal(masks_of(path)["modal"], given)
    assert "predicted IoU 0.90, probability of a hidden part 0.25" in words
    assert ("inverted?" in words) == is_inverted


def test_what_cannot_be_answered_is_told(page, file, tmp_path):
    assert page.open_photo(None) == (None, None) == page.clear_clicks(None)
    with pytest.raises(InputError, match="no photo"):
        page.answer(None, QUERY, "auto", None)
    (tmp_path / "photo.txt").write_text("hello")
    with pytest.raises(InputError, match="cannot be read"):
        page.open_photo(str(tmp_path / "photo.txt"))
    with pytest.raises(InputError, match="empty"):
        page.answer(page.open_photo(file)[0], " ", "auto", None)
    visit, _ = page.add_click(page.open_photo(file)[0], CORNER, (5, 5))
    with pytest.raises(InputError, match="a box has two corners"):
        page.answer(visit, QUERY, "auto", None)


def test_a_photo_of_one_line_is_shown(page, tmp_path):
    Image.new("RGB", (2 * demo.MAX_SIDE + 1, 1)).save(tmp_path / "line.png")
    _, picture = page.open_photo(str(tmp_path / "line.png"))
    assert picture.shape == (1, demo.MAX_SIDE, 3)


def test_many_visitors_keep_their_photos_until_the_file_is_gone(page, tmp_path):
    visits = []
    for number in range(demo.NUM_PHOTOS_IN_MEMORY + 2):
        photo = tmp_path / f"{number}.png"
        Image.new("RGB", (40, 30)).save(photo)
        visits.append(page.open_photo(str(photo))[0])
    assert page._photo.cache_info().currsize == demo.NUM_PHOTOS_IN_MEMORY
    *_, path = page.answer(visits[0], QUERY, "auto", None)
    assert masks_of(path)["mask"].shape == (30, 40)

    Path(visits[1].file).unlink()
    with pytest.raises(InputError, match="no longer here; upload it again"):
        page.answer(visits[1], QUERY, "auto", None)
    with pytest.raises(InputError, match="no longer here"):
        page.add_click(visits[1], ON, (1, 1))


def test_no_message_shows_where_files_lie(page, tmp_path):
    upload = tmp_path / "3a81c0" / "a.jpg"
    upload.parent.mkdir()
    upload.write_text("hello")
    with pytest.raises(InputError) as error:
        page.open_photo(str(upload))
    text = page.hide_folder(str(error.value))
    assert text.startswith("a.jpg: the image cannot be read")
    assert str(tmp_path) not in text and "3a81c0" not in text


@pytest.mark.slow
def test_sigterm_takes_the_photos_away(tiny_run, tmp_path):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
    command = [sys.executable, "-m", "r2sm_jax.demo", str(tiny_run), "--port", "0"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any("Running on local URL" in line for line in process.stdout)
    assert list(tmp_path.glob("r2sm_jax_demo_*"))
    process.terminate()
    process.wait(60)
    assert not list(tmp_path.glob("r2sm_jax_demo_*"))


def test_the_page_is_served(page):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
    blocks = demo.build(page)
    blocks.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    try:
        with urllib.request.urlopen(blocks.local_url) as answer:
            assert demo.TITLE in answer.read().decode()
    finally:
        blocks.close()


def test_a_port_that_is_taken_is_told(refused, tiny_run, page):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
    blocks = demo.build(page)
    blocks.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    try:
        port = blocks.server_port
        assert f"--port {port}" in refused(demo.main, tiny_run, "--port", port)
    finally:
        blocks.close()
