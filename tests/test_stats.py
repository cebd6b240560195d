"""`data stats`: counts by hand, and the files that it writes."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.__main__ import main
from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.split_summary import summarize
from r2sm_jax.data.splits import split_ids

HEIGHT, WIDTH = 40, 50


def first_pixels(count: int) -> dict:
    return masks.encode((np.arange(HEIGHT * WIDTH) < count).reshape(HEIGHT, WIDTH))


def annotation(number: int, image: int, pixels: int | None, visible: int | None = None) -> dict:
    """An instance of `pixels` pixels (None: unknown), of which the first `visible` are (None:
    all)."""
    record = {"id": number, "image_id": image, "category_id": 1}
    record["segmentation"] = None if pixels is None else first_pixels(pixels)
    if visible is not None:
        record["visible_mask"] = first_pixels(visible)
    return record


def query(number: int, image: int, text: str, mask_type: str, *instances: int) -> dict:
    record = {"id": number, "image_id": image, "text": text, "mask_type": mask_type}
    return record | {"instance_ids": list(instances)}


def images(*ids: int) -> list[dict]:
    return [{"id": i, "file_name": f"{i}.jpg", "height": HEIGHT, "width": WIDTH} for i in ids]


def dataset(path: Path, **changes) -> Path:
    """Three images that are not there; instances of 2000, 1024, 1023, 100 and an unknown number of
    pixels."""
    records = {
        "images": images(1, 2, 3),
        "annotations": [
            annotation(1, 1, 2000),
            annotation(2, 1, 1024, 512),
            annotation(3, 2, 1023, 1023),
            annotation(4, 2, 100, 85),
            annotation(5, 2, None, 20),
            annotation(6, 3, 200) | {"ignore": True},
        ],
        "categories": [{"id": 1, "name": "mug"}],
        "queries": [
            query(1, 1, "the mug", "modal", 1),
            query(2, 1, "the whole mug behind it", "amodal", 2),
            query(3, 1, "the mugs , in full", "modal", 1, 2),
            query(4, 2, "what one drinks from", "amodal", 3, 4, 4),
            query(5, 2, "a spoon", "modal"),
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records | changes))
    return path


@pytest.fixture
def report(command):
    """What the command prints with --json, by split."""

    def run(*arguments: object) -> dict:
        end = command(main, "stats", *arguments, "--json")
        assert end.code == 0, end.err
        return json.loads(end.out)["splits"]

    return run


def test_counts_by_hand(tmp_path, report, monkeypatch):
    def never(*_) -> None:
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", never)
    figures = {
        "images": 3,
        "instances": 5,
        "amodal_queries": 2,
        "modal_queries": 3,
        "all_queries": 5,
        "images_without_query": 1,
        "queries_without_target": 1,
        "queries_of_several_instances": 2,
        "queries_against_keyword_rule": 2,
        "instances_with_known_amodal": 4,
        "occluded_instances": 2,
        "occluded_by_more_than_0.15": 1,
        "ignore_regions": 1,
    }
    path = dataset(tmp_path / "tiny.json")
    assert report(f"json:{path}") == {"all": figures}


def test_rates_by_hand(tmp_path):
    # A visible fringe, of the second file, belongs to the amodal mask.
    fringe = [annotation(1, 1, 30, 32)]
    for changes, rates in (({}, [0, 0.5, 0, 0.15]), ({"annotations": fringe, "queries": []}, [0])):
        source = read_json(dataset(tmp_path / "tiny.json", **changes), need_images=False)
        summary = summarize(source.truth_at(index) for index in range(len(source)))
        np.testing.assert_allclose(summary.hidden_shares, rates)


def test_splits_of_a_folder_and_of_a_file(tmp_path, report):
    path = dataset(tmp_path / "a" / "train.json")
    dataset(tmp_path / "a" / "val.json", images=images(1), annotations=[], queries=[])
    counts = report(f"json:{tmp_path / 'a'}")
    assert {split: figures["images"] for split, figures in counts.items()} == {"train": 3, "val": 1}

    parts = report(f"json:{path}", "--splits", "train", "dev", "val")
    names = {image["id"]: image["file_name"] for image in images(1, 2, 3)}
    for split, figures in parts.items():
        assert figures["images"] == len(split_ids(path, names, split)) > 0


def test_files_are_written(tmp_path, command, refused):
    data, out = f"json:{dataset(tmp_path / 'data' / 'tiny.json')}", tmp_path / "out" / "deep"
    end = command(main, "stats", data, "--out", out, "--json")
    assert end.code == 0 and json.loads(end.out) == json.loads((out / "stats.json").read_text())
    with Image.open(out / "stats.png") as picture:
        assert picture.format == "PNG"
    assert "ignore regions" in command(main, "stats", data).out
    assert "--overwrite" in refused(main, "stats", data, "--out", out)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("json:", "data source"),
        ("json:gone.json", "gone.json"),
        ("scenes --scenes -1", "-1 pictures cannot be made"),
        ("json:d/tiny.json --splits test", "test"),
        ("json:damaged.json", "annotation 2: its visible_mask"),
    ],
)
def test_refusals(tmp_path, monkeypatch, refused, line, word):
    monkeypatch.chdir(tmp_path)
    dataset(Path("d/tiny.json"))
    cut = annotation(2, 1, 1024, 512)
    cut["visible_mask"]["counts"] = cut["visible_mask"]["counts"][:-1]
    dataset(Path("damaged.json"), annotations=[annotation(1, 1, 9), cut], queries=[])
    assert word in refused(main, "stats", *line.split())
