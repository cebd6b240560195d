"""Annotation files as they are in the field: names of fields, and records that cannot be used."""

import os
from pathlib import Path
from typing import Any

import pytest
from test_data_cli import failed, run  # noqa: F401
from test_readers import check_pair, coco, finished, mask, photo, to_read, write

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.errors import InputError
from r2sm_jax.tools.coco import PRESETS, MaskOptions, read_coco_like
from r2sm_jax.tools.entries import Note, by_reason

REAL = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data")) / "readers"


def needs(path: Path) -> Path:
    """The path of real data; skips the test where it is missing."""
    if not path.exists():
        pytest.skip(f"there is no {path} (set R2SM_REAL_DATA)")
    return path


def renamed(**names: str) -> dict[str, Any]:
    """The COCO file of the tests with other names for fields of its annotations."""
    content = coco()
    for annotation in content["annotations"]:
        for old, new in names.items():
            annotation[new] = annotation.pop(old)
    return content


def many(count: int = 200) -> dict[str, Any]:
    """The COCO file of the tests with so many annotations."""
    content = coco()
    front = content["annotations"][0]
    content["annotations"] += [front | {"id": number} for number in range(100, 98 + count)]
    return content


@pytest.mark.parametrize("preset", ["cocoa-cls", "d2sa", "kins"])
@pytest.mark.parametrize(
    "names",
    [
        {"visible_mask": "inmodal_seg"},
        {"visible_mask": "i_segmentation"},
        {"visible_mask": "visible_segm", "segmentation": "amodal_segm"},
    ],
)
def test_every_format_knows_the_names_of_other_loaders(preset, names, tmp_path):
    content = renamed(**names)
    if "amodal_segm" in names.values():  # aistron keeps a mask for training in the old field
        content["annotations"] = [
            a | {"segmentation": a["visible_segm"]} for a in content["annotations"]
        ]
    found = read_coco_like(to_read(write(tmp_path / "c.json", content)), PRESETS[preset])
    photo(tmp_path / "a.jpg")
    check_pair(finished(found, tmp_path, tmp_path)[0])


def test_a_file_without_any_visible_field_is_refused(tmp_path):
    path = write(tmp_path / "c.json", renamed(visible_mask="vis"))
    with pytest.raises(
        InputError,
        match=r"no annotation has visible_mask or .*; there are .*, vis; .*--visible-field",
    ):
        read_coco_like(to_read(path), PRESETS["d2sa"])
    read_coco_like(to_read(path), PRESETS["d2sa"], MaskOptions(visible_field="vis"))
    path = write(tmp_path / "d.json", coco())
    with pytest.raises(InputError, match=r"no annotation has seen; there are .*visible_mask"):
        read_coco_like(to_read(path), PRESETS["cocoa-cls"], MaskOptions(visible_field="seen"))


def test_no_occlusion_at_all_is_said(tmp_path):
    content = coco()
    content["annotations"][1] |= {"visible_mask": None, "occlude_rate": 0}
    found = read_coco_like(to_read(write(tmp_path / "c.json", content)), PRESETS["cocoa-cls"])
    assert "no pixel of the 2 objects is hidden" in str(found.notes[-1])


@pytest.mark.parametrize("preset", ["cocoa-cls", "d2sa"])
@pytest.mark.parametrize(
    "name", ["aisformer_i_segmentation", "aisformer_inmodal_seg", "aistron_visible_segm"]
)
def test_prepared_files_of_other_loaders(preset, name):
    path = needs(REAL / "schema" / f"{name}_real_masks.json")
    found = read_coco_like(to_read(path), PRESETS[preset])
    hidden = [masks.decode(a["invisible_mask"]) for a in found.annotations if "invisible_mask" in a]
    assert sum(masks.area(mask) for mask in hidden) == 165_816 and found.bad == []


def test_bad_records_are_left_out_counted_and_listed(tmp_path, run):  # noqa: F811
    content = many(403)
    spoilt = content["annotations"][10:13]
    spoilt[0]["segmentation"] = {"size": [20, 30], "counts": "0"}
    spoilt[1]["segmentation"] = {"size": [20, 30], "counts": "1"}
    spoilt[2]["category_id"] = 999
    photo(tmp_path / "a.jpg")
    path, out = write(tmp_path / "c.json", content), tmp_path / "out.json"
    code, _, err = run("convert", "cocoa-cls", path, "--out", out, "--queries", 0)
    lines = err.splitlines()
    assert code == 0 and "3 of 404 records cannot be used and were left out" in lines[0]
    assert (
        "annotation 108: its segmentation cannot be used" in lines[1] and "and 1 more: " in lines[1]
    )
    assert "annotation 110: category_id 999 is not in the file" in lines[2]
    assert len(read_json(out)[0].instances) == 400
    result = run("convert", "cocoa-cls", path, "--out", out, "--overwrite", "--max-bad", 0.005)
    failed(
        result,
        "annotation 108",
        "2 of 404 records",
        "1 for other reasons",
        "--max-bad 0.005 allows 2",
    )
    failed(
        run("convert", "cocoa-cls", path, "--out", out, "--overwrite", "--max-bad", 2),
        "--max-bad",
        "0 to 1",
    )


def test_images_without_an_id_or_a_size_and_ids_that_occur_twice(tmp_path):
    content = many()
    content["images"] += [{"file_name": "x.jpg"}, content["images"][0] | {"file_name": "twice.jpg"}]
    found = read_coco_like(to_read(write(tmp_path / "c.json", content)), PRESETS["cocoa-cls"])
    first, second = map(str, found.bad)
    assert "images[1]: its 'id' is missing" in first and "image 7: its id occurs twice" in second
    assert found.images[7]["file_name"] == "a.jpg" and len(found.annotations) == 200


def test_an_image_that_cannot_be_used_takes_its_annotations_along(tmp_path):
    content = many(400)
    content["images"].append({"id": 8, "file_name": "b.jpg", "height": 0, "width": 9})
    content["annotations"].append(content["annotations"][0] | {"id": 9, "image_id": 8})
    found = read_coco_like(to_read(write(tmp_path / "c.json", content)), PRESETS["cocoa-cls"])
    (same,) = by_reason(found.bad)
    assert (
        len(same) == 2
        and "image 8: its size is not possible" in str(same[0])
        and "annotation 9" in same[1].where
    )


def test_masks_that_are_larger_on_one_side_only_are_bad_records(tmp_path):
    content = many()
    content["annotations"][0]["segmentation"] = masks.encode(mask(2, 2, 9, 9, height=30, width=20))
    path = write(tmp_path / "c.json", content)
    for oversize in ("refuse", "crop"):
        found = read_coco_like(to_read(path), PRESETS["d2sa"], MaskOptions(oversize))
        assert len(found.bad) == 1 and "the RLE's size 30 x 20" in str(found.bad[0])


def test_notes_that_differ_in_numbers_are_one_reason():
    notes = [Note("a", "3 of 4"), Note("b", "other"), Note("c", "12 of 4")]
    assert [[note.where for note in same] for same in by_reason(notes)] == [["a", "c"], ["b"]]
