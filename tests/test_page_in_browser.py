"""The web page in a real browser: from photos to a data set that is trained on.

Needs Debian's chromium, or Chrome, and playwright (`pip install -e '.[browser]'`).
"""

import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from PIL import Image, ImageDraw
from stub_predictor import StubOutliner, StubPredictor

from r2sm_jax.config import CompleterConfig
from r2sm_jax.data import masks
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.synthetic.sources import load_json_split
from r2sm_jax.tools.data import main as data_main

pytest.importorskip("gradio", reason="the page needs gradio: pip install -e '.[demo]'")
driver = pytest.importorskip(
    "playwright.sync_api", reason="the browser is driven by playwright: pip install -e '.[browser]'"
)
from r2sm_jax.inference import web_page  # noqa: E402

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The brush draws with WebGL, which a machine without a display computes in software.
ARGUMENTS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
PATIENCE = 240_000
"""Milliseconds. Only a page that hangs takes as long."""
WIDTH, HEIGHT = 320, 240
QUERY = "the complete shape of the red mug"


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no browser here: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def predictor() -> StubPredictor:
    """Finds a square in the upper left by words, outlines boxes and clicks, and has an untrained
    completer that adds some pixels."""
    stub = StubPredictor()
    stub.outliner = StubOutliner()
    config = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
    _, weights = nnx.split(make_completer(config, rngs=nnx.Rngs(0)))
    stub.completer = MaskCompleter(config, weights, threshold=-2.0)
    return stub


@pytest.fixture(scope="module")
def address(predictor, tmp_path_factory):
    """Serves the page."""
    folder = tmp_path_factory.mktemp("served")
    patch = pytest.MonkeyPatch()
    patch.setenv("GRADIO_TEMP_DIR", str(folder))
    page = web_page.launch(predictor, folder, host="127.0.0.1", port=0, max_upload_mb=1)
    yield f"http://127.0.0.1:{page.server_port}"
    page.close()
    patch.undo()


@pytest.fixture
def tab(browser, address):
    tab = browser.new_page(viewport={"width": 1280, "height": 1200})
    tab.set_default_timeout(PATIENCE)
    tab.goto(address)
    tab.wait_for_selector("#query textarea")
    yield tab
    tab.close()


@pytest.fixture
def photos(tmp_path) -> list[Path]:
    paths = []
    for number in range(3):
        image = Image.new("RGB", (WIDTH, HEIGHT), (200, 210, 220))
        draw = ImageDraw.Draw(image)
        draw.ellipse((20, 20 + 10 * number, 160, 160), (200, 40, 40))
        draw.rectangle((20, 120, 160, 239), (90, 70, 50))
        paths.append(tmp_path / f"photo{number}.png")
        image.save(paths[-1])
    return paths


def expect(tab, selector: str):
    return driver.expect(tab.locator(selector).first)


def choose(tab, photo: Path) -> None:
    """Uploads a photo in place of the one that is there."""
    if tab.locator("#upload button[aria-label=Clear]").count():
        tab.click("#upload button[aria-label=Clear]")
        expect(tab, "#stage img").to_have_count(0, timeout=PATIENCE)
    tab.set_input_files("#upload input[type=file]", photo)
    expect(tab, "#stage img").to_be_visible(timeout=PATIENCE)


def click_picture(tab, x: float, y: float) -> None:
    """Clicks at a share of the picture's width and height."""
    box = tab.locator("#stage img").bounding_box()
    tab.locator("#stage img").click(position={"x": x * box["width"], "y": y * box["height"]})


def stroke(tab, tool: str, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Paints from one point to another, in shares of the brush's canvas."""
    tab.click(f"#canvas button[title={tool}]")
    box = tab.locator("#canvas canvas").first.bounding_box()

    def move(share: float) -> None:
        x = start[0] + share * (end[0] - start[0])
        y = start[1] + share * (end[1] - start[1])
        tab.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        tab.wait_for_timeout(50)

    move(0)
    tab.mouse.down()
    for step in range(1, 6):
        move(step / 5)
    tab.mouse.up()
    tab.wait_for_timeout(500)


def test_photos_are_annotated_saved_and_trained_on(
    tab, photos, predictor, tmp_path, tiny_config, command
):
    for number, photo in enumerate(photos, start=1):
        choose(tab, photo)
        tab.fill("#query textarea", QUERY if number < 3 else "only the visible part of the mug")
        if number == 2:
            tab.get_by_label("a corner of a box").click()
            click_picture(tab, 0.25, 0.25)
            expect(tab, "#clear").to_be_visible(timeout=PATIENCE)
            click_picture(tab, 0.5, 0.75)
        else:
            tab.get_by_label("on the object").click()
            click_picture(tab, 0.25, 0.5)
        expect(tab, "#decision").to_contain_text("probability of amodal", timeout=PATIENCE)
        if number == 1:
            tab.click("#brush_hidden")
            expect(tab, "#canvas canvas").to_be_visible(timeout=PATIENCE)
            stroke(tab, "Brush", (0.6, 0.85), (0.9, 0.85))
            tab.click("#finish")
            expect(tab, "#decision").to_contain_text("corrected by you", timeout=PATIENCE)
        tab.fill("#category textarea, #category input", "mug")
        tab.click("#add")
        expect(tab, "#kept").to_contain_text(f"{number}. {photo.name}", timeout=PATIENCE)

    tab.click("#save")
    expect(tab, "#dataset").to_be_visible(timeout=PATIENCE)
    with tab.expect_download() as download:
        tab.click("#dataset")
    download.value.save_as(tmp_path / "annotations.zip")
    with zipfile.ZipFile(tmp_path / "annotations.zip") as files:
        files.extractall(tmp_path / "my")

    file = tmp_path / "my" / "annotations.json"
    assert command(data_main, "check", file).code == 0
    samples = {sample.file_name: sample for sample in load_json_split(file, "all")}
    assert samples.keys() == {photo.name for photo in photos}
    types = {name: sample.queries[0].mask_type for name, sample in samples.items()}
    assert types == {"photo0.png": "amodal", "photo1.png": "amodal", "photo2.png": "modal"}
    (boxed,) = samples["photo1.png"].instances
    # A click is true to a pixel of the picture on the screen.
    np.testing.assert_allclose(masks.box(boxed.modal), (80, 60, 160, 180), atol=2)
    (instance,) = samples["photo0.png"].instances
    assert instance.category == "mug"
    np.testing.assert_allclose(masks.box(instance.modal), (60, 100, 100, 140), atol=2)
    # Only the brush has changed what the completer adds: in the lower right.
    (complete,) = predictor.complete([instance.modal], image=samples["photo0.png"].image)
    changed = complete ^ instance.amodal
    assert masks.area(changed) > 100
    x0, y0, _, _ = masks.box(changed)
    assert x0 > WIDTH / 3 and y0 > HEIGHT / 2

    from r2sm_jax.train import train

    data = replace(tiny_config.data, source=f"json:{file}")
    loop = replace(tiny_config.train, steps=10, batch_size=2, evaluate_every=10)
    run = tmp_path / "run"
    train(replace(tiny_config, run=str(run), data=data, train=loop))
    assert "10" in {path.name for path in (run / "checkpoints").iterdir()}
    assert (run / "report.json").exists()


def test_a_brushed_mask_is_completed(tab, photos):
    choose(tab, photos[0])
    tab.click("#brush_visible")
    expect(tab, "#canvas canvas").to_be_visible(timeout=PATIENCE)
    stroke(tab, "Brush", (0.4, 0.5), (0.6, 0.5))
    # A sentence without words is refused, and the stroke stays.
    tab.fill("#query textarea", "-")
    tab.click("#segment")
    expect(tab, "body").to_contain_text("the query is empty", timeout=PATIENCE)
    tab.fill("#query textarea", QUERY)
    tab.press("#query textarea", "Enter")
    expect(tab, "#decision").to_contain_text("given or corrected by you", timeout=PATIENCE)
    expect(tab, "#stage img").to_be_visible(timeout=PATIENCE)


def test_a_sentence_is_answered_that_is_sent_while_the_photo_uploads(tab, photos):
    # The upload waits in the browser until the sentence was sent.
    uploads = []
    tab.route(re.compile(r"/upload\?"), lambda route: uploads.append(route))
    tab.set_input_files("#upload input[type=file]", photos[0])
    tab.fill("#query textarea", QUERY)
    tab.press("#query textarea", "Enter")
    expect(tab, "#decision").to_contain_text("as soon as", timeout=PATIENCE)
    (upload,) = uploads
    upload.continue_()
    expect(tab, "#decision").to_contain_text("probability of amodal", timeout=PATIENCE)
