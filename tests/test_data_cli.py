"""The `data` commands: from annotation files to dataset files, sheets and TFDS; what they
refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from annotation_files import (
    coco,
    instances,
    lisa,
    many,
    mmr,
    photo,
    points,
    reasonseg,
    refs,
    save_cocoa,
    write,
)
from PIL import Image

from r2sm_jax.data.dataset import read_json
from r2sm_jax.tools.data import main

EMPTY = {"images": [], "annotations": [], "categories": [], "queries": []}


def test_convert_then_show(tmp_path, command):
    save_cocoa(tmp_path / "photos", "a.json", "a.jpg")
    save_cocoa(tmp_path / "photos", "b.json", "b.jpg", image_id=4)
    out = tmp_path / "all.json"
    end = command(main, "convert", "cocoa", tmp_path / "photos", "--out", out, "--queries", 5)
    assert (end.code, end.err) == (0, "")
    assert "2 images, 6 annotations, 3 categories, 10 queries (" in end.out
    dataset = read_json(out)
    assert [sample.file_name for sample in dataset] == ["photos/a.jpg", "photos/b.jpg"]
    queries = [query for sample in dataset for query in sample.queries]
    assert [query.id for query in queries] == list(range(1, 11))

    sheet = tmp_path / "s" / "sheet.png"
    end = command(main, "show", "--data", f"json:{out}", "--split", "all", "--out", sheet)
    assert end.code == 0 and "2 samples" in end.out
    with Image.open(sheet) as image:
        assert min(image.size) > 300


def test_a_plain_coco_file_has_one_door_and_the_others_name_it(tmp_path, command, refused):
    photo(tmp_path / "a.jpg")
    path, out = write(tmp_path / "instances.json", instances()), tmp_path / "out.json"
    for wrong in ("cocoa", "cocoa-cls", "d2sa", "kins", "muva"):
        assert "convert coco" in refused(main, "convert", wrong, path, "--out", out), wrong
    assert "convert coco" in refused(main, "show", "--data", f"json:{path}", "--out", "x.png")
    assert not out.exists()

    end = command(main, "convert", "coco", path, "--out", out)
    assert end.code == 0 and f"compose:{path}" in end.out and "data complete" in end.out
    (sample,) = read_json(out)
    assert {query.mask_type for query in sample.queries} == {"modal"}

    # And the other way round: a complete mask is not taken for what is visible.
    both = write(tmp_path / "both.json", coco())
    message = refused(main, "convert", "coco", both, "--out", tmp_path / "other.json")
    assert "cocoa-cls" in message and not (tmp_path / "other.json").exists()
    assert "cocoa-cls" in refused(main, "convert", "cocoa", both, "--out", tmp_path / "other.json")


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


def test_notes_and_bad_records_go_to_stderr(tmp_path, command):
    content = many(403)
    annotations = content["annotations"]
    annotations[10]["segmentation"] = {"size": [20, 30], "counts": "0"}
    annotations[11]["segmentation"] = {"size": [20, 30], "counts": "1"}
    annotations[12]["category_id"] = 999
    annotations[0]["occlude_rate"] = 0.5
    photo(tmp_path / "a.jpg")
    path, out = write(tmp_path / "c.json", content), tmp_path / "out.json"
    end = command(main, "convert", "cocoa-cls", path, "--out", out, "--queries", 0)
    summary, first, second, note, repeated = end.err.splitlines()
    assert "have the mask and the category of another one" in repeated
    assert end.code == 0 and "3 of 404 records cannot be used" in summary
    assert "annotation 108: its segmentation" in first and "and 1 more: " in first
    assert "annotation 110: category_id 999" in second and "occlude_rate 0.500" in note
    assert len(read_json(out)[0].instances) == 400


def test_every_format_gives_a_file_without_problems(tmp_path, command):
    for name in ("a.jpg", "x.jpg", "1.jpg", "train2017/5.jpg"):
        photo(tmp_path / name)
    coco_file = write(tmp_path / "coco.json", coco())
    shape = {"label": "target", "points": points(2, 2, 20, 18)}
    query = {"image_id": 7, "text": "it", "mask_type": "modal", "instance_ids": [31]}
    arguments = {
        "coco": [write(tmp_path / "instances.json", instances())],
        "cocoa-cls": [coco_file],
        "d2sa": [coco_file, "--oversize", "crop"],
        "kins": [coco_file],
        "muva": [coco_file, "--amodal-field", "segmentation"],
        "mmr": [write(tmp_path / "mmr.json", mmr())],
        "reasonseg": [write(tmp_path / "x.json", reasonseg(shape))],
        "lisa++": [write(tmp_path / "lisa.json", [lisa()])],
        "refcoco": [write(tmp_path / "refs.json", refs()), "--instances", coco_file],
        "r2sm": [write(tmp_path / "q.json", [query]), "--over", tmp_path / "cocoa-cls.out.json"],
    }
    for name, words in arguments.items():
        out = tmp_path / f"{name}.out.json"
        end = command(main, "convert", name, *words, "--out", out)
        assert end.code == 0 and "1 images" in end.out and " 0 queries" not in end.out, (name, end)
        end = command(main, "check", out)
        assert end.code == 0 and "nothing wrong" in end.out, (name, end)
    info = json.loads((tmp_path / "r2sm.out.json").read_text())["info"]
    assert info == {"description": "converted from cocoa-cls: coco.json", "queries": "q.json"}


def test_queries_about_ignored_objects_are_noted(tmp_path, command):
    content = coco()
    content["annotations"][0]["iscrowd"] = 1
    over, out = tmp_path / "over.json", tmp_path / "out.json"
    path = write(tmp_path / "c.json", content)
    assert command(main, "convert", "muva", path, "--out", over, "--queries", 0).code == 0
    query = {"image_id": 7, "text": "it", "mask_type": "modal", "instance_ids": [31]}
    queries = write(tmp_path / "q.json", [query])
    end = command(main, "convert", "r2sm", queries, "--over", over, "--out", out)
    assert end.code == 0 and "1 of 1 queries mean ignored objects only" in end.err


def test_template_queries_and_counts_of_a_file(tmp_path, command):
    path = save_cocoa(tmp_path)
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    command(main, "convert", "cocoa", path, "--out", first, "--queries", 0)
    end = command(main, "queries", "template", first, "--out", second, "--queries", 4)
    assert end.code == 0
    end = command(main, "stats", second, "--json")
    assert json.loads(end.out)["total"]["all_queries"] == 4


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
    ("show --data json:photos/one.json --out x.png", "'images'"),
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


@pytest.mark.slow
def test_as_a_module():
    words = ["r2sm_jax.data", "show", "--data", "json:nowhere.json", "--out", "x.png"]
    root = Path(__file__).parents[1]
    end = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, cwd=root, check=False
    )
    assert end.returncode == 2 and end.stderr.startswith("error: ") and "nowhere.json" in end.stderr
