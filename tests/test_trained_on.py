"""Which pictures a model was trained on: known by their files, passed on, and marked in reports."""

import csv
import json
import shutil

import numpy as np
import pytest
from made_pictures import write_photos
from run_files import with_flags

from r2sm_jax import evaluate, train
from r2sm_jax.config import DataConfig
from r2sm_jax.data.images import fingerprint
from r2sm_jax.evaluation.tables import describe_selection
from r2sm_jax.inference.model_folder import (
    RELEASED,
    TRAINED_ON,
    read_trained_on,
    write_trained_on,
)
from r2sm_jax.sources import open_split
from r2sm_jax.synthetic.photos import Photos


def test_a_picture_is_known_by_its_file_and_not_by_its_name(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8).tobytes()
    files = {
        "a.jpg": content,
        "b.jpg": content,
        "longer.jpg": content + b".",
        "other.jpg": content[:10_000] + b"!" + content[10_001:],
        "short.png": b"1",
        "none.png": b"",
    }
    for name, bytes_of_file in files.items():
        (tmp_path / name).write_bytes(bytes_of_file)
    found = {name: fingerprint(tmp_path / name) for name in files}
    assert found["a.jpg"] == found["b.jpg"] == fingerprint(content)
    assert len(set(found.values())) == len(files) - 1


def test_a_composed_picture_is_known_by_its_photo_and_a_drawn_one_not(tmp_path):
    file = write_photos(tmp_path)
    photos = Photos(file)
    parts = {
        split: [fingerprint(photos.path_of(photo)) for photo in photos.photos_of_split(split)]
        for split in ("train", "val")
    }
    spec = f"compose:{file}"
    # Also those of which only objects are in the pictures.
    for count in (3, 200):
        known = open_split(DataConfig(spec), "train", count=count, size=32).fingerprints()
        assert set(known) == set(parts["train"]) and len(known) >= count
    val = open_split(DataConfig(spec), "val_hard", count=5, size=32)
    assert val.fingerprints()[:5] == parts["val"][:5]
    assert val.subset([3, 1]).fingerprints() == [parts["val"][3], parts["val"][1]]
    assert open_split(DataConfig(), "train", count=2).fingerprints() == ["", ""]


@pytest.mark.slow
@pytest.mark.usefixtures("steps_alone")
def test_a_report_marks_what_a_run_or_the_run_before_it_was_trained_on(
    tmp_path, tiny_flags, command
):
    file = write_photos(tmp_path / "photos")
    first, second = tmp_path / "first", tmp_path / "second"
    photos = ["--data.source", f"compose:{file}", "--train.report-samples", 8]
    end = command(train.main, *with_flags(tiny_flags, *photos), "--run", first)
    assert end.code == 0, end.err
    end = command(train.main, *tiny_flags, "--init", first, "--run", second)
    assert end.code == 0, end.err
    known = read_trained_on(second)
    assert known and known == read_trained_on(first)

    # The same photos under other names, in a file that the runs have not read.
    splits = Photos(file).names_of_splits()
    names = [min(splits["train"]), min(splits["dev"]), max(splits["train"])]
    folder = tmp_path / "others"
    folder.mkdir()
    records = json.loads(file.read_text())
    old = {image["file_name"]: image for image in records["images"]}
    records["images"] = [old[name] for name in names]
    for image in records["images"]:
        name = f"copy {image['file_name']}"
        shutil.copy(tmp_path / "photos/images" / image["file_name"], folder / name)
        image["file_name"] = name
    ids = [image["id"] for image in records["images"]]
    records["annotations"] = [a for a in records["annotations"] if a["image_id"] in ids]
    records["queries"] = [
        {"id": a["id"], "image_id": a["image_id"], "text": "it", "mask_type": "modal"}
        | {"instance_ids": [a["id"]]}
        for a in records["annotations"]
        if not a["iscrowd"]
    ]
    (folder / "data.json").write_text(json.dumps(records))
    data = f"json:{folder}/data.json"
    end = command(evaluate.main, second, "--data", data, "--out", tmp_path / "report")
    assert end.code == 0, end.err
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["meta"]["images_seen"] == {"all": 2}
    assert "The run was trained on 2 of the 3 images of `all`." in describe_selection(report)
    with (tmp_path / "report/queries.csv").open(newline="") as table:
        seen = {int(row["image_id"]): row["seen"] for row in csv.DictReader(table)}
    assert seen == {ids[0]: "1", ids[1]: "0", ids[2]: "1"}

    report["meta"]["images_seen"] = {"all": None}  # the run is older than they are
    assert "is not known" in describe_selection(report)


def test_an_export_knows_the_pictures_of_all_of_its_weights(tmp_path):
    run, part, old, out = (tmp_path / name for name in ("run", "part", "old", "out"))
    for folder, known in ((run, ["b", ""]), (part, ["a", "b"])):
        folder.mkdir()
        write_trained_on(folder, known, [])
    old.mkdir()
    out.mkdir()
    write_trained_on(out, [], [run, part])
    assert (out / TRAINED_ON).read_text() == "a\nb\n"
    write_trained_on(out, [], [run, old])  # an older run does not say its pictures
    assert read_trained_on(out) is None


def test_the_released_model_says_its_pictures():
    known = read_trained_on(RELEASED / "photos-small")
    assert known and len(known) > 1000 and all(len(line) == 16 for line in known)
