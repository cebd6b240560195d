"""COCO-like annotation files, and original COCOA, as dataset files."""

import numpy as np
import pytest
from annotation_files import (
    BACK,
    BACK_VISIBLE,
    FRONT,
    check_pair,
    coco,
    cocoa,
    dataset_of,
    instances,
    many,
    mask,
    photo,
    read_coco,
    real,
    renamed,
    save_cocoa,
    square,
    write,
)
from test_template import objects_of

from r2sm_jax.data import masks
from r2sm_jax.errors import InputError
from r2sm_jax.tools.convert import notes_on_all_records
from r2sm_jax.tools.entries import Note, group_by_reason


def notes_of(collector) -> str:
    return "\n".join(map(str, collector.notes))


def test_whole_records_of_a_file(tmp_path):
    collector = read_coco(write(tmp_path / "c.json", coco()), preset="cocoa-cls")
    front, back = masks.encode(FRONT), masks.encode(BACK)
    hidden = BACK & FRONT
    assert collector.notes == [] and collector.bad_records == []
    assert collector.to_records("test") == {
        "images": [{"id": 7, "file_name": "a.jpg", "height": 20, "width": 30}],
        "annotations": [
            {
                "id": 1,
                "image_id": 7,
                "category_id": 1,
                "bbox": [2, 2, 10, 10],
                "area": 100,
                "iscrowd": 0,
                "segmentation": front,
                "occlude_rate": 0,
                "source_id": 31,
            },
            {
                "id": 2,
                "image_id": 7,
                "category_id": 1,
                "bbox": [8, 6, 16, 12],
                "area": 192,
                "iscrowd": 0,
                "segmentation": back,
                "visible_mask": masks.encode(BACK & ~FRONT),
                "occlude_rate": masks.area(hidden) / 192,
                "invisible_mask": masks.encode(hidden),
                "source_id": 32,
            },
        ],
        "categories": [{"id": 1, "name": "bottle"}],
        "queries": [],
        "info": {"description": "test"},
    }


NAMES = [
    {"visible_mask": "inmodal_seg"},
    {"visible_mask": "i_segmentation"},
    {"visible_mask": "i_segm", "segmentation": "a_segm"},
    {"visible_mask": "visible_segm", "segmentation": "amodal_segm"},
]


def test_masks_of_a_plain_file_are_the_visible_ones_and_nothing_else_is_known(tmp_path):
    photo(tmp_path / "a.jpg")
    collector = read_coco(write(tmp_path / "c.json", instances()), preset="coco")
    front, back, crowd = dataset_of(collector, tmp_path).rles_at(0)
    assert (front.modal, front.amodal) == (masks.encode(FRONT), None)
    assert (back.modal, back.amodal) == (masks.encode(BACK_VISIBLE), None)
    assert crowd.ignore and not back.ignore


@pytest.mark.parametrize("preset", ["cocoa-cls", "d2sa", "kins"])
@pytest.mark.parametrize("names", NAMES)
def test_field_names_of_other_loaders(preset, names, tmp_path):
    content = renamed(coco(), **names)
    if "amodal_segm" in names.values():  # aistron has a mask for training in the old field
        for annotation in content["annotations"]:
            annotation["segmentation"] = annotation["visible_segm"]
    photo(tmp_path / "a.jpg")
    collector = read_coco(write(tmp_path / "c.json", content), preset=preset)
    check_pair(dataset_of(collector, tmp_path)[0])


def test_own_field_names(tmp_path):
    path = write(tmp_path / "m.json", renamed(coco(), segmentation="full", visible_mask="part"))
    photo(tmp_path / "a.jpg")
    collector = read_coco(path, preset="muva", amodal_field="full", visible_field="part")
    check_pair(dataset_of(collector, tmp_path)[0])
    with pytest.raises(InputError, match=r"segmentation; there are .*, full, .*--amodal-field"):
        read_coco(path, preset="muva")
    path = write(tmp_path / "c.json", renamed(coco(), visible_mask="part"))
    with pytest.raises(InputError, match=r"visible_mask or .*; there are .*--visible-field"):
        read_coco(path)
    with pytest.raises(InputError, match=r"no annotation has part"):
        read_coco(save_cocoa(tmp_path / "cocoa"), preset="cocoa", visible_field="part")


def test_exchanged_fields_are_refused(tmp_path):
    content = coco()
    content["annotations"][0] = content["annotations"][1] | {"id": 33}
    path = write(tmp_path / "c.json", content)
    with pytest.raises(InputError, match=r"2 of 2 visible masks are larger .*--visible-field"):
        read_coco(path, amodal_field="visible_mask", visible_field="segmentation")


def test_kins_category_names(tmp_path):
    content = coco(categories=[])
    for annotation in content["annotations"]:
        annotation["category_id"] = 4
    assert read_coco(write(tmp_path / "k.json", content), preset="kins").categories == {"car": 1}


@pytest.mark.parametrize("visible", [[], [[3.1, 3.1, 3.2, 3.1, 3.2, 3.2]]])
def test_kins_objects_that_are_not_visible(visible, tmp_path):
    content = coco()
    content["annotations"][0]["visible_mask"] = visible
    collector = read_coco(write(tmp_path / "k.json", content), preset="kins")
    assert collector.annotations[0]["occlude_rate"] == 1 and collector.bad_records == []
    assert "annotation 31: nothing of it is visible" in notes_of(collector)


def test_short_rings_are_left_out(tmp_path):
    content = coco()
    content["annotations"][0]["visible_mask"] = [square(2, 2, 12, 12), [5, 5, 6, 6]]
    collector = read_coco(write(tmp_path / "k.json", content))
    assert "visible_mask" not in collector.annotations[0]
    assert "1 rings of fewer than three points" in notes_of(collector)


def test_several_files_depth_order_and_stored_rates(tmp_path):
    content = coco()
    for annotation, depth in zip(content["annotations"], (5, 3), strict=True):
        annotation |= {"occl_depth": depth, "occlude_rate": 0.9}
    collector = read_coco(*(write(tmp_path / f"{name}.json", content) for name in "ab"))
    assert list(collector.images) == [7, 8]
    notes = notes_of(collector)
    assert "image ids collide" in notes and "1 was added" in notes
    assert "1 of 1 overlapping pairs are seen in another order than occl_depth" in notes
    assert "annotation 31: occlude_rate 0.900 is stored, but the masks give 0.000" in notes


def test_no_occlusion_at_all_is_noted(tmp_path):
    content = coco()
    content["annotations"][1] |= {"visible_mask": None, "occlude_rate": 0}
    collector = read_coco(write(tmp_path / "c.json", content))
    (note,) = notes_on_all_records(collector, collector.to_records(""), "c.json")
    assert "no pixel of the 2 objects is hidden" in str(note)


FLAGS = [
    ({"ignore": 1}, 1, "1 by ignore"),
    ({"iscrowd": 1}, 1, "1 by iscrowd); CVAT and Datumaro"),
    ({"iscrowd": "0", "ignore": False}, 0, ""),
]


@pytest.mark.parametrize(("flags", "num_ignored", "sentence"), FLAGS)
def test_ignore_and_iscrowd(flags, num_ignored, sentence, tmp_path):
    content = coco()
    content["annotations"][0] |= flags
    path = write(tmp_path / "c.json", content)
    collector = read_coco(path)
    assert [a.get("ignore", False) for a in collector.annotations] == [num_ignored == 1, False]
    assert collector.num_ignored.total() == num_ignored
    notes = "".join(map(str, notes_on_all_records(collector, collector.to_records(""), "c.json")))
    assert sentence in notes and bool(notes) == bool(num_ignored)
    content["annotations"][0]["iscrowd"] = "maybe"
    collector = read_coco(write(path, content), max_bad=1)
    assert "its iscrowd is 'maybe'" in str(collector.bad_records[0])


def test_crowds_that_are_objects(tmp_path):
    content = coco()
    for annotation in content["annotations"]:
        annotation["iscrowd"] = 1
    collector = read_coco(write(tmp_path / "c.json", content), crowds="objects")
    assert not any("ignore" in annotation for annotation in collector.annotations)


def test_images_without_annotations(tmp_path):
    content = coco()
    del content["annotations"]
    collector = read_coco(write(tmp_path / "c.json", content))
    assert len(collector.images) == 1 and "its images are kept" in notes_of(collector)


def test_masks_larger_than_the_image(tmp_path):
    big = mask(10, 10, 34, 24, 24, 34)
    content = coco()
    content["annotations"][0] |= {"segmentation": masks.encode(big), "visible_mask": None}
    content["annotations"][0]["bbox"] = masks.coco_box(big)
    path = write(tmp_path / "c.json", content)
    with pytest.raises(InputError, match=r"24 x 34 but it is 20 x 30; choose --oversize"):
        read_coco(path)
    with pytest.raises(InputError, match=r"--oversize pad.*--images DIR"):
        read_coco(path, oversize="pad")
    cropped = read_coco(path, oversize="crop")
    assert cropped.annotations[0]["area"] == 20 * 10

    images = photo(tmp_path / "photos" / "a.jpg").parent
    padded = read_coco(path, oversize="pad", images=images)
    sample = dataset_of(padded, tmp_path)[0]
    assert sample.image.shape == (24, 34, 3)
    assert sample.image[0, 0].any() and not sample.image[20:].any()
    assert (sample.instances[0].amodal == big).all()
    assert masks.area(sample.instances[1].amodal) == masks.area(BACK)


def test_sizes_come_from_the_images_if_the_file_has_none(tmp_path):
    path = write(tmp_path / "k.json", coco(images=[{"id": 7, "file_name": "a.jpg"}]))
    with pytest.raises(InputError, match=r"image 7: a.jpg is not in .*--images DIR"):
        read_coco(path)
    photo(tmp_path / "a.jpg")
    assert read_coco(path).images[7]["height"] == 20


def test_an_image_of_another_size(tmp_path):
    photo(tmp_path / "a.jpg", 20, 25)
    path = write(tmp_path / "c.json", many())
    with pytest.raises(InputError, match="is 20 x 25, but the size in the file is 20 x 30"):
        read_coco(path, images=tmp_path)
    cropped = read_coco(path, images=tmp_path, oversize="crop")
    assert cropped.images[7]["width"] == 25 and cropped.bad_records == []


# Bad records


def test_bad_records_take_along_what_belongs_to_them(tmp_path):
    content = many(400)
    size = {"height": 20, "width": 30}
    content["images"] += [
        {"file_name": "x.jpg"},
        {"id": 7, "file_name": "twice.jpg", **size},
        {"id": 8, "file_name": "b.jpg", "height": 0, "width": 9},
    ]
    one_side = masks.encode(mask(2, 2, 9, 9, height=30, width=20))
    annotations = content["annotations"]
    annotations.append(annotations[0] | {"id": 9, "image_id": 8})
    annotations[5]["segmentation"] = one_side
    annotations[6]["category_id"] = 999
    collector = read_coco(write(tmp_path / "c.json", content), max_bad=0.02)
    reasons = [str(record).removeprefix(f"{tmp_path}/c.json: ") for record in collector.bad_records]
    expected = [
        "images[1]: its 'id' is missing",
        "image 7: its id occurs twice",
        "annotation 104: category_id 999 is not in the file",
        "annotation 103: its segmentation cannot be used (the RLE's size 30 x 20",
        "image 8: its size is not possible",
        "annotation 9: its size is not possible",
    ]
    assert len(reasons) == len(expected)
    for reason, start in zip(reasons, expected, strict=True):
        assert reason.startswith(start)
    assert collector.images[7]["file_name"] == "a.jpg" and len(collector.annotations) == 398
    with pytest.raises(InputError, match=r"2 of 405 .*4 for other reasons; --max-bad 0\.01 allows"):
        read_coco(tmp_path / "c.json")


def test_notes_that_differ_in_numbers_are_one_reason():
    notes = [Note("a", "3 of 4"), Note("b", "other"), Note("c", "12 of 4")]
    assert [[note.location for note in same] for same in group_by_reason(notes)] == [
        ["a", "c"],
        ["b"],
    ]


# Original COCOA


def test_regions_become_annotations(tmp_path):
    collector = read_coco(save_cocoa(tmp_path), preset="cocoa")
    image = {"id": 3, "file_name": "one.jpg", "height": 40, "width": 60}
    assert list(collector.images.values()) == [image] and collector.notes == []
    assert collector.categories == {"mug": 1, "box": 2, "table": 3}
    mug, box, table = collector.annotations
    assert "visible_mask" not in mug and mug["occlude_rate"] == 0
    assert (box["bbox"], box["area"]) == ([20, 12, 30, 16], 480)
    assert box["occlude_rate"] == pytest.approx(1 / 3)
    assert masks.area(masks.decode(box["invisible_mask"])) == 160
    assert [(a["isStuff"], a["order"]) for a in (mug, box, table)] == [(0, 1), (0, 2), (1, 3)]


def test_the_first_of_several_annotators(tmp_path):
    for name, image_id in (("a", 3), ("b", 3), ("c", 4)):
        save_cocoa(tmp_path, f"{name}.json", f"{name}.jpg", image_id=image_id)
    (tmp_path / "index.json").write_text("[1, 2]")
    (tmp_path / "._a.json").write_text("Mac OS X")
    collector = read_coco(tmp_path, preset="cocoa")
    assert list(collector.images) == [3, 4] and len(collector.annotations) == 6
    attributes, second, other = map(str, collector.notes)
    assert "._a.json: left out" in attributes and collector.bad_records == []
    assert "b.json: left out, image 3" in second and "no COCOA regions" in other
    with pytest.raises(InputError, match="no list of 'regions'"):
        read_coco(tmp_path / "index.json", preset="cocoa")


def test_images_of_cocoa_by_stem_url_or_folder(tmp_path):
    def image_name(path, images=None):
        return read_coco(path, preset="cocoa", images=images).image_paths[3].name

    assert image_name(save_cocoa(tmp_path / "a", image="one.png")) == "one.png"
    assert image_name(save_cocoa(tmp_path / "b", image="photo.jpg")) == "photo.jpg"
    path = save_cocoa(tmp_path / "c", image="other.jpg")
    with pytest.raises(InputError, match=r"one\.jpg or .* or photo\.jpg is not in .*--images DIR"):
        image_name(path)
    assert image_name(path, tmp_path / "a") == "one.png"
    records = {"annotations": [cocoa(), cocoa(), cocoa(image_id=4)]}
    photo(tmp_path / "photo.jpg", 40, 60)
    collector = read_coco(write(tmp_path / "all.json", records), preset="cocoa")
    assert {path.name for path in collector.image_paths.values()} == {"photo.jpg"}
    assert "annotations[1]: left out" in notes_of(collector)


@pytest.mark.parametrize(
    "name", ["COCO_val2014_000000000009.jpg", "000000000009.jpg", "BSDS_train_9.jpg"]
)
def test_combined_files_of_cocoa_name_their_images(name, tmp_path):
    file_name = "9.jpg" if "BSDS" in name else "COCO_val2014_000000000009.jpg"
    image = {"id": 3, "file_name": file_name, "height": 40, "width": 60}
    annotation = cocoa(url=f"https://example.org/BSDS_train_{file_name}")
    path = write(tmp_path / "c.json", {"images": [image], "annotations": [annotation]})
    # The file states sizes, so that no image is needed.
    assert read_coco(path, preset="cocoa").images[3] == image
    photo(tmp_path / "photos" / name, 40, 60)
    photo(tmp_path / "photos" / "c.jpg", 40, 60)  # the file's own name names no image
    collector = read_coco(path, preset="cocoa", images=tmp_path / "photos")
    assert collector.image_paths[3].name == name and len(collector.annotations) == 3


@pytest.mark.parametrize("url", [None, "/"])
def test_an_image_of_cocoa_without_any_name_is_a_bad_record(url, tmp_path):
    photo(tmp_path / "photo.jpg", 40, 60)
    unnamed = cocoa(image_id=4, url=url)
    path = write(tmp_path / "all.json", {"images": [], "annotations": [cocoa(), unnamed]})
    for images in (None, tmp_path):
        collector = read_coco(path, preset="cocoa", images=images, max_bad=0.5)
        (bad_record,) = collector.bad_records
        assert "annotations[1]: image 4 is not listed" in str(bad_record)
        assert list(collector.images) == [3]


BAD_REGIONS = [
    ({"segmentation": square(100, 100, 110, 110)}, "region 1: its segmentation is not where"),
    ({"segmentation": None}, "region 1: it has no segmentation"),
    ({"visible_mask": masks.encode(np.ones((9, 9), bool))}, "region 1: its visible_mask cannot"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD_REGIONS)
def test_bad_regions(changes, reason, tmp_path):
    record = cocoa()
    record["regions"][0] |= changes
    path = save_cocoa(tmp_path, **record)
    collector = read_coco(path, preset="cocoa", max_bad=0.3)
    (bad_record,) = collector.bad_records
    assert reason in str(bad_record) and len(collector.annotations) == 2
    with pytest.raises(InputError, match=r"1 of 4 records .*--max-bad 0\.2 allows 0"):
        read_coco(path, preset="cocoa", max_bad=0.2)


# Real files


def test_real_photos():
    collector = read_coco(real("cocoa"), preset="cocoa")
    assert (len(collector.images), len(collector.annotations)) == (5, 48)
    assert collector.notes == []
    records = collector.to_records("test")
    objects = [x for image_id in collector.images for x in objects_of(records, image_id)]
    by_category = {x.category: x for x in objects}
    assert by_category["trash bin"].occlusion == pytest.approx(0.7808, abs=1e-3)
    assert by_category["toilet"].id in by_category["trash bin"].hidden_by


@pytest.mark.parametrize("preset", ["cocoa-cls", "d2sa"])
@pytest.mark.parametrize(
    "name", ["aisformer_i_segmentation", "aisformer_inmodal_seg", "aistron_visible_segm"]
)
def test_prepared_files_of_other_loaders(preset, name):
    collector = read_coco(real(f"readers/schema/{name}_real_masks.json"), preset=preset)
    hidden = [a["invisible_mask"] for a in collector.annotations if "invisible_mask" in a]
    assert sum(masks.areas(hidden)) == 165_816 and collector.bad_records == []


def test_a_bsds_file_with_six_annotators():
    collector = read_coco(real("readers/schema/BSDS_amodal_train.json"), preset="cocoa")
    assert (len(collector.images), len(collector.annotations)) == (1, 2)
    assert collector.bad_records == []


def test_hidden_parts_in_the_place_of_visible_ones(tmp_path):
    """The stated rates tell."""
    content = coco()
    content["annotations"] += [a | {"id": a["id"] + 10} for a in content["annotations"]]
    for annotation in content["annotations"]:
        if annotation["occlude_rate"]:
            annotation["visible_mask"] = masks.encode(BACK & FRONT)
    with pytest.raises(InputError, match="2 of 2 objects have the size of what occlude_rate says"):
        read_coco(write(tmp_path / "c.json", content), preset="cocoa-cls")


def test_images_of_lvis_have_an_address_in_place_of_a_name(tmp_path):
    content = coco()
    del content["images"][0]["file_name"]
    content["images"][0]["coco_url"] = "http://images.cocodataset.org/train2017/a.jpg"
    path = write(tmp_path / "c.json", content)
    (tmp_path / "train2017").mkdir()
    photo(tmp_path / "train2017" / "a.jpg")
    for images, name in ((None, "a.jpg"), (tmp_path, "train2017/a.jpg")):
        collector = read_coco(path, preset="cocoa-cls", images=images)
        assert collector.images[7]["file_name"] == name


@pytest.mark.parametrize("area", [float("nan"), float("inf")])
def test_an_area_that_is_no_number_is_not_compared(area, tmp_path):
    content = coco()
    for annotation in content["annotations"]:
        annotation["area"] = area
    path = write(tmp_path / "c.json", content)
    assert read_coco(path, preset="cocoa-cls").notes == []


def test_counts_that_are_printed_bytes(tmp_path):
    content = coco()
    rle = content["annotations"][0]["segmentation"]
    rle["counts"] = str(rle["counts"].encode())
    with pytest.raises(InputError, match=r"str\(\) of bytes; write counts.decode"):
        read_coco(write(tmp_path / "c.json", content), preset="cocoa-cls")
