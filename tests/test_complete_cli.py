"""`data complete`: files and folders of visible masks become a dataset with complete ones."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import BOX, MUG, SIZE, rectangle
from flax import nnx
from PIL import Image
from run_files import save_completer
from tiny_crops import COMPLETER

from r2sm_jax.config import CompleterConfig
from r2sm_jax.data import masks
from r2sm_jax.data.__main__ import main
from r2sm_jax.data.dataset import read_json
from r2sm_jax.inference import load
from r2sm_jax.inference.crop_models import MaskCompleter, Outline
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.tools import complete
from r2sm_jax.tools.complete_image import complete_image, find_occluders

ROOT = Path(__file__).parents[1]
HEIGHT, WIDTH = SIZE
THRESHOLD = -2.0  # at which an untrained completer adds something


CROWD = rectangle(60, 0, 80, 9)
PIXELS = np.random.default_rng(0).integers(0, 255, (2, *SIZE, 3), np.uint8)


@pytest.fixture(scope="module")
def completer() -> MaskCompleter:
    weights = nnx.state(make_completer(COMPLETER, rngs=nnx.Rngs(0)))
    return MaskCompleter(COMPLETER, weights, THRESHOLD)


@pytest.fixture
def place(tmp_path, completer, monkeypatch) -> Path:
    """A folder with two images and a completer."""
    monkeypatch.chdir(tmp_path)
    save_completer(tmp_path / "completer", completer)
    (tmp_path / "photos").mkdir()
    for number, pixels in enumerate(PIXELS, start=1):
        Image.fromarray(pixels).save(f"photos/{number:012d}.png")
    return tmp_path


def polygon(x0, y0, x1, y1) -> list[list[int]]:
    return [[x0, y0, x1, y0, x1, y1, x0, y1]]


def instances() -> dict:
    """A COCO instances file, as detectron2, supervision and annotation tools write it."""
    images = [
        {"id": 7 + n, "file_name": f"{1 + n:012d}.png", "height": HEIGHT, "width": WIDTH}
        for n in range(2)
    ]
    common = {"iscrowd": 0}
    annotations = [
        {"id": 31, "image_id": 7, "category_id": 3, "segmentation": polygon(10, 10, 30, 40)},
        {"id": 12, "image_id": 7, "category_id": 5, "segmentation": masks.encode(BOX), "note": "x"},
        {"id": 40, "image_id": 7, "category_id": 5, "segmentation": masks.encode(CROWD)},
        {"id": 50, "image_id": 8, "category_id": 3, "segmentation": polygon(10, 10, 30, 40)},
    ]
    annotations = [common | annotation for annotation in annotations]
    for annotation, mask in zip(annotations, (MUG, BOX, CROWD, MUG), strict=True):
        annotation |= {"bbox": masks.coco_box(mask), "area": masks.area(mask)}
    annotations[2] |= {"iscrowd": 1}
    categories = [{"id": 3, "name": "mug"}, {"id": 5, "name": "box"}]
    return {"images": images, "annotations": annotations, "categories": categories}


def write(path: str, content) -> Path:
    Path(path).write_text(json.dumps(content))
    return Path(path)


FLAGS = "--images", "photos", "--model", "completer", "--out", "out.json"


def flags(**changes: str) -> list[str]:
    values = {"images": "photos", "model": "completer", "out": "out.json"} | changes
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def completed_by_id() -> dict[int, dict]:
    return {a["id"]: a for a in json.loads(Path("out.json").read_text())["annotations"]}


def test_an_instances_file_keeps_its_ids_and_gets_complete_masks(place, command, completer):
    source = instances()
    end = command(main, "complete", write("coco.json", source), *FLAGS)
    assert end.code == 0, end.err
    assert "3 objects completed in 2 images" in end.out and "1 crowds" in end.out
    assert "--data.images photos" in end.out

    annotations = completed_by_id()
    assert annotations.keys() == {31, 12, 40, 50}
    assert annotations[40]["ignore"] and "occluded_by" not in annotations[40]
    expected = completer.complete(PIXELS[0], [MUG, BOX], MUG | BOX | CROWD)
    for number, visible, completion in zip((31, 12), (MUG, BOX), expected, strict=True):
        annotation = annotations[number]
        np.testing.assert_array_equal(masks.decode(annotation["visible_mask"]), visible)
        complete = completion.mask
        np.testing.assert_array_equal(masks.decode(annotation["segmentation"]), complete)
        assert annotation["occlude_rate"] == pytest.approx(1 - visible.sum() / complete.sum())
        assert annotation["area"] == complete.sum() > visible.sum()
        assert annotation["bbox"] == masks.coco_box(complete)
    assert annotations[12]["note"] == "x"
    assert {number: a["category_id"] for number, a in annotations.items()} == {
        31: 3, 12: 5, 40: 5, 50: 3
    }  # fmt: skip
    assert annotations[50]["occluded_by"] == []  # it is alone

    dataset = read_json(Path("out.json"), "photos")
    assert [len(dataset[index].instances) for index in range(2)] == [3, 1]


@pytest.mark.parametrize("how", [KeyboardInterrupt(), OSError(errno.ENOSPC, "disk is full")])
def test_a_call_that_ended_goes_on_where_it_stopped(how, place, command, monkeypatch):
    """With a full disk, the image at hand is lost, and no more; the draft is as if nothing had
    happened, and what was kept for it is gone."""
    write("coco.json", instances())
    assert command(main, "complete", "coco.json", *FLAGS).code == 0
    whole = Path("out.json").read_bytes()
    Path("out.json").unlink()
    done = []

    def draw(parts, pixels, truth, model):
        done.append(truth.image_id)
        return complete_image(parts, pixels, truth, model)

    def fail(*args, **kwargs):
        raise how

    monkeypatch.setattr(complete, "complete_image", draw)
    with monkeypatch.context() as patch:
        write_text = Path.write_text
        patch.setattr(
            Path, "write_text", lambda path, *a: (fail if done[1:] else write_text)(path, *a)
        )
        end = command(main, "complete", "coco.json", *FLAGS)
    assert end.code == (130 if isinstance(how, KeyboardInterrupt) else 2), end.err
    assert "disk is full" in end.err or end.code == 130
    assert done == [7, 8] and not Path("out.json").exists()

    end = command(main, "complete", "coco.json", *FLAGS)
    assert end.code == 0 and "1 of the images were finished by an earlier call" in end.out, end.err
    assert done == [7, 8, 8] and Path("out.json").read_bytes() == whole
    assert not Path("out.json.images").exists()


@pytest.mark.slow
def test_sigterm_costs_the_image_at_hand_and_no_more(place, command):
    """A real process, as a scheduler ends it."""
    image = instances()["images"][0]
    annotations = instances()["annotations"][:2]
    images = [image | {"id": n, "file_name": f"{n}.png"} for n in range(1, 201)]
    for one in images:
        (place / "photos" / one["file_name"]).symlink_to(place / "photos" / image["file_name"])
    records = [
        a | {"id": 2 * i["id"] + n, "image_id": i["id"]}
        for i in images
        for n, a in enumerate(annotations)
    ]
    write("coco.json", instances() | {"images": images, "annotations": records})

    words = [sys.executable, "-m", "r2sm_jax.data", "complete", "coco.json", *FLAGS]
    process = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)})
    finished = place / "out.json.images"
    while process.poll() is None and len([*finished.glob("*.json")]) < 3:
        time.sleep(0.01)
    process.terminate()
    assert process.wait() != 0 and not Path("out.json").exists()
    num_finished = len([*finished.glob("*.json")])
    assert 3 <= num_finished < 200

    end = command(main, "complete", "coco.json", *FLAGS)
    assert f"{num_finished} of the images were finished by an earlier call" in end.out, end.err
    drafts = json.loads(Path("out.json").read_text())["annotations"]
    assert len(drafts) == 400 and not finished.exists()
    assert len({draft["segmentation"]["counts"] for draft in drafts}) == 2


def test_what_is_finished_is_of_one_model_photo_and_annotation(place, command, monkeypatch):
    """And it stays while the file of the draft cannot be written, since another call did."""
    write("coco.json", instances())
    drawn = []

    def draw(parts, pixels, truth, model):
        drawn.append(truth.image_id)
        if len(drawn) == 2:
            Path("out.json").write_text("of another call")
        return complete_image(parts, pixels, truth, model)

    monkeypatch.setattr(complete, "complete_image", draw)
    end = command(main, "complete", "coco.json", *FLAGS)
    assert end.code == 2 and Path("out.json").read_text() == "of another call", end.err
    assert len(list(Path("out.json.images").iterdir())) == 2

    Image.fromarray(PIXELS[1] // 2).save("photos/000000000002.png")
    end = command(main, "complete", "coco.json", *FLAGS, "--overwrite")
    assert end.code == 0 and drawn == [7, 8, 8], end.err


@pytest.mark.parametrize("is_polygons", [False, True])
def test_what_people_changed_in_a_draft_stays(is_polygons, place, command):
    """The draft says which masks are the machine's; an object that people added is completed."""
    source = instances()
    source["annotations"][1]["segmentation"] = polygon(30, 20, 60, 50)
    again = flags(out="again.json")
    more = ["--polygons"] if is_polygons else []
    assert command(main, "complete", write("coco.json", source), *FLAGS, *more).code == 0
    draft = json.loads(Path("out.json").read_text())
    by_id = {annotation["id"]: annotation for annotation in draft["annotations"]}
    assert "completed_by" not in by_id[40]  # it is a crowd
    assert isinstance(by_id[31]["segmentation"], list) == is_polygons
    assert by_id[31]["completed_by"]["model"] == "completer"
    assert by_id[31]["completed_by"].keys() == {"model", "segmentation"}
    by_id[31]["segmentation"] = polygon(10, 10, 50, 44)
    added = {"id": 60, "image_id": 7, "category_id": 5, "segmentation": polygon(0, 50, 9, 60)}
    draft["annotations"].append(added)
    del draft["annotations"][1]  # of which another one says that it hides it
    by_id[31]["occluded_by"] = [12]

    end = command(main, "complete", write("draft.json", draft), *FLAGS, "--overwrite")
    assert end.code == 0 and "1 complete masks that people drew or changed are kept" in end.out
    changed, new = completed_by_id()[31], completed_by_id()[60]
    np.testing.assert_array_equal(masks.decode(changed["segmentation"]), rectangle(10, 10, 50, 44))
    if is_polygons:  # which have another edge
        assert masks.same_but_edge(changed["visible_mask"], masks.encode(MUG))
    else:
        np.testing.assert_array_equal(masks.decode(changed["visible_mask"]), MUG)
    assert changed["occluded_by"] == [] and "score" not in changed and "completed_by" in new
    # Once more: it is still theirs.
    end = command(main, "complete", "out.json", *again)
    assert "1 complete masks that people drew or changed are kept" in end.out, end.err


def test_a_draft_that_lost_its_visible_masks_is_no_file_of_visible_masks(place, refused, command):
    assert command(main, "complete", write("coco.json", instances()), *FLAGS).code == 0
    draft = json.loads(Path("out.json").read_text())
    for annotation in draft["annotations"]:
        for name in ("visible_mask", "invisible_mask", "occlude_rate"):
            annotation.pop(name, None)
    write("lost.json", draft)
    for words in (["complete", "lost.json", *flags(out="b.json")], ["check", "lost.json"]):
        end = command(main, *words)
        assert end.code == 2 and "convert corrected FILE --over DRAFT" in end.err, words
    for annotation in draft["annotations"]:
        annotation["completed_by"] = 3  # a person, as in Label Studio
    write("lost.json", draft)
    assert command(main, "check", "lost.json", "--images", "photos").code == 0


def test_boxes_know_what_is_before_them_and_bare_ones_go(place, command, completer, monkeypatch):
    """Of two outlines the one that lies in the other is in front, a given mask always; nothing is
    found in the third box."""
    seen = {(10, 10): rectangle(10, 10, 50, 50), (30, 30): rectangle(30, 30, 55, 40)}

    def outline(pixels, prompts):
        x0, y0, *_ = map(int, prompts[0].box)
        return [Outline(seen.get((x0, y0), rectangle(0, 0, 0, 0)), 0.7)]

    parts = {"completer": completer, "outliner": outline}
    monkeypatch.setattr(load, "load_part", lambda model, part: parts[part])
    boxes = [[10, 10, 40, 40], [30, 30, 25, 10], [60, 50, 9, 9]]
    entries = [{"image_id": 1, "category_id": 3, "score": 0.9, "bbox": box} for box in boxes]
    given = rectangle(10, 10, 14, 20)
    entries.append({"image_id": 1, "category_id": 3, "segmentation": masks.encode(given)})
    end = command(main, "complete", write("results.json", entries), *FLAGS)
    assert end.code == 0 and "1 boxes have no annotation" in end.out, end.err
    by_id = completed_by_id()
    assert by_id.keys() == {1, 2, 4}
    dog = seen[10, 10] & ~seen[30, 30] & ~given
    np.testing.assert_array_equal(masks.decode(by_id[1]["visible_mask"]), dog)
    np.testing.assert_array_equal(masks.decode(by_id[2]["visible_mask"]), seen[30, 30])
    assert [by_id[number].get("source_bbox") for number in (1, 2, 4)] == [*boxes[:2], None]


@pytest.mark.parametrize(
    ("content", "said"),
    [({"info": "of a tool"}, ""), ({"note": "\ud800"}, "coco.json: a text in it holds half")],
)
def test_what_cannot_be_written_is_told_before_the_work(content, said, place, command, monkeypatch):
    def draw(*args):
        raise AssertionError("this is work")

    write("coco.json", instances() | content)
    if said:
        monkeypatch.setattr(complete, "complete_image", draw)
    end = command(main, "complete", "coco.json", *FLAGS)
    assert end.code == (2 if said else 0) and said in end.err, end.err


def test_the_commands_of_the_documentation(place, command):
    write("instances.json", instances())
    write("results.json", results((7, 8)))
    Path("masks").mkdir()
    Image.fromarray(MUG).save("masks/000000000001_mug.png")
    page = (Path(__file__).parents[1] / "docs" / "complete.md").read_text("utf-8")
    lines = re.findall(r"^python -m r2sm_jax.data (complete .*)$", page, re.M)
    assert len(lines) == 3
    for line in lines:
        words = [word for word in line.split() if word not in ("--model", "photos-small")]
        end = command(main, *words, "--model", "completer", "--overwrite")
        assert end.code == 0 and Path("draft.json").exists(), end.err


def test_occluders_are_those_that_cover_what_was_added():
    added = masks.encode(rectangle(0, 0, 10, 10))
    others = {
        4: masks.encode(rectangle(0, 0, 3, 10)),  # 30 %
        9: masks.encode(rectangle(3, 0, 10, 9)),  # 63 %
        2: masks.encode(rectangle(9, 9, 80, 60)),  # 1 %
    }
    assert find_occluders(added, others) == [9, 4]
    assert find_occluders(masks.encode(np.zeros(SIZE, bool)), others) == []


def test_a_dataset_file_with_visible_masks_and_queries_is_completed(place, command):
    source = instances()
    source["annotations"] = source["annotations"][:2]
    source["annotations"][0] |= {"visible_mask": masks.encode(MUG), "segmentation": None}
    query = {"image_id": 7, "text": "the mug", "mask_type": "modal"}
    source["queries"] = [query | {"id": 1, "instance_ids": [31]}]
    end = command(main, "complete", write("data.json", source), *FLAGS)
    assert end.code == 0, end.err
    np.testing.assert_array_equal(masks.decode(completed_by_id()[31]["visible_mask"]), MUG)
    assert json.loads(Path("out.json").read_text())["queries"] == source["queries"]


def test_what_cannot_be_completed_stays_as_it_is(place, command):
    """An image without objects and without a file, and an object of which nothing shows."""
    source = instances()
    source["images"].append({"id": 99, "file_name": "empty.png", "height": HEIGHT, "width": WIDTH})
    source["annotations"][0]["visible_mask"] = masks.encode(np.zeros(SIZE, bool))
    end = command(main, "complete", write("data.json", source), *FLAGS)
    assert end.code == 0 and "wrote out.json: 2 objects completed in 3 images" in end.out, end.err
    assert "1 crowds or ignored regions" in end.out
    hidden = completed_by_id()[31]
    assert "occluded_by" not in hidden
    np.testing.assert_array_equal(masks.decode(hidden["segmentation"]), MUG)


def test_objects_that_hide_others_are_named_by_their_new_ids(place, command):
    source = instances()
    for number, annotation in enumerate(source["annotations"]):
        annotation["id"] = number
    end = command(main, "complete", write("data.json", source), *FLAGS)
    assert end.code == 0 and "annotations have new ids" in end.out, end.err
    by_id = completed_by_id()
    assert [annotation.get("source_id") for annotation in by_id.values()] == [0, 1, 2, 3]
    assert by_id[1]["occluded_by"] == [2]
    assert all(number not in a.get("occluded_by", ()) for number, a in by_id.items())


@pytest.mark.parametrize("score", ["0.4", 40.0, None])
def test_a_least_score_needs_scores(place, refused, score):
    entries = results()
    entries[1]["score"] = score
    file = write("results.json", entries)
    message = refused(main, "complete", file, *FLAGS, "--min-score", "0.5")
    assert "results.json: result 2 has the score" in message


def results(image_ids=(1, 1)) -> list[dict]:
    """A COCO results file, as detectron2's COCOEvaluator and pycocotools users write it."""
    entries = []
    for image_id, mask, score in zip(image_ids, (MUG, BOX), (0.9, 0.4), strict=True):
        entry = {"image_id": image_id, "category_id": 3, "score": score, "bbox": [0, 0, 1, 1]}
        entries.append(entry | {"segmentation": masks.encode(mask)})
    return entries


def test_results_find_their_image_by_its_name(place, command):
    end = command(main, "complete", write("results.json", results()), *FLAGS)
    assert end.code == 0, end.err
    records = json.loads(Path("out.json").read_text())
    assert [image["file_name"] for image in records["images"]] == ["000000000001.png"]
    assert [a["id"] for a in records["annotations"]] == [1, 2]
    assert [a["source_score"] for a in records["annotations"]] == [0.9, 0.4]
    for annotation in records["annotations"]:
        assert 0 < annotation["score"] < 1 and 0 < annotation["hidden_probability"] < 1
    assert records["categories"] == [{"id": 1, "name": "object"}]
    assert "results.json: all objects are called 'object'; give the COCO file" in end.err


def test_results_of_a_coco_file_and_a_least_score(place, command):
    write("coco.json", instances())
    write("results.json", results((8, 8)))
    flags = "--annotations", "coco.json", "--min-score", "0.5"
    end = command(main, "complete", "results.json", *flags, *FLAGS)
    assert end.code == 0, end.err
    records = json.loads(Path("out.json").read_text())
    assert [image["id"] for image in records["images"]] == [8]
    assert [a["id"] for a in records["annotations"]] == [1]
    assert [c["name"] for c in records["categories"]] == ["mug", "box"]  # one of them unused


def test_boxes_of_a_detector_are_outlined_first(place, command, refused, completer, monkeypatch):
    """What shows in a box is drawn by the outliner, here its left half; a mask stays as it is."""

    def outline(pixels, prompts):
        np.testing.assert_array_equal(pixels, PIXELS[0])
        x0, y0, x1, y1 = map(int, prompts[0].box)
        return [Outline(rectangle(x0, y0, (x0 + x1) // 2, y1), 0.7)]

    parts = {"completer": completer, "outliner": outline}
    monkeypatch.setattr(load, "load_part", lambda model, part: parts[part])
    entries = results()
    del entries[0]["segmentation"]
    entries[0]["bbox"] = masks.coco_box(MUG)
    end = command(main, "complete", write("results.json", entries), *FLAGS)
    assert end.code == 0, end.err
    drawn, given = (completed_by_id()[number] for number in (1, 2))
    visible = rectangle(10, 10, 20, 40)
    np.testing.assert_array_equal(masks.decode(drawn["visible_mask"]), visible)
    np.testing.assert_array_equal(masks.decode(given["visible_mask"]), BOX)
    expected, _ = completer.complete(PIXELS[0], [visible, BOX], visible | BOX)
    np.testing.assert_array_equal(masks.decode(drawn["segmentation"]), expected.mask)
    assert drawn["score"] == 0.7 * expected.iou
    assert drawn["visible_score"] == 0.7 and drawn["source_score"] == 0.9
    assert drawn["visible_mask_from"] == "bbox" and "visible_score" not in given

    entries[0]["bbox"] = [10, 10, -5, 30]
    message = refused(main, "complete", write("results.json", entries), *FLAGS, "--overwrite")
    assert "result 1: its bbox is [10, 10, -5, 30]; give x, y, width and height" in message


def test_a_box_of_an_instances_file_is_outlined_as_one_of_results(
    place, command, completer, monkeypatch
):
    """Once: the draft of a box has a mask."""
    prompts = []

    def outline(pixels, given):
        prompts.extend(given)
        return [Outline(MUG, 0.7)]

    parts = {"completer": completer, "outliner": outline}
    monkeypatch.setattr(load, "load_part", lambda model, part: parts[part])
    source = instances()
    source["annotations"][0]["segmentation"] = []
    end = command(main, "complete", write("coco.json", source), *FLAGS)
    assert end.code == 0, end.err
    np.testing.assert_array_equal(masks.decode(completed_by_id()[31]["visible_mask"]), MUG)
    assert [prompt.box for prompt in prompts] == [(10, 10, 30, 40)]
    score = completed_by_id()[31]["score"]
    end = command(main, "complete", "out.json", *flags(out="again.json"))
    assert end.code == 0 and len(prompts) == 1, end.err
    again = {a["id"]: a for a in json.loads(Path("again.json").read_text())["annotations"]}
    assert again[31]["score"] == score  # the outline is no surer than it was


def test_a_region_to_ignore_keeps_its_box(place, command):
    """It needs no outliner, which this model lacks."""
    source = instances()
    del source["annotations"][2]["segmentation"]
    end = command(main, "complete", write("coco.json", source), *FLAGS)
    assert end.code == 0 and "1 crowds or ignored regions" in end.out, end.err
    kept = completed_by_id()[40]
    np.testing.assert_array_equal(masks.decode(kept["segmentation"]), CROWD)
    assert kept["ignore"] and "visible_score" not in kept


def test_corners_in_the_place_of_width_and_height_end_outside(place, command):
    """Which is said before an outliner, which this model lacks, is needed."""
    corners = [[10, 10, 30, 40], [30, 20, 60, 50]]
    entries = [{"image_id": 1, "category_id": 3, "score": 0.9, "bbox": box} for box in corners]
    end = command(main, "complete", write("results.json", entries), *FLAGS)
    assert "1 of 2 boxes end outside of their image (result 2: bbox [30, 20, 60, 50])" in end.err


def test_scores_and_crowds_count_in_all_files(place, command):
    """`predict --coco` writes instances with scores, supervision results with crowds."""
    source = instances()
    for annotation in source["annotations"]:
        annotation["score"] = 0.2 if annotation["id"] == 12 else 0.9
    end = command(main, "complete", write("coco.json", source), *FLAGS, "--min-score", "0.5")
    assert end.code == 0 and completed_by_id().keys() == {31, 40, 50}, end.err
    entries = [entry | {"iscrowd": 1} for entry in results()]
    write("results.json", entries)
    flags = *FLAGS, "--overwrite", "--crowds", "objects"
    end = command(main, "complete", "results.json", *flags)
    assert end.code == 0 and "2 objects completed" in end.out, end.err


def test_a_damaged_image_loses_its_annotations_only(place, command, refused):
    Path("photos/000000000002.png").write_bytes(Path("photos/000000000002.png").read_bytes()[:3000])
    write("coco.json", instances())
    end = command(main, "complete", "coco.json", *FLAGS, "--max-bad", "0.5")
    assert end.code == 0 and "000000000002.png" in end.err
    assert completed_by_id().keys() == {31, 12, 40}
    Path("out.json").unlink()
    assert "000000000002.png" in refused(main, "complete", "coco.json", *FLAGS)
    assert not Path("out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["COCO", *flags(images="nowhere")], "nowhere"),
        (["COCO", *flags(images="masks")], "000000000001.png is not in masks"),
        (["COCO", *flags(model="photos")], "photos"),
        (["COCO", *FLAGS, "--annotations", "COCO"], "--annotations"),
        (["RESULTS", *FLAGS, "--annotations", "RESULTS"], "--annotations RESULTS: it lists no"),
        (["RESULTS", *FLAGS, "--annotations", "TWICE"], "images.1.: its id 7 occurs twice"),
        (["ENTRIES", *FLAGS], r"results\[0\]: it is no object"),
        (["COCO", *FLAGS, "--max-bad", "-1"], "--max-bad -1.*not a share"),
        (["photos", *FLAGS, "--min-score", "0.5"], "--min-score is for COCO files"),
        (["photos", *FLAGS, "--crowds", "objects"], "--crowds is for COCO files"),
        (["COCO", *flags(out="COCO")], "--overwrite"),
        (["COCO", *flags(out="masks"), "--overwrite"], "masks: it is a folder"),
        (["BOXES", *FLAGS], "completer has no outliner"),
        (["RESULTS", *FLAGS], "no image has this name"),
        (["NAMELESS", *FLAGS], "image None: no image has this name"),
        (["OTHER", *FLAGS], "there are no masks to complete|no 'regions'"),
        (["EMPTY", *FLAGS], "no masks to complete"),
        (["TWO", *FLAGS], "modal_mask of annotation 12 holds a mask, too"),
        (["MISSING", *FLAGS], "MISSING: No such file"),
        (["masks", *FLAGS], "no images in it"),
    ],
)
def test_refusals(arguments, named, place, refused):
    Path("masks").mkdir()
    Path("masks/a.txt").write_text("")
    contents = {
        "COCO": instances(),
        "BOXES": [{k: v for k, v in entry.items() if k != "segmentation"} for entry in results()],
        "RESULTS": results((99, 99)),
        # As SAM's automatic masks are stored.
        "NAMELESS": [{"segmentation": entry["segmentation"]} for entry in results()],
        "OTHER": {"images": []},
        "EMPTY": instances() | {"annotations": []},
        "TWO": instances(),
        "TWICE": instances(),
        "ENTRIES": [results()],
    }
    contents["TWICE"]["images"][1]["id"] = 7
    contents["TWO"]["annotations"][1]["modal_mask"] = masks.encode(BOX)
    for name, content in contents.items():
        write(name, content)
    assert re.search(named, refused(main, "complete", *arguments))
    assert not Path("out.json").exists()


def test_a_model_without_a_completer_is_refused(place, refused):
    save_completer(place / "old", MaskCompleter(CompleterConfig(), nnx.State({})))
    write("coco.json", instances())
    assert "old has no completer" in refused(main, "complete", "coco.json", *flags(model="old"))


@pytest.mark.parametrize("first", [31, 0])
def test_shards_are_parts_of_the_whole(first, place, command):
    """Also where annotations have new ids, since one is 0."""
    source = instances()
    source["annotations"][0]["id"] = first
    write("coco.json", source)
    assert command(main, "complete", "coco.json", *FLAGS).code == 0
    whole = json.loads(Path("out.json").read_text())
    for number in (1, 2):
        arguments = [*flags(out=f"draft-{number}-of-2.json"), "--shard", f"{number}/2"]
        assert command(main, "complete", "coco.json", *arguments).code == 0
    page = (Path(__file__).parents[1] / "docs" / "complete.md").read_text("utf-8")
    (join,) = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)
    exec(compile(join.replace("-of-8", "-of-2"), "docs/complete.md", "exec"), {})
    joined = json.loads(Path("draft.json").read_text())
    for key in ("images", "annotations", "categories", "queries"):
        in_order, expected = (sorted(r[key], key=lambda r: r["id"]) for r in (joined, whole))
        assert in_order == expected, key
