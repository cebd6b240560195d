"""The wheel holds all that is needed: installed alone, it answers without a clone."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]


def pip(*args: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *map(str, args)], check=True)


@pytest.mark.slow
def test_the_wheel_alone_lists_the_commands_and_predicts(tmp_path):
    pip("wheel", ROOT, "--no-deps", "--wheel-dir", tmp_path / "wheel")
    (wheel,) = (tmp_path / "wheel").iterdir()
    listed = subprocess.run(
        ["git", "ls-files", "r2sm_jax"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(listed.stdout.split()) <= set(zipfile.ZipFile(wheel).namelist())

    installed, empty = tmp_path / "installed", tmp_path / "empty"
    pip("install", wheel, "--no-deps", "--target", installed)
    empty.mkdir()
    image = np.full((48, 64, 3), 220, np.uint8)
    image[12:36, 16:40] = (180, 30, 30)
    Image.fromarray(image).save(empty / "photo.png")

    def run(*args: str) -> str:
        end = subprocess.run(
            [sys.executable, *args],
            cwd=empty,
            env=os.environ | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
        )
        assert end.returncode == 0, end.stderr
        return end.stdout

    where = run("-c", "import r2sm_jax; print(r2sm_jax.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    assert "predict" in run("-m", "r2sm_jax")
    assert "amodal" in run("-m", "r2sm_jax.decide", "the whole mug, hidden parts included")
    sentence = "the red box, hidden parts included"
    answer = json.loads(
        run("-m", "r2sm_jax.predict", "photos-small", "photo.png", sentence, "--json")
    )
    assert answer["mask_type"] == "amodal" and answer["size"] == [48, 64]
