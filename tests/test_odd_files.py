"""Files in the layouts of real data sets, good and odd ones."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from test_bad_records import many, needs
from test_cocoa import annotation
from test_readers import BACK, FRONT, SEEN, coco, mmr, photo, points, refs, square, to_read, write

from r2sm_jax.data import masks
from r2sm_jax.errors import InputError
from r2sm_jax.tools.coco import PRESETS, MaskOptions, read_coco_like
from r2sm_jax.tools.referring import read_lisa_plus_plus, read_mmr, read_refcoco

SAMPLES = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data")) / "readers"


def combined(file_name: str, **image: Any) -> dict[str, Any]:
    """A combined file of COCOA: its images, and an annotation that lists regions."""
    listed = {"id": 3, "file_name": file_name, "height": 40, "width": 60, **image}
    return {
        "images": [listed],
        "annotations": [annotation(url=f"https://example.org/BSDS_train_{file_name}")],
    }


@pytest.mark.parametrize(
    "name", ["COCO_val2014_000000000009.jpg", "000000000009.jpg", "BSDS_train_9.jpg"]
)
def test_combined_files_of_cocoa_name_their_images(name, tmp_path):
    content = combined("9.jpg" if "BSDS" in name else "COCO_val2014_000000000009.jpg")
    path = write(tmp_path / "COCO_amodal_val2014.json", content)
    (found,) = read_coco_like(to_read(path), PRESETS["cocoa"]).images.values()
    assert (
        found["file_name"] == content["images"][0]["file_name"]
    )  # the file states sizes: no image is needed
    photo(tmp_path / "photos" / name, 40, 60)
    photo(
        tmp_path / "photos" / "COCO_amodal_val2014.jpg", 40, 60
    )  # the file's own name means nothing here
    read = read_coco_like(to_read(path, images=tmp_path / "photos"), PRESETS["cocoa"])
    assert read.image_paths[3].name == name and len(read.annotations) == 3


def test_a_combined_file_without_images_takes_them_from_the_url(tmp_path):
    photo(tmp_path / "photo.jpg", 40, 60)
    photo(tmp_path / "all.jpg", 40, 60)
    path = write(
        tmp_path / "all.json", {"annotations": [annotation(), annotation(), annotation(image_id=4)]}
    )
    found = read_coco_like(to_read(path), PRESETS["cocoa"], MaskOptions())
    assert {path.name for path in found.image_paths.values()} == {"photo.jpg"}
    assert "annotations[1]: left out, image 3 has been read before" in str(found.notes[0])


def test_a_bsds_file_keeps_the_first_of_six_annotators():
    path = needs(SAMPLES / "schema" / "BSDS_amodal_train.json")
    found = read_coco_like(to_read(path), PRESETS["cocoa"])
    assert len(found.images) == 1 and len(found.annotations) == 2 and found.bad == []


def test_a_field_that_no_region_has_is_refused(tmp_path):
    path = write(tmp_path / "c.json", combined("9.jpg"))
    with pytest.raises(InputError, match=r"no annotation has seen; there are .*visible_mask"):
        read_coco_like(to_read(path), PRESETS["cocoa"], MaskOptions(visible_field="seen"))


def question(**changes: Any) -> dict[str, Any]:
    answer = "instance id is 1, label name is cup; instance id is 2, label name is box"
    record = {
        "English Question": "Which?",
        "English Answer": answer,
        "ID": ["1", "2"],
        "img_path": "1.jpg",
    }
    shapes = {
        number: {"label name": "cup", "points": [points(*corners)]}
        for number, corners in CORNERS.items()
    }
    return record | {"points": shapes} | changes


CORNERS = {"1": (2, 2, 12, 12), "2": (20, 2, 25, 12)}


def read_questions(folder: Path, *records: dict[str, Any]):
    """LISA++ records, after 200 good ones."""
    photo(folder / "1.jpg")
    return read_lisa_plus_plus(
        to_read(write(folder / "data.json", [question()] * 200 + list(records)))
    )


RINGS = [
    [points(2, 2, 12, 12), [[1, 1], [2, 2]]],
    points(2, 2, 12, 12),
    [square(2, 2, 12, 12)],
    masks.encode(FRONT),
]


@pytest.mark.parametrize("first", RINGS)
def test_lisa_plus_plus_masks_that_can_be_mended(first, tmp_path):
    record = question(
        points=question()["points"] | {"1": {"points": first}}, ID=[1, 2], img_path=" 1.jpg "
    )
    del record["English Answer"]
    photo(tmp_path / "1.jpg")
    found = read_lisa_plus_plus(to_read(write(tmp_path / "d.json", [record])))
    assert len(found.annotations) == 2 and found.bad == []
    assert (masks.decode(found.annotations[0]["visible_mask"]) == FRONT).all()
    assert "answer" not in found.queries[0] and found.queries[0]["instance_ids"] == [1, 2]


def test_lisa_plus_plus_ids_without_points(tmp_path):
    found = read_questions(tmp_path, question(ID=["1", "2", "99"]))
    assert found.bad == [] and found.queries[-1]["instance_ids"] == [1, 2]
    assert "[200]: ID 99 was left out" in str(found.notes[0])
    answer = {"English Answer": "instance id is 1, instance id is 99"}
    found = read_questions(tmp_path, question(ID=["1", "99"], **answer))
    assert len(found.queries) == 200 and "[200].points: its '99' is missing" in str(found.bad[0])


@pytest.mark.parametrize(
    "lost", [[], [[[5, 5], [6, 6]]], [points(40, 40, 50, 50)], {"size": [9, 9], "counts": [81]}]
)
def test_lisa_plus_plus_records_that_are_left_out(lost, tmp_path):
    shapes = question()["points"] | {"1": {"label name": "cup", "points": lost}}
    photo(tmp_path / "2.jpg")
    found = read_questions(tmp_path, question(points=shapes, img_path="2.jpg", ID=["2", "1"]))
    assert len(found.queries) == 200 and len(found.annotations) == 2 and len(found.images) == 1
    (note,) = found.bad
    assert "[200].points.1: its points" in str(note)


def test_mmr_keeps_every_question_outside_training(tmp_path):
    content = mmr()
    content[0]["text_answers"][0] = ""
    for name, kept in (("MMR_val.json", 4), ("MMR_train.json", 3)):
        found = read_mmr(to_read(write(tmp_path / name, content)))
        assert len(found.queries) == kept and len(found.notes) == 4 - kept and found.bad == []


def test_mmr_lists_of_masks_and_one_image_in_several_records(tmp_path):
    content = mmr()
    for answers in content[0]["answers"]:
        answers[0] = answers[0] | {"segmentation": [masks.encode(FRONT), masks.encode(BACK)]}
    found = read_mmr(to_read(write(tmp_path / "m.json", [*content, *mmr()])))
    assert len(found.images) == 1 and len(found.queries) == 8
    assert (masks.decode(found.annotations[0]["visible_mask"]) == FRONT | BACK).all()
    other = [mmr()[0] | {"width": 31, "questions": [], "answers": [], "text_answers": []}]
    with pytest.raises(InputError, match="image 5 has another size before"):
        read_mmr(to_read(write(tmp_path / "m.json", [*content, *other])))


def kins(**changes: Any) -> dict[str, Any]:
    """A KINS file of 2020 with the two objects of the tests."""
    content = coco(categories=[])
    for record, modal in zip(content["annotations"], (FRONT, SEEN), strict=True):
        record |= {
            "category_id": 4,
            "a_segm": record.pop("segmentation"),
            "i_segm": masks.encode(modal),
        }
        del record["visible_mask"]
    content["annotations"][0] |= changes
    return content


def test_kins_without_sizes_takes_them_from_the_images(tmp_path):
    content = kins()
    content["images"] = [{"id": 7, "file_name": "a.jpg"}]
    path = write(tmp_path / "k.json", content)
    with pytest.raises(InputError, match=r"image 7: a.jpg is not in .*--images DIR"):
        read_coco_like(to_read(path), PRESETS["kins"])
    photo(tmp_path / "a.jpg")
    assert read_coco_like(to_read(path), PRESETS["kins"]).images[7]["height"] == 20


@pytest.mark.parametrize("seen", [[], [[3.1, 3.1, 3.2, 3.1, 3.2, 3.2]]])
def test_kins_objects_that_are_not_visible_at_all(seen, tmp_path):
    found = read_coco_like(to_read(write(tmp_path / "k.json", kins(i_segm=seen))), PRESETS["kins"])
    assert found.annotations[0]["occlude_rate"] == 1 and found.bad == []
    assert "annotation 31: nothing of it is visible" in str(found.notes[0])


def test_kins_short_rings(tmp_path):
    content = kins(i_segm=[square(2, 2, 12, 12), [5, 5, 6, 6]])
    found = read_coco_like(to_read(write(tmp_path / "k.json", content)), PRESETS["kins"])
    assert "visible_mask" not in found.annotations[
        0
    ] and "1 rings of fewer than three points" in str(found.notes[0])


def test_images_without_annotations(tmp_path):
    content = coco()
    del content["annotations"]
    found = read_coco_like(
        to_read(write(tmp_path / "D2S_amodal_test_info.json", content)), PRESETS["d2sa"]
    )
    assert len(found.images) == 1 and "no annotations; its images are kept" in str(found.notes[0])


def test_an_image_of_another_size_is_a_bad_record(tmp_path):
    photo(tmp_path / "a.jpg", 20, 25)
    files = to_read(write(tmp_path / "c.json", many()), images=tmp_path)
    with pytest.raises(
        InputError, match="its image is 20 x 25, but the size in the file is 20 x 30"
    ):
        read_coco_like(files, PRESETS["d2sa"])
    cropped = read_coco_like(files, PRESETS["d2sa"], MaskOptions("crop"))
    assert cropped.images[7]["width"] == 25 and cropped.bad == []


def test_refcoco_strings_of_python_2(tmp_path):
    instances = write(tmp_path / "instances.json", coco())
    for raw, text in ((b"caf\xc3\xa9", "caf\xe9"), (b"caf\xe9", "caf\xe9")):
        sentence = b"U" + bytes([len(raw)]) + raw  # SHORT_BINSTRING, a string of Python 2
        content = pickle.dumps(refs(sentences=[{"sent": "SENTENCE"}]), protocol=1)
        old = b"X\x08\x00\x00\x00SENTENCE"
        assert old in content
        (tmp_path / "refs.p").write_bytes(content.replace(old, sentence))
        assert read_refcoco(to_read(tmp_path / "refs.p"), instances).queries[0]["text"] == text


def test_refcoco_splits_of_the_tests(tmp_path):
    instances = write(tmp_path / "instances.json", coco())
    names = ("testA", "testB", "testAB", "test", "val")
    path = write(tmp_path / "refs.json", [refs(split=name)[0] for name in names])
    counts = {name: len(read_refcoco(to_read(path), instances, name).queries) for name in names}
    assert counts == {"testA": 2, "testB": 2, "testAB": 1, "test": 4, "val": 1}


def test_refcoco_objects_without_a_mask_are_bad_records(tmp_path):
    content = coco()
    content["annotations"][0]["segmentation"] = []
    instances = write(tmp_path / "instances.json", content)
    path = write(tmp_path / "refs.json", [refs(ann_id=31)[0], *[refs(ann_id=32)[0]] * 150])
    found = read_refcoco(to_read(path), instances)
    assert len(found.queries) == 150 and len(found.annotations) == 1
    assert "annotation 31: its segmentation cannot be used (the list of polygons is empty)" in str(
        found.bad[0]
    )
