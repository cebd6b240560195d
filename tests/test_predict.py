"""`predict` for one image: files, JSON, flags and refusals. A stub stands for the model."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from stub_predictor import StubCompleter, StubOutliner, StubPredictor

from r2sm_jax import predict
from r2sm_jax.config import DataConfig
from r2sm_jax.data import masks
from r2sm_jax.inference import load as loading
from r2sm_jax.inference.many import slug
from r2sm_jax.inference.parts import Parts
from r2sm_jax.inference.prediction import FILES, MASKS
from r2sm_jax.predict import main
from r2sm_jax.query import Click, Prompt
from r2sm_jax.sources import open_split

QUERY = "the complete shape of the red mug"
HEIGHT, WIDTH = 90, 70


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("images") / "photo.png"
    image = open_split(DataConfig(), "val", count=1)[0].image[:HEIGHT, :WIDTH]
    Image.fromarray(image).save(path)
    return path


@pytest.fixture(autouse=True)
def stub(monkeypatch) -> StubPredictor:
    stub = StubPredictor()
    monkeypatch.setattr(predict, "load_run", lambda *_, **__: SimpleNamespace(predictor=stub))
    return stub


def read_mask(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_files_hold_the_masks_at_the_original_resolution(photo, tmp_path, command):
    folder = tmp_path / "new" / "folder"
    end = command(main, "RUN", photo, QUERY, "--out", folder)
    assert end.code == 0 and QUERY in end.out and "amodal" in end.out, end
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    pictures = {name: read_mask(folder / f"{name}.png") for name in MASKS}
    for mask in pictures.values():
        assert mask.shape == (HEIGHT, WIDTH) and set(np.unique(mask)) <= {0, 255}
    assert np.array_equal(pictures["modal"] | pictures["occluded"], pictures["amodal"])
    assert not (pictures["modal"] & pictures["occluded"]).any()
    drawn = read_mask(folder / "overlay.png")
    assert drawn.shape == (HEIGHT, WIDTH, 3)
    answer = json.loads((folder / "prediction.json").read_text())
    assert np.array_equal(masks.decode(answer["mask"]), pictures["mask"] > 0)
    assert np.array_equal(pictures["mask"], pictures[answer["mask_type"]])


def test_json_prints_one_object_and_writes_nothing(photo, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = command(main, "RUN", photo, QUERY, "--json")
    assert end.code == 0 and list(tmp_path.iterdir()) == []
    answer = json.loads(end.out)
    keys = "query mask_type amodal_probability target score presence hidden_probability"
    assert list(answer) == [*keys.split(), *MASKS, "instances", "size"]
    assert answer["query"] == QUERY and answer["size"] == [HEIGHT, WIDTH]
    assert answer["mask_type"] == "amodal" and answer["amodal_probability"] > 0.5
    (instance,) = answer["instances"]
    assert list(instance) == ["score", "mask", "modal", "amodal"] and instance["score"] > 0.5


def test_a_probability_within_the_margin_is_undecided(photo, tmp_path, command):
    undecided = json.loads(command(main, "RUN", photo, QUERY, "--json", "--abstain", "0.5").out)
    decided = json.loads(command(main, "RUN", photo, QUERY, "--json", "--abstain", "0").out)
    assert undecided.pop("undecided") is True
    assert undecided == decided
    end = command(main, "RUN", photo, QUERY, "--abstain", "0.5", "--out", tmp_path)
    assert "undecided" in end.out
    flags = "--json", "--abstain", "0.5", "--mask-type", "modal"
    assert "undecided" not in json.loads(command(main, "RUN", photo, QUERY, *flags).out)


def test_of_an_animation_the_first_frame_is_used_with_a_warning(tmp_path, command):
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("white", "red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    end = command(main, "RUN", tmp_path / "a.gif", QUERY, "--json")
    assert end.code == 0 and "a.gif: it has 3 frames" in end.err
    assert json.loads(end.out)["size"] == [30, 40]


@pytest.mark.parametrize("flags", [(), ("--out", "answers")])
def test_every_answer_about_a_photo_has_files_of_its_own(
    flags, photo, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sentences = (QUERY, "the red mug", "the red mug", QUERY)
    for number, sentence in enumerate(sentences, start=1):
        end = command(main, "RUN", photo, sentence, *flags)
        assert end.code == 0, end
        # As many answers as calls: none has replaced another.
        answers = [json.loads(path.read_text()) for path in tmp_path.rglob("prediction.json")]
        assert sorted(answer["query"] for answer in answers) == sorted(sentences[:number])
    folders = [path.parent for path in tmp_path.rglob("prediction.json")]
    assert all({path.name for path in folder.iterdir()} >= set(FILES) for folder in folders)
    assert not flags or all((tmp_path / "answers") in (f, f.parent) for f in folders)


def test_nothing_is_overwritten_unasked(photo, tmp_path, command):
    (tmp_path / "modal.png").write_text("mine")
    assert command(main, "RUN", photo, QUERY, "--out", tmp_path).code == 0
    assert (tmp_path / "modal.png").read_text() == "mine"
    assert not (tmp_path / "mask.png").exists()
    assert command(main, "RUN", photo, QUERY, "--out", tmp_path, "--overwrite").code == 0
    assert read_mask(tmp_path / "modal.png").shape == (HEIGHT, WIDTH)


def test_file_names_of_any_sentence_are_possible():
    sentences = ("../../etc/the mug", "那个杯子 " * 40, "the mug/the cup?", "CON: the \\ mug")
    for sentence in sentences:
        name = slug(sentence)
        assert not set(name) & set("/\\:. ") and 0 < len(name.encode()) < 200


@pytest.fixture
def places(stub, tmp_path, monkeypatch) -> np.ndarray:
    """A mask in files of the folder that the command runs in, for a stub that completes nothing."""
    monkeypatch.chdir(tmp_path)
    stub.parts = Parts(StubCompleter(), StubOutliner())
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[10:40, 10:30] = True
    Image.fromarray(mask).save("mug.png")
    Image.fromarray(mask[:30]).save("small.png")
    Image.fromarray(mask & ~mask).save("empty.png")
    Path("bad.json").write_text(json.dumps([masks.encode(mask), masks.encode(mask[:30])]))
    return mask


@pytest.mark.parametrize(
    "flags",
    [
        ["--mask", "mug.png"],
        ["--box", "10", "10", "30", "40"],
    ],
)
def test_the_object_of_a_mask_or_a_box_is_meant(flags, places, photo, command):
    for query in ([], [QUERY]):
        end = command(main, "RUN", photo, *query, *flags, "--json")
        assert end.code == 0, end.err
        answer = json.loads(end.out)
        assert np.array_equal(masks.decode(answer["modal"]), places)
        assert answer["mask_type"] == ("amodal" if query else "modal")


def test_others_are_the_masks_of_a_picture_or_of_a_file(places, photo, command, stub):
    box = np.zeros_like(places)
    box[20:50, 30:60] = True
    Image.fromarray(places | box).save("others.png")
    Path("polygon.json").write_text(json.dumps([[30, 20, 60, 20, 60, 50, 30, 50]]))
    end = command(main, "RUN", photo, "--mask", "mug.png", "--others", "others.png")
    assert end.code == 0, end.err
    np.testing.assert_array_equal(stub.parts.completer.all_visible, places | box)
    flags = "--box", "10", "10", "30", "40", "--others", "polygon.json", "--overwrite"
    assert command(main, "RUN", photo, *flags).code == 0
    np.testing.assert_array_equal(stub.parts.completer.all_visible, box)


def test_points_say_what_is_meant_and_what_is_not(places, photo, command, stub, monkeypatch):
    seen = []

    draw = StubOutliner.__call__

    def outline(self, image, prompts):
        seen.extend(prompts)
        return draw(self, image, prompts)

    monkeypatch.setattr(StubOutliner, "__call__", outline)
    points = "--point", "40", "30", "--not-point", "9", "9", "--point", "5", "6"
    assert command(main, "RUN", photo, *points).code == 0
    clicks = (Click(40, 30), Click(5, 6), Click(9, 9, False))
    assert seen == [Prompt(None, clicks)] and Path("predictions/photo/prompt/mask.png").exists()


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.png").write_text("hello")
    return folder


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["PHOTO"], "no query"),
        (["PHOTO", ""], "query is empty"),
        (["", QUERY], "IMAGE is empty"),
        (["what is " * 60, QUERY], "too long"),
        (["BAD/missing.png", QUERY], "missing.png"),
        (["BAD/text.png", QUERY], "text.png"),
        (["PHOTO", QUERY, "--out", "BAD/text.png/out"], "text.png"),
        (["PHOTO", QUERY, "--abstain", "0.7"], "abstain 0.7"),
        (["PHOTO", QUERY, "--shard", "1/2"], "--shard"),
        (["PHOTO", QUERY, "--mask", "empty.png"], "it is empty"),
        (["PHOTO", QUERY, "--mask", "small.png"], "small.png"),
        (["PHOTO", QUERY, "--mask", "missing.png"], "missing.png"),
        (["PHOTO", QUERY, "--mask", "mug.png", "--mask", "small.png"], "--mask is given 2 times"),
        (["PHOTO", QUERY, "--others", "mug.png"], "--others are the neighbours"),
        (["PHOTO", QUERY, "--mask", "mug.png", "--others", "bad.json"], "bad.json: mask 2"),
        (["PHOTO", QUERY, "--box", ".1", ".5", ".8", ".95"], "shares"),
        (["PHOTO", QUERY, "--point", "200", "5"], "not in the image"),
    ],
)
def test_refusals(arguments, word, photo, bad_files, places, refused):
    words = [a.replace("PHOTO", str(photo)).replace("BAD", str(bad_files)) for a in arguments]
    assert word in refused(main, "RUN", *words)


def test_the_example_of_the_readme_runs(tiny_run, photo, tmp_path, monkeypatch, capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    program, *_ = re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)
    shutil.copy(photo, tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    program = program.replace("photos-small", str(tiny_run))
    exec(compile(program, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.split()[0] in ("modal", "amodal") for line in lines)


def test_compiled_programs_are_pruned_least_recently_used_first(tmp_path, monkeypatch):
    folder = tmp_path / "compiled"
    folder.mkdir()
    for age in range(6):
        (folder / f"{age}-cache").write_bytes(b"x" * 100)
        os.utime(folder / f"{age}-cache", (1e9 - age, 1e8))  # read, written
    monkeypatch.setattr(loading, "MAX_CACHE_BYTES", 350)
    monkeypatch.setattr(loading, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(type(loading.jax.config), "jax_compilation_cache_dir", None, raising=False)
    monkeypatch.setattr(loading.jax.config, "update", lambda name, value: None)
    loading.enable_compilation_cache()
    assert sorted(path.name for path in folder.iterdir()) == ["0-cache", "1-cache", "2-cache"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_line():
    program = "from r2sm_jax.cli import cli_main; cli_main(lambda: print('masks'))"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 2 and ended.stderr.startswith(b"error: the output: ")
    assert len(ended.stderr.splitlines()) == 1
