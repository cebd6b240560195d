"""`data stats`: counts by hand, published counts, and the files that it writes."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.splits import split_ids
from r2sm_jax.evaluation.published import PUBLISHED, TABLE_1
from r2sm_jax.synthetic.sources import open_source
from r2sm_jax.tools.data import main
from r2sm_jax.tools.stats import FILES, Counts, draw

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


def counts_of(path: Path) -> Counts:
    source = read_json(path, need_images=False)
    counts = Counts()
    for index in range(len(source)):
        counts.add_image(source.truth_at(index))
    return counts


@pytest.fixture
def report(command):
    """What the command prints with --json."""

    def run(*arguments: object) -> dict:
        end = command(main, "stats", *arguments, "--json")
        assert end.code == 0, end.err
        return json.loads(end.out)

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
    assert report(path) == {"splits": {"all": figures}, "total": figures}


def test_lists_by_hand(tmp_path):
    counts = counts_of(dataset(tmp_path / "tiny.json"))
    assert counts.occlusion_rates == [0, 0.5, 0, 0.15]
    assert counts.area_shares["amodal"] == [1, 0.512, 0.5115, 0.05]
    assert counts.area_shares["modal"] == [1, 0.256, 0.5115, 0.0425, 0.01]
    assert counts.num_words == {"modal": [2, 5, 2], "amodal": [5, 4]}
    assert counts.num_targets == {"modal": [1, 2, 0], "amodal": [1, 2]}


def test_a_visible_fringe_belongs_to_the_amodal_mask(tmp_path):
    path = dataset(tmp_path / "one.json", annotations=[annotation(1, 1, 30, 32)], queries=[])
    counts = counts_of(path)
    assert counts.occlusion_rates == [0] and counts.area_shares["amodal"] == [0.016]


def test_scenes(report):
    splits = report("scenes", "--scenes", 3)["splits"]
    assert list(splits) == ["train", "val", "val_phrasing", "val_hard", "dev"]
    source = open_source("scenes", "val_hard", count=3)
    samples = [source[index] for index in range(3)]
    figures = splits["val_hard"]
    assert figures["instances"] == sum(len(sample.instances) for sample in samples)
    assert figures["all_queries"] == sum(len(sample.queries) for sample in samples)
    assert figures["queries_against_keyword_rule"] == figures["all_queries"]


def test_splits_of_a_folder_and_several_sources(tmp_path, report):
    a = dataset(tmp_path / "a" / "train.json").parent
    dataset(a / "val.json", queries=[])
    b = dataset(tmp_path / "b" / "val.json").parent
    counts = report(a, f"json:{b}")
    assert {split: f["images"] for split, f in counts["splits"].items()} == {"train": 3, "val": 6}
    assert counts["total"]["images"] == 9 and counts["total"]["all_queries"] == 10
    assert list(report(a, "--splits", "val")["splits"]) == ["val"]


def test_a_single_file_is_counted_as_training_divides_it(tmp_path, report):
    path = dataset(tmp_path / "tiny.json")
    counts = report(path, "--splits", "train", "dev", "val")
    assert counts["total"] == report(path)["total"]
    for split, figures in counts["splits"].items():
        assert figures["images"] == len(split_ids(path, (1, 2, 3), split)) > 0


def test_published_totals_are_sums():
    for split in ("train", "val"):
        parts = [PUBLISHED[name][split] for name in ("cocoa-cls", "d2sa", "muva")]
        assert [sum(counts) for counts in zip(*parts, strict=True)] == PUBLISHED["total"][split]
    for splits in PUBLISHED.values():
        assert all(counts[4] == counts[2] + counts[3] for counts in splits.values())


def test_compare_marks_differences(tmp_path, command, report, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "d2sa", {"train": (4, 6, 2, 2, 5), "val": (2, 1, 1, 1, 2)})
    dataset(tmp_path / "train.json", images=images(1, 2, 3, 4))
    dataset(tmp_path / "val.json")
    published = report(tmp_path, "--compare", "d2sa")["published"]
    assert published["train"] == dict(zip(TABLE_1, (4, 6, 2, 2, 5), strict=True))
    page = command(main, "stats", tmp_path, "--compare", "d2sa").out
    assert "| images | 4 (as published) | 3 (published 2, +1) | 7 |" in page
    assert "| instances | 5 (published 6, -1) |" in page


def test_files_are_written(tmp_path, command, refused):
    data, out = dataset(tmp_path / "data" / "tiny.json"), tmp_path / "out" / "deep"
    end = command(main, "stats", data, "--out", out, "--json")
    assert end.code == 0 and "wrote" in end.err
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert json.loads(end.out) == json.loads((out / "stats.json").read_text())
    assert "| images | 3 |" in (out / "stats.md").read_text()
    assert "--overwrite" in refused(main, "stats", data, "--out", out)
    assert command(main, "stats", data, "--out", out, "--overwrite").code == 0


@pytest.mark.parametrize("changes", [{}, {"images": [], "annotations": [], "queries": []}])
def test_the_figure(tmp_path, changes):
    path = dataset(tmp_path / "tiny.json", **changes)
    content = draw(counts_of(path))
    with Image.open(io.BytesIO(content)) as picture:
        assert picture.format == "PNG" and picture.size == (1650, 1170)


REFUSALS = [
    ("", "nothing to count"),
    ("scenes --scenes 0", "--scenes"),
    ("json:", "'json:' is unknown"),
    ("gone.json", "gone.json"),
    ("d/tiny.json json:d/tiny.json", "twice"),
    ("d/tiny.json --splits test", "--splits test"),
    ("d/tiny.json --splits all val", "give either"),
    ("d/tiny.json --compare d2sa", "train and val"),
    ("d --out d", "another folder"),
    ("damaged.json", "annotation 2: its visible_mask"),
]


@pytest.mark.parametrize(("line", "word"), REFUSALS)
def test_refusals(tmp_path, monkeypatch, refused, line, word):
    monkeypatch.chdir(tmp_path)
    dataset(Path("d/tiny.json"))
    cut = annotation(2, 1, 1024, 512)
    cut["visible_mask"]["counts"] = cut["visible_mask"]["counts"][:-1]
    dataset(Path("damaged.json"), annotations=[annotation(1, 1, 9), cut], queries=[])
    assert word in refused(main, "stats", *line.split())
