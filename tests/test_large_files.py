"""Large dataset files are read as small ones are, and refused with the same sentences."""

import json
import os
import pickle

import numpy as np
import pytest

from r2sm_jax.data import dataset as dataset_module, large_files, masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.large_files import read_large_file
from r2sm_jax.errors import InputError


@pytest.fixture(autouse=True)
def forget_files():
    dataset_module._parse_once.cache_clear()
    yield
    dataset_module._parse_once.cache_clear()


def make_records():
    """Two images with scattered annotations, masks of all kinds, and letters of several bytes."""
    square = np.zeros((20, 30), bool)
    square[3:9, 4:12] = True
    rle = masks.encode(square)
    runs = {"size": [20, 30], "counts": [100, 20, 480]}
    common = {"category_id": 7, "bbox": [4, 3, 8, 6], "iscrowd": 0}
    polygon = [[4.0, 3.0, 12.0, 3.0, 12.0, 9.0, 4.0, 9.0]]
    return {
        "info": {"description": "größer", "lists": [1, [2, {"a": "]}"}]]},
        "queries": [
            {
                "id": 5,
                "image_id": 2,
                "text": "die Tasse 🫖",
                "mask_type": "modal",
                "instance_ids": [9],
            },
            {
                "id": 6,
                "image_id": 1,
                "text": 'say "cup": \\ ',
                "mask_type": "amodal",
                "instance_ids": [4, 8],
                "kind": {"task": "referring"},
                "answer": "two",
            },
            {"id": 7, "image_id": 2, "text": "nothing", "mask_type": "modal", "instance_ids": []},
        ],
        "annotations": [
            {"id": 4, "image_id": 1, "segmentation": rle, **common},
            {
                "id": 9,
                "image_id": 2,
                "segmentation": polygon,
                "attributes": {"colour": "rot"},
                **common,
            },
            {
                "id": 8,
                "image_id": 1,
                "segmentation": None,
                "visible_mask": runs,
                "category_id": 3,
                "attributes": {"colour": "rot"},
            },
        ],
        "images": [
            {"id": 2, "file_name": "zwei.png", "height": 20, "width": 30},
            {"id": 1, "file_name": "é.png", "height": 20, "width": 30},
        ],
        "categories": [{"id": 7, "name": "cup"}, {"id": 3, "name": "tea"}],
        "version": 12,
    }


def read_small(path):
    return read_json(path, need_images=False)


def read_large(path, monkeypatch, chunk=4 << 20):
    """Reads as a large file, and fails where the ordinary reader takes over."""
    monkeypatch.setattr(dataset_module, "LARGE_BYTES", 0)
    monkeypatch.setattr(large_files, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(large_files, "SPARE_CHARACTERS", chunk // 2)
    dataset_module._parse_once.cache_clear()
    return read_json(path, need_images=False)


@pytest.mark.parametrize("chunk", [3, 50, 4 << 20])
@pytest.mark.parametrize("style", [{}, {"ensure_ascii": False}, {"indent": 2}])
def test_a_large_file_holds_what_a_small_one_does(tmp_path, monkeypatch, style, chunk):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(make_records(), **style), "utf-8")
    small = read_small(path)
    large = read_large(path, monkeypatch, chunk)

    assert isinstance(large._annotations, large_files.IndexedRecords)
    assert large.images == small.images and large.vocabulary == small.vocabulary
    assert large.sha256 == small.sha256
    for index in range(len(small)):
        assert large.truth_at(index) == small.truth_at(index)
        assert large.annotations_at(index) == small.annotations_at(index)

    part = pickle.loads(pickle.dumps(large.subset([1])))
    assert part.truth_at(0) == small.truth_at(1)
    with pytest.raises(KeyError):
        large._queries[3]


def test_lists_may_be_empty(tmp_path, monkeypatch):
    path = tmp_path / "data.json"
    records = make_records() | {"queries": [], "annotations": []}
    path.write_text(json.dumps(records), "utf-8")
    assert read_large(path, monkeypatch).truth_at(0).queries == ()


def change(key, index, **fields):
    """A record of a list with other fields."""

    def apply(records):
        records[key][index] |= fields
        return json.dumps(records)

    return apply


BAD_FILES = {
    "id twice": change("annotations", 0, id=9),
    "image id twice": change("images", 0, id=1),
    "unknown image": change("annotations", 0, image_id=3),
    "unknown image of a query": change("queries", 0, image_id=3),
    "unknown category": change("annotations", 1, category_id=4),
    "unknown instance": change("queries", 0, instance_ids=[99]),
    "instance of another image": change("queries", 0, instance_ids=[4]),
    "mask of another size": change("images", 1, width=31),
    "true as an id": change("queries", 0, instance_ids=[True]),
    "no text": change("queries", 1, text=" "),
    "flag": change("annotations", 2, iscrowd="maybe"),
    "no mask": change("annotations", 0, segmentation=[]),
    "outside": change("images", 0, file_name="../a.png"),
    "no list": lambda records: json.dumps(records | {"categories": {}}),
    "list missing": lambda records: json.dumps({k: v for k, v in records.items() if k != "images"}),
    "number as a record": lambda records: json.dumps(records | {"queries": [12]}),
    "cut short": lambda records: json.dumps(records)[:-30],
    "more than one value": lambda records: json.dumps(records) + " {}",
    "a comma too many": lambda records: json.dumps(records).replace("}]", "},]", 1),
    "a key twice": lambda records: json.dumps(records).replace('"iscrowd"', '"id"', 1),
    "a key twice, deeper": lambda records: json.dumps(records).replace(
        '"kind": {', '"kind": {"task": "a", '
    ),
    "a list twice": lambda records: json.dumps(records)[:-1] + ', "images": []}',
    "boxes elsewhere": lambda records: json.dumps(records).replace("[4, 3, 8, 6]", "[2, 9, 3, 2]"),
    "shared file": change("images", 0, file_name="é.png"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_problems_have_the_sentence_of_small_files(tmp_path, monkeypatch, name):
    path = tmp_path / "data.json"
    path.write_text(BAD_FILES[name](make_records()), "utf-8")
    with pytest.raises(InputError) as small:
        read_small(path)
    with pytest.raises(InputError) as large:
        read_large(path, monkeypatch)
    assert str(large.value) == str(small.value)


def test_other_encodings_are_left_to_the_ordinary_reader(tmp_path, monkeypatch):
    path = tmp_path / "data.json"
    path.write_bytes(json.dumps(make_records(), ensure_ascii=True).encode("utf-16"))
    assert read_large_file(path) is None
    assert len(read_large(path, monkeypatch)) == 2


def test_a_file_that_changes_later_is_named(tmp_path, monkeypatch):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(make_records()), "utf-8")
    large = read_large(path, monkeypatch)
    large.truth_at(0)
    with path.open("r+") as file:
        file.write(" ")
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputError, match="has changed"):
        large.truth_at(0)
