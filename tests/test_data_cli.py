"""The `data` commands: from annotation files to dataset files, sheets and TFDS; what they
refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from r2sm_jax.data.__main__ import main
from r2sm_jax.data.dataset import read_json

FILES = Path(__file__).parent / "files" / "readers"
EMPTY = {"images": [], "annotations": [], "categories": [], "queries": []}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def save_cocoa(folder: Path, name: str = "one", image_id: int = 3) -> Path:
    """A file of original COCOA, beside its photo."""
    content = json.loads((FILES / "cocoa" / "a.json").read_text())
    path = write(folder / f"{name}.json", content | {"image_id": image_id})
    Image.new("RGB", (60, 40), "teal").save(path.with_suffix(".jpg"))
    return path


def test_convert_then_show(tmp_path, command):
    save_cocoa(tmp_path / "photos", "a")
    save_cocoa(tmp_path / "photos", "b", image_id=4)
    out = tmp_path / "all.json"
    end = command(main, "convert", "cocoa", tmp_path / "photos", "--out", out, "--queries", 5)
    assert (end.code, end.err) == (0, "")
    assert "2 images, 6 annotations, 3 categories, 10 queries (" in end.out
    dataset = read_json(out)
    assert [sample.file_name for sample in dataset] == ["photos/a.jpg", "photos/b.jpg"]
    assert [q.id for sample in dataset for q in sample.queries] == list(range(1, 11))

    sheet = tmp_path / "s" / "sheet.png"
    end = command(main, "show", "--data", f"json:{out}", "--split", "all", "--out", sheet)
    assert end.code == 0 and "2 of the 2 pictures of the split all" in end.out
    with Image.open(sheet) as image:
        assert min(image.size) > 300


def test_images_in_other_folders(tmp_path, command, refused):
    save_cocoa(tmp_path / "a")
    save_cocoa(tmp_path / "b", image_id=4)
    sources = tmp_path / "a", tmp_path / "b"
    names = ["a/one.jpg", "b/one.jpg"]
    below, elsewhere = tmp_path / "all.json", tmp_path / "data" / "all.json"

    end = command(main, "convert", "cocoa", *sources, "--out", below)
    assert end.code == 0 and "--data.images" not in end.out
    assert [sample.file_name for sample in read_json(below)] == names

    end = command(main, "convert", "cocoa", *sources, "--out", elsewhere)
    assert end.code == 0 and f"--data.images {tmp_path} " in end.out
    assert [sample.file_name for sample in read_json(elsewhere, tmp_path)] == names
    show = "show", "--data", f"json:{elsewhere}", "--out", tmp_path / "x.png"
    assert "--data.images" in refused(main, *show)
    assert command(main, *show, "--images", tmp_path).code == 0


def test_plain_masks_get_modal_queries_and_pass_the_check(tmp_path, command, refused):
    shutil.copy(FILES / "coco.json", tmp_path)
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg")
    path, out = tmp_path / "coco.json", tmp_path / "out.json"
    assert "convert coco" in refused(main, "show", "--data", f"json:{path}", "--out", "x.png")
    end = command(main, "convert", "coco", path, "--out", out)
    assert end.code == 0 and f"compose:{path}" in end.out and "data complete" in end.out
    assert "1 of 3 objects are ignored" in end.err
    (sample,) = read_json(out)
    assert {query.mask_type for query in sample.queries} == {"modal"}
    end = command(main, "check", out)
    assert end.code == 0 and "nothing wrong" in end.out


def test_template_queries_and_counts_of_a_file(tmp_path, command):
    path = save_cocoa(tmp_path)
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    command(main, "convert", "cocoa", path, "--out", first, "--queries", 0)
    end = command(main, "queries", "template", first, "--out", second, "--queries", 4)
    assert end.code == 0
    end = command(main, "stats", f"json:{second}", "--json")
    assert json.loads(end.out)["splits"]["all"]["all_queries"] == 4


def test_a_failed_build_begins_anew(tmp_path, command, refused):
    save_cocoa(tmp_path / "a")
    folder, image = tmp_path / "data", tmp_path / "a" / "one.jpg"
    command(main, "convert", "cocoa", tmp_path / "a", "--out", folder / "val.json")
    build = "build", f"json:{folder}", "--images", tmp_path / "a", "--out", tmp_path / "out"
    content = image.read_bytes()
    image.write_bytes(content[:200])
    assert "one.jpg" in command(main, *build).err
    image.write_bytes(content)
    end = command(main, *build)
    assert end.code == 0 and "1 images in val" in end.out
    assert "data set already" in refused(main, *build)
    write(folder / "test.json", EMPTY)
    assert "split test" in refused(main, *build[:-1], tmp_path / "other")


REFUSALS = [
    ("convert cocoa --out x.json", "nothing to read"),
    ("convert cocoa nowhere --out x.json", "nowhere"),
    ("convert cocoa photos --out x.json --queries -1", "--queries"),
    ("convert cocoa photos --out mine.json", "--overwrite"),
    ("convert cocoa photos --out x.json --max-bad 2", "--max-bad"),
    ("convert cocoa empty --out x.json", "no annotated images"),
    ("convert cocoa broken.json --out x.json", "not JSON"),
    ("convert cocoa noid.json --out x.json", "'image_id' is missing"),
    ("convert mmr mine.json --out x.json", "mine.json"),
    ("show --data scenes --out x.pdf", ".png"),
    ("show --data scenes --out x.png --count 0", "--count"),
    ("show --data scenes --out mine.png", "--overwrite"),
    ("show --data pigeons --out x.png", "pigeons"),
    ("show --data json:photos --out x.png", "no train.json"),
    ("show --data json:photos/one.json --out x.png", "no dataset file: it has image_id"),
    ("show --data json:wide.json --out x.png", "61"),
    ("build scenes --out out", "json:FILE"),
    ("build json:empty --out out", "no .json file"),
    ("check nowhere.json", "nowhere.json"),
]


@pytest.mark.parametrize(("line", "word"), REFUSALS)
def test_refusals(line, word, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_cocoa(Path("photos"))
    write(Path("noid.json"), {"regions": []})
    image = {"id": 3, "file_name": "photos/one.jpg", "height": 40, "width": 61}
    write(Path("wide.json"), EMPTY | {"images": [image]})
    Path("broken.json").write_text("{")
    Path("empty").mkdir()
    for name in ("mine.json", "mine.png"):
        Path(name).write_text("mine")
    assert word in refused(main, *line.split())
    assert not any(Path(name).exists() for name in ("x.json", "x.png"))
    assert Path("mine.json").read_text() == Path("mine.png").read_text() == "mine"
