import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tyro.conf import FlagCreatePairsOff
from tyro.extras import SubcommandApp

from r2sm_jax.data import masks
from r2sm_jax.data.sheet import FAINT, OCCLUDED, VISIBLE
from r2sm_jax.data.sources import open_source, split_ids
from r2sm_jax.evaluation.published import PUBLISHED, TABLE_1
from r2sm_jax.tools.stats import FILES, HISTOGRAMS, count_file, draw, make_report, markdown, stats

HEIGHT, WIDTH = 40, 50
EDGES = {  # the occlusion rate that is just in its bin
    "0": 0,
    "0-0.15": 15,
    "0.15-0.25": 25,
    "0.25-0.40": 40,
    "0.40-1": 41,
}


def annotation(
    number: int, image: int, pixels: int | None, visible: int | None = None, **more
) -> dict:
    """An instance of `pixels` pixels (None: unknown), of which the first `visible` are (None: all)."""

    def first(count: int) -> dict:
        return masks.encode((np.arange(HEIGHT * WIDTH) < count).reshape(HEIGHT, WIDTH))

    record = {
        "id": number,
        "image_id": image,
        "category_id": 1,
        "bbox": [0, 0, 1, 1],
        "area": 1,
        "iscrowd": 0,
    }
    record["segmentation"] = None if pixels is None else first(pixels)
    return record | ({} if visible is None else {"visible_mask": first(visible)}) | more


def query(number: int, image: int, text: str, mask_type: str, *instances: int, **kind) -> dict:
    record = {
        "id": number,
        "image_id": image,
        "text": text,
        "mask_type": mask_type,
        "instance_ids": list(instances),
    }
    return record | ({"kind": kind} if kind else {})


def dataset(path: Path, **changes) -> Path:
    """Three images that are not there; instances of 2000, 1024, 1023, 100 and an unknown number of pixels."""
    records = {
        "images": [
            {"id": i, "file_name": f"{i}.jpg", "height": HEIGHT, "width": WIDTH} for i in (1, 2, 3)
        ],
        "annotations": [
            annotation(1, 1, 2000),
            annotation(2, 1, 1024, 512),
            annotation(3, 2, 1023, 1023),
            annotation(4, 2, 100, 85),
            annotation(5, 2, None, 20),
            annotation(6, 3, 200, ignore=True),
        ],
        "categories": [{"id": 1, "name": "mug"}],
        "queries": [
            query(1, 1, "the mug", "modal", 1, task="referring"),
            query(2, 1, "the whole mug behind it", "amodal", 2, task="referring"),
            query(3, 1, "the mugs , in full", "modal", 1, 2, task="reasoning"),
            query(4, 2, "what one drinks from", "amodal", 3, 4, 4),
            query(5, 2, "a spoon", "modal"),
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records | changes))
    return path


def many(path: Path, images: int, modal: int, amodal: int) -> Path:
    """A split of so many images and queries, with one instance."""
    texts = [
        query(n, 1, "the mug", "modal" if n <= modal else "amodal", 1)
        for n in range(1, modal + amodal + 1)
    ]
    sized = [
        {"id": n, "file_name": f"{n}.jpg", "height": HEIGHT, "width": WIDTH}
        for n in range(1, images + 1)
    ]
    return dataset(path, images=sized, annotations=[annotation(1, 1, 9)], queries=texts)


def main() -> None:
    app = SubcommandApp()
    app.command(stats)
    app.command(SubcommandApp(), name="other")
    app.cli(config=(FlagCreatePairsOff,))


@pytest.fixture
def report(command):
    """What the command prints with --json."""

    def run(*arguments: object) -> dict:
        end = command(main, "stats", *arguments, "--json")
        assert end.code == 0, end.err
        return json.loads(end.out)

    return run


def test_counts_by_hand(tmp_path, report):
    path = dataset(tmp_path / "tiny.json")
    found = report(path)
    assert list(found["splits"]) == ["all"] and list(found["sources"]) == [str(path)]
    figures = found["total"]
    assert figures == found["splits"]["all"] == found["sources"][str(path)]["all"]
    assert [figures[name] for name in TABLE_1] == [3, 5, 2, 3, 5]
    assert figures["images_without_query"] == figures["ignore_regions"] == 1
    assert figures["queries_without_target"] == 1 and figures["queries_of_several_instances"] == 2
    assert (
        figures["modal_queries_against_keyword_rule"]
        == figures["amodal_queries_against_keyword_rule"]
        == 1
    )
    assert (
        figures["instances_with_known_amodal"] == 4
        and figures["instances_with_unknown_amodal"] == 1
    )
    assert figures["occluded_instances"] == 2 and figures["occluded_by_more_than_0.15"] == 1
    assert (
        figures["shares"]["occluded_instances"] == 0.5
        and figures["shares"]["images_without_query"] == 1 / 3
    )
    assert figures["tasks"] == {"not stated": 2, "reasoning": 1, "referring": 2}


def test_histograms_by_hand(tmp_path, report):
    found = report(dataset(tmp_path / "tiny.json"))["total"]["histograms"]

    def filled(name: str, kind: str) -> dict[str, int]:
        return {label: n for label, n in found[name][kind].items() if n}

    assert filled("occlusion_rate", "instances") == {"0": 2, "0-0.15": 1, "0.40-1": 1}
    assert filled("area_share", "amodal") == {
        "1-5 %": 1,
        "50-100 %": 3,
    }  # 100, 1023, 1024 and 2000 of 2000
    assert filled("area_share", "modal") == {"0-1 %": 1, "1-5 %": 1, "25-50 %": 1, "50-100 %": 2}
    assert filled("coco_size", "amodal") == {"small": 2, "medium": 2}
    assert filled("words", "modal") == {"1-4": 2, "5-8": 1}
    assert filled("words", "amodal") == {"1-4": 1, "5-8": 1}
    assert filled("instances_per_query", "modal") == {"0": 1, "1": 1, "2": 1}
    assert filled("instances_per_query", "amodal") == {"1": 1, "2": 1}


@pytest.mark.parametrize("label", EDGES)
def test_occlusion_edges_belong_to_the_bin_below(tmp_path, label):
    path = dataset(
        tmp_path / "one.json", annotations=[annotation(1, 1, 100, 100 - EDGES[label])], queries=[]
    )
    assert count_file(path)["occlusion_rate", "instances", label] == 1


def test_a_visible_fringe_belongs_to_the_amodal_mask(tmp_path):
    counts = count_file(
        dataset(tmp_path / "one.json", annotations=[annotation(1, 1, 10, 30)], queries=[])
    )
    assert (
        counts["occlusion_rate", "instances", "0"] == 1
        and counts["area_share", "amodal", "1-5 %"] == 1
    )


def test_every_histogram_sums_up(tmp_path, report):
    found = report(
        "scenes", dataset(tmp_path / "f" / "train.json").parent, "--splits", "train", "--scenes", 5
    )
    figures = found["total"]
    wholes = {"modal": figures["modal_queries"], "amodal": figures["amodal_queries"]}
    sizes = {"modal": figures["instances"], "amodal": figures["instances_with_known_amodal"]}
    for name, by_kind in figures["histograms"].items():
        of = sizes if name in ("area_share", "coco_size") else wholes
        for kind, bins in by_kind.items():
            assert list(bins) == list(HISTOGRAMS[name].labels)
            assert sum(bins.values()) == (of | {"instances": sizes["amodal"]})[kind]
    assert sum(figures["tasks"].values()) == figures["all_queries"]


def test_scenes(report):
    found = report("scenes", "--scenes", 3)
    assert list(found["splits"]) == ["train", "val", "val_phrasing", "val_hard", "dev"]
    source = open_source("scenes", "val_hard", count=3)
    samples = [source[index] for index in range(3)]
    figures = found["splits"]["val_hard"]
    assert figures["images"] == 3 and figures["instances"] == sum(
        len(sample.instances) for sample in samples
    )
    assert (
        figures["all_queries"]
        == sum(len(sample.queries) for sample in samples)
        == sum(figures["tasks"].values())
    )
    assert figures["shares"]["modal_queries_against_keyword_rule"] == 1
    hidden = [
        i
        for sample in samples
        for i in sample.instances
        if i.amodal is not None and (i.amodal & ~i.modal).any()
    ]
    assert figures["occluded_instances"] == len(hidden)


def test_splits_of_a_folder_and_several_sources(tmp_path, command, report):
    a, b = dataset(tmp_path / "a" / "train.json").parent, tmp_path / "b"
    dataset(a / "val.json", queries=[])
    dataset(b / "val.json")
    found = report(a, f"json:{b}")
    assert {split: f["images"] for split, f in found["splits"].items()} == {"train": 3, "val": 6}
    assert found["total"]["images"] == 9 and found["total"]["all_queries"] == 10
    assert [list(splits) for splits in found["sources"].values()] == [["train", "val"], ["val"]]
    assert list(report(a, "--splits", "val")["splits"]) == ["val"]
    end = command(main, "stats", a, b)
    assert end.err == "" and "all sources" in end.out and "total" in end.out and "9" in end.out


def test_published_totals_are_sums():
    for split in ("train", "val"):
        parts = [PUBLISHED[name][split] for name in ("cocoa-cls", "d2sa", "muva")]
        assert [sum(counts) for counts in zip(*parts, strict=True)] == PUBLISHED["total"][split]
    for splits in PUBLISHED.values():
        assert all(counts[4] == counts[2] + counts[3] for counts in splits.values())


def test_compare_marks_differences(tmp_path, command, report, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "d2sa", {"train": (4, 1, 3, 2, 5), "val": (2, 1, 1, 1, 2)})
    many(tmp_path / "train.json", images=4, modal=1, amodal=3)
    many(tmp_path / "val.json", images=1200, modal=1, amodal=1)
    found = report(tmp_path, "--compare", "d2sa")["published"]
    assert found["dataset"] == "d2sa" and found["total"] == dict(
        zip(TABLE_1, (6, 2, 4, 3, 7), strict=True)
    )
    rows = command(main, "stats", tmp_path, "--compare", "d2sa").out
    images = next(line for line in rows.splitlines() if "images " in line)
    for cell in ("4 (as published)", "1,200 (published 2, +1,198)", "1,204 (published 6, +1,198)"):
        assert cell in images
    assert "1 (published 2, -1)" in rows
    many(tmp_path / "test.json", images=1, modal=1, amodal=0)
    found = report(tmp_path, "--compare", "d2sa")[
        "published"
    ]  # the paper has no such split, so no total either
    assert list(found["splits"]) == ["train", "val"] and found["total"] is None
    assert (
        report(tmp_path, "--compare", "d2sa", "--splits", "val")["published"]["total"]["images"]
        == 2
    )


def test_files_are_written_whole_and_never_by_accident(tmp_path, command, refused):
    data, out = dataset(tmp_path / "data" / "tiny.json"), tmp_path / "out" / "deep"
    end = command(main, "stats", data, "--out", out, "--json")
    assert end.code == 0 and "wrote" in end.err
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert json.loads(end.out) == json.loads((out / "stats.json").read_text())
    page = (out / "stats.md").read_text()
    assert "| images | 3 |" in page and "| occluded instances | 2 (50.0 %) |" in page
    (out / "stats.json").unlink()
    assert (
        "stats.md" in (error := refused(main, "stats", data, "--out", out))
        and "--overwrite" in error
    )
    assert not (out / "stats.json").exists()
    assert (
        command(main, "stats", data, "--out", out, "--overwrite").code == 0
        and (out / "stats.json").exists()
    )


def test_the_picture_shows_both_colours(tmp_path):
    picture = draw(
        make_report({"x": {"all": count_file(dataset(tmp_path / "tiny.json"))}})["total"],
        "$a_$" * 40,
    )
    with Image.open(io.BytesIO(picture)) as opened:
        assert opened.format == "PNG" and opened.size == (1650, 1170)
        pixels = np.asarray(opened.convert("RGB"))
    for colour in (VISIBLE, OCCLUDED, FAINT):
        assert (pixels == colour).all(-1).sum() > 10_000
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_nothing_at_all_can_be_counted_too(tmp_path, command):
    empty = dataset(tmp_path / "none.json", images=[], annotations=[], queries=[])
    end = command(main, "stats", empty, "--out", tmp_path / "out")
    assert end.code == 0 and "0 (–)" in end.out
    with Image.open(tmp_path / "out" / "stats.png") as picture:
        picture.load()


def test_names_with_markup_stay_as_they_are(tmp_path, command):
    text = query(1, 1, "the mug", "modal", 1, task="[red]a|b[/red]")
    end = command(main, "stats", dataset(tmp_path / "[bold].json", queries=[text]))
    assert "task: [red]a|b[/red]" in end.out and "[bold].json" in end.out
    page = markdown(make_report({"x": {"all": count_file(tmp_path / "[bold].json")}}))
    assert r"| task: [red]a\|b[/red] | 1 (100.0 %) |" in page


def test_images_are_not_needed_nor_read(tmp_path, monkeypatch):
    def never(*_) -> None:
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", never)
    assert count_file(dataset(tmp_path / "tiny.json"))["images"] == 3


def test_a_single_file_is_counted_as_training_divides_it(tmp_path, report):
    path = dataset(tmp_path / "tiny.json")
    found = report(path, "--splits", "train", "dev", "val", "--compare", "d2sa")
    assert found["published"]["dataset"] == "d2sa" and found["total"] == report(path)["total"]
    for split, figures in found["splits"].items():
        chosen = split_ids(path, (1, 2, 3), split)
        assert figures["images"] == len(chosen) > 0
        assert figures["all_queries"] == sum(
            q["image_id"] in chosen for q in json.loads(path.read_text())["queries"]
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["nothing to count", "json:FILE"]),
        (["scenes", "--scenes", "0"], ["--scenes 1 or more"]),
        (["sceens"], ["'sceens' is unknown", "json:FOLDER"]),
        (["json:"], ["'json:' is unknown"]),
        (["gone.json"], ["gone.json", "no such file"]),
        (["scenes", "scenes"], ["twice", "once"]),
        (["{data}", "json:{data}"], ["twice", "once"]),
        (
            ["{data}", "--splits", "test"],
            ["--splits test", "has only all, train, dev, val", "give a folder"],
        ),
        (["{data}", "--splits", "all", "val"], ["--splits all val", "give either"]),
        (["{data}", "{folder}"], ["twice", "once"]),
        (["scenes", "--splits", "test"], ["--splits test", "val_hard", "choose of these"]),
        (["{empty}"], ["no .json file", "train.json"]),
        (["{data}", "--compare", "d2sa"], ["--compare d2sa", "train and val", "give a folder"]),
        (["{data}", "--out", "{data}"], ["--out", "is a file", "another folder"]),
        (["{folder}", "--out", "{folder}"], ["--out", "another folder"]),
        (
            ["{damaged}"],
            ["damaged.json: annotation 2: its visible_mask cannot be read", "write the mask again"],
        ),
        (["{wrong}"], ["wrong.json: query 1: instance_ids is [77]", "give the ids"]),
    ],
)
def test_bad_input(tmp_path, monkeypatch, refused, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    cut = annotation(2, 1, 1024, 512)
    cut["visible_mask"]["counts"] = cut["visible_mask"]["counts"][:-1]
    places = {
        "data": dataset(tmp_path / "d" / "tiny.json"),
        "folder": tmp_path / "d",
        "empty": tmp_path / "empty",
        "damaged": dataset(
            tmp_path / "e" / "damaged.json", annotations=[annotation(1, 1, 9), cut], queries=[]
        ),
        "wrong": dataset(
            tmp_path / "e" / "wrong.json", queries=[query(1, 1, "the mug", "modal", 77)]
        ),
    }
    error = refused(main, "stats", *(argument.format(**places) for argument in arguments))
    for word in words:
        assert word in error
