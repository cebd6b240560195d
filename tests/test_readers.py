"""Files and folders of other projects: what `data convert` makes of them, and what it refuses."""

import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.__main__ import main
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.dataset import read_json, to_records, write
from r2sm_jax.data.readers.coco import COCOOptions, read_coco
from r2sm_jax.data.readers.mask_folders import read_mask_folders
from r2sm_jax.data.readers.referring import (
    draw_polygon,
    read_lisa_plus_plus,
    read_mmr,
    read_pickle,
    read_refcoco,
)
from r2sm_jax.errors import InputError

FILES = Path(__file__).parent / "files" / "readers"
SIZE = HEIGHT, WIDTH = 20, 30


def block(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    mask = np.zeros(SIZE, bool)
    mask[y0:y1, x0:x1] = True
    return mask


FRONT, BACK = block(2, 2, 12, 12), block(8, 6, 24, 18)


def photo(path: Path, height: int = HEIGHT, width: int = WIDTH) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), "olive").save(path)
    return path


def real(name: str) -> Path:
    """A path of real data; skips the test if it is missing."""
    path = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data")) / name
    if not path.exists():
        pytest.skip(f"there is no {path} (set R2SM_REAL_DATA)")
    return path


def load(name: str) -> Any:
    return json.loads((FILES / name).read_text())


def save(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with the files of all formats and their photos."""
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "1.jpg", "reasonseg/x.jpg", "train2017/5.jpg"):
        photo(tmp_path / name)
    photo(tmp_path / "cocoa" / "a.jpg", 40, 60)
    return tmp_path


# One file a format, and what it becomes.

EXAMPLES = {
    "coco": "coco coco.json --queries 0",
    "cocoa-cls": "cocoa-cls cocoa-cls.json --queries 0",
    "aistron": "cocoa-cls aistron.json --queries 0",
    "kins": "kins kins.json --queries 0",
    "d2sa": "d2sa d2sa.json --oversize crop --queries 0",
    "muva": "muva muva.json --amodal-field full --visible-field part --queries 0",
    "cocoa": "cocoa cocoa --queries 0",
    "folders": "folders . --queries 0",
    "mmr": "mmr MMR_train.json",
    "reasonseg": "reasonseg reasonseg --explanatory explanatory.json",
    "lisa++": "lisa++ lisa.json",
    "refcoco": "refcoco refs.json --instances cocoa-cls.json",
    "r2sm": "r2sm r2sm.json --over over.json",
    "r2sm_masks": "r2sm r2sm_masks.json",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_file_of_each_format(name, place, command):
    if name == "folders":
        for number, (complete, visible) in enumerate([(FRONT, FRONT), (BACK, BACK & ~FRONT)]):
            photo(place / "occlusion" / "b_occlusion.png")
            for folder, mask in (("whole_mask", complete), ("visible_object_mask", visible)):
                (place / folder).mkdir(exist_ok=True)
                Image.fromarray(mask).save(place / folder / f"b_{number}_red_{folder}.png")
    over = "cocoa-cls", "cocoa-cls.json", "--queries", 0, "--out", "over.json"
    assert command(main, "convert", *over).code == 0
    end = command(main, "convert", *EXAMPLES[name].split(), "--out", "out.json")
    assert end.code == 0, end.err
    assert json.loads(Path("out.json").read_text()) == load(f"expected/{name}.json")


# Laws of all readers.


def truths_of(path: Path, **options: Any) -> list:
    return list(read_coco(path, options=COCOOptions(**options)))


def test_a_file_that_was_written_is_read_as_it_was(place):
    """Masks, ids, classes, queries and other fields; a second writing changes nothing."""
    for name in ("cocoa-cls.json", "coco.json", "cocoa/a.json"):
        truths = truths_of(place / name)
        records = write(place / "out.json", truths, overwrite=True)
        assert to_records(truths_of(place / "out.json")) == records
        dataset = read_json(place / "out.json", need_images=False)
        for index, truth in enumerate(truths):
            pairs = zip(dataset.truth_at(index).instances, truth.instances, strict=True)
            assert all(replace(one, fields={}) == replace(two, fields={}) for one, two in pairs)


@pytest.mark.parametrize(
    ("field", "renamed"),
    [
        ("visible_mask", "inmodal_seg"),
        ("visible_mask", "i_segmentation"),
        ("visible_mask", "i_segm"),
        ("visible_mask", "visible_segm"),
        ("segmentation", "a_segm"),
        ("segmentation", "amodal_segm"),
    ],
)
@pytest.mark.parametrize("kind", ["any", "cocoa-cls", "d2sa", "kins"])
def test_field_names_of_all_loaders(kind, field, renamed, tmp_path):
    content = load("cocoa-cls.json")
    for annotation in content["annotations"]:
        annotation[renamed] = annotation.pop(field)
    ((front, back),) = [t.instances for t in truths_of(save(tmp_path / "c.json", content))]
    assert masks.decode(front.modal).sum() == masks.decode(front.amodal).sum() == FRONT.sum()
    np.testing.assert_array_equal(masks.decode(back.modal), BACK & ~FRONT)
    np.testing.assert_array_equal(masks.decode(back.amodal), BACK)


def test_without_fields_of_visible_masks_a_segmentation_is_what_shows(place):
    ((front, _, crowd),) = [truth.instances for truth in truths_of(place / "coco.json")]
    assert front.amodal is None and not front.ignore and crowd.ignore
    (truth,) = truths_of(place / "coco.json", crowds_are_objects=True)
    assert not truth.instances[2].ignore


def test_ids_that_collide_are_numbered_anew(tmp_path):
    content = load("cocoa-cls.json")
    content["images"].append(content["images"][0] | {"id": 8, "file_name": "b.jpg"})
    content["annotations"][1] |= {"image_id": 8, "id": 31}
    records = to_records(truths_of(save(tmp_path / "c.json", content)))
    assert [(a["id"], a.get("source_id")) for a in records["annotations"]] == [(1, 31), (2, 31)]
    content["annotations"][1]["id"] = 0  # which COCO tools read as no match
    records = to_records(truths_of(save(tmp_path / "c.json", content)))
    assert [(a["id"], a.get("source_id")) for a in records["annotations"]] == [(1, 31), (2, 0)]


def test_files_whose_image_ids_collide(place, command):
    content = load("cocoa-cls.json")
    content["images"][0]["file_name"] = "b.jpg"
    save(place / "b.json", content)
    words = "d2sa", "cocoa-cls.json", "b.json", "--out", "out.json", "--queries", 0
    end = command(main, "convert", *words)
    assert end.code == 0 and "its image ids collide; 1 was added" in end.err
    assert [i["id"] for i in json.loads(Path("out.json").read_text())["images"]] == [7, 8]


def test_names_that_hold_the_folder_of_the_images_already(place, command):
    photo(place / "photos" / "a.jpg")
    words = "cocoa-cls", "cocoa-cls.json", "--images", "photos", "--out", "out.json"
    assert command(main, "convert", *words).code == 0
    assert read_json(Path("out.json"))[0].file_name == "photos/a.jpg"
    assert command(main, "check", "out.json", "--images", "photos").code == 0


def test_bad_records_are_left_out_and_counted(tmp_path):
    content = load("cocoa-cls.json")
    image, annotation = content["images"][0], content["annotations"][0]
    content["images"] += [{"file_name": "x.jpg"}, image, image | {"id": 8, "height": 0}]
    content["annotations"] += [
        annotation | {"id": 1, "image_id": 8},
        annotation | {"id": 2, "category_id": 999},
        annotation | {"id": 3, "segmentation": {"size": [30, 20], "counts": [600]}},
        annotation | {"id": 4, "iscrowd": "maybe"},
        annotation | {"id": 31},
        annotation | {"id": 5, "segmentation": [[40, 40, 50, 40, 50, 50]], "visible_mask": None},
    ]
    collector = Collector()
    (truth,) = read_coco(save(tmp_path / "c.json", content), collector=collector)
    assert [instance.id for instance in truth.instances] == [31, 32]
    words = [
        "category_id 999 is none",
        "exchanged",
        "iscrowd is 'maybe'",
        "occurs twice",
        "no pixel",
    ]
    words += ["'id' is missing", "its id 7", "0 x 30 is no size", "image 8 is not in the file"]
    for bad, word in zip(collector.bad, words, strict=True):
        assert word in bad.what and "c.json" in bad.where
    with pytest.raises(InputError, match=r"annotation 2.*9 of 12 records are bad; --max-bad 0.5"):
        collector.check(0.5)


def test_results_are_named_after_their_images(tmp_path):
    """An id that is a name gets a number of its own; a name that two files have is refused."""
    for name in ("1.png", "dog.png", "0002.png"):
        photo(tmp_path / name)
    result = {"category_id": 3, "segmentation": masks.encode(FRONT), "score": 0.9}
    results = [result | {"image_id": key} for key in (1, "dog", 2, 1)]
    path = save(tmp_path / "r.json", [*results, result | {"image_id": 1, "score": 0.1}])
    truths = list(read_coco(path, tmp_path, COCOOptions(min_score=0.5)))
    found = [(truth.image_id, truth.file_name, len(truth.instances)) for truth in truths]
    assert found == [(1, "1.png", 2), (3, "dog.png", 1), (2, "0002.png", 1)]
    photo(tmp_path / "b" / "dog.png")
    with pytest.raises(InputError, match=r"image 'dog': .*dog.png, .*dog.png has this name"):
        list(read_coco(path, tmp_path))


def test_folders_of_visible_masks(tmp_path):
    """Words after the image's name are the class; the longest name of an image counts."""
    for name in ("b.jpg", "b_9.jpg"):
        photo(tmp_path / "photos" / name)
    (tmp_path / "masks" / "b").mkdir(parents=True)
    for name in ("b/0.png", "b_1_red cup.png", "b_9_mask.png"):
        Image.fromarray(FRONT).save(tmp_path / "masks" / name)
    truths = read_mask_folders(tmp_path / "photos", tmp_path / "masks", None, Collector())
    found = [(t.file_name, [i.category for i in t.instances]) for t in truths]
    assert found == [("b.jpg", ["object", "red cup"]), ("b_9.jpg", ["object"])]


def test_a_mask_that_two_images_may_have_is_told(tmp_path):
    for name in ("b.jpg", "b_9.jpg"):
        photo(tmp_path / "photos" / name)
    (tmp_path / "masks").mkdir()
    Image.fromarray(FRONT).save(tmp_path / "masks" / "b_9_cup.png")
    collector = Collector()
    (truth,) = read_mask_folders(tmp_path / "photos", tmp_path / "masks", None, collector)
    assert truth.file_name == "b_9.jpg"
    assert any("may be of b, too" in found.what for found in collector.notes)


def test_what_is_not_known_is_kept(place, command):
    """Fields of annotations, attributes, images, classes and of the file itself."""
    content = load("coco.json")
    content |= {"licenses": [{"id": 1, "name": "CC0"}], "info": {"year": 2026}}
    content["images"][0] |= {"license": 1, "date_captured": "2026-11-29"}
    content["categories"][0] |= {"supercategory": "thing", "keypoints": ["neck"]}
    content["categories"].append({"id": 90, "name": "unused"})
    kept = {"keypoints": [3, 4, 2], "note": {"by": ["me"]}, "iou": 0.5, "is_checked": True}
    attributes = {"colour": "green", "rotation": 0.5, "occluded": False, "tags": ["x"]}
    content["annotations"][0] |= kept | {"attributes": attributes}
    content["annotations"][1]["attributes"] = []  # which says nothing
    save(place / "c.json", content)
    words = "convert", "coco", "c.json", "--queries", 0, "--out", "out.json"
    assert command(main, *words).code == 0
    written = json.loads(Path("out.json").read_text())
    assert written["licenses"] == content["licenses"] and written["info"]["year"] == 2026
    assert written["images"] == content["images"]
    assert written["categories"] == content["categories"]
    assert written["annotations"][0].items() >= kept.items()
    assert written["annotations"][0]["attributes"] == attributes
    assert command(main, "check", "out.json").code == 0
    # Only words are read.
    assert read_json(Path("out.json"))[0].instances[0].attributes == {"colour": "green"}


def test_classes_have_the_same_ids_in_all_files(place, command):
    content = load("cocoa-cls.json")
    content["categories"].append({"id": 3, "name": "cup"})
    ids = []
    for category_id in (44, 3):
        for annotation in content["annotations"]:
            annotation["category_id"] = category_id
        save(place / "c.json", content)
        words = "cocoa-cls", "c.json", "--queries", 0, "--out", "out.json", "--overwrite"
        assert command(main, "convert", *words).code == 0
        records = json.loads(Path("out.json").read_text())
        ids.append({category["name"]: category["id"] for category in records["categories"]})
    assert ids[0] == ids[1] == {"bottle": 44, "cup": 3}


SHAPES = [{"label": "target", "points": [[2, 2], [12, 2], [12, 12], [2, 12]]}]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("reasonseg", {"text": "cup", "shapes": SHAPES}, r"got `str` - at `\$.text`"),
        ("reasonseg", {"text": ["a cup", " "], "shapes": SHAPES}, "its question is empty"),
        ("reasonseg", {"text": ["a cup"], "shapes": "cup"}, r"at `\$.shapes`"),
        (
            "reasonseg",
            {"text": ["a cup"], "shapes": [SHAPES[0] | {"shape_type": "circle"}]},
            "shape_type is 'circle'",
        ),
        ("lisa++", [load("lisa.json")[0] | {"ID": "12"}], r"got `str` - at `\$.ID`"),
        ("mmr", [load("MMR_train.json")[0] | {"questions": "Cup?"}], r"at `\$.questions`"),
        (
            "refcoco --instances cocoa-cls.json",
            [load("refs.json")[0] | {"sentences": [{"sent": "a cup"}, {"sent": 3}]}],
            r"at `\$.sentences\[1\].sent`",
        ),
        (
            "refcoco --instances cocoa-cls.json",
            [load("refs.json")[0] | {"ann_id": 99}],
            "annotation 99 of cocoa-cls.json: there is none in the image",
        ),
        ("r2sm --over cocoa-cls.json", [{"image_id": 7, "text": ["a"]}], r"at `\$.text`"),
    ],
)
def test_a_record_of_questions_is_read_whole_or_not_at_all(name, content, reason, place, command):
    """A text is no list, and nothing stays of a record that is left out."""
    photo(place / "cup.jpg")
    save(place / "cup.json", content)
    over = "cocoa-cls", "cocoa-cls.json", "--queries", 0, "--out", "over.json"
    assert command(main, "convert", *over).code == 0
    words = name.replace("over cocoa-cls.json", "over over.json").split()
    words[1:1] = ["cup.json"]
    end = command(main, "convert", *words, "--out", "out.json", "--max-bad", 1)
    assert re.search(reason, end.err), end.err
    if Path("out.json").exists():
        assert json.loads(Path("out.json").read_text())["queries"] == []


def test_a_rectangle_of_labelme_is_no_line(place, command):
    photo(place / "cup.jpg")
    shape = {"label": "target", "shape_type": "rectangle", "points": [[2, 2], [11, 11]]}
    save(place / "cup.json", {"text": ["a cup"], "shapes": [shape]})
    assert command(main, "convert", "reasonseg", "cup.json", "--out", "out.json").code == 0
    np.testing.assert_array_equal(read_json(Path("out.json"))[0].instances[0].modal, FRONT)


def test_one_image_of_mmr_has_one_file(tmp_path):
    (image,) = load("MMR_train.json")
    photo(tmp_path / "train2017" / "5.jpg")
    photo(tmp_path / "train2017" / "6.jpg")
    path = save(tmp_path / "m.json", [image, image | {"file_name": "train2017/6.jpg"}])
    collector = Collector()
    (truth,) = read_mmr([path], tmp_path, collector)
    assert len(truth.queries) == 4 and "image 5 is train2017/5.jpg" in collector.bad[0].what


def test_an_object_has_one_mask(tmp_path):
    photo(tmp_path / "1.jpg")
    question, other, _ = load("lisa.json")
    other["points"] = {"1": question["points"]["2"]}
    collector = Collector()
    path = save(tmp_path / "q.json", [question, other])
    (truth,) = read_lisa_plus_plus([path], tmp_path, collector)
    assert len(truth.queries) == 1 and "object 1 had another mask before" in collector.bad[0].what


def test_splits_of_refcoco(place):
    (ref, *_) = load("refs.json")
    names = ("testA", "testB", "testAB", "test", "val")
    path = save(place / "r.json", [ref | {"split": name} for name in names])
    counts = {}
    for name in names:
        truths = read_refcoco([path], None, Collector(), place / "cocoa-cls.json", name)
        counts[name] = sum(len(truth.queries) for truth in truths)
    assert counts == {"testA": 2, "testB": 2, "testAB": 1, "test": 4, "val": 1}


def test_pickles_hold_plain_data(tmp_path):
    """Strings of Python 2 are read in either encoding; what would run code is refused."""
    path = tmp_path / "refs.p"
    for raw in (b"caf\xc3\xa9", b"caf\xe9"):
        content = pickle.dumps(["SENTENCE"], protocol=1)
        short_string = b"U" + bytes([len(raw)]) + raw  # SHORT_BINSTRING
        path.write_bytes(content.replace(b"X\x08\x00\x00\x00SENTENCE", short_string))
        assert read_pickle(path) == ["caf\xe9"]
    path.write_bytes(pickle.dumps([Path("x")]))
    with pytest.raises(InputError, match=r"holds more than plain data.*write it again as JSON"):
        read_pickle(path)


def test_polygons_of_reasonseg_are_drawn_with_their_outline():
    corners = [[2.9, 3.9], [12.9, 3.1], [12.2, 9.8], [2.1, 9.7]]
    np.testing.assert_array_equal(draw_polygon(corners, SIZE), block(2, 3, 13, 10))
    np.testing.assert_array_equal(draw_polygon([[4, 5], [9, 5]], SIZE), block(4, 5, 10, 6))
    np.testing.assert_array_equal(draw_polygon([[-0.9, 5.5]], SIZE), block(0, 5, 1, 6))
    for points in ([], [1, 2], [[1, 2, 3]], [[1, float("nan")]], [["a", 1]], [[0.1, 0.9]] * 3):
        with pytest.raises(ValueError):
            draw_polygon(points, SIZE)


# What is refused.


def doubled(content: dict, **changes: Any) -> dict:
    """The file with both of its objects twice, since one alone proves nothing."""
    annotations = content["annotations"]
    content["annotations"] = annotations + [a | {"id": a["id"] + 10} for a in annotations]
    for annotation in content["annotations"]:
        for key, change in changes.items():
            annotation[key] = change(annotation)
    return content


def spoilt(name: str) -> Any:
    """A file of the table below."""
    content = load("cocoa-cls.json")
    annotations = content["annotations"]
    empty = masks.encode(FRONT & ~FRONT)
    match name:
        case "unknown":
            content["annotations"] = [{"id": 1, "image_id": 7, "category_id": 44, "mask": []}]
        case "exchanged":
            annotations[:] = [annotations[1] | {"id": 1}, annotations[1]]
            for annotation in annotations:
                visible = annotation.pop("visible_mask")
                annotation |= {"visible_mask": annotation["segmentation"], "segmentation": visible}
        case "unseen":
            return doubled(content, visible_mask=lambda _: empty)
        case "hidden":
            hidden = masks.encode(BACK & FRONT)
            annotations[:] = annotations[1:]
            return doubled(content, visible_mask=lambda _: hidden)
        case "list":
            return [1]
        case "outside":
            content["images"][0]["file_name"] = "../a.jpg"
        case "larger":
            annotations[0]["segmentation"] = masks.encode(np.ones((24, 34), bool))
        case "nameless":
            annotations[0]["id"] = None
        case "named_twice":
            content["categories"].append({"id": content["categories"][0]["id"], "name": "crate"})
        case "spelt":
            counts = annotations[0]["segmentation"]["counts"]
            annotations[0]["segmentation"]["counts"] = str(counts.encode())
    return content


REFUSALS = [
    ("cocoa-cls unknown.json", "there are category_id, id, image_id, mask"),
    ("cocoa-cls coco.json", "use data convert coco"),
    ("cocoa cocoa-cls.json", "no 'regions'"),
    ("coco cocoa-cls.json", "segmentation is the complete mask"),
    ("cocoa-cls cocoa/a.json", "use data convert cocoa"),
    ("muva cocoa-cls.json --visible-field part", "--visible-field"),
    ("muva cocoa-cls.json --amodal-field full", "--amodal-field"),
    ("cocoa-cls exchanged.json", "larger than their complete masks"),
    ("cocoa-cls unseen.json", "have no pixel"),
    ("cocoa-cls hidden.json", "occlude_rate says is hidden"),
    ("cocoa-cls outside.json", "leads out of the image folder"),
    ("cocoa-cls larger.json", "24 x 34 reaches out; use --oversize crop"),
    ("cocoa-cls nameless.json", "'id' is missing"),
    ("cocoa-cls named_twice.json", "and 'crate'; give each an id of its own"),
    ("cocoa-cls spelt.json", "write counts.decode"),
    ("cocoa-cls cocoa-cls.json --images cocoa", "40 pixels high and 60 wide, but"),
    ("cocoa-cls cocoa-cls.json --images reasonseg", "a.jpg is not in reasonseg"),
    ("d2sa cocoa-cls.json aistron.json", "share their file"),
    ("mmr cocoa-cls.json", "not a list"),
    ("mmr list.json", "[0] is not an object"),
    ("lisa++ refs.json", "[0]: "),
    ("refcoco refs.json --instances cocoa-cls.json --split test", "--split is one of train, val"),
    ("reasonseg coco.json", "coco.jpg or coco.jpeg or coco.png is not in"),
    ("r2sm r2sm.json", "give it with --over"),
    ("folders nowhere", "nowhere"),
    ("folders .", "there is no such folder"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSALS)
def test_refusals(words, reason, place, refused):
    for word in words.split():
        if word.endswith(".json") and not (place / word).exists():
            save(place / word, spoilt(word.removesuffix(".json")))
    assert reason in refused(main, "convert", *words.split(), "--out", "out.json")
    assert not Path("out.json").exists()


# Real files.


def test_real_files():
    truths = [t for path in sorted(real("cocoa").glob("*.json")) for t in truths_of(path)]
    assert (len(truths), sum(len(truth.instances) for truth in truths)) == (5, 48)
    loaders = "aisformer_i_segmentation", "aisformer_inmodal_seg", "aistron_visible_segm"
    for name in loaders:
        records = to_records(truths_of(real(f"readers/schema/{name}_real_masks.json")))
        hidden = [a["invisible_mask"] for a in records["annotations"] if "invisible_mask" in a]
        assert sum(masks.areas(hidden)) == 165_816
    (truth,) = truths_of(real("readers/schema/BSDS_amodal_train.json"))  # six annotators
    assert len(truth.instances) == 2
