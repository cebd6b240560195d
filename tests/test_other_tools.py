"""Files of annotation tools and of YOLO, out and in again; each is opened by the other's own code
where it can be."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

import r2sm_jax
from r2sm_jax.data import masks
from r2sm_jax.data.__main__ import main
from r2sm_jax.data.dataset import ImageTruth, Instance, completed_by, read_json, write
from r2sm_jax.data.readers.coco import read_coco
from r2sm_jax.data.readers.listing import COCOOptions
from r2sm_jax.errors import InputError
from r2sm_jax.inference.prediction import InstanceMask, Prediction

SIZE = HEIGHT, WIDTH = 60, 80


def rectangle(x0, y0, x1, y1) -> np.ndarray:
    mask = np.zeros(SIZE, bool)
    mask[y0:y1, x0:x1] = True
    return mask


# What shows of four objects, and the whole of them.
VISIBLE = [
    rectangle(5, 5, 20, 40),
    rectangle(20, 10, 50, 30),
    rectangle(55, 5, 70, 20),
    rectangle(5, 45, 40, 55),
]
WHOLE = [rectangle(5, 5, 30, 40), VISIBLE[1], rectangle(55, 5, 70, 35), VISIBLE[3]]


@pytest.fixture
def draft(tmp_path, monkeypatch) -> Path:
    """A draft of two photos, as `data complete` writes it."""
    monkeypatch.chdir(tmp_path)
    instances = []
    for number, (visible, whole) in enumerate(zip(VISIBLE, WHOLE, strict=True), start=11):
        modal, amodal = masks.encode(visible), masks.encode(whole)
        fields = {"completed_by": completed_by("m", amodal), "score": 0.8}
        fields["occluded_by"] = [12, 14]
        category = "mug" if number < 13 else "box"
        instances.append(Instance(number, category, modal, amodal, fields=fields))
    names = "photos/a.jpg", "photos/b.jpg"
    truths = [
        ImageTruth(5 + n, name, SIZE, tuple(instances[2 * n : 2 * n + 2]), ())
        for n, name in enumerate(names)
    ]
    write(tmp_path / "draft.json", truths, {"description": "of a model"})
    return tmp_path / "draft.json"


def of_cvat() -> dict:
    """Other ids, a folder of its own, an attribute; brushed masks are crowds, as plain RLEs."""
    return {
        "images": [
            {"id": n, "file_name": f"task_1\\{name}.jpg", "height": HEIGHT, "width": WIDTH}
            for n, name in enumerate("ab", start=1)
        ],
        "extra": {"iscrowd": 1, "attributes": {"occluded": False}},
    }


def of_label_studio() -> dict:
    """Ids from 0, names of uploads."""
    images = [
        {"id": n, "file_name": f"images/{n}23456ab-{name}.jpg", "height": HEIGHT, "width": WIDTH}
        for n, name in enumerate("ab")
    ]
    return {"images": images, "extra": {"iscrowd": 0, "ignore": 0}}


def of_roboflow() -> dict:
    """Names that hold the old ending and a version."""
    images = [
        {"id": n, "file_name": f"{name}_jpg.rf.{n}f2a9.jpg", "height": HEIGHT, "width": WIDTH}
        for n, name in enumerate("ab")
    ]
    return {"images": images, "extra": {"iscrowd": 0}}


def plain_rle(mask: np.ndarray) -> dict:
    flat = mask.ravel("F").astype(int)
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *edges, flat.size]).tolist()
    return {"size": list(SIZE), "counts": [0, *runs] if flat[0] else runs}


@pytest.mark.parametrize("tool", [of_cvat, of_label_studio, of_roboflow])
def test_a_corrected_draft_comes_back_without_ids_and_visible_masks(tool, draft, command):
    """One object is larger now, the edge of another is drawn anew, one is gone, one is new."""
    exported = tool()
    extra = exported.pop("extra")
    first, second = (image["id"] for image in exported["images"])
    edge = rectangle(20, 10, 51, 31)
    corrected, new = rectangle(3, 5, 40, 40), rectangle(70, 40, 80, 60)
    drawn = [(second, WHOLE[3]), (first, corrected), (second, new), (first, edge)]
    exported["annotations"] = [
        {"id": n, "image_id": image_id, "category_id": 0, **extra}
        | {"segmentation": plain_rle(mask) if extra["iscrowd"] else masks.polygons(mask)}
        for n, (image_id, mask) in enumerate(drawn)
    ]
    exported["categories"] = [{"id": 0, "name": "mug"}]
    exported["annotations"][0]["category_id"] = 1
    exported["categories"].append({"id": 1, "name": "box"})
    Path("export.json").write_text(json.dumps(exported))
    flags = "--over", draft, "--out", "corrected.json"
    end = command(main, "convert", "corrected", "export.json", *flags)
    assert end.code == 0 and "2 kept, 1 changed, 1 added, 1 dropped" in end.out, end.err + end.out

    # pycocotools opens it: ids and names are those of the draft.
    coco = COCO("corrected.json")
    assert [image["file_name"] for image in coco.loadImgs([5, 6])] == [
        "photos/a.jpg",
        "photos/b.jpg",
    ]
    assert sorted(coco.anns) == [11, 12, 14, 15]
    complete = masks.encode(coco.annToMask(coco.anns[11]).astype(bool))
    assert masks.same_but_edge(complete, masks.encode(corrected))
    visible = masks.decode(coco.anns[11]["visible_mask"])
    np.testing.assert_array_equal(visible, VISIBLE[0])
    np.testing.assert_array_equal(coco.annToMask(coco.anns[12]), WHOLE[1])
    assert "score" not in coco.anns[11] and coco.anns[12]["score"] == 0.8
    assert coco.anns[11]["occluded_by"] == [12]  # 14 is of another image
    dataset = read_json("corrected.json", need_images=False)
    assert [one.category for one in dataset.truth_at(0).instances] == ["mug", "mug"]
    assert dataset.truth_at(1).instances[1].modal == dataset.truth_at(1).instances[1].amodal


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file_name": "c.jpg"}, "c.jpg is not the name of one image of the draft"),
        ({"height": 30}, "it is 30 x 80, in the draft 60 x 80"),
    ],
)
def test_a_file_of_other_images_is_no_corrected_draft(change, said, draft, refused):
    content = json.loads(draft.read_text())
    for image in content["images"]:
        image |= change
    Path("export.json").write_text(json.dumps(content))
    flags = "--over", draft, "--out", "corrected.json"
    assert said in refused(main, "convert", "corrected", "export.json", *flags)
    message = refused(main, "convert", "corrected", draft, draft, *flags)
    assert "2 files are given; give one" in message


def parse_as_ultralytics(file: Path) -> list[tuple[int, np.ndarray]]:
    """Objects of a file of labels, by the rules of ultralytics' documentation: a line an object,
    its class and at least three points x y, in shares of the image's size."""
    objects = []
    for line in file.read_text().splitlines():
        kind, *shares = line.split()
        points = np.array(shares, float).reshape(-1, 2)
        assert len(points) >= 3 and points.min() >= 0 and points.max() <= 1
        objects.append((int(kind), points))
    return objects


@pytest.mark.parametrize("mask", ["modal", "amodal"])
def test_labels_of_yolo_and_back(mask, draft, command):
    """An object in two parts with a hole is one polygon, and the same mask again."""
    ring = rectangle(5, 5, 25, 25) & ~rectangle(10, 10, 20, 20) | rectangle(60, 40, 75, 55)
    content = json.loads(draft.read_text())
    first, second = content["annotations"][:2]
    first |= {"segmentation": masks.encode(ring | VISIBLE[1]), "visible_mask": masks.encode(ring)}
    second |= {"ignore": True}
    draft.write_text(json.dumps(content))
    end = command(main, "labels", draft, "--mask", mask, "--out", "yolo")
    assert end.code == 0 and f"3 {mask} masks of 2 images" in end.out, end.err
    assert "1 are left out" in end.out

    expected = ring | VISIBLE[1] if mask == "amodal" else ring
    ((kind, points),) = parse_as_ultralytics(Path("yolo/labels/photos/a.txt"))
    drawn = masks.encode(masks.from_segmentation((points * (WIDTH, HEIGHT)).tolist(), *SIZE))
    assert kind == 0 and masks.same_but_edge(drawn, masks.encode(expected))

    for name in "ab":
        Path("yolo/images/photos").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (WIDTH, HEIGHT)).save(f"yolo/images/photos/{name}.jpg")
    end = command(main, "convert", "yolo", "yolo/data.yaml", "--out", "back.json")
    assert end.code == 0 and "2 images, 3 annotations" in end.out, end.err
    dataset = read_json("back.json")
    assert list(dataset.vocabulary["category"]) == ["mug", "box"]
    (back,) = dataset.truth_at(0).instances
    assert back.amodal is None and masks.same_but_edge(back.modal, masks.encode(expected))
    assert command(main, "labels", draft, "--mask", mask, "--out", "yolo").code == 2


def test_a_file_without_the_masks_has_no_labels(draft, refused):
    """Empty labels would say that nothing is there."""
    content = json.loads(draft.read_text())
    kept = "id", "image_id", "category_id", "segmentation"
    content["annotations"] = [{name: a[name] for name in kept} for a in content["annotations"]]
    draft.write_text(json.dumps(content))
    message = refused(main, "labels", draft, "--mask", "amodal", "--out", "yolo")
    assert "it has no amodal masks" in message and not Path("yolo").exists()


def test_two_images_never_share_a_file_of_labels(draft, refused):
    content = json.loads(draft.read_text())
    first, second = content["images"][:2]
    first["file_name"], second["file_name"] = "a.jpg", "a.png"
    draft.write_text(json.dumps(content))
    message = refused(main, "labels", draft, "--mask", "modal", "--out", "yolo")
    assert "2 images would have the labels a.txt" in message and not Path("yolo").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 .5 .5 .1 .1", "a.txt: line 1: it is a box and no mask"),
        ("0 5 5 40 5 40 40", "give shares x y of the image's size"),
        ("7 .1 .1 .5 .1 .5 .5", "class 7 is none of `names`"),
        ("0 .1 .1 x", "could not convert"),
        ("0", "give shares x y of the image's size"),
        (None, "it has no names, or no train; give a data.yaml"),
        ("", "nowhere is no folder"),
    ],
)
def test_labels_that_cannot_be_read(line, said, tmp_path, refused):
    for folder in ("train/images", "train/labels"):
        (tmp_path / folder).mkdir(parents=True)
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "train/images/a.jpg")
    (tmp_path / "train/labels/a.txt").write_text(line or "")
    place = "../train/images" if line else "nowhere"  # as Roboflow writes it
    names = "" if line is None else "names: {0: mug}\n"
    (tmp_path / "data.yaml").write_text(f"{names}train: {place}\nval: {place}\n")
    message = refused(
        main, "convert", "yolo", tmp_path / "data.yaml", "--out", tmp_path / "out.json"
    )
    assert said in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("names: {x: mug}\ntrain: images", "it has no names, or no train"),
        ("names: [mug]\ntrain: 7", "7 is no folder"),
        ("names: [mug]\ntrain: images\npath: [a]", "it has no names, or no train"),
        ("- names", "it has no names, or no train"),
    ],
)
def test_a_data_yaml_of_another_shape(content, said, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    Path("data.yaml").write_text(content)
    assert said in refused(main, "convert", "yolo", "data.yaml", "--out", "out.json")


def test_results_of_ultralytics_name_the_files_of_images(draft):
    (draft.parent / "photos").mkdir()
    for name in "ab":
        Image.new("RGB", (WIDTH, HEIGHT)).save(draft.parent / f"photos/{name}.jpg")
    mask = masks.encode(VISIBLE[0])
    results = [{"image_id": i, "category_id": 1, "segmentation": mask, "score": 0.9} for i in "ba"]
    Path("predictions.json").write_text(json.dumps(results))
    options = COCOOptions(annotations=draft)
    truths = list(read_coco(Path("predictions.json"), draft.parent, options))
    assert [(t.image_id, t.file_name) for t in truths] == [(6, "photos/b.jpg"), (5, "photos/a.jpg")]
    content = json.loads(draft.read_text())
    content["images"].append(content["images"][0] | {"id": 7, "file_name": "others/a.jpg"})
    draft.write_text(json.dumps(content))
    with pytest.raises(InputError, match="image 'a': it is not one image of"):
        list(read_coco(Path("predictions.json"), draft.parent, options))


def test_results_correct_a_draft_whose_images_are_given(draft, command, refused):
    (draft.parent / "photos").mkdir()
    for name in "ab":
        Image.new("RGB", (WIDTH, HEIGHT)).save(f"photos/{name}.jpg")
    results = [{"image_id": "a", "category_id": 1, "segmentation": masks.encode(WHOLE[0])}]
    Path("results.json").write_text(json.dumps(results))
    words = "convert", "corrected", "results.json", "--over", draft, "--out", "out.json"
    end = command(main, *words, "--images", "photos")
    assert end.code == 0 and "3 kept, 0 changed, 0 added, 1 dropped" in end.out, end.err + end.out
    names = [image["file_name"] for image in json.loads(Path("out.json").read_text())["images"]]
    assert names == ["photos/a.jpg", "photos/b.jpg"]
    assert "nowhere" in refused(main, *words, "--images", "nowhere", "--overwrite")


def test_detections_of_supervision():
    supervision = pytest.importorskip("supervision")
    parts = [InstanceMask(0.9, 0.7, VISIBLE[0], VISIBLE[0], WHOLE[0])]
    both = VISIBLE[0] | VISIBLE[2], WHOLE[0] | WHOLE[2]
    predictions = [
        Prediction("the mug", "modal", 0.1, 0.8, VISIBLE[0], WHOLE[0], instances=tuple(parts)),
        Prediction("both dogs, whole", "amodal", 0.9, 0.5, *both),
        Prediction("nothing", "modal", 0.1, 0.5, rectangle(0, 0, 0, 0), rectangle(0, 0, 0, 0)),
    ]
    detections = r2sm_jax.to_supervision(predictions)
    assert isinstance(detections, supervision.Detections)
    assert detections.class_id.tolist() == [0, 1]
    np.testing.assert_array_equal(detections.mask, [VISIBLE[0], both[1]])
    assert detections.xyxy.tolist()[0] == [5, 5, 20, 40]
    assert detections["class_name"].tolist() == ["the mug", "both dogs, whole"]
    np.testing.assert_array_equal(detections.data["amodal"][0], WHOLE[0])
    assert len(r2sm_jax.to_supervision(predictions[2:])) == 0
    picture = np.zeros((*SIZE, 3), np.uint8)
    assert supervision.MaskAnnotator().annotate(picture.copy(), detections).any()


def test_an_answer_whose_objects_are_not_told_apart_is_one_annotation():
    answer = Prediction(
        *("dogs", "amodal", 0.9, 0.5, VISIBLE[0], WHOLE[0]), presence=0.8, unsure_below=0.6
    )
    (one,) = answer.to_instances()
    assert (one.modal, one.amodal) == (masks.encode(VISIBLE[0]), masks.encode(WHOLE[0]))
    expected = {"score": 0.4, "answer_score": 0.5, "presence": 0.8, "unsure": True}
    assert {name: one.fields[name] for name in expected} == expected
    assert one.fields["completed_by"]["model"] == "predict"
