"""R2SM's queries, joined to a dataset file of their images."""

import json
from pathlib import Path

import pytest
from test_readers import coco, to_read, write

from r2sm_jax.errors import InputError
from r2sm_jax.tools.coco import PRESETS, read_coco_like
from r2sm_jax.tools.referring import R2SMFields, read_r2sm


def cocoa_cls(folder: Path) -> Path:
    """The objects of `coco` as a dataset file."""
    found = read_coco_like(to_read(write(folder / "c.json", coco())), PRESETS["cocoa-cls"])
    return write(folder / "over.json", found.records("test"))


def test_r2sm_queries_by_ids_or_answer(tmp_path):
    over = cocoa_cls(tmp_path)
    lines = [
        {"image_id": 7, "text": "the  cup", "mask_type": "modal", "instance_ids": [32]},
        {
            "image_id": "dir/a.jpg",
            "text": "both",
            "mask_type": "amodal",
            "answer": "instance id is [31], class name is bottle; Instance id is 32, class name is bottle.",
        },
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_r2sm(to_read(path), over, R2SMFields()).records("")
    queries, before = found["queries"], json.loads(over.read_text())
    assert found == before | {
        "queries": queries,
        "info": {"description": "test", "queries": "q.jsonl"},
    }
    assert [q["instance_ids"] for q in queries] == [[2], [1, 2]] and queries[0]["text"] == "the cup"
    renamed = [{"img": 7, "sentence": "x", "ids": [31]}]
    fields = R2SMFields(image="img", text="sentence", instances="ids")
    (query,) = read_r2sm(
        to_read(write(tmp_path / "q.json", renamed)), over, fields, "amodal"
    ).queries
    assert query["mask_type"] == "amodal"
    before["annotations"][0]["source_id"], before["annotations"][1]["source_id"] = None, [1]
    write(over, before)
    path.write_text(json.dumps(lines[0] | {"instance_ids": [2, 1]}))
    assert read_r2sm(to_read(path), over, R2SMFields()).queries[0]["instance_ids"] == [2, 1]
    for number in (99, True):
        path.write_text(json.dumps(lines[0] | {"instance_ids": [number]}))
        with pytest.raises(InputError, match=f"line 1: image 7 has no instance {number}"):
            read_r2sm(to_read(path), over, R2SMFields())


@pytest.mark.parametrize(
    "answer", ["instance ids are 31 and 32", "instance id: 31", "instance id is 31, 32"]
)
def test_an_answer_whose_ids_cannot_be_read_is_a_bad_record(tmp_path, answer):
    over = cocoa_cls(tmp_path)
    path = write(
        tmp_path / "q.json", [{"image_id": 7, "text": "x", "mask_type": "modal", "answer": answer}]
    )
    with pytest.raises(InputError, match="ids in its answer cannot be read"):
        read_r2sm(to_read(path), over, R2SMFields())


def test_r2sm_images_of_one_name_are_told_apart_by_their_folders(tmp_path):
    images = [{"id": n, "file_name": f"{n}/a.jpg", "height": 9, "width": 9} for n in (1, 2)]
    over = write(
        tmp_path / "o.json", {"images": images, "annotations": [], "categories": [], "queries": []}
    )
    line = {"text": "x", "mask_type": "modal", "instance_ids": []}
    path = write(
        tmp_path / "q.json", [line | {"image_id": "2/a.jpg"}, line | {"image_id": "1/a.jpg"}]
    )
    assert [q["image_id"] for q in read_r2sm(to_read(path), over, R2SMFields()).queries] == [2, 1]
    write(path, [line | {"image_id": "a.jpg"}])
    with pytest.raises(InputError, match="or several have this name"):
        read_r2sm(to_read(path), over, R2SMFields())
