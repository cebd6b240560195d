"""The page of `export --onnx`: its parts in Node.js, and as a whole in a browser.

The browser test needs the packages of docs/onnx.md, playwright, chromium, and onnxruntime-web, in
the folder that the variable R2SM_ONNXRUNTIME_WEB names or as a package that npm can get.
"""

import json
import os
import shutil
import subprocess
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from PIL import Image, ImageDraw

from r2sm_jax.config import CompleterConfig
from r2sm_jax.data.crops import CropWindow, cut_crop
from r2sm_jax.data.tokenizer import PROBE, QueryTokenizer
from r2sm_jax.errors import InputError
from r2sm_jax.inference import onnx_convert
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.inference.onnx_export import SETTINGS, export_onnx
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import load_run
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.models.hub import find_model
from r2sm_jax.synthetic.queries.sentences import intent_sentences

PAGE = Path(onnx_convert.__file__).parent / "onnx_page"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
RUNTIME = (
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
)
NPM_PACKAGE = "onnxruntime-web@1.30.0"
PATIENCE = 240_000
"""Milliseconds. Only a page that hangs takes as long."""

HARD_SENTENCES = [
    PROBE,
    "Please, kindly show the mug...",
    "please please",
    "...",
    "naïve CAFÉ Ångström İstanbul ΣΟΦΟΣ ς",
    "東京 mug 日本語, 한국어",
    "a\u200bb\tc\nd\u00a0e \ufffd \x07",
    "$5 + 3 = `x` ^ ~ | <y>",
    "x" * 101,
    "a" * 99,
    "“smart” quotes — dash … ¿qué? ﬁ ½ e\u0301",
    "😀 mug 👍🏽",
    "the mug " * 80,
]


def run_node(tmp_path: Path, program: str, data: object) -> object:
    """What a program in JavaScript returns for `data`; it may import the files of the page."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node.js here")
    (tmp_path / "data.json").write_text(json.dumps(data))
    head = (
        'import { readFileSync } from "node:fs";\n'
        f'import {{ WordPiece }} from "{PAGE.as_uri()}/wordpiece.mjs";\n'
        f'import {{ cutCrop, pasteMask, windowAround }} from "{PAGE.as_uri()}/crops.mjs";\n'
        'const data = JSON.parse(readFileSync("data.json"));\n'
    )
    text = f"{head}function main() {{\n{program}\n}}\nconsole.log(JSON.stringify(main()));\n"
    (tmp_path / "program.mjs").write_text(text)
    ended = subprocess.run(
        [node, "program.mjs"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def check_words(folder: Path, tmp_path: Path) -> None:
    """The page's token ids are those of the package."""
    sentences = [sentence.text for sentence in intent_sentences("val_r2sm")]
    sentences += [sentence.text for sentence in intent_sentences("development")] + HARD_SENTENCES
    expected = QueryTokenizer(folder, vocab_size=10**6, max_tokens=64)(sentences)
    data = {
        "tokenizer": json.loads((folder / "tokenizer.json").read_text("utf-8")),
        "sentences": sentences,
    }
    program = (
        "const words = new WordPiece(data.tokenizer, 64);\n"
        "return data.sentences.map((sentence) => words.encode(sentence));"
    )
    ids = run_node(tmp_path, program, data)
    assert isinstance(ids, list)
    for sentence, one, other in zip(sentences, ids, expected, strict=True):
        assert one == other, sentence


def test_words_become_the_tokens_of_the_package(bert_folder, tmp_path):
    check_words(bert_folder, tmp_path)


@pytest.mark.slow
def test_words_become_the_tokens_of_minilm(tmp_path):
    try:
        folder = find_model("sentence-transformers/all-MiniLM-L6-v2", "--model.text.name")
    except InputError as error:
        pytest.skip(f"MiniLM cannot be had here: {error}")
    check_words(folder, tmp_path)


@pytest.mark.parametrize(
    ("size", "box"),
    [((60, 80), (10, 20, 40, 44)), ((200, 150), (0, 0, 120, 140)), ((40, 40), (18, 18, 20, 21))],
)
def test_crops_are_those_of_the_package(size, box, tmp_path):
    rng = np.random.default_rng(0)
    (height, width), (x0, y0, x1, y1) = size, box
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    mask = np.zeros(size, bool)
    mask[y0:y1, x0:x1] = rng.random((y1 - y0, x1 - x0)) < 0.7
    mask[y0, x0] = mask[y1 - 1, x1 - 1] = True
    logits = rng.normal(size=(32, 32)).astype(np.float32)
    data = {
        "pixels": np.dstack([image, np.full(size, 255, np.uint8)]).ravel().tolist(),
        "mask": mask.astype(int).ravel().tolist(),
        "logits": logits.ravel().tolist(),
    }
    program = (
        f"const [width, height] = [{width}, {height}];\n"
        "const settings = { min_crop_side: 16, crop_extent: 2.2 };\n"
        "const window = windowAround(data.mask, width, height, settings);\n"
        "const crop = cutCrop(data.pixels, data.mask, width, height, window, 32);\n"
        "const logits = Float32Array.from(data.logits);\n"
        "const whole = pasteMask(logits, data.mask, width, height, window, 32, 0);\n"
        "return { window, crop: [...crop], whole: [...whole] };"
    )
    answer = run_node(tmp_path, program, data)
    assert isinstance(answer, dict)
    window = CropWindow.around(mask)
    assert answer["window"] == {"x": window.x, "y": window.y, "side": window.side}
    crop = cut_crop(image, window, 32, (mask, np.zeros_like(mask)))
    # Pillow rounds its weights, so a value may be rounded to the other side.
    difference = np.array(answer["crop"]).reshape(crop.shape) - crop.astype(int)
    assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.02
    complete = mask | (window.paste(logits, height, width, -20.0) > 0)
    assert (np.array(answer["whole"]).reshape(size) != complete).mean() < 0.001


# In a browser.


def get_runtime(folder: Path) -> None:
    """Puts the files of onnxruntime-web into a folder; skips the test where they cannot be had."""
    folder.mkdir()
    given = os.environ.get("R2SM_ONNXRUNTIME_WEB")
    if given:
        for name in RUNTIME:
            shutil.copyfile(Path(given) / name, folder / name)
        return
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("onnxruntime-web cannot be had here: there is no npm")
    ended = subprocess.run(
        [npm, "pack", NPM_PACKAGE], capture_output=True, text=True, cwd=folder, check=False
    )
    if ended.returncode:
        pytest.skip(f"onnxruntime-web cannot be had here: {ended.stderr.strip()[-200:]}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as files:
        for name in RUNTIME:
            content = files.extractfile(f"package/dist/{name}")
            assert content is not None
            (folder / name).write_bytes(content.read())


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format, *args) -> None:
        pass


@pytest.fixture
def browser():
    driver = pytest.importorskip(
        "playwright.sync_api", reason="the browser is driven by playwright"
    )
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no browser here: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def with_both_types(predictor: Predictor, sentences: list[str]) -> Predictor:
    """A predictor whose untrained head finds half of the sentences amodal."""
    logits = predictor.amodal_logits(sentences)
    shift = -np.median(logits) * predictor.calibration.type_temperature
    leaves = []
    for path, leaf in nnx.to_flat_state(predictor.weights):
        if path[0] == "head" and path[-2:] == ("out", "bias"):
            leaf = leaf.replace(leaf[...] + np.float32(shift))
        leaves.append((path, leaf))
    return predictor.updated(weights=nnx.from_flat_state(leaves))


@pytest.mark.slow
def test_the_page_decides_and_completes_as_the_package(browser, tiny_run, tmp_path):
    for name in onnx_convert.PACKAGES:
        pytest.importorskip(name, reason=f"needs {onnx_convert.INSTALL}")
    config = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
    _, weights = nnx.split(make_completer(config, rngs=nnx.Rngs(0)))
    completer = MaskCompleter(config, weights, threshold=-2.0)
    sentences = [sentence.text for sentence in intent_sentences("val_r2sm")][:40]
    run = load_run(tiny_run)
    run = replace(run, predictor=with_both_types(run.predictor, sentences))
    folder = tmp_path / "page"
    export_onnx(run, folder, completer)
    settings = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps(settings | {"decide": "decide.onnx"}))
    get_runtime(folder / "ort")

    photo = Image.new("RGB", (120, 90), (200, 210, 220))
    draw = ImageDraw.Draw(photo)
    draw.ellipse((20, 20, 80, 70), (200, 40, 40))
    photo.save(tmp_path / "photo.png")
    visible = np.zeros((90, 120), bool)
    visible[20:45, 30:70] = True
    Image.fromarray(visible).convert("L").save(tmp_path / "mask.png")
    (complete,) = completer(np.asarray(photo), [visible])
    assert complete.sum() > visible.sum()

    logits = run.predictor.amodal_logits(sentences)
    chosen = [int(np.argmin(logits)), int(np.argmax(logits))]
    assert logits[chosen[0]] < 0 < logits[chosen[1]]

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tab = browser.new_page()
    tab.set_default_timeout(PATIENCE)
    tab.goto(f"http://127.0.0.1:{server.server_port}/")
    tab.wait_for_function("document.getElementById('status').textContent === 'Ready.'")
    tab.set_input_files("#mask", tmp_path / "mask.png")
    tab.wait_for_function("document.getElementById('status').textContent.includes('photo first')")
    tab.set_input_files("#photo", tmp_path / "photo.png")
    tab.wait_for_function("document.getElementById('stage').width === 120")
    tab.set_input_files("#mask", [])
    tab.set_input_files("#mask", tmp_path / "mask.png")
    tab.wait_for_function(
        "document.getElementById('stage').getContext('2d').getImageData(50, 30, 1, 1).data[2] < 60"
    )
    for row in chosen:
        tab.fill("#sentence", sentences[row])
        tab.click("#answer")
        tab.wait_for_selector("#save:not([hidden])")
        tab.wait_for_function("!document.getElementById('answer').disabled")
        text = tab.text_content("#status")
        assert text.startswith("amodal: " if logits[row] > 0 else "modal: ")
        probability = float(text.split("amodal ")[-1].split(")")[0])
        assert probability == pytest.approx(1 / (1 + np.exp(-logits[row])), abs=2e-3)
        with tab.expect_download() as download:
            tab.click("#save")
        download.value.save_as(tmp_path / "answer.png")
        answer = np.asarray(Image.open(tmp_path / "answer.png").convert("L")) > 127
        expected = complete if logits[row] > 0 else visible
        assert (answer != expected).mean() < 0.002

    # A stroke of the brush adds to the mask.
    box = tab.locator("#stage").bounding_box()
    tab.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.8 * box["height"])
    tab.mouse.down()
    tab.mouse.up()
    tab.fill("#sentence", " ?!")
    tab.click("#answer")
    tab.wait_for_function("document.getElementById('status').textContent.includes('no words')")
    tab.fill("#sentence", sentences[chosen[0]])
    tab.click("#answer")
    tab.wait_for_selector("#save:not([hidden])")
    with tab.expect_download() as download:
        tab.click("#save")
    download.value.save_as(tmp_path / "brushed.png")
    brushed = np.asarray(Image.open(tmp_path / "brushed.png").convert("L")) > 127
    assert brushed[72, 96]
    tab.close()
    server.shutdown()
    server.server_close()
