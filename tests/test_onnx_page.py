"""The page of an ONNX export reads masks as `predict --mask` does."""

import shutil
import subprocess
from pathlib import Path

import pytest

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
