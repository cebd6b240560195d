import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_query_template import objects_of

from r2sm_jax.data import masks
from r2sm_jax.errors import InputError
from r2sm_jax.tools.coco import PRESETS, read_coco_like
from r2sm_jax.tools.convert import Conversion, Files

HEIGHT, WIDTH = 40, 60
REAL = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data")) / "cocoa"


def square(x0, y0, x1, y1):
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def annotation(image_id: int = 3, **changes):
    """A mug in front of a box, on a table (stuff); the box is hidden by both, the last region by nothing."""
    front, back, floor = (
        masks.from_segmentation(square(*corners), HEIGHT, WIDTH)
        for corners in ((10, 10, 30, 30), (20, 12, 50, 28), (0, 25, 60, 40))
    )
    visible = back & ~front
    regions = [
        {
            "name": "Mug ",
            "segmentation": square(10, 10, 30, 30),
            "order": 1,
            "isStuff": 0,
            "occlude_rate": 0,
        },
        {
            "name": "box",
            "segmentation": square(20, 12, 50, 28),
            "visible_mask": masks.encode(visible),
            "invisible_mask": masks.encode(back & front),
            "occlude_rate": masks.area(back & front) / masks.area(back),
            "order": 2,
            "isStuff": 0,
        },
        {
            "name": "table",
            "segmentation": square(0, 25, 60, 40),
            "visible_mask": masks.encode(floor & ~front & ~back),
            "occlude_rate": masks.area(floor & (front | back)) / masks.area(floor),
            "order": 3,
            "isStuff": 1,
        },
    ]
    return {
        "image_id": image_id,
        "url": "https://example.org/x/photo.jpg",
        "regions": regions,
        **changes,
    }


def save(folder: Path, name: str = "one.json", image: str = "one.jpg", **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(annotation(**changes)))
    Image.new("RGB", (WIDTH, HEIGHT), "teal").save(folder / image)
    return folder / name


def read_cocoa(
    sources: list[Path], images_dir: Path | None = None, max_bad: float = 0.01
) -> Conversion:
    files = Files(Path("out.json"), images_dir, sources=tuple(sources), max_bad=max_bad)
    return read_coco_like(files, PRESETS["cocoa"])


def things(found, image_id: int):
    """What queries can ask for."""
    return objects_of(found.records("test"), image_id)


def test_regions_become_annotations(tmp_path):
    found = read_cocoa([save(tmp_path)])
    assert list(found.images.values()) == [
        {"id": 3, "file_name": "one.jpg", "height": HEIGHT, "width": WIDTH}
    ]
    assert found.categories == {"mug": 1, "box": 2, "table": 3}
    assert found.notes == []
    mug, box, table = found.annotations
    assert "visible_mask" not in mug and mug["occlude_rate"] == 0
    assert (box["bbox"], box["area"], box["occlude_rate"]) == (
        [20, 12, 30, 16],
        480,
        pytest.approx(1 / 3),
    )
    assert masks.area(masks.decode(box["invisible_mask"])) == 160
    assert [a["isStuff"] for a in found.annotations] == [0, 0, 1]
    assert [a["order"] for a in found.annotations] == [1, 2, 3]
    assert table["category_id"] == 3


def test_things_leave_stuff_out_and_know_what_hides_them(tmp_path):
    found = read_cocoa([save(tmp_path)])
    mug, box = things(found, 3)
    assert (mug.category, mug.box, mug.hidden_by) == ("mug", (10, 10, 30, 30), ())
    assert (box.hidden_by, box.visible_box) == ((1,), (30, 12, 50, 28))
    record = annotation()
    record["regions"] = record["regions"][2:]
    path = save(tmp_path / "stuff", **record)
    assert [thing.category for thing in things(read_cocoa([path]), 3)] == ["table"]


def test_a_sliver_in_front_does_not_count_as_hiding(tmp_path):
    regions = [
        {"name": "pin", "segmentation": square(10, 10, 12, 12), "order": 1},
        {"name": "wall", "segmentation": square(0, 0, 60, 40), "order": 2},
    ]
    found = read_cocoa([save(tmp_path, regions=regions)])
    assert things(found, 3)[1].hidden_by == ()


def test_several_annotators_keep_the_first(tmp_path):
    save(tmp_path, "a.json", "a.jpg")
    save(tmp_path, "b.json", "b.jpg")
    save(tmp_path, "c.json", "c.jpg", image_id=4)
    found = read_cocoa([tmp_path])
    assert list(found.images) == [3, 4]
    assert len(found.notes) == 1 and "b.json: left out, image 3" in str(found.notes[0])
    assert [a["id"] for a in found.annotations] == [1, 2, 3, 4, 5, 6]


def test_a_list_of_annotations_in_one_file(tmp_path):
    save(tmp_path, image="photo.jpg")
    records = {"images": [], "annotations": [annotation(), annotation(image_id=9)]}
    (tmp_path / "many.json").write_text(json.dumps(records))
    assert list(read_cocoa([tmp_path / "many.json"]).images) == [3, 9]


def test_images_by_stem_url_or_folder(tmp_path):
    assert read_cocoa([save(tmp_path / "a", image="one.png")]).image_paths[3].name == "one.png"
    assert read_cocoa([save(tmp_path / "b", image="photo.jpg")]).image_paths[3].name == "photo.jpg"
    path = save(tmp_path / "c", image="other.jpg")
    with pytest.raises(InputError, match=r"one\.jpg or .* or photo\.jpg is not in .*--images DIR"):
        read_cocoa([path])
    assert read_cocoa([path], tmp_path / "a").image_paths[3] == tmp_path / "a" / "one.png"


def test_a_wrong_occlusion_rate_is_reported_and_recomputed(tmp_path):
    record = annotation()
    record["regions"][0]["occlude_rate"] = 0.3
    record["regions"][1]["occlude_rate"] += 0.01
    found = read_cocoa([save(tmp_path, **record)])
    assert len(found.notes) == 1 and "region 1: occlude_rate 0.300 is stored" in str(found.notes[0])
    assert found.annotations[0]["occlude_rate"] == 0


def test_other_files_in_a_folder_are_left_out_with_a_note(tmp_path):
    save(tmp_path)
    (tmp_path / "index.json").write_text("[1, 2]")
    found = read_cocoa([tmp_path])
    assert len(found.images) == 1 and "no COCOA regions" in str(found.notes[0])
    with pytest.raises(InputError, match="no list of 'regions'"):
        read_cocoa([tmp_path / "index.json"])


def test_a_polygon_without_pixels_is_left_out_with_a_note(tmp_path):
    record = annotation()
    record["regions"][0]["segmentation"] = square(100, 100, 110, 110)
    path = save(tmp_path, **record)
    found = read_cocoa([path], max_bad=0.3)
    assert (
        len(found.annotations) == 2
        and found.notes == []
        and "its mask has no pixel" in str(found.bad[0])
    )
    with pytest.raises(
        InputError,
        match=r"region 1: its mask has no pixel .*1 of 4 records .*--max-bad 0\.2 allows 0",
    ):
        read_cocoa([path], max_bad=0.2)


def test_bad_input(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        read_cocoa([tmp_path / "x"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no annotated images"):
        read_cocoa([tmp_path / "empty"]).records("test")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match=r"x\.json: this is not JSON"):
        read_cocoa([tmp_path / "x.json"])
    with pytest.raises(InputError, match="its 'image_id' is missing"):
        read_cocoa([save(tmp_path / "a", image_id=None)])
    record = annotation()
    record["regions"][1]["visible_mask"] = masks.encode(np.ones((9, 9), bool))
    with pytest.raises(
        InputError, match=r"region 2: its visible_mask cannot be used .*9 x 9.*40 x 60"
    ):
        read_cocoa([save(tmp_path / "b", **record)])
    record["regions"][0]["segmentation"] = None
    with pytest.raises(InputError, match="region 1: it has no segmentation"):
        read_cocoa([save(tmp_path / "c", **record)])


def test_real_photos():
    if not REAL.is_dir():
        pytest.skip(
            f"no real COCOA data in {REAL} (set R2SM_REAL_DATA)"
        )  # photos that are not ours to ship
    found = read_cocoa([REAL])
    assert (len(found.images), len(found.annotations), found.notes) == (5, 48, [])
    by_category = {
        thing.category: thing for number in found.images for thing in things(found, number)
    }
    trash_bin, toilet = by_category["trash bin"], by_category["toilet"]
    assert (
        trash_bin.occlusion == pytest.approx(0.7808, abs=1e-3) and toilet.id in trash_bin.hidden_by
    )
    for record in found.annotations:
        amodal = masks.decode(record["segmentation"])
        modal = masks.decode(record["visible_mask"]) if "visible_mask" in record else amodal
        assert not (modal & ~amodal).any()
