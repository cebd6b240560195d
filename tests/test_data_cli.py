import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from test_cocoa import HEIGHT, WIDTH, annotation, save
from test_readers import BACK, SEEN, coco, mmr, photo, points, refs, write

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.errors import cli_main
from r2sm_jax.tools import convert as conversion, data as cli
from r2sm_jax.tools.convert import write_json


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process; gives exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["r2sm_jax.data", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli_main(cli.main)
        code = exited.value.code
        captured = capsys.readouterr()
        return (0 if code is None else int(code)), captured.out, captured.err

    return run


def failed(result: tuple[int, str, str], *words: str) -> None:
    code, _, stderr = result
    assert code == 2 and "Traceback" not in stderr
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    for word in words:
        assert word in stderr


def test_convert_then_read_then_show(tmp_path, run):
    save(tmp_path / "photos", "a.json", "a.jpg")
    save(tmp_path / "photos", "b.json", "b.jpg", image_id=4)
    code, out, err = run(
        "convert", "cocoa", tmp_path / "photos", "--out", tmp_path / "all.json", "--queries", 5
    )
    assert (code, err) == (0, "") and "2 images, 6 annotations, 3 categories, 10 queries" in out
    dataset = read_json(tmp_path / "all.json")
    assert [sample.file_name for sample in dataset] == ["photos/a.jpg", "photos/b.jpg"]
    queries = [query for sample in dataset for query in sample.queries]
    assert [query.id for query in queries] == list(range(1, 11))
    assert {query.mask_type for query in queries} == {"modal", "amodal"}
    for sample in dataset:
        assert {i for q in sample.queries for i in q.instance_ids} <= {
            i.id for i in sample.instances
        }
    spec = f"json:{tmp_path / 'all.json'}"
    code, out, _ = run(
        "show", "--data", spec, "--split", "all", "--out", tmp_path / "s" / "sheet.png"
    )
    assert code == 0 and "2 samples" in out
    with Image.open(tmp_path / "s" / "sheet.png") as sheet:
        assert min(sheet.size) > 300


def test_queries_depend_on_the_seed_alone(tmp_path, run):
    save(tmp_path)

    def texts(name: str, seed: int) -> list[str]:
        assert (
            run(
                "convert", "cocoa", tmp_path / "one.json", "--out", tmp_path / name, "--seed", seed
            )[0]
            == 0
        )
        return [query.text for query in read_json(tmp_path / name)[0].queries]

    assert texts("1.json", 1) == texts("2.json", 1) != texts("3.json", 2)


def test_images_elsewhere_are_named_for_the_user(tmp_path, run):
    save(tmp_path / "photos")
    out_file = tmp_path / "data" / "all.json"
    code, out, _ = run("convert", "cocoa", tmp_path / "photos", "--out", out_file, "--queries", 0)
    assert code == 0 and f"--data.images {tmp_path / 'photos'}" in out
    assert read_json(out_file, tmp_path / "photos")[0].file_name == "one.jpg"
    failed(
        run("show", "--data", f"json:{out_file}", "--out", tmp_path / "x.png"),
        "one.jpg",
        "--data.images",
    )
    shown = run(
        "show",
        "--data",
        f"json:{out_file}",
        "--images",
        tmp_path / "photos",
        "--out",
        tmp_path / "x.png",
    )
    assert shown[0] == 0


def test_the_same_name_in_two_folders(tmp_path, run):
    save(tmp_path / "a")
    save(tmp_path / "b", image_id=4)
    for out_file, folder in (
        (tmp_path / "data" / "all.json", tmp_path),
        (tmp_path / "all.json", None),
    ):
        code, out, _ = run("convert", "cocoa", tmp_path / "a", tmp_path / "b", "--out", out_file)
        assert code == 0 and (f"--data.images {tmp_path} " in out) == (folder is not None)
        assert [sample.file_name for sample in read_json(out_file, folder)] == [
            "a/one.jpg",
            "b/one.jpg",
        ]


def test_notes_go_to_stderr(tmp_path, run):
    record = annotation()
    record["regions"][0]["occlude_rate"] = 0.5
    save(tmp_path, **record)
    code, _, err = run("convert", "cocoa", tmp_path, "--out", tmp_path / "all.json")
    assert code == 0 and err.startswith("note: ") and "occlude_rate" in err
    # A second time, the folder holds the dataset file itself.
    code, _, err = run("convert", "cocoa", tmp_path, "--out", tmp_path / "all.json", "--overwrite")
    assert code == 0 and "all.json: left out" in err


def test_nothing_is_overwritten_unasked(tmp_path, run):
    save(tmp_path)
    for name in ("keep.json", "keep.png"):
        (tmp_path / name).write_text("mine")
    failed(
        run("convert", "cocoa", tmp_path / "one.json", "--out", tmp_path / "keep.json"),
        "keep.json",
        "--overwrite",
    )
    failed(
        run("show", "--data", "scenes", "--out", tmp_path / "keep.png"), "keep.png", "--overwrite"
    )
    assert {(tmp_path / name).read_text() for name in ("keep.json", "keep.png")} == {"mine"}


def test_bad_arguments(tmp_path, run):
    save(tmp_path)
    out = tmp_path / "x.json"
    failed(run("convert", "cocoa", "--out", out), "nothing to read")
    failed(run("convert", "cocoa", tmp_path / "nothing", "--out", out), "nothing", "check the path")
    failed(run("convert", "cocoa", tmp_path, "--out", out, "--queries", -1), "--queries")
    failed(run("show", "--data", "scenes", "--out", tmp_path / "x.pdf"), ".png")
    failed(run("show", "--data", "scenes", "--out", tmp_path / "x.png", "--count", 0), "--count")
    failed(run("show", "--data", "pigeons", "--out", tmp_path / "x.png"), "pigeons")
    failed(run("show", "--data", f"json:{tmp_path}", "--out", tmp_path / "x.png"), "no train.json")
    failed(
        run("show", "--data", f"json:{tmp_path}/one.json", "--out", tmp_path / "x.png"), "'images'"
    )
    assert not out.exists() and not (tmp_path / "x.png").exists()
    code, _, err = run("show", "--no-such-flag")
    assert code == 2 and "Traceback" not in err


def test_every_format_has_its_command(tmp_path, run):
    """From files of each dialect to a dataset file that has nothing wrong with it."""
    photo(tmp_path / "a.jpg")
    photo(tmp_path / "x.jpg")
    write(tmp_path / "train2017" / "note.json", {})
    photo(tmp_path / "train2017" / "5.jpg")
    coco_file = write(tmp_path / "coco.json", coco())
    kins_file = write(tmp_path / "kins.json", coco())
    shapes = [{"label": "target", "points": points(2, 2, 20, 18)}]
    reason = write(
        tmp_path / "x.json", {"text": ["what can be eaten?"], "is_sentence": True, "shapes": shapes}
    )
    shape = {"label name": "cup", "points": [points(2, 2, 12, 12)]}
    question = {
        "English Question": "Drink?",
        "English Answer": "instance id is 1",
        "ID": ["1"],
        "img_path": "a.jpg",
    }
    lisa = write(tmp_path / "lisa.json", [question | {"points": {"1": shape}}])
    thing = {"name": "book", "visible_mask": masks.encode(SEEN), "amodal_mask": masks.encode(BACK)}
    qa = write(tmp_path / "qa.json", [{"image": "a.jpg", "question": "Which?", "objects": [thing]}])
    commands = {
        "cocoa-cls": [coco_file],
        "d2sa": [coco_file, "--oversize", "crop"],
        "kins": [kins_file],
        "muva": [coco_file, "--amodal-field", "segmentation"],
        "mmr": [write(tmp_path / "mmr.json", mmr())],
        "reasonseg": [reason],
        "lisa++": [lisa],
        "refcoco": [write(tmp_path / "refs.json", refs()), "--instances", coco_file],
        "amodal-qa": [qa, "--fields.answer", "reply"],
        "r2sm": [
            write(
                tmp_path / "q.json",
                [{"image_id": 7, "text": "it", "mask_type": "modal", "instance_ids": [31]}],
            ),
            *("--over", tmp_path / "cocoa-cls.out.json"),
        ],
    }
    for name, arguments in commands.items():
        out_file = tmp_path / f"{name}.out.json"
        code, out, err = run("convert", name, *arguments, "--out", out_file)
        assert code == 0, (name, err)
        assert "1 images" in out and " 0 queries" not in out, (name, out)
        code, out, err = run("check", out_file)
        assert code == 0 and "nothing wrong" in out, (name, err)


def test_statistics_and_template_queries_of_a_file(tmp_path, run):
    save(tmp_path)
    run("convert", "cocoa", tmp_path / "one.json", "--out", tmp_path / "a.json", "--queries", 0)
    assert (
        run(
            "queries", "template", tmp_path / "a.json", "--out", tmp_path / "b.json", "--queries", 4
        )[0]
        == 0
    )
    code, out, _ = run("stats", tmp_path / "b.json", "--json")
    assert code == 0 and json.loads(out)


def test_build_refuses_what_is_empty_and_begins_anew_after_a_failure(tmp_path, run):
    save(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    failed(run("build", f"json:{tmp_path / 'empty'}", "--out", out), "no .json file in this folder")
    failed(run("stats", tmp_path / "empty"), "no .json file in this folder")
    folder = tmp_path / "data"
    assert run("convert", "cocoa", tmp_path / "a", "--out", folder / "val.json")[0] == 0
    empty = {"images": [], "annotations": [], "categories": [], "queries": []}
    write(folder / "test.json", empty)
    images = tmp_path / "a"
    failed(
        run("build", f"json:{folder}", "--images", images, "--out", out),
        "no image in the split test",
        "--splits",
    )
    (folder / "test.json").unlink()
    good = (images / "one.jpg").read_bytes()
    (images / "one.jpg").write_bytes(good[:200])
    code, _, err = run("build", f"json:{folder}", "--images", images, "--out", out)
    assert code == 2 and "one.jpg" in err
    (images / "one.jpg").write_bytes(good)
    code, printed, _ = run("build", f"json:{folder}", "--images", images, "--out", out)
    assert code == 0 and "1 images in val" in printed
    failed(run("build", f"json:{folder}", "--images", images, "--out", out), "data set already")


def test_images_on_several_drives(tmp_path, run, monkeypatch):
    save(tmp_path / "photos")

    def refuse(paths):
        raise ValueError("Paths don't have the same drive")

    monkeypatch.setattr(conversion, "commonpath", refuse)
    out_file = tmp_path / "data" / "all.json"
    failed(
        run("convert", "cocoa", tmp_path / "photos", "--out", out_file),
        "on several drives; put them on one",
    )


def test_help_names_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0 and all(
        name in out for name in ("convert", "check", "stats", "show", "queries")
    )
    code, out, _ = run("convert", "cocoa", "--help")
    assert code == 0 and "--images" in out and "COCOA" in out


def test_show_scenes(tmp_path, run):
    code, out, _ = run(
        "show", "--data", "scenes", "--count", 2, "--size", 64, "--out", tmp_path / "s.png"
    )
    assert code == 0 and "2 samples" in out


def test_as_a_module(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "r2sm_jax.data",
        "show",
        "--data",
        "json:nowhere.json",
        "--out",
        "x.png",
    ]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    failed((done.returncode, done.stdout, done.stderr), "nowhere.json")


def test_an_image_larger_than_its_annotation_says(tmp_path, run):
    save(tmp_path)
    assert run("convert", "cocoa", tmp_path, "--out", tmp_path / "all.json")[0] == 0
    records = {"images": [{"id": 3, "file_name": "one.jpg", "height": HEIGHT, "width": WIDTH + 1}]}
    write_json(
        tmp_path / "wrong.json", records | {"annotations": [], "categories": [], "queries": []}
    )
    failed(
        run("show", "--data", f"json:{tmp_path}/wrong.json", "--out", tmp_path / "x.png"),
        "40 pixels high and 60 wide",
        "40 and 61",
    )
