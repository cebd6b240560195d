"""Models as ONNX files: the programs of scripts/onnx/README.md answer as the package does."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from PIL import Image
from run_files import save_completer
from tiny_crops import COMPLETER, rectangle

from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.inference.decider import load_decider
from r2sm_jax.models.crop_unet import make_completer

ROOT = Path(__file__).parents[1]
SENTENCE = "the whole red mug"
"""That of the program."""


@pytest.mark.slow
def test_the_programs_of_the_documentation_answer_as_the_package(tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("jax2onnx", reason="needs the packages of scripts/onnx/README.md")
    weights = nnx.state(make_completer(COMPLETER, rngs=nnx.Rngs(0)))
    completer = MaskCompleter(COMPLETER, weights, threshold=0.5)
    save_completer(tmp_path / "completer", completer)

    rng = np.random.default_rng(0)
    photo = rng.integers(0, 256, (48, 64, 3), np.uint8)
    visible = rectangle(48, 64, 20, 10, 40, 30)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    Image.fromarray(visible).save(tmp_path / "mask.png")

    monkeypatch.chdir(tmp_path)
    out = Path("onnx/photos-small")
    script = ROOT / "scripts" / "onnx" / "export_onnx.py"
    flags = ["--model", tiny_run, "--out", out, "--completer", "completer"]
    subprocess.run([sys.executable, script, *flags], check=True)
    assert (out / "page.mjs").is_file() and (out / "index.html").is_file()
    assert json.loads((out / "onnx.json").read_text())["crop_size"] == 32

    page = script.with_name("README.md").read_text("utf-8").replace("photo.jpg", "photo.png")
    decide, complete = re.findall(r"```python\n(.*?)```", page, re.S)
    names = {}
    exec(decide, names)
    (logit,) = names["session"].run(["logit"], names["inputs"])
    # The package rounds token states to float16, the files do not.
    ((expected, _),) = load_decider(tiny_run).read([SENTENCE])
    np.testing.assert_allclose(logit, [expected], atol=3e-3)
    exec(complete, names)
    (expected,) = completer.complete(photo, [visible])
    assert (names["complete"] != expected.mask).mean() < 0.001


PAGE = Path(__file__).parents[1] / "scripts/onnx/page"
STUB = Path(__file__).parent / "files/page_stub.mjs"


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page in node")
def test_the_page_reads_masks_as_the_package_does(tmp_path):
    for file in (STUB, *PAGE.glob("*.mjs")):
        shutil.copy(file, tmp_path)
    answer = subprocess.run(
        ["node", STUB.name], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    lines = dict(line.split(": ", 1) for line in answer.stdout.splitlines())
    for name in ("white", "blue", "labels", "transparent", "red beside its photo"):
        assert lines[name] == "80 ", answer
    for name, words in (("black", "black"), ("photo", "neither"), ("inverted", "inverted")):
        assert lines[name].startswith("0 ") and words in lines[name], answer
